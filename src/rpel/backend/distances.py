"""Squared distances between rows of a table, and the nearest neighbours by them.

How this works. Let three victims hold rows 0, 1, 2, rows 1, 2, 5 and rows 0, 2, 5 of a table. Of the nine
pairs that they need only six differ, so `_shared` computes these six once and looks them up for each
victim. Victims that have few pairs in common, as among 10,000 nodes, are computed one by one
(`_by_victim`).

Either way pairs are grouped into *tiles*: one row, the anchor, against `WIDTH` others, whose sums stay in
registers while the columns pass. The pairs (0, 1), (0, 2), (0, 5) are one tile, so row 0 is read once for
three sums. Columns are copied a piece at a time into scratch, which stays in the cache while all tiles use
it; `GROUP` columns are the unit that threads share, and the sums of the groups are added in order. So a
pair's sum has one order of additions, and the same bits, whichever strategy, thread or victim asks for it.

Differences are squared, never a Gram matrix, so nothing cancels. Distances that a caller sees are float64.
Neighbours of float32 rows are decided by float32 sums, at half the cost, wherever these are far enough
apart: each is off by less than half of what `MARGIN` allows. Say an anchor keeps two of the distances 0,
4.0, 4.00001 and 9. Then 0 is surely in and 9 surely out, but the two in the middle may stand in either
order, so these two, and only these, are computed again in float64 (`_choose`).

`to_points` compares each victim's rows with one point in the same tiles, in float64.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpel.backend import threads
from rpel.backend.compile import VECTOR_BYTES, aligned, compiled, inlined, written
from rpel.types import Floats, Integers

Flags = NDArray[np.bool_]

WIDTH = 8  # rows that are compared with an anchor side by side
PIECE = 768  # columns of one block of scratch; half of it in float64. A multiple of 32
GROUP = 6 * PIECE  # columns of one unit of work
MARGIN = (
    1 + 2.1 * (PIECE * 4 // VECTOR_BYTES + 8) * 2.0**-24
)  # ratio from which two float32 sums are surely in this order
SMALLEST = 1e-20  # squared distances below may have lost what float32 cannot hold
MAX_SHARED_ROWS = 340  # of whom a piece stays in the second cache
SMALL_WORK = 1 << 18  # pairs times columns below which waking a thread costs more than it saves


# --- tiles --------------------------------------------------------------------------------------------------


def _write_tile() -> Any:
    """Write kernel(x, a, members, count, sums, at): sums[at + j] += Σ_c (x[a, c] − x[members[j], c])².

    c < count and j < WIDTH; each sum is of the type of x.
    """
    each = range(WIDTH)
    return written(
        [
            "def kernel(x, a, members, count, sums, at):",
            "    own = x[a]",
            *(f"    x{j} = x[members[{j}]]; s{j} = x.dtype.type(0)" for j in each),
            "    for c in range(count):",
            *(f"        gap{j} = own[c] - x{j}[c]; s{j} += gap{j} * gap{j}" for j in each),
            *(f"    sums[at + {j}] += s{j}" for j in each),
        ],
        fastmath={"reassoc", "contract", "nsz"},
    )  # fmt: skip  (reassoc: sums in the lanes of vectors)


_add_tile = _write_tile()


@inlined
def _fill(row: Floats, start: int, count: int, padded: int, target: Floats) -> None:
    """Copy columns start … start + count − 1 of a row, and zeros up to `padded`."""
    source = row[start : start + count]
    for c in range(count):
        target[c] = source[c]
    for c in range(count, padded):
        target[c] = 0


@inlined
def _add_group(
    table: Floats, rows: Integers, point: Floats, tiles: Integers, group: int, x: Floats, sums: Floats
) -> None:
    """Add the squared distances of the tiles' pairs over the columns of one group.

    Positions in tiles count the rows, and after them the point, if x (scratch) has a place for it.
    """
    right = min(table.shape[1], (group + 1) * GROUP)
    for start in range(group * GROUP, right, x.shape[1]):
        count = min(x.shape[1], right - start)
        padded = (count + 15) // 16 * 16
        for r in range(len(rows)):
            _fill(table[rows[r]], start, count, padded, x[r])
        if len(x) > len(rows):
            _fill(point, start, count, padded, x[len(rows)])
        for t in range(len(tiles)):
            _add_tile(x, tiles[t, 0], tiles[t, 1:], padded, sums, t * WIDTH)


@compiled
def _add_groups(
    table: Floats, rows: Integers, tiles: Integers, begin: int, end: int, x: Floats, partial: Floats
) -> None:
    """partial[u] = the tiles' sums over group u, u = begin … end − 1."""
    for u in range(begin, end):
        partial[u] = 0
        _add_group(table, rows, table[0], tiles, u, x, partial[u])


