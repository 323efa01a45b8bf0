"""How many peers must each node pull, how many hostile answers must it survive, and with what certainty?

Node i meets b_i^t ~ Hypergeometric(n−1, b, s) hostile peers in round t, independently over honest nodes and rounds, so

    P(max over i, t ≤ k) = F(k)^{hT}        F = CDF of that law, h = n − b

holds exactly, and no simulation is needed (the paper's Remark 2 thinks otherwise). Law of this file: whether b̂ is a
minority is decided in integers, and one half never is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rpel import hypergeometric, plots, theory
from rpel.randomness import stream

Method = Literal["exact", "simulate", "bound"]


# --- the exact law ---------------------------------------------------------------------------------------------------


def max_byzantine_cdf(nodes: int, byzantine: int, pull: int, rounds: int) -> NDArray[np.float64]:
    """P(no honest node ever pulls more than k hostile peers), for k = 0 … min(byzantine, pull).

    >>> max_byzantine_cdf(nodes=100, byzantine=10, pull=15, rounds=200)[6:9].round(6)
    array([0.479579, 0.973938, 0.999511])
    """
    _check_sizes(nodes, byzantine, rounds, pull)
    low, log_cdf = hypergeometric.log_cdf(nodes - 1, byzantine, pull)
    cdf = np.zeros(min(byzantine, pull) + 1)
    cdf[low : low + len(log_cdf)] = np.exp((nodes - byzantine) * rounds * log_cdf)
    cdf[low + len(log_cdf) - 1 :] = 1.0
    return cdf


@dataclass(frozen=True)
class _Setting:
    """n, b, T and what counts as enough; answers questions about one pull at a time."""

    nodes: int
    byzantine: int
    rounds: int
    confidence: float
    max_fraction: Fraction
    silent: bool
    no_shows: int

    def probability(self, pull: int, b_hat: int) -> float:
        """P(max ≤ b̂), exactly."""
        if b_hat >= min(self.byzantine, pull):
            return 1.0
        low, log_cdf = hypergeometric.log_cdf(self.nodes - 1, self.byzantine, pull)
        if b_hat < low:
            return 0.0
        exponent = (self.nodes - self.byzantine) * self.rounds
        return float(np.exp(exponent * log_cdf[b_hat - low])) if b_hat - low < len(log_cdf) else 1.0

    def quantile(self, pull: int, p: float) -> int:
        """The smallest k with P(max ≤ k) ≥ p."""
        low, log_cdf = hypergeometric.log_cdf(self.nodes - 1, self.byzantine, pull)
        enough = np.exp((self.nodes - self.byzantine) * self.rounds * log_cdf) >= p
        return low + int(np.argmax(enough)) if enough.any() else min(self.byzantine, pull)

    def b_hat(self, pull: int) -> int:
        return self.quantile(pull, self.confidence)

    @property
    def answers_per_hostile(self) -> int:
        """A round aggregates when 2b̂ peers answer; silent hostile ones leave s − b̂ who can."""
        return 3 if self.silent else 2

    def feasible(self, pull: int, b_hat: int) -> bool:
        """b̂/(s+1) ≤ max_fraction, 2b̂ < s+1, and enough answers remain when F honest peers are late."""
        return (
            b_hat <= self.max_fraction * (pull + 1)
            and 2 * b_hat < pull + 1
            and self.answers_per_hostile * b_hat + self.no_shows <= pull
        )

    def smallest_pull_for(self, b_hat: int) -> int:
        """The smallest s at which this b̂ would be feasible, the inverse of :meth:`feasible`."""
        by_fraction = math.ceil(b_hat / self.max_fraction) - 1
        return max(1, by_fraction, self.answers_per_hostile * b_hat + self.no_shows)

    def smallest_pull(self) -> int | None:
        """The smallest feasible s, or None.

        For a fixed b̂ the tail grows with s, so only s(k) = smallest_pull_for(k) can be the answer. Up to 1,500 every k
        is tried; beyond, P(max ≤ k) at s(k) rises with k but for the rounding in s(k), so double, bisect, and look back
        over the rounding.
        """
        every = min(self.byzantine, 1500)
        for k in range(every + 1):
            if self._suffices(k):
                return self.smallest_pull_for(k)
        fails, holds = every, every
        while not self._suffices(holds):
            if holds == self.byzantine:
                return None
            fails, holds = holds, min(2 * holds, self.byzantine)
        while holds - fails > 1:
            middle = (fails + holds) // 2
            fails, holds = (fails, middle) if self._suffices(middle) else (middle, holds)
        gap = float(self.max_fraction) - self.byzantine / self.nodes
        look_back = 64 + min(1500, int(2 / gap) if gap > 0 else 1500)
        return self.smallest_pull_for(next(k for k in range(max(0, holds - look_back), holds + 1) if self._suffices(k)))

    def _suffices(self, b_hat: int) -> bool:
        pull = self.smallest_pull_for(b_hat)
        return pull < self.nodes and self.probability(pull, b_hat) >= self.confidence


# --- the paper's Algorithm 2 and its lemmas --------------------------------------------------------------------------


def simulate_max(
    nodes: int, byzantine: int, pull: int, rounds: int, *, simulations: int = 5, seed: int = 0
) -> list[int]:
    """Lines 4-5 of Algorithm 2: the largest number of hostile peers met, once per simulation.

    The hT draws of a simulation enter only through their histogram, which is multinomial; the rare large values are
    drawn first, where their conditional probabilities are accurate.

    >>> simulate_max(100, 10, 15, 200, simulations=5, seed=0)
    [6, 6, 6, 6, 7]
    """
    low, pmf = hypergeometric.pmf(nodes - 1, byzantine, pull)
    coins = stream(seed, ("plan", pull))
    counts = coins.multinomial((nodes - byzantine) * rounds, pmf[::-1], size=simulations)
    return [low + len(pmf) - 1 - int(np.argmax(row > 0)) for row in counts]


def default_grid(nodes: int) -> Iterator[int]:
    """Every pull up to 256, then steps of about a tenth, then n − 1, where Algorithm 2 always returns."""
    pull = 1
    while pull < nodes - 1:
        yield pull
        pull += 1 if pull < 256 else pull // 10
    yield nodes - 1


def _simulated(case: _Setting, grid: Iterable[int], simulations: int, seed: int) -> tuple[int, int] | None:
    """Algorithm 2: the first s of the grid whose largest simulated count is feasible."""
    for pull in grid:
        b_hat = max(simulate_max(case.nodes, case.byzantine, pull, case.rounds, simulations=simulations, seed=seed))
        if case.feasible(pull, b_hat):
            return pull, b_hat
    return None


def _bounded(case: _Setting, grid: Iterable[int]) -> tuple[int, int] | None:
    """Lemma "effectiveByz": the first s with a b̂ for which the lemma's bound reaches the confidence."""
    for pull in grid:
        b_hat = _bounded_b_hat(case, pull)
        if b_hat is not None and case.feasible(pull, b_hat):
            return pull, b_hat
    return None


