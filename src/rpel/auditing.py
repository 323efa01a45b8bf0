"""Measure membership inference: how well scores separate members from non-members, and what that proves.

The lower bound on ε is that of Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run"
(2023), theorem 5.2. Each of m canaries is included by a fair coin of its own. The auditor guesses r of them,
and v guesses are right. Under (ε, δ) the probability of v or more right guesses has an upper limit; the bound
is the ε at which that limit reaches 1 − confidence. The number of guesses is fixed before any is made.

No audit can be more certain than 1 − δ: a mechanism that reveals everything with probability δ is
(ε, δ)-private for every ε. In the theorem, 1 − confidence must exceed 2 δ m/r. That is why the confidence is
95 %, as in the paper: with 99.9 %, divided among four numbers of guesses, no number of canaries shows
anything at δ = 1e-4. It is also why more canaries do not always show more: a mechanism may reveal i of them
with probability δ m/i, which grows with m.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rpel.types import Floats

CONFIDENCE = 0.95
_GUESSES = ((2, 2), (8, 8), (4, 0), (16, 0))
"""(a, b): the m/a highest scores are guessed to be members, and the m/b lowest (b = 0: none) not to be.

Strong signals show in many guesses, weak ones in few. A canary that was in no batch looks like a non-member.
"""


def auc(inside: Floats, outside: Floats) -> float:
    """Return the probability that a member scores higher than a non-member; ties count half.

    NaN if either group is empty.

    >>> auc(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
    0.875
    """
    if not len(inside) or not len(outside):
        return math.nan
    ranks = stats.rankdata(np.concatenate([inside, outside]))
    return float((ranks[: len(inside)].sum() / len(inside) - (len(inside) + 1) / 2) / len(outside))


def true_positives(inside: Floats, outside: Floats, false: float = 0.01) -> float:
    """The largest share of members above a threshold that at most a share `false` of the non-members reach.

    >>> true_positives(np.array([2.0, 4.0, 5.0]), np.array([3.0, 1.0, 0.0]))
    0.6666666666666666
    """
    if not len(inside) or not len(outside):
        return math.nan
    allowed = int(false * len(outside))
    return float((inside > np.sort(outside)[::-1][allowed]).mean())


@dataclass(frozen=True)
class Audit:
    """A lower bound on ε, and the guesses that gave it."""

    epsilon: float
    guesses: int
    right: int


def audit(scores: Floats, included: NDArray[np.bool_], delta: float, confidence: float = CONFIDENCE) -> Audit:
    """Return the lower bound on ε that holds with that confidence.

    Several numbers of guesses are tried; each has an equal share of 1 − confidence.

    Args:
        scores: of the canaries (m,), higher for those that look like members.
        included: whether each was a member (m,).
        delta: of the (ε, δ) that is tested.
        confidence: the probability that the bound is at most ε.

    >>> coins = np.arange(200) % 2 == 0
    >>> round(audit(coins + 0.0, coins, 1e-4).epsilon, 2), audit(np.zeros(200), coins, 1e-4).epsilon
    (3.69, 0.0)
    """
    order = np.argsort(scores, kind="stable")
    bounds = []
    for there, away in _GUESSES:
        high, low = len(order) // there, len(order) // away if away else 0
        right = int(included[order[len(order) - high :]].sum() + (~included[order[:low]]).sum())
        bound = least_epsilon(len(order), high + low, right, delta, 1 - (1 - confidence) / len(_GUESSES))
        bounds.append(Audit(bound, high + low, right))
    return max(bounds, key=lambda one: one.epsilon)


def most(canaries: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the bound of :func:`audit` if every guess is right, which is the largest it can show.

    >>> [round(most(m, 1e-4), 2) for m in (20, 200, 1000, 2000)], most(1000, 1e-2)
    ([1.39, 3.69, 4.52, 4.45], 0.0)
    """
    coins = np.arange(canaries) % 2 == 0
    return audit(coins + 0.0, coins, delta, confidence).epsilon


def canaries_for(epsilon: float, delta: float) -> int | None:
    """Return a number of canaries whose largest bound exceeds ε, or None if there is none up to 6,400.

    >>> canaries_for(3.0, 1e-4), canaries_for(6.0, 1e-4)
    (100, None)
    """
    return next((m for m in (50, 100, 200, 400, 800, 1600, 3200, 6400) if most(m, delta) > epsilon), None)


@cache
def least_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest ε under which that many right guesses have a probability below 1 − confidence.

    >>> round(least_epsilon(100, 100, 100, 0.0, 0.999), 2), least_epsilon(100, 100, 50, 0.0)
    (2.64, 0.0)
    """
    doubt = 1 - confidence
    if _probability(canaries, guesses, right, 0.0, delta) >= doubt:
        return 0.0
    low, high = 0.0, 1.0
    while _probability(canaries, guesses, right, high, delta) < doubt:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _probability(canaries, guesses, right, middle, delta) < doubt else (low, middle)
        )
    return low


def _probability(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the limit of theorem 5.2 on the probability of `right` or more right guesses, for fair coins."""
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, rate))
    below = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, rate))
    steepest = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * steepest)
