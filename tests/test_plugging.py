"""What others write plugs in from outside, in at most twenty lines each, and takes the fast path if it says so."""

from dataclasses import dataclass, replace
from pathlib import Path
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


# --- local steps, a delivery, an outer step ---------------------------------------------------------------------------


@dataclass
class SignSGD:
    """Lines 3-6 by the signs of the gradients; the network and line 9 are the run's."""

    usual: Any

    def init(self) -> tuple[Array, dict[str, Array]]:
        return self.usual.init()  # type: ignore[no-any-return]

    def __call__(self, x: Array, state: dict[str, Array], nodes: Array, t: int) -> tuple[Array, dict[str, Array]]:
        g, state["buffers"][:] = self.usual.local.task.gradient(x, state["buffers"], nodes, t, 0)
        self.usual.half[:] = x - 0.01 * np.sign(g)
        return self.usual.half, state


def test_local_steps_from_outside_are_taken() -> None:
    ours = rpel.simulate("linear", problem=lambda p: replace(p, local=SignSGD(p.local)), out=None, **SMALL)
    start = rpel.simulate("linear", out=None, **SMALL | {"rounds": 1, "lr": 1e-30})
    assert 0 < np.abs(ours.models - start.models).max() <= 0.01 * SMALL["rounds"] + 1e-6


@dataclass
class Deaf:
    """A network in which nobody hears anybody."""

    usual: Any

    def init(self) -> dict[str, Array]:
        return {}

    def nodes(self, t: int) -> Array:
        return np.asarray(self.usual.nodes(t))

    def __call__(self, half: Array, state: dict[str, Array], nodes: Array, t: int, before: Array) -> Any:
        received, _ = self.usual(half, state, nodes, t, before)
        return replace(received, index=received.index[:, :1]), state


def test_a_delivery_from_outside_decides_what_arrives() -> None:
    deaf = rpel.simulate("linear", problem=lambda p: replace(p, deliver=Deaf(p.deliver)), out=None, **SMALL)
    assert [row["degraded"] for row in deaf.history] == [8] * SMALL["rounds"]  # nobody can aggregate


class HalfWay:
    """Go half the way that line 9 says."""

    def init(self, x: Array) -> dict[str, Array]:
        return {"way": np.zeros(len(x))}

    def __call__(self, x: Array, z: Array, state: dict[str, Array], aggregated: Any) -> tuple[Array, dict[str, Array]]:
        state["way"] += np.abs(z - x).sum(axis=1)
        return x + 0.5 * (z - x), state


def test_an_outer_step_from_outside_is_checkpointed_with_the_run(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"problem": lambda p: replace(p, outer=HalfWay()), **SMALL}
    whole = rpel.simulate("linear", out=None, **changed)
    assert not np.allclose(whole.models, rpel.simulate("linear", out=None, **SMALL).models)

    def stop(progress: Any) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rpel.simulate("linear", out=tmp_path, checkpoint_every=1, progress=stop, **changed)
    (folder,) = tmp_path.iterdir()
    assert np.array_equal(rpel.resume(folder, problem=changed["problem"]).models, whole.models)


# --- a callback ------------------------------------------------------------------------------------------------------


def test_a_callback_adds_a_column_to_the_history_and_to_the_folder(tmp_path: Path) -> None:
    def norms(state: Any, info: Any, row: dict[str, Any]) -> None:
        row["norm_mean"] = float(np.linalg.norm(state.x, axis=1).mean())
        assert row["round"] == info.round

    run = rpel.simulate("linear", callbacks=[norms], out=tmp_path, **SMALL)
    last = float(np.linalg.norm(run.models, axis=1).mean())
    assert run.history["norm_mean"][-1] == pytest.approx(last, rel=1e-6)
    assert run.path is not None
    assert rpel.load(run.path).history["norm_mean"].tolist() == run.history["norm_mean"].tolist()


def test_a_column_that_is_no_number_is_refused() -> None:
    def wrong(state: Any, info: Any, row: dict[str, Any]) -> None:
        row["norms"] = np.linalg.norm(state.x, axis=1)

    with pytest.raises(ValueError, match="norms"):
        rpel.simulate("linear", callbacks=[wrong], out=None, **SMALL)
