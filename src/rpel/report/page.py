"""The page: header, curves, tables, certificates, in one file that needs no other and asks nobody for anything.

Its Content-Security-Policy forbids every request and every script but its own, by hash.
"""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from rpel.plots import COLOURS
from rpel.report import drawing
from rpel.report.collect import Collection, command
from rpel.report.groups import METRICS, Chart, chart_groups, group_runs, stamps
from rpel.runs.certificate import Robustness
from rpel.runs.columns import column
from rpel.runs.record import Run, RunSet
from rpel.text import count, human_bytes, percent, times
from rpel.version import __version__


def page(found: Collection) -> str:
    """The whole page for what was collected. Equal collections give equal text.

    >>> "0 finished runs in 0 settings." in page(Collection((), (), (), ()))
    True
    """
    groups = group_runs(found.runs)
    charts = chart_groups(groups)
    alone = [(RunSet((run,), group.label), f"run-{k}") for k, (group, run) in enumerate(_each(groups))]
    data = [{metric: drawing.values(chart, metric) for metric in METRICS} for chart in charts]
    body = Template(template("report.html")).substitute(
        summary=escape(_summary(found, groups)),
        stamps=_stamps(groups),
        facts=_facts(found, groups),
        trouble=_trouble(found),
        panels="".join(_panel(k, chart) for k, chart in enumerate(charts)),
        tables=_of_groups(groups) + _of_runs(alone) if groups else "",
        proofs="".join(_proof(group.runs[0], group.label, anchor) for group, anchor in alone),
    )
    title = " and ".join(stamps(groups)) + ": " * bool(stamps(groups)) + "rpel report"
    return document(title, body, {"charts": data}, "" if groups else "empty")


def document(title: str, body: str, data: object, kind: str = "") -> str:
    """A page around a body: style and script inside, nothing asked of any other machine."""
    script = template("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(template("document.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=_colours() + template("style.css"),
        script=script,
        data=_embedded(data),
        title=escape(title),
        body=body,
        kind=kind,
    )


