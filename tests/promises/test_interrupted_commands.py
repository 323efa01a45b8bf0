"""A run command that is killed or interrupted is resumed to the bytes of an undisturbed one."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rpel import simulate
from support.commands import rpel
from support.runs import checkpoints, differences, reached, rounds_written
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration
SMALL = {
    "model": "linear", "nodes": "8", "byzantine": "1", "pull": "4", "eval_every": "100", "eval_size": "50",
    "lr": "0.1", "threads": "1",
}  # fmt: skip
FLAGS = [part for key, value in SMALL.items() for part in ("-s", f"{key}={value}")]


def started(out: Path, rounds: int, checkpoint_every: int) -> "subprocess.Popen[str]":
    """A real process on its way, so long that it does not end before it is told to."""
    command = [sys.executable, "-m", "rpel", "run", "quickstart", *FLAGS, "--rounds", str(rounds)]
    command += ["-s", f"checkpoint_every={checkpoint_every}", "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never disturbed."""
    fields: dict[str, Any] = {**SMALL, "name": "quickstart", "rounds": 300}
    path: Path | None = simulate(**fields, out=tmp_path_factory.mktemp("whole")).path
    assert path is not None
    return path


def test_killed_run_is_resumed_to_the_same_bytes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(tmp_path, 300, checkpoint_every=25)
    path = reached(tmp_path, 70, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert path.name == whole.name
    done = rounds_written(path)
    assert 70 <= done < 300
    assert not (path / "certificate.json").exists()
    (saved,) = checkpoints(path)
    assert 0 <= done - saved <= 26, "more was lost than the rounds since the last checkpoint"
    _, said = rpel("resume", str(path), capsys=capsys)
    assert f"going on after round {saved} of 300" in said
    _same_but_checkpoints(whole, path)


def _same_but_checkpoints(whole: Path, path: Path) -> None:
    """Equal to the last byte, but for how often was saved."""
    theirs, ours = (tomllib.loads((p / "spec.toml").read_text()) for p in (whole, path))
    assert {**theirs, "checkpoint_every": 0} == {**ours, "checkpoint_every": 0}
    (path / "spec.toml").write_bytes((whole / "spec.toml").read_bytes())
    assert differences(whole, path) == []


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_with_130(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = started(tmp_path, 300, checkpoint_every=0)
    path = reached(tmp_path, 20, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    (saved,) = checkpoints(path)
    assert f"interrupted after round {saved} of 300, saved; go on with: rpel resume {path}" in err
    assert "Traceback" not in err
    assert rounds_written(path) == saved
    rpel("resume", str(path), capsys=capsys)
    _same_but_checkpoints(whole, path)
