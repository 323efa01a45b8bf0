"""Identity: real TLS handshakes on loopback; only the member meant gets through, known by its pin."""

import socket
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from rpel import certificates
from rpel.peer.net import tls
from support.forged_certificates import NOW, signed
from support.loopback import Credentials, credentials, kept


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[str | ssl.SSLError, str | ssl.SSLError]:
    """What each end made of the other, (server, client): the other's pin, or the refusal.

    One byte goes each way: in TLS 1.3 a client learns that its certificate was refused only when it reads.
    """
    ends = socket.socketpair()
    found: list[str | ssl.SSLError] = ["", ""]

    def talk(end: int, context: ssl.SSLContext) -> None:
        ends[end].settimeout(30)
        try:
            with context.wrap_socket(ends[end], server_side=end == 0) as connection:
                connection.sendall(b"x")
                if connection.recv(1) == b"x":
                    found[end] = tls.leaf_fingerprint(connection)
        except ssl.SSLError as error:
            found[end] = error
        except OSError as error:  # the other end hung up first
            found[end] = ssl.SSLError(str(error))
        finally:
            ends[end].close()

    other = threading.Thread(target=talk, args=(0, server))
    other.start()
    talk(1, client)
    other.join()
    return found[0], found[1]


def refused(outcome: tuple[str | ssl.SSLError, str | ssl.SSLError]) -> bool:
    """No data went through: neither end read a byte of the other."""
    return all(isinstance(end, ssl.SSLError) or end == "" for end in outcome)


