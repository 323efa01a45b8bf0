"""The published files as arrays: IDX (MNIST and Fashion-MNIST), CIFAR-10's pickles, FEMNIST (LEAF's json, or
the images of 155 writers in one npz file).

Invariants: what is returned has exactly the shape its file promises, and belongs to the digest it is known
by; no byte reaches the unpickler before its MD5 is known to be right,
and the unpickler could not run code even then.
"""

import gzip
import io
import json
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data.files import DataError, md5, read, sha256

# --- IDX, gzipped or unpacked -------------------------------------------------------------------------------

IDX_FILES = (
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


def parse_idx(content: bytes, name: str = "the file") -> NDArray[np.uint8]:
    """The array of an unpacked IDX file of unsigned bytes.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
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
    expected = start + math.prod(shape)  # exact, however large a forged header makes it
    if len(content) != expected:
        raise DataError(
            f"{name} has {len(content)} bytes where its header, shape {shape}, promises {expected}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


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
    """Refuse a file that is neither the published one nor the same content,
    unpacked or packed in another way."""
    if md5(stored) != known.packed and md5(content) != known.unpacked:
        raise DataError(f"{name} is not the published file: its MD5 is {md5(stored)}")


Arrays = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]
"""Training images and labels, test images and labels; images (N, 1, H, W)."""


def locate_idx(folder: Path) -> list[Path] | None:
    """The four files in a folder, packed or unpacked; None unless all are there."""
    files = [
        next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None) for name in IDX_FILES
    ]
    paths = [path for path in files if path is not None]
    return paths if len(paths) == len(IDX_FILES) else None


def read_idx(
    paths: list[Path], known: tuple[Digests, ...], classes: int = 10
) -> tuple[Arrays, dict[str, str]]:
    """Arrays and SHA-256 of the four files; the digest is of the unpacked content,
    so packing does not change it."""
    return _read_idx([(read(path), str(path)) for path in paths], known, classes)


def read_sample(known: tuple[Digests, ...]) -> tuple[Arrays, dict[str, str]]:
    """The sample inside the package."""
    folder = resources.files("rpel.data") / "sample"
    return _read_idx(
        [((folder / f"{name}.gz").read_bytes(), f"sample/{name}.gz") for name in IDX_FILES], known, 10
    )


def _read_idx(
    files: list[tuple[bytes, str]], known: tuple[Digests, ...], classes: int
) -> tuple[Arrays, dict[str, str]]:
    parsed, checksums = [], {}
    for (stored, where), digests, name in zip(files, known, IDX_FILES, strict=True):
        content = unpack(stored, where)
        verify(stored, content, digests, where)
        parsed.append(parse_idx(content, where))
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


# --- CIFAR-10: pickles, read without letting one name anything but NumPy's arrays ---------------------------

CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_ARCHIVES = ("cifar-10-batches-py.tar.gz", "cifar-10-python.tar.gz")
CIFAR_MD5 = "c58f30108f718f92721af3b95e74349a"
"""Of the public cifar-10-python.tar.gz, the one that is downloaded."""
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""MD5 of each batch, the same in every archive."""

_LARGEST_MEMBER = 40_000_000


def _reconstruct() -> Any:
    """NumPy's own array constructor for pickles; asking a pickled array avoids its moving module path."""
    return np.zeros(1).__reduce__()[0]


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct(),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Knows four names; every other one, and so every call a pickle could make, is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise DataError(
                f"it asks for {module_name}.{global_name}, which no CIFAR-10 batch needs"
            ) from None


def unpickle(content: bytes, name: str = "the file") -> Any:
    """The object in a pickle of plain values and NumPy arrays; byte strings stay bytes.

    >>> unpickle(pickle.dumps({b"labels": [3, 1]}))
    {b'labels': [3, 1]}
    """
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a forged pickle can fail in any way; all of them mean the same to the user
        raise DataError(f"{name} is refused as a pickle: {error}") from error


def parse_batch(content: bytes, name: str = "the file") -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (N, 3, 32, 32) and labels (N,) of one batch."""
    batch = unpickle(content, name)
    data, labels = (batch.get(b"data"), batch.get(b"labels")) if isinstance(batch, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"{name} holds no images of 3072 bytes under b'data'")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(_is_class(y) for y in labels):
        raise DataError(f"{name} does not hold one label from 0 to 9 for each image under b'labels'")
    return data.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _is_class(label: object) -> bool:
    return isinstance(label, int) and 0 <= label <= 9


def locate_cifar(folder: Path) -> Path | None:
    """The unpacked folder or one of the archives below a data folder."""
    if all((folder / CIFAR_FOLDER / name).is_file() for name in CIFAR_BATCHES):
        return folder / CIFAR_FOLDER
    return next((folder / name for name in CIFAR_ARCHIVES if (folder / name).is_file()), None)


def _members(path: Path) -> dict[str, bytes]:
    """The six batches, by name, from an unpacked folder or an archive;
    an archive is never extracted to disk."""
    if path.is_dir():
        return {name: read(path / name) for name in CIFAR_BATCHES}
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                name = entry.name.rpartition("/")[2]
                if name in CIFAR_BATCHES and entry.isfile() and entry.size <= _LARGEST_MEMBER:
                    file = archive.extractfile(entry)
                    members[name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error
    return members


def read_cifar(
    path: Path,
) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]], dict[str, str]]:
    """Training and test arrays and the SHA-256 of each batch."""
    members = _members(path)
    for name, digest in CIFAR_BATCHES.items():
        if name not in members:
            raise DataError(f"{path} holds no {name}")
        if md5(members[name]) != digest:
            raise DataError(f"{name} in {path} is not the published batch: its MD5 is {md5(members[name])}")
    parts = [parse_batch(members[name], name) for name in _TRAIN]
    test_x, test_y = parse_batch(members["test_batch"], "test_batch")
    train_x, train_y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return (train_x, train_y, test_x, test_y), {
        f"{CIFAR_FOLDER}/{name}": sha256(members[name]) for name in CIFAR_BATCHES
    }


# --- FEMNIST: femnist/{train,test}/*.json with users, num_samples and user_data[user]{x, y},
# or a subset as npz ----

FEMNIST_FOLDER = "femnist"
FEMNIST_CLASSES = 62
"""Digits, upper case, lower case."""
FEMNIST_SUBSET = "femnist-subset/femnist-155-writers.npz"
FEMNIST_SUBSET_SHA256 = "917dd17149e279625d1aa52be4c861ec4b21c8b8d715bf3aacc3097ac930d3bc"
_PIXELS = 784


@dataclass(frozen=True)
class Part:
    """Pooled examples of one split: images (N, 1, 28, 28), labels (N,)
    and the writer's number of each (N,)."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    writers: NDArray[np.int64]
    checksums: dict[str, str]


def locate_femnist(folder: Path) -> Path | None:
    """The FEMNIST folder, if it has json files for training and for testing."""
    both = all(any((folder / FEMNIST_FOLDER / split).glob("*.json")) for split in ("train", "test"))
    return folder / FEMNIST_FOLDER if both else None


def read_femnist(folder: Path, split: str, numbers: dict[str, int]) -> Part:
    """All files of one split, in the order of their names;
    writers that are new to `numbers` get the next ones."""
    images, labels, writers, checksums = [], [], [], {}
    for path in sorted((folder / split).glob("*.json")):
        content = read(path)
        checksums[f"{FEMNIST_FOLDER}/{split}/{path.name}"] = sha256(content)
        for user, x, y in _users(content, str(path)):
            images.append(x)
            labels.append(y)
            writers.append(np.full(len(y), numbers.setdefault(user, len(numbers)), np.int64))
    if not sum(map(len, labels)):
        raise DataError(f"{folder / split} holds no examples")
    return Part(np.concatenate(images), np.concatenate(labels), np.concatenate(writers), checksums)


def read_femnist_subset(path: Path) -> tuple[Part, Part]:
    """Training and test examples of the 155 writers; the file is the known one,
    so what is inside needs no check."""
    content = read(path)
    digest = sha256(content)
    if digest != FEMNIST_SUBSET_SHA256:
        raise DataError(f"{path} is not the known file of 155 writers: its SHA-256 is {digest}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        train, test = (
            Part(
                arrays[f"x_{split}"][:, None],
                arrays[f"y_{split}"].astype(np.int64),
                arrays[f"w_{split}"].astype(np.int64),
                {FEMNIST_SUBSET: digest},
            )
            for split in ("train", "test")
        )
    return train, test


def _users(content: bytes, where: str) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Name, images and labels of each writer in a file."""
    try:
        record = json.loads(content)
        users = list(zip(record["users"], record["num_samples"], strict=True))
        data = [record["user_data"][user] for user, _ in users]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{where} is not in LEAF's format (users, num_samples, user_data): {error}"
        ) from error
    for (user, count), examples in zip(users, data, strict=True):
        yield user, *_examples(examples, count, f"{where}, user {user}")


def _examples(data: Any, count: Any, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One writer's images and labels, checked."""
    try:
        x, y = np.array(data["x"], np.float64).reshape(-1, _PIXELS), np.array(data["y"])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{where}: x must be lists of {_PIXELS} numbers and y one label each") from error
    if not len(x) == len(y) == count:
        raise DataError(f"{where}: {len(x)} images and {len(y)} labels where num_samples says {count}")
    if not ((x >= 0) & (x <= 1)).all():
        raise DataError(f"{where}: a pixel is outside 0 to 1")
    if len(y) and not (y.dtype.kind == "i" and y.min() >= 0 and y.max() < FEMNIST_CLASSES):
        raise DataError(f"{where}: a label is not a whole number from 0 to {FEMNIST_CLASSES - 1}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)
