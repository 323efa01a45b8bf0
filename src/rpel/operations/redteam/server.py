"""The serving end of a hostile member: real TLS with its real key, and no limits of its own.

The rest of what a peer answers (clock, status, the common initial model) is answered as an honest one would: whoever
looks is not to notice. Everything is bounded, because a drill must not fall to what it meets.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from rpel.config.membership import Membership
from rpel.peer.http import INIT, LARGEST_HEAD, MODEL, Reply, json_reply, parse_request
from rpel.peer.identity import leaf_fingerprint
from rpel.peer.wire import Malformed

_MODEL = re.compile(re.escape(MODEL) + "([1-9][0-9]{0,11})")

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int, int], Awaitable[None]]
"""(reader, writer, member, round; 0: the common initial model): do something with the connection."""


class HostileServer:
    """Listens, knows members by their pin, and leaves requests for models to ``answer``."""

    def __init__(
        self,
        membership: Membership,
        context: ssl.SSLContext,
        answer: Answer,
        texts: Mapping[str, Callable[[], dict[str, object]]],
    ) -> None:
        self._membership, self._context, self._answer, self._texts = membership, context, answer, texts
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Begin to listen; ``port`` is then where (0: any free one)."""
        self._server = await asyncio.start_server(
            self._serve, host, port, ssl=self._context, ssl_handshake_timeout=5.0, limit=LARGEST_HEAD
        )
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop all connections."""
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
                member = self._membership.by_fingerprint(leaf_fingerprint(writer.get_extra_info("ssl_object")))
                while member is not None:
                    await self._one(await reader.readuntil(b"\r\n\r\n"), reader, writer, member)
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _one(
        self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, member: int
    ) -> None:
        try:
            path = parse_request(request.removesuffix(b"\r\n\r\n")).path
        except Malformed:
            path = ""
        model = _MODEL.fullmatch(path)
        if model or path == INIT:
            await self._answer(reader, writer, member, int(model[1]) if model else 0)
        elif path in self._texts:
            writer.write(bytes(json_reply(self._texts[path]())))
        else:
            writer.write(bytes(Reply(404)))
        await writer.drain()


def gone() -> bytes:
    """The reply for a round that is served no longer."""
    return bytes(Reply(410))


def early() -> bytes:
    """The reply for a round that is far from now."""
    return bytes(Reply(425))
