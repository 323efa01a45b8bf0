"""``rpel watch`` and ``rpel network demo``: a running network in a table."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rpel.cli.display import stdout
from rpel.cli.options import Json

if TYPE_CHECKING:
    from rpel.operations.demo import Scene
    from rpel.operations.watch import Observer, Seen

_STYLES = {"training": "green", "finished": "green", "starting": "yellow"}
_COLUMNS = ("round", "acc.", "ok", "late", "refused", "failed", "degraded")
_LONGEST_ID = 18  # so that the table fits 80 columns


def watch(
    config: Annotated[Path, typer.Option(help="The settings of the member that asks.")] = Path("peer.toml"),
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a look.")] = False,
) -> None:
    """Watch a running network: round, accuracy, pulls and state of every member, until Ctrl-C.

    Every member is asked over mutual TLS with the key that peer.toml names; the own peer need not run. What is shown of
    a member is what it says of itself: a hostile one may lie. After the last round peers leave; a member that no longer
    answers then is shown as finished. The columns ok, late, refused and failed count pulls; degraded counts rounds that
    ended with too few answers. A member is shown as convicted when more than b others say that they have proof that its
    key signed two models of one round (see rpel verify).

    Example: rpel watch --config peer.toml
    """
    from rpel.config.peer import Config
    from rpel.operations.watch import Observer

    asyncio.run(_watch(Observer.of(Config.load(config)), once, every, as_json))


async def _watch(observer: "Observer", once: bool, every: float, as_json: bool) -> None:
    from rpel.operations.watch import look

    console = Console(highlight=False)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not (once or as_json) else None
    try:
        if live is not None:
            live.start()
        while True:
            found = await look(observer)
            if as_json:
                print(json.dumps(_as_dict(observer, found)), flush=True)
            elif live is not None:
                live.update(_table(observer, found), refresh=True)
            else:
                console.print(_table(observer, found), soft_wrap=True)
            if once:
                return
            await asyncio.sleep(every)
    finally:
        await observer.close()
        if live is not None:
            live.stop()


def _table(observer: "Observer", found: list["Seen"]) -> Table:
    from rpel.operations.watch import convicted

    return members_now(_title(observer), found, convicted=convicted(found, observer.standing.membership.byzantine))


def _title(observer: "Observer") -> str:
    m, now = observer.standing.membership, observer.clock.round()
    when = f"begins in {-observer.clock.position():.0f} s" if now < 1 else f"round {min(now, m.rounds)} of {m.rounds}"
    return f"network {m.run}: {when}" + ("; over" if now > m.rounds else "")


def _as_dict(observer: "Observer", found: list["Seen"]) -> dict[str, object]:
    m = observer.standing.membership
    members = [member.to_dict() for member in found]
    return {"run": m.run, "round": observer.clock.round(), "rounds": m.rounds, "members": members}


def members_now(
    title: str, seen: Sequence["Seen"], hostile: Collection[str] = (), convicted: Collection[str] = ()
) -> Table:
    """One row a member; those known to be hostile are marked, since what they say of themselves means nothing."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold")
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    table.add_column("peer", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for member in seen:
        if member.id in hostile:
            table.add_row(Text(_short(member.id), "magenta"), *[""] * 7, Text("hostile", "magenta"))
            continue
        numbers = _numbers(member) if member.answered and (member.round or member.pulls) else [""] * len(_COLUMNS)
        if member.id in convicted:
            table.add_row(_short(member.id), *numbers, Text("convicted", "magenta"))
            continue
        state = "other file" if member.state == "other membership" else member.state.value
        table.add_row(_short(member.id), *numbers, Text(state, _STYLES.get(state, "red")))
    return table


def _numbers(member: "Seen") -> list[str]:
    """Failed pulls are those whose answer was malformed or that reached nobody."""
    pulls = member.pulls
    failed = pulls["malformed"] + pulls["unreachable"]
    accuracy = "" if member.accuracy is None else f"{member.accuracy:.4f}"
    counts = (pulls["ok"], pulls["late"], pulls["refused"], failed, member.degraded)
    return [str(member.round), accuracy, *map(str, counts)]


def _short(id: str) -> str:
    return id if len(id) <= _LONGEST_ID else f"{id[: _LONGEST_ID - 1]}…"


# --- the demonstration ------------------------------------------------------------------------------------------------


def demo(
    peers: Annotated[int, typer.Option(help="How many peers, n; each is a process of its own.")] = 12,
    byzantine: Annotated[int, typer.Option(help="How many of them are hostile, b.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of training, T.")] = 30,
    attack: Annotated[str, typer.Option(help="What the hostile peers do: see rpel red-team.")] = "foe",
    param: Annotated[
        list[str] | None, typer.Option(help="A parameter of the attack, such as z=1.5.", metavar="KEY=VALUE")
    ] = None,
    no_shows: Annotated[
        int | None,
        typer.Option(help="Rounds go on with this many honest peers late.", show_default="2, fewer if n is small"),
    ] = None,
    period: Annotated[str, typer.Option(help="Seconds of a round, or auto: as short as the machine allows.")] = "auto",
    seed: Annotated[int, typer.Option(help="Where the first model and the shares of data come from.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep keys, logs and states in this folder.", show_default="none is kept")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a network at work on this machine: real processes, keys and TLS, hostile members among them.

    Every peer holds its own share of an MNIST sample and pulls from a few others each round; the hostile ones answer
    with forged models. Then the same network runs again with plain averaging, and both ends are shown side by side.

    Example: rpel network demo --peers 12 --byzantine 2 --attack foe
    """
    from rpel.config.values import parse_pairs
    from rpel.operations.demo import Demonstration
    from rpel.operations.demo import demo as run_demo
    from rpel.processes import ChildError

    setting = Demonstration(
        peers,
        byzantine,
        rounds,
        attack,
        parse_pairs(param or [], "parameter", "z=1.5"),
        no_shows,
        _period(period),
        seed,
    )
    late = setting.founding().late
    if no_shows is None and late < 2:
        _say(f"note: among {peers} peers with {byzantine} hostile only {late} honest ones may be late in a round")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder with --out")
    with ExitStack() as opened:
        folder = out or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rpel-demo-")))
        stage = opened.enter_context(_Stage())
        try:
            found = run_demo(setting, folder, stage.show, stage.say)
        except ChildError as error:
            stage.say(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            stage.say("interrupted; all peers have been ended")
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


class _Stage:
    """A live table on stderr where a person looks; now and then a line where none does."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._told = ("", -1)

    def __enter__(self) -> "_Stage":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        self._console.print(f"rpel: {sentence}", markup=False, soft_wrap=True)

    def show(self, scene: "Scene") -> None:
        title = f"{scene.rule}: round {scene.round} of {scene.rounds}"
        if self._console.is_terminal:
            self._live.update(members_now(title, scene.seen, scene.hostile), refresh=True)
            return
        part = (scene.rule, scene.round * 6 // scene.rounds)
        if part != self._told:
            self._told = part
            known = [member.accuracy for member in scene.seen if member.accuracy is not None]
            self.say(title + (f", accuracy {sum(known) / len(known):.4f} on average" if known else ""))


def _say(sentence: str) -> None:
    print(f"rpel: {sentence}", file=sys.stderr)


def _period(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 3600:
        raise ValueError(f"period {text!r} is not valid: it takes auto, or seconds from 0.1 to 3600")
    return found


def _print(found: dict[str, Any]) -> None:
    """Both ends side by side."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule")
    table.add_column("mean accuracy", justify="right")
    table.add_column("worst peer", justify="right")
    for name, end in (("nnm+trimmed_mean (robust)", ""), ("mean (plain averaging)", "_averaging")):
        table.add_row(name, *(f"{found[f'accuracy_{kind}{end}']:.4f}" for kind in ("mean", "worst")))
    outcomes = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items() if count)
    console = stdout()
    console.print(
        f"{found['peers']} peers, {found['byzantine']} of them hostile ({found['attack']}), {found['rounds']} rounds; "
        f"each pulls {found['pull']} and trims {found['b_hat']}"
    )
    console.print(table)
    console.print(f"rounds of the honest peers with the robust rule: {outcomes}; {found['seconds']:.0f} s in all")
    console.print(_verdict(found))


def _verdict(found: dict[str, Any]) -> str:
    """What the two ends say about the attack, in one sentence."""
    robust, averaging = found["accuracy_mean"], found["accuracy_mean_averaging"]
    ends = f"{robust:.0%} with the robust rule, {averaging:.0%} with plain averaging"
    if not found["byzantine"]:
        return f"without hostile peers: {ends}"
    verb = "ruined" if averaging < robust - 0.2 else "hardly harmed" if averaging > robust - 0.05 else "harmed"
    return f"{found['byzantine']} hostile peers of {found['peers']} {verb} plain averaging: {ends}"
