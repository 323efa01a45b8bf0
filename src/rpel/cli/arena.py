"""``rpel arena``: every rule against every attack, one page."""

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rpel.cli.display import agreed, stderr, stdout
from rpel.cli.options import DataDir, Jobs, Json, Yes
from rpel.cli.sweep import Display
from rpel.text import duration

if TYPE_CHECKING:
    from rpel.arena import Standings
    from rpel.config.spec import Spec
    from rpel.experiments.sweep import Sweep


def arena(
    preset: Annotated[str, typer.Option(help="The setting: a preset or a run file.")] = "mnist-30",
    rules: Annotated[str | None, typer.Option(help="Rules, such as mean,nnm+median. [all]")] = None,
    attacks: Annotated[str | None, typer.Option(help="Attacks, such as alie,foe,alie(z=1). [all]")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods beside the rules, such as gts,nna; or all.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-2 or 0,7.")] = "0",
    strongest: Annotated[bool, typer.Option("--strongest", help="Also attacks that search their best factor.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds, T. [the preset's]")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "--peers", help="All nodes, n. [the preset's]")] = None,
    byzantine: Annotated[int | None, typer.Option(help="Hostile ones among them, b. [the preset's]")] = None,
    pull: Annotated[int | None, typer.Option(help="Peers pulled, s. [the preset's]")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and pages.")] = Path("arena"),
    jobs: Jobs = None,
    data_dir: DataDir = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Run all rules against all attacks in one setting and budget, several at a time, and make one page of it.

    What is finished is not repeated; after Ctrl-C the same command goes on. What cannot run is shown with its reason.

    Example: rpel arena --preset quickstart --rules mean,median,nnm+trimmed_mean --attacks alie,foe --seeds 0-2
    """
    from rpel import arena as arenas
    from rpel.config.spec import load
    from rpel.experiments.sweep import Sweep

    given = {"rounds": rounds, "nodes": nodes, "byzantine": byzantine, "pull": pull, "data_dir": data_dir}
    base = load(preset).but(**{key: value for key, value in given.items() if value is not None})
    who = arenas.contestants(_split(rules), _split(methods))
    played = arenas.trials(base, who, arenas.opponents(_split(attacks), strongest), seeds)
    work = Sweep([trial.cell for trial in played], out, jobs)
    console = stderr()
    work.recall()
    if not agreed(_needed(base, work, console), yes, console):
        raise typer.Exit(0)
    try:
        with Display(console) as display:
            work.run(display.show)
    except KeyboardInterrupt as error:
        console.print(f"rpel: {error or 'interrupted'}", markup=False)
        raise typer.Exit(130) from None
    found = arenas.standings(base, played, work.states)
    files = arenas.write(found, out)
    if as_json:
        print(json.dumps(found.to_dict() | {"files": [str(path) for path in files]}, indent=2))
    else:
        _print(found, files)


def _split(text: str | None) -> list[str]:
    """Names between commas; commas inside brackets belong to a name.

    >>> _split("alie(z=1,targeting=all),foe")
    ['alie(z=1,targeting=all)', 'foe']
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", text or "") if part.strip()]


def _needed(base: "Spec", work: "Sweep", console: Console) -> float:
    """Seconds that the open runs will take, from rounds measured now; said before anything begins."""
    from rpel.experiments.reproduce import costs
    from rpel.simulation.inputs import Objects, gather

    waiting = [state.cell.spec for state in work.states if state.status == "waiting" and state.cell.spec is not None]
    unable = sum(state.cell.spec is None for state in work.states)
    done = len(work.states) - unable - len(waiting)
    console.print(f"runs: {len(waiting) + done}, finished before: {done}, cannot run: {unable}", markup=False)
    if not waiting:
        return 0.0
    inputs = {str(base.dataset): gather(base, Objects())}
    start = time.process_time()  # what this process needed to get so far, every run's process will need again
    measured = costs(waiting, inputs, _kind)
    seconds = sum(start + measured[_kind(spec)].seconds(spec) for spec in waiting) / work.jobs
    console.print(f"about {duration(seconds)}, {work.jobs} at a time (measured on real rounds)", markup=False)
    return seconds


def _kind(spec: "Spec") -> str:
    """Runs of one kind cost about the same: a search multiplies what the rule costs."""
    return f"{spec.method} {spec.rule} {spec.attack == 'strongest'}"


def _print(found: "Standings", files: list[Path]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule", overflow="fold")
    table.add_column("worst case", justify="right")
    table.add_column("under", overflow="fold")
    table.add_column("ahead of the next", overflow="fold")
    for rank in found.ranking():
        number = "no result" if rank.worst_case is None else f"{rank.worst_case:.4f}"
        table.add_row(rank.contestant.label, number, rank.attack, rank.sure)
    console = stdout()
    console.soft_wrap = False
    console.print(table)
    print(f"page: {files[0]}")
