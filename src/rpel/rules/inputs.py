"""Inputs and results of rules: NumPy arrays, torch tensors, and lists of arrays, tensors or state_dicts.

Tensors in main memory are lent to the numba backend without a copy; half precision is computed in float32.
Integers in a state_dict (BatchNorm's count of batches) are no part of the vectors: the result has the first
item's.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from rpel.backend.arrays import is_tensor, namespace
from rpel.backend.base import Backend, backend
from rpel.types import Integers

Array = Any
"""A NumPy array or a torch tensor."""


def is_numeric(x: Array) -> bool:
    """Say whether an array or a tensor holds integers or floats."""
    return bool(namespace(x).isdtype(x.dtype, ("integral", "real floating")))


def kernels_for(table: Array) -> Backend:
    """Return numba for NumPy arrays, and torch for tensors, which are on another device."""
    return backend("torch", str(table.device)) if is_tensor(table) else backend("numba")


def to_kernels(x: Array, name: str) -> Array:
    """Return x as the kernels take it: contiguous float32 or float64, a tensor only on another device."""
    if not _is_floating(x):
        raise ValueError(f"{name} needs an array or a tensor of floats, not {_kind(x)}")
    if not is_tensor(x):
        return np.ascontiguousarray(x, dtype=np.float64 if x.dtype.itemsize >= 8 else np.float32)
    single = x.detach() if x.element_size() >= 4 else x.detach().float()
    return single.contiguous().numpy() if x.device.type == "cpu" else single.contiguous()


def _is_floating(x: Any) -> bool:
    is_array = is_tensor(x) or isinstance(x, np.ndarray)
    return is_array and bool(namespace(x).isdtype(x.dtype, "real floating"))


def _kind(x: Any) -> str:
    return str(getattr(x, "dtype", type(x).__name__))


def from_kernels(result: Array, like: Array) -> Array:
    """Return a result of the kernels in the kind and dtype of ``like``."""
    if not is_tensor(like):
        return result.astype(like.dtype, copy=False)
    import torch

    return (result if is_tensor(result) else torch.from_numpy(result)).to(like.dtype)


def writable(out: Array | None) -> Array | None:
    """Return ``out`` as the kernels can write to it; None if they cannot, or if there is none."""
    if out is None or (is_tensor(out) and out.device.type != "cpu"):
        return out
    if out.dtype.itemsize < 4:
        return None
    return out.detach().numpy() if is_tensor(out) else out


def deliver(result: Array, out: Array | None, buffer: Array | None, like: Array) -> Array:
    """Return a result as the caller wants it: in ``out``, or as a new array of the kind of ``like``."""
    if out is None:
        return from_kernels(result, like)
    if buffer is None:  # the kernels could not write to it
        out[...] = from_kernels(result, out)
    return out


def host(x: Array) -> Any:
    """Return a small result of the kernels as a NumPy array."""
    return x.cpu().numpy() if is_tensor(x) else np.asarray(x)


def as_table(x: Array, name: str) -> tuple[Array, Integers]:
    """Turn x (…, m, d) into a table of all its rows (h·m, d) and the index (h, m) of each victim's rows.

    >>> table, index = as_table(np.zeros((2, 3, 5)), "mean")
    >>> table.shape, index.tolist()
    ((6, 5), [[0, 1, 2], [3, 4, 5]])
    """
    if x.ndim < 2:
        raise ValueError(f"{name} needs an array (…, m, d), not one of shape {tuple(x.shape)}")
    *batch, m, d = x.shape
    h = int(np.prod(batch, dtype=np.int64))
    return x.reshape(h * m, d), np.arange(h * m, dtype=np.int64).reshape(h, m)


def check_index(name: str, table: Array, index: Array) -> Integers:
    """Return the index as int64 (h, m): −1 only at the tail, every other entry a row of the table."""
    rows = host(index)
    if table.ndim != 2 or rows.ndim != 2 or rows.shape[1] < 1 or rows.dtype.kind not in "iu":
        given = f"{tuple(table.shape)} and {rows.shape} {rows.dtype}"
        raise ValueError(f"{name} needs a table (n, d) and an index (h, m) of integers, not {given}")
    rows, last = np.ascontiguousarray(rows, dtype=np.int64), len(table) - 1
    if rows.size and (rows.max() > last or rows.min() < -1):
        found = f"{rows.min()} to {rows.max()}"
        raise ValueError(f"{name}: index entries must lie between −1 and {last}, not {found}")
    absent = rows < 0
    if absent[:, 0].any() or (absent[:, :-1] & ~absent[:, 1:]).any():
        where = "only at the tail of an index row, never for the own model"
        raise ValueError(f"{name}: −1 (absent) may stand {where}")
    return rows


# --- lists of arrays, tensors or state_dicts ----------------------------------------------------------------


def stack(items: Sequence[Any], name: str) -> tuple[Array, Callable[[Array], Any]]:
    """Stack m items to (m, d), and return with them the function from a vector (d,) to such an item.

    >>> x, restore = stack([{"w": np.ones((2, 2))}, {"w": np.zeros((2, 2))}], "mean")
    >>> x.shape, restore(x[0])["w"].shape
    ((2, 4), (2, 2))
    """
    if not items:
        raise ValueError(f"{name} needs at least one vector")
    rows = [_leaves(item) for item in items]
    for leaf in (leaf for row in rows for leaf in row.values()):
        if not (is_tensor(leaf) or isinstance(leaf, np.ndarray)):
            raise ValueError(
                f"{name} takes lists of arrays, tensors or dictionaries of them, not {_kind(leaf)}"
            )
    floats = [key for key, leaf in rows[0].items() if _is_floating(leaf)]
    shapes = [{key: tuple(leaf.shape) for key, leaf in row.items()} for row in rows]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{name} needs items that all have the same entries of the same shapes")
    if not floats:
        raise ValueError(f"{name} needs items with floats in them")
    xp = namespace(rows[0][floats[0]])
    stacked = xp.stack([xp.concat([xp.reshape(row[key], (-1,)) for key in floats]) for row in rows])

    def restore(vector: Array) -> Any:
        start, parts = 0, dict(rows[0])
        for key in floats:
            size = prod(shapes[0][key])
            parts[key] = from_kernels(vector[start : start + size].reshape(shapes[0][key]), rows[0][key])
            start += size
        first = items[0]
        if isinstance(first, Mapping):
            made = type(first)()
            made.update(parts)  # type: ignore[attr-defined]
            return made
        return type(first)(parts.values()) if isinstance(first, list | tuple) else parts[None]

    return stacked, restore


def _leaves(item: Any) -> dict[Any, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, list | tuple) else {None: item}
