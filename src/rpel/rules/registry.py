"""Rules by name, in chains (``rule("nnm+trimmed_mean", f=7)`` is ``chain(nnm(7), trimmed_mean(7))``),
and own ones."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from inspect import Parameter, signature
from typing import Any, cast

import numpy as np

from rpel import plugins
from rpel.backend.arrays import empty, take
from rpel.errors import nearest
from rpel.rules import coordinatewise, graph, linear
from rpel.rules.arrays import Array
from rpel.rules.base import Group, Rule, Stage
from rpel.rules.coordinatewise import Chain, PreAggregation

GROUP = "rpel.rules"
"""The entry points under which packages register rules."""

RULES: dict[str, Callable[..., Stage]] = {
    "mean": linear.mean,
    "median": coordinatewise.median,
    "trimmed_mean": coordinatewise.trimmed_mean,
    "krum": linear.krum,
    "multi_krum": linear.multi_krum,
    "geometric_median": linear.geometric_median,
    "centered_clipping": linear.centered_clipping,
    "mda": linear.mda,
    "monna": linear.monna,
    "meamed": coordinatewise.meamed,
    "smea": linear.smea,
    "caf": linear.caf,
    "bulyan": coordinatewise.bulyan,
    "aksel": linear.aksel,
    "cge": linear.cge,
    "dnc": linear.dnc,
    "nnm": coordinatewise.nnm,
    "bucketing": coordinatewise.bucketing,
    "clipping": coordinatewise.clipping,
    "arc": coordinatewise.arc,
    "gossip": graph.gossip,
    "cs_plus": graph.cs_plus,
    "gts": graph.gts,
    "gts_exact": graph.gts_exact,
    "clipped_gossip_adaptive": graph.clipped_gossip_adaptive,
    "clipped_gossip_oracle": graph.clipped_gossip_oracle,
    "rtc": graph.rtc,
    "ios": graph.ios,
    "balance": graph.balance,
}
"""Every rule of the field by its name. A new one is a constructor and a row here."""


def chain(*stages: Stage) -> Rule:
    """Pre-aggregations, then one rule. A pre-aggregation alone stays what it is and returns all its rows.

    >>> from rpel.rules import chain, nnm, trimmed_mean
    >>> chain(nnm(7), trimmed_mean(7)).name
    'nnm+trimmed_mean'
    """
    if not stages:
        raise ValueError("chain needs at least one rule")
    *before, last = stages
    if not before:
        return cast(Rule, last)
    for stage in before:
        if not isinstance(stage, PreAggregation):
            raise ValueError(f"{stage.name} returns one vector, so it can only stand last in a chain")
    if not isinstance(last, Rule) or last.on_graph:
        raise ValueError(f"{last.name} cannot close a chain: it needs a rule that returns one vector from m")
    return reduce(_before, reversed(cast(list[PreAggregation], before)), last)


def _before(rule: Rule, first: PreAggregation) -> Rule:
    f = max((s.f for s in (first, rule) if s.f is not None), default=None)
    draws = first.draws or rule.draws
    return Chain(f"{first.name}+{rule.name}", first, rule, f=f, pivot=rule.pivot, draws=draws)


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A function x (m, d) → (d,) as a rule, called for one victim after another;
    it is given f if the rule has one.

    >>> FunctionRule("largest", lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    """

    function: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    def run(self, group: Group, out: Array | None = None) -> Array:
        _say_slow(self.name)
        given = self.parameters if self.f is None else self.parameters | {"f": group.f}
        result = empty(len(group.index), group.table) if out is None else out
        for i, rows in enumerate(group.index):
            found = self.function(np.array(group.kernels.host(take(group.table, rows))), **given)
            vector = np.asarray(None if isinstance(found, Stage) else found)
            if vector.shape != (result.shape[1],):
                what = f"{found.name}, a rule" if isinstance(found, Stage) else str(vector.shape)
                raise ValueError(
                    f"rule {self.name} must give a vector ({result.shape[1]},), not {what} "
                    "(a function that makes a rule is given all it needs by keyword)"
                )
            result[i] = group.kernels.array(vector)
        return result


@cache
def _say_slow(name: str) -> None:
    """Said once for every rule."""
    logging.getLogger("rpel").warning("rule %s is called for one node after another; a Rule is faster", name)


@dataclass(frozen=True)
class Part:
    """One part of a chain before it is made: the keywords it takes,
    and those it may be given without taking them."""

    name: str
    make: Callable[..., Any]
    keywords: frozenset[str]
    spare: frozenset[str] = frozenset()


