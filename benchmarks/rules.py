"""Milliseconds per victim: rpel against ByzFL, and against what the machine can do, all from one run.

Run `make bench` (it installs ByzFL without its dependencies), or `python benchmarks/rules.py [--quick]`.
ByzFL has two paths, torch and NumPy, one victim a call; we take the better of the two. Rules on graphs, which
ByzFL lacks, run against their plain twins. The limit is the time the arithmetic or the memory traffic needs
at the rates of this run. The cache of kernels is empty at first, as a new user's is: "first call" says what
that costs, once.
"""

import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from numpy.typing import NDArray

import machine
import rpel
from rpel.backend import threads
from rpel.backend.base import backend
from rpel.backend.coordinates import network, ranks

Array = NDArray[Any]


def import_byzfl() -> Any:
    """ByzFL's aggregators; torchvision and seaborn are only for its training and its plots,
    so stand-ins do."""
    for name in ("torchvision", "seaborn"):
        sys.modules.setdefault(name, MagicMock())
    try:
        import byzfl
    except ModuleNotFoundError:
        sys.exit(
            "benchmarks/rules.py compares with ByzFL: pip install --no-deps byzfl==0.0.11 (or run `make "
            "bench`)"
        )
    return byzfl


@dataclass(frozen=True)
class Case:
    """h victims of n nodes pull m − 1 peers; hostile entries all point to the victim's own forged row."""

    m: int
    f: int
    d: int
    h: int
    n: int

    def table_and_index(self) -> tuple[Array, Array]:
        coins = np.random.default_rng(0)
        table = np.empty((2 * self.h, self.d), np.float32)
        for row in table:
            row[:] = coins.standard_normal(self.d, dtype=np.float32) * 0.05
        index = np.empty((self.h, self.m), np.int64)
        for i in range(self.h):
            pulled = coins.choice(np.delete(np.arange(self.n), i), size=self.m - 1, replace=False)
            index[i] = np.concatenate([[i], np.where(pulled < self.h, pulled, self.h + i)])
        return table, index


MNIST = Case(m=16, f=7, d=176_050, h=90, n=100)
CIFAR = Case(m=7, f=3, d=1_310_922, h=17, n=20)
MANY = Case(m=31, f=13, d=650, h=9_000, n=10_000)


def rivals(byzfl: Any, case: Case) -> dict[str, Callable[[Any], Any]]:
    """ByzFL's own objects for each of our fast paths."""
    f = case.f
    nnm = byzfl.NNM(f)
    return {
        "nnm+trimmed_mean": lambda x: byzfl.TrMean(f)(nnm(x)),
        "nnm+median": lambda x: byzfl.Median()(nnm(x)),
        "trimmed_mean": byzfl.TrMean(f),
        "median": byzfl.Median(),
        "meamed": byzfl.Meamed(f),
        "nnm": nnm,
        "krum": byzfl.Krum(f),
        "multi_krum": byzfl.MultiKrum(f),
        "geometric_median": byzfl.GeometricMedian(),
        "monna": byzfl.MoNNA(f),
    }


def theirs(rival: Callable[[Any], Any], x: Array, quick: bool) -> tuple[float, float]:
    """Seconds per victim of the torch and of the NumPy path,
    each the best of 3 or 9 (20 times as many if short)."""
    tensor = torch.from_numpy(x)
    values = []
    for given in (tensor, x):
        first = machine.best(lambda given=given: rival(given), 1)  # type: ignore[misc]
        repeats = (3 if quick else 9) * (20 if first < 0.02 else 1)
        values.append(machine.best(lambda given=given: rival(given), repeats))  # type: ignore[misc]
    return values[0], values[1]


def ours(
    name: str, case: Case, table: Array, index: Array, out: Array, repeats: int
) -> tuple[float, float, float]:
    """Seconds per victim, and seconds of the first call in this process (compiling or loading included)."""
    parameters = {} if name == "geometric_median" else {"f": case.f}
    rule = rpel.rule(name, **parameters)
    if name == "nnm":
        rows = np.ascontiguousarray(table[index[: min(8, case.h)]])
        start = time.perf_counter()
        rule(rows)
        return machine.best(lambda: rule(rows), repeats) / len(rows), time.perf_counter() - start, 0.0
    start = time.perf_counter()
    rule.aggregate(table, index, out=out)
    first = time.perf_counter() - start
    seconds = machine.best(lambda: rule.aggregate(table, index, out=out), repeats)
    tracemalloc.start()
    rule.aggregate(table, index, out=out)
    extra = tracemalloc.get_traced_memory()[1] / table.nbytes
    tracemalloc.stop()
    return seconds / case.h, first, extra


def limit(m: int, f: int, d: int, index: Array, power: machine.Machine) -> float:
    """Least seconds per victim for nnm+trimmed_mean: distances in float64, mixing and sorting in float32.

    A fused multiply-add, an addition, a minimum count as one operation; matrix products do two flops in one.
    """
    first, second = np.triu_indices(m, 1)
    low, high = (choose(index[:, first], index[:, second]).ravel() for choose in (np.minimum, np.maximum))
    pairs = len(np.unique((low * (index.max() + 1) + high)[low != high]))
    comparisons = 2 * len(network(m, ranks(m, f, "trimmed_mean")))  # a minimum and a maximum each
    operations64 = 2 * pairs * d
    operations32 = len(index) * d * (m * (m - f - 1) + comparisons)
    moved = 4 * d * (len(np.unique(index)) + len(index))
    return power.limit(moved, 2 * operations32, 2 * operations64) / len(index)


