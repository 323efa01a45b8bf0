"""A network of real peers in a folder: founded, started as processes, watched by their logs, broken,
and ended.

Each peer is a process that `rpel.processes.start` forks and that runs ``rpel peer run``, with its own
folder, key, address and state. Waiting means waiting for a log line, never for a time: what is
asserted must hold however slow the machine is.
"""

import http.client
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np

from rpel.peer.config import membership
from rpel.peer.core import wire
from rpel.peer.ops.create import new, stall_proof
from rpel.peer.ops.join import join
from rpel.peer.state import models as model_files
from rpel.processes import Child, start
from rpel.types import Models
from support.paths import TESTS
from support.process_faults import NAMESPACE
from support.waiting import PATIENCE, pace

PORT, METRICS = 7443, 9464


@dataclass
class Process:
    """One life of a peer, from its birth to its end."""

    child: Child
    lines: list[dict[str, Any]] = field(default_factory=list)
    deeds: list[dict[str, Any]] = field(default_factory=list)  # of a red team
    errors: list[str] = field(default_factory=list)
    open_pipes: int = 2

    @property
    def status(self) -> int | None:
        """How it ended, minus the signal's number if it was killed; None: it runs."""
        return self.child.poll()

    @property
    def pid(self) -> int:
        return self.child.pid


@dataclass(eq=False)
class Member:
    """A member, where its files lie, and the processes it has had."""

    number: int
    id: str
    folder: Path
    processes: list[Process] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "peer.toml"

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def running(self) -> bool:
        return bool(self.processes) and self.process.status is None

    @property
    def ended(self) -> bool:
        """Whether its process has ended and everything that it wrote has been read."""
        return not self.running and not self.process.open_pipes

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log over all lives."""
        return [line for process in self.processes for line in process.lines]

    @property
    def rounds(self) -> list[int]:
        return [line["round"] for line in self.lines]

    @property
    def last(self) -> int:
        return max(self.rounds, default=0)

    @property
    def errors(self) -> str:
        return "".join(line for process in self.processes for line in process.errors)

    def outcome(self, round: int) -> str:
        """How a round ended; "" if it has not, or was not played."""
        return next((str(line["outcome"]) for line in self.lines if line["round"] == round), "")


def loopback() -> str:
    """Three numbers of loopback addresses where nobody else is, so that ports need not be looked for."""
    return f"127.{secrets.randbelow(190) + 64}.{secrets.randbelow(256)}"


@dataclass(frozen=True)
class Plan:
    """What network to found. ``urls``: where members say they are; ``listen``: where they are,
    if that is elsewhere."""

    peers: int = 12
    byzantine: int = 2
    rounds: int = 100_000
    period: float = 1.5
    deadline: float = 1.0
    start: float = 4.0
    hyperparameters: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.5})
    urls: Callable[[int], str] | None = None
    listen: Callable[[int], str] | None = None
    namespace: Callable[[int], str] = lambda number: ""
    dtype: str = "float32"
    terms: dict[str, Any] = field(default_factory=dict)
    """Further keys of members.toml, such as its wire."""
    task: str = "support.quadratic:task"
    stretched: bool = True
    """By the machine's load, which a measurement must not be."""


def alone(**more: Any) -> Plan:
    """A network in which one peer plays its rounds although the others never start: nothing in it depends
    on how fast this machine is, once the peer is there at round 1."""
    times = {"period": 0.5, "deadline": 0.3, "start": 0.5 + pace(), "stretched": False}
    return Plan(**{"peers": 3, "byzantine": 0} | times | more)


