"""Files of data sets: where they may lie, their digests, and downloads of the public archives.

A download goes to a temporary file, is checked, then renamed, so a wrong file is never found later.
RPEL_DATA_URL replaces every mirror; below it the files lie as in a data folder (``MNIST/raw/…``), so that
``python -m http.server`` in a data folder is a mirror.
"""

import hashlib
import http.client
import os
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rpel.files import cache_root

Progress = Callable[[str, int, int | None], None]
"""progress(name, done, total): bytes so far and in all; total is None where the server does not say."""

TIMEOUT = 30.0
_CHUNK = 1 << 18


class DataError(ValueError):
    """A data set that is missing, damaged or not what it claims to be;
    the message is one sentence for the user."""


class MissingDataError(DataError):
    """A data set that is nowhere to be found and could not be downloaded."""


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
    """Where downloads are kept."""
    return cache_root() / "data"


def search_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Folders to look in, first to last: the one given, RPEL_DATA, the cache."""
    given = [Path(folder).expanduser() for folder in (data_dir, os.environ.get("RPEL_DATA")) if folder]
    for folder in given:
        if not folder.is_dir():
            raise DataError(f"the data folder {str(folder)!r} does not exist or is not a folder")
    return [*given, cache_folder()]


@dataclass(frozen=True)
class Remote:
    """One file: where it lies in a data folder, its MD5, and the addresses that offer it."""

    path: str
    md5: str
    urls: tuple[str, ...]

    def addresses(self) -> tuple[str, ...]:
        """Its addresses, or the one below RPEL_DATA_URL."""
        base = os.environ.get("RPEL_DATA_URL")
        return (f"{base.rstrip('/')}/{self.path}",) if base else self.urls


def fetch(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """The file below the folder, downloaded from the first address that gives it whole."""
    target = folder / remote.path
    reasons = []
    for url in remote.addresses():
        try:
            _fetch_from(url, remote.md5, target, progress)
            return target
        except (OSError, http.client.HTTPException, ValueError) as error:
            reasons.append(f"{url}: {_reason(error)}")
    raise DataError("; ".join(reasons))


def _reason(error: Exception) -> str:
    """The innermost words of an error: a URLError wraps what happened."""
    inner = getattr(error, "reason", None)
    return str(inner or error) or type(error).__name__


def _fetch_from(url: str, md5: str, target: Path, progress: Progress | None) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("https", "http"):
        raise DataError("only https and http addresses are used")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            digest = _copy(url, file, target.name, progress)
            if digest != md5:
                raise DataError(f"the file is not the published one (MD5 {digest}) and was removed")
            file.close()
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _copy(url: str, file: IO[bytes], name: str, progress: Progress | None) -> str:
    """Copy the reply into the file and return its MD5; a reply that ends early is an error."""
    request = urllib.request.Request(url, headers={"User-Agent": "rpel"})
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        length = reply.headers.get("Content-Length")
        total = int(length) if length else None
        while chunk := reply.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(name, done, total)
    if total is not None and done != total:
        raise DataError(f"the file was cut off after {done} of {total} bytes and was removed")
    return digest.hexdigest()
