"""What an attack declares about itself, beside its function. Whoever uses one asks for this,
never for its name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from rpel.errors import nearest

NEEDS = ("own", "rule", "before", "graph")


class Poison(StrEnum):
    """What the hostile nodes of an attack that trains do to their examples."""

    LABELS = "labels"
    """Labels C − 1 − y."""

    PATCH = "patch"
    """A share of the images carries a patch and the label of a target class."""


@dataclass(frozen=True)
class Traits:
    """What an attack needs and does.

    per_victim  the row for one victim depends on no other victim, and nothing is remembered:
    victims are then forged
                for where they are aggregated, by each worker alone
    needs       what it must be given beside the half-steps: "own" (the victim's own model),
    "rule" (the victim's),
                "before" (the models before the local step), "graph" (who asks whom)
    searches    it evaluates the victims' rules again and again, and is told who else gets a vector
    trains      nothing is forged: its nodes train beside the honest ones and their models are pulled
    poisons     what such nodes do to their training examples
    factor      the parameter a ≥ 0 that scales it, which ``strongest`` may search
    most        the largest number of honest nodes it can look at, and why
    tensors     it takes a view of torch tensors and gives tensors; others, where a run is on torch,
    are handed NumPy's
    """

    per_victim: bool = False
    needs: frozenset[str] = frozenset()
    searches: bool = False
    trains: bool = False
    poisons: Poison | None = None
    factor: str | None = None
    most: tuple[int, str] | None = None
    tensors: bool = False

    def check_size(self, name: str, honest: int) -> None:
        """ValueError for more honest nodes than it can look at."""
        if self.most is not None and honest > self.most[0]:
            raise ValueError(
                f"{name} needs {self.most[1]}: at most {self.most[0]} honest nodes, not {honest}"
            )


Function = TypeVar("Function", bound=Callable[..., Any])
Parts = Callable[[Mapping[str, Any]], Mapping[str, Callable[..., Any]]]
"""(parameters) → the attacks by name of which one is made."""


def declare(
    *,
    per_victim: bool = False,
    needs: Iterable[str] = (),
    searches: bool = False,
    trains: bool = False,
    poisons: Poison | str | None = None,
    factor: str | None = None,
    most: tuple[int, str] | None = None,
    parts: Parts | None = None,
    tensors: bool = False,
) -> Callable[[Function], Function]:
    """A decorator that says what an attack needs and does; see :class:`Traits`.
    Without it nothing is assumed.

    >>> @declare(per_victim=True)
    ... def half_truth(view, share=0.5):
    ...     return view.moments(share)
    >>> traits_of(half_truth).per_victim
    True
    >>> declare(needs=["befor"])
    Traceback (most recent call last):
    ValueError: an attack cannot need 'befor'; the nearest is 'before'...
    """
    wanted = frozenset(needs)
    for wrong in sorted(wanted.difference(NEEDS)):
        raise ValueError(f"an attack cannot need {wrong!r}; {nearest(wrong, NEEDS)}")
    if poisons is not None and poisons not in list(Poison):
        raise ValueError(
            f"an attack poisons {' or '.join(map(repr, map(str, Poison)))}, not {str(poisons)!r}"
        )
    poison = None if poisons is None else Poison(poisons)
    traits = Traits(
        per_victim,
        wanted,
        searches,
        trains or poison is not None,
        poison,
        factor,
        most,
        tensors,
    )

    def declared(function: Function) -> Function:
        function.traits, function.parts = traits, parts  # type: ignore[attr-defined]
        return function

    return declared


def traits_of(function: Callable[..., Any]) -> Traits:
    """What a function declares; nothing where it does not."""
    traits = getattr(function, "traits", None)
    return traits if isinstance(traits, Traits) else Traits()


def parts_of(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Mapping[str, Callable[..., Any]]:
    """The attacks of which this one is made with these parameters, by name; most are made of none."""
    parts: Parts | None = getattr(function, "parts", None)
    return {} if parts is None else parts(parameters)


def joined(whole: Traits, parts: Sequence[Traits]) -> Traits:
    """What an attack made of others needs and does: victim by victim only if all are,
    and all that any needs."""
    alone = whole.per_victim and all(part.per_victim for part in parts)
    return replace(whole, per_victim=alone, needs=whole.needs.union(*(part.needs for part in parts)))
