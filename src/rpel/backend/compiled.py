"""The compiled backend: the eleven primitives on NumPy arrays, by numba, on all threads.

Distances and neighbours are in `distances`, operations on coordinates in `coordinates`, sums and moments of
rows in `rows`; the local step and sums over nodes are here. `rpel.backend.base` says what each primitive
means, and `rpel.backend.plain` has examples.

Arguments are checked before a kernel runs: kernels have no bounds checks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rpel.backend import coordinates, distances, rows, threads
from rpel.backend.base import Backend, Operation
from rpel.backend.checks import check_index, check_mix, check_operation, check_table, result_array
from rpel.backend.compile import compiled
from rpel.backend.distances import nearest
from rpel.types import Floats, Integers, Mix, Out

SUM_COLUMNS = 1024  # whose sums stay in the first cache
CACHED_VALUES = 1 << 18  # that a core keeps at hand
UNIT_COLUMNS = 128  # columns that one thread takes at a time
SMALL_WORK = 1 << 16  # values below which waking a thread costs more than it saves


def _contiguous(array: Floats, dtype: DTypeLike) -> Floats:
    """Return a contiguous, writable array of this type, copied if necessary.

    numba compiles a second version for read-only arrays.
    """
    return np.array(array, dtype, order="C", copy=None if array.flags.writeable else True)


def _int64(index: Integers) -> NDArray[np.int64]:
    return _contiguous(index, np.int64)


def prepare(m: int, f: int, operation: Operation, mixed: bool, dtype: Any, values: float = np.inf) -> None:
    """Have the kernels for m rows and an operation ready: loaded from disk, or compiled now, in seconds.

    Args:
        m: how many rows each victim has.
        f: how many hostile values the operation allows for.
        operation: one of `OPERATIONS`.
        mixed: whether the rows become means of their m − f nearest before.
        dtype: of the table.
        values: victims · m · d, in all rounds; if they are few, the kernel for any m will do.

    >>> prepare(3, 1, "trimmed_mean", mixed=True, dtype=np.float32)
    """
    check_operation(operation, m, f)
    if values >= coordinates.LARGE:
        coordinates.prepare(m, f, operation, dtype, mixed)


# --- the local step -----------------------------------------------------------------------------------------


@compiled
def _momentum(x: Floats, m: Floats, g: Floats, factors: Floats, begin: int, end: int, out: Floats) -> None:
    """Update rows begin … end − 1.

    The factors β, 1 − β, η and λ have the models' dtype, which avoids widening.
    """
    beta, rest, lr, decay = factors[0], factors[1], factors[2], factors[3]
    for i in range(begin, end):
        for c in range(x.shape[1]):
            momentum = beta * m[i, c] + rest * g[i, c]
            m[i, c] = momentum
            out[i, c] = x[i, c] - lr * (momentum + decay * x[i, c])


@compiled
def _add_rows(x: Floats, left: int, right: int, total: Floats) -> None:
    for start in range(left, right, SUM_COLUMNS):
        sums = total[start : min(right, start + SUM_COLUMNS)]
        for i in range(len(x)):
            row = x[i, start : start + len(sums)]
            for c in range(len(sums)):
                sums[c] += row[c]


@compiled
def _add_deviations(x: Floats, mean: Floats, left: int, right: int, total: Floats) -> None:
    for start in range(left, right, SUM_COLUMNS):
        sums, means = total[start : min(right, start + SUM_COLUMNS)], mean[start:right]
        for i in range(len(x)):
            row = x[i, start : start + len(sums)]
            for c in range(len(sums)):
                off = row[c] - means[c]
                sums[c] += off * off


def _over_columns(x: Floats, columns: slice, work: Callable[[int, int], None]) -> None:
    """work(left, right) over narrow ranges that cover the columns, on all threads."""
    first, last = columns.start, columns.stop
    units = -(-(last - first) // UNIT_COLUMNS)
    threads.run(
        lambda begin, end: work(first + begin * UNIT_COLUMNS, min(last, first + end * UNIT_COLUMNS)),
        units,
        small=len(x) * (last - first) < SMALL_WORK,
    )


# --- the primitives ---


class Compiled(Backend):
    """The primitives on NumPy arrays, by numba on all threads that `rpel.backend.threads` allows."""

    def array(self, values: ArrayLike | Floats) -> Floats:
        return np.asarray(values)

    def host(self, x: ArrayLike | Floats) -> Floats:
        return np.asarray(x)

    def finite_rows(self, table: Floats) -> NDArray[np.bool_]:
        check_table(table)
        result = np.empty(len(table), np.bool_)
        step = max(1, CACHED_VALUES // max(1, table.shape[1]))  # rows whose marks stay in the cache

        def work(begin: int, end: int) -> None:
            for first in range(begin, end, step):
                some = slice(first, min(end, first + step))
                np.isfinite(table[some]).all(axis=1, out=result[some])

        threads.run(work, len(table), small=table.size < SMALL_WORK)
        return result

    def squared_distances(self, table: Floats, index: Integers) -> Floats:
        check_index(table, index)
        return distances.squared_distances(table, _int64(index))

    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
        check_index(table, index, absent=True)
        (h, _), d, given = index.shape, table.shape[1], _int64(index)
        present = np.where(given < 0, 0, given)
        if origin is None or (origin.ndim == 1 and origin.dtype.kind == "f"):
            point = np.zeros(d) if origin is None else _contiguous(origin, np.float64).reshape(d)
            found = distances.to_point(table, present, point)
        elif origin.dtype.kind == "f":
            points = _contiguous(origin, origin.dtype).reshape(h, d)
            found = distances.to_points(table, present, points, np.arange(h))
        else:
            check_index(table, origin.reshape(h, 1))
            found = distances.to_points(table, present, table, _int64(origin))
        return np.where(given < 0, 0.0, found)

    def nearest(self, distances: Floats, k: int) -> NDArray[np.int32]:
        _, m, last = distances.shape
        if last != m or not 1 <= k <= m:
            raise ValueError(f"distances must be (h, m, m) and k within 1 … m, not {distances.shape} and {k}")
        return nearest(distances, k)

    def combine(self, table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
        check_index(table, index, absent=True)
        given, result = _int64(index), result_array(table, len(index), out)
        factors = _contiguous(weights, np.float64).reshape(index.shape)
        rows.combine(table, given, factors, result, small=result.size * index.shape[1] < SMALL_WORK)
        return result

    def coordinatewise(
        self,
        table: Floats,
        index: Integers,
        operation: Operation,
        f: int = 0,
        mix: Mix = None,
        out: Out = None,
    ) -> Floats:
        check_index(table, index)
        check_operation(operation, check_mix(mix, *index.shape), f)
        given, result = _int64(index), result_array(table, len(index), out)
        if isinstance(mix, int):
            return coordinates.nearest_mixed(table, given, operation, f, mix, result)
        if mix is None:
            return coordinates.coordinatewise(table, given, operation, f, None, 1, result)
        if mix.dtype.kind == "f":
            weights = _contiguous(mix, np.float64)
            return coordinates.coordinatewise(table, given, operation, f, weights, 0, result)
        k = mix.shape[2]
        if k == 1:
            given = _int64(np.take_along_axis(given, mix[:, :, 0].astype(np.int64), axis=1))
            return coordinates.coordinatewise(table, given, operation, f, None, 1, result)
        kept = np.zeros((*mix.shape[:2], index.shape[1]), np.bool_)
        np.put_along_axis(kept, mix.astype(np.int64), True, axis=2)
        if (kept.sum(axis=2) != k).any():
            raise ValueError("mix must name k different columns for each mixed row")
        codes = coordinates.encode(kept)
        return coordinates.coordinatewise(table, given, operation, f, codes, k, result)

    def moments(
        self, table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Out = None
    ) -> Floats:
        check_index(table, index, absent=True)
        given, h, result = _int64(index), len(index), result_array(table, len(index), out)
        factors = np.empty((h, 2))
        factors[:, 0], factors[:, 1] = mean_factor, std_factor
        rows.moments(table, given, factors, result, small=result.size * index.shape[1] < SMALL_WORK)
        return result

    def momentum_step(
        self, x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Out = None
    ) -> tuple[Floats, Floats]:
        half = np.empty_like(x) if out is None else out
        factors = np.array([beta, 1 - beta, lr, decay], dtype=x.dtype)

        def work(begin: int, end: int) -> None:
            _momentum(x, m, g, factors, begin, end, half)

        threads.run(work, len(x), small=x.size < SMALL_WORK)
        return half, m

    def column_sums(self, x: Floats, columns: slice, total: Floats, mean: Floats | None = None) -> None:
        if mean is None:
            _over_columns(x, columns, lambda left, right: _add_rows(x, left, right, total))
        else:
            _over_columns(x, columns, lambda left, right: _add_deviations(x, mean, left, right, total))
