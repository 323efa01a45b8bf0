"""Trimmed mean, median and meamed of every coordinate, for all victims, with the mixing before them.

Invariants:
- every column is computed alone, so neither threads nor blocks change a bit;
- mixed rows stay sums (all of k rows) until the one division at the end: order is the same, and a mean of k equal
  rows is that row; sums run over kept rows only, one by one;
- the generic kernel (any m) and the specialised one (straight-line code for an m, f and operation) do the same
  arithmetic in the same order: same network, same ranks, same division, so the same bits.

Columns outermost, victims inside: a block of the table stays in the second cache while every victim uses it; the
values of one victim, `STRIDE` columns of them, stay in the first. float32 tables are mixed and trimmed in float32
(weights in float64).
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import distances, pool
from rpel.kernels.cache import announce, compiled, folder
from rpel.kernels.plain import OPERATIONS, Operation
from rpel.kernels.sorting import nearest, network, operate
from rpel.kernels.vectors import BLOCK, add_rows, copy, weigh_rows
from rpel.types import Floats, Integers

STRIDE = 128  # columns of one victim at a time
LARGE = 5e7  # values (victims · m · d), in one call or in many, from which a specialised kernel is compiled
_LONGEST = 64  # values per coordinate up to which straight-line code is made
_SMALL = 1 << 16  # values below which waking a thread costs more than it saves
_SECOND_CACHE = 512 << 10  # bytes of a victim's rows up to which they are still there after their distances
_TOGETHER = 12  # victims whose distances, neighbours and coordinates are computed one after the other
_ROWS, _SUMS, _WEIGHTS = 0, 1, 2  # what the values are: the rows, sums of k rows, weighted sums

Int32 = NDArray[np.int32]
Kernel = Callable[..., None]


@compiled
def _gather(table: Floats, d: int, index: Integers, i: int, start: int, count: int, padded: int, x: Floats) -> None:
    """x[j] = the columns start … start + count − 1 of victim i's row j, zeros up to `padded`. The table is flat."""
    for j in range(index.shape[1]):
        copy(table, index[i, j] * d + start, count, x, j * STRIDE)
        for c in range(count, padded):
            x[j * STRIDE + c] = 0


@compiled
def _weigh(x: Floats, weights: Floats, i: int, padded: int, starts: Integers, factors: Floats, y: Floats) -> None:
    """y[a] = Σ_j weights[i, a, j] · x[j] in float64; a zero weight is skipped, whatever its row holds."""
    for a in range(weights.shape[1]):
        listed = 0
        for j in range(weights.shape[2]):
            if weights[i, a, j] != 0.0:
                starts[listed] = j * STRIDE
                factors[listed] = weights[i, a, j]
                listed += 1
        weigh_rows(x, starts, factors, listed, 0, padded, y, a * STRIDE)


@compiled
def _values(
    table: Floats,
    d: int,
    index: Integers,
    i: int,
    kind: int,
    mix: Int32,
    weights: Floats,
    start: int,
    count: int,
    x: Floats,
    starts: Integers,
    factors: Floats,
    y: Floats,
) -> int:
    """Fill y with victim i's values, `STRIDE` apart; return the padded number of columns."""
    padded = (count + BLOCK - 1) // BLOCK * BLOCK
    if kind == _ROWS:
        _gather(table, d, index, i, start, count, padded, y)
        return padded
    _gather(table, d, index, i, start, count, padded, x)
    if kind == _WEIGHTS:
        _weigh(x, weights, i, padded, starts, factors, y)
        return padded
    _, m, k = mix.shape
    for a in range(m):
        add_rows(x, mix, (i * m + a) * k, k, STRIDE, padded, y, a * STRIDE)
    return padded


@compiled
def _exchange(y: Floats, low: int, high: int, padded: int) -> None:
    """Column by column, the lower value to row `low` of y and the higher to row `high`."""
    lower, higher = y[low * STRIDE : low * STRIDE + padded], y[high * STRIDE : high * STRIDE + padded]
    for c in range(padded):
        a, b = lower[c], higher[c]
        below = a < b  # one comparison decides both, so that no value is lost or doubled
        lower[c] = a if below else b
        higher[c] = b if below else a


@compiled
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


