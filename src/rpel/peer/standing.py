"""A peer's place in a network: which membership is in force, which number it has there, with which key; and what comes.

Laws: a peer starts only with a key and a certificate that its entry names; a later membership takes effect at the round
it names and not before; one that could not be meant for this run is refused in one sentence, and the old one stays.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rpel.aggregation import rule
from rpel.certificates import check_certificate
from rpel.config import membership as memberships
from rpel.config.membership import INIT_FILE, Membership
from rpel.config.peer import Config
from rpel.peer import wire
from rpel.peer.identity import read_key
from rpel.peer.protocol import Terms
from rpel.peer.store import Body
from rpel.peer.wire import Signature
from rpel.types import Models

log = logging.getLogger("rpel")

_FIXED = ("run", "epoch", "period", "model_header_sha256", "init_sha256")
"""What a running network cannot change: another one would be meant."""


@dataclass(frozen=True)
class Standing:
    """The membership in force and this peer's place in it."""

    membership: Membership
    me: int
    certificate: Path
    key: Path
    expiry: float
    """When the certificate ends, unix seconds."""

    @property
    def names(self) -> tuple[str, ...]:
        """The members' ids by number."""
        return tuple(member.id for member in self.membership.members)

    @property
    def terms(self) -> Terms:
        """What the life of a peer needs to know of the membership."""
        m = self.membership
        chosen = rule(m.rule, f=m.b_hat)
        return Terms(self.me, m.nodes, m.byzantine, m.pull, chosen, m.deadline, m.rounds)


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


def _pairs(config: Config) -> Iterator[tuple[Path, Path]]:
    """The own certificate and key; then, when there is one, the pair that a coming membership may name."""
    yield config.certificate, config.key
    later = _later(config.certificate), _later(config.key)
    if later[1].exists():
        yield later


def _later(path: Path) -> Path:
    """peer.key → peer.next.key, beside it."""
    return path.with_name(f"{path.stem}.next{path.suffix}")


class _Initial(Body):
    """The initial model as it travels: our own header, whatever the file's looks like, then the file's values."""

    def __init__(self, path: Path, signature: Signature) -> None:
        width = signature.d * signature.dtype.itemsize
        super().__init__(os.open(path, os.O_RDONLY), path.stat().st_size - width, signature.size)
        self._header = signature.header

    def read(self, begin: int, length: int) -> bytes:
        """Bytes ``begin`` to ``begin + length`` of the body, fewer at its end."""
        head = self._header[begin : begin + length]
        after = max(0, begin - len(self._header))
        length = min(length - len(head), self.size - len(self._header) - after)
        return head + os.pread(self.file, length, self.offset + after)


def initial_body(config: Config, signature: Signature) -> Body | None:
    """The common initial model as it travels, read from its file; None if that is gone."""
    try:
        return _Initial(config.members.with_name(INIT_FILE), signature)
    except OSError:
        return None


def initial_model(config: Config, membership: Membership) -> tuple[Signature, Models]:
    """What models look like here, and everybody's first one (d,), from the file beside members.toml."""
    path = config.members.with_name(INIT_FILE)
    if not path.is_file():
        raise ValueError(f"there is no common initial model {path}: it comes with members.toml")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != membership.init_sha256:
        raise ValueError(f"{path} has the hash {found}, but members.toml says {membership.init_sha256}")
    signature, x = wire.load(path)
    if signature.sha256 != membership.model_header_sha256:
        raise ValueError(
            f"{path} has the header hash {signature.sha256}, but members.toml says {membership.model_header_sha256}"
        )
    return signature, x


class News:
    """The file in which a coming membership is announced, looked at before each round."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._seen: tuple[int, int, int] | None = None
        self._coming: Membership | None = None

    def due(self, now: Membership, round: int) -> Membership | None:
        """The announced membership, if it takes effect at this round and is not yet in force."""
        self._look(now)
        coming = self._coming
        return coming if coming is not None and coming.from_round <= round and coming.hash != now.hash else None

    def _look(self, now: Membership) -> None:
        """Read the file again if it has changed; what is wrong with it is said once."""
        try:
            found = self._config.next_members.stat()
        except OSError:
            self._seen = self._coming = None
            return
        mark = (found.st_mtime_ns, found.st_size, found.st_ino)
        if mark == self._seen:
            return
        self._seen, self._coming = mark, None
        try:
            self._coming = _successor(now, memberships.load(self._config.next_members))
        except (ValueError, OSError) as error:
            log.warning("the coming membership is refused and the present one stays: %s", error)
            return
        if self._coming.hash != now.hash:
            self._announce(self._coming)

    def _announce(self, coming: Membership) -> None:
        """Say what will happen, while there is time to do something about it."""
        log.info("membership %s takes effect at round %d", coming.hash[:12], coming.from_round)
        try:
            take(self._config, coming)
        except ValueError as error:
            log.warning("this peer will have to stop at round %d: %s", coming.from_round, error)


def _successor(now: Membership, coming: Membership) -> Membership:
    """The coming membership, if it can follow the present one."""
    for key in _FIXED:
        if getattr(coming, key) != getattr(now, key):
            raise ValueError(f"its {key} is {getattr(coming, key)}, and a running network keeps {getattr(now, key)}")
    return coming
