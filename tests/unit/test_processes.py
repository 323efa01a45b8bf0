"""No process outlives the one that started it; a child hands back what its function returns."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpel.processes import ChildError, call, start
from support.waiting import PATIENCE

STARTER = """
import sys, time
from pathlib import Path
from rpel.processes import start
folder = Path(sys.argv[1])
print(start(sys.argv[2:], folder / "stdout", folder / "stderr").pid, flush=True)
time.sleep(600)
"""
WITHOUT_GUARD = """
import os
from pathlib import Path
from rpel.processes import call
print("started")
print(call(os.getcwd, stdout=Path("out"), stderr=Path("err")).result())
"""
SLEEP = ["-n", "1", "-r", "1", "import time; time.sleep(600)"]


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def ended(pid: int) -> bool:
    """Return whether it is gone, or waits for its new parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def big(size: int) -> dict[str, Any]:
    print("computed")
    return {
        "bytes": b"x" * size,
        "variable": os.environ["RPEL_TEST"],
        "threads": os.environ["OMP_NUM_THREADS"],
    }


def wrong() -> None:
    raise ValueError("nodes 3 is wrong")


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


def test_commands_report_their_status_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    version = start(["--version"], out, err)
    assert version.wait(PATIENCE) == 0
    assert version.output.startswith("rpel ")
    monkeypatch.chdir(tmp_path)
    asleep = start(SLEEP, tmp_path / "out-asleep", tmp_path / "err-asleep", module="timeit")
    wrong = start(["plan", "--nodes", "x"], out, err)
    assert wrong.wait(PATIENCE) == 2
    assert "--nodes" in wrong.last_lines
    with pytest.raises(subprocess.TimeoutExpired):
        asleep.wait(0.1)
    assert asleep.poll() is None
    assert os.getsid(asleep.pid) == asleep.pid  # Ctrl-C in the starter's terminal does not reach it
    if sys.platform == "linux":  # its starter's folder now, not the one of the first child
        assert Path(f"/proc/{asleep.pid}/cwd").resolve() == tmp_path.resolve()
    asleep.kill()
    assert asleep.wait(PATIENCE) == -signal.SIGKILL
    assert asleep.poll() == -signal.SIGKILL


def test_child_returns_what_its_function_returns(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    child = call(big, 1 << 22, stdout=out, stderr=err, environment={"RPEL_TEST": "é"})
    assert child.result() == {"bytes": b"x" * (1 << 22), "variable": "é", "threads": "1"}
    assert (child.poll(), child.output) == (0, "computed\n")


def test_child_that_fails_raises_the_error_of_its_function(tmp_path: Path) -> None:
    child = call(wrong, stdout=tmp_path / "out", stderr=tmp_path / "err")
    with pytest.raises(ValueError, match="nodes 3 is wrong"):
        child.result()


def test_child_that_dies_is_an_error_that_names_it(tmp_path: Path) -> None:
    child = call(time.sleep, 600, name="job 3", stdout=tmp_path / "out", stderr=tmp_path / "err")
    child.kill()
    with pytest.raises(ChildError, match="job 3 died with status -9"):
        child.result()


def test_script_without_a_main_guard_is_not_run_again_by_its_child(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITHOUT_GUARD)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["started", str(tmp_path.resolve())], done.stderr
