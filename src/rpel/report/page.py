"""The page: header, curves, tables, certificates, in one file that needs no other and asks nobody for anything.

Its Content-Security-Policy forbids every request and every script but its own, by hash.
"""

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from rpel.plots import COLOURS
from rpel.report import drawing, tables
from rpel.report.certificates import of_run, proof
from rpel.report.collect import Collection, Run
from rpel.report.groups import METRICS, Chart, Group, chart_groups, group_runs
from rpel.simulation.certificate import Robustness
from rpel.text import count
from rpel.version import __version__


def page(found: Collection) -> str:
    """The whole page for what was collected. Equal collections give equal text.

    >>> "0 finished runs in 0 settings." in page(Collection((), (), (), ()))
    True
    """
    groups = group_runs(found.runs)
    charts = chart_groups(groups)
    named = [(run, group.label, f"run-{k}") for k, (group, run) in enumerate(_each(groups))]
    data = [{metric: drawing.values(chart, metric) for metric in METRICS} for chart in charts]
    body = Template(template("report.html")).substitute(
        summary=escape(_summary(found, groups)),
        stamps=_stamps(groups),
        facts=_facts(found, groups),
        trouble=_trouble(found),
        panels="".join(_panel(k, chart) for k, chart in enumerate(charts)),
        tables=tables.of_groups(groups) + tables.of_runs(named) if groups else "",
        proofs="".join(proof(run, label, anchor) for run, label, anchor in named),
    )
    return document(_title(groups), body, {"charts": data}, "" if groups else "empty")


