"""``rpel sweep``: grids of runs in several processes, with a live table."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rpel.cli.display import stderr
from rpel.cli.options import Jobs, Json, TensorBoard
from rpel.experiments.sweep import CellRun, Sweep, read
from rpel.text import duration

_STYLES = {"running": "bold", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
_SHOWN = 24


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="A run file with [grid].", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder for runs and the table. [sweeps/NAME]")] = None,
    jobs: Jobs = None,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Run all combinations of a grid over any fields, several at a time; finished ones are not repeated.

    The file holds preset = "quickstart" and any fields, [grid] with lists such as attack = ["alie", "foe"], and, if you
    like, [[cells]] with combinations of their own. A run that fails does not stop the others.

    Example: rpel sweep attacks.toml --jobs 2
    """
    work = Sweep(read(file), out or Path("sweeps") / file.stem, jobs, tensorboard)
    console = stderr()
    try:
        with Display(console) as display:
            work.run(display.show)
    except KeyboardInterrupt as error:
        console.print(f"rpel: {error or 'interrupted'}", markup=False)
        raise typer.Exit(130) from None
    _print(work, as_json)
    if any(state.status == "failed" for state in work.states):
        raise typer.Exit(1)


class Display:
    """A live table where a person looks, a line for each change where none does."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, transient=True, auto_refresh=False)
        self.said: dict[int, str] = {}
        self.drawn = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def show(self, work: Sweep) -> None:
        """Something may have changed."""
        now = self.console.get_time()
        if self.console.is_terminal and now - self.drawn > 0.25:
            self.drawn = now
            self.live.update(_live(work), refresh=True)
        elif not self.console.is_terminal:
            for i, state in enumerate(work.states):
                if state.status != self.said.get(i, "waiting"):
                    self.said[i] = state.status
                    self.console.print(f"{_head(work)}: {state.cell.label}: {_seen(state)}", markup=False)


def _head(work: Sweep) -> str:
    done = sum(state.status in ("done", "failed") for state in work.states)
    left = work.seconds_left
    return f"{done}/{len(work.states)}" + ("" if left is None or left < 1 else f", {duration(left)} left")


def _seen(state: CellRun) -> str:
    """How a cell stands, in a few words."""
    if state.status == "done" and state.result is not None:
        before = "finished before" if state.reused else f"done in {duration(state.seconds)}"
        return f"{before}, accuracy mean {state.result['accuracy_mean']:.4f} worst {state.result['accuracy_worst']:.4f}"
    return f"{state.status}: {state.error}" if state.error else state.status


def _table(work: Sweep, states: Sequence[CellRun], title: str) -> Table:
    """A row a cell: how it stands, its accuracies, and what there is to say; it fits whatever width there is."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold", min_width=min(max(len(s.cell.label) for s in work.states), 30))
    for column in ("state", "mean", "worst"):
        table.add_column(column, no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=24)
    for state in states:
        found = state.result or {}
        accuracies = [f"{found[key]:.4f}" if key in found else "" for key in ("accuracy_mean", "accuracy_worst")]
        table.add_row(
            Text(state.cell.label), state.status, *accuracies, Text(_words(state)), style=_STYLES[state.status]
        )
    return table


def _words(state: CellRun) -> str:
    """What a cell has to say beside its state."""
    if state.status == "done":
        return "finished before" if state.reused else duration(state.seconds)
    return state.last_line.removeprefix("rpel: ") if state.status == "running" else state.error


def _live(work: Sweep) -> Table:
    """The cells on their way first, then what failed, what ended last and what waits."""
    order = {"running": 0, "failed": 1, "stopped": 1, "done": 2, "waiting": 3}
    states = sorted(work.states, key=lambda state: (order[state.status], -state.begun))
    table = _table(work, states[:_SHOWN], f"sweep {_head(work)}, {work.jobs} at a time")
    if len(states) > _SHOWN:
        table.add_row(f"and {len(states) - _SHOWN} more")
    return table


def _print(work: Sweep, as_json: bool) -> None:
    if as_json:
        print(json.dumps(work.rows(), indent=2))
        return
    console = Console(file=sys.stdout, highlight=False)
    console.print(_table(work, work.states, ""))
    for state in work.states:
        if state.error:
            print(f"{state.cell.label}: {state.error}")
    print(f"table: {work.out / 'sweep.csv'}")
