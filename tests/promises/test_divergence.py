"""A run whose training failed says so: in the round, in its summary, in a report and in its repr."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import rpel
from support.commands import rpel as command


def train(lr: float, **fields: Any) -> Any:
    """Five nodes fit y = 2x; with a large rate the loss grows without end, and stays finite for a while."""
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    return rpel.simulate(
        nn.Linear(1, 1), (x, 2 * x), (x, 2 * x), nn.MSELoss(), partition="iid", nodes=5, byzantine=0,
        pull=4, b_hat=0, rounds=10,
        eval_every=2, batch_size=8, lr=lr, momentum=0.0, out=None, **fields,
    )  # fmt: skip


def test_divergence_is_warned_of_once_in_its_round(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rpel"):
        run = train(lr=30.0)
    assert np.isfinite(run.models).all()  # the loss shows it, long before anything overflows
    first = next(row for row in run.rows if row["diverged"])
    assert first["diverged"] == 5
    warnings = [record.getMessage() for record in caplog.records if "diverged" in record.getMessage()]
    assert len(warnings) == 1
    assert f"round {first['round']}: 5 of 5" in warnings[0]
    assert "5 of 5 honest nodes have diverged" in repr(run)
    assert not run.well


def test_divergence_is_in_the_summary_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ["--model", "linear", "-s", "lr=100000", "--rounds", "20", "--out", str(tmp_path)]
    out, err = command("run", "quickstart", *fields, capsys=capsys)
    assert "16 of 16 honest nodes" in out
    assert "16 of 16 honest nodes have diverged" in err
    told, _ = command("run", "quickstart", *fields, "--json", capsys=capsys)
    assert json.loads(told)["diverged"] == 16
    command("report", str(tmp_path), "-o", str(tmp_path / "page.html"), capsys=capsys)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "nodes have diverged in 1" in page
    assert "16 of 16 honest nodes have diverged" in page


def test_training_that_converges_diverges_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    run = train(lr=0.1, seeds=[0, 1])
    assert "diverged" not in repr(run) + caplog.text
    assert run.summary()["diverged"] == 0
