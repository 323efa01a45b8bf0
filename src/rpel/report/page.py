"""The page: header, curves, tables, certificates,
in one file that needs no other and asks nobody for anything.

What is shown is prepared here; templates/ say how, with everything escaped that is not drawn by rpel itself.
The page's Content-Security-Policy forbids every request and every script but its own, by hash.
"""

import base64
import hashlib
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rpel import plots
from rpel.experiments.panels import scale_of
from rpel.report import drawing
from rpel.report.collect import Collection, command
from rpel.report.groups import METRICS, Chart, chart_groups, group_runs, stamps
from rpel.runs.certificate import Robustness
from rpel.runs.columns import column
from rpel.runs.record import Run, RunSet
from rpel.text import count, human_bytes, percent, times
from rpel.version import __version__


def page(collection: Collection) -> str:
    """The whole page for what was collected. Equal collections give equal text.

    >>> "0 finished runs in 0 settings." in page(Collection((), (), (), ()))
    True
    """
    groups = group_runs(collection.runs)
    charts = chart_groups(groups)
    alone = [(RunSet((run,), group.label), f"run-{k}") for k, (group, run) in enumerate(_each(groups))]
    return rendered(
        "report.html",
        title=" and ".join(stamps(groups)) + ": " * bool(stamps(groups)) + "rpel report",
        kind="" if groups else "empty",
        data={"charts": [{metric: drawing.values(chart, metric) for metric in METRICS} for chart in charts]},
        summary=_summary(collection, groups),
        stamps=_stamps(groups),
        facts={"runs made with": _versions(groups), "page made with": f"rpel {__version__}"},
        again=shlex.join(["rpel", "report", *collection.shown, "-o", "report.html"]),
        unfinished=collection.unfinished,
        broken=collection.broken,
        panels=[_panel(chart, k) for k, chart in enumerate(charts)],
        settings=_of_groups(groups),
        runs=_of_runs(alone),
        certificates=[_certificate(group.runs[0], group.label, anchor) for group, anchor in alone],
    )


def rendered(template: str, *, title: str, data: object, kind: str = "", **values: Any) -> str:
    """A page: style and script inside, nothing asked of any other machine.
    ``data`` is what its script reads."""
    script = _file("script.js")
    return (
        _environment()
        .get_template(template)
        .render(
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            script=Markup(script),
            style=Markup(_file("style.css")),
            colours=Markup(plots.dark_style()),
            title=title,
            data=data,
            kind=kind,
            **values,
        )
    )