@compiled
def _add_victims(
    table: Floats, index: Integers, points: Floats, which: Integers, tiles: Integers, places: Integers,
    begin: int, end: int, x: Floats, sums: Floats, result: Floats,
) -> None:  # fmt: skip
    """result[i, j] = sum places[j] of the tiles over the rows index[i] and the point which[i]."""
    for i in range(begin, end):
        sums[1] = 0
        for group in range((table.shape[1] + GROUP - 1) // GROUP):
            sums[0] = 0
            _add_group(table, index[i], points[which[i]], tiles, group, x, sums[0])
            for s in range(sums.shape[1]):
                sums[1, s] += sums[0, s]
        for j in range(len(places)):
            result[i, j] = sums[1, places[j]]


def _scratch(rows: int, dtype: Any) -> Floats:
    return aligned(rows, PIECE * 4 // np.dtype(dtype).itemsize, dtype)


# --- distances within each victim's rows --------------------------------------------------------------------


class Shared(NamedTuple):
    """The pairs that all victims need: rows (u,), tiles of positions in them, the sum of each pair (u, u)."""

    rows: Integers
    tiles: Integers
    slot: Integers
    local: Integers  # (h, m) the index in positions


def squared_distances(table: Floats, index: Integers, dtype: Any = np.float64) -> Floats:
    """(h, m, m) Squared distances among each victim's rows, squared and summed in a dtype.

    >>> squared_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
    array([[[ 0., 25.],
            [25.,  0.]]])
    """
    (h, m), d = index.shape, table.shape[1]
    shared = shared_pairs(index, len(table))
    if shared is None:
        result = np.empty((h, m, m))

        def some(begin: int, end: int) -> None:
            by_victim(table, index[begin:end], dtype, result[begin:end])

        threads.run(some, h, small=result.size * d < 2 * SMALL_WORK)
        return result
    rows, tiles, slot, local = shared
    partial = np.empty((-(-d // GROUP), len(tiles) * WIDTH + 1))  # nothing is added to the last

    def work(begin: int, end: int) -> None:
        _add_groups(table, rows, tiles, begin, end, _scratch(len(rows), dtype), partial)

    threads.run(work, len(partial), small=partial.shape[1] * d < SMALL_WORK)
    total = np.zeros(partial.shape[1])
    for sums in partial:
        total += sums
    found: Floats = total[slot[local[:, :, None], local[:, None]]]
    return found


def by_victim(table: Floats, index: Integers, dtype: Any, result: Floats) -> None:
    """Compute result (h, m, m), each victim by itself, in this thread."""
    h, m = index.shape
    tiles, slot = _all_pairs(m)
    sums, none = np.empty((2, len(tiles) * WIDTH + 1)), np.zeros(h, np.int64)
    _add_victims(
        table, index, table, none, tiles, slot.ravel(), 0, h, _scratch(m, dtype), sums, result.reshape(h, -1)
    )


@cache
def _all_pairs(m: int) -> tuple[Integers, Integers]:
    """Return tiles of all pairs of m rows, and (m, m) the sum that belongs to each pair.

    Each row meets the half of the others that follows it in a circle, which leaves fewer places of tiles
    empty than a triangle. Members change last, so that the next anchor meets the same rows.
    """
    chunks = max(1, -(-(m // 2) // WIDTH))
    anchors = np.tile(np.arange(m), chunks)
    first = np.repeat(np.arange(chunks), m) * WIDTH + 1
    tiles = np.column_stack([anchors, (anchors[:, None] + first[:, None] + np.arange(WIDTH)) % m])
    slot = np.full((m, m), -1)
    slot[anchors[:, None], tiles[:, 1:]] = np.arange(len(tiles) * WIDTH).reshape(-1, WIDTH)
    slot = np.where((slot < 0) | (np.tri(m, dtype=bool) & (slot.T >= 0)), slot.T, slot)
    np.fill_diagonal(slot, len(tiles) * WIDTH)
    return tiles, slot


def shared_pairs(index: Integers, n: int) -> Shared | None:
    """Return the pairs that occur if computing them once is cheaper than victim by victim, else None."""
    used = np.zeros(n, np.bool_)
    used[index] = True
    rows, (h, m) = np.flatnonzero(used), index.shape
    u = len(rows)
    if u > MAX_SHARED_ROWS or u * u > 8 * h * m * m:
        return None
    local = (np.cumsum(used) - 1)[index]
    wanted = np.zeros((u, u), np.bool_)
    wanted[local[:, :, None], local[:, None]] = True
    wanted = np.triu(wanted, 1)
    tiles = np.empty((wanted.sum() + u * (u // WIDTH + 2), 1 + WIDTH), np.int64)
    slot = np.full((u, u), -1)
    tiles = tiles[: _cut(wanted, tiles, slot)]
    slot[slot < 0] = len(tiles) * WIDTH
    return Shared(rows, tiles, slot, local) if len(tiles) <= h * len(_all_pairs(m)[0]) else None


@compiled
def _cut(wanted: Flags, tiles: Integers, slot: Integers) -> int:
    """Cut the wanted pairs (u, u), upper triangle, into tiles, number their sums, and count the tiles.

    A run of rows most of which an anchor needs is one tile, and stays in the cache while anchors pass. The
    pairs that are left, such as those of rows forged for one victim, are gathered around the later row.
    """
    u, t = len(wanted), 0
    for start in range(0, u, WIDTH):
        stop = min(u, start + WIDTH)
        for a in range(stop):
            first, many = max(start, a + 1), 0
            for b in range(first, stop):
                many += wanted[a, b]
            if 2 * many > stop - first:
                tiles[t, 0] = a
                for j in range(WIDTH):
                    b = min(start + j, u - 1)
                    tiles[t, 1 + j] = b
                    if start + j < stop and b > a:
                        slot[a, b] = slot[b, a] = t * WIDTH + j
                        wanted[a, b] = False
                t += 1
    for b in range(u):
        j = 0
        for a in range(b):
            if wanted[a, b]:
                tiles[t, 0] = b
                tiles[t, 1 + j :] = a
                slot[a, b] = slot[b, a] = t * WIDTH + j
                j += 1
                if j == WIDTH:
                    t, j = t + 1, 0
        t += j > 0
    return t


# --- distances to a point -----------------------------------------------------------------------------------


def to_points(table: Floats, index: Integers, points: Floats, which: Integers) -> Floats:
    """(h, m) Squared distances of each victim's rows to the point which[i] of points, in float64; no −1.

    >>> to_points(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]), np.zeros((1, 2)), np.array([0]))
    array([[ 0., 25.]])
    """
    (h, m), d = index.shape, table.shape[1]
    result, members = np.empty((h, m)), np.minimum(np.arange(-(-m // WIDTH) * WIDTH), m - 1)
    tiles = np.insert(members.reshape(-1, WIDTH), 0, m, axis=1)

    def work(begin: int, end: int) -> None:
        x, sums = _scratch(m + 1, np.float64), np.empty((2, len(members)))
        _add_victims(table, index, points, which, tiles, np.arange(m), begin, end, x, sums, result)

    threads.run(work, h, small=result.size * d < SMALL_WORK)
    return result


def to_point(table: Floats, index: Integers, point: Floats) -> Floats:
    """(h, m) Squared distances of rows to one point, each row once, however many victims hold it; no −1."""
    used = np.zeros(len(table), np.bool_)
    used[index] = True
    rows = np.flatnonzero(used)
    padded = np.resize(rows, (-(-len(rows) // (2 * WIDTH)), 2 * WIDTH))
    values = to_points(table, padded, point[None], np.zeros(len(padded), np.int64)).ravel()
    found: Floats = values[(np.cumsum(used) - 1)[index]]
    return found


# --- neighbours ---------------------------------------------------------------------------------------------


def _exact_distance(table: Floats, a: int, b: int) -> float:
    """Compute the squared distance of two rows in float64."""
    total = 0.0
    for c in range(table.shape[1]):
        gap = np.float64(table[a, c]) - np.float64(table[b, c])
        total += gap * gap
    return total


_exact = inlined(_exact_distance, fastmath={"reassoc", "contract", "nsz"})


@compiled
def _choose(
    table: Floats, index: Integers, squared: Floats, order: Floats, k: int, margin: float, kept: Flags
) -> None:
    """kept[i, a, j] = whether column j is among the k nearest of a; ties go to the lower column.

    order is `squared`, sorted. squared is known but for a share of margin − 1, and may be changed; at margin
    1 it is taken as it is.
    """
    h, m = index.shape
    for i in range(h):
        for a in range(m):
            row, last, after = squared[i, a], order[i, a, k - 1], order[i, a, k]
            for j in range(m):
                kept[i, a, j] = row[j] <= last
            if after > last * margin and (margin == 1 or SMALLEST < after < np.inf):
                continue
            if margin > 1:
                _settle(table, index[i], a, row, last / margin, after * margin)
            for j in range(m):
                before = 0
                for q in range(m):
                    before += row[q] < row[j] or (row[q] == row[j] and q < j)
                kept[i, a, j] = before < k


@inlined
def _settle(table: Floats, rows: Integers, a: int, row: Floats, low: float, high: float) -> None:
    """Replace distances from low to high by exact ones, those below by −1, those above by ∞."""
    if low <= SMALLEST or not high < np.inf:  # float32 underflowed or overflowed
        low, high = min(low, 0.0), max(high, 2 * SMALLEST)
    who, alike = -1, True
    for j in range(len(rows)):
        if low <= row[j] <= high:
            who = rows[j] if who < 0 else who
            alike &= rows[j] == who
    for j in range(len(rows)):
        if row[j] < low:
            row[j] = -1.0
        elif row[j] > high:
            row[j] = np.inf
        else:  # one row several times is at one distance, whatever that is
            row[j] = 0.0 if alike else _exact(table, rows[a], rows[j])


def keep_nearest(table: Floats, index: Integers, squared: Floats, k: int, margin: float) -> Flags:
    """(h, m, m) Mark the k columns nearest to each, itself among them, in this thread; squared is spent."""
    each = np.arange(index.shape[1])
    squared[:, each, each] = -1.0
    kept = np.ones(squared.shape, np.bool_)
    if k < len(each):
        _choose(table, index, squared, np.sort(squared, axis=2), k, margin, kept)
    return kept


def neighbours(table: Floats, index: Integers, k: int, alone: bool = False) -> Flags:
    """(h, m, m) Mark the k rows nearest to each row, as exact distances have them.

    Args:
        table: (n, d).
        index: (h, m), without −1.
        k: how many are kept of each victim's rows, the row itself among them.
        alone: compute victim by victim, in this thread.

    >>> neighbours(np.array([[0.0], [2.0], [3.0]], np.float32), np.array([[0, 1, 2]]), 2).astype(int).tolist()
    [[[1, 1, 0], [0, 1, 1], [0, 1, 1]]]
    """
    (h, m), margin = index.shape, MARGIN if table.dtype == np.float32 else 1.0
    if alone:
        squared = np.empty((h, m, m))
        by_victim(table, index, table.dtype, squared)
        return keep_nearest(table, index, squared, k, margin)
    squared, kept = squared_distances(table, index, table.dtype), np.empty((h, m, m), np.bool_)

    def work(begin: int, end: int) -> None:
        some = slice(begin, end)
        kept[some] = keep_nearest(table, index[some], squared[some], k, margin)

    threads.run(work, h, small=squared.size < SMALL_WORK)
    return kept


def nearest(squared: Floats, k: int) -> NDArray[np.int32]:
    """(h, m, k) Return the k columns nearest to each, ascending, given distances (h, m, m) as they are."""
    h, m, _ = squared.shape
    no_table, kept = np.empty((0, 0)), np.empty((h, m, k), np.int32)

    def work(begin: int, end: int) -> None:
        index, values = (
            np.zeros((end - begin, m), np.int64),
            np.array(squared[begin:end], np.float64, order="C"),
        )
        marks = keep_nearest(no_table, index, values, k, 1.0)
        kept[begin:end] = np.nonzero(marks)[2].reshape(-1, m, k)

    threads.run(work, h, small=squared.size < SMALL_WORK)
    return kept
