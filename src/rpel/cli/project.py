"""``rpel new``: a project to begin with."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from rpel.cli import options as opt
from rpel.cli import terminal


def new(
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder; its name becomes the project's.")],
    as_json: opt.Json = False,
) -> None:
    """Write a project that runs as it is: a task on made-up data, a test, a network of four on this machine.

    Then replace the task and the data by your own; README.md in the folder has the steps.

    Example: rpel new clinic
    """
    from rpel.peer.ops.project import create

    files = create(folder)
    if terminal.printed({"folder": str(folder), "files": [str(path) for path in files]}, as_json):
        return
    for path in files:
        print(path)
    print(f"\nnext:  cd {folder} && python -m pytest        (then README.md, from step 2)")
