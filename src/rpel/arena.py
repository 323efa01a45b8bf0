"""The arena: every rule against every attack in one setting and budget. A sweep, then one page.

Invariants: a trial is one run of :mod:`rpel.experiments.sweep`, so it is resumed and never repeated; what
cannot run is shown with its sentence and stops nothing; a rule's rank is its worst case over attacks,
never its average.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from rpel.errors import nearest
from rpel.experiments.sweep import Cell
from rpel.files import write_text
from rpel.record import parse_seeds
from rpel.report.drawing import HeatCell, scatter
from rpel.report.groups import latex_table
from rpel.report.page import TableCell, number, rendered, size, words
from rpel.runs.record import Run, interval
from rpel.runs.table import Table
from rpel.spec import MethodName, Spec
from rpel.text import count, value_text
from rpel.types import ROBUST_RULE

ADAPTIVE = ("alie", "foe", "dissensus", "min_max")
"""What --strongest searches the factor of; ipm is the same family as foe."""


@dataclass(frozen=True)
class Contestant:
    """A method with its rule; rpel with any rule, other methods with their own."""

    method: str
    rule: str

    @property
    def label(self) -> str:
        return self.rule if self.method == "rpel" else f"{self.method} ({self.rule})"


@dataclass(frozen=True)
class Opponent:
    """An attack with its parameters.

    >>> Opponent.parse("strongest(of=alie)").params, Opponent.parse("foe").label
    ({'of': 'alie'}, 'foe')
    """

    name: str
    params: dict[str, Any]

    @staticmethod
    def parse(text: str) -> "Opponent":
        """``name`` or ``name(key=value,…)``, checked."""
        from rpel.attacks import attack

        match = re.fullmatch(r"([^()]+)(?:\((.*)\))?", text.strip())
        if match is None:
            raise ValueError(f"attack {text!r} is not valid: write a name such as alie, or alie(z=1)")
        spec = Spec(attack=match[1], attack_params=match[2] or {})
        return Opponent(attack(spec.attack, **spec.attack_params).name, dict(spec.attack_params))

    @property
    def label(self) -> str:
        return f"{self.name}({value_text(self.params)})" if self.params else self.name


@dataclass(frozen=True)
class Trial:
    """One run: who, against whom, with which seed."""

    contestant: Contestant
    opponent: Opponent
    seed: int
    cell: Cell


# --- who takes part -----------------------------------------------------------------------------------------


def contestants(rules: Sequence[str] = (), methods: Sequence[str] = ()) -> list[Contestant]:
    """The rules under rpel, then the other methods; without any of both,
    all rules that make one model of several.

    >>> [c.label for c in contestants(["median"], ["gts"])]
    ['median', 'gts (gts)']
    """
    from rpel.simulation.methods import METHODS

    known = [str(name) for name in MethodName.__args__]  # type: ignore[attr-defined]
    methods = known if list(methods) == ["all"] else list(methods)
    for name in methods:
        if name not in known:
            raise ValueError(f"there is no method {name!r}; {nearest(name, known)}")
    if not rules:
        rules = [ROBUST_RULE] if "rpel" in methods else [] if methods else every_rule()
    rivals = [name for name in methods if name != "rpel"]
    return [
        *(Contestant("rpel", r) for r in rules),
        *(Contestant(name, METHODS[name].rule) for name in rivals),
    ]


def every_rule() -> list[str]:
    """nnm+trimmed_mean, and every rule by itself that takes models from anybody,
    not from a graph's neighbours."""
    from rpel.rules.registry import about

    return [ROBUST_RULE, *(name for name, _ in about() if _takes_models(name))]


def _takes_models(name: str) -> bool:
    from rpel.rules import rule

    try:
        candidate = rule(name, f=1)
    except ValueError:  # the rules of fixed graphs take b_hat
        return False
    return candidate.pull_error is None


def _searches(name: str) -> bool:
    from rpel.attacks import attack

    try:
        return attack(name).searches
    except ValueError:  # it needs parameters, and will say so where it is run
        return False


