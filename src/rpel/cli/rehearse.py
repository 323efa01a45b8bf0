"""``rpel network rehearse``: the network's plan and rule on this member's data, before the network starts."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from rpel.cli import terminal
from rpel.cli.terminal import Json, Parameters


def rehearse(
    config: Annotated[Path, Option(help="This peer's settings.")] = Path("peer.toml"),
    attack: Annotated[str, Option(help="What hostile members send.")] = "alie",
    param: Parameters = None,
    rounds: Annotated[
        int | None, Option(help="Fewer rounds, for a quick look.", show_default="the network's", min=1)
    ] = None,
    seed: Annotated[int, Option(help="Where all randomness comes from.")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate the network that members.toml plans on this member's own data, split among its honest members.

    The hostile ones attack. Trains twice, by the network's rule and by plain averaging; nothing is written,
    and nobody is contacted. The other members' data are not here: if theirs are unlike yours, expect less.

    Example: rpel network rehearse --config peer.toml --attack alie
    """
    from rpel.config.record import parse_pairs
    from rpel.peer.ops.rehearse import rehearse as run

    parameters = parse_pairs(param or [], "attack_params", "z=1.5")
    with terminal.display() as shown:
        results = run(config, attack, parameters, rounds=rounds, seed=seed, progress=shown.tick).to_dict()
    if not terminal.printed(results, as_json):
        print(_told(results))


def _told(results: dict[str, Any]) -> str:
    def ends(after: str) -> str:
        values = (results[f"{which}{after}"] for which in ("mean", "worst"))
        return " ".join(
            f"{word} {_number(value)}" for word, value in zip(("mean", "worst"), values, strict=True)
        )

    hostile = f"{results['byzantine']} of {results['nodes']} members hostile ({results['attack']})"
    lines = [
        f"{hostile}, {results['rounds']} rounds, batches of {results['batch_size']}; {results['measure']}:"
    ]
    lines.append(f"  {results['rule']:<20} {ends('')}")
    lines.append(f"  {'plain averaging':<20} {ends('_averaging')}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "overflowed" if value is None else f"{value:.4f}"