def contexts(
    a: Credentials, b: Credentials, members: list[str] | None = None
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(a serving, b asking a)."""
    return (
        tls.server_context(a.certificate, a.key, [a.pem, b.pem]),
        tls.client_context(b.certificate, b.key, a.pem),
    )


# --- handshakes ---------------------------------------------------------------------------------------------


def test_two_members_meet_and_see_each_others_pin(tmp_path: Path) -> None:
    a, b = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    server, client = contexts(a, b)
    assert handshake(server, client) == (b.pin, a.pin)
    assert server.num_tickets == 0


def test_expired_member_is_refused_at_either_end(tmp_path: Path) -> None:
    a = credentials(tmp_path, "a")
    late = credentials(tmp_path, "late", days=3, now=NOW - timedelta(days=30))
    raw_client, raw_server = _raw(ssl.PROTOCOL_TLS_CLIENT, late, a), _raw(ssl.PROTOCOL_TLS_SERVER, late, a)
    server = tls.server_context(a.certificate, a.key, [a.pem, late.pem])  # others can start all the same
    asked = handshake(server, raw_client)
    asking = handshake(raw_server, tls.client_context(a.certificate, a.key, late.pem))
    assert refused(asked)
    assert refused(asking)
    assert "expired" in str(asked[0])
    assert "expired" in str(asking[1])
    with pytest.raises(ValueError, match=r"'late' expired at \d"):  # and the late one itself cannot
        tls.server_context(late.certificate, late.key, [a.pem])


def test_tls_1_2_is_refused_at_either_end(tmp_path: Path) -> None:
    a, b = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    server, client = contexts(a, b)
    old_client, old_server = _raw(ssl.PROTOCOL_TLS_CLIENT, b, a), _raw(ssl.PROTOCOL_TLS_SERVER, a, b)
    assert not refused(handshake(server, old_client))  # its fault is the version alone
    for old in (old_client, old_server):
        old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert refused(handshake(server, old_client))
    assert refused(handshake(old_server, client))


def test_member_that_could_sign_cannot_take_anothers_name(tmp_path: Path) -> None:
    a, b = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    ca_key, secret, ca_pem = signed("evil", ca=True)
    evil = kept(tmp_path, "evil", secret, ca_pem)
    _, minted_secret, minted_pem = signed("b", issuer=("evil", ca_key))
    minted = kept(tmp_path, "minted", minted_secret, minted_pem)
    # 1. such a member is not let in at all
    with pytest.raises(ValueError, match=r"'evil'.*CA:TRUE"):
        tls.server_context(a.certificate, a.key, [b.pem, evil.pem])
    with pytest.raises(ValueError, match=r"'evil'.*CA:TRUE"):
        tls.client_context(a.certificate, a.key, evil.pem)
    # 2. had it been, TLS alone would accept the forgery, and the pin tells it from b
    server = tls.server_context(a.certificate, a.key, [a.pem, b.pem])
    server.load_verify_locations(cadata=evil.pem)
    seen, _ = handshake(server, _raw(ssl.PROTOCOL_TLS_CLIENT, minted, a))
    assert seen == minted.pin != b.pin


def test_certificate_signed_by_a_member_is_refused(tmp_path: Path) -> None:
    a, b = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    b_key = serialization.load_pem_private_key(b.key.read_bytes(), None)
    _, secret, pem = signed("a", issuer=("b", b_key))
    minted = kept(tmp_path, "minted", secret, pem)
    server = tls.server_context(a.certificate, a.key, [a.pem, b.pem])
    assert refused(handshake(server, _raw(ssl.PROTOCOL_TLS_CLIENT, minted, a)))


def _raw(protocol: Any, own: Credentials, other: Credentials) -> ssl.SSLContext:
    """A context as an attacker, who need not keep our rules, would make it."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(cadata=other.pem)
    return context


# --- keys and certificates ----------------------------------------------------------------------------------


def test_new_identity_is_what_the_network_asks_for(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    a = credentials(tmp_path, "clinic-3", days=10)
    found = certificates.check_certificate(a.pem)
    assert found.name == "clinic-3"
    assert found.fingerprint == a.pin
    assert found.pem == a.pem
    begin, end = before.replace(microsecond=0), datetime.now(UTC)
    assert begin - timedelta(days=1) <= found.not_before <= end - timedelta(days=1)
    assert begin + timedelta(days=10) <= found.not_after <= end + timedelta(days=10)
    basic = x509.load_pem_x509_certificate(a.pem.encode()).extensions.get_extension_for_class(
        x509.BasicConstraints
    )
    assert basic.critical
    assert basic.value.ca is False


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_key_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    a = credentials(tmp_path, "a")
    a.key.chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600"):
        tls.server_context(a.certificate, a.key, [a.pem])
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600"):
        tls.client_context(a.certificate, a.key, a.pem)


def test_peer_without_key_or_certificate_does_not_start(tmp_path: Path) -> None:
    a, b = credentials(tmp_path, "a"), credentials(tmp_path, "b")
    with pytest.raises(ValueError, match=r"no key .*/none"):
        tls.server_context(a.certificate, tmp_path / "none", [a.pem])
    with pytest.raises(ValueError, match="no certificate"):
        tls.server_context(tmp_path / "none", a.key, [a.pem])
    with pytest.raises(ValueError, match=r"certificate.*key"):
        tls.server_context(a.certificate, b.key, [a.pem])


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    pem, pkcs8, plain = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    kinds = {
        "P-256": ec.generate_private_key(ec.SECP384R1()).private_bytes(pem, pkcs8, plain),
        "unencrypted": own.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret")),
        "PEM": b"no key",
    }
    for words, secret in kinds.items():
        path = tmp_path / words
        tls.write_key(path, secret)
        with pytest.raises(ValueError, match=words):
            tls.read_key(path)


def changed(part: str, other: str) -> str:
    """A certificate in which some bytes are others."""
    der = ssl.PEM_cert_to_DER_cert(certificates.create("x")[1]).hex()
    assert part in der
    return ssl.DER_cert_to_PEM_cert(bytes.fromhex(der.replace(part, other)))


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "CA": (lambda: signed("x", ca=True)[2], "CA:TRUE"),
    "no basic constraints": (lambda: signed("x", ca=None)[2], "peer init"),
    "other curve": (lambda: signed("x", key=ec.generate_private_key(ec.SECP384R1()))[2], "P-256"),
    "RSA": (lambda: signed("x", key=rsa.generate_private_key(65537, 2048))[2], "P-256"),
    "server only": (lambda: signed("x", usages=(ExtendedKeyUsageOID.SERVER_AUTH,))[2], "both ends"),
    "no usage": (lambda: signed("x", usages=())[2], "peer init"),
    "signed by another": (
        lambda: signed("x", issuer=("y", ec.generate_private_key(ec.SECP256R1())))[2],
        "not signed by its own key",
    ),
    "name of another as issuer": (
        lambda: signed("x", issuer=("x", ec.generate_private_key(ec.SECP256R1())))[2],
        "not signed by its own key",
    ),
    "two at once": (lambda: certificates.create("x")[1] + certificates.create("y")[1], "one PEM block"),
    "nothing": (lambda: "", "one PEM block"),
    "noise": (lambda: "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "one PEM block"),
    "unknown curve": (lambda: changed("2a8648ce3d030107", "2a8648ce3d03015f"), "one PEM block"),
    "unknown version": (lambda: changed("a003020102", "a003020172"), "one PEM block"),
    "expired": (lambda: certificates.create("x", days=1, now=NOW - timedelta(days=9))[1], "expired at"),
    "of the future": (lambda: certificates.create("x", now=NOW + timedelta(days=9))[1], "valid only from"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_certificate_that_no_member_may_have_is_refused(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(ValueError) as caught:
        certificates.check_certificate(make())
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a/b", "a" * 65, "a\n"])
def test_id_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValueError, match=r"such as '[A-Za-z0-9]"):
        certificates.create(name)
