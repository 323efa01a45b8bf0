"""``rpel reproduce``: the paper's figures, and some beyond it, at the size of one's machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rpel.cli.display import agreed, display
from rpel.cli.options import DataDir, Json, TensorBoard, Threads, Yes
from rpel.text import duration

if TYPE_CHECKING:
    from rpel.cli.display import RunDisplay
    from rpel.experiments.reproduce import Work
    from rpel.simulation.run import Progress, Tick


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…|all|extra", help="Panels; all: the paper's sixty.", show_default=False),
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke (minutes), short (fewer rounds), full (the paper's).")] = "smoke",
    part: Annotated[
        float | None, typer.Option(help="With short: the share of the paper's rounds. [0.3 MNIST, 0.1 others]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for figures, numbers and runs. [reproduced/SCALE]")] = None,
    data_dir: DataDir = None,
    threads: Threads = None,
    listed: Annotated[bool, typer.Option("--list", help="List the panels and leave.")] = False,
    extra: Annotated[bool, typer.Option("--extra", help="With --list: those beyond the paper.")] = False,
    tensorboard: TensorBoard = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make figures of the paper: numbers as CSV, pictures as SVG and PNG, and an index of the runs behind them.

    What is finished is not repeated; after Ctrl-C the same command goes on.

    Example: rpel reproduce mnist-right alie-mean-s3-b1 --scale smoke
    """
    if listed:
        _print_list(extra, as_json)
        return
    with display() as shown:
        from rpel.experiments.reproduce import make, prepare

        folder = out or Path("reproduced") / scale
        work = prepare(
            names or [], scale, folder, part=part, data_dir=data_dir, threads=threads, tensorboard=tensorboard,
            download=shown.download,
        )  # fmt: skip
        needed = _estimated(work, shown)
        shown.bars.stop()
        if not agreed(sum(needed.values()), yes, shown.console):
            raise typer.Exit(0)
        if shown.console.is_terminal:
            shown.bars.start()
        try:
            made = make(work, needed, progress=_bar(shown), say=shown.say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted and saved: the same command goes on from here") from None
    _print(made, work, as_json)
    if work.missing:
        raise typer.Exit(1)


def _estimated(work: "Work", display: "RunDisplay") -> dict[Path, float]:
    from rpel.experiments.reproduce import seconds_needed

    for name, why in work.missing.items():
        display.say(f"rpel: warning: {name} cannot be made: {why}")
    todo, all_runs = len(work.open), len(work.specs)
    if todo:
        display.say(
            f"panels: {len(work.panels)}, runs: {all_runs}, finished before: {all_runs - todo}; measuring rounds"
        )
    needed = seconds_needed(work)
    if todo:
        display.say(f"about {duration(sum(needed.values()))} for {todo} runs (measured on real rounds of each kind)")
    return needed


def _bar(display: "RunDisplay") -> "Progress | None":
    """One bar for the run on its way, where a person looks; there may be hundreds of runs."""
    if not display.console.is_terminal:
        return None
    task = display.tasks.pop("", None)
    place = display.bars.add_task("", total=None, seen="") if task is None else task

    def tick(t: "Tick") -> None:
        seen = "" if t.accuracy_mean is None else f"accuracy {t.accuracy_mean:.4f}"
        about = f"{t.name}, seed {t.seed}"
        display.bars.update(place, description=about, completed=t.round, total=t.rounds, seen=seen)

    return tick


def _print_list(extra: bool, as_json: bool) -> None:
    from rpel.experiments.panels import EXTRAS, PANELS

    rows = [{"name": p.name, "figure": p.figure, "title": p.title} for p in (EXTRAS if extra else PANELS)]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['figure']}: {row['title']}")


def _print(made: list[dict[str, Any]], work: "Work", as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(work.out), "panels": made, "missing": work.missing}, indent=2, ensure_ascii=False))
        return
    for entry in made:
        print(f"{work.out / entry['name']}.svg  {entry['figure']}: {entry['title']}  [{entry['note']}]")
    for name, why in work.missing.items():
        print(f"{name} was not made: {why}")
