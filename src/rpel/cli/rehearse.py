"""``rpel network rehearse``: the network's plan and rule on this member's data, before the network starts."""

from typing import Annotated, Any

from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import number


@opt.described
def rehearse(
    config: opt.Settings = opt.SETTINGS, attack: str = "alie", param: opt.Parameters = None,
    rounds: Annotated[int | None, Option(min=1)] = None, seed: int = 0, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Simulate the network that members.toml plans on this member's own data, split among its honest members.

    The hostile ones attack. Trains twice, by the network's rule and by plain averaging; nothing is written,
    and nobody is contacted. The other members' data are not here: if theirs are unlike yours, expect less.

    Example: rpel network rehearse --config peer.toml --attack alie

    Options:
        attack: What hostile members send.
        rounds: Fewer rounds, for a quick look. [the network's]
        seed: Where all randomness comes from.
    """
    from rpel.peer.ops.rehearse import rehearse as run
    from rpel.record import parse_pairs

    parameters = parse_pairs(param or [], "attack_params", "z=1.5")
    with terminal.display() as shown:
        results = run(config, attack, parameters, rounds=rounds, seed=seed, progress=shown.tick).to_dict()
    if not terminal.printed(results, as_json):
        print(_told(results))


def _told(results: dict[str, Any]) -> str:
    def row(name: str, after: str) -> str:
        ends = (results[f"{end}{after}"] for end in ("mean", "worst"))
        mean, worst = (number(end, ".4f", missing="overflowed") for end in ends)
        return f"  {name:<20} mean {mean} worst {worst}"

    hostile = f"{results['byzantine']} of {results['nodes']} members hostile ({results['attack']})"
    batches = f"{results['rounds']} rounds, batches of {results['batch_size']}"
    head = f"{hostile}, {batches}; {results['measure']}:"
    return "\n".join([head, row(results["rule"], ""), row("plain averaging", "_averaging")])
