"""A member is given its share and no more, whatever it sends, and whoever stalls gives way."""

import asyncio
import socket
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from rpel.peer.net.limits import Limits
from support.loopback import SMALL, Ends, asking, flat_layout, loopback, membership, model, told, wanted
from support.waiting import brief, until

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("path", "method", "more", "code"),
    [
        ("/v1/model/1", "POST", "", 405),
        ("/v1/model/1", "HEAD", "", 405),
        ("/v1/model/1", "GET", "Content-Length: 3\r\n", 400),
        ("/v1/model/1", "GET", "Transfer-Encoding: chunked\r\n", 400),
        ("/v1/model/01", "GET", "", 404),
        ("/v1/model/-1", "GET", "", 404),
        ("/v1/model/1?x=1", "GET", "", 404),
        ("/v1/model/../model/1", "GET", "", 404),
        ("/v1/model/999999999999", "GET", "", 425),
        ("/", "GET", "", 404),
        ("/v1/model/1", "GET", "RPEL-Membership: 0\r\n", 400),
        ("/" + "x" * 5000, "GET", "", 400),
        ("/v1/model/1", "GET", "x: " + "y" * 300 + "\r\n", 400),
        ("/v1/model/1", "GET", "".join(f"x{i}: y\r\n" for i in range(40)), 400),
        ("/v1/clock", "NONSENSE", "", 400),
    ],
)
async def test_only_plain_requests_are_answered(
    tmp_path: Path, path: str, method: str, more: str, code: int
) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].put(1, model(SMALL, 1))
        request = wanted(net, path, method, more + "Connection: close\r\n")
        reply = await told(net, asking(net, net.credentials[0]), request)
        assert reply[9:12].decode() == str(code)
        assert (len(reply) > SMALL.size) == (code == 200)


async def test_pipelined_requests_wait_and_are_not_buffered(tmp_path: Path) -> None:
    async with loopback(tmp_path, limits=Limits(burst=1, hold=0.2)) as net:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", net.transports[1].port, ssl=asking(net, net.credentials[0]), server_hostname=""
        )
        writer.transport.set_write_buffer_limits(high=1 << 16)
        many = wanted(net, "/v1/clock") * 500
        tracemalloc.start()
        with suppress(OSError):  # also TimeoutError: the server reads no further, or has closed
            async with asyncio.timeout(1.0):
                for _ in range(1000):  # 70 MB
                    writer.write(many)
                    await writer.drain()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        writer.transport.abort()
        assert net.transports[1].server.requests < 100
        assert peak < 4 << 20
        net.stores[1].put(1, model(SMALL, 1))
        assert (await net.pull(2, 1, 1))[0] == "ok"


async def test_headers_are_small(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].put(1, model(SMALL, 1))
        request = wanted(net, more="Connection: close\r\n")
        reply = await told(net, asking(net, net.credentials[0]), request)
        assert len(reply) - SMALL.size + len(request) < 500  # 1 % of MNIST's 704,200 bytes would be 7,042


async def test_member_is_given_two_bodies_of_a_round_then_refused(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        for t in (1, 2):
            net.stores[1].put(t, model(SMALL, t))
        results = [(await net.pull(0, 1, 1, within=seconds))[0] for seconds in (20.0, 20.0, brief(0.5))]
        assert results == ["ok", "ok", "refused"]
        assert net.stores[1].codes()[429]
        assert (await net.pull(2, 1, 1))[0] == "ok"
        assert (await net.pull(0, 1, 2))[0] == "ok"


async def test_aborted_body_counts_against_the_limit(tmp_path: Path) -> None:
    large = flat_layout(2_000_000)

    async with loopback(tmp_path, layout=large) as net:
        net.stores[1].put(1, model(large, 1))
        for _ in range(2):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                net.transports[1].port,
                ssl=asking(net, net.credentials[0]),
                server_hostname="",
            )
            writer.write(wanted(net))
            await reader.readexactly(1000)
            writer.transport.abort()
        assert (await net.pull(0, 1, 1, within=brief(0.5)))[0] == "refused"


