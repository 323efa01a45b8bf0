"""Which k columns are nearest to each anchor.

Laws: the order is (distance, column), the anchor before all; the kept columns come out ascending, so that whoever
sums them has one fixed order; the distances are not written to.

A column's rank is counted, not sorted for: m² comparisons, sixteen at a time, without a branch; less than the mixing
of m rows of d ≥ m columns costs afterwards.
"""

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool as threads
from rpel.kernels.arguments import Float64
from rpel.kernels.cache import compiled
from rpel.kernels.ordering import count_below


@compiled
def _nearest(distances: Float64, k: int, begin: int, end: int, kept: NDArray[np.int32]) -> None:
    m = distances.shape[1]
    padded = (m + 15) // 16 * 16
    row, rank = np.full(padded, np.inf), np.empty(padded, np.int64)
    for i in range(begin, end):
        for anchor in range(m):
            for j in range(m):
                row[j] = distances[i, anchor, j]
            row[anchor] = -1.0
            count_below(row, m, padded, rank)
            _keep(rank, m, k, i, anchor, kept)


@compiled
def _keep(rank: NDArray[np.int64], m: int, k: int, i: int, anchor: int, kept: NDArray[np.int32]) -> None:
    """The k columns of lowest (rank, column), ascending. Equal distances may share a rank: then the last of those that
    share the highest rank below k are too many.
    """
    candidates = 0
    highest = 0
    for j in range(m):
        if rank[j] < k:
            candidates += 1
            highest = max(highest, rank[j])
    room = k  # for columns of the highest rank: what the others leave
    if candidates > k:
        for j in range(m):
            room -= rank[j] < highest
    place = 0
    for j in range(m):
        if rank[j] < highest or (rank[j] == highest and room > 0):
            room -= rank[j] == highest
            kept[i, anchor, place] = j
            place += 1


def nearest(distances: Float64, k: int) -> NDArray[np.int32]:
    """(h, m, k) the k nearest columns of every anchor, itself included, ascending.

    >>> nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), 2)
    array([[[0, 2], [1, 2], [0, 2]]], dtype=int32)
    """
    h, m, _ = distances.shape
    kept = np.empty((h, m, k), np.int32)

    def work(begin: int, end: int) -> None:
        _nearest(distances, k, begin, end, kept)

    threads.run(work, h, small=distances.size * m < 1 << 18)
    return kept
