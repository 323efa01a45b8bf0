"""Differential privacy: what the accountant says, the noise that a target needs, private local steps, runs."""

import json
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld

from rpel import privacy
from support.commands import loads_none_of, rpel

SETTINGS = [
    (noise, batch, examples, steps, delta)
    for noise, steps in ((1.3, 45), (2.5, 9), (3.0, 200), (4.0, 90), (8.0, 900))
    for batch, examples, delta in ((31, 310, 1e-4), (25, 1400, 1e-5), (8, 800, 1e-6), (20, 40, 1e-3))
]


def direct(noise: float, rate: float, steps: int, delta: float) -> float:
    """ε by a direct call of dp-accounting."""
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


# --- the accountant --------------------------------------------------------------------------------------------------


def test_epsilon_is_the_published_value_of_the_reference() -> None:
    assert round(privacy.epsilon(1.3, privacy.rate(31, 310), steps=45, delta=1e-4), 3) == 2.518


@pytest.mark.parametrize(("noise", "batch", "examples", "steps", "delta"), SETTINGS)
def test_epsilon_equals_a_direct_call_of_the_library(
    noise: float, batch: int, examples: int, steps: int, delta: float
) -> None:
    rate = privacy.rate(batch, examples)
    expected = direct(noise, rate, steps, delta)
    assert privacy.epsilon(noise, rate, steps, delta) == expected
    quickly = privacy.epsilon_quickly(noise, rate, steps, delta)
    assert expected - 1e-9 <= quickly <= 1.01 * expected + 0.01


def test_no_steps_cost_nothing_and_no_noise_protects_nothing() -> None:
    assert privacy.epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert privacy.epsilon(0.0, 0.1, 1, 1e-5) == math.inf


@pytest.mark.parametrize(("target", "rate", "steps"), [(3.0, 25 / 1400, 200), (1.0, 0.1, 60)])
def test_planned_noise_keeps_the_target_and_a_little_less_does_not(target: float, rate: float, steps: int) -> None:
    noise = privacy.noise_for(target, rate, steps, 1e-5)
    assert direct(noise, rate, steps, 1e-5) <= target < direct(noise * 0.997, rate, steps, 1e-5)


def test_steps_within_a_target_are_as_many_as_it_allows() -> None:
    allowed = privacy.steps_within(0.5, 4.0, 0.1, 45, 1e-4)
    assert 1 < allowed < 45
    assert direct(4.0, 0.1, allowed, 1e-4) <= 0.5 < direct(4.0, 0.1, allowed + 1, 1e-4)
    assert privacy.steps_within(3.0, 4.0, 0.1, 45, 1e-4) == 45
    assert privacy.steps_within(0.001, 4.0, 0.1, 45, 1e-4) == 0


def test_each_node_has_its_own_epsilon_and_the_run_the_largest_and_the_median() -> None:
    rates = [0.2, 0.05, 0.1, 0.1]
    each = privacy.epsilons(4.0, rates, 30, 1e-4)
    assert each.tolist() == [direct(4.0, rate, 30, 1e-4) for rate in rates]
    assert privacy.largest_and_median(4.0, rates, 30, 1e-4) == (each.max(), float(np.median(each)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: privacy.noise_for(0, 0.1, 10, 1e-5), "epsilon must be a positive number, not 0"),
        (lambda: privacy.noise_for(-1, 0.1, 10, 1e-5), "epsilon must be a positive number, not -1"),
        (lambda: privacy.epsilon(1, 0.1, 10, 1.0), "delta must be above 0 and below 1, not 1"),
        (lambda: privacy.epsilon(1, 1.5, 10, 1e-5), "a sampling rate must be above 0 and at most 1, not 1.5"),
        (lambda: privacy.epsilon(-1, 0.5, 10, 1e-5), "noise_multiplier must be 0 or more, not -1"),
        (lambda: privacy.epsilon(0.01, 0.5, 10, 1e-5), "the nearest is 0.1, or 0"),
        (lambda: privacy.rate(50, 31), "batch 50 is larger than the 31 examples of a node: the nearest is 31"),
    ],
)
def test_bad_privacy_numbers_are_refused_in_one_sentence(call: "object", words: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_delta_that_lets_a_whole_example_go_is_warned_of() -> None:
    assert privacy.weak_delta(1e-5, 1400) is None
    assert "1/1400" in (privacy.weak_delta(1e-3, 1400) or "")


def test_missing_accountant_is_one_sentence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rpel\[privacy\]'"):
        privacy.epsilon(1.234, 0.1, 7, 1e-5)


def test_importing_privacy_imports_neither_the_accountant_nor_torch() -> None:
    code = "import sys, rpel.privacy; print('torch' in sys.modules, 'dp_accounting' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "False False\n"


# --- rpel plan -------------------------------------------------------------------------------------------------------

PLAN = ("plan", "--nodes", "20", "--byzantine", "2", "--rounds", "30")


def test_plan_names_the_noise_that_keeps_an_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--privacy-epsilon",
        "1",
        "--privacy-delta",
        "1e-4",
        "--examples",
        "400",
        "--batch",
        "20",
        "--local-steps",
        "2",
    ]
    found = json.loads(rpel(*PLAN, *asked, "--json", capsys=capsys)[0])
    noise = found["noise_multiplier"]
    assert direct(noise, 0.05, 60, 1e-4) <= 1 < direct(0.997 * noise, 0.05, 60, 1e-4)
    out, err = rpel(*PLAN, *asked, capsys=capsys)
    assert f"noise multiplier {noise:g} " in out
    assert not err


def test_plan_without_privacy_has_no_noise_and_imports_no_accountant(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(rpel(*PLAN, "--json", capsys=capsys)[0])["noise_multiplier"] is None
    loads_none_of({"dp_accounting", "rpel.privacy", "torch"}, *PLAN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--privacy-epsilon 0 --privacy-delta 1e-4 --examples 400 --batch 20", "a positive number, not 0"),
        ("--privacy-epsilon 1 --privacy-delta 2 --examples 400 --batch 20", "below 1, not 2"),
        ("--privacy-epsilon 1 --privacy-delta 1e-4 --examples 10 --batch 20", "the nearest is 10"),
        ("--privacy-epsilon 1 --privacy-delta 1e-4 --examples 10", "--batch is missing"),
    ],
)
def test_plan_refuses_bad_privacy_in_one_sentence(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = rpel(*PLAN, *options.split(), capsys=capsys, code=2)
    assert words in err
    assert not out
    assert err.count("\n") == 1


def test_plan_warns_of_a_delta_above_one_over_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--privacy-epsilon", "1", "--privacy-delta", "0.01", "--examples", "400", "--batch", "20"]
    assert "target_delta 0.01 is not below 1/400" in rpel(*PLAN, *asked, capsys=capsys)[1]
