"""IDX files, the format of MNIST and Fashion-MNIST, gzipped or unpacked, checked before a pixel is used.

Invariant: what is returned has exactly the shape its header promises, and belongs to the digest it is known by.
"""

import gzip
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rpel.data.files import DataError, md5, read, sha256

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""Training images and labels, test images and labels; ``.gz`` is added where they are packed."""

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Digests:
    """MD5 of one file, packed as published (None: not published packed) and unpacked."""

    packed: str | None
    unpacked: str


def parse(content: bytes, name: str = "the file") -> NDArray[np.uint8]:
    """The array of an unpacked IDX file of unsigned bytes.

    >>> parse(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
    array([[1, 2, 3],
           [4, 5, 6]], dtype=uint8)
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE or not 1 <= content[3] <= 4:
        raise DataError(
            f"{name} is not an IDX file of unsigned bytes: it begins with {content[:4].hex(' ') or 'nothing'}"
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{name} ends inside its header of {start} bytes, after {len(content)}")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = start + _product(shape)
    if len(content) != expected:
        raise DataError(f"{name} has {len(content)} bytes where its header, shape {shape}, promises {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _product(shape: Iterable[int]) -> int:
    """Exact, however large a forged header makes it."""
    product = 1
    for size in shape:
        product *= size
    return product


def unpack(content: bytes, name: str = "the file") -> bytes:
    """The content of a gzipped file; what is not gzipped is returned as it is.

    >>> unpack(b"plain")
    b'plain'
    """
    if content[:2] != _GZIP:
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} is damaged: {str(error) or 'it ends too early'}") from error


def verify(stored: bytes, content: bytes, known: Digests, name: str) -> None:
    """Refuse a file that is neither the published one nor the same content, unpacked or packed in another way."""
    if md5(stored) != known.packed and md5(content) != known.unpacked:
        raise DataError(f"{name} is not the published file: its MD5 is {md5(stored)}")


Arrays = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]
"""Training images and labels, test images and labels; images (N, 1, H, W)."""


def locate(folder: Path) -> list[Path] | None:
    """The four files in a folder, packed or unpacked; None unless all are there."""
    found = [next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None) for name in FILES]
    paths = [path for path in found if path is not None]
    return paths if len(paths) == len(FILES) else None


def read_four(paths: list[Path], known: tuple[Digests, ...], classes: int = 10) -> tuple[Arrays, dict[str, str]]:
    """Arrays and SHA-256 of the four files; the digest is of the unpacked content, so packing does not change it."""
    return _assemble([(read(path), str(path)) for path in paths], known, classes)


def read_sample(known: tuple[Digests, ...]) -> tuple[Arrays, dict[str, str]]:
    """The sample inside the package."""
    folder = resources.files("rpel.data") / "sample"
    return _assemble([((folder / f"{name}.gz").read_bytes(), f"sample/{name}.gz") for name in FILES], known, 10)


def _assemble(
    files: list[tuple[bytes, str]], known: tuple[Digests, ...], classes: int
) -> tuple[Arrays, dict[str, str]]:
    parsed, checksums = [], {}
    for (stored, where), digests, name in zip(files, known, FILES, strict=True):
        content = unpack(stored, where)
        verify(stored, content, digests, where)
        parsed.append(parse(content, where))
        checksums[name] = sha256(content)
    train_x, train_y = _paired(parsed[0], parsed[1], classes, "training")
    test_x, test_y = _paired(parsed[2], parsed[3], classes, "test")
    return (train_x, train_y, test_x, test_y), checksums


def _paired(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], classes: int, part: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"the {part} images {images.shape} and labels {labels.shape} do not belong together")
    if labels.size and labels.max() >= classes:
        raise DataError(f"the {part} labels go up to {labels.max()}, but there are {classes} classes")
    return images[:, None], labels.astype(np.int64)
