"""The planner's promises: exact, smallest, honest about what it does not know."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import rpel
from rpel import hypergeometric
from rpel.planning import comfortable, max_byzantine_cdf, plan, pullers
from rpel.planning.paper import (
    algorithm2,
    default_grid,
    simulate_max,
)


def exact_tail(population: int, marked: int, draws: int, k: int) -> Fraction:
    """P(X > k) in integers."""
    ways = sum(
        math.comb(marked, j) * math.comb(population - marked, draws - j)
        for j in range(k + 1, min(marked, draws) + 1)
    )
    return Fraction(ways, math.comb(population, draws))


@pytest.mark.parametrize("silent", [False, True])
def test_comfortable_plan_is_smallest_with_a_third_and_three_left(silent: bool) -> None:
    for nodes, share in product((4, 5, 7, 12, 20, 33, 60), (0.0, 0.1, 0.2, 0.3, 0.4, 0.45)):
        sizes: dict[str, Any] = {"nodes": nodes, "byzantine": int(share * nodes), "rounds": 50}
        choices = [(s, rpel.plan(**sizes, pull=s, silent=silent)) for s in range(1, nodes)]
        feasible = [(s, p.b_hat) for s, p in choices if p.feasible]
        good = [(s, k) for s, k in feasible if 3 * k <= s + 1 and s + 1 - 2 * k >= 3]
        if not feasible:
            with pytest.raises(ValueError, match=r"max_fraction|b_hat"):
                comfortable(**sizes, silent=silent)
            continue
        planned = comfortable(**sizes, silent=silent)
        expected = good[0] if good else max(feasible, key=lambda c: (c[0] - 2 * c[1], -c[0]))
        assert (planned.pull, planned.b_hat) == expected, sizes
        named = [p.comfortable for p in (planned, rpel.plan(**sizes, silent=silent))]
        assert [None if choice is None else choice.pull for choice in named] == [planned.pull] * 2


SMALLEST = Fraction(1, 10**300)
"""Probabilities below it are 0 to everybody; numbers near the least that a float holds have few digits."""


@given(st.data())
def test_tails_agree_with_integer_arithmetic(data: st.DataObject) -> None:
    population = data.draw(st.sampled_from([7, 29, 99, 1000, 10**5, 10**9]))
    marked = data.draw(st.integers(0, population // 2))
    draws = data.draw(st.integers(1, min(population, 60)))
    low, log_cdf = hypergeometric.log_cdf(population, marked, draws)
    tail = -np.expm1(log_cdf)
    for k in range(min(marked, draws) + 1):
        exact = exact_tail(population, marked, draws, k)
        actual = 1.0 if k < low else (float(tail[k - low]) if k - low < len(tail) else 0.0)
        assert abs(Fraction(actual) - exact) <= exact / 10**9 + SMALLEST


@pytest.mark.parametrize(
    ("n", "b", "fraction"), [(20_000, 9_300, 0.5), (30_000, 9_600, 1 / 3), (40_000, 11_500, 0.3)]
)
def test_search_by_bisection_finds_what_trying_every_pull_finds(n: int, b: int, fraction: float) -> None:
    p = plan(nodes=n, byzantine=b, rounds=200, max_fraction=fraction)
    assert p.b_hat > 1500, "the setting must reach the bisection"
    exact = Fraction(fraction).limit_denominator(1000)
    for k in range(p.b_hat):
        s = max(2 * k, math.ceil(k / exact) - 1, 1)
        low, log_cdf = hypergeometric.log_cdf(n - 1, b, s)
        assert (n - b) * 200 * log_cdf[min(k - low, len(log_cdf) - 1)] < math.log(0.99), (
            f"pull {s} was feasible"
        )


def test_simulation_and_exact_law_agree_in_distribution() -> None:
    """Chi-square on 20,000 simulated maxima; a right program fails this with probability 1e-6 (for another
    seed)."""
    maxima = simulate_max(100, 10, 15, 200, simulations=20_000, seed=1)
    p = np.diff(max_byzantine_cdf(100, 10, 15, 200), prepend=0.0)
    expected = np.array([p[:6].sum(), p[6], p[7], p[8:].sum()]) * 20_000
    observed = np.bincount(np.clip(maxima, 5, 8) - 5, minlength=4)
    assert stats.chisquare(observed, expected).pvalue > 1e-6


def test_algorithm_2_takes_the_smallest_pull_of_the_grid_below_the_threshold() -> None:
    sizes = {"nodes": 1000, "byzantine": 100, "rounds": 200}
    grid = (10, 20, 30, 40)
    judged = {s: max(simulate_max(**sizes, pull=s, simulations=5, seed=3)) for s in grid}
    for share in (0.5, 0.4):
        fits = [(s, k) for s, k in judged.items() if k <= share * (s + 1) and 2 * k < s + 1]
        assert algorithm2(**sizes, grid=grid[::-1], threshold=share, seed=3) == fits[0]
    assert algorithm2(**sizes, grid=[1, 2, 3]) is None
    with pytest.raises(ValueError, match="pull 1000 is impossible"):
        algorithm2(**sizes, grid=[1000])


@given(nodes=st.integers(2, 3000), share=st.floats(0, 1))
def test_pullers_are_the_quantile_of_a_binomial(nodes: int, share: float) -> None:
    pull = 1 + int(share * (nodes - 2))
    assert abs(pullers(nodes, pull) - stats.binom.ppf(0.99, nodes - 1, pull / (nodes - 1))) <= 1e-9


def test_algorithm_2_default_grid_ends_at_a_feasible_pull() -> None:
    for n in (2, 10, 300, 10**6):
        grid = list(default_grid(n))
        assert grid == sorted(set(grid))
        assert grid[-1] == n - 1
