"""The objective of a network on a data set: gradients, evaluation, and what it refuses."""

import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.data import virtual
from rpel.models import build, unflatten
from rpel.tasks import Classification, Objective, Trigger
from support.tasks import (
    BATCH,
    EXPECTED,
    MNIST,
    NETWORKS,
    NODES,
    batch,
    dataset,
    models,
    network,
    plain_gradient,
    relative,
    task,
)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "mixed"])
def test_different_coordinates_give_different_gradients(name: str) -> None:
    t = task(name, dropout=0.3, shards=[np.arange(90)] * NODES)
    x, local = np.tile(t.initial(), (NODES, 1)), t.local_state(NODES)
    g, _ = t.gradient(x, local, np.arange(NODES), 4, 1)
    assert len(np.unique(g, axis=0)) == NODES
    for round, k in ((5, 1), (4, 0)):
        assert not (t.gradient(x, local, np.arange(NODES), round, k)[0] == g).all(axis=1).any()


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


@pytest.mark.parametrize("alpha", [0.3, math.inf])
def test_full_gradient_of_virtual_nodes_weighs_classes_by_the_mean_mixture(alpha: float) -> None:
    data = dataset((1, 6, 5))
    shared = virtual(data.train_y, 5, alpha, seed=2)
    t = task("linear", shards=shared)
    x = models(t, 1)
    all_data = np.bincount(data.train_y)[None] / len(data.train_y)
    share = (all_data if shared.mixture is None else shared.mixture).mean(axis=0)
    parts = []
    for c in range(4):
        rows = np.flatnonzero(data.train_y == c)
        inputs = torch.from_numpy(data.normalised(data.train_x[rows]))
        parts.append(share[c] * plain_gradient(network("linear"), x[0], inputs, torch.full((len(rows),), c)))
    assert relative(t.full_gradient(x, t.local_state(1))[0], np.sum(parts, axis=0)) < 1e-5


def test_subsample_of_the_full_gradient_is_fixed_and_comes_near() -> None:
    t = task("linear")
    x, local = models(t, 1), t.local_state(1)
    exact, near = t.full_gradient(x, local), t.full_gradient(x, local, size=3000)
    assert relative(near, exact) < 0.2
    np.testing.assert_array_equal(near, t.full_gradient(x, local, size=3000))


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
