"""What others write plugs in from outside, in at most twenty lines each, and takes the fast path if it says so."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import testing
from rpel.attacks import declare

Array = NDArray[Any]
SMALL: dict[str, Any] = {"nodes": 10, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3, "eval_size": 50}

# --- an attack -------------------------------------------------------------------------------------------------------


@declare(per_victim=True, needs={"before"})
def backwards(view: rpel.View, speed: float = 2.0) -> Array:
    """The honest mean, moved against its last step."""
    forged = view.moments(out=view.out)
    forged -= (speed * view.change).astype(forged.dtype)
    return forged


def test_an_attack_from_outside_says_what_it_is_and_keeps_what_it_says() -> None:
    made = rpel.attack(backwards, speed=3.0)
    assert made.per_victim
    assert made.needs == {"before"}
    assert not made.trains
    assert not made.searches
    testing.check_attack(backwards)


def test_a_run_is_attacked_from_outside_and_declaring_nothing_changes_no_byte() -> None:
    def slowly(view: rpel.View, speed: float = 2.0) -> Array:
        return np.asarray(view.moments() - (speed * view.change).astype(view.out.dtype))

    plain = rpel.simulate("linear", attack=declare(needs={"before"})(slowly), rule="mean", out=None, **SMALL)
    fast = rpel.simulate("linear", attack=backwards, rule="mean", out=None, **SMALL)
    spared = rpel.simulate("linear", attack="none", rule="mean", out=None, **SMALL)
    assert np.array_equal(fast.models, plain.models)
    assert not np.allclose(fast.models, spared.models)


@pytest.mark.parametrize("poison", ["labels", "patch"])
def test_an_attack_from_outside_may_train_instead_of_forging(poison: str) -> None:
    @declare(poisons=poison)
    def mine(target: int = 0, share: float = 0.5) -> None:
        """Trains on examples that are not what they seem."""

    ours = {"labels": "label_flip", "patch": "backdoor"}[poison]
    found = rpel.simulate("linear", attack=mine, out=None, **SMALL)
    assert np.array_equal(found.models, rpel.simulate("linear", attack=ours, out=None, **SMALL).models)
