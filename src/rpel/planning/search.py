"""The search for the smallest pull: what counts as enough, and which pulls can be the answer."""

import math
from dataclasses import dataclass
from fractions import Fraction

from rpel.planning.law import probability, quantile


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

    def probability(self, pull: int, b_hat: int) -> float:
        """P(max ≤ b̂), exactly."""
        return probability(self.nodes, self.byzantine, pull, self.rounds, b_hat)

    def b_hat(self, pull: int) -> int:
        """The smallest b̂ that holds with the confidence asked for."""
        return quantile(self.nodes, self.byzantine, pull, self.rounds, self.confidence)

    @property
    def answers_per_hostile(self) -> int:
        """A round aggregates when 2b̂ peers answer; silent hostile ones leave s − b̂ who can."""
        return 3 if self.silent else 2

    def feasible(self, pull: int, b_hat: int) -> bool:
        """b̂/(s+1) ≤ max_fraction, 2b̂ < s+1, and enough answers remain when F honest peers are late."""
        return (
            b_hat <= self.max_fraction * (pull + 1)
            and 2 * b_hat < pull + 1
            and self.answers_per_hostile * b_hat + self.no_shows <= pull
        )

    def smallest_pull_for(self, b_hat: int) -> int:
        """The smallest s at which this b̂ would be feasible, the inverse of :meth:`feasible`."""
        by_fraction = math.ceil(b_hat / self.max_fraction) - 1
        return max(1, by_fraction, self.answers_per_hostile * b_hat + self.no_shows)

    def smallest_pull(self) -> int | None:
        """The smallest feasible s, or None.

        For a fixed b̂ the tail grows with s, so only s(k) = smallest_pull_for(k) can be the answer. Up to 1,500 every k
        is tried; beyond, P(max ≤ k) at s(k) rises with k but for the rounding in s(k), so double, bisect, and look back
        over the rounding.
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
        return self.smallest_pull_for(next(k for k in range(max(0, holds - look_back), holds + 1) if self._suffices(k)))

    def _suffices(self, b_hat: int) -> bool:
        pull = self.smallest_pull_for(b_hat)
        return pull < self.nodes and self.probability(pull, b_hat) >= self.confidence


def check_question(case: Question) -> None:
    if not 0 < case.confidence < 1:
        nearest = 0.999999 if case.confidence >= 1 else 0.01
        raise ValueError(f"confidence {case.confidence} must lie strictly between 0 and 1, for example {nearest}")
    if not 0 < case.max_fraction <= Fraction(1, 2):
        nearest = 0.5 if case.max_fraction > 0 else 0.1
        raise ValueError(f"max_fraction {float(case.max_fraction)} must lie in (0, 1/2], for example {nearest}")
    most = case.nodes - case.byzantine - 1
    if not 0 <= case.no_shows <= most:
        raise ValueError(f"no_shows {case.no_shows} must lie between 0 and {most}")
