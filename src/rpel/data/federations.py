"""Data sets with real owners: four hospitals' patients, sixteen shops' reviews, Shakespeare's speakers.

Invariants: values are made with public constants, as owners with secret data would have to: no mean, no
vocabulary and no category is taken from the files; a file is read only if it is the published one; the owner
of an example is its `writers` number, the same in training and test data.
"""

import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rpel.data.dataset import DataError, Dataset
from rpel.data.formats import Published

Arrays = tuple[NDArray[np.generic], NDArray[np.int64], NDArray[np.int64]]
"""Examples, targets and owners."""


def _owned(
    published: Published, contents: dict[str, bytes], train: Arrays, test: Arrays, classes: int
) -> Dataset:
    owners = {"writers": train[2], "test_writers": test[2]}
    return published.dataset(contents, *train[:2], *test[:2], classes=classes, **owners)


def _join(parts: Sequence[tuple[NDArray[np.generic], NDArray[np.int64]]]) -> Arrays:
    """Concatenate the owners' examples and targets, and number the owners."""
    owners = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owners


# --- heart disease: comma-separated, 13 findings and the diagnosis, "?" where a finding is missing ----------

_NUMBERS = {0: (54, 9), 3: (132, 18), 4: (247, 52), 7: (150, 23), 9: (1.0, 1.2), 11: (0.7, 0.9)}
"""Column: the mean and deviation by which it is normalised, round numbers near those of the study of 1989
(age, blood pressure at rest, cholesterol, highest heart rate, depression of ST, vessels coloured);
missing is the mean."""
_YES_NO = (1, 5, 8)
"""Sex, high blood sugar, pain when moving: −1 or 1; missing is 0."""
_KINDS = {2: (1, 2, 3, 4), 6: (0, 1, 2), 10: (1, 2, 3), 12: (3, 6, 7)}
"""Column: its categories, one 0 or 1 each (pain, electrocardiogram, slope of ST, scan); missing is all 0."""
_ZERO_IS_MISSING = (3, 4)
HEART_FEATURES = len(_NUMBERS) + len(_YES_NO) + sum(map(len, _KINDS.values()))
_EVERY = 4  # every fourth patient of a file is for testing


def find_heart(published: Published, root: Path) -> Dataset | None:
    """Return the patients of all hospitals: features (N, 22), whether they are ill, and the hospital."""
    contents = published.read(root)
    if contents is None:
        return None
    train, test = [], []
    for content in contents.values():
        x, y = parse_heart(content.decode("ascii"))
        later = np.arange(len(y)) % _EVERY == _EVERY - 1
        train.append((x[~later], y[~later]))
        test.append((x[later], y[later]))
    return _owned(published, contents, _join(train), _join(test), 2)


