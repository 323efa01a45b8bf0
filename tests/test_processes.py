"""No process outlives the one that started it; those of one starter import what is heavy once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rpel.processes import start
from support.waiting import PATIENCE

STARTER = """
import sys, time
from pathlib import Path
from rpel.processes import start
folder = Path(sys.argv[1])
print(start(sys.argv[2:], folder / "stdout", folder / "stderr").pid, flush=True)
time.sleep(600)
"""


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Gone, or waiting for whoever adopted it to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_run_whose_starter_is_killed_saves_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    run = ["run", "quickstart", "--rounds", "1000000", "--out", str(tmp_path / "runs")]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), *run], stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        until(
            lambda: any(path.read_bytes() for path in tmp_path.glob("runs/*/metrics.jsonl")),
            "the run does not begin",
        )
    finally:
        starter.send_signal(number)
        starter.communicate()
    try:
        until(lambda: ended(pid), "the run goes on without its starter")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)  # a failing test leaves no million rounds behind
        raise
    assert list(tmp_path.glob("runs/*/checkpoint/round-*.npz"))
    assert "saved; go on with: rpel resume" in (tmp_path / "stderr").read_text("utf-8")


SLEEP = ["-n", "1", "-r", "1", "import time; time.sleep(600)"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_forked_processes_report_their_status_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    assert start(["--version"], out, err).wait(PATIENCE) == 0
    monkeypatch.chdir(tmp_path)
    asleep = start(SLEEP, tmp_path / "out-asleep", tmp_path / "err-asleep", module="timeit")
    version, wrong = (
        start(["--version"], out, tmp_path / "err-version"),
        start(["plan", "--nodes", "x"], out, err),
    )
    assert int(Path(f"/proc/{asleep.pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    assert (version.wait(PATIENCE), wrong.wait(PATIENCE)) == (0, 2)
    assert "--nodes" in err.read_text("utf-8")
    with pytest.raises(subprocess.TimeoutExpired):
        asleep.wait(0.1)
    assert asleep.poll() is None
    assert Path(f"/proc/{asleep.pid}/cmdline").read_text().split("\0")[1:6] == ["-m", "timeit", *SLEEP[:3]]
    # its starter's folder now, not at first
    assert Path(f"/proc/{asleep.pid}/cwd").resolve() == tmp_path.resolve()
    assert os.getsid(asleep.pid) == asleep.pid  # Ctrl-C in the starter's terminal does not reach it
    asleep.kill()
    assert asleep.wait(PATIENCE) == -signal.SIGKILL
    assert asleep.poll() == -signal.SIGKILL
