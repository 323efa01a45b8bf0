"""Rules and attacks of users work as the built-in ones do."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import testing
from rpel.attacks import declare
from rpel.rules import Group, Rule

Array = NDArray[Any]
SMALL: dict[str, Any] = {"nodes": 10, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3, "eval_size": 50}


@declare(per_victim=True, needs={"before"})
def backwards(view: rpel.View, speed: float = 2.0) -> Array:
    """The honest mean, moved against its last step."""
    forged = view.moments(out=view.out)
    forged -= (speed * view.change).astype(forged.dtype)
    return forged


quickly = rpel.attack(backwards, speed=5.0)


def test_plugin_attack_keeps_what_it_declares() -> None:
    made = rpel.attack(backwards, speed=3.0)
    assert made.per_victim
    assert made.needs == {"before"}
    assert not made.trains
    assert not made.searches
    testing.check_attack(backwards)


def test_plugin_attack_with_parameters_is_found_by_name() -> None:
    made = rpel.attack(f"{__name__}:quickly")
    assert made.parameters == {"speed": 5.0}
    assert made.name == f"{__name__}:quickly"
    with pytest.raises(ValueError, match="parameters"):
        rpel.attack(f"{__name__}:quickly", speed=1.0)


def test_run_is_attacked_from_outside_and_declaring_nothing_changes_no_byte() -> None:
    def slowly(view: rpel.View, speed: float = 2.0) -> Array:
        return np.asarray(view.moments() - (speed * view.change).astype(view.out.dtype))

    plain = rpel.simulate("linear", attack=declare(needs={"before"})(slowly), rule="mean", out=None, **SMALL)
    fast = rpel.simulate("linear", attack=backwards, rule="mean", out=None, **SMALL)
    spared = rpel.simulate("linear", attack="none", rule="mean", out=None, **SMALL)
    assert np.array_equal(fast.models, plain.models)
    assert not np.allclose(fast.models, spared.models)


@pytest.mark.parametrize("poison", ["labels", "patch"])
def test_attack_from_outside_may_train_instead_of_forging(poison: str) -> None:
    @declare(poisons=poison)
    def mine(target: int = 0, share: float = 0.5) -> None:
        """Trains on examples that are not what they seem."""

    ours = {"labels": "label_flip", "patch": "backdoor"}[poison]
    result = rpel.simulate("linear", attack=mine, out=None, **SMALL)
    assert np.array_equal(result.models, rpel.simulate("linear", attack=ours, out=None, **SMALL).models)


class NearestHalf(Rule):
    """The mean of the half of the vectors nearest to one's own,
    in the library's kernels for all victims at once."""

    def run(self, group: Group, out: Array | None = None) -> Array:
        near = np.argsort(group.to(0), axis=1, kind="stable")[:, : group.m // 2 + 1]
        weights = np.zeros(group.index.shape)
        np.put_along_axis(weights, near, 1 / near.shape[1], axis=1)
        return np.asarray(group.combine(weights, out))


def slow_half(x: Array, f: int) -> Array:
    near = np.argsort(np.square(x - x[0]).sum(axis=1), kind="stable")[: len(x) // 2 + 1]
    return np.asarray(x[near].mean(axis=0))


def test_rule_from_outside_runs_for_all_victims_at_once_and_keeps_the_promises() -> None:
    fast = rpel.simulate("linear", attack="foe", rule=NearestHalf("nearest_half"), out=None, **SMALL)
    slow = rpel.simulate("linear", attack="foe", rule=slow_half, out=None, **SMALL)
    np.testing.assert_allclose(fast.models, slow.models, atol=1e-5)
    testing.check_rule(NearestHalf("nearest_half", f=2, pivot=0))
