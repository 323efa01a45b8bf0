"""Who a peer is: its key, its certificate, and TLS with them.

Invariants: identity is the pin (SHA-256 of the certificate's DER bytes), never the name in it; both sides
compare it after the handshake, because TLS alone would also accept what a member with a CA certificate had
signed; certificates that could sign others are refused; only TLS 1.3 with certificates on both sides is
spoken, without session tickets; a key that others on the machine can read is refused.
"""

import ctypes
import os
import resource
import ssl
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rpel.certificates import check_certificate, fingerprint, read_certificate

_PR_SET_DUMPABLE = 4  # <linux/prctl.h>


def write_key(path: Path, secret: bytes) -> None:
    """Write a key that only its owner can read; never over another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(
            f"{path} exists already: a key is never overwritten, choose another folder"
        ) from None
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class ProtectedKey:
    """A key file that is encrypted, and the file with its passphrase."""

    path: Path
    passphrase_file: Path


KeyFile = Path | ProtectedKey
"""Where a private key lies."""


def read_key(file: KeyFile) -> ec.EllipticCurvePrivateKey:
    """The P-256 key of a file that only its owner can read."""
    path, passphrase = _opened(file)
    if not path.is_file():
        raise ValueError(f"there is no key {path}: make one with `rpel peer init`")
    _check_private("key", path)
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=passphrase)
    except TypeError:  # encrypted and no passphrase, or the other way round
        if passphrase is None:
            raise ValueError(
                f"key {path} has a passphrase: name its file as passphrase_file in peer.toml"
            ) from None
        raise ValueError(f"key {path} has no passphrase: leave passphrase_file out of peer.toml") from None
    except ValueError:
        if passphrase is not None:
            raise ValueError(f"the passphrase in {_passphrase_file(file)} does not open key {path}") from None
        raise ValueError(f"{path} does not hold a private key in PEM form") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(f"the key in {path} is not on the curve P-256: make one with `rpel peer init`")
    return key


def read_passphrase(path: Path) -> bytes:
    """The passphrase in a file that only its owner can read: its first line."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: passphrase_file holds the passphrase of the key")
    _check_private("passphrase file", path)
    lines = path.read_bytes().splitlines()
    if not lines or not lines[0]:
        raise ValueError(f"{path} is empty: its first line is the passphrase of the key")
    return lines[0]


def _check_private(what: str, path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{what} {path} has mode {mode:04o}, so that others can read it: set it with `chmod 600 {path}`"
        )


def _opened(file: KeyFile) -> tuple[Path, bytes | None]:
    return (
        (file.path, read_passphrase(file.passphrase_file)) if isinstance(file, ProtectedKey) else (file, None)
    )


def _passphrase_file(file: KeyFile) -> Path | None:
    return file.passphrase_file if isinstance(file, ProtectedKey) else None


def server_context(certificate: Path, key: KeyFile, members: Iterable[str]) -> ssl.SSLContext:
    """The serving end: accepts a connection only from a certificate among the members' PEM texts.

    A member's expired certificate does not keep the others from starting; the handshake with it fails.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _strict(context, certificate, key, members)


def client_context(certificate: Path, key: KeyFile, *members: str) -> ssl.SSLContext:
    """The asking end, for connections to members with these PEM texts; the pin decides which one it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # identity is the pin, never the name
    return _strict(context, certificate, key, members)


def leaf_fingerprint(connection: ssl.SSLObject | ssl.SSLSocket) -> str:
    """The pin of the certificate at the other end, to be compared with the member meant."""
    der = connection.getpeercert(binary_form=True)
    if not der:
        raise ValueError("the other end of the connection showed no certificate")
    return fingerprint(der)


def _strict(context: ssl.SSLContext, certificate: Path, key: KeyFile, pems: Iterable[str]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.options |= (
        ssl.Options.OP_NO_TICKET | ssl.Options.OP_NO_COMPRESSION | ssl.Options.OP_NO_RENEGOTIATION
    )
    _load_own(context, certificate, key)
    anchors = "".join(read_certificate(pem).pem for pem in pems)
    if anchors:  # a server without members accepts nobody
        context.load_verify_locations(cadata=anchors)
    return context


def _load_own(context: ssl.SSLContext, certificate: Path, key: KeyFile) -> None:
    """The own certificate and key, after all that could be wrong with them."""
    read_key(key)
    if not certificate.is_file():
        raise ValueError(f"there is no certificate {certificate}: make one with `rpel peer init`")
    check_certificate(certificate.read_text("utf-8"))
    try:
        path, passphrase = _opened(key)
        context.load_cert_chain(certificate, path, passphrase)
    except ssl.SSLError:
        raise ValueError(f"certificate {certificate} does not belong to key {path}") from None


def no_core_dumps() -> None:
    """Keep the memory of a process that has read a key out of files: no core dumps, no foreign reader."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
