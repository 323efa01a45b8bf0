"""Engines: each computes what plain torch computes, whichever nodes are computed beside."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpel.backend.threads import set_threads
from rpel.data import load, virtual
from rpel.tasks import Classification
from rpel.tasks.engines import ENGINES, PLAIN
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.dropout import dropout_mask
from rpel.tasks.engines.vmap import VmapEngine
from support.tasks import (
    BATCH,
    EXPECTED,
    MANY_AT_ONCE,
    NODES,
    batch,
    dataset,
    models,
    network,
    plain_gradient,
    relative,
    task,
)


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [*((name, np.float32, 1e-5) for name in EXPECTED),
     *(pytest.param(name, np.float64, 1e-10, marks=() if name in ("mlp", "mixed") else pytest.mark.full)
       for name in EXPECTED)],
)  # fmt: skip
def test_gradients_are_those_of_plain_torch(name: str, dtype: Any, bound: float) -> None:
    t = task(name)
    assert type(t.engine) is EXPECTED[name]
    x, ids = models(t, dtype=dtype), np.arange(NODES)
    out = np.full_like(x, np.nan)
    g, _ = t.gradient(x, t.local_state(NODES), ids, 7, 2, out=out)
    assert g is out
    module = network(name).to(torch.float64 if dtype is np.float64 else torch.float32)
    for i in range(NODES):
        inputs, labels = batch(t, i, 7, 2)
        if dtype is np.float64:  # bytes to numbers in float64 too, as the task does
            inputs = t.examples.batch(t.examples.indices(ids[i : i + 1], 7, 2), None, torch.float64)[0][0]
        assert relative(g[i], plain_gradient(module, x[i], inputs, labels)) < bound


@pytest.mark.parametrize("name", EXPECTED)
def test_results_do_not_depend_on_the_number_of_threads(name: str, thread_counts: list[int]) -> None:
    t = task(name, dropout=0.3)
    x, ids, local = models(t), np.arange(NODES), t.local_state(NODES)
    results = []
    for count in thread_counts:
        set_threads(count)
        g, after = t.gradient(x, local, ids, 1, 0)
        results.append([g, after, *t.evaluate(x, after), t.full_gradient(x, after, size=12)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", EXPECTED)
def test_step_replays_alone_for_any_subset_of_nodes(name: str) -> None:
    t = task(name, dropout=0.3)
    x, local = models(t), t.local_state(NODES)
    g, after = t.gradient(x, local, np.arange(NODES), 4, 1)
    t.gradient(x, local, np.arange(NODES), 5, 0)
    again, local_again = t.gradient(x[2:4], local[2:4], np.array([2, 3]), 4, 1)
    np.testing.assert_allclose(again, g[2:4], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(local_again, after[2:4], rtol=1e-5, atol=1e-7)
    if EXPECTED[name] not in MANY_AT_ONCE:
        np.testing.assert_array_equal(again, g[2:4])
        np.testing.assert_array_equal(local_again, after[2:4])


class _Noisy(nn.Module):
    """Draws random numbers in a way that cannot be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.dropout(x.flatten(1), 0.5, self.training))
        return out


def test_module_with_hidden_noise_still_replays() -> None:
    data = dataset((1, 6, 5))
    t = Classification(data, [np.arange(90)] * 20, _Noisy, batch_size=BATCH, seed=1)
    x, local, ids = models(t, 20), t.local_state(20), np.arange(20)
    before = torch.get_rng_state()
    g, _ = t.gradient(x, local, ids, 0, 0)
    assert t.engine.serial
    assert torch.equal(before, torch.get_rng_state())
    np.testing.assert_array_equal(t.gradient(x[7:9], local[7:9], ids[7:9], 0, 0)[0], g[7:9])


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_model_is_not_made_to_look_whole(name: str) -> None:
    t = task(name)
    x = models(t)
    x[1] = np.nan
    g, local = t.gradient(x, t.local_state(NODES), np.arange(NODES), 0, 0)
    assert np.isnan(g[1]).any()
    assert np.isfinite(g[[0, *range(2, NODES)]]).all()
    assert np.isnan(t.evaluate(x, local)[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.25, 0.4, 1e-3, 0.999])
