"""``rpel graph``: the fixed graph of a baseline, drawn and judged."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rpel import terminal


def graph(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET|FILE|RUN]", help="Whose graph; without it the options below.", show_default=False
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes, n.")] = None,
    byzantine: Annotated[int | None, typer.Option(help="How many of them are hostile, b.")] = None,
    pull: Annotated[int | None, typer.Option(help="The budget: n*s/2 edges, as many messages as pulling s.")] = None,
    graph: Annotated[str | None, typer.Option(help="random, or honest-first as in the earlier works.")] = None,
    placement: Annotated[str | None, typer.Option(help="Where hostile nodes sit: random or adversarial.")] = None,
    seed: Annotated[int | None, typer.Option(help="Where the randomness comes from.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (.svg, .png, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Draw the fixed graph that the baselines use, and say what their theory would need of it.

    Example: rpel graph --nodes 30 --byzantine 6 --pull 15 --plot graph.svg
    """
    from rpel.config import spec as specs
    from rpel.experiments import baseline

    given = {"nodes": nodes, "byzantine": byzantine, "pull": pull, "graph": graph, "placement": placement, "seed": seed}
    spec = specs.load(source or "quickstart").but(**{key: value for key, value in given.items() if value is not None})
    found = baseline.inspect(spec)
    if plot is not None:
        baseline.draw(found, plot)
    if as_json:
        print(json.dumps(found.findings(), indent=2))
    else:
        terminal.show_graph(terminal.stdout(), found.findings())
