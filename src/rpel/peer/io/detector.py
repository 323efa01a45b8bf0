"""Proofs of equivocation as files, and who finds them:
it signs what its peer serves and judges what others sign."""

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpel.files import atomic
from rpel.peer.config.membership import Membership
from rpel.peer.core.evidence import Proof, Signed, Witness, evidence, of_member, sign, verified
from rpel.peer.net.snapshot import Snapshot

_LARGEST = 64 << 10  # bytes of a file of evidence
_log = logging.getLogger("rpel")


def verify(path: str | os.PathLike[str], membership: Membership) -> Proof:
    """The proof that a file of evidence holds against a member;
    ValueError in one sentence if it holds none."""
    try:
        text = Path(path).read_bytes()
        content = json.loads(text) if len(text) <= _LARGEST else None
    except (ValueError, RecursionError):
        content = None
    return verified(content if isinstance(content, dict) else {}, membership, str(path))


def keep(folder: Path, proof: Proof, membership: Membership) -> Path:
    """Write a proof into the folder for evidence; returns where."""
    path = folder / f"{membership.members[proof.member].id}-{proof.round}.json"
    folder.mkdir(mode=0o700, exist_ok=True)
    with atomic(path, mode=0o600) as file:
        file.write(json.dumps(evidence(proof, membership), indent=1).encode() + b"\n")
    return path


def proofs(folder: Path, membership: Membership) -> list[Proof]:
    """The proofs in the folder for evidence that hold under this membership."""
    valid = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            valid.append(verify(path, membership))
        except (ValueError, OSError) as error:
            _log.info("%s", error)
    return valid


class EquivocationDetector:
    """Signs what its peer serves, judges what others signed, and writes proofs into files."""

    def __init__(self, folder: Path, last: int) -> None:
        """``folder`` for evidence; ``last``: the last round that the peer has a record of when it starts."""
        self._folder, self._lock, self._witness = folder, threading.Lock(), Witness(last)
        self._read: set[str] = set()  # memberships under which the folder was read

    @property
    def duplicate_key(self) -> int:
        """The round of an own signature that this peer did not make; 0: none was shown to it."""
        return self._witness.duplicate_key

    def excluded(self, now: Snapshot) -> tuple[str, ...]:
        """The ids of members whose key signed two half-steps of one round."""
        if now.membership.hash not in self._read:
            self._read.add(now.membership.hash)
            with self._lock:
                for proof in proofs(self._folder, now.membership):
                    self._witness.restore(proof)
        pins = self._witness.excluded(now.roster)
        return tuple(member.id for member in now.membership.members if member.fingerprint in pins)

    def sign(self, now: Snapshot, round: int, digest: bytes) -> bytes:
        """The signature of the own half-step, made once, before it is recorded."""
        with self._lock:
            self._witness.recorded(round, digest)
        return sign(now.secret, of_member(now.membership, now.me), round, digest)

    def saw(self, now: Snapshot, member: int, round: int, signed: Signed) -> None:
        """A member's half-step came with a valid signature."""
        with self._lock:
            if (proof := self._witness.saw(now.roster, member, round, signed)) is not None:
                self._keep(now, proof)

    def hear(self, now: Snapshot, round: int, message: Mapping[str, Any]) -> None:
        """What another peer saw of a round."""
        with self._lock:
            for proof in self._witness.hear(now.roster, round, message):
                self._keep(now, proof)

    def seen(self, now: Snapshot, round: int) -> dict[str, Any]:
        """What this peer tells others of a round."""
        return self._witness.seen(now.roster, round)

    def _keep(self, now: Snapshot, proof: Proof) -> None:
        member = now.membership.members[proof.member]
        try:
            where = str(keep(self._folder, proof, now.membership))
        except OSError as error:
            where = f"not on disk ({error})"
        message = (
            "%s signed two different half-steps of round %d: its answers count no longer; the proof is %s"
        )
        _log.warning(message, member.id, proof.round, where)
