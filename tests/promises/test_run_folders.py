"""A run has one folder, which is never confused with another run's."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel
from rpel import Run
from support.runs import CrashError, crash_after, differences, tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"))


def test_equal_runs_give_equal_bytes_and_learning_happens(finished: Run, tmp_path: Path) -> None:
    again = tiny(tmp_path)
    assert finished.path is not None
    assert again.path is not None
    assert differences(finished.path, again.path) == []
    assert again.accuracy_mean > again.history["accuracy_mean"][1] > 0.2


def test_finished_run_is_not_repeated_unless_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tiny(tmp_path)
    ticks: list[Any] = []
    with caplog.at_level(logging.INFO):
        stored = tiny(tmp_path, progress=ticks.append)
    assert (stored.reused, ticks) == (True, [])
    assert "is finished and not repeated" in caplog.text
    assert "other code" not in caplog.text
    assert np.array_equal(stored.models, first.models)
    assert stored.rows == first.rows
    assert not tiny(tmp_path, progress=ticks.append, force=True).reused
    assert [tick.round for tick in ticks] == [1, 2, 3, 4, 5, 6]


def test_different_specifications_never_share_a_folder(finished: Run, tmp_path: Path) -> None:
    others = [tiny(tmp_path, lr=0.2), tiny(tmp_path, seed=1), tiny(tmp_path, attack="foe")]
    names = {result.path.name for result in (finished, *others) if result.path}
    assert len(names) == 4


def test_run_with_out_none_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = tiny(None)
    assert result.path is None
    assert result.models.shape == (7, 7850)
    assert list(tmp_path.iterdir()) == []


def test_load_of_a_folder_that_is_not_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^there is no run folder '.*nowhere'$"):
        rpel.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a run folder: it holds no spec\.toml$"):
        rpel.load(tmp_path)
    with pytest.raises(CrashError):
        tiny(tmp_path, progress=crash_after(3))
    (unfinished,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match="is not finished: rpel resume"):
        rpel.load(unfinished)


def test_run_reads_its_files_lazily(finished: Run, tmp_path: Path) -> None:
    assert finished.path is not None
    path = shutil.copytree(finished.path, tmp_path / finished.path.name)
    loaded = rpel.load(path)
    for name in ("models.safetensors", "nodes.npz"):
        (path / name).unlink()
    assert loaded.accuracy_mean == finished.accuracy_mean
    with pytest.raises(ValueError, match=r"models\.safetensors is missing"):
        _ = loaded.models


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "certificate.json", "nodes.npz", "models.safetensors"])
def test_missing_or_truncated_file_of_a_run_is_named(
    name: str, damage: str, finished: Run, tmp_path: Path
) -> None:
    assert finished.path is not None
    path = shutil.copytree(finished.path, tmp_path / finished.path.name)
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage == "truncated":
        (path / name).write_bytes(content[: len(content) // 2])
    said = "not finished" if (name, damage) == ("certificate.json", "missing") else str(path / name)
    with pytest.raises(ValueError, match=re.escape(said)):
        [getattr(rpel.load(path), what) for what in ("history", "nodes", "models")]
