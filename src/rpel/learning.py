"""Algorithm 1 of the paper and nothing else. Line numbers are the paper's.

Laws: nothing here knows where peers live, who is hostile, or what time it is. One ``yield`` is the network: whoever
drives the generator answers it, a simulator with a table of models or a real peer with what arrived over TLS. The trim
is b̂ of the number of peers *asked*, never of those that answered, so that silence cannot raise the hostile share.
"""

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpel.aggregation import Rule
from rpel.aggregation.graph import GraphRule
from rpel.kernels.compiled import finite_rows
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
    """Line 9, with the policy for what cannot be aggregated: such a node keeps its half-step."""
    kept = degraded(inbox, rule)
    if not kept.any():
        return _aggregated(inbox, rule, slice(None), out)
    x = np.array(half) if out is None else out
    x[kept] = half[kept]
    if not kept.all():
        x[~kept] = _aggregated(inbox, rule, ~kept, None)
    return x


def degraded(inbox: Inbox, rule: Rule) -> NDArray[np.bool_]:
    """(h,) True where too few answers came (k < 2 b̂), too many are not finite, or a trusted own model is not."""
    finite = np.append(finite_rows(inbox.table), False)
    present, usable = inbox.index >= 0, finite[inbox.index]  # −1 looks up the False at the end
    blind = ~usable[:, 0] if rule.pivot is not None else np.zeros(len(usable), dtype=bool)
    if isinstance(rule, GraphRule):
        return blind
    short = present.sum(axis=1) < rule.least(rule.f or 0)
    lost = (present & ~usable).sum(axis=1) > (present.shape[1] if rule.f is None else rule.f)
    return np.asarray(blind | short | lost | ~usable.any(axis=1))


def _aggregated(inbox: Inbox, rule: Rule, nodes: Any, out: Models | None) -> Models:
    if not isinstance(rule, GraphRule):
        return np.asarray(rule.aggregate(inbox.table, inbox.index[nodes], out=out))
    weights = None if inbox.weights is None else inbox.weights[nodes]
    hostile = None if inbox.hostile is None else inbox.hostile[nodes]
    return np.asarray(rule.aggregate(inbox.table, inbox.index[nodes], weights=weights, hostile=hostile, out=out))
