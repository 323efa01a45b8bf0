"""Both ends of a peer's network with one certificate, and the pulls of a round: everybody drawn is asked at once, and
on a slow line their models are read one after the other (see :mod:`rpel.peer.intake`).

Invariants: whatever a member makes of its answer, it ends no round; a member that is convicted is not asked; with each
answer comes what its sender saw signed in the round before.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpel.config.membership import Membership
from rpel.config.peer import listen_address
from rpel.peer.client import Answer, Client
from rpel.peer.evidence import EquivocationDetector
from rpel.peer.identity import KeyFile, Standing, server_context
from rpel.peer.intake import FIRST, Intake
from rpel.peer.limits import Limits
from rpel.peer.metrics import Metrics
from rpel.peer.protocol import Pull
from rpel.peer.server import Server, Service
from rpel.peer.wire import Signature
from rpel.text import shortened
from rpel.types import Models, PullResult

log = logging.getLogger("rpel")


class HttpsTransport:
    """A peer's two ends, with one certificate. A missing or unfit key or certificate: ValueError, nothing is opened."""

    def __init__(
        self,
        membership: Membership,
        certificate: Path,
        key: KeyFile,
        listen: str,
        signature: Signature,
        service: Service,
        limits: Limits | None = None,
        clock_timeout: float = 3.0,
        addresses: Path | None = None,
    ) -> None:
        context = server_context(certificate, key, (member.certificate for member in membership.members))
        self._listen, self._clock_timeout = listen_address(listen), clock_timeout
        self.server = Server(service, membership, context, limits)
        self.client = Client(membership, certificate, key, signature, service.position, addresses)

    @property
    def port(self) -> int:
        """Where this peer listens, once it does."""
        return self.server.addresses[0][1]

    async def start(self) -> None:
        """Listen."""
        await self.server.start(*self._listen)

    async def stop(self) -> None:
        """Close everything."""
        await self.server.stop()
        await self.client.close()

    async def pull(
        self, member: int, round: int, row: Models, deadline: float, turn: tuple[Intake, int] | None = None
    ) -> Answer:
        return await self.client.pull(member, round, row, deadline, turn)

    async def clocks(self) -> list[float]:
        return await self.client.clocks(asyncio.get_running_loop().time() + self._clock_timeout)

    async def status(self, member: int, deadline: float) -> dict[str, Any] | Answer:
        """What a member says of itself; an Answer if it does not."""
        return await self.client.status(member, deadline)

    def announce(self) -> None:
        self.server.announce()

    def rotate(self, membership: Membership, certificate: Path, key: KeyFile) -> None:
        context = server_context(certificate, key, (member.certificate for member in membership.members))
        self.server.rotate(membership, context)
        self.client.rotate(membership, certificate, key)


class Pulls:
    """What one peer asks of the others, round after round; all of it runs in the network's thread."""

    def __init__(
        self,
        transport: HttpsTransport,
        notary: EquivocationDetector,
        metrics: Metrics,
        alarm: Callable[[], None],
        next_members: Path,
    ) -> None:
        """``alarm()`` is called once if somebody shows a signature of this peer's key that this peer did not make."""
        self._transport, self._notary, self._metrics = transport, notary, metrics
        self._next_members = next_members
        self._alarm: Callable[[], None] | None = alarm
        self._gossiping: set[asyncio.Task[None]] = set()
        self._silent: tuple[int, ...] = ()
        self._other = ""
        self._width = FIRST  # bodies that are read at once
        self.came: dict[int, str] = {}
        """The hashes of the models that came last, by member."""

    async def clocks(self, here: Standing) -> list[float]:
        """How far the members' clocks are ahead; says once whose are missing to begin."""
        offsets = await self._transport.clocks()
        self._compare(here)
        needed, silent = 2 * here.membership.byzantine, self._transport.client.silent
        if len(offsets) < needed and silent != self._silent:
            log.info(
                "waiting until %d members tell their clocks; %d did, not yet: %s",
                needed,
                len(offsets),
                shortened([here.names[member] for member in silent]),
            )
        self._silent = silent
        return offsets

    async def all(self, want: Pull, table: Models, seconds: float, here: Standing) -> list[Answer]:
        """Ask all members of a round's draw, each for its row of the table (1 + s, d), for so many seconds."""
        self._transport.client.exhausted = False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        intake = Intake(table[0].nbytes, max(seconds, 0.01), self._width)
        names = here.names_to(max(want.members, default=0))
        watching = loop.create_task(intake.watch())
        try:
            answers = await asyncio.gather(
                *(
                    self.ask(member, want.round, row, deadline, names[member], (intake, number))
                    for number, (member, row) in enumerate(zip(want.members, table[1:], strict=True))
                )
            )
        finally:
            watching.cancel()
            self._width = max(intake.width, 1)
        self._compare(here)
        pairs = zip(want.members, answers, strict=True)
        self.came = {member: answer.signed.digest.hex() for member, answer in pairs if answer.signed is not None}
        return answers

    async def ask(
        self, member: int, round: int, row: Models, deadline: float, name: str, turn: tuple[Intake, int] | None = None
    ) -> Answer:
        """Pull one member's model of a round into its row; whatever goes wrong is an Answer."""
        began = time.monotonic()
        if name in self._notary.convicted:  # a no-show, whatever it would say
            return Answer(PullResult.REFUSED, reason="it was convicted of signing two half-steps of one round")
        try:
            answer = await self._transport.pull(member, round, row, deadline, turn)
        except Exception as error:  # whatever a member makes of its answer, it must not end this peer
            log.exception("round %d: asking %s failed", round, name)
            answer = Answer(PullResult.MALFORMED, reason=repr(error))
        self._metrics.pulled(time.monotonic() - began, answer.received)
        if answer.result is not PullResult.OK:
            log.debug("round %d: %s is %s: %s", round, name, answer.result, answer.reason)
        elif answer.signed is not None:
            self._notary.saw(member, round, answer.signed)
            asking = asyncio.get_running_loop().create_task(self._gossip(member, round - 1, deadline))
            self._gossiping.add(asking)
            asking.add_done_callback(self._gossiping.discard)
        return answer

    async def _gossip(self, member: int, round: int, deadline: float) -> None:
        """What a member saw signed in the round before; whoever does not say is not asked again."""
        told = await self._transport.client.seen(member, round, deadline) if round > 0 else None
        if isinstance(told, dict):
            self._notary.hear(round, told)
        if self._notary.impostor and self._alarm is not None:
            alarm, self._alarm = self._alarm, None  # once: this peer may be closing its network already
            alarm()

    def _compare(self, here: Standing) -> None:
        """Say once that this peer's members.toml is not the others', when more say so than can be hostile."""
        for other, count in Counter(self._transport.client.differing.values()).most_common(1):
            if count > here.membership.byzantine and other != self._other:
                self._other = other
                log.warning(
                    "%d members hold the membership %s and refuse this peer, which holds %s: get their file and put it "
                    "at %s",
                    count,
                    other[:12],
                    here.membership.hash[:12],
                    self._next_members,
                )

    async def stop(self) -> None:
        """Ask nobody any more, and close the network."""
        for asking in self._gossiping:
            asking.cancel()
        await self._transport.stop()
