"""``rpel graph``: the fixed graph of a baseline, drawn and judged."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from rpel.cli.display import stdout
from rpel.cli.options import Json, Plot


def graph(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET|FILE|RUN]", help="Whose graph; without it the options below.", show_default=False
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "--peers", help="Number of nodes, n.")] = None,
    byzantine: Annotated[int | None, typer.Option(help="How many of them are hostile, b.")] = None,
    pull: Annotated[int | None, typer.Option(help="The budget: n*s/2 edges, as many messages as pulling s.")] = None,
    graph: Annotated[str | None, typer.Option(help="random, or honest-first as in the earlier works.")] = None,
    placement: Annotated[str | None, typer.Option(help="Where hostile nodes sit: random or adversarial.")] = None,
    seed: Annotated[int | None, typer.Option(help="Where the randomness comes from.")] = None,
    plot: Plot = None,
    as_json: Json = False,
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
        _show(stdout(), found.findings())


def _show(console: Console, found: Mapping[str, Any]) -> None:
    """A fixed graph and whether the assumptions of the methods that use it hold."""
    console.print(
        f"[bold]{found['edges']:,} edges[/] among {found['nodes']:,} nodes ({found['graph']}), degrees "
        f"{found['degree_min']} to {found['degree_max']}: {found['messages']:,} messages a round"
    )
    console.print(
        f"{found['byzantine']:,} hostile ({found['placement']} placement): an honest node has at most "
        f"{found['hostile_neighbours_max']} hostile neighbours, the rules survive b_hat = {found['b_hat']}"
    )
    if found["placement"] == "adversarial":
        console.print(
            "attackers that choose their places may all sit beside one node, so b_hat must be b: honest nodes then "
            "clip or drop that many neighbours everywhere, which is the price of a fixed graph"
        )
    if found["nodes_beyond_b_hat"]:
        console.print(f"{found['nodes_beyond_b_hat']} honest nodes have more hostile neighbours than b_hat")
    whole = "is connected" if found["honest_connected"] else "is NOT connected"
    console.print(f"the honest part {whole}")
    enough = "holds" if found["sufficiently_connected"] else "does NOT hold"
    console.print(
        f"2b-connectivity, which these methods assume, {enough}: {found['connectivity']}-connected, "
        f"{found['connectivity_needed']} needed"
    )
