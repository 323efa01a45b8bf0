"""Hand-written convolutions: they compute what torch computes, for any shape."""

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rpel.backend.threads import set_threads
from rpel.data import load
from rpel.models import build, flatten
from rpel.simulation.build import build_task
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import resolve
from rpel.spec import Spec
from rpel.tasks import Classification
from rpel.tasks.engines import Probe, portable
from rpel.tasks.engines.dropout import Dropout
from rpel.tasks.engines.linear import recognise
from rpel.tasks.native import blocks
from rpel.tasks.native.blocks import Blocks, with_blocks
from rpel.tasks.native.convolution import ConvolutionEngine
from support.tasks import (
    BATCH,
    NODES,
    batch,
    dataset,
    models,
    network,
    plain_gradient,
    relative,
    task,
)


def _block(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.ReLU(), nn.BatchNorm2d(convolution.out_channels))


@given(st.data())
def test_convolutions_of_any_shape_equal_autograd(data: st.DataObject) -> None:
    channels, k, batch_size = (data.draw(st.integers(1, top)) for top in (4, 6, 4))
    padding = data.draw(st.integers(0, k - 1))
    height, width = (data.draw(st.integers(max(2 * k + 2, 7), 19)) for _ in "hw")
    filters = [data.draw(st.integers(1, 51)) for _ in "12"]
    notation = f"C({filters[0]})-R-M-C({filters[1]})-R-M-L(3)-S"
    least = ((min(height, width) + 2 * padding - k + 1) // 2) + 2 * padding - k + 1
    if least < 2:
        notation = f"C({filters[0]})-R-M-L(3)-S"
    module = build(notation, (channels, height, width), kernel=k, padding=padding, seed=1).double()
    layers = recognise(module)
    assert layers is not None
    engine = ConvolutionEngine(layers, (channels, height, width))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    inputs = torch.randn(1, batch_size, channels, height, width, dtype=torch.float64, generator=rng)
    labels = torch.randint(0, 3, (1, batch_size), generator=rng)
    x = flatten(module)[None]
    for _ in range(2):  # scratch is used again
        out = torch.full_like(x, torch.nan)
        engine.gradient(x, torch.empty(1, 0), inputs, labels, [0], out, train=True)
        expected = plain_gradient(module, x[0].numpy(), inputs[0], labels[0])
        np.testing.assert_allclose(out[0].numpy(), expected, rtol=1e-10, atol=1e-12)
        inputs = -inputs
    outputs = engine.outputs(x, torch.empty(1, 0), inputs[0])
    torch.testing.assert_close(outputs[0], module(inputs[0]).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (_block(nn.Conv2d(3, 36, 3, padding=1)), (3, 8, 8)),
        (_block(nn.Conv2d(3, 32, 3)), (3, 8, 8)),
        (_block(nn.Conv2d(3, 32, 3, padding=1, stride=2)), (3, 8, 8)),
        (_block(nn.Conv2d(4, 32, 3, padding=1, groups=2)), (4, 8, 8)),
        (_block(nn.Conv2d(3, 32, 3, padding=1, padding_mode="circular")), (3, 8, 8)),
        (_block(nn.Conv2d(3, 32, 5, padding=2)), (3, 8, 8)),
        (_block(nn.Conv2d(3, 32, 3, padding=1)), (3, 8, 6)),
        (nn.Sequential(nn.Identity(), *_block(nn.Conv2d(3, 32, 3, padding=1))), (3, 8, 8)),
    ],
)
def test_other_layers_and_sizes_are_not_computed_as_blocks(module: nn.Module, shape: tuple[int, ...]) -> None:
    probe = Probe(torch.zeros(2, *shape), torch.zeros(2, dtype=torch.int64), BATCH, torch.device("cpu"))
    assert blocks.build(module, F.cross_entropy, probe) is None


def _random_blocks(data: st.DataObject, channels: int) -> nn.Sequential:
    """Up to three blocks of layers with statistics of their own, some pooled, some with dropout."""
    layers = list[nn.Module]()
    for _ in range(data.draw(st.integers(1, 3))):
        inner, channels = channels, data.draw(st.sampled_from((32, 64)))
        bias, ends = data.draw(st.booleans()), data.draw(st.integers(0, 2))
        layers += [nn.Conv2d(inner, channels, 3, padding=1, bias=bias), nn.ReLU(), nn.BatchNorm2d(channels)]
        layers += [nn.MaxPool2d(2), Dropout(0.5, torch.Generator())][:ends]
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, -1, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean = torch.randn(layer.num_features)
            layer.running_var = 0.5 + torch.rand(layer.num_features)
    return nn.Sequential(*layers)


