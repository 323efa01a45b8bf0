"""The curious member: its statistics, what it does to the victim, its bound beside what is stated,
its command."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import rpel as package
from rpel import auditing
from rpel.simulation.inputs import Inputs, loader
from rpel.simulation.run import prepared
from rpel.spec import Request
from rpel.studies import audit

# --- statistics ---------------------------------------------------------------------------------------------


def test_auc_and_true_positives_equal_a_plain_count() -> None:
    coins = np.random.default_rng(0)
    inside, outside = coins.integers(0, 9, 40) / 2, coins.integers(0, 7, 230) / 2
    pairs = [(a > b) + (a == b) / 2 for a in inside for b in outside]
    assert auditing.auc(inside, outside) == pytest.approx(np.mean(pairs))
    best = max(
        (inside > threshold).mean()
        for threshold in np.unique(np.concatenate([inside, outside]))
        if (outside > threshold).mean() <= 0.01
    )
    assert auditing.true_positives(inside, outside) == best


def published(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """The p-value of Steinke, Nasr and Jagielski, as their appendix has it, term by term."""
    q = math.exp(eps) / (1 + math.exp(eps))
    beta = sum(stats.binom.pmf(i, r, q) for i in range(v, r + 1))
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return float(min(1.0, beta + alpha * delta * 2 * m))


@pytest.mark.parametrize(
    ("m", "r", "v", "delta"), [(100, 100, 80, 0.0), (200, 50, 48, 1e-6), (300, 150, 140, 1e-5)]
)
def test_audit_bound_inverts_the_published_probability(m: int, r: int, v: int, delta: float) -> None:
    bound = auditing.least_epsilon(m, r, v, delta)
    assert published(m, r, v, bound - 1e-6, delta) < 0.05 <= published(m, r, v, bound + 1e-6, delta)


@settings(max_examples=15, deadline=None)
@given(
    m=st.sampled_from([40, 100, 300]),
    epsilon=st.sampled_from([0.1, 0.5, 1.0, 2.0]),
    delta=st.sampled_from([0.0, 1e-5, 1e-4, 1e-3]),
    groups=st.sampled_from([1, 4, 20]),
    seed=st.integers(0, 10**6),
)
def test_audit_bound_exceeds_epsilon_of_the_worst_mechanism_in_5_percent_at_most(
    m: int, epsilon: float, delta: float, groups: int, seed: int
) -> None:
    """Randomised response that reveals each group of canaries with probability delta is (ε, δ)-private."""
    coins, runs, exceeded = np.random.default_rng(seed), 400, 0
    for _ in range(runs):
        included = coins.random(m) < 0.5
        revealed = (coins.random(groups) < delta)[np.arange(m) % groups]
        lies = coins.random(m) < 1 / (1 + math.exp(epsilon))
        scores = np.where(revealed, 2.0, 1.0) * np.where(included ^ (lies & ~revealed), 1, -1)
        exceeded += auditing.audit(scores + coins.random(m) / 9, included, delta).epsilon > epsilon
    assert exceeded <= stats.binom.isf(1e-6, runs, 1 - auditing.CONFIDENCE)


def test_audit_bound_approaches_epsilon_of_randomised_response() -> None:
    coins, epsilon, bounds = np.random.default_rng(1), 1.5, []
    for _ in range(60):
        included = coins.random(400) < 0.5
        told = included ^ (coins.random(400) < 1 / (1 + math.exp(epsilon)))
        bounds.append(auditing.audit(told + coins.random(400) / 2, included, 1e-4).epsilon)
    assert np.median(bounds) > 0.6 * epsilon


@pytest.mark.parametrize("delta", [1e-3, 1e-4, 1e-5])
def test_200_canaries_show_an_epsilon_of_2_at_every_usual_delta(delta: float) -> None:
    assert auditing.most(200, delta) > 2


def test_likelihood_ratios_find_what_a_threshold_on_the_loss_cannot() -> None:
    coins = np.random.default_rng(2)
    hard, there = coins.normal(0, 5, 400), coins.random((9, 400)) < 0.5
    seen = hard + there + coins.normal(0, 0.4, (9, 400))
    ratios = audit.likelihood_ratios(seen[0], seen[1:], there[1:])
    assert auditing.auc(ratios[there[0]], ratios[~there[0]]) > 0.85
    assert auditing.auc(seen[0][there[0]], seen[0][~there[0]]) < 0.65


# --- the run that is played again ---------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "model": "linear", "nodes": 20, "byzantine": 2, "rounds": 16, "batch_size": 50, "partition": "iid",
    "lr": 0.02, "momentum": 0.0, "privacy": "dp(clip=0.1, noise=4, delta=1e-6)",
    "threads": 1,
}  # fmt: skip


def test_left_out_examples_are_never_drawn() -> None:
    resolved, inputs = prepared(Request(**RUN), Inputs(), loader())
    stage = audit._Stage(resolved, inputs, canaries=100, seed=0, victim=3, clipping=True)
    coins = np.random.default_rng(0)
    play = audit._Play(coins.random(len(stage.own)) < 0.5, coins.random(100) < 0.5, 0)
    simulation, task = stage._simulation(play)
    private: Any = simulation.gradients
    seen = np.zeros(task.examples.dataset.size)
    for t in range(200):
        rows, present = private.batches(np.array([stage.row]), t, 0)
        seen[rows[present]] += 1
    there = np.concatenate([stage.own[play.examples], stage.planted[play.canaries]])
    assert not seen[np.setdiff1d(np.arange(len(seen)), there)].any()
    assert seen[there].mean() == pytest.approx(200 * 50 / len(stage.own), rel=0.05)
    assert simulation.budget is not None
    original = package.simulate(**{**RUN, "rounds": 1}).certificate["privacy"]
    assert simulation.budget.of(float(simulation.budget.rates.max()), 1) == original["epsilon"]


def bounds(seed: int, clipping: bool) -> audit.Findings:
    return audit.attack(Request(**RUN, seed=seed), canaries=300, points=1, seed=seed, clipping=clipping)


@pytest.mark.full
def test_fifty_audits_never_exceed_stated_epsilon_with_clipping() -> None:
    for seed in range(50):
        assert bounds(seed, clipping=True).holds, seed
        assert bounds(seed, clipping=False).holds is False, seed


# --- the command --------------------------------------------------------------------------------------------


def test_audit_whose_canaries_cannot_exceed_the_stated_epsilon_says_how_many_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "rpel"):
        audit._most(40, 1e-4, 3.0)
        audit._most(40, 1e-4, 8.0)
    assert "use 100" in caplog.text
    assert "no number of canaries can" in caplog.text


def test_audit_refuses_runs_without_node_examples_or_clipping(tmp_path: Path) -> None:
    public = {"model": "linear", "nodes": 6, "byzantine": 1, "rounds": 2, "batch_size": 20}
    with pytest.raises(ValueError, match="partition 'virtual'"):
        audit.attack(Request(**public, partition="virtual"))
    with pytest.raises(ValueError, match="--without-clipping"):
        audit.attack(Request(**public), clipping=False)


def test_run_without_stated_epsilon_can_be_attacked() -> None:
    result = audit.attack(
        Request(model="linear", nodes=6, byzantine=1, rounds=2, batch_size=20), canaries=40, points=1
    )
    assert (result.stated, result.holds) == ([None], None)
