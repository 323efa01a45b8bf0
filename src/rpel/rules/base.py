"""What all rules share: checks, arrays of any kind, absent and non-finite answers.
An author writes only the idea.

There are three kinds. A :class:`Rule` makes one vector of m; a :class:`~rpel.rules.graph.GossipRule` is one
that does so with the weights of a graph's edges; a :class:`~rpel.rules.coordinatewise.PreAggregation` makes
m′ vectors of m, for a rule after it in a chain.

Invariants:

1. A rule acts on m vectors, row 0 the node's own: (…, m, d) → (…, d), or on many victims at once through a
   table (n, d) and an index (h, m), without ever building an (h, m, d) array.
2. A vector with a non-finite entry is one of the f hostile ones: the g such vectors are left out first, and
   the rule runs on the other m − g with f − g. κ does not grow by that. Rules without f just leave them out.
3. Inputs are never changed; the result has the kind (NumPy or torch) and dtype of the input.

Victims are grouped by how many vectors they have left, so that inside a group nothing is absent or
non-finite; large groups are cut so that their (h, m, m) distances stay small beside the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import empty, is_tensor, namespace, put
from rpel.backend.base import Backend, Operation
from rpel.randomness import Purpose, draws
from rpel.rules.arrays import (
    Array,
    as_table,
    check_index,
    delivered,
    host,
    kernels_for,
    stacked,
    to_kernels,
    writable,
)
from rpel.types import Floats, Integers

Kappa = Callable[[int, int], float]
"""(m, f) → the robustness coefficient."""


# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundContext:
    """Which round it is, and for which nodes: what rules that draw at random, or change over time, are told.

    Whoever drives the round knows: the simulator with its seed,
    a deployed peer with one of the operating system's.

    >>> RoundContext(round=3, rounds=10, seed=1, ids=np.array([4, 7, 9])).among([0, 2]).ids
    array([4, 9])
    """

    round: int = 0
    rounds: int = 1
    seed: int = 0
    ids: Integers | None = None  # (h,) the victims' node numbers; None: 0, 1, …

    def among(self, victims: Any) -> "RoundContext":
        """The same round for some of the victims."""
        return self if self.ids is None else replace(self, ids=self.ids[victims])


@dataclass(frozen=True)
class Group:
    """Some victims: their rows of the table, and who does the arithmetic. Where :meth:`Rule.run` gets one,
    they all aggregate equally many vectors, present and finite."""

    kernels: Backend
    table: Array
    index: Integers
    f: int
    victims: Integers
    context: RoundContext = RoundContext()
    # (n,) the table's rows without a non-finite entry, where that is known
    finite: NDArray[np.bool_] | None = None
    weights: Array | None = None  # (h, m) on a graph: of the gossip, self first
    hostile: Array | None = None  # (h, m) for the one rule that is told

    @property
    def nodes(self) -> Integers:
        """(h,) the victims' node numbers."""
        return self.victims if self.context.ids is None else self.context.ids[self.victims]

    def finite_rows(self) -> NDArray[np.bool_]:
        """(n + 1,) True for rows of the table without a non-finite entry, False at the end,
        where −1 looks it up."""
        return np.append(self.kernels.finite_rows(self.table) if self.finite is None else self.finite, False)

    def pieces(self, each: int, share: int) -> "Iterator[Group]":
        """Groups of so few victims, of ``each`` bytes,
        that they take 1/share of the table (one victim at least)."""
        size = int(self.table.shape[0]) * int(self.table.shape[1]) * int(self.table.dtype.itemsize)
        step = max(1, size // share // each if each else len(self.index))
        for start in range(0, len(self.index), step):
            piece = slice(start, start + step)
            yield replace(self, index=self.index[piece], victims=self.victims[piece])

    def draws(self, purpose: Purpose, size: int) -> Floats:
        """(h, size) uniform numbers, those of each victim from its own coordinates (seed, purpose, round,
        node)."""
        return draws(self.context.seed, purpose, self.context.round, self.nodes, size)

    @property
    def m(self) -> int:
        return int(self.index.shape[1])

    def pairwise(self) -> Floats:
        """(h, m, m) squared distances among each victim's vectors, on the host."""
        return np.asarray(self.kernels.squared_distances(self.table, self.index))

    def nearest(self, k: int) -> Integers:
        """(h, m, k) the columns nearest to each of a victim's vectors, itself included."""
        return np.asarray(self.kernels.nearest(self.kernels.squared_distances(self.table, self.index), k))

    def to(self, column: int) -> Floats:
        """(h, m) squared distances to the vector in the given column."""
        return self.to_origin(self.index[:, column].copy())

    def to_origin(self, origin: Any) -> Floats:
        """(h, m) squared distances to zero (None), a point, or a point or row for every victim."""
        return np.asarray(self.kernels.distances_to(self.table, self.index, origin))

    def norms(self) -> Floats:
        """(h, m) Euclidean norms."""
        return np.sqrt(self.to_origin(None))

    def combine(self, weights: Floats, out: Array | None = None) -> Array:
        """(h, d) Σ_j weights[i, j] · x_j."""
        return self.kernels.combine(self.table, self.index, weights, out=out)

    def coordinatewise(self, operation: Operation, f: int, out: Array | None = None) -> Array:
        """(h, d) the operation on every coordinate's values."""
        return self.kernels.coordinatewise(self.table, self.index, operation, f, out=out)


@dataclass(frozen=True)
class Stage:
    """What the three kinds share: a name, the number f of hostile vectors it is made for,
    and how many it needs."""

    name: str
    f: int | None = field(default=None, kw_only=True)

    draws: bool = field(default=False, kw_only=True)
    """True for those that draw at random: what comes out depends on the order of the vectors."""

    on_graph: ClassVar[bool] = False
    """True for rules that need the gossip weights of a graph's edges."""

    def __post_init__(self) -> None:
        f = self.f
        if f is not None and (isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0):
            raise ValueError(f"{self.name} needs a whole number f of hostile vectors, 0 or more, not {f!r}")

    @property
    def unsuited(self) -> str | None:
        """Why it cannot aggregate pulled answers; None where it can."""
        return None

    def least(self, f: int) -> int:
        """The smallest m for which f hostile vectors can be survived."""
        return 2 * f + 1

    def with_f(self, f: int) -> Self:
        """The same for another number of hostile vectors."""
        return replace(self, f=f)

    def check(self, m: int, f: int) -> None:
        """Raise when m vectors are too few for f hostile ones."""
        if m < max(1, self.least(f)):
            most = max((k for k in range(f) if self.least(k) <= m), default=0)
            raise ValueError(
                f"{self.name} with f={f} needs at least m={max(1, self.least(f))} vectors, not {m}"
                + (f": at most f={most} for m={m}" if m >= 1 else "")
            )

    def refuse_weights(self, weights: Array | None, hostile: Array | None) -> None:
        """ValueError for gossip weights, which only rules on graphs take."""
        if weights is not None or hostile is not None:
            raise ValueError(f"{self.name} takes no weights: only rules on graphs do")


@dataclass(frozen=True)
class Rule(Stage, ABC):
    """One vector of m: call it on (…, m, d), or :meth:`aggregate` many victims over one table.

    An author fills in :meth:`run`, and what else is not as here.

    >>> class Midpoint(Rule):
    ...     def run(self, group, out=None):
    ...         return group.combine(np.full(group.index.shape, 1 / group.m), out)
    >>> Midpoint("midpoint")(np.array([[1.0], [3.0]]))
    array([2.])
    """

    pivot: int | None = field(default=None, kw_only=True)
    """The column a rule trusts more than the others: it must be finite, and it is brought to the front."""

    context: RoundContext = field(default=RoundContext(), kw_only=True, compare=False)
    """The round in which it runs where none is passed; see :meth:`at`."""

    known_kappa: Kappa | None = field(default=None, kw_only=True)

    fuses: ClassVar[bool] = False
    """True for rules that take a mixing before them into their own kernel."""

    # --- what an author fills in ---

    @abstractmethod
    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) for victims whose m vectors are all present and finite."""

    def run_mixed(self, group: Group, before: "Mixing", out: Array | None = None) -> Array:
        """:meth:`run` on what a mixing makes of the vectors,
        some victims at a time (a tenth of the table)."""
        result, start = empty(len(group.index), group.table) if out is None else out, 0
        each = group.m * int(group.table.shape[1]) * int(group.table.dtype.itemsize)
        for part in group.pieces(each, 10):
            table = before.mixed(part)
            index = np.arange(len(table), dtype=np.int64).reshape(len(part.index), -1)
            self.run(
                replace(part, table=table, index=index, finite=None), out=result[start : start + len(index)]
            )
            start += len(index)
        return result

    def scratch(self, m: int) -> int:
        """Bytes that :meth:`run` needs for each victim beside its result: m × m distances."""
        return 8 * m * m

    def prepare(self, m: int, d: int, dtype: Any, victims: int, mixed: bool = False) -> None:
        """Have the machine code ready that m vectors of d entries, for so many victims in all rounds,
        are worth.

        mixed: the vectors come from a nearest-neighbour mixing before it.

        >>> from rpel import rule
        >>> rule("nnm+median", f=1).prepare(m=5, d=10, dtype=np.float32, victims=100)
        """
        return  # most rules need nothing beforehand

    def kappa(self, m: int) -> float | None:
        """The robustness coefficient for m vectors, or None where none is known."""
        return None if self.known_kappa is None or self.f is None else self.known_kappa(m, self.f)

    # --- what all rules share ---

    def at(self, *, round: int, rounds: int, seed: int, ids: Integers) -> Self:
        """The rule as it runs in one of ``rounds`` for the nodes ``ids`` (h,), whoever calls it then.

        The same as passing ``context=RoundContext(…)`` to :meth:`aggregate`; rules that neither draw nor
        change over time do not look at it.
        """
        return replace(self, context=RoundContext(round, rounds, seed, ids))

    def __call__(self, x: Array, *, weights: Array | None = None, hostile: Array | None = None) -> Array:
        """Aggregate x (…, m, d) to (…, d); rules on graphs take ``weights`` (…, m) or (m,), self first.

        A list of m arrays, tensors, lists of tensors or state_dicts comes back as one of its kind.
        """
        if isinstance(x, list | tuple):
            rows, restore = stacked(x, self.name)
            return restore(self(rows, weights=weights, hostile=hostile))
        x, back = to_kernels(x, self.name)
        table, index = as_table(x, self.name)
        *batch, m, d = x.shape
        shares, marks = (
            None if a is None else np.broadcast_to(host(a), (*batch, m)).reshape(index.shape)
            for a in (weights, hostile)
        )
        return back(self.aggregate(table, index, weights=shares, hostile=marks).reshape(*batch, d))

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
        """(h, d): one result for each row of ``index``, which names that victim's rows of ``table`` (n, d).

        Column 0 is the victim's own row; −1 at the tail is an absent answer. ``f`` overrides the rule's own.
        Rules on graphs take gossip ``weights`` (h, m), and the one that is told who is ``hostile`` takes
        marks (h, m). ``context`` says which round it is, and who the victims are. ``finite`` (n,) says which
        rows of the table hold nothing but finite numbers, where the caller has looked already.
        ``kernels`` is who does the arithmetic: by default the compiled kernels for arrays in main memory and
        the tensor kernels on other devices.
        """
        rule = self if f is None else self.with_f(f)
        given = kernels is not None and is_tensor(table)  # it takes them as they are
        table, back = (table, lambda result: result) if given else to_kernels(table, self.name)
        rows = check_index(self.name, table, index)
        group = Group(
            kernels or kernels_for(table),
            table,
            rows,
            rule.f or 0,
            victims=np.arange(len(rows)),
            context=self.context if context is None else context,
            finite=finite,
            weights=weights,
            hostile=hostile,
        )
        buffer = out if given else writable(out)
        return delivered(rule.compute(group, buffer), out, buffer, back)

    def unfit(self, present: NDArray[np.bool_], usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(h,) True where the rule cannot aggregate: too few present (h, m), too many of them not finite, or
        a pivot that is not."""
        short = present.sum(axis=1) < self.least(self.f or 0)
        lost = (present & ~usable).sum(axis=1) > (present.shape[1] if self.f is None else self.f)
        return np.asarray(self.blind(usable) | short | lost | ~usable.any(axis=1))

    def blind(self, usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(h,) True where the vector that the rule trusts is not finite."""
        if self.pivot is None:
            return np.zeros(len(usable), dtype=bool)
        return np.asarray(~usable[:, self.pivot : self.pivot + 1].any(axis=1))

    def compute(self, asked: Group, out: Array | None = None) -> Array:
        """:meth:`aggregate` after its checks, for victims of whose vectors some may be absent or not
        finite."""
        self.refuse_weights(asked.weights, asked.hostile)
        if self.pivot:
            index, own = asked.index, [self.pivot]
            asked = replace(
                asked, index=np.concatenate([index[:, own], np.delete(index, own, axis=1)], axis=1)
            )
        groups = list(self._groups(asked))
        if len(groups) == 1:
            return self._here(self.run(groups[0], out=out), groups[0], out)
        result = empty(len(asked.index), asked.table) if out is None else out
        for group in groups:
            _scatter(self, group, result)
        return result

    def _here(self, result: Array, group: Group, out: Array | None = None) -> Array:
        """Return the result of :meth:`run` as the kind of array that the table is."""
        if not is_tensor(group.table) or is_tensor(result):
            return result
        if out is None:
            return namespace(group.table).astype(group.kernels.array(result), group.table.dtype)
        out[:] = group.kernels.array(result)
        return out

    def _groups(self, asked: Group) -> Iterator[Group]:
        """Victims with equally many present and equally many non-finite vectors,
        their scratch 4 % of the table."""
        index, finite = asked.index, asked.finite_rows()
        everything = finite[:-1].all() and index.min(initial=0) >= 0
        if everything or finite[index].all():  # nothing to leave out, nothing to copy
            self.check(index.shape[1], asked.f)
            yield from asked.pieces(self.scratch(asked.m), 25)
            return
        present, usable = index >= 0, finite[index]
        left, hostile = usable.sum(axis=1), (present & ~usable).sum(axis=1)
        self._check_rows(present, usable, hostile)
        for m, g in np.unique(np.stack([left, hostile], axis=1), axis=0):
            victims = np.flatnonzero((left == m) & (hostile == g))
            f = max(0, (self.f or 0) - int(g))
            self.check(int(m), f)
            rows = index[victims][usable[victims]].reshape(len(victims), m)
            yield from replace(asked, index=rows, f=f, victims=victims).pieces(self.scratch(int(m)), 25)

    def _check_rows(self, present: NDArray[np.bool_], usable: NDArray[np.bool_], hostile: Integers) -> None:
        if self.f is not None and hostile.max(initial=0) > self.f:
            raise ValueError(
                f"{self.name} with f={self.f} cannot survive {hostile.max()} vectors with non-finite entries"
            )
        if self.f is not None:
            fewest = int(present.sum(axis=1).min(initial=present.shape[1]))
            self.check(fewest, self.f)
        if self.pivot is not None and not usable[:, 0].all():  # brought to the front
            raise ValueError(f"{self.name} needs a finite vector in column {self.pivot}, its centre")


class Mixing(Protocol):
    """What stands before a rule: it says of which old rows each new one is made."""

    @property
    def nearest(self) -> Callable[[int, int], int] | None:
        """(m, f) → k where every new row is the mean of the k nearest old ones."""

    def mix(self, group: Group) -> Integers | Floats:
        """(h, m′, k) integer columns whose mean is taken, or (h, m′, m) float weights."""

    def mixed(self, group: Group) -> Array:
        """(h·m′, d) the mixed rows of every victim, one after another."""


def _scatter(rule: Rule, group: Group, result: Array) -> None:
    """Write a group's results to its victims' rows; in place where those rows lie together."""
    first, count = int(group.victims[0]), len(group.victims)
    if int(group.victims[-1]) - first + 1 == count:
        out = result[first : first + count]
        rule._here(rule.run(group, out=out), group, out)
    else:
        put(result, group.victims, rule._here(rule.run(group), group))
