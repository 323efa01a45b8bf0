"""What each attack forges, computed by hand or by definition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel

Array = NDArray[Any]


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_alie_is_mu_plus_z_sigma(k: int, seed: int) -> None:
    honest = np.random.default_rng(seed).normal(size=(k, 5))
    sigma = honest.std(axis=0, ddof=1) if k > 1 else np.zeros(5)
    np.testing.assert_allclose(
        rpel.attack("alie", z=1.5).forge(honest), honest.mean(axis=0) + 1.5 * sigma, atol=1e-12
    )


@pytest.mark.parametrize(("m", "b", "z"), [(16, 7, 0.7647), (16, 6, 0.5244), (7, 3, 0.6745)])
def test_alie_at_maximum_uses_the_reference_z(m: int, b: int, z: float) -> None:
    honest = np.random.default_rng(0).normal(size=(m - b - 1, 4))
    forged = rpel.attack("alie", z="max").forge(honest, byzantine=b)
    np.testing.assert_allclose(forged, honest.mean(axis=0) + z * honest.std(axis=0, ddof=1), atol=1e-4)


def test_dissensus_on_a_graph_uses_the_weights() -> None:
    coins = np.random.default_rng(1)
    honest, own, w = (
        coins.normal(size=(3, 4)),
        coins.normal(size=4),
        np.array([0.4, 0.1, 0.2, 0.05, 0.15, 0.1]),
    )
    forged = rpel.attack("dissensus", epsilon=2.0).forge(honest, own, byzantine=2, weights=w)
    expected = own - (2.0 / 0.25) * (w[1:4, None] * (honest - own)).sum(axis=0)
    np.testing.assert_allclose(forged, expected, atol=1e-12)


def test_strongest_does_at_least_the_harm_of_the_plain_search() -> None:
    coins = np.random.default_rng(2)
    honest, own = coins.normal(size=(8, 6)), coins.normal(size=6)
    rule = rpel.rule("nnm+trimmed_mean", f=3)

    def harm(forged: Array) -> float:
        models = np.concatenate([own[None], honest, np.tile(forged, (3, 1))])
        return float(np.linalg.norm(rule(models) - np.concatenate([own[None], honest]).mean(axis=0)))

    for of in ("alie", "foe", "ipm"):
        actual = rpel.attack("strongest", of=of).forge(honest, own, byzantine=3, rule=rule)
        key = {"alie": "z", "foe": "zeta", "ipm": "tau"}[of]

        def J(a: float, of: str = of, key: str = key) -> float:
            return harm(rpel.attack(of, **{key: a}).forge(honest))

        assert harm(actual) >= one_by_one(J) * (1 - 1e-9)
        assert harm(actual) >= J(0.0)


def one_by_one(J: Any) -> float:
    """Expand from 0, then contract, 16 evaluations: the first half of the search, for one victim."""
    a, best, step, left = 0.0, J(0.0), 1.0, 15
    while left:
        left -= 1
        value = J(a + step)
        if value <= best:
            break
        a, best, step = a + step, value, 2 * step
    forward = True
    while left:
        left -= 1
        step *= 0.8
        tried = a + step if forward or a < step else a - step
        value = J(tried)
        if value > best:
            a, best = tried, value
        forward = not forward
    return float(best)


def test_strongest_also_searches_against_graph_rules() -> None:
    coins = np.random.default_rng(3)
    honest, own, w = coins.normal(size=(5, 6)), coins.normal(size=6), np.full(8, 1 / 8)
    rule = rpel.rule("cs_plus", b_hat=2)
    forged = rpel.attack("strongest", of="dissensus").forge(honest, own, byzantine=2, rule=rule, weights=w)
    models = np.concatenate([own[None], honest, np.tile(forged, (2, 1))])
    still = np.concatenate([own[None], honest, np.tile(own, (2, 1))])
    mean = np.concatenate([own[None], honest]).mean(axis=0)

    def harm(x: Array) -> float:
        return float(np.linalg.norm(rule.aggregate(x, np.arange(8)[None], weights=w[None])[0] - mean))

    assert harm(models) > harm(still)


DIRECTIONS = {
    "std": lambda x: -x.std(axis=0, ddof=1),
    "unit": lambda x: -x.mean(axis=0) / np.linalg.norm(x.mean(axis=0)),
    "sign": lambda x: -np.sign(x.mean(axis=0)),
}


def pairwise(x: Array) -> Array:
    return np.asarray(np.linalg.norm(x[:, None] - x[None], axis=2))


@given(st.integers(2, 9), st.integers(0, 10**6), st.sampled_from(list(DIRECTIONS)))
def test_min_max_goes_as_far_as_the_farthest_pair_and_no_farther(k: int, seed: int, direction: str) -> None:
    x = np.random.default_rng(seed).normal(size=(k, 5)) + 1
    forged = rpel.attack("min_max", direction=direction).forge(x)
    mu, p = x.mean(axis=0), DIRECTIONS[direction](x)
    gamma = float((forged - mu) @ p / (p @ p))
    assert gamma > 0
    np.testing.assert_allclose(forged, mu + gamma * p, atol=1e-9)
    assert np.linalg.norm(forged - x, axis=1).max() == pytest.approx(pairwise(x).max(), rel=1e-9)


@given(st.integers(2, 9), st.integers(0, 10**6), st.sampled_from(list(DIRECTIONS)))
def test_min_sum_goes_as_far_as_the_most_distant_honest_model_is_from_all(
    k: int, seed: int, direction: str
) -> None:
    x = np.random.default_rng(seed).normal(size=(k, 5)) + 1
    forged = rpel.attack("min_sum", direction=direction).forge(x)
    mu, p = x.mean(axis=0), DIRECTIONS[direction](x)
    gamma = float((forged - mu) @ p / (p @ p))
    np.testing.assert_allclose(forged, mu + gamma * p, atol=1e-9)
    largest = np.square(pairwise(x)).sum(axis=1).max()
    assert np.square(forged - x).sum() == pytest.approx(largest, rel=1e-9)


def test_min_max_and_min_sum_by_hand() -> None:
    """0 and 2: μ = 1, σ = √2, R = 2, so that μ − γσ = 0 − (2 − 2)… min_max ends at 0,
    min_sum at 1 − √1 = 0."""
    x = np.array([[0.0], [2.0]])
    assert rpel.attack("min_max").forge(x)[0] == pytest.approx(0.0)
    assert rpel.attack("min_sum").forge(x)[0] == pytest.approx(0.0)
    # μ = 2, R = 5: 5 − 5 = 0; S = 5² + 4² = 41, Σ‖μ − x‖² = 14, √(27/3) = 3
    three = np.array([[0.0], [1.0], [5.0]])
    assert rpel.attack("min_max").forge(three)[0] == pytest.approx(0.0)
    assert rpel.attack("min_sum").forge(three)[0] == pytest.approx(-1.0)


@pytest.mark.parametrize("name", ["min_max", "min_sum", "fang"])
def test_single_or_equal_honest_models_leave_no_room_to_hide(name: str) -> None:
    for x in (np.array([[1.0, -2.0]]), np.array([[1.0, -2.0]] * 4)):
        forged = rpel.attack(name).forge(x, change=np.array([1.0, -1.0]))
        expected = [0.999, -1.998] if name == "fang" else [1.0, -2.0]
        np.testing.assert_allclose(forged, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rpel.attack("ali"), ["'ali'", "'alie'"]),
        (lambda: rpel.attack("alie", zeta=1), ["alie", "'zeta'", "z"]),
        (lambda: rpel.attack("alie", z="most"), ["'most'", "'max'"]),
        (lambda: rpel.attack("foe", zeta=float("nan")), ["zeta", "nan"]),
        (lambda: rpel.attack("foe", zeta=None), ["zeta takes a number", "None"]),
        (lambda: rpel.attack("alie", z=[1, 2]), ["z takes a number", "[1, 2]"]),
        (lambda: rpel.attack("strongest", of=5), ["alie", "not of 5"]),
        (lambda: rpel.attack("strongest", of="sf"), ["alie", "'sf'"]),
        (lambda: rpel.attack("sf", targeting="some"), ["'some'"]),
        (lambda: rpel.attack("label_flip").forge(np.ones((2, 2))), ["label_flip"]),
        (lambda: rpel.attack("dissensus").forge(np.ones((2, 2))), ["dissensus", "own"]),
        (lambda: rpel.attack("strongest").forge(np.ones((2, 2)), np.ones(2)), ["rule"]),
        (lambda: rpel.attack("sf").forge(np.ones(3)), ["(k, d)"]),
        (lambda: rpel.attack("sf").forge(np.ones((0, 3))), ["own"]),
    ],
)
def test_bad_attack_parameters_are_named(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
