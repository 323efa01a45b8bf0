"""The promises of rules and attacks, as checks for your own: `check_rule` and `check_attack`.

Both raise AssertionError naming the promise that is broken. With pytest, every promise becomes a test::

    @rpel.testing.parametrize(rules=["my.module:rule"], attacks=["my.module:attack"])
    def test_promises(check):
        check()
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import Attack, View
from rpel.attacks import attack as attack_by_name
from rpel.backend.base import backend
from rpel.rules import PreAggregation, RoundContext, Rule
from rpel.rules import rule as rule_by_name

if TYPE_CHECKING:
    import pytest

Array = NDArray[Any]

# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A rule and the size at which it is tried."""

    rule: Rule
    m: int
    moves: bool

    @property
    def f(self) -> int:
        return self.rule.f or 0

    def vectors(self, seed: int, dtype: type = np.float64, d: int = 7) -> Array:
        """(m, d) vectors around a common centre."""
        rng = np.random.default_rng(seed)
        return (rng.normal(size=d) + 0.3 * rng.normal(size=(self.m, d))).astype(dtype)

    def __call__(self, x: Any) -> Any:
        return self.rule(x, **self._graph(tuple(x.shape[:-1])))

    def aggregate(self, table: Array, index: Array) -> Array:
        """Many victims at once; on graphs all present models have the same weight."""
        given: dict[str, Any] = {}
        if self.rule.on_graph:
            present = index >= 0
            given = {
                "weights": present / present.sum(axis=1, keepdims=True),
                "hostile": np.zeros(index.shape, bool),
            }
        rule = self.rule.at(round=2, rounds=5, seed=3, ids=np.arange(len(index)))
        return np.asarray(rule.aggregate(table, index, **given))

    def _graph(self, shape: tuple[int, ...]) -> dict[str, Any]:
        if not self.rule.on_graph:
            return {}
        return {"weights": np.full(shape, 1 / shape[-1]), "hostile": np.zeros(shape, bool)}


def _kinds(t: Trial) -> None:
    import torch

    for dtype in (np.float32, np.float64):
        x = t.vectors(1, dtype)
        before, result = x.copy(), t(x)
        assert isinstance(result, np.ndarray), f"it gave {type(result).__name__} for a NumPy array"
        assert result.shape == (7,), f"it gave shape {result.shape} for vectors (…, 7)"
        assert result.dtype == dtype, f"it gave {result.dtype} for {np.dtype(dtype)}"
        assert np.array_equal(x, before), "it changed its input"
        again = t(torch.from_numpy(x))
        assert isinstance(again, torch.Tensor), f"it gave {type(again).__name__} for a tensor"
        assert again.numpy().dtype == dtype, f"it gave {again.dtype} for a tensor of {np.dtype(dtype)}"


def _batches(t: Trial) -> None:
    rng, table = np.random.default_rng(2), np.concatenate([t.vectors(k) for k in range(4)])
    index = np.stack([rng.permutation(len(table))[: t.m] for _ in range(6)])
    result = t.aggregate(table, index)
    for i, rows in enumerate(index):
        told = t.rule.at(round=2, rounds=5, seed=3, ids=np.array([i]))
        _same(result[i], replace(t, rule=told)(table[rows]), f"victim {i} of six")


def _absent(t: Trial) -> None:
    table = np.concatenate([t.vectors(k) for k in range(2)])
    index = np.tile(np.arange(t.m + 1), (3, 1))
    index[1, t.m :] = -1
    result = t.aggregate(table, index)
    told = t.rule.at(round=2, rounds=5, seed=3, ids=np.array([1]))
    _same(result[1], replace(t, rule=told)(table[: t.m]), "an answer that did not come")


def _order(t: Trial) -> None:
    if t.rule.is_random:
        return
    for seed in range(5):
        x, order = t.vectors(seed), 1 + np.random.default_rng(seed).permutation(t.m - 1)
        _same(t(x[[0, *order]]), t(x), "the other vectors in another order")


def _translation(t: Trial) -> None:
    if not t.moves:
        return
    for seed in range(5):
        x, shift = t.vectors(seed), np.random.default_rng(seed + 50).normal(size=7)
        _same(t(x + shift), t(x) + shift, "all vectors moved by the same")


def _non_finite(t: Trial) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for count in range(1, 1 + (t.f if t.rule.f is not None else 1)):
            x = t.vectors(3)
            x[t.m - count :, :: 1 + count % 2] = bad
            assert np.isfinite(t(x)).all(), f"{count} vectors with {bad} made the result not finite"
    if t.rule.f is not None and not t.rule.on_graph:
        x = t.vectors(3)
        x[t.m - t.f - 1 :] = np.nan
        try:
            t(x)
        except ValueError:
            return
        raise AssertionError(f"{t.f + 1} vectors with NaN are more than f = {t.f}, and it did not refuse")


