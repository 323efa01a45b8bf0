"""How long will it take? Measured on real rounds of each kind of run, never guessed."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rpel.config.spec import Spec
from rpel.simulation.environment import pinned
from rpel.simulation.material import Material
from rpel.simulation.running import Running
from rpel.simulation.settle import settle

_TIMED = 2


@dataclass(frozen=True)
class Cost:
    """Seconds that a kind of run takes: to begin, for a round, to evaluate, and to evaluate on all test examples."""

    start: float
    round: float
    evaluation: float
    last: float

    def seconds(self, spec: Spec) -> float:
        """A whole run.

        >>> Cost(start=1.0, round=0.5, evaluation=0.1, last=2.0).seconds(Spec(rounds=60, eval_every=20))
        33.2
        """
        return round(self.start + spec.rounds * self.round + self._evaluations(spec) * self.evaluation + self.last, 6)

    @staticmethod
    def _evaluations(spec: Spec) -> int:
        return (spec.rounds - 1) // spec.eval_every


def kind(spec: Spec) -> str:
    """Runs of one kind cost about the same; the most expensive of them is measured.

    >>> kind(Spec(nodes=30, local_steps=3))
    'mnist-sample with mnist, n = 30, batch 25, 3 local steps'
    """
    searched = ", adaptive attack" if spec.attack == "strongest" else ""
    steps = f"{spec.local_steps} local step{'s' * (spec.local_steps > 1)}"
    return f"{spec.dataset} with {spec.model}, n = {spec.nodes}, batch {spec.batch_size}, {steps}{searched}"


def measure(spec: Spec, material: Material) -> Cost:
    """Begin the run, keep nothing, and time two rounds (after one that compiles) and one evaluation."""
    with pinned(spec.threads) as threads:
        begun = time.perf_counter()
        running = Running(settle(spec), material, None, None, threads)
        start = time.perf_counter() - begun
        running.simulation.step(measured=False)
        steps = _timed(lambda: [running.simulation.step(measured=False) for _ in range(_TIMED)])
        evaluation = _timed(lambda: running.simulation.evaluate(running.subset))
    share = len(material.dataset.test_y) / len(running.subset)
    return Cost(start, steps / _TIMED, evaluation, evaluation * share)


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def costs(specs: Iterable[Spec], materials: Mapping[str, Material]) -> dict[str, Cost]:
    """The measured cost of each kind among these runs."""
    dearest: dict[str, Spec] = {}
    for spec in specs:
        held = dearest.setdefault(kind(spec), spec)
        if _dearness(spec) > _dearness(held):
            dearest[kind(spec)] = spec
    return {name: _measured(spec, materials[spec.dataset]) for name, spec in dearest.items()}


def _measured(spec: Spec, material: Material) -> Cost:
    """Nothing for a run that cannot begin: it will say so itself, and the others go on."""
    try:
        return measure(spec, material)
    except ValueError:
        return Cost(0.0, 0.0, 0.0, 0.0)


def _dearness(spec: Spec) -> tuple[int, bool, int]:
    return spec.pull or 0, spec.attack in ("alie", "strongest"), -spec.byzantine
