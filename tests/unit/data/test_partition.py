"""Partitions: nothing is lost, nothing is held twice, everyone can fill a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rpel.data import Virtual, balanced_subset, by_writer, dirichlet, iid, load, virtual
from rpel.randomness import stream

many_labels = st.lists(st.integers(0, 6), min_size=60, max_size=300).map(np.array)
seeds = st.integers(0, 2**40)


def is_partition(parts: list[NDArray[np.int64]], examples: int) -> bool:
    return bool(np.array_equal(np.sort(np.concatenate(parts)), np.arange(examples)))


@given(many_labels, st.integers(1, 6), st.floats(0.5, 100), seeds)
def test_dirichlet_loses_nothing_shares_nothing_and_fills_batches(
    labels: NDArray[np.int64], nodes: int, alpha: float, seed: int
) -> None:
    parts = dirichlet(labels, nodes, alpha, batch=2, seed=seed)
    assert len(parts) == nodes
    assert is_partition(parts, len(labels))
    assert min(map(len, parts)) >= 2


def test_dirichlet_cuts_each_class_at_the_floors_of_the_cumulated_shares() -> None:
    labels = np.arange(1000) % 4
    parts = dirichlet(labels, nodes=5, alpha=1.0, batch=1, seed=3)
    rng = stream(3, ("partition", 0))
    for label in range(4):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.floor(np.cumsum(rng.dirichlet(np.ones(5))) * len(members)).astype(int)
        for node in range(4):
            expected = members[cuts[node - 1] if node else 0 : cuts[node]]
            assert parts[node][labels[parts[node]] == label].tolist() == expected.tolist()


def test_draw_that_starves_a_node_is_redrawn() -> None:
    """A node has 40 examples on average, and the first draw often leaves one fewer than 20."""
    for seed in range(20):
        parts = dirichlet(np.arange(400) % 10, nodes=10, alpha=0.5, batch=20, seed=seed)
        assert min(map(len, parts)) >= 20


def test_more_batches_than_examples_is_an_error_that_names_the_numbers() -> None:
    message = "21 nodes with a batch of 5 need 105 examples, but there are 100"
    with pytest.raises(ValueError, match=message):
        dirichlet(np.zeros(100, np.int64), 21, 1.0, 5, 0)
    with pytest.raises(ValueError, match=message):
        iid(np.zeros(100, np.int64), 21, 5, 0)
    with pytest.raises(ValueError, match=message):
        by_writer(np.arange(100), 21, 5, 0)


def test_hopeless_dirichlet_split_ends_with_advice() -> None:
    with pytest.raises(ValueError, match=r"100.*alpha 0\.01"):
        dirichlet(np.arange(200) % 2, nodes=20, alpha=0.01, batch=10, seed=0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha.*not {alpha}"):
        dirichlet(np.zeros(10, np.int64), 2, alpha, 1, 0)
    with pytest.raises(ValueError, match=f"alpha.*inf, not {alpha}"):
        virtual(np.zeros(10, np.int64), 2, alpha, 0)


def test_infinite_alpha_is_for_virtual_partitions_and_dirichlet_says_what_to_take() -> None:
    with pytest.raises(ValueError, match="partition iid"):
        dirichlet(np.zeros(10, np.int64), 2, float("inf"), 1, 0)


@given(st.integers(0, 180), st.integers(1, 20), seeds)
def test_iid_loses_nothing_and_deals_evenly(more: int, nodes: int, seed: int) -> None:
    examples = nodes + more
    parts = iid(np.zeros(examples, np.int64), nodes, 1, seed)
    assert len(parts) == nodes
    assert is_partition(parts, examples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


five_writers = st.lists(st.integers(0, 30), max_size=170).flatmap(
    lambda more: st.permutations([*range(5), *more])
)


@given(five_writers.map(np.array), st.integers(1, 5), seeds)
def test_by_writer_loses_nothing_and_never_splits_a_writer(
    writers: NDArray[np.int64], nodes: int, seed: int
) -> None:
    parts = by_writer(writers, nodes, 1, seed)
    assert len(parts) == nodes
    assert is_partition(parts, len(writers))
    held = [set(writers[part].tolist()) for part in parts]
    assert sum(map(len, held)) == len(set.union(*held))


def test_by_writer_deals_evenly_up_to_one_writer() -> None:
    writers = np.repeat(np.arange(200), stream(0, "sizes").integers(1, 40, 200))
    sizes = [len(part) for part in by_writer(writers, 10, 1, seed=0)]
    assert max(sizes) - min(sizes) <= 40


def test_by_writer_needs_a_writer_for_each_node_and_a_batch_from_them() -> None:
    with pytest.raises(ValueError, match=r"2 writers.* 3 nodes"):
        by_writer(np.array([0, 0, 1, 1]), 3, 1, 0)
    with pytest.raises(ValueError, match=r"1 examples.* 2"):
        by_writer(np.array([0, 0, 0, 1]), 2, 2, 0)


# Virtual


@given(many_labels, st.integers(1, 50), st.floats(0.001, 100), seeds)
def test_virtual_draws_only_classes_of_the_mixture(
    labels: NDArray[np.int64], nodes: int, alpha: float, seed: int
) -> None:
    shared = virtual(labels, nodes, alpha, seed)
    assert shared.mixture is not None
    np.testing.assert_allclose(shared.mixture.sum(axis=1), 1, rtol=1e-6)
    for uniform in (
        stream(seed, "batch").random((nodes, 8, 2)),
        np.zeros((nodes, 1, 2)),
        np.full((nodes, 1, 2), 1 - 2**-53),
    ):
        drawn = shared.draw(uniform, np.arange(nodes))
        assert drawn.shape == uniform.shape[:2]
        assert (np.take_along_axis(shared.mixture, labels[drawn], axis=1) > 0).all()


def test_virtual_batches_follow_the_mixture_and_reach_every_example() -> None:
    labels = np.repeat([0, 2, 3], [5, 20, 75])  # no example of class 1
    shared = virtual(labels, nodes=3, alpha=1.0, seed=0)
    drawn = shared.draw(stream(0, "batch").random((3, 20_000, 2)), np.arange(3))
    assert shared.mixture is not None
    for node in range(3):
        shares = np.bincount(labels[drawn[node]], minlength=4) / 20_000
        np.testing.assert_allclose(shares, shared.mixture[node], atol=0.015)
    assert len(np.unique(drawn)) == 100
    counts = np.bincount(drawn[0], minlength=100)[labels == 3]
    assert counts.max() < 1.5 * counts.mean()


def test_virtual_mixtures_do_not_depend_on_the_block_of_nodes() -> None:
    nodes = 40_000  # more than are drawn together
    shared = virtual(np.arange(30) % 3, nodes, alpha=0.7, seed=4)
    expected = stream(4, ("partition", 0)).dirichlet(np.full(3, 0.7), size=nodes).astype(np.float32)
    assert shared.mixture is not None
    np.testing.assert_array_equal(shared.mixture, expected)


def test_infinite_alpha_draws_evenly_without_a_table() -> None:
    labels = np.repeat([0, 2, 3], [5, 20, 75])
    shared = virtual(labels, nodes=10**9, alpha=float("inf"), seed=0)
    assert (shared.mixture, shared.numbers) == (None, 1)
    drawn = shared.draw(stream(0, "batch").random((2, 50_000, 1)), np.array([3, 999_999_999]))
    counts = np.bincount(drawn.ravel(), minlength=100)
    assert len(counts) == 100
    assert counts.min() > 800
    assert counts.max() < 1200
    assert shared.draw(np.full((1, 1, 1), 1 - 2**-53), np.array([0])) == 99
    np.testing.assert_allclose(shared.shares(np.arange(2)), [0.05, 0, 0.2, 0.75])


def test_rounding_never_leads_a_virtual_draw_into_a_class_of_share_zero() -> None:
    mixture = np.array([[0.3, 0.3, 0.3999999, 0.0]], np.float32)
    assert mixture.sum(dtype=np.float64) < 1 - 2**-53
    shared = Virtual(1, pool=np.arange(4), start=np.arange(5), mixture=mixture)
    assert shared.draw(np.full((1, 1, 2), 1 - 2**-53), np.array([0])).tolist() == [[2]]


# Evaluation


@given(many_labels, st.integers(1, 400), seeds)
def test_balanced_subset_is_as_equal_as_the_data_allow(
    labels: NDArray[np.int64], size: int, seed: int
) -> None:
    subset = balanced_subset(labels, size, seed)
    assert len(subset) == min(size, len(labels))
    assert (np.diff(subset) > 0).all()
    taken = np.bincount(labels[subset], minlength=7)
    left = np.bincount(labels, minlength=7) - taken
    # only an exhausted class falls behind
    assert all(taken[c] >= taken.max() - 1 for c in range(7) if left[c])


def test_balanced_subset_is_fixed_by_the_seed() -> None:
    labels = load().test_y
    assert np.bincount(labels[balanced_subset(labels, 500, 0)]).tolist() == [50] * 10
    assert (balanced_subset(labels, 500, 0) == balanced_subset(labels, 500, 0)).all()
    assert (balanced_subset(labels, 500, 0) != balanced_subset(labels, 500, 1)).any()
