"""Weighted sums and moments of rows, the test for non-finite ones, momentum and half-step, the spread of a cohort.

Invariants: sums run in float64, one row after the other, each column alone, so nothing depends on the number of
threads; a row under weight 0 or index −1 is not read; the standard deviation takes two passes (mean, then squared
deviations from it), so nothing cancels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool
from rpel.kernels.cache import compiled
from rpel.kernels.vectors import fetch, moments_of_rows, weigh_rows
from rpel.types import Floats, Integers

_COLUMNS = 1024  # whose deviations are summed before they join the total
_IN_CACHE = 1 << 18  # entries that a core keeps at hand
_NARROW = 128  # columns that one thread takes at a time
_SMALL = 1 << 16  # values below which waking a thread costs more than it saves


@compiled
def _fetch_next(table: Floats, index: Integers, i: int, d: int, left: int, columns: int) -> None:
    """Have the rows of the victim after i on their way while those of i are summed, unless all are in the cache."""
    count = min(columns, d - left)
    if i + 1 < len(index) and count * (len(table) // d) > _IN_CACHE:
        for j in range(index.shape[1]):
            if index[i + 1, j] >= 0:
                fetch(table, index[i + 1, j] * d + left, count)


@compiled
def _combine(
    table: Floats,
    index: Integers,
    weights: Floats,
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
            _fetch_next(table, index, i, d, left, columns)
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
    mean: Floats,
    std: Floats,
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
    starts = np.empty(m, np.int64)
    for unit in range(begin, end):
        left = unit // parts * columns
        count = min(columns, d - left)
        first = unit % parts * chunk
        for i in range(first, min(h, first + chunk)):
            _fetch_next(table, index, i, d, left, columns)
            listed = 0
            for j in range(m):
                if index[i, j] >= 0:
                    starts[listed] = index[i, j] * d
                    listed += 1
            if listed:
                factor = std[i] if listed > 1 else 0.0
                moments_of_rows(table, starts, listed, left, count, mean[i], factor, out, i * d + left)
            else:
                for c in range(i * d + left, i * d + left + count):
                    out[c] = 0


@compiled
def _finite(bits: Integers, exponent: Any, begin: int, end: int, result: NDArray[np.bool_]) -> None:
    """A value is finite unless all bits of its exponent are set."""
    for i in range(begin, end):
        bad = 0
        for c in range(bits.shape[1]):
            bad |= (bits[i, c] & exponent) == exponent
        result[i] = bad == 0


def combine(table: Floats, index: Integers, weights: Floats, out: Floats) -> Floats:
    """(h, d) Σ_j weights[i, j] · table[index[i, j]].

    >>> combine(np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[0, 1]]), np.array([[2.0, 0.0]]), np.empty((1, 2)))
    array([[2., 4.]])
    """
    columns, chunk, units = pool.cut(len(table), len(out), table.shape[1], table.itemsize)
    flat = table.reshape(-1)

    def work(begin: int, end: int) -> None:
        _combine(flat, index, weights, columns, chunk, begin, end, out.reshape(-1), table.shape[1])

    pool.run(work, units, small=out.size * index.shape[1] < _SMALL)
    return out


def moments(table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Floats) -> Floats:
    """(h, d) mean_factor[i] · μ + std_factor[i] · σ.

    >>> moments(np.array([[1.0], [3.0]]), np.array([[0, 1]]), np.ones(1), np.zeros(1), np.empty((1, 1)))
    array([[2.]])
    """
    columns, chunk, units = pool.cut(len(table), len(out), table.shape[1], table.itemsize)
    flat = table.reshape(-1)

    def work(begin: int, end: int) -> None:
        _moments(flat, index, mean_factor, std_factor, columns, chunk, begin, end, out.reshape(-1), table.shape[1])

    pool.run(work, units, small=out.size * index.shape[1] < _SMALL)
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

    pool.run(work, len(table), small=table.size < _SMALL)
    return result


# --- the local step ---------------------------------------------------------------------------------------------------


@compiled
def _momentum(
    x: Floats,
    m: Floats,
    g: Floats,
    beta: Floats,
    rest: Floats,
    lr: Floats,
    decay: Floats,
    begin: int,
    end: int,
    out: Floats,
) -> None:
    """Rows begin … end − 1; the numbers come as one-element arrays of the models' dtype, so that nothing is widened."""
    b, r, eta, lam = beta[0], rest[0], lr[0], decay[0]
    for i in range(begin, end):
        for c in range(x.shape[1]):
            momentum = b * m[i, c] + r * g[i, c]
            m[i, c] = momentum
            out[i, c] = x[i, c] - eta * (momentum + lam * x[i, c])


def momentum_step(
    x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Floats | None = None
) -> tuple[Floats, Floats]:
    """(x^{t+1/2}, m^t): m = βm + (1−β)g, then x − η(m + λx). m is updated in place; x is left, unless it is ``out``.

    >>> momentum_step(np.ones((1, 1)), np.zeros((1, 1)), np.ones((1, 1)), 0.9, 0.5, 0.0)[0].round(3)
    array([[0.95]])
    """
    half = np.empty_like(x) if out is None else out
    b, rest, eta, lam = (np.array([a], dtype=x.dtype) for a in (beta, 1 - beta, lr, decay))

    def work(begin: int, end: int) -> None:
        _momentum(x, m, g, b, rest, eta, lam, begin, end, half)

    pool.run(work, len(x), small=x.size < _SMALL)
    return half, m


@compiled
def _spread(x: Floats, begin: int, end: int, mean: Floats, deviation: Floats) -> None:
    """Blocks of _NARROW columns, begin … end − 1: their mean over the rows, and their squared deviations from it."""
    h, d = x.shape
    left, right = begin * _NARROW, min(d, end * _NARROW)
    mean[left:right] = 0.0
    deviation[left:right] = 0.0
    for i in range(h):
        for c in range(left, right):
            mean[c] += x[i, c]
    for c in range(left, right):
        mean[c] /= h
    for i in range(h):
        for c in range(left, right):
            off = x[i, c] - mean[c]
            deviation[c] += off * off


@compiled
def _block_sums(values: Floats, partial: Floats) -> None:
    for block in range(len(partial)):
        total = 0.0
        for c in range(block * _COLUMNS, min(len(values), (block + 1) * _COLUMNS)):
            total += values[c]
        partial[block] = total


def spread(x: Floats) -> tuple[NDArray[np.float64], float]:
    """The mean row (d,) and (1/h) Σ ‖x_i − mean‖².

    >>> spread(np.array([[0.0, 0.0], [2.0, 0.0]]))
    (array([1., 0.]), 1.0)
    """
    d = x.shape[1]
    mean, deviation, partial = np.empty(d), np.empty(d), np.empty(-(-d // _COLUMNS))

    def work(begin: int, end: int) -> None:
        _spread(x, begin, end, mean, deviation)

    pool.run(work, -(-d // _NARROW), small=x.size < _SMALL)
    _block_sums(deviation, partial)
    return mean, float(partial.sum() / len(x))
