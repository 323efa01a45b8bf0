"""One member that asks a thousand times a second and 300 stalled handshakes:
the others still get their models."""

import asyncio
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.net.limits import Gate, Limits, Pace, Stage, Ticket
from support.flood import Flood, stall
from support.loopback import SMALL, Loopback, asking, loopback, membership, model, wanted
from support.waiting import until

pytestmark = pytest.mark.integration


async def test_honest_members_get_models_during_a_flood(tmp_path: Path) -> None:
    async with loopback(tmp_path, n=6) as net:
        store, served = net.stores[1], net.transports[1]
        store.put(1, model(SMALL, 1))
        newest = 1
        flood = Flood(
            served.port, asking(net, net.credentials[0]), lambda: wanted(net, f"/v1/model/{newest}")
        )
        attacks = [asyncio.create_task(flood.run()), asyncio.create_task(stall(served.port))]
        for newest in range(2, 12):
            store.put(newest, model(SMALL, newest))
            served.announce()
            await until(lambda sent=flood.sent: flood.sent >= sent + 100)  # type: ignore[misc]
            for member in (2, 3, 4, 5):
                result, row = await net.pull(member, 1, newest)
                assert result == "ok"
                np.testing.assert_array_equal(row, model(SMALL, newest))
        assert flood.sent >= 1000
        answered = [code for member, code, sent in store.answered if member == 0 and sent]
        assert len(answered) <= 2 * newest  # two bodies a round, flood or no flood
        assert served.server.handshakes <= 2 * Limits().pending
        assert served.server.mute <= Limits().mute
        for task in attacks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def gate(members: int = 4, **limits: int) -> tuple[Gate, list[Ticket]]:
    dropped: list[Ticket] = []
    return Gate(members, Limits(**limits), dropped.append, random.Random(1)), dropped


def spoken(found: Gate, address: str, now: float = 0.0) -> tuple[Ticket, float | None]:
    ticket = found.arrive(address)
    return ticket, found.speak(ticket, now)


def test_fast_address_is_delayed_and_loses_its_own_connections() -> None:
    found, dropped = gate()
    waits = [wait for _, wait in (spoken(found, "127.0.0.66") for _ in range(300)) if wait is not None]
    assert sum(wait == 0 for wait in waits) == 28
    assert max(waits) <= Limits().pending_each / 12
    assert found.count(Stage.WAITING) <= 28 + Limits().pending_each
    assert {ticket.address for ticket in dropped} == {"127.0.0.66"}
    assert spoken(found, "127.0.0.1")[1] == 0


def test_connections_without_hello_are_dropped_oldest_of_busiest_first() -> None:
    found, dropped = gate(mute=100)
    member = found.arrive("10.0.0.1")
    flood = [found.arrive("10.0.0.66") for _ in range(300)]
    assert dropped == flood[:201]
    assert member.stage is Stage.MUTE


def test_recent_members_address_is_dropped_last() -> None:
    found, dropped = gate(mute=100)
    came, _ = spoken(found, "10.0.0.1")
    assert found.begin(came)
    found.admit(came, now=0.0)
    member = found.arrive("10.0.0.1")
    for i in range(500):
        found.arrive(f"10.1.{i // 100}.{i % 100}")
    assert member not in dropped
    dropped.clear()
    for _ in range(500):
        found.arrive("10.0.0.1")
    others = [ticket for ticket in dropped if ticket.address != "10.0.0.1"]
    assert len(others) <= 51  # half of the room stays for those who were not seen before


def test_stalled_handshakes_of_many_addresses_give_way_at_random() -> None:
    found, dropped = gate(pending=64, waiting=1000)
    tickets = [spoken(found, f"10.0.{i // 100}.{i % 100}")[0] for i in range(256)]
    assert all(found.begin(ticket) for ticket in tickets)
    assert found.count(Stage.PENDING) == 64
    assert len(dropped) == 192
    assert dropped != tickets[:192]


def test_open_connections_of_an_address_are_bounded_and_counted_back() -> None:
    found, _ = gate(members=1, connections=4, pending_each=8)
    held = []
    for second in range(40):
        ticket, wait = spoken(found, "10.0.0.1", now=float(second))
        if wait is not None:
            assert found.begin(ticket)
            found.admit(ticket, now=float(second))
            held.append(ticket)
    assert len(held) == 20
    for ticket in held:
        found.leave(ticket)
        found.leave(ticket)
    assert spoken(found, "10.0.0.1", now=50.0)[1] is not None


