"""An attack to copy: one without memory, and one that remembers.

    rpel run quickstart --attack "attack:against_the_step(speed=3)"
    rpel run quickstart --attack "attack:drift(targeting=most-exposed)"

To put it into the library: the function goes into attacks/forgeries.py, its name into the list at the end of
that file and into docs/rules.md.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import View, declare
from rpel.testing import check_attack

Array = NDArray[Any]


@declare(per_victim=True, needs={"before"}, factor="speed")
def against_the_step(view: View, speed: float = 2.0) -> Array:
    """(v, d) The mean of the honest answers, moved against the honest nodes' last step."""
    forged = view.moments(out=view.out)  # (v, d) μ of each victim
    forged -= (speed * view.change).astype(forged.dtype)
    return forged


def drift(view: View, state: dict[str, Any], speed: float = 0.1) -> tuple[Array, dict[str, Any]]:
    """(v, d) The mean of the honest answers, further along one drawn direction with every round.

    ``state`` is {} in the first round, and holds numbers and arrays that a checkpoint can keep.
    """
    rounds = int(state.get("rounds", 0)) + 1
    direction = np.random.default_rng(view.seed).normal(size=view.honest.shape[1])
    forged = view.moments() + speed * rounds * direction / np.linalg.norm(direction)
    return forged.astype(view.honest.dtype), {"rounds": rounds}


if __name__ == "__main__":
    check_attack(against_the_step, speed=3.0)
    check_attack(drift)
