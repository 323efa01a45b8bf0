"""Change who belongs to a network, its plan or its pace: now, before round 1, or from a later round on.

Before the network begins members.toml itself is edited. Afterwards the change goes into members.next.toml,
which takes effect at a round that has not begun; several changes that wait for the same round share the file.
"""

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel.peer.config.membership import Member, Membership, duplicates
from rpel.peer.config.settings import next_members
from rpel.peer.ops.create import stall_proof
from rpel.peer.ops.join import entry_lines, grouped, read_entries
from rpel.text import count, duration

_NOTICE = 2
"""Rounds from now to the first one at which a change may take effect: the file has to reach all members."""

_TIMES = ("member", "from_round", "earlier", "epoch_round")
"""Keys that a difference of two memberships shows in other words, or not at all."""


@dataclass(frozen=True)
class Change:
    """Two memberships, the second of which follows the first, and the file of the second."""

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
    def later(self) -> bool:
        """Whether it waits for a round, instead of replacing the file from the beginning."""
        return self.after.from_round > self.before.from_round

    @property
    def missing(self) -> int:
        """How many members are still to be added."""
        return self.after.nodes - len(self.after.members)

    @property
    def begins(self) -> float:
        """When it takes effect, in seconds since 1970."""
        return self.after.timetable.begins + self.after.timetable.start(self.after.from_round)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        ids = {name: [member.id for member in getattr(self, name)] for name in ("joined", "left", "altered")}
        return {
            "from_round": self.after.from_round,
            "begins": self.begins,
            **ids,
            "members": len(self.after.members),
            "missing": self.missing,
            "changed": {key: [old, new] for key, old, new in self.changed()},
            "membership": self.after.hash,
            "written": str(self.path),
        }

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (key, before, after) of everything that changes, except members and the rounds of paces."""
        left_out = (*_TIMES, "epoch") if self.later else _TIMES
        for key in dict.fromkeys([*self.before.to_dict(), *self.after.to_dict()]):
            if key not in left_out:
                old, new = getattr(self.before, key), getattr(self.after, key)
                if old != new:
                    yield key, old, new

    def differences(self) -> Iterator[str]:
        """Yield lines on what changes."""
        if self.later:
            at = f"{datetime.fromtimestamp(self.begins, UTC):%Y-%m-%d %H:%M:%S} UTC"
            yield f"takes effect: round {self.after.from_round}, {at}, in {duration(self.begins - self.now)}"
        for member in self.joined:
            first, *rest = entry_lines(member)
            yield from (f"joins:   {first}", *rest) if self.later else (first, *rest)
        for member in self.left:
            yield f"leaves:  {member.id}"
        for member in self.altered:
            yield from self._altered(member)
        for key, old, new in self.changed():
            yield f"{key + ':':<8} {_shown(old)} → {_shown(new)}"
        m = self.after
        pause = self.begins - (m.timetable.begins + m.timetable.end(m.from_round - 1)) if self.later else 0.0
        if pause > m.period and not m.hours:
            yield f"pause:   no round for {duration(pause)} before it"

    def _altered(self, member: Member) -> Iterator[str]:
        had = _by_id(self.before)[member.id]
        if member.fingerprint != had.fingerprint:
            yield f"new key: {member.id}"
            yield f"  {grouped(member.fingerprint)}"
        for key in ("url", "organisation"):
            if getattr(member, key) != getattr(had, key):
                yield f"{key + ':':<8} {member.id}, {getattr(had, key)!r} → {getattr(member, key)!r}"

    def instructions(self) -> Iterator[str]:
        """Yield lines on what each member has to do."""
        if not self.later:
            yield (
                f"{self.path} lacks {self.missing} of {count(self.after.nodes, 'member')}"
                if self.missing
                else f"{self.path} is complete: give it to everybody"
            ) + (". Compare the fingerprints by telephone." if self.joined or self.altered else ".")
            return
        name, new = self.path.name, [member.id for member in self.joined]
        yield f"\nBefore round {self.after.from_round}:"
        yield (
            f"- all {self.after.nodes - len(new)} members that stay: put {name} beside members.toml; "
            "the peer does the rest"
        )
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
        compare = "Compare the fingerprints by telephone. " if new or self.altered else ""
        yield f"{compare}rpel network status shows who has the file."


def _by_id(m: Membership) -> dict[str, Member]:
    return {member.id: member for member in m.members}


def _shown(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value) if value != "" else "none"


def compare(first: Path, second: Path) -> Change:
    """Return how the second of two files differs from the first."""
    before, after = (Membership.load(path, draft=True) for path in (first, second))
    return Change(before, after, second, time.time())


def change(
    members: Path,
    from_round: int | None = None,
    *,
    add: Iterable[Path] = (),
    remove: Collection[str] = (),
    replace: Iterable[Path] = (),
    period: float | None = None,
    deadline: float | None = None,
    hours: str | None = None,
    pause_until: float | None = None,
    rounds: int | None = None,
    byzantine: int | None = None,
    no_shows: int | None = None,
    now: float | None = None,
) -> Change:
    """Write a changed membership, planned anew if its members or bounds changed.

    What is left out stays as it is. A change that waits in members.next.toml is kept, and takes effect
    together with this one.

    Args:
        members: The network's members.toml.
        from_round: The first round of the changed membership; None edits members.toml before round 1.
        add: Files with entries of new members.
        remove: Ids of members that leave.
        replace: Files with entries of members that have another key or address.
        period: Length of a round in seconds.
        deadline: Seconds into a round at which pulls end; by default the same share of the period.
        hours: Hours of the day for rounds, "" for the whole day.
        pause_until: When ``from_round`` begins, in seconds since 1970.
        rounds: The last round.
        byzantine: How many members may be hostile.
        no_shows: How many honest members may be late in a round.
        now: The time in seconds since 1970, by default the present.
    """
    now = time.time() if now is None else now
    path = members if from_round is None else next_members(members)
    present, m = _beginning(members, now) if from_round is None else _coming(members, from_round, now)
    t = from_round or 1
    m = m.replace(members=_edit(m, add, remove, replace))
    pace = m.period if period is None else period, m.hours if hours is None else hours
    if pace != (m.period, m.hours) or pause_until is not None:
        begins = m.timetable.begins + (m.timetable.end(t - 1) if t > 1 else 0.0)
        pause = 0.0 if pause_until is None else pause_until - begins
        if pause < 0:
            earliest = datetime.fromtimestamp(begins, UTC)
            raise ValueError(
                f"round {t} cannot begin before {earliest:%Y-%m-%dT%H:%M:%SZ}: pause until later"
            )
        m = m.paced(m.timetable.changed(t, *pace, pause))
    given = {"deadline": deadline, "rounds": rounds}
    m = m.replace(**{key: value for key, value in given.items() if value is not None})
    nodes = len(m.members) if from_round is not None or len(m.members) > m.nodes or remove else m.nodes
    if remove and len(present.members) < present.nodes:
        nodes = m.nodes  # a network that is still being put together
    if nodes != m.nodes or byzantine is not None or no_shows is not None or from_round is not None:
        m = replan(m, nodes, byzantine, no_shows)
    after = m.check(draft=from_round is None)
    after.save(path)
    return Change(present, after, path, now)


def _beginning(members: Path, now: float) -> tuple[Membership, Membership]:
    """Return (before, to be changed) of a network that has not begun."""
    m = Membership.load(members, draft=True)
    round = m.timetable.round(now - m.timetable.begins)
    if round >= 1 and len(m.members) == m.nodes:
        raise ValueError(
            f"the network {m.run!r} runs, it is in round {round}: say from which round on with --from-round, "
            f"for example {round + 10}"
        )
    return m, m


def _coming(members: Path, from_round: int, now: float) -> tuple[Membership, Membership]:
    """Return (in force, to be changed) of a network that runs."""
    path, present = next_members(members), Membership.load(members)
    newest = Membership.load(path) if path.exists() else present
    round = newest.timetable.round(now - newest.timetable.begins)
    if newest.from_round <= round:
        present = newest
    least = max(round + _NOTICE, present.from_round + 1, newest.from_round, 2)
    if not least <= from_round <= newest.rounds:
        why = f"{path} waits for round {newest.from_round}" if newest.from_round > round else f"it is {round}"
        raise ValueError(
            f"from_round {from_round} is not between {least} and {newest.rounds}: {why}, and all members "
            "need the file before"
        )
    m = newest
    if m.timetable.before(from_round) != present.timetable.before(from_round):
        # the pace of a change that waits begins with this one
        m = m.paced(present.timetable.changed(from_round, m.period, m.hours))
    return present, m.replace(from_round=from_round)


def _edit(
    m: Membership, add: Iterable[Path], remove: Collection[str], replace: Iterable[Path]
) -> tuple[Member, ...]:
    """Return the members after a change."""
    joining = [member for path in add for member in read_entries(path)]
    altered = {member.id: member for path in replace for member in read_entries(path)}
    for member in joining:
        if member.id in _by_id(m):
            raise ValueError(
                f"{member.id!r} is a member already: `rpel network change --replace` gives it a new key or "
                "address"
            )
    for id in (*remove, *altered):
        if m.members[m.index(id)] == altered.get(id):
            raise ValueError(f"the new entry of {id!r} is the one that is in force")
    staying = (altered.get(member.id, member) for member in m.members if member.id not in remove)
    members = (*staying, *joining)
    for fault in duplicates(members):
        raise ValueError(fault)
    return members


def replan(
    m: Membership, nodes: int, byzantine: int | None = None, no_shows: int | None = None
) -> Membership:
    """Plan s and b̂ for this number of members; F stays the same if it fits, unless it is given."""

    def planned(nodes: int, byzantine: int, late: int | None) -> tuple[int, int] | None:
        try:
            plan = stall_proof(nodes, byzantine, m.rounds, m.confidence, late)
        except ValueError:
            return None
        return plan.pull, plan.b_hat

    byzantine = m.byzantine if byzantine is None else byzantine
    if no_shows is None:
        present, numbers = (m.pull, m.b_hat), (None, *range(m.nodes))
        no_shows = next((f for f in numbers if planned(m.nodes, m.byzantine, f) == present), None)
        no_shows = no_shows if planned(nodes, byzantine, no_shows) else None
    plan = stall_proof(nodes, byzantine, m.rounds, m.confidence, no_shows)
    return m.replace(nodes=nodes, byzantine=byzantine, pull=plan.pull, b_hat=plan.b_hat)
