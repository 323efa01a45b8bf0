"""What all rules share: checks, absent and non-finite answers, and line 9 of Algorithm 1 with its fallback.

There are three kinds. A `Rule` makes one vector of m. A `rpel.rules.graph.GossipRule` also takes the weights
of a graph's edges. A `rpel.rules.mixing.PreAggregation` makes m′ vectors of m, for the rule after it in a
chain. The author of a rule writes `Rule.run` and nothing else.

Invariants:

1. A rule maps m vectors, row 0 the node's own, to one: (…, m, d) → (…, d). For many victims at once it takes
   a table (n, d) and an index (h, m), and never builds an (h, m, d) array.
2. A vector with a non-finite entry counts as one of the f hostile ones. The g such vectors are left out, and
   the rule runs on the other m − g with f − g; κ does not grow. Rules without f only leave them out.
3. Inputs are never changed; the result has the kind (NumPy or torch) and dtype of the input.

Victims are grouped by how many vectors they have left, so that inside a group nothing is absent or
non-finite. Large groups are cut so that their (h, m, m) distances stay small beside the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import empty, is_tensor, put, take
from rpel.backend.base import Backend, Operation, backend
from rpel.randomness import Purpose, draws
from rpel.rules.inputs import (
    Array,
    as_table,
    check_index,
    deliver,
    from_kernels,
    host,
    kernels_for,
    stack,
    to_kernels,
    writable,
)
from rpel.types import Aggregated, Floats, Integers, Mix, Received

Kappa = Callable[[int, int], float]
"""(m, f) → the robustness coefficient."""

PIECE = 25
"""A group's temporaries take at most 1/25 of the table."""


@dataclass(frozen=True)
class RoundContext:
    """The round and the nodes, for rules that draw at random or change over time.

    The simulator fills in its seed, a deployed peer one from the operating system.

    >>> RoundContext(round=3, rounds=10, seed=1, ids=np.array([4, 7, 9])).among([0, 2]).ids
    array([4, 9])
    """

    round: int = 0
    rounds: int = 1
    seed: int = 0
    ids: Integers | None = None  # (h,) the victims' node numbers; None: 0, 1, …

    def among(self, victims: Integers | NDArray[np.bool_] | list[int]) -> "RoundContext":
        """Return the same round for some of the victims."""
        return self if self.ids is None else replace(self, ids=self.ids[victims])


