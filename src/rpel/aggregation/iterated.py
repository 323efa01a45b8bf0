"""Rules that walk: z moves towards a weighted sum of the vectors, with weights from its distances to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpel import theory
from rpel.aggregation.arrays import Array, Floats, empty_like, host, is_tensor
from rpel.aggregation.base import Group, Rule
from rpel.aggregation.rules import Kappa, checked


@dataclass(frozen=True)
class Iterated(Rule):
    """z moves towards a weighted sum of the vectors, weights from the current distances ‖x_i − z‖, a few times over.

    ``step(distances (h, m), group)`` gives the vectors' weights (h, m); what they leave of 1 stays on z itself.
    """

    step: Callable[[Floats, Group], Floats]
    start: Any  # "zero", "own", "median" or a vector (d,)
    iterations: int
    tol: float | None = None
    known_kappa: Kappa | None = None

    def kappa(self, m: int) -> float | None:
        return None if self.known_kappa is None or self.f is None else self.known_kappa(m, self.f)

    def run(self, group: Group, out: Array | None = None) -> Array:
        z = empty_like(group.table, len(group.index)) if out is None else out
        anchor = self._begin(group, z)
        mine = np.zeros(group.index.shape)  # z = anchor share · anchor + Σ mine_j x_j
        mine[:, 0] = 1.0 if anchor is None else 0.0
        rest = np.zeros(len(mine)) if anchor is None else np.ones(len(mine))
        moving = np.ones(len(mine), dtype=bool)
        for _ in range(self.iterations):
            weights = self.step(np.sqrt(group.to_origin(z)), group)
            keep = 1 - weights.sum(axis=1)
            keep[np.abs(keep) < 1e-15] = 0.0
            # A victim that has converged stays where it is, so that its result does not depend on the others.
            after = np.where(moving[:, None], keep[:, None] * mine + weights, mine)
            rest = np.where(moving, keep * rest, rest)
            shift, mine = np.abs(after - mine).max(axis=1), after
            self._place(group, mine, rest, anchor, z)
            if self.tol is not None:
                moving &= shift > self.tol
                if not moving.any():
                    break
        return z

    def _begin(self, group: Group, z: Array) -> Any:
        """Write the starting point into z; it is the own vector (None) or something outside the m vectors."""
        if isinstance(self.start, str) and self.start == "own":
            weights = np.zeros(group.index.shape)
            weights[:, 0] = 1.0
            group.combine(weights, z)
            return None
        if isinstance(self.start, str) and self.start == "median":
            group.coordinatewise("median", 0, out=z)
            return "median"
        anchor = 0.0 if isinstance(self.start, str) else self.start
        z[:] = anchor
        return anchor

    def _place(self, group: Group, mine: Floats, rest: Floats, anchor: Any, z: Array) -> None:
        group.combine(mine, z)
        if anchor is not None and not isinstance(anchor, str) and rest.any() and np.any(host(anchor) != 0):
            share = z.new_tensor(rest) if is_tensor(z) else rest.astype(z.dtype)
            z += share[:, None] * anchor


def geometric_median(
    nu: float = 0.1, iterations: int = 3, tol: float | None = None, start: str = "zero", f: int | None = None
) -> Rule:
    """Smoothed Weiszfeld iterations; a point near most vectors (Pillutla et al., 2022).

    By default truncated (three iterations from zero, ν absolute), a form for which no κ holds. With ``tol`` it runs to
    convergence (weights move by at most tol) with ν relative to the vectors' spread, from the coordinate-wise median.

    >>> geometric_median(tol=1e-9)(np.array([[0.0], [1.0], [50.0]])).round(2)
    array([1.])
    """
    converge = tol is not None
    begin = "median" if converge and start == "zero" else start
    if begin not in ("zero", "own", "median"):
        raise ValueError(f"geometric_median starts at zero, own or median, not {start!r}")

    def step(distances: Floats, g: Group) -> Floats:
        smallest = nu * np.median(distances, axis=1, keepdims=True) * 1e-3 if converge else nu
        beta = 1 / np.maximum(distances, np.maximum(smallest, np.finfo(np.float64).tiny))
        beta /= beta.max(axis=1, keepdims=True)  # the scale cancels; this one cannot overflow
        return np.asarray(beta / beta.sum(axis=1, keepdims=True))

    kappa = theory.kappa_median if converge else None
    count = 1000 if converge else iterations
    return Iterated("geometric_median", step, begin, count, tol, kappa, f=checked("geometric_median", f))


def centered_clipping(center: Any = "own", iterations: int = 1, tau: float = 100.0, f: int | None = None) -> Rule:
    """Move the centre by the mean of the differences to it, each clipped to length τ (Karimireddy et al., 2021).

    >>> centered_clipping("zero", iterations=1, tau=1.0)(np.array([[1.0], [0.5], [90.0]])).round(4)
    array([0.8333])
    """
    if isinstance(center, str) and center not in ("own", "zero"):
        raise ValueError(f"centered_clipping has center 'own', 'zero' or a vector, not {center!r}")
    if not isinstance(center, str) and not np.isfinite(host(center)).all():
        raise ValueError("centered_clipping needs a finite centre")
    if not tau > 0 or iterations < 1:
        raise ValueError(f"centered_clipping needs tau > 0 and iterations >= 1, not {tau} and {iterations}")

    def step(distances: Floats, g: Group) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.minimum(1.0, tau / distances) / g.m)

    own = isinstance(center, str) and center == "own"
    name = "centered_clipping"
    return Iterated(name, step, center, iterations, f=checked(name, f), pivot=0 if own else None)
