"""Ten thousand damaged replies, byte by byte, without sockets."""

import asyncio
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rpel.peer.core.wire import Layout, Malformed, Reception
from rpel.peer.net.client import Connection
from rpel.peer.net.http import LARGEST_HEAD
from rpel.types import Models
from support.loopback import head, model

pytestmark = pytest.mark.integration

ROUND = 3


class _Wire(asyncio.Transport):
    """The end of a connection that goes nowhere."""

    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def fed(reply: bytes, layout: Layout, row: Models, cut: Callable[[], int]) -> bool:
    """Was this reply, arriving in pieces and then ending, accepted?"""
    loop, reader, wire = asyncio.get_running_loop(), asyncio.StreamReader(limit=LARGEST_HEAD), _Wire()
    protocol = asyncio.StreamReaderProtocol(reader)
    protocol.connection_made(wire)
    connection = Connection(reader, asyncio.StreamWriter(wire, protocol, reader, loop))

    async def pull() -> None:
        found, reception = await connection.ask(b"GET"), Reception(layout, row, ROUND)
        reception.head(found.status, found.headers)
        while reception.missing:
            reception.feed(await connection.read(reception.missing))
        reception.close()

    asking = asyncio.ensure_future(pull())
    await asyncio.sleep(0)
    left = memoryview(reply)
    while left and not asking.done():
        size = cut()
        reader.feed_data(left[:size])
        left = left[size:]
        await asyncio.sleep(0)
    reader.feed_eof()
    try:
        await asking
    except (Malformed, OSError):
        return False
    finally:
        connection.abort()
        protocol.connection_lost(None)
    return True


def mutations(reply: bytes, coins: random.Random) -> Iterator[bytes]:
    while True:
        changed = bytearray(reply)
        for _ in range(coins.choice((1, 1, 2, 5))):
            at = coins.randrange(len(changed))
            match coins.randrange(5):
                case 0:
                    changed[at] ^= 1 << coins.randrange(8)
                case 1:
                    del changed[at : at + coins.randrange(1, 40)]
                case 2:
                    changed[at:at] = coins.randbytes(coins.randrange(1, 40))
                case 3:
                    changed[at:at] = changed[at : at + coins.randrange(1, 40)]
                case _:
                    del changed[at:]
            if not changed:
                break
        yield bytes(changed)


async def test_ten_thousand_mutated_replies_bring_a_model_of_the_right_form_or_nothing() -> None:
    tiny = Layout(("w",), ((8,),), np.dtype("float32"))
    values = model(tiny, 1).tobytes()
    reply = head(tiny, ROUND) + tiny.header + values
    coins = random.Random(7)
    accepted = 0
    row = np.zeros(tiny.d, tiny.dtype)
    assert await fed(reply, tiny, row, lambda: 7)
    for _, changed in zip(range(10_000), mutations(reply, coins), strict=False):
        row[:] = 0
        if await fed(changed, tiny, row, lambda: coins.randrange(1, 200)):
            accepted += 1
            where = changed.find(tiny.header)
            assert where > 0
            body = changed[where + len(tiny.header) :]
            assert row.tobytes() == body[: len(values)]  # only values differ: then it is another model
    assert 100 < accepted < 5000  # both kinds came up
