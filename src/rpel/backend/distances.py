"""Squared distances between rows of the table, in float64: which pairs, in which order, on how many threads.

Invariants:
- differences are squared, never a Gram matrix: nothing cancels, however near the rows or huge a forged one.
  It costs no more: subtraction and multiply-add run on different units of the processor;
- the sum over d columns has one order, whatever the strategy, the position or the neighbours of a pair: lanes
  within blocks of columns, blocks within groups, groups; so equal pairs of rows get equal bits;
- who only asks for neighbours (`neighbours`) gets those of the exact distances: float32 rows are compared in
  float32 first, twice as fast, and the few pairs of whom that does not tell surely are compared again
  (`settled`).

Two strategies, chosen by counted cost. *Shared* (`pair_sums`): every pair of rows that many victims hold
once, columns outermost. *By victim* (`victim_sums`): each victim's pairs on their own.

The table is (n, d); the rows n, n + 1, … are those of `extra`, points that are not in it.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpel.backend import pool
from rpel.backend.cache import compiled, inlined
from rpel.backend.sorting import COLUMNS, EXACT, LEAST, NEARLY, is_larger, nearest, nearest_of
from rpel.backend.vectors import BLOCK, FULL, TILE, add_pair_sum, add_pair_sums, convert, fetch
from rpel.types import Floats, Integers

# columns by size of a number: 180 rows of them stay in half a megabyte of cache
_BLOCKS = {8: 256, 4: COLUMNS}
_GROUPS = {
    8: 1024,
    4: 2 * COLUMNS,
}  # columns whose sums are added before they join the total: the unit of parallel work
_BLOCK, _WHOLE = _BLOCKS[8], _GROUPS[8]
_SMALL = 1 << 18  # pair-columns below which waking a thread costs more than it saves
_AT_ONCE = 1 << 18  # pairs of rows that are looked up together
_NOWHERE = np.zeros((0, 1))  # where no row stands outside the table

Slots = NDArray[np.int32]
"""Pairs of rows (u, u), upper triangle: −1 wanted, then the number of the pair from 1 on; 0 not wanted."""


# --- pairs in tiles -----------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How many columns are a block, and how many a group of blocks."""

    block: int
    group: int


def _cut_of(like: Floats) -> Cut:
    return Cut(_BLOCKS[like.itemsize], _GROUPS[like.itemsize])


class Tiles(NamedTuple):
    """Pairs of rows to compute: members[first[t] : first[t + 1]] (at most TILE) against anchors[t].

    A row stands for its position in scratch. Where twins[t], tile t + 1 has the same members,
    and both go together.
    """

    anchors: Integers
    first: Integers
    members: Integers
    twins: NDArray[np.bool_]


def cut_tiles(slot: Slots) -> Tiles:
    """Cut the pairs marked in slot (u, u), upper triangle, into tiles, and number them there from 1 on."""
    most = 3 * int(np.count_nonzero(slot)) + 2 * TILE * len(slot)
    tiles = Tiles(
        np.empty(most, np.int64),
        np.empty(most + 1, np.int64),
        np.empty(most, np.int64),
        np.zeros(most, np.bool_),
    )
    used = int(_cut(slot, tiles))
    end = tiles.first[used]
    return Tiles(
        tiles.anchors[:used].copy(),
        tiles.first[: used + 1].copy(),
        tiles.members[:end].copy(),
        tiles.twins[:used].copy(),
    )


@compiled
def _cut(slot: Slots, tiles: Tiles) -> int:
    """Two passes: where a run of rows has many pairs with two anchors, the run stays in cache while anchors
    pass by, and pairs that nobody wants are computed along; what is left (forged rows, that one victim alone
    has seen) is gathered around the later row. Slots count from 1.
    """
    anchors, first, members, twins = tiles
    u = len(slot)
    tile = 0
    first[0] = 0
    for start in range(0, u, TILE):
        high = min(u, start + TILE)
        for a in range(0, high, 2):
            low, wanted, both = max(start, a + 1), 0, min(a + 2, high)
            for anchor in range(a, both):
                for b in range(low, high):
                    wanted += slot[anchor, b] < 0
            if wanted == 0 or wanted * 3 < (both - a) * (high - low) * 2:
                continue
            for anchor in range(a, both):
                place = first[tile]
                anchors[tile] = anchor
                for b in range(low, high):
                    members[place] = b
                    place += 1
                    if anchor < b:
                        slot[anchor, b] = place
                tile = _end_tile(tiles, tile, place)
            twins[tile - 2] = both - a == 2
    for b in range(u):
        place = first[tile]
        for a in range(b):
            if slot[a, b] < 0:
                anchors[tile] = b
                members[place] = a
                place += 1
                slot[a, b] = place
                if place - first[tile] == TILE:
                    tile = _end_tile(tiles, tile, place)
                    place = first[tile]
        if place > first[tile]:
            tile = _end_tile(tiles, tile, place)
    return tile


