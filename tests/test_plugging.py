"""What others write plugs in from outside, in at most twenty lines each,
and takes the fast path if it says so."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import testing
from rpel.rules import FunctionRule, Group, PreAggregation

Array = NDArray[Any]
SMALL: dict[str, Any] = {"nodes": 10, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3, "eval_size": 50}

# --- a rule -------------------------------------------------------------------------------------------------


def test_callable_that_is_no_rule_is_a_function_of_the_vectors() -> None:
    x = np.random.default_rng(0).normal(size=(7, 4))
    with pytest.raises(ValueError, match="the rule nnm"):
        rpel.rule(lambda f: rpel.rule("nnm+median", f=2))(x)
    np.testing.assert_array_equal(rpel.rule(lambda x, f: x[f], f=1)(x), x[1])
    for name in ("x", "f", "vectors"):  # its first parameter, whatever it is called
        made = rpel.rule(eval(f"lambda {name}: {name}.max(axis=0)"))
        np.testing.assert_array_equal(made(x), x.max(axis=0))
    np.testing.assert_array_equal(FunctionRule("largest", np.max, {"axis": 0})(x), x.max(axis=0))


# --- a pre-aggregation --------------------------------------------------------------------------------------


def towards_own(share: float = 0.5) -> PreAggregation:
    """Every vector is moved towards the node's own, so that what is far is less so."""

    def mix(group: Group) -> Array:
        weights = np.tile((1 - share) * np.eye(group.m), (len(group.index), 1, 1))
        weights[:, :, 0] += share
        return weights

    return PreAggregation("towards_own", mix)


def test_plugin_pre_aggregation_is_fused_into_the_next_rule() -> None:
    x = np.random.default_rng(1).normal(size=(5, 4))
    made = rpel.chain(towards_own(), rpel.rule("trimmed_mean", f=1))
    expected = rpel.rule("trimmed_mean", f=1)((x + x[0]) / 2)
    np.testing.assert_allclose(made(x), expected, atol=1e-12)
    np.testing.assert_allclose(rpel.rule(towards_own(share=1.0))(x), np.tile(x[0], (5, 1)), atol=1e-12)
    testing.check_rule(rpel.chain(towards_own(), rpel.rule("median", f=1)))
    run = rpel.simulate("linear", attack="sf", rule=made, out=None, **{**SMALL, "byzantine": 1, "b_hat": 1})
    assert run.certificate["held"]


# --- local steps, a delivery, an outer step -----------------------------------------------------------------


@dataclass
class SignSGD:
    """Lines 3-6 by the signs of the gradients; the network and line 9 are the run's."""

    usual: Any

    def init(self) -> tuple[Array, dict[str, Array]]:
        return self.usual.init()  # type: ignore[no-any-return]

    def __call__(
        self, x: Array, state: dict[str, Array], nodes: Array, t: int
    ) -> tuple[Array, dict[str, Array]]:
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


def test_delivery_from_outside_decides_what_arrives() -> None:
    deaf = rpel.simulate("linear", problem=lambda p: replace(p, deliver=Deaf(p.deliver)), out=None, **SMALL)
    assert [row["degraded"] for row in deaf.rows] == [8] * SMALL["rounds"]  # nobody can aggregate


class HalfWay:
    """Go half the way that line 9 says."""

    def init(self, x: Array) -> dict[str, Array]:
        return {"way": np.zeros(len(x))}

    def __call__(
        self, x: Array, z: Array, state: dict[str, Array], aggregated: Any
    ) -> tuple[Array, dict[str, Array]]:
        state["way"] += np.abs(z - x).sum(axis=1)
        return x + 0.5 * (z - x), state


def test_outer_step_from_outside_is_checkpointed_with_the_run(tmp_path: Path) -> None:
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


# --- a callback ---------------------------------------------------------------------------------------------


def test_callback_adds_a_column_to_the_history_and_to_the_folder(tmp_path: Path) -> None:
    def norms(state: Any, row: dict[str, Any]) -> dict[str, float]:
        assert row["round"] == state.round
        return {"norm_mean": float(np.linalg.norm(state.x, axis=1).mean())}

    run = rpel.simulate("linear", callbacks=[norms], out=tmp_path, **SMALL)
    last = float(np.linalg.norm(run.models, axis=1).mean())
    assert run.final["norm_mean"] == pytest.approx(last, rel=1e-6)
    assert run.path is not None
    assert rpel.load(run.path).history["norm_mean"].tolist() == run.history["norm_mean"].tolist()


def test_column_that_is_no_number_is_refused() -> None:
    def wrong(state: Any, row: dict[str, Any]) -> dict[str, Any]:
        return {"norms": np.linalg.norm(state.x, axis=1)}

    with pytest.raises(ValueError, match=r"ndarray.*'norms'"):
        rpel.simulate("linear", callbacks=[wrong], out=None, **SMALL)
