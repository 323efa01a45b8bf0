"""Faults that only the process itself can have, put in from outside by environment variables;
rpel knows none of them.

``RPEL_TEST_DIE`` = "point:round": kill this process at that point of that round or the first after it where
there is one, as ``kill -9`` would.
``RPEL_TEST_WALL`` = seconds: the wall clock is wrong by so much from the start. SIGUSR1 and SIGUSR2 set it an
hour forward and back while the process runs. ``RPEL_TEST_TIMES`` = 1: not a fault; standard output tells when
each round was published and when its pulls ended, in seconds of the machine's monotonic clock.
``RPEL_TEST_NAMESPACE``: not a fault; the network namespace in which the process runs.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rpel.cli import main
from rpel.learning import MomentumSGD
from rpel.peer.core.protocol import Publish, Pull, Save, Tell
from rpel.peer.learn.learner import TaskLearner
from rpel.peer.net.client import RemoteMember
from rpel.peer.node.node import Node
from rpel.peer.state import store

NAMESPACE = "RPEL_TEST_NAMESPACE"
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
POINTS = (
    "before the local step",
    "in the local step",
    "while the half-step is being written",
    "on disk and not published",
    "published and nothing pulled",
    "between two answers",
    "aggregated and not saved",
    "saved and not reported",
)


def prepare() -> None:
    """Read the environment and do what it says."""
    if namespace := os.environ.get(NAMESPACE):
        _enter(namespace)
    _wall(float(os.environ.get("RPEL_TEST_WALL", "0")))
    if planned := os.environ.get("RPEL_TEST_DIE"):
        point, _, round = planned.rpartition(":")
        die_at(point, int(round))
    if os.environ.get("RPEL_TEST_TIMES"):
        _tell_times()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, round: int) -> None:
    """Arrange for the death of this process."""
    {
        "before the local step": lambda: _before_load(round),
        "in the local step": lambda: _in_the_step(round),
        "while the half-step is being written": lambda: _while_writing(round),
        "on disk and not published": lambda: _at(Publish, lambda want: want.round >= round),
        "published and nothing pulled": lambda: _at(Pull, lambda want: want.round >= round),
        "between two answers": lambda: _between(round),
        "aggregated and not saved": lambda: _at(Save, lambda want: want.checkpoint.round >= round),
        "saved and not reported": lambda: _at(Tell, lambda want: want.report.round >= round),
    }[point]()


def _at(kind: type, due: Callable[[Any], bool]) -> None:
    """Die when the life wants this, before it is done."""
    usual = Node.answer

    def answer(self: Node, effect: Any, learner: Any) -> Any:
        if isinstance(effect, kind) and due(effect):
            die()
        return usual(self, effect, learner)

    Node.answer = answer  # type: ignore[method-assign]


def _tell_times() -> None:
    usual = Node.answer
    published = [0.0]

    def answer(self: Node, effect: Any, learner: Any) -> Any:
        found = usual(self, effect, learner)
        if isinstance(effect, Publish):
            published[0] = time.monotonic()
        elif isinstance(effect, Pull):
            times = {"round": effect.round, "published": published[0], "pulled": time.monotonic()}
            print(json.dumps(times), flush=True)
        return found

    Node.answer = answer  # type: ignore[method-assign]


def _before_load(round: int) -> None:
    usual = TaskLearner.load

    def load(self: TaskLearner, t: int, x: Any, fresh: bool) -> None:
        if t >= round:
            die()
        usual(self, t, x, fresh)

    TaskLearner.load = load  # type: ignore[method-assign, assignment]


def _in_the_step(round: int) -> None:
    usual = MomentumSGD.__call__

    def step(self: MomentumSGD, x: Any, state: Any, nodes: Any, t: int, out: Any = None) -> Any:
        found = usual(self, x, state, nodes, t, out)
        if t >= round:
            die()
        return found

    MomentumSGD.__call__ = step  # type: ignore[method-assign]


def _while_writing(round: int) -> None:
    """Half of the record's bytes are in its temporary file."""
    usual = store.atomic  # type: ignore[attr-defined]

    @contextmanager
    def atomic(path: Path, *rest: Any, **options: Any) -> Iterator[IO[bytes]]:
        with usual(path, *rest, **options) as file:
            if path.match("half-*.json") and int(path.stem.partition("-")[2]) >= round:
                file.write(b"half of a record")
                file.flush()
                die()
            yield file

    store.atomic = atomic  # type: ignore[attr-defined]


def _between(round: int) -> None:
    """The third answer has just come."""
    usual, answered = RemoteMember.fetch, []

    async def fetch(self: RemoteMember, t: int, *rest: Any) -> Any:
        answer = await usual(self, t, *rest)
        if t >= round and answer.result == "ok":
            answered.append(self.number)
            if len(answered) == 3:
                die()
        return answer

    RemoteMember.fetch = fetch  # type: ignore[method-assign, assignment]


def _wall(wrong_by: float) -> None:
    """A wall clock that can be set."""
    right, error = time.time, [wrong_by]

    def shift(seconds: float) -> Callable[[int, Any], None]:
        return lambda *_: error.append(error.pop() + seconds)

    time.time = lambda: right() + error[0]
    signal.signal(signal.SIGUSR1, shift(3600.0))
    signal.signal(signal.SIGUSR2, shift(-3600.0))


def _enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the namespace {namespace}")
    hosts = f"/etc/netns/{namespace}/hosts"
    if os.path.exists(hosts):  # as `ip netns exec` does it
        libc.unshare(CLONE_NEWNS)
        subprocess.run(["mount", "--make-rslave", "/"], check=True)
        subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


if __name__ == "__main__":
    prepare()
    main(sys.argv[1:])
