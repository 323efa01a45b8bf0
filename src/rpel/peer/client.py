"""The asking end: members are asked over mutual TLS 1.3, again and again, until they answer or the deadline comes.

Invariants: nothing is sent before the certificate at the other end is the pin of the member meant; a reply is accepted
only if it is a model of this network in the round wanted, and goes straight into the row that waits for it (see
:mod:`rpel.peer.http`); once a body has begun it is not asked for again; one absolute deadline ends everything.
"""

import asyncio
import base64
import errno
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpel.certificates import check_certificate
from rpel.config.membership import Membership
from rpel.peer.evidence import Signed, of_member, signed_by
from rpel.peer.http import CLOCK, INIT, MODEL, SEEN, STATUS, Connection, Head, Refused, Sink, Socket, Text
from rpel.peer.identity import KeyFile, client_context, leaf_fingerprint
from rpel.peer.intake import Intake, Place
from rpel.peer.resolver import Resolver, connect
from rpel.peer.wire import Malformed, Reception, Signature
from rpel.types import Models, PullResult

_CONNECT = 5.0
_LOOKUPS = 4  # names looked up at once, beside those of b members that may never resolve
_PAUSES = (0.05, 1.0)  # seconds between attempts: the first, the longest
_KEPT = 60.0  # seconds that a connection waits for its next request: routers forget older ones, silently
_NOT_YET = {
    425: PullResult.LATE,
    409: PullResult.REFUSED,
    429: PullResult.REFUSED,
}  # worth asking again before the deadline


_SMALL = 256 << 10  # bytes of a body that connections hold anyway, whether it is read or not

Judge = Callable[[Head, float, Connection], Sink]
"""(head of a reply, own position when the request was sent, connection) → where its body goes; raises if nowhere."""


@dataclass(frozen=True)
class Answer:
    """What came of asking one member, and why not more.

    ``offset``: how far the member's clock is ahead of this peer's · ``membership``: the hash it holds, if it refused
    for holding another · ``received``: bytes of the body · ``status``: the HTTP status of a refusal, else 0 ·
    ``signed``: the hash of the body and its signature, where half-steps are signed
    """

    result: PullResult
    offset: float | None = None
    reason: str = ""
    membership: str = ""
    received: int = 0
    status: int = 0
    signed: Signed | None = None


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

    def close(self) -> None:
        self._sink.close()