def document(title: str, body: str, data: object, kind: str = "") -> str:
    """A page around a body: style and script inside, nothing asked of any other machine."""
    script = template("script.js")
    return Template(template("document.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'",
        style=_colours() + template("style.css"),
        script=script,
        data=_embedded(data),
        title=escape(title),
        body=body,
        kind=kind,
    )


def _each(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def template(name: str) -> str:
    """A file of templates/."""
    return (resources.files("rpel.report") / "templates" / name).read_text("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(content: object) -> str:
    """JSON that cannot end the element it stands in.

    >>> _embedded({"label": "</script>"})
    '{"label":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- colours ---------------------------------------------------------------------------------------------------------


def _colours() -> str:
    """The colours of curves as classes, lighter where the page is dark."""
    light = "".join(f"--c{k}:{colour};" for k, colour in enumerate(COLOURS))
    dark = "".join(f"--c{k}:{lighter(colour)};" for k, colour in enumerate(COLOURS))
    classes = "".join(f".c{k}{{--colour:var(--c{k})}}" for k in range(len(COLOURS)))
    screen = f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f":root{{{light}}}{screen}{classes}\n"


def lighter(colour: str) -> str:
    """The colour for a dark page: mixed with white, black turned to nearly white.

    >>> lighter("#0072B2"), lighter("#000000")
    ('#59a3cd', '#e6e6e6')
    """
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    white = 0.9 if max(parts) < 60 else 0.35
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


# --- parts of the page -----------------------------------------------------------------------------------------------


def _summary(found: Collection, groups: Sequence[Group]) -> str:
    parts = [f"{count(sum(len(group.runs) for group in groups), 'finished run')} in {count(len(groups), 'setting')}"]
    violated = sum(not run.proof.held for _, run in _each(groups))
    if groups:
        parts.append(
            f"the plan was violated in {violated:,}" if violated else "the sampling of all stayed within the plan"
        )
    fragile = sum(of_run(group.runs[0]).robustness is Robustness.NONE for group in groups)
    if fragile:
        parts.append(f"the rule of {count(fragile, 'setting')} is not robust")
    copies = len(found.runs) - sum(len(group.runs) for group in groups)
    others = {"more are copies": copies, "unfinished": len(found.unfinished), "broken": len(found.broken)}
    parts += [f"{how_many:,} {words}" for words, how_many in others.items() if how_many]
    return "; ".join(parts) + "."


_MEANS = {
    "SMOKE": "only show that everything works: a small network, a sample of MNIST, a few rounds, one seed",
    "SHORT": "have fewer rounds than the paper's, and one seed",
}


def _title(groups: Sequence[Group]) -> str:
    stamps = sorted({group.stamp for group in groups} - {""}, reverse=True)
    return f"{' and '.join(stamps)}: rpel report" if stamps else "rpel report"


def _stamps(groups: Sequence[Group]) -> str:
    """A sentence for each scale that is not the paper's."""
    parts = []
    for word, meaning in _MEANS.items():
        alike = sum(group.stamp == word for group in groups)
        who = "All settings here" if alike == len(groups) else f"{alike} of {len(groups)} settings here"
        if alike:
            parts.append(f'<p class="stamped"><b class="badge">{word}</b> {who} {meaning}.</p>')
    return "".join(parts)


def _facts(found: Collection, groups: Sequence[Group]) -> str:
    """Versions and the command that makes the page again, as definition-list rows."""
    versions: dict[str, set[str]] = {}
    for _, run in _each(groups):
        for key, value in run.proof.versions:
            versions.setdefault(key, set()).add(value)
    runs = "; ".join(f"{key} {_some(sorted(values))}" for key, values in versions.items())
    again = shlex.join(["rpel", "report", *found.shown, "-o", "report.html"])
    rows = [("runs made with", escape(runs)), ("page made with", f"rpel {escape(__version__)}")]
    rows.append(("again", f"<code>{escape(again)}</code>"))
    return "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in rows if value)


def _some(values: list[str]) -> str:
    """All of a few values, the number of many.

    >>> _some(["a", "b"]), _some(["a", "b", "c", "d"])
    ('a, b', 'in 4 versions (see each run)')
    """
    return ", ".join(values) if len(values) < 4 else f"in {len(values)} versions (see each run)"


def _trouble(found: Collection) -> str:
    """The unfinished and the broken, with what to do about them."""
    waiting = "".join(
        f"<li>{escape(one.place)}: {one.rounds:,} of {one.spec.rounds:,} rounds; go on with "
        f"<code>{escape(shlex.join(['rpel', 'resume', one.place]))}</code></li>"
        for one in found.unfinished
    )
    broken = "".join(f"<li>{escape(one.place)}: {escape(one.reason)}</li>" for one in found.broken)
    parts = [("Unfinished runs", "unfinished", waiting), ("Broken run folders", "broken", broken)]
    return "".join(
        f'<section class="trouble" id="{name}"><h2>{title}</h2><ul>{items}</ul></section>'
        for title, name, items in parts
        if items
    )


def _panel(at: int, chart: Chart) -> str:
    legend = "".join(
        f'<li><button type="button" aria-pressed="true" data-curve="{k}">{drawing.swatch(k)}'
        f"<span>{escape(group.label)}</span></button></li>"
        for k, group in enumerate(chart.groups)
    )
    accuracy, *others = (_figure(chart, metric) for metric in METRICS)
    seeds = max(len(group.runs) for group in chart.groups)
    band = f"; bands from the lowest to the highest of up to {seeds} seeds" if seeds > 1 else ""
    unknown = sum(not run.followed for group in chart.groups for run in group.runs)
    lost = f" ({count(unknown, 'run')} without nodes.npz: the worst of each round)" if unknown else ""
    badge = f' <span class="badge">{escape(chart.stamp)}</span>' if chart.stamp else ""
    return (
        f'<article class="panel" data-panel="{at}"><h3>{escape(chart.title)}{badge}</h3>'
        f'<p class="common">{escape(chart.common)}</p>{accuracy}'
        f'<p class="caption">solid: mean of the honest nodes; dashed: the node that ends lowest{lost}{band}</p>'
        f'<ul class="legend" aria-label="curves">{legend}</ul>'
        f'<details class="more"><summary>loss and consensus</summary>{"".join(others)}</details></article>'
    )


_HEADS = {
    "accuracy": "test accuracy",
    "loss": "loss, mean of the honest nodes (logarithmic)",
    "consensus": "mean squared distance of the honest models from their mean (logarithmic)",
}


def _figure(chart: Chart, metric: str) -> str:
    readout = '<div class="readout" role="status" hidden></div>'
    return f"<figure><figcaption>{_HEADS[metric]}</figcaption>{drawing.draw(chart, metric)}{readout}</figure>"
