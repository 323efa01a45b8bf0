"""The pulls of a round: everybody drawn is asked at once, and on a slow line their models are read one after
the other (see :mod:`rpel.peer.net.intake`).

Invariants: whatever a member makes of its answer, it ends no round; a member that is excluded is not asked;
with each answer comes what its sender saw signed in the round before.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rpel.peer.core.protocol import Pull
from rpel.peer.io.detector import EquivocationDetector
from rpel.peer.io.metrics import Metrics
from rpel.peer.net.client import Answer, Client
from rpel.peer.net.intake import FIRST, Intake
from rpel.peer.net.snapshot import Snapshot
from rpel.text import shortened
from rpel.types import Models, PullResult

log = logging.getLogger("rpel")

_EXCLUDED = Answer(PullResult.REFUSED, reason="it is excluded: its key signed two half-steps of one round")


class Pulls:
    """What one peer asks of the others, round after round; all of it runs in the network's thread."""

    def __init__(
        self,
        client: Client,
        detector: EquivocationDetector,
        metrics: Metrics,
        alarm: Callable[[], None],
        next_members: Path,
    ) -> None:
        """``alarm()`` is called once if somebody shows a signature of this peer's key that this peer did not
        make."""
        self._client, self._detector, self._metrics = client, detector, metrics
        self._next_members = next_members
        self._alarm: Callable[[], None] | None = alarm
        self._gossiping: set[asyncio.Task[None]] = set()
        self._silent: list[int] = []
        self._other = ""
        self._width = FIRST  # bodies that are read at once
        self.digests: dict[int, str] = {}
        """The hashes of the models that were pulled last, by member."""

    async def clocks(self, now: Snapshot, seconds: float) -> list[float]:
        """How far the clocks of members that answer within so many seconds are ahead;
        says once whose are missing."""
        offsets = await self._client.clocks(now, asyncio.get_running_loop().time() + seconds)
        self._compare(now)
        needed, silent = (
            2 * now.membership.byzantine,
            [number for number in now.others if number not in offsets],
        )
        if len(offsets) < needed and silent != self._silent:
            log.info(
                "waiting until %d members tell their clocks; %d did, not yet: %s",
                needed,
                len(offsets),
                shortened([now.names[member] for member in silent]),
            )
        self._silent = silent
        return list(offsets.values())

    async def round(self, want: Pull, table: Models, seconds: float, now: Snapshot) -> list[Answer]:
        """Ask all members of a round's draw, each for its row of the table (1 + s, d),
        for so many seconds."""
        self._client.exhausted = False
        self._client.prune(now)
        loop = asyncio.get_running_loop()
        deadline, began = loop.time() + seconds, time.monotonic()
        intake = Intake(self._client.layout.size, max(seconds, 0.01), self._width)
        watching = loop.create_task(intake.watch())
        excluded, asking = self._detector.excluded(now), {}
        for turn, (number, row) in enumerate(zip(want.members, table[1:], strict=False)):
            if now.names[number] not in excluded:  # else a no-show, whatever it would say
                member = self._client.member(now, number)
                asking[number] = task = loop.create_task(
                    member.fetch(want.round, row, deadline, intake, turn)
                )
                task.add_done_callback(partial(self._answered, now, number, want.round, deadline, began))
        try:
            await asyncio.gather(*asking.values(), return_exceptions=True)
        finally:
            watching.cancel()
            self._width = max(intake.width, 1)
        self._compare(now)
        answers = [_answer(asking[number]) if number in asking else _EXCLUDED for number in want.members]
        pairs = zip(want.members, answers, strict=True)
        self.digests = {
            member: answer.signed.digest.hex() for member, answer in pairs if answer.signed is not None
        }
        return answers

    def _answered(
        self,
        now: Snapshot,
        member: int,
        round: int,
        deadline: float,
        began: float,
        task: "asyncio.Task[Answer]",
    ) -> None:
        """One member has answered, or will not; with an answer begins what it tells of the round before."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:  # a member must not end this peer
            log.error("round %d: asking %s failed", round, now.names[member], exc_info=error)
        answer = _answer(task)
        self._metrics.pulled(time.monotonic() - began, answer.received)
        if answer.result is not PullResult.OK:
            log.debug("round %d: %s is %s: %s", round, now.names[member], answer.result, answer.reason)
        elif answer.signed is not None:
            self._detector.saw(now, member, round, answer.signed)
            gossip = asyncio.get_running_loop().create_task(self._gossip(now, member, round - 1, deadline))
            self._gossiping.add(gossip)
            gossip.add_done_callback(self._gossiping.discard)

    async def _gossip(self, now: Snapshot, member: int, round: int, deadline: float) -> None:
        """What a member saw signed in the round before; whoever does not say is not asked again."""
        reply = await self._client.member(now, member).seen(round, deadline) if round > 0 else None
        if isinstance(reply, dict):
            self._detector.hear(now, round, reply)
        if self._detector.duplicate_key and self._alarm is not None:
            alarm, self._alarm = self._alarm, None  # once: this peer may be closing its network already
            alarm()

    def _compare(self, now: Snapshot) -> None:
        """Say once that this peer's members.toml is not the others', when more say so than can be hostile."""
        for other, count in self._client.held_elsewhere(now).most_common(1):
            if count > now.membership.byzantine and other not in (self._other, now.membership.hash):
                self._other = other
                log.warning(
                    "%d members hold the membership %s and refuse this peer, which holds %s: get their file "
                    "and put it at %s",
                    count,
                    other[:12],
                    now.membership.hash[:12],
                    self._next_members,
                )

    async def stop(self) -> None:
        """Ask nobody any more."""
        for gossip in self._gossiping:
            gossip.cancel()
        await self._client.close()


def _answer(task: "asyncio.Task[Answer]") -> Answer:
    """What came of asking one member, whatever went wrong."""
    error = task.exception()
    return task.result() if error is None else Answer(PullResult.MALFORMED, reason=repr(error))
