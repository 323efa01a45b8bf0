"""A member's certificate: self-signed, P-256, known to the others by its fingerprint.

Invariants: the fingerprint (SHA-256 of the DER bytes) identifies a member, never the name; a certificate that
could sign others (CA:TRUE) is refused. Members' files are read with this module,
so it opens no socket and no key.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 825
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PURPOSES = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True)
class Certificate:
    """What other members need to know of a certificate.

    ``pem`` is re-encoded from the parsed bytes, so it is always a valid one.
    """

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
        raise ValueError(
            f"id {member!r} is not valid: letters, digits and . _ - (at most 64), such as {near!r}"
        )
    return member


def create(
    member: str, days: int = VALID_DAYS, now: datetime | None = None, passphrase: bytes = b""
) -> tuple[bytes, str]:
    """Create a key (PKCS8 PEM) and its certificate (PEM).

    It is valid from yesterday on, because clocks may differ a little.

    With a passphrase the key is encrypted by it.
    """
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
        .add_extension(
            x509.ExtendedKeyUsage(sorted(_PURPOSES, key=lambda oid: oid.dotted_string)), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption(),
    )
    return secret, certificate.public_bytes(serialization.Encoding.PEM).decode()


def read_certificate(pem: str) -> Certificate:
    """The certificate in a PEM text, whatever its dates; ValueError unless a member may have it."""
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem.encode())
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = certificate.public_key()
    except _UNREADABLE:
        raise ValueError(
            "a member's certificate must be one PEM block as `rpel peer init` makes it"
        ) from None
    name = str(names[0].value) if names else ""
    if basic.ca:
        raise ValueError(
            f"the certificate of {name!r} is a CA's (CA:TRUE): it could sign for others, so it is refused"
        )
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the certificate of {name!r} has a key that is not on the curve P-256")
    if not set(usage) >= _PURPOSES:
        raise ValueError(f"the certificate of {name!r} is not meant for both ends of a connection")
    try:
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise ValueError(f"the certificate of {name!r} is not signed by its own key") from None
    der = certificate.public_bytes(serialization.Encoding.DER)
    text = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return Certificate(
        name, fingerprint(der), certificate.not_valid_before_utc, certificate.not_valid_after_utc, text
    )


def check_certificate(pem: str, now: datetime | None = None) -> Certificate:
    """The certificate in a PEM text, if a member may have it and it is valid now."""
    certificate, now = read_certificate(pem), now or datetime.now(UTC)
    if now > certificate.not_after:
        raise ValueError(
            f"the certificate of {certificate.name!r} expired at {certificate.not_after:%Y-%m-%d %H:%M} UTC"
        )
    if now < certificate.not_before:
        raise ValueError(
            f"the certificate of {certificate.name!r} is valid only from "
            f"{certificate.not_before:%Y-%m-%d %H:%M} UTC"
        )
    return certificate


def fingerprint(der: bytes) -> str:
    """The pin of a certificate, from its DER bytes.

    >>> fingerprint(b"certificate")[:16]
    '03d66dd08835c1ca'
    """
    return hashlib.sha256(der).hexdigest()
