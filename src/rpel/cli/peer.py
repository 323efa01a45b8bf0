"""``rpel peer``: become a member, take part, take the model."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal

if TYPE_CHECKING:
    from rpel.peer.core.protocol import Report
    from rpel.types import Measured

app = typer.Typer(
    name="peer",
    help="One peer of a network: become a member, take part, take the model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Config = Annotated[Path, Option(help="This peer's settings.")]
SETTINGS = Path("peer.toml")
BEHIND = 3
"""Exit status of a peer whose model is not of the last round."""


@app.command()
def init(
    url: Annotated[str, Option(help="Where the others reach it: https://host:port")],
    id: Annotated[
        str | None, Option(help="This peer's name: letters, digits and . _ - [that in peer.toml]")
    ] = None,
    organisation: Annotated[str, Option(help="Who runs it.")] = "",
    members: Annotated[
        Path | None, Option(help="The network's members.toml; it may come later. [members.toml]")
    ] = None,
    task: Annotated[
        str | None, Option(help="mnist-sample, mnist, or your own as module:task. [mnist-sample]")
    ] = None,
    data: Annotated[Path | None, Option(help="Folder or file with this peer's data.")] = None,
    listen: Annotated[
        str | None, Option(help="host:port to listen at. [the url's port, on all networks of the machine]")
    ] = None,
    metrics_listen: Annotated[
        str | None, Option(help="host:port for Prometheus. [127.0.0.1:9464, or the next port that is free]")
    ] = None,
    folder: Annotated[Path, Option("--dir", help="Folder for peer.key, peer.crt and peer.toml.")] = Path(),
    days: Annotated[int, Option(help="How long the certificate is valid.")] = 825,
    passphrase_file: Annotated[
        Path | None, Option(help="Encrypt the key with the first line of this file (mode 0600).")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Make this peer's key, certificate and peer.toml, and print the entry that makes it a member.

    The key, peer.key, is this peer's identity: it never leaves the machine, and only its owner can read it.
    The entry holds the certificate, which is public: send it to the founder of the network over a channel
    where it cannot be exchanged on the way, and compare the fingerprint by telephone.
    A member is known by this fingerprint alone.

    The entry goes to standard output, the rest to standard error. The founder adds it with `rpel network add`
    and gives everybody the same members.toml; then `rpel peer run` takes part,
    and `rpel network status` asks all the others.

    Where a peer.toml lies already, as `rpel new` writes it, it counts: name, task,
    data and addresses come from it.

    Example: rpel peer init --id clinic-3 --url https://rpel.clinic-3.example:7443 > clinic-3.toml
    """
    from rpel.peer.ops.join import grouped, join

    joined = join(
        id=id, url=url, organisation=organisation, members=members, task=task, data=data, listen=listen,
        metrics_listen=metrics_listen, folder=folder, days=days, passphrase_file=passphrase_file,
    )  # fmt: skip
    needs = f"memory:      {joined.memory} says what the service needs for this plan\n"
    print(
        f"key:         {joined.key} (keep it here, and keep it secret)\n"
        f"certificate: {joined.certificate}, valid until {joined.expires:%Y-%m-%d}\n"
        f"settings:    {joined.config} (where to listen, task, data: read it before you run the peer)\n"
        f"fingerprint: {grouped(joined.member.fingerprint)}\n{needs if joined.memory else ''}"
        "next: send the entry on standard output to the founder, who adds it (rpel network add) and "
        "compares the\n"
        "      fingerprint by telephone; when you have the complete members.toml, and before the epoch:\n"
        f"      rpel peer run --config {joined.config}\n"
        f"      rpel network status --config {joined.config}",
        file=sys.stderr,
    )
    for note in joined.notes:
        terminal.say(f"note: {note}")
    if not terminal.printed(joined.to_dict(), as_json):
        print("\n" + joined.member.toml().rstrip())


