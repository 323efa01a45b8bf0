"""Fault-free real peers and the simulator are the same algorithm: same coins, same models, to 1e-6.

Twelve peers over real TLS on loopback. Only their clock is the test's: a round begins when all have ended the
one before it, so that nothing depends on how fast the machine is. Draws are handed in,
which only a program can do.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import nn

from rpel.backend.threads import set_threads, threads
from rpel.peer.config.settings import Config
from rpel.peer.config.timetable import Timetable
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.wire import Layout, Reordering
from rpel.peer.learn.learner import TaskLearner, built_in, training
from rpel.peer.node.node import Node
from rpel.peer.state.models import MODEL_FILE
from rpel.peer.state.store import Store
from rpel.randomness import stream
from rpel.simulation.api import simulate
from rpel.simulation.engine import Engine
from rpel.simulation.methods import resolve
from rpel.spec import Spec, Training
from rpel.tasks import Objective, Task
from rpel.topology import Pull
from rpel.types import Integers, Models
from support.thread_network import NetworkFiles, found
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

NODES, BYZANTINE, PULL, B_HAT, PERIOD = 12, 2, 9, 2, 1000.0
HYPER: Mapping[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "eval_every": 1000}


@dataclass
class Together:
    """A clock that all peers share: when all of them sleep, it is the time they sleep until."""

    now: float = -1.0
    until: float = 0.0
    everybody: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.everybody = threading.Barrier(NODES, action=self._arrive)

    def _arrive(self) -> None:
        self.now = self.until

    def sleep(self, until: float) -> None:
        self.until = until
        self.everybody.wait(timeout=PATIENCE)


class Paced(Node):
    """A peer whose time is the shared clock's."""

    def __init__(self, config: Config, together: Together) -> None:
        def sampler(round: int, me: int, nodes: int, s: int) -> tuple[int, ...]:
            return tuple(int(other) for other in Pull(nodes, s, seed=0).sample(round, np.array([me]))[0])

        super().__init__(config, sampler=sampler)
        self._together = together
        self.clock = self.service.clock = RoundClock(
            Timetable.steady(0.0, PERIOD), wall=lambda: together.now, ticks=lambda: together.now
        )

    def sleep(self, until: float) -> None:
        self._together.sleep(until)

    def _ask_clocks(self) -> list[float | None]:
        """Until all tell: whoever slept here alone would have the others wait for it in the first round."""
        while len(offsets := super()._ask_clocks()) < NODES - 1:
            pass
        return offsets


class LeastSquares(Objective):
    """Linear regression in float64, five examples a step, each member with targets of its own."""

    def __init__(self, d: int = 20, examples: int = 40) -> None:
        self.d, self.layout = d, {"x": (d,)}
        self._x = stream(0, "inputs").standard_normal((NODES, examples, self.d))
        truth = 1 + 0.3 * stream(0, "truth").standard_normal((NODES, self.d))
        self._y = np.einsum("ned,nd->ne", self._x, truth)

    def initial(self) -> Any:
        return stream(0, "initial").standard_normal(self.d)

    def local_state(self, h: int) -> Any:
        return np.zeros((h, 0))

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        out = np.empty_like(x) if out is None else out
        for row, node in enumerate(ids):
            batch = stream(0, ("batch", k), t, int(node)).integers(0, self._x.shape[1], 5)
            inputs = self._x[node, batch]
            out[row] = inputs.T @ (inputs @ x[row] - self._y[node, batch]) / 5
        return out, local

    def evaluate(self, x: Models, local: Models, subset: Integers | None = None) -> tuple[Models, Models]:
        return np.zeros(len(x)), np.square(x - 1).mean(axis=1)

    def full_gradient(self, x: Models, local: Models, size: int | None = None) -> Models:
        raise NotImplementedError


def founded(
    folder: Path, rounds: int, initial: Models, layout: Layout | None = None, **terms: Any
) -> NetworkFiles:
    """The files of twelve members that begin with this model, by default one vector x."""
    terms |= {"period": PERIOD, "byzantine": BYZANTINE, "initial": initial}
    return found(folder, NODES, rounds=rounds, layout=layout or Layout.of({"x": initial}), **terms)


