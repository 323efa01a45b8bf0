"""The only source of randomness: every random number comes from (seed, purpose, round, node).

Laws: equal coordinates give equal numbers whatever was drawn before, so any round replays alone and a resumed
run draws what it would have drawn; different coordinates never share a number, because the purpose chooses
the key of a counter-based generator (Philox) and round and node its counter. What is drawn for many nodes at
once is, node by node, what each would have drawn alone.

numba is imported when many nodes are first drawn together, not before: who only plans does not wait for it.
"""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

Purpose = str | tuple[str, int]
"""What the numbers are for; a purpose may carry a number, as in ("batch", 2) for local step 2."""


def key(seed: int, purpose: Purpose) -> np.ndarray:
    """The generator's key, two unsigned 64-bit words: a hash of seed and purpose."""
    digest = hashlib.sha256(json.dumps([seed, purpose]).encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u8")


def stream(seed: int, purpose: Purpose, round: int = 0, node: int = 0) -> Generator:
    """The generator of these coordinates, at its beginning.

    >>> a, b = stream(0, "pull", round=3, node=7), stream(0, "pull", round=3, node=7)
    >>> bool((a.random(5) == b.random(5)).all())
    True
    """
    return Generator(Philox(key=key(seed, purpose), counter=[0, 0, node, round]))


_FEW = 100  # nodes for which one generator, set to each, costs less in a few hundred rounds than compiling


def draws(seed: int, purpose: Purpose, round: int, ids: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) for many nodes: row r equals
    ``stream(seed, purpose, round, ids[r]).random(size)``.

    >>> many = draws(0, "pull", 3, np.arange(100), 5)
    >>> bool((many[7] == stream(0, "pull", round=3, node=7).random(5)).all())
    True
    """
    nodes = _checked(ids)
    out = np.empty((len(nodes), size))
    if len(nodes) <= _FEW:
        coins = stream(seed, purpose, round)
        state = coins.bit_generator.state
        for row, node in zip(out, nodes, strict=True):
            state["state"]["counter"][2] = node
            coins.bit_generator.state = state
            coins.random(out=row)
    else:
        _compiled(_fill)(*key(seed, purpose), np.uint64(round), nodes, out)
    return out


def sample_without_replacement(
    seed: int, purpose: Purpose, round: int, ids: NDArray[np.int64], population: int, size: int
) -> NDArray[np.int64]:
    """For each node of ids (h,): ``size`` different others of 0 … population − 1, every set equally likely;
    (h, size).

    The order within a row means nothing. A row depends on its own coordinates alone.

    >>> sample_without_replacement(0, "pull", 3, np.array([1]), population=4, size=3)
    array([[0, 2, 3]])
    """
    nodes = _checked(ids)
    if len(nodes) and nodes.max() >= population:
        raise ValueError(f"node {nodes.max()} is not among 0 … {population - 1}")
    if not 0 <= size < population:
        raise ValueError(f"{size} others cannot be drawn from a population of {population}")
    if size == population - 1:
        others = np.arange(size, dtype=np.int64)
        return others + (others >= nodes.astype(np.int64)[:, None])
    chosen = np.empty((len(nodes), size), np.int64)
    if len(nodes) <= _FEW:
        _choose_few(draws(seed, purpose, round, ids, size), nodes.astype(np.int64), population, chosen)
    else:
        _choose_in_blocks(seed, purpose, round, nodes.astype(np.int64), population, chosen)
    return chosen


def _choose_in_blocks(
    seed: int,
    purpose: Purpose,
    round: int,
    nodes: NDArray[np.int64],
    population: int,
    chosen: NDArray[np.int64],
) -> None:
    """Rows by blocks, on all threads: the uniform numbers of a block are all that is ever there beside the
    result."""
    from rpel.backend import pool

    choose, _ = _compiled(_choose), _compiled(_fill)  # before any thread wants them
    step = max(1 << 13, population // 16)

    def work(begin: int, end: int) -> None:
        for first in range(begin * step, min(end * step, len(nodes)), step):
            part = slice(first, first + step)
            uniform = draws(seed, purpose, round, nodes[part], chosen.shape[1])
            choose(uniform, nodes[part], np.full(population, -1, np.int64), chosen[part])

    pool.run(work, -(-len(nodes) // step))


def _checked(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    nodes = np.asarray(ids)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu" or (len(nodes) and nodes.min() < 0):
        raise ValueError("ids must be a vector of whole numbers from 0 on")
    return nodes.astype(np.uint64)


def _choose(uniform: Any, nodes: Any, owner: Any, chosen: Any) -> None:
    """Floyd's algorithm on the others, numbered 0 … n − 2: each draw has one value more,
    and is that one if taken.

    owner (n,) holds, for each value, the row that took it last.
    """
    others, size = len(owner) - 1, uniform.shape[1]
    for r in range(len(nodes)):
        for c in range(size):
            last = others - size + c
            value = min(int(uniform[r, c] * (last + 1)), last)
            if owner[value] == r:
                value = last
            owner[value] = r
            chosen[r, c] = value + (value >= nodes[r])


def _choose_few(
    uniform: NDArray[np.float64], nodes: NDArray[np.int64], population: int, chosen: NDArray[np.int64]
) -> None:
    """The same in NumPy, all rows at once."""
    others, size = population - 1, uniform.shape[1]
    for c in range(size):
        last = others - size + c
        value = np.minimum((uniform[:, c] * (last + 1)).astype(np.int64), last)
        taken = (chosen[:, :c] == value[:, None]).any(axis=1)
        chosen[:, c] = np.where(taken, last, value)
    chosen += chosen >= nodes[:, None]


def _fill(key0: Any, key1: Any, round: Any, nodes: Any, out: Any) -> None:
    """Philox4x64-10 with counter (block, 0, node, round), blocks from 1 on as NumPy counts them."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    w0, w1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
    size = out.shape[1]
    for r in range(len(nodes)):
        for block in range((size + 3) // 4):
            c0, c1, c2, c3 = np.uint64(block + 1), np.uint64(0), nodes[r], round
            k0, k1 = key0, key1
            for _ in range(10):
                # The high words of m0·c0 and m1·c2, by halves.
                a = (m0 & low) * (c0 & low)
                b = (m0 >> half) * (c0 & low) + (a >> half)
                c = (m0 & low) * (c0 >> half) + (b & low)
                high0 = (m0 >> half) * (c0 >> half) + (b >> half) + (c >> half)
                a = (m1 & low) * (c2 & low)
                b = (m1 >> half) * (c2 & low) + (a >> half)
                c = (m1 & low) * (c2 >> half) + (b & low)
                high1 = (m1 >> half) * (c2 >> half) + (b >> half) + (c >> half)
                c0, c1, c2, c3 = high1 ^ c1 ^ k0, m1 * c2, high0 ^ c3 ^ k1, m0 * c0
                k0, k1 = k0 + w0, k1 + w1
            words = (c0, c1, c2, c3)
            for j in range(min(4, size - 4 * block)):
                out[r, 4 * block + j] = np.float64(words[j] >> np.uint64(11)) * 2.0**-53


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    from rpel.backend.cache import compiled

    return compiled(function)
