"""How fast the kernels are, and how near to what this machine can do: ``python benchmarks/kernels.py``.

Three settings: m=16, f=7 of the MNIST experiment, a large model among few nodes, and many nodes with a small
one. The limits are measured in the same run, because other work may share the machine: memory by a large
copy, arithmetic by a sorting network on values in the first cache (two vector instructions a cycle). A
primitive's limit is the larger of the bytes it must move and the vector instructions its busiest unit must
execute; the share says how much of it is reached.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import machine
from rpel.backend import compiled as numba_kernels
from rpel.backend import pool as threads
from rpel.backend.base import OPERATIONS, Operation
from rpel.backend.cache import compiled
from rpel.backend.sorting import network, operate, ranks

Array = NDArray[Any]


class Setting(NamedTuple):
    """n nodes of which b hostile; each honest one pulls s, trims f; models of d parameters."""

    n: int
    b: int
    s: int
    f: int
    d: int


SETTINGS = (
    Setting(100, 10, 15, 7, 176_050),
    Setting(20, 3, 6, 3, 1_310_922),
    Setting(10_000, 1_000, 30, 13, 650),
)


def seconds(function: Callable[[], object]) -> float:
    """The best of a few runs, after one to warm up."""
    function()
    return machine.best(function)


def round_of(setting: Setting) -> tuple[Array, Array]:
    """The honest rows and one forged row per victim;
    every hostile entry of a victim points to its forged row."""
    rng = np.random.default_rng(0)
    h = setting.n - setting.b
    table = rng.standard_normal((2 * h, setting.d), np.float32)
    others = rng.permuted(np.tile(np.arange(setting.n - 1), (h, 1)), axis=1)[:, : setting.s]
    own = np.arange(h)[:, None]
    peers = others + (others >= own)
    return table, np.hstack([own, np.where(peers < h, peers, h + own)])


kernels = numba_kernels.Compiled()


@compiled
def _trim_often(y: Array, z: Array, times: int) -> None:
    for _ in range(times):
        operate(y, 128, 128, np.float32(1), z, 16, 7, 0)


def memory_limit() -> float:
    """Bytes per second, read and written, of a copy on all threads."""
    source = np.ones(1 << 25, np.float32)
    target = np.zeros_like(source)
    step = len(source) // 64

    def work(begin: int, end: int) -> None:
        target[begin * step : end * step] = source[begin * step : end * step]

    return 2 * source.nbytes / seconds(lambda: threads.run(work, 64))


def arithmetic_limit() -> float:
    """Vector instructions per second on all threads: minima and maxima of the pruned network of 16 values."""
    times = 50_000

    def work(begin: int, end: int) -> None:
        _trim_often(np.ones(16 * 128, np.float32), np.ones(128, np.float32), times * (end - begin))

    took = seconds(lambda: threads.run(work, threads.threads()))
    return threads.threads() * times * (128 // 8) * _instructions(16, 7, "trimmed_mean") / took


def _instructions(m: int, f: int, operation: Operation) -> int:
    """Minima and maxima that a needed rank depends on."""
    alive = set(ranks(m, f, operation))
    count = 0
    for low, high in reversed(network(m, f, operation)):
        count += (low in alive) + (high in alive)
        alive |= {low, high}
    return count


def report(setting: Setting, memory: float, arithmetic: float) -> None:
    """One line for each primitive: time, time per victim, share of the limit."""
    table, index = round_of(setting)
    (h, m), f, d = index.shape, setting.f, setting.d
    out = np.empty((h, d), np.float32)
    squared = kernels.squared_distances(table, index)
    nearest = kernels.nearest(squared, m - f)
    weights, ones = np.full((h, m), 1 / m), np.ones(h)
    for operation in OPERATIONS:
        numba_kernels.prepare(m, f, operation, True, np.float32)
    pairs = _pairs(index) if setting.n < 1_000 else h * m * (m - 1) // 2
    used = len(np.unique(index)) * d * 4
    moved = used + 2 * out.nbytes  # a written line is read first
    cells = h * d / 8  # vectors of the result
    trim, middle, full = (_instructions(m, f, name) for name in OPERATIONS)
    mixing = m * (m - f)
    lines: list[tuple[str, Callable[[], object], float, float]] = [
        ("finite_rows", lambda: kernels.finite_rows(table), table.nbytes, table.size / 8),
        ("squared_distances", lambda: kernels.squared_distances(table, index), used, pairs * d / 4),
        ("nearest", lambda: kernels.nearest(squared, m - f), squared.nbytes, h * m * m * m / 4 * 2),
        (
            "nnm + trimmed_mean",
            _coordinates(table, index, "trimmed_mean", f, nearest, out),
            moved,
            cells * (mixing + trim),
        ),
        (
            "nnm + meamed",
            _coordinates(table, index, "meamed", f, nearest, out),
            moved,
            cells * (mixing + full + 4 * f),
        ),
        ("trimmed_mean", _coordinates(table, index, "trimmed_mean", f, None, out), moved, cells * (m + trim)),
        ("median", _coordinates(table, index, "median", f, None, out), moved, cells * (m + middle)),
        ("combine", lambda: kernels.combine(table, index, weights, out), moved, cells * m * 2),
        ("moments", lambda: kernels.moments(table, index, ones, ones, out), moved, cells * m * 2 * 2),
        ("distances_to", lambda: kernels.distances_to(table, index, None), used, used / 4 / 4),
    ]
    print(f"\nn={setting.n} m={m} f={f} d={d:,}: {h} victims on {threads.threads()} threads; limits: copy")
    print(f"  {memory / 1e9:.1f} GB/s, {arithmetic / 1e9:.1f} vector instructions a ns")
    whole = 0.0
    for name, function, size, instructions in lines:
        took = seconds(function)
        limit = max(size / memory, instructions / arithmetic)
        print(
            f"  {name:20s}{took * 1e3:9.2f} ms{took / h * 1e3:10.4f} ms a victim{limit / took:7.0%} of the "
            "limit"
        )
        whole += took if name in ("squared_distances", "nearest", "nnm + trimmed_mean") else 0.0
    print(f"  {'the rule, altogether':20s}{whole * 1e3:9.2f} ms{whole / h * 1e3:10.4f} ms a victim")


def _coordinates(table: Array, index: Array, operation: Any, f: int, mix: Array | None, out: Array) -> Any:
    return lambda: kernels.coordinatewise(table, index, operation, f, mix, out)


def _pairs(index: Array) -> int:
    """Pairs of different rows that some victim holds."""
    together = np.zeros((index.max() + 1,) * 2, np.bool_)
    for rows in index:
        together[np.ix_(rows, rows)] = True
    return int(np.triu(together, 1).sum())


def main() -> None:
    """The three settings, each beside the limits of that moment."""
    for setting in SETTINGS:
        memory, arithmetic = memory_limit(), arithmetic_limit()
        report(setting, memory, arithmetic)


if __name__ == "__main__":
    main()
