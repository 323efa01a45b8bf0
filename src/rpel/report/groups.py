"""Runs brought together: seeds of one specification into a group, groups into a chart; all of them as CSV and LaTeX."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.config.record import Identity
from rpel.config.spec import TO_ALL, Spec
from rpel.report.collect import Run
from rpel.runs.columns import measures
from rpel.runs.record import Table, interval
from rpel.text import value_text

METRICS = ("accuracy", "loss", "consensus")
"""What is drawn; in place of the accuracy another measure, where there are no classes."""

NOT_MEANING = ("seed", *(key for key, field in Spec.model_fields.items() if Identity.NEVER in field.metadata))
_CHART = ("dataset", "nodes", "byzantine", "pull")
_GROUP = ("method", "rule", "attack", "attack_params")
_ALWAYS_SAID = ("model", "rounds", "b_hat", "partition", "alpha", "lr", "batch_size", "local_steps")
_CROWD = 8  # curves that can be told apart
_MOST_PARTS = 4


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in their seed alone; ``label`` tells the group from the others of its chart."""

    runs: tuple[Run, ...]
    label: str

    @property
    def spec(self) -> Spec:
        return self.runs[0].spec

    def columns(self, metric: str) -> tuple[str, ...]:
        """What a metric is drawn from: the first solid, the second, the paper's worst node, dashed."""
        key = self.runs[0].key
        return (f"{key}_mean", f"{key}_lowest") if metric == "accuracy" else (metric,)

    def rounds(self, column: str) -> list[int]:
        """The rounds of :meth:`curve`: those evaluated, and for accuracies round 0 where it is known."""
        evaluated = [row["round"] for row in self.runs[0].evaluated]
        return [0, *evaluated] if self._begins(column) else evaluated

    def curve(self, column: str) -> NDArray[np.float64]:
        """(3, e): mean, lowest and highest over the seeds; infinite where a number overflowed."""
        begins = self._begins(column)
        values = np.array([run.series(column, begins) for run in self.runs])
        return np.stack([values.mean(0), values.min(0), values.max(0)])

    def _begins(self, column: str) -> bool:
        return all(column in run.start for run in self.runs)

    def final(self, column: str) -> tuple[float, float, float]:
        """(mean, low, high) after the last round, over the seeds; infinite if it overflowed in one of them."""
        values = [run.final(column) for run in self.runs]
        return interval(values) if np.isfinite(values).all() else (math.inf, math.inf, math.inf)

    @property
    def measures(self) -> tuple[str, ...]:
        """The columns it is judged by."""
        return measures({k: v for k, v in run.rows[-1].items() if k != f"{run.key}_lowest"} for run in self.runs)

    @property
    def stamp(self) -> str:
        """SMOKE or SHORT when a run is not at full size."""
        return max(run.spec.scale.stamp for run in self.runs)

    @property
    def held(self) -> bool:
        return all(run.proof.held for run in self.runs)

    @property
    def max_observed(self) -> int:
        return max(run.proof.max_observed for run in self.runs)

    @property
    def diverged(self) -> int:
        """Honest nodes whose model is not finite at the end, the most of all seeds; 0 where nobody counted."""
        return max(run.rows[-1].get("diverged") or 0 for run in self.runs)

    def total(self, column: str) -> float:
        """The sum over all rounds and seeds."""
        return sum(run.total(column) for run in self.runs)


@dataclass(frozen=True, eq=False)
class Chart:
    """The groups that are compared with each other: one data set, one number of nodes, attackers and pulls."""

    title: str
    slug: str
    groups: tuple[Group, ...]

    @property
    def measure(self) -> str:
        """What its groups are judged by."""
        return self.groups[0].runs[0].measure

    @property
    def words(self) -> str:
        """The same for readers."""
        if self.measure == "accuracy":
            return "test accuracy"
        better = "more" if self.groups[0].runs[0].better else "less"
        return f"{self.measure} on test data ({better} is better)"

    @property
    def stamp(self) -> str:
        """What must be written over its curves, if they are not all at full size."""
        found = stamps(self.groups)
        partly = "" if all(group.stamp for group in self.groups) else "partly "
        return partly + " and ".join(found) if found else ""

    @property
    def common(self) -> str:
        """What all groups share: the main fields, and others where they are not as usual."""
        specs = [group.spec for group in self.groups]
        said = []
        for key in _others():
            value = getattr(specs[0], key)
            alike = all(getattr(spec, key) == value for spec in specs)
            if alike and (key in _ALWAYS_SAID or value != Spec.model_fields[key].default):
                said.append(f"{key} {value_text(value)}")
        return ", ".join(said)


