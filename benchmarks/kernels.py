"""How fast the kernels are: ``python benchmarks/kernels.py [--json]``.

Three settings: m=16, f=7 of the MNIST experiment, a large model among few nodes, and many nodes with a
small one. The last column compares with copying the rows that a primitive must read and write, measured in
the same run, because other work may share the machine.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import machine
from rpel.backend import compiled, threads

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


def round_of(setting: Setting) -> tuple[Array, Array]:
    """The honest rows and one forged row per victim, to which all hostile entries of that victim point."""
    rng = np.random.default_rng(0)
    h = setting.n - setting.b
    table = rng.standard_normal((2 * h, setting.d), np.float32)
    others = rng.permuted(np.tile(np.arange(setting.n - 1), (h, 1)), axis=1)[:, : setting.s]
    own = np.arange(h)[:, None]
    peers = others + (others >= own)
    return table, np.hstack([own, np.where(peers < h, peers, h + own)])


def measure(setting: Setting) -> dict[str, tuple[float, float]]:
    """Seconds of each primitive, and how many times the copy of its rows that is."""
    table, index = round_of(setting)
    (h, m), f, d = index.shape, setting.f, setting.d
    kernels, out = compiled.Compiled(), np.empty((h, d), np.float32)
    squared, weights, ones = kernels.squared_distances(table, index), np.full((h, m), 1 / m), np.ones(h)
    for mixed in (True, False):
        compiled.prepare(m, f, "trimmed_mean", mixed, np.float32)
    calls: dict[str, Callable[[], object]] = {
        "finite_rows": lambda: kernels.finite_rows(table),
        "squared_distances": lambda: kernels.squared_distances(table, index),
        "nearest": lambda: kernels.nearest(squared, m - f),
        "nnm + trimmed_mean": lambda: kernels.coordinatewise(table, index, "trimmed_mean", f, m - f, out),
        "nnm + meamed": lambda: kernels.coordinatewise(table, index, "meamed", f, m - f, out),
        "trimmed_mean": lambda: kernels.coordinatewise(table, index, "trimmed_mean", f, None, out),
        "combine": lambda: kernels.combine(table, index, weights, out),
        "moments": lambda: kernels.moments(table, index, ones, ones, out),
        "distances_to": lambda: kernels.distances_to(table, index, None),
    }
    used = np.unique(index)
    copy = machine.best(lambda: (table[used], out.copy()))
    found = {}
    for name, call in calls.items():
        call()
        seconds = machine.best(call)
        found[name] = (seconds, seconds / copy)
    return found


def main() -> None:
    """Print the three settings."""
    for setting in SETTINGS:
        found = measure(setting)
        if "--json" in sys.argv:
            print(json.dumps(setting._asdict() | {name: row[0] for name, row in found.items()}))
            continue
        print(f"\nn={setting.n} m={setting.s + 1} f={setting.f} d={setting.d:,}, {threads.threads()} threads")
        for name, (seconds, ratio) in found.items():
            print(f"  {name:20s}{seconds * 1e3:9.2f} ms {ratio:8.2f} copies")


if __name__ == "__main__":
    main()
