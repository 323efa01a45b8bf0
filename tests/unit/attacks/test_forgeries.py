"""Attacks: each forges what it says, for all victims at once as for one;
each hurts averaging and is withstood."""

import doctest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rpel
from rpel.attacks import ATTACKS, Attack, View
from rpel.randomness import stream
from rpel.rules import RULES, RoundContext
from support.paths import ROOT
from support.views import pulled_view

FORGING: list[tuple[str, dict[str, Any]]] = [
    ("foe", {"zeta": 1.1}),
    ("alie", {"z": 0.3}),
    ("mimic", {"epsilon": 2}),
    ("mimic", {"epsilon": 5}),  # more than some victims have peers: counted around among those they have
    ("strongest", {"of": ["alie", "foe", "min_sum"]}),
    *[(name, {"direction": p}) for name in ("min_max", "min_sum") for p in ("std", "unit", "sign")],
]
"""Parameters other than the defaults, which runs and the checks for users cover."""
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(FORGING)]
FULL = pytest.mark.full


@pytest.mark.parametrize(("name", "parameters"), FORGING, ids=IDS)
@pytest.mark.parametrize("kernels", ["plain", "numba"])
def test_batch_forges_what_the_plain_twin_forges_for_each_victim(
    name: str, parameters: dict[str, Any], kernels: str
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
def test_victim_without_honest_peers_is_attacked_from_the_own_model(name: str) -> None:
    view = pulled_view(5)
    view.peers[2] = -1
    forged, _ = rpel.attack(name)(view, {})
    own = view.honest[2]
    expected = {"sf": -own, "foe": -2 * own, "alie": own, "mimic": own}[name]
    np.testing.assert_allclose(forged[2], expected, atol=1e-12)


# --- hidden in the spread of the honest models --------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["plain", "numba"])
def test_fang_goes_against_the_honest_change_beyond_the_extremes(kernels: str) -> None:
    view = pulled_view(9, kernels=kernels)
    before = view.honest - np.where(np.arange(9) % 2, -0.1, 0.1)  # even coordinates rise, odd ones fall
    forged, _ = rpel.attack("fang")(replace(view, before=before), {})
    u = stream(1, "fang", 3).random(9)
    for i in range(5):
        x = view.honest[view.peers[i][view.peers[i] >= 0]]
        low, high = x.min(axis=0), x.max(axis=0)
        expected = np.where(np.arange(9) % 2, high + u * (high - low), low - u * (high - low))
        np.testing.assert_allclose(forged[i], expected, atol=1e-12)
        change = (view.honest - before).mean(axis=0)
        np.testing.assert_allclose(
            rpel.attack("fang").forge(x, change=change, seed=1, round=3), expected, atol=1e-12
        )


def test_spectral_drives_the_two_sides_of_the_weakest_cut_apart() -> None:
    """Two triangles joined by one edge: v has one sign on each of them."""
    graph = np.array([[1, 2, -1], [0, 2, -1], [0, 1, 3], [4, 5, -1], [3, 5, -1], [3, 4, -1]])
    adjacency = np.zeros((6, 6))
    for i, row in enumerate(graph):
        adjacency[i, row[row >= 0]] = 1
    adjacency = np.maximum(adjacency, adjacency.T)  # 2 asks 3, and 3 does not ask 2
    v = np.linalg.eigh(np.diag(adjacency.sum(axis=1)) - adjacency)[1][:, 1]
    v *= np.sign(v[0])
    assert (v[:3] > 0).all()
    assert (v[3:] < 0).all()
    x = np.random.default_rng(3).normal(size=(6, 4))
    table, victims = np.concatenate([x, np.zeros((2, 4))]), np.array([1, 4])
    view = View(table, victims, np.array([[0], [3]]), np.ones(2, int), graph=graph)
    forged, _ = rpel.attack("spectral", a=2.0)(view, {})
    for row, i in zip(forged, (1, 4), strict=True):
        np.testing.assert_allclose(row, x[i] + 2 * v[i] * (v @ x), atol=1e-9)
    order = np.array([0, 1, 2, 3, 5, 4])  # the plain twin takes the victim last
    position = np.argsort(order)
    rows = np.where(graph[order] >= 0, position[graph[order]], -1)
    alone = rpel.attack("spectral", a=2.0).forge(x[order[:5]], x[4], graph=rows)
    np.testing.assert_allclose(alone, forged[1], atol=1e-9)


def test_spectral_breaks_ties_once_and_refuses_too_many_nodes() -> None:
    complete = np.array([[j for j in range(5) if j != i] for i in range(5)])
    x = np.random.default_rng(3).normal(size=(5, 3))
    view = View(
        np.concatenate([x, np.zeros((1, 3))]), np.array([0]), np.array([[1]]), np.ones(1, int), graph=complete
    )
    first = rpel.attack("spectral")(view, {})[0].copy()
    np.testing.assert_array_equal(rpel.attack("spectral")(view, {})[0], first)
    draw = stream(0, "spectral").standard_normal(5)
    v = draw - draw.mean()  # projected onto the space of the four equal eigenvalues
    v *= np.sign(v[0]) / np.linalg.norm(v)
    np.testing.assert_allclose(first[0], x[0] + v[0] * (v @ x), atol=1e-9)
    graph = np.zeros((2001, 1), int)
    many = View(np.zeros((2002, 1)), np.array([0]), np.array([[1]]), np.ones(1, int), graph=graph)
    with pytest.raises(ValueError, match=r"2000.*2001"):
        rpel.attack("spectral")(many, {})


@pytest.mark.parametrize(("name", "what"), [("fang", "before"), ("spectral", "graph")])
def test_attack_names_a_missing_input(name: str, what: str) -> None:
    assert what in rpel.attack(name).needs
    with pytest.raises(ValueError, match=what):
        rpel.attack(name)(pulled_view(3), {})


def test_most_exposed_targeting_sends_the_mean_to_other_victims() -> None:
    view = pulled_view(6)
    forged, _ = rpel.attack("sf", targeting="most-exposed")(view, {})
    for i, b in enumerate(view.hostile):
        mu = view.honest[view.peers[i][view.peers[i] >= 0]].mean(axis=0)
        np.testing.assert_allclose(forged[i], -mu if b == 3 else mu, atol=1e-12)


def test_mimic_heuristic_settles_on_the_extreme_node() -> None:
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
    later = rpel.attack("gaussian", mu=5.0, sigma=0.1)(
        replace(pulled_view(8), context=RoundContext(round=4, seed=1)), {}
    )[0]
    assert not np.isclose(later, noise).any(), "fresh in every round"


# --- what an attack means -----------------------------------------------------------------------------------


def learn(rule: rpel.Rule, attack: Attack | None, rounds: int = 60) -> float:
    """Distance to the optimum after gradient descent among 20 nodes, 4 hostile;
    node i pulls towards its own target.

    All honest nodes pull 9 of the others and aggregate m = 10 models;
    the mean of the honest targets is the optimum.
    """
    coins = np.random.default_rng(0)
    targets = 1.0 + 0.3 * coins.normal(size=(16, 5))
    x = np.zeros((16, 5))
    state: dict[str, Any] = {}
    for t in range(rounds):
        half = x - 0.2 * (x - targets)
        pulls = np.array(
            [coins.choice(np.delete(np.arange(20), i), size=9, replace=False) for i in range(16)]
        )
        order = np.argsort(pulls >= 16, axis=1, kind="stable")
        pulls = np.take_along_axis(pulls, order, axis=1)
        table = np.concatenate([half, np.zeros((16, 5))])
        hostile = (pulls >= 16).sum(axis=1)
        peers = np.where(pulls < 16, pulls, -1)
        view = View(
            table,
            np.arange(16),
            peers,
            hostile,
            rule=rule,
            context=RoundContext(round=t),
            before=x,
            graph=peers,
        )
        if attack is not None:
            forged, state = attack(view, state)
            view.with_forged(forged)
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
        ("strongest", {"of": "alie"}),
        pytest.param("strongest", {"of": "foe"}, marks=FULL),
        pytest.param("strongest", {"of": ["foe", "min_max"]}, marks=FULL),
        ("min_max", {}),
        ("min_sum", {"direction": "unit"}),
        ("fang", {}),
        ("spectral", {}),
    ],
)
def test_each_attack_hurts_averaging_and_not_nnm_with_trimmed_mean(
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


def test_documentation_runs_and_names_every_rule_and_attack() -> None:
    text = ROOT / "docs" / "rules.md"
    outcome = doctest.testfile(str(text), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 12
    assert outcome.failed == 0
    assert all(f"`{name}`" in text.read_text("utf-8") for name in (*ATTACKS, *RULES))
