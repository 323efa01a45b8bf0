"""A user's own data as a Dataset: arrays, tensors, DataFrames, torch and Hugging Face data sets.

Invariants: nothing is normalised, whole numbers stay whole, floats become float32 (the models' precision);
data that cannot be trained on are a DataError of one sentence.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from rpel.data import trees
from rpel.data.dataset import DataError, Dataset, check, check_alike, check_part, checksum, from_arrays
from rpel.types import Integers

Collate = Callable[[list[Any]], tuple[Any, Any]]
NAME = "own"
TARGETS = ("label", "labels", "target", "targets", "y")
"""Names by which the column of the targets is found."""
_TAKEN = (
    "give (x, y) arrays, a torch Dataset with a length, a DataFrame with target=, a Hugging Face Dataset, or "
    "a list with one of these per honest node"
)


def dataset(
    train: Any, test: Any, *, collate: Collate | None = None, target: str | None = None, name: str = NAME
) -> Dataset:
    """Make a data set of a user's training and test data.

    Args:
        train: a pair (x, y) of arrays, tensors, DataFrames, or tuples or dicts of them with a row an example;
            a torch Dataset of such pairs, or its DataLoader (batches are drawn anew); a DataFrame with
            ``target``; a Hugging Face Dataset; or a `Dataset`, with test None.
        test: the same for testing.
        collate: collate(examples) -> (inputs, targets) makes a batch of examples that do not fit into arrays,
            such as texts of unequal length; then examples may be anything.
        target: the column of the targets, in a DataFrame or a Hugging Face Dataset.
        name: what the data set is called.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> dataset(TensorDataset(x, y), (x.numpy(), y.numpy())).classes
    2
    """
    if isinstance(train, Dataset):
        content = (train.train_x, train.train_y, train.test_x, train.test_y)
        return replace(check(train), checksums=train.checksums or {train.name: checksum(content)})
    collate = collate or _collate_of(train) or _collate_of(test)
    if collate is not None:
        return _collated(train, test, collate, name)
    (x, y), (test_x, test_y) = _arrays(train, "train", target), _arrays(test, "test", target)
    sums = {f"{name}/train": checksum((x, y)), f"{name}/test": checksum((test_x, test_y))}
    data = check(Dataset(name, x, y, test_x, test_y, checksums=sums))
    if isinstance(x, np.ndarray) and all(_are_labels(values) for values in (y, test_y)):
        return from_arrays((x, y), (test_x, test_y), name=name)
    return replace(data, classes=_classes(y, test_y))


def named(supplied: Any, name: str) -> Dataset:
    """Return a data set known by name: a `Dataset`, or the pair (train, test)."""
    if isinstance(supplied, Dataset):
        return dataset(replace(supplied, name=name), None)
    if not isinstance(supplied, tuple | list) or len(supplied) != 2:
        raise DataError(f"data set {name!r} is {_a(supplied)}: give (train, test) or a rpel.data.Dataset")
    return dataset(*supplied, name=name)


def with_classes(data: Dataset) -> Dataset:
    """Return the data set with bools, bytes and other whole targets as int64, as cross-entropy needs them.

    >>> x, y = np.ones((2, 1)), np.array([True, False])
    >>> with_classes(Dataset("ward", x, y, x, y)).classes
    2
    """
    if data.collate is not None:
        return data
    y, test_y = (
        trees.mapped(lambda v: v.astype(np.int64) if v.dtype.kind in "biu" else v, tree)
        for tree in (data.train_y, data.test_y)
    )
    return replace(data, train_y=y, test_y=test_y, classes=data.classes or _classes(y, test_y))


def is_one_per_node(train: Any) -> bool:
    """Say whether a list holds data sets, rather than examples or the pair (x, y)."""
    return isinstance(train, list) and bool(train) and all(
        isinstance(one, TorchDataset | DataLoader)
        or _is_frame(one)
        or _is_hugging_face(one)
        or (isinstance(one, tuple | list) and len(one) == 2 and np.ndim(_numpy(one[1])) >= 1)
        for one in train
    )  # fmt: skip


def per_node(
    train: Sequence[Any], test: Any, honest: int, *, collate: Collate | None = None, target: str | None = None
) -> tuple[Dataset, list[Integers]]:
    """Return one data set of all nodes' examples, and which of them each node holds.

    >>> x, y = np.zeros((3, 2)), np.array([0, 1, 1])
    >>> [part.tolist() for part in per_node([(x, y), (x[:2], y[:2])], (x, y), 2)[1]]
    [[0, 1, 2], [3, 4]]
    """
    if len(train) != honest:
        raise DataError(
            f"train has {len(train)} data sets, but there are {honest} honest nodes (nodes − byzantine)"
        )
    collate = collate or next(filter(None, map(_collate_of, train)), None)
    if collate is not None:
        each = [list(_examples(one, f"train[{i}]")) for i, one in enumerate(train)]
        whole: Any = [example for examples in each for example in examples]
        sizes = [len(examples) for examples in each]
    else:
        parts = [_arrays(one, f"train[{i}]", target) for i, one in enumerate(train)]
        for i, part in enumerate(parts):
            check_part(f"train[{i}]", *part)
            for k, what in enumerate(("examples", "targets")):
                check_alike(parts[0][k], part[k], what, ("train[0]", f"train[{i}]"))
        whole = tuple(
            trees.mapped(lambda *values: np.concatenate(values), *group) for group in zip(*parts, strict=True)
        )
        sizes = [len(trees.first(y)) for _, y in parts]
    data, ends = dataset(whole, test, collate=collate, target=target), np.cumsum(sizes)
    sums = data.checksums | {"own/nodes": hashlib.sha256(str(ends.tolist()).encode()).hexdigest()}
    return replace(data, checksums=sums), np.split(np.arange(ends[-1]), ends[:-1])


# --- as arrays ----------------------------------------------------------------------------------------------


def _arrays(part: Any, name: str, target: str | None = None) -> tuple[Any, Any]:
    """Return examples and targets as arrays, or tuples or dicts of arrays."""
    if isinstance(part, DataLoader):
        part = part.dataset
    if isinstance(part, TensorDataset):
        part = part.tensors if len(part.tensors) == 2 else (part.tensors[:-1], part.tensors[-1])
    elif _is_hugging_face(part):
        part = _columns(part, name, target)
    elif target is not None and hasattr(part, "columns"):
        if target not in part.columns:
            raise DataError(f"{name} has the columns {', '.join(map(str, part.columns))}, and no {target!r}")
        part = part.drop(columns=target), part[target]
    elif part is None or isinstance(part, dict | str) or _is_frame(part):
        raise DataError(f"{name} is {_a(part)}, and not examples with their targets: {_TAKEN}")
    if not isinstance(part, tuple | list) or len(part) != 2:
        part = _stack(part, name)
    x, y = (
        trees.mapped(lambda value, what=what: _array(value, f"{name} {what}"), values)
        for values, what in zip(part, ("examples", "targets"), strict=True)
    )
    return x, y


def _columns(part: Any, name: str, target: str | None) -> tuple[Any, Any]:
    """Return a Hugging Face Dataset's columns: several inputs as a dict by name, images as (N, C, H, W)."""
    known = list(part.column_names)
    found = [column for column in known if column in ((target,) if target else TARGETS)]
    if len(found) != 1 or len(known) < 2:
        raise DataError(
            f"{name} has the columns {', '.join(known)}: name the targets' column with target=, and keep "
            "only the inputs beside it, with select_columns"
        )
    arrays = part.with_format("numpy")[:]
    for column in known:
        if type(part.features[column]).__name__ == "Image":
            images = np.asarray(arrays[column])
            arrays[column] = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    y = arrays.pop(found[0])
    return (next(iter(arrays.values())) if len(arrays) == 1 else dict(arrays)), y


