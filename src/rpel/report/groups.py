"""Runs brought together: seeds of one specification into a group, groups into a chart;
all of them as CSV and LaTeX."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rpel.experiments.panels import scale_of
from rpel.runs.columns import Row
from rpel.runs.record import Run, RunSet, interval
from rpel.runs.table import Table
from rpel.spec import TO_ALL, Spec, compared_fields
from rpel.text import value_text

METRICS = ("accuracy", "loss", "consensus")
"""What is drawn; in place of the accuracy another measure, where there are no classes."""

_CHART = ("dataset", "nodes", "byzantine", "pull")
_GROUP = ("method", "rule", "attack", "attack_params")
_ALWAYS_SAID = ("model", "rounds", "b_hat", "partition", "alpha", "lr", "batch_size", "local_steps")
_CROWD = 8  # curves that can be told apart
_MOST_PARTS = 4


@dataclass(frozen=True, eq=False)
class Chart:
    """The groups that are compared with each other: one data set, one number of nodes,
    attackers and pulls."""

    title: str
    slug: str
    groups: tuple[RunSet, ...]

    @property
    def measure(self) -> str:
        """What its groups are judged by."""
        return self.groups[0].measure

    @property
    def words(self) -> str:
        """The same for readers."""
        if self.measure == "accuracy":
            return "test accuracy"
        better = "more" if self.groups[0].more_is_better else "less"
        return f"{self.measure} on test data ({better} is better)"

    @property
    def stamp(self) -> str:
        """What must be written over its curves, if they are not all at full size."""
        words = stamps(self.groups)
        partly = "" if all(scale_of(group.spec).stamp for group in self.groups) else "partly "
        return partly + " and ".join(words) if words else ""

    @property
    def common(self) -> str:
        """What all groups share: the main fields, and others where they are not as usual."""
        specs = [group.spec for group in self.groups]
        words = []
        for key in _others():
            value = getattr(specs[0], key)
            alike = all(getattr(spec, key) == value for spec in specs)
            if alike and (key in _ALWAYS_SAID or value != Spec.model_fields[key].default):
                words.append(f"{key} {value_text(value)}")
        return ", ".join(words)


def stamps(groups: Sequence[RunSet]) -> list[str]:
    """The words that tell groups that are not at full size."""
    return sorted({scale_of(group.spec).stamp for group in groups} - {""}, reverse=True)


def group_runs(runs: Sequence[Run]) -> list[RunSet]:
    """One RunSet for each meaning. A second run of the same seed that differs opens a group of its own."""
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    seen: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        meaning = _meaning(run)
        twins = seen[*meaning, run.spec.seed]
        if any(_numbers(twin) == _numbers(run) for twin in twins):  # a copy of a run folder
            continue
        groups[*meaning, len(twins)].append(run)
        twins.append(run)
    ordered = sorted(groups.items(), key=lambda item: _order(item[1][0].spec))
    same = [tuple(sorted(group, key=lambda run: run.spec.seed)) for _, group in ordered]
    charts = [list(alike) for _, alike in groupby(same, key=lambda group: _chart_key(group[0]))]
    return [
        RunSet(group, label)
        for alike in charts
        for group, label in zip(alike, _labels([group[0].spec for group in alike]), strict=True)
    ]


def chart_groups(groups: Sequence[RunSet]) -> list[Chart]:
    """The groups by data set, nodes, attackers and pull, crowded ones in parts;
    who asks everybody joins every pull.

    >>> chart_groups(group_runs([]))
    []
    """
    own: dict[tuple[Any, ...], list[RunSet]] = {}
    for group in groups:
        if group.spec.method not in TO_ALL:
            own.setdefault(_chart_key(group.runs[0]), []).append(group)
    for group in groups:
        if group.spec.method in TO_ALL:  # they are compared with every pull
            key = _chart_key(group.runs[0])
            for panel in [k for k in own if (k[:3], k[4]) == (key[:3], key[4])] or [key]:
                own.setdefault(panel, []).append(group)
    return [_titled(key, words, part) for key, group in sorted(own.items()) for words, part in _parts(group)]


def _parts(
    alike: list[RunSet], words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[RunSet]]]:
    """A chart with too many curves to tell apart in parts, by the field that makes the fewest;
    ``words`` names them."""
    few = _telling(alike, _others(), _MOST_PARTS) or _telling(alike, ["rule", "attack"], 2 * _CROWD)
    if not few:
        yield words, alike
        return
    key = min(few)[1]
    parts: dict[tuple[float, str], list[RunSet]] = defaultdict(list)
    for group in alike:
        value = getattr(group.spec, key)
        parts[value if isinstance(value, int | float) else 0, value_text(value)].append(group)
    for (_, text), part in sorted(parts.items(), key=lambda item: item[0]):
        yield from _parts(part, (*words, f"{key} {text}"))


def _telling(alike: list[RunSet], keys: Sequence[str], most: int) -> list[tuple[int, str]]:
    """(parts, field) for the fields that would split a crowd into 2 to ``most`` parts."""
    if len(alike) <= _CROWD:
        return []
    counts = [
        (len({repr(getattr(group.spec, key)) for group in alike}), key) for key in keys if key != "b_hat"
    ]
    return [(count, key) for count, key in counts if 2 <= count <= most]


def _titled(key: tuple[Any, ...], parts: tuple[str, ...], alike: list[RunSet]) -> Chart:
    dataset, nodes, byzantine, pull, measure = key
    parts = parts if measure == "accuracy" else (measure, *parts)
    title = ", ".join([f"{dataset}: n = {nodes:,}, b = {byzantine:,}, s = {pull:,}", *parts])
    labels = _labels([group.spec for group in alike])
    named = tuple(RunSet(group.runs, label) for group, label in zip(alike, labels, strict=True))
    slug = "-".join(
        [f"{dataset}-n{nodes}-b{byzantine}-s{pull}", *(re.sub(r"[^\w.]+", "", words) for words in parts)]
    )
    return Chart(title, slug, named)


def _chart_key(run: Run) -> tuple[Any, ...]:
    of_spec = (getattr(run.spec, key) for key in _CHART)
    return (*(0 if value is None else value for value in of_spec), run.measure)


def _meaning(run: Run) -> tuple[Any, ...]:
    """Whatever makes two runs different but for the seed."""
    fields = run.spec.model_dump(include=set(compared_fields()))
    rounds = tuple(row["round"] for row in run.evaluated)
    return (*(repr(value) for value in fields.values()), tuple(run.certificate.data.items()), rounds)


def _numbers(run: Run) -> list[Row]:
    """The rows without times: equal for equal runs."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.history]


