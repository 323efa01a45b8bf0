"""The compiled twin of `plain`: same functions, same meaning, all cores. What they compute, and examples,
are there.

Distances and neighbours are in `distances` and `sorting`, operations on coordinates in `coordinates`; sums
and moments of rows, the test for non-finite ones, momentum and half-step,
and the spread of a cohort are here.

Invariants: arguments are checked before a kernel runs; results do not depend on the number of threads. Sums
run in float64, one row after the other, each column alone; a row under weight 0 or index −1 is not read; the
standard deviation takes two passes (mean, then squared deviations from it), so nothing cancels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rpel.backend import coordinates, distances, pool, sorting
from rpel.backend.base import Backend, Operation
from rpel.backend.cache import compiled, inlined
from rpel.backend.checks import check_index, check_mix, check_operation, check_table, result_array
from rpel.backend.coordinates import unit_bounds
from rpel.backend.vectors import fetch, moments_of_rows, weigh_rows
from rpel.types import Floats, Integers, Mix, Out

_COLUMNS = 1024  # whose deviations are summed before they join the total
_IN_CACHE = 1 << 18  # entries that a core keeps at hand
_NARROW = 128  # columns that one thread takes at a time
_SMALL = 1 << 16  # values below which waking a thread costs more than it saves


def _contiguous(array: Floats, dtype: DTypeLike) -> Floats:
    """Contiguous, of this type and writable, copied if need be:
    numba compiles read-only arrays a second time."""
    return np.array(array, dtype, order="C", copy=None if array.flags.writeable else True)


def _int64(index: Integers) -> NDArray[np.int64]:
    return _contiguous(index, np.int64)


def prepare(
    m: int, f: int, operation: Operation, mixed: bool, dtype: Any, values: float = coordinates.LARGE
) -> None:
    """Have the kernels for m rows and this operation ready:
    loaded from disk or compiled now (a few seconds at most).

    With `mixed` the distances before it too. For few `values` (victims · m · d, in all rounds) nothing
    happens: the kernels for any m will do.

    >>> prepare(3, 1, "trimmed_mean", mixed=True, dtype=np.float32)
    """
    check_operation(operation, m, f)
    if values < coordinates.LARGE:
        return
    coordinates.prepare(m, f, operation, dtype, coordinates.SUMS if mixed else coordinates.ROWS)
    if mixed:
        distances.prepare(dtype)


# --- kernels of sums ----------------------------------------------------------------------------------------


@inlined
def _fetch_next(table: Floats, index: Integers, i: int, left: int, right: int) -> None:
    """Have the rows of the victim after i on their way while those of i are summed,
    unless all are in the cache."""
    if i + 1 < len(index) and (right - left) * len(table) > _IN_CACHE:
        for j in range(index.shape[1]):
            if index[i + 1, j] >= 0:
                fetch(table, index[i + 1, j] * table.shape[1] + left, right - left)


@compiled
def _combine(
    table: Floats, index: Integers, weights: Floats, cut: pool.Units, begin: int, end: int, out: Floats
) -> None:
    """Units begin … end − 1. Only rows present and of weight ≠ 0 are listed, so read."""
    (h, m), d = index.shape, table.shape[1]
    starts, factors = np.empty(m, np.int64), np.empty(m)
    for unit in range(begin, end):
        left, right, first, last = unit_bounds(unit, cut, h, d)
        for i in range(first, last):
            _fetch_next(table, index, i, left, right)
            listed = 0
            for j in range(m):
                if index[i, j] >= 0 and weights[i, j] != 0.0:
                    starts[listed] = index[i, j] * d
                    factors[listed] = weights[i, j]
                    listed += 1
            weigh_rows(table, starts, factors, listed, left, right - left, out, i * d + left)


@compiled
def _moments(
    table: Floats,
    index: Integers,
    mean: Floats,
    std: Floats,
    cut: pool.Units,
    begin: int,
    end: int,
    out: Floats,
) -> None:
    """Units begin … end − 1. One row has no deviation; no row counts as a row of zeros."""
    (h, m), d = index.shape, table.shape[1]
    starts = np.empty(m, np.int64)
    for unit in range(begin, end):
        left, right, first, last = unit_bounds(unit, cut, h, d)
        for i in range(first, last):
            _fetch_next(table, index, i, left, right)
            listed = 0
            for j in range(m):
                if index[i, j] >= 0:
                    starts[listed] = index[i, j] * d
                    listed += 1
            if listed:
                factor = std[i] if listed > 1 else 0.0
                moments_of_rows(table, starts, listed, left, right - left, mean[i], factor, out, i * d + left)
            else:
                out[i, left:right] = 0


# --- the local step -----------------------------------------------------------------------------------------


@compiled
def _momentum(x: Floats, m: Floats, g: Floats, factors: Floats, begin: int, end: int, out: Floats) -> None:
    """Rows begin … end − 1; the factors β, 1 − β, η and λ have the models' dtype,
    so that nothing is widened."""
    beta, rest, lr, decay = factors[0], factors[1], factors[2], factors[3]
    for i in range(begin, end):
        for c in range(x.shape[1]):
            momentum = beta * m[i, c] + rest * g[i, c]
            m[i, c] = momentum
            out[i, c] = x[i, c] - lr * (momentum + decay * x[i, c])


@compiled
def _add_rows(x: Floats, left: int, right: int, total: Floats) -> None:
    for start in range(left, right, _COLUMNS):  # whose sums stay in the first cache
        sums = total[start : min(right, start + _COLUMNS)]
        for i in range(len(x)):
            row = x[i, start : start + len(sums)]
            for c in range(len(sums)):
                sums[c] += row[c]


@compiled
def _add_deviations(x: Floats, mean: Floats, left: int, right: int, total: Floats) -> None:
    for start in range(left, right, _COLUMNS):
        sums, means = total[start : min(right, start + _COLUMNS)], mean[start:right]
        for i in range(len(x)):
            row = x[i, start : start + len(sums)]
            for c in range(len(sums)):
                off = row[c] - means[c]
                sums[c] += off * off


def _over_columns(x: Floats, columns: slice, work: Callable[[int, int], None]) -> None:
    """work(left, right) over narrow ranges that cover the columns, on all threads."""
    first, last = columns.start, columns.stop
    units = -(-(last - first) // _NARROW)
    pool.run(
        lambda begin, end: work(first + begin * _NARROW, min(last, first + end * _NARROW)),
        units,
        small=len(x) * (last - first) < _SMALL,
    )


# --- the primitives ---


class Compiled(Backend):
    """The primitives on NumPy arrays, by numba on all threads that `rpel.backend.pool` allows."""

    def array(self, values: ArrayLike | Floats) -> Floats:
        return np.asarray(values)

    def host(self, x: ArrayLike | Floats) -> Floats:
        return np.asarray(x)

    def finite_rows(self, table: Floats) -> NDArray[np.bool_]:
        """(n,) True where every entry of the row is finite."""
        check_table(table)
        result = np.empty(len(table), np.bool_)
        step = max(1, _IN_CACHE // max(1, table.shape[1]))  # rows whose marks stay in the cache

        def work(begin: int, end: int) -> None:
            for first in range(begin, end, step):
                some = slice(first, min(end, first + step))
                np.isfinite(table[some]).all(axis=1, out=result[some])

        pool.run(work, len(table), small=table.size < _SMALL)
        return result

    def squared_distances(self, table: Floats, index: Integers) -> Floats:
        """(h, m, m) squared Euclidean distances among the rows of each victim, float64."""
        check_index(table, index)
        return distances.among(table, _int64(index))

    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
        """(h, m) squared distances of the rows to an origin: None is zero, (d,) floats a point, (h,) integers
        rows, (h, d) floats a point for each victim.
        """
        check_index(table, index, absent=True)
        h, d = len(index), table.shape[1]
        point: NDArray[Any] = np.zeros(d) if origin is None else origin
        if point.dtype.kind in "iu":
            check_index(table, point.reshape(h, 1))
            return distances.to_rows(table, _int64(index), _int64(point))
        if point.ndim == 2:
            points = _contiguous(point, point.dtype).reshape(h, d)
            return distances.to_rows(table, _int64(index), len(table) + np.arange(h), points)
        return distances.to_point(table, _int64(index), _contiguous(point, np.float64).reshape(d))

    def nearest(self, distances: Floats, k: int) -> NDArray[np.int32]:
        """(h, m, k) for every anchor the k nearest columns, itself included, in ascending order of column."""
        _, m, last = distances.shape
        if last != m or not 1 <= k <= m:
            raise ValueError(f"distances must be (h, m, m) and k within 1 … m, not {distances.shape} and {k}")
        rows = np.broadcast_to(np.arange(m), distances.shape[:2]).copy()
        return sorting.nearest(_contiguous(distances, np.float64), rows, k)[0]

    def combine(self, table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
        """(h, d) weighted sums Σ_j weights[i, j] · table[index[i, j]]; weight 0 and index −1 are skipped,
        never read."""
        check_index(table, index, absent=True)
        rows, factors = _int64(index), _contiguous(weights, np.float64).reshape(index.shape)
        result = result_array(table, len(rows), out)
        cut = pool.cut(len(table), len(rows), table.shape[1], table.itemsize)

        def work(begin: int, end: int) -> None:
            _combine(table, rows, factors, cut, begin, end, result)

        pool.run(work, cut.total, small=result.size * rows.shape[1] < _SMALL)
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
        """(h, d) trimmed_mean, median or meamed of each coordinate, after mixing; see `plain.coordinatewise`.

        Weights of a float `mix` beyond ±1 may overflow float64 values near its end;
        integers and float32 never give NaN.
        """
        check_index(table, index)
        check_operation(operation, check_mix(mix, *index.shape), f)
        result = result_array(table, len(index), out)
        if isinstance(mix, int):
            return coordinates.nearest_mixed(table, _int64(index), operation, f, mix, result)
        if mix is not None:
            mix = _contiguous(mix, np.float64 if mix.dtype.kind == "f" else np.int32)
        return coordinates.coordinatewise(table, _int64(index), operation, f, mix, result)

    def moments(
        self, table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Out = None
    ) -> Floats:
        """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows of index[i]."""
        check_index(table, index, absent=True)
        rows, h = _int64(index), len(index)
        means, deviations = (
            _contiguous(mean_factor, np.float64).reshape(h),
            _contiguous(std_factor, np.float64).reshape(h),
        )
        result = result_array(table, h, out)
        cut = pool.cut(len(table), h, table.shape[1], table.itemsize)

        def work(begin: int, end: int) -> None:
            _moments(table, rows, means, deviations, cut, begin, end, result)

        pool.run(work, cut.total, small=result.size * rows.shape[1] < _SMALL)
        return result

    def momentum_step(
        self, x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Out = None
    ) -> tuple[Floats, Floats]:
        half = np.empty_like(x) if out is None else out
        factors = np.array([beta, 1 - beta, lr, decay], dtype=x.dtype)

        def work(begin: int, end: int) -> None:
            _momentum(x, m, g, factors, begin, end, half)

        pool.run(work, len(x), small=x.size < _SMALL)
        return half, m

    def column_sums(self, x: Floats, columns: slice, total: Floats, mean: Floats | None = None) -> None:
        if mean is None:
            _over_columns(x, columns, lambda left, right: _add_rows(x, left, right, total))
        else:
            _over_columns(x, columns, lambda left, right: _add_deviations(x, mean, left, right, total))
