"""The serving end: GET over mutual TLS 1.3, for members alone, and never more than a member's share.

Invariants: limits on addresses and handshakes are decided before TLS; a handler runs only when the certificate at the
other end is the pin of a member, and looks the member up again for every request, since keys rotate; a request has no
body and is answered before the next one is looked at; what a member asks too much is refused late, so that it waits and
the others do not; a body leaves by its deadline or its reader is dropped; a body counts from its first byte, so that
cutting it off brings nothing.
"""

import asyncio
import json
import logging
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from aiohttp import web

from rpel.config.membership import Membership
from rpel.config.peer import listen_address
from rpel.peer.client import Answer, Client
from rpel.peer.desk import GONE, Decision, Desk
from rpel.peer.http import CLOCK, INIT, MODEL, STATUS
from rpel.peer.identity import KeyFile, leaf_fingerprint, server_context
from rpel.peer.limits import Gate, Limits, Pace, Ticket
from rpel.peer.store import Body
from rpel.peer.wire import Signature
from rpel.types import Models

CHUNK = 256 << 10  # a piece is encrypted in one go: larger ones would hold up the other connections
LARGEST_REQUEST = 4 << 10
_MODEL = re.compile(re.escape(MODEL) + "([1-9][0-9]{0,11})")
_log = logging.getLogger("rpel")
_QUIET = logging.Logger("rpel.http", logging.CRITICAL + 1)  # a member's bad requests must not fill the log


class Service(Protocol):
    """What the server asks of its peer. All of it is called in the event loop's thread, and must be quick."""

    @property
    def desk(self) -> Desk: ...

    def open_body(self, round: int) -> Body | None:
        """The half-step of a published round; round 0: the common initial model."""

    def position(self) -> float:
        """This peer's round clock."""

    def status(self) -> dict[str, object]:
        """What :code:`rpel watch` shows."""

    def served(self, member: int, code: int, sent: int) -> None:
        """A request was answered with this code; ``sent`` bytes of a body left."""


