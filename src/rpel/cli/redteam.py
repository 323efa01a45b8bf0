"""``rpel red-team``: a hostile member for drills."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rpel.operations.redteam import Deed


def red_team(
    attack: Annotated[
        str,
        typer.Option(
            help="An attack of the library (alie, foe, ipm, sf, dissensus, mimic, gaussian, inf, strongest, ...) or a "
            "misbehaviour: silence, slow, old_round, wrong_size, nan, garbage, flood."
        ),
    ],
    config: Annotated[Path, typer.Option(help="The settings of the member that turns hostile.")] = Path("peer.toml"),
    param: Annotated[
        list[str] | None, typer.Option(help="A parameter of the attack, such as z=1.5.", metavar="KEY=VALUE")
    ] = None,
    allies: Annotated[
        str, typer.Option(help="Ids of other red-team members, with commas between: their models are left out.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a round.")] = False,
) -> None:
    """Be a hostile member of your own network, to see that it holds. For drills only.

    It takes part with the key of a real member, pulls what the honest members publish, forges with an attack of the
    library, and answers each victim before the deadline; or it misbehaves: it keeps silent, sends 1 byte a second,
    sends old rounds, wrong sizes, NaN or garbage, or floods the others with requests (200 a second unless rate= says
    otherwise, 1000 at most).

    Use it only on a network that is yours and whose members know of the drill: against others it is an attack.

    Example: rpel red-team --config peer.toml --attack alie --param z=1.5 --allies clinic-4,clinic-7
    """
    from rpel.config.peer import Config
    from rpel.operations.redteam import RedTeam
    from rpel.operations.redteam.deliveries import parse_parameters

    def tell(deed: "Deed") -> None:
        print(json.dumps(deed.to_dict()) if as_json else deed.sentence(), flush=True)

    others = [ally.strip() for ally in allies.split(",") if ally.strip()]
    hostile = RedTeam(Config.load(config), attack, parse_parameters(param or []), others, tell)
    m = hostile.standing.membership
    print(
        f"rpel: red team: {hostile.standing.names[hostile.standing.me]!r} turns hostile in the network {m.run!r} "
        f"({attack}); this is for drills on your own network, with its members knowing",
        file=sys.stderr,
    )
    asyncio.run(hostile.run())
