"""`rpel.testing` checks rules and attacks of users, and names the promise that is broken."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import rpel
from rpel import testing
from rpel.attacks import ATTACKS, View, declare
from support.rule_cases import CASES, GRAPH_RULES

Array = NDArray[Any]


def measures_from_the_origin(name: str, parameters: dict[str, Any]) -> bool:
    zero = parameters.get("center") == "zero" or (name == "geometric_median" and not parameters)
    return (
        zero
        or name.startswith(("clipping", "arc", "balance"))
        or (name == "cge" and "center" not in parameters)
    )


RULES = [(name, {**p, "m": m, "moves": not measures_from_the_origin(name, p)}) for name, p, m, _ in CASES]
FORGING = [name for name in ATTACKS if not rpel.attack(name).trains]


@testing.parametrize(rules=[*RULES, *GRAPH_RULES], attacks=[*FORGING, ("strongest", {"of": "all"})])
def test_built_in_rules_and_attacks_pass_the_checks(check: Callable[[], None]) -> None:
    assert check() is None  # type: ignore[func-returns-value]


def forgetful(view: View, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
    return view.moments(), {"model": view}


def spiteful(view: View) -> Array:
    view.honest[0] = 0
    return view.moments()


@declare(per_victim=True)
def together(view: View) -> Array:
    return view.moments() + view.victims


def dicing(view: View) -> Array:
    return np.random.default_rng().normal(size=view.out.shape)


def secretive(view: View) -> Array:
    return view.moments() + view.change


def outermost(view: View) -> Array:
    return np.stack([view.honest[rows[rows >= 0]].max(axis=0) for rows in view.peers])


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (lambda view: np.zeros((3, 2)), "one row"),
        (lambda view: view.out, "one row"),
        (spiteful, "honest models unchanged"),
        (forgetful, "state can be kept"),
        (dicing, "equal views"),
        (together, "sent alone"),
        (outermost, "without honest peers"),
        (secretive, "before"),
    ],
)
def test_broken_attack_is_found_and_the_promise_named(attack: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        testing.check_attack(attack)


def middle(x: Array, f: int, share: float = 0.5) -> Array:
    """Between the median and the trimmed mean."""
    stored = np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)
    return np.asarray(share * np.median(x, axis=0) + (1 - share) * stored)


def test_function_rule_passes_and_its_slowness_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(9, 5))
    with caplog.at_level(logging.WARNING, logger="rpel"):
        rule = rpel.rule(middle, f=2, share=1.0)
        np.testing.assert_allclose(rule(x), np.median(x, axis=0))
        np.testing.assert_allclose(rpel.rule(middle, f=2, share=0.0)(x), rpel.rule("trimmed_mean", f=2)(x))
        x[4] = np.nan  # one of the two
        rest = np.delete(x, 4, axis=0)
        np.testing.assert_allclose(rpel.rule(middle, f=2, share=0.0)(x), rpel.rule("trimmed_mean", f=1)(rest))
    warnings = [r.message for r in caplog.records if f"{__name__}:middle is called for one" in r.message]
    assert len(warnings) == 1
    testing.check_rule(middle, f=2)
    by_name, chained = rpel.rule(f"{__name__}:middle", f=2), rpel.rule(f"nnm+{__name__}:middle", f=2)
    assert by_name.name == f"{__name__}:middle"
    np.testing.assert_allclose(chained(rest), by_name(rpel.rule("nnm", f=2)(rest)))


def test_user_rule_constructor_and_attack_pass_the_checks() -> None:
    made = rpel.rule("krum", f=1)
    assert rpel.rule(made) is made
    assert rpel.rule(made, f=3).f == 3
    assert rpel.rule("rpel.rules:krum", f=2).f == 2
    attack = rpel.attack("alie", z=2.0)
    assert rpel.attack(attack) is attack
    named = rpel.attack("rpel.attacks.forgeries:foe", zeta=3)
    honest = np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(named.forge(honest), rpel.attack("foe", zeta=3).forge(honest))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rpel.rule("nowhere.at.all:rule"), ["nowhere.at.all:rule", "imported"]),
        (lambda: rpel.rule("math:nothing"), ["math", "'nothing'"]),
        (lambda: rpel.rule("math:pi"), ["math:pi", "float"]),
        (lambda: rpel.rule(middle, f=1, shares=1), ["'shares'", "'share'"]),
        (lambda: rpel.rule(lambda: 3), ["Rule", "f(x)"]),
        (lambda: rpel.rule(middle), ["middle", "'f'"]),
        (lambda: rpel.rule(lambda x, *, by: x[0] * by), ["'by'"]),
        (
            lambda: rpel.rule(lambda size: rpel.rule("median"))(np.ones((3, 2))),
            ["(2,)", "median"],
        ),
        (lambda: rpel.attack(lambda view, by: view.out * by), ["'by'"]),
        (lambda: rpel.attack(lambda: 3), ["view"]),
        (
            lambda: rpel.attack(declare(per_victim=True)(lambda view, state: (view.out, state))),
            ["state", "per_victim"],
        ),
        (lambda: rpel.attack("math:pi"), ["math:pi", "float"]),
        (lambda: rpel.attack(lambda view: view.out[:, :1]).forge(np.ones((2, 3))), ["(1, 3)", "(1, 1)"]),
        (lambda: rpel.attack(lambda view: view.out, z=1), ["'z'"]),
        (lambda: rpel.attack(rpel.attack("sf"), z=1), ["sign_flipping"]),
        (lambda: testing.check_rule("nnm", f=1), ["nnm+median"]),
        (lambda: testing.check_attack("label_flip"), ["label_flip"]),
        (lambda: rpel.rule("mean")([np.ones(2), np.ones(3)]), ["mean", "same"]),
        (lambda: rpel.rule("mean")([]), ["mean", "one"]),
        (lambda: rpel.rule("mean")([1.0, 2.0]), ["float"]),
    ],
)
def test_failed_checks_name_the_broken_promise(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_lists_of_tensors_and_state_dicts_come_back_as_such() -> None:
    nets = [torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(5)]
    for i, net in enumerate(nets):
        net[1].num_batches_tracked.fill_(i + 7)  # type: ignore[operator]
    rule = rpel.rule("trimmed_mean", f=1)
    mixed = rule([net.state_dict() for net in nets])
    assert list(mixed) == list(nets[0].state_dict())
    assert int(mixed["1.num_batches_tracked"]) == 7, "whole numbers stay one's own"
    for key in ("0.weight", "0.bias", "1.running_var"):
        stack = torch.stack([net.state_dict()[key] for net in nets])
        np.testing.assert_allclose(
            mixed[key].numpy(), rule(stack.reshape(5, -1)).reshape(stack.shape[1:]).numpy()
        )
    nets[0].load_state_dict(mixed)
    parameters = rule([list(net.parameters()) for net in nets])
    assert isinstance(parameters, list)
    assert [p.shape for p in parameters] == [p.shape for p in nets[0].parameters()]
    vectors = [np.full(4, float(i)) for i in range(5)]
    np.testing.assert_array_equal(rule(vectors), np.full(4, 2.0))
    halves = rule([torch.full((2, 2), float(i), dtype=torch.float16) for i in range(5)])
    assert (halves.dtype, halves.shape) == (torch.float16, (2, 2))
    rows = rpel.rule("nnm", f=1)([{"w": v} for v in vectors])
    assert len(rows) == 5
    assert rows[0]["w"].shape == (4,)


SMALL: dict[str, Any] = {
    "model": "linear",
    "nodes": 8,
    "byzantine": 1,
    "rounds": 2,
    "eval_size": 100,
    "threads": 1,
}


def shrunk(view: View, share: float = 0.5) -> Array:
    """The honest mean, shrunk."""
    return view.moments(mean=share)


def test_run_takes_rules_and_attacks_as_objects_functions_and_names(tmp_path: Path) -> None:
    def accuracy(**given: Any) -> list[float]:
        return rpel.simulate(out=None, **SMALL, **given).models.tolist()  # type: ignore[no-any-return]

    by_name = accuracy(rule="trimmed_mean", attack="foe(zeta=2)")
    assert accuracy(rule=rpel.rule("trimmed_mean", f=9), attack=rpel.attack("foe", zeta=2.0)) == by_name
    same = accuracy(rule=middle, attack=f"{__name__}:shrunk(share=-1)")
    assert accuracy(rule=f"{__name__}:middle", attack=rpel.attack(shrunk, share=-1.0)) == same
    assert accuracy(rule=lambda x: x[0], attack=shrunk) != same


def test_user_code_is_part_of_the_run_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "my_own_rule.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    values = []
    for text in ("return x.mean(axis=0)", "return x.mean(axis=0)  # the same", "return x[0]"):
        source.write_text(f"def rule(x):\n    {text}\n", "utf-8")
        monkeypatch.delitem(sys.modules, "my_own_rule", raising=False)
        result = rpel.simulate(out=tmp_path / "runs", rule="my_own_rule:rule", **SMALL)
        assert result.path is not None
        values.append(result.path.name)
        assert "my_own_rule:rule" in result.certificate["versions"]
    assert len(set(values)) == 3
