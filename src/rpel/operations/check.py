"""Checking a network before it begins: can everybody be reached, do all hold the same file, how fast are pulls?

Every other member is asked with one's own key: first all at once whether they are there, then one after the other for
the common initial model, which is as large as what travels in every round.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rpel.config.membership import Membership
from rpel.config.peer import Config
from rpel.operations.asking import Asking
from rpel.peer.client import Answer
from rpel.peer.learner import Learner, task_learner

MARGIN = 2.0
"""A round is planned to take this many times what was measured: other hours are busier than this one."""

SHORTEST = 1.0
"""No shorter period is suggested, in seconds: clocks, disks and busy machines need that much."""

_CLOCK = 0.1  # of a period: from there on a member's rounds begin noticeably elsewhere
_REASONS = {
    "late": "it is reachable, but did not answer in time",
    "refused": "it refuses to answer",
    "malformed": "what it answers is not what a peer of this network answers",
    "unreachable": "it cannot be reached: is it running, is the url right, is the port open?",
}


@dataclass(frozen=True)
class Checked:
    """What came of one member. Clocks in seconds, positive if the member's is ahead; None where nothing was learnt."""

    id: str
    url: str
    reachable: bool
    same_membership: bool | None = None
    clock_offset: float | None = None
    seconds: float | None = None
    megabytes_per_second: float | None = None
    remark: str = "well"

    @property
    def well(self) -> bool:
        return self.remark.startswith("well")


@dataclass(frozen=True)
class Report:
    """All members but oneself, and the period that the measured pulls suggest (None: nothing was measured)."""

    members: tuple[Checked, ...]
    period: float
    step_seconds: float | None
    suggested_period: float | None

    @property
    def well(self) -> bool:
        return all(member.well for member in self.members)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        members = [asdict(member) | {"well": member.well} for member in self.members]
        return asdict(self) | {"members": members, "margin": MARGIN, "well": self.well}


async def check(
    ask: Asking, *, within: float = 5.0, timeout: float = 60.0, step_seconds: float | None = None
) -> Report:
    """Ask everybody: who does not answer ``within`` seconds is not there; a model may take ``timeout`` seconds."""
    m, loop = ask.standing.membership, asyncio.get_running_loop()
    others = [number for number in range(m.nodes) if number != ask.standing.me]
    deadline = loop.time() + within
    there = await asyncio.gather(*(ask.client.status(number, deadline) for number in others))
    found = [_first(m, number, answer) for number, answer in zip(others, there, strict=True)]
    for place, number in enumerate(others):
        if found[place].well:
            found[place] = await _pulled(ask, number, found[place], loop.time() + timeout)
    return Report(tuple(found), m.period, step_seconds, suggestion(m, found, step_seconds))


def _first(m: Membership, number: int, answer: dict[str, Any] | Answer) -> Checked:
    """Is it there, and with the same file?"""
    member = m.members[number]
    here = Checked(member.id, member.url, reachable=True)
    if not isinstance(answer, Answer):
        return replace(here, same_membership=True)
    if answer.membership:
        other = f"it holds another members.toml (hash {answer.membership[:12]}, here {m.hash[:12]})"
        return replace(here, same_membership=False, remark=f"{other}: compare the two files")
    reason = _REASONS[answer.result] + (f" ({answer.reason})" if answer.reason else "")
    return replace(here, reachable=answer.result != "unreachable", remark=reason)


async def _pulled(ask: Asking, number: int, found: Checked, deadline: float) -> Checked:
    """How long does a model take, is it the right one, and what time is it there?"""
    row = np.empty_like(ask.initial)
    began = time.perf_counter()
    answer = await ask.client.pull(number, 0, row, deadline)
    seconds = time.perf_counter() - began
    if answer.reason == "status 429":
        return replace(found, remark="well, but its speed was not measured: it sends this member the model twice only")
    if answer.result != "ok":
        return replace(found, remark=f"it did not send the common initial model: {answer.result}, {answer.reason}")
    found = replace(
        found,
        clock_offset=answer.offset,
        seconds=seconds,
        megabytes_per_second=ask.signature.size / seconds / 1e6,
    )
    return replace(found, remark=_verdict(ask, row, answer.offset))


def _verdict(ask: Asking, row: Any, offset: float | None) -> str:
    period = ask.standing.membership.period
    if not np.array_equal(row, ask.initial, equal_nan=True):
        return "the initial model it sends is another one: give it the init.safetensors that came with members.toml"
    if offset is None:
        return "it does not tell its clock"
    if abs(offset) > _CLOCK * period:
        way = "ahead" if offset > 0 else "behind"
        return f"its clock is {abs(offset):.3g} s {way}, {abs(offset) / period:.2g} of a round: set it by NTP"
    return "well"


# --- a period --------------------------------------------------------------------------------------------------------


def suggestion(m: Membership, found: Sequence[Checked], step_seconds: float | None) -> float | None:
    """The period in which a local step and s pulls fit before the deadline, :data:`MARGIN` times over.

    The slowest member's pull counts, s times, because in a round it serves about s others at once and each peer's own
    line carries s models. The deadline is taken to stay the share of a round that it is.
    """
    times = [member.seconds for member in found if member.seconds is not None]
    if not times:
        return None
    share = m.deadline / m.period
    return max(SHORTEST, MARGIN * (max(times) * m.pull + (step_seconds or 0.0)) / share)


def measured_step(config: Config, ask: Asking) -> float | None:
    """Seconds of one local step of the task in peer.toml; None where the task cannot be loaded here."""
    m = ask.standing.membership
    try:
        learner: Learner = task_learner(
            config.task,
            index=ask.standing.me,
            nodes=m.nodes,
            run=m.run,
            hyperparameters=m.hyperparameters,
            local_steps=m.local_steps,
            signature=ask.signature,
            data=config.data,
        )
    except (ValueError, FileNotFoundError):
        return None
    half, scratch = np.empty((2, ask.signature.d), ask.signature.dtype)
    learner.prepare(ask.initial, scratch)
    learner.load(1, ask.initial, fresh=True)
    began = time.perf_counter()
    learner.half(half, scratch)
    return time.perf_counter() - began
