"""Rules by name, in chains (``rule("nnm+trimmed_mean", f=7)`` is ``chain(nnm(7), trimmed_mean(7))``), and own ones."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from inspect import Parameter, signature
from typing import Any

import numpy as np

from rpel import plugins
from rpel.errors import nearest
from rpel.rules import coordinatewise, graph, linear
from rpel.rules.arrays import Array, empty_like, host
from rpel.rules.base import Group, Rule
from rpel.rules.coordinatewise import Mixed, Mixer

GROUP = "rpel.rules"
"""The entry points under which packages register rules."""

RULES: dict[str, Callable[..., Rule]] = {
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


def chain(*stages: Rule) -> Rule:
    """Pre-aggregations, then one rule.

    >>> from rpel.rules import chain, nnm, trimmed_mean
    >>> chain(nnm(7), trimmed_mean(7)).name
    'nnm+trimmed_mean'
    """
    if not stages:
        raise ValueError("chain needs at least one rule")
    *before, last = stages
    for stage in before:
        if not isinstance(stage, Mixer):
            raise ValueError(f"{stage.name} returns one vector, so it can only stand last in a chain")
    if before and (isinstance(last, Mixer) or last.on_graph):
        raise ValueError(f"{last.name} cannot close a chain: it needs a rule that returns one vector from m")
    result = last
    for mixer in reversed(before):
        assert isinstance(mixer, Mixer)
        f = max((s.f for s in (mixer, result) if s.f is not None), default=None)
        timed = mixer.timed or result.timed
        result = Mixed(f"{mixer.name}+{result.name}", mixer, result, f=f, pivot=result.pivot, timed=timed)
    return result


@dataclass(frozen=True)
class Own(Rule):
    """A function x (m, d) → (d,) as a rule, called for one victim after another."""

    function: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    def run(self, group: Group, out: Array | None = None) -> Array:
        _say_slow(self.name)
        given = self.parameters if self.f is None else self.parameters | {"f": group.f}
        result = empty_like(group.table, len(group.index)) if out is None else out
        for i, rows in enumerate(group.index):
            vector = np.asarray(self.function(np.array(host(group.table[group.lend(rows)])), **given))
            if vector.shape != (result.shape[1],):
                raise ValueError(f"rule {self.name} must give a vector ({result.shape[1]},), not {vector.shape}")
            result[i] = group.lend(vector)
        return result


@cache
def _say_slow(name: str) -> None:
    """Said once for every rule."""
    logging.getLogger("rpel").warning("rule %s is called for one node after another; a Rule is faster", name)


@dataclass(frozen=True)
class Stage:
    """One part of a chain before it is made: the keywords it takes, and those it may be given without taking them."""

    name: str
    make: Callable[..., Rule]
    keywords: frozenset[str]
    spare: frozenset[str] = frozenset()


def rule(name: str | Rule | Callable[..., Any], **parameters: Any) -> Rule:
    """The rule, or the chain joined by +, of that name; each stage takes the keywords it knows, f is shared.

    A stage may also be ``module:object`` or a name that an installed package registers; ``name`` may be a function
    ``f(x (m, d), f=…) -> (d,)``, a function that makes a Rule, or a Rule, which is returned (for another f, if given).

    >>> rule("nnm+trimmed_mean", f=7).kappa(31) < 20
    True
    >>> rule(lambda x: x.max(axis=0))(np.array([[1.0], [3.0]]))
    array([3.])
    """
    stages = [_stage(part) for part in name.split("+")] if isinstance(name, str) else [_stage(name)]
    for wrong in sorted(set(parameters).difference(*(stage.keywords | stage.spare for stage in stages))):
        choices = sorted({key for stage in stages for key in stage.keywords})
        whole = "+".join(stage.name for stage in stages)
        raise ValueError(f"{whole} knows no parameter {wrong!r}; {nearest(wrong, choices)}")
    return chain(*_made(stages, parameters))


def _made(stages: list[Stage], parameters: dict[str, Any]) -> Iterator[Rule]:
    for stage in stages:
        try:
            made = stage.make(**{key: value for key, value in parameters.items() if key in stage.keywords})
        except TypeError as error:
            raise ValueError(f"{stage.name}: {error}") from None
        if not isinstance(made, Rule):
            raise ValueError(f"rule {stage.name} must be a function of the vectors x, or make a Rule, not {made!r}")
        yield made


def _stage(part: str | Rule | Callable[..., Any]) -> Stage:
    if isinstance(part, str):
        if part in RULES:
            return Stage(part, RULES[part], frozenset(signature(RULES[part]).parameters))
        return _own_stage(part, plugins.find(GROUP, part, RULES))
    return _own_stage(part.name if isinstance(part, Rule) else plugins.place_of(part), part)


def _own_stage(name: str, found: Any) -> Stage:
    """A Rule; a function of the vectors, its first parameter; or what makes a Rule of keywords."""
    if isinstance(found, Rule):
        return Stage(name, lambda f=None: found if f is None else found.with_f(f), frozenset({"f"}))
    if not callable(found):
        raise ValueError(f"rule {name!r} is neither a Rule nor a function but {type(found).__name__}")
    takes = signature(found).parameters
    keywords, first = frozenset(takes), next(iter(takes.values()), None)
    if first is None or first.name == "f" or first.default is not Parameter.empty or isinstance(found, type):
        return Stage(name, found, keywords)

    def make(f: int | None = None, **given: Any) -> Rule:
        return Own(name, found, given, f=f)

    return Stage(name, make, keywords - {first.name}, spare=frozenset({"f"}))


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
