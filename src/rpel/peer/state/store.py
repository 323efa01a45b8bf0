"""What a peer keeps on disk: its half-steps before anybody sees them, and where each round ended.

Invariants: a round is recorded once, and the file's name carries its number, so that a damaged record still
says that the round was played: it is never served and never computed again. A file is complete or not there,
and names the hash of all that is in it. What the disk will not take is refused and leaves the older files as
they are. Two processes never share a folder.

Files: of each of the newest three half-steps, and of each of the newest two checkpoints, three files. For
round 7:

- ``half-7.safetensors``: the half-step as it travels, served from its first byte; - ``half-7.state``: what
stays here: the local state of training, and the vectors that a restart needs beside the
  body (the half-step as it is where bodies are coded, and with an outer step the model before and its v);
- ``half-7.json``: what the other two are, and the hash of all three. It is written last, so a record without
it
  never was.

A checkpoint likewise: the model, then buffers and v.
"""

import base64
import errno
import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

import numpy as np

from rpel.files import atomic, locked
from rpel.peer.core.protocol import Checkpoint, LentRow, Record, Stored
from rpel.peer.core.wire import Layout, raw
from rpel.types import Models

RECORDS, CHECKPOINTS = 3, 2
_FACTS = ("round", "fresh", "degraded", "outcome", "behind")
LOCK_FILE = "lock"
NETWORK_FILE = "network"
"""Names the network that a state folder belongs to."""
_OWN_FILES = re.compile(
    r"(half|checkpoint)-\d+\.\w+|lock|network|evidence|audit\.jsonl|members\.toml|privacy\.json"
    r"|(model|best)\.safetensors"
)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "it is not allowed",
    errno.EMFILE: "no file descriptors are left",
    errno.ENFILE: "no file descriptors are left",
}
_PIECE = 1 << 20
_log = logging.getLogger("rpel")

Bytes = bytes | memoryview
Entries = dict[str, Any]
"""What a sidecar says of its record."""
Buffers = Mapping[str, Models]


class _Damaged(Exception):  # noqa: N818 (the file is, not the program)
    """A file that is not what was once written."""


UNREADABLE = (OSError, KeyError, TypeError, ValueError, _Damaged)
"""What reading a file that is not whole may raise."""


class Body:
    """The bytes of one half-step, read from its file piece by piece; :meth:`close` when done."""

    def __init__(self, file: int, offset: int, size: int) -> None:
        self.file, self.offset, self.size = file, offset, size

    def read(self, begin: int, length: int) -> bytes:
        """Bytes ``begin`` to ``begin + length`` of the body, fewer at its end."""
        return os.pread(self.file, min(length, self.size - begin), self.offset + begin)

    def close(self) -> None:
        os.close(self.file)


