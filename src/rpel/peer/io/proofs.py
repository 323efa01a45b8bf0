"""Proofs of equivocation as files."""

import json
import logging
import os
from pathlib import Path

from rpel.files import atomic
from rpel.peer.config.membership import Membership
from rpel.peer.core.evidence import Proof, evidence, verified

_LARGEST = 64 << 10  # bytes of a file of evidence
_log = logging.getLogger("rpel")


def verify(path: str | os.PathLike[str], membership: Membership) -> Proof:
    """Return the proof that a file of evidence holds against a member.

    Raises ValueError, in one sentence, if it holds none.
    """
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
