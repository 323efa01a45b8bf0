"""Rules by name and in chains: ``chain(nnm(7), trimmed_mean(7))`` is ``rule("nnm+trimmed_mean", f=7)``."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from rpel.aggregation import coordinatewise, graph, linear, mixing
from rpel.aggregation.base import Rule
from rpel.aggregation.mixing import Mixed, Mixer
from rpel.errors import nearest

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
    "nnm": mixing.nnm,
    "bucketing": mixing.bucketing,
    "clipping": mixing.clipping,
    "arc": mixing.arc,
    "gossip": graph.gossip,
    "cs_plus": graph.cs_plus,
    "gts": graph.gts,
    "clipped_gossip_adaptive": graph.clipped_gossip_adaptive,
    "clipped_gossip_oracle": graph.clipped_gossip_oracle,
    "rtc": graph.rtc,
    "ios": graph.ios,
    "balance": graph.balance,
}
"""Every rule of the field by its name. A new one is a constructor and a row here."""


def chain(*stages: Rule) -> Rule:
    """Pre-aggregations, then one rule.

    >>> from rpel.aggregation import chain, nnm, trimmed_mean
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


def rule(name: str, **parameters: Any) -> Rule:
    """The rule, or the chain joined by +, of that name; each stage takes the keywords it knows, f is shared.

    >>> rule("nnm+trimmed_mean", f=7).kappa(31) < 20
    True
    """
    stages, unused = [], set(parameters)
    for part in name.split("+"):
        if part not in RULES:
            raise ValueError(f"there is no rule {part!r}; {nearest(part, list(RULES))}")
        known = signature(RULES[part]).parameters
        unused -= set(known)
        try:
            stages.append(RULES[part](**{key: value for key, value in parameters.items() if key in known}))
        except TypeError as error:
            raise ValueError(f"{part}: {error}") from None
    if unused:
        wrong = sorted(unused)[0]
        choices = sorted({key for part in name.split("+") for key in signature(RULES[part]).parameters})
        raise ValueError(f"{name} knows no parameter {wrong!r}; {nearest(wrong, choices)}")
    return chain(*stages)
