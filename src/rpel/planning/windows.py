"""The law of hostile answers when a node aggregates those of its last c rounds (`memory`), exactly.

In a round a node draws s peers among those it did not draw in the c − 1 rounds before, so the hostile among the c·s of
a window are hypergeometric (n − 1, b, c·s), and the counts of the last c − 1 draws are a Markov chain: with Σ their
sum, the next one is hypergeometric (n − 1 − (c − 1)s, b − Σ, s). A node survives while no window holds more than k.

Invariant: what is added up is the mass that leaves, a sum of positive terms, never one minus what stays: so
probabilities near one are as exact as their complements.
"""

import math
from functools import lru_cache

import numpy as np

from rpel import hypergeometric
from rpel.types import Floats

_EXACT = 3
"""Windows of more rounds are bounded (Boole): the chain would have (s + 1)^(c − 1) states."""


def window_probability(nodes: int, byzantine: int, pull: int, rounds: int, memory: int, b_hat: int) -> float:
    """P(no window of any honest node holds more than b̂ hostile answers): exact up to c = 3, a lower bound beyond.

    nodes, byzantine, pull, rounds: n, b, s, T. memory: c, whose windows hold c·s answers.

    >>> round(window_probability(nodes=100, byzantine=10, pull=8, rounds=200, memory=2, b_hat=8), 6)
    0.998895
    """
    if memory * pull > nodes - 1:
        raise ValueError(
            f"memory {memory} with pull {pull} needs {memory * pull} different peers, and there are {nodes - 1}: "
            f"the largest pull is {(nodes - 1) // memory}"
        )
    if b_hat >= min(byzantine, memory * pull):
        return 1.0
    honest = nodes - byzantine
    if memory > _EXACT:
        low, above = hypergeometric.tail(nodes - 1, byzantine, memory * pull)
        exceeded = 1.0 if b_hat < low else float(above[b_hat - low]) if b_hat - low < len(above) else 0.0
        return max(0.0, 1.0 - honest * rounds * exceeded)
    return math.exp(honest * _log_survival(nodes - 1, byzantine, pull, rounds, memory, b_hat))


def window_quantile(nodes: int, byzantine: int, pull: int, rounds: int, memory: int, p: float) -> int:
    """The smallest b̂ with P(all windows ≤ b̂) ≥ p.

    >>> window_quantile(nodes=1000, byzantine=100, pull=13, rounds=500, memory=3, p=0.99)
    16
    """
    fails, holds = -1, min(byzantine, memory * pull)
    while holds - fails > 1:
        middle = (fails + holds) // 2
        enough = window_probability(nodes, byzantine, pull, rounds, memory, middle) >= p
        fails, holds = (fails, middle) if enough else (middle, holds)
    return holds


def _log_survival(others: int, marked: int, pull: int, rounds: int, memory: int, most: int) -> float:
    """log P(one node's windows all stay at or below ``most``)."""
    if memory == 1:
        low, log_cdf = hypergeometric.log_cdf(others, marked, pull)
        one = -math.inf if most < low else float(log_cdf[most - low]) if most - low < len(log_cdf) else 0.0
        return rounds * one
    size = min(marked, pull) + 1
    counts = np.arange(size)
    following = _conditional(others - (memory - 1) * pull, marked, pull, (memory - 1) * (size - 1) + 1, size)
    state = _first(others, marked, pull, memory - 1, size)  # the joint law of the last c − 1 counts
    before = counts if memory == 2 else counts[:, None] + counts[None, :]
    allowed = before[..., None] + counts <= most
    joint = following[before]  # (…, size): the law of the next count for every state
    total, left = 0.0, 1.0
    for t in range(rounds):
        moved = state[..., None] * joint
        left = float(moved[~allowed].sum())
        if left >= 1.0:
            return -math.inf
        total += math.log1p(-left)
        after = np.where(allowed, moved, 0.0).sum(axis=0)  # the oldest count is forgotten
        after /= 1.0 - left
        resolved = float(np.abs(after - state).max()) < 1e-17
        state = after
        if resolved:  # every further round loses the same share
            return total + (rounds - t - 1) * math.log1p(-left)
    return total


def _first(others: int, marked: int, pull: int, lists: int, size: int) -> Floats:
    """The joint law of the counts of the first ``lists`` draws, which are disjoint: (size,) or (size, size)."""
    one = _row(others, marked, pull, size)
    if lists == 1:
        return one
    return one[:, None] * _conditional(others - pull, marked, pull, size, size)


def _conditional(others: int, marked: int, pull: int, known: int, size: int) -> Floats:
    """(known, size): the law of the next count when Σ = 0, 1, … of the marked are out of reach."""
    return np.stack([_row(others, marked - gone, pull, size) for gone in range(known)])


@lru_cache(maxsize=4096)
def _cached(population: int, marked: int, draws: int) -> tuple[int, Floats]:
    return hypergeometric.pmf(population, marked, draws)


def _row(population: int, marked: int, draws: int, size: int) -> Floats:
    row = np.zeros(size)
    if marked < 0 or marked > population:  # a state that cannot be reached
        row[0] = 1.0
        return row
    low, p = _cached(population, marked, draws)
    end = min(size, low + len(p))
    row[low:end] = p[: end - low]
    return row
