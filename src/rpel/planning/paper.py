"""The paper's own ways to an answer: its Algorithm 2, which simulates, and its Lemma "effectiveByz",
which bounds."""

from collections.abc import Iterable, Iterator

import numpy as np

from rpel import hypergeometric, theory
from rpel.planning.law import Question


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


def simulated(case: Question, grid: Iterable[int], simulations: int, seed: int) -> tuple[int, int] | None:
    """Algorithm 2: the first s of the grid whose largest simulated count is feasible."""
    for pull in grid:
        b_hat = max(
            simulate_max(case.nodes, case.byzantine, pull, case.rounds, simulations=simulations, seed=seed)
        )
        if case.feasible(pull, b_hat):
            return pull, b_hat
    return None


def bounded(case: Question, grid: Iterable[int]) -> tuple[int, int] | None:
    """Lemma "effectiveByz": the first s with a b̂ for which the lemma's bound reaches the confidence."""
    for pull in grid:
        b_hat = bounded_b_hat(case, pull)
        if b_hat is not None and case.feasible(pull, b_hat):
            return pull, b_hat
    return None


def bounded_b_hat(case: Question, pull: int) -> int | None:
    """The smallest b̂ < (s+1)/2 that the lemma grants; its bound grows with b̂, so bisect."""
    n, b, T = case.nodes, case.byzantine, case.rounds

    def granted(k: int) -> bool:
        return theory.lemma_effective_byzantine(n, b, pull, k, T) >= case.confidence

    high = b if pull == n - 1 else pull // 2
    if not granted(high):
        return None
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if granted(middle) else (middle, high)
    return high