@dataclass(frozen=True)
class Group:
    """Some victims, their rows of the table, and the backend that computes.

    In `Rule.run` all victims of a group aggregate equally many vectors, present and finite.
    """

    kernels: Backend
    table: Array
    index: Integers
    f: int
    victims: Integers
    context: RoundContext
    finite: NDArray[np.bool_] | None = None  # (n,) the table's finite rows, if already computed
    weights: Array | None = None  # (h, m) gossip weights on a graph, self first
    hostile: Array | None = None  # (h, m) hostile marks, for the oracle

    @property
    def m(self) -> int:
        """The number of vectors of each victim."""
        return int(self.index.shape[1])

    @property
    def nodes(self) -> Integers:
        """(h,) The victims' node numbers."""
        return self.victims if self.context.ids is None else self.context.ids[self.victims]

    def finite_rows(self) -> NDArray[np.bool_]:
        """(n + 1,) Mark the table's finite rows; False at the end, where −1 looks it up."""
        return np.append(self.kernels.finite_rows(self.table) if self.finite is None else self.finite, False)

    def pieces(self, bytes_each: int, share: int = PIECE) -> "Iterator[Group]":
        """Cut the group so that ``bytes_each`` per victim take at most 1/``share`` of the table."""
        size = int(self.table.shape[0]) * int(self.table.shape[1]) * int(self.table.dtype.itemsize)
        step = max(1, size // share // bytes_each if bytes_each else len(self.index))
        for start in range(0, len(self.index), step):
            piece = slice(start, start + step)
            yield replace(self, index=self.index[piece], victims=self.victims[piece])

    def uniform(self, purpose: Purpose, size: int) -> Floats:
        """(h, size) Draw from [0, 1), each victim from its own coordinates (seed, purpose, round, node)."""
        return draws(self.context.seed, purpose, self.context.round, self.nodes, size)

    def pairwise(self) -> Floats:
        """(h, m, m) Squared distances among each victim's vectors, on the host."""
        return np.asarray(self.kernels.squared_distances(self.table, self.index))

    def nearest(self, k: int) -> Integers:
        """(h, m, k) The k columns nearest to each of a victim's vectors, itself included."""
        return np.asarray(self.kernels.nearest(self.kernels.squared_distances(self.table, self.index), k))

    def distances_to(self, origin: Array | None) -> Floats:
        """(h, m) Squared distances to zero (None), a point, or one point or row per victim."""
        return np.asarray(self.kernels.distances_to(self.table, self.index, origin))

    def to(self, column: int) -> Floats:
        """(h, m) Squared distances to the vector in the given column."""
        return self.distances_to(self.index[:, column].copy())

    def norms(self) -> Floats:
        """(h, m) Euclidean norms."""
        return np.sqrt(self.distances_to(None))

    def combine(self, weights: Floats, out: Array | None = None) -> Array:
        """(h, d) Σ_j weights[i, j] · x_j."""
        return self.kernels.combine(self.table, self.index, weights, out=out)

    def coordinatewise(
        self, operation: Operation, f: int, mix: Mix = None, out: Array | None = None
    ) -> Array:
        """(h, d) Apply an operation to the values of every coordinate, after mixing the rows."""
        return self.kernels.coordinatewise(self.table, self.index, operation, f, mix=mix, out=out)


@dataclass(frozen=True)
class Stage:
    """A part of a chain: its name, the number f of hostile vectors it allows for, and how many it needs."""

    name: str
    f: int | None = field(default=None, kw_only=True)

    is_random: bool = field(default=False, kw_only=True)
    """True for stages that draw at random: their result depends on the order of the vectors."""

    on_graph: ClassVar[bool] = False
    """True for rules that need the gossip weights of a graph's edges."""

    def __post_init__(self) -> None:
        f = self.f
        if f is not None and (isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0):
            raise ValueError(f"{self.name} needs a whole number f of hostile vectors, 0 or more, not {f!r}")

    @property
    def pull_error(self) -> str | None:
        """Say why it cannot aggregate pulled models; None if it can."""
        return None

    def min_vectors(self, f: int) -> int:
        """Return the smallest m with which f hostile vectors can be survived."""
        return 2 * f + 1

    def with_f(self, f: int) -> Self:
        """Return the same stage for another number of hostile vectors."""
        return replace(self, f=f)

    def check(self, m: int, f: int) -> None:
        """Raise ValueError if m vectors are too few for f hostile ones."""
        if m < max(1, self.min_vectors(f)):
            most = max((k for k in range(f) if self.min_vectors(k) <= m), default=0)
            raise ValueError(
                f"{self.name} with f={f} needs at least m={max(1, self.min_vectors(f))} vectors, not {m}"
                + (f": at most f={most} for m={m}" if m >= 1 else "")
            )

    def refuse_weights(self, weights: Array | None, hostile: Array | None) -> None:
        """Raise ValueError for gossip weights, which only rules on graphs take."""
        if weights is not None or hostile is not None:
            raise ValueError(f"{self.name} takes no weights: only rules on graphs do")


@dataclass(frozen=True)
class Rule(Stage, ABC):
    """One vector of m: call it on (…, m, d), or `aggregate` many victims over one table.

    >>> class Midpoint(Rule):
    ...     def run(self, group, out=None):
    ...         return group.combine(np.full(group.index.shape, 1 / group.m), out)
    >>> Midpoint("midpoint")(np.array([[1.0], [3.0]]))
    array([2.])
    """

    pivot: int | None = field(default=None, kw_only=True)
    """The column of the vector that the rule trusts: it must be finite, and `run` finds it in column 0."""

    context: RoundContext = field(default=RoundContext(), kw_only=True, compare=False)
    """The round in which it runs if none is passed; see `at`."""

    known_kappa: Kappa | None = field(default=None, kw_only=True)

    @abstractmethod
    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate for victims whose m vectors are all present and finite."""

    def scratch(self, m: int) -> int:
        """Return the bytes that `run` needs for each victim beside its result: m × m distances."""
        return 8 * m * m

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        """Compile kernels for m vectors of d entries if this many victims make it pay; none by default."""

    def kappa(self, m: int) -> float | None:
        """Return the robustness coefficient for m vectors, or None if none is known."""
        return None if self.known_kappa is None or self.f is None else self.known_kappa(m, self.f)

    def at(self, *, round: int, rounds: int, seed: int, ids: Integers) -> Self:
        """Return the rule as it runs in round ``round`` of ``rounds`` for the nodes ``ids`` (h,)."""
        return replace(self, context=RoundContext(round, rounds, seed, ids))

    def __call__(self, x: Array, *, weights: Array | None = None, hostile: Array | None = None) -> Array:
        """Aggregate x (…, m, d) to (…, d).

        Args:
            x: vectors, row 0 the node's own; or a list of m arrays, tensors, lists of tensors or
                state_dicts, of which one of its kind comes back.
            weights: (…, m) or (m,) gossip weights, self first, for rules on graphs.
            hostile: marks of the hostile neighbours, for the one rule that is told.
        """
        if isinstance(x, list | tuple):
            rows, restore = stack(x, self.name)
            return restore(self(rows, weights=weights, hostile=hostile))
        rows = to_kernels(x, self.name)
        table, index = as_table(rows, self.name)
        *batch, m, d = x.shape
        shares, marks = (
            None if a is None else np.broadcast_to(host(a), (*batch, m)).reshape(index.shape)
            for a in (weights, hostile)
        )
        result = self.aggregate(table, index, weights=shares, hostile=marks)
        return from_kernels(result.reshape(*batch, d), x)

    def aggregate(
        self,
        table: Array,
        index: Array,
        *,
        weights: Array | None = None,
        hostile: Array | None = None,
        f: int | None = None,
        out: Array | None = None,
        kernels: Backend | None = None,
        context: RoundContext | None = None,
        finite: NDArray[np.bool_] | None = None,
    ) -> Array:
        """(h, d) Aggregate for many victims over one table.

        Args:
            table: (n, d) models.
            index: (h, m) each victim's rows of the table, its own in column 0; −1 at the tail is an absent
                answer.
            weights: (h, m) gossip weights, for rules on graphs.
            hostile: (h, m) marks of hostile neighbours, for the one rule that is told.
            f: the number of hostile vectors, in place of the rule's own.
            out: (h, d), where the result goes.
            kernels: the backend; by default numba in main memory and torch on other devices.
            context: the round and the victims' node numbers, in place of the rule's own (see `at`).
            finite: (n,) the table's finite rows, if already computed.
        """
        rule = self if f is None else self.with_f(f)
        given = kernels is not None and is_tensor(table)  # this backend takes tensors as they are
        rows = table if given else to_kernels(table, self.name)
        checked = check_index(self.name, rows, index)
        group = Group(
            kernels or kernels_for(rows), rows, checked, rule.f or 0, np.arange(len(checked)),
            context or self.context, finite, weights, hostile,
        )  # fmt: skip
        buffer = out if given else writable(out)
        result = rule.compute(group, buffer)
        return result if given else deliver(result, out, buffer, table)

    def cannot_aggregate(self, present: NDArray[np.bool_], usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(h,) Mark victims with too few answers, too many non-finite ones, or a useless own vector.

        Args:
            present: (h, m) the answers that arrived.
            usable: (h, m) those of them that are finite.
        """
        short = present.sum(axis=1) < self.min_vectors(self.f or 0)
        lost = (present & ~usable).sum(axis=1) > (present.shape[1] if self.f is None else self.f)
        lost |= ~usable.any(axis=1)
        if self.pivot is not None:
            lost |= ~usable[:, self.pivot : self.pivot + 1].any(axis=1)
        return np.asarray(short | lost)

    def compute(self, asked: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate after the checks; some vectors may be absent or not finite."""
        self.refuse_weights(asked.weights, asked.hostile)
        if self.pivot:
            others = np.delete(asked.index, self.pivot, axis=1)
            asked = replace(asked, index=np.concatenate([asked.index[:, [self.pivot]], others], axis=1))
        result = empty(len(asked.index), asked.table) if out is None else out
        for group in self._groups(asked):
            first, count = int(group.victims[0]), len(group.victims)
            together = int(group.victims[-1]) - first + 1 == count
            rows = result[first : first + count] if together else None
            made = self.run(group, out=rows)
            if rows is None or made is not rows:
                put(result, group.victims, made)
        return result

    def _groups(self, asked: Group) -> Iterator[Group]:
        """Group victims with equally many present and equally many non-finite vectors."""
        index, finite = asked.index, asked.finite_rows()
        everything = finite[:-1].all() and index.min(initial=0) >= 0
        if everything or finite[index].all():  # nothing to leave out, nothing to copy
            self.check(index.shape[1], asked.f)
            yield from asked.pieces(self.scratch(asked.m))
            return
        present, usable = index >= 0, finite[index]
        left, lost = usable.sum(axis=1), (present & ~usable).sum(axis=1)
        if self.f is not None:
            if lost.max(initial=0) > self.f:
                raise ValueError(
                    f"{self.name} with f={self.f} cannot survive {lost.max()} vectors with non-finite entries"
                )
            self.check(int(present.sum(axis=1).min(initial=index.shape[1])), self.f)
        if self.pivot is not None and not usable[:, 0].all():
            raise ValueError(f"{self.name} needs a finite vector in column {self.pivot}, its centre")
        for left_m, lost_g in np.unique(np.stack([left, lost], axis=1), axis=0):
            m, f = int(left_m), max(0, (self.f or 0) - int(lost_g))
            victims = np.flatnonzero((left == m) & (lost == lost_g))
            self.check(m, f)
            rows = index[victims][usable[victims]].reshape(len(victims), m)
            yield from replace(asked, index=rows, f=f, victims=victims).pieces(self.scratch(m))


def aggregate_or_keep(
    half: Array,
    received: Received,
    rule: Rule,
    out: Array | None = None,
    kernels: Backend | None = None,
) -> tuple[Array, Aggregated]:
    """(h, d) Line 9 of Algorithm 1: aggregate, or keep the half-step where that is impossible.

    Args:
        half: (h, d) the nodes' half-step models.
        received: a table of models, and each node's rows of it.
        rule: the aggregation rule.
        out: (h, d), where the result goes.
        kernels: the backend that computes; numba by default.

    Returns:
        The next models, and what was done for each node.
    """
    table, index, kernels = received.table, received.index, kernels or backend("numba")
    known = np.empty(0, np.bool_) if received.finite is None else received.finite
    finite = np.concatenate([known, np.asarray(kernels.finite_rows(table[len(known) :]))])
    present = index >= 0
    usable = np.append(finite, False)[index]  # −1 looks up the False at the end
    degraded = rule.cannot_aggregate(present, usable)
    trimmed = np.where(degraded, 0, np.maximum((rule.f or 0) - (present & ~usable).sum(axis=1), 0))
    done = Aggregated(degraded, trimmed)
    if not degraded.any():
        weights, hostile = received.weights, received.hostile
        made = rule.aggregate(
            table, index, weights=weights, hostile=hostile, out=out, kernels=kernels, finite=finite
        )
        return made, done
    able, result = ~degraded, empty(len(index), table) if out is None else out
    put(result, degraded, take(half, degraded))
    if able.any():
        weights, hostile = (None if a is None else a[able] for a in (received.weights, received.hostile))
        some = replace(rule, context=rule.context.among(able))
        put(
            result,
            able,
            some.aggregate(
                table, index[able], weights=weights, hostile=hostile, kernels=kernels, finite=finite
            ),
        )
    return result, done
