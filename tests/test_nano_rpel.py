"""The one-file version for students computes what the package computes."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import algorithm
from support.paths import ROOT

Array = NDArray[np.float64]


@pytest.fixture
def nano(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return examples/nano_rpel.py as a module that trains for five rounds."""
    spec = importlib.util.spec_from_file_location("nano_rpel", ROOT / "examples/nano_rpel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nano_rpel", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROUNDS", 5)
    return module


def test_nano_plan_equals_the_planner(nano: ModuleType) -> None:
    plan = rpel.plan(nodes=nano.NODES, byzantine=nano.BYZANTINE, rounds=nano.ROUNDS)
    pull, b_hat = nano.plan()
    assert (pull, b_hat) == (plan.pull, plan.b_hat)
    assert nano.probability(pull, b_hat) == pytest.approx(plan.probability, rel=1e-12)


@pytest.mark.parametrize("attack", ["alie", "foe"])
def test_nano_training_equals_algorithm_1(nano: ModuleType, attack: str) -> None:
    pull, b_hat = nano.plan()
    trained, met = nano.train(
        pull, getattr(nano, attack), lambda models: nano.nnm_trimmed_mean(models, b_hat)
    )

    shards, _ = nano.make_data(0)
    rng = np.random.default_rng([0, 1])

    def gradient(x: Array, node: int, t: int, k: int) -> Array:
        points, labels = shards[node]
        batch = rng.integers(len(points), size=25)
        g: Array = nano.gradient(x, points[batch], labels[batch])
        return g

    def draw(t: int, i: int) -> NDArray[np.int64]:
        return np.asarray(rng.choice(np.delete(np.arange(nano.NODES), i), pull, replace=False))

    problem = algorithm.plain(
        gradient, np.zeros(nano.FEATURES * nano.CLASSES), nodes=nano.NODES, byzantine=nano.BYZANTINE,
        pull=pull, b_hat=b_hat, lr=lambda t: 1.0, beta=0.9, decay=1e-4, draw=draw,
        forge=getattr(nano, attack),
    )  # fmt: skip
    state, most = algorithm.init(problem), 0
    for _ in range(nano.ROUNDS):
        state, info = algorithm.step(problem, state)
        assert info.received.met is not None
        most = max(most, int(info.received.met.max()))
    np.testing.assert_allclose(trained, state.x, rtol=0, atol=1e-12)
    assert met == most


def test_nano_rpel_is_at_most_200_lines_and_needs_numpy_alone() -> None:
    text = (ROOT / "examples/nano_rpel.py").read_text()
    imported = {
        line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))
    }
    assert len(text.splitlines()) <= 200
    assert imported == {"collections", "math", "numpy"}
