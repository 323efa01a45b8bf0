"""Private runs: the epsilon that is planned, certified and compared."""

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld

import rpel as package
from support.commands import loads_none_of, rpel


def direct(noise: float, rate: float, steps: int, delta: float) -> float:
    """ε by a direct call of dp-accounting."""
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


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
    content = json.loads(rpel(*PLAN, *asked, "--json", capsys=capsys)[0])
    noise = content["noise_multiplier"]
    assert direct(noise, 0.05, 60, 1e-4) <= 1 < direct(0.997 * noise, 0.05, 60, 1e-4)
    out, err = rpel(*PLAN, *asked, capsys=capsys)
    assert f"noise multiplier {noise:g} " in out
    assert not err


def test_plan_without_privacy_has_no_noise_and_imports_no_accountant(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
def test_plan_refuses_bad_privacy_options(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = rpel(*PLAN, *options.split(), capsys=capsys, code=2)
    assert words in err
    assert not out
    assert err.count("\n") == 1


def test_plan_warns_of_a_delta_above_one_over_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--privacy-epsilon", "1", "--privacy-delta", "0.01", "--examples", "400", "--batch", "20"]
    assert "target_delta 0.01 is not below 1/400" in rpel(*PLAN, *asked, capsys=capsys)[1]


RUN: dict[str, Any] = {
    "model": "linear", "nodes": 6, "byzantine": 1, "rounds": 4, "local_steps": 2, "batch_size": 20,
    "eval_every": 2, "eval_size": 50, "privacy": "dp(clip=1, noise=4, delta=1e-5)",
}  # fmt: skip


def test_private_run_keeps_gradient_norms_of_training_examples_to_itself() -> None:
    fields = {**RUN, "rounds": 2, "privacy": "dp(clip=1)"}
    clipped, private = package.simulate(**fields), package.simulate(**{**RUN, "rounds": 2})
    assert [row["grad_norm"] for row in private.rows] == [None, None]
    assert private.final["loss"] is not None
    assert clipped.final["grad_norm"] > 0


def test_compare_shows_the_epsilon_of_two_private_runs_and_their_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (
        package.simulate(
            **{**RUN, "rounds": 2, "privacy": f"dp(clip=1, noise={noise}, delta=1e-5)"}, out=tmp_path
        )
        for noise in (4, 8)
    )
    content = json.loads(rpel("compare", str(a.path), str(b.path), "--json", capsys=capsys)[0])["final"][
        "epsilon"
    ]
    stated = [run.certificate["privacy"]["epsilon"] for run in (a, b)]
    assert [content["a"], content["b"], content["difference"]] == pytest.approx(
        [*stated, stated[1] - stated[0]], rel=1e-6
    )
    assert "epsilon" in rpel("compare", str(a.path), str(b.path), capsys=capsys)[0]


def test_target_alone_plans_one_noise_that_holds_for_the_worst_node() -> None:
    fields = {**RUN, "privacy": "dp(clip=1, epsilon=0.5, delta=1e-5)"}
    stated = package.simulate(**fields).certificate["privacy"]
    assert 0.99 * 0.5 < stated["epsilon"] <= 0.5
    assert stated["epsilon_median"] < stated["epsilon"]


def test_run_without_noise_states_no_epsilon() -> None:
    for privacy in ("none", "dp(clip=1)"):
        run = package.simulate(**{**RUN, "privacy": privacy})
        assert run.certificate["privacy"] is None
        assert {row["epsilon"] for row in run.rows} == {None}


def test_private_runs_learn_under_attack_and_do_not_depend_on_threads() -> None:
    fields = {
        **RUN,
        "rounds": 15,
        "batch_size": 40,
        "privacy": "dp(clip=1, noise=0.5, delta=1e-5)",
        "partition": "iid",
        "local_steps": 1,
    }
    one, two = (package.simulate(**fields, attack="label_flip", threads=threads) for threads in (1, 2))
    assert (one.models == two.models).all()
    assert one.accuracy_worst > 0.5
