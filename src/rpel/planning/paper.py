"""The paper's own ways to a pull: Algorithm 2, which simulates, and two lemmas."""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from rpel import hypergeometric
from rpel.planning.law import check_sizes


def simulate_max(
    nodes: int, byzantine: int, pull: int, rounds: int, *, simulations: int = 5, seed: int = 0
) -> list[int]:
    """Lines 4-5 of Algorithm 2: the largest number of hostile peers met, once per simulation.

    The hT draws of a simulation enter only through their histogram, which is multinomial; the rare large
    values are drawn first, where their conditional probabilities are accurate.

    >>> simulate_max(100, 10, 15, 200, simulations=5, seed=0)
    [6, 6, 6, 6, 7]
    """
    low, pmf = hypergeometric.pmf(nodes - 1, byzantine, pull)
    from rpel.randomness import stream  # NumPy's generators take a while to load, and only a simulation draws

    rng = stream(seed, ("plan", pull))
    counts = rng.multinomial((nodes - byzantine) * rounds, pmf[::-1], size=simulations)
    return [low + len(pmf) - 1 - int(np.argmax(row > 0)) for row in counts]


def default_grid(nodes: int) -> Iterator[int]:
    """Every pull up to 256, then steps of about a tenth, then n − 1, where Algorithm 2 always returns."""
    pull = 1
    while pull < nodes - 1:
        yield pull
        pull += 1 if pull < 256 else pull // 10
    yield nodes - 1


def algorithm2(
    nodes: int,
    byzantine: int,
    rounds: int,
    grid: Iterable[int] | None = None,
    threshold: float = 0.5,
    simulations: int = 5,
    seed: int = 0,
) -> tuple[int, int] | None:
    """The paper's Algorithm 2: the smallest s of the grid whose largest simulated count is feasible, and it.

    Feasible: b̂/(s+1) ≤ threshold and 2b̂ < s+1. None where no s of the grid is. :func:`rpel.plan` needs no
    simulation and says how certain its b̂ is.

    Args:
        grid: the pulls to try; :func:`default_grid` if left out.
        simulations: how many are made for each s.

    >>> algorithm2(100_000, 10_000, 200, grid=[10, 20, 30, 40])
    (30, 15)
    """
    share = Fraction(threshold).limit_denominator(10**9)
    for pull in default_grid(nodes) if grid is None else sorted(grid):
        check_sizes(nodes, byzantine, rounds, pull)
        b_hat = max(simulate_max(nodes, byzantine, pull, rounds, simulations=simulations, seed=seed))
        if b_hat <= share * (pull + 1) and 2 * b_hat < pull + 1:
            return pull, b_hat
    return None


def bernoulli_divergence(a: float, p: float) -> float:
    """D(a, p) = a ln(a/p) + (1−a) ln((1−a)/(1−p)), with 0 ln 0 = 0.

    >>> bernoulli_divergence(0.5, 0.5)
    0.0
    """
    if a < 0 or a > 1:
        raise ValueError(f"a Bernoulli mean lies in [0, 1], not {a}")
    first = a * math.log(a / p) if a > 0 and p > 0 else (0.0 if a == 0 else math.inf)
    second = (1 - a) * math.log((1 - a) / (1 - p)) if a < 1 and p < 1 else (0.0 if a == 1 else math.inf)
    return first + second


def lemma_noptlog(nodes: int, byzantine: int, rounds: int, p: float) -> float:
    """Return a pull that suffices with probability p (lemma "noptlog"); vacuous if it exceeds n − 1.

    >>> lemma_noptlog(100, 10, 200, 0.9)
    407
    """
    share = byzantine / nodes
    if share == 0:
        return math.inf
    factor = max(1 / (0.5 - share) ** 2, 3 / share)
    return math.ceil(factor * math.log(4 * rounds * (nodes - byzantine) / (1 - p))) + 2


def lemma_effective_byzantine(nodes: int, byzantine: int, pull: int, b_hat: int, rounds: int) -> float:
    """Lemma "effectiveByz" read as a lower bound on P(no honest node ever meets more than b̂ hostile peers).

    Zero where the lemma says nothing: b̂/s at or below b/(n−1), or outside b/n < b̂/(s+1) < 1/2. The paper's
    event {b_i ≥ b̂} is kept, although > b̂ would suffice. Pulling everyone is certain as soon as b̂ ≥ b.

    >>> round(lemma_effective_byzantine(100, 10, pull=24, b_hat=12, rounds=200), 3)
    0.905
    """
    if byzantine == 0 or (pull == nodes - 1 and b_hat >= byzantine):
        return 1.0
    fair = byzantine / (nodes - 1)
    inside = byzantine * (pull + 1) < b_hat * nodes and 2 * b_hat < pull + 1
    if not inside or b_hat > pull or b_hat / pull <= fair:
        return 0.0
    failure = (nodes - byzantine) * rounds * math.exp(-pull * bernoulli_divergence(b_hat / pull, fair))
    return max(0.0, 1.0 - failure)
