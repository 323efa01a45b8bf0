"""The arena: every rule against every attack in one setting, ranked by the worst case.

A study whose cells are a method, a rule, an attack and a seed. What cannot run is shown with its sentence
and stops nothing. A contestant's rank is its worst case over the attacks, never its average.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rpel.errors import unknown
from rpel.files import write_text
from rpel.record import parse_seeds
from rpel.runs.run import spread
from rpel.spec import Method, Request
from rpel.studies import plots, report
from rpel.studies.study import Cell, Result, Results, Study, combinations, label
from rpel.text import count
from rpel.types import ROBUST_RULE

if TYPE_CHECKING:
    from pandas import DataFrame

ADAPTIVE = ("alie", "foe", "dissensus", "min_max")
"""The attacks whose factor ``strongest`` searches; ipm is the same family as foe."""
MEASURES = {"worst honest node": "accuracy_worst", "mean of the honest nodes": "accuracy_mean"}


# --- who takes part -----------------------------------------------------------------------------------------


def name_of(method: str, rule: str) -> str:
    """Return what a table calls a method with its rule.

    >>> name_of("rpel", "median"), name_of("gts", "gts")
    ('median', 'gts (gts)')
    """
    return rule if method == "rpel" else f"{method} ({rule})"


def contestants(rules: Sequence[Any] = (), methods: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """Return (method, rule): the rules under rpel, then the other methods; all rules if neither is given.

    >>> contestants(["median"], ["gts"])
    [('rpel', 'median'), ('gts', 'gts')]
    """
    from rpel.simulation.methods import METHODS

    known = list(Method.takes)
    methods = known if list(methods) == ["all"] else list(methods)
    for name in methods:
        if name not in known:
            raise ValueError(unknown("method", name, known))
    if not rules:
        rules = [ROBUST_RULE] if "rpel" in methods else [] if methods else every_rule()
    return [("rpel", rule) for rule in rules] + [(m, METHODS[m].rule) for m in methods if m != "rpel"]


def every_rule() -> list[str]:
    """Return nnm+trimmed_mean and every rule that needs no graph."""
    from rpel.rules import rule
    from rpel.rules.registry import about

    def takes_models(name: str) -> bool:
        try:
            return rule(name, f=1).pull_error is None
        except ValueError:  # the rules of fixed graphs take b_hat
            return False

    return [ROBUST_RULE, *(name for name, _ in about() if takes_models(name))]


def opponents(attacks: Sequence[Any] = (), strongest: bool = False) -> list[Any]:
    """Return the attacks given, else all; ``strongest`` adds those that search for their best factor."""
    from rpel.attacks import about, attack

    def searches(name: str) -> bool:
        try:
            return attack(name).searches
        except ValueError:  # it needs parameters, and will say so where it is run
            return False

    names = list(attacks) or [name for name, _ in about() if not searches(name)]
    names += [f"strongest(of={name})" for name in ADAPTIVE] if strongest else []
    for name in names:
        if isinstance(name, str):
            attack(name)  # ValueError for an attack that does not exist
    return list(dict.fromkeys(names))


def cells(
    base: Request, who: Sequence[tuple[str, Any]], attacks: Sequence[Any], seeds: Any = "0"
) -> list[Cell]:
    """Return every contestant against every attack with every seed."""
    return [
        _cell(base, method, rule, attack, seed)
        for seed, (method, rule), attack in product(seeds, who, attacks)
    ]


def _cell(base: Request, method: str, rule: Any, attack: Any, seed: int) -> Cell:
    given = {"rule": rule, "attack": attack}
    own = {key: value for key, value in given.items() if not isinstance(value, str)}
    names = {key: label(value) if key in own else value for key, value in given.items()}
    labels = {"method": method, **names, "seed": seed}
    fields = {"method": method, "seed": seed, "seeds": None, "name": f"arena-{base.name}"}
    if "rule" not in own:
        fields["rule"] = rule
    if "attack" not in own:
        fields["attack"] = attack
    try:
        return Cell(labels, base.replace(**fields), own=own)
    except ValueError as error:
        return Cell(labels, None, str(error))


# --- what came out ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """A contestant's place: by seed its worst case over the attacks, and its lead over the next.

    attack: the attack of the worst case; where it differs between seeds, one for each. unable: attacks
    without a result.
    """

    method: str
    rule: str
    cases: dict[int, float]
    attack: str
    unable: int
    bytes: float
    leads: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.method, self.rule)

    @property
    def worst_case(self) -> float | None:
        """The mean over the seeds."""
        return fmean(self.cases.values()) if self.cases else None

    @property
    def ahead(self) -> str:
        """In how many seeds it is ahead of the next contestant, and by how much."""
        if not self.leads:
            return ""
        won, low, high = sum(lead > 0 for lead in self.leads), min(self.leads), max(self.leads)
        lead = f"{low:+.3f}" if low == high else f"{low:+.3f} to {high:+.3f}"
        return f"in {won} of {count(len(self.leads), 'seed')} ({lead})"


class Standings:
    """The results of an arena: matrices of rules and attacks, and the ranking."""

    def __init__(self, base: Request, results: Results) -> None:
        self.base, self.results = base, results
        self.attacks = list(dict.fromkeys(one.labels["attack"] for one in results))
        self.pairs: dict[tuple[str, str], dict[str, list[Result]]] = {}
        for one in results:
            who = one.labels["method"], one.labels["rule"]
            self.pairs.setdefault(who, {}).setdefault(one.labels["attack"], []).append(one)

    @cached_property
    def ranking(self) -> list[Rank]:
        """Rank contestants by their worst case, best first; those without some result come last."""
        ranks = [self._rank(*who, played) for who, played in self.pairs.items()]
        ranks.sort(key=lambda rank: (rank.unable > 0, not rank.cases, -(rank.worst_case or 0.0)))
        for k, (rank, after) in enumerate(pairwise(ranks)):
            leads = (case - after.cases[seed] for seed, case in rank.cases.items() if seed in after.cases)
            ranks[k] = replace(rank, leads=tuple(leads))
        return ranks

    @staticmethod
    def _rank(method: str, rule: str, played: dict[str, list[Result]]) -> Rank:
        done = {attack: [one for one in those if one.run] for attack, those in played.items()}
        done = {attack: those for attack, those in done.items() if those}
        worst = {a: {one.labels["seed"]: _worst(one) for one in those} for a, those in done.items()}
        seeds = sorted(set.intersection(*map(set, worst.values()))) if worst else []
        hardest = {seed: min((ends[seed], attack) for attack, ends in worst.items())[1] for seed in seeds}
        cases = {seed: worst[attack][seed] for seed, attack in hardest.items()}
        names = list(hardest.values())
        sent = max((one.run.total("bytes") for those in done.values() for one in those if one.run), default=0)
        attack = ", ".join(names if len(set(names)) > 1 else names[:1])
        return Rank(method, rule, cases, attack, len(played) - len(done), sent)

    def matrix(self, column: str) -> "DataFrame":
        """Return means over the seeds: a row a contestant, by rank, a column an attack; NaN where none is."""
        import pandas

        rows = {rank.name: self._row(rank, column) for rank in self.ranking}
        return pandas.DataFrame.from_dict(rows, orient="index", columns=self.attacks, dtype=float)

    def _row(self, rank: Rank, column: str) -> list[float]:
        played = self.pairs[rank.method, rank.rule]
        ends = [[_end(one, column) for one in played.get(attack, []) if one.run] for attack in self.attacks]
        return [fmean(each) if each else math.nan for each in ends]

    def to_dict(self) -> dict[str, Any]:
        """Return a cell for each contestant and attack, and the ranking, as JSON values."""
        cells = []
        for (method, rule), played in self.pairs.items():
            for attack, those in played.items():
                done = [one for one in those if one.run]
                both = {
                    column: fmean(_end(one, column) for one in done) if done else None
                    for column in ("accuracy_mean", "accuracy_worst")
                }
                error = next((one.error for one in those if not one.run), None)
                seeds = [one.labels["seed"] for one in done]
                cells.append(
                    {"rule": rule, "attack": attack, "method": method, **both, "seeds": seeds, "error": error}
                )
        ranking = [
            {
                "rule": rank.rule, "method": rank.method, "worst_case": rank.worst_case,
                "attack": rank.attack or None, "ahead": rank.ahead or None,
            }
            for rank in self.ranking
        ]  # fmt: skip
        return {"cells": cells, "ranking": ranking}

    # --- files ---

    def write(self, out: Path) -> list[Path]:
        """Write arena.html, arena.csv and arena.tex."""
        matrix = self.matrix("accuracy_worst")
        matrix["worst case"] = [math.nan if r.worst_case is None else r.worst_case for r in self.ranking]
        texts = {
            "arena.html": self.page(), "arena.csv": self.results.frame.to_csv(index=False),
            "arena.tex": report.latex(matrix, best="max", about=self.facts),
        }  # fmt: skip
        for name, text in texts.items():
            write_text(out / name, text)
        return [out / name for name in texts]

    @property
    def facts(self) -> str:
        """The setting in a few words."""
        from rpel.simulation.methods import resolve

        base, pull = self.base, resolve(self.base).pull
        size = f"{base.dataset}, n = {base.nodes}, b = {base.hostile_count}, s = {pull}, {base.rounds} rounds"
        return f"{size}, {base.partition}, {count(base.local_steps, 'local step')}"

    def page(self) -> str:
        """Return arena.html: the ranking, two matrices, and what could not run."""
        runs = sum(one.run is not None for one in self.results)
        sizes = f"{len(self.pairs)} rules and methods, {len(self.attacks)} attacks"
        maps = {f"accuracy, {title}": self.matrix(column) for title, column in MEASURES.items()}
        sections = [
            report.Section("Ranking", RANKING, [report.table("ranking", list(map(_ranked, self.ranking)))]),
            report.Section("Every attack", MATRICES, [report.picture(plots.heat_maps(maps), "accuracies")]),
        ]
        errors = [f"{', '.join(who)}: {why}" for why, who in self.results.errors().items()]
        if errors:
            sections.append(report.Section("Without result", "", [report.listed(errors)]))
        summary = f"{sizes}, {count(runs, 'run')}."
        return report.page("rpel arena", ABOUT, summary, {"setting": self.facts}, sections)


ABOUT = (
    "Every rule against every attack in one setting, ranked by the worst case. All rules pull the same "
    "number of peers; methods that ask everybody send more."
)
RANKING = (
    "The worst case is the lowest accuracy of any honest node over all attacks, for each seed; shown is the "
    "mean over the seeds (lowest to highest). Leads over the next contestant are paired by seed."
)
MATRICES = (
    "Accuracy after the last round on the whole test set, mean over the seeds; – where there is no result."
)


def _worst(one: Result) -> float:
    return _end(one, "accuracy_worst")


def _end(one: Result, column: str) -> float:
    """Return what a run is judged by at its end, mean or worst: accuracy, or a metric without classes."""
    assert one.run is not None
    return one.run.end(column.replace("accuracy", one.run.key))


def _ranked(rank: Rank) -> dict[str, Any]:
    """Return a row of the ranking."""
    _, low, high = spread(list(rank.cases.values())) if rank.cases else (0.0, 0.0, 0.0)
    between = f"{low:.4f} to {high:.4f}" if len(rank.cases) > 1 else ""
    case = math.nan if rank.worst_case is None else rank.worst_case
    return {
        "rule": report.text(rank.name),
        "worst case": report.number(case, ".4f", between, missing="no result"),
        "under": report.text(rank.attack, f"{rank.unable} without result" if rank.unable else ""),
        "seeds": report.number(len(rank.cases)),
        "sent": report.size(rank.bytes),
        "ahead of the next": report.text(rank.ahead),
    }


# --- from Python --------------------------------------------------------------------------------------------


def arena(
    model: Any = None, train: Any = None, test: Any = None, loss: Any = None,
    *, rules: Sequence[Any] = (), attacks: Sequence[Any] = (), methods: Sequence[str] = (),
    seeds: str | Sequence[int] = "0", out: str | Path = "arena", jobs: int | None = None, **fields: Any,
) -> Standings:  # fmt: skip
    """Run rules against attacks in one setting, rank them by the worst case, and write a page.

    Args:
        model, train, test, loss, fields: the setting, as for `rpel.simulate`.
        rules, attacks: names or objects; all that there are if left out.
        methods: further methods, such as "gts"; or "all".
        seeds: numbers, or a text such as "0-4".
        out: the folder for runs and pages.
        jobs: runs at a time; runs with objects are made one after the other.
    """
    shared = {"model": model, "train": train, "test": test, "loss": loss, **fields}
    (setting,) = combinations(shared, {"seed": [0]})
    if setting.spec is None:
        raise ValueError(setting.error)
    numbers = parse_seeds(seeds) if isinstance(seeds, str) else seeds
    played = cells(setting.spec, contestants(rules, methods), opponents(attacks), numbers)
    whole = [replace(cell, own={**setting.own, **cell.own}) for cell in played]
    standings = Standings(setting.spec, Study(whole, out, jobs).run())
    standings.write(Path(out))
    return standings
