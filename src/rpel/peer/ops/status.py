"""Ask every member of a network how it is, with one's own key.

Members may be hostile. What they say is bounded and parsed by kind, none of it is printed as text, and what
is shown of a member is its own claim, except for what this machine measured: reachability, clock and speed.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rpel.certificates import check_id
from rpel.peer.api import learner_of
from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config, listen_address
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.wire import Layout
from rpel.peer.net.client import Answer, Client, RemoteMember, version_of
from rpel.peer.net.snapshot import Snapshot, take
from rpel.peer.ops.create import MARGIN
from rpel.peer.state.memberships import MembershipWatcher, in_force
from rpel.peer.state.models import initial_model
from rpel.planning.traffic import pullers
from rpel.types import Models, Outcome, PullResult

SHORTEST_PERIOD = 1.0
"""No shorter period is suggested, in seconds: clocks, disks and busy machines need that much."""

_LARGEST = 10**12
_MOST_EXCLUDED = 1000
_HASH = re.compile("[0-9a-f]{64}")
_CLOCK = 0.1  # of a period: from there on a member's rounds begin noticeably elsewhere
_TOO_MANY = 429
_CALL = 5.0  # seconds for a connection


@dataclass
class Observer:
    """A member that asks the others in its own name and takes no part in rounds."""

    config: Config
    watcher: MembershipWatcher
    now: Snapshot
    layout: Layout
    initial: Models
    clock: RoundClock
    client: Client

    @classmethod
    def of(cls, config: Config) -> "Observer":
        """Read and check everything that a peer.toml names; ValueError unless its key is a member's."""
        watcher = MembershipWatcher(config)
        now = take(config, in_force(config, watcher))
        clock = RoundClock(now.membership.timetable, wall=time.time, ticks=time.monotonic)
        layout, initial = initial_model(config, now.membership)
        return cls(config, watcher, now, layout, initial, clock, Client(layout, clock.position))

    def follow(self) -> None:
        """Take over a membership that has come into force; ValueError if this is no member of it."""
        coming = self.watcher.due(
            self.now.membership, self.clock.round(), self.clock.position(), at_start=True
        )
        if coming is not None:
            self.now, self.clock.timetable = take(self.config, coming), coming.timetable
            self.client.prune(self.now)

    def member(self, number: int) -> RemoteMember:
        """Return a member, to be asked."""
        return self.client.member(self.now, number)

    @property
    def over(self) -> bool:
        """Whether the last round has ended."""
        return self.clock.round() > self.now.membership.rounds

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()


class State(StrEnum):
    """How a member is: by its own word, why it gave none, or what is wrong with what it serves."""

    STARTING = "starting"
    TRAINING = "training"
    FROZEN = "frozen"
    FINISHED = "finished"
    OTHER_MEMBERSHIP = "other membership"
    OTHER_MODEL = "other model"
    WRONG_CLOCK = "wrong clock"
    LATE = "late"
    REFUSED = "refused"
    MALFORMED = "malformed"
    UNREACHABLE = "unreachable"


_ANSWERED = (State.STARTING, State.TRAINING, State.FROZEN, State.FINISHED)
_REMARKS = {
    State.FROZEN: "too few members answer it: ask its operator for /readyz",
    State.LATE: "it is reachable, but did not answer in time",
    State.REFUSED: "it refuses to answer",
    State.MALFORMED: "what it answers is not what a peer of this network answers",
    State.UNREACHABLE: "it cannot be reached: is it running, is the url right, is the port open?",
}


