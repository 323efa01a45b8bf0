"""The asking end: members are asked over mutual TLS 1.3, again and again,
until they answer or the deadline comes.

Invariants: nothing is sent before the certificate at the other end is the pin of the member meant; a reply is
accepted only if it is a model of this network in the round wanted, and goes straight into the row that waits
for it (see :mod:`rpel.peer.net.http`); once a body has begun it is not asked for again;
one absolute deadline ends everything.
"""

import asyncio
import base64
import errno
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rpel.peer.core.clock import ahead, offset
from rpel.peer.core.evidence import Signed
from rpel.peer.core.exchange import PAUSES, refusal
from rpel.peer.core.wire import Layout, Malformed, Reception
from rpel.peer.net.http import (
    CLOCK,
    INIT,
    MODEL,
    REACH,
    SEEN,
    STATUS,
    Connection,
    Head,
    Refused,
    Sink,
    Socket,
    Text,
    all_closed,
)
from rpel.peer.net.intake import Intake, Place
from rpel.peer.net.resolver import Resolver, connect
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.net.tls import leaf_fingerprint
from rpel.types import Models, PullResult

_CONNECT = 5.0
# what TLS takes for a host's name
_NAME = re.compile(r"(?=[^.]*[A-Za-z])[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_VERSION = re.compile("[0-9A-Za-z.+-]{1,20}")
_LOOKUPS = 4  # names looked up at once, beside those of b members that may never resolve
_KEPT = 60.0  # seconds that a connection waits for its next request: routers forget older ones, silently
_SMALL = 256 << 10  # bytes of a body that connections hold anyway, whether it is read or not

Judge = Callable[[Head, float, Connection], Sink]
"""(head of a reply, own position when the request was sent, connection) → where its body goes;
raises if nowhere."""


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


class _Metered:
    """A body whose bytes are counted."""

    def __init__(self, sink: Reception, intake: Intake, place: Place) -> None:
        self._sink, self._intake, self._place = sink, intake, place

    @property
    def missing(self) -> int:
        return self._sink.missing

    def feed(self, data: memoryview) -> None:
        self._intake.took(self._place, len(data))
        self._sink.feed(data)

    def space(self) -> memoryview:
        return self._sink.space()

    def took(self, count: int) -> None:
        self._intake.took(self._place, count)
        self._sink.took(count)

    def close(self) -> None:
        self._sink.close()


class Client:
    """The connections of the asking end, kept for the next round. ``position`` is this peer's round clock."""

    def __init__(self, layout: Layout, position: Callable[[], float]) -> None:
        self.layout, self.position = layout, position
        self._resolver = Resolver()
        self._idle: dict[Line, list[tuple[float, Connection]]] = {}
        self._open: set[Connection] = set()
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
        """By member that answers by the deadline (the loop's time):
        how far its clock is ahead of this one."""
        self.differing.clear()  # a member that held another membership may be gone by now
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
        return len(self._open)

    async def close(self) -> None:
        """Close all connections, and wait until they are."""
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
        else:
            connection.abort()

    async def connection(self, now: Snapshot, member: int) -> Connection:
        """One that waits, or a new one, whose other end has shown the member's pin."""
        waiting, entry = self._idle.get(_line(now, member), []), now.membership.members[member]
        while waiting:
            until, connection = waiting.pop()
            if (
                entry.expires > time.time()
                and connection.usable
                and asyncio.get_running_loop().time() < until
            ):
                return connection
            connection.abort()
        return await self._connected(now, member)

    async def _connected(self, now: Snapshot, member: int) -> Connection:
        """A new one, with the host's name in the ClientHello, by which a forwarder can tell members apart;
        identity is the pin."""
        entry = now.membership.members[member]
        host, _, port = entry.url.removeprefix("https://").rpartition(":")
        connection = Connection()
        context = now.client_context(member)  # it may fail, and nothing is open yet
        try:
            async with asyncio.timeout(_CONNECT):
                most, private = now.membership.byzantine + _LOOKUPS, now.membership.allow_private
                addresses = await self._resolver.addresses(host.strip("[]"), most, private)
                reached = await connect(addresses, int(port), self._sockets)
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    sock=reached,
                    ssl=context,
                    server_hostname=host if _NAME.fullmatch(host) else "",
                    ssl_handshake_timeout=_CONNECT,
                    ssl_shutdown_timeout=1.0,
                )
        except BaseException:
            connection.abort()  # cancelled just after the handshake, it would wait for a goodbye
            raise
        self._open.add(connection)
        connection.ended.add_done_callback(lambda _: self._open.discard(connection))
        if leaf_fingerprint(transport.get_extra_info("ssl_object")) != entry.fingerprint:
            transport.abort()
            raise ConnectionAbortedError(f"{entry.url} is not {entry.id}: its certificate is another")
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


