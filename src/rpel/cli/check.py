"""``rpel network check``: is everybody there, with the same file, and how fast?"""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpel.cli import tables
from rpel.cli.display import stdout

if TYPE_CHECKING:
    from rpel.operations.asking import Asking
    from rpel.operations.check import Report


def check(
    config: Annotated[Path, typer.Option(help="The settings of the member that asks.")] = Path("peer.toml"),
    step_seconds: Annotated[
        float | None,
        typer.Option(help="How long the local steps of a round take.", show_default="measured, for a task", min=0.0),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that pulling one model may take.", min=0.1)] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Ask every other member: is it there, does it hold the same file, what time has it, how long does a model take?

    The others have to run (rpel peer run, before the epoch is the best time); the own peer need not. Suggests a period
    from the slowest pull. Exit status 0: all is well; 1: something is not.

    Example: rpel network check --config peer.toml
    """
    from rpel.config.peer import Config
    from rpel.operations.asking import asking
    from rpel.operations.check import measured_step

    settings = Config.load(config)
    ask = asking(settings)
    step = measured_step(settings, ask) if step_seconds is None else step_seconds
    found = asyncio.run(_check(ask, timeout, step))
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console = stdout()
        console.print(tables.checked_members(found.members))
        console.print(_advice(ask, found))
    if not found.well:
        raise typer.Exit(1)


async def _check(ask: "Asking", timeout: float, step: float | None) -> "Report":
    from rpel.operations.check import check

    try:
        return await check(ask, timeout=timeout, step_seconds=step)
    finally:
        await ask.close()


def _advice(ask: "Asking", found: "Report") -> str:
    """What the measurement says about the period."""
    from rpel.operations.check import MARGIN, SHORTEST

    m = ask.standing.membership
    wrong = [member.id for member in found.members if not member.well]
    verdict = f"not well: {', '.join(wrong)}" if wrong else f"all {len(found.members)} other members are well"
    if found.suggested_period is None:
        return f"{verdict}\nno pull was measured, so no period is suggested"
    slowest = max(member.seconds or 0.0 for member in found.members)
    step = f"local steps {found.step_seconds:.2g} s" if found.step_seconds is not None else "local steps not known"
    enough = "is enough" if m.period >= found.suggested_period else "is SHORTER than that"
    unknown = "" if found.step_seconds is not None else "\nlocal steps are not counted: give their --step-seconds"
    return (
        f"{verdict}\nsuggested period: {found.suggested_period:.2g} s; the period of {m.period:g} s {enough}\n"
        f"({MARGIN:g} times [slowest pull {slowest:.2g} s, {m.pull} at once, and {step}], all of it in the "
        f"{m.deadline / m.period:.2g} of a round before the deadline; at least {SHORTEST:g} s){unknown}"
    )