def _kappa(t: Trial) -> None:
    kappa = t.rule.kappa(t.m)
    if kappa is None:
        return
    assert kappa >= 0, f"kappa({t.m}) is {kappa}"
    for seed in range(3):
        reached = _worst_ratio(t, seed)
        assert reached <= kappa * (1 + 1e-6), (
            f"kappa({t.m}) is {kappa:.4g}, and {reached:.4g} variances were reached"
        )


def _worst_ratio(t: Trial, seed: int) -> float:
    """Return the largest ‖R − mean‖² that a search of f hostile vectors finds, in honest variances."""
    rng, honest = np.random.default_rng(seed), t.vectors(seed)[: t.m - t.f]
    centre = honest.mean(axis=0)
    variance = float(np.square(honest - centre).sum(axis=1).mean())
    axes = np.linalg.svd(honest - centre)[2]

    def ratio(hostile: Array) -> float:
        return float(np.square(t(np.concatenate([honest, hostile])) - centre).sum()) / variance

    tried = [centre + a * np.tile(axis, (t.f, 1)) for a in np.geomspace(0.01, 100, 15) for axis in axes[:3]]
    best = max(tried, key=ratio)
    most = ratio(best)
    for _ in range(60):
        step = best + rng.normal(size=best.shape) * rng.choice([0.01, 0.1, 1.0])
        if (reached := ratio(step)) > most:
            best, most = step, reached
    return most


RULE_PROMISES: dict[str, Callable[[Trial], None]] = {
    "a vector of the input's kind and dtype, the input unchanged": _kinds,
    "many victims at once get what each would get alone": _batches,
    "absent answers are as if never asked": _absent,
    "the order of the other vectors does not matter": _order,
    "moving all vectors moves the result": _translation,
    "up to f vectors with non-finite entries are left out, more are refused": _non_finite,
    "the result stays within kappa variances of the honest mean": _kappa,
}


def check_rule(rule: Any, *, moves: bool = True, m: int | None = None, **parameters: Any) -> None:
    """Hold a rule (anything that `rpel.rule` takes) to what all rules promise.

    ``moves=False`` for a rule that measures from the origin, so that moving all vectors does not move its
    result; ``m`` is the number of vectors to try it with.
    The order of vectors is not checked for rules that draw at random.

    >>> check_rule("nnm+trimmed_mean", f=2)
    >>> check_rule(lambda x: x[-1])
    Traceback (most recent call last):
    AssertionError: rule rpel.testing:<lambda> breaks "the order of the other vectors does not matter": ...
    """
    for check in _rule_checks(rule, moves=moves, m=m, **parameters):
        check()


def _rule_checks(
    rule: Any, *, moves: bool = True, m: int | None = None, **parameters: Any
) -> Iterator[partial[None]]:
    made = rule_by_name(rule, **parameters)
    if isinstance(made, PreAggregation):
        raise ValueError(f"{made.name} gives all its rows: check it in a chain such as {made.name}+median")
    least = max(made.min_vectors(made.f or 0), 4)
    trial = Trial(made, least + 1 if m is None else m, moves)
    for promise, check in RULE_PROMISES.items():
        yield partial(_held, f"rule {made.name}", promise, check, trial)


# --- attacks ------------------------------------------------------------------------------------------------


def _view(attack: Attack, dtype: type = np.float64, kernels: str = "numba", alone: bool = False) -> View:
    """Return a view of five victims among twelve honest nodes, with the inputs that the attack needs."""
    rng, hostile = np.random.default_rng(4), np.array([1, 2, 3, 1, 2])
    peers = np.full((5, 7), -1)
    for i, b in enumerate(hostile):
        peers[i, : 7 - b] = rng.choice(np.delete(np.arange(12), i), size=7 - b, replace=False)
    models: Array = (rng.normal(size=9) + 0.3 * rng.normal(size=(12, 9))).astype(dtype)
    if alone:
        peers[2] = -1
    table: Array = np.concatenate([models, np.full((5, 9), np.nan, dtype)])
    given: dict[str, Any] = {
        "before": (models - 0.1 * rng.normal(size=models.shape)).astype(dtype),
        "graph": np.array([np.delete(rng.permutation(12), 0)[:4] for _ in range(12)]),
    }
    return View(
        table,
        np.arange(5),
        peers,
        hostile,
        rule=rule_by_name("nnm+trimmed_mean", f=3),
        context=RoundContext(round=3, seed=1),
        kernels=backend(kernels),
        **{key: value for key, value in given.items() if key in attack.needs},
    )


def _one(view: View, i: int) -> View:
    """Return the same round for victim i alone."""
    assert view.rule is not None
    table = np.concatenate([view.honest, np.full((1, view.table.shape[1]), np.nan, view.table.dtype)])
    victim = slice(i, i + 1)
    return replace(
        view, table=table, own=view.own[victim], peers=view.peers[victim], hostile=view.hostile[victim]
    )


