"""Weighted sums and moments of rows, and the test for non-finite ones.

Laws: sums run in float64, one row after the other, each column alone; a row under weight 0 or index −1 is not read; the
standard deviation takes two passes (mean, then squared deviations from it), so nothing cancels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool as threads
from rpel.kernels.arguments import Float64, Floats, Integers
from rpel.kernels.cache import compiled
from rpel.kernels.vectors import copy, moments_of_rows, weigh_rows

_SMALL = 1 << 16  # values below which waking a thread costs more than it saves


@compiled
def _combine(
    table: Floats,
    index: Integers,
    weights: Float64,
    columns: int,
    chunk: int,
    begin: int,
    end: int,
    out: Floats,
    d: int,
) -> None:
    """Units begin … end − 1; table and out are flat. Only rows present and of weight ≠ 0 are listed, so read."""
    h, m = index.shape
    parts = (h + chunk - 1) // chunk
    starts, factors = np.empty(m, np.int64), np.empty(m)
    for unit in range(begin, end):
        left = unit // parts * columns
        first = unit % parts * chunk
        for i in range(first, min(h, first + chunk)):
            listed = 0
            for j in range(m):
                if index[i, j] >= 0 and weights[i, j] != 0.0:
                    starts[listed] = index[i, j] * d
                    factors[listed] = weights[i, j]
                    listed += 1
            weigh_rows(table, starts, factors, listed, left, min(columns, d - left), out, i * d + left)


@compiled
def _moments(
    table: Floats,
    index: Integers,
    mean: Float64,
    std: Float64,
    columns: int,
    chunk: int,
    begin: int,
    end: int,
    out: Floats,
    d: int,
) -> None:
    """Units begin … end − 1; table and out are flat. One row has no deviation; no row counts as a row of zeros."""
    h, m = index.shape
    parts = (h + chunk - 1) // chunk
    starts, nothing = np.empty(m, np.int64), np.zeros(columns, table.dtype)
    for unit in range(begin, end):
        left = unit // parts * columns
        count = min(columns, d - left)
        first = unit % parts * chunk
        for i in range(first, min(h, first + chunk)):
            listed = 0
            for j in range(m):
                if index[i, j] >= 0:
                    starts[listed] = index[i, j] * d
                    listed += 1
            if listed:
                factor = std[i] if listed > 1 else 0.0
                moments_of_rows(table, starts, listed, left, count, mean[i], factor, out, i * d + left)
            else:
                copy(nothing, 0, count, out, i * d + left)


@compiled
def _finite(bits: Integers, exponent: Any, begin: int, end: int, result: NDArray[np.bool_]) -> None:
    """A value is finite unless all bits of its exponent are set."""
    for i in range(begin, end):
        bad = 0
        for c in range(bits.shape[1]):
            bad |= (bits[i, c] & exponent) == exponent
        result[i] = bad == 0


def combine(table: Floats, index: NDArray[np.int64], weights: Float64, out: Floats) -> Floats:
    """(h, d) Σ_j weights[i, j] · table[index[i, j]].

    >>> combine(np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[0, 1]]), np.array([[2.0, 0.0]]), np.empty((1, 2)))
    array([[2., 4.]])
    """
    columns, chunk, units = threads.cut(len(table), len(out), table.shape[1], table.itemsize)
    flat = table.reshape(-1)

    def work(begin: int, end: int) -> None:
        _combine(flat, index, weights, columns, chunk, begin, end, out.reshape(-1), table.shape[1])

    threads.run(work, units, small=out.size * index.shape[1] < _SMALL)
    return out


def moments(table: Floats, index: NDArray[np.int64], mean_factor: Float64, std_factor: Float64, out: Floats) -> Floats:
    """(h, d) mean_factor[i] · μ + std_factor[i] · σ.

    >>> moments(np.array([[1.0], [3.0]]), np.array([[0, 1]]), np.ones(1), np.zeros(1), np.empty((1, 1)))
    array([[2.]])
    """
    columns, chunk, units = threads.cut(len(table), len(out), table.shape[1], table.itemsize)
    flat = table.reshape(-1)

    def work(begin: int, end: int) -> None:
        _moments(flat, index, mean_factor, std_factor, columns, chunk, begin, end, out.reshape(-1), table.shape[1])

    threads.run(work, units, small=out.size * index.shape[1] < _SMALL)
    return out


def finite_rows(table: Floats) -> NDArray[np.bool_]:
    """(n,) True where every entry is finite.

    >>> finite_rows(np.array([[1.0, 2.0], [np.inf, 0.0]]))
    array([ True, False])
    """
    result = np.empty(len(table), np.bool_)
    single = table.dtype == np.float32
    bits: Integers = table.view(np.int32 if single else np.int64)
    exponent = bits.dtype.type(0x7F800000 if single else 0x7FF0000000000000)

    def work(begin: int, end: int) -> None:
        _finite(bits, exponent, begin, end, result)

    threads.run(work, len(table), small=table.size < _SMALL)
    return result
