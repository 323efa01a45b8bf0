"""The compiled twin of `plain`: same functions, same meaning, all cores. What they compute is written there.

This file only checks arguments, brings them into the form the kernels expect, and hands them on: distances and
neighbours to `distances`, coordinates to `coordinates`, sums to `sums`. Results do not depend on the
number of threads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import coordinates, distances, sums
from rpel.kernels.arguments import (
    Operation,
    check_index,
    check_mix,
    check_operation,
    check_table,
    result_array,
)
from rpel.kernels.pool import set_threads, threads
from rpel.types import Floats, Integers

__all__ = [
    "combine",
    "coordinatewise",
    "distances_to",
    "finite_rows",
    "moments",
    "nearest",
    "prepare",
    "set_threads",
    "squared_distances",
    "threads",
]


def _plain(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Contiguous, of this type and writable, copied if need be: numba compiles read-only arrays a second time."""
    return np.array(array, dtype, order="C", copy=None if array.flags.writeable else True)


def _int64(index: Integers) -> NDArray[np.int64]:
    return _plain(index, np.int64)


def finite_rows(table: Floats) -> NDArray[np.bool_]:
    """(n,) True where every entry of the row is finite.

    >>> finite_rows(np.array([[1.0, 2.0], [np.inf, 0.0]]))
    array([ True, False])
    """
    check_table(table)
    return sums.finite_rows(table)


def squared_distances(table: Floats, index: Integers) -> Floats:
    """(h, m, m) squared Euclidean distances among the rows of each victim, float64.

    >>> squared_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
    array([[[ 0., 25.], [25.,  0.]]])
    """
    check_table(table)
    check_index(table, index)
    return distances.among(table, _int64(index))


def distances_to(table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
    """(h, m) squared distances of the rows to an origin: None is zero, (d,) floats a point, (h,) integers rows,
    (h, d) floats a point for each victim.

    >>> distances_to(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1], [1, -1]]), None)
    array([[ 0., 25.], [25.,  0.]])
    """
    check_table(table)
    check_index(table, index, absent=True)
    h, d = len(index), table.shape[1]
    point: NDArray[Any] = np.zeros(d) if origin is None else origin
    if point.dtype.kind in "iu":
        check_index(table, point.reshape(h, 1))
        return distances.to_rows(table, _int64(index), _int64(point))
    if point.ndim == 2:
        points = _plain(point, point.dtype).reshape(h * d)
        return distances.to_rows(table, _int64(index), len(table) + np.arange(h), points)
    return distances.to_point(table, _int64(index), _plain(point, np.float64).reshape(d))


def nearest(squared: Floats, k: int) -> NDArray[np.int32]:
    """(h, m, k) for every anchor the k nearest columns, itself included, in ascending order of column.

    >>> nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), 2)
    array([[[0, 2], [1, 2], [0, 2]]], dtype=int32)
    """
    _, m, last = squared.shape
    if last != m or not 1 <= k <= m:
        raise ValueError(f"distances must be (h, m, m) and k within 1 … m, not {squared.shape} and {k}")
    return distances.nearest(_plain(squared, np.float64), k)


def combine(table: Floats, index: Integers, weights: Floats, out: Floats | None = None) -> Floats:
    """(h, d) weighted sums Σ_j weights[i, j] · table[index[i, j]]; weight 0 and index −1 are skipped, never read.

    >>> combine(np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[0, 1]]), np.array([[2.0, 0.0]]))
    array([[2., 4.]])
    """
    check_table(table)
    check_index(table, index, absent=True)
    factors = _plain(weights, np.float64).reshape(index.shape)
    return sums.combine(table, _int64(index), factors, result_array(table, len(index), out))


def coordinatewise(
    table: Floats,
    index: Integers,
    operation: Operation,
    f: int = 0,
    mix: NDArray[Any] | int | None = None,
    out: Floats | None = None,
) -> Floats:
    """(h, d) trimmed_mean, median or meamed of each coordinate, after mixing; see `plain.coordinatewise`.

    Weights of a float `mix` beyond ±1 may overflow float64 values near its end; integers and float32 never give NaN.

    >>> table = np.array([[0.0], [1.0], [2.0], [9.0]])
    >>> coordinatewise(table, np.array([[0, 1, 2, 3]]), "meamed", 1)
    array([[1.]])
    """
    check_table(table)
    check_index(table, index)
    check_operation(operation, check_mix(mix, *index.shape), f)
    result = result_array(table, len(index), out)
    if isinstance(mix, int):
        return coordinates.nearest_mixed(table, _int64(index), operation, f, mix, result)
    if mix is not None:
        mix = _plain(mix, np.float64 if mix.dtype.kind == "f" else np.int32)
    return coordinates.coordinatewise(table, _int64(index), operation, f, mix, result)


def moments(
    table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Floats | None = None
) -> Floats:
    """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows of index[i].

    >>> moments(np.array([[1.0], [3.0]]), np.array([[0, 1]]), np.array([1.0]), np.array([0.0]))
    array([[2.]])
    """
    check_table(table)
    check_index(table, index, absent=True)
    h = len(index)
    means = _plain(mean_factor, np.float64).reshape(h)
    deviations = _plain(std_factor, np.float64).reshape(h)
    return sums.moments(table, _int64(index), means, deviations, result_array(table, h, out))


def prepare(m: int, f: int, operation: Operation, mixed: bool, dtype: Any, values: float = coordinates.LARGE) -> None:
    """Have the kernels for m rows and this operation ready: loaded from disk or compiled now (a few seconds at most).

    With `mixed` the distances and neighbours before it too. For few `values` (victims · m · d, in all rounds) nothing
    happens: the kernels for any m will do.

    >>> prepare(3, 1, "trimmed_mean", mixed=True, dtype=np.float32)
    """
    check_operation(operation, m, f)
    if values < coordinates.LARGE:
        return
    coordinates.prepare(m, f, operation, dtype)
    if mixed:
        distances.prepare(dtype)
        distances.nearest(np.zeros((1, m, m)), m - f)
