"""How many peers must each node pull, how many hostile answers must it survive, and with what certainty?

Node i meets b_i^t ~ Hypergeometric(n−1, b, s) hostile peers in round t,
independently over honest nodes and rounds, so

    P(max over i, t ≤ k) = F(k)^{hT}        F = CDF of that law, h = n − b

holds exactly, and no simulation is needed (the paper's Remark 2 thinks otherwise). `law` has the exact law
and the smallest pull, `paper` the paper's own ways (Algorithm 2 and its lemma),
`planner` the plan and its pictures.
"""

from rpel.planning.law import max_byzantine_cdf, quantiles
from rpel.planning.paper import default_grid, simulate_max
from rpel.planning.planner import Choice, Method, Plan, comfortable, draw, mis_specified, plan, theorem
from rpel.planning.traffic import PULLS, pullers, shortest_period
from rpel.planning.windows import memory_caution, window_probability, window_quantile

__all__ = [
    "PULLS",
    "Choice",
    "Method",
    "Plan",
    "comfortable",
    "default_grid",
    "draw",
    "max_byzantine_cdf",
    "memory_caution",
    "mis_specified",
    "plan",
    "pullers",
    "quantiles",
    "shortest_period",
    "simulate_max",
    "theorem",
    "window_probability",
    "window_quantile",
]
