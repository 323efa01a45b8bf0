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
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data.dataset import DataError, Dataset, sha256

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""The mean and the standard deviation of pixels, per channel."""


def read(path: Path) -> bytes:
    """Return the bytes of a file, or raise a DataError that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def check_published(content: bytes, known: str, where: str | Path) -> bytes:
    """Return the content, or raise DataError if it has not the known MD5 or SHA-256."""
    name, digest = "SHA-256", sha256(content)
    if len(known) == 32:
        name, digest = "MD5", hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != known:
        raise DataError(f"{where} is not the published file: its {name} is {digest}")
    return content


# --- IDX, gzipped or unpacked -------------------------------------------------------------------------------

IDX_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip
"""Training images and labels, test images and labels; ``.gz`` is added if they are packed."""
MNIST_MD5 = (
    "6bbc9ace898e44ae57da46a324031adb", "a25bea736e30d166cdddb491f175f624",
    "2646ac647ad5339dbf082846283269ea", "27ae3e4e09519cfbb04c329615203637",
)  # fmt: skip
FASHION_MD5 = (
    "f4a8712d7a061bf5bd6d2ca38dc4d50a", "9018921c3c673c538a1fc5bad174d6f9",
    "8181f5470baa50b63fa0f6fddb340f0a", "15d484375f8d13e6eb1aabb0c3f46965",
)  # fmt: skip
"""MD5 of the files unpacked, so that other packings of them are recognised by content."""
MNIST_STATISTICS: Statistics = ((0.1307,), (0.3081,))
FASHION_STATISTICS: Statistics = ((0.2860,), (0.3530,))


def find_idx(
    root: Path, name: str, folder: str, digests: tuple[str, ...], statistics: Statistics
) -> Dataset | None:
    """Return the data set of four IDX files below a data folder."""
    paths = [root / folder / f"{file}{end}" for file in IDX_FILES for end in (".gz", "")]
    there = {path.name.removesuffix(".gz"): path for path in reversed(paths) if path.is_file()}
    if len(there) < len(IDX_FILES):
        return None
    contents = {
        f"{folder}/{file}": check_published(unpack(read(there[file]), there[file]), known, there[file])
        for file, known in zip(IDX_FILES, digests, strict=True)
    }
    return _idx(name, contents, statistics)


def sample() -> Dataset:
    """Return the sample of MNIST inside the package."""
    folder = resources.files("rpel.data") / "sample"
    contents = {f"sample/{name}": unpack((folder / f"{name}.gz").read_bytes(), name) for name in IDX_FILES}
    return _idx("mnist-sample", contents, MNIST_STATISTICS)


def _idx(name: str, contents: Mapping[str, bytes], statistics: Statistics) -> Dataset:
    x, y, test_x, test_y = (parse_idx(content) for content in contents.values())
    arrays = x[:, None], y.astype(np.int64), test_x[:, None], test_y.astype(np.int64)
    return Dataset(name, *arrays, 10, *statistics, {key: sha256(value) for key, value in contents.items()})


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

CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_ARCHIVES = ("cifar-10-batches-py.tar.gz", "cifar-10-python.tar.gz")
CIFAR_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""MD5 of each batch, the same in every archive."""
CIFAR_STATISTICS: Statistics = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
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


def find_cifar(root: Path) -> Dataset | None:
    """Return CIFAR-10 from the unpacked folder or an archive, which is never extracted to disk."""
    folder, archives = (
        root / CIFAR_FOLDER,
        [root / name for name in CIFAR_ARCHIVES if (root / name).is_file()],
    )
    if all((folder / name).is_file() for name in CIFAR_BATCHES):
        path, members = folder, {name: read(folder / name) for name in CIFAR_BATCHES}
    elif archives:
        path, members = archives[0], _members(archives[0])
    else:
        return None
    for name, digest in CIFAR_BATCHES.items():
        check_published(members.get(name, b""), digest, f"{name} in {path}")
    parts = [parse_batch(members[name]) for name in CIFAR_BATCHES]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    sums = {f"{CIFAR_FOLDER}/{name}": sha256(members[name]) for name in CIFAR_BATCHES}
    return Dataset("cifar10", x, y, *parts[-1], 10, *CIFAR_STATISTICS, sums, augment="crop-flip")


def parse_batch(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (N, 3, 32, 32) and labels (N,) of one batch."""
    batch = unpickle(content)
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.int64)


def _members(path: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                name = entry.name.rpartition("/")[2]
                file = archive.extractfile(entry) if entry.size <= _LARGEST_MEMBER else None
                if name in CIFAR_BATCHES and file:
                    members[name] = file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error
    return members


# --- FEMNIST: LEAF's femnist/{train,test}/*.json, or a subset as npz ----------------------------------------

FEMNIST_FOLDER = "femnist"
FEMNIST_CLASSES = 62
"""Digits, upper case, lower case."""
FEMNIST_SUBSET = "femnist-subset/femnist-155-writers.npz"
FEMNIST_SUBSET_SHA256 = "917dd17149e279625d1aa52be4c861ec4b21c8b8d715bf3aacc3097ac930d3bc"
# LEAF's images are mostly white background (1.0), which this puts near zero, as MNIST's black is.
FEMNIST_STATISTICS: Statistics = ((0.9637,), (0.1592,))


def find_femnist(root: Path) -> Dataset | None:
    """Return what the user made with LEAF or, without that, the published subset of 155 writers."""
    checksums: dict[str, str] = {}
    if all(any((root / FEMNIST_FOLDER / split).glob("*.json")) for split in ("train", "test")):
        numbers: dict[str, int] = {}
        x, y, writers = _read_leaf(root, "train", numbers, checksums)
        test_x, test_y, test_writers = _read_leaf(root, "test", numbers, checksums)
    elif (root / FEMNIST_SUBSET).is_file():
        content = check_published(read(root / FEMNIST_SUBSET), FEMNIST_SUBSET_SHA256, root / FEMNIST_SUBSET)
        checksums[FEMNIST_SUBSET] = FEMNIST_SUBSET_SHA256
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            x, test_x = file["x_train"][:, None], file["x_test"][:, None]
            y, writers, test_y, test_writers = (
                file[key].astype(np.int64) for key in ("y_train", "w_train", "y_test", "w_test")
            )
    else:
        return None
    more = *FEMNIST_STATISTICS, checksums, writers, test_writers
    return Dataset("femnist", x, y, test_x, test_y, FEMNIST_CLASSES, *more)


def _read_leaf(root: Path, split: str, numbers: dict[str, int], checksums: dict[str, str]) -> tuple[Any, ...]:
    """Return images, labels and writers of all files of a split; new writers get the next numbers."""
    images, labels, writers = [], [], []
    for path in sorted((root / FEMNIST_FOLDER / split).glob("*.json")):
        content = read(path)
        checksums[f"{FEMNIST_FOLDER}/{split}/{path.name}"] = sha256(content)
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
