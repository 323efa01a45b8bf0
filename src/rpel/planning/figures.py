"""The plan's pictures: hostile share against s, messages against n."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from rpel import plots, theory
from rpel.planning.law import Question, quantiles
from rpel.planning.paper import bounded, default_grid
from rpel.planning.planner import Plan


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
        case = Question(n, int(share * n), p.rounds, p.confidence, Fraction(1, 2), p.silent, p.no_shows)
        smallest, granted = case.smallest_pull(), bounded(case, default_grid(n))
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
