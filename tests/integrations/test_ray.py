"""A sweep runs its cells as tasks of a Ray cluster, with the same bytes as without Ray."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.runs import differences

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported: it stays on loopback
pytest.importorskip("ray", reason="needs Ray, as make test-all installs it")
pytestmark = pytest.mark.full

FIELDS: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 9, "rounds": 3, "eval_size": 50,
    "lr": 0.1, "threads": 1, "partition": "virtual",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy machine time to start Ray."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")


def sweep_command(tmp_path: Path, *more: str, **fields: Any) -> list[str]:
    file = tmp_path / "grid.toml"
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in (FIELDS | fields).items()]
    # A pull of 2 cannot survive two hostile nodes.
    file.write_text("".join(lines) + "[grid]\nbyzantine = [1, 2]\npull = [2, 6]\n")
    return [sys.executable, "-m", "rpel", "sweep", str(file), *more]


def test_sweep_on_ray_has_the_bytes_of_a_sweep_without(tmp_path: Path) -> None:
    for engine in ("local", "ray"):
        command = sweep_command(tmp_path, "--out", str(tmp_path / engine), "--engine", engine)
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
    tables = [json.loads((tmp_path / engine / "sweep.json").read_text()) for engine in ("local", "ray")]
    assert [row["status"] for row in tables[1]] == ["done", "done", "failed", "done"]
    for mine, theirs in zip(*tables, strict=True):
        assert mine["error"] == theirs["error"]
        if mine["path"]:
            assert differences(Path(mine["path"]), Path(theirs["path"])) == []


def test_ray_started_by_a_sweep_listens_on_loopback_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = sweep_command(tmp_path, "--out", str(out), "--engine", "ray", rounds=5000)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not list(out.glob("runs/*/metrics.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ours = {process.pid, *descendants(process.pid)}
        sockets = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
        lines = [line for line in sockets.splitlines() if any(f"pid={pid}," in line for pid in ours)]
        addresses = [line.split()[3] for line in lines]
    finally:
        process.terminate()
        process.wait()
    assert addresses
    loopback = ("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")
    assert all(address.startswith(loopback) for address in addresses), addresses


def descendants(parent: int) -> set[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    rows = [tuple(map(int, line.split())) for line in listing.stdout.splitlines()]
    found = {parent}
    for _ in range(4):  # the sweep, its raylet, the workers, their processes
        found |= {pid for pid, above in rows if above in found}
    return found


def test_cluster_that_does_not_answer_is_bad_input(tmp_path: Path) -> None:
    command = sweep_command(tmp_path, "--engine", "ray", "--address", "127.0.0.1:1")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "127.0.0.1:1" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
