"""The published files of images as data sets: IDX (MNIST, Fashion-MNIST), CIFAR-10's pickles, FEMNIST.

Each `find_…` returns what lies in a data folder, or None. Invariants: images stay uint8 as published; a file
that is not the published one is never used, so the content needs no further check; no byte reaches the
unpickler before its MD5 is known to be right, and the unpickler could not run code even then.
"""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data.dataset import DataError, Dataset, sha256


@dataclass(frozen=True)
class Published:
    """The published files of a data set, as sources.toml lists them."""

    name: str
    layout: str
    """The files that a data folder must hold, for messages."""
    content: dict[str, str]
    """Path in a data folder → MD5 or SHA-256, unpacked, so that other packings are recognised."""
    files: dict[str, str] = field(default_factory=dict)
    """Path in a data folder → MD5 of the file as it is downloaded."""
    mirrors: Sequence[str] = ()
    """Addresses below which the files have their names."""
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def read(self, root: Path) -> dict[str, bytes] | None:
        """Return the content of all files below a folder, checked; None unless all are there."""
        contents = {}
        for name in self.content:
            path = next((path for path in (root / f"{name}.gz", root / name) if path.is_file()), None)
            if path is None:
                return None
            contents[name] = unpack(read(path), path)
        return {name: self.check(name, content, root / name) for name, content in contents.items()}

    def check(self, name: str, content: bytes, where: str | Path) -> bytes:
        """Return the content of a file, or raise DataError if it is not the published one."""
        kind, digest = "SHA-256", sha256(content)
        if len(self.content[name]) == 32:
            kind, digest = "MD5", hashlib.md5(content, usedforsecurity=False).hexdigest()
        if digest != self.content[name]:
            raise DataError(f"{where} is not the published file: its {kind} is {digest}")
        return content

    def dataset(self, contents: Mapping[str, bytes], *arrays: Any, classes: int, **more: Any) -> Dataset:
        """Return the data set of train_x, train_y, test_x and test_y, with checksums of the files."""
        checksums = {name: sha256(content) for name, content in contents.items()}
        mean, std = (None if v is None else tuple(v) for v in (self.mean, self.std))
        x, y, test_x, test_y = arrays
        return Dataset(self.name, x, y, test_x, test_y, classes, mean, std, checksums, **more)


def read(path: Path) -> bytes:
    """Return the bytes of a file, or raise a DataError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


# --- IDX, gzipped or unpacked -------------------------------------------------------------------------------

IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
"""Training images and labels, test images and labels; ``.gz`` is added if they are packed."""


def find_idx(published: Published, root: Path) -> Dataset | None:
    """Return the data set of four IDX files."""
    contents = published.read(root)
    return None if contents is None else _idx(published, contents)


def sample(mnist: Published) -> Dataset:
    """Return the sample of MNIST inside the package."""
    folder = resources.files("rpel.data") / "sample"
    contents = {f"sample/{name}": unpack((folder / f"{name}.gz").read_bytes(), name) for name in IDX_FILES}
    return _idx(replace(mnist, name="mnist-sample"), contents)


def _idx(published: Published, contents: Mapping[str, bytes]) -> Dataset:
    x, y, test_x, test_y = (parse_idx(content) for content in contents.values())
    arrays = x[:, None], y.astype(np.int64), test_x[:, None], test_y.astype(np.int64)
    return published.dataset(contents, *arrays, classes=10)


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Return the array of an unpacked IDX file of unsigned bytes.

    >>> parse_idx(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
    array([[1, 2, 3],
           [4, 5, 6]], dtype=uint8)
    """
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def unpack(content: bytes, where: str | Path) -> bytes:
    """Return the content of a gzipped file; what is not gzipped is returned as it is.

    >>> unpack(b"plain", "a file")
    b'plain'
    """
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{where} is damaged: {str(error) or 'it ends too early'}") from error


# --- CIFAR-10: pickles that may name nothing but NumPy's arrays ---------------------------------------------

CIFAR_ARCHIVES = ("cifar-10-batches-py.tar.gz", "cifar-10-python.tar.gz")
_LARGEST_MEMBER = 40_000_000

# NumPy's own array constructor for pickles; asking a pickled array avoids its moving module path.
_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Knows four names; every other one, and so every call a pickle could make, is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise DataError(f"it asks for {module_name}.{global_name}") from None


