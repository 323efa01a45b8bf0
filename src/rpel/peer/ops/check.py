"""Checking a network before it begins: can everybody be reached, do all hold the same file,
how fast are pulls?

Every other member is asked with one's own key: first all at once whether they are there, then one after the
other for the common initial model, which is as large as what travels in every round.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rpel.peer.api import learner_of
from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config, listen_address
from rpel.peer.net.client import Answer
from rpel.peer.ops.watch import Observer
from rpel.types import Health, Models, PullResult

MARGIN = 2.0
"""A round is planned to take this many times what was measured: other hours are busier than this one."""

SHORTEST = 1.0
"""No shorter period is suggested, in seconds: clocks, disks and busy machines need that much."""

_CLOCK = 0.1  # of a period: from there on a member's rounds begin noticeably elsewhere
_TOO_MANY = 429
_CALL = 5.0  # seconds for a connection
_UNANSWERED = {
    PullResult.LATE: "it is reachable, but did not answer in time",
    PullResult.REFUSED: "it refuses to answer",
    PullResult.MALFORMED: "what it answers is not what a peer of this network answers",
    PullResult.UNREACHABLE: "it cannot be reached: is it running, is the url right, is the port open?",
}


@dataclass(frozen=True)
class Checked:
    """What came of one member. Clocks in seconds, positive if the member's is ahead;
    None where nothing was learnt."""

    id: str
    url: str
    health: Health = Health.WELL
    same_membership: bool | None = None
    clock_offset: float | None = None
    seconds: float | None = None
    megabytes_per_second: float | None = None
    reaches_you: bool | None = None
    """Whether it could call back; None: it was not asked, or does not know how to."""
    remark: str = "well"

    @property
    def reachable(self) -> bool:
        """Whether anything answered at its address."""
        return self.health is not Health.UNREACHABLE

    @property
    def well(self) -> bool:
        """Whether nothing is wrong with it; its speed may not be known."""
        return self.health in (Health.WELL, Health.UNMEASURED)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"reachable": self.reachable, "well": self.well}


@dataclass(frozen=True)
class Report:
    """All members but oneself, and the period that the measured pulls suggest (None:
    nothing was measured)."""

    members: tuple[Checked, ...]
    period: float
    step_seconds: float | None
    suggested_period: float | None
    running: bool = False
    """Whether the own peer listens, without which nobody can call back."""
    byzantine: int = 0

    @property
    def well(self) -> bool:
        """Whether nothing is wrong with anybody,
        and no more than b members say that they do not reach this one."""
        unreached = sum(member.reaches_you is False for member in self.members) if self.running else 0
        return all(member.well for member in self.members) and unreached <= self.byzantine

    @property
    def called(self) -> list[bool]:
        """Of each member that was asked to call back, whether it could."""
        return [member.reaches_you for member in self.members if member.reaches_you is not None]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        members = [member.to_dict() for member in self.members]
        return asdict(self) | {"members": members, "margin": MARGIN, "well": self.well}


async def check(
    observer: Observer,
    *,
    within: float = 5.0,
    timeout: float = 60.0,
    step_seconds: float | None = None,
    listen: str = "",
) -> Report:
    """Ask everybody: who does not answer ``within`` seconds is not there;
    a model may take ``timeout`` seconds.

    If the own peer runs at ``listen``, the others are asked to call it back.
    """
    m, loop = observer.now.membership, asyncio.get_running_loop()
    others = [number for number in range(m.nodes) if number != observer.now.me]
    deadline = loop.time() + within
    there = await asyncio.gather(*(observer.member(number).status(deadline) for number in others))
    checks = [_first(m, number, answer) for number, answer in zip(others, there, strict=True)]
    for i, number in enumerate(others):
        if checks[i].well:
            checks[i] = await _pulled(observer, number, checks[i], loop.time() + timeout)
    running = bool(listen) and await _listens(listen)
    if running:
        calls = (_called_back(observer, *one) for one in zip(others, checks, strict=True))
        checks = list(await asyncio.gather(*calls))
    suggested = suggestion(m, checks, step_seconds)
    return Report(tuple(checks), m.period, step_seconds, suggested, running, m.byzantine)


async def _listens(listen: str) -> bool:
    """Whether the own peer is there."""
    host, port = listen_address(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CALL)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _called_back(observer: Observer, number: int, checked: Checked) -> Checked:
    """Can that member reach this one?"""
    if not checked.well:
        return checked
    reply = await observer.member(number).reach(asyncio.get_running_loop().time() + 3 * _CALL)
    if isinstance(reply, Answer) or type(reply.get("reached")) is not bool:
        return checked  # it asked a moment ago, or its version does not call back
    if not reply["reached"]:
        return replace(checked, reaches_you=False, remark=f"{checked.remark}, but it does not reach you")
    return replace(checked, reaches_you=True)


def _first(m: Membership, number: int, answer: dict[str, Any] | Answer) -> Checked:
    """Is it there, and with the same file?"""
    member = m.members[number]
    here = Checked(member.id, member.url)
    if not isinstance(answer, Answer):
        return replace(here, same_membership=True)
    if answer.membership:
        other = f"it holds another members.toml (hash {answer.membership[:12]}, here {m.hash[:12]})"
        remark = f"{other}: compare the two files"
        return replace(here, health=Health.OTHER_MEMBERSHIP, same_membership=False, remark=remark)
    remark = _UNANSWERED[answer.result] + (f" ({answer.reason})" if answer.reason else "")
    return replace(here, health=Health(answer.result.value), remark=remark)


async def _pulled(observer: Observer, number: int, checked: Checked, deadline: float) -> Checked:
    """How long does a model take, is it the right one, and what time is it there?"""
    row = np.empty_like(observer.initial)
    began = time.perf_counter()
    answer = await observer.member(number).fetch(0, row, deadline)
    taken = time.perf_counter() - began
    if answer.status == _TOO_MANY:
        remark = "well, but its speed was not measured: it sends this member the model twice only"
        return replace(checked, health=Health.UNMEASURED, remark=remark)
    if answer.result is not PullResult.OK:
        remark = f"it did not send the common initial model: {answer.result}, {answer.reason}"
        return replace(checked, health=Health(answer.result.value), remark=remark)
    health, remark = _verdict(observer, row, answer.offset)
    layout = observer.layout
    speed = layout.exact.size / taken / 1e6
    # of a half-step, which may be coded; the initial model is not
    seconds = taken * layout.size / layout.exact.size
    measured = replace(checked, clock_offset=answer.offset, seconds=seconds, megabytes_per_second=speed)
    return replace(measured, health=health, remark=remark)


def _verdict(observer: Observer, row: Models, offset: float | None) -> tuple[Health, str]:
    period = observer.now.membership.period
    if not np.array_equal(row, observer.initial, equal_nan=True):
        sentence = (
            "the initial model it sends is another one: give it the init.safetensors that came with "
            "members.toml"
        )
        return Health.OTHER_MODEL, sentence
    if offset is None:
        return Health.NO_CLOCK, "it does not tell its clock"
    if abs(offset) > _CLOCK * period:
        way = "ahead" if offset > 0 else "behind"
        sentence = (
            f"its clock is {abs(offset):.3g} s {way}, {abs(offset) / period:.2g} of a round: set it by NTP"
        )
        return Health.WRONG_CLOCK, sentence
    return Health.WELL, "well"


# --- a period -----------------------------------------------------------------------------------------------


def suggestion(m: Membership, checks: Sequence[Checked], step_seconds: float | None) -> float | None:
    """The period in which a local step and s pulls fit before the deadline, :data:`MARGIN` times over.

    The slowest member's pull counts, s times, because in a round it serves about s others at once and each
    peer's own line carries s models. The deadline is taken to stay the share of a round that it is.
    """
    times = [member.seconds for member in checks if member.seconds is not None]
    if not times:
        return None
    share = m.deadline / m.period
    return max(SHORTEST, MARGIN * (max(times) * m.pull + (step_seconds or 0.0)) / share)


def measured_step(config: Config, observer: Observer) -> float | None:
    """Seconds of one local step of the task in peer.toml; None where the task cannot be loaded here."""
    try:
        learner = learner_of(config, observer.now, observer.layout)
    except (ValueError, FileNotFoundError):
        return None
    half, scratch = np.empty((2, observer.layout.d), observer.layout.dtype)
    learner.prepare(observer.initial, scratch)
    learner.load(1, observer.initial, fresh=True)
    began = time.perf_counter()
    learner.half(half, scratch)
    return time.perf_counter() - began
