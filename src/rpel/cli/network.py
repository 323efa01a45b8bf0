"""``rpel network``: make a network of real peers, add its members, check it, see one at work."""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.cli.peer import members_now, red_team, verify, watch
from rpel.cli.rehearse import rehearse
from rpel.text import count, human_bytes, number, percent, visible
from rpel.types import CONFIDENCE, ROBUST_RULE

if TYPE_CHECKING:
    from rpel.peer.config.membership import Membership
    from rpel.peer.ops.change import Change, Holding
    from rpel.peer.ops.check import Checked, Report
    from rpel.peer.ops.create import NewNetwork
    from rpel.peer.ops.demo import Scene, Show
    from rpel.peer.ops.watch import Observer

T = TypeVar("T")

app = typer.Typer(
    name="network",
    help="Networks of real peers: make one, add its members, check it, see one at work.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


app.command()(rehearse)

for command in (verify, watch, red_team):
    app.command(command.__name__.replace("_", "-"))(command)
_LONGEST = 60  # letters of an organisation or an address that are shown beside a fingerprint

FromRound = Annotated[int, Option(help="The round from which it is in force; all need the file before.")]
Hostile = Annotated[int | None, Option("--byzantine", help="How many may be hostile, b. [as before]")]
LateLater = Annotated[int | None, Option("--no-shows", help="Honest peers that may be late. [as before]")]


@app.command()
@opt.described
def new(
    peers: int, byzantine: opt.Byzantine, rounds: opt.Rounds, no_shows: opt.Late = None,
    confidence: float = CONFIDENCE, task: str = "mnist-sample", model: Path | None = None,
    period: float | None = None, deadline: float | None = None, epoch: str | None = None,
    hours: str | None = None, rule: str = ROBUST_RULE, local_steps: int | None = None,
    hyperparameters: list[str] | None = None, optimizer: str | None = None,
    optimizer_params: list[str] | None = None, outer: str | None = None, outer_lr: float | None = None,
    outer_momentum: float | None = None, allow_private: bool = False, linger: float | None = None,
    wire: str | None = None, upstream: str | None = None,
    run: str = "", out: Path = opt.HERE, seed: int = 0, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Make a network: plan how many peers each one pulls from, and write the two files all members share.

    members.toml has the plan, the times and the hyper-parameters, and later one entry for each member;
    init.safetensors is the model that all begin with. With this plan rounds go on even if all hostile peers
    are silent and some honest ones are late.

    Example: rpel network new --peers 12 --byzantine 2 --rounds 200 --epoch +3600

    Options:
        peers: How many peers the network will have, n.
        confidence: Probability of the plan, over all peers and rounds.
        task: mnist-sample, mnist, your own as module:task, or none: training loops with rpel.Peer.
        model: Begin with the model in this safetensors file (needed for your own task; its values are
            matched by name and shape with the task's layout). [drawn from --seed]
        period: Length of a round in seconds. [60]
        deadline: Seconds into a round at which pulls end. [0.6 of the period]
        epoch: When round 1 begins: 2030-01-01T12:00Z, or +600 for in ten minutes. [the next full hour]
        hours: Rounds only within these hours of a day, UTC, such as 20:00-06:00. [the whole day]
        rule: How answers are aggregated.
        local_steps: Local steps per round. [1]
        hyperparameters (KEY=VALUE): What all members train with: key=value, several with commas between, or
            JSON. All know lr, momentum, weight_decay and batch_size, built-in tasks also model, partition,
            alpha.
        optimizer: The local step: momentum (the paper's), sgd, adam or adamw. [momentum]
        optimizer_params (KEY=VALUE): Its parameters, such as eps=1e-6.
        outer: A step after the aggregation, for many local steps: none or nesterov. [none]
        outer_lr: Its rate. [0.7]
        outer_momentum: Its momentum. [0.9]
        allow_private: Members may have private addresses (one office, one machine, a VPN).
        linger: Periods after the last round in which peers serve it to members that are late. [2]
        wire: How models travel: float32 or int8 (a quarter of the bytes). [float32]
        upstream: What a member can send, such as 20Mbit; the shortest period for it is printed.
        run: The network's name; 128 random bits are put behind it. [the task's]
        out: Folder for members.toml and init.safetensors.
        seed: Where a built-in task's initial model comes from.
    """
    from rpel.peer.ops.create import new as write_network
    from rpel.peer.ops.create import notes, parse_epoch, stall_proof
    from rpel.planning.traffic import bits_per_second
    from rpel.record import parse_pairs

    table = parse_pairs(hyperparameters or [], "hyperparameters", "lr=0.1,momentum=0.9")
    table |= opt.given(optimizer=optimizer)
    if optimizer_params:
        table["optimizer_params"] = parse_pairs(optimizer_params, "optimizer_params", "eps=1e-6")
    if upstream is not None:
        bits_per_second(upstream)  # a wrong rate is refused before anything is written
    terms = opt.given(
        period=period, deadline=deadline, hours=hours, local_steps=local_steps, outer=outer,
        outer_lr=outer_lr, outer_momentum=outer_momentum, linger=linger, wire=wire,
    )  # fmt: skip
    plan = stall_proof(peers, byzantine, rounds, confidence, no_shows)
    network = write_network(
        plan, run=run, task=task, model=model, seed=seed, out=out, hyperparameters=table,
        epoch=parse_epoch(epoch, datetime.now(UTC)), rule=rule, allow_private=allow_private, **terms,
    )  # fmt: skip
    for note in notes(plan, no_shows):
        terminal.say(f"note: {note}")
    shortest = None if upstream is None else network.shortest_period(upstream)
    length = network.membership.period
    if shortest is not None and length < shortest:
        terminal.say(
            f"note: with {upstream} a member cannot serve all who ask it within a period of {length:g} s"
        )
    if not terminal.printed(network.to_dict() | {"shortest_period": shortest}, as_json):
        print(_planned(network))
        if shortest is not None:
            print(f"shortest period with {upstream} upstream: {shortest:.3g} s")


def _planned(network: "NewNetwork") -> str:
    """What was planned, how certain it is, what it survives and costs, and what to do next."""
    m, plan = network.membership, network.plan
    begin = datetime.fromtimestamp(m.timetable.begins, UTC)
    hours = f", {m.hours} UTC only" if m.hours else ""
    task, start = f" --task {network.task}", "rpel peer run --config peer.toml"
    if network.task == "none":
        task, start = "", 'your loop, with rpel.Peer("peer.toml")'
    where = f"--url https://HOST:7443 --members {network.members.name}{task}"
    return f"""\
network {m.run}: {m.nodes} peers, {m.byzantine} of them hostile at most, \
{m.rounds:,} rounds of {m.period:g} s{hours}
begins:   {begin:%Y-%m-%d %H:%M:%S} UTC; pulls end {m.deadline:g} s into each round
plan:     each peer pulls s = {m.pull} others a round and trims b_hat = {m.b_hat} (rule {m.rule})
certain:  no honest peer ever pulls more than {count(m.b_hat, "hostile model")} in a round: \
{percent(plan.probability)}
survives: of the {m.pull} asked, up to {m.b_hat} hostile silent and {plan.no_shows} honest late: \
{m.enough} answers are enough
costs:    {plan.messages_per_round:,} messages a round ({plan.messages_all_to_all:,} all-to-all), \
{human_bytes(network.bytes_per_round)} for models of {network.layout.d:,} parameters as {m.wire}
written:  {network.members} and {network.init}

Next:
1. Send both files to every operator.
2. Each operator runs, beside the files, and sends you entry.toml (the key stays where it is):
     rpel peer init --id NAME --organisation "ORGANISATION" {where} > entry.toml
3. Add the entries, compare the fingerprints by telephone, and give everybody the same members.toml:
     rpel network add ENTRY.toml ...; rpel network members
4. Each operator starts the peer before the epoch, and checks the network while it waits:
     {start}
     rpel network check --config peer.toml"""


@app.command()
@opt.described
def add(entries: list[Path], members: opt.Members = opt.MEMBERS, as_json: opt.Json = False) -> None:
    """Add members' entries to members.toml, all of them or none; certificates,
    addresses and fingerprints are checked.

    Then compare every fingerprint with its owner by telephone, and give everybody the same file: a member is
    known by its fingerprint alone.

    Example: rpel network add clinic-1.toml clinic-2.toml

    Arguments:
        entries (ENTRY...): Entries, as rpel peer init prints them.
    """
    from rpel.peer.ops.join import add

    membership, new = add(members, entries)
    _say_cautions(membership)
    ids, missing = [member.id for member in new], membership.nodes - len(membership.members)
    facts = {"added": ids, "members": len(membership.members), "missing": missing}
    if terminal.printed(facts, as_json, indent=None):
        return
    terminal.stdout().print(_fingerprints(membership, ids))
    waits = f"{missing} of {membership.nodes} are still missing" if missing else "it is complete"
    print(f"{len(new)} added to {members}; {waits}. Compare the fingerprints by telephone.")


def _say_cautions(m: "Membership") -> None:
    for caution in m.cautions():
        terminal.say(f"note: {visible(caution)}")


# --- a running network changes ------------------------------------------------------------------------------


def _print_lines(sentences: Iterable[str]) -> None:
    for line in "\n".join(sentences).split("\n"):
        print(visible(line))


def _say_change(change: "Change", as_json: bool) -> None:
    _say_cautions(change.after)
    if not terminal.printed(change.to_dict(), as_json):
        print(f"written:      {change.path}")
        _print_lines(change.sentences())


@app.command("join")
@opt.described
def join_later(
    entries: list[Path], from_round: FromRound, byzantine: Hostile = None, no_shows: LateLater = None,
    members: opt.Members = opt.MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Add members to a running network from a round on:
    plans anew and writes members.next.toml for everybody.

    Says what changes and what each member has to do.
    A change that waits in members.next.toml already is kept.

    Example: rpel network join clinic-7.toml --from-round 600

    Arguments:
        entries (ENTRY...): Entries, as rpel peer init prints them.
    """
    from rpel.peer.ops.change import change

    _say_change(change(members, from_round, add=entries, byzantine=byzantine, no_shows=no_shows), as_json)


@app.command()
@opt.described
def leave(
    ids: list[str], from_round: FromRound, byzantine: Hostile = None, no_shows: LateLater = None,
    members: opt.Members = opt.MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Take members out of a running network from a round on:
    plans anew and writes members.next.toml for everybody.

    Example: rpel network leave clinic-3 --from-round 600

    Arguments:
        ids (ID...): Ids of the members that leave.
    """
    from rpel.peer.ops.change import change

    _say_change(change(members, from_round, remove=ids, byzantine=byzantine, no_shows=no_shows), as_json)


@app.command()
@opt.described
def rotate(
    entry: Path, from_round: FromRound, members: opt.Members = opt.MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Give a member of a running network a new key or address from a round on;
    writes members.next.toml for everybody.

    The member makes both with rpel peer init --dir new, and keeps them as peer.next.key and peer.next.crt.

    Example: rpel network rotate clinic-3.toml --from-round 600

    Arguments:
        entry (ENTRY): The member's new entry, as rpel peer init prints it.
    """
    from rpel.peer.ops.change import change

    _say_change(change(members, from_round, replace=[entry]), as_json)


@app.command("plan")
@opt.described
def plan_later(
    from_round: FromRound, byzantine: Hostile = None, no_shows: LateLater = None, rounds: int | None = None,
    members: opt.Members = opt.MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Change how many members may be hostile or late, or the last round, from a round on;
    writes members.next.toml.

    Example: rpel network plan --byzantine 3 --from-round 600

    Options:
        rounds: The last round, T. [as before]
    """
    from rpel.peer.ops.change import change

    _say_change(change(members, from_round, rounds=rounds, byzantine=byzantine, no_shows=no_shows), as_json)


@app.command("period")
@opt.described
def period_later(
    from_round: FromRound, seconds: float | None = None, hours: str | None = None,
    pause: opt.NotNegative = 0.0, deadline: float | None = None, members: opt.Members = opt.MEMBERS,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Change how long rounds are, keep them to hours of the day, or pause, from a round on;
    writes members.next.toml.

    Example: rpel network period 120 --hours 20:00-06:00 --from-round 600

    Arguments:
        seconds (SECONDS): Length of a round in seconds. [as before]

    Options:
        hours: Rounds only within these hours of a day, UTC, such as 20:00-06:00; all: the whole day.
            [as before]
        pause: Seconds without a round before that round.
        deadline: Seconds into a round at which pulls end. [the same share of it]
    """
    from rpel.peer.ops.change import change

    hours = "" if hours == "all" else hours
    _say_change(
        change(members, from_round, period=seconds, deadline=deadline, hours=hours, pause=pause), as_json
    )


@app.command()
def diff(config: opt.Asking = opt.SETTINGS, as_json: opt.Json = False) -> None:
    """Say what the coming membership changes, and ask every member which files it holds: in force,
    and to come.

    Exit status 0: all that answered hold the same files as this member; 1: not.

    Example: rpel network diff --config peer.toml
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.change import holdings, waiting
    from rpel.peer.ops.watch import Observer

    settings = Config.load(config)
    observer, change = Observer.of(settings), waiting(settings)
    held = _asked(observer, holdings(observer))
    mine, coming = observer.now.membership.hash, change.after.hash if change else ""
    same = all((row.in_force, row.coming) == (mine, coming) for row in held if row.in_force)
    facts = {"in_force": mine, "coming": change.to_dict() if change else None, "members": held, "same": same}
    if not terminal.printed(facts, as_json):
        _print_lines(change.sentences() if change else ["no other membership is announced here"])
        terminal.stdout().print(_holdings(held, mine, coming))
    if not same:
        raise typer.Exit(1)


def _asked(observer: "Observer", question: Coroutine[Any, Any, T]) -> T:
    """The answer to what is asked in an observer's name, whose connections are then closed."""

    async def ask() -> T:
        try:
            return await question
        finally:
            await observer.close()

    return asyncio.run(ask())


def _holdings(held: "Sequence[Holding]", mine: str, coming: str) -> Table:
    table = terminal.table("member", "in force", "to come", "remark", fold=("remark",))
    for row in held:
        hashes = [_which(row.in_force, mine), _which(row.coming, coming)]
        table.add_row(row.id, *(["unknown"] * 2 if row.remark else hashes), Text(row.remark, "red"))
    return table


def _which(hash: str, mine: str) -> Text:
    """A hash in short, and whether it is that of this member's file."""
    if not hash:
        return Text("missing", "yellow") if mine else Text("none")
    return Text(f"the same ({hash[:8]})", "green") if hash == mine else Text(f"another ({hash[:8]})", "red")


@app.command("members")
def list_members(members: opt.Members = opt.MEMBERS, as_json: opt.Json = False) -> None:
    """Show who is in members.toml, with fingerprints in groups of four, to be compared by telephone.

    Example: rpel network members
    """
    from rpel.peer.config.membership import Membership

    membership = Membership.load(members, draft=True)
    _say_cautions(membership)
    keys = ("id", "organisation", "url", "fingerprint")
    facts = [{key: getattr(member, key) for key in keys} for member in membership.members]
    if not terminal.printed(facts, as_json):
        terminal.stdout().print(_fingerprints(membership))
        whole = f"{len(facts)} of {membership.nodes} members"
        print(f"{whole}; hash of the file's content {membership.hash[:16]}")


def _fingerprints(m: "Membership", only: Sequence[str] | None = None) -> Table:
    """Two lines a member: who it is, and its fingerprint; together at most 80 columns."""
    from rpel.peer.ops.join import grouped

    table = Table(box=None, pad_edge=False, show_header=False)
    for member in m.members:
        if only is None or member.id in only:
            who, digits = (member.id, _written(member.organisation), _written(member.url)), member.fingerprint
            table.add_row(Text("  ".join(filter(None, who)), "bold"))
            table.add_row(Text(f"  {grouped(digits)[:39]}\n  {grouped(digits)[40:]}"))
    return table


def _written(text: str) -> str:
    """What an entry says, on one line and too short for a fingerprint:
    it must not pass for what is compared."""
    shown = visible(" ".join(text.split()))
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


@app.command()
@opt.described
def check(
    config: opt.Asking = opt.SETTINGS, step_seconds: Annotated[float | None, Option(min=0.0)] = None,
    timeout: Annotated[float, Option(min=0.1)] = 60.0, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Ask every other member: is it there, does it hold the same file, what time has it,
    how long does a model take?

    The others have to run (rpel peer run, before the epoch is the best time); the own peer need not. Suggests
    a period from the slowest pull. Exit status 0: all is well; 1: something is not.

    Example: rpel network check --config peer.toml

    Options:
        step_seconds: How long the local steps of a round take. [measured, for a task]
        timeout: Seconds that pulling one model may take.
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.check import check as ask_all
    from rpel.peer.ops.check import measured_step
    from rpel.peer.ops.watch import Observer

    settings = Config.load(config)
    observer = Observer.of(settings)
    step = measured_step(settings, observer) if step_seconds is None else step_seconds
    question = ask_all(observer, timeout=timeout, step_seconds=step, listen=settings.listen)
    report = _asked(observer, question)
    _say_cautions(observer.now.membership)
    if not terminal.printed(report.to_dict(), as_json):
        terminal.stdout().print(_checked(report.members))
        print(_advice(observer, report))
    if not report.well:
        raise typer.Exit(1)


def _advice(observer: "Observer", report: "Report") -> str:
    """What the measurement says about the period."""
    from rpel.peer.ops.check import MARGIN, SHORTEST

    m = observer.now.membership
    wrong = ", ".join(member.id for member in report.members if not member.well)
    verdict = f"not well: {wrong}" if wrong else f"all {len(report.members)} other members are well"
    verdict += f"\n{_reached(report)}"
    if report.suggested_period is None:
        return f"{verdict}\nno pull was measured, so no period is suggested"
    slowest = max(member.seconds or 0.0 for member in report.members)
    step, unknown = f"local steps {report.step_seconds or 0:.2g} s", ""
    if report.step_seconds is None:
        step, unknown = "local steps not known", "\nlocal steps are not counted: give their --step-seconds"
    enough = "is enough" if m.period >= report.suggested_period else "is SHORTER than that"
    return (
        f"{verdict}\n"
        f"suggested period: {report.suggested_period:.2g} s; the period of {m.period:g} s {enough}\n"
        f"({MARGIN:g} times the slowest pull, {slowest:.2g} s, {m.pull} at once, and {step}, all of it in "
        f"the {m.deadline / m.period:.2g} of a round before the deadline; at least {SHORTEST:g} s){unknown}"
    )


def _reached(report: "Report") -> str:
    """Whether the others reach this member."""
    if not report.running:
        return "your peer does not run here: start it and check again to learn who reaches you"
    if not report.called:
        return "nobody was asked to call back: they do so once a minute at most"
    more = "" if all(report.called) else ": is the port of your url open? docs/operators.md, no port to open"
    return f"{sum(report.called)} of {len(report.called)} reach you{more}"


def _checked(checked: Sequence["Checked"]) -> Table:
    """One row a member, with a sentence on what is wrong."""
    columns = ("member", "reachable", "same file", "clock", "pull", "MB/s", "remark")
    table = terminal.table(*columns, right=columns[3:6], fold=columns[-1:])
    for row in checked:
        answers = (_YES[row.reachable], _YES[row.same_membership])
        numbers = (number(row.clock_offset, "+.3f", " s"), number(row.seconds, ".3f", " s"))
        remark = Text(row.remark, "green" if row.well else "red")
        table.add_row(row.id, *answers, *numbers, number(row.megabytes_per_second, ".3g"), remark)
    return table


_YES = {None: Text(), True: Text("yes", "green"), False: Text("no", "red")}


# --- the demonstration --------------------------------------------------------------------------------------


@app.command()
@opt.described
def demo(
    peers: int = 12, byzantine: int = 2, rounds: int = 30, attack: str = "foe", param: opt.Parameters = None,
    no_shows: opt.Late = None, period: str = "auto", seed: int = 0, out: Path | None = None,
    as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Show a network at work on this machine: real processes, keys and TLS, hostile members among them.

    Every peer holds its own share of an MNIST sample and pulls from a few others each round; the hostile ones
    answer with forged models. Then the same network runs again with plain averaging,
    and both ends are shown side by side.

    Example: rpel network demo --peers 12 --byzantine 2 --attack foe

    Options:
        peers: How many peers, n; each is a process of its own.
        byzantine: How many of them are hostile, b.
        rounds: Rounds of training, T.
        attack: What the hostile peers do: see rpel red-team.
        period: Seconds of a round, or auto: as short as the machine allows.
        seed: Where the first model and the shares of data come from.
        out: Keep keys, logs and states in this folder. [none is kept]
    """
    from rpel.peer.ops.demo import Demonstration
    from rpel.peer.ops.demo import demo as run_demo
    from rpel.processes import ChildError
    from rpel.record import parse_pairs

    parameters = parse_pairs(param or [], "parameter", "z=1.5")
    setting = Demonstration(peers, byzantine, rounds, attack, parameters, no_shows, _period(period), seed)
    late = setting.plan.no_shows
    if no_shows is None and late < 2:
        honest = f"only {count(late, 'honest one')}" if late else "no honest one"
        terminal.say(f"note: among {peers} peers with {byzantine} hostile {honest} may be late in a round")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder with --out")
    with ExitStack() as opened:
        folder = out or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rpel-demo-")))
        show = opened.enter_context(_showing())
        try:
            results = run_demo(setting, folder, show, terminal.say)
        except ChildError as error:
            terminal.say(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            terminal.say("interrupted; all peers have been ended")
            raise typer.Exit(130) from None
    if not terminal.printed(results, as_json):
        _print_demo(results)


@contextmanager
def _showing() -> Iterator["Show"]:
    """A live table on stderr where a person looks; now and then a line where none does."""
    told = ("", -1)
    with terminal.live(Console(stderr=True, highlight=False)) as shown:

        def show(scene: "Scene") -> None:
            nonlocal told
            part = scene.round * 6 // scene.rounds
            title = f"{scene.rule}: round {scene.round} of {scene.rounds}"
            if shown is not None:
                shown.update(members_now(title, scene.seen, scene.hostile), refresh=True)
            elif told != (told := (scene.rule, part)):
                known = [member.accuracy for member in scene.seen if member.accuracy is not None]
                mean = f", accuracy {sum(known) / len(known):.4f} on average" if known else ""
                terminal.say(title + mean)

        yield show


def _period(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"period {text!r} is not valid: it takes auto, or seconds from 0.1 to 3600")
    return seconds


def _print_demo(results: dict[str, Any]) -> None:
    """Both ends side by side."""
    table = terminal.table("rule", "mean accuracy", "worst peer", right=("mean accuracy", "worst peer"))
    for name, end in (("nnm+trimmed_mean (robust)", ""), ("mean (plain averaging)", "_averaging")):
        table.add_row(name, *(f"{results[f'accuracy_{kind}{end}']:.4f}" for kind in ("mean", "worst")))
    outcomes = ", ".join(f"{count} {name}" for name, count in results["outcomes"].items() if count)
    console = terminal.stdout()
    console.print(
        f"{results['peers']} peers, {results['byzantine']} of them hostile ({results['attack']}), "
        f"{results['rounds']} rounds; each pulls {results['pull']} and trims {results['b_hat']}"
    )
    console.print(table)
    console.print(
        f"rounds of the honest peers with the robust rule: {outcomes}; {results['seconds']:.0f} s in all"
    )
    console.print(_verdict(results))


def _verdict(results: dict[str, Any]) -> str:
    """What the two ends say about the attack, in one sentence."""
    robust, averaging = results["accuracy_mean"], results["accuracy_mean_averaging"]
    ends = f"{robust:.0%} with the robust rule, {averaging:.0%} with plain averaging"
    if not results["byzantine"]:
        return f"without hostile peers: {ends}"
    lost = robust - averaging
    verb = "ruined" if lost > 0.2 else "harmed" if lost >= 0.05 else "hardly harmed"
    return f"{results['byzantine']} hostile peers of {results['peers']} {verb} plain averaging: {ends}"
