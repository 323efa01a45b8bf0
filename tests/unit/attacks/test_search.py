"""The strongest factor: near the best of all, for each victim and for many at once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel.attacks import ATTACKS, FACTORS, View
from support.views import pulled_view

Array = NDArray[Any]
FULL = pytest.mark.full


@pytest.mark.parametrize(
    "of", ["alie", *(pytest.param(one, marks=FULL) for one in ("foe", "dissensus", "min_max"))]
)
@pytest.mark.parametrize("name", ["nnm+trimmed_mean", pytest.param("krum", marks=FULL)])
def test_strongest_comes_near_the_brute_force_optimum(name: str, of: str) -> None:
    """60 victims: never below half of the best of 120 factors, at most one in twenty below 0.9:
    a lower bound."""
    shares = []
    for seed, (m, b) in enumerate([(16, 7), (16, 4), (7, 3)]):
        coins, k = np.random.default_rng(seed), m - 1 - b
        table: Array = np.concatenate([seed + coins.normal(size=(20 * (k + 1), 8)), np.zeros((20, 8))])
        own, peers = np.arange(20), 20 + np.arange(20 * k).reshape(20, k)
        view = View(table, own, peers, np.full(20, b), rule=rpel.rule(name, f=b))
        honest = table[np.concatenate([own[:, None], peers], axis=1)].mean(axis=1)

        def harm(forged: Array, view: View = view, honest: Array = honest) -> Array:
            assert view.rule is not None
            reached = view.rule.aggregate(view.with_forged(forged), view.answers()[0])
            return np.asarray(np.linalg.norm(reached - honest, axis=1))

        brute = np.zeros(20)
        for a in np.concatenate([[0.0], np.geomspace(0.02, 60, 120)]):
            brute = np.maximum(brute, harm(ATTACKS[of](view, **{FACTORS[of]: np.full(20, a)})))
        values = harm(rpel.attack("strongest", of=of)(view, {})[0])
        shares += (values / np.maximum(brute, 1e-9)).tolist()
    assert min(shares) > 0.5
    assert np.quantile(shares, 0.05) > 0.9


def test_strongest_of_several_is_the_best_of_them_for_each_victim() -> None:
    winners = set()
    for seed in range(12, 16):
        harms = []
        for of in ("alie", "ipm", "dissensus", "alie+ipm+dissensus"):
            view = pulled_view(seed)
            assert view.rule is not None
            view.with_forged(rpel.attack("strongest", of=of)(view, {})[0])
            honest = [np.append(view.peers[i][view.peers[i] >= 0], i) for i in range(5)]
            means = np.stack([view.honest[rows].mean(axis=0) for rows in honest])
            harms.append(np.linalg.norm(view.rule.aggregate(view.table, view.answers()[0]) - means, axis=1))
        *single, several = harms
        np.testing.assert_allclose(several, np.max(single, axis=0), rtol=1e-9)
        winners |= set(np.argmax(single, axis=0).tolist())
    assert len(winners) > 1, "no attack is best for all"


def graph_view(seed: int, rule: rpel.Rule) -> View:
    """Three victims on a complete graph of eight, two of them hostile;
    a victim's own row is among its peers."""
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
    """The plain twin is handed the other honest models alone; A holds the victim, too,
    for the attack itself."""
    rule = rpel.rule("gts", b_hat=2)
    view = graph_view(seed, rule)
    forged, _ = rpel.attack("strongest", of="dissensus")(view, {})
    for i in range(3):
        others = np.delete(np.arange(6), i)
        alone = rpel.attack("strongest", of="dissensus").forge(
            view.honest[others], view.honest[i], byzantine=2, rule=rule, weights=np.full(8, 1 / 8)
        )
        np.testing.assert_allclose(forged[i], alone, atol=1e-9)


def mean_harm(view: View, forged: Array, to: list[int]) -> float:
    """What one vector does to the aggregates of several victims,
    each of which meets it as often as hostile answers."""
    values = []
    assert view.rule is not None
    for i in to:
        honest = [view.honest[i], *view.honest[view.peers[i][view.peers[i] >= 0]]]
        models = np.array([*honest, *[forged] * int(view.hostile[i])])
        values.append(float(np.linalg.norm(view.rule(models) - np.mean(honest, axis=0))))
    return float(np.mean(values))


@pytest.mark.parametrize("of", ["alie", "dissensus"])
def test_consistent_vector_maximises_the_mean_harm(of: str) -> None:
    """Victims 0 and 3 are those whose vector is sent;
    the search for one victim alone harms the others less."""
    audience = np.full((5, 4), -1)
    audience[0], audience[3, :2] = [0, 1, 2, 4], [3, 2]
    better = []
    for seed in range(6):
        view, name = replace(pulled_view(seed), audience=audience), FACTORS[of]
        alone = rpel.attack("strongest", of=of)(pulled_view(seed), {})[0].copy()
        forged = rpel.attack("strongest", of=of)(view, {})[0].copy()
        for sent, to in ((0, [0, 1, 2, 4]), (3, [3, 2])):
            actual = mean_harm(view, forged[sent], to)
            for a in (0.0, 0.5, 1.5, 3.0, 6.0):
                given: dict[str, Any] = {name: a}
                other = rpel.attack(of, **given)(pulled_view(seed), {})[0][sent]
                assert actual >= mean_harm(view, other, to) - 1e-9
            better.append(actual - mean_harm(view, alone[sent], to))
    assert max(better) > 1e-3
    assert np.mean(better) > 0