def stamps(groups: Sequence[Group]) -> list[str]:
    """The words that tell groups that are not at full size."""
    return sorted({group.stamp for group in groups} - {""}, reverse=True)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """One Group for each meaning. A second run of the same seed that differs opens a group of its own."""
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    seen: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        meaning = _meaning(run)
        twins = seen[*meaning, run.spec.seed]
        if any(twin.numbers == run.numbers for twin in twins):  # a copy of a run folder
            continue
        groups[*meaning, len(twins)].append(run)
        twins.append(run)
    ordered = sorted(groups.items(), key=lambda item: _order(item[1][0].spec))
    same = [tuple(sorted(group, key=lambda run: run.spec.seed)) for _, group in ordered]
    charts = [list(alike) for _, alike in groupby(same, key=lambda group: _chart_key(group[0]))]
    return [
        Group(group, label)
        for alike in charts
        for group, label in zip(alike, _labels([group[0].spec for group in alike]), strict=True)
    ]


def chart_groups(found: Sequence[Group]) -> list[Chart]:
    """The groups by data set, nodes, attackers and pull, crowded ones in parts; who asks everybody joins every pull.

    >>> chart_groups(group_runs([]))
    []
    """
    own: dict[tuple[Any, ...], list[Group]] = {}
    for group in found:
        if group.spec.method not in TO_ALL:
            own.setdefault(_chart_key(group.runs[0]), []).append(group)
    for group in found:
        if group.spec.method in TO_ALL:  # they are compared with every pull
            key = _chart_key(group.runs[0])
            for panel in [k for k in own if (k[:3], k[4]) == (key[:3], key[4])] or [key]:
                own.setdefault(panel, []).append(group)
    return [_titled(key, said, part) for key, group in sorted(own.items()) for said, part in _parts(group)]


def _parts(alike: list[Group], said: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Group]]]:
    """A chart with too many curves to tell apart in parts, by the field that makes the fewest; ``said`` names them."""
    few = _telling(alike, _others(), _MOST_PARTS) or _telling(alike, ["rule", "attack"], 2 * _CROWD)
    if not few:
        yield said, alike
        return
    key = min(few)[1]
    parts: dict[tuple[float, str], list[Group]] = defaultdict(list)
    for group in alike:
        value = getattr(group.spec, key)
        parts[value if isinstance(value, int | float) else 0, value_text(value)].append(group)
    for (_, text), part in sorted(parts.items(), key=lambda item: item[0]):
        yield from _parts(part, (*said, f"{key} {text}"))


def _telling(alike: list[Group], keys: Sequence[str], most: int) -> list[tuple[int, str]]:
    """(parts, field) for the fields that would split a crowd into 2 to ``most`` parts."""
    if len(alike) <= _CROWD:
        return []
    counts = [(len({repr(getattr(group.spec, key)) for group in alike}), key) for key in keys if key != "b_hat"]
    return [(count, key) for count, key in counts if 2 <= count <= most]


def _titled(key: tuple[Any, ...], said: tuple[str, ...], alike: list[Group]) -> Chart:
    dataset, nodes, byzantine, pull, measure = key
    said = said if measure == "accuracy" else (measure, *said)
    title = ", ".join([f"{dataset}: n = {nodes:,}, b = {byzantine:,}, s = {pull:,}", *said])
    labels = _labels([group.spec for group in alike])
    named = tuple(Group(group.runs, label) for group, label in zip(alike, labels, strict=True))
    slug = "-".join([f"{dataset}-n{nodes}-b{byzantine}-s{pull}", *(re.sub(r"[^\w.]+", "", words) for words in said)])
    return Chart(title, slug, named)


def _chart_key(run: Run) -> tuple[Any, ...]:
    of_spec = (getattr(run.spec, key) for key in _CHART)
    return (*(0 if value is None else value for value in of_spec), run.measure)


def _meaning(run: Run) -> tuple[Any, ...]:
    """Whatever makes two runs different but for the seed."""
    fields = run.spec.model_dump(exclude=set(NOT_MEANING))
    rounds = tuple(row["round"] for row in run.evaluated)
    return (*(repr(value) for value in fields.values()), run.proof.data, rounds)


