"""``rpel peer``: become a member, take part, take the model. Also ``watch``, ``verify``, ``doctor``,
``red-team``."""

import asyncio
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import count, duration, number, visible

if TYPE_CHECKING:
    from rpel.peer.core.protocol import Report
    from rpel.peer.ops.redteam import Deed
    from rpel.peer.ops.watch import Observer, Seen
    from rpel.types import Measured

MODEL = Path("model.safetensors")
app = typer.Typer(
    name="peer",
    help="One peer of a network: become a member, and take part.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@opt.described
def init(
    url: str, id: str | None = None, organisation: str = "", members: Path | None = None,
    task: str | None = None, data: Path | None = None, listen: str | None = None,
    metrics_listen: str | None = None, folder: Path = opt.HERE, days: int = 825,
    passphrase_file: Path | None = None, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Make this peer's key, certificate and peer.toml, and print the entry that makes it a member.

    The key, peer.key, is this peer's identity: it never leaves the machine, and only its owner can read it.
    The entry holds the certificate, which is public: send it to the founder of the network over a channel
    where it cannot be exchanged on the way, and compare the fingerprint by telephone.
    A member is known by this fingerprint alone.

    The entry goes to standard output, the rest to standard error. The founder adds it with `rpel network add`
    and gives everybody the same members.toml; then `rpel peer run` takes part,
    and `rpel network check` asks all the others.

    Where a peer.toml lies already, as `rpel new` writes it, it counts: name, task,
    data and addresses come from it.

    Example: rpel peer init --id clinic-3 --url https://rpel.clinic-3.example:7443 > clinic-3.toml

    Options:
        url: Where the others reach it: https://host:port
        id: This peer's name: letters, digits and . _ - [that in peer.toml]
        organisation: Who runs it.
        members: The network's members.toml; it may come later. [members.toml]
        task: mnist-sample, mnist, or your own as module:task. [mnist-sample]
        data: Folder or file with this peer's data.
        listen: host:port to listen at. [the url's port, on all networks of the machine]
        metrics_listen: host:port for Prometheus. [127.0.0.1:9464, or the next port that is free]
        folder (--dir): Folder for peer.key, peer.crt and peer.toml.
        days: How long the certificate is valid.
        passphrase_file: Encrypt the key with the first line of this file (mode 0600).
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
        f"      rpel network check --config {joined.config}",
        file=sys.stderr,
    )
    for note in joined.notes:
        terminal.say(f"note: {note}")
    if not terminal.printed(joined.to_dict(), as_json):
        print("\n" + joined.member.toml().rstrip())


@app.command()
@opt.described
def run(
    config: opt.Settings = opt.SETTINGS, force: bool = False, metrics_listen: str | None = None,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Take part in the network until its last round, with the task that peer.toml names.

    One line a round goes to standard error, one JSON line a round to the log (rounds.jsonl in the state
    folder, unless peer.toml names another), and a page to look at is at http://METRICS_LISTEN/. Ctrl-C
    (status 130) and SIGTERM (status 0) end it at once with everything on disk: started again, it goes on
    where it was. Status 3: the run is over and this peer's model is not of its last round.
    For your own training loop see rpel.Peer.

    Example: rpel peer run --config peer.toml

    Options:
        force: Take a coming membership also where that may split this peer off from the others.
        metrics_listen: host:port of page and metrics. [as peer.toml says]
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
    if summary["model_round"] != summary["rounds"]:
        raise typer.Exit(BEHIND)


@app.command()
@opt.described
def export(
    config: opt.Settings = opt.SETTINGS, round: int | None = None, out: Path = MODEL,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Write this peer's model as a safetensors file, at any time, also while the peer runs.

    Parameters are named as in init.safetensors; beside them are this peer's buffers (BatchNorm's statistics),
    so that model.load_state_dict(safetensors.torch.load_file(FILE)) takes it as it is. The round and the
    digest are in the file's metadata. After the last round the same file lies in the state folder already.

    Example: rpel peer export --config peer.toml -o model.safetensors

    Options:
        round: The model after this round, one of those kept. [the newest]
        out (--out, -o): The file to write.
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.state.memberships import MembershipWatcher, in_force
    from rpel.peer.state.models import export, initial_model

    own = Config.load(config)
    m = in_force(own, MembershipWatcher(own))
    exported = export(own.state_dir, initial_model(own, m)[0], out, round, run=m.run, id=own.id)
    facts = {"id": own.id, "round": exported, "rounds": m.rounds, "model": str(out)}
    if not terminal.printed(facts, as_json, indent=None):
        print(f"{out}: {own.id}'s model after round {exported} of {m.rounds}")


def _say_round(report: "Report", scored: "Measured") -> None:
    words = [f"{report.received} of {report.asked} answered", f"trim {report.trim}"]
    words.append(f"model age {report.degraded}")
    if scored.accuracy is not None:
        words.append(f"accuracy {scored.accuracy:.3f}")
    if scored.loss is not None:
        words.append(f"loss {scored.loss:.4g}")
    if report.frozen:
        words.append("frozen: too few members answer")
    with suppress(OSError, ValueError):  # a terminal that is gone does not end a peer
        print(f"round {report.round}: {report.outcome}, {', '.join(words)}", file=sys.stderr, flush=True)


def _ended(summary: dict[str, Any]) -> str:
    """How it went, for people."""
    id, rounds, last = (summary[key] for key in ("id", "rounds", "model_round"))
    whole = bool(summary["model"]) and last == rounds
    model = f"; the model is {summary['model']}"
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


# --- drills -------------------------------------------------------------------------------------------------


@opt.described
def red_team(
    attack: str, config: Path = opt.SETTINGS, param: opt.Parameters = None, allies: str = "",
    as_json: opt.JsonLines = False,
) -> None:  # fmt: skip
    """Be a hostile member of your own network, to see that it holds. For drills only.

    It takes part with the key of a real member, pulls what the honest members publish, forges with an attack
    of the library, and answers each victim before the deadline; or it misbehaves: it keeps silent, sends 1
    byte a second, sends old rounds, wrong sizes, NaN or garbage, or floods the others with requests (200 a
    second unless rate= says otherwise, 1000 at most).

    Use it only on a network that is yours and whose members know of the drill:
    against others it is an attack.

    Example: rpel red-team --config peer.toml --attack alie --param z=1.5 --allies clinic-4,clinic-7

    Options:
        attack: An attack of the library (alie, foe, ipm, sf, dissensus, mimic, gaussian, inf, strongest, ...)
            or a misbehaviour: silence, slow, old_round, wrong_size, nan, garbage, flood.
        config: The settings of the member that turns hostile.
        allies: Ids of other red-team members, with commas between: their models are left out.
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.redteam import RedTeam
    from rpel.record import parse_pairs

    def tell(deed: "Deed") -> None:
        if not terminal.printed(deed, as_json, indent=None):
            print(deed.sentence(), flush=True)

    others = [ally.strip() for ally in allies.split(",") if ally.strip()]
    parameters = parse_pairs(param or [], "parameter", "z=1.5")
    hostile = RedTeam(Config.load(config), attack, parameters, others, tell)
    m = hostile.now.membership
    terminal.say(
        f"red team: {hostile.now.names[hostile.now.me]!r} turns hostile in the network {m.run!r} "
        f"({attack}); this is for drills on your own network, with its members knowing"
    )
    asyncio.run(hostile.run())


# --- watching and judging -----------------------------------------------------------------------------------


_STATES = {"training": "green", "finished": "green", "starting": "yellow"}
_COLUMNS = ("round", "acc.", "ok", "late", "refused", "failed", "degraded")
BEHIND = 3  # exit status of a peer whose model is not of the last round
_LONGEST_ID = 18  # so that the table fits 80 columns


@opt.described
def watch(
    config: opt.Asking = opt.SETTINGS, once: bool = False, every: Annotated[float, Option(min=0.1)] = 2.0,
    as_json: opt.JsonLines = False,
) -> None:  # fmt: skip
    """Watch a running network: round, accuracy, pulls and state of every member, until Ctrl-C.

    Every member is asked over mutual TLS with the key that peer.toml names; the own peer need not run. What
    is shown of a member is what it says of itself: a hostile one may lie. A change of membership is followed
    when its round comes. After the last round peers leave; a member that no longer answers then is shown as
    finished, with its last numbers. The columns ok, late, refused and failed count pulls; degraded counts
    rounds that ended with too few answers. A member is shown as excluded when more than b others say that
    they have proof that its key signed two models of one round (see rpel verify).

    Example: rpel watch --config peer.toml

    Options:
        once: Look once and leave.
        every: Seconds between two looks.
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.watch import Observer

    asyncio.run(_watch(Observer.of(Config.load(config)), once, every, as_json))


async def _watch(observer: "Observer", once: bool, every: float, as_json: bool) -> None:
    from rpel.peer.ops.watch import Seen, excluded, look, remembering

    console = Console(highlight=False)
    members: list[Seen] = []
    with nullcontext() if once or as_json else terminal.live(console) as shown:
        try:
            while True:
                observer.follow()
                members, m = remembering(members, await look(observer)), observer.now.membership
                facts = {"run": m.run, "round": observer.clock.round(), "rounds": m.rounds}
                table = members_now(_title(observer), members, excluded=excluded(members, m.byzantine))
                if shown is not None:
                    shown.update(table, refresh=True)
                elif not terminal.printed(facts | {"members": members}, as_json, indent=None):
                    console.print(table, soft_wrap=True)
                if once:
                    return
                await asyncio.sleep(every)
        finally:
            await observer.close()


def _title(observer: "Observer") -> str:
    m, now = observer.now.membership, observer.clock.round()
    left = duration(-observer.clock.position())
    when = f"begins in {left}" if now < 1 else f"round {min(now, m.rounds)} of {m.rounds}"
    return f"network {m.run}: {when}" + ("; over" if now > m.rounds else "")


def members_now(
    title: str, seen: Sequence["Seen"], hostile: Collection[str] = (), excluded: Collection[str] = ()
) -> Table:
    """One row a member; those known to be hostile are marked,
    since what they say of themselves means nothing."""
    table = terminal.table("peer", *_COLUMNS, "state", right=_COLUMNS)
    table.title, table.title_style, table.padding = Text(visible(title)), "bold", (0, 1, 0, 0)
    table.columns[0].no_wrap = table.columns[-1].no_wrap = True
    for member in seen:
        state, numbers = member.state.value, [""] * len(_COLUMNS)
        if member.answered and (member.round or member.pulls):
            numbers = _numbers(member)
        style = _STATES.get(state, "red")
        if member.state == "other membership":
            state = "other file"
        if member.id in hostile:
            numbers, state, style = [""] * len(_COLUMNS), "hostile", "magenta"
        elif member.id in excluded:
            state, style = "excluded", "magenta"
        short = member.id if len(member.id) <= _LONGEST_ID else f"{member.id[: _LONGEST_ID - 1]}…"
        name = Text(short, style if member.id in hostile else "")
        table.add_row(name, *numbers, Text(state, style))
    return table


def _numbers(member: "Seen") -> list[str]:
    """Failed pulls are those whose answer was malformed or that reached nobody."""
    pulls = member.pulls
    failed = pulls["malformed"] + pulls["unreachable"]
    counts = (pulls["ok"], pulls["late"], pulls["refused"], failed, member.degraded)
    return [str(member.round), number(member.accuracy, ".4f"), *map(str, counts)]


@opt.described
def verify(evidence: Path, members: opt.Members = opt.MEMBERS, as_json: opt.Json = False) -> None:
    """Check a proof that a member signed two different models of one round, without trusting whoever sent it.

    Both signatures are verified with the key that members.toml names. A proof excludes a key
    and says nothing of an intention: two machines that run with one key are excluded, too. Of an audit log
    (audit.jsonl) it is checked that no line was changed or left out but at its end, and that the member it
    names signed it; lines that could not be written and rounds without a line are listed. Exit status 0:
    proven; 1: not.

    Example: rpel verify state/evidence/clinic-7-42.json --members members.toml

    Arguments:
        evidence (EVIDENCE): A file of a peer's evidence folder, or its audit.jsonl.
    """
    from rpel.peer.config.membership import Membership
    from rpel.peer.io.detector import verify
    from rpel.peer.state.journal import verify_audit

    if evidence.is_dir():
        raise ValueError(f"{evidence} is a folder: give a peer's audit.jsonl, or a file of its evidence")
    membership = Membership.load(members)
    try:
        if evidence.suffix == ".jsonl":
            _say_audit(evidence, verify_audit(evidence, membership), as_json)
            return
        proof = verify(evidence, membership)
    except ValueError as error:
        if not terminal.printed({"proven": False, "reason": str(error)}, as_json, indent=None):
            print(f"not proven: {error}")
        raise typer.Exit(1) from None
    member = membership.members[proof.member]
    digests = [signed.digest.hex() for signed in (proof.first, proof.second)]
    facts = {"proven": True, "member": member.id, "fingerprint": member.fingerprint, "round": proof.round}
    if not terminal.printed(facts | {"digests": digests}, as_json, indent=None):
        organisation = visible(member.organisation) or "no organisation named"
        print(
            f"proven: {member.id} ({organisation}) signed two models of round "
            f"{proof.round}\n  {digests[0]}\n  {digests[1]}\nkey: {member.fingerprint}"
        )


def _say_audit(path: Path, lines: Sequence[dict[str, Any]], as_json: bool) -> None:
    from rpel.peer.state.journal import missing_rounds

    last, missing = lines[-1], missing_rounds(lines)
    gaps = [{"before_round": line.get("round"), **line["gap"]} for line in lines if "gap" in line]
    facts = {"proven": True, "member": last["member"], "lines": len(lines), "round": last["round"]}
    if terminal.printed(facts | {"gaps": gaps, "rounds_missing": missing}, as_json, indent=None):
        return
    whole = f"{path} is whole, {len(lines)} lines to round {last['round']}"
    print(f"proven: {whole}, signed by {last['member']}")
    for gap in gaps:
        lost = count(gap["lines"], "line")
        print(f"  before round {gap['before_round']}: {lost} not written ({visible(gap['reason'])})")
    if missing:
        ranges = [f"{first}" if first == end else f"{first}-{end}" for first, end in missing]
        print(f"  rounds without a line: {', '.join(ranges)}")


@opt.described
def doctor(
    preset: str | None = None, config: Path | None = None, data_dir: opt.DataDir = None,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Check that this machine is ready: versions, kernels, data, disk, memory, clock;
    what is wrong and how to fix it.

    Example: rpel doctor --preset scale-100k

    Options:
        preset: Also: is there memory for this preset or run file?
        config: Also: a peer.toml, its members, certificate and port.
    """
    from rpel.doctor import examine

    checks = examine(preset, config, data_dir)
    wrong = [one for one in checks if not one.ok]
    if not terminal.printed(checks, as_json):
        words = [(("WRONG", "ok")[one.ok], f"{one.check}: {one.detail}", one.remedy) for one in checks]
        rows = [pair for state, text, remedy in words for pair in ((state, text), ("", remedy))]
        terminal.print_pairs([pair for pair in rows if pair[1]])
        print(f"{count(len(wrong), 'problem')} found" if wrong else "all is well")
    if wrong:
        raise typer.Exit(1)
