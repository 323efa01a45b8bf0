"""``rpel sweep``, ``arena`` and ``reproduce``: many runs, and what is made of them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.studies.study import Job, Results, Study, Watch, read
from rpel.text import duration, ends, number

STYLES = {"running": "bold", "done": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}
ROWS = 24
REFRESH_SECONDS = 0.25
ARENA = Path("arena")


@opt.described
def sweep(
    file: Path, out: Path | None = None, jobs: opt.Jobs = None, engine: opt.Engine = "local",
    address: opt.Address = None, data_dir: opt.DataDir = None, as_json: opt.Json = False,
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
    cells, folder = read(file, **opt.given(data_dir=data_dir)), out or Path("sweeps") / file.stem
    with _engine(engine, address) as ray, terminal.display() as shown:
        study = Study(cells, folder, jobs, strict=True, ray=ray, download=shown.download)
    try:
        results = _run(study)
    finally:
        study.results.write(folder)
    if not terminal.printed(results.rows, as_json):
        terminal.stdout(wrap=True).print(_table(study, study.states, ""))
        print(f"table: {folder / 'sweep.csv'}")
    _complain(results)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)


@contextmanager
def _engine(name: str, address: str | None) -> Iterator[Any]:
    """Yield the connected module ray if the runs are to be ray tasks, or None if they run here."""
    if name not in ("local", "ray"):
        raise ValueError(f"engine {name!r} is unknown: it is local or ray")
    if name == "local":
        yield None
        return
    from rpel.integrations.ray import connected
    from rpel.processes import cores

    with connected(address, cores()) as ray:
        yield ray


def _run(study: Study) -> Results:
    with terminal.interruptible(), _watching(terminal.stderr()) as watch:
        _estimate(study)
        return study.run(watch)


def _estimate(study: Study) -> None:
    """Print how many runs there are and how long the open ones will take, from rounds that are measured."""
    states = study.states
    waiting = [job.cell.spec for job in states if job.status == "waiting" and job.cell.spec]
    done, failed = (sum(job.status == status for job in states) for status in ("done", "failed"))
    console = terminal.stderr()
    runs = f"runs: {len(waiting) + done}, finished before: {done}, cannot run: {failed}"
    console.print(runs, markup=False)
    if waiting:
        from rpel.studies.estimate import seconds

        needed = duration(seconds(waiting, study.jobs))
        console.print(f"about {needed}, {study.jobs} at a time (measured on real rounds)", markup=False)


def _complain(results: Results) -> None:
    """Print every error once, with the cells that share it."""
    for error, names in results.errors().items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        terminal.say(f"{names[0]}{others}: {error}")


@contextmanager
def _watching(console: Console) -> Iterator[Watch]:
    """Show a live table on a terminal, elsewhere a line for each change."""
    shown_states: dict[int, str] = {}
    drawn = 0.0
    with terminal.live(console, transient=True) as shown:

        def watch(study: Study) -> None:
            nonlocal drawn
            if shown is None:
                for job in study.states:
                    if job.status != shown_states.get(id(job), "waiting"):
                        shown_states[id(job)] = job.status
                        console.print(f"{_head(study)}: {job.cell.name}: {_seen(job)}", markup=False)
            elif (now := console.get_time()) - drawn > REFRESH_SECONDS:
                drawn = now
                shown.update(_live(study), refresh=True)

        yield watch


def _head(study: Study) -> str:
    done = sum(job.status in ("done", "failed") for job in study.states)
    left = study.seconds_left
    words = f", {duration(left)} left" if left and left >= 1 else ""
    return f"{done}/{len(study.states)} runs done{words}"


def _seen(job: Job) -> str:
    """Say how a run stands, in a few words."""
    if job.status == "done" and job.run is not None:
        before = "finished before" if job.reused else f"done in {duration(job.seconds)}"
        return f"{before}, accuracy {ends(job.run.final)}"
    return f"{job.status}: {job.error.splitlines()[-1]}" if job.error else job.status


def _table(study: Study, states: Sequence[Job], title: str) -> Table:
    """Make a table with one row for each run: its state, accuracies and details."""
    table = terminal.table("cell", "state", "mean", "worst", "", fold=("cell",), title=title)
    table.columns[0].min_width = min(max(len(job.cell.name) for job in study.states), 30)
    table.columns[-1].max_width = 24
    for column in table.columns[1:]:
        column.no_wrap = True
    for job in states:
        final = {} if job.run is None else job.run.final
        accuracies = [number(final.get(f"accuracy_{end}"), ".4f") for end in ("mean", "worst")]
        table.add_row(
            Text(job.cell.name), job.status, *accuracies, Text(_words(job)), style=STYLES[job.status]
        )
    return table


def _words(job: Job) -> str:
    """Return the details of a run beside its state."""
    if job.status == "done":
        return "finished before" if job.reused else duration(job.seconds)
    return job.last_line if job.status == "running" else job.error


def _live(study: Study) -> Table:
    """Return the running runs first, then what failed, what ended last and what waits."""
    order = {"running": 0, "failed": 1, "stopped": 1, "done": 2, "waiting": 3}
    states = sorted(study.states, key=lambda job: (order[job.status], -job.begun))
    table = _table(study, states[:ROWS], f"{_head(study)}, {study.jobs} at a time")
    if len(states) > ROWS:
        table.add_row(f"and {len(states) - ROWS} more")
    return table


# --- arena --------------------------------------------------------------------------------------------------


@opt.described
def arena(
    preset: str = "mnist-30", rules: str | None = None, attacks: str | None = None,
    methods: str | None = None, seeds: str = "0", strongest: bool = False, rounds: int | None = None,
    nodes: opt.SomeNodes = None, byzantine: int | None = None, pull: int | None = None, out: Path = ARENA,
    jobs: opt.Jobs = None, data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Run all rules against all attacks in one setting and budget, and make one page of it.

    Several runs are computed at a time. Finished runs are not repeated; after Ctrl-C the same command
    continues. What cannot run is shown with its reason.

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
    from rpel.record import parse_seeds
    from rpel.spec import load
    from rpel.studies import arena as arenas

    fields = opt.given(rounds=rounds, nodes=nodes, byzantine=byzantine, pull=pull, data_dir=data_dir)
    base = load(preset).replace(**fields)
    who = arenas.contestants(_split(rules), _split(methods))
    cells = arenas.cells(base, who, arenas.opponents(_split(attacks), strongest), parse_seeds(seeds))
    study = Study(cells, out, jobs)
    standings = arenas.Standings(base, _run(study))
    files = standings.write(out)
    _complain(standings.results)
    if terminal.printed(standings.to_dict() | {"files": [str(path) for path in files]}, as_json):
        return
    columns = ("rule", "worst case", "under", "ahead of the next")
    table = terminal.table(*columns, right=columns[1:2], fold=columns)
    for rank in standings.ranking:
        worst = number(rank.worst_case, ".4f", missing="no result")
        table.add_row(rank.name, worst, rank.attack, rank.ahead)
    terminal.stdout(wrap=True).print(table)
    print(f"page: {files[0]}")


def _split(text: str | None) -> list[str]:
    """Split names at commas; commas inside brackets belong to a name.

    >>> _split("alie(z=1,targeting=all),foe")
    ['alie(z=1,targeting=all)', 'foe']
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", text or "") if part.strip()]


