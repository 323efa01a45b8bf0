"""Share what several commands need: options, each declared once, and output.

Tables and results go to stdout, progress and warnings to stderr.
"""

import json
import logging
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from rpel.text import ends, human_bytes, percent, times
from rpel.types import Guarantee

if TYPE_CHECKING:
    from rich.live import Live

    from rpel.simulation.loop import Tick


class NamesInHelp(TyperCommand):
    """A command whose help ends with the names of rules and attacks.

    The names are looked up only then, because importing numba is slow.
    """

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from rpel import attacks
        from rpel.rules import registry as rules

        formatter.write_paragraph()
        with formatter.section("Rules, joined by + into chains such as nnm+median"):
            formatter.write_text(", ".join(name for name, _ in rules.about()))
        with formatter.section("Attacks"):
            formatter.write_text(", ".join(name for name, _ in attacks.about()))


# --- results ------------------------------------------------------------------------------------------------


def stdout(wrap: bool = False) -> Console:
    """Where results go: broken between words where a person looks, else whole lines unless so asked."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not (wrap or sys.stdout.isatty()))


def printed(content: Any, as_json: bool, indent: int | None = 2, ensure_ascii: bool = True) -> bool:
    """Print the results, records among them, as JSON if that was asked for; whether it was."""
    if as_json:
        text = json.dumps(_finite(content), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
        print(text, flush=True)
    return as_json


def _finite(content: Any) -> Any:
    """The same as JSON knows it: records as tables, a number that overflowed as null.

    >>> _finite({"loss": float("inf"), "rounds": (1, 2.5)})
    {'loss': None, 'rounds': [1, 2.5]}
    """
    if is_dataclass(content) and not isinstance(content, type):
        content = asdict(content)
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_pairs(rows: Collection[tuple[str, str]]) -> None:
    """Print names and descriptions.

    On a terminal the lines are broken between words; elsewhere each pair is one line.
    """
    indent = max((len(name) for name, _ in rows), default=0) + 2
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, about in rows:
        text = _folded(about, max(columns - indent, 30)) if columns else about
        print(f"{name:<{indent}}" + text.replace("\n", f"\n{' ' * indent}"))


def _folded(text: str, width: int) -> str:
    """Text in lines of that width, broken between words only."""
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def table(
    *columns: str, right: Collection[str] = (), fold: Collection[str] = (), title: str | None = None
) -> Table:
    """A table without lines; numbers stand right in one piece, words may be folded."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        number = name in right
        made.add_column(name, justify="right" if number else "left", no_wrap=number)
        made.columns[-1].overflow = "fold" if name in fold else "ellipsis"
    return made


# --- progress -----------------------------------------------------------------------------------------------


def stderr() -> Console:
    """Where progress and warnings go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(sentence: str) -> None:
    """A sentence on stderr, as rpel says it; broken between words only, where a person looks."""
    text = f"rpel: {sentence}"
    text = _folded(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text
    print(text, file=sys.stderr, flush=True)


LONG = 600.0
"""Seconds of a run from which on a log is told of its tenths."""


@contextmanager
def live(console: Console, transient: bool = False) -> "Iterator[Live | None]":
    """A place for a table that changes, where a person looks; None where none does."""
    if not console.is_terminal:
        yield None
        return
    from rich.live import Live

    with Live(console=console, transient=transient, auto_refresh=False) as shown:
        yield shown


class _Sentences(logging.Handler):
    """Hands on what is logged: what happens, with the level where it is more than that."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        with suppress(OSError, ValueError):  # a terminal that is gone ends nothing
            self.tell(f"{level}{self.format(record)}")


@contextmanager
def heard(tell: Callable[[str], None] = say) -> Iterator[None]:
    """Inside, what rpel logs is told."""
    log, handler = logging.getLogger("rpel"), _Sentences(tell)
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def interruptible(tell: Callable[[str], None] = say) -> Iterator[None]:
    """Inside, Ctrl-C ends the command with status 130 and its sentence, which typer would swallow."""
    try:
        yield
    except KeyboardInterrupt as error:
        tell(str(error) or "interrupted")
        raise typer.Exit(130) from None


