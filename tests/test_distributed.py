"""A run shared by several processes is, byte for byte, the run of one: every method, rules, attacks,
faults."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rpel.attacks import ATTACKS
from rpel.config.spec import Spec
from rpel.processes import free_memory
from rpel.rules import PreAggregation, rule
from rpel.rules.registry import RULES
from rpel.runs.folder import RunFolder
from rpel.simulation import launch
from rpel.simulation.api import resume, simulate
from rpel.simulation.communicator import Group, LostError
from rpel.simulation.inputs import Objects, gather
from rpel.simulation.methods import METHODS, resolve
from rpel.simulation.run import pinned
from rpel.simulation.runner import Run
from support import namespaces
from support.paths import ROOT, TESTS
from support.runs import differences, reached

SMALL: dict[str, Any] = {
    "dataset": "mnist-sample-8x8", "model": "linear", "nodes": 24, "byzantine": 2, "pull": 12, "b_hat": 2,
    "rounds": 2, "eval_every": 2, "eval_size": 50, "lr": 0.1, "threads": 1, "batch_size": 800,
    "checkpoint_every": 0, "partition": "virtual",
}  # fmt: skip
"""Five units of work, so that three workers have some each."""
MANY = {"nodes": 400, "byzantine": 40, "pull": 10, "b_hat": 5, "batch_size": 40}
NAMES = [name for name in RULES if not rule(name, f=2).on_graph]
AGGREGATE = [
    f"{name}+trimmed_mean" if isinstance(rule(name, f=2), PreAggregation) else name for name in NAMES
]
FORGE = [*ATTACKS]
FULL = {"pull": None, "b_hat": None}  # where all hear each other, that is no choice
CASES: list[dict[str, Any]] = [
    {"rounds": 20},  # sums in another order would show in the last bits of one round in three
    {"consistent": True, "no_show": 0.2, "local_steps": 2, "output": "uniform"},
    {"silent": True, "model": "mnist", "dataset": "mnist-sample", "nodes": 8, "pull": 5, "batch_size": 5},
    {"optimizer": "adamw", "lr": 0.01, "local_steps": 2, "outer": "nesterov"},
    {"nodes": 6, "byzantine": 1, "pull": 4, "b_hat": 1, "batch_size": 10},  # fewer units than workers
    {"rounds": 5, "consistent": True, "no_show": 0.1, "wire": "int8"},
    *(
        {"method": name, "attack": "dissensus", **(FULL if m.peers == "everybody" else {})}
        for name, m in METHODS.items()
    ),
    *({"rule": AGGREGATE[i % len(AGGREGATE)], "attack": FORGE[i % len(FORGE)]} for i in range(20)),
    {"attack": "strongest", "attack_params": {"of": "alie+foe", "evaluations": 3}, "rounds": 1},
    {"attack_params": {"targeting": "most-exposed"}},
    # shards sent in pieces
    {"nodes": 140, "byzantine": 4, "batch_size": 4000, "local_steps": 2, "rounds": 3},
    MANY,
    {
        "asynchronous": True,
        "speeds": "lognormal:0.3+stragglers:0.3,4",
        "jitter": 0.2,
        "rounds": 2,
        "model": "mnist",
        "dataset": "mnist-sample",
        "nodes": 9,
        "pull": 6,
        "batch_size": 5,
        "attack": "fang",
    },
]


def together(size: int, cases: Path, out: Path) -> None:
    """All cases by so many workers."""
    store = out.with_name(f"store-{size}")
    script = [sys.executable, str(TESTS / "support" / "workers.py"), str(cases), str(out), str(size)]
    variables = [{**os.environ, "RPEL_WORKERS": f"{store},{size},{rank}"} for rank in range(size)]
    processes = [
        subprocess.Popen(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for env in variables
    ]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, said


def different(cases: list[dict[str, Any]], tmp_path: Path, *sizes: int) -> list[Any]:
    """The cases that end otherwise with so many workers than with one: number of workers, case, files."""
    fields = [{**SMALL, **case} for case in cases]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(fields))
    for size in sizes:
        together(size, file, tmp_path / str(size))
    found: list[Any] = []
    with pinned(1):
        for number, case in enumerate(fields):
            spec = resolve(Spec(**case))
            folder = RunFolder(tmp_path / "1" / str(number))
            with folder.locked():
                Run(spec, gather(spec, Objects()), folder).result()
            for size in sizes:
                files = differences(folder.path, tmp_path / str(size) / str(number))
                found += [(size, case, files)] if files else []
    return found


@pytest.mark.integration
def test_two_workers_give_the_bytes_of_one(tmp_path: Path) -> None:
    assert different([*CASES[:6], {"method": "cs-plus", "attack": "dissensus"}], tmp_path, 2) == []


@pytest.mark.full
def test_any_worker_count_gives_the_same_bytes(tmp_path: Path) -> None:
    assert {case.get("attack") for case in CASES} >= set(FORGE)
    assert {case.get("method") for case in CASES} >= set(METHODS)
    assert different(CASES, tmp_path, 2, 3) == []


@pytest.mark.full
@pytest.mark.parametrize("attack", FORGE)
def test_two_workers_give_the_bytes_of_one_for_every_rule_and_attack(attack: str, tmp_path: Path) -> None:
    assert different([{"rule": name, "attack": attack} for name in AGGREGATE], tmp_path, 2, 3) == []


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_worker_is_sent_every_model_of_the_others_once_a_round_and_little_else(
    size: int, tmp_path: Path
) -> None:
    case = {**SMALL, "dataset": "mnist-sample", "nodes": 300, "byzantine": 30, "batch_size": 40, "rounds": 4}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([case]))
    together(size, file, tmp_path / "out")
    for rank in range(size):
        (received,) = json.loads((tmp_path / "out" / f"received-{rank}.json").read_text())
        stored = 4 * 270 * 7850 * (size - 1) / size if rank == 0 else 0  # worker 0 collects the result, once
        wanted = 4 * 270 * 7850 * (size - 1) / size * 4
        assert 0.9 * wanted < received - stored < 1.1 * wanted


def test_shards_are_whole_units_and_cover_all_rows() -> None:
    for size in (1, 2, 3, 7):
        for rows, unit in ((70, 13), (16, 1), (5, 13), (26, 13), (400, 3)):
            shards = Group(0, size).shards(rows, unit)
            pieces = [piece for shard in Group(0, size).pieces(shards, unit) for piece in shard]
            for parts in (shards, pieces):
                assert [i for part in parts for i in range(rows)[part]] == list(range(rows))
                assert all(part.start % unit == 0 or part.start == rows for part in parts)


# --- the command --------------------------------------------------------------------------------------------

LONG = SMALL | {
    "nodes": 9, "pull": 6, "batch_size": 2000, "rounds": 120, "name": "quickstart", "eval_every": 60,
    "checkpoint_every": 10,
}  # fmt: skip
FLAGS = [
    part
    for key, value in LONG.items()
    if key != "name"
    for part in (f"--{key.replace('_', '-')}", str(value))
]
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
    ((saved, _),) = RunFolder(path).checkpoints
    files = sorted(file.name for file in (path / "checkpoint").iterdir())
    assert [name.partition("-rows-")[1] for name in files] == ["-rows-", "-rows-", ""], files
    if further == "none":
        resume(path)
    else:
        process = started(tmp_path, "--workers", "3")
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert f"going on after round {saved} of 120" in said
    assert differences(whole, path) == []


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
    assert RunFolder(path).checkpoints
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
    assert (process.returncode, "worker 1 ended before it had joined the others" in said) == (2, True), said
    assert "Traceback" not in said


def test_worker_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "_JOINING", timedelta(milliseconds=10))
    monkeypatch.setenv("RPEL_WORKERS", f"{tmp_path / 'store'},2,0")
    with pytest.raises(LostError, match="worker 1 of 2"), launch.joined(Spec(workers=2)):
        pass
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # the next group may meet at another interface


@pytest.mark.integration
@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("specification", "would run"),
        pytest.param("code", "has source", marks=pytest.mark.full),
        pytest.param("folder", "must be one folder that all machines see", marks=pytest.mark.full),
    ],
)
def test_workers_that_would_not_run_the_same_refuse(other: str, sentence: str, tmp_path: Path) -> None:
    source = ROOT / "src"
    if other == "code":
        source = shutil.copytree(ROOT / "src", tmp_path / "src")
        with (source / "rpel" / "text.py").open("a") as file:
            file.write("# changed\n")
    store, more = tmp_path / "store", ["--seed", "1"] if other == "specification" else []
    out = tmp_path / ("elsewhere" if other == "folder" else "runs")
    first = started(tmp_path / "runs", env={"RPEL_WORKERS": f"{store},2,0"})
    second = started(out, *more, env={"RPEL_WORKERS": f"{store},2,1", "PYTHONPATH": str(source)})
    said, theirs = first.communicate()[1], second.communicate()[1]
    assert (first.returncode, second.returncode) == (2, 2), (said, theirs)
    assert f"worker 1 on {socket.gethostname()}" in said
    assert sentence in said
    assert said.count("rpel:") == 1
    assert "rpel:" not in theirs, "one worker speaks for all"


# --- torchrun -----------------------------------------------------------------------------------------------


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
    assert RunFolder(path).checkpoints, "they have saved"
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


# --- machines -----------------------------------------------------------------------------------------------


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


def test_unreachable_rendezvous_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(launch, "_JOINING", timedelta(seconds=1))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=f"127.0.0.1:{port}"), launch.joined(Spec()):
        pass


def test_workers_that_are_started_again_do_not_meet_those_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun keeps its store over a restart:
    worker 1 of the first attempt is not worker 1 of the second."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(launch, "_JOINING", timedelta(seconds=2))
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for key, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(key, value)
    for attempt, rank in enumerate((1, 0)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(LostError, match=f"worker {1 - rank} of 2"), launch.joined(Spec()):
            pass


# --- what is refused ----------------------------------------------------------------------------------------


def test_table_larger_than_memory_is_refused_with_its_size(tmp_path: Path) -> None:
    free = free_memory()
    assert free is not None
    nodes = free // (4 * 4 * 7850) * 2
    with pytest.raises(
        ValueError,
        match=r"7,850.*[\d,]+.* [\d.]+ [GT]B.* [\d.]+ [GT]B",
    ):
        simulate("linear", nodes=nodes, byzantine=1, pull=6, b_hat=1, partition="virtual", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_workers_than_nodes_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start", lambda *_, **__: pytest.fail("a worker was started"))
    with pytest.raises(ValueError, match=r"workers 100.* 13"):
        simulate(nodes=16, byzantine=3, workers=100, out=None)


def test_objects_from_python_stay_with_one_worker() -> None:
    from torch import nn

    with pytest.raises(ValueError, match="workers=1"):
        simulate(nn.Linear(784, 10), workers=2, out=None)