def _bounded_b_hat(case: _Setting, pull: int) -> int | None:
    """The smallest b̂ < (s+1)/2 that the lemma grants; its bound grows with b̂, so bisect."""
    n, b, T = case.nodes, case.byzantine, case.rounds

    def granted(k: int) -> bool:
        return theory.lemma_effective_byzantine(n, b, pull, k, T) >= case.confidence

    high = b if pull == n - 1 else pull // 2
    if not granted(high):
        return None
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if granted(middle) else (middle, high)
    return high


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One pull and what it gives: the b̂ it must survive and the exact probability that b̂ is never exceeded."""

    pull: int
    b_hat: int
    fraction: float
    probability: float
    kappa: float | None


@dataclass(frozen=True)
class Plan:
    """An answer: pull ``pull`` peers, survive ``b_hat`` hostile answers; this holds with ``probability``.

    ``to_dict`` gives the JSON of the command line, where ``lambda_`` is called ``lambda``.
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

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, keys as in the documentation.

        >>> plan(nodes=30, byzantine=6, rounds=200, pull=15).to_dict()["b_hat"]
        6
        """
        fields = asdict(self)
        fields["alternatives"] = list(fields["alternatives"])
        return {key.rstrip("_"): value for key, value in fields.items()}

    def reduction(self) -> theory.Reduction | None:
        """The contraction constants of a round under this plan."""
        return theory.reduction(self.nodes, self.byzantine, self.pull, self.b_hat)


def plan(
    *,
    nodes: int,
    byzantine: int,
    rounds: int,
    pull: int | None = None,
    confidence: float = 0.99,
    max_fraction: float | Fraction = 0.5,
    method: Method = "exact",
    silent: bool = False,
    no_shows: int = 0,
    simulations: int = 5,
    grid: Sequence[int] | None = None,
    seed: int = 0,
    parameters: int | None = None,
) -> Plan:
    """Find the smallest pull (or judge the given one) for ``nodes``, ``byzantine`` of them hostile, over ``rounds``.

    With ``silent`` a round must also go on when every hostile peer stays silent and ``no_shows`` honest ones are late.
    Raises ValueError, in one sentence with the nearest feasible choice, when there is no answer.

    >>> p = plan(nodes=100_000, byzantine=10_000, rounds=200)
    >>> p.pull, p.b_hat, round(p.probability, 4)
    (34, 17, 0.992)
    """
    for s in (pull, *(grid or ())):
        _check_sizes(nodes, byzantine, rounds, s)
    _check_method(method, simulations, parameters)
    # The fraction that was meant: .1 is 1/10, and 1/3 in floating point is a third.
    meant = Fraction(max_fraction).limit_denominator(10**9) if math.isfinite(max_fraction) else Fraction(-1)
    case = _Setting(nodes, byzantine, rounds, confidence, meant, silent, no_shows)
    _check_case(case)
    chosen = _choose(case, pull, method, simulations, grid, seed)
    if chosen is None:
        raise ValueError(_nothing_feasible(case, grid))
    pull, b_hat = chosen
    probability = case.probability(pull, b_hat)
    if method == "bound":
        probability = theory.lemma_effective_byzantine(nodes, byzantine, pull, b_hat, rounds)
    red = theory.reduction(nodes, byzantine, pull, b_hat)
    feasible = case.feasible(pull, b_hat) and (method != "bound" or probability >= confidence)
    half = pull // 2  # the largest b̂ with 2b̂ < s + 1
    noptlog = theory.lemma_noptlog(nodes, byzantine, rounds, confidence)
    return Plan(
        nodes=nodes,
        byzantine=byzantine,
        rounds=rounds,
        pull=pull,
        b_hat=b_hat,
        fraction=b_hat / (pull + 1),
        probability=probability,
        confidence=confidence,
        max_fraction=float(case.max_fraction),
        feasible=feasible,
        best_below_half=None if feasible else {"b_hat": half, "probability": case.probability(pull, half)},
        messages_per_round=nodes * pull,
        messages_all_to_all=nodes * (nodes - 1),
        bytes_per_round=None if parameters is None else nodes * pull * 4 * parameters,
        method=method,
        silent=silent,
        no_shows=no_shows,
        kappa=red.kappa if red else None,
        alpha=red.alpha if red else None,
        lambda_=red.lambda_ if red else None,
        theorem_applies=red is not None and red.contracts,
        pull_noptlog=None if math.isinf(noptlog) else noptlog,
        comfortable=_comfortable(case),
        alternatives=tuple(_choice(case, s) for s in range(max(1, pull - 2), min(nodes - 1, pull + 3) + 1)),
    )


def _choose(
    case: _Setting, pull: int | None, method: Method, simulations: int, grid: Sequence[int] | None, seed: int
) -> tuple[int, int] | None:
    """(s, b̂) by the given method; with a pull, its b̂ whether feasible or not."""
    pulls = sorted(grid) if grid else default_grid(case.nodes)
    if method == "exact":
        if pull is None:
            pull = case.smallest_pull() if grid is None else _first_feasible(case, pulls)
        return None if pull is None else (pull, case.b_hat(pull))
    if method == "simulate":
        if pull is None:
            return _simulated(case, pulls, simulations, seed)
        counts = simulate_max(case.nodes, case.byzantine, pull, case.rounds, simulations=simulations, seed=seed)
        return pull, max(counts)
    if pull is None:
        return _bounded(case, pulls)
    b_hat = _bounded_b_hat(case, pull)
    return pull, case.b_hat(pull) if b_hat is None else b_hat


def _first_feasible(case: _Setting, pulls: Iterable[int]) -> int | None:
    return next((s for s in pulls if case.feasible(s, case.b_hat(s))), None)


def _choice(case: _Setting, pull: int) -> Choice:
    b_hat = case.b_hat(pull)
    red = theory.reduction(case.nodes, case.byzantine, pull, b_hat)
    return Choice(pull, b_hat, b_hat / (pull + 1), case.probability(pull, b_hat), red.kappa if red else None)


def _comfortable(case: _Setting) -> Choice | None:
    """The smallest pull with a fraction of at most 1/3: the smallest feasible one leaves m − 2b̂ = 1 and the worst κ."""
    pull = replace(case, max_fraction=min(case.max_fraction, Fraction(1, 3))).smallest_pull()
    return None if pull is None else _choice(case, pull)


def mis_specified(p: Plan, rows: int = 8) -> list[dict[str, float]]:
    """P(b̂ is never exceeded) when the true number of hostile nodes is larger than planned, until it is below 1 %.

    >>> wrong = mis_specified(plan(nodes=100, byzantine=10, rounds=200, pull=15, confidence=0.97))
    >>> wrong[1]["byzantine"], round(wrong[1]["probability"], 3)
    (11, 0.915)
    """
    step = max(1, p.byzantine // 25)
    table: list[dict[str, float]] = []
    for true in range(p.byzantine, (p.nodes + 1) // 2, step):
        cdf = max_byzantine_cdf(p.nodes, true, p.pull, p.rounds)
        probability = float(cdf[p.b_hat]) if p.b_hat < len(cdf) else 1.0
        table.append({"byzantine": true, "probability": probability})
        if len(table) > rows or probability < 0.01:
            break
    return table


def quantiles(nodes: int, byzantine: int, rounds: int, pulls: Sequence[int], p: Sequence[float]) -> NDArray[np.int64]:
    """b̂ at each probability and pull, shape (len(p), len(pulls)): the curves of the paper's Figure 3, exactly.

    >>> quantiles(1000, 100, 200, pulls=[10, 30, 50], p=[0.5, 0.99]).tolist()
    [[7, 12, 16], [8, 14, 18]]
    """
    case = _Setting(nodes, byzantine, rounds, 0.99, Fraction(1, 2), False, 0)
    return np.array([[case.quantile(s, q) for s in pulls] for q in p])


def theorem(p: Plan, L: float, sigma: float, G: float, gap: float) -> theory.Convergence | None:
    """The convergence theorem for this plan and these constants; None where it does not apply.

    >>> theorem(plan(nodes=100, byzantine=10, rounds=200), L=1, sigma=1, G=1, gap=1) is None  # α is far above 1
    True
    """
    red = p.reduction()
    if red is None:
        return None
    sizes = {"nodes": p.nodes, "byzantine": p.byzantine, "pull": p.pull, "b_hat": p.b_hat, "rounds": p.rounds}
    return theory.convergence(red, **sizes, L=L, sigma=sigma, G=G, gap=gap)


def draw(p: Plan, path: str | Path, figure: Literal["fraction", "messages"] = "fraction") -> None:
    """Draw b̂/(s+1) against s with its quantile band, or messages per round against n for the same hostile share."""
    _draw_fraction(p, path) if figure == "fraction" else _draw_messages(p, path)


def _draw_fraction(p: Plan, path: str | Path) -> None:
    most = min(p.nodes - 1, max(2 * p.pull, 20))
    pulls = sorted({round(s) for s in np.linspace(1, most, min(most, 200))})
    low, median, high = quantiles(p.nodes, p.byzantine, p.rounds, pulls, [0.01, 0.5, 0.99]) / (np.array(pulls) + 1)
    title = f"n = {p.nodes:,}, b = {p.byzantine:,}, T = {p.rounds:,}: worst hostile share any node ever meets"
    plots.fraction_against_pull(path, pulls, median, low, high, title=title, chosen=p.pull)


def _draw_messages(p: Plan, path: str | Path) -> None:
    """From ten nodes to ten million: the exact s, the s of both lemmas, and everybody."""
    share = Fraction(p.byzantine, p.nodes)
    sizes = [n for n in (10**e * k for e in range(1, 7) for k in (1, 3)) if n >= 10]
    exact, lemma, log = [], [], []
    for n in sizes:
        case = _Setting(n, int(share * n), p.rounds, p.confidence, Fraction(1, 2), p.silent, p.no_shows)
        smallest, granted = case.smallest_pull(), _bounded(case, default_grid(n))
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
    plots.messages_against_nodes(path, sizes, curves, title=title)


# --- bad input -------------------------------------------------------------------------------------------------------


def _check_sizes(nodes: int, byzantine: int, rounds: int, pull: int | None) -> None:
    for name, value, least in (("nodes", nodes, 2), ("byzantine", byzantine, 0), ("rounds", rounds, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if 2 * byzantine >= nodes:
        raise ValueError(
            f"byzantine {byzantine} is not a minority of nodes {nodes}: at most {(nodes - 1) // 2} can be tolerated"
        )
    if pull is not None and not 1 <= pull < nodes:
        nearest = 1 if pull < 1 else nodes - 1
        raise ValueError(f"pull {pull} is impossible among nodes {nodes}: choose 1 to {nodes - 1}, nearest {nearest}")


def _check_case(case: _Setting) -> None:
    if not 0 < case.confidence < 1:
        nearest = 0.999999 if case.confidence >= 1 else 0.01
        raise ValueError(f"confidence {case.confidence} must lie strictly between 0 and 1, for example {nearest}")
    if not 0 < case.max_fraction <= Fraction(1, 2):
        nearest = 0.5 if case.max_fraction > 0 else 0.1
        raise ValueError(f"max_fraction {float(case.max_fraction)} must lie in (0, 1/2], for example {nearest}")
    most = case.nodes - case.byzantine - 1
    if not 0 <= case.no_shows <= most:
        raise ValueError(f"no_shows {case.no_shows} must lie between 0 and {most}")


def _check_method(method: str, simulations: int, parameters: int | None) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method {method!r} is unknown: choose {', '.join(get_args(Method))}")
    for name, value in (("simulations", simulations), ("parameters", parameters)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _nothing_feasible(case: _Setting, grid: Sequence[int] | None) -> str:
    """One sentence: what was asked, that no pull gives it, and the nearest things that can be had."""
    pulls = sorted(grid) if grid else list(default_grid(case.nodes))
    best = min(pulls, key=lambda s: (Fraction(case.b_hat(s), s + 1), s))
    b_hat = case.b_hat(best)
    where = "no pull of the grid" if grid else "no pull"
    late = f" when {case.no_shows} honest peers are late" if case.no_shows else ""
    quiet = f" {'and' if late else 'when'} all hostile ones stay silent" if case.silent else ""
    most = _most_byzantine(case)
    return (
        f"{where} keeps b_hat/(s+1) at or below {float(case.max_fraction):.6g} for nodes {case.nodes} and "
        f"byzantine {case.byzantine}{late}{quiet}: the smallest fraction is {b_hat / (best + 1):.6g} (pull {best}, "
        f"b_hat {b_hat})" + ("" if grid or most is None else f", or plan for at most byzantine {most}")
    )


def _most_byzantine(case: _Setting) -> int | None:
    """The largest number of hostile nodes for which the same question has an answer; None if even 0 has none."""
    low, high = -1, case.byzantine
    while high - low > 1:
        middle = (low + high) // 2
        solved = replace(case, byzantine=middle).smallest_pull() is not None
        low, high = (middle, high) if solved else (low, middle)
    return low if low >= 0 else None
