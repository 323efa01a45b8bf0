"""The smallest simulation worth running: a quadratic task in seven dimensions, three hostile nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import Attack
from rpel.randomness import stream
from rpel.simulation.engine import Engine
from rpel.simulation.methods import resolve
from rpel.simulation.network import Ask, SimulatedNetwork
from rpel.spec import Spec
from rpel.tasks import Objective
from rpel.types import Arrays, Integers, Models, Received, RoundInfo

Array = NDArray[Any]


class Quadratic(Objective):
    """Node i pulls towards its own target, with noise from coordinates: f_i(x) = ‖x − c_i‖² / 2."""

    d = 7
    layout = {"x": (7,)}  # noqa: RUF012

    def __init__(self, nodes: int = 12, noise: float = 0.1) -> None:
        self.targets = np.random.default_rng(0).normal(size=(nodes, self.d)) * 0.3 + 1
        self.noise = noise

    def initial(self) -> Any:
        return np.zeros(self.d)

    def local_state(self, h: int) -> Any:
        return np.zeros((h, 1))

    def gradient(
        self, x: Array, local: Array, ids: Array, t: int, k: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        noise = np.stack([stream(0, ("batch", k), t, int(i)).standard_normal(self.d) for i in ids])
        g = x - self.targets[ids] + self.noise * noise
        if out is not None:
            out[:] = g
            g = out
        return g, local + 1  # local state counts the steps

    def evaluate(self, x: Array, local: Array, subset: Array | None = None) -> tuple[Array, Array]:
        off = np.square(x - self.targets.mean(axis=0)).sum(axis=1)
        return 1 / (1 + off), off

    def full_gradient(self, x: Array, local: Array, size: int | None = None) -> Array:
        return np.asarray(x - self.targets.mean(axis=0))


def schedule(rate: Callable[[int], float], rounds: int) -> list[tuple[int, float]]:
    """A rate for every round, as a Spec takes it."""
    return [(t, rate(t)) for t in range(1, rounds + 1)]


BASE = Spec(
    nodes=15,
    byzantine=3,
    pull=8,
    b_hat=3,
    rounds=6,
    lr=schedule(lambda t: 0.4 / t, 6),
    momentum=0.8,
    weight_decay=0.01,
    attack="foe",
)


def simulation(spec: Spec = BASE, task: Any = None) -> Engine:
    """The simulation of a Spec, of the quadratic task unless told otherwise."""
    return Engine(resolve(spec), task or Quadratic())


def play(engine: Engine, contraction: bool = False) -> RoundInfo:
    """Take a round, and return what is measured of it."""
    engine.step()
    return engine.measure(contraction)


def resumes_bit_by_bit(spec: Spec, rounds: int = 6, after: int = 3) -> None:
    """A simulation of a Spec that is loaded from another one's arrays ends where an undisturbed one ends."""
    whole, first, second = simulation(spec), simulation(spec), simulation(spec)
    for _ in range(rounds):
        whole.step()
    for _ in range(after):
        first.step()
    second.load({key: value.copy() for key, value in first.arrays().items()})
    for _ in range(rounds - after):
        second.step()
    np.testing.assert_array_equal(second.models(), whole.models())
    np.testing.assert_array_equal(second.state.local["momentum"], whole.state.local["momentum"])


@dataclass(frozen=True)
class Watching:
    """A network that keeps what is asked and delivered."""

    network: SimulatedNetwork
    seen: list[tuple[Ask, Received]] = field(default_factory=list)

    def init(self) -> Arrays:
        return self.network.init()

    def nodes(self, t: int) -> Integers:
        return self.network.nodes(t)

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        received, state = self.network(half, state, nodes, t, before)
        self.seen.append((self.network.ask(t, nodes), received))
        return received, state


def watched(run: Engine) -> list[tuple[Ask, Received]]:
    """What is asked and delivered from now on, a pair a round."""
    watching = Watching(run.network)
    run.problem = replace(run.problem, deliver=watching)
    return watching.seen


def with_attack(run: Engine, attack: Attack) -> Engine:
    """The simulation with another adversary."""
    run.network = replace(run.network, attack=attack)
    run.problem = replace(run.problem, deliver=run.network)
    return run
