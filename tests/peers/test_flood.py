"""One member that asks a thousand times a second and 300 stalled handshakes: the others still get their models."""

import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.limits import Gate, Limits, Pace
from support.flood import Flood, stall
from support.loopback import SMALL, asking, loopback, model, wanted

pytestmark = pytest.mark.integration


def test_the_others_get_their_models(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path, n=6) as net:
            store, served = net.stores[1], net.transports[1]
            store.put(1, model(SMALL, 1))
            newest = 1
            flood = Flood(served.port, asking(net, net.credentials[0]), lambda: wanted(net, f"/v1/model/{newest}"))
            attacks = [asyncio.create_task(flood.run()), asyncio.create_task(stall(served.port))]
            for newest in range(2, 12):
                store.put(newest, model(SMALL, newest))
                served.announce()
                sent = flood.sent
                while flood.sent < sent + 100:
                    await asyncio.sleep(0.01)
                for member in (2, 3, 4, 5):
                    result, row = await net.pull(member, 1, newest)
                    assert result == "ok"
                    np.testing.assert_array_equal(row, model(SMALL, newest))
            assert flood.sent >= 1000
            answered = [code for member, code, sent in store.answered if member == 0 and sent]
            assert len(answered) <= 2 * newest  # two bodies a round, flood or no flood
            assert len(served.server._gate._pending) <= Limits().pending
            assert len(served.server._greeting) <= 2 * Limits().pending
            for task in attacks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(scenario())


def test_an_address_that_comes_too_fast_waits_and_then_is_refused() -> None:
    gate = Gate(members=4, limits=Limits())
    tickets = [gate.arrive("127.0.0.66", now=0.0) for _ in range(300)]
    waits = [ticket.wait for ticket in tickets if ticket is not None]
    assert sum(wait == 0 for wait in waits) == 28
    assert len(waits) == 28 + Limits().pending_each
    assert waits == sorted(waits)
    other = gate.arrive("127.0.0.1", now=0.0)
    assert other is not None
    assert other.wait == 0


def test_stalled_handshakes_of_many_addresses_give_way_to_the_next() -> None:
    gate = Gate(members=4, limits=Limits(pending=64))
    tickets = [gate.arrive(f"10.0.{i // 100}.{i % 100}", now=0.0) for i in range(256)]
    begun = [(ticket, gate.begin(ticket)) for ticket in tickets if ticket is not None]
    assert len(begun) == 256
    assert [gone for _, gone in begun] == [None] * 64 + [ticket for ticket, _ in begun[:192]]


def test_open_connections_of_an_address_are_bounded_and_counted_back() -> None:
    gate = Gate(members=1, limits=Limits(connections=4, pending_each=8))
    held = []
    for second in range(40):
        ticket = gate.arrive("10.0.0.1", now=float(second))
        if ticket is not None:
            gate.begin(ticket)
            gate.settle(ticket)
            held.append(ticket)
    assert len(held) == 20
    for ticket in held:
        gate.leave(ticket)
    assert gate.arrive("10.0.0.1", now=50.0) is not None


def test_many_names_are_not_remembered_for_ever() -> None:
    pace = Pace(rate=1.0, burst=1.0, remembered=100)
    for i in range(10_000):
        assert pace.turn(str(i), now=float(i)) == 0
    assert len(pace._buckets) <= 101
