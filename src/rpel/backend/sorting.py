"""Order: sorting networks for coordinates, operations on sorted values as straight-line code,
and nearest neighbours.

A network says which pairs to compare, in which order, so that values end up in ascending rank.

Invariants:
- a network is a fixed list of (low, high) pairs, the same for every column, so all columns go through vector
  registers together; only comparators on which a needed rank depends are kept;
- generic and specialised kernels walk the same list with the same comparator ("smaller, else the other", and
  its mirror), so every value is handed on, ±∞ is ordered, and even +0 and −0 come out alike;
- neighbours are ordered by (distance, column), the anchor before all; the kept columns come out ascending, so
  that whoever sums them has one fixed order.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from rpel.backend import pool
from rpel.backend.base import OPERATIONS, Operation
from rpel.backend.cache import compiled, inlined
from rpel.backend.plain import Plain
from rpel.backend.vectors import (
    BLOCK,
    Builder,
    count_below,
    instruction,
    integer,
    load,
    loop,
    spread,
    store,
    vector_of,
    zero,
)
from rpel.types import Floats

_FEW = 1 << 15  # distances that NumPy orders in a millisecond
EXACT = 1.0
COLUMNS = 688  # whose squares are summed in float32 before float64 takes over: an odd number of cache lines
NEARLY = 1 + 2.1 * (COLUMNS // BLOCK + 8) * 2.0**-24
"""By what a distance must be larger to be so surely. Squared in float32, each is off by less than half of
that: a difference and its square are rounded, and so is each sum of a lane's columns and of all lanes."""
_INFINITE = 0x7FF0000000000000  # the bits of ∞
LEAST = 1e-20  # squared distances below may have lost what float32 cannot hold
_SMALL = 1 << 18  # comparisons below which waking a thread costs more than it saves

Pairs = tuple[tuple[int, int], ...]


