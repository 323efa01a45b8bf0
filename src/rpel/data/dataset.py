"""What a data set is: the record that all parts of the product take, how it is made of arrays,
what is checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.data import trees
from rpel.data.files import DataError, sha256


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples (N, …) and targets (N, …) for training and testing,
    and what is needed to use and to certify them.

    >>> x, y = np.zeros((4, 7), np.float32), np.array([0, 1, 1, 0])
    >>> Dataset("ward", x, y, x, y, classes=2).shape
    (7,)
    """

    name: str
    train_x: Any
    """An array, a tuple or a dict of arrays with N rows each; with a `collate`, N examples of any kind."""
    train_y: Any
    """The same; with a `collate`, what the partition may go by."""
    test_x: Any
    test_y: Any
    classes: int = 0
    """The targets are whole numbers below it; 0 where they are no classes."""
    mean: tuple[float, ...] | None = None
    """Per channel, of pixels scaled to 0 … 1; None: examples are used as they are."""
    std: tuple[float, ...] | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each source file, unpacked."""
    writers: NDArray[np.int64] | None = None
    """The writer's number of each training example, where the data set knows it."""
    test_writers: NDArray[np.int64] | None = None
    """The same of each test example; a writer has one number in both."""
    augment: str | None = None
    """How training images are varied: "crop-flip" (random crop after padding by 4, horizontal flip)
    or not at all."""
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None
    """collate(examples) -> (inputs, targets) makes a batch; None: examples are rows of arrays."""

    @property
    def size(self) -> int:
        """How many training examples there are."""
        return len(trees.first(self.train_y))

    @property
    def test_size(self) -> int:
        """How many test examples there are."""
        return len(trees.first(self.test_y))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example, such as (C, H, W); () where an example is not one array."""
        return tuple(self.train_x.shape[1:]) if isinstance(self.train_x, np.ndarray) else ()

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The class of each training example, where it has just one."""
        return self.train_y if self.classes and np.ndim(self.train_y) == 1 else None

    def strata(self) -> NDArray[np.int64]:
        """What a fair sample of the test examples has equally much of: their classes, or all are alike."""
        return self.test_y if self.labels is not None else np.zeros(self.test_size, np.int64)

    def normalised(self, x: NDArray[Any]) -> NDArray[Any]:
        """Images as float32: bytes scaled to 0 … 1, then (x − mean) / std per channel;
        other data as they are.

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


def check_examples(
    train: NDArray[Any], test: NDArray[Any], names: tuple[str, str] = ("train", "test")
) -> None:
    """DataError unless both are finite, of one shape, and pixels (uint8) or not alike:
    only pixels are divided by 255.

    >>> check_examples(np.zeros((2, 3), np.uint8), np.ones((2, 3), np.float32))
    Traceback (most recent call last):
    rpel.data.files.DataError: the train examples are uint8 from 0 to 0, the test examples are float32 ...
    """
    parts = ((names[0], train), (names[1], test))
    for name, x in parts:
        if x.dtype.kind == "f":
            check_finite(x, f"{name} examples")
    if train.shape[1:] != test.shape[1:]:
        raise DataError(
            f"{names[0]} examples have the shape {train.shape[1:]} and {names[1]} examples {test.shape[1:]}"
        )
    if (train.dtype == np.uint8) != (test.dtype == np.uint8):
        a, b = (f"the {name} examples are {x.dtype} from {x.min():g} to {x.max():g}" for name, x in parts)
        raise DataError(f"{a}, {b}: uint8 are pixels, divided by 255, so that both must be uint8, or neither")


def check_finite(values: NDArray[Any], what: str) -> None:
    """DataError, with the rows, where there is NaN or infinity.

    >>> check_finite(np.array([[1.0, 2.0], [np.nan, 0.0]]), "examples")
    Traceback (most recent call last):
    rpel.data.files.DataError: the examples have NaN or infinity in 1 of 2 rows: 1
    """
    broken = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(broken):
        some = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
        raise DataError(f"the {what} have NaN or infinity in {len(broken):,} of {len(values):,} rows: {some}")


def from_arrays(
    train: tuple[NDArray[Any], NDArray[Any]],
    test: tuple[NDArray[Any], NDArray[Any]],
    *,
    name: str = "own",
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Dataset:
    """Your own data: (examples, labels) for training and testing; with mean and std they are images to
    normalise, of which uint8 are divided by 255, else they are kept as given.

    >>> x, y = np.zeros((4, 1, 2, 2), np.float32), np.array([0, 1, 2, 1])
    >>> from_arrays((x, y), (x, y)).classes
    3
    """
    parts: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
    checksums = {}
    for part, (x, y) in {"train": train, "test": test}.items():
        if len(x) != len(y) or y.ndim != 1 or not len(y):
            raise DataError(f"the {part} examples {x.shape} and labels {y.shape} do not belong together")
        if y.dtype.kind not in "iu" or y.min() < 0:
            raise DataError(f"the {part} labels must be whole numbers from 0 on")
        parts.append((x, y.astype(np.int64)))
        content = np.ascontiguousarray(x).tobytes() + parts[-1][1].tobytes()
        checksums[f"{name}/{part}"] = sha256(f"{x.dtype}{x.shape}".encode() + content)
    check_examples(train[0], test[0])
    largest = max(int(y.max()) for _, y in parts)
    classes = largest + 1 if classes is None else classes
    if largest >= classes:
        raise DataError(f"the labels go up to {largest}, but there are {classes} classes")
    return Dataset(name, *parts[0], *parts[1], classes, mean, std, checksums)
