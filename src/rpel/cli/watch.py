"""``rpel watch``: a running network in a table."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from rpel.cli import tables

if TYPE_CHECKING:
    from rpel.operations.asking import Asking
    from rpel.operations.watch import Seen


def watch(
    config: Annotated[Path, typer.Option(help="The settings of the member that asks.")] = Path("peer.toml"),
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a look.")] = False,
) -> None:
    """Watch a running network: round, accuracy, pulls and state of every member, until Ctrl-C.

    Every member is asked over mutual TLS with the key that peer.toml names; the own peer need not run. What is shown of
    a member is what it says of itself: a hostile one may lie.

    Example: rpel watch --config peer.toml
    """
    from rpel.config.peer import Config
    from rpel.operations.asking import asking

    asyncio.run(_watch(asking(Config.load(config)), once, every, as_json))


async def _watch(ask: "Asking", once: bool, every: float, as_json: bool) -> None:
    from rpel.operations.watch import look

    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not (once or as_json) else None
    try:
        if live is not None:
            live.start()
        while True:
            found = await look(ask)
            if as_json:
                print(json.dumps(_as_dict(ask, found)), flush=True)
            elif live is not None:
                live.update(tables.members_now(_title(ask), found), refresh=True)
            else:
                console.print(tables.members_now(_title(ask), found), soft_wrap=True)
            if once:
                return
            await asyncio.sleep(every)
    finally:
        await ask.close()
        if live is not None:
            live.stop()


def _title(ask: "Asking") -> str:
    m, now = ask.standing.membership, ask.clock.round()
    when = f"begins in {-ask.clock.position():.0f} s" if now < 1 else f"round {min(now, m.rounds)} of {m.rounds}"
    return f"network {m.run}: {when}" + ("; over" if now > m.rounds else "")


def _as_dict(ask: "Asking", found: list["Seen"]) -> dict[str, object]:
    m = ask.standing.membership
    members = [member.to_dict() for member in found]
    return {"run": m.run, "round": ask.clock.round(), "rounds": m.rounds, "members": members}