class Store:
    """The state folder of one peer, locked as long as the store is open."""

    def __init__(self, path: Path, layout: Layout, run: str = "") -> None:
        """Lock the folder; ValueError if it is in use, or belongs to another network than ``run``."""
        self.path, self._layout = path, layout
        self._lock = _locked(path)
        try:
            _bind(path, run)
        except ValueError:
            self.close()
            raise
        self._whole: dict[int, Entries] = {}  # records that were checked, or written by this process
        self._last = max(rounds_kept(path, "half"), default=0)
        self.trouble = ""
        """Why the last file could not be written; "" if it was."""
        for leftover in [*path.glob(".*.tmp"), *_uncommitted(path)]:  # of a process that was killed
            leftover.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder free."""
        with suppress(OSError):
            self._lock.close()

    def memory(self) -> Stored:
        """Return what is on disk and whole; this reads and checks every file."""
        self._prune("half", RECORDS)  # of a process that was killed before it could
        self._prune("checkpoint", CHECKPOINTS)
        checked = {t: self._check_record(t) for t in rounds_kept(self.path, "half")}
        self._whole = {t: entries for t, entries in checked.items() if entries is not None}
        return Stored(
            checkpoint=self._newest_checkpoint(),
            record=self._load_record(max(self._whole)) if self._whole else None,
            last_round=self._last,
            published=tuple(t for t in sorted(self._whole) if self._whole[t]["body"]),
        )

    def persist(
        self, record: Record, state: Bytes = b"", signature: bytes = b"", body: Sequence[Bytes] | None = None
    ) -> bool:
        """Record a round once, with the local state of training and the signature of its half-step, if any.

        A round without a half-step may be recorded again with one. ``body``: the half-step as it travels, if
        the caller has already made it. Returns False if the write failed; earlier records remain.
        """
        earlier = self._whole.get(record.round)
        if record.round <= self._last and (earlier is None or earlier["body"]):
            raise ValueError(f"round {record.round} cannot be recorded: round {self._last} already is")
        self._last = record.round
        if body is None:
            body = () if record.half is None else self._layout.body(record.half)
        entries = {
            "round": record.round,
            "asked": [int(member) for member in record.asked],
            "membership": record.membership,
            "stale": record.stale,
            "body": sum(map(len, body)),
            "state": len(state),
        }
        if signature:
            entries["signature"] = base64.b64encode(signature).decode()
        exact = record.half if self._layout.wire != "float32" else None
        besides = (("half", exact), ("before", record.before), ("v", record.v))
        behind = {name: x for name, x in besides if x is not None}
        if behind:
            entries["behind"] = list(behind)
        vectors = (raw(self._layout, x) for x in behind.values())
        if not self._write("half", record.round, entries, body, [state, *vectors]):
            return False
        self._whole[record.round] = entries
        self._prune("half", RECORDS)
        return True

    def save(self, checkpoint: Checkpoint, buffers: Buffers = MappingProxyType({})) -> bool:
        """Keep where a round ended. Returns False if the write failed; earlier checkpoints remain.

        ``buffers``: what belongs to the model and is never exchanged (BatchNorm's statistics), by name.
        """
        body: list[Bytes] = [self._layout.header, raw(self._layout, checkpoint.x)]
        arrays = {name: np.asarray(buffer, order="C") for name, buffer in buffers.items()}
        rest = [array.tobytes() for array in arrays.values()]
        entries = {name: getattr(checkpoint, name) for name in _FACTS} | {
            "model": self._layout.sha256,
            "body": sum(map(len, body)),
            "buffers": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
            "v": checkpoint.v is not None,
        }
        if checkpoint.v is not None:
            rest.append(raw(self._layout, checkpoint.v).tobytes())
        if not self._write("checkpoint", checkpoint.round, entries, body, rest):
            return False
        self._prune("checkpoint", CHECKPOINTS)
        return True

    def state(self, round: int) -> bytes | None:
        """The local state that was recorded with a round; None if there is no whole record of it."""
        if round not in self._whole:
            return None
        with open(_file(self.path, "half", round, "state"), "rb") as file:
            return file.read(self._whole[round]["state"])

    def signature(self, round: int) -> bytes | None:
        """The signature that was recorded with a half-step; None if there is none."""
        entries = self._whole.get(round, {})
        return base64.b64decode(entries["signature"]) if "signature" in entries else None

    @property
    def last_round(self) -> int:
        """The newest round ever recorded, readable or not; 0: none."""
        return self._last

    def open_body(self, round: int) -> Body | None:
        """Open the bytes to serve for a round, from a complete record.

        None if there is none, or it has been removed.
        """
        size = self._whole.get(round, {"body": 0})["body"]
        try:
            path = _file(self.path, "half", round, "safetensors")
            return Body(os.open(path, os.O_RDONLY), 0, size) if size else None
        except FileNotFoundError:
            return None

    # --- files ----------------------------------------------------------------------------------------------

    def _prune(self, kind: str, kept: int) -> None:
        with suppress(OSError):  # then it is tried again with the next
            for old in rounds_kept(self.path, kind)[:-kept]:
                if kind == "half":
                    self._whole.pop(old, None)
                for part in ("json", "safetensors", "state"):
                    _file(self.path, kind, old, part).unlink(missing_ok=True)

    def _write(
        self, kind: str, round: int, entries: Entries, body: Sequence[Bytes], state: Sequence[Bytes]
    ) -> bool:
        """Write the files of a record, without copying its parts; False if the write failed."""
        hashed = {**entries, "sha256": _hash(entries, [*body, *state])}
        sidecar: list[Bytes] = [json.dumps(hashed).encode()]
        try:
            self._check_folder()
            for part, pieces in (("safetensors", body), ("state", state), ("json", sidecar)):
                path = _file(self.path, kind, round, part)
                with atomic(path, mode=0o600) as file:
                    for piece in pieces:
                        file.write(piece)
        except OSError as error:
            self._complain(_file(self.path, kind, round, "json"), error)
            return False
        self.trouble = ""
        return True

    def _complain(self, path: Path, error: OSError) -> None:
        """Once, until the disk takes files again: a full disk would fill the log too."""
        if not self.trouble:
            _log.error("could not write %s: %s; what was there before stays", path, error.strerror or error)
        self.trouble = _REASONS.get(error.errno or 0, error.strerror or str(error))

    def _check_folder(self) -> None:
        """Check that the folder is still the locked one; if it was deleted, create and lock it again.

        Another one in its place is left alone: another peer may be at work there.
        """
        try:
            there = os.stat(self.path / LOCK_FILE)
            if os.path.samestat(there, os.fstat(self._lock.fileno())):
                return
        except FileNotFoundError:
            pass
        _log.error(
            "the state folder %s was deleted or replaced while this peer runs: it is locked again", self.path
        )
        try:
            fresh = _locked(self.path)
        except ValueError as error:
            raise OSError(errno.EBUSY, str(error)) from None
        self._lock.close()
        self._lock = fresh
        self._whole.clear()

    def _check_record(self, round: int) -> Entries | None:
        """The entries of a record whose bytes are all as they were written."""
        try:
            entries = _read_entries(self.path, "half", round)
            if entries["body"] not in (0, self._layout.size):
                raise _Damaged(f"has a body of {entries['body']} bytes instead of {self._layout.size}")
            header = self._layout.body_header
            with open(_file(self.path, "half", round, "safetensors"), "rb") as file:
                if entries["body"] and file.read(len(header)) != header:
                    raise _Damaged("holds another kind of model")
            return entries
        except (OSError, KeyError, TypeError, _Damaged) as error:
            path = _file(self.path, "half", round, "json")
            _log.warning("%s is damaged and will not be served: %s", path, error)
            return None

    def _load_record(self, round: int) -> Record:
        entries = self._whole[round]
        with open(_file(self.path, "half", round, "state"), "rb") as file:
            file.seek(entries["state"])
            rows = {name: _read_values(file, self._layout) for name in entries.get("behind", [])}
        if entries["body"] and "half" not in rows:
            with open(_file(self.path, "half", round, "safetensors"), "rb") as file:
                file.seek(len(self._layout.header))
                rows["half"] = _read_values(file, self._layout)
        asked, membership = tuple(entries["asked"]), entries.get("membership", "")
        half = LentRow(rows["half"]) if "half" in rows else None
        stale = entries.get("stale", False)
        return Record(round, asked, half, rows.get("before"), rows.get("v"), membership, stale)

    def _newest_checkpoint(self) -> Checkpoint | None:
        for t in reversed(rounds_kept(self.path, "checkpoint")):
            try:
                return read_checkpoint(self.path, t, self._layout)[0]
            except UNREADABLE as error:
                _log.warning("the checkpoint of round %d is damaged, the one before it is used: %s", t, error)
        return None


# --- files --------------------------------------------------------------------------------------------------


def _file(folder: Path, kind: str, round: int, part: str) -> Path:
    return folder / f"{kind}-{round}.{part}"


def rounds_kept(folder: Path, kind: str) -> list[int]:
    """The rounds that have a record ("half") or a "checkpoint", whole or not, oldest first."""
    names = (re.fullmatch(rf"{kind}-([1-9][0-9]*|0)\.json", path.name) for path in folder.glob(f"{kind}-*"))
    return sorted(int(name[1]) for name in names if name is not None)


def _uncommitted(folder: Path) -> list[Path]:
    """The files whose record was never finished."""
    pattern = re.compile(r"(half|checkpoint)-\d+\.(safetensors|state)")
    return [
        path
        for path in folder.iterdir()
        if pattern.fullmatch(path.name) and not path.with_suffix(".json").exists()
    ]


def read_checkpoint(folder: Path, round: int, layout: Layout) -> tuple[Checkpoint, dict[str, Models]]:
    """A checkpoint that is whole, and the buffers beside it."""
    entries = _read_entries(folder, "checkpoint", round)
    if entries["model"] != layout.sha256:  # the same number of values may belong to other names
        raise _Damaged("it holds another kind of model")
    with open(_file(folder, "checkpoint", round, "safetensors"), "rb") as file:
        file.seek(len(layout.header))
        x = _read_values(file, layout)
    with open(_file(folder, "checkpoint", round, "state"), "rb") as file:
        buffers = {}
        for name, dtype, shape in entries["buffers"]:
            count = math.prod(shape) * np.dtype(dtype).itemsize
            buffers[name] = np.frombuffer(file.read(count), dtype).reshape(shape)
        v = _read_values(file, layout) if entries["v"] else None
    return Checkpoint(x=x, v=v, **{name: entries[name] for name in _FACTS}), buffers


def _read_values(file: IO[bytes], layout: Layout) -> Models:
    x = np.empty(layout.d, layout.dtype)
    if file.readinto(raw(layout, x)) != x.nbytes:  # type: ignore[attr-defined]
        raise _Damaged("it is too short")
    return x


class _Lock:
    """A locked file."""

    def __init__(self, path: Path) -> None:
        self._held = ExitStack()
        self._held.enter_context(locked(path, wait=False))
        self._file = self._held.enter_context(open(path, "rb"))  # noqa: SIM115 (open as long as the store is)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._held.close()


def _locked(path: Path) -> _Lock:
    """Lock the state folder, creating it if it does not exist.

    The folder and its contents are accessible to its owner alone.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = _Lock(path / LOCK_FILE)
    except BlockingIOError:
        raise ValueError(
            f"the state folder {path} is in use by another peer: give each peer its own"
        ) from None
    keep_private(path)
    return lock


def _bind(folder: Path, run: str) -> None:
    """Write down which network a folder belongs to, or refuse one that belongs to another."""
    file = folder / NETWORK_FILE
    if run and not file.exists():
        with atomic(file, mode=0o600) as writing:
            writing.write(run.encode())
    elif run and (there := file.read_text("utf-8", "replace")) != run:
        raise ValueError(
            f"the state folder {folder} belongs to the network {there!r} and not to {run!r}: give each "
            "network its own (state_dir in peer.toml)"
        )


def keep_private(folder: Path) -> None:
    """Make a peer's files accessible to its owner alone, whatever a copy or a umask has made of them.

    Other files in the folder are none of the store's business, nor is a folder that holds such.
    """
    there = list(folder.iterdir())
    own = [path for path in there if _OWN_FILES.fullmatch(path.name)]
    for path in (*own, *folder.glob("evidence/*.json"), *([folder] if own == there else [])):
        with suppress(OSError):  # of somebody else, or gone meanwhile
            mode = path.lstat().st_mode
            if stat.S_IMODE(mode) & 0o077 and not stat.S_ISLNK(mode):
                path.chmod(0o700 if stat.S_ISDIR(mode) else 0o600)


def _hash(entries: Mapping[str, Any], parts: Iterable[Bytes]) -> str:
    """Of all entries but the hash itself, then of the bytes."""
    named = {name: value for name, value in entries.items() if name != "sha256"}
    sha256 = hashlib.sha256(json.dumps(named, sort_keys=True).encode())
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()


def _read_entries(folder: Path, kind: str, round: int) -> Entries:
    """The content of a sidecar, if all bytes of its record are those that were written."""
    try:
        entries = json.loads(_file(folder, kind, round, "json").read_bytes())
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict) or entries.get("round") != round:
        raise _Damaged("its sidecar is not what was written")
    paths = [_file(folder, kind, round, part) for part in ("safetensors", "state")]
    if _hash(entries, _pieces(paths)) != entries.pop("sha256", None):
        raise _Damaged("its bytes are not those that were written")
    return entries


def _pieces(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with open(path, "rb") as file:
            yield from iter(lambda file=file: file.read(_PIECE), b"")  # type: ignore[misc]
