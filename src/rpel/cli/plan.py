"""``rpel plan``: what a network of some size needs, before anything runs."""

import sys
from collections.abc import Mapping
from typing import Any, cast

from rich.table import Table
from typer import BadParameter

from rpel import planning
from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import count, human_bytes, number, percent
from rpel.types import CONFIDENCE, WireName


@opt.described
def plan(
    nodes: opt.Nodes, byzantine: opt.Byzantine, rounds: opt.Rounds, pull: int | None = None,
    confidence: float = CONFIDENCE, silent: bool = False, no_shows: int = 0,
    parameters: int | None = None, wire: str = "float32", upstream: str | None = None,
    privacy_epsilon: float | None = None, privacy_delta: float | None = None, examples: int | None = None,
    batch: int | None = None, local_steps: opt.Positive = 1, plot: opt.Plot = None,
    style: opt.Look = "screen", as_json: opt.Json = False,
) -> None:  # fmt: skip
    """How many peers must each node pull, how many hostile answers must it survive, and with what certainty?

    Example: rpel plan --nodes 100 --byzantine 10 --rounds 200

    Options:
        pull: Judge this pull s instead of searching the smallest.
        confidence: Probability asked for, over all nodes and rounds.
        silent: Rounds must go on when all hostile peers stay silent.
        no_shows: ... and when this many honest peers are late.
        parameters: Model size d, to count bytes.
        wire: What a pulled model is made of: float32 or int8.
        upstream: Rate at which a node sends, such as 20Mbit, for the shortest period.
        privacy_epsilon: Noise of local steps that keeps this epsilon.
        privacy_delta: ... at this delta, below 1/examples.
        examples: ... for a node with so many training examples.
        batch: ... and batches of about so many of them.
        local_steps: ... that takes so many local steps a round.
    """
    asked = {"--privacy-epsilon": privacy_epsilon, "--privacy-delta": privacy_delta, "--examples": examples}
    noise = _noise({**asked, "--batch": batch}, rounds * local_steps)
    p = planning.plan(
        nodes=nodes, byzantine=byzantine, rounds=rounds, pull=pull, confidence=confidence,
        silent=silent, no_shows=no_shows, parameters=parameters,
        wire=cast(WireName, wire), upstream=upstream,
    )  # fmt: skip
    if not p.feasible:
        _warn(p)
    if plot is not None:
        from rpel.studies import plots

        plots.save(plots.of_plan(p), plot, style)
    if terminal.printed(p.to_dict() | {"noise_multiplier": noise}, as_json):
        return
    console = terminal.stdout()
    _show_plan(p)
    if noise is not None:
        console.print(
            f"privacy: [bold]noise multiplier {noise:g}[/] on gradients clipped example by example keeps "
            f"epsilon at or below {privacy_epsilon:g} (delta {privacy_delta:g}) over "
            f"{count(rounds * local_steps, 'local step')}, for each of a node's {examples:,} examples, in "
            f"Poisson batches of about {batch}"
        )
    if plot is not None:
        print(f"figure written to {plot}", file=sys.stderr)


def _noise(asked: Mapping[str, Any], steps: int) -> float | None:
    """Return the noise multiplier for --privacy-epsilon.

    Where the option is not given, return None and do not import the accountant.
    """
    epsilon, delta, examples, batch = asked.values()
    if all(value is None for value in asked.values()):
        return None
    for name, value in asked.items():
        if value is None:
            raise BadParameter(f"planning the noise needs {', '.join(asked)}; {name} is missing")
    from rpel import privacy

    noise = privacy.noise_for(epsilon, privacy.rate(batch, examples), steps, delta)
    if weak := privacy.weak_delta(delta, examples):
        terminal.say(f"warning: {weak}")
    return noise


def _warn(p: planning.Plan) -> None:
    """What this pull can survive at most, where that is too little."""
    below = p.best_below_half or {"b_hat": 0, "probability": 0.0}
    terminal.say(
        f"warning: pull {p.pull} is not feasible: b_hat {p.b_hat} of {p.models} is needed at confidence "
        f"{p.confidence:g}; the most it can survive is b_hat {below['b_hat']:.0f}, which holds with "
        f"{percent(below['probability'])}"
    )


