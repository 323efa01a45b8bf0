"""A line that carries some of the models asked for brings these, and not parts of all of them."""

import asyncio
import socket
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.net.intake import Turns
from support.loopback import flat_layout, loopback, model
from support.waiting import brief

BIG = flat_layout(1_000_000)
ASKED = 6


class NarrowLine:
    """Connections to members' ports that together carry so many bytes a second, each its share."""

    def __init__(self, rate: float) -> None:
        self.rate, self.carried = rate, 0
        self._free = 0.0
        self.servers: list[asyncio.Server] = []

    async def open(self, to: int) -> int:
        """A port that leads to another one over the line."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_connection("127.0.0.1", to, limit=16 << 10)
            writer.transport.set_write_buffer_limits(high=16 << 10)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
            both = asyncio.gather(self._carry(reader, outer, False), self._carry(inner, writer, True))
            try:
                await both
            except OSError:
                pass
            finally:
                both.cancel()
                writer.transport.abort()
                outer.transport.abort()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=16 << 10)
        self.servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, narrow: bool) -> None:
        while piece := await reader.read(16 << 10):
            if narrow:  # first come, first served: all that have something to send in turn
                now = asyncio.get_running_loop().time()
                self._free = max(self._free, now - 0.1) + len(piece) / self.rate
                await asyncio.sleep(self._free - now)
                self.carried += len(piece)
            writer.write(piece)
            await writer.drain()
        writer.transport.abort()


@pytest.mark.integration
async def test_narrow_line_delivers_as_many_models_as_it_carries(tmp_path: Path) -> None:
    async with loopback(tmp_path, n=ASKED + 1, layout=BIG) as net:
        within = brief(8.0)
        line = NarrowLine(rate=0.75 * ASKED * BIG.size / within)
        for member in range(1, ASKED + 1):
            net.stores[member].put(1, model(BIG, member))
        net.move(
            {i: f"https://127.0.0.1:{await line.open(net.transports[i].port)}" for i in range(1, ASKED + 1)}
        )
        loop, rows = asyncio.get_running_loop(), np.zeros((ASKED, BIG.d), BIG.dtype)
        deadline = loop.time() + within
        turns = Turns(range(1, ASKED + 1), 3, BIG.size, deadline, loop.time)
        answers = await asyncio.gather(
            *(net.transports[0].pull(i + 1, 1, rows[i], deadline, turns) for i in range(ASKED))
        )
        for server in line.servers:
            server.close()
        for i, answer in enumerate(answers):
            assert answer.result != "ok" or np.array_equal(rows[i], model(BIG, i + 1))
    results, carried = [str(answer.result) for answer in answers], line.carried / BIG.size
    assert results.count("ok") > carried - 2, (results, carried)
    assert results.count("ok") >= 2, (results, carried)
