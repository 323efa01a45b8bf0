"""Show a network at work: real processes, keys and TLS on this machine, with some peers hostile.

The same network runs twice from the same model with the same data and the same hostile peers, once with the
robust rule and once with the mean. How long a start and a round take depends on the machine, so one start is
measured first; if peers are not up when round 1 would begin, they are started again with more time.
"""

import asyncio
import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from rpel.peer.ops.status import MemberStatus, Observer, look
from rpel.planning import Plan
from rpel.processes import ChildError, Children, Stop, cores
from rpel.types import ROBUST_RULE

AVERAGING = "mean"
LOG = "rounds.jsonl"
_DEADLINE = 0.75  # of a round: what follows it, aggregating and measuring, is short here
_ROUND = 1 / 14  # of what a peer's start takes: a round takes less than a third of that
_ATTEMPTS = 3
_OVERTIME = 60.0


@dataclass(frozen=True)
class Demonstration:
    """What is shown. ``period`` None: as short as this machine allows."""

    peers: int = 12
    byzantine: int = 2
    rounds: int = 30
    attack: str = "foe"
    no_shows: int | None = None
    period: float | None = None
    seed: int = 0

    @property
    def honest(self) -> int:
        """How many peers are honest; the others come last."""
        return self.peers - self.byzantine

    @cached_property
    def plan(self) -> Plan:
        """The plan of both networks."""
        return stall_proof(self.peers, self.byzantine, self.rounds, no_shows=self.no_shows)


@dataclass(frozen=True)
class Frame:
    """A moment to be shown: the rule, every member, who is hostile, and the newest round all have measured.

    ``measured`` is (round, mean accuracy of the honest peers after it), (0, None) if there is none yet.
    """

    rule: str
    members: Sequence[MemberStatus]
    hostile: frozenset[str]
    round: int
    rounds: int
    measured: tuple[int, float | None]


@dataclass(frozen=True)
class _Stage:
    """What both networks share: the setting, and where progress goes."""

    setting: Demonstration
    show: Callable[[Frame], None]
    say: Callable[[str], None]
    stop: Stop


def demo(
    setting: Demonstration, folder: Path, show: Callable[[Frame], None], say: Callable[[str], None]
) -> dict[str, Any]:
    """Run both networks in ``folder``; returns the results as plain JSON values."""
    plan = setting.plan
    drill(setting.attack)
    began = time.monotonic()
    with Stop() as stop:
        stage = _Stage(setting, show, say, stop)
        say("measuring how long a peer takes to start")
        crowd = _measure_start(setting, folder / "measured", stop) * max(1.0, setting.peers / cores())
        period, lead = setting.period or max(1.0, _ROUND * crowd), 3.0 + 1.2 * crowd
        say(f"rounds of {period:.3g} s; round 1 of {setting.peers} processes begins in about {lead:.0f} s")
        robust, outcomes = _run_network(stage, ROBUST_RULE, folder / "robust", period, lead)
        say("the same again with plain averaging")
        averaged, _ = _run_network(stage, AVERAGING, folder / "averaging", period, lead)
    return {
        **{key: getattr(setting, key) for key in ("peers", "byzantine", "rounds")},
        **{key: getattr(plan, key) for key in ("pull", "b_hat")},
        "attack": setting.attack,
        "accuracy_mean": fmean(robust),
        "accuracy_worst": min(robust),
        "accuracy_mean_averaging": fmean(averaged),
        "accuracy_worst_averaging": min(averaged),
        "outcomes": outcomes,
        "seconds": time.monotonic() - began,
    }


def _measure_start(setting: Demonstration, folder: Path, stop: Stop) -> float:
    """Return the seconds that one process takes to prepare as a peer does."""
    path = write_network(replace(setting, peers=4, byzantine=0), ROBUST_RULE, folder, 60.0)[0]
    for _ in range(2):  # the first one may have to compile; what it compiled is kept
        began = time.monotonic()
        with Children(stop) as children:
            child = children.call("a peer that prepares", prepare, str(path), folder=folder)
            while child.poll() is None:
                children.check()
                time.sleep(0.02)
            children.check()
    return time.monotonic() - began


def prepare(path: str) -> None:
    """Do what a peer does before it listens."""
    from rpel.peer.api import learner_of
    from rpel.peer.core.protocol import make_ready
    from rpel.peer.node.node import Node

    node = Node(Config.load(path))
    terms = node.now.terms
    make_ready(terms.rule, terms.pull, node.layout.d, node.layout.dtype)
    learner_of(node.config, node.now, node.layout)


# --- one network --------------------------------------------------------------------------------------------


def _run_network(
    stage: _Stage, rule: str, folder: Path, period: float, lead: float
) -> tuple[list[float], dict[str, int]]:
    """Run a network to its end; returns the honest peers' accuracies and the outcomes of their rounds."""
    setting = stage.setting
    paths = write_network(setting, rule, folder, period)
    for attempt in range(_ATTEMPTS):
        lead *= 2 if attempt else 1
        with Children(stage.stop) as children, asyncio.Runner() as runner:
            observer = _start(setting, paths, lead, children)
            try:
                if _wait_ready(runner, observer, children, setting.honest):
                    _follow(stage, runner, observer, children, paths, rule)
                    _say_excluded(stage, paths)
                    return _collect(children, setting)
            finally:
                runner.run(observer.close())
        stage.say(f"not all peers were up within {lead:.3g} s")
    raise ChildError(f"this machine is too busy: {setting.peers} peers were not up within {lead:.3g} s")


