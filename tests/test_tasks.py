"""Tasks: every engine computes what plain torch computes, from coordinates alone,
whoever computes beside it."""

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.backend.threads import set_threads, threads
from rpel.data import Dataset, crop_flip, from_arrays, iid, load, virtual
from rpel.models import build, flatten, model, unflatten
from rpel.randomness import draws
from rpel.tasks import Classification, Objective, Trigger
from rpel.tasks.engines import ENGINES, PLAIN, Probe, portable
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.dropout import Dropout, dropout_mask
from rpel.tasks.engines.linear import LinearEngine, recognise
from rpel.tasks.engines.vmap import VmapEngine
from rpel.tasks.native import blocks
from rpel.tasks.native.blocks import Blocks, with_blocks
from rpel.tasks.native.convolution import ConvolutionEngine
from rpel.tasks.private import PrivateGradients

# The paper's three networks and the two small ones, narrower and on smaller images: notation, images, kernel,
# padding.
MNIST = ("C(5)-R-M-C(6)-R-M-L(9)-R-L(4)-S", (1, 16, 16), 5, 0)
FEMNIST = ("C(16)-R-M-C(26)-R-M-L(12)-R-L(4)-S", (1, 18, 16), 5, 0)
CIFAR = ("C(4)-R-B-C(4)-R-B-M-D-C(6)-R-B-C(6)-R-B-M-D-L(8)-R-D-L(4)-S", (3, 8, 8), 3, 1)
WIDE = ("C(32)-R-B-C(32)-R-B-M-D-C(40)-R-L(4)-S", (3, 8, 8), 3, 1)  # convolutions by Winograd's way
LINEAR = ("L(4)-S", (1, 6, 5), 5, 0)
MLP = ("L(7)-R-L(6)-R-L(4)-S", (1, 6, 5), 5, 0)
NETWORKS = {"mnist": MNIST, "femnist": FEMNIST, "cifar10": CIFAR, "wide": WIDE, "linear": LINEAR, "mlp": MLP}
SHAPES = {name: shape for name, (_, shape, _, _) in NETWORKS.items()} | {
    "mixed": (1, 6, 5),
    "small": (1, 6, 5),
}
EXPECTED = {
    "mnist": ConvolutionEngine,
    "femnist": ConvolutionEngine,
    "cifar10": AutogradEngine,
    "wide": AutogradEngine,
    "linear": LinearEngine,
    "mlp": LinearEngine,
    "mixed": VmapEngine,
    "small": VmapEngine,
}
# a batched product may round differently for another number of nodes
MANY_AT_ONCE = (LinearEngine, VmapEngine)
NODES, BATCH = 6, 5


def network(name: str, dropout: float = 0.0) -> nn.Module:
    if name not in NETWORKS:
        return _unknown(name, dropout)
    notation, shape, kernel, padding = NETWORKS[name]
    return build(notation, shape, kernel=kernel, padding=padding, dropout=dropout, seed=3)