def _stack(part: Any, name: str) -> tuple[Any, Any]:
    """Stack all examples of a torch Dataset or a list."""
    try:
        xs, ys = zip(*((x, y) for x, y in (part[i] for i in range(len(part)))), strict=True)
        stack = lambda *values: np.stack([_numpy(value) for value in values])  # noqa: E731
        return trees.mapped(stack, *xs), trees.mapped(stack, *ys)
    except Exception as error:  # a data set's code may be anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        uneven = " (examples of unequal size need a collate=)" if "same shape" in why else ""
        raise DataError(
            f"{name} is {_a(part)} that cannot be read as examples and targets ({why}){uneven}: {_TAKEN}"
        ) from None


def _array(value: Any, what: str) -> NDArray[Any]:
    """Return numbers as an array: floats as float32, wide unsigned integers as int64."""
    try:
        values = _numpy(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"the {what} are {_a(value)} of unequal parts: make them equal, or give collate= to pad a batch"
        ) from None
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    return values.astype(np.int64) if values.dtype.kind == "u" and values.dtype != np.uint8 else values


def _numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if _is_frame(value) and value.ndim == 2 and len(kinds := {dtype.kind for dtype in value.dtypes}) > 1:
        return np.asarray(value.to_numpy(np.float32) if kinds <= set("fiub") else value.to_numpy())
    if isinstance(value, list | tuple) and value and all(isinstance(one, torch.Tensor) for one in value):
        return _numpy(torch.stack(list(value)))
    return np.asarray(value)


