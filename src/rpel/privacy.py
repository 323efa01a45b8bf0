"""Compute the (ε, δ) of private local steps, and the noise that a target needs.

What is counted: all half-steps of a node, which others see, as one mechanism: the T·k-fold composition of
Gaussian noise σ·C on the sum of gradients clipped to C, over a batch in which each of the node's N examples
is with probability q = B₀/N, independently of all others (Poisson sampling). Unit: one example of one node,
added or removed.

The accountant is Google's dp-accounting (its privacy loss distributions); nothing is counted by formulas of
our own, and it is imported only when something is counted. Its answers are upper bounds, and they rise with
the rate and the number of steps and fall with the noise; that is all that is relied on here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from rpel.errors import BudgetSpentError
from rpel.types import Floats

RELATION = "add or remove one example"
ACCOUNTANT = "dp-accounting PLD"
LEAST, MOST = 0.1, 1e4
"""Noise multipliers that are looked at: with less there is no protection worth counting,
with more no learning."""

_FINE, _COARSE, _ROUGH = 1e-4, 1e-3, 1e-2
"""Steps of the privacy loss in which the accountant counts: its own default,
ten times and a hundred times faster."""
_LARGE = 50.0
"""From this ε on the steps grow with it: a direct call would need gigabytes,
and nobody needs the fourth digit."""


def library() -> Any:
    """dp-accounting; ValueError, with what to do, where it is not installed."""
    if find_spec("dp_accounting") is None:
        raise ValueError(
            "differential privacy is counted by Google's dp-accounting: pip install 'rpel[privacy]'"
        )
    import dp_accounting.pld

    return dp_accounting


def version() -> str:
    """Return the version of the accountant's library."""
    library()
    return metadata.version("dp-accounting")


def rate(batch: int, examples: int) -> float:
    """Return q = B₀/N, the probability with which each example of a node is in a batch.

    Raises ValueError where that is no probability.

    >>> rate(31, 310)
    0.1
    """
    if batch < 1 or examples < 1:
        raise ValueError(f"cannot draw a batch of {batch} from {examples} examples: both must be at least 1")
    if batch > examples:
        raise ValueError(
            f"batch {batch} is larger than the {examples} examples of a node: the nearest is {examples}"
        )
    return batch / examples


