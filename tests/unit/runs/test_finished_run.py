"""A finished run as Python reads it: its tables, its curve, and several seeds of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel
from rpel import Run, Runs
from rpel.runs.certificate import certificate
from rpel.runs.columns import COLUMNS
from rpel.runs.run import spread
from rpel.spec import Request
from support.runs import tiny

PLAN = {"nodes": 20, "byzantine": 4, "pull": 4, "b_hat": 1, "rounds": 4, "probability": 0.99}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"))


def made(seed: int = 0, worst: float = 0.5, nodes: Any = None, **more: Any) -> Run:
    """A run of four rounds, evaluated in the second and the last."""
    rows = []
    for t in (1, 2, 3, 4):
        mean = 0.1 * t + 0.01 * seed
        seen = {"accuracy_mean": mean, "accuracy_worst": worst * mean, "loss": 1 / t}
        row = seen if t % 2 == 0 else dict.fromkeys(seen)
        rows.append(
            {"round": t, **row, "consensus": 1.0, "messages": 4, "bytes": 400, "seconds": 0.5, **more}
        )
    proof = certificate(
        PLAN, np.array([[1, 0]]), 1, lambda t: np.array([0, 1]), seed=seed, versions={},
        threads=1, data={},
    )  # fmt: skip
    return Run(Request(rounds=4, seed=seed), rows=rows, certificate=proof, nodes=nodes or {})


def test_history_has_a_row_a_round_with_nan_where_nothing_was_evaluated(finished: Run) -> None:
    assert tuple(finished.history.columns) == COLUMNS
    assert finished.history["round"].tolist() == [1, 2, 3, 4, 5, 6]
    assert math.isnan(finished.history["loss"][0])
    assert finished.history["loss"].count() == 3
    assert finished.history["epsilon"].isna().all()
    assert rpel.load(finished.path).history.equals(finished.history)


def test_curve_follows_the_node_that_ends_lowest_from_round_0() -> None:
    accuracy = np.array([[0.05, 0.15], [0.1, 0.35], [0.6, 0.2]])
    curve = made(nodes={"round": np.array([0, 2, 4]), "accuracy": accuracy}).curve
    assert curve["round"].tolist() == [0, 2, 4]
    assert curve["accuracy_mean"].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert curve["accuracy_lowest"].tolist() == [0.15, 0.35, 0.2]
    assert curve["accuracy_worst"].tolist() == pytest.approx([0.05, 0.1, 0.2])
    assert curve["bytes"].tolist() == [0, 800, 1600]


@pytest.mark.parametrize("values", [None, [[0.1, math.nan], [0.2, 0.3]]])
def test_curve_without_numbers_of_the_nodes_shows_the_worst_of_each_round(values: Any) -> None:
    nodes = None if values is None else {"round": np.array([2, 4]), "accuracy": np.array(values)}
    curve = made(nodes=nodes or {"round": np.array([2, 4]), "accuracy": np.full((2, 2), np.nan)}).curve
    assert curve["accuracy_lowest"].tolist() == curve["accuracy_worst"].tolist()


def test_overflowed_number_is_infinite_at_the_end_and_has_no_mean() -> None:
    run = made(diverged=2)
    run.rows[-1]["loss"] = None
    assert run.end("loss") == math.inf
    assert math.isnan(Runs([run, made()]).interval("loss")[0])
    assert "2 of 16 honest nodes have diverged" in repr(run)


def test_seeds_have_means_and_ranges_and_one_certificate() -> None:
    runs = Runs([made(seed) for seed in range(3)])
    assert runs.interval("accuracy_mean") == pytest.approx((0.41, 0.4, 0.42))
    assert runs.history["accuracy_mean"].iloc[-1] == pytest.approx(0.41)
    assert runs.frame["seed"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert runs.total("bytes") == 4800
    assert runs.certificate.held
    assert runs.summary()["intervals"]["accuracy_worst"]["low"] == pytest.approx(0.2)
    assert spread([0.5]) == (0.5, 0.5, 0.5)


def test_run_that_was_not_kept_says_how_to_keep_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out='runs'"):
        _ = made().models
    with pytest.raises(ValueError, match=r"there is no run folder"):
        Run.load(tmp_path / "nowhere")
