"""``rpel sweep``: grids of runs in several processes, with a live table."""

import json
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rpel.cli.reproduce import duration
from rpel.cli.run import TensorBoard
from rpel.experiments.sweep import State, Sweep, read

_STYLES = {"running": "bold", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
_SHOWN = 24


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="A run file with [grid].", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder for runs and the table. [sweeps/NAME]")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores]", min=1)] = None,
    tensorboard: TensorBoard = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Run all combinations of a grid over any fields, several at a time; finished ones are not repeated.

    The file holds preset = "quickstart" and any fields, [grid] with lists such as attack = ["alie", "foe"], and, if you
    like, [[cells]] with combinations of their own. A run that fails does not stop the others.

    Example: rpel sweep attacks.toml --jobs 2
    """
    work = Sweep(read(file), out or Path("sweeps") / file.stem, jobs, tensorboard)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
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
            self.live.update(_table(work), refresh=True)
        elif not self.console.is_terminal:
            for i, state in enumerate(work.states):
                if state.status != self.said.get(i, "waiting"):
                    self.said[i] = state.status
                    self.console.print(f"{_head(work)}: {state.cell.label}: {_seen(state)}", markup=False)


def _head(work: Sweep) -> str:
    done = sum(state.status in ("done", "failed") for state in work.states)
    left = work.seconds_left
    return f"{done}/{len(work.states)}" + ("" if left is None or left < 1 else f", {duration(left)} left")


def _seen(state: State) -> str:
    """How a cell stands, in a few words."""
    if state.status == "done" and state.result is not None:
        before = "finished before" if state.reused else f"done in {duration(state.seconds)}"
        return f"{before}, accuracy mean {state.result['accuracy_mean']:.4f} worst {state.result['accuracy_worst']:.4f}"
    return f"{state.status}: {state.error}" if state.error else state.status


def _table(work: Sweep) -> Table:
    """The cells on their way first, then what failed, what ended last and what waits."""
    table = Table(title=f"sweep {_head(work)}, {work.jobs} at a time", title_justify="left", box=None, pad_edge=False)
    longest = max(len(state.cell.label) for state in work.states)
    for column, width in (("cell", min(longest, 44)), ("state", 7), ("", None)):
        table.add_column(column, no_wrap=True, min_width=width)
    order = {"running": 0, "failed": 1, "stopped": 1, "done": 2, "waiting": 3}
    states = sorted(work.states, key=lambda state: (order[state.status], -state.begun))
    for state in states[:_SHOWN]:
        words = state.last_line if state.status == "running" else _seen(state).removeprefix(f"{state.status}: ")
        table.add_row(state.cell.label, state.status, words, style=_STYLES[state.status])
    if len(states) > _SHOWN:
        table.add_row(f"and {len(states) - _SHOWN} more")
    return table


def _print(work: Sweep, as_json: bool) -> None:
    if as_json:
        print(json.dumps(work.rows(), indent=2))
        return
    width = max(len(state.cell.label) for state in work.states)
    for state in work.states:
        print(f"{state.cell.label:<{width}}  {_seen(state)}")
    print(f"table: {work.out / 'sweep.csv'}")
