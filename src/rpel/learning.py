"""Algorithm 1 of the paper and nothing else. Line numbers are the paper's.

Laws: nothing here knows where peers live, who is hostile, or what time it is. One ``yield`` is the network: whoever
drives the generator answers it, a simulator with a table of models or a real peer with what arrived over TLS. The trim
is b̂ of the number of peers *asked*, never of those that answered, so that silence cannot raise the hostile share.
"""

from collections.abc import Generator
from typing import Protocol

import numpy as np

from rpel.aggregation import Rule
from rpel.aggregation.gossip import GraphRule
from rpel.kernels.steps import momentum_step
from rpel.types import Cohort, Exchange, Inbox, Integers, Models, Schedule, Topology


class Gradients(Protocol):
    """The part of a task that Algorithm 1 needs."""

    def gradient(self, x: Models, local: Models, ids: Integers, t: int, k: int) -> tuple[Models, Models]:
        """Stochastic gradients (h, d) at x on node i's data, and the nodes' new local state."""


def local_step(
    c: Cohort, t: int, k: int, task: Gradients, *, beta: float, lr: Schedule, decay: float, out: Models | None = None
) -> Cohort:
    """Lines 3-6: gradient, momentum, half-step; called for k = 0 … local_steps − 1. ``out`` takes x^{t+1/2}."""
    g, local = task.gradient(c.x, c.local, c.ids, t, k)  # lines 3-4
    # line 5: m = β m + (1 − β) g        line 6: x^{t+1/2} = x − η (m + λ x)
    x, m = momentum_step(c.x, c.m, g, beta, lr(t), decay, out=out)
    return Cohort(c.ids, x=x, m=m, local=local)


def exchange(
    c: Cohort, t: int, topology: Topology, rule: Rule, out: Models | None = None
) -> Generator[Exchange, Inbox, Cohort]:
    """Lines 7-9: pull and aggregate."""
    wanted = topology.sample(t, c.ids)  # line 7    S_i^t, drawn once
    inbox = yield Exchange(t, c.ids, wanted, c.x, topology.weights(c.ids))  # line 8    whatever the network returns
    return c.with_x(mix(c.x, inbox, rule, out))  # line 9    R(own; received)


def mix(half: Models, inbox: Inbox, rule: Rule, out: Models | None = None) -> Models:
    """Line 9, with the policy for missing answers: fewer than the rule needs, and the node keeps its half-step."""
    if isinstance(rule, GraphRule):
        mixed = rule.aggregate(inbox.table, inbox.index, weights=inbox.weights, hostile=inbox.hostile, out=out)
        return np.asarray(mixed)
    short = degraded(inbox, rule)
    if not short.any():
        return np.asarray(rule.aggregate(inbox.table, inbox.index, out=out))
    x = np.array(half) if out is None else out
    x[short] = half[short]
    x[~short] = rule.aggregate(inbox.table, inbox.index[~short])
    return x


def degraded(inbox: Inbox, rule: Rule) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(h,) True where too few answers came to survive the rule's f: k < 2 b̂."""
    if isinstance(rule, GraphRule):
        return np.zeros(len(inbox.index), dtype=bool)
    present = (inbox.index >= 0).sum(axis=1)
    return np.asarray(present < rule.least(rule.f or 0))