def write_network(setting: Demonstration, rule: str, folder: Path, period: float) -> list[Path]:
    """Write members.toml, the common model, and for each peer a folder with its key and peer.toml."""
    folder.mkdir(parents=True)
    network = new(
        setting.plan, run=f"demo-{setting.seed}", seed=setting.seed, out=folder, epoch=time.time(),
        period=period, deadline=_DEADLINE * period, rule=rule, allow_private=True, linger=1.0,
    )  # fmt: skip
    members, paths = [], []
    for number, port in enumerate(free_ports(setting.peers), 1):
        home = folder / f"peer-{number}"
        url = f"https://127.0.0.1:{port}"
        joined = join(
            id=home.name, url=url, members=network.members, metrics_listen="127.0.0.1:0", folder=home
        )
        Config.load(joined.config).replace(log=home.resolve() / LOG).save(joined.config)
        members.append(joined.member)
        paths.append(joined.config)
    network.membership.replace(members=tuple(members)).save(network.members)
    return paths


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, below those that systems give to outgoing connections."""
    found: list[int] = []
    ports = range(10_000, 32_768)
    for port in SystemRandom().sample(ports, len(ports)):
        if len(found) == count:
            return found
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    raise OSError(f"there are no {count} free ports on 127.0.0.1")


def _start(setting: Demonstration, paths: Sequence[Path], lead: float, children: Children) -> Observer:
    """Start all peers, with round 1 ``lead`` seconds from now."""
    members = Config.load(paths[0]).members
    Membership.load(members).replace(epoch=time.time() + lead).save(members)
    allies = ",".join(path.parent.name for path in paths[setting.honest :])
    hostile = ["network", "drill", "--attack", setting.attack, "--allies", allies]
    for number, path in enumerate(paths):
        command = ["peer", "run"] if number < setting.honest else hostile
        children.start(path.parent.name, [*command, "--config", str(path), "--json"], path.parent)
    return Observer.of(Config.load(paths[0]))


def _wait_ready(runner: asyncio.Runner, observer: Observer, children: Children, honest: int) -> bool:
    """Wait until all peers answer and the honest ones are ready; False if round 1 begins first."""
    while observer.clock.position() < -0.2:
        children.check()
        members = runner.run(look(observer, within=min(1.0, -observer.clock.position())))
        if all(member.answered for member in members) and all(member.ready for member in members[:honest]):
            return True
        time.sleep(0.2)
    return False


def _follow(
    stage: _Stage,
    runner: asyncio.Runner,
    observer: Observer,
    children: Children,
    paths: Sequence[Path],
    rule: str,
) -> None:
    """Show every moment until all have ended; who has ended is shown as it was last seen."""
    m, setting = observer.now.membership, stage.setting
    hostile = frozenset(member.id for member in m.members[setting.honest :])
    last: dict[str, MemberStatus] = {}
    while children.running():
        children.check()
        if observer.clock.position() > (m.rounds + 1) * m.period + _OVERTIME:
            raise ChildError(f"{children.running()} of {setting.peers} peers do not end")
        for member in runner.run(look(observer, within=min(1.0, m.period / 2))):
            if member.answered or member.id not in last:
                last[member.id] = member
        round = min(max(observer.clock.round(), 0), m.rounds)
        measured = _measured(paths[: setting.honest])
        stage.show(Frame(rule, list(last.values()), hostile, round, m.rounds, measured))
        time.sleep(min(1.0, m.period / 4))
    children.check()


def _measured(paths: Sequence[Path]) -> tuple[int, float | None]:
    """Return the newest round after which all these peers measured their accuracy, and its mean."""
    scores: defaultdict[int, list[float]] = defaultdict(list)
    for path in paths:
        with suppress(OSError, ValueError):  # no line yet, or half a line
            for line in map(json.loads, (path.parent / LOG).read_text().splitlines()):
                if line.get("accuracy") is not None:
                    scores[line["round"]].append(line["accuracy"])
    complete = [round for round, values in scores.items() if len(values) == len(paths)]
    return (max(complete), fmean(scores[max(complete)])) if complete else (0, None)


def _say_excluded(stage: _Stage, paths: Sequence[Path]) -> None:
    """Say whom proofs of two different models in one round have excluded."""
    proofs = [file for path in paths for file in path.parent.glob("state/evidence/*.json")]
    if ids := sorted({file.stem.rpartition("-")[0] for file in proofs}):
        stage.say(f"excluded for signing two models of one round: {', '.join(ids)}")


def _collect(children: Children, setting: Demonstration) -> tuple[list[float], dict[str, int]]:
    accuracies, outcomes = [], Counter[str]()
    for child in children.all[: setting.honest]:
        try:
            summary = json.loads(child.output.splitlines()[-1])
            accuracies.append(float(summary["accuracy"]))
            outcomes.update(summary["outcomes"])
        except (IndexError, ValueError, KeyError, TypeError):
            raise ChildError(
                f"{child.name} ended without a result; its last lines:\n{child.last_lines}"
            ) from None
    return accuracies, dict(outcomes)
