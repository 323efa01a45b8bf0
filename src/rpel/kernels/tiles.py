"""Which pairs of rows to compare, cut into tiles that fill the vector registers.

Laws: every pair asked for stands in exactly one tile; the cut changes the speed, never a distance.

A `Tiles` lists anchors and, for each, up to seven rows to compare it with; one slot per pair, in the order of
`members`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpel.kernels.cache import compiled
from rpel.kernels.vectors import TILE

_DENSE = 5  # needed pairs of seven from which a run of rows is kept in the first cache

Int64 = NDArray[np.int64]


class Tiles(NamedTuple):
    """Pairs to compute: members[first[t] : first[t + 1]] (at most seven) against anchors[t]; positions in `rows`."""

    rows: Int64
    anchors: Int64
    first: Int64
    members: Int64


def cut_tiles(rows: Int64, slot: NDArray[np.int32]) -> Tiles:
    """Cut the pairs marked in slot (u, u), upper triangle, into tiles, and number them there from 1 on."""
    count = int(np.count_nonzero(slot))
    anchors, first, members = np.empty(count, np.int64), np.empty(count + 1, np.int64), np.empty(count, np.int64)
    used = int(_cut(slot, anchors, first, members))
    return Tiles(rows, anchors[:used], first[: used + 1], members)


@compiled
def _cut(slot: NDArray[np.int32], anchors: Int64, first: Int64, members: Int64) -> int:
    """Two passes: where a run of rows has many pairs with an anchor, the run stays in cache while anchors pass by;
    what is left (forged rows, that one victim alone has seen) is gathered around the later row. Slots count from 1.
    """
    u = len(slot)
    tile = 0
    place = 0
    first[0] = 0
    runs = (u + TILE - 1) // TILE
    for run in range(runs):
        start, high = u * run // runs, u * (run + 1) // runs
        for a in range(high):
            low = max(start, a + 1)
            wanted = 0
            for b in range(low, high):
                wanted += slot[a, b] < 0
            if wanted >= min(_DENSE, high - low) and wanted > 0:
                anchors[tile] = a
                for b in range(low, high):
                    if slot[a, b] < 0:
                        members[place] = b
                        place += 1
                        slot[a, b] = place
                tile += 1
                first[tile] = place
    for b in range(u):
        for a in range(b):
            if slot[a, b] < 0:
                if place == first[tile]:
                    anchors[tile] = b
                members[place] = a
                place += 1
                slot[a, b] = place
                if place - first[tile] == TILE:
                    tile += 1
                    first[tile] = place
        if place > first[tile]:
            tile += 1
            first[tile] = place
    return tile


def to_first(m: int) -> Tiles:
    """Row 0 against each of rows 1 … m."""
    edges = np.append(np.arange(0, m, TILE), m)
    return Tiles(np.arange(m + 1), np.zeros(len(edges) - 1, np.int64), edges, np.arange(1, m + 1))
