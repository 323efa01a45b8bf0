"""Attacks by name, with their parameters checked: ``attack("alie", z=1.5)``; own functions,
and those of packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import component
from rpel.attacks.forgeries import ALIASES, ATTACKS, State, families
from rpel.attacks.traits import Poison, Traits, joined, parts_of, traits_of
from rpel.attacks.view import View
from rpel.backend.arrays import copy, put
from rpel.backend.base import backend
from rpel.rules import RoundContext, Rule
from rpel.rules.inputs import is_numeric
from rpel.types import Floats, Integers, Models

GROUP = "rpel.attacks"
"""The entry points under which packages register attacks."""


@dataclass(frozen=True)
class Attack:
    """An attack with its parameters; call it on a view and a state, or :meth:`forge` for one victim.

    ``function`` forges: ``f(view, **parameters)``, or ``f(view, state, **parameters)`` if it remembers; what
    it needs and does is declared beside it (:func:`rpel.attacks.declare`).
    ``targeting="most-exposed"`` strikes only the victims with the most hostile peers this round; the others
    get μ. ``flood`` makes the hostile nodes push to every honest node every round,
    where nodes push (Epidemic Learning).
    """

    name: str
    function: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    targeting: str = "all"
    flood: bool = False

    @property
    def traits(self) -> Traits:
        """What its function declares, with what those declare that it is made of."""
        parts = parts_of(self.function, self.parameters)
        return joined(traits_of(self.function), [traits_of(part) for part in parts.values()])

    @property
    def per_victim(self) -> bool:
        """True when what one victim is sent depends on no other victim, and nothing is remembered.

        >>> attack("alie").per_victim, attack("alie",
        ...     targeting="most-exposed").per_victim, attack("stale").per_victim
        (True, False, False)
        """
        return self.traits.per_victim and self.targeting == "all"

    @property
    def needs(self) -> frozenset[str]:
        """What it must be given besides the half-steps: "own", "rule", "before" (the models x^t), "graph".

        >>> attack("fang").needs, attack("alie").needs, sorted(attack("strongest", of="alie+spectral").needs)
        (frozenset({'before'}), frozenset(), ['graph', 'own', 'rule'])
        """
        return self.traits.needs

    @property
    def trains(self) -> bool:
        """True when hostile nodes train beside the honest ones instead of forging."""
        return self.traits.trains

    @property
    def poisons(self) -> Poison | None:
        """What hostile nodes that train do to their examples."""
        return self.traits.poisons

    @property
    def searches(self) -> bool:
        """True when it evaluates the victims' rules to find what harms them most."""
        return self.traits.searches

    @property
    def built_in(self) -> bool:
        """Whether it is one of the library's own."""
        return ATTACKS.get(self.name) is self.function

    def check_size(self, honest: int) -> None:
        """Refuse more honest nodes than it can look at, before a run begins.

        >>> attack("spectral").check_size(3000)
        Traceback (most recent call last):
        ValueError: spectral needs all eigenvalues of the honest graph: at most 2000 honest nodes, not 3000
        """
        for name, function in {self.name: self.function, **parts_of(self.function, self.parameters)}.items():
            traits_of(function).check_size(name, honest)

    def __call__(self, view: View, state: State | None = None) -> tuple[Models, State]:
        """(forged (v, d), new state). The forged rows are an array of their own, or the view's ``out``."""
        state = {} if state is None else state
        if self.trains:
            raise ValueError(f"{self.name} forges nothing: its nodes train on data of their own")
        if not view.victims:
            return view.out, state
        seen = (
            view
            if self.built_in or self.traits.tensors or isinstance(view.table, np.ndarray)
            else self._on_host(view)
        )
        if _remembers(self.function):
            forged, state = self.function(seen, state, **self.parameters)
        else:
            forged = self.function(seen, **self.parameters)
        rows = self._rows(view, forged)
        if self.targeting == "most-exposed":
            rows = _sparing(view, rows, view.hostile < view.hostile.max())
        return rows, state

    def _on_host(self, view: View) -> View:
        """The same view of NumPy arrays, for a function that does not say that it takes tensors."""
        table, before = (
            None if a is None else view.kernels.host(a).copy() for a in (view.table, view.before)
        )
        assert table is not None
        return replace(view, table=table, before=before, kernels=backend("numba"))

    def _rows(self, view: View, forged: Any) -> Models:
        """What a function returned as rows of the models' dtype; one vector stands for all victims."""
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
        """The forged vector (d,) for one victim that received ``honest`` (k, d), by the plain kernels.

        ``weights`` are the gossip weights of own, the honest and the hostile models, in this order;
        ``change`` (d,) is the honest nodes' mean change in the local step (fang); ``graph`` (k + 1, s) the
        rows of the honest that each of them asks, the victim last (spectral).

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
        k = len(honest)
        first = honest.mean(axis=0) if own is None else np.asarray(own)
        table = np.concatenate([honest, first[None], np.zeros_like(first)[None]]).astype(honest.dtype)
        shares = None if weights is None else np.asarray(weights, dtype=np.float64)
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


def _sparing(view: View, forged: Models, spared: NDArray[np.bool_]) -> Models:
    """The forged rows, but μ for the spared victims."""
    if not spared.any():
        return forged
    # what others made is not ours to write to
    rows = view.out if forged is view.out else copy(forged)
    put(rows, spared, view.average(view.sources[spared]))
    return rows


def _remembers(function: Callable[..., Any]) -> bool:
    """Whether a function is called ``f(view, state, …)``."""
    return list(signature(function).parameters)[1:2] == ["state"]


def attack(
    name: str | Attack | Callable[..., Any], *, targeting: str = "all", flood: bool = False, **parameters: Any
) -> Attack:
    """The attack of that name, checked: ``attack("alie", z=1.5)``, ``attack("strongest", of="foe")``.

    ``name`` may also be ``module:function``, a name that an installed package registers, a function
    ``f(view, **parameters)`` or ``f(view, state, **parameters)``, or an Attack (also under
    ``module:object``), which is taken as it is.

    >>> attack("sf").forge(np.array([[1.0], [3.0]]))
    array([-2.])
    >>> attack(lambda view, by=1.0: view.moments(by)).forge(np.array([[1.0], [3.0]]))
    array([2.])
    """
    if targeting not in ("all", "most-exposed"):
        raise ValueError(f"targeting is 'all' or 'most-exposed', not {targeting!r}")
    full, function = _found(name)
    if isinstance(function, Attack):
        if parameters or flood or targeting != "all":
            raise ValueError(f"attack {full} has its parameters already; make it anew to change them")
        return function if function.name == full else replace(function, name=full)
    _check_parameters(full, function, parameters)
    return Attack(full, function, parameters, targeting, flood)


def _found(name: str | Attack | Callable[..., Any]) -> tuple[str, Attack | Callable[..., Any]]:
    """(its full name, its function, or the Attack that somebody made)."""
    if isinstance(name, Attack):
        return name.name, name
    if not isinstance(name, str):
        component.check_callable(name, "attack")
    full = ALIASES.get(name, name) if isinstance(name, str) else component.place_of(name)
    if full in ATTACKS:
        return full, ATTACKS[full]
    function = component.find(GROUP, name, [*ATTACKS, *ALIASES]) if isinstance(name, str) else name
    if not callable(function):
        raise ValueError(f"attack {name!r} is not a function f(view, …) but {type(function).__name__}")
    return full, function


def _check_parameters(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """ValueError unless the function can be called as f(view, …) or f(view, state, …) with what is given."""
    takes = list(signature(function).parameters.values())
    if not traits_of(function).trains:
        if not takes or takes[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            raise ValueError(
                f"attack {name} must be a function of a view, f(view, …), not {name}{signature(function)}"
            )
        takes = takes[2 if _remembers(function) else 1 :]
        if _remembers(function) and traits_of(function).per_victim:
            raise ValueError(f"attack {name} takes a state, so it cannot be declared per_victim")
    variable = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
    known = {p.name for p in takes if p.kind not in variable}
    anything = any(p.kind is Parameter.VAR_KEYWORD for p in takes)
    for key, value in given.items():
        if key not in known and not anything:
            raise ValueError(
                f"{name} knows no parameter {key!r}: it takes {', '.join(sorted(known)) or 'none'}"
            )
        if ATTACKS.get(name) is function:
            _check_parameter(name, key, value)
    for p in takes:
        if p.name not in given and p.default is Parameter.empty and p.kind not in variable:
            raise ValueError(f"attack {name} needs its parameter {p.name!r}")


def about() -> list[tuple[str, str]]:
    """Every attack by name with one line on it, those of installed packages included.

    >>> dict(about())["sign_flipping"]
    'SF: −μ (Li et al., 2020).'
    """
    return component.about(GROUP, ATTACKS)


def _check_parameter(name: str, key: str, value: Any) -> None:
    if key == "of":
        families(value)
    elif key == "direction":
        if value not in ("std", "unit", "sign"):
            raise ValueError(f"{name}: direction is std, unit or sign, not {value!r}")
    elif not isinstance(value, int | float | np.integer | np.floating):
        if (name, key, value) != ("alie", "z", "max"):
            raise ValueError(
                f"{name}: {key} takes a number, not {value!r}" + (" (or 'max')" if key == "z" else "")
            )
    elif not np.isfinite(value):
        raise ValueError(f"{name}: {key} must be finite, not {value}")
    elif (key == "share" and not 0 < value <= 1) or (key == "target" and (value < 0 or value != int(value))):
        right = "a share above 0 and up to 1" if key == "share" else "the number of a class"
        raise ValueError(f"{name}: {key} takes {right}, not {value}")
