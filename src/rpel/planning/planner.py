"""The answer: the smallest pull, what it must survive, how certain that is, what it costs,
and its neighbours."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rpel import plots, theory
from rpel.errors import nearest
from rpel.planning.law import COMFORT, Question, check_question, check_sizes
from rpel.planning.paper import bounded, bounded_b_hat, default_grid, simulate_max, simulated
from rpel.planning.traffic import bits_per_second, shortest_period
from rpel.planning.windows import check_window, is_exact
from rpel.types import CONFIDENCE, WireName
from rpel.wire import Wire

Method = Literal["exact", "simulate", "bound"]


@dataclass(frozen=True)
class Choice:
    """One pull and what it gives: the b̂ it must survive and the exact probability that b̂ is never exceeded.

    ``window``: the answers that a node aggregates, ``pull`` of each round it remembers."""

    pull: int
    b_hat: int
    fraction: float
    probability: float
    kappa: float | None
    window: int


@dataclass(frozen=True)
class Plan:
    """An answer: pull ``pull`` peers, survive ``b_hat`` hostile answers; this holds with ``probability``.

    ``memory`` is c, the rounds whose answers a node aggregates, and ``window`` c·s, how many those are;
    ``aggregations`` counts those of all honest nodes where it is not one a round each. ``to_dict`` gives the
    JSON of the command line, where ``lambda_`` is called ``lambda``.
    """

    nodes: int
    byzantine: int
    rounds: int
    pull: int
    b_hat: int
    fraction: float
    probability: float
    confidence: float
    max_fraction: float
    feasible: bool
    best_below_half: dict[str, float] | None
    messages_per_round: int
    messages_all_to_all: int
    bytes_per_round: int | None
    wire: WireName
    bytes_per_message: int | None
    shortest_period: float | None
    method: Method
    silent: bool
    no_shows: int
    kappa: float | None
    alpha: float | None
    lambda_: float | None
    theorem_applies: bool
    pull_noptlog: float | None
    comfortable: Choice | None
    alternatives: tuple[Choice, ...]
    memory: int
    window: int
    aggregations: int | None

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, keys as in the documentation.

        >>> plan(nodes=30, byzantine=6, rounds=200, pull=15).to_dict()["b_hat"]
        6
        """
        fields = asdict(self)
        fields["alternatives"] = list(fields["alternatives"])
        return {key.rstrip("_"): value for key, value in fields.items()}

    @property
    def models(self) -> int:
        """m: what a node aggregates, its own model included."""
        return self.window + 1

    @property
    def exact(self) -> bool:
        """Whether the probability is exact; by the lemma, and for long memories, it is a lower bound."""
        return self.method != "bound" and is_exact(self.nodes, self.byzantine, self.pull, self.memory)

    def question(self) -> Question:
        """What this plan answers."""
        fraction = Fraction(self.max_fraction).limit_denominator(10**9)
        return Question(
            self.nodes, self.byzantine, self.rounds, self.confidence, fraction, self.silent, self.no_shows,
            memory=self.memory, aggregations=self.aggregations,
        )  # fmt: skip

    def reduction(self) -> theory.Reduction | None:
        """The contraction constants of a round under this plan; None with a memory:
        the theorem says nothing of it."""
        if self.memory > 1:
            return None
        return theory.reduction(self.nodes, self.byzantine, self.pull, self.b_hat)


