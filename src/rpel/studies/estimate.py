"""Estimates of how long runs will take, from real rounds of each kind, measured on this machine."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from rpel.attacks import attack
from rpel.simulation.methods import resolve
from rpel.simulation.run import run
from rpel.spec import Request
from rpel.text import count

ROUNDS = 4
"""Rounds that are measured: the first compiles, the third is evaluated in part, the fourth in full."""


@dataclass(frozen=True)
class Cost:
    """Seconds that a kind of run takes: to begin, for a round, and to evaluate in part and in full."""

    start: float = 0.0
    round: float = 0.0
    evaluation: float = 0.0
    last: float = 0.0

    def seconds(self, spec: Request) -> float:
        """Return the seconds of a whole run.

        >>> Cost(start=1.0, round=0.5, evaluation=0.1, last=2.0).seconds(Request(rounds=60, eval_every=20))
        33.2
        """
        evaluations = (spec.rounds - 1) // spec.eval_every
        return round(self.start + spec.rounds * self.round + evaluations * self.evaluation + self.last, 6)


def kind(spec: Request) -> str:
    """Return what runs of about the same cost have in common.

    >>> kind(Request(nodes=30, local_steps=3))
    'mnist-sample with mnist, n = 30, rpel, batch 25, 3 local steps'
    """
    searched = ", adaptive attack" if searches(spec) else ""
    size = f"{spec.dataset} with {spec.model}, n = {spec.nodes}, {spec.method}"
    return f"{size}, batch {spec.batch_size}, {count(spec.local_steps, 'local step')}{searched}"


def searches(spec: Request) -> bool:
    """Return whether the run's attack searches, which multiplies what the rule costs."""
    with suppress(ValueError):  # the run itself will name an attack that does not exist
        return attack(spec.attack).searches
    return False


def measure(spec: Request) -> Cost:
    """Return what the run costs, from a few of its rounds; nothing is kept."""
    began = time.perf_counter()
    short = resolve(spec).spec.replace(rounds=ROUNDS, eval_every=ROUNDS - 1, seeds=None)
    _, step, partly, fully = run(short, keep=False).history["seconds"]
    start = time.perf_counter() - began - step - partly - fully
    return Cost(start, step, max(0.0, partly - step), max(0.0, fully - step))


def costs(specs: Iterable[Request], kind: Callable[[Request], str] = kind) -> dict[str, Cost]:
    """Return the cost of each kind among these runs, of the dearest; nothing for one that cannot begin."""
    cheapest_first = sorted(specs, key=lambda spec: (spec.pull or 0, searches(spec), -spec.hostile_count))
    found = {}
    for name, spec in {kind(spec): spec for spec in cheapest_first}.items():
        found[name] = Cost()
        with suppress(Exception):  # a run that fails says so itself, and the others go on
            found[name] = measure(spec)
    return found


def seconds(specs: Iterable[Request], jobs: int = 1, kind: Callable[[Request], str] = kind) -> float:
    """Return the seconds that these runs will take, several at a time."""
    open_runs = list(specs)
    found = costs(open_runs, kind)
    return sum(found[kind(spec)].seconds(spec) for spec in open_runs) / jobs