async def test_two_requests_may_be_open_and_a_third_is_refused(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        waiting = [asyncio.create_task(net.pull(0, 1, 1)) for _ in range(2)]
        await until(lambda: net.transports[1].server.requests >= 2)
        assert (await net.pull(0, 1, 1, within=0.4))[0] in ("refused", "late")  # not served, either way
        net.stores[1].put(1, model(SMALL, 1))
        net.transports[1].announce()
        assert [result for result, _ in await asyncio.gather(*waiting)] == ["ok", "ok"]


async def test_reader_of_one_byte_at_a_time_is_dropped_at_the_deadline(tmp_path: Path) -> None:
    large = flat_layout(10_000_000)  # more than the kernel's buffers hold

    async with loopback(tmp_path, layout=large, limits=Limits(write=0.3)) as net:
        net.stores[1].put(1, model(large, 1))
        raw = socket.create_connection(("127.0.0.1", net.transports[1].port))
        raw.setblocking(False)
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=asking(net, net.credentials[0]), server_hostname="", limit=1
        )
        writer.write(wanted(net))
        assert await reader.read(1) == b"H"
        # the reader stays, the server goes
        await until(lambda: not net.transports[1].server.connections())
        writer.transport.abort()
        assert net.stores[1].policy.open(0) == 0


async def test_members_oldest_connection_gives_way(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        context, port = asking(net, net.credentials[0]), net.transports[1].port
        opened = [
            await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="")
            for _ in range(7)
        ]
        net.stores[1].put(1, model(SMALL, 1))
        assert (await net.pull(0, 1, 1))[0] == "ok"
        assert net.transports[1].server.connections(net.membership.members[0].fingerprint) <= 4
        assert await opened[0][0].read() == b""
        for _, writer in opened:
            writer.transport.abort()


async def test_simultaneous_connections_of_a_member_are_limited(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        context, serving = asking(net, net.credentials[0]), net.transports[1]
        opening = (
            asyncio.open_connection("127.0.0.1", serving.port, ssl=context, server_hostname="")
            for _ in range(24)
        )
        opened = await asyncio.gather(*opening, return_exceptions=True)
        net.stores[1].put(1, model(SMALL, 1))
        assert (await net.pull(2, 1, 1))[0] == "ok"
        assert serving.server.connections(net.membership.members[0].fingerprint) <= 4
        for found in opened:
            if not isinstance(found, BaseException):
                found[1].transport.abort()


async def test_connections_that_never_shake_hands_give_way_and_end(tmp_path: Path) -> None:
    limits = Limits(handshake=0.5, pending=8, pending_each=4)
    async with loopback(tmp_path, limits=limits) as net:
        server = net.transports[1].server
        stalled = [await asyncio.open_connection("127.0.0.1", net.transports[1].port) for _ in range(30)]
        net.stores[1].put(1, model(SMALL, 1))
        assert (await net.pull(0, 1, 1))[0] == "ok"
        assert server.handshakes <= 8
        ends = await asyncio.gather(*(reader.read() for reader, _ in stalled), return_exceptions=True)
        assert len(ends) == 30  # all were closed by the server
        for _, writer in stalled:
            writer.transport.abort()


async def test_members_that_join_may_connect_from_the_same_address_at_once(tmp_path: Path) -> None:
    """One address may have a connection for each member and two more; a membership that grows widens that."""

    narrow = Limits(connections=1, pending_each=1)
    async with loopback(tmp_path, n=8) as net:
        own, few = net.credentials[1], membership(net.membership.members[:2])
        serving = Ends(few, own.certificate, own.key, "127.0.0.1:0", SMALL, net.stores[1], narrow)
        await serving.start()
        net.move({1: f"https://127.0.0.1:{serving.port}"})
        serving.rotate(net.membership, own.certificate, own.key)
        for asking_member in (0, 2, 3, 4, 5, 6, 7):  # one after the other; all stay open
            answer = await net.transports[asking_member].status(1, asyncio.get_running_loop().time() + 5)
            assert isinstance(answer, dict), answer
        assert serving.server.connections() == 7
        await serving.stop()
