"""Who a peer is: one P-256 key and one self-signed certificate, known to the others by its fingerprint.

Laws: identity is the pin (SHA-256 of the certificate's DER bytes), never the name in it; both sides compare it after
the handshake, because TLS alone would also accept what a member with a CA certificate had signed; certificates that
could sign others are refused; only TLS 1.3 with certificates on both sides is spoken, without session tickets; a key
that others on the machine can read is refused.
"""

import hashlib
import os
import re
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 825
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PURPOSES = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


@dataclass(frozen=True)
class Certificate:
    """What the others need to know of a certificate; ``pem`` is rewritten from the parsed bytes, so it is one."""

    name: str
    fingerprint: str
    not_before: datetime
    not_after: datetime
    pem: str


def check_id(member: str) -> str:
    """The id itself, if it can be one: it is written into certificates, file names and metrics.

    >>> check_id("clinic-3")
    'clinic-3'
    """
    if not _ID.fullmatch(member):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", member).strip("-._")[:64] or "peer-1"
        raise ValueError(f"id {member!r} is not valid: letters, digits and . _ - (at most 64), such as {near!r}")
    return member


def create(member: str, days: int = VALID_DAYS, now: datetime | None = None) -> tuple[bytes, str]:
    """A new key (PKCS8 PEM) and its certificate (PEM), valid from yesterday on, so that clocks may differ a little."""
    check_id(member)
    if not 1 <= days <= 36_500:
        raise ValueError(f"days {days} is impossible: choose 1 to 36500, nearest {min(max(days, 1), 36_500)}")
    start = (now or datetime.now(UTC)) - timedelta(days=1)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days + 1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(sorted(_PURPOSES, key=lambda oid: oid.dotted_string)), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret, certificate.public_bytes(serialization.Encoding.PEM).decode()


def write_key(path: Path, secret: bytes) -> None:
    """Write a key that only its owner can read; never over another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path} exists already: a key is never overwritten, choose another folder") from None
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The P-256 key of a file that only its owner can read."""
    if not path.is_file():
        raise ValueError(f"there is no key {path}: make one with `rpel peer init`")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"key {path} has mode {mode:04o}, so that others can read it: set it with `chmod 600 {path}`")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        raise ValueError(f"{path} does not hold an unencrypted private key in PEM form") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the key in {path} is not on the curve P-256: make one with `rpel peer init`")
    return key


def read_certificate(pem: str) -> Certificate:
    """The certificate in a PEM text, whatever its dates; ValueError unless a member may have it."""
    try:
        (found,) = x509.load_pem_x509_certificates(pem.encode())
        basic = found.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = found.public_key()
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        raise ValueError("a member's certificate must be one PEM block as `rpel peer init` makes it") from None
    name = str(names[0].value) if names else ""
    if basic.ca:
        raise ValueError(f"the certificate of {name!r} is a CA's (CA:TRUE): it could sign for others, so it is refused")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the certificate of {name!r} has a key that is not on the curve P-256")
    if not set(usage) >= _PURPOSES:
        raise ValueError(f"the certificate of {name!r} is not meant for both ends of a connection")
    try:
        found.verify_directly_issued_by(found)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"the certificate of {name!r} is not signed by its own key") from None
    der = found.public_bytes(serialization.Encoding.DER)
    text = found.public_bytes(serialization.Encoding.PEM).decode()
    return Certificate(name, fingerprint(der), found.not_valid_before_utc, found.not_valid_after_utc, text)


def check_certificate(pem: str, now: datetime | None = None) -> Certificate:
    """The certificate in a PEM text, if a member may have it and it is valid now."""
    found, now = read_certificate(pem), now or datetime.now(UTC)
    if now > found.not_after:
        raise ValueError(f"the certificate of {found.name!r} expired at {found.not_after:%Y-%m-%d %H:%M} UTC")
    if now < found.not_before:
        raise ValueError(f"the certificate of {found.name!r} is valid only from {found.not_before:%Y-%m-%d %H:%M} UTC")
    return found


def fingerprint(der: bytes) -> str:
    """The pin of a certificate, from its DER bytes.

    >>> fingerprint(b"certificate")[:16]
    '03d66dd08835c1ca'
    """
    return hashlib.sha256(der).hexdigest()


def server_context(certificate: Path, key: Path, members: Iterable[str]) -> ssl.SSLContext:
    """The serving end: accepts a connection only from a certificate among the members' PEM texts.

    A member's expired certificate does not keep the others from starting; the handshake with it fails.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _strict(context, certificate, key, members)


def client_context(certificate: Path, key: Path, member: str) -> ssl.SSLContext:
    """The asking end, for connections to the one member whose PEM text is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # identity is the pin, never the name
    return _strict(context, certificate, key, [member])


def leaf_fingerprint(connection: ssl.SSLObject | ssl.SSLSocket) -> str:
    """The pin of the certificate at the other end, to be compared with the member meant."""
    der = connection.getpeercert(binary_form=True)
    if not der:
        raise ValueError("the other end of the connection showed no certificate")
    return fingerprint(der)


def _strict(context: ssl.SSLContext, certificate: Path, key: Path, pems: Iterable[str]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.options |= ssl.Options.OP_NO_TICKET | ssl.Options.OP_NO_COMPRESSION | ssl.Options.OP_NO_RENEGOTIATION
    _load_own(context, certificate, key)
    anchors = "".join(read_certificate(pem).pem for pem in pems)
    if anchors:  # a server without members accepts nobody
        context.load_verify_locations(cadata=anchors)
    return context


def _load_own(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """The own certificate and key, after all that could be wrong with them."""
    read_key(key)
    if not certificate.is_file():
        raise ValueError(f"there is no certificate {certificate}: make one with `rpel peer init`")
    check_certificate(certificate.read_text("utf-8"))
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError:
        raise ValueError(f"certificate {certificate} does not belong to key {key}") from None
