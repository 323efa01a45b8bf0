"""Networks, data, rules and attacks of users are named with parameters, and their errors are shown."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rpel.cli import main
from support.commands import rpel

SOURCE = '''
import numpy as np
from torch import nn


def points(features=5, count=240, labels="int64"):
    """(train, test), as rpel.simulate takes them."""
    rng = np.random.default_rng(0)
    y = np.arange(count) % 3
    x = (rng.normal(size=(count, features)) + 2 * np.eye(3, features)[y]).astype(np.float32)
    return (x, y.astype(labels)), (x[:60], y[:60].astype(labels))


class Net(nn.Sequential):
    def __init__(self, features=5, width=4):
        super().__init__(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 3))


def scaled(x, factor=1.0):
    """A rule: a multiple of the mean."""
    return factor * x.mean(axis=0)


def constant(view, value=1.0):
    """An attack: one number everywhere."""
    return np.full_like(view.moments(), value)


def typo_rule(x):
    return x.maen(axis=0)


def typo_attack(view):
    return view.honest_mean


def typo_points():
    return undefined_points


class TypoNet(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return self.lyaers(x)
'''
BASE = {
    "preset": "quickstart", "dataset": "mnist-sample-8x8", "model": "linear", "partition": "iid",
    "rule": "mean", "attack": "none", "nodes": 6, "byzantine": 1, "pull": 4, "rounds": 2,
    "batch_size": 8, "lr": 1.0, "eval_every": 2, "eval_size": 20,
}  # fmt: skip
FEATURES, WIDTH = 7, 6
DATA, NET = f"mine:points(features={FEATURES})", f"mine:Net(features={FEATURES}, width={WIDTH})"
PARAMETERS = FEATURES * WIDTH + WIDTH + WIDTH * 3 + 3
ZERO, HUGE = "mine:scaled(factor=0.0)", "mine:constant(value=1e6)"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a module `mine` and a setting `base.toml` of built-in parts."""
    (tmp_path / "mine.py").write_text(SOURCE, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return write("base.toml", {}).parent


def write(name: str, changes: dict[str, Any], more: str = "") -> Path:
    """Write a setting with some fields changed, and lines of TOML after them."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in (BASE | changes).items()]
    path = Path(name).absolute()
    path.write_text("\n".join(lines) + "\n" + more, "utf-8")
    return path


def models(folder: str) -> list[Any]:
    """Return the models of each run below a folder."""
    return [load_file(file)["models"] for file in sorted(Path(folder).rglob("models.safetensors"))]


@pytest.mark.usefixtures("project")
def test_run_takes_a_users_network_and_data_with_parameters_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rpel("run", "base.toml", "--dataset", DATA, "--model", NET, "--out", "runs", capsys=capsys)
    (honest,) = models("runs")
    assert honest.shape == (5, PARAMETERS)


def test_run_is_repeated_when_the_file_of_its_network_changed(
    project: Path,
) -> None:
    command = [sys.executable, "-m", "rpel", "run", "base.toml", "--out", "runs", "--dataset", DATA]
    for change, folders in (("", 1), ("", 1), ("# edited\n", 2)):
        (project / "mine.py").write_text((project / "mine.py").read_text("utf-8") + change, "utf-8")
        subprocess.run([*command, "--model", NET], check=True, capture_output=True)
        assert len(list(Path("runs").iterdir())) == folders


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("labels", ["int64", "uint8"])
def test_run_takes_data_as_simulate_takes_them_by_name(
    labels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"mine:points(labels={labels})"
    rpel("run", "base.toml", "--dataset", data, "--out", "runs", capsys=capsys)
    (honest,) = models("runs")
    assert honest.shape == (5, 5 * 3 + 3)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("option", "name"), [("--rule", ZERO), ("--attack", HUGE)])
def test_run_takes_a_users_rule_and_attack_with_parameters_by_name(
    option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rpel("run", "base.toml", option, name, "--out", "runs", capsys=capsys)
    (honest,) = models("runs")
    assert (np.abs(honest).max() == 0) if option == "--rule" else (np.abs(honest).max() > 1e5)


@pytest.mark.usefixtures("project")
@pytest.mark.integration
def test_sweep_takes_parts_of_users_with_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    grid = f'[grid]\nrule = ["{ZERO}", "mine:scaled(factor=1.0)"]\n'
    file = write("grid.toml", {"dataset": DATA, "model": NET, "attack": HUGE}, grid)
    rpel("sweep", str(file), "--jobs", "1", "--out", "sweep", capsys=capsys)
    found = models("sweep")
    assert [honest.shape for honest in found] == [(5, PARAMETERS)] * 2
    low, high = sorted(np.abs(honest).max() for honest in found)
    assert low == 0
    assert high > 1e5


@pytest.mark.usefixtures("project")
@pytest.mark.integration
def test_arena_takes_parts_of_users_with_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    file = write("setting.toml", {"dataset": DATA, "model": NET})
    who = ("--rules", f"mean,{ZERO}", "--attacks", f"none,{HUGE}")
    command = ("arena", "--preset", str(file), *who, "--jobs", "1", "--out", "arena", "--json")
    cells = json.loads(rpel(*command, capsys=capsys)[0])["cells"]
    assert {cell["rule"].partition("(")[0] for cell in cells} == {"mean", "mine:scaled"}
    assert {cell["attack"].partition("(")[0] for cell in cells} == {"none", "mine:constant"}
    assert all(cell["accuracy_mean"] is not None for cell in cells)
    assert [honest.shape for honest in models("arena")] == [(5, PARAMETERS)] * 4


# --- errors in what users write -----------------------------------------------------------------------------


def complaint(said: str) -> str:
    """Return what a command said, after looking that it shows a user's frames and no others."""
    assert "mine.py" in said
    for foreign in ("typer", "site-packages", "simulation"):
        assert foreign not in said
    return said


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("option", "name", "word"),
    [
        ("--attack", "mine:typo_attack", "honest_mean"),
        ("--rule", "mine:typo_rule", "maen"),
        ("--dataset", "mine:typo_points", "undefined_points"),
        ("--model", "mine:TypoNet", "lyaers"),
    ],
)
@pytest.mark.xfail(strict=True, reason="errors of users end in a traceback through typer [issue 51]")
def test_error_in_a_users_code_is_shown_with_the_users_frames_alone(
    option: str, name: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "base.toml", option, name, "--out", "runs"])
    assert left.value.code in (1, 2)
    output = capsys.readouterr()
    assert output.out == ""
    assert word in complaint(output.err)


@pytest.mark.usefixtures("project")
@pytest.mark.integration
def test_arena_runs_all_but_the_broken_attack_of_a_user(capsys: pytest.CaptureFixture[str]) -> None:
    who = ("--rules", "mean,median", "--attacks", "none,mine:typo_attack")
    with pytest.raises(SystemExit) as left:
        main(["arena", "--preset", "base.toml", *who, "--jobs", "1", "--out", "arena", "--json"])
    assert left.value.code in (0, 1)
    output = capsys.readouterr()
    cells = json.loads(output.out)["cells"]
    done = {(cell["rule"], cell["attack"]) for cell in cells if cell["accuracy_mean"] is not None}
    assert done == {("mean", "none"), ("median", "none")}
    assert "honest_mean" in complaint(output.out + output.err)