@compiled
def _sum_near_median(y: Floats, m: int, f: int, padded: int, divisor: Any, z: Floats) -> None:
    """z = Σ of the m − f values nearest to the median, ascending; see `sorting._near_median` for who is kept."""
    kept = m - f
    two = y.dtype.type(2)
    for c in range(padded):
        median = (y[(m - 1) // 2 * STRIDE + c] + y[m // 2 * STRIDE + c]) / two
        z[c] = 0
        for rank in range(m):
            value = y[rank * STRIDE + c]
            keep = True
            if rank < f:
                keep = not (y[(rank + kept) * STRIDE + c] - median < median - value)
            if keep and rank >= kept:
                keep = value - median < median - y[(rank - kept) * STRIDE + c]
            z[c] += value if keep else y.dtype.type(0)
        z[c] /= divisor


@compiled
def _generic(
    comparators: Int32,
    m: int,
    f: int,
    operation: int,
    table: Floats,
    index: Integers,
    kind: int,
    mix: Int32,
    weights: Floats,
    divisor: Any,
    columns: int,
    chunk: int,
    begin: int,
    end: int,
    out: Floats,
) -> None:
    """Units begin … end − 1 for any m: the network is walked comparator by comparator over the values in cache."""
    h, rows = index.shape
    d = len(out) // h
    parts = (h + chunk - 1) // chunk
    x, y = np.empty(rows * STRIDE, table.dtype), np.empty(m * STRIDE, table.dtype)
    z, starts, factors = np.empty(STRIDE, table.dtype), np.empty(rows, np.int64), np.empty(rows)
    for unit in range(begin, end):
        left = unit // parts * columns
        first = unit % parts * chunk
        for i in range(first, min(h, first + chunk)):
            for start in range(left, min(d, left + columns), STRIDE):
                count = min(STRIDE, d - start)
                padded = _values(table, d, index, i, kind, mix, weights, start, count, x, starts, factors, y)
                for p in range(len(comparators)):
                    _exchange(y, comparators[p, 0], comparators[p, 1], padded)
                if operation == 2:
                    _sum_near_median(y, m, f, padded, divisor, z)
                elif operation == 1:
                    _sum_ranks(y, (m - 1) // 2, m // 2 + 1, padded, divisor, z)
                else:
                    _sum_ranks(y, f, m - f, padded, divisor, z)
                copy(z, 0, count, out, i * d + start)


@cache
def _specialised(m: int, f: int, operation: int) -> Kernel:
    """The kernel of one (m, f, operation): the three are literals inside, so `operate` becomes straight-line code."""

    def kernel(
        table: Floats,
        index: Integers,
        kind: int,
        mix: Int32,
        weights: Floats,
        divisor: Any,
        columns: int,
        chunk: int,
        begin: int,
        end: int,
        out: Floats,
    ) -> None:
        h, rows = index.shape
        d = len(out) // h
        parts = (h + chunk - 1) // chunk
        x, y = np.empty(rows * STRIDE, table.dtype), np.empty(m * STRIDE, table.dtype)
        z, starts, factors = np.empty(STRIDE, table.dtype), np.empty(rows, np.int64), np.empty(rows)
        for unit in range(begin, end):
            left = unit // parts * columns
            first = unit % parts * chunk
            for i in range(first, min(h, first + chunk)):
                for start in range(left, min(d, left + columns), STRIDE):
                    count = min(STRIDE, d - start)
                    padded = _values(table, d, index, i, kind, mix, weights, start, count, x, starts, factors, y)
                    operate(y, STRIDE, padded, divisor, z, m, f, operation)
                    copy(z, 0, count, out, i * d + start)

    return compiled(kernel)


def prepare(m: int, f: int, operation: Operation, dtype: Any) -> None:
    """Compile, or load from disk, the kernel for m values now; it serves mixed and unmixed values alike.

    >>> prepare(3, 1, "median", np.float32)
    """
    f = 0 if operation == "median" else f
    key = (m, f, operation, np.dtype(dtype).name)
    special = m <= _LONGEST
    if special and not _mark(*key).exists():
        announce()
    table, index, mix = np.zeros((1, 1), dtype), np.zeros((1, 1), np.int64), np.zeros((1, m, 1), np.int32)
    coordinatewise(table, index, operation, f, mix, np.empty((1, 1), dtype), specialise=special)
    if special:
        _mark(*key).touch()
        _ready.add(key)


Key = tuple[int, int, Operation, str]
_ready: set[Key] = set()
_work: dict[Key, float] = defaultdict(float)  # values that this process has computed without a specialised kernel


def _mark(m: int, f: int, operation: str, dtype: str) -> Path:
    """The file that says: this kernel is stored in the folder beside it."""
    return folder() / f"{operation}-{m}-{f}-{dtype}.ready"


def _is_ready(key: Key, values: float) -> bool:
    """Whether the specialised kernel is at hand; it is compiled when the work, this call's and all before, is large."""
    if key in _ready:
        return True
    _work[key] += values
    if key[0] > _LONGEST or not (_work[key] >= LARGE or _mark(*key).exists()):
        return False
    prepare(*key)
    return True


def _kernel(m: int, f: int, operation: Operation, specialise: bool) -> Kernel:
    """kernel(table, index, kind, mix, weights, divisor, columns, chunk, begin, end, out), generic or specialised."""
    code = OPERATIONS.index(operation)
    if specialise:
        return _specialised(m, f, code)
    comparators = np.array(network(m, f, operation), np.int32).reshape(-1, 2)
    return partial(_generic, comparators, m, f, code)


def _divisor(m: int, f: int, operation: Operation, k: int) -> int:
    """Number of table values in the final sum."""
    kept = {"trimmed_mean": m - 2 * f, "median": 2 - m % 2, "meamed": m - f}[operation]
    return kept * k


def coordinatewise(
    table: Floats,
    index: Integers,
    operation: Operation,
    f: int,
    mix: NDArray[Any] | None,
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
    m, k = (index.shape[1], 1) if mix is None else (mix.shape[1], mix.shape[2] if mix.dtype.kind in "iu" else 1)
    picks, weights = np.zeros((h, 1, 1), np.int32), np.zeros((h, 1, 1))
    kind = _ROWS
    if mix is not None:
        kind = _WEIGHTS if mix.dtype.kind == "f" else _SUMS
        picks, weights = (picks, mix) if kind == _WEIGHTS else (mix, weights)
    columns, chunk, units = pool.cut(len(table), h, d, table.itemsize)
    divisor = table.dtype.type(_divisor(m, f, operation, k))
    values = float(h) * m * d
    if specialise is None:
        specialise = _is_ready((m, f, operation, table.dtype.name), values)
    kernel, rows, flat = _kernel(m, f, operation, specialise), table.reshape(-1), out.reshape(-1)

    def work(begin: int, end: int) -> None:
        kernel(rows, index, kind, picks, weights, divisor, columns, chunk, begin, end, flat)

    pool.run(work, units, small=values < _SMALL)
    return out


def nearest_mixed(table: Floats, index: Integers, operation: Operation, f: int, k: int, out: Floats) -> Floats:
    """(h, d) the operation after every row became the mean of the k nearest among its victim's rows.

    Small models go victim by victim, from distances to result while the rows are in the cache; for large ones the
    distances of many victims come first. Memory beside the result stays below a tenth of the table either way.

    >>> nearest_mixed(np.array([[0.0], [1.0], [9.0]]), np.array([[0, 1, 2]]), "median", 0, 2, np.empty((1, 1)))
    array([[0.5]])
    """
    f = 0 if operation == "median" else f
    (h, m), d = index.shape, table.shape[1]
    specialise = _is_ready((m, f, operation, table.dtype.name), float(h) * m * d)
    if m * d * table.itemsize <= _SECOND_CACHE and h > _TOGETHER and not distances.are_shared(table, index):
        return _victim_by_victim(table, index, operation, f, k, out, specialise)
    step = max(1, table.nbytes // 25 // (8 * m * m))
    for first in range(0, h, step):
        part = index[first : first + step]
        kept = nearest(distances.among(table, part), k)
        coordinatewise(table, part, operation, f, kept, out[first : first + step], specialise)
    return out


def _victim_by_victim(
    table: Floats, index: Integers, operation: Operation, f: int, k: int, out: Floats, specialise: bool
) -> Floats:
    (h, m), d = index.shape, table.shape[1]
    kernel, rows = _kernel(m, f, operation, specialise), table.reshape(-1)
    divisor, weights = table.dtype.type(_divisor(m, f, operation, k)), np.zeros((1, 1, 1))

    def work(begin: int, end: int) -> None:
        kept = np.empty((_TOGETHER, m, k), np.int32)
        for first in range(begin, end, _TOGETHER):
            part = index[first : min(end, first + _TOGETHER)]
            count = len(part)
            distances.neighbours_of(table, part, k, kept)
            target = out[first : first + count].reshape(-1)
            kernel(rows, part, _SUMS, kept, weights, divisor, d, count, 0, 1, target)

    pool.run(work, h, small=float(h) * m * d < _SMALL)
    return out
