"""Studies: what a sweep file means; real processes, one of which fails; interrupted and gone on with."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel as package
from rpel.studies.study import Study, grid, read, sweep
from support.commands import rpel
from support.paths import ROOT
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
TINY: dict[str, Any] = {
    "model": "linear", "nodes": 8, "byzantine": 1, "pull": 4, "rounds": 2, "eval_every": 2, "eval_size": 50,
    "lr": 0.1,
}  # fmt: skip


def started(file: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    """``rpel sweep`` as a process of its own."""
    command = [sys.executable, "-m", "rpel", "sweep", str(file), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_file_is_a_base_a_grid_and_cells(tmp_path: Path) -> None:
    file = tmp_path / "attacks.toml"
    table = '[grid]\nattack = ["alie", "foe"]\nbyzantine = [1, 5]\n'
    file.write_text(SMALL + table + '[[cells]]\nbyzantine = 0\nseeds = "0,2"\n', "utf-8")
    cells = read(file)
    assert [cell.name for cell in cells] == [
        "attack alie, byzantine 1", "attack alie, byzantine 5", "attack foe, byzantine 1",
        "attack foe, byzantine 5", "byzantine 0, seeds 0,2, seed 0", "byzantine 0, seeds 0,2, seed 2",
    ]  # fmt: skip
    assert cells[0].spec is not None
    assert (cells[0].spec.name, cells[0].spec.model, cells[0].spec.attack) == ("attacks", "linear", "alie")
    assert (cells[1].spec, cells[1].error) == (
        None, "byzantine 5 is not a minority of nodes 8: the most is 3",
    )  # fmt: skip
    table_of = grid({"base": {"preset": "mnist-30", "rounds": 3}, "grid": {"pull": [12, 15]}})
    assert [(cell.spec.pull, cell.spec.rounds) for cell in table_of if cell.spec] == [(12, 3), (15, 3)]


@pytest.mark.parametrize("name", ["consistent", "exchange", "federations", "privacy"])
def test_settings_of_our_studies_are_valid(name: str) -> None:
    cells = read(ROOT / "studies" / f"{name}.toml")
    assert len(cells) > 50
    assert [cell.error for cell in cells if cell.spec is None] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[grid]\nnods = [1]", "[grid]: unknown field 'nods'; did you mean 'nodes'?"),
        ("rouns = 3\n[grid]\nnodes = [8]", "[base]: unknown field 'rouns'; did you mean 'rounds'?"),
        ("[grid]\nnodes = 8", "nodes in [grid] is 8: it takes a list such as [8]"),
        ('preset = "quickstar"\n[grid]\nnodes = [8]', "'quickstart'"),
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
    assert "rule krumm: " in said
    assert "'krum'" in said
    assert not (tmp_path / "out").exists()


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
    assert "4/4 runs done" in said
    assert "measured on real rounds" in said
    assert rows == json.loads((out / "sweep.json").read_text("utf-8"))
    for row in rows:
        if row["status"] == "done":
            last = json.loads((Path(row["path"]) / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
            assert row["accuracy_mean"] == last["accuracy_mean"]
    study = Study(read(file), out, jobs=2)
    assert [job.reused for job in study.states] == [True, True, False, True], "what is done is not repeated"
    assert study.results.frame["status"].tolist() == [row["status"] for row in rows]
    shutil.rmtree(rows[0]["path"])
    states = Study(read(file), out, jobs=2).states
    assert [job.status for job in states] == ["waiting", "done", "failed", "done"]


def test_seeds_become_rows_and_a_table_of_means(tmp_path: Path) -> None:
    cells = grid({**TINY, "seeds": "0,1", "grid": {"attack": ["alie", "foe"]}})
    results = Study(cells, tmp_path).run()
    assert results.frame["seed"].tolist() == [0, 1, 0, 1]
    final = results.final("accuracy_worst", "attack")
    foe = [one.row()["accuracy_worst"] for one in results.where(attack="foe")]
    assert final.loc["foe"].tolist() == [np.mean(foe), min(foe), max(foe), 2]
    assert results.curves["attack"].nunique() == 2
    assert set(results.curves["round"]) == {0, 2}


def test_objects_from_python_run_beside_names_and_one_broken_object_stops_nothing(tmp_path: Path) -> None:
    def broken(x: Any) -> Any:
        return x.maen(axis=0)

    rules = ["median", lambda x: x.mean(axis=0), broken]
    results = sweep(**TINY, grid={"rule": rules}, out=tmp_path)
    assert [one.status for one in results] == ["done", "done", "failed"]
    ((error, names),) = results.errors().items()
    assert names == ["rule broken"]
    assert "maen" in error
    assert "test_study.py" in error
    assert "simulation" not in error, "the user's own frames"
    assert results.frame["rule"].tolist() == ["median", "<lambda>", "broken"]
    assert (tmp_path / "sweep.csv").is_file()
    assert package.sweep is sweep


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
    (folder,) = out.glob("runs/*")
    assert list(folder.glob("checkpoint/round-*.npz"))
    assert [row["status"] for row in json.loads((out / "sweep.json").read_text("utf-8"))] == ["stopped"]
    process = started(file, out, "--jobs", "2", "--json")
    shown, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert [row["status"] for row in json.loads(shown)] == ["done"]
    (log,) = (path.read_text("utf-8") for path in out.glob("cells/*.log"))
    assert "going on after round" in log
