"""``rpel doctor``: is this machine ready?"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import count


def doctor(
    preset: Annotated[str | None, Option(help="Also: is there memory for this preset or run file?")] = None,
    config: Annotated[
        Path | None, Option(help="Also: a peer.toml, its members, certificate and port.")
    ] = None,
    data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:
    """Check that this machine is ready: versions, kernels, data, disk, memory, clock.

    Says what is wrong and how to fix it.

    Example: rpel doctor --preset scale-100k
    """
    from rpel.doctor import examine

    checks = examine(preset, config, data_dir)
    wrong = [one for one in checks if not one.ok]
    if not terminal.printed(checks, as_json):
        words = [(("WRONG", "ok")[one.ok], f"{one.check}: {one.detail}", one.remedy) for one in checks]
        rows = [pair for state, text, remedy in words for pair in ((state, text), ("", remedy))]
        terminal.print_pairs([pair for pair in rows if pair[1]])
        print(f"{count(len(wrong), 'problem')} found" if wrong else "all is well")
    if wrong:
        raise typer.Exit(1)
