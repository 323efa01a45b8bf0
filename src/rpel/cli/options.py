"""Options that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write the metrics for TensorBoard.")]
Nodes = Annotated[int, typer.Option("--nodes", "--peers", help="Number of nodes, n.")]
Byzantine = Annotated[int, typer.Option(help="How many of them may be hostile, b.")]
Rounds = Annotated[int, typer.Option(help="Rounds of the whole training, T.")]
Plot = Annotated[Path | None, typer.Option(help="Draw to this file (.svg, .png, .pdf).")]
DataDir = Annotated[str | None, typer.Option(help="Folder with the data sets.")]
Threads = Annotated[int | None, typer.Option(help="Threads (unset: as many as cores).", min=1)]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time. [as many as cores]", min=1)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before a long run.")]

ALIASES = {"nodes": "--peers", "attack_params": "--param"}
"""Second names of options made from a run's fields."""


class NamesInHelp(TyperCommand):
    """A command whose help ends with the names of rules and attacks; they are looked up only there (numba is slow)."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from rpel.aggregation import registry as rules
        from rpel.attacks import registry as attacks

        formatter.write_paragraph()
        with formatter.section("Rules, joined by + into chains such as nnm+median"):
            formatter.write_text(", ".join(name for name, _ in rules.about()))
        with formatter.section("Attacks"):
            formatter.write_text(", ".join(name for name, _ in attacks.about()))
