"""A user's rule, attack and task of a peer. After `pip install ./examples/plugin` rpel knows them by name:

rpel run quickstart --rule nnm+winsorized_mean --attack echo
rpel network new --task quadrants --model init.safetensors …
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpel import View
from rpel.attacks import declare
from rpel.data import Dataset
from rpel.tasks import Classification

Array = NDArray[Any]


def winsorized_mean(x: Array, f: int) -> Array:
    """Per coordinate, the mean after pulling the f lowest and highest values in to the next one
    (winsorized)."""
    ordered = np.sort(x, axis=0)
    low, high = ordered[f], ordered[len(x) - 1 - f]
    return np.asarray(np.clip(x, low, high).mean(axis=0))


@declare(per_victim=True)
def echo(view: View, gain: float = 1.5) -> Array:
    """What the victim's honest peers sent, on average, amplified."""
    return view.moments(mean=gain, out=view.out)


def quadrants(index: int, nodes: int, seed: int) -> Classification:
    """In which quadrants a point lies, learnt from points of this member's own."""
    x = np.random.default_rng([seed, index]).normal(size=(300, 2)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    data = Dataset("quadrants", x[:200], y[:200], x[200:], y[200:], classes=2, mean=(0.0,), std=(1.0,))
    module = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    return Classification(data, [np.arange(200)] * nodes, module, batch_size=20, seed=seed)
