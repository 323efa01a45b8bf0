"""The pulls of a round: everybody drawn is asked at once, as an ``Exchange`` decides.

Invariant: whatever a member makes of its answer, it ends no round.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rpel.peer.core.evidence import Proof, Witness
from rpel.peer.core.exchange import Exchange, SecondInstanceError
from rpel.peer.core.protocol import Pull, Pulled
from rpel.peer.io.metrics import Metrics
from rpel.peer.io.proofs import keep
from rpel.peer.net.client import Answer, Client
from rpel.peer.net.intake import Turns
from rpel.peer.net.snapshot import Snapshot
from rpel.text import shortened
from rpel.types import Models, PullResult

log = logging.getLogger("rpel")

_SMALL = 256 << 10  # bytes of a body that connections hold anyway, whether it is read or not
_SLACK = 1.0  # seconds after the deadline by when every answer is given up


class Pulls:
    """What one peer asks of the others, round after round; all of it runs in the network's thread."""

    def __init__(
        self,
        client: Client,
        witness: Witness,
        evidence: Path,
        metrics: Metrics,
        next_members: Path,
        alarm: Callable[[SecondInstanceError], None],
    ) -> None:
        """``alarm`` ends this peer."""
        self._alarm = alarm
        self._client, self._witness, self._metrics = client, witness, metrics
        self._evidence, self._next_members = evidence, next_members
        self._working: set[asyncio.Task[None]] = set()
        self._silent: list[int] = []
        self._other = ""
        self.digests: dict[int, str] = {}
        """The hashes of the models that were pulled last, by member."""

    async def clocks(self, now: Snapshot, seconds: float) -> list[float]:
        """Return how far the clocks of the members that answer within these seconds are ahead.

        Logs once which answers are missing.
        """
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

    async def round(self, pull: Pull, table: Models, seconds: float, now: Snapshot) -> Pulled:
        """Ask the members of a round's draw, each for its row of the table (1 + s, d).

        ``seconds``: how long to wait for answers.
        """
        self._client.exhausted = False
        self._client.prune(now)
        exchange, over = Exchange(pull, now.roster, self._witness), asyncio.Event()
        loop, self.digests = asyncio.get_running_loop(), {}
        deadline, size = loop.time() + seconds, self._client.layout.size
        turns = Turns(exchange.members, pull.needed + 1, size, deadline, loop.time) if size > _SMALL else None
        asking = []
        for member in exchange.members:
            row = table[pull.members.index(member) + 1]
            work = self._ask(now, member, row, deadline, exchange, over, turns)
            asking.append(self._start(work))
        if exchange.over:
            over.set()
        try:
            async with asyncio.timeout(max(0.0, seconds) + _SLACK):
                await over.wait()
        except TimeoutError:
            pass
        await _ended(asking)
        self._compare(now)
        return exchange.pulled(table)

    async def _ask(
        self,
        now: Snapshot,
        member: int,
        row: Models,
        deadline: float,
        exchange: Exchange,
        over: asyncio.Event,
        turns: Turns | None,
    ) -> None:
        """One member, until it has answered or will not; what it tells of the round before comes after."""
        began, asked = time.monotonic(), self._client.member(now, member)

        def again(status: int) -> bool:
            more = exchange.refused(member, status)
            if exchange.over:
                over.set()
            return more

        try:
            answer = await asked.fetch(exchange.pull.round, row, deadline, turns, again)
        except Exception as error:  # a member must not end this peer
            log.exception("round %d: asking %s failed", exchange.pull.round, now.names[member])
            answer = Answer(PullResult.MALFORMED, reason=repr(error))
        self._metrics.pulled(time.monotonic() - began, answer.received)
        self._metrics.heard(now.names[member], answer.offset, answer.version)
        if answer.result is PullResult.OK:
            self._prove(now, exchange.answered(member, answer.signed, answer.offset))
            if answer.signed is not None:
                self.digests[member] = answer.signed.digest.hex()
                self._start(self._gossip(now, member, exchange, deadline))
        else:
            exchange.failed(member, answer.result)
            reason = f"{now.names[member]} is {answer.result}: {answer.reason}"
            log.debug("round %d: %s", exchange.pull.round, reason)
        if exchange.over:
            over.set()

    async def _gossip(self, now: Snapshot, member: int, exchange: Exchange, deadline: float) -> None:
        """Ask a member once which signatures it saw in the round before."""
        if not exchange.tells:
            return
        reply = await self._client.member(now, member).seen(exchange.tells, deadline)
        if isinstance(reply, dict):
            try:
                self._prove(now, exchange.told(reply))
            except SecondInstanceError as error:
                self._alarm(error)

    def _prove(self, now: Snapshot, proofs: list[Proof]) -> None:
        for proof in proofs:
            try:
                where = str(keep(self._evidence, proof, now.membership))
            except OSError as error:
                where = f"not on disk ({error})"
            log.warning(
                "%s signed two different half-steps of round %d: its answers count no longer; "
                "the proof is %s",
                now.names[proof.member],
                proof.round,
                where,
            )

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

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def stop(self) -> None:
        """Stop asking members, also in a round that was left."""
        await _ended(list(self._working))
        await self._client.close()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel these tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
