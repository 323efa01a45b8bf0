"""Several processes share a run: they start, end, and lose no work together."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rpel import resume, simulate
from support import namespaces
from support.paths import ROOT
from support.runs import checkpoints, differences, reached

SMALL: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 24, "byzantine": 2, "pull": 12, "b_hat": 2,
    "rounds": 2, "eval_every": 2, "eval_size": 50, "lr": 0.1, "threads": 1, "batch_size": 800,
    "checkpoint_every": 0, "partition": "virtual",
}  # fmt: skip
"""Five units of work, so that three workers have some each."""
LONG = SMALL | {
    "nodes": 9, "pull": 6, "batch_size": 2000, "rounds": 120, "name": "quickstart", "eval_every": 60,
    "checkpoint_every": 10,
}  # fmt: skip
FLAGS = [part for key, value in LONG.items() for part in ("-s", f"{key}={value}")]
RUN = ["-m", "rpel", "run", "quickstart", *FLAGS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path | None = simulate(**LONG, out=tmp_path_factory.mktemp("whole")).path
    assert path is not None
    return path


def started(
    out: Path,
    *more: str,
    before: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    with_us: bool = False,
) -> Any:
    command = [sys.executable, *before, *RUN, "--out", str(out), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
        preexec_fn=_end_with_us if with_us else None,
    )  # fmt: skip


@pytest.mark.integration
def test_lost_worker_is_reported_and_the_same_command_resumes(whole: Path, tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2")
    path = reached(tmp_path, 20, process)
    (worker,) = workers(process.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 2
    assert "a worker was lost" in said
    assert "Traceback" not in said
    assert checkpoints(path)
    process = started(tmp_path, "--workers", "2")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert differences(whole, path) == []


def workers(parent: int) -> list[int]:
    """Those that a run has started: a process that has imported all they need forks them."""
    return [worker for nursery in children(parent) for worker in children(nursery)]


def children(parent: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(word) for word in done.split()]


@pytest.mark.full
def test_worker_that_dies_before_joining_is_reported_at_once(tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2")
    while not (actual := workers(process.pid)):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(actual[0], signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 2, said
    assert said.startswith("rpel: ")
    assert "worker 1 " in said or "a worker was lost" in said  # it has joined within milliseconds
    assert "Traceback" not in said


def torchrun(out: Path, *more: str, restarts: int = 0) -> Any:
    before = ("-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2")
    return started(out, *more, before=(*before, f"--max-restarts={restarts}"), with_us=True)


def _end_with_us() -> None:
    """In torchrun, which looks after its workers: SIGTERM when the tests are gone, whichever way they end."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@pytest.mark.full
def test_workers_end_with_their_killed_torchrun(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "--rounds", "50000")
    path = reached(tmp_path, 5, process)
    assert len(children(process.pid)) == 2
    process.kill()
    process.communicate()  # until nobody is left who could write
    assert checkpoints(path), "they have saved"
    assert not (path / "certificate.json").exists(), "and not gone on to the end"


@pytest.mark.full
def test_torchrun_places_the_workers(whole: Path, tmp_path: Path) -> None:
    process = torchrun(tmp_path)
    said, log = process.communicate()
    assert process.returncode == 0, log
    assert said.count("accuracy") == simple_output(whole).count("accuracy"), "one worker prints the result"
    assert differences(whole, tmp_path / whole.name) == []


def simple_output(path: Path) -> str:
    return subprocess.run(
        [sys.executable, *RUN, "--out", str(path.parent)], capture_output=True, text=True
    ).stdout


@pytest.mark.integration
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
def test_torchrun_starts_the_group_again_when_a_worker_is_killed(
    victim: int, whole: Path, tmp_path: Path
) -> None:
    process = torchrun(tmp_path, restarts=2)
    path = reached(tmp_path, 25, process)
    os.kill(children(process.pid)[victim], signal.SIGKILL)
    _, log = process.communicate()
    assert process.returncode == 0, log
    assert "going on after round" in log
    assert differences(whole, path) == []


@pytest.mark.integration
def test_workers_on_several_machines_meet_at_an_address(whole: Path, tmp_path: Path) -> None:
    """Two network namespaces with an address each;
    gloo listens on the interface from which the first is reached."""
    if why := namespaces.possible():
        pytest.skip(why)
    network = namespaces.Namespaces(2)
    network.make()
    try:
        meeting = {"MASTER_ADDR": f"{namespaces.NET}.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        command = [sys.executable, *RUN, "--out", str(tmp_path)]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", network.namespace(rank), *command],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_WORLD_SIZE": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [process.communicate()[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        network.remove()
    assert differences(whole, tmp_path / whole.name) == []


def test_objects_from_python_stay_with_one_worker() -> None:
    from torch import nn

    with pytest.raises(ValueError, match="workers=1"):
        simulate(nn.Linear(784, 10), workers=2, out=None)


@pytest.mark.integration
@pytest.mark.parametrize("further", [pytest.param("3 workers", marks=pytest.mark.full), "none"])
def test_shared_run_that_was_interrupted_goes_on_with_any_number_of_workers(
    further: str, whole: Path, tmp_path: Path
) -> None:
    process = started(tmp_path, "--workers", "2")
    path = reached(tmp_path, 20, process)
    assert path.name == whole.name, "workers are not part of a run's identity"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, "go on with: rpel resume" in said) == (130, True), said
    (saved,) = checkpoints(path)
    if further == "none":
        resume(path)
    else:
        process = started(tmp_path, "--workers", "3")
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert f"going on after round {saved} of 120" in said
    assert differences(whole, path) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("specification", "would run"),
        pytest.param("code", "has source", marks=pytest.mark.full),
    ],
)
def test_workers_that_would_not_run_the_same_refuse(other: str, sentence: str, tmp_path: Path) -> None:
    source = ROOT / "src"
    if other == "code":
        source = shutil.copytree(ROOT / "src", tmp_path / "src")
        with (source / "rpel" / "text.py").open("a") as file:
            file.write("# changed\n")
    store, more = tmp_path / "store", ["--seed", "1"] if other == "specification" else []
    first = started(tmp_path / "runs", env={"RPEL_WORKERS": f"{store},2,0"})
    second = started(
        tmp_path / "elsewhere", *more, env={"RPEL_WORKERS": f"{store},2,1", "PYTHONPATH": str(source)}
    )
    said, theirs = first.communicate()[1], second.communicate()[1]
    assert (first.returncode, second.returncode) == (2, 2), (said, theirs)
    assert f"worker 1 on {socket.gethostname()}" in said
    assert sentence in said
    assert said.count("rpel:") == 1
    assert "rpel:" not in theirs, "one worker speaks for all"