def plan(
    *,
    nodes: int,
    byzantine: int,
    rounds: int,
    pull: int | None = None,
    confidence: float = CONFIDENCE,
    max_fraction: float | Fraction = 0.5,
    method: Method = "exact",
    silent: bool = False,
    no_shows: int = 0,
    simulations: int = 5,
    grid: Sequence[int] | None = None,
    seed: int = 0,
    parameters: int | None = None,
    wire: WireName = "float32",
    upstream: str | float | None = None,
    memory: int = 1,
    aggregations: int | None = None,
) -> Plan:
    """Find the smallest pull (or judge the given one) for ``nodes``, ``byzantine`` of them hostile,
    over ``rounds``.

    With ``silent`` a round must also go on when every hostile peer stays silent and ``no_shows`` honest ones
    are late. With ``parameters`` (d) bytes are counted, of models sent as ``wire`` says; with ``upstream``, a
    rate such as "20Mbit", the shortest period is given in which a node can answer all who ask it.
    ``memory`` c: nodes aggregate the answers of their last c rounds, whose draws are disjoint.
    ``aggregations``: of all honest nodes together, where it is not one a round each.
    Raises ValueError, in one sentence with the nearest feasible choice, when there is no answer.

    >>> p = plan(nodes=100_000, byzantine=10_000, rounds=200)
    >>> p.pull, p.b_hat, round(p.probability, 4)
    (34, 17, 0.992)
    >>> plan(nodes=100, byzantine=10, rounds=200, memory=2).pull  # without memory it is 16
    8
    """
    for s in chain([pull], grid or ()):
        check_sizes(nodes, byzantine, rounds, s)
        check_window(nodes, s or 1, memory)
    _check_method(method, simulations, parameters)
    line = _line(parameters, wire, upstream)
    if method != "exact" and (memory > 1 or aggregations is not None):
        raise ValueError(f"method {method!r} counts one aggregation a node and round: the nearest is 'exact'")
    # The fraction that was meant: .1 is 1/10, and 1/3 in floating point is a third.
    fraction = (
        Fraction(max_fraction).limit_denominator(10**9) if math.isfinite(max_fraction) else Fraction(-1)
    )
    case = Question(
        nodes,
        byzantine,
        rounds,
        confidence,
        fraction,
        silent,
        no_shows,
        memory=memory,
        aggregations=aggregations,
    )
    check_question(case)
    chosen = _choose(case, pull, method, simulations, grid, seed)
    if chosen is None:
        raise ValueError(_nothing_feasible(case, grid))
    return _answer(case, *chosen, method, line)


def comfortable(
    *,
    nodes: int,
    byzantine: int,
    rounds: int,
    confidence: float = CONFIDENCE,
    max_fraction: float | Fraction | None = None,
    silent: bool = False,
    no_shows: int = 0,
    memory: int = 1,
    aggregations: int | None = None,
) -> Plan:
    """The plan that a run or a network takes where nobody says how many to pull.

    The smallest s with b̂/(s+1) ≤ 1/3 and s+1−2b̂ ≥ 3, so that rules can be told apart; where there is none,
    the feasible one that leaves most models after trimming. max_fraction: another limit in place of 1/3,
    which is kept to.

    >>> [comfortable(nodes=n, byzantine=b, rounds=60).pull for n, b in ((20, 4), (7, 2), (4, 1), (100, 45))]
    [11, 6, 3, 99]
    """
    limit = Fraction(1, 2) if max_fraction is None else max_fraction
    least = plan(
        nodes=nodes, byzantine=byzantine, rounds=rounds, confidence=confidence, max_fraction=limit,
        silent=silent, no_shows=no_shows, memory=memory, aggregations=aggregations,
    )  # fmt: skip
    case = least.question()
    fraction = case.max_fraction
    wider = (
        replace(case, margin=3).smallest_pull() if fraction > COMFORT and max_fraction is not None else None
    )
    pull = wider or case.comfortable_pull() or least.pull
    return _answer(case, pull, case.b_hat(pull), "exact", Line())


@dataclass(frozen=True)
class Line:
    """How models travel: as what, how large one is, and how fast a node sends."""

    wire: WireName = "float32"
    message: int | None = None
    upstream: str | float | None = None


def _line(parameters: int | None, wire: WireName, upstream: str | float | None) -> Line:
    if wire not in get_args(WireName):
        raise ValueError(f"wire {wire!r} is unknown: {nearest(wire, get_args(WireName))}")
    if upstream is not None:
        bits_per_second(upstream)
        if parameters is None:
            raise ValueError("a period follows from upstream and the size of a model: parameters is missing")
    return Line(wire, None if parameters is None else Wire(wire).nbytes(parameters), upstream)


