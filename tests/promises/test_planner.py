"""What `rpel.plan` and the exact law answer, and what they refuse."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import rpel
from rpel import plan
from rpel.planning import max_byzantine_cdf
from rpel.planning.paper import lemma_effective_byzantine, lemma_noptlog

# docs/reference/definitions.md, section 2.
TABLE = [
    (100, 10, 15, 200, {6: ".479579", 7: ".973938", 8: ".999511"}),
    (100_000, 10_000, 30, 200, {13: ".004264", 14: ".529395", 15: ".936818", 16: ".994125", 17: ".999533"}),
    (1000, 100, 30, 200, {11: ".165873", 12: ".784125", 13: ".971807", 14: ".997080", 15: ".999740"}),
    (10_000, 1000, 30, 200, {12: ".019445", 13: ".596713", 14: ".942225", 15: ".993984", 16: ".999462"}),
]


@pytest.mark.parametrize(("n", "b", "s", "T", "expected"), TABLE)
def test_probabilities_equal_the_reference_table_to_all_printed_digits(
    n: int, b: int, s: int, T: int, expected: dict[int, str]
) -> None:
    cdf = max_byzantine_cdf(n, b, s, T)
    assert {k: f"{cdf[k]:.6f}".lstrip("0") for k in expected} == expected


@pytest.mark.parametrize(("n", "b", "s", "T"), [(30, 6, 15, 200), (20, 3, 6, 2000), (30, 3, 6, 500)])
def test_small_settings_of_the_paper_meet_all_attackers_for_certain(n: int, b: int, s: int, T: int) -> None:
    p = plan(nodes=n, byzantine=b, rounds=T, pull=s)
    assert (p.b_hat, p.probability, p.feasible) == (b, 1.0, True)


def test_billion_nodes_are_planned_exactly() -> None:
    p = plan(nodes=10**9, byzantine=10**8, rounds=200)
    assert (p.pull, p.b_hat, f"{p.probability:.6f}") == (52, 26, "0.993179")


def test_max_fraction_is_respected_or_refused() -> None:
    sizes: dict[str, Any] = {"nodes": 100, "byzantine": 10, "rounds": 200}
    planned = [plan(**sizes, max_fraction=share) for share in (0.25, 1 / 3, 0.45)]
    assert [p.pull for p in planned] == [39, 26, 17]
    assert all(p.fraction <= share for p, share in zip(planned, (0.25, 1 / 3, 0.45), strict=True))
    with pytest.raises(ValueError, match=r"0\.05 .*100 .*10: .*0\.1 .*byzantine 5"):
        plan(**sizes, max_fraction=0.05)


@given(st.data())
def test_search_finds_the_smallest_feasible_pull(data: st.DataObject) -> None:
    n = data.draw(st.integers(3, 120))
    b = data.draw(st.integers(0, (n - 1) // 2))
    fraction = data.draw(st.sampled_from([Fraction(1, 2), Fraction(1, 3), Fraction(3, 10), Fraction(9, 20)]))
    silent, late = data.draw(st.booleans()), data.draw(st.integers(0, min(2, n - b - 1)))
    T, confidence = (
        data.draw(st.sampled_from([1, 10, 200, 10**6])),
        data.draw(st.sampled_from([0.5, 0.9, 0.99, 0.999999])),
    )

    def feasible(s: int) -> bool:
        cdf = max_byzantine_cdf(n, b, s, T)
        b_hat = int(np.argmax(cdf >= confidence))
        return b_hat <= fraction * (s + 1) and 2 * b_hat < s + 1 and (3 if silent else 2) * b_hat + late <= s

    smallest = next((s for s in range(1, n) if feasible(s)), None)
    question = {"confidence": confidence, "max_fraction": float(fraction), "silent": silent, "no_shows": late}
    if smallest is None:
        with pytest.raises(ValueError, match=r"max_fraction|b_hat"):
            plan(nodes=n, byzantine=b, rounds=T, **question)  # type: ignore[arg-type]
    else:
        p = plan(nodes=n, byzantine=b, rounds=T, **question)  # type: ignore[arg-type]
        assert p.pull == smallest
        assert p.feasible


def test_search_looks_back_over_the_rounding_of_the_pull() -> None:
    """P(max ≤ k) at the smallest pull for k does not rise with every k:
    bisection alone stops at pull 14,868."""
    p = plan(nodes=47_468, byzantine=20_420, rounds=200, max_fraction=0.45)
    assert (p.pull, p.b_hat) == (14_859, 6_687)


@pytest.mark.parametrize(
    ("n", "b", "T", "s"),
    [(20, 3, 2000, 9), (30, 6, 200, 18), (100, 10, 200, 27), (1000, 100, 500, 63), (10**5, 10**4, 200, 90)],
)
def test_silence_cannot_stall_a_silent_plan(n: int, b: int, T: int, s: int) -> None:
    p = plan(nodes=n, byzantine=b, rounds=T, silent=True)
    assert p.pull == s
    assert p.pull - p.b_hat >= 2 * p.b_hat


def test_no_shows_are_planned_for_on_top_of_silence() -> None:
    p = plan(nodes=12, byzantine=2, rounds=200, silent=True, no_shows=2)
    assert (p.pull, p.b_hat) == (8, 2)


@pytest.mark.parametrize(("silent", "no_shows"), [(False, 0), (False, 1), (True, 0), (True, 2)])
def test_given_pull_is_feasible_from_the_last_answer_needed_on(silent: bool, no_shows: int) -> None:
    """2b̂ answers must come when F honest peers are late and, under silence, b̂ hostile ones say nothing."""
    answers = 3 if silent else 2
    judged = {}
    for pull in range(4, 17):
        p = plan(nodes=20, byzantine=3, rounds=200, pull=pull, silent=silent, no_shows=no_shows)
        assert p.b_hat == 3
        judged[pull] = p.feasible
    assert judged == {pull: pull >= answers * 3 + no_shows for pull in judged}


@pytest.mark.parametrize(
    ("n", "p", "s", "b_hat"),
    [(100, 0.9, 24, 12), (100, 0.99, 30, 15), (10**5, 0.9, 38, 19), (10**5, 0.99, 42, 21)],
)
def test_lemma_gives_the_reference_plans(n: int, p: float, s: int, b_hat: int) -> None:
    granted = (
        (pull, k)
        for pull in range(1, n)
        for k in range(pull // 2 + 1)
        if lemma_effective_byzantine(n, n // 10, pull, k, 200) >= p
    )
    assert next(granted) == (s, b_hat)
    bound = lemma_effective_byzantine(n, n // 10, s, b_hat, 200)
    assert p <= bound <= max_byzantine_cdf(n, n // 10, s, 200)[min(b_hat, n // 10)]


@pytest.mark.parametrize(
    ("n", "b", "T", "s"),
    [(100, 10, 200, 407), (30, 6, 200, 185), (20, 3, 2000, 285), (100_000, 10_000, 200, 614)],
)
def test_lemma_noptlog_gives_the_reference_pulls(n: int, b: int, T: int, s: int) -> None:
    assert lemma_noptlog(n, b, T, 0.9) == s


def test_lemma_noptlog_says_nothing_without_hostile_nodes() -> None:
    assert math.isinf(lemma_noptlog(100, 0, 200, 0.9))


def test_paper_setting_is_judged_and_not_refused() -> None:
    p = plan(nodes=100, byzantine=10, rounds=200, pull=15)
    assert (p.b_hat, p.feasible, p.kappa, p.theorem_applies) == (8, False, None, False)
    assert p.best_below_half is not None
    assert p.best_below_half["b_hat"] == 7
    assert f"{p.best_below_half['probability']:.6f}" == "0.973938"


def test_plan_for_100_000_nodes_needs_pull_34_for_99_percent() -> None:
    p = plan(nodes=100_000, byzantine=10_000, rounds=200)
    assert (p.pull, p.b_hat) == (34, 17)


def test_costs_are_counted_in_models_and_in_bytes() -> None:
    p = plan(nodes=100, byzantine=10, rounds=200, pull=15, parameters=176_050)
    assert (p.messages_per_round, p.messages_all_to_all, p.bytes_per_round) == (
        1500,
        9900,
        1500 * 4 * 176_050,
    )


@pytest.mark.parametrize(("wire", "message"), [("float32", 704_200), ("int8", 178_802)])
def test_code_makes_messages_smaller_and_the_period_shorter(wire: Any, message: int) -> None:
    p = plan(nodes=100, byzantine=10, rounds=200, pull=15, parameters=176_050, wire=wire, upstream="20Mbit")
    assert (p.bytes_per_message, p.bytes_per_round) == (message, 1500 * message)
    asked = stats.binom.ppf(0.99, 99, 15 / 99)
    assert p.shortest_period == pytest.approx(asked * message * 8 / 20e6 / 0.6)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"wire": "int4"}, "int8"), ({"upstream": "20MB"}, "20Mbit"), ({"upstream": "-1"}, "-1"),
     ({"upstream": "20Mbit", "parameters": None}, "parameters")],
)  # fmt: skip
def test_line_that_cannot_be_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan(**{"nodes": 10, "byzantine": 1, "rounds": 5, "parameters": 9, **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [("nodes", 100.5), ("nodes", "100"), ("byzantine", 10.5), ("rounds", 2.5), ("pull", 3.5),
     ("no_shows", 0.5), ("confidence", "high")],
)  # fmt: skip
def test_plan_refuses_a_value_that_is_not_a_number_of_its_kind(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} {value!r} is not a (whole )?number: give one such as"):
        plan(**{"nodes": 100, "byzantine": 10, "rounds": 200, field: value})
    numpy: Any = np.array([100, 10])
    assert plan(nodes=numpy[0], byzantine=numpy[1], rounds=200).pull == 16


def test_third_given_as_a_float_is_a_third() -> None:
    assert plan(nodes=100, byzantine=10, rounds=200, max_fraction=1 / 3).fraction == 1 / 3


def test_plan_is_public_and_frozen() -> None:
    p = rpel.plan(nodes=30, byzantine=6, rounds=200)
    assert isinstance(p, rpel.Plan)
    with pytest.raises(AttributeError):
        p.pull = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"nodes": 100, "byzantine": 50, "rounds": 1}, ["byzantine 50", "nodes 100", "at most 49"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "pull": 10}, ["pull 10", "nearest 9"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "pull": 0}, ["pull 0", "nearest 1"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 0}, ["rounds", "at least 1", "0"]),
        ({"nodes": 10, "byzantine": -1, "rounds": 1}, ["byzantine", "-1"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "confidence": 1.0}, ["confidence 1.0", "0.999999"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "confidence": math.nan}, ["confidence nan"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "max_fraction": 0.7}, ["max_fraction 0.7", "0.5"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "max_fraction": math.inf}, ["max_fraction"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "no_shows": 9}, ["no_shows 9", "8"]),
        ({"nodes": 10, "byzantine": 1, "rounds": 1, "parameters": 0}, ["parameters"]),
        (
            {"nodes": 100, "byzantine": 30, "rounds": 300, "max_fraction": 0.25},
            ["0.25", "pull 99", "byzantine 25"],
        ),
        (
            {"nodes": 3, "byzantine": 1, "rounds": 9, "silent": True},
            ["leaves 2 b_hat answers", "1 of 2 answers"],
        ),
    ],
)
def test_bad_plan_input_names_the_nearest_choice(question: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        plan(**question)  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(word in sentence for word in words), sentence
