"""The page: header, curves, tables, certificates, in one file that needs no other and asks nobody for anything.

Its Content-Security-Policy forbids every request and every script but its own, by hash.
"""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from rpel.plots import COLOURS
from rpel.report import drawing
from rpel.report.collect import Collection, Run, command
from rpel.report.groups import METRICS, Chart, Group, chart_groups, group_runs
from rpel.simulation.certificate import Robustness, Survival, survival
from rpel.text import count, human_bytes, percent
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
        tables=of_groups(groups) + of_runs(named) if groups else "",
        proofs="".join(_proof(run, label, anchor) for run, label, anchor in named),
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


@dataclass(frozen=True)
class TableCell:
    """What is shown, what it sorts by, and a smaller second line."""

    text: str
    key: float | str
    small: str = ""
    kind: str = ""
    anchor: str = ""


def number(value: float, digits: str = ".4f") -> str:
    """A number as people read it.

    >>> number(0.98765), number(math.inf), number(1234567, ",.0f")
    ('0.9877', 'overflowed', '1,234,567')
    """
    return "overflowed" if not math.isfinite(value) else format(value, digits)


def _over_seeds(group: Group, column: str, digits: str = ".4f") -> TableCell:
    mean, low, high = group.final(column)
    if math.isinf(mean):
        return TableCell("overflowed", mean, f"{group.diverged} nodes diverged" if group.diverged else "", "number")
    half = f"± {number((high - low) / 2, '.4f' if digits == '.4f' else '.2g')}"
    return TableCell(number(mean, digits), mean, half if len(group.runs) > 1 else "", "number")


def _plain(value: float, digits: str = ",.0f", small: str = "") -> TableCell:
    return TableCell(number(value, digits), value, small, "number")


def _met(observed: int, b_hat: int) -> TableCell:
    return TableCell(f"{observed} of {b_hat}", observed - b_hat, "", "number")


def _sampling(runs: Sequence[Run]) -> TableCell:
    """The first statement: green only where the second is not known to fail."""
    violations = sum(run.proof.violations_total for run in runs)
    if not all(run.proof.held for run in runs):
        return TableCell(
            "beyond the plan", violations, "once" if violations == 1 else f"{violations:,} times", "violated"
        )
    small = "" if all(run.proof.guaranteed for run in runs) else "not guaranteed"
    return TableCell("within the plan", 0, small, "held" if all(map(well, runs)) else "plain")


def _survives(run: Run) -> TableCell:
    """The second statement."""
    words = {Robustness.PROVEN: "survives b_hat", Robustness.UNKNOWN: "no bound known", Robustness.NONE: "not robust"}
    found = of_run(run)
    return TableCell(words[found.robustness], words[found.robustness], "", _KINDS[found.robustness])


_KINDS = {Robustness.PROVEN: "held", Robustness.UNKNOWN: "plain", Robustness.NONE: "violated"}


def of_groups(groups: Iterable[Group]) -> str:
    """One row for each setting: what it ends with over its seeds, what it sent, and whether its plan held."""
    columns: dict[str, Callable[[Group], TableCell]] = {
        "setting": lambda s: TableCell(s.label, s.label, "", "label"),
        "data": lambda s: TableCell(s.spec.dataset, s.spec.dataset),
        "n": lambda s: _plain(s.spec.nodes),
        "b": lambda s: _plain(s.spec.byzantine),
        "s": lambda s: _plain(s.runs[0].proof.pull),
        "seeds": lambda s: _plain(len(s.runs)),
        "sampling": lambda s: _sampling(s.runs),
        "rule": lambda s: _survives(s.runs[0]),
        "met/b_hat": lambda s: _met(s.max_observed, s.runs[0].proof.b_hat),
        "mean": lambda s: _over_seeds(s, "accuracy_mean"),
        "worst": lambda s: _over_seeds(s, "accuracy_worst"),
        "median": lambda s: _over_seeds(s, "accuracy_median"),
        "loss": lambda s: _over_seeds(s, "loss", ".4g"),
        "consensus": lambda s: _over_seeds(s, "consensus", ".3g"),
        "messages": lambda s: _plain(s.total("messages")),
        "bytes": lambda s: TableCell(human_bytes(s.total("bytes")), s.total("bytes"), "", "number"),
        "seconds": lambda s: _plain(s.total("seconds"), ",.1f"),
    }
    return sorting_table("settings", "Settings, over their seeds", columns, groups)


def of_runs(runs: Iterable[tuple[Run, str, str]]) -> str:
    """One row for each (run, label, anchor), with a link to its certificate."""
    columns: dict[str, Callable[[tuple[Run, str, str]], TableCell]] = {
        "run": lambda r: TableCell(r[0].folder, r[0].folder, "", "name", r[2]),
        "setting": lambda r: TableCell(r[1], r[1], "", "label"),
        "seed": lambda r: _plain(r[0].spec.seed, "d"),
        "sampling": lambda r: _sampling([r[0]]),
        "rule": lambda r: _survives(r[0]),
        "met/b_hat": lambda r: _met(r[0].proof.max_observed, r[0].proof.b_hat),
        "mean": lambda r: _plain(r[0].final("accuracy_mean"), ".4f"),
        "worst": lambda r: _plain(r[0].final("accuracy_worst"), ".4f"),
        "median": lambda r: _plain(r[0].final("accuracy_median"), ".4f"),
        "loss": lambda r: _plain(r[0].final("loss"), ".4g"),
        "consensus": lambda r: _plain(r[0].final("consensus"), ".3g"),
        "messages": lambda r: _plain(r[0].total("messages")),
        "bytes": lambda r: TableCell(human_bytes(r[0].total("bytes")), r[0].total("bytes"), "", "number"),
        "seconds": lambda r: _plain(r[0].total("seconds"), ",.1f"),
    }
    return sorting_table("runs", "Runs, one by one", columns, runs)


