"""Trimmed mean, median and meamed of every coordinate, for all victims, with the mixing before them.

Invariants:
- every column is computed alone, so neither threads nor blocks change a bit;
- mixed rows stay sums (all of k rows) until the one division at the end: order is the same, and a mean of k
  equal rows is that row; sums run over kept rows only, one by one;
- the generic kernel (any m) and the specialised one (straight-line code for an m, f and operation) do the
  same arithmetic in the same order: same network, same ranks, same division, so the same bits.

Columns outermost, victims inside: a block of the table stays in the second cache while every victim uses it;
the values of one victim, a stride of columns, stay in the first. float32 tables are mixed and trimmed in
float32 (weights in float64).
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.extending import overload
from numpy.typing import NDArray

from rpel.backend import distances, pool
from rpel.backend.base import OPERATIONS, Operation
from rpel.backend.cache import announce, compiled, folder, inlined
from rpel.backend.distances import aligned
from rpel.backend.sorting import network, operate
from rpel.backend.vectors import BLOCK, add_rows, copy, weigh_rows
from rpel.types import Floats, Integers

STRIDE = 128  # columns of one victim at a time: 31 rows and as many sums of them stay in the first cache
_FEW, _FEW_STRIDE = 16, 256  # so few values per coordinate leave room there for more columns
LARGE = 5e7  # values (victims · m · d), in one call or in many, from which a specialised kernel is compiled
_LONGEST = 64  # values per coordinate up to which straight-line code is made
_SMALL = 1 << 16  # values below which waking a thread costs more than it saves
_SECOND_CACHE = 512 << 10  # bytes of a victim's rows up to which they are still there after their distances
_TOGETHER = 12  # victims whose distances, neighbours and coordinates are computed one after the other
ROWS, SUMS, WEIGHTS = 0, 1, 2  # what the values are: the rows, sums of k rows, weighted sums

Int32 = NDArray[np.int32]
Kernel = Callable[..., None]


Mix = NDArray[Any] | None
"""How a victim's m′ values are made of its m rows: (h, m′, k) the rows that are summed, or (h, m′, m)
weights."""


class Scratch(NamedTuple):
    """What a thread needs for one victim: its rows and values, `stride` columns each, a result,
    rows of a sum."""

    x: Floats
    y: Floats
    z: Floats
    starts: Integers
    factors: Floats
    stride: int


@inlined
def unit_bounds(unit: int, cut: pool.Units, h: int, d: int) -> Any:
    """(first and last column, first and last victim), the last ones exclusive, of a unit of an (h, d)
    result."""
    parts = (h + cut.chunk - 1) // cut.chunk
    left, first = unit // parts * cut.columns, unit % parts * cut.chunk
    return left, min(d, left + cut.columns), first, min(h, first + cut.chunk)


@inlined
def _scratch(table: Floats, rows: int, m: int, stride: int) -> Scratch:
    room = aligned((rows + m + 1) * stride, table)
    x, y, z = room[: rows * stride], room[rows * stride : (rows + m) * stride], room[(rows + m) * stride :]
    return Scratch(x, y, z, np.empty(rows, np.int64), np.empty(rows), stride)


@inlined
def _gather(
    table: Floats, rows: Integers, start: int, count: int, padded: int, stride: int, x: Floats
) -> None:
    """x[j] = the columns start … start + count − 1 of a victim's row j, zeros up to `padded`."""
    for j in range(len(rows)):
        copy(table, rows[j] * table.shape[1] + start, count, x, j * stride)
        for c in range(count, padded):
            x[j * stride + c] = 0


@inlined
def _weigh(weights: Floats, padded: int, s: Scratch) -> None:
    """y[a] = Σ_j weights[a, j] · x[j] in float64; a zero weight is skipped, whatever its row holds."""
    for a in range(weights.shape[0]):
        listed = 0
        for j in range(weights.shape[1]):
            if weights[a, j] != 0.0:
                s.starts[listed] = j * s.stride
                s.factors[listed] = weights[a, j]
                listed += 1
        weigh_rows(s.x, s.starts, s.factors, listed, 0, padded, s.y, a * s.stride)


@inlined
def _exchange(y: Floats, low: int, high: int, padded: int) -> None:
    """Column by column, the lower value to row `low` of y and the higher to row `high`."""
    lower, higher = y[low * STRIDE : low * STRIDE + padded], y[high * STRIDE : high * STRIDE + padded]
    for c in range(padded):
        a, b = lower[c], higher[c]
        below = a < b  # one comparison decides both, so that no value is lost or doubled
        lower[c] = a if below else b
        higher[c] = b if below else a


