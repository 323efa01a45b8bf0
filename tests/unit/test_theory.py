"""The paper's formulas, checked by counting where counting is possible."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations

import pytest

from rpel import theory


@pytest.mark.parametrize(("pull", "nodes", "alpha"), [(6, 30, 0.68), (15, 100, 0.32), (15, 30, 0.18)])
def test_round_without_hostile_nodes_contracts(pull: int, nodes: int, alpha: float) -> None:
    red = theory.reduction(nodes, 0, pull, 0)
    assert red is not None
    assert round(red.alpha, 2) == alpha
    assert red.contracts


@pytest.mark.parametrize(
    ("nodes", "byzantine", "pull", "b_hat"),
    [(100, 10, 15, 7), (30, 6, 15, 6), (20, 3, 6, 3), (20, 3, 19, 3), (30, 3, 6, 3)],
)
def test_theorem_applies_to_no_experiment_of_the_paper_with_attackers(
    nodes: int, byzantine: int, pull: int, b_hat: int
) -> None:
    red = theory.reduction(nodes, byzantine, pull, b_hat)
    assert red is not None
    assert not red.contracts
    sizes = {"nodes": nodes, "byzantine": byzantine, "pull": pull, "b_hat": b_hat, "rounds": 200}
    assert theory.convergence(red, **sizes, L=1, sigma=1, G=1, gap=1) is None


def test_bound_is_what_the_proof_gets_at_the_largest_step() -> None:
    """At η = η_max the proof's inequality, c0/ηT + η(noise) + η²(drift) + c3 G²,
    is at most the theorem's bound."""
    sizes = {"nodes": 30, "byzantine": 0, "pull": 29, "b_hat": 0}
    for L, sigma, G, gap, T in [
        (1.0, 1.0, 0.5, 2.0, 100),
        (3.0, 0.1, 0.0, 1.0, 5000),
        (0.5, 5.0, 2.0, 9.0, 10),
    ]:
        for pull in (6, 15, 29):
            red = theory.reduction(30, 0, pull, 0)
            assert red is not None
            sizes["pull"] = pull
            actual = theory.convergence(red, **sizes, rounds=T, L=L, sigma=sigma, G=G, gap=gap)
            assert actual is not None
            eta = actual.eta_max
            assert eta <= 1 / (12 * L)
            proof = (
                actual.c0 / (eta * T)
                + actual.c2 * eta * L * sigma**2
                + 432 * eta * L / T * sigma**2 / 30
                + actual.c3 * G**2
                + 9 * actual.c1 * 30 * eta**2 * L**2 * (sigma**2 + G**2)
            )
            assert proof <= actual.bound * (1 + 1e-12)


def test_bound_scales_with_length_squared_which_the_printed_cube_would_not() -> None:
    """Measuring the model in other units multiplies gradients by c: a bound on ‖∇F‖² must grow by c² (G²,
    not G³)."""
    red = theory.reduction(30, 0, 15, 0)
    assert red is not None

    def bound(c: float) -> float:
        actual = theory.convergence(
            red, nodes=30, byzantine=0, pull=15, b_hat=0, rounds=50, L=2 * c, sigma=c, G=c * 0.7, gap=c
        )
        assert actual is not None
        return actual.bound

    assert bound(8.0) == pytest.approx(64 * bound(1.0), rel=1e-12)


Draws = Iterable[tuple[Fraction, frozenset[int]]]


def proofs_sampling(n: int, b: int, m: int, h_hat: int) -> Draws:
    """(probability, Ĥ) under the proofs' sampling: m of the n nodes,
    given at least ĥ honest (nodes 0 … h−1)."""
    sets = [frozenset(c) for c in combinations(range(n), m) if sum(i < n - b for i in c) >= h_hat]
    return [draw for chosen in sets for draw in honest_subsets(chosen, n - b, h_hat, Fraction(1, len(sets)))]


def algorithms_sampling(n: int, b: int, m: int, h_hat: int) -> Draws:
    """The same under Algorithm 1, seen from node 0, whose own model is always in."""
    sets = [
        frozenset({0, *c}) for c in combinations(range(1, n), m - 1) if 1 + sum(i < n - b for i in c) >= h_hat
    ]
    return [draw for chosen in sets for draw in honest_subsets(chosen, n - b, h_hat, Fraction(1, len(sets)))]


def honest_subsets(chosen: frozenset[int], h: int, h_hat: int, weight: Fraction) -> Draws:
    honest = sorted(i for i in chosen if i < h)
    subsets = [frozenset(c) for c in combinations(honest, h_hat)]
    return [(weight / len(subsets), subset) for subset in subsets]


@pytest.mark.parametrize(("n", "b", "m", "h_hat"), [(6, 2, 4, 2), (7, 2, 5, 3), (7, 3, 5, 3), (8, 3, 4, 3)])
def test_lemmas_hit_and_varcov_hold_exactly_under_the_proofs_sampling(
    n: int, b: int, m: int, h_hat: int
) -> None:
    draws, h = proofs_sampling(n, b, m, h_hat), n - b
    share = Fraction(h_hat, h)
    hit = [sum(p for p, chosen in draws if j in chosen) for j in range(h)]
    assert hit == [share] * h
    assert all(p * (1 - p) == share * (1 - share) for p in hit)
    for j, k in combinations(range(h), 2):
        both = sum(p for p, chosen in draws if {j, k} <= chosen)
        assert both - hit[j] * hit[k] == Fraction(h_hat * (h_hat - 1), h * (h - 1)) - share**2


@pytest.mark.parametrize(("n", "b", "m", "h_hat"), [(6, 2, 4, 2), (7, 3, 5, 3)])
def test_lemma_hit_fails_under_algorithm_1(n: int, b: int, m: int, h_hat: int) -> None:
    draws, h = algorithms_sampling(n, b, m, h_hat), n - b
    own = sum(p for p, chosen in draws if 0 in chosen)
    other = sum(p for p, chosen in draws if 1 in chosen)
    assert own > Fraction(h_hat, h) > other
