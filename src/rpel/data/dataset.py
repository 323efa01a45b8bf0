"""What a data set is, and the checks that each one passes, wherever it comes from."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import is_tensor
from rpel.data import trees


class DataError(ValueError):
    """A data set that is missing, damaged or unusable; the message is one sentence for the user."""


class MissingDataError(DataError):
    """A data set that is in no folder and could not be downloaded."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples (N, …) and targets (N, …) for training and testing, and how to use and certify them.

    >>> x, y = np.zeros((4, 7), np.float32), np.array([0, 1, 1, 0])
    >>> Dataset("ward", x, y, x, y, classes=2).shape
    (7,)
    """

    name: str
    train_x: Any
    """An array, a tuple or a dict of arrays with N rows each; with a `collate`, N examples of any kind."""
    train_y: Any
    """The same; with a `collate`, the classes that a partition may go by."""
    test_x: Any
    test_y: Any
    classes: int = 0
    """The targets are whole numbers below it; 0 if they are not classes."""
    mean: tuple[float, ...] | None = None
    """Per channel, of pixels scaled to 0 … 1; None: examples are used as they are."""
    std: tuple[float, ...] | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each source file, unpacked."""
    writers: NDArray[np.int64] | None = None
    """The number of the writer (owner) of each training example, if the data set knows it."""
    test_writers: NDArray[np.int64] | None = None
    """The same of each test example; a writer has one number in both."""
    augment: str | None = None
    """How training images are varied: "crop-flip" (random crop after padding by 4, and mirroring)."""
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    """collate(examples) -> (inputs, targets) makes a batch; None: examples are rows of arrays."""

    @property
    def size(self) -> int:
        """The number of training examples."""
        return len(trees.first(self.train_y))

    @property
    def test_size(self) -> int:
        """The number of test examples."""
        return len(trees.first(self.test_y))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, such as (C, H, W); () if an example is not one array."""
        return tuple(self.train_x.shape[1:]) if isinstance(self.train_x, np.ndarray) else ()

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The class of each training example, if each has just one."""
        return self.train_y if self.classes and np.ndim(self.train_y) == 1 else None

    def strata(self) -> NDArray[np.int64]:
        """Return the groups of test examples that a fair sample balances: their classes, or one for all."""
        return self.test_y if self.labels is not None else np.zeros(self.test_size, np.int64)

    def normalised(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return images as float32, bytes scaled to 0 … 1, (x − mean) / std per channel; other data as is.

        >>> x, y = np.full((1, 1, 2, 2), 255, np.uint8), np.array([0])
        >>> Dataset("white", x, y, x, y, mean=(0.5,), std=(0.25,)).normalised(x).ravel()
        array([2., 2., 2., 2.], dtype=float32)
        """
        if self.mean is None or self.std is None:
            return x
        per_channel = (-1, *(1,) * (x.ndim - 2))
        mean, std = (np.array(v, np.float32).reshape(per_channel) for v in (self.mean, self.std))
        scale = np.float32(255 if x.dtype == np.uint8 else 1)
        result: NDArray[np.float32] = (x.astype(np.float32) / scale - mean) / std
        return result


def crop_flip(
    images: NDArray[np.uint8], uniform: NDArray[np.floating], padding: int = 4
) -> NDArray[np.uint8]:
    """Crop each image at random after padding it with black, and mirror it with probability one half.

    Padding comes before normalisation, as in the published recipe, so it is black and not the mean colour.

    Args:
        images: (N, C, H, W).
        uniform: (N, 3) in [0, 1): row offset, column offset, mirror.
        padding: pixels on each side.

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


def from_arrays(
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]],
    *,
    name: str = "own",
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Dataset:
    """Make a data set of (examples, labels) for training and testing.

    With mean and std the examples are images to normalise, of which uint8 are divided by 255.

    >>> x, y = np.zeros((4, 1, 2, 2), np.float32), np.array([0, 1, 2, 1])
    >>> from_arrays((x, y), (x, y)).classes
    3
    """
    for part, (_, y) in (("train", train), ("test", test)):
        if y.ndim != 1 or y.dtype.kind not in "iu" or y.min(initial=0) < 0:
            raise DataError(f"the {part} labels must be whole numbers from 0 on, one for each example")
    labels = [y.astype(np.int64) for _, y in (train, test)]
    found = 1 + max(int(y.max(initial=-1)) for y in labels)
    if classes is not None and found > classes:
        raise DataError(f"the labels go up to {found - 1}, but there are {classes} classes")
    parts = (train[0], labels[0]), (test[0], labels[1])
    sums = {f"{name}/{part}": checksum(arrays) for part, arrays in zip(("train", "test"), parts, strict=True)}
    return check(Dataset(name, *parts[0], *parts[1], classes or found, mean, std, sums))


