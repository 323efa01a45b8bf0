"""What people read in a terminal: results as tables on stdout. Only words and layout; every number is handed in."""

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rpel.planning import Choice, Plan
from rpel.theory import Convergence, Reduction


def human_bytes(count: float) -> str:
    """A size in the unit that fits.

    >>> human_bytes(1_056_300_000)
    '1.06 GB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def percent(probability: float) -> str:
    """A probability with as many digits as it takes to see that it is not certain.

    >>> percent(0.973938), percent(1.0), percent(0.99999987)
    ('97.3938 %', '100 % (certain)', '99.999987 %')
    """
    if probability == 1:
        return "100 % (certain)"
    text = f"{100 * probability:.4f} %"
    return text if text != "100.0000 %" else f"{100 * probability:.10f}".rstrip("0") + " %"


def show_plan(console: Console, p: Plan) -> None:
    """The answer, what it costs, the neighbouring choices, and whether the theorem applies."""
    console.print(
        f"[bold]pull s = {p.pull}[/], survive b_hat = {p.b_hat} hostile answers "
        f"(b_hat/(s+1) = {p.b_hat}/{p.pull + 1} = {p.fraction:.4f})"
    )
    source = "lemma's lower bound" if p.method == "bound" else "exact"
    console.print(
        f"never exceeded by any of {p.nodes - p.byzantine:,} honest nodes in {p.rounds:,} rounds "
        f"with probability [bold]{percent(p.probability)}[/] ({source})"
    )
    share = p.messages_per_round / p.messages_all_to_all
    console.print(
        f"messages per round: {p.messages_per_round:,} against {p.messages_all_to_all:,} all-to-all ({share:.2%})"
        + (f"; bytes per round: {human_bytes(p.bytes_per_round)}" if p.bytes_per_round is not None else "")
    )
    if p.silent or p.no_shows:
        quiet = "all hostile peers silent and " if p.silent else ""
        left = p.pull - p.no_shows - (p.b_hat if p.silent else 0)
        console.print(
            f"with {quiet}{p.no_shows} honest ones late at least {left} answers come, {2 * p.b_hat} are needed"
        )
    console.print(_choices(p))
    _advice(console, p)


def _choices(p: Plan) -> Table:
    table = Table(title="neighbouring choices", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("s", "b_hat", "b_hat/(s+1)", "probability", "kappa"):
        table.add_column(column, justify="right")
    for choice in p.alternatives:
        style = "bold green" if choice.pull == p.pull else None
        table.add_row(*_choice_cells(choice), style=style)
    return table


def _choice_cells(c: Choice) -> tuple[str, ...]:
    kappa = "none: not a minority" if c.kappa is None else f"{c.kappa:.4g}"
    return str(c.pull), str(c.b_hat), f"{c.fraction:.4f}", percent(c.probability), kappa


def _advice(console: Console, p: Plan) -> None:
    if p.comfortable is not None and p.comfortable.pull > p.pull:
        c = p.comfortable
        console.print(
            f"comfortable: s = {c.pull} with b_hat = {c.b_hat} (fraction {c.fraction:.3f}); the smallest feasible s "
            f"has the worst kappa"
        )
    if p.theorem_applies:
        console.print(
            f"contraction: alpha = {p.alpha:.4g} < 1, lambda = {p.lambda_:.4g}: the convergence theorem applies"
        )
    elif p.alpha is not None:
        console.print(f"the convergence theorem does not apply to this setting (alpha = {p.alpha:.4g}, it needs < 1)")
    else:
        console.print("the convergence theorem does not apply: b_hat is not a minority of the s + 1 models")


def show_lemmas(console: Console, p: Plan) -> None:
    """What the paper's two lemmas ask for, and where they say nothing."""
    limit = p.nodes - 1
    if p.pull_noptlog is None:
        console.print("lemma noptlog: vacuous (it divides by b/n, which is 0)")
    else:
        verdict = f"vacuous: there are only {limit} others" if p.pull_noptlog > limit else "meaningful"
        console.print(f"lemma noptlog: s >= {p.pull_noptlog:,.0f} ({verdict})")
    if p.pull == limit and p.byzantine:
        console.print("lemma effectiveByz: vacuous below s = n - 1, where all are pulled and b_hat = b is certain")
    elif p.probability == 0:
        console.print(f"lemma effectiveByz: vacuous at s = {p.pull} (no b_hat below one half reaches its bound)")
    else:
        console.print(
            f"lemma effectiveByz: s = {p.pull}, b_hat = {p.b_hat} holds with at least {percent(p.probability)}"
        )


