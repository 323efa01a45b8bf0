"""FEMNIST in LEAF's json: ``femnist/{train,test}/*.json`` with users, num_samples and user_data[user]{x, y}.

Pixels are kept as LEAF has them: 28 × 28 in reading orientation, dark ink on a white background of 1.0 (MNIST is the
inverse), stored as uint8 after multiplying by 255.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data.files import DataError, read, sha256

FOLDER = "femnist"
CLASSES = 62
"""Digits, upper case, lower case."""
_PIXELS = 784


@dataclass(frozen=True)
class Part:
    """Pooled examples of one split: images (N, 1, 28, 28), labels (N,) and the writer's number of each (N,)."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    writers: NDArray[np.int64]
    checksums: dict[str, str]


def locate(folder: Path) -> Path | None:
    """The FEMNIST folder, if it has json files for training and for testing."""
    both = all(any((folder / FOLDER / split).glob("*.json")) for split in ("train", "test"))
    return folder / FOLDER if both else None


def read_split(folder: Path, split: str) -> Part:
    """All files of one split, in the order of their names; writers are numbered in the order they appear."""
    images, labels, writers, checksums = [], [], [], {}
    numbers: dict[str, int] = {}
    for path in sorted((folder / split).glob("*.json")):
        content = read(path)
        checksums[f"{FOLDER}/{split}/{path.name}"] = sha256(content)
        for user, x, y in _users(content, str(path)):
            images.append(x)
            labels.append(y)
            writers.append(np.full(len(y), numbers.setdefault(user, len(numbers)), np.int64))
    if not sum(map(len, labels)):
        raise DataError(f"{folder / split} holds no examples")
    return Part(np.concatenate(images), np.concatenate(labels), np.concatenate(writers), checksums)


def _users(content: bytes, where: str) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Name, images and labels of each writer in a file."""
    try:
        record = json.loads(content)
        users = list(zip(record["users"], record["num_samples"], strict=True))
        data = [record["user_data"][user] for user, _ in users]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} is not in LEAF's format (users, num_samples, user_data): {error}") from error
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
    if len(y) and not (y.dtype.kind == "i" and y.min() >= 0 and y.max() < CLASSES):
        raise DataError(f"{where}: a label is not a whole number from 0 to {CLASSES - 1}")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)
