"""The models at both ends of a run, as files: the common initial one, and the one that is handed over."""

import hashlib
import os
from pathlib import Path

import safetensors.numpy

from rpel.config.membership import INIT_FILE, Membership
from rpel.config.peer import Config
from rpel.files import atomic
from rpel.peer import wire
from rpel.peer.store import UNREADABLE, Body, read_checkpoint, rounds_kept
from rpel.peer.wire import Signature
from rpel.types import Models

MODEL_FILE = "model.safetensors"


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


def export(state_dir: Path, signature: Signature, to: Path, round: int | None = None, **facts: str) -> int:
    """Write the model after a round (None: the newest kept) as safetensors; returns the round.

    Parameters are named as in the common initial model; beside them are this peer's buffers, so that
    ``load_state_dict(strict=True)`` takes the file. Its metadata are the round, the digest of the parameters as they
    would travel, and ``facts``. A peer that runs meanwhile is not disturbed.
    """
    kept = rounds_kept(state_dir, "checkpoint")
    if not kept:
        raise ValueError(f"there is no checkpoint in {state_dir}: no round has ended here yet")
    if round is not None and round not in kept:
        raise ValueError(f"round {round} is not kept in {state_dir}: choose {' or '.join(map(str, kept))}")
    for t in reversed(kept) if round is None else [round]:
        try:
            found, buffers = read_checkpoint(state_dir, t, signature)
            break
        except UNREADABLE as error:
            why = f"the checkpoint of round {t} in {state_dir} cannot be read: {error}"
    else:
        raise ValueError(why)
    about = {"round": str(found.round), "digest": wire.digest(signature, found.x), **facts}
    with atomic(to, mode=0o600) as file:
        file.write(safetensors.numpy.save({**wire.split(signature, found.x), **buffers}, about))
    return found.round
