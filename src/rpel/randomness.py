"""The only source of randomness: every random number comes from (seed, purpose, round, node).

Invariants:

1. Equal coordinates give equal numbers, whatever was drawn before. Any round can be replayed alone, and a
   resumed run draws what it would have drawn.
2. Different coordinates never share a number: the purpose chooses the key of a counter-based generator
   (Philox), and round and node its counter.
3. Numbers drawn for many nodes at once are, node by node, what each node would have drawn alone.
"""

import hashlib
import json

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

Purpose = str | tuple[str, int]
"""What the numbers are for; a purpose may carry a number, as in ("batch", 2) for local step 2."""

BLOCK = 1 << 14  # counters at a time: their temporaries stay in the second-level cache
MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
KEY_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def key(seed: int, purpose: Purpose) -> NDArray[np.uint64]:
    """Return the generator's key, two unsigned 64-bit words: a hash of seed and purpose."""
    digest = hashlib.sha256(json.dumps([seed, purpose]).encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u8")


def stream(seed: int, purpose: Purpose, round: int = 0, node: int = 0) -> Generator:
    """Return the generator of these coordinates, at its beginning.

    >>> a, b = stream(0, "pull", round=3, node=7), stream(0, "pull", round=3, node=7)
    >>> bool((a.random(5) == b.random(5)).all())
    True
    """
    return Generator(Philox(key=key(seed, purpose), counter=[0, 0, node, round]))


def draws(seed: int, purpose: Purpose, round: int, ids: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """(h, size) Draw uniform numbers in [0, 1) for many nodes.

    Row r equals ``stream(seed, purpose, round, ids[r]).random(size)``.

    >>> many = draws(0, "pull", 3, np.arange(100), 5)
    >>> bool((many[7] == stream(0, "pull", round=3, node=7).random(5)).all())
    True
    """
    nodes = _check_ids(ids)
    out = np.empty((len(nodes), size))
    rows = max(1, BLOCK // max(1, size // 4))
    for start in range(0, len(nodes), rows):
        block = slice(start, start + rows)
        out[block] = _philox(key(seed, purpose), round, nodes[block].astype(np.uint64), size)
    return out


def sample_without_replacement(
    seed: int, purpose: Purpose, round: int, ids: NDArray[np.int64], population: int, size: int
) -> NDArray[np.int64]:
    """(h, size) Draw different others of 0 … population − 1 for each node, every set equally likely.

    The order within a row has no meaning. A row depends on its own coordinates alone.

    Args:
        seed: the seed of the run.
        purpose: what the numbers are for.
        round: the round.
        ids: (h,) the nodes, which do not draw themselves.
        population: how many nodes there are.
        size: how many others each node draws.

    >>> sample_without_replacement(0, "pull", 3, np.array([1]), population=4, size=3)
    array([[0, 2, 3]])
    """
    nodes = _check_ids(ids)
    if len(nodes) and nodes.max() >= population:
        raise ValueError(f"node {nodes.max()} is not among 0 … {population - 1}")
    if not 0 <= size < population:
        raise ValueError(f"cannot draw {size} others from a population of {population}")
    if size == population - 1:
        others = np.arange(size, dtype=np.int64)
        return others + (others >= nodes[:, None])
    chosen = np.empty((len(nodes), size), np.int64)
    rows = max(1, BLOCK // max(1, size))
    for start in range(0, len(nodes), rows):
        block = slice(start, start + rows)
        uniform = draws(seed, purpose, round, nodes[block], size)
        chosen[block] = _choose(uniform, nodes[block], population - 1)
    return chosen


def _check_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    nodes = np.asarray(ids)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu" or (len(nodes) and nodes.min() < 0):
        raise ValueError("ids must be a vector of integers, 0 or more")
    return nodes.astype(np.int64)


def _choose(uniform: NDArray[np.float64], nodes: NDArray[np.int64], others: int) -> NDArray[np.int64]:
    """Apply Floyd's algorithm: draw from one value more each time, and take that one if the draw is taken."""
    chosen = np.empty(uniform.shape[::-1], np.int64)
    for c, column in enumerate(uniform.T):
        last = others - len(chosen) + c
        value = np.minimum((column * (last + 1)).astype(np.int64), last)
        taken = (chosen[:c] == value).any(axis=0)
        chosen[c] = np.where(taken, last, value)
    return np.asarray((chosen + (chosen >= nodes)).T)


def _philox(key: NDArray[np.uint64], round: int, nodes: NDArray[np.uint64], size: int) -> NDArray[np.float64]:
    """Compute Philox4x64-10 with the counters (block, 0, node, round), blocks from 1 on as in NumPy."""
    blocks = np.arange(1, -(-size // 4) + 1, dtype=np.uint64)
    c0, c2 = np.repeat(blocks[None], len(nodes), axis=0), np.repeat(nodes[:, None], len(blocks), axis=1)
    c1, c3 = np.zeros_like(c0), np.full_like(c0, round)
    k0, k1 = key
    with np.errstate(over="ignore"):
        for _ in range(10):
            (high0, low0), (high1, low1) = _multiply(MULTIPLIERS[0], c0), _multiply(MULTIPLIERS[1], c2)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
    words = np.stack([c0, c1, c2, c3], axis=-1).reshape(len(nodes), -1)[:, :size]
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(m: np.uint64, c: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the high and the low 64 bits of the products m · c, computed by halves."""
    low, high = c & LOW, c >> HALF
    first = (m & LOW) * low
    second = (m >> HALF) * low + (first >> HALF)
    third = (m & LOW) * high + (second & LOW)
    return (m >> HALF) * high + (second >> HALF) + (third >> HALF), m * c
