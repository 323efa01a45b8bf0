"""A running network's next membership: other members, another plan or another pace from a round on.

Invariants: a written membership can follow the one in force, is planned for its number of members, and takes
effect at a round that has not begun. Several changes that wait for the same round are in the same file.
"""

import asyncio
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel.peer.config.membership import Member, Membership
from rpel.peer.config.settings import Config, next_members
from rpel.peer.net.client import Answer
from rpel.peer.ops.create import stall_proof
from rpel.peer.ops.join import grouped, read_entries
from rpel.peer.ops.watch import Observer
from rpel.peer.state.memberships import MembershipWatcher, in_force
from rpel.text import duration

_HASH = re.compile("[0-9a-f]{64}")
_NOTICE = 2
"""Rounds from now to the first one at which a change may take effect: the file has to reach all members."""


@dataclass(frozen=True)
class Change:
    """A membership in force, the one that follows it, and the file of the latter."""

    before: Membership
    after: Membership
    path: Path
    now: float

    @property
    def left(self) -> list[Member]:
        """Members that leave."""
        return [member for member in self.before.members if member.id not in _by_id(self.after)]

    @property
    def joined(self) -> list[Member]:
        """New members."""
        return [member for member in self.after.members if member.id not in _by_id(self.before)]

    @property
    def altered(self) -> list[Member]:
        """Members with another key, address or organisation, as they will be."""
        before = _by_id(self.before)
        return [m for m in self.after.members if m.id in before and m != before[m.id]]

    @property
    def begins(self) -> float:
        """When it takes effect, in unix seconds."""
        return self.after.timetable.begins + self.after.timetable.start(self.after.from_round)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
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
        """Yield (key, before, after) of everything that changes, except members and paces."""
        old, new = self.before.to_dict(), self.after.to_dict()
        for key in dict.fromkeys([*old, *new]):
            if key not in ("member", "from_round", "earlier", "epoch", "epoch_round"):
                a, b = getattr(self.before, key), getattr(self.after, key)
                if a != b:
                    yield key, a, b

    def sentences(self) -> Iterator[str]:
        """Yield lines on what changes, and what each member has to do."""
        m, at = self.after, f"{datetime.fromtimestamp(self.begins, UTC):%Y-%m-%d %H:%M:%S} UTC"
        yield f"takes effect: round {m.from_round}, {at}, in {duration(self.begins - self.now)}"
        for member in self.joined:
            yield f"joins:   {member.id}, {member.url}\n         {grouped(member.fingerprint)}"
        for member in self.left:
            yield f"leaves:  {member.id}"
        for member in self.altered:
            yield from self._altered(member)
        for key, old, new in self.changed():
            yield f"{key + ':':<8} {_shown(old)} → {_shown(new)}"
        pause = self.begins - (m.timetable.begins + m.timetable.end(m.from_round - 1))
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
        yield f"- all {staying} members that stay: put {name} beside members.toml; the peer does the rest"
        for id in new:
            yield (
                f"- {id}: put {name} and init.safetensors where members.toml is to be and start the peer; it "
                f"waits for round {self.after.from_round}"
            )
        for member in self.altered:
            if member.fingerprint != _by_id(self.before)[member.id].fingerprint:
                yield f"- {member.id}: put the new key and certificate at peer.next.key and peer.next.crt"
        for member in self.left:
            yield f"- {member.id}: nothing; with {name} the peer stops at that round, and its key can go"
        if new or self.altered:
            yield "Compare the fingerprints by telephone. rpel network diff shows who has the file."


def _by_id(m: Membership) -> dict[str, Member]:
    return {member.id: member for member in m.members}


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else "none"


