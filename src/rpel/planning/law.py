"""The exact law of the largest number of hostile peers that a node ever pulls, F(k)^{hT}."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real

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


def probability(
    nodes: int, byzantine: int, pull: int, rounds: int, b_hat: int, aggregations: int | None = None
) -> float:
    """P(max ≤ b̂), exactly; aggregations: in all, where it is not once a round for each honest node.

    >>> round(probability(nodes=100, byzantine=10, pull=15, rounds=200, b_hat=7), 6)
    0.973938
    """
    if b_hat >= min(byzantine, pull):
        return 1.0
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    if b_hat < low:
        return 0.0
    exponent = (nodes - byzantine) * rounds if aggregations is None else aggregations
    return float(np.exp(exponent * log_cdf[b_hat - low])) if b_hat - low < len(log_cdf) else 1.0


def quantile(
    nodes: int, byzantine: int, pull: int, rounds: int, p: float, aggregations: int | None = None
) -> int:
    """Return the smallest k with P(max ≤ k) ≥ p.

    >>> quantile(nodes=100, byzantine=10, pull=15, rounds=200, p=0.99)
    8
    """
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    times = (nodes - byzantine) * rounds if aggregations is None else aggregations
    enough = np.exp(times * log_cdf) >= p
    return low + int(np.argmax(enough)) if enough.any() else min(byzantine, pull)


def quantiles(nodes: int, byzantine: int, rounds: int, pulls: Sequence[int], p: Sequence[float]) -> Integers:
    """(len(p), len(pulls)) Return b̂ at each probability and pull: the curves of the paper's Figure 3.

    >>> quantiles(1000, 100, 200, pulls=[10, 30, 50], p=[0.5, 0.99]).tolist()
    [[7, 12, 16], [8, 14, 18]]
    """
    return np.array([[quantile(nodes, byzantine, s, rounds, q) for s in pulls] for q in p])


def check_whole(name: str, value: int) -> None:
    """Refuse anything but a whole number; NumPy's whole numbers are accepted."""
    if not isinstance(value, Integral):
        raise ValueError(f"{name} {value!r} is not a whole number: give one such as 100")


def check_sizes(nodes: int, byzantine: int, rounds: int, pull: int | None) -> None:
    for name, value, least in (("nodes", nodes, 2), ("byzantine", byzantine, 0), ("rounds", rounds, 1)):
        check_whole(name, value)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if 2 * byzantine >= nodes:
        raise ValueError(
            f"byzantine {byzantine} is not a minority of nodes {nodes}: at most {(nodes - 1) // 2} can be "
            "tolerated"
        )
    if pull is None:
        return
    check_whole("pull", pull)
    if not 1 <= pull < nodes:
        nearest = 1 if pull < 1 else nodes - 1
        raise ValueError(
            f"pull {pull} is impossible among nodes {nodes}: choose 1 to {nodes - 1}, nearest {nearest}"
        )


# --- the smallest pull: what counts as enough, and which pulls can be the answer ----------------------------


COMFORT = Fraction(1, 3)
"""The hostile share that a plan takes at most where it can: with more, κ grows fast."""


