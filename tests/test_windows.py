"""The exact law of hostile answers in windows of several rounds,
against published values and against draws."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpel.config.spec import Spec
from rpel.planning import max_byzantine_cdf, memory_caution, plan, window_probability, window_quantile
from rpel.planning.windows import window_holds
from rpel.rules import rule
from rpel.simulation.methods import remarks, resolve
from rpel.types import ROBUST_RULE
from support.commands import rpel


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((100, 10, 8, 200, 2), {7: 0.949845, 8: 0.998895, 9: 0.999991}),
        ((1000, 100, 13, 500, 3), {15: 0.926378, 16: 0.990199, 17: 0.998871}),
    ],
)
def test_window_probability_has_the_published_values(
    sizes: tuple[int, int, int, int, int], expected: dict[int, float]
) -> None:
    assert {k: round(window_probability(*sizes, k), 6) for k in expected} == expected


@given(st.integers(4, 60), st.data())
def test_window_of_one_round_is_the_law_of_algorithm_1(nodes: int, data: st.DataObject) -> None:
    byzantine = data.draw(st.integers(0, (nodes - 1) // 2))
    pull, rounds = data.draw(st.integers(1, nodes - 1)), data.draw(st.integers(1, 300))
    cdf = max_byzantine_cdf(nodes, byzantine, pull, rounds)
    actual = [window_probability(nodes, byzantine, pull, rounds, 1, k) for k in range(len(cdf))]
    np.testing.assert_allclose(actual, cdf, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize(("memory", "pull"), [(2, 5), (3, 4)])
def test_law_of_windows_is_that_of_disjoint_draws(memory: int, pull: int) -> None:
    """3,000 histories of one node; a share 5 σ off would be one false alarm in a million."""
    nodes, byzantine, rounds, histories = 30, 6, 12, 3_000
    source, worst = np.random.default_rng(0), np.zeros(histories, int)
    marked = np.arange(nodes - 1) < byzantine
    for run in range(histories):
        window: list[np.ndarray] = list(np.split(source.permutation(nodes - 1)[: memory * pull], memory))
        most = sum(int(marked[one].sum()) for one in window)
        for _ in range(rounds - 1):
            free = np.setdiff1d(np.arange(nodes - 1), np.concatenate(window[1:]))
            window = [*window[1:], source.choice(free, pull, replace=False)]
            most = max(most, sum(int(marked[one].sum()) for one in window))
        worst[run] = most
    for k in range(2, byzantine):
        p = window_probability(nodes, byzantine, pull, rounds, memory, k) ** (1 / (nodes - byzantine))
        assert abs((worst <= k).mean() - p) < 5 * np.sqrt(p * (1 - p) / histories) + 1e-9


def test_long_windows_are_bounded_from_below_or_refused() -> None:
    exact, bound = (window_probability(1000, 100, 9, 500, c, 15) for c in (3, 4))
    assert bound < exact
    assert window_quantile(100, 10, 8, 200, 2, 0.99) == 8
    with pytest.raises(ValueError, match=r"120 .*99.* 33$"):
        window_probability(100, 10, 40, 200, 3, 8)


# --- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "byzantine", "memory"), [(100, 10, 2), (60, 9, 3), (40, 4, 4)])
def test_plan_with_memory_has_the_smallest_pull_whose_window_is_feasible(
    nodes: int, byzantine: int, memory: int
) -> None:
    planned = plan(nodes=nodes, byzantine=byzantine, rounds=50, memory=memory)
    tried = [
        s
        for s in range(1, (nodes - 1) // memory + 1)
        if 2 * window_quantile(nodes, byzantine, s, 50, memory, 0.99) < memory * s + 1
    ]
    assert (planned.pull, planned.window) == (tried[0], memory * tried[0])
    assert (
        planned.probability
        == window_probability(nodes, byzantine, planned.pull, 50, memory, planned.b_hat)
        >= 0.99
    )
    assert (planned.fraction, planned.theorem_applies, planned.alpha) == (
        planned.b_hat / (planned.window + 1),
        False,
        None,
    )
    assert planned.messages_per_round == nodes * planned.pull
    assert {choice.window for choice in planned.alternatives} <= {memory * s for s in range(nodes)}


def test_bounds_decide_about_windows_as_the_chain_does() -> None:
    """What is neither certain by Boole nor hopeless is walked; the others must have come to the same."""
    for memory, pull in ((2, 8), (2, 16), (3, 5), (3, 11)):
        exact = [window_probability(200, 30, pull, 300, memory, k) for k in range(memory * pull)]
        for p in (0.5, 0.9, 0.99, 0.9999):
            holds = [window_holds(200, 30, pull, 300, memory, k, p) for k in range(memory * pull)]
            assert holds == [value >= p for value in exact]


def test_million_nodes_with_memory_are_planned_in_milliseconds() -> None:
    plan(nodes=1000, byzantine=100, rounds=200, memory=2)
    began = time.process_time()
    planned = plan(nodes=10**6, byzantine=10**5, rounds=200, memory=3)
    assert (planned.pull, planned.window, planned.b_hat) == (14, 42, 21)
    assert time.process_time() - began < 0.5, "some 20 ms on an idle machine"


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"memory": 0}, ["memory 0", "at least 1"]),
        ({"memory": 3, "pull": 40}, ["120 different peers", "33"]),
        ({"memory": 2, "method": "simulate"}, ["simulate", "exact"]),
        ({"memory": 2, "method": "bound"}, ["bound", "exact"]),
        ({"memory": 100}, ["memory 100", "99"]),
    ],
)
def test_impossible_plan_with_memory_is_refused(question: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        plan(nodes=100, byzantine=10, rounds=200, **question)
    assert all(word in str(refused.value) for word in words)
    assert "\n" not in str(refused.value)


@given(memory=st.integers(2, 4), pull=st.integers(2, 12), data=st.data())
def test_caution_stands_where_new_answers_cannot_hold_back_a_node_that_runs_away(
    memory: int, pull: int, data: st.DataObject
) -> None:
    """Own and remembered models are far away together, the new answers where everybody else is."""
    window = memory * pull
    b_hat = data.draw(st.integers(1, window // 2))
    models = np.zeros((window + 1, 3))
    models[: window + 1 - pull] = 1000.0
    models += np.random.default_rng(0).normal(size=models.shape)
    stays_away = bool((rule(ROBUST_RULE, f=b_hat)(models) > 990).all())
    assert stays_away == (memory_caution(pull, b_hat, memory) is not None)


def test_run_and_plan_say_where_new_answers_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec(nodes=30, byzantine=6, pull=5, memory=3)
    assert "pull 5 is not above b_hat 6" in " ".join(remarks(spec, resolve(spec)))
    enough = spec.replace(pull=7)
    assert "is not above" not in " ".join(remarks(enough, resolve(enough)))
    sizes = ["--nodes", "30", "--byzantine", "6", "--rounds", "60", "--memory", "3", "--pull", "5"]
    out, _ = rpel("plan", *sizes, capsys=capsys)
    assert "pull 5 is not above b_hat 6" in out