def change(
    members: Path,
    from_round: int,
    *,
    add: Iterable[Path] = (),
    remove: Collection[str] = (),
    replace: Iterable[Path] = (),
    period: float | None = None,
    deadline: float | None = None,
    hours: str | None = None,
    pause: float = 0.0,
    rounds: int | None = None,
    byzantine: int | None = None,
    no_shows: int | None = None,
    now: float | None = None,
) -> Change:
    """Write the next membership beside the present one, planned anew for its members.

    A change that waits in members.next.toml is kept, and takes effect together with this one. What is left
    out stays as it is.

    Args:
        members: The network's members.toml.
        from_round: The first round of the next membership.
        add: Files with entries of new members.
        remove: Ids of members that leave.
        replace: Files with entries of members that have another key or address.
        period: Length of a round in seconds.
        deadline: Seconds into a round at which pulls end; by default the same share of the period.
        hours: Hours of the day for rounds, "" for the whole day.
        pause: Seconds without a round before ``from_round``.
        rounds: The last round.
        byzantine: How many members may be hostile.
        no_shows: How many honest members may be late in a round.
        now: The time in unix seconds, by default the present.
    """
    now = time.time() if now is None else now
    path = next_members(members)
    present = Membership.load(members)
    newest = Membership.load(path) if path.exists() else present
    round = newest.timetable.round(now - newest.timetable.begins)
    if newest.from_round <= round:
        present = newest
    _check_round(from_round, present, newest, round, path)
    m = newest
    if m.timetable.before(from_round) != present.timetable.before(from_round):
        # the pace of a change that waits begins with this one
        m = m.paced(present.timetable.changed(from_round, m.period, m.hours))
    m = m.replace(from_round=from_round, members=_edited(m, add, remove, replace))
    pace = m.period if period is None else period, m.hours if hours is None else hours
    if pace != (m.period, m.hours) or pause:
        m = m.paced(m.timetable.changed(from_round, *pace, pause))
    given = {"deadline": deadline, "rounds": rounds}
    m = m.replace(**{key: value for key, value in given.items() if value is not None})
    after = replanned(m, byzantine, no_shows).check()
    after.save(path)
    return Change(present, after, path, now)


def _check_round(from_round: int, present: Membership, newest: Membership, round: int, path: Path) -> None:
    """Refuse a round that has begun, begins too soon, or comes before a change that waits."""
    least = max(round + _NOTICE, present.from_round + 1, newest.from_round, 2)
    if not least <= from_round <= newest.rounds:
        why = f"it is round {round}"
        if newest.from_round > round:
            why = f"{path} waits for round {newest.from_round}"
        raise ValueError(
            f"from_round {from_round} is not between {least} and {newest.rounds}: {why}, and all members "
            "need the file before"
        )


def _edited(
    m: Membership, add: Iterable[Path], remove: Collection[str], replace: Iterable[Path]
) -> tuple[Member, ...]:
    """Return the members after a change."""
    joining = [member for path in add for member in read_entries(path)]
    altered = {member.id: member for path in replace for member in read_entries(path)}
    for member in joining:
        if member.id in _by_id(m):
            raise ValueError(
                f"{member.id!r} is a member already: `rpel network rotate` gives it a new key or address"
            )
    for id in (*remove, *altered):
        if m.members[m.index(id)] == altered.get(id):
            raise ValueError(f"the new entry of {id!r} is the one that is in force")
    staying = (altered.get(member.id, member) for member in m.members if member.id not in remove)
    return (*staying, *joining)


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


def waiting(config: Config) -> Change | None:
    """Return what the membership announced beside a peer's members.toml changes, None if it is in force."""
    watcher = MembershipWatcher(config)
    present = in_force(config, watcher)
    coming = watcher.announced(present)
    return None if coming is None else Change(present, coming, config.next_members, time.time())


# --- which member has which file ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Holding:
    """The hashes of the memberships that a member reports, in force and to come; "" if unknown."""

    id: str
    in_force: str = ""
    coming: str = ""
    remark: str = ""


def holding(id: str, status: dict[str, Any] | Answer) -> Holding:
    """Return what a member's answer says about its files.

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
    """Ask all members at once, this one included."""
    deadline = asyncio.get_running_loop().time() + within
    members = observer.now.membership.members
    answers = await asyncio.gather(
        *(observer.member(number).status(deadline) for number in range(len(members)))
    )
    return [holding(member.id, answer) for member, answer in zip(members, answers, strict=True)]
