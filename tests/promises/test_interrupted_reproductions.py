"""A reproduction that is interrupted keeps what is done."""

import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from support.waiting import PATIENCE

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_ctrl_c_saves_and_ends_with_130(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rpel",
        "reproduce",
        "extra-b-hat",
        "--out",
        str(tmp_path),
        "--threads",
        "1",
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        before = list(takewhile(lambda line: "runs done" not in line, running.stderr))
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=PATIENCE)
    finally:
        running.kill()
    assert running.returncode == 130, said
    assert any("measured on real rounds" in line for line in before)
    assert "the same command goes on" in said
    assert not (tmp_path / "extra-b-hat.svg").exists()
