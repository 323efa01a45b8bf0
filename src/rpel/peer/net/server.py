"""The serving end: GET over mutual TLS 1.3, for members alone, and never more than a member's share.

Invariants: limits on addresses and handshakes are decided before TLS; a handler runs only when the
certificate at the other end is the pin of a member, and looks the member up again for every request, since
keys rotate; a request has no body and is answered before the next one is looked at; what a member asks too
much is refused late, so that it waits and the others do not; a body leaves by its deadline or its reader is
dropped; a body counts from its first byte, so that cutting it off brings nothing.
"""

import asyncio
import base64
import logging
import math
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Protocol

from rpel.peer.core.serve_policy import GONE, Decision, ServePolicy
from rpel.peer.net.http import (
    CLOCK,
    INIT,
    MODEL,
    REACH,
    SEEN,
    STATUS,
    Line,
    Reply,
    Request,
    Socket,
    all_closed,
    json_reply,
    reply_head,
)
from rpel.peer.net.limits import Gate, Limits, Stage, Ticket
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.net.tls import leaf_fingerprint
from rpel.version import __version__

# encrypted in one go: larger ones hold up others, and malloc maps 128 KiB and more anew each time
CHUNK = 96 << 10
_MODEL = re.compile(re.escape(MODEL) + "([1-9][0-9]{0,11})")
_SEEN = re.compile(re.escape(SEEN) + "([1-9][0-9]{0,11})")
_HELLO = re.compile(rb"\x16\x03.{3}\x01", re.DOTALL)  # a TLS record that begins a ClientHello
_GRACE = 5.0  # seconds that a body may leave after the reader's deadline, by when nobody wants it any more
_BETWEEN_CALLS = 60.0  # seconds between two calls back to one member
_log = logging.getLogger("rpel")

CallBack = Callable[[Snapshot, int], Awaitable[bool]]
"""(membership, member) → whether that member is reached at its url."""


class Body(Protocol):
    """A model as it travels, read in pieces."""

    @property
    def size(self) -> int: ...

    def read(self, begin: int, count: int) -> bytes: ...

    def close(self) -> None: ...


class Service(Protocol):
    """What the server asks of its peer. All of it is called in the event loop's thread, and must be quick."""

    @property
    def now(self) -> Snapshot:
        """The membership in force."""

    @property
    def policy(self) -> ServePolicy: ...

    def open_body(self, round: int) -> Body | None:
        """The half-step of a published round; round 0: the common initial model."""

    def signature_of(self, round: int) -> bytes | None:
        """The signature of the half-step of a published round; None where none are made."""

    def seen(self, now: Snapshot, round: int) -> dict[str, object] | None:
        """What this peer saw signed in a round; None where signatures are not made."""

    def position(self) -> float:
        """This peer's round clock."""

    def status(self) -> dict[str, object]:
        """What :code:`rpel network status` shows."""

    def served(self, now: Snapshot, member: int, code: int, sent: int) -> None:
        """A request was answered with this code; ``sent`` bytes of a body left."""


class MemberLine(Line):
    """A connection whose other end has shown a member's certificate.

    Nothing is parsed before that is known.
    """

    def __init__(self, server: "Server", ticket: Ticket) -> None:
        super().__init__(server.answer, server.limits.idle)
        self._server, self._ticket = server, ticket
        self.pin = ""
        self.sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.pin = leaf_fingerprint(transport.get_extra_info("ssl_object"))
        if self._server.welcome(self, self._ticket):
            super().connection_made(transport)
        else:
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self, self._ticket)
        if self.transport is not None:
            super().connection_lost(exc)


@dataclass(frozen=True)
class _Accepted:
    """A connection that has sent nothing yet, and what closes it if it never does."""

    socket: socket.socket
    timeout: asyncio.TimerHandle


