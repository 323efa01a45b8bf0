"""Squared distances between rows of the table, in float64, and the nearest neighbours they give.

Laws:
- the sum over d columns has one order, whatever the strategy, the position or the neighbours of a pair: lanes within
  blocks of `BLOCK_COLUMNS`, blocks within groups of `GROUP` blocks, groups; so equal pairs of rows get equal bits;
- differences are squared, never a Gram matrix: nothing cancels, however near the rows or huge a forged one. It costs no
  more: subtraction and multiply-add run on different units of the processor;
- two strategies, chosen by counted cost. *Shared*: every pair of rows that occurs is computed once, columns outermost.
  *By victim*: each victim's pairs on their own, when few are shared or the table has too many rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool as threads
from rpel.kernels.arguments import Float64, Floats
from rpel.kernels.cache import compiled
from rpel.kernels.tiles import Int64, Tiles, cut_tiles, to_first
from rpel.kernels.vectors import TILE, add_pair_sums, convert

BLOCK_COLUMNS = 256  # 180 rows of float64 stay in half a megabyte of cache
GROUP = 4  # blocks whose sums are added before they join the total: the unit of parallel work
_GROUP_COLUMNS = BLOCK_COLUMNS * GROUP
_SMALL = 1 << 18  # pair-columns below which waking a thread costs more than it saves

_NOWHERE = np.zeros(0)  # where no row stands outside the table


@compiled
def _add_tile(x: Float64, anchor: int, members: Int64, first: int, width: int, columns: int, out: Float64) -> None:
    if width == 7:
        add_pair_sums(x, anchor, members, first, columns, 7, out)
    elif width == 6:
        add_pair_sums(x, anchor, members, first, columns, 6, out)
    elif width == 5:
        add_pair_sums(x, anchor, members, first, columns, 5, out)
    elif width == 4:
        add_pair_sums(x, anchor, members, first, columns, 4, out)
    elif width == 3:
        add_pair_sums(x, anchor, members, first, columns, 3, out)
    elif width == 2:
        add_pair_sums(x, anchor, members, first, columns, 2, out)
    elif width == 1:
        add_pair_sums(x, anchor, members, first, columns, 1, out)


@compiled
def _add_group(
    table: Floats,
    extra: Floats,
    rows: Int64,
    anchors: Int64,
    first: Int64,
    members: Int64,
    group: int,
    d: int,
    x: Float64,
    out: Float64,
) -> None:
    """out[slot] += the pair sums over the columns of one group; x is scratch, one block of every row in float64.

    The table is flat; the rows after its last are those of `extra`, points that are not in it.
    """
    for block in range(group * GROUP, (group + 1) * GROUP):
        start = block * BLOCK_COLUMNS
        count = min(BLOCK_COLUMNS, d - start)
        if count <= 0:
            return
        padded = (count + 3) // 4 * 4
        for position in range(len(rows)):
            target = position * BLOCK_COLUMNS
            at = rows[position] * d
            if at < len(table):
                convert(table, at + start, count, x, target)
            else:
                convert(extra, at - len(table) + start, count, x, target)
            for c in range(count, padded):
                x[target + c] = 0.0
        for t in range(len(anchors)):
            width = first[t + 1] - first[t]
            _add_tile(x, anchors[t] * BLOCK_COLUMNS, members, first[t], width, padded, out)


@compiled
def _add_groups(
    table: Floats,
    extra: Floats,
    rows: Int64,
    anchors: Int64,
    first: Int64,
    members: Int64,
    d: int,
    origin: int,
    begin: int,
    end: int,
    partial: Float64,
) -> None:
    """partial[u] = the pair sums of group origin + u, u = begin … end − 1. Columns outermost: the shared strategy."""
    x = np.empty(len(rows) * BLOCK_COLUMNS)
    offsets = members * BLOCK_COLUMNS
    for u in range(begin, end):
        partial[u] = 0.0
        _add_group(table, extra, rows, anchors, first, offsets, origin + u, d, x, partial[u])


@compiled
def _by_victim(
    table: Floats,
    extra: Floats,
    index: Int64,
    anchors: Int64,
    first: Int64,
    members: Int64,
    d: int,
    begin: int,
    end: int,
    result: Float64,
) -> None:
    """result[i] = the pair sums of the same tiles over the rows index[i], for victims i = begin … end − 1."""
    x = np.empty(index.shape[1] * BLOCK_COLUMNS)
    partial = np.empty(len(members))
    offsets = members * BLOCK_COLUMNS
    groups = (d + _GROUP_COLUMNS - 1) // _GROUP_COLUMNS
    for i in range(begin, end):
        result[i] = 0.0
        for group in range(groups):
            partial[:] = 0.0
            _add_group(table, extra, index[i], anchors, first, offsets, group, d, x, partial)
            for slot in range(len(members)):
                result[i, slot] += partial[slot]


def pair_sums(table: Floats, extra: Floats, tiles: Tiles) -> Float64:
    """(slots,) the squared distances of the tiles' pairs, columns outermost.

    >>> table = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    >>> pair_sums(table, np.zeros(0), Tiles(np.array([0, 1]), np.array([0]), np.array([0, 1]), np.array([1])))
    array([25.])
    """
    d = table.shape[1]
    groups = -(-d // _GROUP_COLUMNS)
    slots = len(tiles.members)
    wave = max(threads.threads(), min(groups, table.nbytes // 40 // (8 * slots + 8)))
    partial = np.empty((min(wave, groups), slots))
    total = np.zeros(slots)
    for origin in range(0, groups, wave):
        count = min(wave, groups - origin)

        def work(begin: int, end: int, origin: int = origin) -> None:
            _add_groups(table.reshape(-1), extra, *tiles, d, origin, begin, end, partial)

        threads.run(work, count, small=slots * d < _SMALL)
        for u in range(count):
            total += partial[u]
    return total


def victim_sums(table: Floats, extra: Floats, index: Int64, tiles: Tiles) -> Float64:
    """(h, slots) the same tiles, with positions into index[i], for every victim.

    >>> table = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    >>> pair = Tiles(np.array([0, 1]), np.array([0]), np.array([0, 1]), np.array([1]))
    >>> victim_sums(table, np.zeros(0), np.array([[0, 1], [1, 1]]), pair)
    array([[25.], [ 0.]])
    """
    d = table.shape[1]
    result = np.empty((len(index), len(tiles.members)))

    def work(begin: int, end: int) -> None:
        _by_victim(table.reshape(-1), extra, index, tiles.anchors, tiles.first, tiles.members, d, begin, end, result)

    threads.run(work, len(index), small=result.size * d < _SMALL)
    return result


@compiled
def _mark(index: Int64, slot: NDArray[np.int32]) -> None:
    """−1 in the upper triangle for each pair of different rows that some victim holds."""
    h, m = index.shape
    for i in range(h):
        for a in range(m):
            for b in range(a + 1, m):
                p, q = index[i, a], index[i, b]
                if p != q:
                    slot[min(p, q), max(p, q)] = -1


@compiled
def _scatter(total: Float64, slot: NDArray[np.int32], index: Int64, result: Float64) -> None:
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


@compiled
def _scatter_victims(sums: Float64, slot: NDArray[np.int32], result: Float64) -> None:
    h, m, _ = result.shape
    for i in range(h):
        for a in range(m):
            result[i, a, a] = 0.0
            for b in range(a + 1, m):
                value = sums[i, slot[a, b] - 1]
                result[i, a, b] = value
                result[i, b, a] = value


def among(table: Floats, index: Int64) -> Float64:
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
    slot = np.triu(np.full((m, m), -1, np.int32), 1)
    _scatter_victims(victim_sums(table, _NOWHERE, index, cut_tiles(np.arange(m), slot)), slot, result)
    return result


def _distinct(index: Int64, n: int) -> tuple[Int64, Int64]:
    """The rows that occur, ascending, and the index in their numbering (an absent −1 becomes any of them)."""
    used = np.zeros(n, np.bool_)
    used[index[index >= 0]] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[index]


def _fits(table: Floats, rows: int) -> bool:
    """Whether one block of so many rows in float64, per thread, is a small part of the table."""
    return 8 * BLOCK_COLUMNS * rows * threads.threads() <= max(table.nbytes // 25, 1 << 22)


def _shared_pairs(table: Floats, u: int, compact: Int64) -> NDArray[np.int32] | None:
    """The pairs that occur, marked −1 in (u, u), or None where computing them by victim is cheaper or smaller."""
    h, m = compact.shape
    if 4 * u * u > max(table.nbytes // 25, 1 << 22) or not _fits(table, u):
        return None
    slot = np.zeros((u, u), np.int32)
    _mark(compact, slot)
    units = min(4, -(-table.shape[1] // _GROUP_COLUMNS))
    shared = (int(np.count_nonzero(slot)) + u) / units
    alone = h * (m * (m - 1) // 2 + m) / min(4, h)
    return slot if shared <= alone else None


def prepare(dtype: Any) -> None:
    """Compile, or load from disk, both strategies now.

    >>> prepare(np.float32)
    """
    table, index = np.zeros((2, 1), dtype), np.array([[0, 1]])
    among(table, index)
    slot = np.triu(np.full((2, 2), -1, np.int32), 1)
    _scatter_victims(victim_sums(table, _NOWHERE, index, cut_tiles(np.arange(2), slot)), slot, np.empty((1, 2, 2)))


def to_point(table: Floats, index: Int64, point: Float64) -> Float64:
    """(h, m) squared distances of the rows to one point; each row once, however many victims hold it.

    >>> to_point(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.zeros(2))
    array([[25.,  0.,  0.]])
    """
    rows, compact = _distinct(index, len(table))
    if len(rows) == 0:
        return np.zeros(index.shape)
    few = _fits(table, len(rows)) and table.shape[1] > _GROUP_COLUMNS
    together = len(rows) if few else 4 * TILE
    padded = np.resize(rows, (-(-len(rows) // together), together))
    local = np.insert(padded, 0, len(table), axis=1)
    tiles = to_first(together)
    if few:
        values = pair_sums(table, point, tiles._replace(rows=local[0]))
    else:
        values = victim_sums(table, point, local, tiles).ravel()
    return np.where(index < 0, 0.0, values[compact])


def to_rows(table: Floats, index: Int64, origin: Int64, extra: Floats = _NOWHERE) -> Float64:
    """(h, m) squared distances of each victim's rows to the row origin[i]; rows n, n + 1, … are those of `extra`, flat.

    >>> to_rows(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.array([1]))
    array([[ 0., 25.,  0.]])
    """
    local = np.column_stack([origin, np.where(index < 0, origin[:, None], index)])
    rows, compact = _distinct(local, len(table) + len(extra) // table.shape[1])
    u = len(rows)
    if table.shape[1] <= _GROUP_COLUMNS or 4 * u * u > max(table.nbytes // 25, 1 << 22) or not _fits(table, u):
        return np.where(index < 0, 0.0, victim_sums(table, extra, local, to_first(index.shape[1])))
    low, high = np.minimum(compact[:, :1], compact[:, 1:]), np.maximum(compact[:, :1], compact[:, 1:])
    slot = np.zeros((u, u), np.int32)
    slot[low, high] = np.where(low != high, -1, 0)
    total = np.append(pair_sums(table, extra, cut_tiles(rows, slot)), 0.0)  # slot 0, a row and itself, finds the 0
    return total[slot[low, high] - 1]