@app.command()
def run(
    config: Config = SETTINGS,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Take a coming membership also where that may split this peer off from the others.",
        ),
    ] = False,
    metrics_listen: Annotated[
        str | None, Option(help="host:port of page and metrics. [as peer.toml says]")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Take part in the network until its last round, with the task that peer.toml names.

    One line a round goes to standard error, one signed JSON line a round to audit.jsonl in the state folder,
    and a page to look at is at http://METRICS_LISTEN/. Ctrl-C (status 130) and SIGTERM (status 0) end it at
    once with everything on disk: started again, it goes on where it was. Status 3: the run is over and this
    peer's model is not of its last round. For your own training loop see rpel.Peer.

    Example: rpel peer run --config peer.toml
    """
    from rpel.peer.config.settings import Config

    own = Config.load(config)
    if metrics_listen is not None:
        own = Config.read("--metrics-listen", own.given() | {"metrics_listen": metrics_listen})
    from rpel.peer.api import run
    from rpel.processes import Terminated

    with terminal.heard():
        try:
            summary = run(own, progress=_say_round, force=force)
        except KeyboardInterrupt as error:
            how, status = ("terminated", 0) if isinstance(error, Terminated) else ("interrupted", 130)
            terminal.say(f"{how}; everything is on disk, the same command goes on from there")
            raise typer.Exit(status) from None
    if not terminal.printed(summary, as_json, indent=None):
        # that is the JSON lines' then
        print(_ended(summary), file=sys.stderr if own.log == "-" else sys.stdout)
    if summary["model_round"] != summary["rounds"] and summary["left"] is None:
        raise typer.Exit(BEHIND)


@app.command()
def export(
    config: Config = SETTINGS,
    round: Annotated[
        int | None, Option(help="The model after this round, one of those kept. [the newest]")
    ] = None,
    best: Annotated[
        bool, Option("--best", help="The model that scored best on this peer's own data, with its round.")
    ] = False,
    out: Annotated[Path, Option("--out", "-o", help="The file to write.")] = Path("model.safetensors"),
    as_json: opt.Json = False,
) -> None:
    """Write this peer's model as a safetensors file, at any time, also while the peer runs.

    Parameters are named as in init.safetensors; beside them are this peer's buffers (BatchNorm's statistics),
    so that model.load_state_dict(safetensors.torch.load_file(FILE)) takes it as it is. The round and the
    digest are in the file's metadata. After the last round the same file lies in the state folder already.

    Example: rpel peer export --config peer.toml -o model.safetensors
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.state.memberships import MembershipWatcher, in_force
    from rpel.peer.state.models import export, export_best, initial_model

    own = Config.load(config)
    m = in_force(own, MembershipWatcher(own))
    if best and round is not None:
        raise ValueError("--best and --round name two models: give one of them")
    if best:
        exported = export_best(own.state_dir, out)
    else:
        exported = export(own.state_dir, initial_model(own, m)[0], out, round, run=m.run, id=own.id)
    facts = {"id": own.id, "round": exported, "rounds": m.rounds, "model": str(out)}
    if not terminal.printed(facts, as_json, indent=None):
        print(f"{out}: {own.id}'s model after round {exported} of {m.rounds}")


def _say_round(report: "Report", scored: "Measured", trouble: str) -> None:
    words = [f"{report.received} of {report.asked} answered", f"trim {report.trim}"]
    words.append(f"model age {report.degraded}")
    if scored.accuracy is not None:
        words.append(f"accuracy {scored.accuracy:.3f}")
    if scored.loss is not None:
        words.append(f"loss {scored.loss:.4g}")
    if trouble:
        words.append(trouble)
    with suppress(OSError, ValueError):  # a terminal that is gone does not end a peer
        print(f"round {report.round}: {report.outcome}, {', '.join(words)}", file=sys.stderr, flush=True)


def _ended(summary: dict[str, Any]) -> str:
    """How it went, for people."""
    id, rounds, last = (summary[key] for key in ("id", "rounds", "model_round"))
    whole = bool(summary["model"]) and last == rounds
    model = f"; the model is {summary['model']}"
    if summary["left"] is not None:
        return f"{id}: left with round {summary['left']}, as agreed{model if summary['model'] else ''}"
    if not summary["model"]:
        model = "; there is no model, since no round ended here"
    elif not whole:
        model += f", after round {last} only: another member has that of round {rounds}"
    # a peer started again while the last round still runs has nothing left to do
    if summary["over"] or (whole and not summary["round"]):
        return f"{id}: the run is over, after {rounds} rounds{model}"
    if not summary["round"]:
        return f"{id}: the run ended before this peer was ready{model}"
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items() if count)
    measured = "" if summary["accuracy"] is None else f"; accuracy {summary['accuracy']:.4f}"
    ended = f"{id}: finished with round {summary['round']} of {rounds}; rounds here: {outcomes}"
    return f"{ended}{measured}{model}"
