"""A task that costs nothing: member i wants to be at its own point,
and everybody together at the mean of them.

Network hyper-parameters: ``d`` (parameters, 64 unless given) and ``noise`` (of the gradient, 0.01 unless
given). The noise comes from the operating system, so that a step taken twice is seen to be another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpel.randomness import stream
from rpel.tasks import Objective
from rpel.types import Integers, Models


@dataclass(frozen=True)
class Quadratic(Objective):
    """f_i(x) = ½ ‖x − c_i‖², all coordinates of c_i the same number, around 1 and apart by about 1."""

    d: int
    seed: int
    noise: float

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {"x": (self.d,)}

    def local_state(self, h: int) -> Models:
        return np.zeros((h, 0), np.float32)

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        out = np.empty_like(x) if out is None else out
        for row, i in enumerate(ids):
            np.subtract(x[row], 1 + stream(self.seed, "centre", 0, int(i)).standard_normal(), out=out[row])
            if self.noise:
                out[row] += (self.noise * np.random.default_rng().standard_normal(self.d)).astype(x.dtype)
        return out, local

    def evaluate(self, x: Models, local: Models, subset: Integers | None = None) -> tuple[Models, Models]:
        return np.zeros(len(x)), np.square(x - 1).mean(axis=1)


def task(seed: int, hyperparameters: Mapping[str, Any]) -> Quadratic:
    """What ``rpel peer run`` calls for the task "support.quadratic:task"."""
    return Quadratic(int(hyperparameters.get("d", 64)), seed, float(hyperparameters.get("noise", 0.01)))
