"""Members get each other's models over real TLS, and nobody else gets anything."""

import asyncio
import socket
import ssl
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.config.membership import Member
from rpel.peer.net import tls
from support.loopback import (
    SMALL,
    Ends,
    asking,
    credentials,
    loopback,
    membership,
    model,
    told,
    wanted,
)
from support.waiting import brief, until

pytestmark = pytest.mark.integration


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs sockets for IPv4 and IPv6")
async def test_server_on_all_ipv6_addresses_is_reached_over_ipv4(tmp_path: Path) -> None:
    async with loopback(tmp_path, 2) as net:
        server = net.transports[0].server
        await server.start("::", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", server.addresses[-1][1])
        assert writer.get_extra_info("peername")[0] == "127.0.0.1"
        writer.close()


async def test_published_model_arrives_bit_for_bit(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        x = model(SMALL, 1)
        net.stores[1].put(4, x)
        for _ in range(2):
            result, row = await net.pull(0, 1, 4)
            assert result == "ok"
            np.testing.assert_array_equal(row, x)
        assert net.stores[1].answered == [(0, 200, SMALL.size)] * 2
        assert net.transports[0].client.connections == 1


async def test_request_waits_until_the_round_is_published(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        waiting = asyncio.create_task(net.pull(0, 1, 1))
        await until(lambda: net.transports[1].server.requests)
        x = model(SMALL, 1)
        net.stores[1].put(1, x)
        net.transports[1].announce()
        result, row = await waiting
        assert result == "ok"
        np.testing.assert_array_equal(row, x)


async def test_round_that_never_comes_is_late_and_one_that_is_gone_refused(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].policy.patience = 0.05
        assert (await net.pull(0, 1, 1, within=brief(0.4)))[0] == "late"
        assert net.stores[1].codes()[425]
        for t in range(1, 6):
            net.stores[1].put(t, model(SMALL, t))
        assert (await net.pull(0, 1, 1))[0] == "refused"
        assert net.stores[1].codes()[410]


async def test_disconnected_reader_frees_its_slot(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        for asked in range(3):  # more than may be open at once
            waiting = asyncio.create_task(net.pull(0, 1, 1))
            await until(lambda asked=asked: net.transports[1].server.requests != asked)  # type: ignore[misc]
            waiting.cancel()
            await until(lambda: not net.transports[1].server.connections())
        net.stores[1].put(1, model(SMALL, 1))
        net.transports[1].announce()
        assert (await net.pull(0, 1, 1))[0] == "ok"


async def test_late_starting_peer_is_reached(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        port = net.transports[1].port
        await net.transports[1].stop()
        waiting = asyncio.create_task(net.pull(0, 1, 1))
        own = net.credentials[1]
        again = Ends(net.membership, own.certificate, own.key, f"127.0.0.1:{port}", SMALL, net.stores[1])
        net.stores[1].put(1, model(SMALL, 1))
        await again.start()
        assert (await waiting)[0] == "ok"
        await again.stop()


async def test_clock_status_and_initial_model_are_served(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].ahead, net.stores[2].ahead = 100.0, -7.0
        assert sorted(round(offset) for offset in await net.transports[0].clocks()) == [-7, 100]
        assert await net.transports[0].status(1, now() + 20) == {"round": 0}
        net.stores[1].put(0, model(SMALL, 0))
        row = np.zeros(SMALL.d, SMALL.dtype)
        answer = await net.transports[0].pull(1, 0, row, now() + 20)
        assert (answer.result, round(answer.offset or 0.0), answer.received) == ("ok", 100, SMALL.size)
        np.testing.assert_array_equal(row, model(SMALL, 0))


async def test_hosts_name_of_a_url_is_sent_for_forwarders_and_an_address_is_not(tmp_path: Path) -> None:
    async with loopback(tmp_path, 2) as net:
        own, names = net.credentials[1], list[str | None]()
        context = tls.server_context(own.certificate, own.key, [net.credentials[0].pem])
        context.sni_callback = lambda connection, name, context: names.append(name)
        listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        for host in ("localhost", "127.0.0.1"):
            net.move({1: f"https://{host}:{listening.sockets[0].getsockname()[1]}"})
            await net.pull(0, 1, 1, within=brief(0.3))
        listening.close()
        assert set(names) == {"localhost", None}


# --- who is let in ------------------------------------------------------------------------------------------


async def test_strangers_reach_no_handler(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].put(1, model(SMALL, 1))
        stranger = credentials(tmp_path, "stranger")
        same_name = credentials(tmp_path / "other", "peer-0")
        unarmed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unarmed.check_hostname, unarmed.verify_mode = False, ssl.CERT_NONE
        old = asking(net, net.credentials[0])
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        for context in (asking(net, stranger), asking(net, same_name), unarmed, old, None):
            assert await told(net, context, wanted(net)) == b""
        assert net.transports[1].server.requests == 0
        assert net.stores[1].answered == []
        assert (await told(net, asking(net, net.credentials[0]), wanted(net, more="Connection: close\r\n")))[
            :12
        ] == (b"HTTP/1.1 200")


async def test_member_at_the_wrong_address_is_neither_asked_nor_believed(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[2].put(1, model(SMALL, 1))
        net.move({1: f"https://127.0.0.1:{net.transports[2].port}"})
        result, row = await net.pull(0, 1, 1, within=0.5)
        assert result == "unreachable"
        assert not row.any()
        assert net.transports[2].server.requests == 0


async def test_request_under_another_membership_gets_409_and_no_model(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].put(1, model(SMALL, 1))
        own = net.credentials[0]
        new = Member.of("new", "https://127.0.0.1:9", credentials(tmp_path, "new").pem)
        other = membership([*net.membership.members, new])
        net.transports[0].rotate(other, own.certificate, own.key)
        row = np.zeros(SMALL.d, SMALL.dtype)
        answer = await net.transports[0].pull(1, 1, row, now() + brief(0.5))
        assert (answer.result, answer.membership) == ("refused", net.membership.hash)
        assert set(net.stores[1].codes()) == {409}
        assert all(sent == 0 for _, _, sent in net.stores[1].answered)


async def test_rotated_key_and_a_removed_member_take_effect_while_connected(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        for i in (0, 1):
            net.stores[i].put(1, model(SMALL, i))
        assert (await net.pull(0, 1, 1))[0] == "ok"
        assert (await net.pull(2, 1, 1))[0] == "ok"
        fresh = credentials(tmp_path / "fresh", "peer-0")
        members = net.membership.members
        later = membership([Member.of("peer-0", members[0].url, fresh.pem), members[1]])
        old = net.membership
        for i, own in enumerate((fresh, net.credentials[1])):
            net.transports[i].rotate(later, own.certificate, own.key)
        net.membership = later
        assert (await net.pull(0, 1, 1))[0] == "ok"
        assert (await net.pull(1, 0, 1))[0] == "ok"
        assert (await net.pull(2, 1, 1, within=0.5))[0] in ("unreachable", "late")
        answered = len(net.stores[1].answered)
        # the key of before
        net.transports[0].rotate(later, net.credentials[0].certificate, net.credentials[0].key)
        assert (await net.pull(0, 1, 1, within=0.5))[0] in ("unreachable", "late")
        assert len(net.stores[1].answered) == answered
        assert old.hash != later.hash
