"""What a plan costs on the line: bytes of a message, simultaneous pulls of a node, the shortest period."""

import math
import re

from rpel.planning.law import check_sizes

PULLS = 0.6
"""The share of a period in which models travel, in a network that names no deadline of its own."""
BUSY = 0.99
"""The quantile of the number of nodes that ask one node in a round, for which a line must suffice."""
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def pullers(nodes: int, pull: int, level: float = BUSY) -> int:
    """How many of the others ask one node in a round, at most, with probability ``level``.

    Each of them draws it with probability s/(n−1), independently: Binomial(n − 1, s/(n − 1)).

    >>> pullers(100, 15), pullers(7, 6), pullers(1_000_000, 34)
    (24, 6, 48)
    """
    check_sizes(nodes, 0, 1, pull)
    others = nodes - 1
    if pull == others:
        return others
    p = pull / others
    total = 0.0
    for k in range(others + 1):
        ways = math.lgamma(others + 1) - math.lgamma(k + 1) - math.lgamma(others - k + 1)
        total += math.exp(ways + k * math.log(p) + (others - k) * math.log1p(-p))
        if total >= level:
            return k
    return others


def bits_per_second(rate: str | float) -> float:
    """A line's rate: a number, or such as '20Mbit'.

    >>> bits_per_second("20Mbit"), bits_per_second("1.5 Gbit/s"), bits_per_second(8e6)
    (20000000.0, 1500000000.0, 8000000.0)
    >>> bits_per_second("20MB")
    Traceback (most recent call last):
    ValueError: upstream '20MB' is not a rate such as 512kbit, 20Mbit or 1Gbit
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]?bit)?(?:/s)?\s*", str(rate).lower())
    try:
        value = float(match[1]) * _UNITS[match[2] or "bit"] if match else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"upstream {str(rate)!r} is not a rate such as 512kbit, 20Mbit or 1Gbit")
    return value


def shortest_period(nodes: int, pull: int, message: int, upstream: str | float) -> float:
    """Seconds that a round must last so that a node can answer all who ask it in a busy round.

    Args:
        message: bytes of a model as it is sent.
        upstream: the rate at which a node sends, such as "20Mbit".

    >>> round(shortest_period(100, 15, 4 * 176_050, "20Mbit"), 1)
    11.3
    """
    return pullers(nodes, pull) * message * 8 / bits_per_second(upstream) / PULLS