@inlined
def _sum_ranks(y: Floats, low: int, high: int, padded: int, divisor: Any, z: Floats) -> None:
    """z = Σ of the ranks low … high − 1, ascending, over the divisor."""
    for c in range(padded):
        z[c] = 0
    for rank in range(low, high):
        at = rank * STRIDE
        for c in range(padded):
            z[c] += y[at + c]
    for c in range(padded):
        z[c] /= divisor


@inlined
def _sum_near_median(y: Floats, m: int, f: int, padded: int, divisor: Any, z: Floats) -> None:
    """z = Σ of the m − f values nearest to the median, ascending, NaN at a tie;
    as `sorting._near_median` has it."""
    kept = m - f
    two = y.dtype.type(2)
    for c in range(padded):
        median = (y[(m - 1) // 2 * STRIDE + c] + y[m // 2 * STRIDE + c]) / two
        z[c], tied = 0, False
        for rank in range(m):
            value = y[rank * STRIDE + c]
            keep = True
            if rank < f:
                above = y[(rank + kept) * STRIDE + c] - median
                keep = not (above < median - value)
                tied |= above == median - value and above > 0
            if keep and rank >= kept:
                keep = value - median < median - y[(rank - kept) * STRIDE + c]
            z[c] += value if keep else y.dtype.type(0)
        z[c] = np.nan if tied else z[c] / divisor


@inlined
def _any_tie(z: Floats, count: int) -> bool:
    """Whether a value is NaN for a tie at the median."""
    tied = False
    for c in range(count):
        tied |= np.isnan(z[c])
    return tied


@inlined
def _break_ties(s: Scratch, count: int, f: int, divisor: Any) -> None:
    """Where z is NaN for a tie: the mean of the nearest by (distance, row), compared in float64;
    y are the values."""
    m = len(s.y) // s.stride
    for c in range(count):
        if np.isnan(s.z[c]):
            s.z[c] = _nearest_by_row(s.y, s.stride, c, m, m - f) / divisor


@inlined
def _nearest_by_row(y: Floats, stride: int, c: int, m: int, kept: int) -> Any:
    """Σ of the kept values of column c nearest to its median, ties to the lower row."""
    values = np.empty(m)
    for j in range(m):
        values[j] = y[j * stride + c]
    low, high = 0.0, 0.0
    for j in range(m):
        place = _place(values, j)
        low = values[j] if place == (m - 1) // 2 else low
        high = values[j] if place == m // 2 else high
    median = (low + high) / 2
    apart = np.abs(values - median)
    total = y.dtype.type(0)
    for j in range(m):
        total += y[j * stride + c] if _place(apart, j) < kept else y.dtype.type(0)
    return total


@inlined
def _place(values: Floats, j: int) -> int:
    """How many values come before the j-th in order of (value, row)."""
    before = 0
    for q in range(len(values)):
        before += values[q] < values[j] or (values[q] == values[j] and q < j)
    return before


def _values(table: Floats, rows: Integers, i: int, mix: Mix, start: int, count: int, s: Scratch) -> int:
    """Fill y with the values of victim i, `stride` apart: its rows, or what `mix` makes of them; return the
    padded number of columns. Inside kernels only, where the type of `mix` decides:
    nothing of the other kinds is compiled."""
    raise NotImplementedError


@overload(_values, jit_options={"nogil": True, "error_model": "numpy"})
def _values_by_type(table: Any, rows: Any, i: Any, mix: Any, start: Any, count: Any, s: Any) -> Kernel:
    def unmixed(table: Any, rows: Any, i: Any, mix: Any, start: Any, count: Any, s: Any) -> Any:
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        _gather(table, rows, start, count, padded, s.stride, s.y)
        return padded

    def sums(table: Any, rows: Any, i: Any, mix: Any, start: Any, count: Any, s: Any) -> Any:
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        _gather(table, rows, start, count, padded, s.stride, s.x)
        _, m, k = mix.shape
        for a in range(m):
            add_rows(s.x, mix, (i * m + a) * k, k, s.stride, padded, s.y, a * s.stride)
        return padded

    def weighed(table: Any, rows: Any, i: Any, mix: Any, start: Any, count: Any, s: Any) -> Any:
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        _gather(table, rows, start, count, padded, s.stride, s.x)
        _weigh(mix[i], padded, s)
        return padded

    if isinstance(mix, numba.types.NoneType):
        return unmixed
    return sums if isinstance(mix.dtype, numba.types.Integer) else weighed


@cache
def _generic(operation: int) -> Kernel:
    """The kernel of an operation for any m: the network is walked comparator by comparator over the values in
    cache.

    The operation is a literal inside: what another one needs is not compiled.
    """

    def kernel(
        comparators: Int32, m: int, f: int,
        table: Floats, index: Integers, mix: Mix, divisor: Any, cut: pool.Units, begin: int, end: int,
        out: Floats,
    ) -> None:  # fmt: skip
        h, d = out.shape
        s = _scratch(table, index.shape[1], m, STRIDE)
        for unit in range(begin, end):
            left, right, first, last = unit_bounds(unit, cut, h, d)
            for i in range(first, last):
                for start in range(left, right, STRIDE):
                    count = min(STRIDE, d - start)
                    padded = _values(table, index[i], i, mix, start, count, s)
                    for p in range(len(comparators)):
                        _exchange(s.y, comparators[p, 0], comparators[p, 1], padded)
                    if operation == 0:
                        _sum_ranks(s.y, f, m - f, padded, divisor, s.z)
                    elif operation == 1:
                        _sum_ranks(s.y, (m - 1) // 2, m // 2 + 1, padded, divisor, s.z)
                    else:
                        _sum_near_median(s.y, m, f, padded, divisor, s.z)
                        if _any_tie(s.z, count):  # once more: sorted values have lost their rows
                            _values(table, index[i], i, mix, start, count, s)
                            _break_ties(s, count, f, divisor)
                    copy(s.z, 0, count, out, i * d + start)

    return compiled(kernel)


@cache
def _specialised(m: int, f: int, operation: int) -> Kernel:
    """The kernel of one (m, f, operation): literals inside, so `operate` becomes straight-line code."""
    stride = _FEW_STRIDE if m <= _FEW else STRIDE

    def kernel(
        table: Floats,
        index: Integers,
        mix: Mix,
        divisor: Any,
        cut: pool.Units,
        begin: int,
        end: int,
        out: Floats,
    ) -> None:
        h, d = out.shape
        s = _scratch(table, index.shape[1], m, stride)
        for unit in range(begin, end):
            left, right, first, last = unit_bounds(unit, cut, h, d)
            for i in range(first, last):
                for start in range(left, right, stride):
                    count = min(stride, right - start)  # a block need not be whole strides
                    padded = _values(table, index[i], i, mix, start, count, s)
                    operate(s.y, stride, padded, divisor, s.z, m, f, operation)
                    if operation == 2:  # noqa: SIM102  (alone: a literal, so that numba drops what follows)
                        if _any_tie(s.z, count):
                            _break_ties(s, count, f, divisor)
                    copy(s.z, 0, count, out, i * d + start)

    return compiled(kernel)


def prepare(m: int, f: int, operation: Operation, dtype: Any, kind: int = ROWS) -> None:
    """Compile, or load from disk, the kernel for m values of this kind now.

    >>> prepare(3, 1, "median", np.float32)
    """
    f = 0 if operation == "median" else f
    key = (m, f, operation, np.dtype(dtype).name, kind)
    special = m <= _LONGEST
    if special and not _mark(*key).exists():
        announce()
    mix = (None, np.zeros((1, m, 1), np.int32), np.zeros((1, m, m)))[kind]
    table, index = np.zeros((1, 1), dtype), np.zeros((1, m), np.int64)
    coordinatewise(table, index, operation, f, mix, np.empty((1, 1), dtype), specialise=special)
    if special:
        _mark(*key).touch()
        _ready.add(key)


Key = tuple[int, int, Operation, str, int]
_ready: set[Key] = set()
# values that this process has computed without a specialised kernel
_work: dict[Key, float] = defaultdict(float)


def _mark(m: int, f: int, operation: str, dtype: str, kind: int) -> Path:
    """The file that says: this kernel is stored in the folder beside it."""
    return folder() / f"{operation}-{m}-{f}-{dtype}-{('rows', 'sums', 'weights')[kind]}.ready"


def _is_ready(key: Key, values: float) -> bool:
    """Whether the specialised kernel is at hand; it is compiled when the work, this call's and all before,
    is large."""
    if key in _ready:
        return True
    _work[key] += values
    if key[0] > _LONGEST or not (_work[key] >= LARGE or _mark(*key).exists()):
        return False
    prepare(*key)
    return True


def _kernel(m: int, f: int, operation: Operation, specialise: bool) -> Kernel:
    """kernel(table, index, mix, divisor, cut, begin, end, out), generic or specialised."""
    code = OPERATIONS.index(operation)
    if specialise:
        return _specialised(m, f, code)
    comparators = np.array(network(m, f, operation), np.int32).reshape(-1, 2)
    return partial(_generic(code), comparators, m, f)


def _divisor(m: int, f: int, operation: Operation, k: int) -> int:
    """Number of table values in the final sum."""
    kept = {"trimmed_mean": m - 2 * f, "median": 2 - m % 2, "meamed": m - f}[operation]
    return kept * k


def _kind(mix: Mix) -> int:
    return ROWS if mix is None else WEIGHTS if mix.dtype.kind == "f" else SUMS


def coordinatewise(
    table: Floats,
    index: Integers,
    operation: Operation,
    f: int,
    mix: Mix,
    out: Floats,
    specialise: bool | None = None,
) -> Floats:
    """(h, d) the operation per coordinate; `specialise` forces or forbids straight-line code (None: by work).

    >>> table = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> coordinatewise(table, np.array([[0, 1, 2, 3]]), "trimmed_mean", 1, None, np.empty((1, 1)))
    array([[1.5]])
    """
    f = 0 if operation == "median" else f
    h, d = out.shape
    m, k = (
        (index.shape[1], 1) if mix is None else (mix.shape[1], mix.shape[2] if mix.dtype.kind in "iu" else 1)
    )
    values = float(h) * m * d
    if specialise is None:
        specialise = _is_ready((m, f, operation, table.dtype.name, _kind(mix)), values)
    kernel, cut = _kernel(m, f, operation, specialise), pool.cut(len(table), h, d, table.itemsize)
    divisor = table.dtype.type(_divisor(m, f, operation, k))

    def work(begin: int, end: int) -> None:
        kernel(table, index, mix, divisor, cut, begin, end, out)

    pool.run(work, cut.total, small=values < _SMALL)
    return out


def nearest_mixed(
    table: Floats, index: Integers, operation: Operation, f: int, k: int, out: Floats
) -> Floats:
    """(h, d) the operation after every row became the mean of the k nearest among its victim's rows.

    Small models go victim by victim, from distances to result while the rows are in the cache; for large ones
    the distances of many victims come first. Memory beside the result stays below a tenth of the table either
    way.

    >>> nearest_mixed(np.array([[0.0], [1.0], [9.0]]), np.array([[0, 1, 2]]), "median", 0, 2,
    ...     np.empty((1, 1)))
    array([[0.5]])
    """
    f = 0 if operation == "median" else f
    (h, m), d = index.shape, table.shape[1]
    specialise = _is_ready((m, f, operation, table.dtype.name, SUMS), float(h) * m * d)
    if m * d * table.itemsize <= _SECOND_CACHE and h > _TOGETHER and not distances.are_shared(table, index):
        return _victim_by_victim(table, index, operation, f, k, out, specialise)
    step = max(1, table.nbytes // 25 // (8 * m * m))
    for first in range(0, h, step):
        part = index[first : first + step]
        kept = distances.neighbours(table, part, k)
        coordinatewise(table, part, operation, f, kept, out[first : first + step], specialise)
    return out


def _victim_by_victim(
    table: Floats, index: Integers, operation: Operation, f: int, k: int, out: Floats, specialise: bool
) -> Floats:
    (h, m), d = index.shape, table.shape[1]
    kernel = _kernel(m, f, operation, specialise)
    divisor = table.dtype.type(_divisor(m, f, operation, k))

    def work(begin: int, end: int) -> None:
        kept = np.empty((_TOGETHER, m, k), np.int32)
        for first in range(begin, end, _TOGETHER):
            part = index[first : min(end, first + _TOGETHER)]
            distances.neighbours_of(table, part, k, kept)
            cut = pool.Units(d, len(part), 1)
            kernel(table, part, kept, divisor, cut, 0, 1, out[first : first + len(part)])

    pool.run(work, h, small=float(h) * m * d < _SMALL)
    return out
