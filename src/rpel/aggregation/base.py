"""What every rule shares: checks, arrays of any kind, absent and non-finite answers. An author writes only the idea.

Laws:

1. A rule acts on m vectors, row 0 the node's own: (…, m, d) → (…, d), or on many victims at once through a table
   (n, d) and an index (h, m), without ever building an (h, m, d) array.
2. A vector with a non-finite entry is one of the f hostile ones: the g such vectors are left out first, and the rule
   runs on the other m − g with f − g. κ does not grow by that. Rules without f just leave them out.
3. Inputs are never changed; the result has the kind (NumPy or torch) and dtype of the input.

Victims are grouped by how many vectors they have left, so that inside a group nothing is absent or non-finite; large
groups are cut so that their (h, m, m) distances stay small beside the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rpel.aggregation.arrays import (
    Array,
    Floats,
    Integers,
    as_table,
    check_index,
    deliver,
    empty_like,
    host,
    kernels_for,
    lend,
    nbytes,
    to_kernels,
)


@dataclass(frozen=True)
class Group:
    """Victims that aggregate equally many finite vectors: their rows of the table, and who does the arithmetic."""

    kernels: ModuleType
    table: Array
    index: Array
    f: int
    victims: Integers

    @property
    def m(self) -> int:
        return int(self.index.shape[1])

    def lend(self, array: Any) -> Array:
        """A small array where the table is."""
        return lend(array, self.table)

    @property
    def rows(self) -> Array:
        """The index, where the table is."""
        return self.lend(self.index)

    def pairwise(self) -> Floats:
        """(h, m, m) squared distances among each victim's vectors, on the host."""
        return np.asarray(host(self.kernels.squared_distances(self.table, self.rows)))

    def nearest(self, k: int) -> Integers:
        """(h, m, k) the columns nearest to each of a victim's vectors, itself included."""
        return np.asarray(host(self.kernels.nearest(self.kernels.squared_distances(self.table, self.rows), k)))

    def to(self, column: int) -> Floats:
        """(h, m) squared distances to the vector in the given column."""
        return self.to_origin(self.lend(self.index[:, column].copy()))

    def to_origin(self, origin: Any) -> Floats:
        """(h, m) squared distances to zero (None), a point, or a point or row for every victim."""
        return np.asarray(host(self.kernels.distances_to(self.table, self.rows, origin)))

    def norms(self) -> Floats:
        """(h, m) Euclidean norms."""
        return np.sqrt(self.to_origin(None))

    def combine(self, weights: Floats, out: Array | None = None) -> Array:
        """(h, d) Σ_j weights[i, j] · x_j."""
        return self.kernels.combine(self.table, self.rows, self.lend(weights), out=out)

    def coordinatewise(self, operation: str, f: int, mix: Any = None, out: Array | None = None) -> Array:
        """(h, d) the operation on every coordinate's values, after mixing."""
        lent = None if mix is None else self.lend(mix)
        return self.kernels.coordinatewise(self.table, self.rows, operation, f, mix=lent, out=out)


