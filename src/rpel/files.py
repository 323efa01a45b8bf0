"""Write files that are complete or not there, and lock them between processes.

A file is written as a temporary file, fsync, rename, fsync of the folder.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rpel.text import human_bytes


def cache_root() -> Path:
    """Return the folder for downloads and compiled kernels.

    It is $RPEL_CACHE, else ``rpel`` in $XDG_CACHE_HOME or ~/.cache.
    """
    chosen = os.environ.get("RPEL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rpel"


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class DiskError(OSError):
    """A full or read-only disk, as one sentence."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


@contextlib.contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Inside, a full or read-only disk is a DiskError with the path and the room that there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or not isinstance(error.strerror, str):
            raise
        room = shutil.disk_usage(path.parent)
        free = f"{human_bytes(room.free)} of {human_bytes(room.total)} are free"
        why = f"{error.strerror} ({free}): make room, then repeat the command, which continues"
        raise DiskError(error.errno, why, str(path)) from error


@contextlib.contextmanager
def atomic(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write that takes its name only when all of it is on disk; ``mode`` as for os.open.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic(Path(folder) / "a") as file:
    ...         _ = file.write(b"whole")
    ...     (Path(folder) / "a").read_bytes()
    b'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with naming_the_disk(path):
        try:
            with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """A whole file of text; ``errors`` as for str.encode."""
    with atomic(path) as file:
        file.write(text.encode("utf-8", errors))


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock file, created if necessary, against other processes and threads.

    The lock is released even when the process is killed.

    Without ``wait``: BlockingIOError if another holds it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder) / "lock"):
    ...     with locked(Path(folder) / "lock", wait=False):
    ...         pass
    Traceback (most recent call last):
    BlockingIOError: ...
    """
    with contextlib.ExitStack() as stack:
        with naming_the_disk(path):
            file = stack.enter_context(path.open("ab"))
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        try:
            yield
        finally:
            # a child forked meanwhile has the file open, too, so closing it is not enough
            fcntl.flock(file, fcntl.LOCK_UN)
