"""``rpel network``: found a network of real peers, check it, show one."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpel import text

if TYPE_CHECKING:
    from rpel.operations.found import Founded

app = typer.Typer(
    name="network",
    help="Networks of real peers: found one, check it, see one at work.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def new(
    peers: Annotated[int, typer.Option(help="How many peers the network will have, n.")],
    byzantine: Annotated[int, typer.Option(help="How many of them may be hostile, b.")],
    rounds: Annotated[int, typer.Option(help="Rounds of the whole training, T.")],
    no_shows: Annotated[
        int | None,
        typer.Option(help="Rounds go on with this many honest peers late.", show_default="2, fewer if n is small"),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Probability of the plan, over all peers and rounds.")] = 0.99,
    task: Annotated[str, typer.Option(help="mnist-sample, mnist, or your own as module:task.")] = "mnist-sample",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the model in this safetensors file (needed for your own task, its values in the order of "
            "the task's vector).",
            show_default="drawn from --seed",
        ),
    ] = None,
    period: Annotated[float, typer.Option(help="Length of a round in seconds.")] = 60.0,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds into a round at which pulls end.", show_default="0.6 of the period")
    ] = None,
    epoch: Annotated[
        str | None,
        typer.Option(
            help="When round 1 begins: a time such as 2030-01-01T12:00Z, or +600 for in ten minutes.",
            show_default="the next full hour",
        ),
    ] = None,
    rule: Annotated[str, typer.Option(help="How answers are aggregated.")] = "nnm+trimmed_mean",
    local_steps: Annotated[int, typer.Option(help="Local steps per round.")] = 1,
    hyperparameters: Annotated[
        list[str] | None,
        typer.Option(
            help="What all members train with: key=value, several with commas between, or JSON. Built-in tasks know "
            "lr, momentum, weight_decay, batch_size, model, partition, alpha.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The network's name.", show_default="the task's and eight random digits")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for members.toml and init.safetensors.")] = Path(),
    seed: Annotated[int, typer.Option(help="Where a built-in task's initial model comes from.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Found a network: plan how many peers each one pulls from, and write the two files that all members share.

    members.toml holds the plan, the times and the hyper-parameters, and later one entry for each member;
    init.safetensors is the model that all begin with. The plan is stall-proof: rounds go on even when all hostile peers
    keep silent and some honest ones are late.

    Example: rpel network new --peers 12 --byzantine 2 --rounds 200 --epoch +3600
    """
    from rpel.config.membership import Founding
    from rpel.operations.found import new as write_network
    from rpel.operations.found import notes, parse_epoch, parse_hyperparameters

    founding = Founding(
        run=run or "",
        nodes=peers,
        byzantine=byzantine,
        rounds=rounds,
        epoch=parse_epoch(epoch, datetime.now(UTC)),
        period=period,
        deadline=deadline,
        confidence=confidence,
        no_shows=no_shows,
        rule=rule,
        local_steps=local_steps,
        hyperparameters=parse_hyperparameters(hyperparameters or []),
    )
    found = write_network(founding, task=task, model=model, seed=seed, out=out)
    for note in notes(founding):
        print(f"rpel: note: {note}", file=sys.stderr)
    print(json.dumps(found.to_dict(), indent=2) if as_json else _founded(found))


def _founded(found: "Founded") -> str:
    """What was planned, how certain it is, what it survives and costs, and what to do next."""
    m, plan, late = found.membership, found.plan, found.founding.late
    begin = datetime.fromtimestamp(m.epoch, UTC)
    hosts = f"--members {found.members.name} --task {found.task}"
    return f"""\
network {m.run}: {m.nodes} peers, {m.byzantine} of them hostile at most, {m.rounds:,} rounds of {m.period:g} s
begins:   {begin:%Y-%m-%d %H:%M:%S} UTC; pulls end {m.deadline:g} s into each round
plan:     each peer pulls s = {m.pull} others a round and trims b_hat = {m.b_hat} (rule {m.rule})
certain:  no honest peer ever pulls more than {m.b_hat} hostile models in a round: {text.percent(plan.probability)}
survives: of the {m.pull} asked, up to {m.b_hat} hostile silent and {late} honest late: {m.enough} answers are enough
costs:    {plan.messages_per_round:,} messages a round ({plan.messages_all_to_all:,} all-to-all), \
{text.human_bytes(found.bytes_per_round)} for models of {found.signature.d:,} parameters
written:  {found.members} and {found.init}

Next:
1. Send both files to every operator.
2. Each operator runs, beside the files, and sends back the entry it prints (the key stays where it is):
     rpel peer init --id NAME --organisation "ORGANISATION" --url https://HOST:7443 {hosts}
3. Append all {m.nodes} entries to members.toml, and give everybody that same file.
4. Each operator runs rpel network check, and before the epoch: rpel peer run --config peer.toml"""
