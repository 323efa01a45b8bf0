"""A running network's next membership: who joins, leaves or has a new key, another plan, another pace;
checked.

Invariants: what is written can follow what is in force, is planned anew for as many members as it has, and
takes effect at a round that has not begun; several changes that wait for the same round are in the same file.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel.peer.config.membership import Member, Membership
from rpel.peer.config.settings import Config, next_members
from rpel.peer.io.client import Answer
from rpel.peer.io.watcher import MembershipWatcher, in_force
from rpel.peer.ops.create import stall_proof
from rpel.peer.ops.join import grouped, read_entries
from rpel.peer.ops.watch import Observer
from rpel.text import duration

_HASH = re.compile("[0-9a-f]{64}")
_AHEAD = 2
"""Rounds from now to the first one at which a change may take effect: the file has to reach everybody."""


@dataclass(frozen=True)
class Change:
    """A membership in force, the one that is to follow it, and where that is written."""

    before: Membership
    after: Membership
    path: Path
    now: float

    @property
    def left(self) -> list[Member]:
        """Members that are no longer there."""
        return [member for member in self.before.members if member.id not in _by_id(self.after)]

    @property
    def joined(self) -> list[Member]:
        """Members that are new."""
        return [member for member in self.after.members if member.id not in _by_id(self.before)]

    @property
    def altered(self) -> list[Member]:
        """Members with another key, address or organisation, as they will be."""
        had = _by_id(self.before)
        return [member for member in self.after.members if member.id in had and member != had[member.id]]

    @property
    def begins(self) -> float:
        """When it takes effect, in unix seconds."""
        return self.after.timetable.begins + self.after.timetable.start(self.after.from_round)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        ids = {name: [member.id for member in getattr(self, name)] for name in ("joined", "left", "altered")}
        return {
            "from_round": self.after.from_round,
            "begins": self.begins,
            **ids,
            "changed": {key: [old, new] for key, old, new in self.changed()},
            "membership": self.after.hash,
            "written": str(self.path),
        }

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """(key, before, after) of everything beside the members that is another."""
        old, new = self.before.to_dict(), self.after.to_dict()
        for key in dict.fromkeys([*old, *new]):
            if key not in ("member", "from_round", "earlier", "epoch", "epoch_round"):
                a, b = getattr(self.before, key), getattr(self.after, key)
                if a != b:
                    yield key, a, b

    def sentences(self) -> Iterator[str]:
        """What changes, and what each has to do about it, line by line."""
        m, at = self.after, datetime.fromtimestamp(self.begins, UTC)
        away = self.begins - self.now
        yield f"takes effect: round {m.from_round}, {at:%Y-%m-%d %H:%M:%S} UTC, in {duration(away)}"
        for member in self.joined:
            yield f"joins:   {member.id}, {member.url}\n         {grouped(member.fingerprint)}"
        for member in self.left:
            yield f"leaves:  {member.id}"
        for member in self.altered:
            yield from self._altered(member)
        for key, old, new in self.changed():
            yield f"{key + ':':<8} {_shown(old)} → {_shown(new)}"
        pause = (
            self.begins - (m.timetable.begins + m.timetable.end(m.from_round - 1))
            if m.from_round > 1
            else 0.0
        )
        if pause > m.period and not m.hours:
            yield f"pause:   no round for {duration(pause)} before it"
        yield from self._to_do()

    def _altered(self, member: Member) -> Iterator[str]:
        had = _by_id(self.before)[member.id]
        if member.fingerprint != had.fingerprint:
            yield f"new key: {member.id}\n         {grouped(member.fingerprint)}"
        for key in ("url", "organisation"):
            if getattr(member, key) != getattr(had, key):
                yield f"{key + ':':<8} {member.id}, {getattr(had, key)!r} → {getattr(member, key)!r}"

    def _to_do(self) -> Iterator[str]:
        name, new = self.path.name, [member.id for member in self.joined]
        staying = self.after.nodes - len(new)
        yield f"\nBefore round {self.after.from_round}:"
        yield (
            f"- all {staying} members that stay: put {name} beside members.toml; the peer changes over by "
            "itself"
        )
        for id in new:
            yield (
                f"- {id}: put {name} and init.safetensors where members.toml is to be and start the peer; it "
                f"waits for round {self.after.from_round}"
            )
        for member in self.altered:
            if member.fingerprint != _by_id(self.before)[member.id].fingerprint:
                yield (
                    f"- {member.id}: put the new key and certificate beside the old: peer.next.key, "
                    "peer.next.crt"
                )
        for member in self.left:
            yield (
                f"- {member.id}: nothing; with {name} the peer stops by itself at that round, and its key "
                "can go"
            )
        if new or self.altered:
            yield "Compare the fingerprints by telephone. rpel network diff says who has the file."


def _by_id(m: Membership) -> dict[str, Member]:
    return {member.id: member for member in m.members}


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else "none"


def change(
    members: Path,
    from_round: int,
    edit: Callable[[Membership], Membership],
    *,
    byzantine: int | None = None,
    no_shows: int | None = None,
    now: float | None = None,
) -> Change:
    """Write the next membership beside ``members``: ``edit`` of the newest there is, planned anew.

    A change that waits in members.next.toml is kept, and takes effect together with this one.
    """
    now = time.time() if now is None else now
    path = next_members(members)
    present = Membership.load(members)
    newest = Membership.load(path) if path.exists() else present
    round = newest.timetable.round(now - newest.timetable.begins)
    if newest.from_round <= round:
        present = newest
    least = max(round + _AHEAD, present.from_round + 1, newest.from_round, 2)
    if not least <= from_round <= newest.rounds:
        why = (
            f"it is round {round}"
            if newest.from_round <= round
            else f"{path} waits for round {newest.from_round}"
        )
        far = f"the last is {newest.rounds}" if from_round > newest.rounds else f"the nearest is {least}"
        raise ValueError(
            f"from_round {from_round} cannot be: {why}, and everybody needs the file before; {far}"
        )
    moved = _moved(present, newest, from_round).replace(from_round=from_round)
    after = replanned(edit(moved), byzantine, no_shows).check()
    after.save(path)
    return Change(present, after, path, now)


def _moved(present: Membership, waiting: Membership, from_round: int) -> Membership:
    """A pace that waits for its round begins with the new one, too."""
    if waiting.timetable.before(from_round) == present.timetable.before(from_round):
        return waiting
    return waiting.paced(present.timetable.changed(from_round, waiting.period, waiting.hours))


def replanned(m: Membership, byzantine: int | None = None, no_shows: int | None = None) -> Membership:
    """Plan s and b̂ for the present number of members; F stays what it was if it fits, unless it is given."""

    def planned(nodes: int, byzantine: int, late: int | None) -> tuple[int, int] | None:
        try:
            plan = stall_proof(nodes, byzantine, m.rounds, m.confidence, late)
        except ValueError:
            return None
        return plan.pull, plan.b_hat

    nodes, byzantine = len(m.members), m.byzantine if byzantine is None else byzantine
    if no_shows is None:
        present, numbers = (m.pull, m.b_hat), (None, *range(m.nodes))
        no_shows = next((f for f in numbers if planned(m.nodes, m.byzantine, f) == present), None)
        no_shows = no_shows if planned(nodes, byzantine, no_shows) else None
    plan = stall_proof(nodes, byzantine, m.rounds, m.confidence, no_shows)
    return m.replace(nodes=nodes, byzantine=byzantine, pull=plan.pull, b_hat=plan.b_hat)


# --- what the commands do to a membership -------------------------------------------------------------------


def joining(*entries: Path) -> Callable[[Membership], Membership]:
    """With the members of these entries."""
    new = tuple(member for path in entries for member in read_entries(path))

    def edit(m: Membership) -> Membership:
        for member in new:
            if member.id in _by_id(m):
                raise ValueError(
                    f"{member.id!r} is a member already: a new key or address is `rpel network rotate`"
                )
        return m.replace(members=m.members + new)

    return edit


def leaving(*ids: str) -> Callable[[Membership], Membership]:
    """Without these members."""

    def edit(m: Membership) -> Membership:
        for id in ids:
            m.index(id)
        return m.replace(members=tuple(member for member in m.members if member.id not in ids))

    return edit


def rotating(entry: Path) -> Callable[[Membership], Membership]:
    """With the entry of a member that has another key or address."""
    new = {member.id: member for member in read_entries(entry)}

    def edit(m: Membership) -> Membership:
        for member in new.values():
            if m.members[m.index(member.id)] == member:
                raise ValueError(f"the entry of {member.id!r} in {entry} is the one that is in force")
        return m.replace(members=tuple(new.get(member.id, member) for member in m.members))

    return edit


def pacing(
    period: float | None = None, deadline: float | None = None, hours: str | None = None, pause: float = 0.0
) -> Callable[[Membership], Membership]:
    """With another period, other hours, or a pause before the first round of it."""

    def edit(m: Membership) -> Membership:
        wanted = m.period if period is None else period, m.hours if hours is None else hours
        if wanted != (m.period, m.hours) or pause:
            m = m.paced(m.timetable.changed(m.from_round, *wanted, pause))
        return m if deadline is None else m.replace(deadline=deadline)

    return edit


def planning(rounds: int | None = None) -> Callable[[Membership], Membership]:
    """With another last round."""
    return lambda m: m if rounds is None else m.replace(rounds=rounds)


def waiting(config: Config) -> Change | None:
    """What the file announced beside a peer's members.toml changes, if it is not in force."""
    watcher = MembershipWatcher(config)
    present = in_force(config, watcher)
    coming = watcher.announced(present)
    return None if coming is None else Change(present, coming, config.next_members, time.time())


# --- who holds which file -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """What one member says it holds: hashes of the membership in force and of the one to come;
    "" where unknown."""

    id: str
    in_force: str = ""
    coming: str = ""
    remark: str = ""


def holding(id: str, status: dict[str, Any] | Answer) -> Holding:
    """What a member's answer says about its files.

    >>> holding("a", {"membership": "0" * 64, "coming": "no hash"})
    Holding(id='a', in_force='0000000000000000000000000000000000000000000000000000000000000000', coming='',
    remark='')
    """
    if isinstance(status, Answer):
        return Holding(
            id,
            status.membership or "",
            remark="" if status.membership else f"{status.result}: {status.reason}",
        )
    hashes = [str(status.get(key, "")) for key in ("membership", "coming")]
    return Holding(id, *(text if _HASH.fullmatch(text) else "" for text in hashes))


async def holdings(observer: Observer, within: float = 5.0) -> list[Holding]:
    """All members, the own one included, asked at once."""
    deadline = asyncio.get_running_loop().time() + within
    members = observer.now.membership.members
    answers = await asyncio.gather(
        *(observer.member(number).status(deadline) for number in range(len(members)))
    )
    return [holding(member.id, answer) for member, answer in zip(members, answers, strict=True)]
