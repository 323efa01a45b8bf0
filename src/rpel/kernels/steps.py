"""What a local step does to a whole cohort at once: momentum and half-step in one pass, and how far models are apart.

Laws: every element on its own, so nothing depends on the number of threads; sums over rows run in float64, columns cut
into blocks of fixed size and their sums added in order.
"""

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import pool as threads
from rpel.kernels.arguments import Float64, Floats
from rpel.kernels.cache import compiled

_COLUMNS = 1024
_SMALL = 1 << 16


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

    threads.run(work, len(x), small=x.size < _SMALL)
    return half, m


@compiled
def _spread(x: Floats, begin: int, end: int, mean: Float64, partial: Float64) -> None:
    """Column blocks begin … end − 1: their mean over the rows, and the summed squared deviations from it."""
    h, d = x.shape
    for block in range(begin, end):
        left = block * _COLUMNS
        right = min(d, left + _COLUMNS)
        mean[left:right] = 0.0
        for i in range(h):
            for c in range(left, right):
                mean[c] += x[i, c]
        for c in range(left, right):
            mean[c] /= h
        deviation = np.zeros(right - left)
        for i in range(h):
            for c in range(left, right):
                off = x[i, c] - mean[c]
                deviation[c - left] += off * off
        total = 0.0
        for c in range(right - left):
            total += deviation[c]
        partial[block] = total


def spread(x: Floats) -> tuple[NDArray[np.float64], float]:
    """The mean row (d,) and (1/h) Σ ‖x_i − mean‖².

    >>> spread(np.array([[0.0, 0.0], [2.0, 0.0]]))
    (array([1., 0.]), 1.0)
    """
    blocks = -(-x.shape[1] // _COLUMNS)
    mean, partial = np.empty(x.shape[1]), np.empty(blocks)

    def work(begin: int, end: int) -> None:
        _spread(x, begin, end, mean, partial)

    threads.run(work, blocks, small=x.size < _SMALL)
    return mean, float(partial.sum() / len(x))