def opponents(attacks: Sequence[str] = (), strongest: bool = False) -> list[Opponent]:
    """The attacks of these names, else all; ``strongest`` adds those that search for their best factor."""
    from rpel.attacks import about

    names = list(attacks) or [name for name, _ in about() if not _searches(name)]
    if strongest:
        names += [f"strongest(of={name})" for name in ADAPTIVE]
    attackers = [Opponent.parse(name) for name in names]
    return list({one.label: one for one in attackers}.values())


def trials(
    base: Spec, who: Iterable[Contestant], against: Sequence[Opponent], seeds: str = "0"
) -> list[Trial]:
    """Every contestant against every opponent with every seed; what cannot run has its sentence already."""
    combined = product(parse_seeds(seeds), who, against)
    return [Trial(one, other, seed, _cell(base, one, other, seed)) for seed, one, other in combined]


def _cell(base: Spec, one: Contestant, other: Opponent, seed: int) -> Cell:
    from rpel.simulation.methods import resolve

    values = {
        "method": one.method,
        "rule": one.rule,
        "attack": other.name,
        "attack_params": other.params,
        "seed": seed,
    }
    name = f"{one.label} against {other.label}, seed {seed}"
    try:
        spec = base.replace(**values, seeds=None, name=f"arena-{base.name}".removeprefix("arena-arena-"))
        resolve(spec)
    except ValueError as error:
        return Cell(values, None, str(error), name)
    return Cell(values, spec, "", name)


# --- what came out ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """One contestant against one opponent: a run for each seed; where one is missing, why."""

    contestant: Contestant
    opponent: Opponent
    runs: tuple[Run, ...]
    error: str = ""

    @cached_property
    def ends(self) -> dict[int, tuple[float, float]]:
        """By seed what the run is judged by, mean and worst node."""
        return {run.spec.seed: (run.end(f"{run.key}_mean"), run.end(f"{run.key}_worst")) for run in self.runs}

    @cached_property
    def bytes(self) -> int:
        """Sent in a run."""
        return max((int(run.total("bytes")) for run in self.runs), default=0)

    @property
    def missing(self) -> str:
        """Why there is no number, in two words."""
        return "not run" if self.error in ("waiting", "running", "stopped") else "no result"

    def number(self, column: str) -> float | None:
        """The average over the seeds of ``mean`` or ``worst``."""
        return fmean(end[column == "worst"] for end in self.ends.values()) if self.ends else None


