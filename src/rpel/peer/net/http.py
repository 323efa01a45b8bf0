"""Speak the little HTTP/1.1 that peers use, at both ends: GET, small heads, bodies of known length.

Invariants: no redirects, no compression, no chunks, no cookies, no interim replies, no header twice; a head
has at most 4 KiB and 16 headers. A reply is read only as long as it can still be the one that was asked for:
it can make this end hold one head, and the row or the few bytes where its body goes, and no more. An
unexpected byte ends the connection. A request has no body and is answered before the next one is looked at;
bytes that arrive meanwhile wait in 8 KiB here, and then in the kernel.

Heads are parsed by h11. What h11 accepts beyond plain HTTP/1.1 is refused here: bare line feeds, folded
headers, headers that it would merge. Bodies never go through h11: they are read from the socket into their
row, and the amount read is bounded here, because general libraries queue whatever arrives on a connection
that waits.
"""

import asyncio
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import cast

import h11

from rpel.peer.core.wire import Malformed

MODEL, SEEN, INIT, CLOCK, STATUS = "/v1/model/", "/v1/seen/", "/v1/init", "/v1/clock", "/v1/status"
REACH = "/v1/reach"
"""Asks a member to call back at the asker's url."""
_log = logging.getLogger("rpel")
LARGEST_HEAD = 4 << 10
LARGEST_TEXT = 64 << 10
_MOST_HEADERS = 16
_LONGEST_HEADER = 256
_LONGEST_TARGET = 256
_CLOSED_WITHIN = 2.0  # seconds in which asyncio closes the sockets of connections that were aborted
_PLAIN = re.compile(rb"[ -~]*(\r\n[\t -~]*)*")  # lines of printable ASCII, each ended by both characters
_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS")
_NAME, _VALUE = re.compile(rb"[a-z0-9-]+"), re.compile(rb"[ -~]*")
_ANY = h11.Request(method="GET", target="/", headers=[("Host", "peer")])
"""h11 reads a reply only after a request."""


@dataclass(frozen=True)
class Head:
    """Status and headers (names in lower case) of a reply, and whether the connection can be used again."""

    status: int
    headers: Mapping[str, str]

    @property
    def lasting(self) -> bool:
        return "connection" not in self.headers


def parse_head(data: bytes) -> Head:
    """The head of a reply, without the empty line at its end; Malformed unless it is plain HTTP/1.1.

    >>> parse_head(b"HTTP/1.1 200 OK\\r\\nRPEL-Round: 7").headers["rpel-round"]
    '7'
    """
    connection = h11.Connection(h11.CLIENT, LARGEST_HEAD + 4)
    connection.send(_ANY)
    event, lines = _parsed(connection, data)
    if (
        not isinstance(event, h11.Response)
        or not event.status_code < 600
        or not lines[0].startswith(b"HTTP/1.1 ")
    ):
        raise Malformed("not a reply in HTTP/1.1")
    return Head(event.status_code, _headers(event, lines))


