"""How much somebody who guesses who was there gives away of a mechanism:
scores of those who were and who were not.

The lower bound on ε is that of Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run"
(2023), theorem 5.2: each of m canaries is there by a fair coin of its own, r of them are guessed, v of the
guesses are right. Under (ε, δ) so many right guesses have at most a certain probability; the ε at which it
passes 1 − confidence is the bound. Invariant: how many are guessed never depends on which guesses are right.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from rpel.types import Floats

CONFIDENCE = 0.999
_GUESSES = ((2, 2), (8, 8), (4, 0), (16, 0))
"""One in so many canaries is guessed to be there, and one in so many (0: none) not to be; the most telling
ones. Weak signals show in few guesses, strong ones in many;
who was never drawn into a batch looks as if it were not there."""


def auc(inside: Floats, outside: Floats) -> float:
    """The probability that a member scores higher than a non-member, ties counting half;
    NaN where one is missing.

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
    """The lower bound on ε that holds with that confidence, from canaries' scores (m,)
    and whether each was there.

    The highest scores are guessed to be there and the lowest not to be, in several numbers of guesses that
    are fixed beforehand; each has its share of the doubt.

    >>> coins = np.arange(200) % 2 == 0
    >>> round(audit(coins + 0.0, coins, 1e-5).epsilon, 2), audit(np.zeros(200), coins, 1e-5).epsilon
    (2.82, 0.0)
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
    """The lower bound that :func:`audit` would give if every guess were right:
    no more can be shown with so many."""
    coins = np.arange(canaries) % 2 == 0
    return audit(coins + 0.0, coins, delta, confidence).epsilon


def least_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest ε under which so many right guesses of so many would still have a probability below 1 −
    confidence.

    >>> round(least_epsilon(100, 100, 100, 0.0), 2), least_epsilon(100, 100, 50, 0.0)
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
    """Theorem 5.2 for fair coins: so many right guesses, or more, are at most so probable under (ε, δ)."""
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, rate))
    below = np.cumsum(stats.binom.pmf(right - np.arange(1, right + 1), guesses, rate))
    steepest = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * steepest)
