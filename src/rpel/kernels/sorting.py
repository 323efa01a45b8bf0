"""Sorting networks: which pairs to compare, in which order, so that values end up in ascending rank.

Laws: a network is a fixed list of (low, high) pairs, the same for every column, so all columns go through vector
registers together; only comparators on which a needed rank depends are kept; generic and specialised kernels walk the
same list, so that even the order of +0 and −0 is the same.
"""

from functools import cache

from rpel.kernels.arguments import Operation

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