def _each(groups: Sequence[RunSet]) -> list[tuple[RunSet, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def template(name: str) -> str:
    """A file of templates/."""
    return (resources.files("rpel.report") / "templates" / name).read_text("utf-8")


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
    white = 0.9 if max(drawing.channels(colour)) < 60 else 0.35
    return drawing.mixed(colour, "#ffffff", white)


# --- parts of the page -----------------------------------------------------------------------------------------------


def _summary(found: Collection, groups: Sequence[RunSet]) -> str:
    parts = [f"{count(sum(len(group.runs) for group in groups), 'finished run')} in {count(len(groups), 'setting')}"]
    violated = sum(not run.certificate.held for _, run in _each(groups))
    if groups:
        parts.append(
            f"the plan was violated in {violated:,}" if violated else "the sampling of all stayed within the plan"
        )
    fragile = sum(group.runs[0].survival.robustness is Robustness.NONE for group in groups)
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


def _stamps(groups: Sequence[RunSet]) -> str:
    """A sentence for each scale that is not the paper's."""
    parts = []
    for word, meaning in _MEANS.items():
        alike = sum(group.stamp == word for group in groups)
        who = "All settings here" if alike == len(groups) else f"{alike} of {len(groups)} settings here"
        if alike:
            parts.append(f'<p class="stamped"><b class="badge">{word}</b> {who} {meaning}.</p>')
    return "".join(parts)


def _facts(found: Collection, groups: Sequence[RunSet]) -> str:
    """Versions and the command that makes the page again, as definition-list rows."""
    versions: dict[str, set[str]] = {}
    for _, run in _each(groups):
        for key, value in run.certificate.versions.items():
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


_HEADS = {
    "loss": "loss, mean of the honest nodes (logarithmic)",
    "consensus": "mean squared distance of the honest models from their mean (logarithmic)",
}


def _panel(at: int, chart: Chart) -> str:
    legend = "".join(
        f'<li><button type="button" aria-pressed="true" data-curve="{k}">{drawing.swatch(k)}'
        f"<span>{escape(group.label)}</span></button></li>"
        for k, group in enumerate(chart.groups)
    )
    readout = '<div class="readout" role="status" hidden></div>'
    accuracy, *others = (
        f"<figure><figcaption>{escape(head)}</figcaption>{drawing.draw(chart, metric)}{readout}</figure>"
        for metric, head in ((metric, _HEADS.get(metric, chart.words)) for metric in METRICS)
    )
    lowest = "lowest" if chart.groups[0].more_is_better else "highest"
    seeds = max(len(group.runs) for group in chart.groups)
    band = f"; bands from the lowest to the highest of up to {seeds} seeds" if seeds > 1 else ""
    unknown = sum(not run.curves.lowest for group in chart.groups for run in group.runs)
    lost = f" ({count(unknown, 'run')} without nodes.npz: the worst of each round)" if unknown else ""
    badge = f' <span class="badge">{escape(chart.stamp)}</span>' if chart.stamp else ""
    return (
        f'<article class="panel" data-panel="{at}"><h3>{escape(chart.title)}{badge}</h3>'
        f'<p class="common">{escape(chart.common)}</p>{accuracy}'
        f'<p class="caption">solid: mean of the honest nodes; dashed: the node that ends {lowest}{lost}{band}</p>'
        f'<ul class="legend" aria-label="curves">{legend}</ul>'
        f'<details class="more"><summary>loss and consensus</summary>{"".join(others)}</details></article>'
    )


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableCell:
    """What is shown, what it sorts by, and a smaller second line."""

    text: str
    key: float | str
    small: str = ""
    kind: str = ""
    anchor: str = ""


def number(value: float, digits: str = ",.0f", small: str = "") -> TableCell:
    """A number as people read it.

    >>> number(0.98765, ".4f").text, number(math.inf).text, number(1234567).text
    ('0.9877', 'overflowed', '1,234,567')
    """
    return TableCell(format(value, digits) if math.isfinite(value) else "overflowed", value, small, "number")


def words(text: str, kind: str = "", small: str = "", anchor: str = "") -> TableCell:
    """Words, by which a column sorts, too."""
    return TableCell(text, text, small, kind, anchor)


def size(count: float) -> TableCell:
    """Bytes."""
    return TableCell(human_bytes(count), count, "", "number")


def _of_groups(groups: Sequence[RunSet]) -> str:
    """One row for each setting: what it ends with over its seeds, what it sent, and whether its plan held."""
    judged = _judged(groups)
    rows = [
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
    return sorting_table("settings", "Settings, over their seeds", rows)


def _of_runs(alone: Sequence[tuple[RunSet, str]]) -> str:
    """One row for each (run as a group of its own, anchor), with a link to its certificate."""
    judged = _judged(group for group, _ in alone)
    rows = [
        {
            "run": words(group.runs[0].name, "name", anchor=anchor),
            "setting": words(group.label, "label"),
            "seed": number(group.spec.seed, "d"),
            **_ends(group, judged),
        }
        for group, anchor in alone
    ]
    return sorting_table("runs", "Runs, one by one", rows)


def _ends(group: RunSet, judged: Sequence[str]) -> dict[str, TableCell]:
    """What settings and runs both show; ``judged`` are the columns that any of them is judged by."""
    met, b_hat, found = group.max_observed, group.runs[0].certificate.b_hat, group.runs[0].survival.robustness
    says = {Robustness.PROVEN: "survives b_hat", Robustness.UNKNOWN: "no bound known", Robustness.NONE: "not robust"}
    kinds = {Robustness.PROVEN: "held", Robustness.UNKNOWN: "plain", Robustness.NONE: "violated"}
    return {
        "sampling": _sampling(group.runs),
        "rule": words(says[found], kinds[found]),
        "met/b_hat": TableCell(f"{met} of {b_hat}", met - b_hat, "", "number"),
        **{column(key).short: _over_seeds(group, key) for key in judged},
        "messages": number(group.total("messages")),
        "bytes": size(group.total("bytes")),
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


def sorting_table(name: str, caption: str, rows: Sequence[Mapping[str, TableCell]]) -> str:
    """A table of rows with equal columns, whose headings sort."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(column)}</button></th>' for column in rows[0]
    )
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="sortable" id="{name}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: TableCell) -> str:
    text = escape(cell.text)
    if cell.anchor:
        text = f'<a href="#{cell.anchor}">{text}</a>'
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    key = repr(float(cell.key)).replace("inf", "Infinity") if isinstance(cell.key, int | float) else cell.key
    return f'<td class="{cell.kind}" data-key="{escape(key)}">{text}{small}</td>'


# --- what a run proves, and how to make it again ---------------------------------------------------------------------

_LISTED = 20  # violations written out; certificate.json has more


def _proof(run: Run, label: str, anchor: str) -> str:
    """The certificate of a run, its command line, versions, threads and data, as a folded section."""
    kind = "held" if run.well else "violated" if not run.certificate.held else "plain"
    says = "sampling within the plan" if run.certificate.held else "sampling beyond the plan"
    if run.survival.robustness is Robustness.NONE:
        says += ", rule not robust"
    if run.edited:
        says += f", edited after it had finished: {escape(', '.join(run.edited))}"
    line = command(run.spec)
    own = "<p>rpel.simulate in Python, with a model or data of its own.</p>"
    pairs = [*run.certificate.versions.items(), ("threads", str(run.certificate.threads)), ("device", run.spec.device)]
    made = ", ".join(f"{key} {value}" for key, value in pairs)
    files = "".join(
        f"<li>{escape(name)} <code>{escape(digest)}</code></li>" for name, digest in run.certificate.data.items()
    )
    parts = {
        "Certificate": _certificate(run),
        "Command": own if line is None else f"<pre><code>{escape(line)}</code></pre>",
        "Made with": f"<p>{escape(made)}</p>",
        "Data, SHA-256": files and f"<ul>{files}</ul>",
    }
    sections = "".join(f"<section><h4>{head}</h4>{body}</section>" for head, body in parts.items() if body)
    return (
        f'<details class="run" id="{anchor}"><summary><span class="name">{escape(run.name)}</span> '
        f'<span class="what">{escape(label)}, seed {run.spec.seed}</span> <span class="{kind}">{says}</span>'
        f'</summary><div class="proof">{sections}</div></details>'
    )


def _certificate(run: Run) -> str:
    """Two statements that must not be taken for one another: what the sampling was, and what the rule survives."""
    p, spec, rule = run.certificate, run.spec, run.survival
    plan = (
        f"each of {spec.nodes - spec.byzantine:,} honest nodes meets at most b_hat = {p.b_hat} hostile peers among "
        f"s = {p.pull} pulled (b_hat/(s+1) = {p.fraction:.4f}), in all of {spec.rounds:,} rounds, with probability "
        f"{percent(p.probability)}; asked for: {percent(p.confidence)}."
    )
    ends = ", ".join(f"{value:.4f}" for value in run.curves.quartiles)
    lowest = "Accuracy of the honest nodes at the end, from lowest to highest by quarters"
    fragile = "violated" if rule.robustness is Robustness.NONE else "plain"
    return (
        f"<p><b>The plan:</b> {escape(plan)} <b>Guarantee:</b> "
        f"{escape(p.guarantee.meaning)}.</p><p><b>The sampling:</b> at most {p.max_observed} were met. "
        f'{_violations(run)}</p><p><b>The rule:</b> <span class="{fragile}">{escape(rule.sentence)}.</span></p>'
        f"{_privacy(run)}<figure>{drawing.histogram(p.histogram, p.b_hat)}"
        "<figcaption>how often a node met that many hostile peers in a round; the line is b_hat</figcaption>"
        f"</figure>{ends and f'<p>{lowest}: {ends}.</p>'}"
    )


def _privacy(run: Run) -> str:
    said = run.certificate.privacy
    if said is None:
        return ""
    return (
        f"<p><b>The privacy:</b> ε is at most {said['epsilon']:.4g} at any honest node, median "
        f"{said['epsilon_median']:.4g}, at δ = {said['delta']:g}: of one example, added or removed, in all that others "
        f"saw. Noise multiplier {said['noise_multiplier']:g}.</p>"
    )


def _violations(run: Run) -> str:
    p = run.certificate
    if p.held:
        return f'<span class="{"held" if run.well else "plain"}">It stayed within the plan.</span>'
    listed = "; ".join(f"round {t:,} node {node:,}: {met:,}" for t, node, met in p.violations[:_LISTED])
    more = "; …" if p.violations_total > _LISTED else ""
    often = times(p.violations_total)
    return f'<span class="violated">The plan was violated {often}</span>: {escape(listed + more)}.'
