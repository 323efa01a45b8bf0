"""Keep what a run leaves on disk in one folder that Ctrl-C, kill -9 or a full disk cannot damage.

Invariants: a file is complete or not there (temporary file, fsync, rename, fsync of the folder), except
metrics.jsonl, which grows by a line a round and is cut back to the checkpoint on resuming, and its copy for
TensorBoard; certificate.json comes last, so a folder that has one is finished; one process at a time writes
a folder.
"""

import contextlib
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.files import atomic, locked
from rpel.runs.certificate import Certificate
from rpel.runs.columns import Row
from rpel.runs.journal import EVENTS, Events, Journal, lines, read_rows, remove_events
from rpel.text import human_bytes

Arrays = Mapping[str, NDArray[Any]]

log = logging.getLogger("rpel")
_CHECKPOINT = re.compile(r"round-(\d+)\.npz")
_NAME = re.compile(r".*-([0-9a-f]{12})")


def hash_of(name: str) -> str | None:
    """The hash in a run folder's name, if it has one.

    >>> hash_of("run-0123456789ab"), hash_of("elsewhere")
    ('0123456789ab', None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def is_by_row(key: str) -> bool:
    """Whether an array of a checkpoint has a row for every node: models, and what stays with a node.

    >>> [is_by_row(key) for key in ("x", "local.momentum", "network.past", "record.counts")]
    [True, True, False, False]
    """
    return key == "x" or key.startswith(("local.", "outer.", "chosen", "network.rows."))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a failure to read a file of a finished run into one ValueError that names the file."""
    try:
        yield
    except Exception as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ValueError(f"{path} {reason}: copy the folder anew, or repeat the run with --force") from error


class RunFolder:
    """The folder of one run.

    Writing needs :meth:`locked`; reading does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # --- who writes ---

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, made if need be, against other processes; ValueError if another one has it."""
        try:
            (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise  # the command line says which part of the path is a file
        except OSError as error:
            reason = str(error.strerror).lower()
            raise ValueError(f"{error.filename} cannot be created ({reason}): choose another --out") from None
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", wait=False))
            except BlockingIOError:
                raise ValueError(
                    f"another process is writing {self.path}: wait for it, stop it, or choose another --out"
                ) from None
            yield

    def check_room(self, needed: int) -> None:
        """Raise ValueError if files of that size do not fit on the disk, beside what the folder has now."""
        held = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.path).free
        if needed > free + held:
            raise ValueError(
                f"the files of this run need {human_bytes(needed)}, and {human_bytes(free + held)} are free "
                f"for {self.path}: make room, or choose another --out"
            )

    def clear(self) -> None:
        """Forget everything the run has written."""
        for path in [*self.path.glob("*"), *self.path.glob(".*.tmp"), *self.path.glob("checkpoint/*")]:
            if path.is_file():
                path.unlink()
        remove_events(self.path / EVENTS)

    # --- whole files ---

    def write_text(self, name: str, text: str) -> None:
        with atomic(self.path / name) as file:
            file.write(text.encode())

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_arrays(self, name: str, arrays: Arrays) -> None:
        named: Any = dict(arrays)
        with atomic(self.path / name) as file:
            np.savez_compressed(file, **named)

    def write_tensors(self, name: str, arrays: Arrays) -> None:
        """Write a safetensors file row by row from memory, without a copy.

        Models can take up most of the memory.
        """
        kinds = {"f": "F", "i": "I", "u": "U"}
        header, at = {}, 0
        for key, array in arrays.items():
            kind = f"{kinds[array.dtype.kind]}{8 * array.dtype.itemsize}"
            header[key] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with atomic(self.path / name) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def read_arrays(self, name: str) -> dict[str, NDArray[Any]]:
        with readable(self.path / name):
            return _arrays(self.path / name)

    def certificate(self) -> Certificate | None:
        """The certificate of a finished run; None while it is not finished."""
        path = self.path / "certificate.json"
        if not path.exists():
            return None
        with readable(path):
            return Certificate(**json.loads(path.read_text("utf-8")))

    def code(self) -> str | None:
        """The digest of the code that finished the run or wrote its newest checkpoint; None before that."""
        if (certificate := self.certificate()) is not None:
            return str(certificate.versions.get("code"))
        for _, path in self.checkpoints:
            damage = contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
            # read: one member
            with damage, path.open("rb") as file, np.load(file, allow_pickle=False) as state:
                return str(state["run.code"])
        return None

    # --- metrics.jsonl ---

    def metrics(self) -> list[Row]:
        """The complete lines, up to the first damaged one."""
        return read_rows(self.path / "metrics.jsonl")

    @contextlib.contextmanager
    def journal(self, rows: list[Row]) -> Iterator[Journal]:
        """metrics.jsonl, cut back to these rows and open for more."""
        self.write_text("metrics.jsonl", lines(rows))
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            yield Journal(file)

    def copy_events(self) -> None:
        """Write the TensorBoard copy of a finished run; two processes may do so at once."""
        remove_events(self.path / EVENTS)
        Events(self.path / EVENTS, self.metrics()).close()

    # --- checkpoints ---

    @property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """(round, file) of the checkpoints that have their name, newest first."""
        matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in (self.path / "checkpoint").glob("*")]
        return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)

    def save(self, round_: int, arrays: Arrays) -> None:
        """Write the checkpoint of a round; older ones go when it is durable."""
        path, named = self._checkpoint(round_), dict[str, Any](arrays)
        with atomic(path) as file:
            np.savez(file, **named)
        for other in (self.path / "checkpoint").glob("round-*"):
            if other != path:
                other.unlink()

    def _checkpoint(self, round_: int) -> Path:
        return self.path / "checkpoint" / f"round-{round_:08d}.npz"

    def restore(self) -> dict[str, NDArray[Any]] | None:
        """The newest checkpoint that can be read; None to begin at round 0."""
        return next(
            (arrays for round_, _ in self.checkpoints if (arrays := self.read(round_)) is not None), None
        )

    def read(self, round_: int) -> dict[str, NDArray[Any]] | None:
        """A round's checkpoint; None if it is damaged."""
        try:
            return _arrays(self._checkpoint(round_))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            log.warning("the checkpoint of round %d is damaged and left aside (%s)", round_, error)
            return None

    def finish(self) -> None:
        """Remove what only an unfinished run needs."""
        for path in (self.path / "checkpoint").glob("*"):
            path.unlink()


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of a file, its CRC checked."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
        return dict(content)