def show_mis_specified(console: Console, p: Plan, rows: Sequence[dict[str, float]]) -> None:
    """How the certainty falls when more nodes are hostile than planned for."""
    table = Table(
        title=f"if more than {p.byzantine} are hostile (s = {p.pull}, b_hat = {p.b_hat} kept)",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("hostile nodes", justify="right")
    table.add_column("probability that b_hat is never exceeded", justify="right")
    for row in rows:
        table.add_row(f"{row['byzantine']:,}", percent(row["probability"]))
    console.print(table)


def show_theory(console: Console, red: Reduction | None, result: Convergence | None) -> None:
    """The theorem's constants and bound, or one sentence on why there are none."""
    if red is None or result is None:
        why = "b_hat is not a minority" if red is None else f"alpha = {red.alpha:.4g} is not below 1"
        console.print(f"theorem: does not apply ({why}), so there is no bound to evaluate")
        return
    simple = "holds" if red.guaranteed else "fails"
    console.print(f"condition kappa + 1/h_hat < 1/6: {simple} (kappa = {red.kappa:.4g}, h_hat = {red.h_hat})")
    console.print(
        f"theorem: mean squared gradient at every honest node <= {result.bound:.6g} for eta <= {result.eta_max:.6g} "
        f"(c0 = {result.c0:.4g}, c1 = {result.c1:.4g}, c2 = {result.c2:.4g}, c3 = {result.c3:.4g})"
    )
    console.print(f"corollary: epsilon in the order of {result.corollary:.6g} (constants left out)")


# --- runs ------------------------------------------------------------------------------------------------------------


class Tick(Protocol):
    """What a run tells after each round (`rpel.simulation.run.Tick`)."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def accuracy_mean(self) -> float | None: ...
    @property
    def accuracy_worst(self) -> float | None: ...
    @property
    def byzantine_max(self) -> int: ...
    @property
    def b_hat(self) -> int: ...


class RunDisplay:
    """Progress of runs: a bar with the time left where a person looks, a plain line every tenth where none does."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, TextColumn("{task.fields[seen]}"), console=console, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bars.start()
            self.tasks[""] = self.bars.add_task("starting", total=None, seen="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def say(self, sentence: str) -> None:
        """A sentence above the bars."""
        self.console.print(sentence, markup=False)

    def tick(self, t: Tick) -> None:
        """A round is done."""
        if self.console.is_terminal:
            self._update(f"{t.name}, seed {t.seed}", t.round, t.rounds, _seen(t))
        elif t.round == t.rounds or t.round * 10 // t.rounds > (t.round - 1) * 10 // t.rounds:
            self.say(f"{t.name}, seed {t.seed}: round {t.round}/{t.rounds}  {_seen(t)}")

    def download(self, name: str, done: int, total: int | None) -> None:
        """Some bytes of a file came."""
        if self.console.is_terminal:
            size = human_bytes(done) + ("" if total is None else f" of {human_bytes(total)}")
            self._update(f"downloading {name}", done, total, size)
        elif total is not None and done == total:
            self.say(f"downloaded {name}, {human_bytes(done)}")

    def _update(self, label: str, done: int, total: int | None, seen: str) -> None:
        if "" in self.tasks:
            self.bars.remove_task(self.tasks.pop(""))
        if label not in self.tasks:
            self.tasks[label] = self.bars.add_task(label, total=total, seen=seen)
        self.bars.update(self.tasks[label], completed=done, seen=seen)


def _seen(t: Tick) -> str:
    hostile = f"hostile met {t.byzantine_max}, planned for {t.b_hat}"
    if t.accuracy_mean is None or t.accuracy_worst is None:
        return hostile
    return f"accuracy mean {t.accuracy_mean:.4f} worst {t.accuracy_worst:.4f}  {hostile}"


def show_run(console: Console, found: Mapping[str, Any]) -> None:
    """The end of a run, or of several seeds, in a short table; lines are never broken, so paths can be copied."""
    for label, text in _run_rows(found):
        console.print(f"[bold]{label:<19}[/]{escape(text)}")


def _run_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    seeds = f", {len(found['runs'])} seeds" if "runs" in found else f", seed {found['seed']}"
    hostile = f"{found['byzantine']:,} of {found['nodes']:,} nodes hostile"
    rows = [(found["name"], f"{found['method']} with {found['rule']} against {found['attack']}, {hostile}{seeds}")]
    for key in ("accuracy_mean", "accuracy_worst", "accuracy_median", "loss", "consensus"):
        text = f"{found[key]:.4g}" if key in ("loss", "consensus") else f"{found[key]:.4f}"
        if found[key] > 1e300:
            text = "overflowed"
        elif "intervals" in found:
            low, high = (found["intervals"][key][end] for end in ("low", "high"))
            text += f"  ({low:.4g} to {high:.4g})"
        rows.append((key.replace("_", " "), text))
    proof = found["certificate"]
    verdict = "held" if proof["held"] else f"violated {proof['violations_total']:,} times: see certificate.json"
    planned = f"b_hat {found['b_hat']} of pull {found['pull']} ({percent(found['probability'])})"
    rows.append(("hostile peers met", f"at most {proof['max_observed']}; planned for {planned}: {verdict}"))
    if proof["guarantee"] and not proof["guarantee"].startswith("the plan"):
        rows.append(("guarantee", proof["guarantee"]))
    sent = f"{found['messages']:,} models, {human_bytes(found['bytes'])} a round; {found['rounds']:,} rounds"
    rows += [("messages", sent), ("seconds", f"{found['seconds']:.1f}")]
    if found["path"] is not None:
        folders = [run["path"] for run in found.get("runs", [found])]
        rows += [("kept in" if i == 0 else "", folder) for i, folder in enumerate(folders)]
    return rows


def stdout() -> Console:
    """Where results go: plain, never broken lines."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def show_graph(console: Console, found: Mapping[str, Any]) -> None:
    """A fixed graph and whether the assumptions of the methods that use it hold."""
    console.print(
        f"[bold]{found['edges']:,} edges[/] among {found['nodes']:,} nodes ({found['graph']}), degrees "
        f"{found['degree_min']} to {found['degree_max']}: {found['messages']:,} messages a round"
    )
    console.print(
        f"{found['byzantine']:,} hostile ({found['placement']} placement): an honest node has at most "
        f"{found['hostile_neighbours_max']} hostile neighbours, the rules survive b_hat = {found['b_hat']}"
    )
    if found["placement"] == "adversarial":
        console.print(
            "attackers that choose their places may all sit beside one node, so b_hat must be b: honest nodes then "
            "clip or drop that many neighbours everywhere, which is the price of a fixed graph"
        )
    if found["nodes_beyond_b_hat"]:
        console.print(f"{found['nodes_beyond_b_hat']} honest nodes have more hostile neighbours than b_hat")
    whole = "is connected" if found["honest_connected"] else "is NOT connected"
    console.print(f"the honest part {whole}")
    enough = "holds" if found["sufficiently_connected"] else "does NOT hold"
    console.print(
        f"2b-connectivity, which these methods assume, {enough}: {found['connectivity']}-connected, "
        f"{found['connectivity_needed']} needed"
    )
