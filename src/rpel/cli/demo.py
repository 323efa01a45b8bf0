"""``rpel network demo``: a whole network on this machine, some of it hostile."""

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rpel.cli import tables
from rpel.cli.display import stdout

if TYPE_CHECKING:
    from rpel.operations.demo import Scene


def demo(
    peers: Annotated[int, typer.Option(help="How many peers, n; each is a process of its own.")] = 12,
    byzantine: Annotated[int, typer.Option(help="How many of them are hostile, b.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of training, T.")] = 30,
    attack: Annotated[str, typer.Option(help="What the hostile peers do: see rpel red-team.")] = "alie",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show a network at work on this machine: real processes, keys and TLS, hostile members among them.

    Every peer holds its own share of an MNIST sample and pulls from a few others each round; the hostile ones answer
    with forged models. Then the same network runs again with plain averaging, and both ends are shown side by side.

    Example: rpel network demo --peers 12 --byzantine 2 --attack alie
    """
    from rpel.operations.children import Failed
    from rpel.operations.demo import Demonstration
    from rpel.operations.demo import demo as run_demo
    from rpel.operations.redteam.deliveries import parse_parameters

    setting = Demonstration(
        peers, byzantine, rounds, attack, parse_parameters(param or []), no_shows, _period(period), seed
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
        except Failed as error:
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
            self._live.update(tables.members_now(title, scene.seen, scene.hostile), refresh=True)
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
