"""The user's own data, in whatever form they come, as a Dataset: arrays, tensors, DataFrames,
torch data sets.

Invariants: nothing is normalised and whole numbers stay whole (float64 becomes float32, the models'
precision); what cannot be trained on is a DataError of one sentence that says which part,
which rows and what would do.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from rpel.data import trees
from rpel.data.dataset import Dataset, check_finite, from_arrays
from rpel.data.files import DataError
from rpel.types import Integers

Collate = Callable[[list[Any]], tuple[Any, Any]]
NAME = "own"
_TAKEN = "it takes (x, y) arrays, a torch Dataset with a length, or a list with one of these per honest node"


def dataset(train: Any, test: Any, *, collate: Collate | None = None, name: str = NAME) -> Dataset:
    """A Dataset of the user's training and test data.

    train, test: a pair (x, y), where x and y are arrays, tensors, DataFrames, or tuples or dicts of them with
    a row an example; or a torch Dataset whose examples are pairs, or a loader, whose batches are drawn anew.
    collate(examples) -> (inputs, targets) makes batches of a list of examples that do not fit into arrays,
    such as texts of unequal length; then x and y may be lists, and a torch Dataset's examples anything.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> dataset(TensorDataset(x, y), (x.numpy(), y.numpy())).classes
    2
    >>> texts, marks = {"ids": np.zeros((3, 5), int)}, np.zeros((3, 5))
    >>> dataset((texts, marks), (texts, marks)).size
    3
    """
    if isinstance(train, Dataset):
        _check_given(train)
        content = (train.train_x, train.train_y, train.test_x, train.test_y)
        return replace(train, checksums=train.checksums or {train.name: checksum(content)})
    collate = collate or _loaders(train) or _loaders(test)
    if collate is not None:
        return _collated(train, test, collate, name)
    (x, y), (test_x, test_y) = (_arrays(part, where) for part, where in ((train, "train"), (test, "test")))
    _check_alike(x, test_x, "examples")
    _check_alike(y, test_y, "targets")
    if isinstance(x, np.ndarray) and all(isinstance(v, np.ndarray) and _labels(v) for v in (y, test_y)):
        return from_arrays((x, y), (test_x, test_y), name=name)
    checksums = {f"{name}/train": checksum((x, y)), f"{name}/test": checksum((test_x, test_y))}
    return Dataset(name, x, y, test_x, test_y, _classes(y, test_y), checksums=checksums)


def _check_given(data: Dataset) -> None:
    """What a Dataset that the user made must be, too."""
    if data.collate is not None:
        return
    for part, x, y in (("train", data.train_x, data.train_y), ("test", data.test_x, data.test_y)):
        _check_pair(part, x, y)
        for what, tree in (("examples", x), ("targets", y)):
            for where, values in trees.leaves(tree):
                if not isinstance(values, np.ndarray):
                    raise DataError(
                        f"the {part} {what}{where} of a Dataset are {_called(values)}, and not an array"
                    )
                if values.dtype.kind == "f":
                    check_finite(values, f"{part} {what}{where}")
    _check_alike(data.train_x, data.test_x, "examples")
    _check_alike(data.train_y, data.test_y, "targets")


def with_classes(data: Dataset) -> Dataset:
    """The Dataset with targets as cross-entropy takes them: bools, bytes and other whole numbers as int64.

    >>> x, y = np.ones((2, 1)), np.array([True, False])
    >>> with_classes(Dataset("ward", x, y, x, y)).classes
    2
    """
    targets = data.train_y, data.test_y
    if data.collate is not None or not any(_is_other(y) for tree in targets for _, y in trees.leaves(tree)):
        return data
    train_y, test_y = (trees.mapped(_whole, tree) for tree in targets)
    return replace(data, train_y=train_y, test_y=test_y, classes=data.classes or _classes(train_y, test_y))


def _is_other(values: Any) -> bool:
    """Whether these are whole numbers, and not int64."""
    return isinstance(values, np.ndarray) and values.dtype.kind in "biu" and values.dtype != np.int64


def _whole(values: Any) -> Any:
    return values.astype(np.int64) if _is_other(values) else values


def is_one_per_node(train: Any) -> bool:
    """Whether a list holds data sets, rather than examples or the pair (x, y)."""
    if not isinstance(train, list) or not train:
        return False
    return all(
        isinstance(one, TorchDataset | DataLoader)
        or (isinstance(one, tuple | list) and len(one) == 2 and np.ndim(_any_array(one[1])) >= 1)
        for one in train
    )


def per_node(
    train: Sequence[Any], test: Any, honest: int, *, collate: Collate | None = None
) -> tuple[Dataset, list[Integers]]:
    """One Dataset of all nodes' examples, and which of them each node holds; nodes may hold unequally many.

    >>> x, y = np.zeros((3, 2)), np.array([0, 1, 1])
    >>> [part.tolist() for part in per_node([(x, y), (x[:2], y[:2])], (x, y), 2)[1]]
    [[0, 1, 2], [3, 4]]
    """
    if len(train) != honest:
        raise DataError(
            f"train has {len(train)} data sets, but there are {honest} honest nodes (nodes − byzantine)"
        )
    collate = collate or next(filter(None, map(_loaders, train)), None)
    if collate is not None:
        each = [list(_examples(one, f"train[{i}]")) for i, one in enumerate(train)]
        whole: Any = [example for examples in each for example in examples]
        sizes = [len(examples) for examples in each]
    else:
        parts = [_arrays(one, f"train[{i}]") for i, one in enumerate(train)]
        for i, (x, y) in enumerate(parts):
            _check_alike(parts[0][0], x, "examples", ("train[0]", f"train[{i}]"))
            _check_alike(parts[0][1], y, "targets", ("train[0]", f"train[{i}]"))
        xs, ys = zip(*parts, strict=True)
        whole = tuple(trees.mapped(lambda *values: np.concatenate(values), *group) for group in (xs, ys))
        sizes = [len(trees.first(y)) for y in ys]
    if min(sizes) == 0:
        raise DataError("each honest node needs at least one example")
    data, ends = dataset(whole, test, collate=collate), np.cumsum(sizes)
    nodes = hashlib.sha256(str(ends.tolist()).encode()).hexdigest()
    return replace(data, checksums={**data.checksums, "own/nodes": nodes}), np.split(
        np.arange(ends[-1]), ends[:-1]
    )


# --- arrays -------------------------------------------------------------------------------------------------


def _arrays(part: Any, name: str) -> tuple[Any, Any]:
    """(examples, targets) as arrays, or tuples or dicts of arrays."""
    if isinstance(part, DataLoader):
        part = part.dataset
    if isinstance(part, TensorDataset):
        part = part.tensors if len(part.tensors) == 2 else (part.tensors[:-1], part.tensors[-1])
    if part is None or isinstance(part, dict | str) or _is_frame(part):
        raise DataError(f"{name} is {_called(part)}, and not examples with their targets: {_TAKEN}")
    if not isinstance(part, tuple | list) or len(part) != 2:
        part = _stacked(part, name)
    x, y = (
        trees.mapped(lambda value, what=what: array(value, f"{name} {what}"), values)
        for values, what in zip(part, ("examples", "targets"), strict=True)
    )
    _check_pair(name, x, y)
    return x, y


def _stacked(part: Any, name: str) -> tuple[Any, Any]:
    """The examples of a torch Dataset, all of them."""
    try:
        pairs = [part[i] for i in range(len(part))]
        xs, ys = zip(*((x, y) for x, y in pairs), strict=True)
        stack = lambda *values: np.stack([_any_array(value) for value in values])  # noqa: E731
        return trees.mapped(stack, *xs), trees.mapped(stack, *ys)
    except Exception as error:  # a data set's code may be anything
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        uneven = " (examples of unequal size need a collate=)" if "same shape" in why else ""
        raise DataError(
            f"{name} is {_called(part)} that cannot be read as examples and targets ({why}){uneven}: {_TAKEN}"
        ) from None


def _called(thing: Any) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def array(value: Any, what: str) -> NDArray[Any]:
    """Numbers as an array, checked: finite, at least one row; float64 as float32."""
    try:
        values = _any_array(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"the {what} are {_called(value)} of unequal parts: make them equal, or give collate= to pad a "
            "batch"
        ) from None
    if values.dtype.kind not in "fiub":
        kinds = "text" if values.dtype.kind in "OUS" else str(values.dtype)
        raise DataError(f"the {what} are {kinds}, not numbers: encode them first")
    if not values.ndim or not len(values):
        raise DataError(f"there are no {what}")
    if values.dtype.kind == "f":
        check_finite(values, what)
        return values.astype(np.float32)
    return values.astype(np.int64) if values.dtype.kind == "u" and values.dtype != np.uint8 else values


def _any_array(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if _is_frame(value) and value.ndim == 2:
        kinds = {dtype.kind for dtype in value.dtypes}
        return np.asarray(
            value.to_numpy(np.float32) if kinds <= set("fiub") and len(kinds) > 1 else value.to_numpy()
        )
    if isinstance(value, list | tuple) and value and all(isinstance(one, torch.Tensor) for one in value):
        return _any_array(torch.stack(list(value)))
    return np.asarray(value)


def _is_frame(value: Any) -> bool:
    """A DataFrame or a Series, of pandas or what is like it."""
    return (
        hasattr(value, "to_numpy")
        and hasattr(value, "ndim")
        and (hasattr(value, "dtypes") or hasattr(value, "dtype"))
    )


def _labels(y: NDArray[Any]) -> bool:
    return y.ndim == 1 and y.dtype.kind in "iu" and y.min() >= 0


def _classes(*targets: Any) -> int:
    """One more than the largest of whole-numbered targets; 0 where they are something else,
    or may be negative."""
    if not all(isinstance(y, np.ndarray) and y.dtype.kind in "iu" for y in targets):
        return 0
    known = [y[y != -100] for y in targets]  # the target that cross-entropy leaves out
    known = [y for y in known if y.size]
    return 1 + max((int(y.max()) for y in known), default=-1) if all(y.min() >= 0 for y in known) else 0


def _check_pair(name: str, x: Any, y: Any) -> None:
    """As many examples as targets."""
    sizes = {
        where: len(value) for where, value in (*trees.leaves(x, "examples"), *trees.leaves(y, "targets"))
    }
    if len(set(sizes.values())) > 1:
        counts = " and ".join(f"{size:,} {where}" for where, size in sizes.items())
        raise DataError(f"{name} has {counts}, which do not belong together")


def _check_alike(a: Any, b: Any, what: str, names: tuple[str, str] = ("train", "test")) -> None:
    """DataError unless both have the same form, the same shapes behind the rows,
    and the same kind of numbers."""
    ours, theirs = (dict(trees.leaves(tree)) for tree in (a, b))
    if list(ours) != list(theirs):
        parts = (", ".join(part) or "one array" for part in (ours, theirs))
        raise DataError("the {} {what} are {}, the {} {what} {}".format(*_mixed(names, parts), what=what))
    for where, one in ours.items():
        other = theirs[where]
        if one.shape[1:] != other.shape[1:]:
            raise DataError(
                f"{names[0]} {what}{where} have the shape {one.shape[1:]} and {names[1]} {what} "
                f"{other.shape[1:]}"
            )
        if one.dtype != other.dtype and not {one.dtype.kind, other.dtype.kind} <= set("iu") - _bytes(
            one, other
        ):
            first, second = (
                f"the {name} {what}{where} are {part.dtype} from {part.min():g} to {part.max():g}"
                for name, part in zip(names, (one, other), strict=True)
            )
            raise DataError(f"{first}, {second}: both must be of one kind")


def _bytes(*arrays: NDArray[Any]) -> set[str]:
    """Bytes beside other whole numbers are pixels beside something else."""
    return {"u"} if any(values.dtype == np.uint8 for values in arrays) else set()


def _mixed(names: tuple[str, str], texts: Iterator[str]) -> list[str]:
    return [word for pair in zip(names, texts, strict=True) for word in pair]


# --- examples of any kind, with a collate -------------------------------------------------------------------


def _loaders(part: Any) -> Collate | None:
    """The collate_fn that a loader was given."""
    function = getattr(part, "collate_fn", None) if isinstance(part, DataLoader) else None
    collate: Collate | None = None if function is default_collate else function
    return collate


def _examples(part: Any, name: str) -> Sequence[Any]:
    """What has a length and numbers: pairs of a pair of lists, a torch Dataset, or a list of examples."""
    if isinstance(part, DataLoader):
        part = part.dataset
    if isinstance(part, tuple) and len(part) == 2:
        x, y = part
        if len(x) != len(y):
            raise DataError(
                f"{name} has {len(x):,} examples and {len(y):,} targets, which do not belong together"
            )
        part = list(zip(x, y, strict=True))
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, str | dict):
        raise DataError(f"{name} is {_called(part)} without a length and numbered examples: {_TAKEN}")
    if not len(part):
        raise DataError(f"there are no {name} examples")
    examples: Sequence[Any] = part
    return examples


def _collated(train: Any, test: Any, collate: Collate, name: str) -> Dataset:
    if not callable(collate):
        raise DataError(
            f"collate is {_called(collate)}: give a function collate(examples) -> (inputs, targets)"
        )
    x, test_x = _examples(train, "train"), _examples(test, "test")
    checksums, targets = {}, []
    for part, examples in (("train", x), ("test", test_x)):
        whole = [examples[i] for i in range(len(examples))]
        checksums[f"{name}/{part}"] = checksum(whole)
        _check_floats(whole, part)
        targets.append(_single_labels(whole))
    y, test_y = (
        targets
        if all(len(target) for target in targets)
        else (np.zeros(len(e), np.int64) for e in (x, test_x))
    )
    classes = _classes(y, test_y) if all(len(target) for target in targets) else 0
    return Dataset(name, x, y, test_x, test_y, classes, checksums=checksums, collate=collate)


def _single_labels(examples: list[Any]) -> NDArray[np.int64]:
    """The class of each example, where it is a pair with one; else nothing."""
    try:
        labels = np.array([int(y) for _, y in examples if np.asarray(y).dtype.kind in "iu"], np.int64)
    except (TypeError, ValueError):
        return np.empty(0, np.int64)
    return labels if len(labels) == len(examples) and labels.min() >= 0 else np.empty(0, np.int64)


def _check_floats(examples: list[Any], part: str) -> None:
    for i, example in enumerate(examples):
        for _, value in trees.leaves(tuple(example) if isinstance(example, list) else example):
            values = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
            if (
                isinstance(values, np.ndarray | float)
                and np.asarray(values).dtype.kind == "f"
                and not np.isfinite(values).all()
            ):
                raise DataError(f"{part} example {i} has NaN or infinity")


def checksum(thing: Any) -> str:
    """SHA-256 of numbers in any arrangement, and of how things other than numbers are written.

    >>> checksum(np.zeros(2)) == checksum(np.zeros(2)), checksum({"a": 1}) == checksum({"a": 2})
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _content(thing):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _content(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, torch.Tensor):
        thing = _any_array(thing)
    if isinstance(thing, np.ndarray):
        yield f"{thing.dtype} {thing.shape}".encode()
        yield np.ascontiguousarray(thing).tobytes()
    elif isinstance(thing, dict):
        yield repr(list(thing)).encode()
        yield from (part for value in thing.values() for part in _content(value))
    elif isinstance(thing, tuple | list):
        yield f"{len(thing)}".encode()
        yield from (part for value in thing for part in _content(value))
    else:
        yield repr(thing).encode()
