"""Randomness comes from its coordinates: alone or together, early or late, the numbers are the same."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rpel.randomness import draws, sample_without_replacement, stream

seeds = st.integers(0, 2**40)
purposes = st.one_of(st.text(max_size=8), st.tuples(st.text(max_size=8), st.integers(0, 100)))
nodes = st.lists(st.integers(0, 2**50), min_size=0, max_size=30)


@given(seeds, purposes, st.integers(0, 2**50), nodes, st.integers(0, 13))
def test_many_nodes_draw_what_each_would_draw_alone(
    seed: int, purpose: str | tuple[str, int], t: int, ids: list[int], size: int
) -> None:
    together = draws(seed, purpose, t, np.array(ids, np.int64), size)
    alone = [stream(seed, purpose, t, node).random(size) for node in ids]
    assert together.shape == (len(ids), size)
    np.testing.assert_array_equal(together, np.array(alone).reshape(together.shape))


def test_different_coordinates_give_different_numbers() -> None:
    base = draws(0, "batch", 1, np.arange(20), 4)
    for other in (draws(1, "batch", 1, np.arange(20), 4), draws(0, "pull", 1, np.arange(20), 4)):
        assert not np.intersect1d(base, other).size
    assert not np.intersect1d(base, draws(0, "batch", 2, np.arange(20), 4)).size
    assert len(np.unique(base)) == base.size


def test_ids_must_be_integers_from_zero_on() -> None:
    for ids in (np.array([-1]), np.array([0.5]), np.zeros((2, 2), np.int64)):
        with pytest.raises(ValueError, match=r"^ids .*integers"):
            draws(0, "batch", 0, ids, 1)


@given(seeds, st.integers(0, 1000), st.data())
def test_samples_are_distinct_others_and_do_not_depend_on_who_else_is_asked(
    seed: int, t: int, data: st.DataObject
) -> None:
    population = data.draw(st.integers(2, 60))
    size = data.draw(st.integers(0, population - 1))
    ids = np.array(data.draw(st.lists(st.integers(0, population - 1), min_size=1, max_size=40)), np.int64)
    sample = sample_without_replacement(seed, "pull", t, ids, population, size)
    assert sample.shape == (len(ids), size)
    assert ((sample >= 0) & (sample < population) & (sample != ids[:, None])).all()
    assert all(len(set(row)) == size for row in sample.tolist())
    some = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=12))
    np.testing.assert_array_equal(
        sample_without_replacement(seed, "pull", t, ids[some], population, size), sample[some]
    )


def test_peers_of_tens_of_thousands_of_nodes_are_uniform() -> None:
    """A block of rows does not depend on the blocks before it."""
    ids, size = np.arange(20_000), 6
    whole = sample_without_replacement(4, "pull", 2, ids, 20_000, size)
    parts = [sample_without_replacement(4, "pull", 2, part, 20_000, size) for part in np.split(ids, 10)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    small = np.arange(17_000) % 40  # few others: nearly all are taken
    drawn = sample_without_replacement(4, "pull", 2, small, 40, 30)
    np.testing.assert_array_equal(drawn, drawn[:40][small])


@pytest.mark.parametrize(("population", "size"), [(5, 2), (6, 4)])
def test_every_set_of_others_is_equally_likely(population: int, size: int) -> None:
    """Chi-square over all sets of others, 10,000 draws, fixed seed; false alarm for a fresh seed 1e-4."""
    ids = np.arange(population)
    rows = [
        sample_without_replacement(11, "pull", t, ids, population, size) for t in range(10_000 // population)
    ]
    others = np.concatenate([sample - (sample > ids[:, None]) for sample in rows])  # numbered without the own
    counts = np.unique(np.sort(others, axis=1), axis=0, return_counts=True)[1]
    assert stats.chisquare(counts).pvalue > 1e-4
    assert len(counts) == math.comb(population - 1, size)


def test_every_other_is_pulled_equally_often() -> None:
    """Chi-square over 1,000 nodes in 20,000 rows of 15, fixed seed; false alarm for a fresh seed 1e-4."""
    counts = np.zeros(1000)
    for t in range(20):
        np.add.at(counts, sample_without_replacement(5, "pull", t, np.arange(1000), 1000, 15).ravel(), 1)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 .*population of 5$"):
        sample_without_replacement(0, "pull", 0, np.arange(5), 5, 5)
    with pytest.raises(ValueError, match=r"node 7 .*0 … 4"):
        sample_without_replacement(0, "pull", 0, np.array([7]), 5, 2)
