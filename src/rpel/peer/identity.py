"""Who a peer is: its key, its certificate, and its place in the membership in force and in the one to come.

Invariants: identity is the pin (SHA-256 of the certificate's DER bytes), never the name in it; both sides compare it
after the handshake, because TLS alone would also accept what a member with a CA certificate had signed; certificates
that could sign others are refused; only TLS 1.3 with certificates on both sides is spoken, without session tickets; a
key that others on the machine can read is refused. A peer starts only with a key and a certificate that its entry
names; a later membership takes effect at the round it names and not before; one that could not be meant for this run is
refused in one sentence, and the old one stays.
"""

import ctypes
import logging
import os
import resource
import secrets
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rpel.certificates import check_certificate, fingerprint, read_certificate
from rpel.config.membership import Membership
from rpel.config.peer import Config
from rpel.peer.evidence import FIXED
from rpel.peer.protocol import Terms
from rpel.rules import rule

log = logging.getLogger("rpel")
_PR_SET_DUMPABLE = 4  # <linux/prctl.h>


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
            raise ValueError(f"key {path} has a passphrase: name its file as passphrase_file in peer.toml") from None
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
    return (file.path, read_passphrase(file.passphrase_file)) if isinstance(file, ProtectedKey) else (file, None)


def _passphrase_file(file: KeyFile) -> Path | None:
    return file.passphrase_file if isinstance(file, ProtectedKey) else None


def server_context(certificate: Path, key: KeyFile, members: Iterable[str]) -> ssl.SSLContext:
    """The serving end: accepts a connection only from a certificate among the members' PEM texts.

    A member's expired certificate does not keep the others from starting; the handshake with it fails.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _strict(context, certificate, key, members)


def client_context(certificate: Path, key: KeyFile, member: str) -> ssl.SSLContext:
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


def _strict(context: ssl.SSLContext, certificate: Path, key: KeyFile, pems: Iterable[str]) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.options |= ssl.Options.OP_NO_TICKET | ssl.Options.OP_NO_COMPRESSION | ssl.Options.OP_NO_RENEGOTIATION
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
    """Nothing of a process that has read a key ends up in a file: no core dumps, and no other process looks inside."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


# --- a place in a membership ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """The membership in force and this peer's place in it."""

    membership: Membership
    me: int
    certificate: Path
    key: KeyFile
    expiry: float
    """When the certificate ends, unix seconds."""

    @property
    def names(self) -> tuple[str, ...]:
        """The members' ids by number."""
        return tuple(member.id for member in self.membership.members)

    def names_to(self, most: int) -> tuple[str, ...]:
        """Ids by number, up to ``most``: a draw from before a change of membership may hold numbers beyond it."""
        return self.names + tuple(f"former-{number}" for number in range(len(self.membership.members), most + 1))

    @property
    def terms(self) -> Terms:
        """What the protocol needs to know of the membership."""
        m = self.membership
        chosen = rule(m.rule, f=m.b_hat)
        seed = secrets.randbits(63)
        return Terms(self.me, m.nodes, m.byzantine, m.pull, chosen, m.deadline, m.rounds, seed=seed)


def take(config: Config, membership: Membership) -> Standing:
    """This peer's place in the membership, with the key and certificate that its entry names."""
    me = membership.index(config.id)
    wanted = membership.members[me].fingerprint
    seen = []
    for certificate, key in _pairs(config):
        read_key(key)
        if not certificate.is_file():
            raise ValueError(f"there is no certificate {certificate}: make one with `rpel peer init`")
        found = check_certificate(certificate.read_text("utf-8"))
        if found.fingerprint == wanted:
            return Standing(membership, me, certificate, key, found.not_after.timestamp())
        seen.append(f"{certificate.name} has {found.fingerprint}")
    raise ValueError(f"the entry of {config.id!r} names the fingerprint {wanted}, but {' and '.join(seen)}")


def _pairs(config: Config) -> Iterator[tuple[Path, KeyFile]]:
    """The own certificate and key; then, when there is one, the pair that a coming membership may name."""
    for certificate, key in (
        (config.certificate, config.key),
        (_later(config.certificate), _later(config.key)),
    ):
        if key == config.key or key.exists():
            yield certificate, ProtectedKey(key, config.passphrase_file) if config.passphrase_file else key


def _later(path: Path) -> Path:
    """peer.key → peer.next.key, beside it."""
    return path.with_name(f"{path.stem}.next{path.suffix}")