def merge_exchange(m: int) -> Pairs:
    """Batcher's network for any m (Knuth, volume 3, algorithm 5.2.2M): about m·log²m/4 comparators.

    >>> merge_exchange(3)
    ((0, 2), (0, 1), (1, 2))
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (m - 1).bit_length() - 1)
    p = top if m > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs.extend((i, i + d) for i in range(m - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return tuple(pairs)


def pruned(pairs: Pairs, needed: set[int]) -> Pairs:
    """The comparators, in order, from which at least one needed rank still draws its value.

    >>> pruned(merge_exchange(4), {0})
    ((0, 2), (1, 3), (0, 1))
    """
    alive = set(needed)
    kept = []
    for low, high in reversed(pairs):
        if low in alive or high in alive:
            kept.append((low, high))
            alive |= {low, high}
    return tuple(reversed(kept))


def ranks(m: int, f: int, operation: Operation) -> range:
    """The ranks an operation looks at.

    >>> ranks(16, 7, "trimmed_mean"), ranks(5, 0, "median"), ranks(5, 2, "meamed")
    (range(7, 9), range(2, 3), range(0, 5))
    """
    if operation == "trimmed_mean":
        return range(f, m - f)
    return range((m - 1) // 2, m // 2 + 1) if operation == "median" else range(m)


@cache
def network(m: int, f: int, operation: Operation) -> Pairs:
    """The pruned network of an operation; empty where the order does not matter (a plain mean).

    >>> len(network(16, 7, "trimmed_mean")), network(9, 0, "trimmed_mean")
    (53, ())
    """
    if operation == "trimmed_mean" and f == 0:
        return ()
    return pruned(merge_exchange(m), set(ranks(m, f, operation)))


def _exchange(builder: Builder, a: Any, b: Any) -> tuple[Any, Any]:
    """(lower, higher); one comparison decides both, so that no value is lost or doubled."""
    below = builder.fcmp_ordered("<", a, b)
    return builder.select(below, a, b), builder.select(below, b, a)


@instruction("m", "f", "operation")
def operate(
    builder: Builder, y: Any, stride: Any, columns: Any, divisor: Any, z: Any, m: int, f: int, operation: int
) -> None:
    """z[c] = the operation over y[r · stride + c], r < m. m, f and operation (its place in OPERATIONS)
    are literals.

    Straight-line code: m vectors are loaded, pass the network and are summed in ascending rank.
    """
    name, vector = OPERATIONS[operation], vector_of(y)
    scale = spread(builder, divisor, vector)
    with loop(builder, integer(0), columns, vector.count) as (c, _):
        starts = [builder.add(builder.mul(stride, integer(r)), c) for r in range(m)]
        values = [load(builder, y, start, vector) for start in starts]
        for a, b in network(m, f, name):
            values[a], values[b] = _exchange(builder, values[a], values[b])
        total = _total(builder, values, f, name, vector)
        if name == "meamed" and f:
            total = _unless_tied(builder, total, values, f, vector)
        store(builder, builder.fdiv(total, scale), z, c)


def _total(builder: Builder, values: list[Any], f: int, operation: Operation, vector: Any) -> Any:
    """The sum, in ascending rank, of the values the operation keeps. For the median:
    of the middle one or two."""
    m = len(values)
    if operation == "meamed":
        values = _near_median(builder, values, f, vector)
    total = zero(vector)
    for rank in ranks(m, f, operation):
        total = builder.fadd(total, values[rank])
    return total


def _near_median(builder: Builder, values: list[Any], f: int, vector: Any) -> list[Any]:
    """The m − f values nearest to the median, the others 0.

    They are neighbours in rank. Rank r < f leaves at the bottom exactly when rank r + m − f is strictly
    nearer and enters at the top. Where both are equally near, see :func:`_unless_tied`.
    """
    kept, chosen = len(values) - f, list(values)
    for r, (below, above) in enumerate(_sides(builder, values, f, vector)):
        leaves = builder.fcmp_ordered("<", above, below)
        chosen[r] = builder.select(leaves, zero(vector), chosen[r])
        chosen[r + kept] = builder.select(leaves, chosen[r + kept], zero(vector))
    return chosen


def _sides(builder: Builder, values: list[Any], f: int, vector: Any) -> list[tuple[Any, Any]]:
    """For each rank r < f how far it lies below the median, and how far rank r + m − f above."""
    m, kept = len(values), len(values) - f
    middle = builder.fadd(values[(m - 1) // 2], values[m // 2])
    median = builder.fmul(middle, ir.Constant(vector, [0.5] * vector.count))
    return [(builder.fsub(median, values[r]), builder.fsub(values[r + kept], median)) for r in range(f)]


def _unless_tied(builder: Builder, total: Any, values: list[Any], f: int, vector: Any) -> Any:
    """The total; NaN where two different values are equally near and one is kept: ranks do not say whose row
    is lower, so whoever called looks at the rows again."""
    tied = ir.Constant(ir.VectorType(ir.IntType(1), vector.count), [0] * vector.count)
    for below, above in _sides(builder, values, f, vector):
        equal = builder.fcmp_ordered("==", below, above)
        tied = builder.or_(tied, builder.and_(equal, builder.fcmp_ordered(">", above, zero(vector))))
    return builder.select(tied, ir.Constant(vector, [float("nan")] * vector.count), total)


# --- nearest neighbours -------------------------------------------------------------------------------------


@compiled
def nearest_of(
    distances: Floats, index: Any, k: int, factor: float, begin: int, end: int, kept: NDArray[np.int32],
    sure: NDArray[np.bool_],
) -> None:  # fmt: skip
    """kept[i] = the neighbours within distances[i], i = begin … end − 1, in this thread.

    sure[i, anchor]: whether they are those of the true distances, each of which is known but for a share of
    factor − 1 in all. index[i] are the rows: equal ones have equal distances.
    """
    m = distances.shape[1]
    padded = (m + 15) // 16 * 16
    row, rank, column = np.full(padded, np.inf), np.empty(padded, np.int64), np.empty(m + 1, np.int32)
    bits = row.view(np.int64)  # in the order of the values, as none but the anchor's is negative
    edge = np.empty(2)  # the last that is kept, the next
    edges = edge.view(np.int64)
    for i in range(begin, end):
        for anchor in range(m):
            certain = True
            for j in range(m):
                row[j] = distances[i, anchor, j]
            row[anchor] = -1.0
            count_below(row, m, padded, rank)
            if _list(rank, m, k, column) > k:
                _list_ties(rank, m, k, column)
                certain = factor == 1.0 or _is_sure_of_tie(row, rank, index[i], m, k, factor)
            elif factor != 1.0 and k < m:
                last, after = np.int64(0), np.int64(_INFINITE)
                for j in range(m):
                    last = max(last, bits[j] if rank[j] < k else np.int64(0))
                    after = min(after, bits[j] if rank[j] >= k else np.int64(_INFINITE))
                edges[0], edges[1] = last, after
                certain = is_larger(edge[1], edge[0], factor)
            for j in range(k):
                kept[i, anchor, j] = column[j]
            sure[i, anchor] = certain


@inlined
def is_larger(a: float, b: float, factor: float) -> bool:
    return a > b * factor and a > LEAST and a < np.inf


@inlined
def _is_sure_of_tie(row: Floats, rank: NDArray[np.int64], rows: Any, m: int, k: int, factor: float) -> bool:
    """Whether those of equal distance around place k are one row several times,
    and all others surely are not there."""
    highest, who = np.int64(-1), 0
    for j in range(m):
        if rank[j] < k and rank[j] > highest:
            highest, who = rank[j], j
    certain = True
    for j in range(m):
        if rank[j] == highest:
            certain &= rows[j] == rows[who]
        elif rank[j] < highest:
            certain &= is_larger(row[who], row[j], factor)
        else:
            certain &= is_larger(row[j], row[who], factor)
    return certain


@inlined
def _list(rank: NDArray[np.int64], m: int, k: int, column: NDArray[np.int32]) -> int:
    """The columns of rank below k, ascending; their number is above k where equal distances share the highest
    rank."""
    place = 0
    for j in range(m):
        column[place] = j
        place += rank[j] < k
    return place


@inlined
def _list_ties(rank: NDArray[np.int64], m: int, k: int, column: NDArray[np.int32]) -> None:
    """The k columns of lowest (rank, column), ascending:
    of those that share the highest rank the last are left out."""
    highest = 0
    for j in range(m):
        if rank[j] < k:
            highest = max(highest, rank[j])
    room = k  # for columns of the highest rank: what the others leave
    for j in range(m):
        room -= rank[j] < highest
    place = 0
    for j in range(m):
        if rank[j] < highest or (rank[j] == highest and room > 0):
            room -= rank[j] == highest
            column[place] = j
            place += 1


def nearest(
    distances: Floats, index: Any, k: int, factor: float = EXACT
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """(h, m, k) the k nearest columns of every anchor, itself included, ascending, and (h, m) whether they
    surely are, of distances that are known but for a share of factor − 1; index (h, m) are the rows.

    A column's rank is counted, not sorted for: m² comparisons, sixteen at a time, without a branch. The plain
    twin does for a few, without being compiled.

    >>> nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), np.arange(3)[None], 2)[0]
    array([[[0, 2], [1, 2], [0, 2]]], dtype=int32)
    """
    h, m, _ = distances.shape
    if distances.size < _FEW:
        return Plain().nearest(distances, k), _are_sure(distances, index, k, factor)
    kept, sure = np.empty((h, m, k), np.int32), np.empty((h, m), np.bool_)

    def work(begin: int, end: int) -> None:
        nearest_of(distances, index, k, factor, begin, end, kept, sure)

    pool.run(work, h, small=distances.size * m < _SMALL)
    return kept, sure


def _are_sure(distances: Floats, index: Any, k: int, factor: float) -> NDArray[np.bool_]:
    """(h, m) as `nearest_of` says it, in NumPy."""
    h, m, _ = distances.shape
    if factor == EXACT or k == m:
        return np.ones((h, m), np.bool_)
    own_first = np.where(np.eye(m, dtype=bool), -1.0, distances)
    order = np.sort(own_first, axis=2)
    last, after = order[:, :, k - 1], order[:, :, k]
    sure = (after > np.maximum(last, 0) * factor) & (after > LEAST) & (after < np.inf)
    for i, anchor in zip(*np.nonzero(~sure & (last == after)), strict=True):
        row, value = own_first[i, anchor], after[i, anchor]
        below, equal, above = row[row < value], row == value, row[row > value]
        apart = not below.size or value > max(0.0, below.max()) * factor
        apart = apart and (not above.size or value * factor < above.min() < np.inf)
        sure[i, anchor] = apart and value > LEAST and len(set(index[i][equal].tolist())) == 1
    return np.asarray(sure)