def _is_frame(value: Any) -> bool:
    """Say whether this is a DataFrame or a Series, of pandas or a similar library."""
    return hasattr(value, "to_numpy") and hasattr(value, "ndim") and hasattr(value, "dtypes")


def _is_hugging_face(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("column_names", "features", "with_format", "__len__"))


def _a(thing: Any) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def _are_labels(y: Any) -> bool:
    return isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "iu" and y.min() >= 0


def _classes(*targets: Any) -> int:
    """Return one more than the largest of whole-numbered targets; 0 for others, or if some are negative."""
    if not all(isinstance(y, np.ndarray) and y.dtype.kind in "iu" for y in targets):
        return 0
    known = [y[y != -100] for y in targets]  # the target that cross-entropy ignores
    ends = [(int(y.min()), int(y.max())) for y in known if y.size]
    return 0 if any(low < 0 for low, _ in ends) else 1 + max((high for _, high in ends), default=-1)


# --- examples of any kind, with a collate -------------------------------------------------------------------


def _collate_of(part: Any) -> Collate | None:
    """Return the collate_fn that a loader was given."""
    function = getattr(part, "collate_fn", None) if isinstance(part, DataLoader) else None
    collate: Collate | None = None if function is default_collate else function
    return collate


def _examples(part: Any, name: str) -> Sequence[Any]:
    """Return a sequence of examples: pairs of two lists, a torch Dataset, or a list of examples."""
    if isinstance(part, DataLoader):
        part = part.dataset
    if isinstance(part, tuple) and len(part) == 2:
        if len(part[0]) != len(part[1]):
            raise DataError(f"{name} has {len(part[0]):,} examples and {len(part[1]):,} targets")
        part = list(zip(*part, strict=True))
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, str | dict):
        raise DataError(f"{name} is {_a(part)} without a length and numbered examples: {_TAKEN}")
    if not len(part):
        raise DataError(f"there are no {name} examples")
    examples: Sequence[Any] = part
    return examples


def _collated(train: Any, test: Any, collate: Collate, name: str) -> Dataset:
    if not callable(collate):
        raise DataError(f"collate is {_a(collate)}: give a function collate(examples) -> (inputs, targets)")
    parts = {"train": _examples(train, "train"), "test": _examples(test, "test")}
    checksums, targets = {}, []
    for part, examples in parts.items():
        whole = [examples[i] for i in range(len(examples))]
        checksums[f"{name}/{part}"] = checksum(whole)
        targets.append(_single_labels(whole))
        for i, example in enumerate(whole):
            for _, value in trees.leaves(tuple(example) if isinstance(example, list) else example):
                numeric = isinstance(value, torch.Tensor | np.ndarray | float)
                if numeric and not np.isfinite(_numpy(value)).all():
                    raise DataError(f"{part} example {i} has NaN or infinity")
    (x, test_x), known = parts.values(), all(len(labels) for labels in targets)
    y, test_y = targets if known else (np.zeros(len(examples), np.int64) for examples in (x, test_x))
    classes = _classes(y, test_y) if known else 0
    return Dataset(name, x, y, test_x, test_y, classes, checksums=checksums, collate=collate)


def _single_labels(examples: list[Any]) -> NDArray[np.int64]:
    """Return the class of each example if all are pairs with one, and an empty array otherwise."""
    try:
        labels = np.array([int(y) for _, y in examples if np.asarray(y).dtype.kind in "iu"], np.int64)
    except (TypeError, ValueError):
        return np.empty(0, np.int64)
    return labels if len(labels) == len(examples) and labels.min() >= 0 else np.empty(0, np.int64)
