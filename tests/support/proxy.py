"""A connection that can be bad: TCP between peers through a thread of the test, which delays,
damages or starves bytes.

It sees only what TLS lets anybody see. One :class:`Proxy` stands before one member:
it is where the others reach it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

_PIECE = 64 << 10


@dataclass
class Proxy:
    """From an address to a member's; what it does to bytes can be changed while it is in use.

    ``delay``: seconds before each piece goes on · ``damage``: of a member's bytes, one bit of each so many is
    turned (0: none) · ``starve_after``: bytes of each connection after which one byte a second goes on (None:
    never)
    · ``silent``: connections are accepted and nothing ever comes.
    """

    at: tuple[str, int]
    to: tuple[str, int]
    delay: float = 0.0
    damage: int = 0
    starve_after: int | None = None
    silent: bool = False
    damaged: int = 0
    carried: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: both directions until either ends."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):  # cut by the test
                if self.silent:
                    await reader.read()
                    return
                inner, outer = await asyncio.open_connection(*self.to)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(reader, outer, lambda piece, seen: piece))
                    both.create_task(self._carry(inner, writer, self._harm))
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, harm: Callable[[bytes, int], bytes]
    ) -> None:
        seen = 0
        try:
            while piece := await reader.read(_PIECE):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if (
                    self.starve_after is not None
                    and harm == self._harm
                    and seen + len(piece) > self.starve_after
                ):
                    await self._starve(piece, writer)
                else:
                    writer.write(harm(piece, seen))
                    await writer.drain()
                seen += len(piece)
                self.carried += len(piece)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    def _harm(self, piece: bytes, seen: int) -> bytes:
        """Turn one bit of each ``damage`` bytes of the connection."""
        if not self.damage:
            return piece
        harmed = bytearray(piece)
        for position in range(-seen % self.damage, len(piece), self.damage):
            if seen + position:
                harmed[position] ^= 0x10
                self.damaged += 1
        return bytes(harmed)

    async def _starve(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        for byte in piece:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1.0)


class Proxies:
    """Several proxies in one background thread; a context manager."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self.proxies = proxies

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """End all connections, so that the next ones meet the proxies as they are now."""
        self._call(self._cut())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._servers = [await asyncio.start_server(proxy.connected, *proxy.at) for proxy in self.proxies]

    async def _cut(self) -> None:
        tasks = [task for proxy in self.proxies for task in proxy.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for _ in range(3):  # what was just accepted begins its task, what was cut closes its socket
            await asyncio.sleep(0)
            await self._cut()
        await asyncio.sleep(0)
