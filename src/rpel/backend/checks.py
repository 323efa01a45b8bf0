"""What the NumPy backends accept, checked before a kernel that has no bounds checks moves a pointer."""

import numpy as np

from rpel.backend.base import OPERATIONS
from rpel.types import Floats, Integers, Mix, Out


def check_table(table: Floats) -> None:
    """Require a C-contiguous (n, d) table of float32 or float64.

    >>> check_table(np.zeros((2, 3), np.float32))
    """
    if table.ndim != 2 or table.dtype not in (np.float32, np.float64) or not table.flags.c_contiguous:
        raise ValueError(
            f"table must be a C-contiguous (n, d) float32 or float64 array, not {describe(table)}"
        )


def check_index(table: Floats, index: Integers, absent: bool = False) -> None:
    """Require a table, and an (h, m) integer index of its rows, or −1 where ``absent`` allows it.

    >>> check_index(np.zeros((2, 3)), np.array([[0, 1]]))
    """
    check_table(table)
    if index.ndim != 2 or index.dtype.kind not in "iu":
        raise ValueError(f"index must be an (h, m) integer array, not {describe(index)}")
    check_range("index", index, -1 if absent else 0, len(table))


def check_range(name: str, values: Integers, low: int, high: int) -> None:
    """Require that every entry lies in [low, high).

    >>> check_range("index", np.array([0, 3]), 0, 3)
    Traceback (most recent call last):
    ValueError: index holds 3, outside 0 … 2
    """
    if values.size:
        least, most = int(values.min()), int(values.max())
        if least < low or most >= high:
            raise ValueError(f"{name} holds {least if least < low else most}, outside {low} … {high - 1}")


def check_operation(operation: str, m: int, f: int) -> None:
    """Require a known operation that leaves at least one of m values.

    >>> check_operation("trimmed_mean", 4, 2)
    Traceback (most recent call last):
    ValueError: trimmed_mean with f=2 leaves nothing of 4 values
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, not {operation!r}")
    dropped = {"trimmed_mean": 2 * f, "median": 0, "meamed": f}[operation]
    if m < 1 or f < 0 or dropped >= m:
        raise ValueError(f"{operation} with f={f} leaves nothing of {m} values")


def check_mix(mix: Mix, h: int, m: int) -> int:
    """Return the number of values per coordinate after mixing, m′.

    >>> check_mix(None, 5, 3), check_mix(np.zeros((5, 2, 3)), 5, 3), check_mix(np.zeros((5, 4, 1), int), 5, 3)
    (3, 2, 4)
    """
    if mix is None:
        return m
    if isinstance(mix, int):
        if not 1 <= mix <= m:
            raise ValueError(f"mix must be within 1 … {m} nearest rows, not {mix}")
        return m
    if mix.ndim != 3 or len(mix) != h or mix.shape[2] < 1 or (mix.dtype.kind == "f" and mix.shape[2] != m):
        raise ValueError(f"mix must be integer ({h}, m', k) or float ({h}, m', {m}), not {describe(mix)}")
    if mix.dtype.kind in "iu":
        check_range("mix", mix, 0, m)
    return int(mix.shape[1])


def result_array(table: Floats, h: int, out: Out) -> Floats:
    """Return ``out`` when it fits, else a new (h, d) array of the table's dtype.

    >>> result_array(np.zeros((2, 3), np.float32), 4, None).shape
    (4, 3)
    """
    if out is None:
        return np.empty((h, table.shape[1]), table.dtype)
    if out.shape != (h, table.shape[1]) or out.dtype != table.dtype or not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous {(h, table.shape[1])} {table.dtype}, not {describe(out)}")
    if np.may_share_memory(out, table):
        raise ValueError("out must not share memory with the table: victims still read the rows")
    return out


def describe(array: Floats) -> str:
    """Return shape and dtype for a message.

    >>> describe(np.zeros(3))
    '(3,) float64'
    """
    return f"{array.shape} {array.dtype}"
