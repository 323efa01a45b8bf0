"""Rows that stand in no table: answers of earlier rounds, moved along with the node that remembers them.

Row r of :class:`~rpel.types.Moves` is past[base[r]] + (table[own[r]] − past[back[r]]) in the models' precision, the
difference first. An index names it as n + r, n being the rows of the table that it goes with.

:class:`Moving` is a backend that knows such rows: what a rule asks of it is computed on a few victims at a time, whose
rows are put into memory that stays below a tenth of the table (or a few megabytes), so there is never an (h, m, d)
array. What stands in the table alone goes to the backend inside as it is.

Invariant: a moved row is the same to the bit whoever makes it: the plain twin, the compiled one, or a real peer.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend import pool
from rpel.backend.base import Backend
from rpel.backend.cache import compiled
from rpel.types import Floats, Integers, Moves

_AT_LEAST = 4 << 20  # bytes of moved rows that may stand beside any table
_SMALL = 1 << 16  # values below which waking a thread costs more than it saves


def plain_moved(moves: Moves, table: Floats, rows: Integers) -> Floats:
    """(r, d) the rows of these numbers, the plain twin.

    >>> past, none = np.array([[1.0], [4.0]], np.float32), np.zeros(1)
    >>> at = Moves(past, np.array([0]), np.array([0]), np.array([1]), none)
    >>> plain_moved(at, np.array([[9.0]], np.float32), np.array([0]))
    array([[6.]], dtype=float32)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        step = table[moves.own[rows]] - moves.past[moves.back[rows]]
        return np.asarray(moves.past[moves.base[rows]] + step)


def plain_largest(table: Floats) -> Floats:
    """(n,) the largest absolute value of each row, ∞ where one is not finite; the plain twin.

    >>> plain_largest(np.array([[1.0, -3.0], [0.0, np.nan]], np.float32))
    array([ 3., inf])
    """
    most = np.abs(table).max(axis=1, initial=0.0).astype(np.float64)
    return np.where(np.isfinite(most), most, np.inf)


@compiled
def _largest(table: Floats, begin: int, end: int, out: Floats) -> None:
    for i in range(begin, end):
        most, odd = table.dtype.type(0), 0
        for c in range(table.shape[1]):
            value = abs(table[i, c])
            most = max(most, value)
            odd |= not (value < np.inf)
        out[i] = np.inf if odd else most


def largest(table: Floats) -> Floats:
    """(n,) the largest absolute value of each row, ∞ where one is not finite."""
    out = np.empty(len(table))
    pool.run(lambda begin, end: _largest(table, begin, end, out), len(table), small=table.size < _SMALL)
    return out


@compiled
def _gathered(
    table: Floats, past: Floats, own: Integers, base: Integers, back: Integers, rows: Integers, begin: int, end: int,
    out: Floats,
) -> None:  # fmt: skip
    """out[i] = the row of number rows[i], of the table or moved, for i = begin … end − 1."""
    n, d = table.shape
    for i in range(begin, end):
        r = rows[i] - n
        if r < 0:
            for c in range(d):
                out[i, c] = table[rows[i], c]
        else:
            x, z, y = table[own[r]], past[back[r]], past[base[r]]
            for c in range(d):
                out[i, c] = y[c] + (x[c] - z[c])


def gathered(moves: Moves, table: Floats, rows: Integers, out: Floats) -> Floats:
    """(r, d) the rows of these numbers, those of the table and moved ones, into ``out``."""
    numbers = np.ascontiguousarray(rows, np.int64)

    def work(begin: int, end: int) -> None:
        _gathered(table, moves.past, moves.own, moves.base, moves.back, numbers, begin, end, out)

    pool.run(work, len(numbers), small=out.size < _SMALL)
    return out