def epsilon(noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
    """Return ε at δ of one node after the given number of local steps; infinite without noise.

    noise_multiplier: σ, the noise's standard deviation relative to the clipping norm. rate: see :func:`rate`.

    >>> round(epsilon(1.3, rate(31, 310), steps=45, delta=1e-4), 3)
    2.518
    """
    return _epsilon(noise_multiplier, rate, steps, delta, _FINE)


def epsilon_quickly(noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
    """Compute :func:`epsilon` in a tenth of the time.

    The result is never below it, and at most a hundredth plus 0.01 above it.
    """
    return _epsilon(noise_multiplier, rate, steps, delta, _COARSE)


def epsilons(noise_multiplier: float, rates: Sequence[float] | Floats, steps: int, delta: float) -> Floats:
    """(h,) ε of each node, which has the rate of its own number of examples; equal rates are counted once."""
    each, inverse = np.unique(np.asarray(rates, np.float64), return_inverse=True)
    values = np.array([epsilon(noise_multiplier, q, steps, delta) for q in each.tolist()])
    return values[inverse]


def largest_and_median(
    noise_multiplier: float, rates: Sequence[float] | Floats, steps: int, delta: float
) -> tuple[float, float]:
    """Return the largest and the median of :func:`epsilons`.

    ε rises with the rate, so at most three nodes have to be computed.
    """
    ordered = np.sort(np.asarray(rates, np.float64))
    middle = ordered[[(len(ordered) - 1) // 2, len(ordered) // 2]]
    values = epsilons(noise_multiplier, [ordered[-1], *middle], steps, delta)
    return float(values[0]), float(values[1:].mean())


def noise_for(target_epsilon: float, rate: float, steps: int, delta: float) -> float:
    """The least noise multiplier, to four digits, with which ε stays at or below the target.

    One noise holds for several nodes when it holds for the largest of their rates.
    ValueError where none does.

    >>> sigma = noise_for(0.5, rate(31, 310), steps=45, delta=1e-4)
    >>> epsilon(sigma, rate(31, 310), steps=45, delta=1e-4) <= 0.5
    True
    """
    _check_target(target_epsilon)
    _check(1.0, rate, steps, delta)
    low, high = _bracket(target_epsilon, rate, steps, delta)

    def halve(low: float, high: float, precision: float) -> float:
        while high / low > 1.0005:
            middle = math.sqrt(low * high)
            holds = _epsilon(middle, rate, steps, delta, precision) <= target_epsilon
            low, high = (low, middle) if holds else (middle, high)
        return high

    high = halve(low, high, _COARSE)
    # where counting quickly is not good enough
    if epsilon(high, rate, steps, delta) < 0.999 * target_epsilon:
        high = halve(max(LEAST, 0.98 * high), high, _FINE)
    return _rounded_up(high)


def steps_within(
    target_epsilon: float, noise_multiplier: float, rate: float, steps: int, delta: float
) -> int:
    """Return how many of these steps keep ε at or below the target.

    >>> steps_within(1.0, 4.0, 0.1, 12, 1e-4)
    12
    """
    _check_target(target_epsilon)
    low, high = 0, steps + 1
    while high - low > 1:
        middle = steps if high == steps + 1 and low == 0 else (low + high) // 2
        holds = epsilon(noise_multiplier, rate, middle, delta) <= target_epsilon
        low, high = (middle, high) if holds else (low, middle)
    return low


def weak_delta(delta: float, examples: int) -> str | None:
    """A sentence to warn with where δ is so large that giving away one whole example would be allowed."""
    if delta < 1 / examples:
        return None
    return (
        f"target_delta {delta:g} is not below 1/{examples}, one over the examples of a node: a mechanism "
        f"that gives one example away would pass; the usual is at most {1 / examples / 10:.0e}"
    )


@dataclass(frozen=True)
class Budget:
    """ε of some nodes, round by round. rates: (h,) with which each draws its examples; steps: per round.

    first: rounds up to this one are not counted. A round counts whether or not a step was taken in it.
    """

    noise_multiplier: float
    max_grad_norm: float
    delta: float
    rates: Floats
    steps: int
    rounds: int
    target: float | None = None
    first: int = 0

    @cached_property
    def whole(self) -> tuple[float, float]:
        """The largest and the median ε of the nodes after the last round."""
        return largest_and_median(self.noise_multiplier, self.rates, self._steps(self.rounds), self.delta)

    @cached_property
    def affordable(self) -> int:
        """The last round that the target allows."""
        if self.target is None or self.whole[0] <= self.target:
            return self.rounds
        worst, most = float(self.rates.max()), self._steps(self.rounds)
        return (
            self.first
            + steps_within(self.target, self.noise_multiplier, worst, most, self.delta) // self.steps
        )

    def after(self, t: int) -> float:
        """An upper bound of the largest ε after round t; in the last round what the certificate says."""
        if t == self.rounds:
            return self.whole[0]
        quick = epsilon_quickly(self.noise_multiplier, float(self.rates.max()), self._steps(t), self.delta)
        return min(quick, self.whole[0]) if t < self.rounds else quick

    def of(self, rate: float, t: int) -> float:
        """ε of a node with that rate after round t."""
        return epsilon(self.noise_multiplier, rate, self._steps(t), self.delta)

    def check(self, t: int) -> None:
        """BudgetSpentError where round t would pass the target."""
        if self.target is not None and t > self.affordable:
            raise BudgetSpentError(
                f"stopped before round {t} of {self.rounds}, which would pass target_epsilon {self.target:g} "
                f"(delta {self.delta:g}) with noise_multiplier {self.noise_multiplier:g}: take more noise or "
                f"{t - 1} rounds"
            )

    def statement(self) -> dict[str, Any]:
        """Return the budget as the certificate states it."""
        largest, median = self.whole
        return {
            "epsilon": largest, "epsilon_median": median, "delta": self.delta, "relation": RELATION,
            "accountant": ACCOUNTANT, "version": version(), "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm, "sampling": "poisson", "steps": self._steps(self.rounds),
        }  # fmt: skip

    def _steps(self, t: int) -> int:
        return self.steps * max(0, t - self.first)


@lru_cache(maxsize=1024)
def _epsilon(noise_multiplier: float, rate: float, steps: int, delta: float, precision: float) -> float:
    _check(noise_multiplier, rate, steps, delta)
    if not steps:
        return 0.0
    if not noise_multiplier:
        return math.inf
    if noise_multiplier < LEAST:
        raise ValueError(
            f"noise_multiplier {noise_multiplier:g} is too little to count: the nearest is {LEAST}, or 0"
        )
    rough = _counted(noise_multiplier, rate, steps, delta, _ROUGH)
    return _counted(noise_multiplier, rate, steps, delta, precision * max(1.0, rough / _LARGE))


def _counted(noise_multiplier: float, rate: float, steps: int, delta: float, precision: float) -> float:
    """What dp-accounting says."""
    dp = library()
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, precision)
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise_multiplier)), steps)
    return float(accountant.get_epsilon(delta))


def _bracket(target: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    """Two noises, of which the second holds and the first does not; both the least where that holds."""
    high = 1.0
    while _epsilon(high, rate, steps, delta, _COARSE) > target:
        high *= 2
        if high > MOST:
            raise ValueError(
                f"no noise keeps epsilon at {target:g} over {steps} steps: take more, or fewer steps"
            )
    low = max(LEAST, high / 2)
    while _epsilon(low, rate, steps, delta, _COARSE) <= target:
        if low == LEAST:
            return low, low
        low, high = max(LEAST, low / 2), low
    return low, high


def _rounded_up(value: float) -> float:
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


def _check_target(target_epsilon: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise ValueError(f"epsilon must be a positive number, not {target_epsilon:g}: 1 is strong, 8 is weak")


def _check(noise_multiplier: float, rate: float, steps: int, delta: float) -> None:
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be 0 or more, not {noise_multiplier:g}")
    if not 0 < rate <= 1:
        raise ValueError(f"a sampling rate must be above 0 and at most 1, not {rate:g}")
    if steps < 0:
        raise ValueError(f"steps must be 0 or more, not {steps}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, not {delta:g}: the usual is below 1/examples")
