"""The exact law of the largest number of hostile peers any honest node ever pulls: F(k)^{hT}, no simulation."""

from collections.abc import Sequence

import numpy as np

from rpel import hypergeometric
from rpel.types import Floats, Integers


def max_byzantine_cdf(nodes: int, byzantine: int, pull: int, rounds: int) -> Floats:
    """P(no honest node ever pulls more than k hostile peers), for k = 0 … min(byzantine, pull).

    >>> max_byzantine_cdf(nodes=100, byzantine=10, pull=15, rounds=200)[6:9].round(6)
    array([0.479579, 0.973938, 0.999511])
    """
    check_sizes(nodes, byzantine, rounds, pull)
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    cdf = np.zeros(min(byzantine, pull) + 1)
    cdf[low : low + len(log_cdf)] = np.exp((nodes - byzantine) * rounds * log_cdf)
    cdf[low + len(log_cdf) - 1 :] = 1.0
    return cdf


def probability(nodes: int, byzantine: int, pull: int, rounds: int, b_hat: int) -> float:
    """P(max ≤ b̂), exactly.

    >>> round(probability(nodes=100, byzantine=10, pull=15, rounds=200, b_hat=7), 6)
    0.973938
    """
    if b_hat >= min(byzantine, pull):
        return 1.0
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    if b_hat < low:
        return 0.0
    exponent = (nodes - byzantine) * rounds
    return float(np.exp(exponent * log_cdf[b_hat - low])) if b_hat - low < len(log_cdf) else 1.0


def quantile(nodes: int, byzantine: int, pull: int, rounds: int, p: float) -> int:
    """The smallest k with P(max ≤ k) ≥ p.

    >>> quantile(nodes=100, byzantine=10, pull=15, rounds=200, p=0.99)
    8
    """
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    enough = np.exp((nodes - byzantine) * rounds * log_cdf) >= p
    return low + int(np.argmax(enough)) if enough.any() else min(byzantine, pull)


def quantiles(nodes: int, byzantine: int, rounds: int, pulls: Sequence[int], p: Sequence[float]) -> Integers:
    """b̂ at each probability and pull, shape (len(p), len(pulls)): the curves of the paper's Figure 3, exactly.

    >>> quantiles(1000, 100, 200, pulls=[10, 30, 50], p=[0.5, 0.99]).tolist()
    [[7, 12, 16], [8, 14, 18]]
    """
    return np.array([[quantile(nodes, byzantine, s, rounds, q) for s in pulls] for q in p])


def check_sizes(nodes: int, byzantine: int, rounds: int, pull: int | None) -> None:
    for name, value, least in (("nodes", nodes, 2), ("byzantine", byzantine, 0), ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if 2 * byzantine >= nodes:
        raise ValueError(
            f"byzantine {byzantine} is not a minority of nodes {nodes}: at most {(nodes - 1) // 2} can be tolerated"
        )
    if pull is not None and not 1 <= pull < nodes:
        nearest = 1 if pull < 1 else nodes - 1
        raise ValueError(f"pull {pull} is impossible among nodes {nodes}: choose 1 to {nodes - 1}, nearest {nearest}")