def _unknown(name: str, dropout: float) -> nn.Module:
    """Networks of forms that no engine knows: with BatchNorm, dropout, a frozen and a shared layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "mixed":
            twice = nn.Linear(7, 7)
            hidden = (
                nn.BatchNorm1d(7),
                nn.Tanh(),
                nn.Dropout(dropout),
                twice,
                nn.Tanh(),
                nn.Dropout(dropout),
                twice,
            )
            module = nn.Sequential(
                nn.Flatten(), nn.Linear(30, 7), *hidden, nn.Linear(7, 4), nn.LogSoftmax(dim=1)
            )
        else:
            layers = (nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Dropout(dropout), nn.Tanh())
            module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 4), nn.LogSoftmax(dim=1))
        return module


def dataset(shape: tuple[int, ...], examples: int = 90) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (examples, *shape)).astype(np.uint8)
    mean, std = tuple(0.1 * c + 0.2 for c in range(shape[0])), tuple(0.1 * c + 0.3 for c in range(shape[0]))
    y = rng.integers(0, 4, examples)
    return from_arrays((x, y), (x[:31], y[:31]), classes=4, mean=mean, std=std)


def task(name: str, dropout: float = 0.0, **options: Any) -> Classification:
    data = dataset(SHAPES[name])
    shards = options.pop("shards", iid(data.train_y, NODES, BATCH, seed=0))
    return Classification(data, shards, network(name, dropout), batch_size=BATCH, seed=1, **options)


def models(t: Classification, h: int = NODES, dtype: Any = np.float32) -> NDArray[Any]:
    """Models near the initial one, all different."""
    noise = np.random.default_rng(5).standard_normal((h, t.d))
    return (t.initial() * (1 + 0.2 * noise) + 0.02 * noise).astype(dtype)


def plain_gradient(module: nn.Module, x: NDArray[Any], inputs: Tensor, labels: Tensor) -> NDArray[Any]:
    """One node, plain torch."""
    unflatten(module, torch.from_numpy(x))
    loss = F.nll_loss(module(inputs.to(torch.from_numpy(x).dtype)), labels)
    parts = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def batch(t: Classification, node: int, round: int, k: int) -> tuple[Tensor, Tensor]:
    """The batch of one node, gathered and normalised the plain way."""
    rows = t.examples.indices(np.array([node]), round, k)[0]
    data = t.examples.dataset
    return torch.from_numpy(data.normalised(data.train_x[rows])), torch.from_numpy(data.train_y[rows])


@pytest.fixture
def thread_counts() -> Iterator[list[int]]:
    before = threads()
    yield [1, 2, 3]
    set_threads(before)


def relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


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


def test_blocks_of_cifar10s_network_in_float32_are_near_float64() -> None:
    """But for rounding: a rectifier on the other side of zero moves a gradient by more."""
    torch.manual_seed(0)
    x, found = torch.randn(10, 3, 32, 32), []
    for module in (
        model("cifar10", dropout=0.0).double(),
        with_blocks(model("cifar10", dropout=0.0)),
    ):
        out = module(x.to(next(module.parameters()).dtype))
        slopes = torch.autograd.grad(nn.functional.nll_loss(out, torch.arange(10)), list(module.parameters()))
        found.append((out.double(), torch.cat([g.double().flatten() for g in slopes])))
    (out, exact), (near, slope) = found
    assert (out - near).abs().max() < 1e-4
    assert (slope - exact).norm() < 0.02 * exact.norm()


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


@pytest.mark.parametrize("name", ["mnist", "cifar10", "mixed"])
def test_different_coordinates_give_different_gradients(name: str) -> None:
    t = task(name, dropout=0.3, shards=[np.arange(90)] * NODES)
    x, local = np.tile(t.initial(), (NODES, 1)), t.local_state(NODES)
    g, _ = t.gradient(x, local, np.arange(NODES), 4, 1)
    assert len(np.unique(g, axis=0)) == NODES
    for round, k in ((5, 1), (4, 0)):
        assert not (t.gradient(x, local, np.arange(NODES), round, k)[0] == g).all(axis=1).any()


def test_batches_come_evenly_from_the_nodes_shard() -> None:
    data = dataset((1, 6, 5))
    t = Classification(
        data, {3: np.arange(10, 20), 8: np.arange(50, 53)}, network("linear"), batch_size=400, seed=0
    )
    rows = t.examples.indices(np.array([3, 8]), 0, 0)
    for drawn, shard in zip(rows, (range(10, 20), range(50, 53)), strict=True):
        counts = [(drawn == example).sum() for example in shard]
        assert sum(counts) == 400
        assert min(counts) > 20
    with pytest.raises(ValueError, match="node 4 holds no examples"):
        t.gradient(models(t, 1), t.local_state(1), np.array([4]), 0, 0)


def test_nodes_that_flip_labels_train_on_everything_with_mirrored_labels() -> None:
    data = dataset((1, 6, 5))
    for shards in (iid(data.train_y, 3, BATCH, seed=0), virtual(data.train_y, 4, 1.0, seed=0)):
        t = Classification(data, shards, network("linear"), batch_size=300, seed=0, flipped=[3])
        rows = t.examples.indices(np.array([1, 3]), 0, 0)
        assert len(np.unique(rows[1])) > 75
        labels = t.examples.batch(rows, np.array([1, 3]), torch.float32)[1].numpy()
        np.testing.assert_array_equal(labels[0], data.train_y[rows[0]])
        np.testing.assert_array_equal(labels[1], 3 - data.train_y[rows[1]])


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_backdoored_nodes_patch_and_relabel_a_share_of_their_images(kind: Any) -> None:
    data = dataset((2, 8, 9))
    data = replace(data, train_x=data.train_x.astype(kind), test_x=data.test_x.astype(kind))
    trigger, ids = Trigger(target=2, share=0.25), np.array([1, 3])
    options: dict[str, Any] = {"batch_size": 400, "seed": 0, "flipped": [3], "trigger": trigger}
    module = build("L(4)-S", (2, 8, 9), kernel=3, padding=0)
    t = Classification(data, iid(data.train_y, 3, BATCH, seed=0), module, **options)
    rows, patched = t.examples.indices(ids, 5, 1), t.examples.patched(ids, 5, 1)
    assert patched is not None
    assert not patched[0].any()
    assert 0.15 < patched[1].mean() < 0.35
    expected = data.train_x[rows].astype(np.float64)
    expected[patched, :, -2:, -2:] = data.train_x.max() if kind is np.float32 else 255
    inputs, labels = t.examples.batch(rows, ids, torch.float32, None, patched)
    scale = 255 if kind is np.uint8 else 1
    mean, std = (np.array(v)[:, None, None] for v in (data.mean, data.std))
    np.testing.assert_allclose(inputs.numpy(), (expected / scale - mean) / std, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(labels.numpy(), np.where(patched, 2, data.train_y[rows]))
    other, _ = Classification(data, [rows[0]] * 4, module, batch_size=400, seed=0).gradient(
        models(t, 2), t.local_state(2), ids, 5, 1
    )
    g, _ = t.gradient(models(t, 2), t.local_state(2), ids, 5, 1)
    assert relative(g[1], other[1]) > 0.01


def test_attack_success_counts_patched_images_of_other_classes() -> None:
    data = dataset((1, 6, 5))
    t = task("linear", flipped=[5], trigger=Trigger(target=1))
    x, local = models(t), t.local_state(NODES)
    actual = t.measure(x, local)["attack_success"]
    test_x = data.test_x[data.test_y != 1].copy()
    test_x[:, :, -1:, -1:] = 255
    module = network("linear")
    for i in range(NODES):
        unflatten(module, torch.from_numpy(x[i]))
        called = module(torch.from_numpy(data.normalised(test_x))).argmax(1)
        assert actual is not None
        assert actual[i] == float((called == 1).double().mean())
    assert "attack_success" not in task("linear").measure(x, local)


def test_backdoor_needs_images_and_a_class_that_there_is() -> None:
    data = dataset((1, 6, 5))
    with pytest.raises(ValueError, match=r"target 4.* 3"):
        Classification(
            data, [np.arange(90)], network("linear"), batch_size=3, seed=0, trigger=Trigger(target=4)
        )
    flat = replace(data, train_x=data.train_x.reshape(90, 30), test_x=data.test_x.reshape(31, 30))
    with pytest.raises(ValueError, match=r"backdoor.*images.*\(30,\)"):
        Classification(flat, [np.arange(90)], network("linear"), batch_size=3, seed=0, trigger=Trigger())


def test_virtual_nodes_draw_by_their_mixture() -> None:
    data = dataset((1, 6, 5))
    shared = virtual(data.train_y, 5, 0.3, seed=2)
    t = Classification(data, shared, network("linear"), batch_size=4000, seed=0)
    labels = data.train_y[t.examples.indices(np.arange(5), 0, 0)]
    shares = np.stack([(labels == c).mean(axis=1) for c in range(4)], axis=1)
    assert shared.mixture is not None
    np.testing.assert_allclose(shares, shared.mixture, atol=0.05)


def test_many_virtual_nodes_draw_what_each_would_draw_alone() -> None:
    data = dataset((1, 6, 5))
    for alpha in (0.3, float("inf")):
        t = Classification(
            data, virtual(data.train_y, 2000, alpha, seed=2), network("linear"), batch_size=3, seed=0
        )
        many = t.examples.indices(np.arange(2000), 5, 1)
        assert len(np.unique(many)) == 90
        for node in (0, 511, 512, 1999):
            np.testing.assert_array_equal(t.examples.indices(np.array([node]), 5, 1)[0], many[node])


def test_images_are_varied_in_training_only_and_by_coordinates() -> None:
    data = dataset((3, 8, 8))
    object.__setattr__(data, "augment", "crop-flip")
    t = Classification(data, [np.arange(90)] * 2, network("cifar10"), batch_size=BATCH, seed=1)
    ids = np.arange(2)
    rows, coins = t.examples.indices(ids, 3, 0), t.examples.variations(ids, 3, 0)
    np.testing.assert_array_equal(coins, draws(1, ("augment", 0), 3, ids, 3 * BATCH).reshape(2, BATCH, 3))
    assert coins is not None
    expected = data.normalised(crop_flip(data.train_x[rows[1]], coins[1]))
    inputs, _ = t.examples.batch(rows, None, torch.float32, coins)
    torch.testing.assert_close(inputs[1], torch.from_numpy(expected))
    torch.testing.assert_close(
        t.examples.tested(np.arange(4), torch.float32)[0], torch.from_numpy(data.normalised(data.test_x[:4]))
    )


@pytest.mark.parametrize("private", [False, True])
def test_images_are_varied_anew_in_every_round_and_local_step(private: bool) -> None:
    """Each node has one image, so two gradients at one model differ by its variation alone."""
    varied = replace(dataset((3, 8, 8)), augment="crop-flip")
    for data, count in ((varied, 4), (dataset((3, 8, 8)), 1)):
        module = build("L(4)-S", (3, 8, 8), kernel=1, padding=0, seed=3)
        t = Classification(data, [np.array([i]) for i in range(8)], module, batch_size=1, seed=1)
        of = PrivateGradients(t, math.inf) if private else t
        x = np.tile(t.initial(), (8, 1))
        steps = [(1, 0), (1, 1), (1, 2), (2, 0)]
        gradients = [of.gradient(x, t.local_state(8), np.arange(8), round, k)[0] for round, k in steps]
        assert len({g.tobytes() for g in gradients}) == count


def test_numbers_other_than_bytes_are_taken_as_given() -> None:
    x = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)
    data = from_arrays((x, np.arange(40) % 3), (x, np.arange(40) % 3))
    t = Classification(
        data, [np.arange(40)], build("L(3)-S", (7,), kernel=1, padding=0), batch_size=4, seed=0
    )
    torch.testing.assert_close(
        t.examples.batch(np.array([[5]]), None, torch.float32)[0][0, 0], torch.from_numpy(x[5])
    )
    assert t.gradient(models(t, 1), t.local_state(1), np.array([0]), 0, 0)[0].shape == (1, t.d)


def test_batchnorm_statistics_stay_with_their_node() -> None:
    t = task("cifar10")
    x, local = models(t), t.local_state(NODES)
    assert t.d + local.shape[1] == sum(v.numel() for v in network("cifar10").state_dict().values())
    before = local.copy()
    _, after = t.gradient(x, local, np.arange(NODES), 0, 0)
    np.testing.assert_array_equal(local, before)
    module = network("cifar10").train()
    unflatten(module, torch.from_numpy(x[4]))
    module(batch(t, 4, 0, 0)[0])
    buffers = torch.cat([buffer.reshape(-1).float() for buffer in module.buffers()])
    np.testing.assert_allclose(after[4], buffers.numpy(), rtol=1e-5, atol=1e-6)
    module.eval()
    data = t.examples.dataset
    right = module(torch.from_numpy(data.normalised(data.test_x))).argmax(1).numpy() == data.test_y
    assert t.evaluate(x, after)[0][4] == right.mean()


def test_dropout_leaves_torchs_global_generator_alone() -> None:
    t = task("cifar10", dropout=0.5)
    before = torch.get_rng_state()
    t.gradient(models(t), t.local_state(NODES), np.arange(NODES), 0, 0)
    assert torch.equal(before, torch.get_rng_state())


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


def test_module_made_by_a_function_comes_from_the_seed() -> None:
    data = dataset((1, 6, 5))
    first, again, other = (
        Classification(data, [np.arange(90)], _Noisy, batch_size=BATCH, seed=seed).initial()
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("subset", [None, np.array([3, 8, 30, 4])])
def test_evaluation_is_that_of_plain_torch(name: str, subset: NDArray[np.int64] | None) -> None:
    t = task(name, dropout=0.5)
    x = models(t)
    accuracy, loss = t.evaluate(x, t.local_state(NODES), subset)
    data, module = t.examples.dataset, network(name).eval()
    rows = np.arange(31) if subset is None else subset
    for i in range(NODES):
        unflatten(module, torch.from_numpy(x[i]))
        logp = module(torch.from_numpy(data.normalised(data.test_x[rows]))).detach()
        labels = torch.from_numpy(data.test_y[rows])
        assert accuracy[i] == float((logp.argmax(1) == labels).double().mean())
        assert loss[i] == pytest.approx(float(F.nll_loss(logp, labels)), rel=1e-5)


def test_many_nodes_are_evaluated_as_few_are() -> None:
    t = task("linear")
    t.nodes_per_call = 2  # 50 groups instead of one
    x = np.repeat(models(t, 10), 10, axis=0)
    accuracy, loss = t.evaluate(x, t.local_state(100))
    few_accuracy, few_loss = t.evaluate(np.ascontiguousarray(x[::10]), t.local_state(10))
    np.testing.assert_array_equal(accuracy[::10], few_accuracy)
    np.testing.assert_allclose(loss[::10], few_loss, rtol=1e-6)
    assert len(np.unique(loss)) > 5


def test_task_accepts_any_loss() -> None:
    def squares(output: Tensor, target: Tensor) -> Tensor:
        return ((output.exp() - F.one_hot(target, 4)) ** 2).sum(dim=1).mean()

    t = task("mlp", loss=squares)
    x = models(t)
    g, local = t.gradient(x, t.local_state(NODES), np.arange(NODES), 0, 0)
    module = network("mlp")
    inputs, labels = batch(t, 2, 0, 0)
    unflatten(module, torch.from_numpy(x[2]))
    parts = torch.autograd.grad(squares(module(inputs), labels), list(module.parameters()))
    assert relative(g[2], torch.cat([part.reshape(-1) for part in parts]).numpy()) < 1e-5
    data = t.examples.dataset
    expected = squares(module(torch.from_numpy(data.normalised(data.test_x))), torch.from_numpy(data.test_y))
    assert t.evaluate(x, local)[1][2] == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("block", [250, 20], ids=["one block", "a short last block"])
@pytest.mark.parametrize("name", ["mnist", "linear"])
def test_full_gradient_is_the_mean_of_the_honest_nodes_gradients(name: str, block: int) -> None:
    data = dataset(NETWORKS[name][1])
    shards = [np.arange(5), np.arange(5, 30), np.arange(30, 90)]
    t = task(name, shards=shards, flipped=[3])
    t.engine.block = block
    x = models(t, 2)
    g = t.full_gradient(x, t.local_state(2))
    for i in range(2):
        parts = [
            plain_gradient(
                network(name),
                x[i],
                torch.from_numpy(data.normalised(data.train_x[s])),
                torch.from_numpy(data.train_y[s]),
            )
            for s in shards
        ]
        assert relative(g[i], np.mean(parts, axis=0)) < 1e-5


def test_full_gradient_of_virtual_nodes_weighs_classes_by_the_mean_mixture() -> None:
    data = dataset((1, 6, 5))
    shared = virtual(data.train_y, 5, 0.3, seed=2)
    t = task("linear", shards=shared)
    x = models(t, 1)
    assert shared.mixture is not None
    share = shared.mixture.mean(axis=0)
    parts = []
    for c in range(4):
        rows = np.flatnonzero(data.train_y == c)
        inputs = torch.from_numpy(data.normalised(data.train_x[rows]))
        parts.append(share[c] * plain_gradient(network("linear"), x[0], inputs, torch.full((len(rows),), c)))
    assert relative(t.full_gradient(x, t.local_state(1))[0], np.sum(parts, axis=0)) < 1e-5


def test_full_gradient_of_nodes_that_draw_from_all_data_is_that_of_all_data() -> None:
    data = dataset((1, 6, 5))
    t = task("linear", shards=virtual(data.train_y, 5, float("inf"), seed=2))
    x = models(t, 1)
    inputs, labels = torch.from_numpy(data.normalised(data.train_x)), torch.from_numpy(data.train_y)
    expected = plain_gradient(network("linear"), x[0], inputs, labels)
    assert relative(t.full_gradient(x, t.local_state(1))[0], expected) < 1e-5


def test_subsample_of_the_full_gradient_is_fixed_and_comes_near() -> None:
    t = task("linear")
    x, local = models(t, 1), t.local_state(1)
    exact, near = t.full_gradient(x, local), t.full_gradient(x, local, size=3000)
    assert relative(near, exact) < 0.2
    np.testing.assert_array_equal(near, t.full_gradient(x, local, size=3000))


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_model_is_not_made_to_look_whole(name: str) -> None:
    t = task(name)
    x = models(t)
    x[1] = np.nan
    g, local = t.gradient(x, t.local_state(NODES), np.arange(NODES), 0, 0)
    assert np.isnan(g[1]).any()
    assert np.isfinite(g[[0, *range(2, NODES)]]).all()
    assert np.isnan(t.evaluate(x, local)[1][1])


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


def test_callers_module_and_torchs_threads_are_left_as_they_were() -> None:
    module = network("cifar10").eval()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    data = dataset((3, 8, 8))
    t: Objective = Classification(data, [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    t.gradient(np.tile(t.initial(), (2, 1)), t.local_state(2), np.arange(2), 0, 0)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)
    assert not module.training
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert {type(layer) for layer in module.modules()} >= {nn.Dropout, nn.BatchNorm2d}


@pytest.mark.parametrize("name", EXPECTED)
def test_task_can_be_sent_to_another_process(name: str) -> None:
    t = task(name, dropout=0.3)
    x, local, ids = models(t), t.local_state(NODES), np.arange(NODES)
    g, _ = t.gradient(x, local, ids, 2, 0)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(t)).gradient(x, local, ids, 2, 0)[0], g)


def test_arrays_may_be_read_only_and_must_fit() -> None:
    t = task("mnist")
    x, local, ids = models(t), t.local_state(NODES), np.arange(NODES)
    x.flags.writeable = local.flags.writeable = False
    t.gradient(x, local, ids, 0, 0)
    t.evaluate(x, local)
    for wrong in (x[:, 1:], x[1:], np.asfortranarray(x), x.astype(np.float16)):
        with pytest.raises(ValueError, match=r"6 models.*\(6, 989\).*not \("):
            t.gradient(wrong, local, ids, 0, 0)
    with pytest.raises(ValueError, match="local state"):
        t.gradient(x, np.zeros((NODES, 3), np.float32), ids, 0, 0)
    with pytest.raises(ValueError, match="test example"):
        t.evaluate(x, local, np.array([], np.int64))


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
    elif way == "order":
        weight = first.weight
        del first.weight
        first.weight = weight
    elif way == "more":
        module.register_parameter("more", nn.Parameter(torch.ones(3)))
    return module


@pytest.mark.parametrize(
    "way", ["hook", "pre-hook", "backward hook", "parametrisation", "call", "order", "more"]
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


def test_hooks_are_called_for_every_node() -> None:
    module, seen = _altered(""), list[tuple[int, ...]]()
    module[1].register_forward_hook(lambda layer, given, output: seen.append(tuple(output.shape)))
    t = Classification(dataset((1, 6, 5)), [np.arange(90)] * 3, module, batch_size=BATCH, seed=1)
    seen.clear()
    t.gradient(models(t, 3), t.local_state(3), np.arange(3), 0, 0)
    assert seen == [(BATCH, 5)] * 3


def test_hook_on_dropout_is_called() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Dropout(0.5))
    module[2].register_forward_hook(lambda layer, given, output: 0 * output)
    t = Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    assert not t.gradient(models(t, 2), t.local_state(2), np.arange(2), 0, 0)[0].any()


def test_forward_put_on_a_layer_itself_is_the_one_that_counts() -> None:
    module = _altered("")
    module[3].forward = lambda x: x[:, :4] * 0.5
    t = Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    g = t.gradient(models(t, 2), t.local_state(2), np.arange(2), 0, 0)[0]
    assert not g[:, -24:].any()
    assert g[:, :-24].any()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Sequential(nn.Linear(30, 4)), r"does not take examples of the shape \(1, 6, 5\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(29, 4)), r"does not take examples of the shape \(1, 6, 5\)"),
        (build(MNIST[0], (3, 16, 16), kernel=5, padding=0, dropout=0, seed=0), "does not take examples"),
        (nn.Sequential(nn.Flatten(), nn.Linear(30, 4)).double(), "'1.weight' of the model is torch.float64"),
    ],
    ids=["no flattening", "width", "channels", "float64"],
)
def test_networks_that_do_not_fit_are_refused(module: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)
    assert "\n" not in str(error.value)


def test_hook_on_a_parameter_is_refused() -> None:
    module = _altered("")
    module[1].weight.register_hook(lambda gradient: 0 * gradient)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"'1\.weight'"):
        Classification(dataset((1, 6, 5)), [np.arange(90)] * 2, module, batch_size=BATCH, seed=1)


def test_bare_linear_layer_is_computed_like_one_in_a_row() -> None:
    x = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)
    data = from_arrays((x, np.arange(40) % 3), (x, np.arange(40) % 3))
    bare = nn.Linear(7, 3)
    tasks = [
        Classification(data, [np.arange(40)], m, batch_size=4, seed=0) for m in (bare, nn.Sequential(bare))
    ]
    assert type(tasks[0].engine) is LinearEngine
    results = [t.gradient(models(t, 1), t.local_state(1), np.array([0]), 0, 0)[0] for t in tasks]
    np.testing.assert_array_equal(results[0], results[1])


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


@pytest.mark.full
def test_papers_mnist_network_learns(shared_data: Any) -> None:
    from rpel.data import load

    data = load("mnist", shared_data)
    t = Classification(data, iid(data.train_y, 4, 25, seed=0), model("mnist"), batch_size=25, seed=0)
    x, local = np.tile(t.initial(), (4, 1)), t.local_state(4)
    for round in range(150):
        g, local = t.gradient(x, local, np.arange(4), round, 0)
        x -= np.float32(0.1) * g
    assert t.evaluate(x, local, np.arange(2000))[0].min() > 0.85


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
