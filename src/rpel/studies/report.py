"""The report: run folders on disk as one HTML page, CSV, LaTeX and figures; torch is never imported.

The page loads nothing: pictures are SVG images inside it, and its policy forbids every request and every
script but its own. What comes from disk is escaped. A broken folder is listed and stops nothing. Equal runs
give equal bytes.
"""

import base64
import hashlib
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import groupby, islice
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rpel.runs.certificate import Robustness
from rpel.runs.columns import Role, column
from rpel.runs.folder import RunFolder
from rpel.runs.run import STATISTIC, Run, Runs, spread
from rpel.spec import TO_ALL, Request, compared_fields, load_folder, to_toml
from rpel.studies import plots
from rpel.studies.paper import stamp
from rpel.text import count, human_bytes, percent, times, value_text, visible
from rpel.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

METRICS = ("accuracy", "loss", "consensus")
"""What is drawn; in place of the accuracy another measure, where there are no classes."""
RUN_FILES = {"spec.toml", "metrics.jsonl"}
CHART_FIELDS = ("dataset", "nodes", "byzantine", "pull")
CURVE_FIELDS = ("method", "rule", "attack")
COMMON_FIELDS = ("model", "rounds", "b_hat", "partition", "lr", "batch_size", "local_steps")
MAX_CURVES = 8
MAX_VIOLATIONS = 20
"""Violations that a page lists; certificate.json has more."""


# --- run folders --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unfinished:
    """A run that has not ended, and the rounds done so far."""

    path: Path
    spec: Request
    rounds: int