class RunDisplay:
    """Show the progress of runs.

    On a terminal each run has a bar with the time left (``one``: only the newest run); elsewhere a plain line
    is printed after every tenth of a run.
    """

    def __init__(self, console: Console, one: bool = False) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console, self.bar, self.one = console, BarColumn(bar_width=24), one
        label, done, seen = (TextColumn(f"{{task.{key}}}", markup=False) for key in _TEXTS)
        left = TimeRemainingColumn(compact=True)
        self.bars = Progress(label, done, self.bar, left, seen, console=console, transient=True)
        self.tasks = {"": self.bars.add_task("starting", total=None, done="", seen="")}

    def say(self, sentence: str) -> None:
        """A sentence above the bars, broken between words only, so that paths can be copied."""
        folded = _folded(sentence, self.console.width) if self.console.is_terminal else sentence
        self.console.print(folded, markup=False)

    def tick(self, t: "Tick") -> None:
        """A round is done."""
        if self.console.is_terminal:
            done = f"round {t.round}/{t.rounds}"
            self.update(f"{t.name}, seed {t.seed}", t.round, t.rounds, _seen(t), done)
        elif t.tenth:
            self.say(t.sentence)

    def download(self, name: str, done: int, total: int | None) -> None:
        """Some bytes of a file came."""
        if self.console.is_terminal:
            size = human_bytes(done) + ("" if total is None else f" of {human_bytes(total)}")
            self.update(f"downloading {name}", done, total, "", size)
        elif total is not None and done == total:
            self.say(f"downloaded {name}, {human_bytes(done)}")

    def update(self, label: str, done: int, total: int | None, seen: str, words: str = "") -> None:
        """Update the bar with that label.

        The bar gets the room that the words leave; a long label is cut before they are.
        """
        for old in [key for key in self.tasks if key == "" or (self.one and key != label)]:
            self.bars.remove_task(self.tasks.pop(old))
        words = words or f"{done}/{total}"
        # room for the time left and a space between columns
        room = self.console.width - len(words) - len(seen) - 5 - 4
        if label not in self.tasks:
            self.tasks[label] = self.bars.add_task(label, total=total, done=words, seen=seen)
        short = label if len(label) <= room - 6 else f"{label[: max(room - 7, 8)]}…"
        self.bar.bar_width = min(max(room - len(short), 6), 24)
        self.bars.update(self.tasks[label], description=short, completed=done, done=words, seen=seen)


_TEXTS = ("description", "fields[done]", "fields[seen]")


def _seen(t: "Tick") -> str:
    """The worst accuracy and the hostile peers, short: a line of 80 columns has room for no more."""
    hostile = f"hostile {t.byzantine_max} of {t.b_hat}"
    return hostile if t.accuracy_worst is None else f"worst {t.accuracy_worst:.3f}  {hostile}"


@contextmanager
def display(one: bool = False) -> Iterator[RunDisplay]:
    """Show progress on stderr, with the messages of the run and how to continue after an interrupt."""
    shown = RunDisplay(stderr(), one)

    def tell(sentence: str) -> None:
        shown.say(f"rpel: {sentence}")

    with shown.bars if shown.console.is_terminal else nullcontext(), heard(tell), interruptible(tell):
        yield shown


# --- a run --------------------------------------------------------------------------------------------------


def show_run(run: Mapping[str, Any]) -> None:
    """The end of a run, or of several seeds, in a short table."""
    print_pairs(_run_rows(run))


def _run_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    from rpel.runs.certificate import survival
    from rpel.runs.columns import column

    seeds = f", {len(run['runs'])} seeds" if "runs" in run else f", seed {run['seed']}"
    hostile = f"{run['byzantine']:,} of {run['nodes']:,} nodes hostile"
    rows = [(run["name"], f"{run['method']} with {run['rule']} against {run['attack']}, {hostile}{seeds}")]
    rows += [(column(key).label, _measure(run, key)) for key in run["measures"]]
    if run.get("output_accuracy_mean") is not None:
        rows.append(("models kept", f"{ends(run, 'output_accuracy')}: each of a round drawn for its node"))
    if run.get("diverged"):
        honest = run["nodes"] - run["byzantine"]
        rows.append(("diverged", f"{run['diverged']:,} of {honest:,} honest nodes: training has failed"))
    proof = run["certificate"]
    beyond = f"beyond the plan {times(proof['violations_total'])}: see certificate.json"
    planned = f"b_hat {run['b_hat']} of pull {run['pull']}, {percent(run['probability'])}"
    verdict = "within the plan" if proof["held"] else beyond
    rows.append(("hostile peers met", f"at most {proof['max_observed']}; planned for {planned}: {verdict}"))
    if (guarantee := Guarantee(proof["guarantee"])) is not Guarantee.PLAN:
        rows.append(("guarantee", guarantee.meaning))
    rows.append(("rule", survival(run["rule"], run["pull"], run["b_hat"]).sentence))
    if spent := proof.get("privacy"):
        most = f"at most {spent['epsilon']:.4g} at any honest node, median {spent['epsilon_median']:.4g}"
        noise = f"delta {spent['delta']:g}, noise multiplier {spent['noise_multiplier']:g}"
        rows.append(("epsilon", f"{most} ({noise})"))
    sent = f"{run['messages']:,} models, {human_bytes(run['bytes'])} a round; {run['rounds']:,} rounds"
    rows += [("messages", sent), ("seconds", f"{run['seconds']:.1f}")]
    if run["path"] is not None:
        folders = [one["path"] for one in run.get("runs", [run])]
        rows += [("kept in" if i == 0 else "", folder) for i, folder in enumerate(folders)]
    return rows


def _measure(run: Mapping[str, Any], key: str) -> str:
    """A number after the last round, with its interval over the seeds where there are several."""
    if run[key] is None:
        return "overflowed"
    from rpel.runs.columns import column

    text = format(run[key], column(key).digits)
    if "intervals" not in run:
        return text
    low, high = (run["intervals"][key][end] for end in ("low", "high"))
    kind = "95 % t-interval" if len(run["runs"]) > 2 else "both seeds"
    return f"{text}  ({kind}: {low:.4g} to {high:.4g})"
