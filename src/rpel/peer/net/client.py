"""Ask members over mutual TLS 1.3, repeatedly, until they answer or the deadline comes.

Invariants: nothing is sent before the certificate at the other end is the pin of the member meant; a reply is
accepted only if it is a model of this network in the round wanted, and is read piece by piece into the row
that waits for it; once a body has begun it is not asked for again; a connection on which a byte comes that
nobody asked for is closed; one absolute deadline ends everything.
"""

import asyncio
import base64
import errno
import json
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

from rpel.peer.core.clock import ahead, offset
from rpel.peer.core.evidence import Signed
from rpel.peer.core.exchange import PAUSES, refusal
from rpel.peer.core.wire import Layout, Malformed, Reception
from rpel.peer.net.http import (
    CLOCK,
    INIT,
    LARGEST_HEAD,
    LARGEST_TEXT,
    MODEL,
    REACH,
    SEEN,
    STATUS,
    Head,
    Socket,
    all_closed,
    parse_head,
)
from rpel.peer.net.intake import Turns
from rpel.peer.net.resolver import Resolver, connect
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.net.tls import leaf_fingerprint
from rpel.types import Models, PullResult

_CONNECT = 5.0
_PIECE = 256 << 10  # bytes of a body read at once
# what TLS takes for a host's name
_NAME = re.compile(r"(?=[^.]*[A-Za-z])[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_VERSION = re.compile("[0-9A-Za-z.+-]{1,20}")
_LOOKUPS = 4  # names looked up at once, beside those of b members that may never resolve
_KEPT = 60.0  # seconds that a connection waits for its next request: routers forget older ones, silently
T = TypeVar("T")
Receive = Callable[["Connection", Head, float], Awaitable[T]]
"""(connection, head of a reply, own position when the request was sent) → what the body comes to."""


@dataclass(frozen=True)
class Answer:
    """What came of asking one member, and why not more.

    ``offset``: how far the member's clock is ahead of this peer's · ``membership``: the hash it holds, if it
    refused for holding another · ``received``: bytes of the body · ``status``: the HTTP status of a refusal,
    else 0 · ``signed``: the hash of the body and its signature, where half-steps are signed · ``version``: of
    rpel, by its own word
    """

    result: PullResult
    offset: float | None = None
    reason: str = ""
    membership: str = ""
    received: int = 0
    status: int = 0
    signed: Signed | None = None
    version: str = ""


class Connection:
    """A connection to a member, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._watching: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return not (self._writer.is_closing() or self._reader.at_eof())

    @property
    def certificate(self) -> str:
        """The fingerprint of what the other end has shown."""
        return leaf_fingerprint(self._writer.get_extra_info("ssl_object"))

    async def ask(self, request: bytes) -> Head:
        """Send a request; returns the head of the reply."""
        self._writer.write(request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Malformed(f"more than {LARGEST_HEAD} bytes of headers") from None
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection was closed") from None
        return parse_head(head[:-4])

    async def read(self, most: int) -> bytes:
        """The next bytes of a body, one at least."""
        data = await self._reader.read(most)
        if not data:
            raise Malformed(f"the reply was cut off {most} bytes before its end")
        return data

    def wait(self) -> None:
        """Nothing is asked for now: what comes all the same closes this connection."""

        async def watch() -> None:
            with suppress(OSError):
                await self._reader.read(1)
            self.abort()

        self._watching = asyncio.get_running_loop().create_task(watch())

    async def resume(self) -> None:
        """It is used again."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def abort(self) -> None:
        """Close at once, without a goodbye."""
        self._writer.transport.abort()


class Client:
    """The connections of the asking end, kept for the next round. ``position`` is this peer's round clock."""

    def __init__(self, layout: Layout, position: Callable[[], float]) -> None:
        self.layout, self.position = layout, position
        self._resolver = Resolver()
        self._idle: dict[Line, list[tuple[float, Connection]]] = {}
        self._open = WeakSet[Connection]()  # idle or not: all are closed in the end
        self._sockets: set[Socket] = set()
        self._closed = False
        self.signed = True  # only tests of the wire alone take a half-step without a signature
        self.exhausted = False  # no file descriptor was left for a connection
        # by pin: the hash that a member holds, if it last refused for that
        self.differing: dict[str, str] = {}

    def member(self, now: Snapshot, number: int) -> "RemoteMember":
        """A member, to be asked under this membership."""
        return RemoteMember(self, now, number)

    async def clocks(self, now: Snapshot, deadline: float) -> dict[int, float]:
        """Return, for each member that answers by the deadline, how far its clock is ahead of this one.

        The deadline is in the loop's time.
        """
        self.differing.clear()  # members that held another membership may have left
        offsets = await asyncio.gather(*(self.member(now, number).clock(deadline) for number in now.others))
        return {
            number: offset for number, offset in zip(now.others, offsets, strict=True) if offset is not None
        }

    def held_elsewhere(self, now: Snapshot) -> Counter[str]:
        """Hashes of other memberships, and how many of these members last said that they hold them."""
        return Counter(
            other for pin, other in self.differing.items() if now.membership.by_fingerprint(pin) is not None
        )

    @property
    def connections(self) -> int:
        """How many are open, in use or waiting for their next request."""
        return len(self._sockets)

    async def close(self) -> None:
        """Close all connections, and wait until they are, but not for ever."""
        self._closed = True
        for connection in list(self._open):
            connection.abort()
        await all_closed(self._sockets)

    # --- connections ----------------------------------------------------------------------------------------

    def prune(self, now: Snapshot) -> None:
        """Close connections that no request under this membership will use."""
        usable = {_line(now, number) for number in now.others}
        for line in [line for line in self._idle if line not in usable]:
            for _, connection in self._idle.pop(line):
                connection.abort()

    def give_back(self, line: "Line", connection: Connection, lasting: bool) -> None:
        """A request has ended: its connection waits for the next one, if it can be used again."""
        if lasting and connection.usable and not self._closed:
            until = asyncio.get_running_loop().time() + _KEPT
            self._idle.setdefault(line, []).append((until, connection))
            connection.wait()
        else:
            connection.abort()

    async def connection(self, now: Snapshot, member: int) -> Connection:
        """One that waits, or a new one, whose other end has shown the member's pin."""
        waiting, entry = self._idle.get(_line(now, member), []), now.membership.members[member]
        while waiting:
            until, connection = waiting.pop()
            try:
                await connection.resume()
            except BaseException:  # cancelled: nobody else would close it
                connection.abort()
                raise
            if (
                entry.expires > time.time()
                and connection.usable
                and asyncio.get_running_loop().time() < until
            ):
                return connection
            connection.abort()
        return await self._connected(now, member)

    async def _connected(self, now: Snapshot, member: int) -> Connection:
        """Open a connection to a member.

        The host's name goes into the ClientHello, where a forwarder can tell members apart by it; identity is
        the pin.
        """
        entry, context = now.membership.members[member], now.client_context
        host, _, port = entry.url.removeprefix("https://").rpartition(":")
        async with asyncio.timeout(_CONNECT):
            most, private = now.membership.byzantine + _LOOKUPS, now.membership.allow_private
            addresses = await self._resolver.addresses(host.strip("[]"), most, private)
            reached = await connect(addresses, int(port), self._sockets)
            try:
                reader, writer = await asyncio.open_connection(
                    sock=reached,
                    limit=LARGEST_HEAD,
                    ssl=context,
                    server_hostname=host if _NAME.fullmatch(host) else "",
                    ssl_handshake_timeout=_CONNECT,
                    ssl_shutdown_timeout=1.0,
                )
            except BaseException as error:
                with suppress(OSError):  # asyncio closes it and must not wait for close_notify
                    reached.shutdown(socket.SHUT_RDWR)
                if isinstance(error, ValueError) and not isinstance(error, OSError):
                    reached.close()  # asyncio has not taken it over
                raise
        connection = Connection(reader, writer)
        self._open.add(connection)
        if connection.certificate != entry.fingerprint:
            connection.abort()
            raise ConnectionAbortedError(f"{entry.url} is not {entry.id}: it has another certificate")
        return connection

    async def probe(self, now: Snapshot, member: int) -> bool:
        """Whether a member is reached at its url by a new connection."""
        try:
            (await self._connected(now, member)).abort()
        except (OSError, ValueError):
            return False
        return True


Line = tuple[str, str, str, str]
"""What a connection belongs to: its own certificate, the pins of its ends, and the address."""


def _line(now: Snapshot, member: int) -> Line:
    entry = now.membership.members[member]
    return str(now.certificate), now.own.fingerprint, entry.fingerprint, entry.url


@dataclass(frozen=True)
class RemoteMember:
    """One member, asked under the membership that the request carries."""

    client: Client
    now: Snapshot
    number: int

    async def fetch(
        self,
        round: int,
        into: Models,
        deadline: float,
        turns: Turns | None = None,
        again: Callable[[int], bool] = lambda status: refusal(status)[1],
    ) -> Answer:
        """Its half-step of a round into a row (d,), by a deadline (loop's time).

        Round 0 is the common initial model. The row holds the model only if the result is ok. ``turns`` may
        hold the body back; ``again``: whether to ask again after a status.
        """
        layout = self.client.layout if round else self.client.layout.exact
        hashed = round > 0 and self.client.signed

        async def receive(connection: Connection, head: Head, sent: float) -> Answer:
            reception = Reception(layout, into, round, hashed)
            reception.head(head.status, head.headers)
            offset = _offset(head.headers, sent, self.client.position())
            while reception.missing:
                if turns is not None:
                    await turns.turn(self.number, layout.size - reception.missing)
                reception.feed(await connection.read(min(reception.missing, _PIECE)))
            reception.close()
            signed = self._signed(reception, head, round) if hashed else None
            if hashed and signed is None:
                raise Malformed("it is not signed by that member")
            version = version_of(head.headers.get("rpel-version"))
            return Answer(PullResult.OK, offset, received=layout.size, signed=signed, version=version)

        try:
            return await self._ask(f"{MODEL}{round}" if round else INIT, receive, deadline, again)
        finally:
            if turns is not None:
                turns.end(self.number)

    async def seen(self, round: int, deadline: float) -> dict[str, Any] | Answer:
        """What it saw signed in a round; an Answer if it does not say."""
        return await self._text(f"{SEEN}{round}", deadline)

    async def status(self, deadline: float) -> dict[str, Any] | Answer:
        """What it says of itself; an Answer if it does not."""
        return await self._text(STATUS, deadline)

    async def reach(self, deadline: float) -> dict[str, Any] | Answer:
        """Ask it to call back at this peer's own url, and what came of that."""
        return await self._text(REACH, deadline)

    async def clock(self, deadline: float) -> float | None:
        """How far its clock is ahead of this peer's; None if it does not say."""

        async def receive(connection: Connection, head: Head, sent: float) -> float | None:
            position = _number((await _json(connection, head, sent)).get("position"))
            return None if position is None else offset(position, sent, self.client.position())

        ahead = await self._ask(CLOCK, receive, deadline)
        return None if isinstance(ahead, Answer) else ahead

    # --- parts ----------------------------------------------------------------------------------------------

    async def _ask(
        self,
        path: str,
        receive: Receive[T],
        deadline: float,
        again: Callable[[int], bool] = lambda status: refusal(status)[1],
    ) -> T | Answer:
        """Ask again and again, ever more slowly, while there is hope before the deadline."""
        client, pin = self.client, self.now.membership.members[self.number].fingerprint
        last = Answer(PullResult.UNREACHABLE, reason="no connection before the deadline")
        pause, longest = PAUSES
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        connection = await client.connection(self.now, self.number)
                        last = Answer(PullResult.LATE, reason="no answer before the deadline")
                        answer = await self._one(connection, path, receive)
                        if not isinstance(answer, Head):
                            client.differing.pop(pin, None)
                            return answer
                        last = _refusal(answer)
                        if last.membership:
                            client.differing[pin] = last.membership
                        if not again(answer.status):
                            return last
                    except Malformed as error:
                        return Answer(PullResult.MALFORMED, reason=str(error))
                    # ssl.SSLError, TimeoutError, unknown names; ValueError: the own certificate has expired
                    except (OSError, ValueError) as error:
                        full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                        client.exhausted |= full
                        last = Answer(PullResult.UNREACHABLE, reason=str(error) or type(error).__name__)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
        return last

    async def _one(self, connection: Connection, path: str, receive: Receive[T]) -> T | Head:
        """Send one request and return its reply, or the head of a refusal.

        The connection is kept if nothing is left to read on it.
        """
        lasting, sent = False, self.client.position()
        try:
            head = await connection.ask(self.request(path))
            if head.status != 200:
                lasting = head.lasting and head.headers.get("content-length") == "0"
                return head
            answer = await receive(connection, head, sent)
            lasting = head.lasting
            return answer
        finally:
            self.client.give_back(_line(self.now, self.number), connection, lasting)

    async def _text(self, path: str, deadline: float) -> dict[str, Any] | Answer:
        return await self._ask(path, _json, deadline)

    def request(self, path: str) -> bytes:
        """The bytes that ask for a path."""
        m = self.now.membership
        where = m.members[self.number].url.removeprefix("https://")
        return f"GET {path} HTTP/1.1\r\nHost: {where}\r\nRPEL-Membership: {m.hash}\r\n\r\n".encode()

    def _signed(self, reception: Reception, head: Head, round: int) -> Signed | None:
        """The hash of a body with its signature, if the member's key made that; None otherwise."""
        try:
            signature = base64.b64decode(head.headers.get("rpel-signature", ""), validate=True)
        except ValueError:
            return None
        valid = self.now.signed(self.number, round, reception.digest, signature)
        return Signed(reception.digest, signature) if valid else None


async def _json(connection: Connection, head: Head, sent: float) -> dict[str, Any]:
    """The JSON object that a small body holds."""
    length = head.headers.get("content-length", "")
    if not re.fullmatch("[0-9]{1,5}", length) or int(length) > LARGEST_TEXT:
        raise Malformed(f"a text of {length[:20] or 'unknown'} bytes")
    if "transfer-encoding" in head.headers or "content-encoding" in head.headers:
        raise Malformed("a text that is encoded")
    text = b""
    while len(text) < int(length):
        text += await connection.read(int(length) - len(text))
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    raise Malformed("not a JSON object")


def _refusal(head: Head) -> Answer:
    status = head.status
    result = refusal(status)[0]
    other = head.headers.get("rpel-membership", "")
    known = other if re.fullmatch("[0-9a-f]{64}", other) else ""
    return Answer(result, reason=f"status {status}", membership=known, status=status)


def version_of(version: object) -> str:
    """The version of rpel that a member says it has; "" if it says nothing, or what is none.

    >>> version_of("0.4.0"), version_of("<b>"), version_of(None)
    ('0.4.0', '', '')
    """
    return version if isinstance(version, str) and _VERSION.fullmatch(version) else ""


def _offset(headers: Mapping[str, str], sent: float, now: float) -> float | None:
    """How far ahead a member's clock must be at least; request sent and reply come at these own positions."""
    position, waited = _number(headers.get("rpel-position")), _number(headers.get("rpel-waited"))
    return None if position is None else ahead(position, sent, now, waited or 0.0)


def _number(text: object) -> float | None:
    """What a member says is a number, if it is one.

    >>> _number("12.5"), _number("nan"), _number(None)
    (12.5, None, None)
    """
    try:
        number = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