@dataclass(frozen=True)
class Rank:
    """A contestant's place: its worst case over attacks by seed, and its leads over the next by seed.

    ``attack`` is that of the worst case; where it differs between seeds, one for each in their order.
    """

    contestant: Contestant
    cases: dict[int, float]
    attack: str
    unable: int
    bytes: int
    leads: tuple[float, ...] = ()

    @property
    def worst_case(self) -> float | None:
        return fmean(self.cases.values()) if self.cases else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the worst case over the seeds."""
        return interval(list(self.cases.values()))[1:] if self.cases else None

    @property
    def sure(self) -> str:
        """How sure the order is, in words."""
        if not self.leads:
            return ""
        seeds = len(self.leads)
        if seeds < 2:
            return "one seed: not known"
        says = f"ahead in {sum(lead > 0 for lead in self.leads)} of {seeds} seeds"
        if seeds < 3:
            return says
        _, low, high = interval(self.leads)
        return f"{says}, {'sure' if low > 0 else 'not sure'} (lead {low:+.3f} to {high:+.3f}, 95 %)"


@dataclass(frozen=True)
class Standings:
    """All scores, who took part, and the setting they share."""

    base: Spec
    contestants: tuple[Contestant, ...]
    opponents: tuple[Opponent, ...]
    scores: tuple[Score, ...]

    def score(self, one: Contestant, other: Opponent) -> Score:
        return next(s for s in self.scores if (s.contestant, s.opponent) == (one, other))

    def ranking(self) -> list[Rank]:
        """From the best worst case to the least;
        who did not finish against some attack comes after all who did."""
        ranks = [self._rank(one) for one in self.contestants]
        ranks.sort(key=lambda rank: (rank.unable > 0, not rank.cases, -(rank.worst_case or 0.0)))
        return [
            replace(
                rank, leads=tuple(case - after.cases[s] for s, case in rank.cases.items() if s in after.cases)
            )
            for rank, after in pairwise(ranks)
        ] + ranks[-1:]

    def _rank(self, one: Contestant) -> Rank:
        mine = [s for s in self.scores if s.contestant == one]
        there = [s for s in mine if s.ends]
        seeds = sorted(set.intersection(*(set(s.ends) for s in there))) if there else []
        cases = {seed: min(s.ends[seed][1] for s in there) for seed in seeds}
        hardest = [min(there, key=lambda s: s.ends[seed][1]).opponent.label for seed in seeds]
        attack = ", ".join(hardest if len(set(hardest)) > 1 else hardest[:1])
        return Rank(one, cases, attack, len(mine) - len(there), max((s.bytes for s in there), default=0))

    def to_dict(self) -> dict[str, Any]:
        """As JSON: a cell for each contestant and attack, and the ranking."""
        return {
            "cells": [
                {
                    "rule": s.contestant.rule,
                    "attack": s.opponent.label,
                    "method": s.contestant.method,
                    "accuracy_mean": s.number("mean"),
                    "accuracy_worst": s.number("worst"),
                    "seeds": list(s.ends),
                    "error": s.error or None,
                }
                for s in self.scores
            ],
            "ranking": [
                {
                    "rule": r.contestant.rule,
                    "method": r.contestant.method,
                    "worst_case": r.worst_case,
                    "interval": r.interval and list(r.interval),
                    "attack": r.attack or None,
                    "order": r.sure or None,
                }
                for r in self.ranking()
            ],
        }


def standings(base: Spec, played: Sequence[Trial], ends: Sequence[Run | str]) -> Standings:
    """The scores of these trials, in their order: of each its run, or why there is none."""
    by_pair: dict[tuple[str, str], list[tuple[Trial, Run | str]]] = {}
    for trial, end in zip(played, ends, strict=True):
        by_pair.setdefault((trial.contestant.label, trial.opponent.label), []).append((trial, end))
    who = tuple(dict.fromkeys(trial.contestant for trial in played))
    against = {trial.opponent.label: trial.opponent for trial in played}
    return Standings(base, who, tuple(against.values()), tuple(_score(pairs) for pairs in by_pair.values()))


def _score(pairs: Sequence[tuple[Trial, Run | str]]) -> Score:
    trial, runs = pairs[0][0], tuple(end for _, end in pairs if isinstance(end, Run))
    return Score(
        trial.contestant, trial.opponent, runs, next((end for _, end in pairs if isinstance(end, str)), "")
    )


# --- files --------------------------------------------------------------------------------------------------


def to_csv(results: Standings) -> str:
    """A line for each contestant, attack and seed."""
    lines: list[dict[str, Any]] = []
    for s in results.scores:
        who = {"method": s.contestant.method, "rule": s.contestant.rule, "attack": s.opponent.label}
        for seed, (mean, worst) in s.ends.items():
            ends = {"accuracy_mean": mean, "accuracy_worst": worst, "bytes": s.bytes}
            lines.append(who | {"seed": seed, **ends, "error": ""})
        if s.error:
            empty = dict.fromkeys(("seed", "accuracy_mean", "accuracy_worst", "bytes"))
            lines.append(who | empty | {"error": s.error})
    return Table(lines).to_csv()


def latex(results: Standings) -> str:
    """A booktabs table: rules by rank, a column an attack, the worst node's accuracy, and the worst case."""
    rows = []
    for rank in results.ranking():
        numbers = [results.score(rank.contestant, other).number("worst") for other in results.opponents]
        cells = ["--" if value is None else f"{value:.3f}" for value in (*numbers, rank.worst_case)]
        rows.append([rank.contestant.label, *cells])
    return latex_table(
        ["rule", *(other.label for other in results.opponents), "worst case"], rows, facts(results.base)
    )


