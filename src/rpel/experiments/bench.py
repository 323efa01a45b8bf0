"""Measured on this machine: what rpel gains over the plain way, in about two minutes,
and what runs will cost.

Ratios travel between machines; seconds do not. Work is timed several times and the fastest counts: on a
shared machine the others measure the neighbours. Kernels are compiled anew in a folder of their own,
so nothing stored before counts.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import planning
from rpel.attacks import attack
from rpel.backend import compiled, plain
from rpel.config.spec import Spec
from rpel.rules import rule
from rpel.simulation.inputs import Inputs
from rpel.simulation.methods import resolve
from rpel.simulation.run import pinned
from rpel.simulation.runner import Run
from rpel.text import count

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

    fields: dict[str, Any] = {
        "nodes": 15,
        "byzantine": 3,
        "pull": 8,
        "rounds": 8,
        "eval_every": 8,
        "eval_size": 10,
    }
    run = simulate("mnist", **fields, out=None)
    ours = float(min(run.history["seconds"][1:-1])) / 12
    network, x, y = model("mnist"), torch.randn(25, 1, 28, 28), torch.randint(10, (25,))

    def step() -> None:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]

    return Measurement("a whole round, one node", ours, "torch: forward and backward", fastest(step, 10))


def _plan() -> Measurement:
    """The exact answer against Algorithm 2 as written: five simulations of each of ten s,
    every count drawn."""
    nodes, byzantine, rounds, simulations = 100_000, 10_000, 200, 50
    ours = fastest(lambda: planning.plan(nodes=nodes, byzantine=byzantine, rounds=rounds), 5)
    coins, part = np.random.default_rng(0), 20
    draws = (nodes - byzantine) * rounds // part
    drawn = fastest(lambda: coins.hypergeometric(byzantine, nodes - 1 - byzantine, 30, size=draws).max(), 1)
    against = f"Algorithm 2, of which 1/{part * simulations} was timed"
    return Measurement("plan for 100,000 nodes, exact", ours, against, drawn * part * simulations)


_FIRST = """
import time, numpy as np
from rpel.rules import rule
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
                    [sys.executable, "-c", _FIRST], env={**os.environ, "RPEL_CACHE": cache},
                    stdout=subprocess.PIPE, text=True, check=True,
                ).stdout
            )
            for _ in range(2)
        ]  # fmt: skip
    return Measurement("first call, kernels stored", seconds[1], "kernels compiled anew", seconds[0])


# --- what runs will cost, measured on real rounds of each kind ----------------------------------------------

_TIMED = 2
"""Rounds that are timed."""


@dataclass(frozen=True)
class Cost:
    """Seconds that a kind of run takes: to begin, for a round, to evaluate,
    and to evaluate on all test examples."""

    start: float
    round: float
    evaluation: float
    last: float

    def seconds(self, spec: Spec) -> float:
        """A whole run.

        >>> Cost(start=1.0, round=0.5, evaluation=0.1, last=2.0).seconds(Spec(rounds=60, eval_every=20))
        33.2
        """
        evaluations = (spec.rounds - 1) // spec.eval_every
        return round(self.start + spec.rounds * self.round + evaluations * self.evaluation + self.last, 6)


def kind(spec: Spec) -> str:
    """Runs of one kind cost about the same; the most expensive of them is measured.

    >>> kind(Spec(nodes=30, local_steps=3))
    'mnist-sample with mnist, n = 30, batch 25, 3 local steps'
    """
    searched = ", adaptive attack" if searches(spec) else ""
    steps = count(spec.local_steps, "local step")
    return f"{spec.dataset} with {spec.model}, n = {spec.nodes}, batch {spec.batch_size}, {steps}{searched}"


def searches(spec: Spec) -> bool:
    """Whether the run's attack searches, which multiplies what the rule costs;
    False for one that does not exist."""
    with suppress(ValueError):
        return attack(spec.attack, **spec.attack_params).searches
    return False


def measure(spec: Spec, inputs: Inputs) -> Cost:
    """Begin the run, keep nothing, and time two rounds (after one that compiles) and one evaluation."""
    with pinned(spec.threads):
        begun = time.perf_counter()
        running = Run(resolve(spec), inputs)
        start = time.perf_counter() - begun
        running.simulation.step(measured=False)
        steps = fastest(lambda: [running.simulation.step(measured=False) for _ in range(_TIMED)], 1)
        evaluation = fastest(lambda: running.simulation.evaluate(running.evaluate.subset), 1)
    final = running.evaluate.final
    share = len(inputs.dataset.test_y if final is None else final) / len(running.evaluate.subset)
    return Cost(start, steps / _TIMED, evaluation, evaluation * share)


def costs(
    specs: Iterable[Spec], inputs: Mapping[str, Inputs], kind: Callable[[Spec], str] = kind
) -> dict[str, Cost]:
    """The measured cost of each kind among these runs, of the dearest; nothing for a run that cannot begin.

    Such a run will say so itself, and the others go on.
    """
    cheapest_first = sorted(specs, key=lambda s: (s.pull or 0, searches(s), -s.byzantine))
    costs_by_kind: dict[str, Cost] = {}
    for name, spec in {kind(spec): spec for spec in cheapest_first}.items():
        costs_by_kind[name] = Cost(0.0, 0.0, 0.0, 0.0)
        with suppress(ValueError):
            costs_by_kind[name] = measure(spec, inputs[spec.dataset])
    return costs_by_kind
