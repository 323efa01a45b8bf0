"""Attacks: each forges what it says, for all victims at once as for one; each hurts averaging and is withstood."""

import doctest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel.attacks import ATTACKS, Attack, View
from rpel.kernels import compiled, plain
from support.paths import ROOT

Array = NDArray[Any]
FORGING: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("sf", {}),
    ("foe", {}),
    ("foe", {"zeta": 1.1}),
    ("ipm", {}),
    ("alie", {}),
    ("alie", {"z": 0.3}),
    ("alie", {"z": "max"}),
    ("dissensus", {}),
    ("mimic", {"epsilon": 2}),
    ("mimic", {"epsilon": 5}),  # more than some victims have peers: counted around among those they have
    ("strongest", {"of": "alie"}),
    ("strongest", {"of": "foe"}),
    ("strongest", {"of": "ipm"}),
    ("strongest", {"of": "dissensus"}),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(FORGING)]


def pulled_view(seed: int, n: int = 12, s: int = 7, dtype: type = np.float64, kernels: Any = compiled) -> View:
    """Five victims that pulled s peers each, one to three of them hostile."""
    coins = np.random.default_rng(seed)
    hostile = np.array([1, 2, 3, 1, 2])
    peers = np.full((5, s), -1)
    for i, b in enumerate(hostile):
        peers[i, : s - b] = coins.choice(np.delete(np.arange(n), i), size=s - b, replace=False)
    table: Array = np.concatenate([coins.normal(size=9) + 0.3 * coins.normal(size=(n, 9)), np.zeros((5, 9))]).astype(
        dtype
    )
    rule = rpel.rule("nnm+trimmed_mean", f=3)
    return View(table, np.arange(5), peers, hostile, rule=rule, round=3, seed=1, kernels=kernels)


@pytest.mark.parametrize(("name", "parameters"), FORGING, ids=IDS)
@pytest.mark.parametrize("kernels", [plain, compiled], ids=["plain", "compiled"])
def test_the_batch_forges_what_the_plain_twin_forges_for_each_victim(
    name: str, parameters: dict[str, Any], kernels: Any
) -> None:
    attack, view = rpel.attack(name, **parameters), pulled_view(4, kernels=kernels)
    honest = view.honest.copy()
    forged, _ = attack(view, {})
    assert forged.shape == (5, 9)
    np.testing.assert_array_equal(view.honest, honest)
    for i in range(5):
        received = honest[view.peers[i][view.peers[i] >= 0]]
        alone = attack.forge(received, honest[i], byzantine=int(view.hostile[i]), rule=view.rule)
        np.testing.assert_allclose(forged[i], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["sf", "foe", "alie", "mimic"])
def test_a_victim_without_honest_peers_is_attacked_from_its_own_model(name: str) -> None:
    view = pulled_view(5)
    view.peers[2] = -1
    forged, _ = rpel.attack(name)(view, {})
    own = view.honest[2]
    expected = {"sf": -own, "foe": -2 * own, "alie": own, "mimic": own}[name]
    np.testing.assert_allclose(forged[2], expected, atol=1e-12)


@given(st.integers(1, 12), st.integers(0, 10**6))
def test_alie_is_mu_plus_z_sigma(k: int, seed: int) -> None:
    honest = np.random.default_rng(seed).normal(size=(k, 5))
    sigma = honest.std(axis=0, ddof=1) if k > 1 else np.zeros(5)
    np.testing.assert_allclose(
        rpel.attack("alie", tau=1.5).forge(honest), honest.mean(axis=0) + 1.5 * sigma, atol=1e-12
    )


@pytest.mark.parametrize(("m", "b", "z"), [(16, 7, 0.7647), (16, 6, 0.5244), (7, 3, 0.6745)])
def test_alie_at_its_maximum_uses_the_reference_z(m: int, b: int, z: float) -> None:
    honest = np.random.default_rng(0).normal(size=(m - b - 1, 4))
    found = rpel.attack("alie", z="max").forge(honest, byzantine=b)
    np.testing.assert_allclose(found, honest.mean(axis=0) + z * honest.std(axis=0, ddof=1), atol=1e-4)


