"""Arrays of any kind: which kernels take them, how they get there and back, and where a result is delivered."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import compiled

Array = Any
"""A NumPy array or a torch tensor; kernels of the right kind are chosen by :func:`kernels_for`."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def is_tensor(x: Array) -> bool:
    """True for torch tensors, without importing torch for anybody else."""
    return hasattr(x, "detach")


def kernels_for(table: Array) -> ModuleType:
    """Compiled kernels for NumPy arrays, tensor kernels for torch tensors (those left on another device)."""
    if is_tensor(table):
        from rpel.kernels import tensor

        return tensor
    return compiled


def to_kernels(x: Array, name: str) -> tuple[Array, Any]:
    """The array in a form the kernels take, and the way back to the caller's kind and dtype.

    Tensors in main memory are lent to the compiled kernels without a copy; half precision is computed in float32.
    """
    if is_tensor(x):
        return _from_torch(x, name)
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise ValueError(f"{name} needs an array of floats, not {kind}")
    dtype = x.dtype
    wide = np.ascontiguousarray(x, dtype=np.float64 if dtype.itemsize >= 8 else np.float32)
    return wide, lambda result: result.astype(dtype, copy=False)


def _from_torch(x: Array, name: str) -> tuple[Array, Any]:
    import torch

    if not x.is_floating_point():
        raise ValueError(f"{name} needs a tensor of floats, not {x.dtype}")
    dtype, wide = x.dtype, x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()
    if wide.device.type == "cpu":
        return wide.numpy(), lambda result: torch.from_numpy(result).to(dtype)
    return wide, lambda result: result.to(dtype)


def deliver(compute: Callable[[Array | None], Array], out: Array | None, back: Callable[[Array], Array]) -> Array:
    """Compute into ``out`` where the kernels can write there, else compute and copy; without ``out`` a new array."""
    if out is None:
        return back(compute(None))
    place = out.detach().numpy() if is_tensor(out) and out.device.type == "cpu" and out.dtype.itemsize >= 4 else out
    if is_tensor(place) or place.dtype.itemsize >= 4:
        compute(place)
    else:
        out[...] = back(compute(None))
    return out


def lend(array: Any, table: Array) -> Array:
    """A NumPy array where the table is: itself, or a tensor on the table's device."""
    if not is_tensor(table):
        return array
    import torch

    return torch.as_tensor(array, device=table.device)


def host(x: Array) -> Any:
    """A small result of the kernels as a NumPy array."""
    return x.cpu().numpy() if is_tensor(x) else np.asarray(x)


def empty_like(table: Array, rows: int) -> Array:
    """An uninitialised (rows, d) array of the table's kind."""
    return (
        table.new_empty((rows, table.shape[1])) if is_tensor(table) else np.empty((rows, table.shape[1]), table.dtype)
    )


def nbytes(table: Array) -> int:
    return int(table.shape[0]) * int(table.shape[1]) * int(table.dtype.itemsize)


def as_table(x: Array, name: str) -> tuple[Array, Integers]:
    """An array (…, m, d) as a table of all its rows (h·m, d) and the index (h, m) of who has which.

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
    """The index as int64 (h, m); −1 only at the tail, every other entry a row of the table."""
    rows = host(index)
    if table.ndim != 2 or rows.ndim != 2 or rows.shape[1] < 1:
        raise ValueError(f"{name} needs a table (n, d) and an index (h, m), not {tuple(table.shape)} and {rows.shape}")
    if rows.dtype.kind not in "iu":
        raise ValueError(f"{name} needs an index of integers, not {rows.dtype}")
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if rows.size and (rows.max() >= len(table) or rows.min() < -1):
        raise ValueError(f"{name}: index entries lie between −1 and {len(table) - 1}, not {rows.min()} to {rows.max()}")
    absent = rows < 0
    if absent[:, 0].any() or (absent[:, :-1] & ~absent[:, 1:]).any():
        raise ValueError(f"{name}: −1 (absent) may stand only at the tail of an index row, never for the own model")
    return rows