@dataclass(frozen=True)
class Request:
    """Method, path and headers (names in lower case) of a request."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def lasting(self) -> bool:
        return "connection" not in self.headers


@lru_cache(maxsize=64)
def parse_request(data: bytes) -> Request:
    """The head of a request, without the empty line at its end; Malformed unless it is plain HTTP/1.1.

    All who ask for one round send the same bytes: they are parsed once.

    >>> parse_request(b"GET /v1/clock HTTP/1.1\\r\\nHost: a:7443").path
    '/v1/clock'
    """
    event, lines = _parsed(h11.Connection(h11.SERVER, LARGEST_HEAD + 4), data)
    if not isinstance(event, h11.Request) or event.method not in _METHODS:
        raise Malformed("not a request in HTTP/1.1")
    if lines[0] != b"%b %b HTTP/1.1" % (event.method, event.target) or not event.target.startswith(b"/"):
        raise Malformed("not a request in HTTP/1.1")
    if len(event.target) > _LONGEST_TARGET:
        raise Malformed("a path that is too long")
    return Request(event.method.decode(), event.target.decode(), _headers(event, lines))


def _parsed(connection: h11.Connection, data: bytes) -> tuple[object, list[bytes]]:
    """What h11 makes of a head, and its lines."""
    if _PLAIN.fullmatch(data) is None:
        raise Malformed("a head that is not lines of plain text")
    try:
        connection.receive_data(data + b"\r\n\r\n")
        return connection.next_event(), data.split(b"\r\n")
    except h11.RemoteProtocolError as error:
        raise Malformed(f"not HTTP/1.1: {error}") from None


def _headers(event: h11.Request | h11.Response, lines: list[bytes]) -> dict[str, str]:
    """The headers by name: one for each line, or h11 has merged some."""
    if len(lines) - 1 > _MOST_HEADERS:
        raise Malformed(f"more than {_MOST_HEADERS} headers")
    headers = dict(event.headers)
    plain = all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in headers.items())
    if len(headers) != len(lines) - 1 or not plain or max(map(len, lines[1:]), default=0) > _LONGEST_HEADER:
        raise Malformed("a header that is not plain, too long, or stands there twice")
    return {name.decode(): value.decode() for name, value in headers.items()}


def reply_head(status: int, length: int, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of a reply, with the empty line at its end.

    >>> reply_head(404, 0)
    b'HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\nServer: rpel\\r\\n\\r\\n'
    """
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {length}", "Server: rpel"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Reply:
    """A small reply; ``closing``: the connection ends with it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] | None = None
    closing: bool = False

    def __bytes__(self) -> bytes:
        more = {**(self.headers or {}), **({"Connection": "close"} if self.closing else {})}
        return reply_head(self.status, len(self.body), more) + self.body


def json_reply(content: Mapping[str, object]) -> Reply:
    """A JSON object as a reply."""
    return Reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


class Socket(socket.socket):
    """A socket that says when it is closed: asyncio closes one some turns of its loop after it was told to.

    ``kept``: a set that holds it as long as it is open.
    """

    def __init__(
        self,
        family: int = -1,
        kind: int = -1,
        protocol: int = -1,
        *,
        kept: "set[Socket]",
        fileno: int | None = None,
    ) -> None:
        super().__init__(family, kind, protocol, fileno)
        self.setblocking(False)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = kept
        kept.add(self)

    def close(self) -> None:
        super().close()
        self._kept.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)


async def all_closed(sockets: set[Socket]) -> None:
    """Wait until asyncio has closed these sockets; close those that it has not closed in time."""
    if sockets:
        await asyncio.wait([reached.ended for reached in sockets], timeout=_CLOSED_WITHIN)
    for reached in list(sockets):
        reached.close()


class Line(asyncio.StreamReaderProtocol):
    """One accepted connection, on which requests are answered one at a time.

    ``answer(line, request)`` returns the reply, or None if it has sent one itself; it is cancelled when the
    other end leaves. A connection is closed when no whole request comes within ``idle`` seconds.
    """

    def __init__(
        self,
        answer: Callable[["Line", Request], Awaitable[Reply | None]],
        idle: float,
        first: float | None = None,
    ) -> None:
        """``first``: seconds for the first request, if they are fewer."""
        super().__init__(asyncio.StreamReader(limit=LARGEST_HEAD), self._connected)
        self._answer_one, self._idle, self._first = answer, idle, idle if first is None else first
        self._serving: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests = 0
        self.busy = self.dropped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=1, low=0)  # a slow reader must not fill our memory
        super().connection_made(transport)
        if self.dropped:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._serving is not None:
            self._serving.cancel()
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def drop(self) -> None:
        """Close at once, whatever is still to be sent; before it is made, as soon as it is."""
        self.dropped = True
        if self.transport is not None:
            self.transport.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._serving = asyncio.get_running_loop().create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            self.drop()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False: there will be no other."""
        try:
            async with asyncio.timeout(self._idle if self.requests else self._first):
                request = parse_request((await reader.readuntil(b"\r\n\r\n"))[:-4])
        except (Malformed, asyncio.LimitOverrunError):
            writer.write(bytes(Reply(400, closing=True)))
            await writer.drain()
            return False
        self.requests += 1
        self.busy = True
        try:
            try:
                reply = await self._answer_one(self, request)
            except OSError:  # the other end went away
                raise
            except Exception:
                _log.exception("could not answer %s", request.path[:80])
                reply = Reply(500, closing=True)
            if reply is not None:
                # whoever never reads would keep all that waits for it
                async with asyncio.timeout(self._idle):
                    writer.write(bytes(reply))
                    await writer.drain()
            return request.lasting and not (reply is not None and reply.closing)
        finally:
            self.busy = False