def _rows(attack: Attack, per_victim: bool) -> None:
    for dtype in (np.float32, np.float64):
        view = _view(attack, dtype)
        before = view.honest.copy()
        forged, _ = attack(view, {})
        assert forged.shape == (5, 9), f"it forged {forged.shape} for five victims of nine parameters"
        assert forged.dtype == dtype, f"it forged {forged.dtype} among models of {np.dtype(dtype)}"
        assert not np.isnan(forged).any(), "it left rows unwritten, or forged NaN"
        assert np.array_equal(view.honest, before), "it changed honest models"


def _repeats(attack: Attack, per_victim: bool) -> None:
    first, state = attack(_view(attack), {})
    again, _ = attack(_view(attack), {})
    assert np.array_equal(first, again), "equal views gave different rows: draw from rpel.randomness.stream"
    for key, value in state.items():
        assert np.asarray(value).dtype.kind in "fiub", (
            f"state {key!r} is no number or array, for a checkpoint to keep"
        )


def _singly(attack: Attack, per_victim: bool) -> None:
    if not per_victim:
        return
    view = _view(attack)
    forged = attack(view, {})[0].copy()
    for i in range(5):
        _same(forged[i], attack(_one(_view(attack), i), {})[0][0], f"victim {i} of five")


def _twins(attack: Attack, per_victim: bool) -> None:
    _same(attack(_view(attack, kernels="plain"), {})[0], attack(_view(attack), {})[0], "by the plain kernels")


def _lonely(attack: Attack, per_victim: bool) -> None:
    forged, _ = attack(_view(attack, alone=True), {})
    assert not np.isnan(forged).any(), "a victim without honest peers was forgotten"


ATTACK_PROMISES: dict[str, Callable[[Attack, bool], None]] = {
    "one row of the models' dtype for each victim, honest models unchanged": _rows,
    "equal views and states give equal rows, and the state can be kept": _repeats,
    "where it declares per_victim, victims are sent what each would be sent alone": _singly,
    "the plain kernels forge what the compiled ones forge": _twins,
    "a victim without honest peers is attacked from its own model": _lonely,
}


def check_attack(attack: Any, *, per_victim: bool | None = None, **parameters: Any) -> None:
    """Hold an attack (anything that `rpel.attack` takes) to what all promise.

    What it declares (:func:`rpel.attacks.declare`) is checked, too, and it is shown nothing that it does not
    declare to need. ``per_victim`` True or False: hold it to that promise, or do not, whatever it declares.

    >>> check_attack("alie", z=2.0)
    >>> check_attack(lambda view: view.out * 0)
    Traceback (most recent call last):
    AssertionError: attack rpel.testing:<lambda> breaks "one row of the models' dtype ...
    """
    for check in _attack_checks(attack, per_victim=per_victim, **parameters):
        check()


def _attack_checks(
    attack: Any, *, per_victim: bool | None = None, **parameters: Any
) -> Iterator[partial[None]]:
    made = attack_by_name(attack, **parameters)
    alone = made.per_victim if per_victim is None else per_victim
    if made.trains:
        raise ValueError(f"{made.name} forges nothing: its nodes train")
    for promise, check in ATTACK_PROMISES.items():
        yield partial(_held, f"attack {made.name}", promise, check, made, alone)


# --- both ---------------------------------------------------------------------------------------------------


def _same(a: Any, b: Any, what: str) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"{what}: {a.shape} instead of {b.shape}"
    scale = 1 + float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    both = np.isfinite(a) & np.isfinite(b)
    off = float(np.abs(a[both] - b[both]).max(initial=0.0))
    assert np.array_equal(np.isfinite(a), np.isfinite(b)), f"{what}: other entries are finite"
    assert off <= 1e-6 * scale, f"{what}: the results differ by {off:.3g}"


def _held(who: str, promise: str, check: Callable[..., None], *given: Any) -> None:
    try:
        check(*given)
    except AssertionError as error:
        raise AssertionError(f'{who} breaks "{promise}": {error}') from None
    except Exception as error:
        raise AssertionError(
            f'{who} breaks "{promise}": it raised {type(error).__name__}: {error}'
        ) from error


def parametrize(rules: Iterable[Any] = (), attacks: Iterable[Any] = ()) -> "pytest.MarkDecorator":
    """Return a pytest mark that calls the test with each ``check`` of each rule and attack.

    An entry is what :func:`check_rule` or :func:`check_attack` takes, or (that, {keywords}).
    """
    import pytest

    cases = []
    for makers, entries in ((_rule_checks, rules), (_attack_checks, attacks)):
        for entry in entries:
            what, given = entry if isinstance(entry, tuple) else (entry, {})
            cases += [
                pytest.param(check, id=f"{check.args[0]}: {check.args[1]}") for check in makers(what, **given)
            ]
    return pytest.mark.parametrize("check", cases)
