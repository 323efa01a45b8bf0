"""How many peers must each node pull, how many hostile answers must it survive, and with what certainty?

Node i meets b_i^t ~ Hypergeometric(n−1, b, s) hostile peers in round t,
independently over honest nodes and rounds, so

    P(max over i, t ≤ k) = F(k)^{hT}        F = CDF of that law, h = n − b

holds exactly, and no simulation is needed (the paper's Remark 2 thinks otherwise). `law` has the exact law
and the smallest pull, `paper` the paper's own ways (Algorithm 2 and its lemmas),
`planner` the plan and its picture.
"""

from rpel.planning.law import max_byzantine_cdf, quantiles
from rpel.planning.planner import Choice, Plan, comfortable, plan
from rpel.planning.traffic import PULLS, pullers, shortest_period

__all__ = [
    "PULLS",
    "Choice",
    "Plan",
    "comfortable",
    "max_byzantine_cdf",
    "plan",
    "pullers",
    "quantiles",
    "shortest_period",
]
