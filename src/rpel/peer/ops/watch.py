"""Watching a network: what every member says of itself, asked over mutual TLS with one's own key.

Invariant: members may be hostile, so what they say is bounded and taken apart by kind; nothing of it is shown
as text. And they may lie: what is shown of a member is its own claim.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rpel.certificates import check_id
from rpel.peer.config.settings import Config
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.wire import Layout
from rpel.peer.net.client import Answer, Client, RemoteMember, version_of
from rpel.peer.net.snapshot import Snapshot, take
from rpel.peer.state.memberships import MembershipWatcher, in_force
from rpel.peer.state.models import initial_model
from rpel.types import Models, Outcome, PullResult

_LARGEST = 10**12
_MOST_CONVICTED = 1000


@dataclass
class Observer:
    """A member that asks the others in its own name without taking part: for watching and checking."""

    config: Config
    watcher: MembershipWatcher
    now: Snapshot
    layout: Layout
    initial: Models
    clock: RoundClock
    client: Client

    @classmethod
    def of(cls, config: Config) -> "Observer":
        """Everything that a peer.toml names, read and checked; ValueError unless its key is a member's."""
        watcher = MembershipWatcher(config)
        now = take(config, in_force(config, watcher))
        clock = RoundClock(now.membership.timetable, wall=time.time, ticks=time.monotonic)
        layout, initial = initial_model(config, now.membership)
        return cls(config, watcher, now, layout, initial, clock, Client(layout, clock.position))

    def follow(self) -> None:
        """Take the membership that has come into force meanwhile; ValueError if this is no member of it."""
        coming = self.watcher.due(
            self.now.membership, self.clock.round(), self.clock.position(), at_start=True
        )
        if coming is not None:
            self.now, self.clock.timetable = take(self.config, coming), coming.timetable
            self.client.prune(self.now)

    def member(self, number: int) -> RemoteMember:
        """A member, to be asked."""
        return self.client.member(self.now, number)

    @property
    def over(self) -> bool:
        """Whether the last round has ended."""
        return self.clock.round() > self.now.membership.rounds

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()


class State(StrEnum):
    """Where a member is, by its own word; or why it gave none."""

    STARTING = "starting"
    TRAINING = "training"
    FROZEN = "frozen"
    FINISHED = "finished"
    OTHER_MEMBERSHIP = "other membership"
    LATE = "late"
    REFUSED = "refused"
    MALFORMED = "malformed"
    UNREACHABLE = "unreachable"


_ANSWERED = (State.STARTING, State.TRAINING, State.FROZEN, State.FINISHED)


@dataclass(frozen=True)
class Seen:
    """One member at one moment.

    After the last round peers leave: one that cannot be reached then is taken to have finished.
    ``degraded``: rounds that ended with the half-step alone, for lack of answers · ``excluded``: members of
    whom it says that it has a proof against their key · ``ready``: it has compiled all it needs and agreed on
    the time · ``version``: of rpel
    """

    id: str
    state: State
    round: int = 0
    accuracy: float | None = None
    pulls: Mapping[str, int] = field(default_factory=dict)
    degraded: int = 0
    caught_up: int = 0
    excluded: tuple[str, ...] = ()
    ready: bool = False
    version: str = ""

    @property
    def answered(self) -> bool:
        """Did it say anything that can be shown?"""
        return self.state in _ANSWERED


async def look(observer: Observer, within: float = 3.0) -> list[Seen]:
    """All members at once, in the order of members.toml;
    who has not answered within so many seconds is unreachable."""
    deadline = asyncio.get_running_loop().time() + within
    m = observer.now.membership
    answers = await asyncio.gather(*(observer.member(number).status(deadline) for number in range(m.nodes)))
    pairs = zip(m.members, answers, strict=True)
    return [seen(member.id, answer, m.rounds, observer.over) for member, answer in pairs]


def seen(id: str, status: Mapping[str, Any] | Answer, rounds: int, over: bool = False) -> Seen:
    """What a member's answer amounts to; one that makes no sense is "malformed" and nothing else.

    >>> one = seen("a", {"round": 7, "accuracy": 0.5, "pulls": {"ok": 12}}, rounds=9)
    >>> one.state.value, one.round, one.pulls["ok"], one.pulls["late"]
    ('training', 7, 12, 0)
    >>> seen("b", {"round": "7" * 1000}, rounds=9).state.value, seen("c", Answer(PullResult.LATE),
    ...     rounds=9).state.value
    ('malformed', 'late')
    """
    if isinstance(status, Answer):
        if over and status.result is PullResult.UNREACHABLE:
            return Seen(id, State.FINISHED)
        return Seen(id, State.OTHER_MEMBERSHIP if status.membership else State(status.result.value))
    try:
        round, frozen, ready = (
            _count(status, "round"),
            status.get("frozen") is True,
            status.get("ready") is True,
        )
        outcomes, pulls = _counts(status, "outcomes", Outcome), _counts(status, "pulls", PullResult)
        accuracy, excluded = _share(status.get("accuracy")), _ids(status.get("excluded", []))
    except ValueError:
        return Seen(id, State.MALFORMED)
    state = State.FINISHED if round >= rounds else State.TRAINING
    state = State.FROZEN if frozen else State.STARTING if not round else state
    degraded, caught_up, version = (
        outcomes["local_only"],
        outcomes["caught_up"],
        version_of(status.get("version")),
    )
    return Seen(id, state, round, accuracy, pulls, degraded, caught_up, excluded, ready, version)


def remembering(before: Sequence[Seen], looked: Sequence[Seen]) -> list[Seen]:
    """What was looked at, with the last numbers of members that have finished and left.

    >>> last, gone = Seen("a", State.TRAINING, round=9, accuracy=0.5), Seen("a", State.FINISHED)
    >>> remembering([last], [gone])[0].accuracy, remembering([last], [gone])[0].state.value
    (0.5, 'finished')

    A peer may leave before the time of the last round is over:

    >>> remembering([replace(last, state=State.FINISHED)], [Seen("a", State.UNREACHABLE)])[0].state.value
    'finished'
    """
    known = {member.id: member for member in before if member.round}
    return [_last_known(known[member.id], member) if member.id in known else member for member in looked]


def _last_known(last: Seen, now: Seen) -> Seen:
    left = now.state is State.FINISHED or (now.state is State.UNREACHABLE and last.state is State.FINISHED)
    return replace(last, state=State.FINISHED) if left and not now.round else now


def excluded(looked: Sequence[Seen], byzantine: int) -> set[str]:
    """The members of whom more than b others say that they hold a proof: at least one of these is honest.

    >>> sure = Seen("a", State.TRAINING, excluded=("c",))
    >>> excluded([sure, Seen("b", State.TRAINING)], byzantine=1), excluded([sure, sure], byzantine=1)
    (set(), {'c'})
    """
    counts = Counter(id for member in looked for id in member.excluded if id != member.id)
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
    if (
        not isinstance(value, list)
        or len(value) > _MOST_CONVICTED
        or not all(isinstance(id, str) for id in value)
    ):
        raise ValueError("excluded")
    return tuple(sorted({check_id(id) for id in value}))


def _share(value: object) -> float | None:
    if value is None:
        return None
    # NaN is not either
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError("accuracy")
    return float(value)
