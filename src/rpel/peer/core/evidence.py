"""Who signed what: signatures of half-steps, and proofs that a member signed two for one round.

Invariants:
- a half-step is signed once, over facts that no later membership may change, the round, and the hash of its
  bytes: two different hashes signed by one key for one round are a proof, whatever the membership,
  that anybody can check;
- only valid signatures make a proof, so nobody can be excluded by what others say;
- an honest peer never makes one: whoever is shown its own signature for a round it has not recorded, or
  another hash for one that it has, stops, because a second peer with its key is alive or its state folder was
  set back;
- a proof excludes a key, not an intention; another key for the member, by a change of membership, clears it.
"""

import base64
import binascii
import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from rpel.certificates import read_certificate
from rpel.peer.config.membership import Membership, content_hash

FIXED = ("run", "model_header_sha256", "init_sha256")
"""What makes a network: with another value another one would be meant.
The run's name ends in 128 random bits."""

FORMAT = "rpel evidence 3"
_PURPOSE = b"rpel half-step 3\0"
_AUDIT = b"rpel audit 3\0"
_CURVE = ec.ECDSA(hashes.SHA256())
_KEYS = ("format", "facts", "member", "fingerprint", "round", "digests", "signatures", "certificate")
_MOST_TOLD = 350  # entries of a reply, which has at most 64 KiB
_REMEMBERED = 3  # rounds of which is remembered what was seen
_MOST_PROOFS = 16  # told in one reply


def facts(membership: Membership) -> dict[str, Any]:
    """What every signature of a network is about."""
    return {name: getattr(membership, name) for name in FIXED}


def of_member(membership: Membership, member: int) -> dict[str, Any]:
    """What every signature of one member is about: the facts, and its id."""
    return facts(membership) | {"member": membership.members[member].id}


def message(about: Mapping[str, Any], round: int, digest: bytes) -> bytes:
    """Return the bytes to sign.

    They are the purpose, the SHA-256 of the facts and the member's id as canonical JSON, the round (8 bytes),
    and the SHA-256 of the body.

    >>> len(message({"run": "ward-7"}, 7, bytes(32)))
    89
    """
    return _PURPOSE + bytes.fromhex(content_hash(dict(about))) + round.to_bytes(8, "big") + digest


def sign(key: ec.EllipticCurvePrivateKey, about: Mapping[str, Any], round: int, digest: bytes) -> bytes:
    """The signature (ECDSA on P-256 with SHA-256, DER) of a half-step with this hash."""
    return key.sign(message(about, round, digest), _CURVE)


def signed_by(
    certificate: str, about: Mapping[str, Any], round: int, digest: bytes, signature: bytes
) -> bool:
    """Whether the key of a certificate (PEM) signed this half-step."""
    key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), (
        "members' certificates are checked when their file is read"
    )
    if len(digest) != hashlib.sha256().digest_size or not 0 < round < 1 << 63:
        return False
    try:
        key.verify(signature, message(about, round, digest), _CURVE)
    except InvalidSignature:
        return False
    return True


def sign_line(key: ec.EllipticCurvePrivateKey, about: Mapping[str, Any], digest: bytes) -> bytes:
    """The signature of a line of an audit log with this hash, and so of all lines before it."""
    return key.sign(_AUDIT + bytes.fromhex(content_hash(dict(about))) + digest, _CURVE)


def line_signed_by(certificate: str, about: Mapping[str, Any], digest: bytes, signature: bytes) -> bool:
    """Whether the key of a certificate (PEM) signed a line with this hash."""
    key = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), (
        "members' certificates are checked when their file is read"
    )
    try:
        key.verify(signature, _AUDIT + bytes.fromhex(content_hash(dict(about))) + digest, _CURVE)
    except InvalidSignature:
        return False
    return True


# --- proofs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signed:
    """One signed half-step: its hash and the signature."""

    digest: bytes
    signature: bytes


@dataclass(frozen=True)
class Proof:
    """Two different half-steps of one round, signed by the same key."""

    member: int
    fingerprint: str
    round: int
    first: Signed
    second: Signed


def evidence(proof: Proof, membership: Membership) -> dict[str, Any]:
    """A proof as a file holds it: everything that is needed to check it, but the list of members."""
    member = membership.members[proof.member]
    pair = (proof.first, proof.second)
    return {
        "format": FORMAT,
        "facts": facts(membership),
        "member": member.id,
        "fingerprint": proof.fingerprint,
        "round": proof.round,
        "digests": [signed.digest.hex() for signed in pair],
        "signatures": [base64.b64encode(signed.signature).decode() for signed in pair],
        "certificate": member.certificate,
    }


