"""Rules by name and in chains: ``rule("nnm+trimmed_mean", f=7)`` is ``chain(nnm(7), trimmed_mean(7))``."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from rpel import component
from rpel.backend.arrays import empty, take
from rpel.component import Component
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


def rule(name: str | Stage | Callable[..., Any], **parameters: Any) -> Rule:
    """Return a rule by name, or a chain of rules joined by ``+``.

    Args:
        name: names of rules with or without parameters, as in ``"nnm+krum(neighbours=m-f-2)"``; of the
            library, of an installed package, or ``module:object``; or an object: an instance or a subclass of
            `Rule` (or `PreAggregation`), or any other callable, which is a function of the vectors
            (m, d) → (d,) and receives f if it has such a parameter.
        **parameters: each stage takes the ones it has; f is shared.

    >>> rule("nnm+krum(neighbours=m-f-2)", f=7).kappa(31) is None
    True
    >>> rule("nnm+trimmed_mean", f=7).kappa(31) < 20
    True
    >>> rule(lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    """
    given = component.parse_chain(name) if isinstance(name, str) else [name]
    parts = [_part(one) for one in given]
    known = frozenset({"f"}).union(*(part.keywords for part in parts))
    for wrong in sorted(set(parameters) - known):
        whole = "+".join(part.asked.name for part in parts)
        raise ValueError(f"{whole} has no parameter {wrong!r}; {nearest(wrong, known)}")
    return chain(*(part.stage(parameters) for part in parts))


@dataclass(frozen=True)
class Part:
    """A stage of a chain before it is made: by ``make``, with the parameters of ``takes`` after ``skip``."""

    asked: Component
    make: Callable[..., Stage]
    takes: Callable[..., Any]
    skip: int = 0

    @property
    def keywords(self) -> list[str]:
        """The names of its parameters."""
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        takes = signature(self.takes).parameters.values()
        return [p.name for p in takes if p.kind not in variable][self.skip :]

    def stage(self, shared: Mapping[str, Any]) -> Stage:
        """Make the stage with its own parameters and those of the chain's that it has."""
        given = {key: shared[key] for key in self.keywords if key in shared} | dict(self.asked.keywords)
        name = self.asked.name
        try:
            bound = Component(name, self.asked.args, given).bind_to(self.takes, self.skip)
        except ValueError as error:
            raise ValueError(str(error).replace(name, f"rule {name!r}", 1)) from None
        try:
            return self.make(**bound)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None


def _part(one: Component | Stage | Callable[..., Any]) -> Part:
    thing: Any = one
    if isinstance(one, Component):
        thing = RULES.get(one.name) or component.find(GROUP, one.name, RULES)
        if not callable(thing):
            kind = type(thing).__name__
            raise ValueError(f"rule {one.name!r} is neither a Rule nor a function but {kind}")
        asked = one
    else:
        component.check_callable(thing, "rule")
        asked = Component(thing.name if isinstance(thing, Stage) else component.place_of(thing))
    if thing in RULES.values():
        return Part(asked, thing, thing)
    if isinstance(thing, Stage):
        return Part(asked, (with_f := partial(_with_f, thing)), with_f)
    if isinstance(thing, type) and issubclass(thing, Stage):
        return Part(asked, (make := partial(thing, asked.name)), make)
    takes = list(signature(thing).parameters.values())
    if not takes or takes[0].kind is Parameter.KEYWORD_ONLY:
        raise ValueError(f"rule {asked.name} must be a Rule or a function f(x), not {asked.name}()")

    def function_rule(f: int | None = None, **more: Any) -> Rule:
        return FunctionRule(asked.name, thing, more, f=f)

    return Part(asked, function_rule, thing, skip=1)  # the first parameter is the vectors


def _with_f(stage: Stage, f: int | None = None) -> Stage:
    return stage if f is None else stage.with_f(f)


def built_in(name: str) -> bool:
    """Say whether every part of a chain is one of the library's own rules.

    >>> built_in("nnm+trimmed_mean"), built_in("nnm+my.module:rule")
    (True, False)
    """
    return all(part.name in RULES for part in component.parse_chain(name))


def about() -> list[tuple[str, str]]:
    """Return every rule by name with one line about it, those of installed packages included.

    >>> dict(about())["median"]
    'Per coordinate, the middle value (Yin et al., 2018). f enters only κ and the check of m.'
    """
    return component.about(GROUP, RULES)
