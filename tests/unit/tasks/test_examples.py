"""Examples: whose is what, batches from coordinates alone, and what hostile nodes see."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rpel.data import crop_flip, iid, virtual
from rpel.models import build
from rpel.randomness import draws
from rpel.tasks import Classification, Trigger
from rpel.tasks.private import PrivateGradients
from support.tasks import BATCH, dataset, models, network, relative


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


def test_backdoor_needs_images_and_a_class_that_there_is() -> None:
    data = dataset((1, 6, 5))
    with pytest.raises(ValueError, match=r"target 4.* 3"):
        Classification(
            data, [np.arange(90)], network("linear"), batch_size=3, seed=0, trigger=Trigger(target=4)
        )
    flat = replace(data, train_x=data.train_x.reshape(90, 30), test_x=data.test_x.reshape(31, 30))
    with pytest.raises(ValueError, match=r"backdoor.*images.*\(30,\)"):
        Classification(flat, [np.arange(90)], network("linear"), batch_size=3, seed=0, trigger=Trigger())


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
