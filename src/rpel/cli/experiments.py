"""``rpel sweep``, ``arena`` and ``reproduce``: many runs, and what is made of them."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.experiments.sweep import CellRun, Sweep, Watch, checked, read
from rpel.text import count, duration, ends, number

if TYPE_CHECKING:
    from rpel.cli.terminal import RunDisplay
    from rpel.experiments.reproduce import Work
    from rpel.spec import Spec

_STYLES = {"running": "bold", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
_SHOWN = 24
ARENA = Path("arena")


@opt.described
def sweep(
    file: Path, out: Path | None = None, jobs: opt.Jobs = None, engine: opt.Engine = "local",
    address: opt.Address = None, reuse: opt.Reuse = False, tensorboard: opt.TensorBoard = False,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Run all combinations of a grid over any fields, several at a time; finished ones are not repeated.

    The file holds preset = "quickstart" and any fields, [grid] with lists such as attack = ["alie", "foe"],
    and, if you like, [[cells]] with combinations of their own. The whole grid is checked first; a run that
    fails does not stop the others.

    Example: rpel sweep attacks.toml --jobs 2

    Arguments:
        file (FILE.toml): A run file with [grid].

    Options:
        out: Folder for runs and the table. [sweeps/NAME]
    """
    grid = checked(read(file))
    with _engine(engine, address) as ray, terminal.interruptible(), _watching(terminal.stderr()) as watch:
        work = Sweep(grid, out or Path("sweeps") / file.stem, jobs, tensorboard, ray, reuse)
        work.run(watch)
    if not terminal.printed(work.rows(), as_json):
        terminal.stdout(wrap=True).print(_table(work, work.states, ""))
        for state in work.states:
            if state.error:
                print(f"{state.cell.label}: {state.error}")
        print(f"table: {work.out / 'sweep.csv'}")
    if any(state.status == "failed" for state in work.states):
        raise typer.Exit(1)


@contextmanager
def _engine(name: str, address: str | None) -> Iterator[Any]:
    """The module ray, connected, where it is to run the cells as its tasks; None where they run here."""
    if name not in ("local", "ray"):
        raise ValueError(f"engine {name!r} is unknown: it is local or ray")
    if name == "local":
        yield None
        return
    from rpel.backend.pool import threads
    from rpel.integrations.ray import connected

    with connected(address, threads()) as ray:
        yield ray


@contextmanager
def _watching(console: Console) -> Iterator[Watch]:
    """A live table where a person looks, a line for each change where none does."""
    shown_states: dict[int, str] = {}
    drawn = 0.0
    with terminal.live(console, transient=True) as shown:

        def watch(work: Sweep) -> None:
            nonlocal drawn
            if shown is None:
                for i, state in enumerate(work.states):
                    if state.status != shown_states.get(i, "waiting"):
                        shown_states[i] = state.status
                        console.print(f"{_head(work)}: {state.cell.label}: {_seen(state)}", markup=False)
            elif (now := console.get_time()) - drawn > 0.25:
                drawn = now
                shown.update(_live(work), refresh=True)

        yield watch


def _head(work: Sweep) -> str:
    done = sum(state.status in ("done", "failed") for state in work.states)
    left = work.seconds_left
    return f"{done}/{len(work.states)}" + ("" if left is None or left < 1 else f", {duration(left)} left")


def _seen(state: CellRun) -> str:
    """How a cell stands, in a few words."""
    if state.status == "done" and state.result is not None:
        before = "finished before" if state.reused else f"done in {duration(state.seconds)}"
        return f"{before}, accuracy {ends(state.result)}"
    return f"{state.status}: {state.error}" if state.error else state.status


def _table(work: Sweep, states: Sequence[CellRun], title: str) -> Table:
    """A row a cell: how it stands, its accuracies, and what there is to say;
    it fits whatever width there is."""
    table = terminal.table("cell", "state", "mean", "worst", "", fold=("cell",), title=title)
    table.columns[0].min_width = min(max(len(s.cell.label) for s in work.states), 30)
    table.columns[-1].max_width = 24
    for column in table.columns[1:]:
        column.no_wrap = True
    for state in states:
        result = state.result or {}
        accuracies = [number(result.get(f"accuracy_{end}"), ".4f") for end in ("mean", "worst")]
        name, words = Text(state.cell.label), Text(_words(state))
        table.add_row(name, state.status, *accuracies, words, style=_STYLES[state.status])
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