class Line(web.RequestHandler):
    """One connection of one member: aiohttp's, once the pin is known to be a member's."""

    def __init__(
        self,
        http: web.Server,
        idle: float,
        welcome: Callable[["Line"], bool],
        left: Callable[["Line"], None],
    ) -> None:
        super().__init__(
            http,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=idle,
            logger=_QUIET,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=256,
            max_field_size=256,
            max_headers=16,
            lingering_time=0,
            read_bufsize=LARGEST_REQUEST,
            auto_decompress=False,
        )
        self._welcome, self._left = welcome, left
        self._connection: asyncio.Transport | None = None
        self.pin = ""
        self.sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = cast(asyncio.Transport, transport)
        self.pin = leaf_fingerprint(transport.get_extra_info("ssl_object"))
        if self._welcome(self):
            self._connection.set_write_buffer_limits(high=1, low=0)  # a slow reader must not fill our memory
            super().connection_made(transport)
        else:
            self._connection.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._left(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once, whatever is still to be sent."""
        if self._connection is not None:
            self._connection.abort()


class Server:
    """Serves one peer's models. ``rotate`` changes membership and certificate while it runs."""

    def __init__(
        self, service: Service, membership: Membership, context: ssl.SSLContext, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._service, self._membership, self._context = service, membership, context
        self._gate = Gate(len(membership.members), self.limits)
        self._pace = Pace(self.limits.rate, self.limits.burst)
        self._greeting: dict[Ticket, asyncio.Task[None]] = {}
        self._lines: dict[str, list[Line]] = {}  # by pin, oldest first
        self._news = asyncio.Event()
        self._listening: list[socket.socket] = []
        self._unclaimed: set[socket.socket] = set()  # accepted, and no handshake has begun
        self.addresses: list[tuple[str, int]] = []

    @property
    def requests(self) -> int:
        """How many requests have come as far as being parsed."""
        return self._http.requests_count

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one (see ``addresses``)."""
        self._http = web.Server(self._answer, handler_cancellation=True)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in found[:1]:
            listening = socket.create_server(address[:2], family=family, backlog=256)
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
        tasks = list(self._greeting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in [line for lines in self._lines.values() for line in lines]:
            line.drop()
        await self._http.shutdown(1.0)

    def rotate(self, membership: Membership, context: ssl.SSLContext) -> None:
        """From now on this membership and certificate count; connections of those who left are closed."""
        self._membership, self._context = membership, context
        self._gate.resize(len(membership.members))
        for pin in [pin for pin in self._lines if membership.by_fingerprint(pin) is None]:
            for line in list(self._lines[pin]):
                line.drop()

    def announce(self) -> None:
        """The desk has changed: requests that wait for a round look again. In the event loop's thread."""
        self._news.set()
        self._news = asyncio.Event()

    # --- connections -------------------------------------------------------------------------------------------------

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """One connection: refused at once, or greeted. Accepted here and not in a task, which could lose it."""
        loop = asyncio.get_running_loop()
        try:
            accepted, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # gone before it was accepted
            return
        except OSError as error:  # too many open files: later there may be fewer
            _log.debug("could not accept a connection: %s", error)
            loop.remove_reader(listening)
            loop.call_later(0.05, self._listen, listening)
            return
        accepted.setblocking(False)
        ticket = self._gate.arrive(address[0], loop.time())
        if ticket is None:
            accepted.close()
            return
        self._unclaimed.add(accepted)
        self._greeting[ticket] = loop.create_task(self._greet(accepted, ticket))
        self._greeting[ticket].add_done_callback(lambda _: self._left_standing(accepted))

    def _left_standing(self, accepted: socket.socket) -> None:
        """A greeting that ended, perhaps before it began, without a handshake."""
        if accepted in self._unclaimed:
            self._unclaimed.discard(accepted)
            accepted.close()

    async def _greet(self, accepted: socket.socket, ticket: Ticket) -> None:
        """Its turn, then the handshake; what fails here was no member, or not a patient one."""
        line = Line(self._http, self.limits.idle, self._welcome, lambda gone: self._left(gone, ticket))
        try:
            await self._turn(ticket)
            self._unclaimed.discard(accepted)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: line,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self.limits.handshake,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, ValueError) as error:
            _log.debug("handshake with %s failed: %s", ticket.address, error)
        except asyncio.CancelledError:
            line.drop()  # if it was just over; it would wait for a goodbye
            raise
        finally:
            self._greeting.pop(ticket, None)
            self._gate.settle(ticket)
            if not line.pin:
                self._gate.leave(ticket)

    async def _turn(self, ticket: Ticket) -> None:
        await asyncio.sleep(ticket.wait)
        gives_way = self._gate.begin(ticket)
        if gives_way in self._greeting:
            self._greeting[gives_way].cancel()

    def _welcome(self, line: Line) -> bool:
        """A handshake is over: is it a member, by its pin?"""
        if self._membership.by_fingerprint(line.pin) is None:
            return False
        lines = self._lines.setdefault(line.pin, [])
        if len(lines) >= self.limits.connections:  # perhaps of a process that died without closing them
            lines[0].drop()
        lines.append(line)
        return True

    def _left(self, line: Line, ticket: Ticket) -> None:
        self._gate.leave(ticket)
        lines = self._lines.get(line.pin, [])
        if line in lines:
            lines.remove(line)
        if not lines:
            self._lines.pop(line.pin, None)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        line = cast(Line, request.protocol)
        member = self._membership.by_fingerprint(line.pin)
        if member is None:
            line.drop()
            return _empty(403)
        line.sent = 0
        try:
            response = await self._judged(request, line, member)
        except OSError:  # the reader went away
            raise
        except Exception:
            _log.exception("could not answer %s", request.raw_path[:80])
            response = _empty(500)
        self._service.served(member, response.status, line.sent)
        return response

    async def _judged(self, request: web.BaseRequest, line: Line, member: int) -> web.StreamResponse:
        if self._pace.turn(line.pin, asyncio.get_running_loop().time()) is None:
            await asyncio.sleep(self.limits.hold)
            return _closing(429)  # with all that it has sent meanwhile
        if request.method != "GET":
            return _closing(405)
        if "Content-Length" in request.headers or "Transfer-Encoding" in request.headers:
            return _closing(400)
        own = self._membership.hash
        if request.headers.get("RPEL-Membership") != own:
            return _empty(409, {"RPEL-Membership": own})
        path = request.raw_path
        if found := _MODEL.fullmatch(path):
            return await self._model(request, line, member, int(found[1]))
        if path == INIT:
            return await self._model(request, line, member, 0)
        if path == CLOCK:
            return _json({"position": self._service.position()})
        if path == STATUS:
            return _json(self._service.status())
        return _empty(404)

    async def _model(self, request: web.BaseRequest, line: Line, member: int, round: int) -> web.StreamResponse:
        """One body, if the desk gives it: now, or when its round is published."""
        desk, loop = self._service.desk, asyncio.get_running_loop()
        came = loop.time()
        decision = desk.request(member, round)
        if decision.kind == "refuse":
            return _empty(decision.code)
        try:
            if decision.kind == "wait":
                decision = await self._published(desk, round)
            if decision.kind != "serve":
                return _empty(decision.code)
            body = self._service.open_body(round)
            if body is None:
                return _empty(GONE)
            try:
                return await self._send(request, line, round, body, loop.time() - came)
            finally:
                body.close()
        finally:
            desk.done(member, round, full=line.sent > 0)

    async def _published(self, desk: Desk, round: int) -> Decision:
        """Wait until the round is published, will never be, or patience ends."""
        try:
            async with asyncio.timeout(self.limits.patience):
                while (decision := desk.look(round)).kind == "wait":
                    await self._news.wait()
        except TimeoutError:
            decision = desk.look(round)
        return decision

    async def _send(
        self, request: web.BaseRequest, line: Line, round: int, body: Body, waited: float
    ) -> web.StreamResponse:
        headers = {
            "RPEL-Round": str(round),
            "RPEL-Position": f"{self._service.position():.6f}",
            "RPEL-Waited": f"{waited:.6f}",
            "Server": "rpel",
        }
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = body.size
        try:
            async with asyncio.timeout(self.limits.write):
                await response.prepare(request)
                for begin in range(0, body.size, CHUNK):
                    chunk = body.read(begin, CHUNK)
                    line.sent += len(chunk)
                    await response.write(chunk)
                await response.write_eof()
        except TimeoutError:
            line.drop()
            raise ConnectionResetError("its reader was too slow") from None
        return response


def _empty(status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers={"Server": "rpel", **(headers or {})})


def _closing(status: int) -> web.Response:
    response = _empty(status)
    response.force_close()
    return response


def _json(content: dict[str, object]) -> web.Response:
    body = json.dumps(content).encode()
    return web.Response(body=body, content_type="application/json", headers={"Server": "rpel"})


# --- both ends --------------------------------------------------------------------------------------------------------


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
    ) -> None:
        context = server_context(certificate, key, (member.certificate for member in membership.members))
        self._listen, self._clock_timeout = listen_address(listen), clock_timeout
        self.server = Server(service, membership, context, limits)
        self.client = Client(membership, certificate, key, signature, service.position)

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

    async def pull(self, member: int, round: int, row: Models, deadline: float) -> Answer:
        return await self.client.pull(member, round, row, deadline)

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
