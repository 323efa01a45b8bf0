"""Estimates how long runs will take from real rounds of each kind, measured on this machine."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rpel.attacks import attack
from rpel.simulation.engine import Engine
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import resolve
from rpel.simulation.workers import pinned
from rpel.spec import Spec
from rpel.text import count

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


def measure(spec: Spec, inputs: Gathered) -> Cost:
    """Begin the run, keep nothing, and time two rounds (after one that compiles) and one evaluation."""
    subset = inputs.subset(spec.eval_size)
    with pinned(spec.threads):
        begun = time.perf_counter()
        engine = Engine.of(resolve(spec), inputs)
        start = time.perf_counter() - begun
        engine.step()
        engine.measure()
        steps = _seconds(lambda: [(engine.step(), engine.measure()) for _ in range(_TIMED)])
        evaluation = _seconds(lambda: engine.evaluate(subset))
    share = inputs.dataset.test_size / len(subset)
    return Cost(start, steps / _TIMED, evaluation, evaluation * share)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def costs(
    specs: Iterable[Spec], inputs: Mapping[str, Gathered], kind: Callable[[Spec], str] = kind
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
