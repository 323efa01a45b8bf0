"""Members that ask too much and strangers that stall:
the attacks of the flood test and of benchmarks/flood.py."""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Flood:
    """Requests at a steady rate over a handful of connections, whatever the answers;
    lost connections are replaced."""

    port: int
    context: ssl.SSLContext
    request: Callable[[], bytes]
    rate: float = 1000.0
    connections: int = 8
    sent: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        opening = [asyncio.create_task(self._connect()) for _ in range(self.connections)]
        begin, due = loop.time(), 0
        try:
            while True:
                await asyncio.sleep(0.005)
                due = int((loop.time() - begin) * self.rate) - self.sent
                for _ in range(due):
                    self.sent += 1
                    if self.writers:
                        self.writers[self.sent % len(self.writers)].write(self.request())
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    async def _connect(self) -> None:
        """Keep one connection, and read what comes without looking at it."""
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self.port, ssl=self.context, server_hostname=""
                )
                self.writers.append(writer)
                try:
                    while await reader.read(1 << 16):
                        pass
                finally:
                    self.writers.remove(writer)
                    writer.transport.abort()
            await asyncio.sleep(0.01)


async def stall(port: int, count: int = 300, source: str = "127.0.0.66") -> None:
    """That many connections at a time from one address that never say a word; until cancelled."""

    async def one() -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
                try:
                    await reader.read()
                finally:
                    writer.transport.abort()
            await asyncio.sleep(1.0)

    await asyncio.gather(*(one() for _ in range(count)))
