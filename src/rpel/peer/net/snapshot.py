"""Hold the membership in force as one immutable snapshot.

Each request, served or sent, carries the snapshot under which it began.

Invariant: a change of membership is the change of one reference
(:attr:`rpel.peer.io.service.PeerService.now`). What began under the snapshot before ends under it: no number,
name or key of one membership is read by another.
"""

import secrets
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from rpel.certificates import check_certificate
from rpel.learning import NesterovOuter
from rpel.peer.config.membership import Member, Membership
from rpel.peer.config.settings import Config
from rpel.peer.core.evidence import Roster, of_member, signed_by
from rpel.peer.core.protocol import Terms
from rpel.peer.net.tls import KeyFile, ProtectedKey, client_context, read_key, server_context
from rpel.rules import rule


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A membership, this peer's place in it, and the key and certificate that its entry names."""

    membership: Membership
    me: int
    certificate: Path
    key: KeyFile

    @property
    def own(self) -> Member:
        """This peer's entry."""
        return self.membership.members[self.me]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members' ids by number."""
        return tuple(member.id for member in self.membership.members)

    @property
    def others(self) -> list[int]:
        """The numbers of all members but this one."""
        return [number for number in range(len(self.membership.members)) if number != self.me]

    @cached_property
    def terms(self) -> Terms:
        """What the protocol needs to know of the membership."""
        m = self.membership
        chosen, seed = rule(m.rule, f=m.b_hat), secrets.randbits(63)
        outer = NesterovOuter(m.outer_lr, m.outer_momentum) if m.outer == "nesterov" else None
        return Terms(
            self.me, m.nodes, m.byzantine, m.pull, chosen, m.deadline, m.rounds,
            seed=seed, outer=outer, linger=m.linger, membership=m.hash,
        )  # fmt: skip

    @cached_property
    def secret(self) -> ec.EllipticCurvePrivateKey:
        """The private key."""
        return read_key(self.key)

    @cached_property
    def roster(self) -> Roster:
        """Whose signatures count."""
        m = self.membership
        return Roster(self.me, tuple(member.fingerprint for member in m.members), self.signed, m.pull)

    def signed(self, member: int, round: int, digest: bytes, signature: bytes) -> bool:
        """Whether that member's key signed a half-step with this hash."""
        certificate = self.membership.members[member].certificate
        return signed_by(certificate, of_member(self.membership, member), round, digest, signature)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        """TLS of the serving end: members only."""
        members = (member.certificate for member in self.membership.members)
        return server_context(self.certificate, self.key, members)

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """TLS of the asking end; the pin decides which member it is."""
        members = (member.certificate for member in self.membership.members)
        return client_context(self.certificate, self.key, *members)


def take(config: Config, membership: Membership) -> Snapshot:
    """This peer's place in the membership, with the key and certificate that its entry names."""
    me = membership.index(config.id)
    wanted = membership.members[me].fingerprint
    others = []
    for certificate, key in _pairs(config):
        read_key(key)
        if not certificate.is_file():
            raise ValueError(f"there is no certificate {certificate}: make one with `rpel peer init`")
        own = check_certificate(certificate.read_text("utf-8"))
        if own.fingerprint == wanted:
            return Snapshot(membership, me, certificate, key)
        others.append(f"{certificate.name} has {own.fingerprint}")
    raise ValueError(f"the entry of {config.id!r} names the fingerprint {wanted}, but {' and '.join(others)}")


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