def _order(spec: Spec) -> tuple[str, ...]:
    numbers = tuple(f"{getattr(spec, key) or 0:012d}" for key in _CHART[1:])
    rest = spec.model_dump(include=set(_others()))
    return (spec.dataset, *numbers, spec.method, spec.rule or "", spec.attack, repr(rest))


def _others() -> list[str]:
    """The fields that mean something beside those of panels and curves."""
    return [key for key in compared_fields() if key not in (*_CHART, *_GROUP)]


def _labels(specs: Sequence[Spec]) -> list[str]:
    """Method, rule and attack, then whatever else tells them apart; equal ones are numbered."""
    others = [key for key in _others() if key != "b_hat"]
    telling = [key for key in others if len({repr(getattr(spec, key)) for spec in specs}) > 1]
    names = [_name(spec, telling) for spec in specs]
    longer = [_name(spec, [*telling, "b_hat"]) for spec in specs]
    if len(set(longer)) > len(set(names)):  # b_hat follows from the method unless somebody chose it
        names = longer
    return [
        name if names.count(name) == 1 else f"{name} ({1 + names[:at].count(name)})"
        for at, name in enumerate(names)
    ]


def _attack(spec: Spec) -> str:
    """The attack with its parameters.

    >>> _attack(Spec(attack="strongest", attack_params={"of": "foe"}))
    'strongest(of=foe)'
    """
    if not spec.byzantine:
        return "no attacker"
    return f"{spec.attack}({value_text(spec.attack_params)})" if spec.attack_params else spec.attack


def _name(spec: Spec, telling: Sequence[str]) -> str:
    extra = [f"{key} {value_text(getattr(spec, key))}" for key in telling]
    size = [word for word in [scale_of(spec).stamp] if word]
    return " · ".join([*size, spec.method, spec.rule or "own rule", _attack(spec), *extra])


