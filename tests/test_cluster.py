"""Ray places and restarts the workers of a run, and runs cells as tasks: the same bytes, whatever dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpel.simulation.api import resume, simulate
from support.runs import differences, reached

# before Ray is imported: the cluster of a test stays on loopback
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
ray = pytest.importorskip("ray", reason="needs Ray, as make test-all installs it")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # Ray warns of its own future

FIELDS: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 9, "byzantine": 2, "pull": 6, "b_hat": 2,
    "rounds": 300, "eval_every": 100, "eval_size": 50, "lr": 0.1, "threads": 1, "batch_size": 2000,
    "partition": "virtual", "checkpoint_every": 10,
}  # fmt: skip
FLAGS = [part for key, value in FIELDS.items() for part in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine starts Ray slowly, and nothing leaves loopback."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path | None = simulate(**FIELDS, name="quickstart", out=tmp_path_factory.mktemp("whole")).path
    assert path is not None
    return path


def started(out: Path, workers: int, *more: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "rpel",
        "run",
        "quickstart",
        *FLAGS,
        "--out",
        str(out),
        "--engine",
        "ray",
    ]
    return subprocess.Popen(
        [*command, "--workers", str(workers), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def below(parent: int) -> dict[int, str]:
    """All processes below one, with their commands."""
    lines = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in lines]
    actual = {parent: ""}
    for _ in range(4):  # the driver, its raylet, the workers, theirs
        actual |= {int(pid): args for pid, above, args in rows if int(above) in actual}
    del actual[parent]
    return actual


def train_workers(parent: int) -> list[int]:
    """The Ray Train workers below a process."""
    return [pid for pid, args in below(parent).items() if args.startswith("ray::") and "TrainWorker" in args]


def ended(process: "subprocess.Popen[str]") -> str:
    said, log = process.communicate()
    assert process.returncode == 0, log
    return said


def test_run_on_ray_has_the_same_bytes_and_is_not_repeated(whole: Path, tmp_path: Path) -> None:
    said = ended(started(tmp_path, 2))
    assert "accuracy" in said
    assert differences(whole, tmp_path / whole.name) == []
    process = started(tmp_path, 2)
    _, log = process.communicate()
    assert "is finished and not repeated" in log
    assert [path.name for path in tmp_path.iterdir()] == [whole.name], "nothing else is left"


def test_worker_that_is_killed_is_started_again(whole: Path, tmp_path: Path) -> None:
    process = started(tmp_path, 2)
    path = reached(tmp_path, 25, process)
    workers = train_workers(process.pid)
    assert len(workers) == 2, workers
    os.kill(workers[1], signal.SIGKILL)
    ended(process)
    assert differences(whole, path) == []


def test_ctrl_c_saves_and_resuming_without_ray_goes_on(whole: Path, tmp_path: Path) -> None:
    process = started(tmp_path, 2)
    path = reached(tmp_path, 25, process)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate()
    assert (process.returncode, "go on with: rpel resume" in log) == (130, True), log
    resume(path)
    assert differences(whole, path) == []


def test_ray_that_is_started_here_listens_on_loopback_alone(tmp_path: Path) -> None:
    process = started(tmp_path, 2)
    reached(tmp_path, 5, process)
    # torch's meeting place is not Ray's
    ours = {process.pid, *below(process.pid)} - set(train_workers(process.pid))
    sockets = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    actual = [line.split()[3] for line in sockets if any(f"pid={pid}," in line for pid in ours)]
    process.terminate()
    process.communicate()
    assert actual
    assert all(where.startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:", "[::1]:")) for where in actual), actual


def test_impossible_ray_run_is_refused(tmp_path: Path) -> None:
    process = started(tmp_path, 2, "--address", "127.0.0.1:1")
    _, log = process.communicate()
    assert (process.returncode, "no Ray cluster answers at 127.0.0.1:1" in log) == (2, True), log
    assert "Traceback" not in log


@pytest.fixture
def machines() -> Iterator[Any]:
    """A Ray cluster of three nodes on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.1"})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, node_ip_address="127.0.0.1")
        yield cluster
    finally:
        cluster.shutdown()


def test_lost_machine_is_left_out_of_the_next_attempt(whole: Path, tmp_path: Path, machines: Any) -> None:
    process = started(tmp_path, 3, "--address", machines.address)
    path = reached(tmp_path, 25, process)
    node = next(node for node in machines.worker_nodes if train_workers(_raylet(node)))
    machines.remove_node(node, allow_graceful=False)
    ended(process)
    assert differences(whole, path) == []


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def test_sweep_runs_its_cells_as_ray_tasks(tmp_path: Path) -> None:
    file = tmp_path / "attacks.toml"
    given = {
        key: value
        for key, value in (FIELDS | {"rounds": 3}).items()
        if key not in ("b_hat", "pull", "byzantine")
    }
    fields = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    # a pull of 2 cannot survive two hostile nodes
    file.write_text(fields + "[grid]\nbyzantine = [1, 2]\npull = [2, 6]\n")
    for engine in ("local", "ray"):
        command = [sys.executable, "-m", "rpel", "sweep", str(file), "--out", str(tmp_path / engine)]
        done = subprocess.run([*command, "--engine", engine], capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
    tables = [json.loads((tmp_path / engine / "sweep.json").read_text()) for engine in ("local", "ray")]
    assert [row["status"] for row in tables[1]] == ["done", "done", "failed", "done"]
    for mine, theirs in zip(*tables, strict=True):
        assert mine["error"] == theirs["error"]
        if mine["path"]:
            assert differences(Path(mine["path"]), Path(theirs["path"])) == []