def report(byzfl: Any, name: str, case: Case, power: machine.Machine, quick: bool) -> float:
    table, index = case.table_and_index()
    out = np.empty((case.h, case.d), np.float32)
    mine, first, extra = ours(name, case, table, index, out, 5 if quick else 9)
    torch_path, numpy_path = theirs(rivals(byzfl, case)[name], table[index[0]], quick)
    ratio = min(torch_path, numpy_path) / mine
    line = (
        f"{name:18} m={case.m:2} f={case.f:2} d={case.d:>9,} h={case.h:5}  ours {mine * 1e3:8.3f} ms  "
        f"byzfl torch {torch_path * 1e3:8.2f}  numpy {numpy_path * 1e3:8.2f}  ratio {ratio:6.1f}x  "
        f"first call {first:5.2f} s  extra {extra:6.1%} of table"
    )
    if name == "nnm+trimmed_mean":
        line += f"  {mine / limit(case.m, case.f, case.d, index, power):.1f}x the machine's limit"
    print(line, flush=True)
    return ratio


def report_forging(case: Case) -> None:
    """Forging must cost less than aggregating."""
    table, index = case.table_and_index()
    peers, out = index[:, 1:].copy(), np.empty((case.h, case.d), np.float32)
    one = np.ones(case.h)
    alie = machine.best(lambda: backend("numba").moments(table, peers, one, 1.5 * one, out=out)) / case.h
    rule = rpel.rule("nnm+trimmed_mean", f=case.f)
    mixing = machine.best(lambda: rule.aggregate(table, index, out=out)) / case.h
    victim = torch.from_numpy(table[peers[0]])
    plain_torch = machine.best(lambda: victim.mean(0) + 1.5 * victim.std(0), 2)
    print(
        f"forging (alie)     m={case.m:2} d={case.d:>9,} h={case.h:5}  ours {alie * 1e3:8.3f} ms  torch "
        f"{plain_torch * 1e3:8.2f}  ratio {plain_torch / alie:6.1f}x  {alie / mixing:.2f} of aggregating"
    )


def report_graph_rules(case: Case) -> None:
    """CS+, GTS, ClippedGossip, RTC and plain gossip against their plain twins."""
    table, index = case.table_and_index()
    out, few = np.empty((case.h, case.d), np.float32), 3
    weights = np.full(index.shape, 1 / case.m)
    hostile = index >= case.h
    for name in ("gossip", "cs_plus", "gts", "clipped_gossip_adaptive", "clipped_gossip_oracle", "rtc"):
        rule = rpel.rule(name, b_hat=3)
        call = {"weights": weights, "hostile": hostile}
        whole = lambda rule=rule, call=call: rule.aggregate(table, index, out=out, **call)  # noqa: E731
        mine = machine.best(whole) / case.h
        part = {"weights": weights[:few], "hostile": hostile[:few]}
        slow = machine.best(
            lambda rule=rule, part=part: rule.aggregate(table, index[:few], kernels=backend("plain"), **part),  # type: ignore[misc]
            2,
        )
        print(
            f"{name:23} m={case.m:2} d={case.d:,}  ours {mine * 1e3:8.3f} ms  plain twin "
            f"{slow / few * 1e3:8.2f}  ratio {slow / few / mine:6.1f}x"
        )


PREPARE = """
import time, numpy as np
from rpel.backend import compiled
start = time.perf_counter()
compiled.prepare({m}, {f}, "trimmed_mean", mixed=True, dtype=np.float32)
print(time.perf_counter() - start)
"""


def report_compiling() -> None:
    """From an empty store: the very first kernel, another (m, f), and the same in a later process."""
    with tempfile.TemporaryDirectory() as store:

        def seconds(m: int, f: int) -> float:
            command = [sys.executable, "-c", PREPARE.format(m=m, f=f)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "RPEL_CACHE": store}
            )
            return float(done.stdout)

        first, other, later = seconds(16, 7), seconds(31, 13), seconds(31, 13)
    print(
        f"compiling: the first kernel of all {first:.1f} s, a new (m, f) {other:.2f} s (promised: 10), "
        f"in a later process {later:.2f} s (promised: 1)"
    )


def main() -> None:
    quick = "--quick" in sys.argv
    byzfl = import_byzfl()
    power = machine.measure()
    print(
        f"this machine now: {power.bandwidth / 1e9:.1f} GB/s, {power.flops32 / 1e9:.0f} GFlop/s float32, "
        f"{power.flops64 / 1e9:.0f} float64; {threads.threads()} threads"
    )
    for case in (MNIST, CIFAR, MANY):
        report(byzfl, "nnm+trimmed_mean", case, power, quick)
    for name in list(rivals(byzfl, MNIST))[1:]:
        report(byzfl, name, MNIST, power, quick)
    report_forging(MNIST)
    report_graph_rules(MNIST)
    report_compiling()


if __name__ == "__main__":
    main()
