"""A run shared by several processes is, byte for byte, the run of one: every method, rules, attacks,
faults."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rpel.attacks import ATTACKS
from rpel.processes import Children, free_memory
from rpel.rules import PreAggregation, rule
from rpel.rules.registry import RULES
from rpel.runs.folder import RunFolder
from rpel.simulation import workers as launch
from rpel.simulation.api import simulate
from rpel.simulation.engine import Engine
from rpel.simulation.inputs import Inputs, gather
from rpel.simulation.loop import train
from rpel.simulation.methods import METHODS, resolve
from rpel.simulation.workers import LostError, pinned
from rpel.spec import Request
from support.paths import TESTS
from support.runs import differences

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
    {"attack": "alie(consistent=true)", "no_show": 0.2, "local_steps": 2, "output": "uniform"},
    {"silent": True, "model": "mnist", "dataset": "mnist-sample", "nodes": 8, "pull": 5, "batch_size": 5},
    {"optimizer": "adamw", "lr": 0.01, "local_steps": 2, "outer": "nesterov"},
    {"nodes": 6, "byzantine": 1, "pull": 4, "b_hat": 1, "batch_size": 10},  # fewer units than workers
    {"rounds": 5, "attack": "alie(consistent=true)", "no_show": 0.1, "wire": "int8"},
    *(
        {"method": name, "attack": "dissensus", **(FULL if m.peers == "everybody" else {})}
        for name, m in METHODS.items()
    ),
    *({"rule": AGGREGATE[i % len(AGGREGATE)], "attack": FORGE[i % len(FORGE)]} for i in range(20)),
    {"attack": "strongest(of=alie+foe, evaluations=3)", "rounds": 1},
    {"attack": "alie(targeting=most-exposed)"},
    # shards sent in pieces
    {"nodes": 140, "byzantine": 4, "batch_size": 4000, "local_steps": 2, "rounds": 3},
    MANY,
    {
        "timing": "asynchronous(speeds=lognormal(0.3)+stragglers(0.3, 4), jitter=0.2)",
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
            run = resolve(Request(**case))
            folder, inputs = RunFolder(tmp_path / "1" / str(number)), gather(run, Inputs())
            with folder.locked():
                train(run, inputs, Engine.of(run, inputs), folder)
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
        # worker 0 collects models and momenta before the last evaluation, and the result
        stored = 3 * 4 * 270 * 7850 * (size - 1) / size if rank == 0 else 0
        wanted = 4 * 270 * 7850 * (size - 1) / size * 4
        assert 0.9 * wanted < received - stored < 1.1 * wanted


# --- the command --------------------------------------------------------------------------------------------


def test_worker_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "_JOINING", timedelta(milliseconds=10))
    monkeypatch.setenv("RPEL_WORKERS", f"{tmp_path / 'store'},2,0")
    with pytest.raises(LostError, match="worker 1 of 2"), launch.joined(Request(workers=2)):
        pass
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # the next group may meet at another interface


# --- machines -----------------------------------------------------------------------------------------------


def test_unreachable_rendezvous_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(launch, "_JOINING", timedelta(seconds=1))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=f"127.0.0.1:{port}"), launch.joined(Request()):
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
        with pytest.raises(LostError, match=f"worker {1 - rank} of 2"), launch.joined(Request()):
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
    monkeypatch.setattr(Children, "call", lambda *_, **__: pytest.fail("a worker was started"))
    with pytest.raises(ValueError, match=r"workers 100.* 13"):
        simulate(nodes=16, byzantine=3, workers=100, out=None)


@pytest.mark.integration
def test_worker_memory_check_counts_the_shared_machine() -> None:
    """What one worker may take, two may not. As torchrun places them; the free memory is made up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = (
        "import os, sys, rpel.processes\n"
        "rpel.processes.free_memory = lambda: 1_300_000\n"  # 28 rows of 7,850 numbers are 879,200 bytes
        "import rpel\n"
        "for here in ('1', '2'):\n"
        "    os.environ['LOCAL_WORLD_SIZE'] = here\n"
        "    try:\n"
        "        rpel.simulate('linear', nodes=8, byzantine=1, pull=4, b_hat=1, rounds=1, eval_size=50, "
        "out=None)\n"
        "        print('ran')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    placed = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **placed},
        capture_output=True,
        text=True,
        check=True,
    )
    one, two = done.stdout.splitlines()
    assert one == "ran"
    assert "for each of 2 workers" in two
