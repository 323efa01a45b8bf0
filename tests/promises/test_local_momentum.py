"""LocalMomentum is lines 5 and 6 of Algorithm 1, and survives being saved."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rpel
from rpel.optim import LocalMomentum


def test_optimiser_is_reached_through_the_package() -> None:
    assert "optim" in dir(rpel)
    assert rpel.optim.LocalMomentum is LocalMomentum


def steps(optimiser: LocalMomentum, x: torch.nn.Parameter, gradients: np.ndarray) -> None:
    for g in gradients:
        x.grad = torch.from_numpy(g.copy())
        optimiser.step()


@given(st.floats(0, 1), st.floats(0, 0.99), st.floats(0, 0.5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_steps_follow_the_formula(lr: float, beta: float, decay: float, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start, gradients = rng.standard_normal(4), rng.standard_normal((count, 4))
    x = torch.nn.Parameter(torch.from_numpy(start.copy()))
    steps(LocalMomentum([x], lr=lr, momentum=beta, weight_decay=decay), x, gradients)
    expected, m = start, np.zeros(4)
    for g in gradients:
        m = beta * m + (1 - beta) * g
        expected = expected - lr * (m + decay * expected)
    np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_restored_optimiser_continues_identically() -> None:
    gradients = np.random.default_rng(0).standard_normal((8, 3))
    x = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    steps(LocalMomentum([x], lr=0.1), x, gradients)

    y = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    first = LocalMomentum([y], lr=0.1)
    steps(first, y, gradients[:5])
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    second = LocalMomentum([y], lr=0.7, momentum=0.2)
    second.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    steps(second, y, gradients[5:])
    assert torch.equal(x, y)


def test_optimiser_closure_runs_with_gradients_and_returns_the_loss() -> None:
    x = torch.nn.Parameter(torch.tensor([3.0]))
    optimiser = LocalMomentum([x], lr=0.5, momentum=0.0)

    def closure() -> float:
        optimiser.zero_grad()
        loss = (x**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    assert optimiser.step(closure) == 9.0
    assert float(x.detach()) == 0.0


def test_parameters_without_a_gradient_stay() -> None:
    x, y = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimiser = LocalMomentum([x, y], lr=0.1, weight_decay=0.5)
    x.grad = torch.ones(1)
    optimiser.step()
    assert float(y.detach()) == 1.0


@pytest.mark.parametrize(
    ("lr", "momentum", "decay", "message"),
    [
        (-1, 0.9, 0, "lr"),
        (float("nan"), 0.9, 0, "lr"),
        (0.1, 1.0, 0, "momentum"),
        (0.1, 0.9, -0.1, "weight_decay"),
    ],
)
def test_impossible_settings_are_refused_by_name(
    lr: float, momentum: float, decay: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LocalMomentum([torch.nn.Parameter(torch.ones(1))], lr=lr, momentum=momentum, weight_decay=decay)
