"""The models at both ends of a run, as files: the common initial one, and the trained one."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from rpel.files import atomic
from rpel.peer.config.membership import INIT_FILE, Membership
from rpel.peer.config.settings import Config
from rpel.peer.core import wire
from rpel.peer.core.wire import Layout
from rpel.peer.state.store import UNREADABLE, Body, read_checkpoint, rounds_kept
from rpel.types import Measured, Models

MODEL_FILE, BEST_FILE = "model.safetensors", "best.safetensors"
_LARGEST_HEADER = 4 << 20  # bytes; what is larger is refused before it is parsed
_MOST_PARAMETERS = 20_000  # tensors of a model


class _Initial(Body):
    """The initial model as it travels: our own header, then the values of the file.

    The file's own header may look different.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        values = layout.exact.values
        super().__init__(os.open(path, os.O_RDONLY), path.stat().st_size - values, layout.exact.size)
        self._header = layout.header

    def read(self, begin: int, length: int) -> bytes:
        """Bytes ``begin`` to ``begin + length`` of the body, fewer at its end."""
        head = self._header[begin : begin + length]
        after = max(0, begin - len(self._header))
        length = min(length - len(head), self.size - len(self._header) - after)
        return head + os.pread(self.file, length, self.offset + after)


def initial_body(config: Config, layout: Layout) -> Body | None:
    """The common initial model as it travels, read from its file; None if that is gone."""
    try:
        return _Initial(config.members.with_name(INIT_FILE), layout)
    except OSError:
        return None


def initial_model(config: Config, membership: Membership) -> tuple[Layout, Models]:
    """Read the layout of models and the common initial model (d,) from the file beside members.toml."""
    path = config.members.with_name(INIT_FILE)
    if not path.is_file():
        raise ValueError(f"there is no common initial model {path}: it comes with members.toml")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != membership.init_sha256:
        raise ValueError(f"{path} has the hash {digest}, but members.toml says {membership.init_sha256}")
    layout, x = load(path)
    if layout.sha256 != membership.model_header_sha256:
        raise ValueError(
            f"{path} has the header hash {layout.sha256}, but members.toml says "
            f"{membership.model_header_sha256}"
        )
    return replace(layout, wire=membership.wire), x


def read_layout(path: str | os.PathLike[str]) -> Layout:
    """The layout of a safetensors file; the order of the vector is that of the values in the file."""
    entries, values = _stored_header(path)
    try:
        rows = sorted(
            (
                (name, e["dtype"], _numbers(e["shape"]), _numbers(e["data_offsets"]))
                for name, e in entries.items()
            ),
            key=lambda row: row[3],
        )
        dtypes = sorted({row[1] for row in rows})
    except (TypeError, KeyError):
        raise ValueError(f"{path} is not a safetensors file: its header is damaged") from None
    if len(dtypes) != 1 or dtypes[0] not in wire.DTYPES:
        kinds = " and ".join(map(str, dtypes)) or "nothing"
        raise ValueError(f"{path} holds {kinds}: a model to exchange is all F32 or all F64, without buffers")
    layout = Layout(tuple(row[0] for row in rows), tuple(row[2] for row in rows), wire.DTYPES[dtypes[0]])
    if [row[3] for row in rows] != layout.offsets or layout.offsets[-1][1] != values:
        raise ValueError(
            f"{path} is not a whole safetensors file: its header does not fit its {values} value bytes"
        )
    return layout


def load(path: str | os.PathLike[str]) -> tuple[Layout, Models]:
    """The layout and the values (d,) of a safetensors file."""
    layout = read_layout(path)
    flat = np.empty(layout.d, layout.dtype)
    with open(path, "rb") as file:
        file.seek(-flat.nbytes, os.SEEK_END)
        if file.readinto(wire.raw(layout, flat)) != flat.nbytes:
            raise ValueError(f"{path} became shorter while it was read")
    return layout, flat


def save(path: Path, layout: Layout, flat: Models) -> None:
    """Write a model as a safetensors file, which is at the same time the body that travels."""
    values = wire.raw(layout, flat)
    with atomic(path) as file:
        file.write(layout.header)
        file.write(values)


def _stored_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """The JSON of a safetensors file without its metadata, and how many bytes of values follow it."""
    with open(path, "rb") as file:
        length, left = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size - 8
        if not 2 <= length <= min(_LARGEST_HEADER, left):
            most = f"; {_LARGEST_HEADER:,} are the most" if length <= left else ""
            raise ValueError(f"{path} is not a safetensors file: its header would have {length} bytes{most}")
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError):
            entries = None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is damaged")
    if len(entries) > _MOST_PARAMETERS:
        raise ValueError(
            f"{path} holds {len(entries):,} tensors: peers exchange {_MOST_PARAMETERS:,} at most"
        )
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}, left - length


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise TypeError
    return tuple(values)


def export(state_dir: Path, layout: Layout, to: Path, round: int | None = None, **facts: str) -> int:
    """Write the model after a round (None: the newest kept) as safetensors; returns the round.

    Parameters are named as in the common initial model; beside them are this peer's buffers, so that
    ``load_state_dict(strict=True)`` takes the file. Its metadata are the round, the digest of the parameters
    as they would travel, and ``facts``. A peer that runs meanwhile is not disturbed.
    """
    rounds = rounds_kept(state_dir, "checkpoint")
    if not rounds:
        raise ValueError(f"there is no checkpoint in {state_dir}: no round has ended here yet")
    if round is not None and round not in rounds:
        raise ValueError(f"round {round} is not kept in {state_dir}: choose {' or '.join(map(str, rounds))}")
    for t in reversed(rounds) if round is None else [round]:
        try:
            checkpoint, buffers = read_checkpoint(state_dir, t, layout)
            break
        except UNREADABLE as error:
            why = f"the checkpoint of round {t} in {state_dir} cannot be read: {error}"
    else:
        raise ValueError(why)
    _write(to, layout, checkpoint.x, buffers, round=str(checkpoint.round), **facts)
    return checkpoint.round


def _write(to: Path, layout: Layout, x: Models, buffers: Mapping[str, Any], **facts: str) -> None:
    about = {"digest": wire.digest(layout, x), **facts}
    with atomic(to, mode=0o600) as file:
        file.write(safetensors.numpy.save({**wire.split(layout, x), **buffers}, about))


def keep_best(
    state_dir: Path,
    layout: Layout,
    x: Models,
    buffers: Mapping[str, Any],
    round: int,
    measured: Measured,
    **facts: str,
) -> None:
    """Write a model into the state folder if it scored better than the one there.

    The score is its accuracy, or minus its loss where no accuracy is measured.
    """
    score = measured.accuracy if measured.accuracy is not None else measured.loss and -measured.loss
    if score is None or score != score or score <= best(state_dir).get("score", -math.inf):
        return
    facts |= {"round": str(round), "score": repr(score)}
    _write(state_dir / BEST_FILE, layout, x, buffers, **facts)


def best(state_dir: Path) -> dict[str, float]:
    """Return the round and the score of the best model kept; empty if there is none."""
    try:
        with safetensors.safe_open(state_dir / BEST_FILE, "numpy") as file:
            about = file.metadata()
        return {"round": int(about["round"]), "score": float(about["score"])}
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
        return {}


def export_best(state_dir: Path, to: Path) -> int:
    """Copy the model that scored best on this peer's own data; returns its round."""
    if not (found := best(state_dir)):
        raise ValueError(f"there is no best model in {state_dir}: no round's model has been measured yet")
    with atomic(to, mode=0o600) as file:
        file.write((state_dir / BEST_FILE).read_bytes())
    return int(found["round"])