@dataclass(frozen=True)
class Rule(ABC):
    """An aggregation rule: call it on (…, m, d), or :meth:`aggregate` many victims over one table."""

    name: str
    f: int | None = field(default=None, kw_only=True)

    # --- the three holes an author fills ---

    @abstractmethod
    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) for victims whose m vectors are all present and finite."""

    def least(self, f: int) -> int:
        """The smallest m for which f hostile vectors can be survived."""
        return 2 * f + 1

    def kappa(self, m: int) -> float | None:
        """The robustness coefficient for m vectors, or None where none is known."""
        return None

    # --- what all rules share ---

    pivot: int | None = field(default=None, kw_only=True)
    """The column a rule trusts more than the others: it must be finite, and it is brought to the front."""

    def with_f(self, f: int) -> Self:
        """The same rule for another number of hostile vectors."""
        return replace(self, f=f)

    def __call__(self, x: Array) -> Array:
        """Aggregate x (…, m, d) to (…, d)."""
        x, back = to_kernels(x, self.name)
        table, index = as_table(x, self.name)
        return back(self._aggregate(table, index).reshape(*x.shape[:-2], x.shape[-1]))

    def aggregate(
        self,
        table: Array,
        index: Array,
        *,
        weights: Array | None = None,
        f: int | None = None,
        out: Array | None = None,
        kernels: ModuleType | None = None,
    ) -> Array:
        """(h, d): one result for each row of ``index``, which names that victim's rows of ``table`` (n, d).

        Column 0 is the victim's own row; −1 at the tail is an absent answer. ``f`` overrides the rule's own;
        ``weights`` are for rules on graphs. ``kernels`` is who does the arithmetic: by default the compiled kernels for
        arrays in main memory and the tensor kernels on other devices.
        """
        if weights is not None:
            raise ValueError(f"{self.name} takes no weights: only rules on graphs do")
        rule = self if f is None else self.with_f(f)
        table, back = to_kernels(table, self.name)
        return deliver(
            lambda place: rule._aggregate(table, check_index(self.name, table, index), out=place, kernels=kernels),
            out,
            back,
        )

    def _aggregate(
        self, table: Array, index: Integers, *, out: Array | None = None, kernels: ModuleType | None = None
    ) -> Array:
        kernels = kernels or kernels_for(table)
        if self.pivot:
            index = np.concatenate([index[:, [self.pivot]], np.delete(index, self.pivot, axis=1)], axis=1)
        groups = list(self._groups(kernels, table, index))
        if len(groups) == 1:
            return self.run(groups[0], out=out)
        result = empty_like(table, len(index)) if out is None else out
        for group in groups:
            _scatter(self.run, group, result)
        return result

    def _groups(self, kernels: ModuleType, table: Array, index: Integers) -> Iterator[Group]:
        """Victims with equally many present and equally many non-finite vectors, in pieces of bounded size."""
        finite = np.append(host(kernels.finite_rows(table)), False)
        if finite[:-1].all() and index.min(initial=0) >= 0:  # nothing to leave out, nothing to copy
            self.check(index.shape[1], self.f or 0)
            yield from _pieces(Group(kernels, table, index, self.f or 0, np.arange(len(index))))
            return
        present, usable = index >= 0, finite[index]  # −1 looks up the False at the end
        left, hostile = usable.sum(axis=1), (present & ~usable).sum(axis=1)
        self._check_rows(present, usable, hostile)
        for m, g in np.unique(np.stack([left, hostile], axis=1), axis=0):
            victims = np.flatnonzero((left == m) & (hostile == g))
            f = max(0, (self.f or 0) - int(g))
            self.check(int(m), f)
            rows = index[victims][usable[victims]].reshape(len(victims), m)
            yield from _pieces(Group(kernels, table, rows, f, victims))

    def _check_rows(self, present: NDArray[np.bool_], usable: NDArray[np.bool_], hostile: Integers) -> None:
        if self.f is not None and hostile.max(initial=0) > self.f:
            raise ValueError(
                f"{self.name} with f={self.f} cannot survive {hostile.max()} vectors with non-finite entries"
            )
        if self.f is not None:
            fewest = int(present.sum(axis=1).min(initial=present.shape[1]))
            self.check(fewest, self.f)
        if self.pivot is not None and not usable[:, 0].all():
            raise ValueError(f"{self.name} needs a finite vector in column {self.pivot}, its centre")

    def check(self, m: int, f: int) -> None:
        """Raise when m vectors are too few for f hostile ones."""
        if m < max(1, self.least(f)):
            most = max((k for k in range(f) if self.least(k) <= m), default=0)
            raise ValueError(
                f"{self.name} with f={f} needs at least m={max(1, self.least(f))} vectors, not {m}"
                + (f": at most f={most} for m={m}" if m >= 1 else "")
            )


def _pieces(group: Group) -> Iterator[Group]:
    """The group cut so that the distances of a piece take at most 4 % of the table (one victim at the least)."""
    step = max(1, nbytes(group.table) // 25 // (8 * group.m**2))
    for start in range(0, len(group.index), step):
        piece = slice(start, start + step)
        yield replace(group, index=group.index[piece], victims=group.victims[piece])


def _scatter(run: Callable[..., Array], group: Group, result: Array) -> None:
    """Write a group's results to its victims' rows; in place where those rows lie together."""
    first, count = int(group.victims[0]), len(group.victims)
    if int(group.victims[-1]) - first + 1 == count:
        run(group, out=result[first : first + count])
    else:
        result[group.victims] = run(group)