def parts_and_module() -> tuple[list[tuple[Any, Any]], nn.Module]:
    """Examples of its own for each member, and a small model."""
    coins = np.random.default_rng(0)
    inputs = [coins.normal(size=(10 + node, 3)).astype(np.float32) for node in range(NODES)]
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return [(x, (x.sum(axis=1) > 0).astype(np.int64)) for x in inputs], module


def by_peers(
    files: NetworkFiles, task: Objective | list[Objective], hyper: Training | None = None, steps: int = 1
) -> Models:
    """The models (n, d) after the last round of real peers, with one task or one each."""
    together, hyper = Together(), hyper or training(HYPER)
    tasks = task if isinstance(task, list) else [task] * NODES
    m = files.membership
    nodes = [Paced(config, together) for config in files.configs]

    def live(place: int) -> None:
        try:
            layout = nodes[place].layout
            learner = TaskLearner(tasks[place], place, hyper, local_steps=steps, layout=layout)
            for _ in nodes[place].live(learner):
                pass
        except BaseException:
            together.everybody.abort()
            raise

    with ExitStack() as open_nodes, ThreadPoolExecutor(NODES) as pool:
        for node in nodes:  # all listen before the first asks for a clock
            open_nodes.enter_context(node)
        list(pool.map(live, range(NODES)))
    rounds = files.membership.rounds
    for node in nodes:
        assert node.summary()["outcomes"] == {"aggregated": rounds, "local_only": 0, "caught_up": 0}
        assert node.summary()["pulls"]["ok"] == m.pull * rounds
    return np.array([_last(node) for node in nodes])


def _last(node: Node) -> Models:
    with Store(node.config.state_dir, node.layout) as store:
        kept = store.memory().checkpoint
    assert kept is not None
    return kept.x


def by_simulator(task: Objective, rounds: int, hyper: Training | None = None, **others: Any) -> Models:
    """The models (n, d) after the last round of the simulator."""
    hyper, others = hyper or training(HYPER), {"pull": PULL, "b_hat": B_HAT, **others}
    spec = Spec(
        nodes=NODES, byzantine=0, rounds=rounds, lr=hyper.lr, momentum=hyper.momentum,
        weight_decay=hyper.weight_decay, optimizer=hyper.optimizer,
        attack="none", **others,
    )  # fmt: skip
    run = Engine(resolve(spec), task)
    for _ in range(rounds):
        run.step()
    return run.models()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = threads()
    set_threads(1)
    yield
    set_threads(before)


def test_five_rounds_of_mnist_agree_with_the_simulator(tmp_path: Path, one_thread: None) -> None:
    task = built_in("mnist-sample", training(HYPER), NODES, run="consortium")
    layout = Layout.of(task.module.named_parameters())
    files = founded(tmp_path, 5, task.initial(), layout)
    real, simulated = by_peers(files, task), by_simulator(task, 5)
    assert np.abs(simulated - task.initial()).max() > 1e-3, "nothing was learned"
    assert np.abs(real - simulated).max() <= 1e-6


@pytest.mark.parametrize("rounds", [25, pytest.param(100, marks=pytest.mark.full)])
def test_rounds_of_a_linear_task_in_float64_agree_with_the_simulator(
    tmp_path: Path, one_thread: None, rounds: int
) -> None:
    task = LeastSquares()
    real, simulated = by_peers(founded(tmp_path, rounds, task.initial()), task), by_simulator(task, rounds)
    assert real.dtype == np.float64
    assert np.abs(simulated - 1).max() < 2 < np.abs(task.initial() - 1).max()
    assert np.abs(real - simulated).max() <= 1e-6


