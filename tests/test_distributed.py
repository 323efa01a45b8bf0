"""A run shared by several processes is, byte for byte, the run of one: every method, rules, attacks, faults."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rpel.config.spec import Spec
from rpel.simulation.api import simulate
from rpel.simulation.checkpoint import RunFolder
from rpel.simulation.distributed import Workers
from rpel.simulation.inputs import Objects, gather
from rpel.simulation.methods import settle
from rpel.simulation.run import Run, pinned
from support.paths import TESTS
from support.runs import same_bytes

SMALL: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 9, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3,
    "eval_every": 2, "eval_size": 50, "lr": 0.1, "threads": 1, "batch_size": 10, "checkpoint_every": 0,
}  # fmt: skip
MANY = {"nodes": 400, "byzantine": 40, "pull": 10, "b_hat": 5, "batch_size": 40, "partition": "virtual"}
"""Several units of work for every worker."""
CASES: list[dict[str, Any]] = [
    {},
    {"method": "cs-plus", "attack": "dissensus"},
    {"attack": "mimic_heuristic", "rule": "mean"},
    {"attack": "label_flip"},
    {"attack": "fang"},
    {"attack_params": {"targeting": "most-exposed"}},
    {"consistent": True, "roaming": True, "no_show": 0.2, "local_steps": 2, "output": "uniform"},
    MANY,
]


def together(size: int, cases: Path, out: Path, tmp_path: Path) -> None:
    """All cases by so many workers."""
    store = tmp_path / f"store-{size}"
    script = [sys.executable, str(TESTS / "support" / "workers.py"), str(cases), str(out), str(size)]
    variables = [{**os.environ, "RPEL_WORKERS": f"{store},{size},{rank}"} for rank in range(size)]
    processes = [
        subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for env in variables
    ]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, said


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    fields = [{**SMALL, **case} for case in CASES]
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps(fields))
    for size in (2, 3):
        together(size, cases, tmp_path / str(size), tmp_path)
    with pinned(1):
        for number, case in enumerate(fields):
            spec = settle(Spec(**case))
            folder = RunFolder(tmp_path / "1" / str(number))
            with folder.locked():
                Run(spec, gather(spec, Objects()), folder).result()
            for size in (2, 3):
                same_bytes(folder.path, tmp_path / str(size) / str(number))


def test_shares_are_whole_units_and_cover_all_rows() -> None:
    workers = Workers.__new__(Workers)
    for size in (1, 2, 3, 7):
        for rows, unit in ((70, 13), (16, 1), (5, 13), (26, 13)):
            workers.rank, workers.size = 0, size
            shares = workers.shares(rows, unit)
            assert [i for share in shares for i in range(rows)[share]] == list(range(rows))
            assert all(share.start % unit == 0 or share.start == rows for share in shares)


# --- the command -----------------------------------------------------------------------------------------------------

LONG = {**SMALL, "model": "linear", "rounds": 300, "name": "quickstart", "eval_every": 100}
FLAGS = [part for key, value in LONG.items() if key != "name" for part in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = simulate(**LONG, out=tmp_path_factory.mktemp("whole")).path
    assert path is not None
    return path


def started(out: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rpel", "run", "quickstart", *FLAGS, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def reached(out: Path, round_: int, process: "subprocess.Popen[str]") -> Path:
    while process.poll() is None:
        for path in out.glob("*/metrics.jsonl"):
            if path.read_bytes().count(b"\n") >= round_:
                return path.parent
        time.sleep(0.01)
    raise AssertionError(f"round {round_} was not reached: {process.communicate()}")


def test_a_shared_run_that_was_interrupted_goes_on_with_another_number_of_workers(whole: Path, tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2")
    path = reached(tmp_path, 20, process)
    assert path.name == whole.name, "workers are not part of a run's identity"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, "go on with: rpel resume" in said) == (130, True), said
    ((saved, _),) = RunFolder(path).checkpoints
    process = started(tmp_path, "--workers", "3")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert f"going on after round {saved} of 300" in said
    same_bytes(whole, path)


def test_a_lost_worker_is_one_sentence_and_the_same_command_goes_on(whole: Path, tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2", "--checkpoint-every", "10")
    path = reached(tmp_path, 20, process)
    (worker,) = children(process.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 2
    assert "a worker was lost" in said
    assert "Traceback" not in said
    assert RunFolder(path).checkpoints
    process = started(tmp_path, "--workers", "2")
    _, said = process.communicate()
    assert process.returncode == 0, said
    same_bytes(whole, path)


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def test_objects_from_python_stay_with_one_worker() -> None:
    from torch import nn

    with pytest.raises(ValueError, match="workers=1"):
        simulate(nn.Linear(784, 10), workers=2, out=None)