def test_address_records_are_bounded() -> None:
    pace = Pace(rate=1.0, burst=1.0, remembered=100)
    for i in range(10_000):
        assert pace.turn(str(i), now=float(i)) == 0
    assert len(pace) <= 101


# --- a member beside strangers, for real --------------------------------------------------------------------

HANDSHAKES = 20


async def handshake(net: Loopback, way: float) -> bool:
    """A fresh connection of member 0, whose ClientHello takes so many seconds to arrive:
    is its request answered?"""
    reached = socket.socket()
    reached.setblocking(False)
    loop = asyncio.get_running_loop()
    writer = None
    try:
        async with asyncio.timeout(30):
            await loop.sock_connect(reached, ("127.0.0.1", net.transports[1].port))
            await asyncio.sleep(way)
            reader, writer = await asyncio.open_connection(
                sock=reached, ssl=asking(net, net.credentials[0]), server_hostname=""
            )
            writer.write(wanted(net, "/v1/clock"))
            return (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        reached.close() if writer is None else writer.transport.abort()


async def strangers(port: int, rate: float, address: Callable[[], str], opened: list[int]) -> None:
    """Connections that never say a word, so many a second, until cancelled."""
    held: deque[socket.socket] = deque()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        while True:
            while opened[0] < (loop.time() - begin) * rate:
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.bind((address(), 0))
                with suppress(BlockingIOError):
                    stranger.connect(("127.0.0.1", port))
                held.append(stranger)
                opened[0] += 1
                if len(held) > 400:  # more than the server holds: those were closed by it
                    held.popleft().close()
            await asyncio.sleep(0.005)
    finally:
        for stranger in held:
            stranger.close()


@pytest.mark.parametrize(
    ("rate", "way", "address"),
    [
        (30.0, 0.0, lambda: "127.0.0.1"),
        (300.0, 0.0, lambda: "127.0.0.1"),
        (
            600.0,
            0.1,
            lambda: f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}",
        ),
    ],
    ids=["from the member's own address", "ten times as many", "from many addresses, a member 100 ms away"],
)
async def test_silent_strangers_cost_a_member_at_most_one_handshake_in_twenty(
    tmp_path: Path, rate: float, way: float, address: Callable[[], str]
) -> None:
    async with loopback(tmp_path) as net:
        opened = [0]
        flood = asyncio.create_task(strangers(net.transports[1].port, rate, address, opened))
        await until(lambda: opened[0] >= min(300, 4 * rate))  # until the server is full of them
        passed = [await handshake(net, way) for _ in range(HANDSHAKES)]
        assert net.transports[1].server.mute <= Limits().mute
        flood.cancel()
        with suppress(asyncio.CancelledError):
            await flood
    assert opened[0] > 100
    assert sum(passed) >= HANDSHAKES - 1


async def test_membership_that_shrinks_under_load_shuts_out_former_members(tmp_path: Path) -> None:
    async with loopback(tmp_path, n=4) as net:
        serving, left = net.transports[1], net.membership.members[0].fingerprint
        net.stores[1].put(1, model(SMALL, 1))
        flood = Flood(serving.port, asking(net, net.credentials[0]), lambda: wanted(net, "/v1/clock"))
        running = asyncio.create_task(flood.run())
        await until(lambda: flood.sent >= 500 and serving.server.connections(left))
        smaller = membership(net.membership.members[1:])  # everybody has another number now
        for transport, own in list(zip(net.transports, net.credentials, strict=True))[1:]:
            transport.rotate(smaller, own.certificate, own.key)
        await until(lambda: not serving.server.connections(left))
        for asking_member in (2, 3):
            row = np.zeros(SMALL.d, SMALL.dtype)
            answer = await net.transports[asking_member].pull(
                0, 1, row, asyncio.get_running_loop().time() + 30
            )
            assert answer.result == "ok"
            np.testing.assert_array_equal(row, model(SMALL, 1))
        answered, sent = len(net.stores[1].answered), flood.sent
        await until(lambda: flood.sent >= sent + 500)
        assert len(net.stores[1].answered) == answered  # nothing more for whoever left
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
