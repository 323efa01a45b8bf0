"""Sweeps, reports and reproductions never pass one thing off as another."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel
from rpel.cli import main
from support.commands import rpel as command
from support.plain import examples, network


def test_impossible_cell_of_a_sweep_is_never_passed_off_as_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the sweep refuses it at once or lists it as failed: the sentence is there, a result is not."""
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text('preset = "quickstart"\nnodes = 8\nrounds = 2\n[grid]\nbyzantine = [5, 6]\n', "utf-8")
    with pytest.raises(SystemExit) as left:
        main(["sweep", str(file), "--out", str(out), "--json"])
    assert left.value.code in (1, 2)
    said = capsys.readouterr()
    assert "byzantine 5 is not a minority of nodes 8" in said.out + said.err
    table = out / "sweep.json"
    rows: list[dict[str, Any]] = json.loads(table.read_text("utf-8")) if table.is_file() else []
    assert [row["status"] for row in rows] in ([], ["failed", "failed"])
    assert all(f"byzantine {row['byzantine']} is not a minority" in row["error"] for row in rows)
    assert all(row["path"] is None and row["accuracy_mean"] is None for row in rows)
    assert not list(out.glob("runs/*"))


@pytest.mark.integration
@pytest.mark.parametrize(("dataset", "word"), [("nowhere:data", "nowhere"), ("femnist", "femnist")])
def test_sweep_over_missing_data_starts_no_run_and_says_so_once(
    dataset: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("RPEL_DATA", str(tmp_path / "data"))
    base = f'preset = "quickstart"\ndataset = "{dataset}"\nnodes = 8\nbyzantine = 1\nrounds = 1\n'
    (tmp_path / "grid.toml").write_text(f'{base}[grid]\nattack = ["foe", "alie"]\n', "utf-8")
    out, err = command("sweep", "grid.toml", "--out", "sweep", code=2, capsys=capsys)
    assert out == ""
    assert sum(word in line for line in err.splitlines()) == 1
    assert not list(tmp_path.rglob("spec.toml"))


def settings(runs: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """How many settings the report's table of the runs below a folder has."""
    table = runs / "table.tex"
    command("report", str(runs), "-o", str(runs / "page.html"), "--latex", str(table), capsys=capsys)
    return sum("&" in line and "own" in line for line in table.read_text("utf-8").splitlines())


def test_runs_on_other_data_are_not_averaged_as_if_they_were_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = examples(12)
    for where, shift in (("alike", 0.0), ("other", 1.0)):
        for seed in (0, 1):
            moved = (x + np.float32(seed * shift), y)
            rpel.simulate(
                network(), moved, moved, nodes=4, byzantine=1, pull=3, b_hat=1, rounds=1, partition="iid",
                batch_size=1, eval_size=6, seed=seed, out=tmp_path / where,
            )  # fmt: skip
    assert settings(tmp_path / "alike", capsys) == 1
    assert settings(tmp_path / "other", capsys) == 2


def test_figure_at_full_scale_takes_in_no_panel_made_smaller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, scale in (("fraction-10000", "smoke"), ("fraction-1000", "full")):
        command("reproduce", name, "--scale", scale, "--out", str(tmp_path), capsys=capsys)
    drawn = (tmp_path / "figure-3.svg").read_text("utf-8")
    assert drawn.count(">not run yet</text>") == 2
    assert "SMOKE" not in drawn
