"""Attacks by name, with their parameters checked: ``attack("alie", z=1.5)``; own functions, and those of packages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import plugins
from rpel.aggregation import Rule
from rpel.attacks.forgeries import ALIASES, ATTACKS, BACKDOOR, LABEL_FLIP, TRAINING, State, check_spectral, families
from rpel.attacks.view import View
from rpel.kernels.backend import backend
from rpel.types import Floats, Integers, Models

GROUP = "rpel.attacks"
"""The entry points under which packages register attacks."""


@dataclass(frozen=True)
class Attack:
    """An attack with its parameters; call it on a view and a state, or :meth:`forge` for one victim.

    ``targeting="most-exposed"`` strikes only the victims with the most hostile peers this round; the others get μ.
    ``flood`` makes the hostile nodes push to every honest node every round, where nodes push (Epidemic Learning).
    ``own`` is the function of an attack that is not one of the library's.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    targeting: str = "all"
    flood: bool = False
    own: Callable[..., Any] | None = None

    @property
    def trains(self) -> bool:
        """True when hostile nodes train beside the honest ones instead of forging."""
        return self.name in TRAINING

    @property
    def function(self) -> Callable[..., Any]:
        """What forges: ``f(view, **parameters)``, or ``f(view, state, **parameters)`` if it remembers."""
        return ATTACKS[self.name] if self.own is None else self.own

    @property
    def needs(self) -> frozenset[str]:
        """What must be kept for it besides the half-steps: "before" (the models x^t), "graph" (who asks whom).

        >>> attack("fang").needs, attack("alie").needs, attack("strongest", of="alie+spectral").needs
        (frozenset({'before'}), frozenset(), frozenset({'graph'}))
        """
        return frozenset().union(*(getattr(function, "needs", ()) for function in self._functions))

    @property
    def _functions(self) -> list[Callable[..., Any]]:
        """What forges, with those it searches; nothing where nodes train."""
        if self.trains:
            return []
        searched = families(self.parameters.get("of", "alie")) if self.name == "strongest" else []
        return [self.function, *(ATTACKS[name] for name in searched)]

    def check_size(self, honest: int) -> None:
        """Refuse more honest nodes than it can look at, before a run begins.

        >>> attack("spectral").check_size(3000)
        Traceback (most recent call last):
        ValueError: spectral needs all eigenvalues of the honest graph: at most 2000 honest nodes, not 3000
        """
        if ATTACKS["spectral"] in self._functions:
            check_spectral(honest)

    def __call__(self, view: View, state: State | None = None) -> tuple[Models, State]:
        """(forged (v, d), new state). The forged rows are the view's own space."""
        state = {} if state is None else state
        if self.trains:
            raise ValueError(f"{self.name} forges nothing: its nodes train on data of their own")
        if not view.victims:
            return view.space, state
        if "state" in signature(self.function).parameters:
            forged, state = self.function(view, state, **self.parameters)
        else:
            forged = self.function(view, **self.parameters)
        self._deliver(view, forged)
        if self.targeting == "most-exposed":
            _spare(view, view.hostile < view.hostile.max())
        return view.space, state

    def _deliver(self, view: View, forged: Any) -> None:
        """Own functions may return rows of their own making; ours have written to the view's space."""
        if forged is view.space:
            return
        rows = np.asarray(forged)
        if rows.shape not in (view.space.shape, view.space.shape[1:]) or rows.dtype.kind not in "fiu":
            right = f"rows of numbers of shape {view.space.shape}"
            raise ValueError(f"attack {self.name} must give {right}, not {rows.shape} {rows.dtype}")
        if not np.shares_memory(rows, view.space):
            view.space[:] = rows

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

        ``weights`` are the gossip weights of own, the honest and the hostile models, in this order; ``change`` (d,) is
        the honest nodes' mean change in the local step (fang); ``graph`` (k + 1, s) the rows of the honest that each
        of them asks, the victim last (spectral).

        >>> attack("foe", zeta=3).forge(np.array([[1.0, 2.0], [3.0, 4.0]]))
        array([-4., -6.])
        """
        honest = np.asarray(honest)
        if honest.ndim != 2 or honest.dtype.kind != "f":
            raise ValueError(
                f"{self.name} forges from honest models (k, d) of floats, not {honest.shape} {honest.dtype}"
            )
        if own is None and (not len(honest) or self.name in ("dissensus", "strongest", "spectral")):
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
            round=round,
            seed=seed,
            weights=None if shares is None else shares[None, 1 : k + 1],
            hostile_weights=None if shares is None else shares[None, k + 1 :],
            kernels=backend("plain"),
            before=None if change is None else table[:-1].astype(np.float64) - np.asarray(change),
            graph=graph,
        )
        return np.asarray(self(view)[0][0])


def _spare(view: View, spared: NDArray[np.bool_]) -> None:
    """Overwrite the forged rows of the spared victims with μ."""
    if spared.any():
        view.space[spared] = view.average(view.sources[spared])


def attack(
    name: str | Attack | Callable[..., Any], *, targeting: str = "all", flood: bool = False, **parameters: Any
) -> Attack:
    """The attack of that name, checked: ``attack("alie", z=1.5)``, ``attack("strongest", of="foe")``.

    ``name`` may also be ``module:function``, a name that an installed package registers, a function
    ``f(view, **parameters)`` or ``f(view, state, **parameters)``, or an Attack, which is returned as it is.

    >>> attack("sf").forge(np.array([[1.0], [3.0]]))
    array([-2.])
    >>> attack(lambda view, by=1.0: view.moments(by)).forge(np.array([[1.0], [3.0]]))
    array([2.])
    """
    if isinstance(name, Attack):
        if parameters or flood or targeting != "all":
            raise ValueError(f"attack {name.name} has its parameters already; make it anew to change them")
        return name
    if targeting not in ("all", "most-exposed"):
        raise ValueError(f"targeting is 'all' or 'most-exposed', not {targeting!r}")
    full, own = _found(name)
    if full == "alie" and "tau" in parameters:
        parameters["z"] = parameters.pop("tau")
    takes = {} if full in TRAINING else dict(signature(own or ATTACKS[full]).parameters)
    known = set(TRAINING.get(full, set(takes) - {"view", "state"} - {next(iter(takes), "")}))
    anything = any(p.kind is Parameter.VAR_KEYWORD for p in takes.values())
    for key, value in parameters.items():
        if key not in known and not anything:
            raise ValueError(f"{full} knows no parameter {key!r}: it takes {', '.join(sorted(known)) or 'none'}")
        if own is None:
            _check_parameter(full, key, value)
    return Attack(full, parameters, targeting, flood, own)


def _found(name: str | Callable[..., Any]) -> tuple[str, Callable[..., Any] | None]:
    """(its full name, the function where it is not one of ours)."""
    full = ALIASES.get(name, name) if isinstance(name, str) else plugins.place_of(name)
    if full in ATTACKS or full in TRAINING:
        return full, None
    found = plugins.find(GROUP, name, [*ATTACKS, *ALIASES, *TRAINING]) if isinstance(name, str) else name
    if not callable(found):
        raise ValueError(f"attack {name!r} is not a function f(view, …) but {type(found).__name__}")
    return full, found


def about() -> list[tuple[str, str]]:
    """Every attack by name with one line on it, those of installed packages included.

    >>> dict(about())["sign_flipping"]
    'SF: −μ (Li et al., 2020).'
    """
    flipped = (LABEL_FLIP, "Hostile nodes train beside the honest ones, on labels C − 1 − y.")
    marked = (BACKDOOR, "Hostile nodes train on images of which a share carry a patch and the label target.")
    found = plugins.about(GROUP, ATTACKS)
    return [*found[: len(ATTACKS)], flipped, marked, *found[len(ATTACKS) :]]


def _check_parameter(name: str, key: str, value: Any) -> None:
    if key == "of":
        families(value)
    elif key == "direction":
        if value not in ("std", "unit", "sign"):
            raise ValueError(f"{name}: direction is std, unit or sign, not {value!r}")
    elif not isinstance(value, int | float | np.integer | np.floating):
        if (name, key, value) != ("alie", "z", "max"):
            raise ValueError(f"{name}: {key} takes a number, not {value!r}" + (" (or 'max')" if key == "z" else ""))
    elif not np.isfinite(value):
        raise ValueError(f"{name}: {key} must be finite, not {value}")
    elif (key == "share" and not 0 < value <= 1) or (key == "target" and (value < 0 or value != int(value))):
        right = "a share above 0 and up to 1" if key == "share" else "the number of a class"
        raise ValueError(f"{name}: {key} takes {right}, not {value}")
