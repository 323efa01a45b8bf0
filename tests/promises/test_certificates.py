"""What a run's folder, its certificate and its name promise, and that several processes keep it."""

import fcntl
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import rpel
from support.plain import FEATURES, examples
from support.runs import CrashError, crash_after, differences, tiny

GUARANTEES = {
    "rpel": "plan", "all-to-all": "plan", "nna": "plan", "el-oracle": "plan", "el-local": "void",
    "cs-plus": "none", "gts": "none", "clipped-gossip": "none", "clipped-gossip-oracle": "none",
    "rtc": "none", "ios": "none", "balance": "none", "d-psgd": "none",
}  # fmt: skip
"""The law of pulling holds where nobody chooses who hears him; who pushes does, and a graph is drawn once."""


@pytest.mark.parametrize("method", GUARANTEES)
def test_certificate_says_what_the_plan_is_worth_under_each_method(method: str) -> None:
    everybody = method in ("all-to-all", "nna")
    result = tiny(None, method=method, pull=None if everybody else 4, rounds=1)
    assert result.certificate["guarantee"] == GUARANTEES[method]


def test_attackers_who_choose_their_places_are_all_counted_on() -> None:
    """At this confidence two of the three would be planned for; but all may sit beside one victim."""
    few: dict[str, Any] = {
        "nodes": 12,
        "byzantine": 3,
        "pull": 6,
        "rounds": 1,
        "confidence": 0.3,
        "method": "cs-plus",
    }
    planned = {
        placed: tiny(None, **{**few, "method": f"cs-plus(placement={placed})"}).certificate
        for placed in ("random", "adversarial")
    }
    assert {placed: actual["plan"]["b_hat"] for placed, actual in planned.items()} == {
        "random": 2,
        "adversarial": 3,
    }


def test_plan_with_a_chosen_b_hat_has_that_b_hats_constants() -> None:
    """Twelve nodes, three hostile, six pulled, one round; nine in ten would need b_hat = 3.
    By hand for b_hat = 2."""
    plan = tiny(None, nodes=12, byzantine=3, pull=6, rounds=1, confidence=0.9, b_hat=2).certificate["plan"]
    kappa = 8 * 2 / (7 - 2) * (6 * (2 / 3) * (1 + 2 / 3) + 1)  # nnm, then trimmed mean with f/(m − 2f) = 2/3
    v = (9 - 5) / (8 * 5)
    expected = {
        "b_hat": 2, "fraction": 2 / 7, "kappa": kappa, "alpha": 6 * kappa + 6 * v, "lambda": kappa + v / 9,
        "probability": (1 - math.comb(8, 3) / math.comb(11, 6)) ** 9,
    }  # fmt: skip
    assert {key: plan[key] for key in expected} == pytest.approx(expected)
    assert plan["theorem_applies"] is False


def test_several_seeds_hold_only_if_every_seed_does() -> None:
    result = tiny(None, nodes=12, byzantine=3, pull=6, b_hat=2, rounds=2, seeds="0,1", confidence=0.01)
    assert isinstance(result, rpel.Runs)
    assert [run.certificate["held"] for run in result.runs] == [False, True]
    assert result.certificate["held"] is False
    assert (result.certificate["violations_total"], result.certificate["max_observed"]) == (2, 3)


def test_changed_float_test_data_makes_another_run(tmp_path: Path) -> None:
    x, _ = examples(12)
    y = x.sum(axis=1, keepdims=True)
    model, data = nn.Linear(FEATURES, 1), []
    for number, shift in enumerate((0.0, 0.0, 1.0)):
        result = rpel.simulate(
            model, (x, y), (x, y + np.float32(shift)), nn.functional.mse_loss, nodes=4, byzantine=1,
            pull=3, b_hat=1, rounds=1, partition="iid", batch_size=1, eval_size=6, lr=0.01,
            out=tmp_path / str(number),
        )  # fmt: skip
        data.append(result.certificate["data"])
    first, again, other = (path.name for path in sorted(tmp_path.glob("*/*")))
    assert first == again != other
    assert data[0] == data[1] != data[2]


def test_run_that_another_process_finished_meanwhile_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one finishes after this one has found the folder unfinished and before it holds the lock."""
    lock, others, played = fcntl.flock, list[bytes](), list[int]()

    def late(file: Any, operation: int) -> None:
        if not others:
            others.append(b"")
            path = tiny(tmp_path).path
            assert path is not None
            others[0] = (path / "metrics.jsonl").read_bytes()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    result = tiny(tmp_path, progress=lambda tick: played.append(tick.round))
    assert result.path is not None
    assert (result.path / "metrics.jsonl").read_bytes() == others[0], "with the other one's times"
    assert result.reused
    assert not played


@pytest.mark.integration
def test_shared_run_with_uniform_output_goes_on_alone_with_the_same_bytes(tmp_path: Path) -> None:
    """Two workers hold five units of work; what a node will output may have been drawn before the
    interruption."""
    fields: dict[str, Any] = {
        "dataset": "mnist-sample-8x8", "nodes": 24, "byzantine": 2, "pull": 12, "b_hat": 2, "batch_size": 800,
        "partition": "virtual", "output": "uniform", "rounds": 4, "checkpoint_every": 1, "threads": 1,
    }  # fmt: skip
    whole = tiny(tmp_path / "whole", **fields).path
    with pytest.raises(CrashError):
        tiny(tmp_path / "shared", workers=2, progress=crash_after(3), **fields)
    (path,) = (tmp_path / "shared").iterdir()
    rpel.resume(path)
    assert whole is not None
    assert differences(whole, path) == []