@dataclass(frozen=True)
class Collection:
    """All run folders under some paths: the finished, the unfinished, and why others cannot be read."""

    tops: tuple[Path, ...] = ()
    runs: tuple[Run, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    broken: Mapping[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Return a path as a page shows it: without the folders of this machine that lie above."""
        top = next((top for top in self.tops if path.is_relative_to(top)), path)
        shown = path if not top.is_absolute() else Path(top.name) / path.relative_to(top)
        return shown.as_posix().encode("utf-8", "replace").decode()


def collect(paths: Iterable[str | Path]) -> Collection:
    """Read every run folder at or under the paths; one that is reached twice counts once.

    >>> collect(["nowhere"])
    Traceback (most recent call last):
    ValueError: there is no folder 'nowhere': give run folders or folders above them
    """
    given, folders = [Path(path) for path in paths], dict[Path, Path]()
    for path in given:
        if not path.is_dir():
            raise ValueError(f"there is no folder {str(path)!r}: give run folders or folders above them")
        below = {folder.resolve(): folder for folder in _folders(path)}
        if not below:
            raise ValueError(f"there is no run in {str(path)!r}: rpel run PRESET --out {path} makes one")
        folders = below | folders
    runs, unfinished, broken = list[Run](), list[Unfinished](), dict[Path, str]()
    for path in sorted(folders.values()):
        try:
            spec, certificate = load_folder(path), RunFolder(path).certificate()
            if certificate is None:
                unfinished.append(Unfinished(path, spec, len(RunFolder(path).metrics())))
                continue
            planned = spec.replace(pull=certificate.pull, b_hat=certificate.b_hat)
            run = Run(planned, path, certificate=certificate)
            _ = run.curve
            runs.append(run)
        except (OSError, ValueError, TypeError, KeyError) as error:
            broken[path] = str(error).replace(f"{path}/", "").replace(str(path), path.name)
    return Collection(tuple(given), tuple(runs), tuple(unfinished), broken)


def _folders(top: Path) -> Iterator[Path]:
    """Yield the run folders at or under a folder; links are followed, circles are not."""
    seen = set()
    for where, folders, files in os.walk(top, followlinks=True):
        here = Path(where)
        if (real := here.resolve()) in seen or RUN_FILES & set(files):
            folders.clear()
        folders.sort()
        if real not in seen and RUN_FILES & set(files):
            yield here
        seen.add(real)


# --- settings -----------------------------------------------------------------------------------------------


def settings(runs: Iterable[Run]) -> list[Runs]:
    """Bring the seeds of each setting together, labelled by what tells it from the others.

    A copy of a run counts once; another run of the same seed with other numbers opens a setting of its own.
    """
    groups, seen = defaultdict[Any, list[Run]](list), defaultdict[Any, list[Run]](list)
    for run in runs:
        fields = run.spec.model_dump(include=set(compared_fields()))
        rounds = tuple(run.curve["round"])
        meaning = (*map(repr, fields.values()), tuple(run.certificate.data.items()), rounds)
        twins = seen[*meaning, run.spec.seed]
        if not any(_numbers(twin) == _numbers(run) for twin in twins):
            groups[*meaning, len(twins)].append(run)
            twins.append(run)
    ordered = [sorted(g, key=lambda run: run.spec.seed) for g in sorted(groups.values(), key=_order)]
    found: list[Runs] = []
    for _, alike in groupby(ordered, key=lambda group: _order(group)[:4]):
        found += labelled(list(alike))
    return found


def labelled(groups: Sequence[Sequence[Run]]) -> tuple[Runs, ...]:
    """Return the runs of each setting with a label that says what is special about it."""
    specs = [group[0].spec for group in groups]
    pairs = zip(map(stamp, specs), labels(specs), strict=True)
    names = (" · ".join(filter(None, pair)) for pair in pairs)
    return tuple(Runs(group, name) for group, name in zip(groups, names, strict=True))


def _numbers(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rows]


def _order(group: Sequence[Run]) -> tuple[Any, ...]:
    spec = group[0].spec
    return (*_sizes(spec), *(str(getattr(spec, key)) for key in CURVE_FIELDS), repr(spec))


def labels(specs: Sequence[Request]) -> list[str]:
    """Return method, rule and attack of each, then whatever else tells them apart; equal ones are numbered.

    >>> labels([Request(lr=0.1), Request(lr=0.2)])
    ['rpel · alie · lr 0.1', 'rpel · alie · lr 0.2']
    """
    known = {"dataset", "nodes", "pull", *CURVE_FIELDS, "b_hat"}
    beside = [key for key in compared_fields() if key not in known]
    telling = [key for key in beside if len({repr(getattr(spec, key)) for spec in specs}) > 1]
    names = [_name(spec, telling) for spec in specs]
    if len(set(longer := [_name(spec, [*telling, "b_hat"]) for spec in specs])) > len(set(names)):
        names = longer
    earlier = [names[:k].count(name) for k, name in enumerate(names)]
    return [name if not k else f"{name} ({k + 1})" for name, k in zip(names, earlier, strict=True)]


def _name(spec: Request, telling: Sequence[str]) -> str:
    others = (f"{key} {value_text(getattr(spec, key))}" for key in telling)
    return visible(" · ".join([spec.method, *filter(None, [spec.rule]), spec.attack, *others]))


@dataclass(frozen=True, eq=False)
class Chart:
    """Settings that are compared: one data set, one number of nodes, attackers and pulls, one measure."""

    title: str
    settings: tuple[Runs, ...]

    @property
    def slug(self) -> str:
        """The title as a file's name has it.

        >>> Chart("mnist: n = 30, b = 6, s = 15", ()).slug
        'mnist-n30-b6-s15'
        """
        return re.sub(r"[^\w.]+", "-", re.sub(r" = ", "", self.title)).strip("-")

    @property
    def stamp(self) -> str:
        """What is written over its curves, if they are not all at the paper's size."""
        words = sorted({stamp(one.spec) for one in self.settings} - {""}, reverse=True)
        partly = "" if all(stamp(one.spec) for one in self.settings) else "partly "
        return partly + " and ".join(words) if words else ""

    @property
    def common(self) -> str:
        """What all settings share: the main fields, and others that are not as usual."""
        specs = [one.spec for one in self.settings]
        words = []
        for key in compared_fields():
            value = getattr(specs[0], key)
            usual = key not in COMMON_FIELDS and value == Request.model_fields[key].default
            if key not in (*CHART_FIELDS, *CURVE_FIELDS) and not usual:
                words += [f"{key} {value_text(value)}"] * all(getattr(spec, key) == value for spec in specs)
        return ", ".join(words)

    @property
    def table(self) -> "DataFrame":
        """The curves of all runs."""
        import pandas

        return pandas.concat([plots.table_of(one.runs, one.label) for one in self.settings])

    def draw(self, metric: str) -> "Figure":
        """Draw one metric against the rounds, with a legend beside the curves."""
        run = self.settings[0].runs[0]
        names, words = plots.ends(run) if metric == "accuracy" else ([metric], [])
        figure, ((axes,),) = plots.canvas(7.0, 3.6 + 0.2 * len(self.settings))
        plots.stamp(axes, self.stamp)
        plots.curves(axes, self.table, names)
        plots.explain(axes, words)
        axes.set(xlabel="round", ylabel=plots.measured(run) if metric == "accuracy" else metric)
        if metric == "accuracy" and run.measure == "accuracy":
            axes.set_ylim(0, 1.02)
        elif metric != "accuracy":
            axes.set_yscale("log")
        axes.set_title(self.title, fontsize=10.5)
        figure.legend(frameon=False, fontsize=9, loc="outside lower left")
        return figure


def charts(groups: Sequence[Runs]) -> list[Chart]:
    """Return the charts of these settings; those in which all nodes are asked join every pull.

    >>> charts([])
    []
    """
    own = defaultdict[Any, list[Runs]](list)
    for group in groups:
        if group.spec.method not in TO_ALL:
            own[_chart_key(group)].append(group)
    for group in groups:
        if group.spec.method in TO_ALL:
            key = _chart_key(group)
            for other in [k for k in own if (k[:3], k[4]) == (key[:3], key[4])] or [key]:
                own[other].append(group)
    return [chart for key, alike in sorted(own.items()) for chart in _split(_title(key), alike)]


def _chart_key(group: Runs) -> tuple[Any, ...]:
    return (*_sizes(group.spec), group.runs[0].measure)


def _sizes(spec: Request) -> tuple[str, int, int, int]:
    """Return what the settings of a chart have in common, as something that can be sorted."""
    return spec.dataset, spec.nodes, spec.hostile_count, spec.pull or 0


def _title(key: tuple[Any, ...]) -> str:
    dataset, nodes, byzantine, pull, measure = key
    title = f"{dataset}: n = {nodes}, b = {byzantine}, s = {pull}"
    return title if measure == "accuracy" else f"{title}, {measure}"


def _split(title: str, alike: Sequence[Runs]) -> Iterator[Chart]:
    """Yield a chart, or several by the field with the fewest values where its curves are too many."""
    keys = [key for key in compared_fields() if key != "b_hat"]
    counts = {key: len({repr(getattr(one.spec, key)) for one in alike}) for key in keys}
    telling = sorted((number, key) for key, number in counts.items() if number > 1)
    if len(alike) <= MAX_CURVES or not telling:
        rest = iter(alike)
        while part := tuple(islice(rest, MAX_CURVES)):
            yield Chart(title, labelled([one.runs for one in part]))
        return
    key = telling[0][1]
    for value in dict.fromkeys(value_text(getattr(one.spec, key)) for one in alike):
        same = [one for one in alike if value_text(getattr(one.spec, key)) == value]
        yield from _split(f"{title}, {key} {value}", same)


# --- comparing two settings ---------------------------------------------------------------------------------


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences and their 95 % t-interval; of two or one their range.

    >>> t_interval([0.25, 0.75])
    (0.5, 0.25, 0.75)
    """
    mean, low, high = spread(values)
    if len(values) < 3 or math.isnan(mean):
        return mean, low, high
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def compared(a: Runs, b: Runs) -> dict[str, Any]:
    """Return what differs between two settings, and differences of their ends, paired by seed."""
    fields = {key: [value_text(getattr(one.spec, key)) for one in (a, b)] for key in compared_fields()}
    runs = [{run.spec.seed: run for run in one.runs} for one in (a, b)]
    seeds = sorted(runs[0].keys() & runs[1].keys())
    run, measures = a.runs[0], [key for key in a.measures if key in b.measures]
    costs = [key for key in run.final if column(key).role is Role.COST]
    rows: dict[str, dict[str, float | None]] = {}
    for key in (*measures, *costs):
        value = Run.end if key in measures else Run.total
        ends = [[value(one, key) for one in each.values()] for each in runs]
        gaps = [value(runs[1][seed], key) - value(runs[0][seed], key) for seed in seeds]
        rows[key] = {"a": spread(ends[0])[0], "b": spread(ends[1])[0]}
        three = t_interval(gaps) if gaps else (None, None, None)
        rows[key] |= dict(zip(("difference", "low", "high"), three, strict=True))
    mean = f"{run.key}_mean"
    one, two = (plots.table_of(each.runs).groupby("round")[mean].mean() for each in (a, b))
    common = sorted(set(one.index) & set(two.index))
    interval = "95 % t-interval" if len(seeds) > 2 else "lowest to highest"
    return {
        "differences": {key: pair for key, pair in fields.items() if pair[0] != pair[1]},
        "seeds": seeds, "interval": interval, "measure": run.measure, "final": rows,
        "curve": [{"round": int(t), "a": float(one[t]), "b": float(two[t])} for t in common],
    }  # fmt: skip


# --- tables for papers --------------------------------------------------------------------------------------


def table_of(groups: Sequence[Runs]) -> "DataFrame":
    """Return a row for each setting, without columns in which all are alike."""
    import pandas

    rows = []
    for group in groups:
        key, spec = group.runs[0].key, group.spec
        row: dict[str, Any] = {"setting": group.label, "data": spec.dataset, "n": spec.nodes}
        row |= {"b": spec.hostile_count, "s": group.certificate.pull, "seeds": len(group)}
        row |= {"measure": group.runs[0].measure}
        for name, end in (("mean", "mean"), ("worst node", "worst")):
            mean, low, high = group.interval(f"{key}_{end}")
            row[name] = f"{mean:.4f}" + (f" ({low:.4f} to {high:.4f})" if len(group) > 1 else "")
        rows.append(row)
    table = pandas.DataFrame(rows)
    measured = any(group.runs[0].measure != "accuracy" for group in groups)
    always = ["setting", "data", *["measure"] * measured, "mean", "worst node"]
    return table[[name for name in table if name in always or table[name].nunique() > 1]]


def latex(table: "DataFrame", best: str = "", about: str = "", index: bool = True) -> str:
    """Return a booktabs table; best="max" sets the best of each column in bold; a missing value is a dash."""
    styler = table.style.format(precision=3, na_rep="--", escape="latex")
    styler = styler.format_index(escape="latex", axis=0).format_index(escape="latex", axis=1)
    if best == "max":
        styler = styler.highlight_max(props="textbf:--rwrap;", axis=0)
    if not index:
        styler = styler.hide(axis="index")
    comments = "".join(f"% {line}\n" for line in (*[about] * bool(about), "needs \\usepackage{booktabs}"))
    return comments + str(styler.to_latex(hrules=True))


def numbers(runs: Sequence[Run]) -> "DataFrame":
    """Return every row of every run, with the fields in which they differ."""
    import pandas

    specs = [run.spec for run in runs]
    telling = [k for k in compared_fields() if len({repr(getattr(spec, k)) for spec in specs}) > 1]
    tables = []
    for run in runs:
        known: dict[str, Any] = {"run": _folder(run), "seed": run.spec.seed}
        known |= {key: value_text(getattr(run.spec, key)) for key in telling}
        table = run.history.assign(**known, held=run.certificate.held)
        tables.append(table[[*known, "held", *run.history.columns]])
    return pandas.concat(tables, ignore_index=True)


# --- the page -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A heading, a sentence below it, and what follows."""

    title: str
    caption: str
    parts: Sequence[Markup]


def page(title: str, about: str, summary: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """Return a page that needs no other file and loads nothing."""
    script, style = (
        (resources.files("rpel.studies") / "templates" / name).read_text("utf-8")
        for name in ("sort.js", "style.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html").render(
        title=title, about=about, summary=summary, facts=facts, sections=sections, digest=digest,
        script=Markup(script), style=Markup(style),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    """Return the templates; whatever is not Markup is text."""
    made = Environment(
        loader=PackageLoader("rpel.studies"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"percent": percent, "times": times}
    return made


def picture(figure: "Figure", about: str) -> Markup:
    """Return a figure as an image inside the page."""
    text = base64.b64encode(plots.svg(figure).encode()).decode()
    return Markup('<img alt="{}" src="data:image/svg+xml;base64,{}">').format(about, text)


def listed(lines: Iterable[str]) -> Markup:
    """Return lines as a list."""
    items = (Markup("<li>{}</li>").format(line) for line in lines)
    return Markup("<ul>{}</ul>").format(Markup("").join(items))


def text(words: str, small: str = "", kind: str = "", link: str = "", key: object = None) -> Markup:
    """Return words as a cell of a table, which sorts by the key or by the words."""
    inside = Markup('<a href="#{}">{}</a>').format(link, words) if link else escape(words)
    inside += Markup("<small>{}</small>").format(small) if small else ""
    return Markup('<td class="{}" data-key="{}">{}</td>').format(kind, words if key is None else key, inside)


def number(
    value: float, digits: str = ",.0f", small: str = "", missing: str = "overflowed", words: str = ""
) -> Markup:
    """Return a number as a cell of a table.

    >>> print(number(0.98765, ".4f"))
    <td class="number" data-key="0.98765">0.9877</td>
    """
    known = math.isfinite(value)
    return text(
        words or (format(value, digits) if known else missing), small, "number", key=value if known else -1
    )


def size(value: float, small: str = "") -> Markup:
    """Return bytes as a cell of a table."""
    return number(value, small=small, words=human_bytes(value))


def table(name: str, rows: Sequence[Mapping[str, Markup]]) -> Markup:
    """Return a table whose headings sort it."""
    head = Markup("").join(
        Markup('<th scope="col" aria-sort="none"><button type="button">{}</button></th>').format(one)
        for one in rows[0]
    )
    body = Markup("\n").join(Markup("<tr>{}</tr>").format(Markup("").join(row.values())) for row in rows)
    whole = Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><table id="{0}"><thead><tr>{1}'
    )
    return (whole + Markup("</tr></thead><tbody>{2}</tbody></table></div>")).format(name, head, body)


ABOUT = (
    "Learning among peers, some of them hostile, with no server: how well the honest nodes learned, and "
    "whether any of them met more hostile peers than planned for."
)
NUMBERS = (
    f"After the last round, on the whole test set: {STATISTIC}. Sent and seconds are sums over all rounds "
    "and seeds. Sampling says whether a node met more hostile peers in a round than planned; rule says "
    "whether the rule survives that many, which plain averaging never does. Press a heading to sort."
)


def of_runs(collection: Collection) -> str:
    """Return the page of what was collected.

    >>> "0 finished runs in 0 settings." in of_runs(Collection())
    True
    """
    groups = settings(collection.runs)
    runs = [(Runs((run,), group.label), f"run-{k}") for k, (group, run) in enumerate(_each(groups))]
    sections = []
    if collection.unfinished:
        lines = []
        for one in collection.unfinished:
            place = collection.place(one.path)
            command = shlex.join(["rpel", "resume", place])
            lines.append(f"{place}: {one.rounds:,} of {one.spec.rounds:,} rounds; go on: {command}")
        sections.append(Section("Unfinished runs", "", [listed(lines)]))
    if collection.broken:
        lines = [f"{collection.place(path)}: {reason}" for path, reason in collection.broken.items()]
        sections.append(Section("Broken run folders", "", [listed(lines)]))
    if groups:
        template = _environment().get_template("run.html")
        details = [
            Markup(
                template.render(run=group.runs[0], anchor=anchor, **_certificate(group.runs[0], group.label))
            )
            for group, anchor in runs
        ]
        tables = [table("settings", _settings(groups)), table("runs", [_row(*one, groups) for one in runs])]
        sections += [
            Section("Curves", f"Lines and bands: {STATISTIC}.", [_curves(chart) for chart in charts(groups)]),
            Section("Numbers", NUMBERS, tables),
            Section("Certificates", "", details),
        ]
    tops = map(collection.place, collection.tops)
    command = shlex.join(["rpel", "report", *tops, "-o", "report.html"])
    facts = {"runs made with": _versions(groups), "page made with": f"rpel {__version__}", "command": command}
    stamps = sorted({stamp(group.spec) for group in groups} - {""}, reverse=True)
    title = f"{' and '.join(stamps)}: rpel report" if stamps else "rpel report"
    return page(title, ABOUT, _summary(collection, groups), facts, sections)


def _each(groups: Sequence[Runs]) -> list[tuple[Runs, Run]]:
    return [(group, run) for group in groups for run in group.runs]


def _folder(run: Run) -> str:
    """Return the name of a run's folder, which need not be Unicode."""
    return "" if run.path is None else run.path.name.encode("utf-8", "replace").decode()


def _summary(collection: Collection, groups: Sequence[Runs]) -> str:
    runs = [run for _, run in _each(groups)]
    violated = sum(not run.certificate.held for run in runs)
    fragile = sum(group.runs[0].survival.robustness is Robustness.NONE for group in groups)
    sampled = f"the plan was violated in {violated:,}" if violated else "all sampling stayed within the plan"
    sentences = {
        f"{count(len(runs), 'finished run')} in {count(len(groups), 'setting')}": True,
        sampled: bool(runs),
        f"nodes have diverged in {sum(run.diverged > 0 for run in runs):,}": any(
            run.diverged for run in runs
        ),
        f"the rule of {count(fragile, 'setting')} is not robust": bool(fragile),
        f"{len(collection.runs) - len(runs):,} more are copies": len(collection.runs) > len(runs),
        f"{len(collection.unfinished):,} unfinished": bool(collection.unfinished),
        f"{len(collection.broken):,} broken": bool(collection.broken),
    }
    return "; ".join(words for words, true in sentences.items() if true) + "."


def _versions(groups: Sequence[Runs]) -> str:
    """Return what made the runs; of many versions their number."""
    versions: dict[str, set[str]] = {}
    for _, run in _each(groups):
        for key, value in run.certificate.versions.items():
            versions.setdefault(key, set()).add(value[:8] if key == "code" else value)
    texts = {k: ", ".join(sorted(v)) if len(v) < 4 else f"in {len(v)} versions" for k, v in versions.items()}
    return "; ".join(f"{key} {words}" for key, words in texts.items())


def _curves(chart: Chart) -> Markup:
    pictures = [picture(chart.draw(metric), f"{chart.title}: {metric} against rounds") for metric in METRICS]
    more = Markup("<details><summary>loss and consensus</summary>{}{}</details>").format(*pictures[1:])
    article = Markup('<article class="chart">{}<p class="caption">{}</p>{}</article>')
    run = chart.settings[0].runs[0]
    lines = "; ".join(
        f"{line}: the {words}" for line, words in zip(("solid", "dashed"), plots.ends(run)[1], strict=True)
    )
    caption = f"{plots.measured(run)}, {lines}; {chart.common}"
    return article.format(pictures[0], caption, more)


def _settings(groups: Sequence[Runs]) -> list[dict[str, Markup]]:
    """Return a row for each setting, without columns in which all are alike."""
    rows = []
    for group in groups:
        spec, seeds = group.spec, number(len(group))
        sizes = {"n": spec.nodes, "b": spec.hostile_count, "s": group.certificate.pull}
        row = {"setting": text(group.label), "data": text(spec.dataset), "seeds": seeds}
        rows.append(
            row | {key: number(value) for key, value in sizes.items()} | _ends(group, _judged(groups))
        )
    constant = ("data", "seeds", "n", "b", "s")
    out = {key for key in constant if len(rows) > 1 and len({row[key] for row in rows}) == 1}
    return [{key: cell for key, cell in row.items() if key not in out} for row in rows]


def _row(group: Runs, anchor: str, groups: Sequence[Runs]) -> dict[str, Markup]:
    """Return the row of one run."""
    row = {
        "run": text(_folder(group.runs[0]), link=anchor),
        "setting": text(group.label),
        "seed": number(group.spec.seed, "d"),
    }
    return row | _ends(group, _judged(groups))


def _judged(groups: Sequence[Runs]) -> list[str]:
    return list(dict.fromkeys(key for group in groups for key in group.measures))


SURVIVES = {
    Robustness.PROVEN: ("survives b_hat", "held"), Robustness.UNKNOWN: ("no bound known", "plain"),
    Robustness.NONE: ("not robust", "violated"),
}  # fmt: skip


def _ends(group: Runs, judged: Sequence[str]) -> dict[str, Markup]:
    """Return the cells that settings and runs share."""
    proof = group.certificate
    words, kind = SURVIVES[group.runs[0].survival.robustness]
    met = number(proof.max_observed - proof.b_hat, words=f"{proof.max_observed} of {proof.b_hat}")
    return {
        "sampling": _sampling(group), "rule": text(words, kind=kind), "met/b_hat": met,
        **{column(key).short: _over_seeds(group, key) for key in judged},
        "sent": size(group.total("bytes"), f"{group.total('messages'):,.0f} messages"),
        "seconds": number(group.total("seconds"), ",.1f"),
    }  # fmt: skip


def _over_seeds(group: Runs, key: str) -> Markup:
    if key not in group.measures:
        return text("")
    digits, (mean, low, high) = column(key).digits, group.interval(key)
    if not math.isfinite(mean):
        return number(math.inf, small=f"{count(group.diverged, 'node')} diverged" if group.diverged else "")
    return number(mean, digits, f"{low:{digits}} to {high:{digits}}" if len(group) > 1 else "")


def _sampling(group: Runs) -> Markup:
    """Say whether the sampling stayed within the plan: green only if the rule is not known to fail."""
    proof = group.certificate
    if not proof.held:
        return text("beyond the plan", times(proof.violations_total), "violated", key=proof.violations_total)
    small = "" if all(run.certificate.guaranteed for run in group) else "not guaranteed"
    return text("within the plan", small, "held" if all(run.well for run in group) else "plain", key=0)


def _certificate(run: Run, label: str) -> dict[str, Any]:
    """Return what a run proves, for its template."""
    proof = run.certificate
    verdict = "sampling within the plan" if proof.held else "sampling beyond the plan"
    verdict += ", rule not robust" if run.survival.robustness is Robustness.NONE else ""
    verdict += f", {count(run.diverged, 'node')} diverged" if run.diverged else ""
    met = ", ".join(f"{k}: {often:,}" for k, often in enumerate(proof.histogram) if often)
    return {
        "label": label, "verdict": verdict, "met": met, "listed": MAX_VIOLATIONS, "toml": to_toml(run.spec),
        "name": _folder(run),
        "kind": "held" if run.well else "plain" if proof.held else "violated",
    }  # fmt: skip
