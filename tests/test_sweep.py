"""Sweeps: what a file means; real processes, one of which fails; interrupted and gone on with."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from rpel.cli.experiments import _live as live_table
from rpel.experiments.sweep import Sweep, cells, checked, read
from rpel.simulation.inputs import data_checksums
from support.commands import rpel
from support.data_files import femnist, leaf_file
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

SMALL = """
preset = "quickstart"
model = "linear"
nodes = 8
pull = 4
eval_every = 100
eval_size = 50
lr = 0.1
"""
COMMAND = (
    "import typer; from rpel.cli.experiments import sweep; app = typer.Typer(); app.command()(sweep); app()"
)


def started(file: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    """``rpel sweep`` as a process of its own."""
    command = [sys.executable, "-c", COMMAND, str(file), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_file_is_a_base_a_grid_and_cells(tmp_path: Path) -> None:
    file = tmp_path / "attacks.toml"
    grid = '[grid]\nattack = ["alie", "foe"]\nbyzantine = [1, 5]\n[[cells]]\nattack = "alie"\nbyzantine = 1\n'
    file.write_text(SMALL + grid + "[[cells]]\nrounds = 7\n", "utf-8")
    actual = read(file)
    assert [cell.label for cell in actual] == [
        "attack alie, byzantine 1", "attack alie, byzantine 5", "attack foe, byzantine 1",
        "attack foe, byzantine 5", "rounds 7",
    ]  # fmt: skip
    assert actual[0].spec is not None
    assert (actual[0].spec.name, actual[0].spec.model, actual[0].spec.attack) == ("attacks", "linear", "alie")
    assert actual[1].spec is None
    assert actual[1].error == "byzantine 5 is not a minority of nodes 8: the most is 3"
    table = cells({"base": {"preset": "mnist-30", "rounds": 3}, "grid": {"pull": [12, 15]}})
    assert [(cell.spec.pull, cell.spec.rounds) for cell in table if cell.spec] == [(12, 3), (15, 3)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[grid]\nnods = [1]", "there is no field 'nods' in [grid]; the nearest is 'nodes'"),
        ("rouns = 3\n[grid]\nnodes = [8]", "there is no field 'rouns' in [base]; the nearest is 'rounds'"),
        ("[grid]\nnodes = 8", "nodes in [grid] is 8: it takes a list such as [8]"),
        ('preset = "quickstar"\n[grid]\nnodes = [8]', "the nearest is 'quickstart'"),
        ("rounds = 3", "the sweep is empty: it needs [grid] or [[cells]]"),
        ("grid = 3", "[grid] is a table of lists"),
        ("[grid", "is not TOML"),
    ],
)
def test_bad_sweep_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError) as told:
        read(file)
    assert sentence in str(told.value)


def test_whole_grid_is_checked_before_the_first_cell_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(SMALL + 'byzantine = 1\nrounds = 1\n[grid]\nrule = ["mean", "krumm"]\n', "utf-8")
    said = rpel("sweep", str(file), "--out", str(tmp_path / "out"), capsys=capsys, code=2)[1]
    assert "rule krumm: unknown rule 'krumm'; did you mean 'krum'?" in said
    assert not (tmp_path / "out").exists()
    actual = checked(cells({"nodes": 8, "grid": {"byzantine": [1, 2], "pull": [2, 4]}}))
    assert [cell.spec is None for cell in actual] == [False, False, True, False], (
        "a combination stops no other"
    )
    assert "best_below_half" in actual[2].error


def test_cell_is_another_one_with_other_code_and_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweptrule.py").write_text("def agg(x, f=0):\n    return x.mean(axis=0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def key(**fields: str) -> str:
        sys.modules.pop("sweptrule", None)
        data_checksums.cache_clear()
        return cells({"cells": [fields]})[0].key

    first = key(rule="sweptrule:agg")
    assert key(rule="sweptrule:agg") == first
    (tmp_path / "sweptrule.py").write_text("def agg(x, f=0):\n    return 0 * x.mean(axis=0)\n")
    assert key(rule="sweptrule:agg") != first
    folder = femnist(tmp_path, leaf_file({"a": [0, 1]}), leaf_file({"b": [1]}))
    first = key(dataset="femnist", data_dir=str(folder))
    femnist(tmp_path, leaf_file({"a": [1, 0]}), leaf_file({"b": [1]}))
    assert key(dataset="femnist", data_dir=str(folder)) != first


def test_two_by_two_with_one_that_fails(tmp_path: Path) -> None:
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    # a pull of 2 cannot survive the two hostile nodes
    file.write_text(SMALL + "rounds = 3\n[grid]\nbyzantine = [1, 2]\npull = [2, 4]\n", "utf-8")
    process = started(file, out, "--jobs", "2", "--json")
    shown, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, said
    rows = json.loads(shown)
    assert [row["status"] for row in rows] == ["done", "done", "failed", "done"]
    assert "best_below_half" in rows[2]["error"]
    assert "4/4" in said
    for row in rows:
        if row["status"] == "done":
            last = json.loads((Path(row["path"]) / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
            assert row["accuracy_mean"] == last["accuracy_mean"]
    with (out / "sweep.csv").open(encoding="utf-8") as table:
        assert [(row["byzantine"], row["pull"], row["status"]) for row in csv.DictReader(table)][2] == (
            "2", "2", "failed",
        )  # fmt: skip
    # again: nothing that is done is repeated, what failed is tried once more
    again = Sweep(read(file), out, jobs=2)
    again.recall()
    assert [state.reused for state in again.states] == [True, True, False, True]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_interrupted_sweep_is_saved_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    file, out = tmp_path / "long.toml", tmp_path / "out"
    text = SMALL + "byzantine = 1\nrounds = 600\ncheckpoint_every = 0\n[grid]\nattack = ['foe']\n"
    file.write_text(text, "utf-8")
    process = started(file, out, "--jobs", "2")
    deadline = time.monotonic() + PATIENCE
    while not any(path.read_bytes().count(b"\n") > 5 for path in out.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    begun = [path.parent for path in out.glob("runs/*/metrics.jsonl") if path.read_bytes()]
    assert begun
    for folder in begun:  # a run that had begun is saved, one that was only being started has nothing to save
        assert list(folder.glob("checkpoint/round-*.npz")), folder
    stopped = json.loads((out / "sweep.json").read_text("utf-8"))
    assert [row["status"] for row in stopped] == ["stopped"]
    process = started(file, out, "--jobs", "2", "--json")
    shown, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert [row["status"] for row in json.loads(shown)] == ["done"]
    logs = [path.read_text("utf-8") for path in out.glob("cells/*.log")]
    assert sum("going on after round" in log for log in logs) == len(begun)


def finished(file: Path, out: Path) -> list[Path]:
    """The sweep run to its end, with the run folders of its cells."""
    states = Sweep(read(file), out, jobs=1).run()
    assert [state.status for state in states] == ["done"] * len(states)
    return [
        Path(run["path"])
        for state in states
        if state.result
        for run in state.result.get("runs", [state.result])
    ]


@pytest.mark.parametrize("seeds", [pytest.param("0", marks=pytest.mark.full), "0,1"])
def test_cell_whose_run_folder_is_gone_is_run_again(tmp_path: Path, seeds: str) -> None:
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text(SMALL + f"rounds = 1\nseeds = '{seeds}'\n[grid]\nbyzantine = [0, 1]\n", "utf-8")
    runs = finished(file, out)
    shutil.rmtree(runs[-1])
    again = Sweep(read(file), out, jobs=1)
    again.recall()
    assert [state.status for state in again.states] == ["done", "waiting"]


def test_table_fits_80_columns_and_shows_parameters_as_they_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = {
        "attack": ["strongest"],
        "attack_params": [{"of": "alie"}, {"of": "bogus"}],
        "local_steps": [1, 3],
    }
    work = Sweep(cells({"rounds": 5, "grid": grid}), tmp_path)
    work.states[0].status = work.states[1].status = "done"
    work.states[0].result = work.states[1].result = {"accuracy_mean": 0.5, "accuracy_worst": 0.25}
    work.states[2].status, work.states[2].error = "failed", "a sentence that is longer than the line " * 3
    console = Console(file=sys.stdout, width=80, highlight=False)
    console.print(live_table(work))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "of=alie" in shown
    assert "{" not in shown
    assert "waiting waiting" not in " ".join(shown.split())
