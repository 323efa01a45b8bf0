"""Replies of members that may be hostile: one request at a time on a connection, judged byte by byte.

Invariants: a reply is read only as far as it can still be what was asked for, and never beyond; no redirects, no
compression, no chunks, no cookies, no interim replies; a byte that nobody asked for ends the connection. What a reply
can make this end hold is bounded: 4 KiB of headers, one piece of a body, and the row or the few bytes where it goes.

HTTP is read here by hand, because a general client is too polite for hostile servers: aiohttp's parses and queues
whatever arrives on a connection that waits for its next request, without a bound.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rpel.peer.wire import Malformed

MODEL, INIT, CLOCK, STATUS = "/v1/model/", "/v1/init", "/v1/clock", "/v1/status"
LARGEST_HEAD = 4 << 10
LARGEST_TEXT = 64 << 10
_SCRATCH = 256 << 10
_STATUS = re.compile(r"HTTP/1\.1 ([2-5][0-9][0-9])(?: [ -~]*)?")
_HEADER = re.compile(r"([A-Za-z0-9-]+):[ \t]*([ -~]*?)[ \t]*")


@dataclass(frozen=True)
class Head:
    """Status and headers (names in lower case) of a reply, and whether the connection can be used again."""

    status: int
    headers: Mapping[str, str]

    @property
    def lasting(self) -> bool:
        return "connection" not in self.headers


class Sink(Protocol):
    """Where a body goes."""

    @property
    def missing(self) -> int: ...

    def feed(self, data: memoryview) -> None: ...

    def close(self) -> None: ...


class Refused(Exception):  # noqa: N818 (an answer, not an error of ours)
    """A member answered with another status than 200."""

    def __init__(self, head: Head) -> None:
        super().__init__(f"status {head.status}")
        self.head = head


def parse_head(data: bytes) -> Head:
    """The head of a reply, without the empty line at its end; Malformed unless it is plain HTTP/1.1.

    >>> parse_head(b"HTTP/1.1 200 OK\\r\\nRPEL-Round: 7").headers["rpel-round"]
    '7'
    """
    first, *rest = data.decode("latin-1").split("\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise Malformed("not a reply in HTTP/1.1")
    headers: dict[str, str] = {}
    for line in rest:
        found = _HEADER.fullmatch(line)
        if found is None or found[1].lower() in headers:
            raise Malformed("a header that is not plain, or stands there twice")
        headers[found[1].lower()] = found[2]
    return Head(int(status[1]), headers)


class Text:
    """A small body kept as it is."""

    def __init__(self, head: Head) -> None:
        length = head.headers.get("content-length", "")
        if not re.fullmatch("[0-9]{1,5}", length) or int(length) > LARGEST_TEXT:
            raise Malformed(f"a text of {length[:20] or 'unknown'} bytes")
        if "transfer-encoding" in head.headers or "content-encoding" in head.headers:
            raise Malformed("a text that is encoded")
        self.data, self.missing = bytearray(), int(length)

    def feed(self, data: memoryview) -> None:
        if len(data) > self.missing:
            raise Malformed("more than was announced")
        self.data += data
        self.missing -= len(data)

    def close(self) -> None:
        pass

    def content(self) -> dict[str, Any]:
        """The JSON object that came."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.data)
            if isinstance(found, dict):
                return found
        raise Malformed("not a JSON object")


class Connection(asyncio.BufferedProtocol):
    """One request at a time; bytes that nobody waits for close it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(LARGEST_HEAD))
        self._head = bytearray()
        self._judge: Callable[[Head], Sink] | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[Head] | None = None
        self._found: Head | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def get(self, request: bytes, judge: Callable[[Head], Sink]) -> Head:
        """Send a request; ``judge`` sees the head and says where the body goes, or raises what is wrong with it."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._done = asyncio.get_running_loop().create_future()
        self._judge, self._sink, self._found = judge, None, None
        self._head.clear()
        try:
            self._transport.write(request)
            return await self._done
        except BaseException as error:
            if not (
                isinstance(error, Refused) and error.head.lasting and error.head.headers.get("content-length") == "0"
            ):
                self.abort()
            raise
        finally:
            self._done = self._judge = self._sink = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._sink is not None:
            self._end(Malformed(f"the reply was cut off {self._sink.missing} bytes before its end"))
        else:
            self._end(ConnectionResetError("the connection was closed"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._sink is None:
            return self._scratch[: LARGEST_HEAD - len(self._head)]
        if len(self._scratch) < min(self._sink.missing, _SCRATCH):  # a model is on its way
            self._scratch = memoryview(bytearray(_SCRATCH))
        return self._scratch[: max(1, self._sink.missing)]  # an empty one would mean the end of the connection

    def buffer_updated(self, nbytes: int) -> None:
        if self._done is None or self._done.done():
            self.abort()
            return
        try:
            if self._sink is None:
                self._take_head(self._scratch[:nbytes])
            else:
                self._sink.feed(self._scratch[:nbytes])
            if self._sink is not None and self._sink.missing == 0:
                self._sink.close()
                self._end(None)
        except (Malformed, Refused) as error:
            self._end(error)

    def _take_head(self, data: memoryview) -> None:
        """Bytes of the head; what follows it is the body's beginning."""
        assert self._judge is not None
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) >= LARGEST_HEAD:
                raise Malformed(f"more than {LARGEST_HEAD} bytes of headers")
            return
        self._found = parse_head(bytes(self._head[:end]))
        self._sink = self._judge(self._found)
        rest = memoryview(bytes(self._head[end + 4 :]))
        self._head.clear()
        if rest:
            self._sink.feed(rest)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is not None:
            self._done.set_exception(error)
        else:
            assert self._found is not None
            self._done.set_result(self._found)
