"""What commands share: options, each declared once; progress on stderr, results on stdout."""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand

from rpel.simulation.certificate import survival
from rpel.text import human_bytes, percent
from rpel.types import Guarantee

if TYPE_CHECKING:
    from rpel.simulation.run import Tick


Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write the metrics for TensorBoard.")]
Nodes = Annotated[int, typer.Option("--nodes", "--peers", help="Number of nodes, n.")]
Byzantine = Annotated[int, typer.Option(help="How many of them may be hostile, b.")]
Rounds = Annotated[int, typer.Option(help="Rounds of the whole training, T.")]
Plot = Annotated[Path | None, typer.Option(help="Draw to this file (.svg, .png, .pdf).")]
DataDir = Annotated[str | None, typer.Option(help="Folder with the data sets.")]
Threads = Annotated[int | None, typer.Option(help="Threads (unset: as many as cores).", min=1)]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores]", min=1)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before a long run.")]
Members = Annotated[Path, typer.Option(help="The network's members.toml.", show_default="members.toml")]
Settings = Annotated[Path, typer.Option(help="The settings of the member that asks.")]

ALIASES = {"nodes": "--peers", "attack_params": "--param"}
"""Second names of options made from a run's fields."""


class NamesInHelp(TyperCommand):
    """A command whose help ends with the names of rules and attacks; they are looked up only there (numba is slow)."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from rpel.aggregation import registry as rules
        from rpel.attacks import registry as attacks

        formatter.write_paragraph()
        with formatter.section("Rules, joined by + into chains such as nnm+median"):
            formatter.write_text(", ".join(name for name, _ in rules.about()))
        with formatter.section("Attacks"):
            formatter.write_text(", ".join(name for name, _ in attacks.about()))


def stdout() -> Console:
    """Where results go: plain, never broken lines."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Where progress and warnings go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


_ASK_FROM = 600.0
"""Seconds from which a person at a terminal is asked."""


def agreed(seconds: float, yes: bool, console: Console) -> bool:
    """Whether to begin: a person who would wait long is asked, a script never is."""
    if yes or seconds < _ASK_FROM or not (sys.stdin.isatty() and console.is_terminal):
        return True
    return typer.confirm("Begin? (it can be interrupted and goes on with the same command)", default=True, err=True)


class RunDisplay:
    """Progress of runs: a bar with the time left where a person looks, a plain line every tenth where none does."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, TextColumn("{task.fields[seen]}"), console=console, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bars.start()
            self.tasks[""] = self.bars.add_task("starting", total=None, seen="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def say(self, sentence: str) -> None:
        """A sentence above the bars."""
        self.console.print(sentence, markup=False)

    def tick(self, t: "Tick") -> None:
        """A round is done."""
        if self.console.is_terminal:
            self._update(f"{t.name}, seed {t.seed}", t.round, t.rounds, _seen(t))
        elif t.round == t.rounds or t.round * 10 // t.rounds > (t.round - 1) * 10 // t.rounds:
            self.say(f"{t.name}, seed {t.seed}: round {t.round}/{t.rounds}  {_seen(t)}")

    def download(self, name: str, done: int, total: int | None) -> None:
        """Some bytes of a file came."""
        if self.console.is_terminal:
            size = human_bytes(done) + ("" if total is None else f" of {human_bytes(total)}")
            self._update(f"downloading {name}", done, total, size)
        elif total is not None and done == total:
            self.say(f"downloaded {name}, {human_bytes(done)}")

    def _update(self, label: str, done: int, total: int | None, seen: str) -> None:
        if "" in self.tasks:
            self.bars.remove_task(self.tasks.pop(""))
        if label not in self.tasks:
            self.tasks[label] = self.bars.add_task(label, total=total, seen=seen)
        self.bars.update(self.tasks[label], completed=done, seen=seen)


def _seen(t: "Tick") -> str:
    hostile = f"hostile met {t.byzantine_max}, planned for {t.b_hat}"
    if t.accuracy_mean is None or t.accuracy_worst is None:
        return hostile
    return f"accuracy mean {t.accuracy_mean:.4f} worst {t.accuracy_worst:.4f}  {hostile}"


class _Handler(logging.Handler):
    """Hands what the run says to the display."""

    def __init__(self, display: RunDisplay) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        self.display.say(f"rpel: {kind}{record.getMessage()}")


@contextmanager
def display() -> Iterator[RunDisplay]:
    """A progress display on stderr that also shows what the run has to say, and how to go on after an interrupt."""
    log = logging.getLogger("rpel")
    with RunDisplay(stderr()) as shown:
        handler = _Handler(shown)
        before = log.level
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield shown
        except KeyboardInterrupt as error:  # typer would swallow the message
            shown.say(f"rpel: {error or 'interrupted'}")
            raise typer.Exit(130) from None
        finally:
            log.removeHandler(handler)
            log.setLevel(before)


def show_run(console: Console, found: Mapping[str, Any]) -> None:
    """The end of a run, or of several seeds, in a short table; lines are never broken, so paths can be copied."""
    for label, text in _run_rows(found):
        console.print(f"[bold]{label:<19}[/]{escape(text)}")


def _run_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    seeds = f", {len(found['runs'])} seeds" if "runs" in found else f", seed {found['seed']}"
    hostile = f"{found['byzantine']:,} of {found['nodes']:,} nodes hostile"
    rows = [(found["name"], f"{found['method']} with {found['rule']} against {found['attack']}, {hostile}{seeds}")]
    for key in ("accuracy_mean", "accuracy_worst", "accuracy_median", "loss", "consensus"):
        text = (
            "overflowed" if found[key] is None else format(found[key], ".4g" if key in ("loss", "consensus") else ".4f")
        )
        if found[key] is not None and "intervals" in found:
            low, high = (found["intervals"][key][end] for end in ("low", "high"))
            kind = "95 % t-interval" if len(found["runs"]) > 2 else "both seeds"
            text += f"  ({kind}: {low:.4g} to {high:.4g})"
        rows.append((key.replace("_", " "), text))
    proof = found["certificate"]
    times = f"{proof['violations_total']:,} times" if proof["violations_total"] != 1 else "once"
    verdict = "within the plan" if proof["held"] else f"beyond the plan {times}: see certificate.json"
    planned = f"b_hat {found['b_hat']} of pull {found['pull']} ({percent(found['probability'])})"
    rows.append(("hostile peers met", f"at most {proof['max_observed']}; planned for {planned}: {verdict}"))
    if (guarantee := Guarantee(proof["guarantee"])) is not Guarantee.PLAN:
        rows.append(("guarantee", guarantee.meaning))
    rows.append(("rule", survival(found["rule"], found["pull"], found["b_hat"]).sentence))
    sent = f"{found['messages']:,} models, {human_bytes(found['bytes'])} a round; {found['rounds']:,} rounds"
    rows += [("messages", sent), ("seconds", f"{found['seconds']:.1f}")]
    if found["path"] is not None:
        folders = [run["path"] for run in found.get("runs", [found])]
        rows += [("kept in" if i == 0 else "", folder) for i, folder in enumerate(folders)]
    return rows
