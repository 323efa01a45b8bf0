"""A connection that fails leaves no descriptor, and a client always closes."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.core.evidence import Witness
from rpel.peer.core.protocol import Pull
from rpel.peer.io.metrics import Metrics
from rpel.peer.io.pulls import Pulls
from support.loopback import Loopback, loopback
from support.waiting import PATIENCE, brief, until

pytestmark = pytest.mark.integration


@asynccontextmanager
async def nothing_listens(net: Loopback) -> AsyncIterator[None]:
    await net.transports[1].server.stop()
    yield


@asynccontextmanager
async def listener_resets(net: Loopback) -> AsyncIterator[None]:
    """Every connection is reset as soon as it was accepted."""
    listening, loop = socket.create_server(("127.0.0.1", 0)), asyncio.get_running_loop()
    listening.setblocking(False)

    def reset() -> None:
        with suppress(BlockingIOError):
            accepted, _ = listening.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()

    loop.add_reader(listening, reset)
    net.move({1: f"https://127.0.0.1:{listening.getsockname()[1]}"})
    try:
        yield
    finally:
        loop.remove_reader(listening)
        listening.close()


@asynccontextmanager
async def listener_answers(net: Loopback, answer: bytes, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    """Every connection is sent these bytes, and stays open until the other end closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        try:
            with suppress(OSError):
                await reader.read()
        finally:  # also when the loop ends
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    net.move({1: f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    try:
        yield
    finally:
        server.close()


def is_silent(net: Loopback) -> AbstractAsyncContextManager[None]:
    return listener_answers(net, b"", None)


def speaks_no_tls(net: Loopback) -> AbstractAsyncContextManager[None]:
    return listener_answers(net, b"SSH-2.0-OpenSSH_9.2\r\n", None)


def shows_another_certificate(net: Loopback) -> AbstractAsyncContextManager[None]:
    own = net.credentials[2]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    return listener_answers(net, b"", context)


@asynccontextmanager
async def own_key_is_gone(net: Loopback) -> AsyncIterator[None]:
    net.credentials[0].key.unlink()
    yield


FAILURES = [
    nothing_listens,
    listener_resets,
    is_silent,
    speaks_no_tls,
    shows_another_certificate,
    own_key_is_gone,
]


def sockets_open() -> set[str]:
    """The sockets of this process, as the system names them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize("fails", FAILURES, ids=lambda fails: fails.__name__)
async def test_connection_that_fails_leaves_no_descriptor_and_close_returns(
    tmp_path: Path, fails: Callable[[Loopback], AbstractAsyncContextManager[None]]
) -> None:
    async with loopback(tmp_path) as net, fails(net):
        client = net.transports[0].client
        before = sockets_open()
        result, _ = await net.pull(0, 1, 1, within=brief(0.5))
        assert result == "unreachable"
        async with asyncio.timeout(PATIENCE):
            await client.close()
        await until(lambda: sockets_open() <= before)


async def test_round_that_was_left_asks_nobody_any_more(tmp_path: Path) -> None:
    """Its requests end with the peer, and open no connection after the others were closed."""
    async with loopback(tmp_path) as net, is_silent(net):
        ends, before = net.transports[0], asyncio.all_tasks()
        pulls = Pulls(ends.client, Witness(), tmp_path, Metrics(), tmp_path / "next", lambda error: None)
        pull, table = Pull(1, (1,), None, PATIENCE, needed=1), np.zeros((2, net.layout.d))
        left = asyncio.create_task(pulls.round(pull, table, PATIENCE, ends.now))
        await until(lambda: ends.client.connections)
        left.cancel()
        await asyncio.wait([left])
        await pulls.stop()
        assert not {task for task in asyncio.all_tasks() - before if "_ask" in repr(task)}
        assert ends.client.connections == 0
