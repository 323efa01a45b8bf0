"""Data that real owners hold: four hospitals' patients, sixteen shops' reviews, Shakespeare's speakers.

Invariants: every value is made with public constants, as owners who may not show their data would have to: no
mean, no vocabulary and no category is taken from the files; a file is read only if it is the known one; who
owns an example is its `writers` number, the same in training and test data.
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

from rpel.data.files import DataError, read, sha256

Arrays = tuple[NDArray[np.generic], NDArray[np.int64], NDArray[np.int64]]
"""Examples, targets and owners."""


def _checked(path: Path, known: str, what: str) -> bytes:
    content = read(path)
    digest = sha256(content)
    if digest != known:
        raise DataError(f"{path} is not the known file of {what}: its SHA-256 is {digest}")
    return content


def _joined(parts: Sequence[tuple[NDArray[np.generic], NDArray[np.int64]]]) -> Arrays:
    """The owners' examples and targets one after the other, and whose they are."""
    owners = np.repeat(np.arange(len(parts)), [len(y) for _, y in parts])
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owners


# --- heart disease: comma-separated, 13 findings and the diagnosis, "?" where a finding is missing ----------

HOSPITALS = {
    "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
}
"""SHA-256 of each hospital's file."""
HOSPITALS_MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
HEART_FOLDER = "heart-disease"
HEART_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"

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
_EVERY = 4  # patient of each file is for testing


def locate_heart(folder: Path) -> bool:
    """Whether all hospitals' files lie below a data folder."""
    return all(_heart_file(folder, name).is_file() for name in HOSPITALS)


def _heart_file(folder: Path, name: str) -> Path:
    return folder / HEART_FOLDER / f"processed.{name}.data"


def read_heart(folder: Path) -> tuple[Arrays, Arrays, dict[str, str]]:
    """Training and test patients of all hospitals: features (N, 22), whether they are ill,
    and the hospital."""
    train, test, checksums = [], [], {}
    for name, known in HOSPITALS.items():
        path = _heart_file(folder, name)
        x, y = parse_heart(_checked(path, known, f"{name}'s patients").decode("ascii"))
        checksums[f"{HEART_FOLDER}/{path.name}"] = known
        later = np.arange(len(y)) % _EVERY == _EVERY - 1
        train.append((x[~later], y[~later]))
        test.append((x[later], y[later]))
    return _joined(train), _joined(test), checksums


def parse_heart(text: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features (N, 22) and 0 for healthy or 1 for ill (N,) of the lines of a file.

    >>> x, y = parse_heart("63,1,1,150,?,1,2,150,0,2.2,3,0,6,0\\n63,1,1,150,?,?,?,150,?,?,?,?,?,3\\n")
    >>> x[1].tolist()[:9], y.tolist()
    ([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0, 1])
    """
    rows = [line.split(",") for line in text.split()]
    if any(len(row) != 14 for row in rows):
        raise DataError("a patient has 13 findings and a diagnosis, separated by commas")
    table = np.array([[np.nan if cell == "?" else float(cell) for cell in row] for row in rows])
    for column in _ZERO_IS_MISSING:  # nobody alive has a pressure or a cholesterol of zero
        table[table[:, column] == 0, column] = np.nan
    parts = [(table[:, [c]] - mean) / deviation for c, (mean, deviation) in _NUMBERS.items()]
    parts += [2 * table[:, [c]] - 1 for c in _YES_NO]
    parts += [(table[:, [c]] == kinds).astype(float) for c, kinds in _KINDS.items()]
    return np.nan_to_num(np.hstack(parts)).astype(np.float32), (table[:, 13] > 0).astype(np.int64)


# --- reviews: an archive of DEPARTMENT.task.{train,test}, a line a review: label, tab,
# words separated by blanks

REVIEWS = "fdu-mtl/fdu-mtl.tar.xz"
REVIEWS_SHA256 = "fe5977648d868eab4a7d6f38dee0729b82cb31c96f682fb3756023f35913c9ad"
REVIEW_WORDS, VOCABULARY = 128, 8192
_REVIEW_FILE = re.compile(r"(\w+)\.task\.(train|test)")


def read_reviews(path: Path) -> tuple[Arrays, Arrays, dict[str, str]]:
    """Training and test reviews of all departments, by name: words (N, 128), 1 for praise (N,),
    and the department."""
    content = _checked(path, REVIEWS_SHA256, "the reviews")
    train, test = parse_reviews(content)
    return train, test, {REVIEWS: REVIEWS_SHA256}


def parse_reviews(archive: bytes) -> tuple[Arrays, Arrays]:
    """The same from the bytes of an archive."""
    texts: dict[tuple[str, str], bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive)), mode="r:") as files:
        for entry in files:
            name = _REVIEW_FILE.fullmatch(entry.name.rpartition("/")[2])
            file = files.extractfile(entry) if name and entry.isfile() else None
            if name and file:
                texts[name[1], name[2]] = file.read()
    departments = sorted({department for department, _ in texts})
    train, test = (
        _joined([_review_arrays(texts[d, split]) for d in departments]) for split in ("train", "test")
    )
    return train, test


def _review_arrays(content: bytes) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    lines = [line.partition(b"\t") for line in content.split(b"\n") if line.strip()]
    x = np.stack([word_numbers(text) for _, _, text in lines])
    return x, np.array([int(label) for label, _, _ in lines], np.int64)


def word_numbers(text: bytes) -> NDArray[np.int32]:
    """The first 128 words as numbers below 8,192 that come from the word alone, by CRC-32; 0 fills up.

    >>> word_numbers(b"good good book")[:4].tolist()
    [4816, 4816, 658, 0]
    """
    numbers = [1 + zlib.crc32(word) % (VOCABULARY - 1) for word in text.split()[:REVIEW_WORDS]]
    return np.array(numbers + [0] * (REVIEW_WORDS - len(numbers)), np.int32)


# --- Shakespeare: speeches "NAME:", lines, an empty line ----------------------------------------------------

SHAKESPEARE = "shakespeare/input.txt"
SHAKESPEARE_MD5 = "6fb458f1232090904fb40fe944165e91"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WINDOW = 64
_FEWEST = 2000  # characters of a speaker who is taken
_STRIDE = 16  # between training windows; those for testing do not overlap
_TEST_SHARE = 10  # a tenth of each speaker's text, the last


def read_shakespeare(path: Path) -> tuple[Arrays, Arrays, dict[str, str]]:
    """Training and test windows of the speakers: 64 characters (N, 64), the next of each (N, 64),
    and the speaker."""
    train, test = parse_shakespeare(_checked(path, SHAKESPEARE_SHA256, "tiny Shakespeare").decode("ascii"))
    return train, test, {SHAKESPEARE: SHAKESPEARE_SHA256}


def parse_shakespeare(text: str, fewest: int = _FEWEST) -> tuple[Arrays, Arrays]:
    """The same from the text; speakers with fewer characters are left out,
    the others go by how much they say."""
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
    train = _joined([_windows(part[:cut], _STRIDE) for part, cut in zip(parts, cuts, strict=True)])
    return train, _joined([_windows(part[cut:], WINDOW) for part, cut in zip(parts, cuts, strict=True)])


def _windows(text: NDArray[np.int32], stride: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    if len(text) <= WINDOW:
        return np.empty((0, WINDOW), np.int32), np.empty((0, WINDOW), np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)[::stride]
    return windows[:, :-1].copy(), windows[:, 1:].astype(np.int64)