def test_dissensus_on_a_graph_uses_the_weights() -> None:
    coins = np.random.default_rng(1)
    honest, own, w = coins.normal(size=(3, 4)), coins.normal(size=4), np.array([0.4, 0.1, 0.2, 0.05, 0.15, 0.1])
    found = rpel.attack("dissensus", epsilon=2.0).forge(honest, own, byzantine=2, weights=w)
    expected = own - (2.0 / 0.25) * (w[1:4, None] * (honest - own)).sum(axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_strongest_searches_as_the_reference_words_it() -> None:
    coins = np.random.default_rng(2)
    honest, own = coins.normal(size=(8, 6)), coins.normal(size=6)
    rule = rpel.rule("nnm+trimmed_mean", f=3)

    def harm(forged: Array) -> float:
        models = np.concatenate([own[None], honest, np.tile(forged, (3, 1))])
        return float(np.linalg.norm(rule(models) - np.concatenate([own[None], honest]).mean(axis=0)))

    for of in ("alie", "foe", "ipm"):
        found = rpel.attack("strongest", of=of).forge(honest, own, byzantine=3, rule=rule)
        key = {"alie": "z", "foe": "zeta", "ipm": "tau"}[of]

        def J(a: float, of: str = of, key: str = key) -> float:
            return harm(Attack(rpel.attack(of).name, {key: a}).forge(honest))

        assert harm(found) == pytest.approx(one_by_one(J), rel=1e-9)
        assert harm(found) >= J(0.0)


def one_by_one(J: Any) -> float:
    """The search as the reference page words it, for one victim."""
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
    found = rpel.attack("strongest", of="dissensus").forge(honest, own, byzantine=2, rule=rule, weights=w)
    models = np.concatenate([own[None], honest, np.tile(found, (2, 1))])
    still = np.concatenate([own[None], honest, np.tile(own, (2, 1))])
    mean = np.concatenate([own[None], honest]).mean(axis=0)

    def harm(x: Array) -> float:
        return float(np.linalg.norm(rule.aggregate(x, np.arange(8)[None], weights=w[None])[0] - mean))

    assert harm(models) > harm(still)


def graph_view(seed: int, rule: rpel.Rule) -> View:
    """Three victims on a complete graph of eight, two of them hostile; a victim's own row is among its peers."""
    coins, w = np.random.default_rng(seed), 1 / 8
    table: Array = np.concatenate([coins.normal(size=(6, 4)), np.zeros((3, 4))])
    return View(
        table,
        own=np.arange(3),
        peers=np.array([[i, *(j for j in range(6) if j != i)] for i in range(3)]),
        hostile=np.full(3, 2),
        rule=rule,
        weights=np.full((3, 6), w),
        hostile_weights=np.full((3, 2), w),
    )


@pytest.mark.parametrize("seed", range(8))
def test_on_a_graph_strongest_counts_the_victim_once_among_the_honest(seed: int) -> None:
    """The plain twin is handed the other honest models alone; A holds the victim, too, for the attack itself."""
    rule = rpel.rule("gts", b_hat=2)
    view = graph_view(seed, rule)
    forged, _ = rpel.attack("strongest", of="dissensus")(view, {})
    for i in range(3):
        others = np.delete(np.arange(6), i)
        alone = rpel.attack("strongest", of="dissensus").forge(
            view.honest[others], view.honest[i], byzantine=2, rule=rule, weights=np.full(8, 1 / 8)
        )
        np.testing.assert_allclose(forged[i], alone, atol=1e-9)


def test_the_most_exposed_are_struck_and_the_others_hear_the_mean() -> None:
    view = pulled_view(6)
    forged, _ = rpel.attack("sf", targeting="most-exposed")(view, {})
    for i, b in enumerate(view.hostile):
        mu = view.honest[view.peers[i][view.peers[i] >= 0]].mean(axis=0)
        np.testing.assert_allclose(forged[i], -mu if b == 3 else mu, atol=1e-12)


def test_mimic_heuristic_learns_the_extreme_node_and_stays_with_it() -> None:
    attack = rpel.attack("mimic_heuristic", learning_rounds=5)
    state: dict[str, Any] = {}
    for round in range(8):
        view = pulled_view(7)
        view.honest[:] = np.random.default_rng(round).normal(size=view.honest.shape) * 0.01
        view.honest[9 if round < 5 else 2] += 3.0
        forged, state = attack(view, state)
        assert state["node"] == 9
        np.testing.assert_array_equal(forged, np.tile(view.honest[9], (5, 1)))
    assert state["rounds"] == 5


def test_stale_answers_what_the_honest_mean_was() -> None:
    attack, state = rpel.attack("stale", delay=2), None
    means = []
    for round in range(5):
        view = pulled_view(20 + round)
        means.append(view.honest.mean(axis=0))
        forged, state = attack(view, state)
        np.testing.assert_allclose(forged[0], means[max(0, round - 2)], atol=1e-12)


def test_inf_and_gaussian_are_what_they_say_and_repeat() -> None:
    view = pulled_view(8)
    assert np.isposinf(rpel.attack("inf")(view, {})[0]).all()
    noise = rpel.attack("gaussian", mu=5.0, sigma=0.1)(view, {})[0].copy()
    assert abs(noise.mean() - 5) < 0.1
    assert len({tuple(row) for row in noise}) == 5
    np.testing.assert_array_equal(rpel.attack("gaussian", mu=5.0, sigma=0.1)(pulled_view(8), {})[0], noise)
    later = rpel.attack("gaussian", mu=5.0, sigma=0.1)(replace(pulled_view(8), round=4), {})[0]
    assert not np.isclose(later, noise).any(), "fresh in every round"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rpel.attack("ali"), ["'ali'", "'alie'"]),
        (lambda: rpel.attack("alie", zeta=1), ["alie", "'zeta'", "z"]),
        (lambda: rpel.attack("alie", z="most"), ["'most'", "'max'"]),
        (lambda: rpel.attack("foe", zeta=float("nan")), ["zeta", "nan"]),
        (lambda: rpel.attack("strongest", of="sf"), ["alie", "'sf'"]),
        (lambda: rpel.attack("sf", targeting="some"), ["'some'"]),
        (lambda: rpel.attack("label_flip").forge(np.ones((2, 2))), ["label_flip"]),
        (lambda: rpel.attack("dissensus").forge(np.ones((2, 2))), ["dissensus", "own"]),
        (lambda: rpel.attack("strongest").forge(np.ones((2, 2)), np.ones(2)), ["rule"]),
        (lambda: rpel.attack("sf").forge(np.ones(3)), ["(k, d)"]),
        (lambda: rpel.attack("sf").forge(np.ones((0, 3))), ["own"]),
    ],
)
def test_errors_name_what_is_wrong(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- what an attack means --------------------------------------------------------------------------------------------


def learn(rule: rpel.Rule, attack: Attack | None, rounds: int = 60) -> float:
    """Distance to the optimum after gradient descent among 20 nodes, 4 hostile; node i pulls towards its own target.

    All honest nodes pull 9 of the others and aggregate m = 10 models; the mean of the honest targets is the optimum.
    """
    coins = np.random.default_rng(0)
    targets = 1.0 + 0.3 * coins.normal(size=(16, 5))
    x = np.zeros((16, 5))
    state: dict[str, Any] = {}
    for t in range(rounds):
        half = x - 0.2 * (x - targets)
        pulls = np.array([coins.choice(np.delete(np.arange(20), i), size=9, replace=False) for i in range(16)])
        order = np.argsort(pulls >= 16, axis=1, kind="stable")
        pulls = np.take_along_axis(pulls, order, axis=1)
        table = np.concatenate([half, np.zeros((16, 5))])
        hostile = (pulls >= 16).sum(axis=1)
        view = View(table, np.arange(16), np.where(pulls < 16, pulls, -1), hostile, rule=rule, round=t, seed=0)
        if attack is not None:
            _, state = attack(view, state)
        else:
            rpel.attack("none")(view, {})
        x = rule.aggregate(table, view.answers()[0])
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(x - targets.mean(axis=0), axis=1).mean())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sf", {}),
        ("foe", {}),
        ("ipm", {}),
        ("alie", {"z": 4.0}),
        ("dissensus", {}),
        ("mimic", {}),
        ("mimic_heuristic", {}),
        ("gaussian", {"sigma": 20.0}),
        ("strongest", {"of": "foe"}),
        ("strongest", {"of": "alie"}),
    ],
)
def test_each_attack_hurts_averaging_and_nnm_with_trimmed_mean_withstands_it(
    name: str, parameters: dict[str, Any]
) -> None:
    attack = rpel.attack(name, **parameters)
    averaging, robust = rpel.rule("mean"), rpel.rule("nnm+trimmed_mean", f=4)
    calm, hurt = learn(averaging, None), learn(averaging, attack)
    assert hurt > 1.05 * calm
    assert learn(robust, attack) < 0.3, "the honest optimum lies at distance 2.2 from the start"


@pytest.mark.parametrize("rule", ["mean", "nnm+trimmed_mean"])
def test_inf_is_left_out_by_every_rule_even_by_averaging(rule: str) -> None:
    assert learn(rpel.rule(rule, f=4), rpel.attack("inf")) < 0.3


def test_the_documentation_runs_and_a_new_attack_is_ten_lines() -> None:
    try:
        found = doctest.testfile(str(ROOT / "docs" / "rules.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    finally:
        ATTACKS.pop("half_truth", None)
    assert found.attempted > 8
    assert found.failed == 0