@dataclass
class RemoteMember:
    """One member, asked under the membership that the request carries."""

    client: Client
    now: Snapshot
    number: int
    _sent: float = 0.0

    async def fetch(
        self,
        round: int,
        into: Models,
        deadline: float,
        intake: Intake | None = None,
        turn: int = 0,
        again: Callable[[int], bool] = lambda status: refusal(status)[1],
    ) -> Answer:
        """Its half-step of a round into a row (d,), by a deadline (loop's time).

        Round 0 is the common initial model. The row holds the model only if the result is ok. ``intake``
        decides when the body is read; ``turn`` is the member's number in the draw. ``again``: whether to ask
        again after a status.
        """
        layout, place = self.client.layout if round else self.client.layout.exact, Place(turn)
        hashed = round > 0 and self.client.signed
        replies: list[tuple[Reception, Head, float | None]] = []
        if layout.size <= _SMALL:
            intake = None

        def judge(head: Head, sent: float, connection: Connection) -> Sink:
            reception = Reception(layout, into, round, hashed)
            reception.head(head.status, head.headers)
            replies[:] = [(reception, head, _offset(head.headers, sent, self.client.position()))]
            if intake is None:
                return reception
            intake.begin(place, connection)
            return _Metered(reception, intake, place)

        try:
            answer = await self._ask(f"{MODEL}{round}" if round else INIT, judge, deadline, again)
        finally:
            if intake is not None:
                intake.end(place)
        if answer.result is not PullResult.OK:
            return answer
        reception, head, offset = replies[0]
        signed = self._signed(reception, head, round) if hashed else None
        if hashed and signed is None:
            return Answer(PullResult.MALFORMED, reason="it is not signed by that member")
        return Answer(
            PullResult.OK, offset=offset, received=layout.size, signed=signed,
            version=version_of(head.headers.get("rpel-version")),
        )  # fmt: skip

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
        reply = await self._text(CLOCK, deadline)
        if isinstance(reply, Answer) or (position := _number(reply.get("position"))) is None:
            return None
        return offset(position, self._sent, self.client.position())

    # --- parts ----------------------------------------------------------------------------------------------

    async def _text(self, path: str, deadline: float) -> dict[str, Any] | Answer:
        texts: list[Text] = []

        def judge(head: Head, sent: float, connection: Connection) -> Sink:
            texts[:] = [Text(head)]
            return texts[0]

        answer = await self._ask(path, judge, deadline)
        if answer.result is not PullResult.OK:
            return answer
        try:
            return texts[0].content()
        except Malformed as error:
            return Answer(PullResult.MALFORMED, reason=str(error))

    async def _ask(
        self,
        path: str,
        judge: Judge,
        deadline: float,
        again: Callable[[int], bool] = lambda status: refusal(status)[1],
    ) -> Answer:
        """Ask again and again, ever more slowly, while there is hope before the deadline."""
        client, entry = self.client, self.now.membership.members[self.number]
        last = Answer(PullResult.UNREACHABLE, reason="no connection before the deadline")
        pause, longest = PAUSES
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        connection = await client.connection(self.now, self.number)
                        last = Answer(PullResult.LATE, reason="no answer before the deadline")
                        lasting = True
                        try:
                            self._sent = sent = client.position()
                            head = await connection.get(
                                self.request(path), partial(_judged, judge, sent, connection)
                            )
                            lasting = head.lasting
                        finally:
                            client.give_back(_line(self.now, self.number), connection, lasting)
                        client.differing.pop(entry.fingerprint, None)
                        return Answer(PullResult.OK)
                    except Malformed as error:
                        return Answer(PullResult.MALFORMED, reason=str(error))
                    except Refused as error:
                        last = _refusal(error.head)
                        if last.membership:
                            client.differing[entry.fingerprint] = last.membership
                        if not again(error.head.status):
                            return last
                    # ssl.SSLError, TimeoutError, unknown names; ValueError:
                    # the own certificate has expired meanwhile
                    except (OSError, ValueError) as error:
                        client.exhausted |= isinstance(error, OSError) and error.errno in (
                            errno.EMFILE,
                            errno.ENFILE,
                        )
                        last = Answer(PullResult.UNREACHABLE, reason=str(error) or type(error).__name__)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
        except TimeoutError:
            pass
        return last

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


def _judged(judge: Judge, sent: float, connection: Connection, head: Head) -> Sink:
    if head.status != 200:
        raise Refused(head)
    return judge(head, sent, connection)


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
