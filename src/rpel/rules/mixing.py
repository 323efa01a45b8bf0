"""Pre-aggregations, which make m′ vectors of m for the rule after them, and chains of both.

A pre-aggregation says how each new row is made of the old ones. Before a coordinate-wise rule it is fused
into that rule's kernel; before any other rule the mixed rows of a few victims at a time are written to a
small table. Non-finite vectors are passed through.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rpel import theory
from rpel.backend.arrays import empty, is_tensor, take
from rpel.rules.base import Group, RoundContext, Rule, Stage
from rpel.rules.coordinatewise import Coordinatewise
from rpel.rules.inputs import Array, as_table, from_kernels, host, kernels_for, stack, to_kernels
from rpel.types import Floats, Integers

__all__ = ["arc", "bucketing", "clipping", "nnm"]

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
    """(m, f) → k if every new row is the mean of the k nearest old ones: the kernels find them themselves."""

    @property
    def pull_error(self) -> str:
        """Say that it returns all its rows."""
        return f"mixes models but does not aggregate them; use '{self.name}+trimmed_mean'"

    def mixed(self, group: Group) -> Array:
        """(h·m′, d) Mix the rows of every victim, one victim after another."""
        weights = as_weights(self.mix(group), group.m)
        repeated = replace(group, index=np.repeat(group.index, weights.shape[1], axis=0))
        return repeated.combine(weights.reshape(-1, group.m))

    def __call__(self, x: Array, *, weights: Array | None = None, hostile: Array | None = None) -> Array:
        """Return all rows: x (…, m, d) to (…, m′, d).

        Rows with non-finite entries stay untouched: in their places, or at the end if m′ differs from m.
        """
        self.refuse_weights(weights, hostile)
        if isinstance(x, list | tuple):
            stacked, restore = stack(x, self.name)
            return [restore(row) for row in self(stacked)]
        table, index = as_table(to_kernels(x, self.name), self.name)
        *batch, m, d = x.shape
        group = Group(kernels_for(table), table, index, self.f or 0, np.arange(len(index)), RoundContext())
        finite = np.asarray(group.kernels.finite_rows(table)).reshape(index.shape)
        if finite.all():
            self.check(m, group.f)
            return from_kernels(self.mixed(group).reshape(*batch, -1, d), x)
        pieces = [self._pass_non_finite(group, i, finite[i]) for i in range(len(index))]
        if len({len(piece) for piece in pieces}) > 1:
            raise ValueError(
                f"{self.name} would return different numbers of rows; call it on one batch entry at a time"
            )
        joined = np.concatenate(pieces).reshape(*batch, len(pieces[0]), d)
        return x.new_tensor(joined) if is_tensor(x) else from_kernels(joined, x)

    def _pass_non_finite(self, group: Group, i: int, finite: NDArray[np.bool_]) -> Any:
        """(m′, d) Mix one victim's finite rows, on the host, and pass the others through."""
        rows, good, bad = group.index[i], np.flatnonzero(finite), np.flatnonzero(~finite)
        f = max(0, group.f - len(bad))
        self.check(len(good), f)
        alone = replace(group, index=rows[None, good], f=f, victims=group.victims[i : i + 1])
        mixed, through = host(self.mixed(alone)), host(take(group.table, rows[bad]))
        if len(mixed) != len(good):
            return np.concatenate([mixed, through])
        whole = np.empty((len(rows), mixed.shape[1]), mixed.dtype)
        whole[good], whole[bad] = mixed, through
        return whole


def as_weights(parts: Parts, m: int) -> Floats:
    """(h, m′, m) Write a mixing as float weights."""
    if parts.dtype.kind == "f":
        return np.asarray(parts, dtype=np.float64)
    weights = np.zeros((*parts.shape[:2], m))
    np.put_along_axis(weights, parts.astype(np.int64), 1 / parts.shape[2], axis=2)
    return weights


def nnm(f: int) -> PreAggregation:
    """Nearest-neighbour mixing: each vector becomes the mean of the m − f nearest (Allouah et al., 2023).

    >>> nnm(1)(np.array([[0.0], [1.0], [9.0]]))
    array([[0.5], [0.5], [5. ]])
    """
    return PreAggregation(
        "nnm", lambda g: g.nearest(g.m - g.f), theory.kappa_nnm, nearest=lambda m, f: m - f, f=f
    )


def bucketing(size: int = 2, seed: int = 0, f: int | None = None) -> PreAggregation:
    """Shuffle and average groups of the given size; the last group may be smaller (Karimireddy et al., 2022).

    Every node shuffles anew in every round that a `rpel.rules.RoundContext` names.

    >>> bucketing(size=2)(np.array([[1.0], [1.0], [1.0], [1.0]]))
    array([[1.], [1.]])
    """
    if size < 1:
        raise ValueError(f"bucketing needs a size of at least 1, not {size}")

    def mix(g: Group) -> Parts:
        order = np.argsort(g.uniform(("bucketing", seed), g.m), axis=1)
        weights = np.zeros((len(order), ceil(g.m / size), g.m))
        for bucket in range(weights.shape[1]):
            members = order[:, bucket * size : (bucket + 1) * size]
            np.put_along_axis(weights[:, bucket], members, 1 / members.shape[1], axis=1)
        return weights

    return PreAggregation("bucketing", mix, rows=lambda m: ceil(m / size), f=f, is_random=True)