# --- what is printed ----------------------------------------------------------------------------------------


def _show_plan(p: planning.Plan) -> None:
    """The answer and what it costs, the neighbouring choices, and whether the theorem applies."""
    terminal.print_pairs(_plan_rows(p))
    terminal.stdout().print("", _choices(p), "", sep="\n")
    terminal.print_pairs(_advice(p))


def _plan_rows(p: planning.Plan) -> list[tuple[str, str]]:
    certainty = percent(p.probability) + ("" if p.probability == 1 else " (exact)")
    honest = f"{p.nodes - p.byzantine:,} honest nodes"
    share = f"{p.b_hat} of {p.models} models, {p.fraction:.4f}"
    rows = [
        ("pull", f"s = {p.pull} random peers a round"),
        ("tolerate", f"b_hat = {p.b_hat} hostile answers ({share})"),
        ("probability", f"{certainty} that none of {honest} meets more in {p.rounds:,} rounds"),
        ("messages", f"{p.messages_per_round:,} a round; all-to-all needs {p.messages_all_to_all:,}"),
    ]
    if p.bytes_per_round is not None and p.bytes_per_message is not None:
        each = f"{human_bytes(p.bytes_per_message)} a message ({p.wire})"
        rows.append(("bytes", f"{human_bytes(p.bytes_per_round)} a round, {each}"))
    if p.shortest_period is not None:
        asking = f"the {planning.pullers(p.nodes, p.pull)} peers that ask in a busy round (1 in 100)"
        why = f"{planning.PULLS:.0%} of it suffices to answer {asking}"
        rows.append(("shortest period", f"{p.shortest_period:.3g} s: {why}"))
    if p.silent or p.no_shows:
        quiet = "all hostile peers silent and " if p.silent else ""
        left = p.pull - p.no_shows - (p.b_hat if p.silent else 0)
        late = count(p.no_shows, "honest one")
        rows.append(("answers", f"with {quiet}{late} late at least {left} arrive; {2 * p.b_hat} are needed"))
    return rows


def _choices(p: planning.Plan) -> Table:
    """Pulls near the answer and the one that a run takes, which is marked."""
    columns = ("", "s", "b_hat", "hostile share", "probability", "kappa")
    table = terminal.table(*columns, right=columns, title="neighbouring choices")
    taken = p.comfortable
    more = () if taken is None or any(c.pull == taken.pull for c in p.alternatives) else (taken,)
    for c in sorted((*p.alternatives, *more), key=lambda c: c.pull):
        kappa = number(c.kappa, ".4g", missing="not a minority")
        row = (str(c.pull), str(c.b_hat), f"{c.fraction:.4f}", percent(c.probability), kappa)
        mark = "a run takes" if taken is not None and c.pull == taken.pull else ""
        table.add_row(mark, *row, style="bold green" if c.pull == p.pull else None)
    return table


def _advice(p: planning.Plan) -> list[tuple[str, str]]:
    effect = "worst-case effect of b_hat hostile models, relative to the honest spread; smaller is better"
    rows = [("kappa", effect)]
    if p.comfortable is not None and p.comfortable.pull > p.pull:
        c = p.comfortable
        taken = f"s = {c.pull}, b_hat = {c.b_hat} (hostile share {c.fraction:.3f})"
        rows.append(("default", f"without --pull, runs and networks use {taken}: a better kappa"))
    if p.theorem_applies:
        rows.append(("theorem", f"applies: alpha = {p.alpha:.4g} < 1 (lambda = {p.lambda_:.4g})"))
    elif p.alpha is not None:
        rows.append(("theorem", f"does not apply: it needs alpha < 1, here alpha = {p.alpha:.4g}"))
    else:
        rows.append(("theorem", "does not apply: b_hat is not a minority of the s + 1 models"))
    if p.alpha is not None:
        left = "worst-case share of the nodes' disagreement that an exchange leaves"
        rows.append(("alpha", f"{left}; runs do better"))
    return rows