def sorting_table(
    name: str, caption: str, columns: dict[str, Callable[[Any], TableCell]], things: Iterable[Any]
) -> str:
    """A table with a row a thing, whose headings sort."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(column)}</button></th>' for column in columns
    )
    body = "".join("<tr>" + "".join(_cell(make(thing)) for make in columns.values()) + "</tr>" for thing in things)
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


_LISTED = 20  # violations written out; certificate.json has more


def of_run(run: Run) -> Survival:
    """What the run's rule survives."""
    return survival(run.spec.rule or "its own rule", run.proof.pull, run.proof.b_hat)


def well(run: Run) -> bool:
    """Shown in green: as the run left it, the sampling within a plan that applies, the rule not known to be fragile."""
    return not run.edited and run.proof.held and run.proof.guaranteed and of_run(run).robustness is not Robustness.NONE


# --- a run's section -------------------------------------------------------------------------------------------------


def _proof(run: Run, label: str, anchor: str) -> str:
    """The certificate of a run, its command line, versions, threads and data, as a folded section."""
    kind = "held" if well(run) else "violated" if not run.proof.held else "plain"
    words = "sampling within the plan" if run.proof.held else "sampling beyond the plan"
    if of_run(run).robustness is Robustness.NONE:
        words += ", rule not robust"
    if run.edited:
        words += f", edited after it had finished: {escape(', '.join(run.edited))}"
    parts = [_proven(run), _command(run), _made_with(run), _checksums(run)]
    return (
        f'<details class="run" id="{anchor}"><summary><span class="name">{escape(run.folder)}</span> '
        f'<span class="what">{escape(label)}, seed {run.spec.seed}</span> <span class="{kind}">{words}</span>'
        f'</summary><div class="proof">{"".join(parts)}</div></details>'
    )


def _proven(run: Run) -> str:
    p, spec, rule = run.proof, run.spec, of_run(run)
    honest = spec.nodes - spec.byzantine
    plan = (
        f"each of {honest:,} honest nodes meets at most b_hat = {p.b_hat} hostile peers among s = {p.pull} pulled "
        f"(b_hat/(s+1) = {p.fraction:.4f}), in all of {spec.rounds:,} rounds, with probability "
        f"{percent(p.probability)}; asked for: {percent(p.confidence)}."
    )
    ends = ", ".join(f"{value:.4f}" for value in run.quartiles)
    nodes = (
        f"<p>Accuracy of the honest nodes at the end, from lowest to highest by quarters: {ends}.</p>" if ends else ""
    )
    fragile = "violated" if rule.robustness is Robustness.NONE else "plain"
    return (
        f"<section><h4>Certificate</h4><p><b>The plan:</b> {escape(plan)} <b>Guarantee:</b> "
        f"{escape(p.guarantee.meaning)}.</p><p><b>The sampling:</b> at most {p.max_observed} were met. "
        f'{_violations(run)}</p><p><b>The rule:</b> <span class="{fragile}">{escape(rule.sentence)}.</span></p>'
        f"<figure>{drawing.histogram(p.histogram, p.b_hat)}"
        "<figcaption>how often a node met that many hostile peers in a round; the line is b_hat</figcaption>"
        f"</figure>{nodes}</section>"
    )


def _violations(run: Run) -> str:
    p = run.proof
    if p.held:
        return f'<span class="{"held" if well(run) else "plain"}">It stayed within the plan.</span>'
    listed = "; ".join(f"round {t:,} node {node:,}: {count:,}" for t, node, count in p.violations[:_LISTED])
    more = "; …" if p.violations_total > _LISTED else ""
    times = "once" if p.violations_total == 1 else f"{p.violations_total:,} times"
    return f'<span class="violated">The plan was violated {times}</span>: {escape(listed + more)}.'


def _command(run: Run) -> str:
    line = command(run.spec)
    if line is None:
        return "<section><h4>Command</h4><p>rpel.simulate in Python, with a model or data of its own.</p></section>"
    return f"<section><h4>Command</h4><pre><code>{escape(line)}</code></pre></section>"


def _made_with(run: Run) -> str:
    pairs = [*run.proof.versions, ("threads", str(run.proof.threads)), ("device", run.spec.device)]
    text = ", ".join(f"{key} {value}" for key, value in pairs)
    return f"<section><h4>Made with</h4><p>{escape(text)}</p></section>"


def _checksums(run: Run) -> str:
    rows = "".join(f"<li>{escape(name)} <code>{escape(digest)}</code></li>" for name, digest in run.proof.data)
    return f"<section><h4>Data, SHA-256</h4><ul>{rows}</ul></section>" if rows else ""
