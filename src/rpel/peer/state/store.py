"""What a peer keeps on disk: its half-steps before anybody sees them, and where each round ended.

Invariants: a round is recorded once, and the file's name carries its number, so that a damaged record still
says that the round was played: it is never served and never computed again. A file is complete or not there,
and names the hash of all that is in it. What the disk will not take is refused and leaves the older files as
they are. Two processes never share a folder.

Files: ``half-<round>.rec``, the newest three, and ``checkpoint-<round>.ckpt``, the newest two. Each is one
line of JSON (what follows, how long, and the hash), then bytes: in a record the body as it travels, if there
is one, the local state of training, where bodies are coded the half-step as it is (the own row of line 9 is
exact), and with an outer step the model before the local steps and its v; in a checkpoint the values of the
model, then those of its buffers, if it has any, and v.
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

import numpy as np

from rpel.files import atomic, locked
from rpel.peer.core.protocol import Checkpoint, LentRow, Record, Stored
from rpel.peer.core.wire import Layout, raw
from rpel.types import Models

RECORDS, CHECKPOINTS = 3, 2
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
_SUFFIX = {"half": "rec", "checkpoint": "ckpt"}
_LONGEST_LINE = 1 << 20
_PIECE = 1 << 20
_log = logging.getLogger("rpel")

Bytes = bytes | memoryview
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


@dataclass(frozen=True)
class _Head:
    """The JSON line of a file: its entries, and where the bytes behind it begin."""

    entries: Mapping[str, Any]
    offset: int


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
        self._whole: dict[int, _Head] = {}  # records that were checked, or written by this process
        self._last = max(rounds_kept(path, "half"), default=0)
        self.trouble = ""
        """Why the last file could not be written; "" if it was."""
        for leftover in path.glob(".*.tmp"):  # of a process that was killed while writing
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
        """What is on disk and whole. Reads and checks every file."""
        self._prune("half", RECORDS)  # of a process that was killed before it could
        self._prune("checkpoint", CHECKPOINTS)
        self._whole = {
            t: head for t in rounds_kept(self.path, "half") if (head := self._checked(t)) is not None
        }
        return Stored(
            checkpoint=self._newest_checkpoint(),
            record=self._load_record(max(self._whole)) if self._whole else None,
            last_round=self._last,
            published=tuple(t for t in sorted(self._whole) if self._whole[t].entries["body"]),
        )

    def persist(
        self, record: Record, state: Bytes = b"", signature: bytes = b"", body: Sequence[Bytes] | None = None
    ) -> bool:
        """Record a round once, with the local state of training and the signature of its half-step,
        if there is one. A round without a half-step may be recorded again with one.

        ``body``: the half-step as it travels, if somebody has made that already. Returns False if the write
        failed; earlier records remain.
        """
        earlier = self._whole.get(record.round)
        if record.round <= self._last and (earlier is None or earlier.entries["body"]):
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
        parts = [*body, state, *(raw(self._layout, x) for x in behind.values())]
        head = self._write(_file(self.path, "half", record.round), entries, parts)
        if head is None:
            return False
        self._whole[record.round] = head
        self._prune("half", RECORDS)
        return True

    def save(self, checkpoint: Checkpoint, buffers: Buffers = MappingProxyType({})) -> bool:
        """Keep where a round ended. Returns False if the write failed; earlier checkpoints remain.

        ``buffers``: what belongs to the model and is never exchanged (BatchNorm's statistics), by name.
        """
        values = raw(self._layout, checkpoint.x)
        entries = {
            "round": checkpoint.round,
            "fresh": checkpoint.fresh,
            "degraded": checkpoint.degraded,
            "outcome": checkpoint.outcome,
            "behind": checkpoint.behind,
            "model": self._layout.sha256,
            "values": len(values),
        }
        arrays = {name: np.asarray(buffer, order="C") for name, buffer in buffers.items()}
        if arrays:
            entries["buffers"] = [
                [name, buffer.dtype.str, list(buffer.shape)] for name, buffer in arrays.items()
            ]
        parts: list[Bytes] = [values, *(buffer.tobytes() for buffer in arrays.values())]
        if checkpoint.v is not None:
            entries["v"] = len(values)
            parts.append(raw(self._layout, checkpoint.v))
        if self._write(_file(self.path, "checkpoint", checkpoint.round), entries, parts) is None:
            return False
        self._prune("checkpoint", CHECKPOINTS)
        return True

    def state(self, round: int) -> bytes | None:
        """The local state that was recorded with a round; None if there is no whole record of it."""
        head = self._whole.get(round)
        if head is None:
            return None
        with open(_file(self.path, "half", round), "rb") as file:
            file.seek(head.offset + head.entries["body"])
            return file.read(head.entries["state"])

    def signature(self, round: int) -> bytes | None:
        """The signature that was recorded with a half-step; None if there is none."""
        head = self._whole.get(round)
        return base64.b64decode(head.entries["signature"]) if head and "signature" in head.entries else None

    @property
    def last_round(self) -> int:
        """The newest round ever recorded, readable or not; 0: none."""
        return self._last

    def open_body(self, round: int) -> Body | None:
        """The bytes to serve for a round, from a record that is whole; None if there is none,
        or no longer."""
        head = self._whole.get(round)
        if head is None or not head.entries["body"]:
            return None
        try:
            return Body(
                os.open(_file(self.path, "half", round), os.O_RDONLY), head.offset, head.entries["body"]
            )
        except FileNotFoundError:
            return None

    # --- files ----------------------------------------------------------------------------------------------

    def _prune(self, kind: str, kept: int) -> None:
        with suppress(OSError):  # then it is tried again with the next
            for old in rounds_kept(self.path, kind)[:-kept]:
                if kind == "half":
                    self._whole.pop(old, None)
                _file(self.path, kind, old).unlink()

    def _write(self, path: Path, entries: dict[str, Any], parts: Sequence[Bytes]) -> _Head | None:
        """Write a file whole, without copying its parts; None: the disk would not."""
        entries = {**entries, "sha256": _hash(entries, parts)}
        line = json.dumps(entries).encode() + b"\n"
        try:
            self._check_folder()
            with atomic(path, mode=0o600) as file:
                file.write(line)
                for part in parts:
                    file.write(part)
        except OSError as error:
            self._complain(path, error)
            return None
        self.trouble = ""
        return _Head(entries, len(line))

    def _complain(self, path: Path, error: OSError) -> None:
        """Once, until the disk takes files again: a full disk would fill the log too."""
        if not self.trouble:
            _log.error("could not write %s: %s; what was there before stays", path, error.strerror or error)
        self.trouble = _REASONS.get(error.errno or 0, error.strerror or str(error))

    def _check_folder(self) -> None:
        """The folder is still the one that was locked; if somebody deleted it, it is made and locked again.

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

    def _checked(self, round: int) -> _Head | None:
        """The head of a record whose bytes are all as they were written."""
        path = _file(self.path, "half", round)
        try:
            with open(path, "rb") as file:
                head = _read_head(file, round)
                body = head.entries["body"]
                if body not in (0, self._layout.size):
                    raise _Damaged(f"has a body of {body} bytes instead of {self._layout.size}")
                if body and file.read(len(self._layout.body_header)) != self._layout.body_header:
                    raise _Damaged("holds another kind of model")
                file.seek(head.offset)
                _check(head, iter(lambda: file.read(_PIECE), b""))
                return head
        except (OSError, KeyError, TypeError, _Damaged) as error:
            _log.warning("%s is damaged and will not be served: %s", path, error)
            return None

    def _load_record(self, round: int) -> Record:
        head = self._whole[round]
        with open(_file(self.path, "half", round), "rb") as file:
            file.seek(head.offset + head.entries["body"] + head.entries["state"])
            rows = {name: _read_values(file, self._layout) for name in head.entries.get("behind", [])}
            if head.entries["body"] and "half" not in rows:
                file.seek(head.offset + len(self._layout.header))
                rows["half"] = _read_values(file, self._layout)
        asked, membership = tuple(head.entries["asked"]), head.entries.get("membership", "")
        half = LentRow(rows["half"]) if "half" in rows else None
        stale = head.entries.get("stale", False)
        return Record(round, asked, half, rows.get("before"), rows.get("v"), membership, stale)

    def _newest_checkpoint(self) -> Checkpoint | None:
        for t in reversed(rounds_kept(self.path, "checkpoint")):
            try:
                return read_checkpoint(self.path, t, self._layout)[0]
            except UNREADABLE as error:
                _log.warning("the checkpoint of round %d is damaged, the one before it is used: %s", t, error)
        return None


# --- files --------------------------------------------------------------------------------------------------


def _file(folder: Path, kind: str, round: int) -> Path:
    return folder / f"{kind}-{round}.{_SUFFIX[kind]}"


def rounds_kept(folder: Path, kind: str) -> list[int]:
    """The rounds that have a record ("half") or a "checkpoint" in a state folder, whole or not,
    oldest first."""
    names = (
        re.fullmatch(rf"{kind}-([1-9][0-9]*|0)\.{_SUFFIX[kind]}", path.name)
        for path in folder.glob(f"{kind}-*")
    )
    return sorted(int(name[1]) for name in names if name is not None)


def read_checkpoint(folder: Path, round: int, layout: Layout) -> tuple[Checkpoint, dict[str, Models]]:
    """A checkpoint that is whole, and the buffers beside it."""
    with open(_file(folder, "checkpoint", round), "rb") as file:
        head = _read_head(file, round)
        if head.entries["model"] != layout.sha256:  # the same number of values may belong to other names
            raise _Damaged("it holds another kind of model")
        x, entries = _read_values(file, layout), head.entries
        shapes = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in entries.get("buffers", [])]
        rest = file.read()
    _check(head, [raw(layout, x), rest])
    buffers, begin = {}, 0
    for name, dtype, shape in shapes:
        count = math.prod(shape)
        buffers[name] = np.frombuffer(rest, dtype, count, begin).reshape(shape)
        begin += count * dtype.itemsize
    v = np.frombuffer(rest, layout.dtype, layout.d, begin).copy() if "v" in entries else None
    checkpoint = Checkpoint(
        round, x, entries["fresh"], entries["degraded"], entries["outcome"], entries["behind"], v
    )
    return checkpoint, buffers


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
    """Lock the state folder, made for its owner alone if it is not there;
    what is in it is for its owner alone, too."""
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
    """Let nobody but its owner at a peer's files, whatever a copy or a umask has made of them.

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


def _read_head(file: IO[bytes], round: int) -> _Head:
    line = file.readline(_LONGEST_LINE)
    with suppress(ValueError, RecursionError):
        entries = json.loads(line)
        if isinstance(entries, dict) and entries.get("round") == round:
            return _Head(entries, len(line))
    raise _Damaged("its first line is not what was written")


def _check(head: _Head, parts: Iterable[Bytes]) -> None:
    if _hash(head.entries, parts) != head.entries["sha256"]:
        raise _Damaged("its bytes are not those that were written")