class Moving:
    """A backend over a table and the moved rows that go with it."""

    def __init__(self, inside: Backend, moves: Moves) -> None:
        self.inside, self.moves = inside, moves

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    @property
    def more(self) -> int:
        """How many rows there are beyond the table."""
        return len(self.moves.base)

    def finite_rows(self, table: Floats) -> NDArray[np.bool_]:
        """(n + r,) of the table's rows, then of the moved ones: a sum of finite numbers may overflow."""
        past, moves = self.moves.largest, self.moves
        most = largest(table) if moves.now is None else moves.now
        bound = past[moves.base] / 4 + most[moves.own] / 4 + past[moves.back] / 4
        finite = bound < np.finfo(table.dtype).max / 4
        doubtful = np.flatnonzero(~finite & np.isfinite(bound))
        if len(doubtful):
            finite[doubtful] = np.isfinite(plain_moved(moves, table, doubtful)).all(axis=1)
        return np.concatenate([np.isfinite(most), finite])

    def _pieces(self, table: Floats, index: Integers) -> Iterator[tuple[slice, Floats, Integers]]:
        """(victims, their rows, and the index into those), some victims at a time; −1 stays."""
        (h, m), d = index.shape, table.shape[1]
        each = max(1, m * d * table.itemsize)
        step = max(1, min(h, max(table.nbytes // 10, _AT_LEAST) // each))
        room = np.empty((step * m, d), table.dtype)
        for first in range(0, h, step):
            part = index[first : first + step]
            rows = room[: part.size]
            gathered(self.moves, table, np.maximum(part, 0).ravel(), rows)
            numbers = np.arange(part.size, dtype=np.int64).reshape(part.shape)
            yield slice(first, first + len(part)), rows, np.where(part < 0, -1, numbers)

    def _has(self, table: Floats, index: Integers) -> bool:
        return bool(index.size) and int(index.max()) >= len(table)

    def take(self, table: Floats, rows: Any) -> Floats:
        """(…, d) the rows of these numbers."""
        numbers = np.asarray(rows)
        if numbers.dtype.kind == "b" or not self._has(table, numbers):
            return np.asarray(table[numbers])
        found = gathered(self.moves, table, numbers.ravel(), np.empty((numbers.size, table.shape[1]), table.dtype))
        return found.reshape(*numbers.shape, table.shape[1])

    def top_direction(self, table: Floats, index: Integers, columns: Integers | None) -> Floats:
        inside: Any = self.inside
        found = [
            inside.top_direction(rows, local, None if columns is None else columns[some])
            for some, rows, local in self._pieces(table, index)
        ]
        return np.concatenate(found)

    def squared_distances(self, table: Floats, index: Integers) -> Floats:
        if not self._has(table, index):
            return self.inside.squared_distances(table, index)
        h, m = index.shape
        result = np.empty((h, m, m))
        for some, rows, local in self._pieces(table, index):
            result[some] = self.inside.squared_distances(rows, local)
        return result

    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
        if not self._has(table, index):
            return self.inside.distances_to(table, index, origin)
        result = np.empty(index.shape)
        for some, rows, local in self._pieces(table, index):
            point: Any = origin
            if origin is not None and origin.dtype.kind in "iu":
                point = np.empty((len(local), table.shape[1]), table.dtype)
                gathered(self.moves, table, origin[some], point)
            elif origin is not None and origin.ndim == 2:
                point = origin[some]
            result[some] = self.inside.distances_to(rows, local, point)
        return result

    def combine(self, table: Floats, index: Integers, weights: Floats, out: Floats | None = None) -> Floats:
        if not self._has(table, index):
            return self.inside.combine(table, index, weights, out=out)
        result = np.empty((len(index), table.shape[1]), table.dtype) if out is None else out
        for some, rows, local in self._pieces(table, index):
            self.inside.combine(rows, local, weights[some], out=result[some])
        return result

    def coordinatewise(
        self, table: Floats, index: Integers, operation: Any, f: int = 0, mix: Any = None, out: Floats | None = None
    ) -> Floats:
        if not self._has(table, index):
            return self.inside.coordinatewise(table, index, operation, f, mix=mix, out=out)
        result = np.empty((len(index), table.shape[1]), table.dtype) if out is None else out
        for some, rows, local in self._pieces(table, index):
            made = mix if mix is None or isinstance(mix, int) else mix[some]
            self.inside.coordinatewise(rows, local, operation, f, mix=made, out=result[some])
        return result
