"""Rows that stand in no table: answers of earlier rounds, moved along with the node that remembers them.

Row r of :class:`~rpel.types.Moves` is past[base[r]] + (table[own[r]] − past[back[r]]) in the models'
precision, the difference first. An index names it as n + r, n being the rows of the table that it goes with.

:class:`Moving` is a backend that knows such rows: what a rule asks of it is computed on a few victims at a
time, whose rows are put into memory that stays below a tenth of the table (or a few megabytes), so there is
never an (h, m, d) array. What stands in the table alone goes to the backend inside as it is.

Invariant: a moved row is the same to the bit whoever makes it: any backend, or a real peer.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend.base import Backend
from rpel.types import Floats, Integers, Mix, Moves, Out

_SURELY = float(np.finfo(np.float32).max)  # sums below it are finite in any precision
_AT_LEAST = 4 << 20  # bytes of moved rows that may stand beside any table


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
        most = self.inside.largest(table) if moves.now is None else moves.now
        bound = past[moves.base] / 4 + most[moves.own] / 4 + past[moves.back] / 4
        finite = bound < _SURELY / 4
        doubtful = np.flatnonzero(~finite & np.isfinite(bound))
        if len(doubtful):
            finite[doubtful] = self.inside.finite_rows(self._made(table, len(table) + doubtful))
        return np.concatenate([np.isfinite(most), finite])

    def _pieces(self, table: Floats, index: Integers) -> Iterator[tuple[slice, Floats, Integers]]:
        """(victims, their rows, and the index into those), some victims at a time; −1 stays."""
        (h, m), d = index.shape, table.shape[1]
        each = max(1, m * d * table.itemsize)
        step = max(1, min(h, max(table.nbytes // 10, _AT_LEAST) // each))
        room = self.inside.empty(step * m, table)
        for first in range(0, h, step):
            part = index[first : first + step]
            rows = room[: part.size]
            self.inside.gathered(self.moves, table, np.maximum(part, 0).ravel(), rows)
            numbers = np.arange(part.size, dtype=np.int64).reshape(part.shape)
            yield slice(first, first + len(part)), rows, np.where(part < 0, -1, numbers)

    def _has(self, table: Floats, index: Integers) -> bool:
        return bool(index.size) and int(index.max()) >= len(table)

    def take(self, table: Floats, rows: Any) -> Floats:
        """(…, d) the rows of these numbers."""
        numbers = np.asarray(rows)
        if numbers.dtype.kind == "b" or not self._has(table, numbers):
            return self.inside.take(table, numbers)
        return self._made(table, numbers.ravel()).reshape(*numbers.shape, table.shape[1])

    def _made(self, table: Floats, rows: Integers) -> Floats:
        """(r, d) the rows of these numbers, in new memory."""
        return self.inside.gathered(self.moves, table, rows, self.inside.empty(len(rows), table))

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
            if isinstance(origin, np.ndarray) and origin.dtype.kind in "iu":
                point = self._made(table, origin[some])
            elif origin is not None and origin.ndim == 2:
                point = origin[some]
            result[some] = self.inside.distances_to(rows, local, point)
        return result

    def combine(self, table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
        if not self._has(table, index):
            return self.inside.combine(table, index, weights, out=out)
        result = self.inside.empty(len(index), table) if out is None else out
        for some, rows, local in self._pieces(table, index):
            self.inside.combine(rows, local, weights[some], out=result[some])
        return result

    def coordinatewise(
        self, table: Floats, index: Integers, operation: Any, f: int = 0, mix: Mix = None, out: Out = None
    ) -> Floats:
        if not self._has(table, index):
            return self.inside.coordinatewise(table, index, operation, f, mix=mix, out=out)
        result = self.inside.empty(len(index), table) if out is None else out
        for some, rows, local in self._pieces(table, index):
            made = mix if mix is None or isinstance(mix, int) else mix[some]
            self.inside.coordinatewise(rows, local, operation, f, mix=made, out=result[some])
        return result
