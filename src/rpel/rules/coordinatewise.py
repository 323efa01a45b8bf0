"""Coordinate-wise rules, an operation on the m sorted values of each coordinate,
and what may stand before a rule.

A pre-aggregation takes m vectors and gives m′: the kept columns of every new row (integers), or a weight for
every old row (floats). Before a coordinate-wise rule it is fused into that rule's kernel; before any other
rule the mixed rows of a few victims at a time are written to a small table.
Non-finite vectors are handed through.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rpel import theory
from rpel.backend import compiled
from rpel.backend.arrays import is_tensor, take
from rpel.rules.arrays import Array, as_table, host, kernels_for, stacked, to_kernels
from rpel.rules.base import Group, Mixing, Rule, Stage
from rpel.rules.linear import krum_scores
from rpel.types import Floats, Integers


@dataclass(frozen=True)
class Coordinatewise(Rule):
    """An operation on the sorted values of each coordinate."""

    operation: Literal["trimmed_mean", "median", "meamed"]
    fuses: ClassVar[bool] = True

    def run(self, group: Group, out: Array | None = None) -> Array:
        return group.coordinatewise(self.operation, group.f, out=out)

    def run_mixed(self, group: Group, before: Mixing, out: Array | None = None) -> Array:
        near = before.nearest
        mix = near(group.m, group.f) if near else before.mix(group)
        return group.kernels.coordinatewise(
            group.table, group.index, self.operation, group.f, mix=mix, out=out
        )

    def scratch(self, m: int) -> int:
        return 0

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        if m >= self.least(self.f or 0):
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
    """Krum picks θ = m − 2f vectors in turn; then per coordinate the θ − 2f values nearest to their
    median."""

    def least(self, f: int) -> int:
        return 4 * f + 3 if f else 1

    def run(self, group: Group, out: Array | None = None) -> Array:
        picked = self._picks(group.pairwise(), group.f)
        chosen = replace(group, index=np.take_along_axis(group.index, picked, axis=1))
        return chosen.coordinatewise("meamed", 2 * group.f, out=out)

    @staticmethod
    def _picks(squared: Floats, f: int) -> Integers:
        """(h, θ) columns picked by Krum among those that remain, in ascending order."""
        h, m, _ = squared.shape
        remaining = np.tile(np.arange(m), (h, 1))
        picked = np.empty((h, m - 2 * f), dtype=np.int64)
        for k in range(m - 2 * f):
            sub = np.take_along_axis(squared, remaining[:, :, None], axis=1)
            sub = np.take_along_axis(
                sub, np.repeat(remaining[:, None, :], remaining.shape[1], axis=1), axis=2
            )
            best = np.argmin(krum_scores(sub, f), axis=1)
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


# --- before a rule ------------------------------------------------------------------------------------------

Parts = Integers | Floats
"""(h, m′, k) integer columns whose mean is taken, or (h, m′, m) float weights."""


@dataclass(frozen=True)
class PreAggregation(Stage):
    """m′ vectors of m: ``mix(group)`` says how each new row is made of the old ones.

    >>> halves = PreAggregation("halves", lambda group: np.tile(0.5 * np.eye(group.m),
    ...     (len(group.index), 1, 1)))
    >>> halves(np.array([[1.0], [3.0]]))
    array([[0.5], [1.5]])
    """

    mix: Callable[[Group], Parts]
    mixed_kappa: Callable[[int, int, float], float] | None = None
    rows: Callable[[int], int] = lambda m: m
    nearest: Callable[[int, int], int] | None = None
    """(m, f) → k where every new row is the mean of the k nearest old ones:
    the kernels find them as they go."""

    @property
    def unsuited(self) -> str:
        return f"mixes but does not aggregate: the nearest is '{self.name}+trimmed_mean'"

    def mixed(self, group: Group) -> Array:
        """(h·m′, d) the mixed rows of every victim, one after another."""
        weights = as_weights(self.mix(group), group.m)
        repeated = replace(group, index=np.repeat(group.index, weights.shape[1], axis=0))
        return repeated.combine(weights.reshape(-1, group.m))

    def __call__(self, x: Array, *, weights: Array | None = None, hostile: Array | None = None) -> Array:
        """All rows: x (…, m, d) to (…, m′, d); rows with non-finite entries come last, untouched,
        unless m′ = m."""
        self.refuse_weights(weights, hostile)
        if isinstance(x, list | tuple):
            rows, restore = stacked(x, self.name)
            return [restore(row) for row in self(rows)]
        x, back = to_kernels(x, self.name)
        *batch, m, d = x.shape
        table, index = as_table(x, self.name)
        group = Group(kernels_for(x), table, index, self.f or 0, np.arange(len(index)))
        finite = np.asarray(group.kernels.finite_rows(table)).reshape(index.shape)
        if finite.all():
            self.check(m, group.f)
            return back(self.mixed(group).reshape(*batch, -1, d))
        pieces = [self._with_non_finite(group, i, finite[i]) for i in range(len(index))]
        if len({len(piece) for piece in pieces}) > 1:
            raise ValueError(
                f"{self.name} would return different numbers of rows; call it on one batch entry at a time"
            )
        joined = np.concatenate(pieces).reshape(*batch, len(pieces[0]), d)
        return back(x.new_tensor(joined) if is_tensor(x) else joined)

    def _with_non_finite(self, group: Group, i: int, finite: NDArray[np.bool_]) -> Any:
        """(m′, d) one victim's rows on the host: the finite ones mixed,
        the others in their places (or at the end)."""
        rows, good, bad = group.index[i], np.flatnonzero(finite), np.flatnonzero(~finite)
        f = max(0, group.f - len(bad))
        self.check(len(good), f)
        mixed = host(
            self.mixed(replace(group, index=rows[None, good], f=f, victims=group.victims[i : i + 1]))
        )
        through = host(take(group.table, rows[bad]))
        if len(mixed) != len(good):
            return np.concatenate([mixed, through])
        whole = np.empty((len(rows), mixed.shape[1]), mixed.dtype)
        whole[good], whole[bad] = mixed, through
        return whole


def as_weights(mixing: Parts, m: int) -> Floats:
    """(h, m′, m) float weights of a mixing."""
    if mixing.dtype.kind == "f":
        return np.asarray(mixing, dtype=np.float64)
    weights = np.zeros((*mixing.shape[:2], m))
    np.put_along_axis(weights, mixing.astype(np.int64), 1 / mixing.shape[2], axis=2)
    return weights


def nnm(f: int) -> PreAggregation:
    """Nearest-neighbour mixing: every vector becomes the mean of the m − f nearest to it (Allouah et al.,
    2023).

    >>> nnm(1)(np.array([[0.0], [1.0], [9.0]]))
    array([[0.5], [0.5], [5. ]])
    """

    return PreAggregation(
        "nnm", lambda g: g.nearest(g.m - g.f), theory.kappa_nnm, nearest=lambda m, f: m - f, f=f
    )


def bucketing(size: int = 2, seed: int = 0, f: int | None = None) -> PreAggregation:
    """Shuffle and average groups of the given size; the last group may be smaller (Karimireddy et al., 2022).

    Every node deals anew in every round, once a :class:`~rpel.rules.RoundContext` says which round it is.

    >>> bucketing(size=2)(np.array([[1.0], [1.0], [1.0], [1.0]]))
    array([[1.], [1.]])
    """
    if size < 1:
        raise ValueError(f"bucketing needs a size of at least 1, not {size}")

    def mix(g: Group) -> Parts:
        order = np.argsort(g.draws(("bucketing", seed), g.m), axis=1)
        weights = np.zeros((len(order), ceil(g.m / size), g.m))
        for bucket in range(weights.shape[1]):
            members = order[:, bucket * size : (bucket + 1) * size]
            np.put_along_axis(weights[:, bucket], members, 1 / members.shape[1], axis=1)
        return weights

    return PreAggregation("bucketing", mix, rows=lambda m: ceil(m / size), f=f, draws=True)


def _scaled(factors: Floats) -> Floats:
    """(h, m, m) diagonal mixing that scales every row."""
    return np.asarray(factors[:, :, None] * np.eye(factors.shape[1]))


def _clip(norms: Floats, limit: Floats | float) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norms > limit, limit / norms, 1.0)


def clipping(c: float = 2.0, f: int | None = None) -> PreAggregation:
    """Scale every vector longer than c down to length c.

    >>> clipping(2.0)(np.array([[1.0], [-8.0]]))
    array([[ 1.], [-2.]])
    """
    if not c >= 0:
        raise ValueError(f"clipping needs a length c of 0 or more, not {c}")
    return PreAggregation("clipping", lambda g: _scaled(_clip(g.norms(), c)), f=f)


def arc(f: int) -> PreAggregation:
    """Adaptive robust clipping: the ⌊2f(m−f)/m⌋ longest vectors are scaled to the next smaller norm.

    (Allouah et al., 2025.)

    >>> arc(1)(np.array([[1.0], [2.0], [-8.0]]))
    array([[ 1.], [ 2.], [-2.]])
    """

    def mix(g: Group) -> Parts:
        norms, cut = g.norms(), 2 * g.f * (g.m - g.f) // g.m
        limit = np.sort(norms, axis=1)[:, g.m - cut - 1]
        return _scaled(_clip(norms, limit[:, None]))

    return PreAggregation("arc", mix, f=f)


@dataclass(frozen=True)
class Chain(Rule):
    """A pre-aggregation, then a rule (which may itself be such a pair)."""

    before: PreAggregation
    rule: Rule

    def with_f(self, f: int) -> "Chain":
        return replace(self, before=self.before.with_f(f), rule=self.rule.with_f(f), f=f)

    def least(self, f: int) -> int:
        """The smallest m whose mixed rows are enough for the rule."""
        m = max(self.before.least(f), 1)
        while self.before.rows(m) < self.rule.least(f):
            m += 1
        return m

    def scratch(self, m: int) -> int:
        return 0 if self.before.nearest and self.rule.fuses else super().scratch(m)

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        self.rule.prepare(self.before.rows(m), d, dtype, victims, mixed=self.before.nearest is not None)

    def kappa(self, m: int) -> float | None:
        inner = self.rule.kappa(m)
        if self.before.mixed_kappa is None or inner is None or self.before.f is None:
            return None
        return self.before.mixed_kappa(m, self.before.f, inner)

    def run(self, group: Group, out: Array | None = None) -> Array:
        return self.rule.run_mixed(group, self.before, out)
