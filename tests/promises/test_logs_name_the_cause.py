"""A log line and /readyz name what is wrong: the disk or the certificate, and not the network."""

import errno
import json
import os
import re
import resource
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from support.commands import rpel
from support.process_network import Member, ProcessNetwork, alone
from support.waiting import pace

pytestmark = pytest.mark.integration

NO_SPACE = os.strerror(errno.EFBIG)
"""What a limited process is told when it writes; a full disk says "No space left on device"."""


def lines_of(member: Member, round: int) -> list[str]:
    """The lines for people that are about one round."""
    return [line for line in member.errors.splitlines() if re.search(rf"\bround {round}\b", line)]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessNetwork, list[int], str]]:
    """A peer that could write nothing in some of its rounds: the network, those rounds,
    and what /readyz said."""
    plan = alone(hyperparameters={"d": 4000, "lr": 0.1})
    with ProcessNetwork(tmp_path_factory.mktemp("full"), plan) as net:
        peer = net.members[0]
        net.start(peer)
        net.wait(lambda: bool(peer.lines) or peer.ended, "the first round")
        # room for a part of the next line of the audit log, and for no half-step
        size = (peer.folder / "state" / "audit.jsonl").stat().st_size + 40
        most = resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE, (size, most))
        before = peer.last
        net.wait_round(before + 3, peer)
        said = net.page(peer, "/readyz")[1]
        resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE, (most, most))
        full = [round for round in peer.rounds if round > before + 1]
        net.wait_round(peer.last + 3, peer)
        net.kill(peer)
        yield net, full, said


def test_readyz_names_a_full_disk(full: tuple[ProcessNetwork, list[int], str]) -> None:
    assert NO_SPACE in full[2]


def test_round_that_a_full_disk_spoils_names_the_disk(full: tuple[ProcessNetwork, list[int], str]) -> None:
    net, rounds, _ = full
    for round in rounds:
        assert lines_of(net.members[0], round)
        for line in lines_of(net.members[0], round):
            assert NO_SPACE in line


def test_audit_log_is_proven_after_the_disk_was_full(
    full: tuple[ProcessNetwork, list[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    net, rounds, _ = full
    log = net.members[0].folder / "state" / "audit.jsonl"
    members = str(net.folder / "members.toml")
    out, _ = rpel("network", "verify", str(log), "--members", members, "--json", capsys=capsys)
    found = json.loads(out)
    assert found["proven"] is True
    assert any(first <= rounds[0] <= last for first, last in found["rounds_missing"])


def certify_briefly(net: ProcessNetwork, member: Member, seconds: float) -> datetime:
    """Replace a member's key and certificate by ones that end soon; returns when."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member.id)])
    now = datetime.now(UTC)
    ends = (now + timedelta(seconds=seconds)).replace(microsecond=0)
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both_ends, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (member.folder / "peer.key").write_bytes(key.private_bytes(*encoding))
    old = (member.folder / "peer.crt").read_text()
    (member.folder / "peer.crt").write_text(pem)
    pins = [
        x509.load_pem_x509_certificate(one.encode()).fingerprint(hashes.SHA256()).hex() for one in (old, pem)
    ]
    text = (net.folder / "members.toml").read_text()
    assert old.strip() in text
    text = text.replace(old.strip(), pem.strip())
    (net.folder / "members.toml").write_text(re.sub(_colons(pins[0]), pins[1], text, flags=re.IGNORECASE))
    return ends


def _colons(pin: str) -> str:
    return ":?".join(pin[i : i + 2] for i in range(0, len(pin), 2))


def test_certificate_that_ends_during_the_run_is_named(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path, alone()) as net:
        peer = net.members[0]
        ends = certify_briefly(net, peer, 3.0 + pace()).isoformat()
        net.start(peer)
        net.wait(lambda: bool(peer.lines) or peer.ended, "the first round")
        assert peer.running, peer.errors
        net.wait(lambda: peer.lines[-1]["time"] > ends, "the end of the certificate")
        seen = peer.last
        net.wait_round(seen + 3, peer)
        later = next(round for round in peer.rounds if round > seen)
        assert any("certificate" in line for line in lines_of(peer, later))
        assert "certificate" in net.page(peer, "/readyz")[1]