def verified(claim: Mapping[str, Any], membership: Membership, path: str) -> Proof:
    """Return the proof that a JSON object holds against a member.

    Raises ValueError, in one sentence about ``path``, if it holds none. Nothing in the object is trusted: the
    certificate must be that of a member, and both signatures must be those of its key over the facts of this
    membership.
    """
    if any(key not in claim for key in _KEYS):
        raise ValueError(f"{path} is not evidence: it must be a JSON object with {', '.join(_KEYS)}")
    if claim["format"] != FORMAT:
        raise ValueError(f"{path} has the format {claim['format']!r}, not {FORMAT!r}")
    if claim["facts"] != facts(membership):
        raise ValueError(f"{path} is about another network than the members' file: their facts differ")
    number = membership.by_fingerprint(str(claim["fingerprint"]))
    if number is None:
        raise ValueError(
            f"{path} names the key {claim['fingerprint']!r}, which is no member's: use the file of that time"
        )
    member = membership.members[number]
    try:
        same = (
            read_certificate(claim["certificate"]).fingerprint == member.fingerprint
            and claim["member"] == member.id
        )
        digests = [bytes.fromhex(text) for text in claim["digests"]]
        signatures = [base64.b64decode(text, validate=True) for text in claim["signatures"]]
        first, second = (Signed(*pair) for pair in zip(digests, signatures, strict=True))
        round = operator.index(claim["round"])
    except (TypeError, ValueError, AttributeError, binascii.Error):
        raise ValueError(
            f"{path} is not evidence: its certificate, digests or signatures are damaged"
        ) from None
    if not same:
        raise ValueError(
            f"{path} names {claim['member']!r}, but its certificate is not the one of {member.id!r}"
        )
    if first.digest == second.digest or {len(first.digest), len(second.digest)} != {32} or round < 1:
        raise ValueError(f"{path} proves nothing: it must hold two different hashes of one round")
    for signed in (first, second):
        if not signed_by(
            member.certificate, of_member(membership, number), round, signed.digest, signed.signature
        ):
            raise ValueError(f"{path} proves nothing: a signature in it is not that of {member.id!r}")
    return Proof(number, member.fingerprint, round, first, second)


# --- what a peer sees ---------------------------------------------------------------------------------------

Verifier = Callable[[int, int, bytes, bytes], bool]
"""(member, round, digest, signature) → whether that member signed it."""


@dataclass(frozen=True)
class Roster:
    """The members under one membership: their pins by number, this peer's number, and the verifier.

    ``most``: how many entries are accepted of what another peer tells about a round.
    """

    me: int
    pins: tuple[str, ...]
    verify: Verifier
    most: int = _MOST_TOLD


