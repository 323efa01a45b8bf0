"""Attacks by name, with their parameters checked: ``attack("alie", z=1.5)``."""

from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.aggregation import Rule
from rpel.attacks.forgeries import ALIASES, ATTACKS, FACTORS, LABEL_FLIP, State
from rpel.attacks.view import View
from rpel.errors import nearest
from rpel.kernels import plain
from rpel.types import Floats, Models


@dataclass(frozen=True)
class Attack:
    """An attack with its parameters; call it on a view and a state, or :meth:`forge` for one victim.

    ``targeting="most-exposed"`` strikes only the victims with the most hostile peers this round; the others get μ.
    ``flood`` makes the hostile nodes push to every honest node every round, where nodes push (Epidemic Learning).
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    targeting: str = "all"
    flood: bool = False

    @property
    def trains(self) -> bool:
        """True when hostile nodes train beside the honest ones instead of forging."""
        return self.name == LABEL_FLIP

    def __call__(self, view: View, state: State | None = None) -> tuple[Models, State]:
        """(forged (v, d), new state). The forged rows are the view's own space."""
        state = {} if state is None else state
        if self.trains:
            raise ValueError("label_flip forges nothing: its nodes train on flipped labels")
        if not view.victims:
            return view.space, state
        function = ATTACKS[self.name]
        if "state" in signature(function).parameters:
            forged, state = function(view, state, **self.parameters)
        else:
            forged = function(view, **self.parameters)
        if self.targeting == "most-exposed":
            _spare(view, view.hostile < view.hostile.max())
        return forged, state

    def forge(
        self,
        honest: Models,
        own: Models | None = None,
        *,
        byzantine: int = 1,
        rule: Rule | None = None,
        weights: Floats | None = None,
    ) -> Models:
        """The forged vector (d,) for one victim that received ``honest`` (k, d), by the plain kernels.

        ``weights`` are the gossip weights of own, the honest and the hostile models, in this order.

        >>> attack("foe", zeta=3).forge(np.array([[1.0, 2.0], [3.0, 4.0]]))
        array([-4., -6.])
        """
        honest = np.asarray(honest)
        if honest.ndim != 2 or honest.dtype.kind != "f":
            raise ValueError(
                f"{self.name} forges from honest models (k, d) of floats, not {honest.shape} {honest.dtype}"
            )
        if own is None and (not len(honest) or self.name in ("dissensus", "strongest")):
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
            weights=None if shares is None else shares[None, 1 : k + 1],
            hostile_weights=None if shares is None else shares[None, k + 1 :],
            kernels=plain,
        )
        return np.asarray(self(view)[0][0])


def _spare(view: View, spared: NDArray[np.bool_]) -> None:
    """Overwrite the forged rows of the spared victims with μ."""
    if not spared.any():
        return
    weights = (view.sources >= 0) / np.maximum((view.sources >= 0).sum(axis=1, keepdims=True), 1)
    view.space[spared] = view.kernels.combine(view.honest, view.sources[spared], weights[spared])


def attack(name: str, *, targeting: str = "all", flood: bool = False, **parameters: Any) -> Attack:
    """The attack of that name, checked: ``attack("alie", z=1.5)``, ``attack("strongest", of="foe")``.

    >>> attack("sf").forge(np.array([[1.0], [3.0]]))
    array([-2.])
    """
    full = ALIASES.get(name, name)
    if full not in ATTACKS and full != LABEL_FLIP:
        choices = [*ATTACKS, *ALIASES, LABEL_FLIP]
        raise ValueError(f"there is no attack {name!r}; {nearest(name, choices)}")
    if targeting not in ("all", "most-exposed"):
        raise ValueError(f"targeting is 'all' or 'most-exposed', not {targeting!r}")
    if full == "alie" and "tau" in parameters:
        parameters["z"] = parameters.pop("tau")
    known = set() if full == LABEL_FLIP else set(signature(ATTACKS[full]).parameters) - {"view", "state"}
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(f"{name} knows no parameter {key!r}: it takes {', '.join(sorted(known)) or 'none'}")
        _check_parameter(full, key, value)
    return Attack(full, parameters, targeting, flood)


def _check_parameter(name: str, key: str, value: Any) -> None:
    if key == "of":
        if ALIASES.get(value, value) not in FACTORS:
            raise ValueError(f"strongest searches the factor of {', '.join(FACTORS)}, not of {value!r}")
    elif isinstance(value, str):
        if (name, key, value) != ("alie", "z", "max"):
            raise ValueError(f"{name}: {key} takes a number, not {value!r}" + (" (or 'max')" if key == "z" else ""))
    elif not np.isfinite(value):
        raise ValueError(f"{name}: {key} must be finite, not {value}")
