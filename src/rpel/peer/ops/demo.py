"""A network shown at work: real processes, real keys, real TLS on loopback, some peers hostile;
then plain averaging.

The same network runs twice from the same model with the same data and the same hostile peers, once with the
robust rule and once with the mean. How long a start and a round take depends on the machine, so one start is
measured first; if peers are not up when round 1 would begin, they are started again with more time.
"""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import SystemRandom
from statistics import fmean
from typing import Any

from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.ops.create import new, stall_proof
from rpel.peer.ops.drill import drill
from rpel.peer.ops.join import join
from rpel.peer.ops.watch import Observer, Seen, look
from rpel.planning import Plan
from rpel.processes import ChildError, Children, Stop, cores
from rpel.types import ROBUST_RULE

AVERAGING = "mean"
_DEADLINE = 0.75  # of a round: what follows it, aggregating and measuring, is short here
_ROUND = 1 / 14  # of what a peer's start takes: a round takes less than a third of that
_COMPILED = 8.0  # seconds: a start that took longer had to compile, or will not be quicker the next time
_ATTEMPTS = 3
_LOOK = 0.02
_OVERTIME = 60.0


@dataclass(frozen=True)
class Demonstration:
    """What is shown. ``period`` None: as short as this machine allows."""

    peers: int = 12
    byzantine: int = 2
    rounds: int = 30
    attack: str = "foe"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    no_shows: int | None = None
    period: float | None = None
    seed: int = 0

    @cached_property
    def plan(self) -> Plan:
        """The plan of both networks."""
        return stall_proof(self.peers, self.byzantine, self.rounds, no_shows=self.no_shows)


@dataclass(frozen=True)
class Scene:
    """A moment to be shown: which rule, what every member says, who is hostile, and which round it is."""

    rule: str
    seen: Sequence[Seen]
    hostile: frozenset[str]
    round: int
    rounds: int


Show = Callable[[Scene], None]
Say = Callable[[str], None]
Ends = tuple[list[float], dict[str, int]]
"""How the honest peers ended: the accuracy of each on all test examples,
and the outcomes of all their rounds."""


def demo(setting: Demonstration, folder: Path, show: Show, say: Say) -> dict[str, Any]:
    """Run both networks in ``folder``; returns the findings as plain JSON values."""
    plan = setting.plan
    drill(setting.attack, setting.parameters)
    began = time.monotonic()
    with Stop() as stop:
        say("measuring how long a peer takes to start")
        lead, period = _measured(setting, folder, stop)
        say(
            f"rounds of {period:.3g} s; {setting.peers} processes are started, round 1 begins in about "
            f"{lead:.0f} s"
        )
        robust, lead = _network(setting, ROBUST_RULE, folder / "robust", period, lead, show, say, stop)
        say("the same again with plain averaging")
        averaging, _ = _network(setting, AVERAGING, folder / "averaging", period, lead, show, say, stop)
    (accuracies, outcomes), (averaged, _) = robust, averaging
    return {
        **{key: getattr(setting, key) for key in ("peers", "byzantine", "rounds")},
        **{key: getattr(plan, key) for key in ("pull", "b_hat")},
        "attack": setting.attack,
        "accuracy_mean": fmean(accuracies),
        "accuracy_worst": min(accuracies),
        "accuracy_mean_averaging": fmean(averaged),
        "accuracy_worst_averaging": min(averaged),
        "outcomes": outcomes,
        "seconds": time.monotonic() - began,
    }


# --- how long things take here ------------------------------------------------------------------------------


def _measured(setting: Demonstration, folder: Path, stop: Stop) -> tuple[float, float]:
    """(seconds until all processes are up, seconds of a round),
    from one process that prepares as a peer does."""
    home = folder / "measured"
    paths = _founded(replace(setting, peers=4, byzantine=0), ROBUST_RULE, home, 60.0)
    for _ in range(2):  # the first may have to compile; what it compiled is kept
        began = time.monotonic()
        with Children(stop) as children:
            children.call("a peer that prepares", prepare, str(paths[0]), folder=home)
            while children.running():
                children.check()
                time.sleep(_LOOK)
            children.check()
        took = time.monotonic() - began
        if took < _COMPILED:
            break
    crowd = took * max(1.0, setting.peers / cores())
    return 3.0 + 1.2 * crowd, setting.period or max(1.0, _ROUND * crowd)


def prepare(path: str) -> None:
    """What a peer does before it listens."""
    from rpel.peer.api import learner_of
    from rpel.peer.core.protocol import make_ready
    from rpel.peer.node.node import Node

    node = Node(Config.load(path))
    terms = node.now.terms
    make_ready(terms.rule, terms.pull, node.layout.d, node.layout.dtype)
    learner_of(node.config, node.now, node.layout)


# --- one network --------------------------------------------------------------------------------------------


