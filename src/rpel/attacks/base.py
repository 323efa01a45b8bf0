"""What an attack is: a function of a view, its declared traits, and its parameters."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from inspect import Parameter, signature
from typing import Any, TypeVar

import numpy as np

from rpel import component
from rpel.attacks.view import View
from rpel.backend.arrays import copy, put
from rpel.backend.base import backend
from rpel.component import Component
from rpel.errors import nearest
from rpel.rules import RoundContext, Rule
from rpel.rules.inputs import is_numeric
from rpel.types import Floats, Integers, Models

GROUP = "rpel.attacks"
"""The entry points under which packages register attacks."""

State = dict[str, Any]
"""What an attack remembers from round to round: arrays and numbers, checkpointed with the run."""

ATTACKS: dict[str, Callable[..., Any]] = {}
"""Every attack by name; `forgeries` and `search` fill it."""

ALIASES = {"sf": "sign_flipping", "ipm": "inner_product_manipulation"}

NEEDS = ("own", "rule", "before", "graph")


class Poison(StrEnum):
    """How the hostile nodes of an attack that trains change their examples."""

    LABELS = "labels"
    """Labels C − 1 − y."""

    PATCH = "patch"
    """A share of the images carries a patch and the label of a target class."""


@dataclass(frozen=True)
class Traits:
    """What an attack needs and does."""

    per_victim: bool = False
    """A victim's row depends on no other victim and on no state: each worker forges for its own victims."""
    needs: frozenset[str] = frozenset()
    """Inputs beside the half-steps: "own" (the victim's model), "rule" (the victim's, evaluated many times),
    "before" (the models before the local step), "graph" (who asks whom)."""
    poisons: Poison | None = None
    """Its nodes forge nothing, but train beside the honest ones on such examples."""
    factor: str | None = None
    """The parameter a ≥ 0 that scales it, which ``strongest`` may search."""
    most: int | None = None
    """The largest number of honest nodes that it can look at."""
    tensors: bool = False
    """It takes views of torch tensors; on a device, others see a copy in NumPy."""


Function = TypeVar("Function", bound=Callable[..., Any])


