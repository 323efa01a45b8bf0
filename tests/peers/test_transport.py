"""Members get each other's models over real TLS, and nobody else gets anything."""

import asyncio
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from rpel import certificates
from rpel.peer.config.membership import Member
from rpel.peer.net import tls
from support.loopback import (
    SMALL,
    Credentials,
    Ends,
    MemoryStore,
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
def test_server_on_all_ipv6_addresses_is_reached_over_ipv4(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path, 2) as net:
            server = net.transports[0].server
            await server.start("::", 0)
            _, writer = await asyncio.open_connection("127.0.0.1", server.addresses[-1][1])
            assert writer.get_extra_info("peername")[0] == "127.0.0.1"
            writer.close()

    asyncio.run(scenario())


def test_published_model_arrives_bit_for_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            x = model(SMALL, 1)
            net.stores[1].put(4, x)
            for _ in range(2):
                result, row = await net.pull(0, 1, 4)
                assert result == "ok"
                np.testing.assert_array_equal(row, x)
            assert net.stores[1].answered == [(0, 200, SMALL.size)] * 2

    asyncio.run(scenario())


def test_connection_serves_many_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            for t in range(1, 6):
                net.stores[1].put(t, model(SMALL, t))
                assert (await net.pull(0, 1, t))[0] == "ok"
            assert net.transports[0].client.connections == 1

    asyncio.run(scenario())


def test_request_waits_until_the_round_is_published(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            waiting = asyncio.create_task(net.pull(0, 1, 1))
            await until(lambda: net.transports[1].server.requests)
            x = model(SMALL, 1)
            net.stores[1].put(1, x)
            net.transports[1].announce()
            result, row = await waiting
            assert result == "ok"
            np.testing.assert_array_equal(row, x)

    asyncio.run(scenario())


def test_round_that_never_comes_is_late_and_one_that_is_gone_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            net.stores[1].policy.patience = 0.05
            assert (await net.pull(0, 1, 1, within=brief(0.4)))[0] == "late"
            assert net.stores[1].codes()[425]
            for t in range(1, 6):
                net.stores[1].put(t, model(SMALL, t))
            assert (await net.pull(0, 1, 1))[0] == "refused"
            assert net.stores[1].codes()[410]

    asyncio.run(scenario())


def test_disconnected_reader_frees_its_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            for asked in range(3):  # more than may be open at once
                waiting = asyncio.create_task(net.pull(0, 1, 1))
                await until(lambda asked=asked: net.transports[1].server.requests != asked)  # type: ignore[misc]
                waiting.cancel()
                await until(lambda: not net.transports[1].server.connections())
            net.stores[1].put(1, model(SMALL, 1))
            net.transports[1].announce()
            assert (await net.pull(0, 1, 1))[0] == "ok"

    asyncio.run(scenario())


def test_silent_address_is_unreachable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            await net.transports[1].stop()
            assert (await net.pull(0, 1, 1, within=0.3))[0] == "unreachable"

    asyncio.run(scenario())


def test_late_starting_peer_is_reached(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_clock_status_and_initial_model_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            net.stores[1].ahead, net.stores[2].ahead = 100.0, -7.0
            assert sorted(round(offset) for offset in await net.transports[0].clocks()) == [-7, 100]
            assert await net.transports[0].status(1, now() + 20) == {"round": 0}
            net.stores[1].put(0, model(SMALL, 0))
            row = np.zeros(SMALL.d, SMALL.dtype)
            answer = await net.transports[0].pull(1, 0, row, now() + 20)
            assert (answer.result, round(answer.offset or 0.0), answer.received) == ("ok", 100, SMALL.size)
            np.testing.assert_array_equal(row, model(SMALL, 0))

    asyncio.run(scenario())


# --- who is let in ------------------------------------------------------------------------------------------


def test_strangers_reach_no_handler(tmp_path: Path) -> None:
    async def scenario() -> None:
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
            assert (
                await told(net, asking(net, net.credentials[0]), wanted(net, more="Connection: close\r\n"))
            )[:12] == (b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_expired_member_reaches_no_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            net.stores[1].put(1, model(SMALL, 1))
            secret, pem = certificates.create("late", days=1, now=datetime.now(UTC) - timedelta(days=3))
            late = Credentials(tmp_path / "late.key", tmp_path / "late.pem", pem)
            tls.write_key(late.key, secret)
            late.certificate.write_text(pem)
            joined = membership([*net.membership.members, Member.of("late", "https://127.0.0.1:9", pem)])
            own = net.credentials[1]
            net.transports[1].rotate(joined, own.certificate, own.key)
            with pytest.raises(ValueError, match=r"'late' expired at \d"):
                asking(net, late)
            monkeypatch.setattr(tls, "check_certificate", lambda pem: None)  # a peer that does not look
            assert await told(net, asking(net, late), wanted(net)) == b""
            assert net.transports[1].server.requests == 0

    asyncio.run(scenario())


def test_member_at_the_wrong_address_is_neither_asked_nor_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            net.stores[2].put(1, model(SMALL, 1))
            net.move({1: f"https://127.0.0.1:{net.transports[2].port}"})
            result, row = await net.pull(0, 1, 1, within=0.5)
            assert result == "unreachable"
            assert not row.any()
            assert net.transports[2].server.requests == 0

    asyncio.run(scenario())


def test_request_under_another_membership_gets_409_and_no_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            net.stores[1].put(1, model(SMALL, 1))
            own = net.credentials[0]
            other = membership(
                [*net.membership.members, Member.of("new", "https://127.0.0.1:9", _stranger(tmp_path))]
            )
            net.transports[0].rotate(other, own.certificate, own.key)
            row = np.zeros(SMALL.d, SMALL.dtype)
            answer = await net.transports[0].pull(1, 1, row, now() + brief(0.5))
            assert (answer.result, answer.membership) == ("refused", net.membership.hash)
            assert set(net.stores[1].codes()) == {409}
            assert all(sent == 0 for _, _, sent in net.stores[1].answered)

    asyncio.run(scenario())


def _stranger(folder: Path) -> str:
    return credentials(folder, "new").pem


def test_rotated_key_and_a_removed_member_take_effect_while_connected(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_server_without_key_or_certificate_does_not_start(tmp_path: Path) -> None:
    own, other = credentials(tmp_path, "peer-0"), credentials(tmp_path, "peer-1")
    alone = membership([Member.of("peer-0", "https://127.0.0.1:1", own.pem)])

    def transport(certificate: Path, key: Path) -> Ends:
        return Ends(alone, certificate, key, "127.0.0.1:0", SMALL, MemoryStore(SMALL))

    with pytest.raises(ValueError, match=r"no key .*nowhere\.key"):
        transport(own.certificate, tmp_path / "nowhere.key")
    with pytest.raises(ValueError, match="no certificate"):
        transport(tmp_path / "nowhere.pem", own.key)
    with pytest.raises(ValueError, match=r"certificate.*key"):
        transport(other.certificate, own.key)
    own.key.chmod(0o644)
    with pytest.raises(ValueError, match=r"mode 0644.*chmod 600"):
        transport(own.certificate, own.key)