def _order(spec: Spec) -> tuple[str, ...]:
    numbers = tuple(f"{getattr(spec, key) or 0:012d}" for key in _CHART[1:])
    rest = spec.model_dump(exclude={*NOT_MEANING, *_CHART, *_GROUP})
    return (spec.dataset, *numbers, spec.method, spec.rule or "", spec.attack, repr(rest))


def _others() -> list[str]:
    """The fields that mean something beside those of panels and curves."""
    return [key for key in Spec.model_fields if key not in (*NOT_MEANING, *_CHART, *_GROUP)]


def _labels(specs: Sequence[Spec]) -> list[str]:
    """Method, rule and attack, then whatever else tells them apart; equal ones are numbered."""
    others = [key for key in _others() if key != "b_hat"]
    telling = [key for key in others if len({repr(getattr(spec, key)) for spec in specs}) > 1]
    names = [_name(spec, telling) for spec in specs]
    longer = [_name(spec, [*telling, "b_hat"]) for spec in specs]
    if len(set(longer)) > len(set(names)):  # b_hat follows from the method unless somebody chose it
        names = longer
    return [
        name if names.count(name) == 1 else f"{name} ({1 + names[:at].count(name)})" for at, name in enumerate(names)
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
    size = [word for word in [spec.scale.stamp] if word]
    return " · ".join([*size, spec.method, spec.rule or "own rule", _attack(spec), *extra])


# --- two groups -------------------------------------------------------------------------------------------------------


def compared(a: Group, b: Group) -> dict[str, Any]:
    """What differs between two groups; differences of final numbers are B − A, paired by seed."""
    pairs = {key: (getattr(a.spec, key), getattr(b.spec, key)) for key in Spec.model_fields if key not in NOT_MEANING}
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


def _difference(a: Group, b: Group, column: str, seeds: list[int]) -> dict[str, float | None]:
    first, second = ({run.spec.seed: run.final(column) for run in group.runs} for group in (a, b))
    gaps = [second[seed] - first[seed] for seed in seeds]
    means = [group.final(column)[0] for group in (a, b)]
    known = bool(gaps) and all(map(math.isfinite, gaps))
    mean, low, high = interval(gaps) if known else (None, None, None)
    ends = [value if math.isfinite(value) else None for value in means]
    return {"a": ends[0], "b": ends[1], "difference": mean, "low": low, "high": high}


# --- for papers ------------------------------------------------------------------------------------------------------

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$", "±": r"$\pm$",
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


# --- all numbers -----------------------------------------------------------------------------------------------------

_PLACES = ("data_dir", "out", "seeds", "checkpoint_every", "device", "threads")


def to_csv(runs: Sequence[Run]) -> str:
    """The lines of all runs; what a run did not evaluate is empty.

    >>> to_csv([])
    '\\n'
    """
    fields = [key for key in Spec.model_fields if key not in _PLACES]
    lines = []
    for run in runs:
        known = {"run": run.folder} | {key: value_text(getattr(run.spec, key)) for key in fields}
        known |= {"held": value_text(run.proof.held)}
        lines += [known | row for row in run.rows]
    return Table(lines).to_csv()


def groups_as_latex(groups: Iterable[Group]) -> str:
    """A booktabs table of groups: what each ends with, with its interval over the seeds."""
    groups = list(groups)
    head = ["setting", "data", "n", "b", "s", "seeds", "mean accuracy", "worst node"]
    if mixed := any(g.runs[0].measure != "accuracy" for g in groups):
        head[6:] = ["measure", "mean", "worst node"]
    rows = [
        [g.label, g.spec.dataset, str(g.spec.nodes), str(g.spec.byzantine), str(g.runs[0].proof.pull), str(len(g.runs))]
        + [g.runs[0].measure] * mixed
        + [
            f"{mean:.4f}" + (f" ± {(high - low) / 2:.4f}" if len(g.runs) > 1 else "")
            for mean, low, high in map(g.final, (f"{g.runs[0].key}_mean", f"{g.runs[0].key}_worst"))
        ]
        for g in groups
    ]
    about = "after the last round; ± half of the 95 % t-interval over seeds, of two seeds half their distance"
    return latex_table(head, rows, about)
