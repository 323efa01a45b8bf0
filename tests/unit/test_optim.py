"""Local steps by torch's optimisers, schedules by name, and the outer step:
each is what a loop by hand gives."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rpel import algorithm
from rpel.learning import NesterovOuter
from rpel.optim import factory, local_steps
from rpel.spec import Request, Spec, load, to_toml
from rpel.types import Aggregated
from support.simulations import BASE, Quadratic, simulation

Array = NDArray[Any]
SHAPES = [(2, 2), (3,)]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "sgd with momentum": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {"betas": [0.8, 0.99]}),
    "adamw": ("adamw", {"weight_decay": 0.3}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "a class": (torch.optim.RMSprop, {"momentum": 0.5}),
    "a class by whole matrices": (torch.optim.Adafactor, {}),
    "a maker": (lambda parameters: torch.optim.Adagrad(parameters, lr=0.05), {}),
}


TORCH: dict[Any, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def by_hand(
    optimizer: Any, parameters: dict[str, Any], node: int, rounds: int, steps: int, lr: Callable[[int], float]
) -> Array:
    """One node alone, in a loop as people write it."""
    task = Quadratic()
    model = [torch.nn.Parameter(part.clone()) for part in _cut(torch.from_numpy(task.initial()))]
    kind = TORCH.get(optimizer, optimizer)
    made = factory(kind, lr(1), 0.01, parameters)(model)
    rates = [group["lr"] / lr(1) for group in made.param_groups]
    for t in range(1, rounds + 1):
        for group, rate in zip(made.param_groups, rates, strict=True):
            group["lr"] = rate * lr(t)
        for k in range(steps):
            x = torch.cat([part.detach().reshape(-1) for part in model]).numpy()[None]
            g, _ = task.gradient(x, np.zeros((1, 1)), np.array([node]), t, k)
            for part, gradient in zip(model, _cut(torch.from_numpy(g[0].copy())), strict=True):
                part.grad = gradient
            made.step()
    return torch.cat([part.detach().reshape(-1) for part in model]).numpy()


def _cut(vector: torch.Tensor) -> list[torch.Tensor]:
    parts = torch.split(vector, [math.prod(shape) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_node_optimiser_step_equals_a_lone_torch_step(name: str) -> None:
    optimizer, parameters = OPTIMIZERS[name]

    def lr(t: int) -> float:
        return 0.1 / t

    local = local_steps(
        Quadratic(), optimizer, lr, SHAPES, weight_decay=0.01, parameters=parameters, steps=2, nodes=5
    )
    x, state = local.init()
    for t in range(1, 4):
        x, state = local(x, state, np.arange(5), t)
    expected = np.stack([by_hand(optimizer, parameters, i, 3, 2, lr) for i in range(5)])
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-9)
    assert np.abs(x).min() > 0


def test_optimiser_state_stays_local_and_is_not_exchanged() -> None:
    run = simulation(BASE.replace(optimizer="adam", lr=0.1), Quadratic())
    run.step()
    assert (run.state.local["steps"] == 1).all()
    for name in ("mean", "square"):
        assert run.state.local[name].shape == (12, 7)
        assert len({row.tobytes() for row in run.state.local[name]}) == 12


# --- schedules by name --------------------------------------------------------------------------------------


def test_cosine_schedule_equals_torch_and_survives_toml(tmp_path: Path) -> None:
    spec = Request(lr="cosine(0.4, warmup=5, to=0.02)", rounds=30)
    assert [spec.rate(t) for t in range(1, 6)] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=25, eta_min=0.02)
    for t in range(6, 31):
        assert spec.rate(t) == pytest.approx(made.param_groups[0]["lr"]), t
        made.step()
        theirs.step()
    file = tmp_path / "run.toml"
    file.write_text(to_toml(spec), "utf-8")
    assert load(file).lr == spec.lr == "cosine(0.4, warmup=5, to=0.02)"
    assert [Spec(lr="warmup(0.5, 2)").rate(t) for t in (1, 2, 3, 60)] == [0.25, 0.5, 0.5, 0.5]
    assert Spec(lr="cosine( 0.1 )").lr == "cosine(0.1)"


# --- the outer step -----------------------------------------------------------------------------------------


def test_outer_step_is_nesterov_and_skipped_with_a_kept_half_step() -> None:
    rng = np.random.default_rng(0)
    outer, x = NesterovOuter(lr=0.7, momentum=0.9), rng.normal(size=(3, 4))
    state, v = outer.init(x), np.zeros_like(x)
    for stored in ([False, False, False], [False, True, False], [False, False, False]):
        z = rng.normal(size=(3, 4))
        degraded = np.array(stored)
        delta = x - z
        v = np.where(degraded[:, None], v, 0.9 * v + delta)
        expected = np.where(degraded[:, None], z, x - 0.7 * (delta + 0.9 * v))
        x, state = outer(x.copy(), z.copy(), state, Aggregated(degraded, np.zeros(3, dtype=np.int64)))
        np.testing.assert_allclose(x, expected)
        np.testing.assert_allclose(state["v"], v)


def test_simulators_outer_step_is_the_one_of_the_plain_algorithm() -> None:
    spec = BASE.replace(byzantine=0, nodes=12, pull=6, b_hat=1, local_steps=3, outer="nesterov(0.5)")
    run = simulation(spec, Quadratic())
    problem = run.problem
    x = run.state.x.copy()
    v = np.zeros_like(x)
    for _ in range(4):
        before = x.copy()
        _, info = algorithm.step(
            algorithm.Problem(problem.local, problem.deliver, problem.rule), _copied(run.state)
        )
        z, _ = problem.rule(info.half, info.received, problem.deliver.nodes(info.round), info.round)
        v = 0.9 * v + (before - z)
        x = before - 0.5 * ((before - z) + 0.9 * v)
        run.step()
        np.testing.assert_allclose(run.state.x, x, rtol=1e-12)


def _copied(state: algorithm.State) -> algorithm.State:
    local = {key: value.copy() for key, value in state.local.items()}
    return algorithm.State(state.round, state.x.copy(), local, dict(state.network))