@cache
def _environment() -> Environment:
    """The templates; whatever is not Markup is text, and a name that nobody gave is an error."""
    made = Environment(
        loader=PackageLoader("rpel.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters |= {
        "percent": percent, "times": times, "swatch": drawing.swatch,
        "resume": lambda place: shlex.join(["rpel", "resume", place]),
    }  # fmt: skip
    made.globals["listed"] = _LISTED
    return made


_LISTED = 20  # violations written out; certificate.json has more


def _each(groups: Sequence[RunSet]) -> list[tuple[RunSet, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def _file(name: str) -> str:
    return (resources.files("rpel.report") / "templates" / name).read_text("utf-8")


# --- parts of the page --------------------------------------------------------------------------------------


def _summary(collection: Collection, groups: Sequence[RunSet]) -> str:
    parts = [
        f"{count(sum(len(group.runs) for group in groups), 'finished run')} in "
        f"{count(len(groups), 'setting')}"
    ]
    violated = sum(not run.certificate.held for _, run in _each(groups))
    if groups:
        parts.append(
            f"the plan was violated in {violated:,}"
            if violated
            else "the sampling of all stayed within the plan"
        )
    diverged = sum(run.diverged > 0 for _, run in _each(groups))
    if diverged:
        parts.append(f"nodes have diverged in {diverged:,}")
    fragile = sum(group.runs[0].survival.robustness is Robustness.NONE for group in groups)
    if fragile:
        parts.append(f"the rule of {count(fragile, 'setting')} is not robust")
    copies = len(collection.runs) - sum(len(group.runs) for group in groups)
    others = {
        "more are copies": copies,
        "unfinished": len(collection.unfinished),
        "broken": len(collection.broken),
    }
    parts += [f"{how_many:,} {words}" for words, how_many in others.items() if how_many]
    return "; ".join(parts) + "."


_MEANS = {
    "SMOKE": "only show that everything works: they learn from a sample of MNIST",
    "SHORT": "have fewer rounds than the paper's",
}


def _stamps(groups: Sequence[RunSet]) -> list[dict[str, str]]:
    """A word and a sentence for each size that is not the paper's."""
    stamps = []
    for word, meaning in _MEANS.items():
        alike = sum(scale_of(group.spec).stamp == word for group in groups)
        who = "All settings here" if alike == len(groups) else f"{alike} of {len(groups)} settings here"
        if alike:
            stamps.append({"word": word, "sentence": f"{who} {meaning}."})
    return stamps


def _versions(groups: Sequence[RunSet]) -> str:
    """What made the runs."""
    versions: dict[str, set[str]] = {}
    for _, run in _each(groups):
        for key, value in run.certificate.versions.items():
            versions.setdefault(key, set()).add(value[:8] if key == "code" else value)
    return "; ".join(f"{key} {_some(sorted(values))}" for key, values in versions.items())


def _some(values: list[str]) -> str:
    """All of a few values, the number of many.

    >>> _some(["a", "b"]), _some(["a", "b", "c", "d"])
    ('a, b', 'in 4 versions (see each run)')
    """
    return ", ".join(values) if len(values) < 4 else f"in {len(values)} versions (see each run)"


_HEADS = {
    "loss": "loss, mean of the honest nodes (logarithmic)",
    "consensus": "mean squared distance of the honest models from their mean (logarithmic)",
}


def _panel(chart: Chart, k: int) -> dict[str, Any]:
    """A chart: its drawings, the accuracy first, and what the lines are."""
    lowest = "lowest" if chart.groups[0].more_is_better else "highest"
    seeds = max(len(group.runs) for group in chart.groups)
    band = f"; bands from the lowest to the highest of up to {seeds} seeds" if seeds > 1 else ""
    unknown = sum(not run.curves.lowest for group in chart.groups for run in group.runs)
    lost = f" ({count(unknown, 'run')} without nodes.npz: the worst of each round)" if unknown else ""
    return {
        "chart": chart,
        "figures": [
            {"head": _HEADS.get(metric, chart.words), "drawing": drawing.draw(chart, metric, f"chart-{k}")}
            for metric in METRICS
        ],
        "caption": f"solid: mean of the honest nodes; dashed: the node that ends {lowest}{lost}{band}",
    }


# --- tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableCell:
    """What is shown, what it sorts by, and a smaller second line."""

    text: str
    key: float | str
    small: str = ""
    kind: str = ""
    anchor: str = ""

    @property
    def sort_key(self) -> str:
        """The key as the page's script reads it."""
        return (
            repr(float(self.key)).replace("inf", "Infinity")
            if isinstance(self.key, int | float)
            else self.key
        )


def number(value: float, digits: str = ",.0f", small: str = "") -> TableCell:
    """A number as people read it.

    >>> number(0.98765, ".4f").text, number(math.inf).text, number(1234567).text
    ('0.9877', 'overflowed', '1,234,567')
    """
    return TableCell(format(value, digits) if math.isfinite(value) else "overflowed", value, small, "number")


def words(text: str, kind: str = "", small: str = "", anchor: str = "") -> TableCell:
    """Words, by which a column sorts, too."""
    return TableCell(text, text, small, kind, anchor)


def size(count: float, small: str = "") -> TableCell:
    """Bytes."""
    return TableCell(human_bytes(count), count, small, "number")


def _of_groups(groups: Sequence[RunSet]) -> list[dict[str, TableCell]]:
    """One row for each setting: what it ends with over its seeds, what it sent, and whether its plan held."""
    judged = _judged(groups)
    return [
        {
            "setting": words(group.label, "label"),
            "data": words(group.spec.dataset),
            "n": number(group.spec.nodes),
            "b": number(group.spec.byzantine),
            "s": number(group.runs[0].certificate.pull),
            "seeds": number(len(group.runs)),
            **_ends(group, judged),
        }
        for group in groups
    ]


def _of_runs(alone: Sequence[tuple[RunSet, str]]) -> list[dict[str, TableCell]]:
    """One row for each (run as a group of its own, anchor), with a link to its certificate."""
    judged = _judged(group for group, _ in alone)
    return [
        {
            "run": words(group.runs[0].name, "name", anchor=anchor),
            "setting": words(group.label, "label"),
            "seed": number(group.spec.seed, "d"),
            **_ends(group, judged),
        }
        for group, anchor in alone
    ]


def _ends(group: RunSet, judged: Sequence[str]) -> dict[str, TableCell]:
    """What settings and runs both show; ``judged`` are the columns that any of them is judged by."""
    met, b_hat, robustness = (
        group.max_observed,
        group.runs[0].certificate.b_hat,
        group.runs[0].survival.robustness,
    )
    says = {
        Robustness.PROVEN: "survives b_hat",
        Robustness.UNKNOWN: "no bound known",
        Robustness.NONE: "not robust",
    }
    kinds = {Robustness.PROVEN: "held", Robustness.UNKNOWN: "plain", Robustness.NONE: "violated"}
    return {
        "sampling": _sampling(group.runs),
        "rule": words(says[robustness], kinds[robustness]),
        "met/b_hat": TableCell(f"{met} of {b_hat}", met - b_hat, "", "number"),
        **{column(key).short: _over_seeds(group, key) for key in judged},
        "sent": size(group.total("bytes"), f"{group.total('messages'):,.0f} messages"),
        "seconds": number(group.total("seconds"), ",.1f"),
    }


def _judged(groups: Iterable[RunSet]) -> list[str]:
    return list(dict.fromkeys(key for group in groups for key in group.measures))


def _over_seeds(group: RunSet, key: str) -> TableCell:
    if key not in group.measures:
        return words("")
    digits, (mean, low, high) = column(key).digits, group.interval(key)
    if not math.isfinite(mean):
        return number(math.inf, small=f"{count(group.diverged, 'node')} diverged" if group.diverged else "")
    half = f"± {(high - low) / 2:{'.4f' if digits == '.4f' else '.2g'}}"
    return number(mean, digits, half if len(group.runs) > 1 else "")


def _sampling(runs: Sequence[Run]) -> TableCell:
    """Whether the sampling stayed within the plan: green only where the rule is not known to fail."""
    violations = sum(run.certificate.violations_total for run in runs)
    if not all(run.certificate.held for run in runs):
        return TableCell("beyond the plan", violations, times(violations), "violated")
    small = "" if all(run.certificate.guaranteed for run in runs) else "not guaranteed"
    return TableCell("within the plan", 0, small, "held" if all(run.well for run in runs) else "plain")


def _certificate(run: Run, label: str, anchor: str) -> dict[str, Any]:
    """What a run proves, and how to make it again."""
    verdict = "sampling within the plan" if run.certificate.held else "sampling beyond the plan"
    if run.survival.robustness is Robustness.NONE:
        verdict += ", rule not robust"
    if run.diverged:
        verdict += f", {count(run.diverged, 'node')} diverged"
    return {
        "run": run,
        "label": label,
        "anchor": anchor,
        "kind": "held" if run.well else "violated" if not run.certificate.held else "plain",
        "verdict": verdict,
        "command": command(run.spec),
        "histogram": drawing.histogram(run.certificate.histogram, run.certificate.b_hat, anchor),
    }
