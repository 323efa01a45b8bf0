"""Rules on graphs with numbers small enough to check by hand."""

import numpy as np
import pytest

import rpel


@pytest.mark.parametrize("name", ["cs_plus", "clipped_gossip_adaptive", "rtc"])
def test_answer_that_is_not_finite_is_part_of_the_hostile_weight(name: str) -> None:
    """The weight .25 that may be hostile is the infinite neighbour's: nothing is left to cut,
    so it is plain gossip."""
    rule = rpel.rule(name, byzantine_weight=0.25)
    models, weights = np.array([[0.0], [1.0], [2.0], [np.inf]]), np.full(4, 0.25)
    np.testing.assert_allclose(rule(models, weights=weights), [0.25 * 1 + 0.25 * 2])
    far = np.array([[0.0], [1.0], [2.0], [80.0]])
    assert abs(rule(far, weights=weights)[0]) < 2, "the same weight, finite, is cut"


def test_ios_stops_where_the_farthest_weighs_too_much() -> None:
    """The farthest of the first mean, 5.1, is 10, whose weight .5 is more than .3: the nearer one, .1,
    stays as well.

    Of the second, 3.3, the farthest is 10 with the weight .3, which is dropped; then nothing may be.
    """
    rule, models = rpel.rule("ios", byzantine_weight=0.3), np.array([[0.0], [1.0], [10.0]])
    weights = np.array([[0.4, 0.1, 0.5], [0.4, 0.3, 0.3]])
    expected = [[5.1], [0.3 / 0.7]]
    np.testing.assert_allclose(rule(np.stack([models, models]), weights=weights), expected)
    np.testing.assert_allclose([rule(models, weights=row) for row in weights], expected)
