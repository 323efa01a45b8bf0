"""Rules by name and in chains: ``rule("nnm+trimmed_mean", f=7)`` is ``chain(nnm(7), trimmed_mean(7))``."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from rpel import component
from rpel.backend.arrays import empty, take
from rpel.errors import nearest
from rpel.rules import coordinatewise, graph, linear, mixing
from rpel.rules.base import Group, Rule, Stage
from rpel.rules.inputs import Array
from rpel.rules.mixing import chain

GROUP = "rpel.rules"
"""The entry points under which packages register rules."""

RULES: dict[str, Callable[..., Stage]] = {
    name: getattr(module, name)
    for module in (linear, coordinatewise, mixing, graph)
    for name in module.__all__
}
"""Every rule by name. A new one is a constructor, with its name in ``__all__`` of its module."""


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A function x (m, d) → (d,) as a rule, called for one victim after another.

    >>> FunctionRule("largest", lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    """

    function: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Call the function with each victim's vectors, and with f if the rule has one."""
        _warn_slow_once(self.name)
        given = self.parameters if self.f is None else self.parameters | {"f": group.f}
        result = empty(len(group.index), group.table) if out is None else out
        for i, rows in enumerate(group.index):
            vector = self.function(np.array(group.kernels.host(take(group.table, rows))), **given)
            if np.shape(vector) != (result.shape[1],):
                what = f"the rule {vector.name}" if isinstance(vector, Stage) else str(np.shape(vector))
                raise ValueError(f"rule {self.name} must return a vector ({result.shape[1]},), not {what}")
            result[i] = group.kernels.array(np.asarray(vector))
        return result


@cache
def _warn_slow_once(name: str) -> None:
    logging.getLogger("rpel").warning(
        "rule %s is called for one node after another; a subclass of rpel.rules.Rule is faster", name
    )


@dataclass(frozen=True)
class Part:
    """A part of a chain before it is made."""

    name: str
    make: Callable[..., Stage]
    keywords: frozenset[str]
    required: frozenset[str] = frozenset()


def rule(name: str | Stage | Callable[..., Any], **parameters: Any) -> Rule:
    """Return a rule by name, or the chain of rules joined by ``+``.

    Each part takes the keywords that it knows; f is shared.

    Args:
        name: names of rules, of rules that installed packages register, or ``module:object``; or an object:
            an instance or a subclass of `Rule` (or `PreAggregation`), or a function of the vectors
            (m, d) → (d,), which receives f if it has such a parameter.
        **parameters: keywords for the parts.

    >>> rule("nnm+trimmed_mean", f=7).kappa(31) < 20
    True
    >>> rule(lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    """
    parts = [_part(one) for one in (name.split("+") if isinstance(name, str) else [name])]
    known = frozenset({"f"}).union(*(part.keywords for part in parts))
    for wrong in sorted(set(parameters) - known):
        whole = "+".join(part.name for part in parts)
        raise ValueError(f"{whole} knows no parameter {wrong!r}; {nearest(wrong, known)}")
    return chain(*(_make(part, parameters) for part in parts))


def _make(part: Part, parameters: dict[str, Any]) -> Stage:
    for key in sorted(part.required - set(parameters)):
        raise ValueError(f"rule {part.name!r} needs its parameter {key!r}: give {key}=…")
    try:
        return part.make(**{key: value for key, value in parameters.items() if key in part.keywords})
    except TypeError as error:
        raise ValueError(f"{part.name}: {error}") from None


def _part(one: str | Stage | Callable[..., Any]) -> Part:
    if isinstance(one, str) and one in RULES:
        return Part(one, RULES[one], *_keywords(RULES[one]))
    thing: Any = component.find(GROUP, one, RULES) if isinstance(one, str) else one
    if isinstance(thing, Stage):
        name = one if isinstance(one, str) else thing.name
        return Part(name, lambda f=None: thing if f is None else thing.with_f(f), frozenset({"f"}))
    if isinstance(one, str) and not callable(thing):
        raise ValueError(f"rule {one!r} is neither a Rule nor a function but {type(thing).__name__}")
    component.check_callable(thing, "rule")
    name = one if isinstance(one, str) else component.place_of(thing)
    if thing in RULES.values():
        return Part(name, thing, *_keywords(thing))
    if isinstance(thing, type) and issubclass(thing, Stage):
        make: Callable[..., Stage] = partial(thing, name)
        return Part(name, make, *_keywords(make))

    takes = list(signature(thing).parameters.values())
    if not takes or takes[0].kind is Parameter.KEYWORD_ONLY:
        raise ValueError(f"rule {name} must be a Rule or a function of the vectors, f(x), not {name}()")

    def function_rule(f: int | None = None, **more: Any) -> Rule:
        return FunctionRule(name, thing, more, f=f)

    return Part(name, function_rule, *_keywords(thing, skip=1))  # the first parameter is the vectors


def _keywords(function: Callable[..., Any], skip: int = 0) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of a function's parameters, and of those without a default."""
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    named = [p for p in signature(function).parameters.values() if p.kind not in variable][skip:]
    required = (p.name for p in named if p.default is Parameter.empty)
    return frozenset(p.name for p in named), frozenset(required)


def built_in(name: str) -> bool:
    """Say whether every part of a chain is one of the library's own rules.

    >>> built_in("nnm+trimmed_mean"), built_in("nnm+my.module:rule")
    (True, False)
    """
    return all(part in RULES for part in name.split("+"))


def about() -> list[tuple[str, str]]:
    """Return every rule by name with one line about it, those of installed packages included.

    >>> dict(about())["median"]
    'Per coordinate, the middle value (Yin et al., 2018). f enters only κ and the check of m.'
    """
    return component.about(GROUP, RULES)
