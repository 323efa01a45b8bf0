"""Whole peers on loopback: each a Node in a thread of its own, over real TLS,
with files as operators have them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rpel import certificates
from rpel.peer.config.membership import INIT_FILE, Member, Membership
from rpel.peer.config.settings import Config
from rpel.peer.core import wire
from rpel.peer.learn.learner import Blob, Learner
from rpel.peer.net import tls
from rpel.peer.node.node import Node, Round
from rpel.peer.ops.create import draft, stall_proof
from rpel.peer.ops.demo import free_ports
from rpel.types import Measured, Models
from support.waiting import PATIENCE, pace

D = 6
LAYOUT = wire.Layout(("w", "b"), ((2, 2), (2,)), np.dtype("float64"))


class QuadraticLearner:
    """f_i(x) = ‖x − target_i‖² / 2 in float64, one gradient step of length 1/2,
    and a count of steps as local state."""

    def __init__(self, number: int) -> None:
        self.target = np.arange(D) + 0.1 * number
        self.steps = 0
        self.x: Models = np.zeros(D)
        self.restored = 0

    def prepare(self, x: Models, scratch: Models) -> None:
        pass

    def load(self, round: int, x: Models, fresh: bool) -> None:
        self.x = x.copy()

    def half(self, out: Models, scratch: Models) -> None:
        scratch.fill(np.nan)
        out[:] = self.x - 0.5 * (self.x - self.target)
        self.steps += 1

    def state(self) -> Blob:
        return str(self.steps).encode()

    def restore(self, blob: Blob) -> None:
        self.steps = self.restored = int(bytes(blob))

    def buffers(self) -> dict[str, Models]:
        return {}

    def measure(self, x: Models, round: int, last: bool) -> Measured:
        return Measured(1.0 if last else None)


class Measuring(QuadraticLearner):
    """Says how good its model is after every round."""

    def measure(self, x: Models, round: int, last: bool) -> Measured:
        return Measured(1 - 1 / (1 + round), 1 / round)


def write_init(folder: Path, layout: wire.Layout, x: Models) -> str:
    """init.safetensors; returns its hash."""
    (folder / INIT_FILE).write_bytes(layout.header + bytes(wire.raw(layout, x)))
    return wire.digest(layout, x)


@dataclass
class NetworkFiles:
    """The files of n peers: members.toml and init.safetensors in ``folder``,
    the rest in a folder for each peer."""

    folder: Path
    configs: list[Config]
    membership: Membership


def found(
    folder: Path,
    n: int = 4,
    *,
    rounds: int = 6,
    period: float = 0.5,
    soon: float = 1.0,
    byzantine: int = 0,
    layout: wire.Layout = LAYOUT,
    initial: Models | None = None,
    task: str = "mnist-sample",
    **terms: Any,
) -> NetworkFiles:
    """Keys, certificates, peer.toml files and a members.toml whose round 1 begins ``soon`` seconds from now.

    Periods of seconds are those of a free machine, stretched by its load.
    """
    stretch = pace() if period < 60 else 1.0
    period, soon = period * stretch, soon * stretch
    x = np.zeros(layout.d, layout.dtype) if initial is None else initial
    plan = stall_proof(n, byzantine, rounds, no_shows=terms.pop("no_shows", None))
    terms = {"run": "consortium", "linger": 0.0, "allow_private": True, **terms}
    incomplete = draft(
        plan,
        epoch=time.time() + soon,
        period=period,
        deadline=0.8 * period,
        model_header_sha256=layout.sha256,
        init_sha256=write_init(folder, layout, x),
        **terms,
    )
    configs, members = [], []
    for i, port in enumerate(free_ports(n)):
        home = folder / f"peer-{i}"
        secret, pem = certificates.create(f"peer-{i}")
        tls.write_key(home / "peer.key", secret)
        (home / "peer.crt").write_text(pem)
        text = (
            f'id = "peer-{i}"\nmembers = "../members.toml"\nlisten = "127.0.0.1:{port}"\nlog = '
            '"rounds.jsonl"\n'
        )
        (home / "peer.toml").write_text(text + f'metrics_listen = "127.0.0.1:0"\ntask = "{task}"\n')
        configs.append(Config.load(home / "peer.toml"))
        members.append(Member.of(f"peer-{i}", f"https://127.0.0.1:{port}", pem))
    whole = incomplete.replace(members=tuple(members))
    whole.save(folder / "members.toml")
    return NetworkFiles(folder, configs, whole)


@dataclass
class Running:
    """One peer in its thread: the rounds it yielded, its learner, and what it ended with."""

    node: Node
    learner: Learner
    rounds: list[Round] = field(default_factory=list)
    error: BaseException | None = None
    entered: threading.Event = field(default_factory=threading.Event)

    def start(self, visit: Callable[["Running", Round], bool] | None = None) -> "Running":
        """Live until the end, or until ``visit(self, round)`` says True:
        then the loop is left at that round."""
        self.thread = threading.Thread(target=self._live, args=(visit,), daemon=True)
        self.thread.start()
        return self

    def _live(self, visit: Callable[["Running", Round], bool] | None) -> None:
        try:
            with self.node:
                self.entered.set()
                for round in self.node.live(self.learner):
                    self.rounds.append(round)
                    if visit is not None and visit(self, round):
                        break
        except BaseException as error:
            self.error = error
        finally:
            self.entered.set()

    def join(self) -> "Running":
        """Wait for the end; what went wrong in the thread is raised here."""
        self.thread.join(timeout=PATIENCE)
        assert not self.thread.is_alive(), "the peer does not end"
        if self.error is not None:
            raise self.error
        return self


@contextmanager
def ended(peers: list[Running]) -> Iterator[list[Running]]:
    """Peers that are stopped at the end, whatever happens."""
    try:
        yield peers
    finally:
        for peer in peers:
            if peer.thread.is_alive():
                peer.entered.wait(PATIENCE)
                peer.node.stop()
        for peer in peers:
            peer.thread.join(PATIENCE)