def facts(base: Spec) -> str:
    """The setting in a few words.

    >>> facts(Spec(nodes=100, byzantine=10, alpha="inf"))
    'mnist-sample, n = 100, b = 10, s = 26, 60 rounds, alpha inf, 1 local step'
    """
    from rpel.simulation.methods import resolve

    size = f"{base.dataset}, n = {base.nodes}, b = {base.byzantine}, s = {resolve(base).pull}"
    return (
        f"{size}, {base.rounds} rounds, alpha {float(base.alpha):g}, {count(base.local_steps, 'local step')}"
    )


def page(results: Standings) -> str:
    """arena.html: ranking, two heat maps, what could not run, accuracy against bytes."""
    ranks = results.ranking()
    runs = sum(len(score.ends) for score in results.scores)
    seeds = max((len(score.ends) for score in results.scores), default=0)
    sizes = f"{len(results.contestants)} rules and methods, {len(results.opponents)} attacks"
    points = [(r.contestant.label, r.bytes / 1e6, r.worst_case) for r in ranks if r.worst_case is not None]
    return rendered(
        "arena.html",
        title="rpel arena",
        data={},
        summary=f"{sizes}, {count(runs, 'run')}.",
        setting=facts(results.base),
        interval="their 95 % t-interval" if seeds > 2 else "the lowest and the highest",
        ranking=[_ranked(position, rank) for position, rank in enumerate(ranks, 1)],
        rules=[rank.contestant.label for rank in ranks],
        attacks=[other.label for other in results.opponents],
        worst=_heat(results, ranks, "worst"),
        mean=_heat(results, ranks, "mean"),
        unable=_unable(results),
        scatter=scatter(points, "megabytes sent"),
    )


def _heat(results: Standings, ranks: Sequence[Rank], column: str) -> list[list[HeatCell]]:
    return [
        [_heat_cell(results.score(rank.contestant, other), column) for other in results.opponents]
        for rank in ranks
    ]


def _heat_cell(score: Score, column: str) -> HeatCell:
    who = f"{score.contestant.label} against {score.opponent.label}: "
    if not score.ends:
        return HeatCell(None, who + score.error, score.missing)
    numbers = [
        f"seed {seed}: mean {mean:.4f}, worst {worst:.4f}" for seed, (mean, worst) in score.ends.items()
    ]
    return HeatCell(score.number(column), who + "; ".join(numbers))


def _unable(results: Standings) -> list[dict[str, str]]:
    """What could not run, with the reason; a reason that all attacks share is said once."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for s in results.scores:
        if s.error:
            reasons.setdefault((s.contestant.label, s.error), []).append(s.opponent.label)
    every = len(results.opponents)
    return [
        {"rule": who, "attacks": "all attacks" if len(names) == every else ", ".join(names), "reason": why}
        for (who, why), names in reasons.items()
    ]


def _ranked(position: int, rank: Rank) -> dict[str, TableCell]:
    """A row of the ranking."""
    low, high = rank.interval or (0.0, 0.0)
    between = f"{low:.4f} to {high:.4f}" if len(rank.cases) > 1 else ""
    none = TableCell("no result", -1.0)
    return {
        "rank": number(position),
        "rule": words(rank.contestant.label, "label"),
        "worst case": none if rank.worst_case is None else number(rank.worst_case, ".4f", between),
        "under": words(rank.attack, small=f"{rank.unable} without result" if rank.unable else ""),
        "seeds": number(len(rank.cases)),
        "sent": size(rank.bytes),
        "ahead of the next": words(rank.sure),
    }


def write(results: Standings, out: Path) -> list[Path]:
    """arena.html, arena.csv and arena.tex."""
    files = {"arena.html": page(results), "arena.csv": to_csv(results), "arena.tex": latex(results)}
    for name, text in files.items():
        write_text(out / name, text)
    return [out / name for name in files]