def _scale(norms: Floats, limit: Floats | float) -> Floats:
    """(h, m, m) A diagonal mixing that scales every row longer than the limit down to it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(norms > limit, limit / norms, 1.0)
    return np.asarray(factors[:, :, None] * np.eye(factors.shape[1]))


def clipping(c: float = 2.0, f: int | None = None) -> PreAggregation:
    """Scale every vector longer than c down to length c.

    >>> clipping(2.0)(np.array([[1.0], [-8.0]]))
    array([[ 1.], [-2.]])
    """
    if not c >= 0:
        raise ValueError(f"clipping needs a length c of 0 or more, not {c}")
    return PreAggregation("clipping", lambda g: _scale(g.norms(), c), f=f)


def arc(f: int) -> PreAggregation:
    """Adaptive robust clipping: scale the ⌊2f(m−f)/m⌋ longest vectors to the next smaller norm.

    (Allouah et al., 2025.)

    >>> arc(1)(np.array([[1.0], [2.0], [-8.0]]))
    array([[ 1.], [ 2.], [-2.]])
    """

    def mix(g: Group) -> Parts:
        norms, cut = g.norms(), 2 * g.f * (g.m - g.f) // g.m
        return _scale(norms, np.sort(norms, axis=1)[:, g.m - cut - 1][:, None])

    return PreAggregation("arc", mix, f=f)


@dataclass(frozen=True)
class Chain(Rule):
    """A pre-aggregation, then a rule (which may itself be a chain)."""

    before: PreAggregation
    rule: Rule

    @property
    def _is_fused(self) -> bool:
        return isinstance(self.rule, Coordinatewise)

    def with_f(self, f: int) -> "Chain":
        """Return the chain with every stage for another number of hostile vectors."""
        return replace(self, before=self.before.with_f(f), rule=self.rule.with_f(f), f=f)

    def min_vectors(self, f: int) -> int:
        """Return the smallest m whose mixed rows are enough for the rule."""
        m = max(self.before.min_vectors(f), 1)
        while self.before.rows(m) < self.rule.min_vectors(f):
            m += 1
        return m

    def scratch(self, m: int) -> int:
        """Need no distances where the kernel finds the neighbours itself."""
        return 0 if self.before.nearest and self._is_fused else super().scratch(m)

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        """Compile the kernel for the mixed rows if the number of values is worth it.

        >>> chain(nnm(1), Coordinatewise("median", "median", f=1)).prepare(5, 10, np.float32, victims=100)
        """
        self.rule.prepare(self.before.rows(m), d, dtype, victims, mixed=self.before.nearest is not None)

    def kappa(self, m: int) -> float | None:
        """Return the robustness coefficient of the whole, or None if none is known."""
        inner = self.rule.kappa(m)
        if self.before.mixed_kappa is None or inner is None or self.before.f is None:
            return None
        return self.before.mixed_kappa(m, self.before.f, inner)

    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Mix, then aggregate; a tenth of the table at a time if the kernel does not mix itself."""
        if isinstance(self.rule, Coordinatewise):
            nearest = self.before.nearest
            mix = nearest(group.m, group.f) if nearest else self.before.mix(group)
            return self.rule.run(group, out, mix)
        result = empty(len(group.index), group.table) if out is None else out
        bytes_each = group.m * int(group.table.shape[1]) * int(group.table.dtype.itemsize)
        start = 0
        for piece in group.pieces(bytes_each, share=10):
            table = self.before.mixed(piece)
            index = np.arange(len(table), dtype=np.int64).reshape(len(piece.index), -1)
            rows = result[start : start + len(index)]
            made = self.rule.run(replace(piece, table=table, index=index, finite=None), out=rows)
            if made is not rows:
                rows[:] = group.kernels.array(made)
            start += len(index)
        return result


def chain(*stages: Stage) -> Rule:
    """Join pre-aggregations and one rule at the end.

    >>> from rpel.rules import median, nnm
    >>> chain(nnm(1), median(1)).name
    'nnm+median'
    """
    if not stages:
        raise ValueError("a chain needs at least one rule")
    *before, last = stages
    if not before:
        return cast(Rule, last)
    for stage in before:
        if not isinstance(stage, PreAggregation):
            raise ValueError(f"{stage.name} returns one vector, so it can only stand last in a chain")
    if not isinstance(last, Rule) or last.on_graph:
        raise ValueError(f"{last.name} cannot end a chain: that takes a rule that makes one vector of m")
    return reduce(_prepend, reversed(cast(list[PreAggregation], before)), last)


def _prepend(rule: Rule, first: PreAggregation) -> Rule:
    f = max((stage.f for stage in (first, rule) if stage.f is not None), default=None)
    return Chain(
        f"{first.name}+{rule.name}", first, rule, f=f, pivot=rule.pivot,
        is_random=first.is_random or rule.is_random,
    )  # fmt: skip