def _answer(case: Question, pull: int, b_hat: int, method: Method, line: Line) -> Plan:
    """What this pull and b̂ give."""
    n = case.nodes
    holds = case.probability(pull, b_hat)
    if method == "bound":
        holds = theory.lemma_effective_byzantine(n, case.byzantine, pull, b_hat, case.rounds)
    window = case.window(pull)
    red = theory.reduction(n, case.byzantine, window, b_hat)
    feasible = case.feasible(pull, b_hat) and (method != "bound" or holds >= case.confidence)
    half = window // 2  # the largest b̂ with 2b̂ < m
    proven = red if case.memory == 1 else None  # κ is relative to the moved answers; of more nothing is known
    noptlog = theory.lemma_noptlog(n, case.byzantine, case.rounds, case.confidence)
    return Plan(
        **{key: value for key, value in vars(case).items() if key != "margin"}
        | {"max_fraction": float(case.max_fraction)},
        pull=pull,
        b_hat=b_hat,
        window=window,
        fraction=b_hat / (window + 1),
        probability=holds,
        feasible=feasible,
        best_below_half=None if feasible else {"b_hat": half, "probability": case.probability(pull, half)},
        messages_per_round=n * pull,
        messages_all_to_all=n * (n - 1),
        bytes_per_round=None if line.message is None else n * pull * line.message,
        wire=line.wire,
        bytes_per_message=line.message,
        shortest_period=(
            None
            if line.message is None or line.upstream is None
            else shortest_period(n, pull, line.message, line.upstream)
        ),
        method=method,
        kappa=red.kappa if red else None,
        alpha=proven.alpha if proven else None,
        lambda_=proven.lambda_ if proven else None,
        theorem_applies=proven is not None and proven.contracts,
        pull_noptlog=None if math.isinf(noptlog) else noptlog,
        comfortable=_comfortable(case),
        alternatives=tuple(_choice(case, s) for s in range(max(1, pull - 2), min(case.widest, pull + 3) + 1)),
    )


def _choose(
    case: Question, pull: int | None, method: Method, simulations: int, grid: Sequence[int] | None, seed: int
) -> tuple[int, int] | None:
    """(s, b̂) by the given method; with a pull, its b̂ whether feasible or not."""
    pulls: Iterable[int] = sorted(grid) if grid else default_grid(case.nodes)
    if method == "exact":
        if pull is None:
            pull = case.smallest_pull() if grid is None else _first_feasible(case, pulls)
        return None if pull is None else (pull, case.b_hat(pull))
    if method == "simulate":
        if pull is None:
            return simulated(case, pulls, simulations, seed)
        counts = simulate_max(
            case.nodes, case.byzantine, pull, case.rounds, simulations=simulations, seed=seed
        )
        return pull, max(counts)
    if pull is None:
        return bounded(case, pulls)
    b_hat = bounded_b_hat(case, pull)
    return pull, case.b_hat(pull) if b_hat is None else b_hat


def _first_feasible(case: Question, pulls: Iterable[int]) -> int | None:
    return next((s for s in pulls if case.feasible(s, case.b_hat(s))), None)


def _choice(case: Question, pull: int) -> Choice:
    b_hat, window = case.b_hat(pull), case.window(pull)
    red = theory.reduction(case.nodes, case.byzantine, window, b_hat)
    return Choice(
        pull, b_hat, b_hat / (window + 1), case.probability(pull, b_hat), red.kappa if red else None, window
    )


def _comfortable(case: Question) -> Choice | None:
    """What runs and networks take: the smallest feasible pull leaves m − 2b̂ = 1 and the worst κ."""
    pull = case.comfortable_pull()
    return None if pull is None else _choice(case, pull)


