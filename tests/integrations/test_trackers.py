"""Runs of rpel in MLflow's file store and in Weights & Biases' offline files. Run by `make test-all`."""

import time
from pathlib import Path
from typing import Any

import pytest

import rpel
from support.waiting import PATIENCE

pytestmark = pytest.mark.full
SMALL: dict[str, Any] = {"nodes": 8, "byzantine": 1, "pull": 4, "rounds": 3, "eval_every": 2, "eval_size": 50}


def test_mlflow_has_every_number_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from rpel.integrations.trackers import MLflow

    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run = rpel.simulate("linear", callbacks=[MLflow(experiment="ward")], out=None, **SMALL)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("ward").experiment_id])
    assert found.data.params["nodes"] == "8"
    told = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "consensus")}
    assert told == {row["round"]: row["consensus"] for row in run.rows}
    assert found.data.metrics["accuracy_mean"] == run.accuracy_mean


def test_wandb_writes_offline_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from rpel.integrations.trackers import WandB

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandB(project="ward")
    run = rpel.simulate("linear", callbacks=[tracker], out=None, **SMALL)
    assert tracker.run.config["nodes"] == 8
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + PATIENCE  # a process of its own writes it
    while (written := file.read_bytes()).count(b"consensus") < len(run.history):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert str(run.accuracy_mean).encode() in written
