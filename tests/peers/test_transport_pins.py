"""Identity is the pin: a certificate that a member could have minted for others opens nothing,
at either end."""

import asyncio
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from rpel import certificates
from rpel.peer.config.membership import Member, Membership
from rpel.peer.net import tls
from rpel.peer.net.http import Request
from rpel.peer.net.limits import Ticket
from rpel.peer.net.server import MemberLine, Server
from support.forged_certificates import signed
from support.loopback import SMALL, Loopback, kept, loopback, membership, model
from support.waiting import until


class Minting:
    """Member 2 holds a certificate that can sign others (CA:TRUE),
    and has signed one in the name of peer-0."""

    def __init__(self, folder: Path, net: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
        key, secret, pem = signed("peer-2", ca=True)
        self.own = kept(folder / "ca", "peer-2", secret, pem)
        _, secret, pem = signed("peer-0", issuer=("peer-2", key))
        self.minted = kept(folder / "minted", "peer-0", secret, pem)
        # let past the reader, who would refuse both
        monkeypatch.setattr(tls, "read_certificate", _lenient)
        monkeypatch.setattr(tls, "check_certificate", _lenient)
        url = net.membership.members[2].url
        pin = _lenient(self.own.pem).fingerprint
        members = [
            *net.membership.members[:2],
            Member(id="peer-2", url=url, certificate=self.own.pem, fingerprint=pin),
        ]
        self.membership: Membership = membership(members)


def _lenient(pem: str) -> certificates.Certificate:
    found = x509.load_pem_x509_certificate(pem.encode())
    der = found.public_bytes(serialization.Encoding.DER)
    return certificates.Certificate(
        "", certificates.fingerprint(der), found.not_valid_before_utc, found.not_valid_after_utc, pem
    )


async def test_minted_client_certificate_is_dropped_before_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback(tmp_path) as net:
        minting = Minting(tmp_path, net, monkeypatch)
        own, serving = net.credentials[1], net.transports[1]
        serving.rotate(minting.membership, own.certificate, own.key)
        context = tls.client_context(minting.minted.certificate, minting.minted.key, own.pem)
        for _ in range(2):  # TLS alone would let it in, as the anchor's signature is right
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", serving.port, ssl=context, server_hostname=""
            )
            try:
                async with asyncio.timeout(60):  # not idle's 90 s
                    assert await reader.read() == b""
            except ConnectionResetError:
                pass
            finally:
                writer.transport.abort()
        assert serving.server.connections() == 0
        assert serving.server.requests == 0


async def test_server_with_a_minted_certificate_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback(tmp_path) as net:
        minting = Minting(tmp_path, net, monkeypatch)
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(1000))
            writer.transport.abort()

        pems = [found.pem for found in net.credentials]
        context = tls.server_context(minting.minted.certificate, minting.minted.key, pems)
        listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        members = minting.membership.members
        net.membership = membership([*members[:2], members[2].replace(url=url)])
        asking, own = net.transports[0], net.credentials[0]
        asking.rotate(net.membership, own.certificate, own.key)
        result, _ = await net.pull(0, 2, 1, within=2.0)
        listening.close()
        assert result == "unreachable"
        assert set(heard) <= {b""}  # not a byte of a request


async def test_request_of_a_former_member_is_not_answered(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        shop = net.stores[1]
        shop.put(1, model(SMALL, 1))
        serving: Server = net.transports[1].server
        line = MemberLine(serving, Ticket("127.0.0.1"))
        line.pin = "0" * 64
        request = Request("GET", "/v1/model/1", {"rpel-membership": net.membership.hash})
        reply = await serving.answer(line, request)
        assert reply is not None
        assert (reply.status, reply.closing) == (403, True)
        assert shop.answered == []


async def test_open_connections_of_a_member_that_left_are_closed(tmp_path: Path) -> None:
    async with loopback(tmp_path) as net:
        own, serving = net.credentials[1], net.transports[1]
        context = tls.client_context(net.credentials[2].certificate, net.credentials[2].key, own.pem)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", serving.port, ssl=context, server_hostname=""
        )
        pin = net.membership.members[2].fingerprint
        await until(lambda: serving.server.connections(pin))
        serving.rotate(membership(net.membership.members[:2]), own.certificate, own.key)
        try:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        except ConnectionResetError:
            pass
        assert serving.server.connections(pin) == 0
        writer.transport.abort()