@inlined
def _end_tile(tiles: Tiles, tile: int, place: int) -> int:
    """The number of the next tile; this one is filled up with its last member,
    which costs less than a narrow tile."""
    while (place - tiles.first[tile]) % FULL:
        tiles.members[place] = tiles.members[place - 1]
        place += 1
    tiles.first[tile + 1] = place
    return tile + 1


def to_first(m: int) -> Tiles:
    """Row 0 against each of rows 1 … m."""
    edges = np.append(np.arange(0, m, TILE), m)
    anchors = np.zeros(len(edges) - 1, np.int64)
    return Tiles(anchors, edges, np.arange(1, m + 1), np.zeros(len(anchors), np.bool_))


@cache
def all_pairs(m: int) -> tuple[Tiles, Integers]:
    """Every pair of m rows as tiles, and (m · m,) the place of each pair among their sums;
    of a row and itself the one behind them."""
    slot = np.triu(np.full((m, m), -1, np.int32), 1)
    tiles = cut_tiles(slot)
    numbers = (slot + slot.T).astype(np.int64) - 1
    np.fill_diagonal(numbers, len(tiles.members))
    return tiles, numbers.ravel()


# --- sums over tiles ----------------------------------------------------------------------------------------


@inlined
def aligned(size: int, like: Floats) -> Floats:
    """Room for so many values that begins where a vector, and a line of the cache, begins."""
    room = np.empty(size + 64 // like.itemsize, like.dtype)
    skip = -room.ctypes.data % 64 // like.itemsize
    return room[skip : skip + size]


@inlined
def _add_tiles(
    x: Floats, stride: int, tiles: Tiles, columns: int, table: Floats, ahead: Integers, at: int, out: Floats
) -> None:
    """All tiles of one block, twins together.

    With each tile one of the rows `ahead` is fetched, columns `at` and on: what the next block will read.
    """
    anchors, first, members, twins = tiles
    t, row, pair = 0, 0, np.empty(2, np.int64)
    while t < len(anchors):
        if row < len(ahead):
            fetch(table, ahead[row] * table.shape[1] + at, min(stride, table.shape[1] - at))
            row += 1
        start, width = first[t], first[t + 1] - first[t]
        pair[0] = anchors[t]
        if twins[t]:
            pair[1] = anchors[t + 1]
            add_pair_sums(x, stride, pair, members, start, columns, width, 1, out)
            t += 2
        else:
            add_pair_sums(x, stride, pair, members, start, columns, width, 0, out)
            t += 1


@inlined
def _add_group(
    table: Floats, extra: Floats, rows: Integers, after: Integers, tiles: Tiles, cut: Cut, group: int,
    x: Floats, out: Floats,
) -> None:  # fmt: skip
    """out[slot] += the pair sums over the columns of one group; the rows `after` come next.

    x is scratch, one block of every row, in whose type differences are squared and a block's lanes summed.
    """
    n, d = table.shape
    for start in range(group * cut.group, (group + 1) * cut.group, cut.block):
        count = min(cut.block, d - start)
        if count <= 0:
            return
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        for position in range(len(rows)):
            target = position * cut.block
            if rows[position] < n:
                convert(table, rows[position] * d + start, count, x, target)
            else:
                convert(extra, (rows[position] - n) * d + start, count, x, target)
            for c in range(count, padded):
                x[target + c] = 0.0
        more = start + cut.block < d
        ahead, at = (rows, start + cut.block) if more else (after, 0)
        _add_tiles(x, cut.block, tiles, padded, table, ahead, at, out)


@compiled
def _add_groups(
    table: Floats, extra: Floats, rows: Integers, tiles: Tiles, cut: Cut, origin: int, begin: int, end: int,
    like: Floats, partial: Floats,
) -> None:  # fmt: skip
    """partial[u] = the pair sums of group origin + u, u = begin … end − 1, in the type of `like`.

    Columns outermost: the shared strategy.
    """
    x = aligned(len(rows) * cut.block, like)
    for u in range(begin, end):
        partial[u] = 0.0
        _add_group(table, extra, rows, rows, tiles, cut, origin + u, x, partial[u])


@inlined
def _add_victim(
    table: Floats,
    extra: Floats,
    rows: Integers,
    after: Integers,
    tiles: Tiles,
    cut: Cut,
    scratch: Any,
    sums: Floats,
) -> None:
    """sums = the pair sums of one victim's rows; scratch are x (see `_add_group`) and sums of one group."""
    x, partial = scratch
    sums[:] = 0.0
    for group in range((table.shape[1] + cut.group - 1) // cut.group):
        partial[:] = 0.0
        _add_group(table, extra, rows, after, tiles, cut, group, x, partial)
        for slot in range(len(sums)):
            sums[slot] += partial[slot]


@compiled
def _by_victim(
    table: Floats,
    extra: Floats,
    index: Integers,
    tiles: Tiles,
    cut: Cut,
    begin: int,
    end: int,
    result: Floats,
) -> None:
    """result[i] = the pair sums of the same tiles over the rows index[i], for victims i = begin … end − 1."""
    scratch = aligned(index.shape[1] * cut.block, result), np.empty(len(tiles.members))
    for i in range(begin, end):
        _add_victim(table, extra, index[i], index[min(i + 1, end - 1)], tiles, cut, scratch, result[i])


@compiled
def _among_by_victim(
    table: Floats,
    index: Integers,
    tiles: Tiles,
    numbers: Integers,
    cut: Cut,
    begin: int,
    end: int,
    like: Floats,
    result: Floats,
) -> None:
    """result[i] (m, m) = all distances among the rows index[i], i = begin … end − 1, squared in the type of
    `like`; tiles and numbers are those of `all_pairs`."""
    m, slots = index.shape[1], len(tiles.members) + 1  # nothing is ever added to the last
    scratch, sums = (aligned(m * cut.block, like), np.empty(slots)), np.empty(slots)
    for i in range(begin, end):
        _add_victim(table, result[i], index[i], index[min(i + 1, end - 1)], tiles, cut, scratch, sums)
        values = result[i].reshape(-1)
        for pair in range(len(numbers)):  # in the order of the result: a gather
            values[pair] = sums[numbers[pair]]


def pair_sums(table: Floats, extra: Floats, rows: Integers, tiles: Tiles, like: Floats = _NOWHERE) -> Floats:
    """(slots,) the squared distances of the tiles' pairs among the rows, columns outermost,
    in the type of `like`.

    >>> pair_sums(np.array([[0.0, 0.0], [3.0, 4.0]], np.float32), np.zeros((0, 1)), np.array([0, 1]),
    ...     to_first(1))
    array([25.])
    """
    d = table.shape[1]
    cut = _cut_of(like)
    groups = -(-d // cut.group)
    slots = len(tiles.members)
    wave = max(pool.threads(), min(groups, table.nbytes // 40 // (8 * slots + 8)))
    partial = np.empty((min(wave, groups), slots))
    total = np.zeros(slots)
    for origin in range(0, groups, wave):
        count = min(wave, groups - origin)

        def work(begin: int, end: int, origin: int = origin) -> None:
            _add_groups(table, extra, rows, tiles, cut, origin, begin, end, like, partial)

        pool.run(work, count, small=slots * d < _SMALL)
        for u in range(count):
            total += partial[u]
    return total


def victim_sums(table: Floats, extra: Floats, index: Integers, tiles: Tiles) -> Floats:
    """(h, slots) the same tiles, with positions into index[i], for every victim.

    >>> victim_sums(np.array([[0.0, 0.0], [3.0, 4.0]]), np.zeros((0, 1)), np.array([[0, 1], [1, 1]]),
    ...     to_first(1))
    array([[25.], [ 0.]])
    """
    result = np.empty((len(index), len(tiles.members)))

    def work(begin: int, end: int) -> None:
        _by_victim(table, extra, index, tiles, _cut_of(_NOWHERE), begin, end, result)

    pool.run(work, len(index), small=result.size * table.shape[1] < _SMALL)
    return result


# --- which strategy -----------------------------------------------------------------------------------------


def _some(index: Integers) -> Iterator[slice]:
    """Victims whose pairs of rows are there at once."""
    step = max(1, _AT_ONCE // index.shape[1] ** 2)
    return (slice(first, first + step) for first in range(0, len(index), step))


def _mark(index: Integers, slot: Slots) -> None:
    """−1 in the upper triangle for each pair of different rows that some victim holds."""
    for some in _some(index):
        rows, others = index[some, :, None], index[some, None]
        slot[np.minimum(rows, others), np.maximum(rows, others)] = -1
    np.fill_diagonal(slot, 0)


def _scatter(total: Floats, slot: Slots, index: Integers, result: Floats) -> None:
    """result[i, a, b] from the slot of rows index[i, a], index[i, b]; 0 where both are the same row."""
    values = np.append(total, 0.0)  # slot 0, a row and itself, finds the 0
    for some in _some(index):
        rows, others = index[some, :, None], index[some, None]
        result[some] = values[slot[np.minimum(rows, others), np.maximum(rows, others)] - 1]


def _distinct(index: Integers, n: int) -> tuple[Integers, Integers]:
    """The rows that occur, ascending, and the index in their numbering (an absent −1 becomes any of them)."""
    used = np.zeros(n, np.bool_)
    used[index[index >= 0]] = True
    return np.flatnonzero(used), (np.cumsum(used) - 1)[index]


def _fits(table: Floats, rows: int) -> bool:
    """Whether one block of so many rows in float64, per thread, is a small part of the table."""
    return 8 * _BLOCKS[8] * rows * pool.threads() <= max(table.nbytes // 25, 1 << 22)


def _pairs_fit(table: Floats, rows: int) -> bool:
    """Whether the numbers of all their pairs are, too."""
    return 4 * rows * rows <= max(table.nbytes // 25, 1 << 22) and _fits(table, rows)


def _shared_pairs(table: Floats, u: int, compact: Integers) -> Slots | None:
    """The pairs that occur, marked −1 in (u, u),
    or None where computing them by victim is cheaper or smaller."""
    h, m = compact.shape
    if not _pairs_fit(table, u):
        return None
    slot = np.zeros((u, u), np.int32)
    _mark(compact, slot)
    units = min(4, -(-table.shape[1] // _WHOLE))
    shared = (int(np.count_nonzero(slot)) + u) / units
    alone = h * (m * (m - 1) // 2 + m) / min(4, h)
    return slot if shared <= alone else None


def are_shared(table: Floats, index: Integers) -> bool:
    """Whether so many victims hold the same pairs of rows that these are computed once for all.

    >>> are_shared(np.zeros((2, 1)), np.array([[0, 1]] * 9))
    True
    """
    rows, compact = _distinct(index, len(table))
    return _shared_pairs(table, len(rows), compact) is not None


def among(table: Floats, index: Integers, like: Floats = _NOWHERE) -> Floats:
    """(h, m, m) squared distances among each victim's rows, squared in the type of `like`: exact in float64,
    else off by less than `sorting.NEARLY` allows.

    >>> among(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
    array([[[ 0., 25.], [25.,  0.]]])
    """
    h, m = index.shape
    result = np.empty((h, m, m))
    rows, compact = _distinct(index, len(table))
    slot = _shared_pairs(table, len(rows), compact)
    if slot is not None:
        tiles = cut_tiles(slot)
        _scatter(pair_sums(table, _NOWHERE, rows, tiles, like), slot, compact, result)
        return result
    tiles, numbers = all_pairs(m)

    def work(begin: int, end: int) -> None:
        _among_by_victim(table, index, tiles, numbers, _cut_of(like), begin, end, like, result)

    pool.run(work, h, small=result.size * table.shape[1] < 2 * _SMALL)
    return result


def to_point(table: Floats, index: Integers, point: Floats) -> Floats:
    """(h, m) squared distances of the rows to one point; each row once, however many victims hold it.

    >>> to_point(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.zeros(2))
    array([[25.,  0.,  0.]])
    """
    rows, compact = _distinct(index, len(table))
    if len(rows) == 0:
        return np.zeros(index.shape)
    few = _fits(table, len(rows)) and table.shape[1] > _WHOLE
    together = len(rows) if few else 4 * TILE
    padded = np.resize(rows, (-(-len(rows) // together), together))
    local, tiles = np.insert(padded, 0, len(table), axis=1), to_first(together)
    if few:
        values = pair_sums(table, point[None], local[0], tiles)
    else:
        values = victim_sums(table, point[None], local, tiles).ravel()
    return np.where(index < 0, 0.0, values[compact])


def to_rows(table: Floats, index: Integers, origin: Integers, extra: Floats = _NOWHERE) -> Floats:
    """(h, m) squared distances of each victim's rows to the row origin[i].

    >>> to_rows(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[1, 0, -1]]), np.array([1]))
    array([[ 0., 25.,  0.]])
    """
    local = np.column_stack([origin, np.where(index < 0, origin[:, None], index)])
    rows, compact = _distinct(local, len(table) + len(extra))
    if table.shape[1] <= _WHOLE or not _pairs_fit(table, len(rows)):
        return np.where(index < 0, 0.0, victim_sums(table, extra, local, to_first(index.shape[1])))
    low, high = np.minimum(compact[:, :1], compact[:, 1:]), np.maximum(compact[:, :1], compact[:, 1:])
    slot = np.zeros((len(rows), len(rows)), np.int32)
    slot[low, high] = np.where(low != high, -1, 0)
    # slot 0, a row and itself, finds the 0
    total = np.append(pair_sums(table, extra, rows, cut_tiles(slot)), 0.0)
    return total[slot[low, high] - 1]


# --- neighbours ---------------------------------------------------------------------------------------------


@compiled
def exact(table: Floats, a: int, b: int, x: Floats, sums: Floats) -> float:
    """The squared distance of two rows in float64, in the order of all sums; x (2 · _BLOCK,) and sums (2,):
    scratch."""
    d = table.shape[1]
    sums[:] = 0.0
    for start in range(0, d, _BLOCK):
        count = min(_BLOCK, d - start)
        for c in range(count):
            x[c] = table[a, start + c]
            x[_BLOCK + c] = table[b, start + c]
        x[count:_BLOCK] = 0.0
        x[_BLOCK + count :] = 0.0
        add_pair_sum(x, _BLOCK, _BLOCK, sums)
        if (start + _BLOCK) % _WHOLE == 0 or start + _BLOCK >= d:
            sums[1] += sums[0]
            sums[0] = 0.0
    return float(sums[1])


Known = dict[tuple[int, int], float]
"""Exact distances of pairs of rows, the lower row first."""


def settled(
    table: Floats, rows: Integers, distances: Floats, k: int, factor: float, known: Known | None = None
) -> Slots:
    """(m, k) the neighbours of one victim as exact distances have them, from such (m, m) as are known but for
    a share of factor − 1: only those are computed on which it depends, near the edge between kept and
    dropped, and only those that no other victim needed before.

    >>> table = np.array([[0.0], [1.0], [-1.0 - 1e-6]], np.float32)
    >>> about = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 4.0], [1.0, 4.0, 0.0]])
    >>> settled(table, np.array([0, 2, 1]), about, 2, NEARLY).tolist()
    [[0, 2], [0, 1], [0, 2]]
    """
    own = np.eye(len(rows), dtype=bool)
    row = np.where(own, -1.0, distances)
    order = np.sort(row, axis=1)
    last, after = np.maximum(order[:, k - 1, None], 0.0), order[:, k, None]
    within = own | ((after > row * factor) & (after > LEAST) & (after < np.inf))
    beyond = (row > last * factor) & (row > LEAST) & (row < np.inf)
    value, x, sums = np.where(within, -1.0, np.inf), np.empty(2 * _BLOCK), np.empty(2)
    known = {} if known is None else known
    for anchor, j in np.argwhere(~within & ~beyond).tolist():
        pair = min(rows[anchor], rows[j]), max(rows[anchor], rows[j])
        if pair not in known:
            known[pair] = exact(table, *pair, x, sums)
        value[anchor, j] = known[pair]
    nearest_first = np.argsort(value, axis=1, kind="stable")[:, :k]
    return np.sort(nearest_first, axis=1).astype(np.int32)


@compiled
def settle(
    table: Floats, index: Integers, distances: Floats, k: int, factor: float, sure: NDArray[np.bool_],
    kept: Slots,
) -> None:  # fmt: skip
    """kept[i, anchor] where that is not sure, as exact distances have it: see `settled`, its plain twin."""
    m = distances.shape[1]
    row, place = np.empty(m), np.empty(m, np.int64)
    x, sums = np.empty(2 * _BLOCK), np.empty(2)
    for i in range(len(sure)):
        for anchor in range(m):
            if sure[i, anchor]:
                continue
            for j in range(m):
                row[j] = -1.0 if j == anchor else distances[i, anchor, j]
            _order(row, place)
            last, after = 0.0, 0.0
            for j in range(m):
                last = max(row[j], 0.0) if place[j] == k - 1 else last
                after = row[j] if place[j] == k else after
            for j in range(m):
                if j == anchor or is_larger(after, row[j], factor):
                    row[j] = -1.0
                elif is_larger(row[j], last, factor):
                    row[j] = np.inf
                else:
                    row[j] = exact(table, index[i, anchor], index[i, j], x, sums)
            _order(row, place)
            listed = 0
            for j in range(m):
                if place[j] < k:
                    kept[i, anchor, listed] = j
                    listed += 1


@inlined
def _order(row: Floats, place: NDArray[np.int64]) -> None:
    """The place of each value in order of (value, column)."""
    for j in range(len(row)):
        before = 0
        for q in range(len(row)):
            before += row[q] < row[j] or (row[q] == row[j] and q < j)
        place[j] = before


@compiled
def _neighbours(
    table: Floats, index: Integers, tiles: Tiles, numbers: Integers, cut: Cut, k: int, like: Floats,
    factor: float, kept: Slots, sure: NDArray[np.bool_],
) -> None:  # fmt: skip
    h, m = index.shape
    squared = np.empty((h, m, m))
    _among_by_victim(table, index, tiles, numbers, cut, 0, h, like, squared)
    nearest_of(squared, index, k, factor, 0, h, kept, sure)
    settle(table, index, squared, k, factor, sure, kept)


def neighbours_of(table: Floats, index: Integers, k: int, kept: NDArray[np.int32]) -> None:
    """kept[i] (m, k) = for every row of a few victims the k nearest, in this thread.

    >>> kept = np.empty((1, 2, 1), np.int32); neighbours_of(np.array([[0.0], [2.0]]), np.array([[0, 1]]), 1,
    ...     kept)
    >>> kept.tolist()
    [[[0], [1]]]
    """
    pairs, sure = all_pairs(index.shape[1]), np.empty(index.shape, np.bool_)
    factor = EXACT if table.dtype == np.float64 else NEARLY
    _neighbours(table, index, *pairs, _cut_of(table), k, table[:0], factor, kept, sure)


def neighbours(table: Floats, index: Integers, k: int) -> NDArray[np.int32]:
    """(h, m, k) for every row of each victim the k nearest of its rows, as their exact distances have them.

    >>> neighbours(np.array([[0.0], [2.0], [3.0]], np.float32), np.array([[0, 1, 2]]), 2).tolist()
    [[[0, 1], [1, 2], [1, 2]]]
    """
    if table.dtype == np.float64:
        return nearest(among(table, index), index, k)[0]
    squared = among(table, index, table[:0])
    kept, sure = nearest(squared, index, k, NEARLY)
    open_, known = np.flatnonzero(~sure.all(axis=1)), Known()

    def work(begin: int, end: int) -> None:
        for i in open_[begin:end]:
            kept[i] = settled(table, index[i], squared[i], k, NEARLY, known)

    pool.run(work, len(open_), small=len(open_) * table.shape[1] < _SMALL)
    return kept


def prepare(dtype: Any) -> None:
    """Compile, or load from disk, the shared strategy for neighbours now, which a single victim has, too.

    >>> prepare(np.float32)
    """
    table = np.zeros((2, 1), dtype)
    among(table, np.array([[0, 1]]), table)