def test_coded_models_are_the_simulators_bit_for_bit(tmp_path: Path, one_thread: None) -> None:
    """Three blocks, the last one short: local steps are each node's own here,
    so that nothing but rounding is left."""
    task, rounds = LeastSquares(d=600), 8
    files = founded(tmp_path, rounds, task.initial(), wire="int8")
    real, simulated = by_peers(files, task), by_simulator(task, rounds, wire="int8")
    assert not np.array_equal(simulated, by_simulator(task, rounds)), "the code changes nothing"
    assert np.array_equal(real, simulated)


def test_adamw_a_falling_rate_and_an_outer_step_agree_with_the_simulator(
    tmp_path: Path, one_thread: None
) -> None:
    task, rounds = LeastSquares(), 10
    table = {"lr": "cosine(0.05, warmup=3)", "optimizer": "adamw(eps=1e-6)"}
    hyper = training({**HYPER, **table}, rounds=rounds)
    terms: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.6, "outer_momentum": 0.8}
    real = by_peers(founded(tmp_path, rounds, task.initial(), **terms), task, hyper, steps=3)
    outer = {"outer": "nesterov(0.6, momentum=0.8)"}
    simulated = by_simulator(task, rounds, hyper, local_steps=3, **outer)
    without = by_simulator(task, rounds, hyper, local_steps=3)
    assert np.abs(simulated - without).max() > 1e-2, "the outer step changes nothing"
    assert np.abs(real - simulated).max() <= 1e-6


def test_task_object_gives_the_same_model_in_simulation_and_network(tmp_path: Path, one_thread: None) -> None:
    parts, module = parts_and_module()
    task = Task(module, parts, parts[0])
    layout = Layout.of(module.named_parameters())
    initial = np.concatenate([value.detach().numpy().ravel() for value in module.parameters()])
    files = founded(tmp_path, 4, initial, layout)
    by_peers(files, [task.of_member(i, batch_size=4, seed=0) for i in range(NODES)])
    fields = {key: HYPER[key] for key in ("lr", "momentum", "weight_decay")}
    plan: dict[str, Any] = {"nodes": NODES, "byzantine": 0, "pull": PULL, "b_hat": B_HAT, "rounds": 4}
    result = simulate(task=task, batch_size=4, attack="none", **plan, **fields)
    for i, config in enumerate(files.configs):
        handed_over, simulated = load_file(config.state_dir / MODEL_FILE), result.state_dict(i)
        assert set(handed_over) == set(simulated)
        for name, value in simulated.items():
            np.testing.assert_allclose(handed_over[name], value.numpy(), atol=1e-6)
    assert np.abs(result.models - initial).max() > 1e-3, "nothing was learned"
    with pytest.raises(ValueError, match=r"member 12 .*12 members"):
        task.of_member(12, batch_size=4, seed=0)


@pytest.mark.full
def test_members_tasks_agree_with_one_joint_task_in_the_simulator(tmp_path: Path, one_thread: None) -> None:
    """The network's models travel in another order than the task's: values are matched by name."""
    parts, module = parts_and_module()
    shapes = {name: tuple(value.shape) for name, value in sorted(module.named_parameters())}
    layout = Layout(tuple(shapes), tuple(shapes.values()), np.dtype(np.float32))
    assert list(shapes) != [name for name, _ in module.named_parameters()]
    initial = np.concatenate([module.state_dict()[name].numpy().ravel() for name in shapes])
    files = founded(tmp_path, 5, initial, layout)
    common: dict[str, Any] = {"batch_size": 4, "seed": 7}
    tasks: list[Objective] = [Task(module, part, part).of_member(i, **common) for i, part in enumerate(parts)]
    real = by_peers(files, tasks)
    whole = Task(module, parts, parts[0])
    assert whole.shards is not None
    simulated = by_simulator(whole.among(whole.shards, **common), 5)
    order = Reordering(layout, whole.layout, "the task")
    own = np.stack([order.inwards(model, np.empty(layout.d, np.float32)) for model in real])
    assert np.abs(simulated - whole.among(whole.shards, **common).initial()).max() > 1e-3, (
        "nothing was learned"
    )
    assert np.abs(own - simulated).max() <= 1e-6