class Client:
    """Asks members; connections are kept for the next round. ``position`` is this peer's round clock."""

    def __init__(
        self,
        membership: Membership,
        certificate: Path,
        key: KeyFile,
        signature: Signature,
        position: Callable[[], float],
        addresses: Path | None = None,
    ) -> None:
        """``addresses``: a file that keeps where members were reached."""
        self._signature, self._position = signature, position
        self._resolver = Resolver(_LOOKUPS, addresses)
        self._idle: dict[int, list[tuple[float, Connection]]] = {}
        self._open: set[Connection] = set()
        self._sockets: set[Socket] = set()
        self._closed = False
        self._contexts: dict[int, ssl.SSLContext] = {}
        self.signed = True  # only tests of the wire alone take a half-step without a signature
        self.exhausted = False  # no file descriptor was left for a connection
        self.silent: tuple[int, ...] = ()  # who did not tell its clock when last asked
        self.differing: dict[int, str] = {}  # the hash that a member holds, if it last refused for holding another
        self.rotate(membership, certificate, key)

    def rotate(self, membership: Membership, certificate: Path, key: KeyFile) -> None:
        """From now on this membership and certificate count."""
        self._drop_idle()
        self._membership, self._certificate, self._key = membership, certificate, key
        self._me = membership.by_fingerprint(check_certificate(certificate.read_text("utf-8")).fingerprint)
        self._contexts, self.differing = {}, {}
        self._resolver.most, self._resolver.private = membership.byzantine + _LOOKUPS, membership.allow_private

    @property
    def connections(self) -> int:
        """How many are open, in use or waiting for their next request."""
        return len(self._open)

    async def close(self) -> None:
        """Close all connections, and wait until they are."""
        self._closed = True
        for connection in list(self._open):
            connection.abort()
        await asyncio.gather(*(reached.ended for reached in self._sockets))

    def _drop_idle(self) -> None:
        for waiting in self._idle.values():
            for _, connection in waiting:
                connection.abort()
        self._idle = {}

    async def pull(
        self, member: int, round: int, row: Models, deadline: float, turn: tuple[Intake, int] | None = None
    ) -> Answer:
        """Ask a member for its half-step of a round, into row (d,), until a deadline (the loop's time).

        Round 0 is the common initial model. The row holds the model only if the result is ok. ``turn``: who decides
        when the body is read, and the member's number in the draw.
        """
        path = f"{MODEL}{round}" if round else INIT
        offsets: list[float] = []
        came: list[tuple[Reception, str]] = []
        signatures = round > 0 and self.signed
        if turn is not None and self._signature.size > _SMALL:
            intake, place = turn[0], turn[0].place(turn[1])
        else:
            intake, place = None, Place(0)

        def judge(head: Head, sent: float, connection: Connection) -> Sink:
            if head.status != 200:
                raise Refused(head)
            reception = Reception(self._signature, row, round, hashed=signatures)
            reception.head(head.status, head.headers)
            offsets[:] = _offset(head.headers, sent, self._position())
            came[:] = [(reception, head.headers.get("rpel-signature", ""))]
            if intake is None:
                return reception
            intake.begin(place, connection)
            return _Metered(reception, intake, place)

        membership = self._membership
        try:
            answer = await self._ask(member, path, judge, deadline)
        finally:
            if intake is not None:
                intake.end(place)
        if answer.result is not PullResult.OK:
            return answer
        signed = _signed(*came[0], membership, member, round) if signatures else None
        if signatures and signed is None:
            return Answer(PullResult.MALFORMED, reason="it is not signed by that member")
        offset = offsets[0] if offsets else None
        return Answer(PullResult.OK, offset=offset, received=self._signature.size, signed=signed)

    async def seen(self, member: int, round: int, deadline: float) -> dict[str, Any] | Answer:
        """What a member saw signed in a round; an Answer if it does not say."""
        return await self._text(member, f"{SEEN}{round}", deadline)

    async def clocks(self, deadline: float) -> list[float]:
        """How far the clocks of the members that answer by the deadline (the loop's time) are ahead of this one."""
        others = [member for member in range(len(self._membership.members)) if member != self._me]
        found = await asyncio.gather(*(self._clock(member, deadline) for member in others))
        self.silent = tuple(member for member, offset in zip(others, found, strict=True) if offset is None)
        return [offset for offset in found if offset is not None]

    async def status(self, member: int, deadline: float) -> dict[str, Any] | Answer:
        """What a member says of itself; an Answer if it does not."""
        return await self._text(member, STATUS, deadline)

    # --- parts -------------------------------------------------------------------------------------------------------

    async def _clock(self, member: int, deadline: float) -> float | None:
        found = await self._text(member, CLOCK, deadline)
        offsets = [] if isinstance(found, Answer) else _finite(found.get("position"), self._position())
        return offsets[0] if offsets else None

    async def _text(self, member: int, path: str, deadline: float) -> dict[str, Any] | Answer:
        kept: list[Text] = []

        def judge(head: Head, sent: float, connection: Connection) -> Sink:
            if head.status != 200:
                raise Refused(head)
            kept[:] = [Text(head)]
            return kept[0]

        answer = await self._ask(member, path, judge, deadline)
        if answer.result is not PullResult.OK:
            return answer
        try:
            return kept[0].content()
        except Malformed as error:
            return Answer(PullResult.MALFORMED, reason=str(error))

    async def _ask(self, member: int, path: str, judge: Judge, deadline: float) -> Answer:
        """Ask again and again, ever more slowly, while there is hope before the deadline."""
        pause, longest = _PAUSES
        last = Answer(PullResult.UNREACHABLE, reason="no connection before the deadline")
        membership = self._membership  # another one may give the number to another member
        try:
            async with asyncio.timeout_at(deadline):
                while membership is self._membership:
                    try:
                        connection = await self._connection(member)
                        last = Answer(PullResult.LATE, reason="no answer before the deadline")
                        await self._once(member, connection, path, judge)
                        self.differing.pop(member, None)
                        return Answer(PullResult.OK)
                    except Malformed as error:
                        return Answer(PullResult.MALFORMED, reason=str(error))
                    except Refused as error:
                        last = _refusal(error.head)
                        if last.membership:
                            self.differing[member] = last.membership
                        if error.head.status not in _NOT_YET:
                            return last
                    # ssl.SSLError, TimeoutError, unknown names; ValueError: the own certificate has expired meanwhile
                    except (OSError, ValueError) as error:
                        self.exhausted |= isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                        last = Answer(PullResult.UNREACHABLE, reason=str(error) or type(error).__name__)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
        except TimeoutError:
            pass
        return last

    async def _once(self, member: int, connection: Connection, path: str, judge: Judge) -> None:
        membership, sent = self._membership, self._position()
        where = membership.members[member].url.removeprefix("https://")
        request = f"GET {path} HTTP/1.1\r\nHost: {where}\r\nRPEL-Membership: {membership.hash}\r\n\r\n"
        lasting = True
        try:
            lasting = (await connection.get(request.encode(), lambda head: judge(head, sent, connection))).lasting
        finally:
            if lasting and connection.usable and membership is self._membership and not self._closed:
                until = asyncio.get_running_loop().time() + _KEPT
                self._idle.setdefault(member, []).append((until, connection))
            else:
                connection.abort()

    async def _connection(self, member: int) -> Connection:
        """One that waits, or a new one, whose other end has shown the member's pin."""
        waiting = self._idle.get(member, [])
        while waiting:
            until, connection = waiting.pop()
            lasts = self._membership.members[member].expires > time.time()
            if lasts and connection.usable and asyncio.get_running_loop().time() < until:
                return connection
            connection.abort()
        meant = self._membership.members[member]
        if member not in self._contexts:
            self._contexts[member] = client_context(self._certificate, self._key, meant.certificate)
        host, _, port = meant.url.removeprefix("https://").rpartition(":")
        connection = Connection()
        try:
            async with asyncio.timeout(_CONNECT):
                places = await self._resolver.addresses(host.strip("[]"))
                reached = await connect(places, int(port), self._sockets)
                where = reached.getpeername()[0]
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection,
                    sock=reached,
                    ssl=self._contexts[member],
                    server_hostname="",  # no name is sent: identity is the pin
                    ssl_handshake_timeout=_CONNECT,
                    ssl_shutdown_timeout=1.0,
                )
        except BaseException:
            connection.abort()  # cancelled just after the handshake, it would wait for a goodbye
            raise
        self._open.add(connection)
        connection.ended.add_done_callback(lambda _: self._open.discard(connection))
        if leaf_fingerprint(transport.get_extra_info("ssl_object")) != meant.fingerprint:
            transport.abort()
            raise ConnectionAbortedError(f"{meant.url} is not {meant.id}: its certificate is another")
        self._resolver.reached(host.strip("[]"), where)
        return connection