def unpickle(content: bytes, name: str = "the file") -> Any:
    """Return the object in a pickle of plain values and NumPy arrays; byte strings stay bytes.

    >>> unpickle(pickle.dumps({b"labels": [3, 1]}))
    {b'labels': [3, 1]}
    """
    try:
        return _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a forged pickle can fail in any way; all of them mean the same to the user
        raise DataError(f"{name} is refused as a pickle: {error}") from error


def find_cifar(published: Published, root: Path) -> Dataset | None:
    """Return CIFAR-10 from the unpacked folder or an archive, which is never extracted to disk."""
    contents = published.read(root)
    archive = next((root / name for name in CIFAR_ARCHIVES if (root / name).is_file()), None)
    if contents is None and archive is not None:
        members = _members(archive)
        contents = {
            name: published.check(name, members.get(Path(name).name, b""), f"{Path(name).name} in {archive}")
            for name in published.content
        }
    if contents is None:
        return None
    *parts, test = (parse_batch(content) for content in contents.values())
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return published.dataset(contents, x, y, *test, classes=10, augment="crop-flip")


def parse_batch(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (N, 3, 32, 32) and labels (N,) of one batch."""
    batch = unpickle(content)
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64)


def _members(path: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.size <= _LARGEST_MEMBER else None
                if "batch" in entry.name and file:
                    members[Path(entry.name).name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error
    return members


# --- FEMNIST: LEAF's femnist/{train,test}/*.json, or a subset as npz ----------------------------------------

FEMNIST_FOLDER = "femnist"
FEMNIST_CLASSES = 62
"""Digits, upper case, lower case."""


def find_femnist(published: Published, root: Path) -> Dataset | None:
    """Return what the user made with LEAF or, without that, the published subset of 155 writers."""
    subset, contents = published.read(root), dict[str, bytes]()
    if all(any((root / FEMNIST_FOLDER / split).glob("*.json")) for split in ("train", "test")):
        numbers: dict[str, int] = {}
        x, y, writers = _read_leaf(root, "train", numbers, contents)
        test_x, test_y, test_writers = _read_leaf(root, "test", numbers, contents)
    elif subset is not None:
        contents = subset
        with np.load(io.BytesIO(*subset.values()), allow_pickle=False) as file:
            x, test_x = file["x_train"][:, None], file["x_test"][:, None]
            y, writers, test_y, test_writers = (
                file[key].astype(np.int64) for key in ("y_train", "w_train", "y_test", "w_test")
            )
    else:
        return None
    arrays, owners = (x, y, test_x, test_y), {"writers": writers, "test_writers": test_writers}
    return published.dataset(contents, *arrays, classes=FEMNIST_CLASSES, **owners)


def _read_leaf(root: Path, split: str, numbers: dict[str, int], contents: dict[str, bytes]) -> Any:
    """Return images, labels and writers of all files of a split; new writers get the next numbers."""
    images, labels, writers = [], [], []
    for path in sorted((root / FEMNIST_FOLDER / split).glob("*.json")):
        content = read(path)
        contents[f"{FEMNIST_FOLDER}/{split}/{path.name}"] = content
        for user, x, y in _users(content, path):
            images.append(x)
            labels.append(y)
            writers.append(np.full(len(y), numbers.setdefault(user, len(numbers)), np.int64))
    if not sum(map(len, labels)):
        raise DataError(f"{root / FEMNIST_FOLDER / split} holds no examples")
    return np.concatenate(images), np.concatenate(labels), np.concatenate(writers)


def _users(content: bytes, path: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield the name, images and labels of each writer in a file."""
    try:
        record = json.loads(content)
        for user, count in zip(record["users"], record["num_samples"], strict=True):
            data = record["user_data"][user]
            x, y = np.array(data["x"], np.float64).reshape(-1, 784), np.array(data["y"])
            whole = y.dtype.kind == "i" and y.min() >= 0 and y.max() < FEMNIST_CLASSES
            if not len(x) == len(y) == count or not ((x >= 0) & (x <= 1)).all() or not whole:
                raise ValueError(
                    f"writer {user} needs {count} images of 784 pixels from 0 to 1, with labels from 0 to 61"
                )
            yield user, np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)
    except (ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not in LEAF's format (users, num_samples, user_data): {why}") from error
