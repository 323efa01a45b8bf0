"""The law of hostile answers when a node aggregates those of its last c rounds (`memory`), exactly.

In a round a node draws s peers among those it did not draw in the c − 1 rounds before, so the hostile among
the c·s of a window are hypergeometric (n − 1, b, c·s), and the counts of the last c − 1 draws are a Markov
chain: with Σ their sum, the next one is hypergeometric (n − 1 − (c − 1)s, b − Σ, s).
A node survives while no window holds more than k.

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
_STATES = 200_000
"""Transitions of the chain up to which it is walked; so many need thousands of answers,
and a bound is as good."""
_CUT = 1e-18


def window_probability(
    nodes: int,
    byzantine: int,
    pull: int,
    rounds: int,
    memory: int,
    b_hat: int,
    aggregations: int | None = None,
) -> float:
    """P(no window of any honest node holds more than b̂ hostile answers): exact up to c = 3,
    a lower bound beyond.

    nodes, byzantine, pull, rounds: n, b, s, T. memory: c, whose windows hold c·s answers. aggregations: where
    c = 1, how many times honest nodes aggregate in all, if that is not once a round each.

    >>> round(window_probability(nodes=100, byzantine=10, pull=8, rounds=200, memory=2, b_hat=8), 6)
    0.998895
    """
    check_window(nodes, pull, memory)
    if b_hat >= min(byzantine, memory * pull):
        return 1.0
    honest = nodes - byzantine
    if memory == 1:
        low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
        one = -math.inf if b_hat < low else float(log_cdf[b_hat - low]) if b_hat - low < len(log_cdf) else 0.0
        return math.exp((honest * rounds if aggregations is None else aggregations) * one)
    if not is_exact(nodes, byzantine, pull, memory):
        return max(0.0, 1.0 - honest * rounds * _exceeded(nodes - 1, byzantine, memory * pull, b_hat))
    return math.exp(honest * _log_survival(nodes - 1, byzantine, pull, rounds, memory, b_hat))


def check_window(nodes: int, pull: int, memory: int) -> None:
    """ValueError where so many different peers do not exist."""
    if memory < 1:
        raise ValueError(f"memory {memory} is impossible: it must be at least 1, the answers of one round")
    if memory * pull > nodes - 1:
        raise ValueError(
            f"memory {memory} with pull {pull} needs {memory * pull} different peers, and there are "
            f"{nodes - 1}: the largest pull is {(nodes - 1) // memory}"
        )


def memory_caution(pull: int, b_hat: int, memory: int) -> str | None:
    """A sentence where line 9 may drop all of a round's new answers, s ≤ b̂ of m = c·s + 1 models.

    Remembered answers move along with the node's own model, so own and remembered models, at least m − b̂ of
    them, agree about any step of the node's, however wild.

    >>> memory_caution(pull=8, b_hat=7, memory=2), memory_caution(pull=8, b_hat=8, memory=1)
    (None, None)
    """
    if memory == 1 or pull > b_hat:
        return None
    return (
        f"pull {pull} is not above b_hat {b_hat}, so a round's new answers cannot hold back a node whose own "
        "steps run away: what it remembers moves along with it"
    )


def is_exact(nodes: int, byzantine: int, pull: int, memory: int) -> bool:
    """Whether :func:`window_probability` is exact here and no bound.

    >>> is_exact(100, 10, 8, 3), is_exact(100, 10, 8, 4)
    (True, False)
    """
    return memory == 1 or (memory <= _EXACT and _support(nodes - 1, byzantine, pull)[1] ** memory <= _STATES)


def window_holds(
    nodes: int, byzantine: int, pull: int, rounds: int, memory: int, b_hat: int, p: float
) -> bool:
    """Whether P(all windows ≤ b̂) ≥ p. The chain is walked only where neither bound decides: Boole's from
    below and, from above, that exceedances come in groups of c at most on average: windows c rounds apart
    share no draw, and after many hostile answers fewer are left to be drawn. Twice that is allowed for.

    >>> window_holds(100, 10, 8, 200, 2, 8, 0.99)
    True
    """
    if b_hat >= min(byzantine, memory * pull):
        return True
    expected = (nodes - byzantine) * rounds * _exceeded(nodes - 1, byzantine, memory * pull, b_hat)
    if expected <= 1.0 - p:
        return True
    if expected > -2 * memory * math.log(p) or not is_exact(nodes, byzantine, pull, memory):
        return False
    return window_probability(nodes, byzantine, pull, rounds, memory, b_hat) >= p


def window_quantile(nodes: int, byzantine: int, pull: int, rounds: int, memory: int, p: float) -> int:
    """The smallest b̂ with P(all windows ≤ b̂) ≥ p.

    >>> window_quantile(nodes=1000, byzantine=100, pull=13, rounds=500, memory=3, p=0.99)
    16
    """
    check_window(nodes, pull, memory)
    fails, holds = -1, min(byzantine, memory * pull)
    while holds - fails > 1:
        middle = (fails + holds) // 2
        enough = window_holds(nodes, byzantine, pull, rounds, memory, middle, p)
        fails, holds = (fails, middle) if enough else (middle, holds)
    return holds


def _exceeded(others: int, marked: int, draws: int, most: int) -> float:
    """P(one window holds more than ``most``)."""
    low, above = _tail(others, marked, draws)
    return 1.0 if most < low else float(above[most - low]) if most - low < len(above) else 0.0


def _log_survival(others: int, marked: int, pull: int, rounds: int, memory: int, most: int) -> float:
    """log P(one node's windows all stay at or below ``most``), memory 2 or 3."""
    low, size = _support(others, marked, pull)
    counts = np.arange(low, low + size)
    lists = memory - 1
    following = _conditional(
        others - lists * pull, marked, pull, lists * low, lists * (size - 1) + 1, low, size
    )
    state = _first(others, marked, pull, lists, low, size)  # the joint law of the last c − 1 counts
    before = counts - low if lists == 1 else (counts - low)[:, None] + (counts - low)[None, :]
    total_before = before + lists * low
    allowed = total_before[..., None] + counts <= most
    surviving, lost = (
        np.where(allowed, following[before], 0.0),
        np.where(allowed, 0.0, following[before]).sum(axis=-1),
    )
    total, left = 0.0, 1.0
    for t in range(rounds):
        left = float((state * lost).sum())
        if left >= 1.0:
            return -math.inf
        total += math.log1p(-left)
        after = (
            state @ surviving if lists == 1 else np.einsum("ab,abx->bx", state, surviving)
        )  # the oldest is forgotten
        after /= 1.0 - left
        converged = float(np.abs(after - state).max()) < 1e-16
        state = after
        if converged:  # every further round loses the same share
            return total + (rounds - t - 1) * math.log1p(-left)
    return total


def _support(others: int, marked: int, pull: int) -> tuple[int, int]:
    """The first count and the number of counts of one draw outside of which less than 1e-18 lies.

    By symmetry every draw of the chain has this law, so what is cut is less than that in each round.
    """
    low, p = _cached(others, marked, pull)
    heavy = np.flatnonzero(p >= _CUT)
    return low + int(heavy[0]), int(heavy[-1] - heavy[0]) + 1


def _first(others: int, marked: int, pull: int, lists: int, low: int, size: int) -> Floats:
    """The joint law of the counts of the first ``lists`` draws, which are disjoint: (size,) or (size,
    size)."""
    one = _row(others, marked, pull, low, size)
    if lists == 1:
        return one
    return one[:, None] * _conditional(others - pull, marked, pull, low, size, low, size)


def _conditional(others: int, marked: int, pull: int, gone: int, known: int, low: int, size: int) -> Floats:
    """(known, size): the law of the next count when Σ = gone, gone + 1, … of the marked are out of reach.

    All at once by ratios where every count can be had; each law is made whole on these counts alone, which
    changes the joint law by less than what was cut.
    """
    left = marked - gone - np.arange(known, dtype=np.float64)[:, None]
    k = np.arange(low, low + size - 1, dtype=np.float64)
    unmarked = others - left - pull + k + 1
    if left.min() < low + size - 1 or unmarked.min(initial=1.0) <= 0:
        return np.stack([_row(others, marked - gone - more, pull, low, size) for more in range(known)])
    ratio = (left - k) * (pull - k) / ((k + 1) * unmarked)
    weights = np.cumprod(np.concatenate([np.ones((known, 1)), ratio], axis=1), axis=1)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@lru_cache(maxsize=4096)
def _cached(population: int, marked: int, draws: int) -> tuple[int, Floats]:
    return hypergeometric.pmf(population, marked, draws)


@lru_cache(maxsize=4096)
def _tail(population: int, marked: int, draws: int) -> tuple[int, Floats]:
    return hypergeometric.tail(population, marked, draws)


def _row(population: int, marked: int, draws: int, low: int, size: int) -> Floats:
    """(size,) the law of a count on low, low + 1, …; a state that cannot be reached has none."""
    row = np.zeros(size)
    if 0 <= marked <= population and draws <= population:
        first, p = _cached(population, marked, draws)
        begin, end = max(first, low), min(first + len(p), low + size)
        row[begin - low : max(begin, end) - low] = p[begin - first : max(begin, end) - first]
    return row