class ProcessNetwork:
    """The peers of one network, to begin soon; a context manager that kills every process that is left."""

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        self.folder, self.plan = folder, plan or Plan()
        self.news = threading.Condition()
        self._address = loopback()
        self.membership, self.members = self._found()
        self.layout = model_files.read_layout(folder / membership.INIT_FILE)

    def url(self, number: int) -> str:
        return self.plan.urls(number) if self.plan.urls else f"https://{self._address}.{number + 1}:{PORT}"

    def listen(self, number: int) -> str:
        """Where a member listens."""
        return self.plan.listen(number) if self.plan.listen else self.url(number).removeprefix("https://")

    def metrics(self, number: int) -> str:
        """Where a member's metrics are."""
        return f"{self.listen(number).rpartition(':')[0]}:{METRICS}"

    def put_in_force(self, members: Path) -> None:
        """From now on this membership is the network's."""
        self.membership = membership.Membership.load(members)

    def page(self, member: Member, path: str, host: str = "", patience: float = PATIENCE) -> tuple[int, str]:
        """The status and text of one of a member's pages, asked for under this host name."""
        address = self.metrics(member.number)
        with closing(http.client.HTTPConnection(address, timeout=patience)) as connection:
            connection.request("GET", path, headers={"Host": host or address})
            with connection.getresponse() as response:
                return response.status, response.read().decode()

    def _found(self) -> tuple[membership.Membership, list[Member]]:
        d = int(self.plan.hyperparameters.get("d", 64))
        initial = np.zeros(d, self.plan.dtype)
        model_files.save(self.folder / "model.safetensors", wire.Layout.of({"x": initial}), initial)
        stretch = pace() if self.plan.stretched else 1.0
        terms = dict(self.plan.terms)
        late = terms.pop("no_shows", None)
        network = new(
            stall_proof(self.plan.peers, self.plan.byzantine, self.plan.rounds, no_shows=late),
            task=self.plan.task,
            model=self.folder / "model.safetensors",
            out=self.folder,
            epoch=time.time() + self.plan.start * stretch,
            period=self.plan.period * stretch,
            deadline=self.plan.deadline * stretch,
            hyperparameters=self.plan.hyperparameters,
            allow_private=True,
            **terms,
        )
        members = [Member(i, f"peer-{i:02}", self.folder / f"peer-{i:02}") for i in range(self.plan.peers)]
        entries = [self._join(member) for member in members]
        found = network.membership.replace(members=tuple(entries))
        found.save(self.folder / "members.toml")
        for member in members:
            for name in ("members.toml", membership.INIT_FILE):
                os.link(self.folder / name, member.folder / name)
        return found, members

    def _join(self, member: Member) -> membership.Member:
        member.folder.mkdir()
        joined = join(
            id=member.id,
            url=self.url(member.number),
            members=member.folder / "members.toml",
            task=self.plan.task,
            listen=self.listen(member.number),
            metrics_listen=self.metrics(member.number),
            folder=member.folder,
        )
        with member.config.open("a") as file:
            file.write('\nlog = "-"\n')  # the rounds are waited for by their lines
        return joined.member

    # --- processes ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT, *self.members)
        self.kill(*self.members)

    def start(
        self, *members: Member, environment: dict[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> None:
        """Start processes for these members; for all of them if none is named."""
        for member in members or self.members:
            command = arguments or ("peer", "run", "--config", str(member.config))
            self._start(member, command, environment or {})

    def _start(self, member: Member, command: Sequence[str], environment: dict[str, str]) -> None:
        pipes = [os.pipe(), os.pipe()]
        out, err = (Path(f"/proc/self/fd/{write}") for _, write in pipes)
        more = {**environment, NAMESPACE: self.plan.namespace(member.number)}
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with patch.dict(os.environ, PYTHONPATH=path):
            process = Process(start(command, out, err, more, module="support.process_faults"))
        member.processes.append(process)
        for (read, write), heard in zip(pipes, (self._line, self._error), strict=True):
            os.close(write)
            threading.Thread(target=self._read, args=(read, process, heard), daemon=True).start()

    def _read(self, descriptor: int, process: Process, heard: Callable[[Process, str], None]) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
            for line in file:
                with self.news:
                    heard(process, line)
                    self.news.notify_all()
        with self.news:
            process.open_pipes -= 1
            self.news.notify_all()

    def _line(self, process: Process, line: str) -> None:
        if line.startswith('{"time"'):
            process.lines.append(json.loads(line))
        elif line.startswith('{"round"'):
            process.deeds.append(json.loads(line))

    def _error(self, process: Process, line: str) -> None:
        process.errors.append(line)

    def signal(self, number: int, *members: Member) -> None:
        """Send a signal to members' processes."""
        for member in members:
            if member.running:
                os.kill(member.process.pid, number)

    def kill(self, *members: Member) -> None:
        """kill -9, and wait for their end."""
        self.signal(signal.SIGKILL, *members)
        self.wait(lambda: not any(member.running for member in members), "killed processes to end")

    @contextmanager
    def stopped(self, *members: Member) -> Iterator[None]:
        """SIGSTOP while inside, SIGCONT after."""
        self.signal(signal.SIGSTOP, *members)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT, *members)

    # --- waiting --------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Wait until the logs make the condition true."""
        until = time.monotonic() + patience
        with self.news:
            while not condition():
                if time.monotonic() > until:
                    raise AssertionError(f"waited {patience:g} s for {what}:\n{self.picture()}")
                self.news.wait(0.05)  # the end of a process is no line

    def wait_round(self, round: int, *members: Member) -> None:
        """Wait until these members (or all that run) have ended this round or a later one."""
        some = members or tuple(member for member in self.members if member.running)
        self.wait(lambda: all(member.last >= round for member in some), f"round {round}")

    def wait_aggregated(self, *members: Member, times: int = 1) -> None:
        """Wait until each of these members (or all that run) has aggregated so many times from now on."""
        some = members or tuple(member for member in self.members if member.running)
        seen = [(member, len(member.lines)) for member in some]

        def enough(member: Member, already: int) -> bool:
            return [line["outcome"] for line in member.lines[already:]].count("aggregated") >= times

        self.wait(lambda: all(enough(*one) for one in seen), f"{times} aggregated rounds")

    def picture(self) -> str:
        """The last of every log, for whoever reads a failure."""
        rows = []
        for member in self.members:
            status = [process.status for process in member.processes]
            ends = " ".join(
                f"{line['round']}:{line['outcome']}:{line['received']}" for line in member.lines[-6:]
            )
            rows.append(f"{member.id} {status} {ends} {member.errors[-600:]}")
        return "\n".join(rows)


def check_invariants(net: ProcessNetwork, *members: Member) -> None:
    """What the logs of all honest members must show, whatever happened and however long it took."""
    pull, b_hat = net.membership.pull, net.membership.b_hat
    for member in members or net.members:
        for process in member.processes:
            rounds = [line["round"] for line in process.lines]
            assert rounds == sorted(set(rounds)), f"{member.id} played a round twice: {rounds}"
        assert member.rounds == sorted(member.rounds), f"{member.id} went back: {member.rounds}"
        for line in member.lines:
            assert line["asked"] in (pull, 0), line
            assert line["trim"] == b_hat, line
            assert line["received"] == list(line["results"].values()).count("ok") <= line["asked"], line
            assert line["outcome"] == "local_only" or line["received"] >= 2 * b_hat, line
        assert "Traceback" not in member.errors, member.errors


def heard(lines: list[dict[str, Any]], *others: Member) -> set[str]:
    """What came of asking the others, in these log lines."""
    names = {other.id for other in others}
    return {result for line in lines for name, result in line["results"].items() if name in names}


def half_step(net: ProcessNetwork, member: Member, round: int | None = None) -> Models | None:
    """A member's half-step of a round as it is on its disk, the newest if none is named;
    None if there is none."""
    state = member.folder / "state"
    if round is None:
        round = max(int(path.stem.partition("-")[2]) for path in state.glob("half-*.json"))
    try:
        body = (state / f"half-{round}.safetensors").read_bytes()
    except FileNotFoundError:
        return None
    return np.frombuffer(body[len(net.layout.header) :], net.layout.dtype) if body else None