@given(st.data())
@settings(max_examples=8)
def test_blocks_equal_their_layers(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    channels, train = data.draw(st.sampled_from((3, 32))), data.draw(st.booleans())
    plain = _random_blocks(data, channels).double().train(train)
    x = torch.randn(data.draw(st.integers(1, 5)), channels, 16, 16).double()
    found = []
    for module in (plain, with_blocks(copy.deepcopy(plain))):
        for layer in module.modules():
            if isinstance(layer, Dropout):
                layer.generator.manual_seed(1)
        out = module(x.contiguous(memory_format=torch.channels_last))
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
        slopes = torch.autograd.grad(out, list(module.parameters()), weights)
        found.append([out, *slopes, *module.buffers()])
    assert isinstance(next(module.children()), Blocks)
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-10 * one.abs().max().clamp(min=1)


def test_moments_of_a_block_far_from_zero_keep_their_digits() -> None:
    """All values of a channel lie in 1000 ± 0.1: squares of them would leave float32 no variance."""
    layer, x = nn.Conv2d(3, 32, 3, padding=1), torch.rand(4, 3, 8, 8)
    layer.weight.data *= 0.1
    nn.init.constant_(cast(Tensor, layer.bias), 1000)
    norm = nn.BatchNorm2d(32)
    norm.running_mean = torch.full((32,), 1000.0)
    plain = nn.Sequential(layer, nn.ReLU(), norm).train()
    exact = copy.deepcopy(plain).double()(x.double())
    assert (with_blocks(plain)(x) - exact).abs().max() < 0.01


@pytest.mark.parametrize("name", ["mnist", "femnist", "wide"])
def test_native_kernels_compute_what_the_other_engines_compute(name: str) -> None:
    native, plain = task(name), task(name, native=False)
    assert plain.engines == portable()
    ids, x, local = np.arange(NODES), models(native), native.local_state(NODES)
    tasks = native, plain
    (g, state), (expected, buffers) = (t.gradient(x, local, ids, 1, 0) for t in tasks)
    assert not np.array_equal(g, expected), "the same engine computed both"
    assert relative(g, expected) < 1e-5
    np.testing.assert_allclose(state, buffers, rtol=1e-5, atol=1e-6)
    scores, plain_scores = (t.measure(x, state) for t in tasks)
    for column, values in scores.items():
        np.testing.assert_allclose(values, plain_scores[column], rtol=1e-5)


def test_broken_number_anywhere_stays_visible_and_never_reaches_the_next_node(
    thread_counts: list[int],
) -> None:
    set_threads(1)
    # filters that do not fill a vector, borders between stages
    notation = "C(3)-R-M-C(5)-R-M-C(6)-R-M-L(4)-S"
    module, data = build(notation, (1, 16, 16), kernel=3, padding=1, seed=3), dataset((1, 16, 16))
    t = Classification(data, [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    x, local = models(t, 2), t.local_state(2)
    expected = t.gradient(x[1:], local[1:], np.array([1]), 0, 0)[0]
    x[0, 0] = np.nan
    assert np.isnan(t.evaluate(x, local)[1][0])
    np.testing.assert_array_equal(t.gradient(x, local, np.arange(2), 0, 0)[0][1:], expected)


def test_rectifier_at_exactly_zero_has_no_gradient() -> None:
    t = task("mnist")
    x = models(t, 1)
    x[0, : 5 * 25 + 5] = 0  # the first convolution: all its sums are zero, and the layers above ask for more
    x[0, 5 * 25 + 5 :] = np.abs(x[0, 5 * 25 + 5 :])
    x[0, -40:-20] *= -1
    g, _ = t.gradient(x, t.local_state(1), np.array([0]), 0, 0)
    assert relative(g[0], plain_gradient(network("mnist"), x[0], *batch(t, 0, 0, 0))) < 1e-5
    assert not g[0, : 5 * 25 + 5].any()


def test_field_of_a_run_switches_the_kernels_off() -> None:
    fields: dict[str, Any] = {"model": "mnist", "dataset": "mnist-sample", "nodes": 5, "byzantine": 1}
    run = resolve(Spec(**fields, native=False))
    task = build_task(run, Gathered(load("mnist-sample"), None, None))
    assert task.engines == portable()
    assert not isinstance(task.engine, ConvolutionEngine)
