"""Tasks that show one property each; their models are one parameter ``x`` of ``d`` numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpel.types import Integers, Models
from support import quadratic


@dataclass(frozen=True)
class Exhausted(quadratic.Quadratic):
    """Its batches run out: the third gradient raises StopIteration, as ``next(batches)`` does."""

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        batches = iter(range(2))
        for _ in range(t):
            next(batches)
        return super().gradient(x, local, ids, t, k, out)


@dataclass(frozen=True)
class Climbing(quadratic.Quadratic):
    """x grows by the learning rate in every step, and models are best where x is 2."""

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        out = np.empty_like(x) if out is None else out
        out.fill(-1)
        return out, local

    def evaluate(self, x: Models, local: Models, subset: Integers | None = None) -> tuple[Models, Models]:
        distance = np.abs(x - 2).mean(axis=1)
        return 1 - distance / 10, distance


@dataclass(frozen=True)
class OneFar(quadratic.Quadratic):
    """The minimum of member 3 lies far from those of all others."""

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        out = np.empty_like(x) if out is None else out
        for row, i in enumerate(ids):
            np.subtract(x[row], 100 if i == 3 else 1 + 0.1 * int(i), out=out[row])
        return out, local


def exhausted(seed: int, hyperparameters: Mapping[str, Any]) -> Exhausted:
    return Exhausted(int(hyperparameters["d"]), seed, 0.0)


def climbing(seed: int, hyperparameters: Mapping[str, Any]) -> Climbing:
    return Climbing(int(hyperparameters["d"]), seed, 0.0)


def one_far(seed: int, hyperparameters: Mapping[str, Any]) -> OneFar:
    return OneFar(int(hyperparameters["d"]), seed, 0.0)
