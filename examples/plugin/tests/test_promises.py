"""The rule and the attack keep what all of rpel's keep, and do what they say."""

from collections.abc import Callable

import numpy as np

from rpel import attack, rule, testing


@testing.parametrize(rules=[("winsorized_mean", {"f": 2})], attacks=["echo", ("echo", {"gain": -1.0})])
def test_promises(check: Callable[[], None]) -> None:
    assert check() is None  # type: ignore[func-returns-value]


def test_outliers_are_pulled_in() -> None:
    x = np.array([[0.0], [1.0], [2.0], [3.0], [1e9]])
    assert rule("winsorized_mean", f=1)(x)[0] == (1 + 1 + 2 + 3 + 3) / 5


def test_the_echo_is_louder() -> None:
    assert attack("echo", gain=3.0).forge(np.array([[1.0], [3.0]]))[0] == 6.0