def test_dropout_drops_with_its_probability_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.ones(40, 16, 25, 25, dtype=dtype).contiguous(memory_format=torch.channels_last)
    masks = [dropout_mask(p, x, generator) for _ in range(4)]
    assert all(one.stride() == x.stride() for one in masks)
    flat = torch.stack([one.permute(0, 2, 3, 1).flatten() for one in masks])
    assert np.unique(flat.numpy()).tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.02)
    flat, spread = (flat == 0).double(), (p * (1 - p)) ** 0.5
    assert abs(flat.mean() - p) < 5 * spread / flat.numel() ** 0.5
    # neighbours in memory share a number of the generator, and masks share the generator: still independent
    pairs = [(flat[:, k:], flat[:, : flat.shape[1] - k]) for k in (1, 2, 3, 4)] + [(flat[1:], flat[:-1])]
    for left, right in pairs:
        assert abs(((left - p) * (right - p)).mean()) < 5 * spread**2 / left.numel() ** 0.5


def test_dropout_takes_any_layout_and_probability_0_and_1() -> None:
    generator = torch.Generator().manual_seed(4)
    for x in (
        torch.ones(0),
        torch.ones(()),
        torch.ones(7),
        torch.ones(3, 1).expand(3, 5),
        torch.ones(9, 4)[::2, 1:],
    ):
        assert dropout_mask(0.5, x, generator).shape == x.shape
        assert not dropout_mask(1.0, x, generator).any()
        assert torch.equal(dropout_mask(1e-9, x, generator), torch.ones_like(x))


@pytest.mark.parametrize("hidden", [False, True])
def test_dropout_differs_between_nodes_rounds_and_steps(hidden: bool) -> None:
    """All hold one and the same example, so that only the noise can differ."""
    shape = (1, 6, 5)
    seen = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(30, 4))
    t = Classification(
        dataset(shape), [np.array([0])] * 3, _Noisy if hidden else seen, batch_size=BATCH, seed=1
    )
    x, local = np.tile(models(t, 1), (3, 1)), t.local_state(3)
    steps = [t.gradient(x, local, np.arange(3), round, k)[0] for round, k in ((0, 0), (1, 0), (0, 1))]
    assert len(np.unique(np.concatenate(steps), axis=0)) == 9


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(30, 4, bias=False)),
        nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Tanh(), nn.Linear(4, 4)),
        nn.Sequential(
            nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 4)
        ),
        nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(12, 4)
        ),
        nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(12, 4)
        ),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)),
        nn.Sequential(nn.Flatten(), nn.LogSoftmax(dim=1), nn.Linear(30, 4)),
    ],
)
def test_networks_of_other_forms_are_left_to_autograd_one_by_one_or_many_at_once(module: nn.Module) -> None:
    data = dataset((1, 6, 5))
    plain, many = (
        Classification(data, [np.arange(90)] * 3, module, batch_size=BATCH, seed=1, engines=engines)
        for engines in (PLAIN, ENGINES)
    )
    assert type(plain.engine) is AutogradEngine
    assert type(many.engine) is VmapEngine
    x = models(plain, 3)
    results = [t.gradient(x, t.local_state(3), np.arange(3), 0, 0)[0] for t in (plain, many)]
    assert relative(results[1], results[0]) < 1e-5


