"""What every reader shares: one kind of error, checksums, and where data may lie."""

import hashlib
import os
from pathlib import Path


class DataError(ValueError):
    """A data set that is missing, damaged or not what it claims to be; the message is one sentence for the user."""


def md5(content: bytes) -> str:
    """The digest under which the public archives are known; it guards against damage, not against an enemy.

    >>> md5(b"")
    'd41d8cd98f00b204e9800998ecf8427e'
    """
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    """The digest that certificates record.

    >>> sha256(b"")[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(content).hexdigest()


def read(path: Path) -> bytes:
    """The bytes of a file, or a DataError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def cache_folder() -> Path:
    """Where downloads are kept: ``data`` in RPEL_CACHE, or in ~/.cache/rpel."""
    return Path(os.environ.get("RPEL_CACHE") or "~/.cache/rpel").expanduser() / "data"


def search_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Folders to look in, first to last: the one given, RPEL_DATA, the cache."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("RPEL_DATA")) if folder]
    for folder in given:
        if not folder.is_dir():
            raise DataError(f"the data folder {str(folder)!r} does not exist or is not a folder")
    return [*given, cache_folder()]