def _signed(reception: Reception, header: str, membership: Membership, member: int, round: int) -> Signed | None:
    """The hash of a body with its signature, if the member's key made that; None otherwise."""
    try:
        found = Signed(reception.digest, base64.b64decode(header, validate=True))
    except ValueError:
        return None
    certificate = membership.members[member].certificate
    valid = signed_by(certificate, of_member(membership, member), round, found.digest, found.signature)
    return found if valid else None


def _refusal(head: Head) -> Answer:
    status = head.status
    result = _NOT_YET.get(status) or (PullResult.REFUSED if 400 <= status < 500 else PullResult.MALFORMED)
    other = head.headers.get("rpel-membership", "")
    known = other if re.fullmatch("[0-9a-f]{64}", other) else ""
    return Answer(result, reason=f"status {status}", membership=known, status=status)


def _offset(headers: Mapping[str, str], sent: float, now: float) -> list[float]:
    """How far ahead a member's clock must be at least; request sent and reply come at these own positions.

    The member read its clock after the request had waited there, and before the reply came: what the way to it and
    back can explain is no difference. Otherwise all members would follow each other's delays, back and ever further.

    >>> _offset({"rpel-position": "10.2"}, sent=10.0, now=10.5)
    [0.0]
    >>> _offset({"rpel-position": "11.5", "rpel-waited": "0.75"}, sent=10.0, now=11.0)
    [0.5]
    >>> _offset({"rpel-position": "10.5", "rpel-waited": "0.75"}, sent=10.0, now=11.0)
    [-0.25]
    """
    waited = max([0.0, *_finite(headers.get("rpel-waited", ""), 0.0)])
    return [max(late, min(0.0, late + now - sent - waited)) for late in _finite(headers.get("rpel-position"), now)]


def _finite(position: object, own: float) -> list[float]:
    """How far ahead a position is, if it is one.

    >>> _finite("12.5", 12.0), _finite("nan", 0.0), _finite(None, 0.0)
    ([0.5], [], [])
    """
    try:
        found = float(position) - own  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return []
    return [found] if math.isfinite(found) else []