@dataclass(frozen=True)
class MemberStatus:
    """One member at one moment.

    After the last round peers leave, so one that cannot be reached then is taken to have finished.

    Attributes:
        degraded: Rounds in a row that ended with the half-step alone, for lack of answers.
        excluded: Members of whom it says that it has a proof against their key.
        ready: Whether it has compiled all it needs and agreed on the time.
        coming: The hash of the membership that it will change to; "" if none is announced there.
        clock_offset: Seconds that its clock is ahead of this one; None if it was not measured.
        seconds: How long a half-step takes from there; None if it was not measured.
        reaches_you: Whether it could call back; None if it was not asked.
    """

    id: str
    state: State
    url: str = ""
    round: int = 0
    accuracy: float | None = None
    pulls: Mapping[str, int] = field(default_factory=dict)
    degraded: int = 0
    caught_up: int = 0
    excluded: tuple[str, ...] = ()
    ready: bool = False
    version: str = ""
    coming: str = ""
    clock_offset: float | None = None
    seconds: float | None = None
    megabytes_per_second: float | None = None
    reaches_you: bool | None = None
    remark: str = ""

    @property
    def answered(self) -> bool:
        """Whether it said anything that can be shown."""
        return self.state in _ANSWERED

    @property
    def reachable(self) -> bool:
        """Whether anything answered at its address."""
        return self.state is not State.UNREACHABLE

    @property
    def same_membership(self) -> bool | None:
        """Whether it holds the same members.toml; None if it did not say."""
        if self.state is State.OTHER_MEMBERSHIP:
            return False
        return True if self.answered or self.state in (State.OTHER_MODEL, State.WRONG_CLOCK) else None

    @property
    def well(self) -> bool:
        """Whether it can take part in rounds."""
        return self.answered and self.state is not State.FROZEN

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        names = ("reachable", "same_membership", "well")
        return asdict(self) | {name: getattr(self, name) for name in names}


async def look(observer: Observer, within: float = 3.0) -> list[MemberStatus]:
    """Ask all members at once, this one included; one without an answer in that time is unreachable."""
    deadline = asyncio.get_running_loop().time() + within
    m = observer.now.membership
    answers = await asyncio.gather(*(observer.member(number).status(deadline) for number in range(m.nodes)))
    pairs = zip(m.members, answers, strict=True)
    return [
        replace(parse_status(member.id, answer, m.rounds, observer.over), url=member.url)
        for member, answer in pairs
    ]


def parse_status(
    id: str, status: Mapping[str, Any] | Answer, rounds: int, over: bool = False
) -> MemberStatus:
    """Read a member's answer; one that makes no sense is "malformed" and nothing else of it is kept.

    >>> one = parse_status("a", {"round": 7, "accuracy": 0.5, "pulls": {"ok": 12}}, rounds=9)
    >>> one.state.value, one.round, one.pulls["ok"], one.pulls["late"]
    ('training', 7, 12, 0)
    >>> parse_status("b", {"round": "7" * 1000}, rounds=9).state.value
    'malformed'
    >>> parse_status("c", Answer(PullResult.LATE), rounds=9).state.value
    'late'
    """
    if isinstance(status, Answer):
        if over and status.result is PullResult.UNREACHABLE:
            return MemberStatus(id, State.FINISHED)
        if status.membership:
            held = f"it holds another members.toml (hash {status.membership[:12]}): compare the two files"
            return MemberStatus(id, State.OTHER_MEMBERSHIP, remark=held)
        state = State(status.result.value)
        remark = _REMARKS[state] + (f" ({status.reason})" if status.reason else "")
        return MemberStatus(id, state, remark=remark)
    try:
        round, frozen = _count(status, "round"), status.get("frozen") is True
        outcomes, pulls = _counts(status, "outcomes", Outcome), _counts(status, "pulls", PullResult)
        accuracy, excluded = _share(status.get("accuracy")), _ids(status.get("excluded", []))
    except ValueError:
        return MemberStatus(id, State.MALFORMED, remark=_REMARKS[State.MALFORMED])
    state = State.FINISHED if round >= rounds else State.TRAINING
    state = State.FROZEN if frozen else State.STARTING if not round else state
    coming = str(status.get("coming", ""))
    return MemberStatus(
        id, state, round=round, accuracy=accuracy, pulls=pulls, degraded=outcomes["local_only"],
        caught_up=outcomes["caught_up"], excluded=excluded, ready=status.get("ready") is True,
        version=version_of(status.get("version")), coming=coming if _HASH.fullmatch(coming) else "",
        remark=_REMARKS.get(state, ""),
    )  # fmt: skip


