"""`strongest`: a search of an attack's factor against the victim's actual rule."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rpel.attacks.base import ALIASES, ATTACKS, Traits, declare, traits_of
from rpel.attacks.forgeries import FACTORS
from rpel.attacks.view import View
from rpel.backend.arrays import empty, put, take
from rpel.rules import aggregate_or_keep
from rpel.types import Floats, Integers, Models, Received

PROBES = (0.06, 0.12, 0.25, 0.5, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0)


def _traits(of: str | Sequence[str] = "alie", **_: Any) -> Traits:
    """Return the traits of a search: per victim only if all searched attacks are, and all their needs."""
    parts = [traits_of(ATTACKS[name]) for name in families(of)]
    return Traits(
        per_victim=all(part.per_victim for part in parts),
        needs=frozenset({"own", "rule"}).union(*(part.needs for part in parts)),
        most=min((part.most for part in parts if part.most), default=None),
    )


@declare(by_parameters=_traits)
def strongest(view: View, of: str | Sequence[str] = "alie", evaluations: int = 16) -> Models:
    """The given attack, or the best of several, with the factor that harms the victim's own aggregate most.

    Harm is J(a) = ‖R(A ∪ own ∪ forged(a)) − mean(A ∪ own)‖, for every victim at once and against its actual
    rule; of a vector for several victims (the view's audience) it is the mean over them, each taken to meet
    it as often as it meets hostile answers. The result is a lower bound of the worst.

    Args:
        view: the round.
        of: one attack, several (a list, or joined by +), or "all".
        evaluations: half of the factors tried.
    """
    if view.rule is None:
        raise ValueError("strongest needs the victim's rule")
    searched, honest = {name: ATTACKS[name] for name in families(of)}, _honest_mean(view)
    most, kept = np.full(view.victims, -1.0), view.out
    if len(searched) > 1:
        kept = empty(view.victims, view.out)
    for name, forge in searched.items():
        factor = FACTORS[name]

        def harm(a: Floats, forge: Any = forge, factor: str = factor) -> Floats:
            return _harm(view, forge(view, **{factor: a}), honest)

        best, reached = _search(harm, view.victims, evaluations)
        forged = forge(view, **{factor: best})
        better = reached > most
        most = np.where(better, reached, most)
        if len(searched) > 1:
            put(kept, better, take(forged, better))
    return kept


def _harm(view: View, forged: Models, honest: Models) -> Floats:
    """(v,) Return how far the forged rows move the aggregates from the honest means (v, d)."""
    table = view.with_forged(forged)
    if view.audience is None:
        return _moved(view, _aggregated(view, table), honest)
    harm, heard = np.zeros(view.victims), view.audience >= 0
    for sent in np.flatnonzero(heard.any(axis=1)).tolist():
        to = view.audience[sent, heard[sent]]
        harm[sent] = _moved(view, _aggregated(view, table, to, sent), take(honest, to)).mean()
    return harm


def _moved(view: View, aggregated: Models, honest: Models) -> Floats:
    rows = np.arange(len(aggregated))[:, None]
    moved = np.sqrt(view.kernels.distances_to(aggregated, rows, honest)[:, 0])
    return np.where(np.isnan(moved), np.inf, moved)  # a rule that breaks may be driven to infinity


def families(of: str | Sequence[str]) -> list[str]:
    """Return the names of the attacks that ``of`` means.

    >>> families("alie+ipm")
    ['alie', 'inner_product_manipulation']
    """
    if isinstance(of, str):
        given = list(FACTORS) if of == "all" else of.split("+")
    else:
        given = list(of) if isinstance(of, Iterable) else [of]
    for name in given:
        if not isinstance(name, str) or ALIASES.get(name, name) not in FACTORS:
            raise ValueError(f"strongest searches the factor of {', '.join(FACTORS)}, not of {name!r}")
    if not given:
        raise ValueError("strongest needs at least one attack to search")
    return [ALIASES.get(name, name) for name in given]


def _search(harm: Callable[[Floats], Floats], victims: int, evaluations: int) -> tuple[Floats, Floats]:
    """(v,) Return the best factors found and their harm, with 2 · ``evaluations`` calls.

    From a = 0 with step 1, move while better and double the step; then shrink the step by .8 before each try,
    trying a + step and a − step in turn; J(0) counts as an evaluation. Harm has several hills, so this alone
    may stop on a low one: as many evaluations again go to spread points, and then between the best factor and
    the next larger one tried, because harm rises until the rule notices and then falls off a cliff.
    """
    best = np.zeros(victims)
    reached, step, tried = harm(best), np.ones(victims), [best]

    def attempt(a: Floats) -> Floats:
        nonlocal best, reached
        value = harm(a)
        better = value > reached
        best, reached = np.where(better, a, best), np.where(better, value, reached)
        tried.append(a)
        return better

    expanding, forward = np.ones(victims, dtype=bool), np.ones(victims, dtype=bool)
    for _ in range(evaluations - 1):
        step = np.where(expanding, step, 0.8 * step)
        back = ~expanding & ~forward & (best >= step)
        better = attempt(np.where(back, best - step, best + step))
        forward = np.where(expanding, True, ~forward)
        step = np.where(expanding & better, 2 * step, step)
        expanding &= better
    for a in PROBES[:evaluations]:
        attempt(np.full(victims, a))
    for _ in range(evaluations - len(PROBES)):
        above = np.min(np.where(np.array(tried) > best, tried, np.inf), axis=0)
        attempt(np.where(np.isfinite(above), (best + above) / 2, 2 * best))
    return best, reached


def _honest_mean(view: View) -> Models:
    """(v, d) Return the mean of A and the victim's own model."""
    others = np.where(view.peers == view.own[:, None], -1, view.peers)
    return view.average(np.concatenate([view.own[:, None], others], axis=1))


def _aggregated(
    view: View, table: Models, victims: Integers | None = None, sent: int | None = None
) -> Models:
    """(v, d) Aggregate each victim's answers; one that cannot aggregate keeps its half-step.

    Args:
        view: the round.
        table: (n + v, d) the honest models, then the forged rows.
        victims: only these, who all receive the vector forged for victim ``sent``.
        sent: that victim.
    """
    assert view.rule is not None
    index, weights = view.answers()
    forged = (index >= len(view.honest)) & (index < len(table))
    places = np.arange(view.victims) if victims is None else victims
    index, forged = index[places], forged[places]
    if sent is not None:
        index = np.where(forged, len(view.honest) + sent, index)
    marks = None if weights is None else forged
    weights = None if weights is None else weights[places]
    received = Received(table, index, weights, marks, finite=view.finite)
    # without node numbers, the rule runs in the round that it was made for
    context = view.rule.context if view.context.ids is None else view.context
    half, nodes = take(table, index[:, 0]), context.among(places)
    result: Models
    result, _ = aggregate_or_keep(half, received, replace(view.rule, context=nodes), kernels=view.kernels)
    return result


ATTACKS["strongest"] = strongest