# --- arena --------------------------------------------------------------------------------------------------


@opt.described
def arena(
    preset: str = "mnist-30", rules: str | None = None, attacks: str | None = None,
    methods: str | None = None, seeds: str = "0", strongest: bool = False, rounds: int | None = None,
    nodes: opt.SomeNodes = None, byzantine: int | None = None, pull: int | None = None, out: Path = ARENA,
    jobs: opt.Jobs = None, data_dir: opt.DataDir = None, reuse: opt.Reuse = False,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Run all rules against all attacks in one setting and budget, several at a time,
    and make one page of it.

    What is finished is not repeated; after Ctrl-C the same command goes on.
    What cannot run is shown with its reason.

    Example: rpel arena --preset quickstart --rules mean,median,nnm+trimmed_mean --attacks alie,foe --seeds
    0-2

    Options:
        preset: The setting: a preset or a run file.
        rules: Rules, such as mean,nnm+median. [all]
        attacks: Attacks, such as alie,foe,alie(z=1). [all]
        methods: Methods beside the rules, such as gts,nna; or all.
        seeds: Seeds, such as 0-2 or 0,7.
        strongest: Also attacks that search their best factor.
        rounds: Rounds, T. [the preset's]
        byzantine: Hostile ones among them, b. [the preset's]
        pull: Peers pulled, s. [the preset's]
        out: Folder for runs and pages.
    """
    from rpel import arena as arenas
    from rpel.spec import load

    fields = opt.given(rounds=rounds, nodes=nodes, byzantine=byzantine, pull=pull, data_dir=data_dir)
    base = load(preset).replace(**fields)
    who = arenas.contestants(_split(rules), _split(methods))
    played = arenas.trials(base, who, arenas.opponents(_split(attacks), strongest), seeds)
    console = terminal.stderr()
    work = Sweep([trial.cell for trial in played], out, jobs, reuse=reuse)
    work.recall()
    _tell_needed(base, work, console)
    with terminal.interruptible(), _watching(console) as watch:
        work.run(watch)
    results = arenas.standings(base, played, [state.end for state in work.states])
    files = arenas.write(results, out)
    if terminal.printed(results.to_dict() | {"files": [str(path) for path in files]}, as_json):
        return
    columns = ("rule", "worst case", "under", "ahead of the next")
    table = terminal.table(*columns, right=columns[1:2], fold=columns)
    for rank in results.ranking():
        worst = number(rank.worst_case, ".4f", missing="no result")
        table.add_row(rank.contestant.label, worst, rank.attack, rank.sure)
    terminal.stdout(wrap=True).print(table)
    print(f"page: {files[0]}")


def _split(text: str | None) -> list[str]:
    """Names between commas; commas inside brackets belong to a name.

    >>> _split("alie(z=1,targeting=all),foe")
    ['alie(z=1,targeting=all)', 'foe']
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", text or "") if part.strip()]


def _tell_needed(base: "Spec", work: "Sweep", console: Console) -> None:
    """Print how long the open runs will take, from rounds that are measured now."""
    from rpel.experiments.estimate import costs
    from rpel.simulation.inputs import Inputs, gather
    from rpel.simulation.methods import resolve

    specs = [(state.status, state.cell.spec) for state in work.states]
    waiting = [spec for status, spec in specs if status == "waiting" and spec is not None]
    unable = sum(spec is None for _, spec in specs)
    done = len(work.states) - unable - len(waiting)
    console.print(f"runs: {len(waiting) + done}, finished before: {done}, cannot run: {unable}", markup=False)
    if not waiting:
        return
    inputs = {str(base.dataset): gather(resolve(base), Inputs())}
    start = time.process_time()  # what this process needed to get so far, every run's process will need again
    measured = costs(waiting, inputs, _kind)
    seconds = sum(start + measured[_kind(spec)].seconds(spec) for spec in waiting) / work.jobs
    console.print(f"about {duration(seconds)}, {work.jobs} at a time (measured on real rounds)", markup=False)


def _kind(spec: "Spec") -> str:
    """Runs of one kind cost about the same: a search multiplies what the rule costs."""
    from rpel.experiments.estimate import searches

    return f"{spec.method} {spec.rule} {searches(spec)}"


# --- reproduce ----------------------------------------------------------------------------------------------


@opt.described
def reproduce(
    names: list[str] | None = None, scale: str = "smoke", part: float | None = None,
    attacks: str | None = None, methods: str | None = None, seeds: str | None = None,
    eval_every: int | None = None, out: Path | None = None, style: opt.Look = "screen",
    data_dir: opt.DataDir = None, threads: opt.Threads = None, listed: bool = False,
    extra: bool = False, reuse: opt.Reuse = False, tensorboard: opt.TensorBoard = False,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Make figures of the paper: numbers as CSV, pictures as SVG and PNG,
    and an index of the runs behind them.

    What is finished is not repeated; after Ctrl-C the same command goes on.

    Example: rpel reproduce mnist-right alie-mean-s3-b1 --scale smoke

    Arguments:
        names (NAME…|all|extra): Panels; all: the paper's sixty.

    Options:
        scale: smoke (minutes), short (fewer rounds), full (the paper's).
        part: With short: the share of the paper's rounds. [0.3 MNIST, 0.1 others]
        attacks: Only the curves under these, such as alie,foe. [all]
        methods: Only the curves of these, such as rpel,cs-plus. [all]
        seeds: Seeds, such as 0 or 0-2. [the paper's at full scale, else 0]
        eval_every: Rounds between evaluations. [the panel's]
        out: Folder for figures, numbers and runs. [reproduced/SCALE]
        listed (--list): List the panels and leave.
        extra: With --list: those beyond the paper.
    """
    if listed:
        _list_panels(extra, as_json)
        return
    with terminal.display(one=True) as shown:
        from rpel.experiments.reproduce import Selection, make, prepare

        selection = Selection(_split(attacks), _split(methods), seeds, eval_every, part)
        folder = out or Path("reproduced") / scale
        work = prepare(
            names or [], scale, folder, selection=selection, data_dir=data_dir, threads=threads, reuse=reuse,
            tensorboard=tensorboard, download=shown.download, style=style,
        )  # fmt: skip
        needed = _estimated(work, shown)
        try:
            long = max(needed.values(), default=0.0) >= terminal.LONG
            # A log is told of tenths where a run is long: there may be hundreds of short ones.
            tick = shown.tick if shown.console.is_terminal or long else None
            made = make(work, needed, progress=tick, say=shown.say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted and saved: the same command goes on from here") from None
    facts = {"out": str(work.out), "panels": made, "missing": work.missing}
    if not terminal.printed(facts, as_json, ensure_ascii=False):
        words = [f"{entry['figure']}: {entry['title']}  [{entry['note']}]" for entry in made]
        files = [f"{work.out / entry['name']}.svg" for entry in made]
        terminal.print_pairs(list(zip(files, words, strict=True)))
        for name, why in work.missing.items():
            print(f"{name} was not made: {why}")
    if work.missing:
        raise typer.Exit(1)


def _list_panels(extra: bool, as_json: bool) -> None:
    from rpel.experiments.panels import EXTRAS, PANELS

    rows = [{"name": p.name, "figure": p.figure, "title": p.title} for p in (EXTRAS if extra else PANELS)]
    if not terminal.printed(rows, as_json, ensure_ascii=False):
        terminal.print_pairs([(row["name"], f"{row['figure']}: {row['title']}") for row in rows])


def _estimated(work: "Work", display: "RunDisplay") -> dict[Path, float]:
    from rpel.experiments.reproduce import seconds_needed

    for name, why in work.missing.items():
        display.say(f"rpel: warning: {name} cannot be made: {why}")
    todo, all_runs = len(work.open), len(work.specs)
    if not todo:
        return seconds_needed(work)
    runs = f"runs: {all_runs}, finished before: {all_runs - todo}"
    display.say(f"panels: {len(work.panels)}, {runs}; measuring rounds")
    needed = seconds_needed(work)
    runs = f"{duration(sum(needed.values()))} for {count(todo, 'run')}"
    display.say(f"about {runs} (measured on real rounds of each kind)")
    return needed