def parse_heart(text: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features (N, 22), and 0 for healthy or 1 for ill (N,), of the lines of a file.

    >>> x, y = parse_heart("63,1,1,150,?,1,2,150,0,2.2,3,0,6,0\\n63,1,1,150,?,?,?,150,?,?,?,?,?,3\\n")
    >>> x[1].tolist()[:9], y.tolist()
    ([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0, 1])
    """
    rows = [line.split(",") for line in text.split()]
    if any(len(row) != 14 for row in rows):
        raise DataError("a patient has 13 findings and a diagnosis, separated by commas")
    table = np.array([[np.nan if cell == "?" else float(cell) for cell in row] for row in rows])
    for column in _ZERO_IS_MISSING:  # impossible blood pressure or cholesterol
        table[table[:, column] == 0, column] = np.nan
    parts = [(table[:, [c]] - mean) / deviation for c, (mean, deviation) in _NUMBERS.items()]
    parts += [2 * table[:, [c]] - 1 for c in _YES_NO]
    parts += [(table[:, [c]] == kinds).astype(float) for c, kinds in _KINDS.items()]
    return np.nan_to_num(np.hstack(parts)).astype(np.float32), (table[:, 13] > 0).astype(np.int64)


# --- reviews: an archive of DEPARTMENT.task.{train,test}; a line is a review: label, tab, words -------------

REVIEW_WORDS, VOCABULARY = 128, 8192
_REVIEW_FILE = re.compile(r"(\w+)\.task\.(train|test)")


def find_reviews(published: Published, root: Path) -> Dataset | None:
    """Return the reviews of all departments: words (N, 128), 1 for praise (N,), and the department."""
    contents = published.read(root)
    if contents is None:
        return None
    return _owned(published, contents, *parse_reviews(*contents.values()), 2)


def parse_reviews(archive: bytes) -> tuple[Arrays, Arrays]:
    """Return training and test reviews from the bytes of an archive."""
    texts: dict[tuple[str, str], bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive)), mode="r:") as files:
        for entry in files:
            name = _REVIEW_FILE.fullmatch(entry.name.rpartition("/")[2])
            file = files.extractfile(entry) if name and entry.isfile() else None
            if name and file:
                texts[name[1], name[2]] = file.read()
    departments = sorted({department for department, _ in texts})
    train, test = (
        _join([_review_arrays(texts[d, split]) for d in departments]) for split in ("train", "test")
    )
    return train, test


def _review_arrays(content: bytes) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    lines = [line.partition(b"\t") for line in content.split(b"\n") if line.strip()]
    x = np.stack([word_numbers(text) for _, _, text in lines])
    return x, np.array([int(label) for label, _, _ in lines], np.int64)


def word_numbers(text: bytes) -> NDArray[np.int32]:
    """Return the first 128 words as numbers below 8,192, by CRC-32 of each word alone; 0 fills up.

    >>> word_numbers(b"good good book")[:4].tolist()
    [4816, 4816, 658, 0]
    """
    numbers = [1 + zlib.crc32(word) % (VOCABULARY - 1) for word in text.split()[:REVIEW_WORDS]]
    return np.array(numbers + [0] * (REVIEW_WORDS - len(numbers)), np.int32)


# --- Shakespeare: speeches "NAME:", lines, an empty line ----------------------------------------------------

CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WINDOW = 64
_FEWEST = 2000  # characters of a speaker who is taken
_STRIDE = 16  # between training windows; those for testing do not overlap
_TEST_SHARE = 10  # a tenth of each speaker's text, the last


def find_shakespeare(published: Published, root: Path) -> Dataset | None:
    """Return windows of the speakers: 64 characters (N, 64), the next of each (N, 64), and the speaker."""
    contents = published.read(root)
    if contents is None:
        return None
    (content,) = contents.values()
    return _owned(published, contents, *parse_shakespeare(content.decode("ascii")), len(CHARACTERS))


def parse_shakespeare(text: str, fewest: int = _FEWEST) -> tuple[Arrays, Arrays]:
    """Return training and test windows; speakers with fewer characters are left out, the largest is first."""
    spoken: dict[str, list[str]] = {}
    for speech in text.split("\n\n"):
        speaker, _, words = speech.strip().partition(":\n")
        if words:
            spoken.setdefault(speaker, []).append(words)
    texts = sorted(("\n\n".join(speeches) for speeches in spoken.values()), key=len, reverse=True)
    code = np.full(128, -1, np.int32)
    code[[ord(c) for c in CHARACTERS]] = np.arange(len(CHARACTERS))
    parts = [code[np.frombuffer(one.encode("ascii"), np.uint8)] for one in texts if len(one) >= fewest]
    if not parts:
        raise DataError(f"no speaker says {fewest} characters")
    cuts = [len(part) - len(part) // _TEST_SHARE for part in parts]
    train = _join([_windows(part[:cut], _STRIDE) for part, cut in zip(parts, cuts, strict=True)])
    return train, _join([_windows(part[cut:], WINDOW) for part, cut in zip(parts, cuts, strict=True)])


def _windows(text: NDArray[np.int32], stride: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    if len(text) <= WINDOW:
        return np.empty((0, WINDOW), np.int32), np.empty((0, WINDOW), np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)[::stride]
    return windows[:, :-1].copy(), windows[:, 1:].astype(np.int64)