class MembershipWatcher:
    """The file in which a coming membership is announced, looked at before each round.

    It is read in a thread of its own: whatever it holds, it neither ends a peer nor holds up a round.
    """

    def __init__(self, config: Config, held: Callable[[str], bool] = lambda hash: False, force: bool = False) -> None:
        """``held(hash)``: whether more than b others say that they hold that membership; ``force``: take any file."""
        self._config, self._held, self._force = config, held, force
        self._seen: tuple[int, int, int] | None = None
        self._coming: Membership | None = None
        self._reading: threading.Thread | None = None
        self._refused = ""
        self._found_in = 0  # the round in which the file was first seen
        self.prepare: Callable[[Membership], None] | None = None
        """Called, in a thread of its own, with a membership that is announced: what its plan needs is compiled then."""

    def make_ready(self, coming: Membership | None = None) -> None:
        """Begin to prepare for a coming membership, by default the one announced; nobody waits for it."""
        coming = coming or self._coming
        if self.prepare is not None and coming is not None:
            threading.Thread(target=self.prepare, args=(coming,), name="rpel-prepare", daemon=True).start()

    def due(
        self, now: Membership, round: int, patience: float | None = None, at_start: bool = False
    ) -> Membership | None:
        """The announced membership, if it takes effect at this round and is not yet in force.

        One that should have taken effect before is taken at the start of a peer, and later if the others hold it.
        ``patience``: seconds to wait for a file that takes long to read; it counts from the round in which it is read.
        """
        self._look(now, round)
        if self._reading is not None:
            self._reading.join(patience)
            if self._reading.is_alive():
                log.warning("%s takes long to read: the present membership stays for now", self._config.next_members)
                return None
        coming = self._coming
        if coming is None or coming.from_round > round or coming.hash == now.hash:
            return None
        if coming.from_round < self._found_in and not at_start and not self._force and not self._held(coming.hash):
            self._refuse(coming, round)
            return None
        return coming

    def _refuse(self, coming: Membership, round: int) -> None:
        """It should have taken effect before: whoever does so now, alone, is refused by all the others."""
        if coming.hash != self._refused:
            self._refused = coming.hash
            log.warning(
                "%s takes effect at round %d, which has begun, and the others do not hold it (it is round %d): with it "
                "this peer would be split off from them. Name a later from_round in the file that all get, or start "
                "with --force",
                self._config.next_members,
                coming.from_round,
                round,
            )

    def _look(self, now: Membership, round: int) -> None:
        """Begin to read the file again if it has changed."""
        if self._reading is not None and self._reading.is_alive():
            return
        try:
            found = self._config.next_members.stat()
        except OSError:
            self._seen = self._coming = None
            return
        mark = (found.st_mtime_ns, found.st_size, found.st_ino)
        if mark != self._seen:
            self._seen, self._coming, self._found_in = mark, None, round
            self._reading = threading.Thread(target=self._read, args=(now,), name="rpel-members", daemon=True)
            self._reading.start()

    def _read(self, now: Membership) -> None:
        """Read the file; what is wrong with it is said once."""
        try:
            coming = _successor(now, Membership.load(self._config.next_members), self._force)
            self._coming = coming
            if coming.hash != now.hash:
                self._announce(coming)
                self.make_ready()
        except Exception as error:  # whatever is in the file, it must not end this peer
            log.warning("the coming membership is refused and the present one stays: %s", error or repr(error))

    def _announce(self, coming: Membership) -> None:
        """Say what will happen, while there is time to do something about it."""
        log.info("membership %s takes effect at round %d", coming.hash[:12], coming.from_round)
        try:
            take(self._config, coming)
        except ValueError as error:
            log.warning("this peer will have to stop at round %d: %s", coming.from_round, error)


def _successor(now: Membership, coming: Membership, force: bool = False) -> Membership:
    """The coming membership, if it can follow the present one."""
    for key in ("from_round", "protocol"):
        had, has = getattr(now, key), getattr(coming, key)
        if has < had and not force:
            raise ValueError(
                f"its {key} is {has}, and {had} is in force: it is an older file, with which this peer would be split "
                "off from the others; --force takes it all the same"
            )
    for key in (*FIXED, "epoch", "period"):
        if getattr(coming, key) != getattr(now, key):
            raise ValueError(f"its {key} is {getattr(coming, key)}, and a running network keeps {getattr(now, key)}")
    return coming