@pytest.mark.parametrize("name", ["mixed", "small"])
def test_many_at_once_equal_one_by_one_with_dropout_and_batchnorm(name: str) -> None:
    plain, many = (task(name, dropout=0.4, engines=engines) for engines in (PLAIN, ENGINES))
    assert type(many.engine) is VmapEngine
    x, local, ids = (
        models(plain, dtype=np.float64),
        plain.local_state(NODES).astype(np.float64),
        np.arange(NODES),
    )
    assert local.shape[1] > 0
    for _ in range(2):
        (expected, after), (g, state) = (t.gradient(x, local, ids, 3, 1) for t in (plain, many))
        assert relative(g, expected) < 1e-10
        np.testing.assert_allclose(state, after, rtol=1e-10)
        assert np.abs(state - local).max() > 0
        x, local = x - 0.1 * g, state
    for a, b in zip(plain.evaluate(x, local), many.evaluate(x, local), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    assert relative(many.full_gradient(x, local), plain.full_gradient(x, local)) < 1e-10


def test_frozen_layer_is_left_out_many_at_once_as_one_by_one() -> None:
    data, module = dataset((1, 6, 5)), network("mixed")
    whole = Classification(data, [np.arange(90)] * 3, module, batch_size=BATCH, seed=1)
    frozen = next(module.parameters()).requires_grad_(False)
    plain, many = (
        Classification(data, [np.arange(90)] * 3, module, batch_size=BATCH, seed=1, engines=engines)
        for engines in (PLAIN, ENGINES)
    )
    assert type(many.engine) is VmapEngine
    assert many.d == whole.d - frozen.numel()
    x, ids = models(many, 3, dtype=np.float64), np.arange(3)
    local = many.local_state(3).astype(np.float64)
    g, _ = many.gradient(x, local, ids, 0, 0)
    assert relative(g, plain.gradient(x, local, ids, 0, 0)[0]) < 1e-10
    x = np.hstack([np.tile(frozen.detach().double().reshape(-1).numpy(), (3, 1)), x])
    assert relative(g, whole.gradient(x, local, ids, 0, 0)[0][:, frozen.numel() :]) < 1e-5


class _Branching(nn.Module):
    """Decides by a number in the data, which many nodes at once cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1))
        return out if float(out.detach().sum()) > 0 else 2 * out


@pytest.mark.parametrize(
    "module",
    [_Branching(), nn.Sequential(nn.Flatten(), nn.Linear(30, 1700), nn.Tanh(), nn.Linear(1700, 4))],
    ids=["branches", "large"],
)
def test_networks_that_cannot_be_batched_are_computed_one_by_one(module: nn.Module) -> None:
    t = Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    assert type(t.engine) is AutogradEngine
    assert np.isfinite(t.gradient(models(t, 2), t.local_state(2), np.arange(2), 0, 0)[0]).all()


class _Doubled(nn.Linear):
    def __call__(self, *given: Any) -> Any:
        return 2 * super().__call__(*given)


class _Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def _altered(way: str) -> nn.Sequential:
    """A network of linear layers that looks like one the engines know, and does something else."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 5), nn.ReLU(), nn.Linear(5, 4))
    first, last = module[1], module[3]
    assert isinstance(first, nn.Linear)
    if way == "hook":
        first.register_forward_hook(lambda layer, given, output: 2 * output)
    elif way == "pre-hook":
        module.register_forward_pre_hook(lambda layer, given: (2 * given[0],))
    elif way == "backward hook":
        last.register_full_backward_hook(lambda layer, given, output: (2 * given[0],))  # type: ignore[index]
    elif way == "parametrisation":
        nn.utils.parametrize.register_parametrization(first, "weight", _Scaled())
    elif way == "call":
        module[1] = _Doubled(30, 5)
    elif way == "forward":
        last.forward = lambda x: x[:, :4] * 0.5
    elif way == "order":
        weight = first.weight
        del first.weight
        first.weight = weight
    elif way == "more":
        module.register_parameter("more", nn.Parameter(torch.ones(3)))
    return module


@pytest.mark.parametrize(
    "way", ["hook", "pre-hook", "backward hook", "parametrisation", "call", "forward", "order", "more"]
)
def test_lookalike_networks_do_not_take_the_fast_path(way: str) -> None:
    data, module = dataset((1, 6, 5)), _altered(way)
    plain, fast = (
        Classification(data, [np.arange(90)] * 3, module, batch_size=BATCH, seed=1, engines=engines)
        for engines in (PLAIN, ENGINES)
    )
    x, ids = models(plain, 3), np.arange(3)
    results = [t.gradient(x, t.local_state(3), ids, 0, 0)[0] for t in (plain, fast)]
    assert relative(results[1], results[0]) < 1e-5
    accuracies = [t.evaluate(x, t.local_state(3)) for t in (plain, fast)]
    np.testing.assert_allclose(accuracies[1], accuracies[0], rtol=1e-5)


def test_hook_on_dropout_is_called() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Dropout(0.5))
    module[2].register_forward_hook(lambda layer, given, output: 0 * output)
    t = Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    assert not t.gradient(models(t, 2), t.local_state(2), np.arange(2), 0, 0)[0].any()


def test_network_without_log_softmax_is_trained_by_cross_entropy_too() -> None:
    data = dataset((1, 6, 5))
    logits = nn.Sequential(nn.Flatten(), nn.Linear(30, 4))
    x = None
    results = []
    for module in (logits, nn.Sequential(*logits, nn.LogSoftmax(dim=1))):
        for engines in (ENGINES, PLAIN):
            t = Classification(data, [np.arange(90)] * 3, module, batch_size=BATCH, seed=1, engines=engines)
            x = models(t, 3) if x is None else x
            results.append(t.gradient(x, t.local_state(3), np.arange(3), 0, 0)[0])
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-4, atol=1e-6)


class Doubling(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(2.0).flatten(1))
        return out


def test_in_place_module_does_not_spoil_other_nodes_evaluation() -> None:
    data = load("mnist-sample-8x8")
    task = Classification(data, virtual(data.train_y, 3, math.inf, seed=0), Doubling, batch_size=5, seed=0)
    x = np.tile(task.initial(), (3, 1))
    _, lost = task.evaluate(x, task.local_state(3), np.arange(40))
    assert len(set(lost.tolist())) == 1


def test_hook_on_a_parameter_is_refused() -> None:
    module = _altered("")
    module[1].weight.register_hook(lambda gradient: 0 * gradient)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