def remember(before: Sequence[MemberStatus], seen: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Return what was seen, with the last numbers of members that have finished and left.

    >>> last, gone = MemberStatus("a", State.TRAINING, round=9), MemberStatus("a", State.FINISHED)
    >>> remember([last], [gone])[0].round, remember([last], [gone])[0].state.value
    (9, 'finished')

    A peer may leave before the time of the last round is over:

    >>> finished = replace(last, state=State.FINISHED)
    >>> remember([finished], [MemberStatus("a", State.UNREACHABLE)])[0].state.value
    'finished'
    """
    known = {member.id: member for member in before if member.round}
    return [_last_known(known[member.id], member) if member.id in known else member for member in seen]


def _last_known(last: MemberStatus, now: MemberStatus) -> MemberStatus:
    left = now.state is State.FINISHED or (now.state is State.UNREACHABLE and last.state is State.FINISHED)
    return replace(last, state=State.FINISHED) if left and not now.round else now


def excluded(seen: Sequence[MemberStatus], byzantine: int) -> set[str]:
    """Return the members against whom more than b others say that they hold a proof: one of these is honest.

    >>> sure = MemberStatus("a", State.TRAINING, excluded=("c",))
    >>> excluded([sure, MemberStatus("b", State.TRAINING)], byzantine=1), excluded([sure, sure], byzantine=1)
    (set(), {'c'})
    """
    counts = Counter(id for member in seen for id in member.excluded if id != member.id)
    return {id for id, count in counts.items() if count > byzantine}


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 0)
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(key)
    return value


def _counts(status: Mapping[str, Any], key: str, names: Iterable[str]) -> dict[str, int]:
    table = status.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(key)
    return {str(name): _count(table, name) for name in names}


def _ids(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MOST_EXCLUDED:
        raise ValueError("excluded")
    return tuple(sorted({check_id(id if isinstance(id, str) else "") for id in value}))


def _share(value: object) -> float | None:
    if value is None:
        return None
    # NaN fails the comparison, too
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError("accuracy")
    return float(value)


# --- measured: clocks, speeds, and whether others reach this peer -------------------------------------------


@dataclass(frozen=True)
class Report:
    """All members but oneself, and whether rounds can work.

    Attributes:
        suggested_period: The shortest period that the measured pulls allow; None if none was measured.
        running: Whether the own peer listens, without which nobody can call back.
    """

    members: tuple[MemberStatus, ...]
    period: float
    byzantine: int
    step_seconds: float | None
    suggested_period: float | None
    running: bool = False

    @property
    def long_enough(self) -> bool:
        """Whether the network's period is no shorter than what was measured; True if nothing was."""
        return self.suggested_period is None or self.period >= self.suggested_period

    @property
    def well(self) -> bool:
        """Whether everybody is well, reaches this peer (but for b liars), and the period is long enough."""
        unreached = sum(member.reaches_you is False for member in self.members) if self.running else 0
        return self.long_enough and unreached <= self.byzantine and all(m.well for m in self.members)

    @property
    def called(self) -> list[bool]:
        """Return for each member that was asked to call back whether it could."""
        return [member.reaches_you for member in self.members if member.reaches_you is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        members = [member.to_dict() for member in self.members]
        return asdict(self) | {"members": members, "margin": MARGIN, "well": self.well}


async def measure(
    observer: Observer, *, within: float = 5.0, timeout: float = 60.0, step_seconds: float | None = None
) -> Report:
    """Ask all members, then pull the common initial model from one after the other.

    That model is as large as what travels in every round. If the own peer runs, the others are asked to call
    it back.

    Args:
        observer: The member that asks.
        within: Seconds in which members have to answer.
        timeout: Seconds that a model may take.
        step_seconds: How long the local steps of a round take, if that is known.
    """
    m, loop = observer.now.membership, asyncio.get_running_loop()
    seen = await look(observer, within)
    others = [number for number in range(m.nodes) if number != observer.now.me]
    members = [seen[number] for number in others]
    for i, number in enumerate(others):
        if members[i].answered:
            members[i] = await _pull(observer, number, members[i], loop.time() + timeout)
    running = await _listens(observer.config.listen)
    if running:
        calls = (_call_back(observer, *one) for one in zip(others, members, strict=True))
        members = list(await asyncio.gather(*calls))
    suggested = suggest_period(m, [member.seconds for member in members], step_seconds)
    return Report(tuple(members), m.period, m.byzantine, step_seconds, suggested, running)


async def _pull(observer: Observer, number: int, member: MemberStatus, deadline: float) -> MemberStatus:
    """Measure how long a model takes, whether it is the right one, and what time it is there."""
    row = np.empty_like(observer.initial)
    began = time.perf_counter()
    answer = await observer.member(number).fetch(0, row, deadline)
    taken = time.perf_counter() - began
    if answer.status == _TOO_MANY:
        remark = "its speed was not measured: it sends each member the model twice only"
        return replace(member, remark=remark)
    if answer.result is not PullResult.OK:
        remark = f"it did not send the common initial model: {answer.result}, {answer.reason}"
        return replace(member, state=State(answer.result.value), remark=remark)
    layout, period, offset = observer.layout, observer.now.membership.period, answer.offset
    member = replace(
        member,
        clock_offset=offset,
        seconds=taken * layout.size / layout.exact.size,  # of a half-step, which may be coded
        megabytes_per_second=layout.exact.size / taken / 1e6,
    )
    if not np.array_equal(row, observer.initial, equal_nan=True):
        remark = "its initial model is another one: give it the init.safetensors that came with members.toml"
        return replace(member, state=State.OTHER_MODEL, remark=remark)
    if offset is None or abs(offset) > _CLOCK * period:
        way = "ahead" if (offset or 0.0) > 0 else "behind"
        remark = "it does not tell its clock"
        if offset is not None:
            share = abs(offset) / period
            remark = f"its clock is {abs(offset):.3g} s {way}, {share:.2g} of a round: set it by NTP"
        return replace(member, state=State.WRONG_CLOCK, remark=remark)
    return member


async def _listens(listen: str) -> bool:
    """Return whether the own peer runs."""
    host, port = listen_address(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CALL)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _call_back(observer: Observer, number: int, member: MemberStatus) -> MemberStatus:
    """Ask a member whether it reaches this one."""
    if not member.well:
        return member
    reply = await observer.member(number).reach(asyncio.get_running_loop().time() + 3 * _CALL)
    if isinstance(reply, Answer) or type(reply.get("reached")) is not bool:
        return member  # it was asked a moment ago
    remark = member.remark if reply["reached"] else "it does not reach you"
    return replace(member, reaches_you=reply["reached"], remark=remark)


def suggest_period(
    m: Membership, seconds: Iterable[float | None], step_seconds: float | None
) -> float | None:
    """Return the shortest period in which a local step and all pulls fit before the deadline.

    It is :data:`MARGIN` times what was measured, as in the plan. The slowest member's pull counts, as often
    as members ask one of them in a busy round, because its line carries all of these models.
    """
    times = [taken for taken in seconds if taken is not None]
    if not times:
        return None
    pulls = max(times) * pullers(m.nodes, m.pull)
    return max(SHORTEST_PERIOD, MARGIN * (pulls + (step_seconds or 0.0)) * m.period / m.deadline)


def measure_step(observer: Observer) -> float | None:
    """Return the seconds of one local step of the task in peer.toml; None if the task cannot be loaded."""
    try:
        learner = learner_of(observer.config, observer.now, observer.layout)
    except (ValueError, FileNotFoundError):
        return None
    half, scratch = np.empty((2, observer.layout.d), observer.layout.dtype)
    learner.prepare(observer.initial, scratch)
    learner.load(1, observer.initial, fresh=True)
    began = time.perf_counter()
    learner.half(half, scratch)
    return time.perf_counter() - began
