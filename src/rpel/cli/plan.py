"""``rpel plan``: parses, asks the planner, prints."""

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rpel import planning, terminal


class MethodName(StrEnum):
    exact = "exact"
    simulate = "simulate"
    bound = "bound"


class FigureName(StrEnum):
    fraction = "fraction"
    messages = "messages"


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r} is not a number or a fraction such as 0.4 or 1/3") from None


def _grid(text: str | None) -> list[int] | None:
    """'10,20,30' or 'first:last:step', last included."""
    if text is None:
        return None
    try:
        if ":" not in text:
            return [int(part) for part in text.split(",")]
        first, last, step = (int(part) for part in (text + ":1").split(":")[:3])
        values = list(range(first, last + 1, step))
    except ValueError:
        values = []
    if not values:
        raise typer.BadParameter(f"{text!r} is not a list such as 10,20,30 or a range such as 5:60:5")
    return values


def _theory(text: str) -> tuple[float, float, float, float]:
    try:
        L, sigma, G, gap = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not four numbers L,sigma,G,gap such as 1,1,0.5,2") from None
    if not (L > 0 and min(sigma, G, gap) >= 0):
        raise typer.BadParameter(f"{text!r} needs L > 0 and sigma, G, gap >= 0, such as 1,1,0.5,2")
    return L, sigma, G, gap


def plan(
    nodes: Annotated[int, typer.Option(help="Number of nodes, n.")],
    byzantine: Annotated[int, typer.Option(help="How many of them may be hostile, b.")],
    rounds: Annotated[int, typer.Option(help="Rounds of the whole training, T.")],
    pull: Annotated[int | None, typer.Option(help="Judge this pull s instead of searching the smallest.")] = None,
    confidence: Annotated[float, typer.Option(help="Probability asked for, over all nodes and rounds.")] = 0.99,
    max_fraction: Annotated[
        str, typer.Option(help="Largest b_hat/(s+1) allowed, such as 0.4 or 1/3; one half itself is never feasible.")
    ] = "0.5",
    method: Annotated[
        MethodName, typer.Option(help="exact law, the paper's Algorithm 2 (simulate), or its lemmas (bound).")
    ] = MethodName.exact,
    simulations: Annotated[int, typer.Option(help="Simulations per s, with --method simulate.")] = 5,
    grid: Annotated[str | None, typer.Option(help="Pulls to consider: 10,20,30 or first:last:step.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --method simulate.")] = 0,
    silent: Annotated[
        bool, typer.Option("--silent", help="Rounds must go on when all hostile peers stay silent.")
    ] = False,
    no_shows: Annotated[int, typer.Option(help="... and when this many honest peers are late.")] = 0,
    mis_specified: Annotated[
        bool, typer.Option("--mis-specified", help="Show the probability when more than b nodes are hostile.")
    ] = False,
    parameters: Annotated[int | None, typer.Option(help="Model size d, to count bytes (4 each).")] = None,
    theory: Annotated[
        str | None, typer.Option(help="L,sigma,G,gap: evaluate the convergence theorem for these constants.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (.svg, .png, .pdf).")] = None,
    figure: Annotated[
        FigureName, typer.Option(help="What --plot draws: fraction against s, or messages against n.")
    ] = FigureName.fraction,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """How many peers must each node pull, how many hostile answers must it survive, and with what certainty?

    Example: rpel plan --nodes 100 --byzantine 10 --rounds 200
    """
    constants = None if theory is None else _theory(theory)
    p = planning.plan(
        nodes=nodes,
        byzantine=byzantine,
        rounds=rounds,
        pull=pull,
        confidence=confidence,
        max_fraction=_fraction(max_fraction),
        method=method.value,
        silent=silent,
        no_shows=no_shows,
        simulations=simulations,
        grid=_grid(grid),
        seed=seed,
        parameters=parameters,
    )
    if not p.feasible:
        print(_infeasible(p), file=sys.stderr)
    if plot is not None:
        planning.draw(p, plot, figure.value)
    extra: dict[str, Any] = {}
    if mis_specified:
        extra["mis_specified"] = planning.mis_specified(p)
    if constants is not None:
        extra["theory"] = planning.theorem(p, *constants)
    if as_json:
        found = {k: asdict(v) if k == "theory" and v is not None else v for k, v in extra.items()}
        print(json.dumps({**p.to_dict(), **found}, indent=2))
        return
    _print_plan(p, extra, asked_theory=constants is not None)
    if plot is not None:
        print(f"figure written to {plot}", file=sys.stderr)


def _print_plan(p: planning.Plan, extra: dict[str, Any], asked_theory: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    terminal.show_plan(console, p)
    if p.method == "bound":
        terminal.show_lemmas(console, p)
    if "mis_specified" in extra:
        terminal.show_mis_specified(console, p, extra["mis_specified"])
    if asked_theory:
        terminal.show_theory(console, p.reduction(), extra["theory"])


def _infeasible(p: planning.Plan) -> str:
    below = p.best_below_half or {"b_hat": 0, "probability": 0.0}
    return (
        f"rpel: warning: pull {p.pull} is not feasible: b_hat {p.b_hat} of {p.pull + 1} is needed at confidence "
        f"{p.confidence:g}; the most it can survive is b_hat {below['b_hat']:.0f}, which holds with "
        f"{terminal.percent(below['probability'])}"
    )