# --- checks -------------------------------------------------------------------------------------------------


def check(data: Dataset) -> Dataset:
    """Return the data set, or raise DataError if its arrays cannot be trained on.

    >>> x, y = np.array([[1.0], [np.nan]]), np.zeros(2, int)
    >>> check(Dataset("ward", x, y, x, y))
    Traceback (most recent call last):
    rpel.data.dataset.DataError: the train examples have NaN or infinity in 1 of 2 rows: 1
    """
    if data.collate is None:
        check_part("train", data.train_x, data.train_y)
        check_part("test", data.test_x, data.test_y)
        check_alike(data.train_x, data.test_x, "examples")
        check_alike(data.train_y, data.test_y, "targets")
    return data


def check_part(name: str, x: Any, y: Any) -> None:
    """Raise DataError unless all leaves are arrays of equally many finite numbers."""
    sizes = {}
    for what, values in (*trees.leaves(x, "examples"), *trees.leaves(y, "targets")):
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
            kind = values.dtype if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
            text = " (text)" if isinstance(values, np.ndarray) and values.dtype.kind in "OUS" else ""
            raise DataError(f"the {name} {what} are {kind}{text}, not an array of numbers: encode them first")
        if not values.ndim or not len(values):
            raise DataError(f"there are no {name} {what}")
        sizes[what] = len(values)
        if values.dtype.kind == "f":
            check_finite(values, f"{name} {what}")
    if len(set(sizes.values())) > 1:
        counts = " and ".join(f"{size:,} {what}" for what, size in sizes.items())
        raise DataError(f"{name} has {counts}, which do not belong together")


def check_finite(values: NDArray[Any], what: str) -> None:
    """Raise DataError, with the rows, for NaN or infinity."""
    broken = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(broken):
        some = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
        raise DataError(f"the {what} have NaN or infinity in {len(broken):,} of {len(values):,} rows: {some}")


def check_alike(a: Any, b: Any, what: str, names: tuple[str, str] = ("train", "test")) -> None:
    """Raise DataError unless both have the same form, shapes behind the rows, and kind of numbers."""
    ours, theirs = (dict(trees.leaves(tree)) for tree in (a, b))
    if list(ours) != list(theirs):
        first, second = (", ".join(part).strip(", ") or "one array" for part in (ours, theirs))
        raise DataError(f"the {names[0]} {what} are {first}, the {names[1]} {what} {second}")
    for where, one in ours.items():
        other = theirs[where]
        if one.shape[1:] != other.shape[1:]:
            shapes = f"{one.shape[1:]} and {names[1]} {what} {other.shape[1:]}"
            raise DataError(f"{names[0]} {what}{where} have the shape {shapes}")
        if _kind(one) != _kind(other):
            first, second = (
                f"the {name} {what}{where} are {x.dtype} from {float(x.min()):g} to {float(x.max()):g}"
                for name, x in zip(names, (one, other), strict=True)
            )
            raise DataError(f"{first}, {second}: both must be of one kind")


def _kind(x: NDArray[Any]) -> str:
    """Return "pixels" for uint8, which are divided by 255; "i" for other whole numbers."""
    return "pixels" if x.dtype == np.uint8 else x.dtype.kind.replace("u", "i")


def sha256(content: bytes) -> str:
    """Return the digest that certificates record.

    >>> sha256(b"")[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(content).hexdigest()


def checksum(thing: Any) -> str:
    """Return the SHA-256 of numbers in any arrangement, and of the repr of anything else.

    >>> checksum(np.zeros(2)) == checksum(np.zeros(2)), checksum({"a": 1}) == checksum({"a": 2})
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _content(thing):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _content(thing: Any) -> Iterator[bytes]:
    if is_tensor(thing):
        thing = thing.detach().cpu()
        thing = (thing.float() if thing.is_floating_point() else thing).numpy()
    if isinstance(thing, np.ndarray):
        yield f"{thing.dtype} {thing.shape}".encode()
        yield np.ascontiguousarray(thing).tobytes()
    elif isinstance(thing, dict | tuple | list):
        yield repr(list(thing) if isinstance(thing, dict) else len(thing)).encode()
        for value in thing.values() if isinstance(thing, dict) else thing:
            yield from _content(value)
    else:
        yield repr(thing).encode()
