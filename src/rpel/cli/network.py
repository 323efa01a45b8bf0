"""``rpel network``: plan a network of real peers, change it, watch it, and try what it survives."""

import asyncio
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from rpel.cli import options as opt
from rpel.cli import terminal
from rpel.text import count, duration, human_bytes, number, percent, visible
from rpel.types import CONFIDENCE, ROBUST_RULE

if TYPE_CHECKING:
    from rpel.peer.config.membership import Membership
    from rpel.peer.ops.create import NewNetwork
    from rpel.peer.ops.demo import Frame
    from rpel.peer.ops.drill import Strike
    from rpel.peer.ops.status import MemberStatus, Observer, Report

app = typer.Typer(
    name="network",
    help="Networks of real peers: plan one, add and remove members, see how it is, try what it survives.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Members = Annotated[Path, Option(help="The network's members.toml.")]
Config = Annotated[Path, Option(help="The settings of the member that asks.")]
FromRound = Annotated[
    int | None,
    Option(help="The round from which it is in force; unset: the beginning, before the network has begun."),
]
Hostile = Annotated[int | None, Option("--byzantine", help="How many may be hostile, b. [as before]")]
Late = Annotated[int | None, Option("--no-shows", help="Honest peers that may be late. [as before]")]
Attack = Annotated[str, Option(help="What hostile peers send: an attack such as foe or alie(z=1.5).")]
Entries = Annotated[list[Path], Argument(metavar="ENTRY...", help="Entries, as rpel peer init prints them.")]
MEMBERS, SETTINGS = Path("members.toml"), Path("peer.toml")
HOURS = "Rounds only within these hours of a day, UTC, such as 20:00-06:00"


# --- make one, and change it --------------------------------------------------------------------------------


@app.command()
def new(
    peers: Annotated[int, Option(help="How many peers the network will have, n.")],
    byzantine: Annotated[int, Option(help="How many of them may be hostile, b.")],
    rounds: Annotated[int, Option(help="Rounds of the whole training, T.")],
    no_shows: Annotated[
        int | None,
        Option(help="Rounds go on with this many honest peers late. [2, fewer if n is small]"),
    ] = None,
    confidence: Annotated[float, Option(help="Probability of the plan, all peers and rounds.")] = CONFIDENCE,
    task: Annotated[
        str, Option(help="mnist-sample, mnist, your own as module:task, or none: loops with rpel.Peer.")
    ] = "mnist-sample",
    model: Annotated[
        Path | None, Option(help="Begin with this safetensors file; your own task needs it. [from --seed]")
    ] = None,
    period: Annotated[float, Option(help="Length of a round in seconds.")] = 60.0,
    deadline: Annotated[
        float | None, Option(help="Seconds into a round at which pulls end. [0.6 of the period]")
    ] = None,
    epoch: Annotated[
        str | None,
        Option(help="When round 1 begins: 2030-01-01T12:00Z, or +600 seconds. [the next full hour]"),
    ] = None,
    hours: Annotated[str, Option(help=f"{HOURS}. [the whole day]")] = "",
    rule: Annotated[str, Option(help="How answers are aggregated.")] = ROBUST_RULE,
    local_steps: Annotated[int, Option(help="Local steps per round.")] = 1,
    hyperparameters: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE",
            help="What all members train with: lr=0.1,batch_size=20, or JSON. All tasks know lr, momentum, "
            "weight_decay, batch_size and optimizer, built-in ones also model and partition.",
        ),
    ] = None,
    outer: Annotated[
        str,
        Option(help="A step after the aggregation, for many local steps: none, nesterov(0.7, momentum=0.9)."),
    ] = "none",
    allow_private: Annotated[
        bool, Option("--allow-private", help="Members may have private addresses (an office, a VPN).")
    ] = False,
    linger: Annotated[
        float, Option(help="Periods after the last round in which peers serve it to late members.")
    ] = 2.0,
    wire: Annotated[str, Option(help="How models travel: float32 or int8.")] = "float32",
    upstream: Annotated[
        str | None, Option(help="What a member can send, such as 20Mbit: prints the shortest period.")
    ] = None,
    run: Annotated[str, Option(help="The network's name, followed by 128 random bits. [the task's]")] = "",
    out: Annotated[Path, Option(help="Folder for members.toml and init.safetensors.")] = Path(),
    seed: Annotated[int, Option(help="Where a built-in task's initial model comes from.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Make a network: plan how many peers each one pulls from, and write the two files all members share.

    members.toml has the plan, the times and the hyper-parameters, and later one entry for each member;
    init.safetensors is the model that all begin with. With this plan rounds go on even if all hostile peers
    are silent and some honest ones are late.

    Example: rpel network new --peers 12 --byzantine 2 --rounds 200 --epoch +3600
    """
    from rpel.component import parse
    from rpel.peer.ops.create import new as write_network
    from rpel.peer.ops.create import notes, parse_epoch, stall_proof
    from rpel.planning.traffic import bits_per_second
    from rpel.record import parse_pairs

    if upstream is not None:
        bits_per_second(upstream)  # a wrong rate is refused before anything is written
    step = parse(outer)
    step_parameters = {f"outer_{key}": value for key, value in step.bind(["lr", "momentum"]).items()}
    plan = stall_proof(peers, byzantine, rounds, confidence, no_shows)
    network = write_network(
        plan, run=run, task=task, model=model, seed=seed, out=out, rule=rule, allow_private=allow_private,
        hyperparameters=parse_pairs(hyperparameters or [], "hyperparameters", "lr=0.1,momentum=0.9"),
        epoch=parse_epoch(epoch, datetime.now(UTC)), period=period, hours=hours, local_steps=local_steps,
        linger=linger, wire=wire, outer=step.name, **step_parameters, **opt.given(deadline=deadline),
    )  # fmt: skip
    for note in notes(plan, no_shows):
        terminal.say(f"note: {note}")
    shortest = None if upstream is None else network.shortest_period(upstream)
    if shortest is not None and period < shortest:
        terminal.say(f"note: with {upstream} rounds need {shortest:.3g} s, and the period is {period:g} s")
    if not terminal.printed(network.to_dict() | {"shortest_period": shortest}, as_json):
        print(_plan_text(network))
        if shortest is not None:
            print(f"shortest period with {upstream} upstream: {shortest:.3g} s")


def _plan_text(network: "NewNetwork") -> str:
    """Describe the plan, what it survives and costs, and what to do next."""
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
     rpel network add ENTRY.toml ...; rpel network show
4. Each operator starts the peer before the epoch, and asks the network while it waits:
     {start}
     rpel network status --config peer.toml"""


@app.command()
def add(
    entries: Entries, from_round: FromRound = None, byzantine: Hostile = None, no_shows: Late = None,
    members: Members = MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Add members: before the network begins to members.toml, later to members.next.toml.

    All entries are added or none. Then compare every fingerprint with its owner by telephone and give
    everybody the same file: a member is known by its fingerprint alone. A change that waits in
    members.next.toml is kept.

    Example: rpel network add clinic-1.toml clinic-2.toml
    """
    _change(members, from_round, as_json, add=entries, byzantine=byzantine, no_shows=no_shows)


@app.command()
def remove(
    ids: Annotated[list[str], Argument(metavar="ID...", help="Ids of the members that leave.")],
    from_round: FromRound = None, byzantine: Hostile = None, no_shows: Late = None,
    members: Members = MEMBERS, as_json: opt.Json = False,
) -> None:  # fmt: skip
    """Remove members, and plan anew for those that stay.

    Example: rpel network remove clinic-3 --from-round 600
    """
    _change(members, from_round, as_json, remove=ids, byzantine=byzantine, no_shows=no_shows)


@app.command()
def change(
    from_round: FromRound = None,
    period: Annotated[float | None, Option(help="Length of a round in seconds. [as before]")] = None,
    deadline: Annotated[
        float | None, Option(help="Seconds into a round at which pulls end. [the same share of it]")
    ] = None,
    pause_until: Annotated[
        str | None, Option(help="No round until then: 2030-01-01T12:00Z, or +86400 seconds from now.")
    ] = None,
    hours: Annotated[str | None, Option(help=f"{HOURS}; all: the whole day. [as before]")] = None,
    byzantine: Hostile = None,
    no_shows: Late = None,
    rounds: Annotated[int | None, Option(help="The last round, T. [as before]")] = None,
    replace: Annotated[
        list[Path] | None,
        Option(metavar="ENTRY", help="The new entry of a member with another key or address."),
    ] = None,
    members: Members = MEMBERS,
    as_json: opt.Json = False,
) -> None:
    """Change the plan, the pace, or a member's key: before the network begins, or from a round on.

    A member that gets a new key makes it with rpel peer init --dir new, and keeps it as peer.next.key and
    peer.next.crt beside the old one.

    Example: rpel network change --from-round 600 --period 120 --hours 20:00-06:00
    """
    from rpel.peer.ops.create import parse_epoch

    until = None if pause_until is None else parse_epoch(pause_until, datetime.now(UTC))
    _change(
        members, from_round, as_json, period=period, deadline=deadline, pause_until=until,
        hours="" if hours == "all" else hours, byzantine=byzantine, no_shows=no_shows, rounds=rounds,
        replace=replace or (),
    )  # fmt: skip


def _change(members: Path, from_round: int | None, as_json: bool, **changes: Any) -> None:
    from rpel.peer.ops.change import change

    changed = change(members, from_round, **changes)
    _print_cautions(changed.after)
    if not terminal.printed(changed.to_dict(), as_json):
        if changed.later:
            print(f"written:      {changed.path}")
        _print_lines([*changed.differences(), *changed.instructions()])


def _print_cautions(m: "Membership") -> None:
    for caution in m.cautions():
        terminal.say(f"note: {visible(caution)}")


def _print_lines(sentences: Iterable[str]) -> None:
    for line in "\n".join(sentences).split("\n"):
        print(visible(line))


@app.command()
def show(
    files: Annotated[
        list[Path] | None,
        Argument(metavar="[FILE [FILE]]", help="A members.toml; two: their differences. [members.toml]"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Show who is in members.toml, with fingerprints in groups of four, to be compared by telephone.

    Example: rpel network show members.toml members.next.toml
    """
    from rpel.peer.config.membership import Membership
    from rpel.peer.ops.change import compare
    from rpel.peer.ops.join import entry_lines

    files = files or [MEMBERS]
    if len(files) > 2:
        raise ValueError(f"show takes one file or two, not {len(files)}")
    if len(files) == 2:
        difference = compare(*files)
        if not terminal.printed(difference.to_dict(), as_json):
            _print_lines(difference.differences())
        return
    m = Membership.load(files[0], draft=True)
    _print_cautions(m)
    keys = ("id", "organisation", "url", "fingerprint")
    if not terminal.printed([{key: getattr(one, key) for key in keys} for one in m.members], as_json):
        _print_lines([line for member in m.members for line in entry_lines(member)])
        whole = f"{len(m.members)} of {count(m.nodes, 'member')}"
        print(f"{whole}; hash of the file's content {m.hash[:16]}")


# --- how it is ----------------------------------------------------------------------------------------------

_STATES = {"training": "green", "finished": "green", "starting": "yellow"}
_PULLS = ("round", "acc.", "ok", "late", "refused", "failed", "degraded")
_LONGEST_ID = 18  # so that the table fits 80 columns


@app.command()
def status(
    config: Config = SETTINGS,
    watch: Annotated[bool, Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[float, Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    step_seconds: Annotated[
        float | None, Option(min=0.0, help="How long the local steps of a round take. [measured, for a task]")
    ] = None,
    timeout: Annotated[float, Option(min=0.1, help="Seconds that pulling one model may take.")] = 60.0,
    as_json: opt.Json = False,
) -> None:
    """Ask every other member: is it there, with the same files, which time and round has it, how fast is it?

    Asks over mutual TLS with this member's key; the own peer need not run. What is shown of a member's rounds
    is what it says of itself: a hostile one may lie. Suggests a period from the slowest pull, twice over.
    Exit status 0: rounds can work; 1: not all is well, or the period is too short.

    With --watch, shows round, accuracy, pulls and state of every member until Ctrl-C (with --json one line
    each time). A member is excluded when more than b others say that they have proof that its key signed two
    models of one round (see rpel network verify).

    Example: rpel network status --config peer.toml
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.status import Observer, measure, measure_step

    observer = Observer.of(Config.load(config))
    if watch:
        asyncio.run(_watch(observer, every, as_json))
        return
    step = measure_step(observer) if step_seconds is None else step_seconds
    report = asyncio.run(_closing(observer, measure(observer, timeout=timeout, step_seconds=step)))
    coming = observer.watcher.announced(observer.now.membership)
    _print_cautions(observer.now.membership)
    next_hash = coming.hash if coming else ""
    if not terminal.printed(report.to_dict() | {"coming": next_hash}, as_json):
        terminal.stdout().print(_report_table(report, next_hash))
        print("\n".join(_verdict(observer.now.membership, report, coming)))
    if not report.well:
        raise typer.Exit(1)


async def _closing(observer: "Observer", question: Any) -> Any:
    try:
        return await question
    finally:
        await observer.close()


def _report_table(report: "Report", coming: str) -> Table:
    """One row a member, with a sentence on what is wrong."""
    columns = ("member", "state", "round", "acc.", "same files", "clock", "pull", "MB/s", "remark")
    table = terminal.table(*columns, right=("round", "acc.", "clock", "pull", "MB/s"), fold=("remark",))
    for row in report.members:
        same, style = {True: "yes", False: "no", None: ""}[row.same_membership], "green"
        if coming and row.same_membership and row.coming != coming:
            same, style = "not the next", "yellow"
        numbers = (number(row.clock_offset, "+.3f", " s"), number(row.seconds, ".3f", " s"))
        table.add_row(
            row.id, Text(row.state.value, _STATES.get(row.state.value, "red")), str(row.round),
            number(row.accuracy, ".4f"), Text(same, style), *numbers,
            number(row.megabytes_per_second, ".3g"), row.remark,
        )  # fmt: skip
    return table


def _verdict(m: "Membership", report: "Report", coming: "Membership | None") -> Iterator[str]:
    """Yield lines on the members, on whether they reach this one, and on the period."""
    from rpel.peer.ops.create import MARGIN
    from rpel.peer.ops.status import SHORTEST_PERIOD

    wrong = ", ".join(member.id for member in report.members if not member.well)
    yield f"not well: {wrong}" if wrong else f"all {len(report.members)} other members are well"
    if not report.running:
        yield "your peer does not run here: start it and ask again to learn who reaches you"
    elif not report.called:
        yield "nobody was asked to call back: they do so once a minute at most"
    else:
        more = (
            "" if all(report.called) else ": is the port of your url open? docs/operators.md, no port to open"
        )
        yield f"{sum(report.called)} of {len(report.called)} reach you{more}"
    if coming is not None:
        have = sum(member.coming == coming.hash for member in report.members)
        yield (
            f"the next membership takes effect at round {coming.from_round}: {have} of {len(report.members)} "
            "others have it"
        )
    if report.suggested_period is None:
        yield "no pull was measured, so no period is suggested"
        return
    slowest = max(member.seconds or 0.0 for member in report.members)
    step = "unknown, give --step-seconds" if report.step_seconds is None else f"{report.step_seconds:.2g} s"
    enough = "is enough" if report.long_enough else "is SHORTER than that"
    yield f"shortest period: {report.suggested_period:.2g} s; the period of {m.period:g} s {enough}"
    yield (
        f"({MARGIN:g} times the pulls of a busy round, {slowest:.2g} s each, and local steps, {step}, "
        f"before the deadline at {m.deadline / m.period:.2g} of a round; at least {SHORTEST_PERIOD:g} s)"
    )


async def _watch(observer: "Observer", every: float, as_json: bool) -> None:
    from rpel.peer.ops.status import MemberStatus, excluded, look, remember

    console = Console(highlight=False)
    members: list[MemberStatus] = []
    with nullcontext() if as_json else terminal.live(console) as live:
        try:
            while True:
                observer.follow()
                members, m = remember(members, await look(observer)), observer.now.membership
                facts = {"run": m.run, "round": observer.clock.round(), "rounds": m.rounds}
                table = members_table(_title(observer), members, excluded=excluded(members, m.byzantine))
                if live is not None:
                    live.update(table, refresh=True)
                elif not terminal.printed(facts | {"members": members}, as_json, indent=None):
                    console.print(table, soft_wrap=True)
                await asyncio.sleep(every)
        finally:
            await observer.close()


def _title(observer: "Observer") -> str:
    m, now = observer.now.membership, observer.clock.round()
    left = duration(-observer.clock.position())
    when = f"begins in {left}" if now < 1 else f"round {min(now, m.rounds)} of {m.rounds}"
    return f"network {m.run}: {when}" + ("; over" if now > m.rounds else "")


def members_table(
    title: str,
    members: Sequence["MemberStatus"],
    hostile: Collection[str] = (),
    excluded: Collection[str] = (),
) -> Table:
    """One row a member; what hostile ones say of themselves is not shown."""
    table = terminal.table("peer", *_PULLS, "state", right=_PULLS)
    table.title, table.title_style, table.padding = Text(visible(title)), "bold", (0, 1, 0, 0)
    table.columns[0].no_wrap = table.columns[-1].no_wrap = True
    for member in members:
        state, numbers = member.state.value, [""] * len(_PULLS)
        if member.answered and (member.round or member.pulls):
            numbers = _numbers(member)
        style = _STATES.get(state, "red")
        if member.id in hostile:
            numbers, state, style = [""] * len(_PULLS), "hostile", "magenta"
        elif member.id in excluded:
            state, style = "excluded", "magenta"
        short = member.id if len(member.id) <= _LONGEST_ID else f"{member.id[: _LONGEST_ID - 1]}…"
        name = Text(short, style if member.id in hostile else "")
        table.add_row(name, *numbers, Text(state.replace("membership", "file"), style))
    return table


def _numbers(member: "MemberStatus") -> list[str]:
    """List the numbers of a member; failed pulls were malformed or unreachable."""
    pulls = member.pulls
    failed = pulls["malformed"] + pulls["unreachable"]
    counts = (pulls["ok"], pulls["late"], pulls["refused"], failed, member.degraded)
    return [str(member.round), number(member.accuracy, ".4f"), *map(str, counts)]


# --- what it survives ---------------------------------------------------------------------------------------


@app.command()
def rehearse(
    config: Config = SETTINGS,
    attack: Attack = "alie",
    rounds: Annotated[int | None, Option(min=1, help="Fewer rounds, for a quick look.")] = None,
    seed: Annotated[int, Option(help="Where all randomness comes from.")] = 0,
    as_json: opt.Json = False,
) -> None:
    """Simulate the network that members.toml plans on this member's own data, split among its honest members.

    The hostile ones attack. Trains twice, by the network's rule and by plain averaging; nothing is written,
    and nobody is contacted. The other members' data are not here: if theirs are unlike yours, expect less.

    Example: rpel network rehearse --config peer.toml --attack alie
    """
    from rpel.peer.ops.rehearse import rehearse

    with terminal.display() as shown:
        results = rehearse(config, attack, rounds=rounds, seed=seed, progress=shown.tick)
    if terminal.printed(results, as_json):
        return
    hostile = f"{results['byzantine']} of {results['nodes']} members hostile ({results['attack']})"
    print(f"{hostile}, {results['rounds']} rounds, batches of {results['batch_size']}; {results['measure']}:")
    for name, after in ((results["rule"], ""), ("plain averaging", "_averaging")):
        ends = (results[f"{end}{after}"] for end in ("mean", "worst"))
        mean, worst = (number(end, ".4f", missing="overflowed") for end in ends)
        print(f"  {name:<20} mean {mean} worst {worst}")


@app.command()
def demo(
    peers: Annotated[int, Option(help="How many peers, n; each is a process of its own.")] = 12,
    byzantine: Annotated[int, Option(help="How many of them are hostile, b.")] = 2,
    rounds: Annotated[int, Option(help="Rounds of training, T.")] = 30,
    attack: Attack = "foe",
    no_shows: Annotated[
        int | None, Option(help="Honest peers that may be late. [2, fewer if n is small]")
    ] = None,
    period: Annotated[
        str, Option(help="Seconds of a round, or auto: as short as this machine allows.")
    ] = "auto",
    seed: Annotated[int, Option(help="Where the first model and the shares of data come from.")] = 0,
    out: Annotated[Path | None, Option(help="Keep keys, logs and states in this folder. [none]")] = None,
    as_json: opt.Json = False,
) -> None:
    """Show a network at work on this machine: real processes, keys and TLS, hostile members among them.

    Every peer holds its own share of an MNIST sample and pulls from a few others each round; the hostile ones
    answer with forged models, the same to all. Then the same network runs again with plain averaging, and
    both results are shown side by side.

    Example: rpel network demo --peers 12 --byzantine 2 --attack foe
    """
    from rpel.peer.ops.demo import Demonstration
    from rpel.peer.ops.demo import demo as run_demo
    from rpel.processes import ChildError

    setting = Demonstration(peers, byzantine, rounds, attack, no_shows, _parse_period(period), seed)
    late = setting.plan.no_shows
    if no_shows is None and late < 2:
        honest = f"only {count(late, 'honest one')}" if late else "no honest one"
        terminal.say(f"note: among {peers} peers with {byzantine} hostile {honest} may be late in a round")
    if out is not None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder with --out")
    with ExitStack() as opened:
        folder = out or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="rpel-demo-")))
        show = opened.enter_context(_frames())
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
def _frames() -> Iterator[Callable[["Frame"], None]]:
    """Show a live table on stderr on a terminal, and elsewhere a line from time to time."""
    said: tuple[str, int] = ("", -1)
    with terminal.live(Console(stderr=True, highlight=False)) as live:

        def show(frame: "Frame") -> None:
            nonlocal said
            title = f"{frame.rule}: round {frame.round} of {frame.rounds}"
            if live is not None:
                live.update(members_table(title, frame.members, frame.hostile), refresh=True)
                return
            after, mean = frame.measured
            if said != (said := (frame.rule, after)):
                more = "" if mean is None else f", accuracy {mean:.4f} on average after round {after}"
                terminal.say(title + more)

        yield show


def _parse_period(text: str) -> float | None:
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
    """Print both networks' results side by side, and what they say about the attack."""
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
    robust, averaging = results["accuracy_mean"], results["accuracy_mean_averaging"]
    lost, who = robust - averaging, f"{results['byzantine']} hostile peers of {results['peers']}"
    verb = "ruined" if lost > 0.2 else "harmed" if lost >= 0.05 else "hardly harmed"
    verdict = f"{who} {verb} plain averaging" if results["byzantine"] else "without hostile peers"
    console.print(f"{verdict}: {robust:.0%} with the robust rule, {averaging:.0%} with plain averaging")


@app.command()
def drill(
    attack: Annotated[
        str,
        Option(
            help="An attack, such as alie(z=1.5), or a misbehaviour: silence, slow, old_round, "
            "wrong_size, nan, garbage, equivocate, flood."
        ),
    ],
    config: Annotated[Path, Option(help="The settings of the member that turns hostile.")] = SETTINGS,
    allies: Annotated[
        str, Option(help="Ids of other hostile members, with commas between: their models are left out.")
    ] = "",
    as_json: opt.JsonLines = False,
) -> None:
    """Be a hostile member of your own network, to see that it holds.

    It takes part with the key of a real member, pulls what the honest members publish, forges one model, and
    sends it to all who ask before the deadline; or it misbehaves: it keeps silent, sends 1 byte a second,
    sends old rounds, wrong sizes, NaN, garbage or another model to each, or floods the others with requests
    (200 a second unless rate= says otherwise, 1000 at most).

    Use it only on a network that is yours and whose members know of the drill: against others it is an
    attack.

    Example: rpel network drill --config peer.toml --attack alie --allies clinic-4,clinic-7
    """
    from rpel.peer.config.settings import Config
    from rpel.peer.ops.drill import HostileMember

    def report(strike: "Strike") -> None:
        if not terminal.printed(strike, as_json, indent=None):
            print(strike.sentence(), flush=True)

    others = [ally.strip() for ally in allies.split(",") if ally.strip()]
    hostile = HostileMember(Config.load(config), attack, others, report)
    m = hostile.now.membership
    terminal.say(
        f"drill: {hostile.now.names[hostile.now.me]!r} turns hostile in the network {m.run!r} ({attack}); "
        "this is for your own network, with its members knowing"
    )
    asyncio.run(hostile.run())


# --- what can be proven -------------------------------------------------------------------------------------


@app.command()
def verify(
    file: Annotated[Path, Argument(help="A file of a peer's evidence folder, or its audit.jsonl.")],
    members: Members = MEMBERS,
    as_json: opt.Json = False,
) -> None:
    """Check a proof that a member signed two models of one round, or a member's signed log.

    Whoever sent the file need not be trusted: signatures are verified with the keys in members.toml. A proof
    excludes a key and says nothing of an intention: two machines that run with one key are excluded, too. Of
    a signed log (audit.jsonl) it is checked that no line was changed, or left out but at its end, and that
    the member it names signed it; lines that could not be written and rounds without a line are listed. Exit
    status 0: proven; 1: not.

    Example: rpel network verify state/evidence/clinic-7-42.json --members members.toml
    """
    from rpel.peer.config.membership import Membership
    from rpel.peer.io.proofs import verify as verify_evidence
    from rpel.peer.state.journal import verify_audit

    if file.is_dir():
        raise ValueError(f"{file} is a folder: give a peer's audit.jsonl, or a file of its evidence")
    m = Membership.load(members)
    try:
        if file.suffix == ".jsonl":
            _print_log(file, verify_audit(file, m), as_json)
            return
        proof = verify_evidence(file, m)
    except ValueError as error:
        if not terminal.printed({"proven": False, "reason": str(error)}, as_json, indent=None):
            print(f"not proven: {error}")
        raise typer.Exit(1) from None
    member = m.members[proof.member]
    digests = [signed.digest.hex() for signed in (proof.first, proof.second)]
    facts = {"proven": True, "member": member.id, "fingerprint": member.fingerprint, "round": proof.round}
    if not terminal.printed(facts | {"digests": digests}, as_json, indent=None):
        organisation = visible(member.organisation) or "no organisation named"
        print(
            f"proven: {member.id} ({organisation}) signed two models of round "
            f"{proof.round}\n  {digests[0]}\n  {digests[1]}\nkey: {member.fingerprint}"
        )


def _print_log(path: Path, lines: Sequence[dict[str, Any]], as_json: bool) -> None:
    from rpel.peer.state.journal import missing_rounds

    last, missing = lines[-1], missing_rounds(lines)
    gaps = [{"before_round": line.get("round"), **line["gap"]} for line in lines if "gap" in line]
    facts = {"proven": True, "member": last["member"], "lines": len(lines), "round": last["round"]}
    if terminal.printed(facts | {"gaps": gaps, "rounds_missing": missing}, as_json, indent=None):
        return
    print(f"proven: {path} is whole, {len(lines)} lines to round {last['round']}, signed by {last['member']}")
    for gap in gaps:
        lost = count(gap["lines"], "line")
        print(f"  before round {gap['before_round']}: {lost} not written ({visible(gap['reason'])})")
    if missing:
        ranges = [f"{first}" if first == end else f"{first}-{end}" for first, end in missing]
        print(f"  rounds without a line: {', '.join(ranges)}")