def rule(name: str | Stage | Callable[..., Any], **parameters: Any) -> Rule:
    """The rule, or the chain joined by +, of that name; each part takes the keywords it knows, f is shared.

    A part may also be ``module:object`` or a name that an installed package registers, and ``name`` an
    object: a Rule or a PreAggregation (which is returned, for another f if one is given), or a callable. Of a
    callable the call form decides: one to which the keywords given leave nothing open makes a rule; one that
    lacks its first parameter, and no other, is a function of the vectors, ``f(x (m, d), f=…) -> (d,)``. To
    leave nothing to decide, pass a :class:`FunctionRule`.

    >>> rule("nnm+trimmed_mean", f=7).kappa(31) < 20
    True
    >>> rule(lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    >>> rule(lambda f: rule("nnm+median", f=f), f=2).name
    'nnm+median'
    """
    named = name.split("+") if isinstance(name, str) else [name]
    parts = [_part(one, parameters) for one in named]
    for wrong in sorted(set(parameters).difference(*(part.keywords | part.spare for part in parts))):
        choices = sorted({key for part in parts for key in part.keywords})
        whole = "+".join(part.name for part in parts)
        raise ValueError(f"{whole} knows no parameter {wrong!r}; {nearest(wrong, choices)}")
    return chain(*_made(parts, parameters))


def _made(parts: list[Part], parameters: dict[str, Any]) -> Iterator[Stage]:
    for part in parts:
        for key, taken in signature(part.make).parameters.items():
            variable = taken.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            if taken.default is Parameter.empty and not variable and key not in parameters:
                raise ValueError(f"rule {part.name!r} needs its parameter {key!r}: give {key}=…")
        try:
            made = part.make(**{key: value for key, value in parameters.items() if key in part.keywords})
        except TypeError as error:
            raise ValueError(f"{part.name}: {error}") from None
        if not isinstance(made, Stage):
            raise ValueError(
                f"rule {part.name} must make a Rule where nothing is left open, not {made!r}; "
                "a function of the vectors has them as its first parameter, without a default"
            )
        yield made


def _part(part: str | Stage | Callable[..., Any], given: Mapping[str, Any]) -> Part:
    if isinstance(part, str):
        if part in RULES:
            return Part(part, RULES[part], frozenset(signature(RULES[part]).parameters))
        return _user_part(part, plugins.find(GROUP, part, RULES), given)
    plugins.check_callable(part, "rule")
    return _user_part(part.name if isinstance(part, Stage) else plugins.place_of(part), part, given)


def _user_part(name: str, given_rule: Any, given: Mapping[str, Any]) -> Part:
    """Something user-supplied, by what it is or how it can be called; see :func:`rule`."""
    if isinstance(given_rule, Stage):
        return Part(name, lambda f=None: given_rule if f is None else given_rule.with_f(f), frozenset({"f"}))
    if not callable(given_rule):
        raise ValueError(f"rule {name!r} is neither a Rule nor a function but {type(given_rule).__name__}")
    if isinstance(given_rule, type) and issubclass(given_rule, Stage):
        given_rule = partial(given_rule, name)  # a class of rules; what it takes beside its name are keywords
    takes = list(signature(given_rule).parameters.values())
    fixed = [p for p in takes if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    keywords = frozenset(p.name for p in fixed)
    open_ = [p for p in fixed if p.default is Parameter.empty and p.name not in given]
    if not open_ or isinstance(given_rule, type | partial):
        return Part(name, given_rule, keywords)
    first = open_[0]
    if first is not takes[0] or first.kind is Parameter.KEYWORD_ONLY:
        raise ValueError(f"rule {name} needs its parameter {first.name!r}")
    if len(open_) > 1:
        rest = ", ".join(repr(p.name) for p in open_[1:])
        raise ValueError(f"rule {name} needs more than the vectors {first.name!r}: give {rest}")

    def make(f: int | None = None, **more: Any) -> Rule:
        return FunctionRule(name, given_rule, more, f=f)

    return Part(name, make, keywords - {first.name}, spare=frozenset({"f"}))


def built_in(name: str) -> bool:
    """Whether every part of a chain is one of the library's own rules.

    >>> built_in("nnm+trimmed_mean"), built_in("nnm+my.module:rule")
    (True, False)
    """
    return all(part in RULES for part in name.split("+"))


def about() -> list[tuple[str, str]]:
    """Every rule by name with one line on it, those of installed packages included.

    >>> dict(about())["median"]
    'Per coordinate, the middle value (Yin et al., 2018). f enters only κ and the check of m.'
    """
    return plugins.about(GROUP, RULES)