class Server:
    """Serves one peer's models, each request under the membership that is in force when it comes."""

    def __init__(
        self, service: Service, limits: Limits | None = None, call_back: CallBack | None = None
    ) -> None:
        """Prepare to serve; nothing is opened yet.

        Raises ValueError if the key or the certificate is missing or unfit. ``call_back``: tries to reach a
        member at its url, if members may ask for that.
        """
        _ = service.now.server_context  # read it now, so that an unreadable key is an error at the start
        self.limits, self._service = limits or Limits(), service
        self._gate = Gate(len(service.now.membership.members), self.limits, self._give_way)
        self._pace = self.limits.pace(len(service.now.membership.members))
        self._mute: dict[Ticket, _Accepted] = {}
        self._greeting: dict[Ticket, asyncio.Task[None]] = {}
        self._unclaimed: set[socket.socket] = set()  # sockets whose handshake has not begun
        self._lines: dict[str, list[MemberLine]] = {}  # by pin, oldest first
        self._call_back = call_back
        self._called: dict[str, float] = {}  # by pin: time of the last call back
        self._news = asyncio.Event()
        self._listening: list[socket.socket] = []
        self._sockets: set[Socket] = set()
        self.addresses: list[tuple[str, int]] = []
        self.requests = 0
        """How many requests have come as far as being parsed."""

    @property
    def handshakes(self) -> int:
        """Connections that have sent a ClientHello and are not yet known to be a member's."""
        return self._gate.count(Stage.WAITING) + self._gate.count(Stage.PENDING)

    @property
    def mute(self) -> int:
        """Connections that have sent nothing yet."""
        return len(self._mute)

    def connections(self, pin: str | None = None) -> int:
        """Open connections of the member with this pin, or of all."""
        return sum(len(lines) for other, lines in self._lines.items() if pin in (None, other))

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one (see ``addresses``)."""
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in addresses[:1]:
            both = host == "::" and socket.has_dualstack_ipv6()
            listening = socket.create_server(address[:2], family=family, backlog=256, dualstack_ipv6=both)
            listening.setblocking(False)
            self.addresses.append(listening.getsockname()[:2])
            self._listening.append(listening)
            self._listen(listening)

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        for listening in self._listening:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._listening = []
        for ticket in list(self._mute):
            self._hang_up(ticket)
        tasks = list(self._greeting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in [line for lines in self._lines.values() for line in lines]:
            line.drop()
        await all_closed(self._sockets)

    def membership_changed(self) -> None:
        """Another one is in force: connections of those who left are closed."""
        membership = self._service.now.membership
        self._gate.resize(len(membership.members))
        self._pace = self.limits.pace(len(membership.members))
        for pin in [pin for pin in self._lines if membership.by_fingerprint(pin) is None]:
            for line in list(self._lines[pin]):
                line.drop()

    def announce(self) -> None:
        """The policy has changed: requests that wait for a round look again. In the event loop's thread."""
        self._news.set()
        self._news = asyncio.Event()

    # --- connections ----------------------------------------------------------------------------------------

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection, which is then refused at once or greeted.

        This happens here and not in a task, because a cancelled task could lose the connection.
        """
        loop = asyncio.get_running_loop()
        try:
            connection, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # gone before it was accepted
            return
        except OSError as error:  # too many open files: try again later
            _log.debug("could not accept a connection: %s", error)
            loop.remove_reader(listening)
            loop.call_later(0.05, self._listen, listening)
            return
        accepted = Socket(fileno=connection.detach(), kept=self._sockets)
        ticket = self._gate.arrive(address[0])
        self._mute[ticket] = _Accepted(
            accepted, loop.call_later(self.limits.handshake, self._hang_up, ticket)
        )
        loop.add_reader(accepted, self._spoke, ticket)

    def _spoke(self, ticket: Ticket) -> None:
        """The first bytes came: if they begin a ClientHello, its handshake begins when it is its turn."""
        accepted, loop = self._mute[ticket].socket, asyncio.get_running_loop()
        try:
            hello = _HELLO.match(accepted.recv(6, socket.MSG_PEEK))
        except OSError:
            hello = None
        wait = None if hello is None else self._gate.speak(ticket, loop.time())
        if wait is None:
            self._hang_up(ticket)
            return
        self._take(ticket)
        self._unclaimed.add(accepted)
        self._greeting[ticket] = task = loop.create_task(self._greet(accepted, ticket, wait))
        task.add_done_callback(lambda _: self._greeted(ticket, accepted))

    def _take(self, ticket: Ticket) -> socket.socket | None:
        """The socket of a connection that has sent nothing, which is no longer watched here."""
        held = self._mute.pop(ticket, None)
        if held is None:
            return None
        held.timeout.cancel()
        asyncio.get_running_loop().remove_reader(held.socket)
        return held.socket

    def _hang_up(self, ticket: Ticket) -> None:
        if (accepted := self._take(ticket)) is not None:
            accepted.close()
            self._gate.leave(ticket)

    def _give_way(self, ticket: Ticket) -> None:
        """Close this connection because there are too many."""
        self._hang_up(ticket)
        if ticket in self._greeting:
            self._greeting[ticket].cancel()

    async def _greet(self, accepted: socket.socket, ticket: Ticket, wait: float) -> None:
        """Wait for the connection's turn, then do the handshake.

        A connection that fails here does not belong to a member, or gave up.
        """
        line = MemberLine(self, ticket)
        try:
            await asyncio.sleep(wait)
            if self._gate.begin(ticket):
                context = self._service.now.server_context
                self._unclaimed.discard(accepted)  # asyncio closes it from here on
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: line,
                    accepted,
                    ssl=context,
                    ssl_handshake_timeout=self.limits.handshake,
                    ssl_shutdown_timeout=1.0,
                )
        except (OSError, ValueError) as error:
            _log.debug("handshake with %s failed: %s", ticket.address, error)
        except asyncio.CancelledError:
            line.drop()  # if it was just over; it would wait for a goodbye
            raise

    def _greeted(self, ticket: Ticket, accepted: socket.socket) -> None:
        """End a greeting, perhaps before it began.

        The socket is closed unless a member's connection came of it.
        """
        del self._greeting[ticket]
        if accepted in self._unclaimed:
            self._unclaimed.discard(accepted)
            accepted.close()
        if ticket.stage is not Stage.MEMBER:
            self._gate.leave(ticket)

    def welcome(self, line: MemberLine, ticket: Ticket) -> bool:
        """A handshake is over: is it a member, by its pin?"""
        if self._service.now.membership.by_fingerprint(line.pin) is None:
            return False
        self._gate.admit(ticket, asyncio.get_running_loop().time())
        lines = self._lines.setdefault(line.pin, [])
        staying = [other for other in lines if not other.dropped]
        if len(staying) >= self.limits.connections:  # perhaps of a process that died without closing them
            staying[0].drop()
        lines.append(line)
        return True

    def left(self, line: MemberLine, ticket: Ticket) -> None:
        """A connection is closed."""
        lines = self._lines.get(line.pin, [])
        if line in lines:
            lines.remove(line)
            self._gate.leave(ticket)
        if not lines:
            self._lines.pop(line.pin, None)

    # --- requests -------------------------------------------------------------------------------------------

    async def answer(self, line: Line, request: Request) -> Reply | None:
        """One request of a member; None: the reply is sent."""
        assert isinstance(line, MemberLine)
        self.requests += 1
        now = self._service.now
        member = now.membership.by_fingerprint(line.pin)
        # it may have ended meanwhile
        if member is None or now.membership.members[member].expires <= time.time():
            line.drop()
            return Reply(403, closing=True)
        line.sent = 0
        try:
            reply = await self._judged(request, line, now)
        except OSError:  # the reader went away
            raise
        except Exception:
            _log.exception("could not answer %s", request.path[:80])
            reply = Reply(500, closing=True)
        self._service.served(now, member, 200 if reply is None else reply.status, line.sent)
        return reply

    async def _judged(self, request: Request, line: MemberLine, now: Snapshot) -> Reply | None:
        if self._pace.turn(line.pin, asyncio.get_running_loop().time()) is None:
            await asyncio.sleep(self.limits.hold)
            return Reply(429, closing=True)  # with all that it has sent meanwhile
        if request.method != "GET":
            return Reply(405, closing=True)
        if "content-length" in request.headers or "transfer-encoding" in request.headers:
            return Reply(400, closing=True)
        if request.headers.get("rpel-membership") != now.membership.hash:
            return Reply(409, headers={"RPEL-Membership": now.membership.hash})
        if match := _MODEL.fullmatch(request.path):
            return await self._model(line, now, int(match[1]))
        if match := _SEEN.fullmatch(request.path):
            seen = self._service.seen(now, int(match[1]))
            return Reply(404) if seen is None else json_reply(seen)
        if request.path == INIT:
            return await self._model(line, now, 0)
        if request.path == CLOCK:
            return json_reply({"position": self._service.position()})
        if request.path == STATUS:
            return json_reply(self._service.status())
        if request.path == REACH and self._call_back is not None:
            return await self._reached(line, now)
        return Reply(404)

    async def _reached(self, line: MemberLine, now: Snapshot) -> Reply:
        """Call the asker back, at its own url and nowhere else, and rarely.

        Otherwise members could use this peer to scan the ports of others.
        """
        assert self._call_back is not None, "looked at before"
        member, moment = now.membership.by_fingerprint(line.pin), asyncio.get_running_loop().time()
        if member is None or moment - self._called.get(line.pin, -math.inf) < _BETWEEN_CALLS:
            return json_reply({"too_often": True})
        self._called[line.pin] = moment
        return json_reply({"reached": await self._call_back(now, member)})

    async def _model(self, line: MemberLine, now: Snapshot, round: int) -> Reply | None:
        """One body, if the policy gives it: now, or when its round is published."""
        policy, began = self._service.policy, asyncio.get_running_loop().time()
        period = now.membership.timetable.round(self._service.position())
        decision = policy.request(line.pin, round, period)
        if decision.kind == "refuse":
            return Reply(decision.code)
        try:
            if decision.kind == "wait":
                decision = await self._published(policy, round, began)
            if decision.kind != "serve":
                return Reply(decision.code)
            try:
                body = self._service.open_body(round)
            except OSError:  # of this end's disk, and not of the reader
                _log.exception("the half-step of round %d cannot be read", round)
                return Reply(500, closing=True)
            if body is None:
                return Reply(GONE)
            with closing(body):
                await self._send(line, now, round, body, began)
        finally:
            policy.done(line.pin, round, full=line.sent > 0)
        return None

    async def _published(self, policy: ServePolicy, round: int, began: float) -> Decision:
        """Wait until the round is published, will never be, or patience ends."""
        loop = asyncio.get_running_loop()
        while (decision := policy.look(round, loop.time() - began)).kind == "wait":
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + policy.patience):
                    await self._news.wait()
        return decision

    async def _send(self, line: MemberLine, now: Snapshot, round: int, body: Body, began: float) -> None:
        write = now.membership.deadline + _GRACE if self.limits.write is None else self.limits.write
        waited = asyncio.get_running_loop().time() - began
        headers = {
            "Content-Type": "application/octet-stream",
            "RPEL-Round": str(round),
            "RPEL-Position": f"{self._service.position():.6f}",
            "RPEL-Waited": f"{waited:.6f}",
            "RPEL-Version": __version__,
        }
        if (signature := self._service.signature_of(round)) is not None:
            headers["RPEL-Signature"] = base64.b64encode(signature).decode()
        try:
            async with asyncio.timeout(write):
                line.writer.write(reply_head(200, body.size, headers))
                for begin in range(0, body.size, CHUNK):
                    chunk = body.read(begin, CHUNK)
                    line.sent += len(chunk)
                    line.writer.write(chunk)
                    await line.writer.drain()
        except TimeoutError:
            line.drop()
            raise ConnectionResetError("its reader was too slow") from None