def mis_specified(p: Plan, rows: int = 8) -> list[dict[str, float]]:
    """P(b̂ is never exceeded) when the true number of hostile nodes is larger than planned,
    until it is below 1 %.

    >>> wrong = mis_specified(plan(nodes=100, byzantine=10, rounds=200, pull=15, confidence=0.97))
    >>> wrong[1]["byzantine"], round(wrong[1]["probability"], 3)
    (11, 0.915)
    """
    step = max(1, p.byzantine // 25)
    table: list[dict[str, float]] = []
    for true in range(p.byzantine, (p.nodes + 1) // 2, step):
        held = replace(p.question(), byzantine=true).probability(p.pull, p.b_hat)
        table.append({"byzantine": true, "probability": held})
        if len(table) > rows or held < 0.01:
            break
    return table


def theorem(p: Plan, L: float, sigma: float, G: float, gap: float) -> theory.Convergence | None:
    """The convergence theorem for this plan and these constants; None where it does not apply.

    >>> theorem(plan(nodes=100, byzantine=10, rounds=200), L=1, sigma=1, G=1,
    ...     gap=1) is None  # α is far above 1
    True
    """
    red = p.reduction()
    if red is None:
        return None
    sizes = {"nodes": p.nodes, "byzantine": p.byzantine, "pull": p.pull, "b_hat": p.b_hat, "rounds": p.rounds}
    return theory.convergence(red, **sizes, L=L, sigma=sigma, G=G, gap=gap)


# --- pictures -----------------------------------------------------------------------------------------------


def draw(
    p: Plan,
    path: str | Path,
    figure: Literal["fraction", "messages"] = "fraction",
    style: plots.Style = "screen",
) -> None:
    """Draw b̂/(s+1) against s with its quantile band,
    or messages per round against n for the same hostile share."""
    _draw_fraction(p, path, style) if figure == "fraction" else _draw_messages(p, path, style)


def _draw_fraction(p: Plan, path: str | Path, style: plots.Style) -> None:
    case = p.question()
    most = min(case.widest, max(2 * p.pull, 20))
    pulls = sorted({round(s) for s in np.linspace(1, most, min(most, 200 if p.memory == 1 else 40))})
    levels = [replace(case, confidence=q) for q in (0.01, 0.5, 0.99)]
    models = np.array([case.window(s) + 1 for s in pulls])
    low, median, high = (np.array([one.b_hat(s) for s in pulls]) / models for one in levels)
    title = f"n = {p.nodes:,}, b = {p.byzantine:,}, T = {p.rounds:,}: worst hostile share any node ever meets"
    plots.fraction_against_pull(path, pulls, median, low, high, title=title, chosen=p.pull, style=style)


def _draw_messages(p: Plan, path: str | Path, style: plots.Style) -> None:
    """From ten nodes to ten million: the exact s, the s of both lemmas, and everybody."""
    share = Fraction(p.byzantine, p.nodes)
    sizes = [n for n in (10**e * k for e in range(1, 7) for k in (1, 3)) if n >= 10]
    exact, lemma, log = [], [], []
    for n in sizes:
        case = replace(p.question(), nodes=n, byzantine=int(share * n), max_fraction=Fraction(1, 2))
        smallest, granted = case.smallest_pull(), bounded(replace(case, memory=1), default_grid(n))
        exact.append(n * (smallest or n - 1))
        lemma.append(n * (granted[0] if granted else n - 1))
        log.append(n * min(n - 1, theory.lemma_noptlog(n, case.byzantine, p.rounds, p.confidence)))
    curves: dict[str, Sequence[float]] = {
        "rpel, exact s": exact,
        "rpel, s of lemma effectiveByz": lemma,
        "rpel, s of lemma noptlog": log,
        "all-to-all": [n * (n - 1) for n in sizes],
    }
    title = f"{float(share):.1%} hostile, T = {p.rounds:,}, {p.confidence:.0%} sure"
    plots.messages_against_nodes(path, sizes, curves, title=title, style=style)


# --- bad input ----------------------------------------------------------------------------------------------


def _check_method(method: str, simulations: int, parameters: int | None) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method {method!r} is unknown: choose {', '.join(get_args(Method))}")
    for name, value in (("simulations", simulations), ("parameters", parameters)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _nothing_feasible(case: Question, grid: Sequence[int] | None) -> str:
    """One sentence: what was asked, that no pull gives it, and the nearest things that can be had."""
    pulls = sorted(grid) if grid else [s for s in default_grid(case.nodes) if s < case.widest] + [case.widest]
    best = min(pulls, key=lambda s: (Fraction(case.b_hat(s), case.window(s) + 1), s))
    b_hat, models = case.b_hat(best), case.window(best) + 1
    where = "no pull of the grid" if grid else "no pull"
    late = f" when {case.no_shows} honest peers are late" if case.no_shows else ""
    quiet = f" {'and' if late else 'when'} all hostile ones stay silent" if case.silent else ""
    needed, answers = "", ""
    if case.silent or case.no_shows:
        left = max(0, models - 1 - case.memory * case.no_shows - (b_hat if case.silent else 0))
        needed, answers = " and leaves 2 b_hat answers", f", {left} of {2 * b_hat} answers"
    most = _most_byzantine(case)
    return (
        f"{where} keeps b_hat/(s+1) at or below {float(case.max_fraction):.6g}{needed} for nodes "
        f"{case.nodes} and byzantine {case.byzantine}{late}{quiet}: the smallest fraction is "
        f"{b_hat / models:.6g} (pull {best}, b_hat {b_hat}{answers})"
        + ("" if grid or most is None else f", or plan for at most byzantine {most}")
    )


def _most_byzantine(case: Question) -> int | None:
    """The largest number of hostile nodes for which the same question has an answer;
    None if even 0 has none."""
    low, high = -1, case.byzantine
    while high - low > 1:
        middle = (low + high) // 2
        solved = replace(case, byzantine=middle).smallest_pull() is not None
        low, high = (middle, high) if solved else (low, middle)
    return low if low >= 0 else None