# --- two groups ---------------------------------------------------------------------------------------------


def compared(a: RunSet, b: RunSet) -> dict[str, Any]:
    """What differs between two groups; differences of final numbers are B − A, paired by seed."""
    pairs = {key: (getattr(a.spec, key), getattr(b.spec, key)) for key in compared_fields()}
    both = sorted({run.spec.seed for run in a.runs} & {run.spec.seed for run in b.runs})
    mine, theirs = (
        dict(zip(group.rounds(f"{key}_mean"), group.curve(f"{key}_mean")[0].tolist(), strict=True))
        for group, key in ((a, a.runs[0].key), (b, b.runs[0].key))
    )
    if a.runs[0].measure != b.runs[0].measure:
        theirs = {}
    return {
        "measure": a.runs[0].measure,
        "differences": {key: [value_text(x), value_text(y)] for key, (x, y) in pairs.items() if x != y},
        "seeds": both,
        "interval": "95 % t-interval" if len(both) > 2 else "lowest and highest" if len(both) == 2 else "",
        "final": {key: _difference(a, b, key, both) for key in a.measures if key in b.measures},
        "curve": [{"round": t, "a": mine[t], "b": theirs[t]} for t in mine if t in theirs],
    }


def _difference(a: RunSet, b: RunSet, column: str, seeds: list[int]) -> dict[str, float | None]:
    first, second = ({run.spec.seed: run.end(column) for run in group.runs} for group in (a, b))
    gaps = [second[seed] - first[seed] for seed in seeds]
    means = [group.interval(column)[0] for group in (a, b)]
    known = bool(gaps) and all(map(math.isfinite, gaps))
    mean, low, high = interval(gaps) if known else (None, None, None)
    ends = [value if math.isfinite(value) else None for value in means]
    return {"a": ends[0], "b": ends[1], "difference": mean, "low": low, "high": high}


# --- for papers ---------------------------------------------------------------------------------------------

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$", "±": r"$\pm$",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Text as LaTeX prints it.

    >>> print(latex_text("nnm+trimmed_mean · 10 %"))
    nnm+trimmed\\_mean $\\cdot$ 10 \\%
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in text)


def latex_table(head: Sequence[str], rows: Iterable[Sequence[str]], about: str = "") -> str:
    """A booktabs table; the first column is text, the others are numbers. ``about`` becomes a comment."""
    lines = [f"% {about}"] * bool(about) + ["% needs \\usepackage{booktabs}"]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(latex_text, head)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(latex_text, row)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


# --- all numbers --------------------------------------------------------------------------------------------


def to_csv(runs: Sequence[Run]) -> str:
    """The lines of all runs; what a run did not evaluate is empty.

    >>> to_csv([])
    '\\n'
    """
    fields = ["name", "seed", *compared_fields()]
    lines = []
    for run in runs:
        known = {"run": run.name} | {key: value_text(getattr(run.spec, key)) for key in fields}
        known |= {"held": value_text(run.certificate.held)}
        lines += [known | row for row in run.rows]
    return Table(lines).to_csv()


def groups_as_latex(groups: Iterable[RunSet]) -> str:
    """A booktabs table of groups: what each ends with, with its interval over the seeds."""
    groups = list(groups)
    head = ["setting", "data", "n", "b", "s", "seeds", "mean accuracy", "worst node"]
    if mixed := any(g.runs[0].measure != "accuracy" for g in groups):
        head[6:] = ["measure", "mean", "worst node"]
    rows = [
        [
            g.label,
            g.spec.dataset,
            *map(str, (g.spec.nodes, g.spec.byzantine, g.runs[0].certificate.pull, len(g.runs))),
        ]
        + [g.runs[0].measure] * mixed
        + [
            f"{mean:.4f}" + (f" ± {(high - low) / 2:.4f}" if len(g.runs) > 1 else "")
            for mean, low, high in map(g.interval, (f"{g.runs[0].key}_mean", f"{g.runs[0].key}_worst"))
        ]
        for g in groups
    ]
    about = "after the last round; ± half of the 95 % t-interval over seeds, of two seeds half their distance"
    return latex_table(head, rows, about)
