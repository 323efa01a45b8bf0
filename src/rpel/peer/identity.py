"""Who a peer is: one P-256 key and one self-signed certificate, known to the others by its fingerprint.

Laws: identity is the pin (SHA-256 of the certificate's DER bytes), never the name in it; both sides compare it after
the handshake, because TLS alone would also accept what a member with a CA certificate had signed; certificates that
could sign others are refused; only TLS 1.3 with certificates on both sides is spoken, without session tickets; a key
that others on the machine can read is refused.
"""

import os
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rpel.certificates import check_certificate, fingerprint, read_certificate


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
