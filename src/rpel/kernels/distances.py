"""Squared distances between rows of the table, in float64, and the nearest neighbours they give.

Invariants:
- differences are squared, never a Gram matrix: nothing cancels, however near the rows or huge a forged one. It costs no
  more: subtraction and multiply-add run on different units of the processor;
- neighbours are ordered by (distance, column), the anchor before all; the kept columns come out ascending, so that
  whoever sums them has one fixed order.

Pairs that many victims hold are computed once for all, others victim by victim: by counted cost, with equal bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool
from rpel.kernels.cache import compiled
from rpel.kernels.pairs import (
    BLOCK_COLUMNS,
    GROUP_COLUMNS,
    SMALL,
    Slots,
    all_pairs,
    among_by_victim,
    among_victims,
    cut_tiles,
    pair_sums,
    to_first,
    victim_sums,
)
from rpel.kernels.vectors import TILE, count_below
from rpel.types import Floats, Integers

_NOWHERE = np.zeros(0)  # where no row stands outside the table


@compiled
def _mark(index: Integers, slot: Slots) -> None:
    """−1 in the upper triangle for each pair of different rows that some victim holds."""
    h, m = index.shape
    for i in range(h):
        for a in range(m):
            for b in range(a + 1, m):
                p, q = index[i, a], index[i, b]
                if p != q:
                    slot[min(p, q), max(p, q)] = -1


@compiled
def _scatter(total: Floats, slot: Slots, index: Integers, result: Floats) -> None:
    """result[i, a, b] from the slot of rows index[i, a], index[i, b]; 0 where both are the same row."""
    h, m = index.shape
    for i in range(h):
        for a in range(m):
            result[i, a, a] = 0.0
            for b in range(a + 1, m):
                p, q = index[i, a], index[i, b]
                value = 0.0 if p == q else total[slot[min(p, q), max(p, q)] - 1]
                result[i, a, b] = value
                result[i, b, a] = value


def among(table: Floats, index: Integers) -> Floats:
    """(h, m, m) squared distances among each victim's rows.

    >>> among(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
    array([[[ 0., 25.], [25.,  0.]]])
    """
    h, m = index.shape
    result = np.empty((h, m, m))
    rows, compact = _distinct(index, len(table))
    slot = _shared_pairs(table, len(rows), compact)
    if slot is not None:
        _scatter(pair_sums(table, _NOWHERE, cut_tiles(rows, slot)), slot, compact, result)
        return result

    def work(begin: int, end: int) -> None:
        among_victims(table, index, begin, end, result)

    pool.run(work, h, small=result.size * table.shape[1] < 2 * SMALL)
    return result


def are_shared(table: Floats, index: Integers) -> bool:
    """Whether so many victims hold the same pairs of rows that these are computed once for all.

    >>> are_shared(np.zeros((2, 1)), np.array([[0, 1]] * 9))
    True
    """
    rows, compact = _distinct(index, len(table))
    return _shared_pairs(table, len(rows), compact) is not None


def _distinct(index: Integers, n: int) -> tuple[Integers, Integers]:
    """The rows that occur, ascending, and the index in their numbering (an absent −1 becomes any of them)."""
    used = np.zeros(n, np.bool_)
    used[index[index >= 0]] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[index]


def _fits(table: Floats, rows: int) -> bool:
    """Whether one block of so many rows in float64, per thread, is a small part of the table."""
    return 8 * BLOCK_COLUMNS * rows * pool.threads() <= max(table.nbytes // 25, 1 << 22)


def _shared_pairs(table: Floats, u: int, compact: Integers) -> NDArray[np.int32] | None:
    """The pairs that occur, marked −1 in (u, u), or None where computing them by victim is cheaper or smaller."""
    h, m = compact.shape
    if 4 * u * u > max(table.nbytes // 25, 1 << 22) or not _fits(table, u):
        return None
    slot = np.zeros((u, u), np.int32)
    _mark(compact, slot)
    units = min(4, -(-table.shape[1] // GROUP_COLUMNS))
    shared = (int(np.count_nonzero(slot)) + u) / units
    alone = h * (m * (m - 1) // 2 + m) / min(4, h)
    return slot if shared <= alone else None


def prepare(dtype: Any) -> None:
    """Compile, or load from disk, both strategies now.

    >>> prepare(np.float32)
    """
    table, index = np.zeros((2, 1), dtype), np.array([[0, 1]])
    among(table, index)
    neighbours_of(table, index, 1, np.empty((1, 2, 1), np.int32))


def to_point(table: Floats, index: Integers, point: Floats) -> Floats:
    """(h, m) squared distances of the rows to one point; each row once, however many victims hold it.

    >>> to_point(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.zeros(2))
    array([[25.,  0.,  0.]])
    """
    rows, compact = _distinct(index, len(table))
    if len(rows) == 0:
        return np.zeros(index.shape)
    few = _fits(table, len(rows)) and table.shape[1] > GROUP_COLUMNS
    together = len(rows) if few else 4 * TILE
    padded = np.resize(rows, (-(-len(rows) // together), together))
    local = np.insert(padded, 0, len(table), axis=1)
    tiles = to_first(together)
    if few:
        values = pair_sums(table, point, tiles._replace(rows=local[0]))
    else:
        values = victim_sums(table, point, local, tiles).ravel()
    return np.where(index < 0, 0.0, values[compact])


def to_rows(table: Floats, index: Integers, origin: Integers, extra: Floats = _NOWHERE) -> Floats:
    """(h, m) squared distances of each victim's rows to the row origin[i]; rows n, n + 1, … are those of `extra`, flat.

    >>> to_rows(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.array([1]))
    array([[ 0., 25.,  0.]])
    """
    local = np.column_stack([origin, np.where(index < 0, origin[:, None], index)])
    rows, compact = _distinct(local, len(table) + len(extra) // table.shape[1])
    u = len(rows)
    if table.shape[1] <= GROUP_COLUMNS or 4 * u * u > max(table.nbytes // 25, 1 << 22) or not _fits(table, u):
        return np.where(index < 0, 0.0, victim_sums(table, extra, local, to_first(index.shape[1])))
    low, high = np.minimum(compact[:, :1], compact[:, 1:]), np.maximum(compact[:, :1], compact[:, 1:])
    slot = np.zeros((u, u), np.int32)
    slot[low, high] = np.where(low != high, -1, 0)
    total = np.append(pair_sums(table, extra, cut_tiles(rows, slot)), 0.0)  # slot 0, a row and itself, finds the 0
    return total[slot[low, high] - 1]


# --- neighbours -------------------------------------------------------------------------------------------------------


@compiled
def nearest_of(distances: Floats, k: int, begin: int, end: int, kept: NDArray[np.int32]) -> None:
    """kept[i] = the neighbours within distances[i], i = begin … end − 1, in this thread."""
    m = distances.shape[1]
    padded = (m + 15) // 16 * 16
    row, rank, column = np.full(padded, np.inf), np.empty(padded, np.int64), np.empty(m + 1, np.int32)
    for i in range(begin, end):
        for anchor in range(m):
            for j in range(m):
                row[j] = distances[i, anchor, j]
            row[anchor] = -1.0
            count_below(row, m, padded, rank)
            if _list(rank, m, k, column) > k:
                _list_ties(rank, m, k, column)
            for j in range(k):
                kept[i, anchor, j] = column[j]


@compiled
def _list(rank: NDArray[np.int64], m: int, k: int, column: NDArray[np.int32]) -> int:
    """The columns of rank below k, ascending; their number is above k where equal distances share the highest rank."""
    place = 0
    for j in range(m):
        column[place] = j
        place += rank[j] < k
    return place


@compiled
def _list_ties(rank: NDArray[np.int64], m: int, k: int, column: NDArray[np.int32]) -> None:
    """The k columns of lowest (rank, column), ascending: of those that share the highest rank the last are left out."""
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


@compiled
def _neighbours(
    table: Floats,
    index: Integers,
    anchors: Integers,
    first: Integers,
    members: Integers,
    slot: Slots,
    d: int,
    k: int,
    kept: NDArray[np.int32],
) -> None:
    h, m = index.shape
    squared = np.empty((h, m, m))
    among_by_victim(table, index, anchors, first, members, slot, d, 0, h, squared)
    nearest_of(squared, k, 0, h, kept)


def neighbours_of(table: Floats, index: Integers, k: int, kept: NDArray[np.int32]) -> None:
    """kept[i] (m, k) = for every row of a few victims the k nearest, in this thread.

    >>> kept = np.empty((1, 2, 1), np.int32); neighbours_of(np.array([[0.0], [2.0]]), np.array([[0, 1]]), 1, kept)
    >>> kept.tolist()
    [[[0], [1]]]
    """
    tiles, slot = all_pairs(index.shape[1])
    _neighbours(table.reshape(-1), index, tiles.anchors, tiles.first, tiles.members, slot, table.shape[1], k, kept)


def nearest(distances: Floats, k: int) -> NDArray[np.int32]:
    """(h, m, k) the k nearest columns of every anchor, itself included, ascending.

    A column's rank is counted, not sorted for: m² comparisons, sixteen at a time, without a branch.

    >>> nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), 2)
    array([[[0, 2], [1, 2], [0, 2]]], dtype=int32)
    """
    h, m, _ = distances.shape
    kept = np.empty((h, m, k), np.int32)

    def work(begin: int, end: int) -> None:
        nearest_of(distances, k, begin, end, kept)

    pool.run(work, h, small=distances.size * m < SMALL)
    return kept
