"""A plan: the smallest pull, what it must survive, with which probability, its costs and alternatives."""

import math
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, get_args

from rpel import theory
from rpel.errors import nearest
from rpel.planning.law import Question, check_question, check_sizes
from rpel.planning.paper import default_grid, lemma_noptlog
from rpel.planning.traffic import bits_per_second, shortest_period
from rpel.types import CONFIDENCE, WireName
from rpel.wire import Wire


@dataclass(frozen=True)
class Choice:
    """One pull, the b̂ it must survive, and the exact probability that b̂ is never exceeded."""

    pull: int
    b_hat: int
    fraction: float
    probability: float
    kappa: float | None


@dataclass(frozen=True)
class Plan:
    """An answer: pull ``pull`` peers, survive ``b_hat`` hostile answers; this holds with ``probability``.

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
    silent: bool
    no_shows: int
    kappa: float | None
    alpha: float | None
    lambda_: float | None
    theorem_applies: bool
    pull_noptlog: float | None
    comfortable: Choice | None
    alternatives: tuple[Choice, ...]
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
        return self.pull + 1

    def question(self) -> Question:
        """What this plan answers."""
        fraction = Fraction(self.max_fraction).limit_denominator(10**9)
        return Question(
            self.nodes, self.byzantine, self.rounds, self.confidence, fraction, self.silent, self.no_shows,
            aggregations=self.aggregations,
        )  # fmt: skip


def plan(
    *,
    nodes: int,
    byzantine: int,
    rounds: int,
    pull: int | None = None,
    confidence: float = CONFIDENCE,
    max_fraction: float | Fraction = 0.5,
    silent: bool = False,
    no_shows: int = 0,
    parameters: int | None = None,
    wire: WireName = "float32",
    upstream: str | float | None = None,
    aggregations: int | None = None,
) -> Plan:
    """Find the smallest pull, or judge the given one, for nodes of which some are hostile.

    With ``silent`` a round must also go on when every hostile peer stays silent and ``no_shows`` honest ones
    are late. With ``parameters`` (d) bytes are counted, of models sent as ``wire`` says; with ``upstream``, a
    rate such as "20Mbit", the shortest period is given in which a node can answer all who ask it.
    ``aggregations``: of all honest nodes together, where it is not one a round each.
    Raises ValueError, in one sentence with the nearest feasible choice, when there is no answer.

    >>> p = plan(nodes=100_000, byzantine=10_000, rounds=200)
    >>> p.pull, p.b_hat, round(p.probability, 4)
    (34, 17, 0.992)
    """
    check_sizes(nodes, byzantine, rounds, pull)
    line = _line(parameters, wire, upstream)
    # The fraction that was meant: .1 is 1/10, and 1/3 in floating point is a third.
    fraction = (
        Fraction(max_fraction).limit_denominator(10**9) if math.isfinite(max_fraction) else Fraction(-1)
    )
    case = Question(
        nodes, byzantine, rounds, confidence, fraction, silent, no_shows, aggregations=aggregations
    )
    check_question(case)
    chosen = case.smallest_pull() if pull is None else pull
    if chosen is None:
        raise ValueError(_nothing_feasible(case))
    return _answer(case, chosen, line)


def comfortable(
    *,
    nodes: int,
    byzantine: int,
    rounds: int,
    confidence: float = CONFIDENCE,
    silent: bool = False,
    no_shows: int = 0,
    aggregations: int | None = None,
) -> Plan:
    """Return the plan that a run or a network takes if the pull is left out.

    The smallest s with b̂/(s+1) ≤ 1/3 and s+1−2b̂ ≥ 3, so that rules can be told apart; where there is none,
    the feasible one that leaves most models after trimming.

    >>> [comfortable(nodes=n, byzantine=b, rounds=60).pull for n, b in ((20, 4), (7, 2), (4, 1), (100, 45))]
    [11, 6, 3, 99]
    """
    least = plan(
        nodes=nodes, byzantine=byzantine, rounds=rounds, confidence=confidence, silent=silent,
        no_shows=no_shows, aggregations=aggregations,
    )  # fmt: skip
    case = least.question()
    return _answer(case, case.comfortable_pull() or least.pull, Line())


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
    if parameters is not None and parameters < 1:
        raise ValueError(f"parameters must be at least 1, not {parameters}")
    return Line(wire, None if parameters is None else Wire(wire).nbytes(parameters), upstream)


def _answer(case: Question, pull: int, line: Line) -> Plan:
    """What this pull gives."""
    n, b_hat = case.nodes, case.b_hat(pull)
    red = theory.reduction(n, case.byzantine, pull, b_hat)
    feasible = case.feasible(pull, b_hat)
    half = pull // 2  # the largest b̂ with 2b̂ < m
    noptlog = lemma_noptlog(n, case.byzantine, case.rounds, case.confidence)
    return Plan(
        **{key: value for key, value in vars(case).items() if key != "margin"}
        | {"max_fraction": float(case.max_fraction)},
        pull=pull,
        b_hat=b_hat,
        fraction=b_hat / (pull + 1),
        probability=case.probability(pull, b_hat),
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
        kappa=red.kappa if red else None,
        alpha=red.alpha if red else None,
        lambda_=red.lambda_ if red else None,
        theorem_applies=red is not None and red.contracts,
        pull_noptlog=None if math.isinf(noptlog) else noptlog,
        comfortable=_comfortable(case),
        alternatives=tuple(_choice(case, s) for s in range(max(1, pull - 2), min(n - 1, pull + 3) + 1)),
    )


def _choice(case: Question, pull: int) -> Choice:
    b_hat = case.b_hat(pull)
    red = theory.reduction(case.nodes, case.byzantine, pull, b_hat)
    return Choice(pull, b_hat, b_hat / (pull + 1), case.probability(pull, b_hat), red.kappa if red else None)


def _comfortable(case: Question) -> Choice | None:
    """What runs and networks take: the smallest feasible pull leaves m − 2b̂ = 1 and the worst κ."""
    pull = case.comfortable_pull()
    return None if pull is None else _choice(case, pull)


# --- bad input ----------------------------------------------------------------------------------------------


def _nothing_feasible(case: Question) -> str:
    """One sentence: what was asked, that no pull gives it, and the nearest things that can be had."""
    best = min(default_grid(case.nodes), key=lambda s: (Fraction(case.b_hat(s), s + 1), s))
    b_hat = case.b_hat(best)
    late = f" when {case.no_shows} honest peers are late" if case.no_shows else ""
    quiet = f" {'and' if late else 'when'} all hostile ones stay silent" if case.silent else ""
    needed, answers = "", ""
    if case.silent or case.no_shows:
        left = max(0, best - case.no_shows - (b_hat if case.silent else 0))
        needed, answers = " and leaves 2 b_hat answers", f", {left} of {2 * b_hat} answers"
    most = _most_byzantine(case)
    return (
        f"no pull keeps b_hat/(s+1) at or below {float(case.max_fraction):.6g}{needed} for nodes "
        f"{case.nodes} and byzantine {case.byzantine}{late}{quiet}: the smallest fraction is "
        f"{b_hat / (best + 1):.6g} (pull {best}, b_hat {b_hat}{answers})"
        + ("" if most is None else f", or plan for at most byzantine {most}")
    )


def _most_byzantine(case: Question) -> int | None:
    """Return the largest number of hostile nodes with an answer to the same question, or None."""
    low, high = -1, case.byzantine
    while high - low > 1:
        middle = (low + high) // 2
        solved = replace(case, byzantine=middle).smallest_pull() is not None
        low, high = (middle, high) if solved else (low, middle)
    return low if low >= 0 else None
