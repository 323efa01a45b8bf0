"""`rpel network rehearse`: the network's plan, rule and first model, on this member's data,
before anything is real."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rpel.peer.ops.rehearse import rehearse
from support.commands import rpel

CLINIC = """
import numpy as np
import torch
import torch.nn.functional as F
from rpel.tasks import Objective, Task

def task(data):
    x = np.loadtxt(data, dtype=np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    return Task(torch.nn.Linear(2, 2), (x[:150], y[:150]), (x[150:], y[150:]))

def numbers(data):
    x = np.loadtxt(data, dtype=np.float32)
    return Task(torch.nn.Linear(2, 1), (x[:150], x[:150, :1]), (x[150:], x[150:, :1]), F.mse_loss)

def other():
    class Mine(Objective):
        d, layout = 6, {"weight": (2, 2), "bias": (2,)}
        local_state = gradient = evaluate = None
    return Mine()
"""


def network(folder: Path, task: str, outputs: int, capsys: pytest.CaptureFixture[str]) -> Path:
    """A network that is planned and has no member yet, and one's own peer.toml."""
    (folder / "rehearsed.py").write_text(CLINIC, "utf-8")
    np.savetxt(folder / "patients.txt", np.random.default_rng(0).normal(size=(200, 2)))
    first = {"weight": np.zeros((outputs, 2), np.float32), "bias": np.zeros(outputs, np.float32)}
    save_file(first, folder / "first.safetensors")
    terms = ["--peers", "8", "--byzantine", "2", "--rounds", "20", "--no-shows", "0", "--out", str(folder)]
    model = ["--model", str(folder / "first.safetensors"), "--hyperparameters", "lr=0.5,batch_size=40"]
    rpel("network", "new", *terms, *model, "--task", task, capsys=capsys)
    (folder / "peer.toml").write_text(f'id = "ada"\ntask = "{task}"\ndata = "patients.txt"\n', "utf-8")
    return folder / "peer.toml"


def test_rehearsal_splits_user_data_and_starts_from_the_network_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rehearsed", raising=False)
    config = network(tmp_path, "rehearsed:task", 2, capsys)
    attack = ("--attack", "foe(zeta=10)")
    out, _ = rpel("network", "rehearse", "--config", str(config), *attack, "--json", capsys=capsys)
    found = json.loads(out)
    assert (found["nodes"], found["byzantine"], found["rounds"], found["rule"]) == (
        8,
        2,
        20,
        "nnm+trimmed_mean",
    )
    assert found["batch_size"] == 25, "150 examples for six honest members"
    assert found["measure"] == "accuracy"
    assert found["worst"] > 0.9 > found["mean_averaging"]
    assert not any(path.name in ("state", "runs") for path in tmp_path.iterdir()), "nothing is written"


def test_rehearsal_of_a_regression_names_its_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rehearsed", raising=False)
    config = network(tmp_path, "rehearsed:numbers", 1, capsys)
    out, _ = rpel("network", "rehearse", "--config", str(config), "--rounds", "2", capsys=capsys)
    first, robust, averaging = out.splitlines()
    assert first.startswith("2 of 8 members hostile (alie), 2 rounds, batches of 25; loss:")
    assert robust.split()[0] == "nnm+trimmed_mean"
    assert averaging.startswith("  plain averaging ")
    config.write_text(config.read_text("utf-8").replace("rehearsed:numbers", "rehearsed:other"), "utf-8")
    with pytest.raises(ValueError, match=r"Mine.*rpel\.tasks\.Task"):
        rehearse(config)