# --- reproduce ----------------------------------------------------------------------------------------------


@opt.described
def reproduce(
    names: list[str] | None = None, scale: str = "smoke", part: float | None = None,
    attacks: str | None = None, methods: str | None = None, seeds: str | None = None,
    eval_every: int | None = None, out: Path | None = None, style: opt.Look = "screen",
    jobs: opt.Jobs = None, data_dir: opt.DataDir = None, threads: opt.Threads = None, listed: bool = False,
    extra: bool = False, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Make figures of the paper: CSV, SVG, PNG, and an index of the runs behind them.

    Finished runs are not repeated; after Ctrl-C the same command continues.

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
    from rpel.studies.paper import EXTRAS, PANELS, Reproduction, Selection

    if listed:
        panels = EXTRAS if extra else PANELS
        rows = [{"name": one.name, "figure": one.figure, "title": one.title} for one in panels]
        if not terminal.printed(rows, as_json, ensure_ascii=False):
            terminal.print_pairs([(row["name"], f"{row['figure']}: {row['title']}") for row in rows])
        return
    folder = out or Path("reproduced") / scale
    selection = Selection(_split(attacks), _split(methods), seeds, eval_every, part)
    with terminal.display() as shown:
        work = Reproduction(
            names or [], scale, folder, jobs, selection=selection, data_dir=data_dir, threads=threads,
            style=style, download=shown.download,
        )  # fmt: skip
    with terminal.interruptible(), _watching(terminal.stderr()) as watch:
        _estimate(work.study)
        made = work.run(watch)
    if not terminal.printed({"out": str(folder), "panels": made, "missing": work.missing}, as_json):
        words = [f"{entry['figure']}: {entry['title']}  [{entry['note']}]" for entry in made]
        files = [f"{folder / entry['name']}.svg" for entry in made]
        terminal.print_pairs(list(zip(files, words, strict=True)))
    for name, why in work.missing.items():
        terminal.say(f"{name} cannot be made: {why}")
    if work.missing:
        raise typer.Exit(1)
