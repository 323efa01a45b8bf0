"""A rule and an attack of one's own. Installed (`pip install ./examples/plugin`), rpel knows both by name:

rpel run quickstart --rule nnm+winsorized_mean --attack echo
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import View

Array = NDArray[Any]


def winsorized_mean(x: Array, f: int) -> Array:
    """Per coordinate, the mean after pulling the f lowest and highest values in to the next one (winsorized)."""
    ordered = np.sort(x, axis=0)
    low, high = ordered[f], ordered[len(x) - 1 - f]
    return np.asarray(np.clip(x, low, high).mean(axis=0))


def echo(view: View, gain: float = 1.5) -> Array:
    """What the victim's honest peers sent, on average, amplified."""
    return view.moments(mean=gain)