def declare(
    *,
    per_victim: bool = False,
    needs: Iterable[str] = (),
    poisons: Poison | str | None = None,
    factor: str | None = None,
    most: int | None = None,
    tensors: bool = False,
    by_parameters: Callable[..., Traits] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator that states what an attack needs and does; see `Traits`.

    Without it nothing is assumed. With ``by_parameters``, that function of the attack's parameters states it.

    >>> @declare(per_victim=True)
    ... def half_truth(view, share=0.5):
    ...     return view.moments(share)
    >>> attack(half_truth).per_victim
    True
    >>> declare(needs=["befor"])
    Traceback (most recent call last):
    ValueError: an attack cannot need 'befor'; the nearest is 'before'...
    """
    for wrong in sorted(set(needs).difference(NEEDS)):
        raise ValueError(f"an attack cannot need {wrong!r}; {nearest(wrong, NEEDS)}")
    if poisons is not None and poisons not in list(Poison):
        raise ValueError(f"an attack poisons 'labels' or 'patch', not {str(poisons)!r}")
    poison = None if poisons is None else Poison(poisons)
    traits = Traits(per_victim, frozenset(needs), poison, factor, most, tensors)

    def declared(function: Function) -> Function:
        function.traits = by_parameters or (lambda **_: traits)  # type: ignore[attr-defined]
        return function

    return declared


def traits_of(function: Callable[..., Any], **parameters: Any) -> Traits:
    """Return what an attack declares with these parameters; nothing if it declares nothing."""
    declared: Callable[..., Traits] | None = getattr(function, "traits", None)
    return Traits() if declared is None else declared(**parameters)


@dataclass(frozen=True)
class Attack:
    """An attack with its parameters; call it on a view and a state, or `forge` for one victim."""

    name: str
    function: Callable[..., Any]
    """``f(view, **parameters) -> rows`` or ``f(view, state, **parameters) -> (rows, state)``."""
    parameters: dict[str, Any] = field(default_factory=dict)
    targeting: str = "all"
    """"most-exposed" strikes only the victims with the most hostile peers this round; the others get μ."""
    consistent: bool = False
    """Each hostile node sends all its victims of a round one vector."""
    flood: bool = False
    """Hostile nodes push to every honest node every round, where nodes push (Epidemic Learning)."""

    def __post_init__(self) -> None:
        if self.targeting not in ("all", "most-exposed"):
            raise ValueError(f"targeting is 'all' or 'most-exposed', not {self.targeting!r}")

    def __str__(self) -> str:
        """Return the text that makes the same attack.

        >>> str(attack("sf")), str(attack("alie(2, targeting=most-exposed)"))
        ('sign_flipping', 'alie(z=2, targeting=most-exposed)')
        """
        how = {key: getattr(self, key) for key in ("targeting", "consistent", "flood")}
        changed = {key: value for key, value in how.items() if value not in ("all", False)}
        return str(Component(self.name, (), {**self.parameters, **changed}))

    @property
    def traits(self) -> Traits:
        """What its function declares."""
        return traits_of(self.function, **self.parameters)

    @property
    def per_victim(self) -> bool:
        """Whether a victim's vector depends on no other victim, and nothing is remembered.

        >>> attack("alie").per_victim, attack("alie(targeting=most-exposed)").per_victim
        (True, False)
        """
        return self.traits.per_victim and self.targeting == "all"

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that it needs beside the half-steps: "own", "rule", "before", "graph".

        >>> attack("fang").needs, attack("alie").needs, sorted(attack("strongest", of="alie+spectral").needs)
        (frozenset({'before'}), frozenset(), ['graph', 'own', 'rule'])
        """
        return self.traits.needs

    @property
    def trains(self) -> bool:
        """Whether hostile nodes train beside the honest ones instead of forging."""
        return self.traits.poisons is not None

    @property
    def poisons(self) -> Poison | None:
        """How hostile nodes that train change their examples."""
        return self.traits.poisons

    @property
    def searches(self) -> bool:
        """Whether it evaluates the victims' rules to find what harms them most."""
        return "rule" in self.needs

    @property
    def built_in(self) -> bool:
        """Whether it is one of the library's own."""
        return ATTACKS.get(self.name) is self.function

    def check_size(self, honest: int) -> None:
        """Refuse more honest nodes than it can look at, before a run begins.

        >>> attack("spectral").check_size(3000)
        Traceback (most recent call last):
        ValueError: attack spectral takes at most 2000 honest nodes, not 3000
        """
        most = self.traits.most
        if most is not None and honest > most:
            raise ValueError(f"attack {self.name} takes at most {most} honest nodes, not {honest}")

    def __call__(self, view: View, state: State | None = None) -> tuple[Models, State]:
        """Return the forged rows (v, d), which may be the view's ``out``, and the new state."""
        state = {} if state is None else state
        if self.trains:
            raise ValueError(f"{self.name} forges nothing: its nodes train on data of their own")
        if not view.victims:
            return view.out, state
        self.check_size(len(view.honest))
        seen = view
        if not (self.built_in or self.traits.tensors or isinstance(view.table, np.ndarray)):
            on_host = [None if a is None else view.kernels.host(a).copy() for a in (view.table, view.before)]
            seen = replace(view, table=on_host[0], before=on_host[1], kernels=backend("numba"))
        if _remembers(self.function):
            forged, state = self.function(seen, state, **self.parameters)
        else:
            forged = self.function(seen, **self.parameters)
        rows = self._rows(view, forged)
        if self.targeting == "most-exposed":
            spared = view.hostile < view.hostile.max()
            rows = view.out if rows is view.out else copy(rows)  # other arrays are not ours to write to
            put(rows, spared, view.average(view.sources[spared]))
        return rows, state

    def _rows(self, view: View, forged: Any) -> Models:
        """Return the result of a function as rows of the models' dtype; one vector stands for all victims."""
        rows = view.kernels.array(forged)
        if rows.shape not in (view.out.shape, view.out.shape[1:]) or not is_numeric(rows):
            right = f"rows of numbers of shape {tuple(view.out.shape)}"
            raise ValueError(f"attack {self.name} must give {right}, not {tuple(rows.shape)} {rows.dtype}")
        if rows.dtype == view.out.dtype and rows.shape == view.out.shape:
            return rows
        view.out[:] = rows
        return view.out

    def forge(
        self,
        honest: Models,
        own: Models | None = None,
        *,
        byzantine: int = 1,
        rule: Rule | None = None,
        weights: Floats | None = None,
        change: Models | None = None,
        graph: Integers | None = None,
        seed: int = 0,
        round: int = 0,
    ) -> Models:
        """Return the forged vector (d,) for one victim, computed by the plain backend.

        Args:
            honest: (k, d) the models that the victim received from honest peers.
            own: (d,) the victim's own model.
            byzantine: the number of hostile answers.
            rule: the victim's rule.
            weights: the gossip weights of own, the honest and the hostile models, in this order.
            change: (d,) the honest nodes' mean change in the local step (fang).
            graph: (k + 1, s) the rows of the honest that each of them asks, the victim last (spectral).
            seed: the run's.
            round: its number.

        >>> attack("foe", zeta=3).forge(np.array([[1.0, 2.0], [3.0, 4.0]]))
        array([-4., -6.])
        """
        honest = np.asarray(honest)
        if honest.ndim != 2 or honest.dtype.kind != "f":
            raise ValueError(
                f"{self.name} forges from honest models (k, d) of floats, not {honest.shape} {honest.dtype}"
            )
        if own is None and (not len(honest) or "own" in self.needs):
            raise ValueError(f"{self.name} needs the victim's own model")
        k, shares = len(honest), None if weights is None else np.asarray(weights, dtype=np.float64)
        first = honest.mean(axis=0) if own is None else np.asarray(own)
        table = np.concatenate([honest, first[None], np.zeros_like(first)[None]]).astype(honest.dtype)
        view = View(
            table,
            own=np.array([k]),
            peers=np.arange(k)[None, :],
            hostile=np.array([byzantine]),
            rule=rule,
            context=RoundContext(round, seed=seed),
            weights=None if shares is None else shares[None, 1 : k + 1],
            hostile_weights=None if shares is None else shares[None, k + 1 :],
            kernels=backend("plain"),
            before=None if change is None else table[:-1].astype(np.float64) - np.asarray(change),
            graph=graph,
        )
        return np.asarray(self(view)[0][0])


def _remembers(function: Callable[..., Any]) -> bool:
    """Say whether a function is called ``f(view, state, …)``."""
    return list(signature(function).parameters)[1:2] == ["state"]


def attack(name: str | Attack | Callable[..., Any], **parameters: Any) -> Attack:
    """Return an attack with its parameters checked: ``attack("alie", z=1.5)`` or ``attack("alie(z=1.5)")``.

    Args:
        name: a name, with parameters or without; of the library, of an installed package, or
            ``module:object``; or an object: a function ``f(view, **parameters) -> rows`` or
            ``f(view, state, **parameters) -> (rows, state)``, or an Attack, which is taken as it is.
        **parameters: the function's; and for any attack targeting, consistent and flood (see `Attack`).

    >>> attack("sf").forge(np.array([[1.0], [3.0]]))
    array([-2.])
    >>> attack(lambda view, by=1.0: view.moments(by), by=2.0).forge(np.array([[1.0], [3.0]]))
    array([4.])
    """
    function: Any
    if isinstance(name, str):
        asked = component.parse(name)
        full = ALIASES.get(asked.name, asked.name)
        function = ATTACKS.get(full) or component.find(GROUP, full, [*ATTACKS, *ALIASES])
        if not callable(function):
            raise ValueError(f"attack {full!r} is not a function f(view, …) but {type(function).__name__}")
    else:
        component.check_callable(name, "attack")
        full = name.name if isinstance(name, Attack) else component.place_of(name)
        asked, function = Component(full), name
    given = {**asked.keywords, **parameters}
    if isinstance(function, Attack):
        if given or asked.args:
            raise ValueError(f"attack {full} has its parameters already; make it anew to change them")
        return function if function.name == full else replace(function, name=full)
    how = {key: given.pop(key) for key in ("targeting", "consistent", "flood") if key in given}
    takes = list(signature(function).parameters.values())
    first = 2 if _remembers(function) else 1
    if traits_of(function).poisons is not None:
        first = 0
    elif not takes or takes[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        what = f"{full}{signature(function)}"
        raise ValueError(f"attack {full} must be a function of a view, f(view, …), not {what}")
    bound = Component(full, asked.args, given).bind_to(function, skip=first)
    if ATTACKS.get(full) is function:
        _check_values(full, bound)
    made = Attack(full, function, bound, **how)
    if made.traits.per_victim and first == 2:
        raise ValueError(f"attack {full} takes a state, so it cannot be declared per_victim")
    return made


DIRECTIONS = ("std", "unit", "sign")
WORDS = {"alie.z": ("max",), "min_max.direction": DIRECTIONS, "min_sum.direction": DIRECTIONS}
"""The words that parameters of our attacks take; "of" is checked by the search, the others are numbers."""


def _check_values(name: str, parameters: dict[str, Any]) -> None:
    for key, value in parameters.items():
        words = WORDS.get(f"{name}.{key}", ())
        is_number = isinstance(value, int | float | np.number) and bool(np.isfinite(value))
        if key != "of" and not (isinstance(value, str) and value in words) and not is_number:
            takes = " or ".join(([] if key == "direction" else ["a number"]) + [repr(word) for word in words])
            finite = ", and it must be finite" if isinstance(value, float) else ""
            raise ValueError(f"{name}: {key} takes {takes}, not {value!r}{finite}")
        whole = key != "target" or (value >= 0 and value == int(value))
        if not whole or (key == "share" and not 0 < value <= 1):
            right = "the number of a class" if key == "target" else "a share above 0 and up to 1"
            raise ValueError(f"{name}: {key} takes {right}, not {value}")


def about() -> list[tuple[str, str]]:
    """Return every attack by name with one line about it, those of installed packages included.

    >>> dict(about())["sign_flipping"]
    'SF: −μ (Li et al., 2020).'
    """
    return component.about(GROUP, ATTACKS)
