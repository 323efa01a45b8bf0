"""Tables: of groups over their seeds and of single runs, sorting on the page; as CSV; as LaTeX. All is escaped here."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rpel.config.spec import Spec
from rpel.report.certificates import of_run, well
from rpel.report.collect import Run
from rpel.report.groups import Group
from rpel.simulation.certificate import Robustness
from rpel.simulation.result import Table
from rpel.text import human_bytes, value_text


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
    head = ["setting", "data", "n", "b", "s", "seeds", "mean accuracy", "worst node"]
    rows = [
        [g.label, g.spec.dataset, str(g.spec.nodes), str(g.spec.byzantine), str(g.runs[0].proof.pull), str(len(g.runs))]
        + [_with_interval(g, column) for column in ("accuracy_mean", "accuracy_worst")]
        for g in groups
    ]
    about = "accuracy after the last round; ± half of the 95 % t-interval over seeds, of two seeds half their distance"
    return latex_table(head, rows, about)


def _with_interval(group: Group, column: str) -> str:
    mean, low, high = group.final(column)
    return f"{mean:.4f}" + (f" ± {(high - low) / 2:.4f}" if len(group.runs) > 1 else "")
