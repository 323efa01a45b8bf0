"""What rpel gains on this machine, in about two minutes: every measurement is a ratio to the plain way.

Ratios travel between machines; seconds do not. Work is timed several times and the fastest counts: on a shared machine
the others measure the neighbours. Kernels are compiled anew in a folder of their own, so nothing stored before counts.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import planning
from rpel.aggregation import rule
from rpel.kernels import compiled, plain

_VICTIMS, _M, _F, _D = 18, 16, 7, 176_050
"""The paper's MNIST setting, for a fifth of its victims."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of ours and of what it is compared with."""

    name: str
    seconds: float
    against: str
    seconds_against: float

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.seconds_against / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def measurements() -> Iterator[Measurement]:
    """One after the other, so that a display can show them as they come."""
    table, index = _round()
    yield _aggregation(table, index)
    yield _forging(table, index)
    yield _local_steps()
    yield _plan()
    yield _first_use()


def fastest(work: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of several.

    >>> fastest(lambda: None) < 1
    True
    """
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _round() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    coins = np.random.default_rng(0)
    table = coins.standard_normal((2 * _VICTIMS, _D), dtype=np.float32)
    index = np.stack([np.roll(np.arange(2 * _VICTIMS), -i)[:_M] for i in range(_VICTIMS)])
    return table, index


def _aggregation(table: NDArray[np.float32], index: NDArray[np.int64]) -> Measurement:
    robust, out = rule("nnm+trimmed_mean", f=_F), np.empty((_VICTIMS, _D), np.float32)
    robust.aggregate(table, index, out=out)  # compiles
    ours = fastest(lambda: robust.aggregate(table, index, out=out)) / _VICTIMS

    def numpy() -> None:
        near = plain.nearest(plain.squared_distances(table, index[:1]), _M - _F)
        plain.coordinatewise(table, index[:1], "trimmed_mean", _F, near)

    return Measurement("nnm+trimmed_mean, one victim", ours, "NumPy", fastest(numpy))


def _forging(table: NDArray[np.float32], index: NDArray[np.int64]) -> Measurement:
    one, z = np.ones(_VICTIMS), np.full(_VICTIMS, 1.5)
    compiled.moments(table, index, one, z)
    ours = fastest(lambda: compiled.moments(table, index, one, z)) / _VICTIMS
    theirs = fastest(lambda: plain.moments(table, index[:1], one[:1], z[:1]))
    return Measurement("forging ALIE, one victim", ours, "NumPy", theirs)


def _local_steps() -> Measurement:
    """A whole round of honest nodes, exchange included, against torch's forward and backward pass alone."""
    import torch

    from rpel.models import model
    from rpel.simulation.api import simulate

    fields: dict[str, Any] = {"nodes": 15, "byzantine": 3, "pull": 8, "rounds": 8, "eval_every": 8, "eval_size": 10}
    run = simulate("mnist", **fields, out=None)
    ours = float(min(run.history["seconds"][1:-1])) / 12
    network, x, y = model("mnist"), torch.randn(25, 1, 28, 28), torch.randint(10, (25,))

    def step() -> None:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]

    return Measurement("a whole round, one node", ours, "torch: forward and backward", fastest(step, 10))


def _plan() -> Measurement:
    ours = fastest(lambda: planning.plan(nodes=100_000, byzantine=10_000, rounds=200), 5)
    grid = range(5, 51, 5)
    theirs = fastest(lambda: [planning.simulate_max(100_000, 10_000, s, 200) for s in grid], 1)
    return Measurement("plan for 100,000 nodes, exact", ours, "five simulations of ten s", theirs)


_FIRST = """
import time, numpy as np
from rpel.aggregation import rule
table = np.zeros((16, 1000), np.float32); index = np.arange(16)[None]
begun = time.perf_counter()
rule("nnm+trimmed_mean", f=7).aggregate(table, index)
print(time.perf_counter() - begun)
"""


def _first_use() -> Measurement:
    """The first call in a process: kernels found in the cache, against compiled anew."""
    with tempfile.TemporaryDirectory() as cache:
        seconds = [
            float(
                subprocess.run(
                    [sys.executable, "-c", _FIRST], env={**os.environ, "RPEL_CACHE": cache}, stdout=subprocess.PIPE,
                    text=True, check=True,
                ).stdout
            )
            for _ in range(2)
        ]  # fmt: skip
    return Measurement("first call, kernels stored", seconds[1], "kernels compiled anew", seconds[0])