def _network(
    setting: Demonstration,
    rule: str,
    folder: Path,
    period: float,
    lead: float,
    show: Show,
    say: Say,
    stop: Stop,
) -> tuple[Ends, float]:
    """Found it, run it, and collect the ends; also how much lead the next one needs."""
    paths = _founded(setting, rule, folder, period)
    for attempt in range(1, _ATTEMPTS + 1):
        with Children(stop) as children, asyncio.Runner() as runner:
            began = time.monotonic()
            observer = _started(setting, paths, lead, children)
            try:
                if _all_ready(runner, observer, children, setting.peers - setting.byzantine):
                    took = time.monotonic() - began
                    _followed(setting, runner, observer, children, rule, show)
                    return _collected(children, setting), 1.0 + 1.2 * took
            finally:
                runner.run(observer.close())
        if attempt < _ATTEMPTS:
            lead *= 2
            say(f"not all peers were up in time: they are started again, {lead:.3g} s before round 1")
    raise ChildError(f"this machine is too busy: {setting.peers} peers were not up within {lead:.3g} s")


def _founded(setting: Demonstration, rule: str, folder: Path, period: float) -> list[Path]:
    """The files of a network: members.toml, the common model,
    and a folder with key and peer.toml for each peer."""
    folder.mkdir(parents=True)
    network = new(
        setting.plan,
        run=f"demo-{setting.seed}",
        seed=setting.seed,
        out=folder,
        epoch=time.time(),
        period=period,
        deadline=_DEADLINE * period,
        rule=rule,
        allow_private=True,
        linger=1.0,
    )
    members, paths = [], []
    for number, port in enumerate(free_ports(setting.peers), 1):
        home = folder / f"peer-{number}"
        url = f"https://127.0.0.1:{port}"
        joined = join(
            id=home.name, url=url, members=network.members, metrics_listen="127.0.0.1:0", folder=home
        )
        Config.load(joined.config).replace(log=home.resolve() / "rounds.jsonl").save(joined.config)
        members.append(joined.member)
        paths.append(joined.config)
    network.membership.replace(members=tuple(members)).save(network.members)
    return paths


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, below those that systems give to outgoing connections,
    which come and go."""
    found: list[int] = []
    ports = range(10_000, 32_768)
    for port in SystemRandom().sample(ports, len(ports)):
        if len(found) == count:
            return found
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    raise OSError(f"there are no {count} free ports on 127.0.0.1")


def _started(setting: Demonstration, paths: Sequence[Path], lead: float, children: Children) -> Observer:
    """Start everybody, with round 1 ``lead`` seconds from now; the last ones are hostile."""
    members = Config.load(paths[0]).members
    Membership.load(members).replace(epoch=time.time() + lead).save(members)
    honest = setting.peers - setting.byzantine
    allies = ",".join(path.parent.name for path in paths[honest:])
    hostile = ["--attack", setting.attack, "--allies", allies]
    hostile += [part for key, value in setting.parameters.items() for part in ("--param", f"{key}={value}")]
    for number, path in enumerate(paths):
        command = ["peer", "run"] if number < honest else ["red-team", *hostile]
        children.start(path.parent.name, [*command, "--config", str(path), "--json"], path.parent)
    return Observer.of(Config.load(paths[0]))


def _all_ready(runner: asyncio.Runner, observer: Observer, children: Children, honest: int) -> bool:
    """Wait until everybody answers and the honest ones are ready; False if that is not before round 1."""
    while observer.clock.position() < -0.2:
        children.check()
        members = runner.run(look(observer, within=min(1.0, -observer.clock.position())))
        if all(member.answered for member in members) and all(member.ready for member in members[:honest]):
            return True
        time.sleep(0.2)
    return False


def _followed(
    setting: Demonstration,
    runner: asyncio.Runner,
    observer: Observer,
    children: Children,
    rule: str,
    show: Show,
) -> None:
    """Show every moment until all have ended; who has ended is shown as it was last seen."""
    m = observer.now.membership
    hostile = frozenset(member.id for member in m.members[setting.peers - setting.byzantine :])
    over = (m.rounds + 1) * m.period + _OVERTIME
    last: dict[str, Seen] = {}
    while children.running():
        children.check()
        if observer.clock.position() > over:
            raise ChildError(f"{children.running()} of {setting.peers} peers do not end")
        for member in runner.run(look(observer, within=min(1.0, m.period / 2))):
            if member.answered or member.id not in last:
                last[member.id] = member
        show(
            Scene(rule, list(last.values()), hostile, min(max(observer.clock.round(), 0), m.rounds), m.rounds)
        )
        time.sleep(min(1.0, m.period / 4))
    children.check()


def _collected(children: Children, setting: Demonstration) -> Ends:
    accuracies, outcomes = [], Counter[str]()
    for child in children.all[: setting.peers - setting.byzantine]:
        try:
            summary = json.loads(child.output.splitlines()[-1])
            accuracies.append(float(summary["accuracy"]))
            outcomes.update(summary["outcomes"])
        except (IndexError, ValueError, KeyError, TypeError):
            raise ChildError(
                f"{child.name} ended without a result; its last lines:\n{child.last_lines}"
            ) from None
    return accuracies, dict(outcomes)
