"""CIFAR-10's batches: pickles, read without letting a pickle name anything but NumPy's arrays; and crops of its images.

Invariant: no byte reaches the unpickler before its MD5 is known to be right, and the unpickler could not run code even
then.
"""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data.files import DataError, md5, read, sha256

FOLDER = "cifar-10-batches-py"
ARCHIVES = ("cifar-10-batches-py.tar.gz", "cifar-10-python.tar.gz")
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
"""Of the public cifar-10-python.tar.gz, the one that is downloaded."""
TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
MEMBERS = {
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
            raise DataError(f"it asks for {module_name}.{global_name}, which no CIFAR-10 batch needs") from None


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


def locate(folder: Path) -> Path | None:
    """The unpacked folder or one of the archives below a data folder."""
    if all((folder / FOLDER / name).is_file() for name in MEMBERS):
        return folder / FOLDER
    return next((folder / name for name in ARCHIVES if (folder / name).is_file()), None)


def read_members(path: Path) -> dict[str, bytes]:
    """The six batches, by name, from an unpacked folder or an archive; an archive is never extracted to disk."""
    if path.is_dir():
        return {name: read(path / name) for name in MEMBERS}
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                name = entry.name.rpartition("/")[2]
                if name in MEMBERS and entry.isfile() and entry.size <= _LARGEST_MEMBER:
                    file = archive.extractfile(entry)
                    members[name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error
    return members


def read_batches(
    path: Path,
) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]], dict[str, str]]:
    """Training and test arrays and the SHA-256 of each batch."""
    members = read_members(path)
    for name, digest in MEMBERS.items():
        if name not in members:
            raise DataError(f"{path} holds no {name}")
        if md5(members[name]) != digest:
            raise DataError(f"{name} in {path} is not the published batch: its MD5 is {md5(members[name])}")
    parts = [parse_batch(members[name], name) for name in TRAIN]
    test_x, test_y = parse_batch(members["test_batch"], "test_batch")
    train_x, train_y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return (train_x, train_y, test_x, test_y), {f"{FOLDER}/{name}": sha256(members[name]) for name in MEMBERS}


def crop_flip(images: NDArray[np.uint8], uniform: NDArray[np.floating], padding: int = 4) -> NDArray[np.uint8]:
    """Random crops of the original size after padding with black, each mirrored with probability one half.

    images (N, C, H, W); uniform (N, 3) in [0, 1): row offset, column offset, mirror. Padding comes before
    normalisation, as in the published recipe, so it is black and not the mean colour.

    >>> image = np.arange(1, 5, dtype=np.uint8).reshape(1, 1, 2, 2)
    >>> crop_flip(image, np.array([[0.5, 0.5, 0.9]]), padding=1)[0, 0]
    array([[2, 1],
           [4, 3]], dtype=uint8)
    """
    n, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    top, left = ((uniform[:, k] * (2 * padding + 1)).astype(np.int64)[:, None] for k in (0, 1))
    rows = top + np.arange(height)
    columns = left + np.arange(width)
    columns = np.where(uniform[:, 2:] < 0.5, columns, columns[:, ::-1])
    picked: NDArray[np.uint8] = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(picked.transpose(0, 3, 1, 2))
