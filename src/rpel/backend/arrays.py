"""Array operations that are no primitives, written once for NumPy arrays and tensors of any device.

Each takes the kind of array from its input. Indices and factors come from the host as NumPy arrays.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import array_api_compat
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rpel.types import Floats, Integers

if TYPE_CHECKING:
    import torch

WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices."""
BLOCK = 4_000_000  # numbers of a temporary: 32 MB in float64


def namespace(x: Floats) -> ModuleType:
    """Return the array namespace of x: NumPy's or torch's, as the array API standard has it.

    >>> namespace(np.zeros(2)).sum(np.ones(2))
    np.float64(2.0)
    """
    return array_api_compat.array_namespace(x)


def is_tensor(x: object) -> bool:
    """Say whether x is a torch tensor, without importing torch.

    >>> is_tensor(np.zeros(2))
    False
    """
    return array_api_compat.is_torch_array(x)


def on_host(x: Floats) -> bool:
    """Say whether x lies in main memory."""
    return not is_tensor(x) or str(array_api_compat.device(x)) == "cpu"


def empty(rows: int, like: Floats) -> Floats:
    """(rows, d) Allocate uninitialised rows of the kind of an array (…, d)."""
    shape = (rows, like.shape[-1])
    made: Floats = namespace(like).empty(shape, dtype=like.dtype, device=array_api_compat.device(like))
    return made


def zeros(shape: tuple[int, ...], like: Floats, wide: bool = False) -> Floats:
    """Allocate zeros of the kind of an array; ``wide``: in float64, where its device has that."""
    dtype = wide_dtype(like) if wide else like.dtype
    made: Floats = namespace(like).zeros(shape, dtype=dtype, device=array_api_compat.device(like))
    return made


def wide_dtype(like: Floats) -> type:
    """Return the widest float type of an array's device: float64, and float32 on mps."""
    xp, device = namespace(like), str(array_api_compat.device(like)).partition(":")[0]
    dtype: type = xp.float32 if device in WITHOUT_FLOAT64 else xp.float64
    return dtype


def copy(x: Floats) -> Floats:
    """Return the same numbers in memory of their own."""
    made: Floats = namespace(x).asarray(x, copy=True)
    return made


def take(x: Floats, rows: Integers | NDArray[np.bool_], out: Floats | None = None) -> Floats:
    """(k, …) Copy some rows, given by numbers or marks, into ``out`` if given.

    >>> take(np.array([[1.0], [2.0]]), np.array([1, 1, 0])).tolist()
    [[2.0], [2.0], [1.0]]
    """
    if not is_tensor(x):
        return np.take(x, _numbers(rows), axis=0, out=out, mode="raise" if out is None else "clip")
    chosen: Floats = namespace(x).index_select(x, 0, lend(_numbers(rows), x), out=out)
    return chosen


def put(x: Floats, rows: Integers | NDArray[np.bool_], values: Floats) -> None:
    """Set x[rows] = values (k, …), rows given by numbers or marks.

    >>> x = np.zeros((3, 1)); put(x, np.array([True, False, True]), np.ones((2, 1))); x[:, 0]
    array([1., 0., 1.])
    """
    x[lend(_numbers(rows), x)] = namespace(x).astype(lend(values, x), x.dtype, copy=False)


def _numbers(rows: Integers | NDArray[np.bool_]) -> Integers:
    given = np.asarray(rows)
    return np.flatnonzero(given) if given.dtype == bool else given.astype(np.int64)


def lend(values: Floats, like: Floats) -> Floats:
    """Move values from the host to where an array lies."""
    if not is_tensor(like):
        return np.asarray(values)
    moved: Floats = namespace(like).as_tensor(values).to(array_api_compat.device(like))
    return moved


def column_blocks(rows: int, d: int) -> Iterator[slice]:
    """Cut d columns so that a temporary of the given number of rows stays below `BLOCK` numbers.

    >>> [(part.start, part.stop) for part in column_blocks(2_000_000, 5)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, BLOCK // max(1, rows))
    return (slice(start, min(d, start + step)) for start in range(0, d, step))


# --- random numbers -----------------------------------------------------------------------------------------


def standard_normal(rng: Generator, shape: tuple[int, ...], like: Floats) -> Floats:
    """Draw N(0, 1) of the kind of an array: from ``rng`` in main memory, seeded by it on a device."""
    if on_host(like):
        single = str(like.dtype).endswith("float32")
        return lend(rng.standard_normal(shape, dtype=np.float32 if single else np.float64), like)
    device, xp = array_api_compat.device(like), namespace(like)
    drawn: Floats = xp.randn(shape, dtype=like.dtype, device=device, generator=device_generator(rng, like))
    return drawn


def uniform(rng: Generator, size: int, like: Floats) -> Floats:
    """(size,) Draw from [0, 1) in the widest type: from ``rng`` in main memory, seeded by it on a device."""
    if on_host(like):
        return lend(rng.random(size), like)
    device, xp = array_api_compat.device(like), namespace(like)
    drawn: Floats = xp.rand(
        size, dtype=wide_dtype(like), device=device, generator=device_generator(rng, like)
    )
    return drawn


def device_generator(rng: Generator, like: Floats) -> "torch.Generator | None":
    """Return a generator on the device of an array, seeded by a stream of `rpel.randomness`."""
    import torch

    return torch.Generator(array_api_compat.device(like)).manual_seed(int(rng.integers(2**63)))