class Witness:
    """The signatures that one peer saw or heard of in the last rounds, and the keys that they exclude.

    It uses no files and no other I/O.

    >>> roster = Roster(me=0, pins=("a", "b", "c"), verify=lambda member, round, digest, signature: True)
    >>> witness = Witness()
    >>> witness.saw(roster, 1, 4, Signed(b"x", b"1"))
    >>> proofs = witness.hear(roster, 4, {"seen": [[1, "eQ==", "Mg=="]]})
    >>> [(proof.member, proof.round) for proof in proofs], witness.excluded(roster)
    ([(1, 4)], {'b'})
    """

    def __init__(self, last: int = 0) -> None:
        """``last``: the last round that this peer's folder holds a record of when it starts."""
        self._last = last
        self._seen: dict[int, dict[str, Signed]] = {}  # by round and pin; valid
        # by others; valid only if it says so here when they differ
        self._told: dict[int, dict[str, Signed]] = {}
        self._own: dict[int, bytes] = {}
        self._proofs: dict[str, Proof] = {}
        self.duplicate_key = 0
        """The round of an own signature that this peer did not make; 0: none was shown to it."""

    def excluded(self, roster: Roster) -> set[str]:
        """The members' pins whose keys signed two half-steps of one round."""
        return self._proofs.keys() & set(roster.pins)

    def recorded(self, round: int, digest: bytes | None) -> None:
        """Note the peer's own half-step of a round before it is published (None: none is served)."""
        if digest is not None:
            self._own[round] = digest
        self._forget(round)

    def saw(self, roster: Roster, member: int, round: int, signed: Signed) -> Proof | None:
        """Note that a member's half-step arrived with a valid signature.

        Returns the proof if the member had signed another one for that round.
        """
        pin = roster.pins[member]
        own = self._seen.setdefault(round, {})
        earlier = own.get(pin) or self._told.get(round, {}).get(pin)
        own[pin] = signed
        self._forget(round)
        if earlier is None or earlier.digest == signed.digest or pin in self._proofs:
            return None
        return (
            self._exclude(Proof(member, pin, round, earlier, signed))
            if _valid(roster, member, round, earlier)
            else None
        )

    def seen(self, roster: Roster, round: int) -> dict[str, Any]:
        """What this peer tells others of a round: what it saw signed, and proofs."""
        numbers = {pin: number for number, pin in enumerate(roster.pins)}
        signed = [(numbers[pin], one) for pin, one in self._seen.get(round, {}).items() if pin in numbers]
        entries = [[number, *_packed(one)] for number, one in signed[:_MOST_TOLD]]
        proofs = [
            [numbers[pin], proof.round, *_packed(proof.first), *_packed(proof.second)]
            for pin, proof in self._proofs.items()
            if pin in numbers
        ]
        return {"seen": entries} | ({"proofs": proofs[:_MOST_PROOFS]} if proofs else {})

    def hear(self, roster: Roster, round: int, message: Mapping[str, Any]) -> list[Proof]:
        """Note what another peer tells about a round, and return new proofs.

        Only what differs from what is known is verified.
        """
        new: list[Proof] = []
        for member, signed in _entries(message.get("seen"), len(roster.pins), roster.most):
            if member == roster.me:
                self._shown(roster, round, signed)
            elif (proof := self._compared(roster, member, round, signed)) is not None:
                new.append(proof)
        for proof in _proofs(message.get("proofs"), roster.pins):
            valid = (_valid(roster, proof.member, proof.round, one) for one in (proof.first, proof.second))
            if proof.fingerprint in self._proofs or not all(valid):
                continue
            if proof.member != roster.me:
                new.append(self._exclude(proof))
            elif proof.round > self._last:  # another process with this key ran at the same time
                self.duplicate_key = proof.round
        return new

    def restore(self, proof: Proof) -> None:
        """A proof from an earlier start."""
        self._proofs.setdefault(proof.fingerprint, proof)

    def _compared(self, roster: Roster, member: int, round: int, signed: Signed) -> Proof | None:
        pin = roster.pins[member]
        heard = self._told.setdefault(round, {})
        seen = self._seen.get(round, {}).get(pin)
        known = seen or heard.setdefault(pin, signed)
        alike = known.digest == signed.digest
        if (
            known == signed
            or (alike and seen)
            or pin in self._proofs
            or not _valid(roster, member, round, signed)
        ):
            return None
        # somebody told us nonsense before, perhaps with the right hash
        if not _valid(roster, member, round, known):
            heard[pin] = signed
            return None
        return None if alike else self._exclude(Proof(member, pin, round, known, signed))

    def _shown(self, roster: Roster, round: int, signed: Signed) -> None:
        """An own signature, as others have it: is it one that this peer made?"""
        own = self._own.get(round)
        strange = round > self._last if own is None else own != signed.digest
        if strange and _valid(roster, roster.me, round, signed):
            self.duplicate_key = round

    def _exclude(self, proof: Proof) -> Proof:
        self._proofs[proof.fingerprint] = proof
        return proof

    def _forget(self, round: int) -> None:
        for remembered in (self._seen, self._told, self._own):
            for old in [t for t in remembered if t <= round - _REMEMBERED]:
                del remembered[old]


def _valid(roster: Roster, member: int, round: int, signed: Signed) -> bool:
    return roster.verify(member, round, signed.digest, signed.signature)


def _packed(signed: Signed) -> list[str]:
    return [base64.b64encode(signed.digest).decode(), base64.b64encode(signed.signature).decode()]


def _unpacked(digest: Any, signature: Any) -> Signed:
    return Signed(base64.b64decode(digest, validate=True), base64.b64decode(signature, validate=True))


def _entries(entries: Any, members: int, most: int) -> Iterable[tuple[int, Signed]]:
    """The first entries of a reply that are what they should be, at most one for each member."""
    signed: dict[int, Signed] = {}
    for entry in entries[:most] if isinstance(entries, list) else []:
        try:
            member, digest, signature = entry
            if type(member) is int and 0 <= member < members:
                signed.setdefault(member, _unpacked(digest, signature))
        except (TypeError, ValueError):
            continue
    return signed.items()


def _proofs(entries: Any, pins: tuple[str, ...]) -> Iterable[Proof]:
    for entry in entries[:_MOST_PROOFS] if isinstance(entries, list) else []:
        try:
            member, round, *parts = entry
            first, second = _unpacked(*parts[:2]), _unpacked(*parts[2:])
            numbers = (
                type(member) is int and type(round) is int and 0 <= member < len(pins) and 0 < round < 1 << 63
            )
            if numbers and first.digest != second.digest:
                yield Proof(member, pins[member], round, first, second)
        except (TypeError, ValueError):
            continue
