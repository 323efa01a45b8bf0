"""The hypergeometric law with tails that can be trusted: how many of the pulled peers are hostile.

Invariant: a tail is a sum of positive terms, made by ratios from the mode outwards and added smallest first,
never a difference of large logarithms. So its relative error stays near 1e-13 even for a population of 10⁹,
where scipy's tail is about 1e-7 off.
"""

import math

import numpy as np

from rpel.types import Floats


def pmf(population: int, marked: int, draws: int) -> tuple[int, Floats]:
    """P(X = k) on the window [low, low + len) outside of which it is below 1e-300: (low, probabilities).

    >>> low, p = pmf(population=9, marked=3, draws=2)
    >>> low, p.round(4).tolist()
    (0, [0.4167, 0.5, 0.0833])
    """
    low, high = max(0, draws - (population - marked)), min(marked, draws)
    mode = min(max((draws + 1) * (marked + 1) // (population + 2), low), high)
    share = marked / population
    # 40 standard deviations for the Gaussian part, 750 more for the Poisson-like tail of rare marks.
    reach = 750 + 40 * math.isqrt(1 + int(draws * share * (1 - share)))
    low, high = max(low, mode - reach), min(high, mode + reach)
    # p(k+1) / p(k), as one float division of exact integers below 2^53 whenever the products fit.
    k = np.arange(low, high, dtype=np.float64)
    ratio = (marked - k) * (draws - k) / ((k + 1) * (population - marked - draws + k + 1))
    at = mode - low
    upward = np.cumprod(ratio[at:])
    # far below the mode the weights underflow to zero, which is what they are
    with np.errstate(divide="ignore"):
        downward = np.cumprod(1 / ratio[:at][::-1])[::-1]
    weights = np.concatenate([downward, [1.0], upward])
    return low, weights / weights.sum()


def log_cdf(population: int, marked: int, draws: int) -> tuple[int, Floats]:
    """log P(X ≤ k) for k in the window of :func:`pmf`; −inf below it and 0 above it.

    >>> float(log_cdf(population=9, marked=3, draws=2)[1][1].round(6))
    -0.087011
    """
    low, p = pmf(population, marked, draws)
    above = np.concatenate([np.cumsum(p[::-1])[::-1][1:], [0.0]])  # P(X > k)
    with np.errstate(divide="ignore"):
        return low, np.where(
            above < 0.5, np.log1p(-np.minimum(above, 0.5)), np.log(np.minimum(np.cumsum(p), 1.0))
        )