@dataclass(frozen=True)
class Question:
    """n, b, T and what counts as enough; answers questions about one pull at a time.

    Invariant: whether b̂ is a minority is decided in integers, and one half never is.
    """

    nodes: int
    byzantine: int
    rounds: int
    confidence: float
    max_fraction: Fraction
    silent: bool
    no_shows: int
    margin: int = 1
    """How many of the models are to be left when b̂ were trimmed on either side."""
    aggregations: int | None = None
    """In all, where nodes do not aggregate once a round each (asynchronous runs)."""

    @property
    def sizes(self) -> tuple[int, int]:
        return self.nodes, self.byzantine

    def probability(self, pull: int, b_hat: int) -> float:
        """P(max ≤ b̂), exactly."""
        return probability(*self.sizes, pull, self.rounds, b_hat, self.aggregations)

    def b_hat(self, pull: int) -> int:
        """The smallest b̂ that holds with the confidence asked for."""
        return quantile(*self.sizes, pull, self.rounds, self.confidence, self.aggregations)

    @property
    def answers_per_hostile(self) -> int:
        """A round aggregates when 2b̂ peers answer; silent hostile ones leave s − b̂ who can."""
        return 3 if self.silent else 2

    def feasible(self, pull: int, b_hat: int) -> bool:
        """Say whether b̂/m ≤ max_fraction, m − 2b̂ ≥ margin for m = s + 1, and enough answers come."""
        return (
            b_hat <= self.max_fraction * (pull + 1)
            and 2 * b_hat + self.margin <= pull + 1
            and self.answers_per_hostile * b_hat + self.no_shows <= pull
        )

    def smallest_pull_for(self, b_hat: int) -> int:
        """The smallest s at which this b̂ would be feasible, the inverse of :meth:`feasible`."""
        by_fraction = math.ceil(b_hat / self.max_fraction) - 1
        by_answers = self.answers_per_hostile * b_hat + self.no_shows
        return max(1, by_fraction, 2 * b_hat + self.margin - 1, by_answers)

    def smallest_pull(self) -> int | None:
        """The smallest feasible s, or None.

        For a fixed b̂ the tail grows with s, so only s(k) = smallest_pull_for(k) can be the answer. Up to
        1,500 every k is tried; beyond, P(max ≤ k) at s(k) rises with k but for the rounding in s(k), so
        double, bisect, and look back over the rounding.
        """
        every = min(self.byzantine, 1500)
        for k in range(every + 1):
            if self._suffices(k):
                return self.smallest_pull_for(k)
        fails, holds = every, every
        while not self._suffices(holds):
            if holds == self.byzantine:
                return None
            fails, holds = holds, min(2 * holds, self.byzantine)
        while holds - fails > 1:
            middle = (fails + holds) // 2
            fails, holds = (fails, middle) if self._suffices(middle) else (middle, holds)
        gap = float(self.max_fraction) - self.byzantine / self.nodes
        look_back = 64 + min(1500, int(2 / gap) if gap > 0 else 1500)
        return self.smallest_pull_for(
            next(k for k in range(max(0, holds - look_back), holds + 1) if self._suffices(k))
        )

    def comfortable_pull(self) -> int | None:
        """Return the smallest s with a share of at most 1/3 and s+1−2b̂ ≥ 3, or the one that leaves most.

        Where only 1 or 2 models are left after trimming, trimmed mean and median are one function. What
        leaves most is n − 1 if that is feasible: leaving out u peers would need more than u/2 hostile
        ones among them, always. Among few nodes, where chance and a low confidence may say otherwise,
        all are looked at.
        """
        pull = replace(self, max_fraction=min(self.max_fraction, COMFORT), margin=3).smallest_pull()
        if pull is not None:
            return pull
        some = range(1, self.nodes) if self.nodes <= 300 else (self.nodes - 1, self.smallest_pull() or 1)
        known = ((s, self.b_hat(s)) for s in some)
        return max(
            (s for s, k in known if self.feasible(s, k)),
            key=lambda s: (s - 2 * self.b_hat(s), -s),
            default=None,
        )

    def _suffices(self, b_hat: int) -> bool:
        pull = self.smallest_pull_for(b_hat)
        return pull < self.nodes and self.probability(pull, b_hat) >= self.confidence


def check_question(case: Question) -> None:
    check_whole("no_shows", case.no_shows)
    if not isinstance(case.confidence, Real):
        raise ValueError(f"confidence {case.confidence!r} is not a number: give one such as 0.99")
    if not 0 < case.confidence < 1:
        nearest = 0.999999 if case.confidence >= 1 else 0.01
        raise ValueError(
            f"confidence {case.confidence} must lie strictly between 0 and 1, for example {nearest}"
        )
    if not 0 < case.max_fraction <= Fraction(1, 2):
        nearest = 0.5 if case.max_fraction > 0 else 0.1
        raise ValueError(
            f"max_fraction {float(case.max_fraction)} must lie in (0, 1/2], for example {nearest}"
        )
    most = case.nodes - case.byzantine - 1
    if not 0 <= case.no_shows <= most:
        raise ValueError(f"no_shows {case.no_shows} must lie between 0 and {most}")
