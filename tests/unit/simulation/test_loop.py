"""Runs from Python: what they keep, how they stop and go on, and what they refuse."""

import inspect
import json
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rpel import algorithm, data
from rpel.data import load as dataset
from rpel.runs.columns import COLUMNS
from rpel.runs.folder import RunFolder
from rpel.runs.run import Run
from rpel.simulation import run as runs
from rpel.simulation.api import Interrupted, resume, simulate
from rpel.simulation.inputs import Inputs
from rpel.spec import Request
from rpel.tasks import Classification
from support.commands import rpel
from support.runs import TINY, checkpoints, differences, rounds_written, tiny

FILES = {
    "spec.toml", "metrics.jsonl", "certificate.json", "counts.npz", "nodes.npz", "models.safetensors",
    "checkpoint",
}  # fmt: skip
EVALUATED = COLUMNS[1:8]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"))


def test_run_folder_holds_what_is_promised(finished: Run) -> None:
    path = finished.path
    assert path is not None
    assert {p.name for p in path.iterdir()} - {".lock"} == FILES
    assert path.name.startswith("run-")
    assert len(path.name) == len("run-") + 12
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert tuple(row) == COLUMNS
        assert all((row[key] is None) == (row["round"] % 2 == 1) for key in EVALUATED)
    assert (rows[0]["messages"], rows[0]["bytes"]) == (8 * 4, 8 * 4 * 4 * 7850)
    proof = json.loads((path / "certificate.json").read_text())
    promised = (
        "plan guarantee held max_observed histogram violations violations_total seed versions "
        "threads data rule"
    )
    promised += " objects privacy aggregations"
    assert set(proof) == set(promised.split())
    assert (proof["held"], sum(proof["histogram"]), proof["plan"]["b_hat"]) == (True, 6 * 7, 1)
    counts, nodes = np.load(path / "counts.npz"), np.load(path / "nodes.npz")
    assert counts["counts"].shape == (6, 7)
    assert counts["counts"].max(axis=1).tolist() == [row["byzantine_max"] for row in rows]
    assert nodes["round"].tolist() == [0, 2, 4, 6]
    assert len(set(nodes["accuracy"][0])) == 1, "all begin with one model"
    assert nodes["accuracy"][1:].mean(axis=1).tolist() == [
        row["accuracy_mean"] for row in rows if row["loss"]
    ]
    tensors = load_file(path / "models.safetensors")
    assert (tensors["models"].shape, tensors["ids"].shape) == ((7, 7850), (7,))
    assert tensors["models"].dtype == np.float32


# --- stopping and going on ----------------------------------------------------------------------------------


def test_signal_in_the_last_evaluation_is_obeyed_at_once_and_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, measure = tiny(tmp_path / "whole").path, Classification.measure

    def interrupted(self: Any, x: Any, local: Any, subset: Any = None, ids: Any = None) -> Any:
        if subset is None:
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the last evaluation went on")
        return measure(self, x, local, subset, ids)

    monkeypatch.setattr(Classification, "measure", interrupted)
    with pytest.raises(Interrupted, match=r"6 of 6.*resume") as stopped:
        tiny(tmp_path / "stopped")
    monkeypatch.undo()
    path = stopped.value.path
    assert path is not None
    assert whole is not None
    assert list(checkpoints(path)) == [6]
    assert rounds_written(path) == 5
    rounds: list[int] = []
    resume(path, progress=lambda tick: rounds.append(tick.round))
    assert rounds == [6]
    assert differences(whole, path) == []


def test_certificate_comes_after_all_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[set[str]] = []
    real = RunFolder.write_json

    def write(self: RunFolder, name: str, content: Any) -> None:
        there.append({p.name for p in self.path.iterdir()})
        real(self, name, content)

    monkeypatch.setattr(RunFolder, "write_json", write)
    tiny(tmp_path)
    assert FILES - {"certificate.json"} <= there[0]
    assert "certificate.json" not in there[0]


def test_last_round_is_evaluated_on_all_test_examples(finished: Run) -> None:
    *before, last = finished.nodes["accuracy"]
    size = len(dataset("mnist-sample").test_y)
    assert size > TINY["eval_size"]
    np.testing.assert_allclose(np.array(before) * TINY["eval_size"] % 1, 0, atol=1e-9)
    np.testing.assert_allclose((last * size + 0.5) % 1, 0.5, atol=1e-6)
    assert (np.abs((last * TINY["eval_size"] + 0.5) % 1 - 0.5) > 1e-6).any(), (
        "a subset would give coarser numbers"
    )


def test_simulate_shows_every_field_with_its_default() -> None:
    keywords = inspect.signature(simulate).parameters
    for key, field in Request.model_fields.items():
        if key not in ("model", "out"):
            assert keywords[key].default == field.default, key
    assert keywords["out"].default is None, "nothing is kept unless told"
    with pytest.raises(ValueError, match=r"'nods'.*'nodes'"):
        simulate(nods=3)


# --- certificate, faults, methods ---------------------------------------------------------------------------


def test_threads_are_pinned_recorded_and_given_back() -> None:
    from rpel.backend.threads import threads

    before = threads(), torch.get_num_threads()
    assert tiny(None, threads=1).certificate["threads"] == 1
    assert (threads(), torch.get_num_threads()) == before


def test_missing_result_files_are_named() -> None:
    with pytest.raises(ValueError, match="partition 'writer'"):
        tiny(None, partition="writer")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"'cuda'.*CPU-only.*'cpu'"):
            tiny(None, device="cuda")
    with pytest.raises(ValueError, match=r"rpel\.simulate"):
        runs.run(Request(dataset="own"), Inputs())


def test_five_frames_stand_between_the_command_and_algorithm_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, step, walks = str(Path(data.__file__).parents[1]), algorithm.step, list[list[str]]()

    def watching(problem: Any, state: Any) -> Any:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ours)]
        walks.append([frame.name for frame in frames])
        return step(problem, state)

    monkeypatch.setattr(algorithm, "step", watching)
    rpel("run", "quickstart", "--rounds", "1", "--model", "linear", "--out", str(tmp_path), capsys=capsys)
    (walk,) = walks
    assert len(walk[walk.index("main") + 1 :]) <= 5
