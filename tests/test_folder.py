"""The run folder: atomic files, checkpoints that may be damaged, the journal, and the lock."""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rpel.files import atomic
from rpel.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with contextlib.suppress(ZeroDivisionError), atomic(path) as file:
        file.write(b"half of the new")
        _ = 1 / 0
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_rename_comes_after_the_bytes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(handle: int) -> None:
        seen.append(
            "fsync folder"
            if Path(f"/proc/self/fd/{handle}").resolve() == tmp_path.resolve()
            else "fsync file"
        )
        real_sync(handle)

    def replace(self: Path, target: Path) -> Path:
        seen.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    with atomic(tmp_path / "file") as file:
        file.write(b"new")
    assert seen == ["fsync file", "rename", "fsync folder"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "unnamed"])
def test_damaged_checkpoint_falls_back_with_a_warning(
    folder: RunFolder, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.save(5, {"x": np.arange(1000)})
    stored = folder.checkpoints[0][1].read_bytes()
    folder.save(10, {"x": np.arange(1000) + 1})
    (folder.path / "checkpoint" / "round-00000005.npz").write_bytes(stored)
    newest = folder.checkpoints[0][1]
    content = bytearray(newest.read_bytes())
    if damage == "unnamed":  # killed before the rename
        newest.rename(newest.with_name(f".{newest.name}.tmp"))
    else:
        content[len(content) // 2] ^= 1
        newest.write_bytes(
            bytes({"truncated": content[:3000], "flipped": content, "empty": bytearray()}[damage])
        )
    with caplog.at_level(logging.WARNING):
        checkpoint = folder.restore()
    assert checkpoint is not None
    assert checkpoint["x"][0] == 0
    assert ("round 10 is damaged" in caplog.text) == (damage != "unnamed")
    (folder.path / "checkpoint" / "round-00000005.npz").write_bytes(b"gone")
    if damage != "unnamed":
        assert folder.restore() is None


def test_metrics_are_cut_back_to_the_rows_that_count(folder: RunFolder) -> None:
    with folder.journal([]) as journal:
        for t in range(1, 6):
            journal.add({"round": t})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6')  # killed inside a line
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3, 4, 5]
    with folder.journal(folder.metrics()[:3]) as journal:
        journal.add({"round": 4, "again": True})
    assert [row["round"] for row in folder.metrics()] == [1, 2, 3, 4]
    assert [row.get("again") for row in folder.metrics()] == [None, None, None, True]


def test_folder_has_one_writer(folder: RunFolder) -> None:
    script = "import sys, pathlib; from rpel.runs.folder import RunFolder\n"
    script += "with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('mine')"
    command = [sys.executable, "-c", script, str(folder.path)]
    with folder.locked():
        other = subprocess.run(command, capture_output=True, text=True)
        assert "ValueError: another process is writing" in other.stderr
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "mine\n"
