"""Coordinate-wise rules: an operation on the m sorted values of each coordinate."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rpel import theory
from rpel.backend import compiled
from rpel.backend.base import Operation
from rpel.rules.base import Group, Rule
from rpel.rules.inputs import Array
from rpel.rules.linear import krum_scores
from rpel.types import Floats, Integers, Mix

__all__ = ["bulyan", "meamed", "median", "trimmed_mean"]


@dataclass(frozen=True)
class Coordinatewise(Rule):
    """An operation on the sorted values of each coordinate."""

    operation: Operation

    def run(self, group: Group, out: Array | None = None, mix: Mix = None) -> Array:
        """(h, d) Apply the operation; ``mix``: to mixed rows, as the backend's kernels take it."""
        return group.coordinatewise(self.operation, group.f, mix, out)

    def scratch(self, m: int) -> int:
        """Need no distances."""
        return 0

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        """Compile the kernel for this m and f if the number of values is worth it."""
        if m >= self.min_vectors(self.f or 0):
            compiled.prepare(m, self.f or 0, self.operation, mixed, dtype, float(victims) * m * d)


def trimmed_mean(f: int) -> Rule:
    """Per coordinate, drop the f lowest and the f highest values and average the rest (Yin et al., 2018).

    >>> trimmed_mean(1)(np.array([[0.0], [1.0], [2.0], [90.0]]))
    array([1.5])
    """
    return Coordinatewise("trimmed_mean", "trimmed_mean", known_kappa=theory.kappa_trimmed_mean, f=f)


def median(f: int | None = None) -> Rule:
    """Per coordinate, the middle value (Yin et al., 2018). f enters only κ and the check of m.

    >>> median()(np.array([[0.0], [1.0], [90.0]]))
    array([1.])
    """
    return Coordinatewise("median", "median", known_kappa=theory.kappa_median, f=f)


def meamed(f: int) -> Rule:
    """Per coordinate, the mean of the m − f values nearest to the median (Xie et al., 2018).

    >>> meamed(1)(np.array([[0.0], [1.0], [90.0]]))
    array([0.5])
    """
    return Coordinatewise("meamed", "meamed", f=f)


@dataclass(frozen=True)
class Bulyan(Rule):
    """Pick θ = m − 2f vectors by Krum; per coordinate, average the θ − 2f values nearest to their median."""

    def min_vectors(self, f: int) -> int:
        """Need m ≥ 4f + 3."""
        return 4 * f + 3 if f else 1

    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate the picked vectors."""
        picked = self._picks(group.pairwise(), group.f)
        chosen = replace(group, index=np.take_along_axis(group.index, picked, axis=1))
        return chosen.coordinatewise("meamed", 2 * group.f, out=out)

    @staticmethod
    def _picks(squared: Floats, f: int) -> Integers:
        """(h, θ) Columns picked by Krum, one after another among those that remain, in ascending order."""
        h, m, _ = squared.shape
        remaining = np.tile(np.arange(m), (h, 1))
        picked = np.empty((h, m - 2 * f), dtype=np.int64)
        for k in range(m - 2 * f):
            rows = np.take_along_axis(squared, remaining[:, :, None], axis=1)
            among = np.take_along_axis(
                rows, np.repeat(remaining[:, None, :], remaining.shape[1], axis=1), axis=2
            )
            best = np.argmin(krum_scores(among, f), axis=1)
            picked[:, k] = remaining[np.arange(h), best]
            keep = np.arange(remaining.shape[1]) != best[:, None]
            remaining = remaining[keep].reshape(h, -1)
        return np.sort(picked, axis=1)


def bulyan(f: int) -> Rule:
    """Bulyan of Krum (El Mhamdi et al., 2018); needs m ≥ 4f + 3.

    >>> bulyan(1)(np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [90.0]]))
    array([2.])
    """
    return Bulyan("bulyan", f=f)
