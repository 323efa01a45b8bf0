"""Algorithm 1 of the paper and nothing else. Line numbers are the paper's.

Invariants: nothing here knows where peers live, who is hostile, or what time it is. One ``yield`` is the network:
whoever drives the generator answers it, from a table of models; a real peer, a cohort of one, calls :func:`mix` on what
arrived over TLS. The trim is b̂ of the number of peers *asked*, never of those that answered, so that silence cannot
raise the hostile share.
"""

from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

from rpel.aggregation import Rule
from rpel.kernels.compiled import finite_rows, momentum_step
from rpel.types import Cohort, Exchange, Inbox, Integers, MixInfo, Models, Schedule, Topology


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
) -> Generator[Exchange, Inbox, tuple[Cohort, MixInfo]]:
    """Lines 7-9: pull and aggregate."""
    wanted = topology.sample(t, c.ids)  # line 7    S_i^t, drawn once
    inbox = yield Exchange(t, c.ids, wanted, c.x, topology.weights(c.ids))  # line 8    whatever the network returns
    x, info = mix(c.x, inbox, rule, out)  # line 9    R(own; received)
    return c.with_x(x), info


def mix(half: Models, inbox: Inbox, rule: Rule, out: Models | None = None) -> tuple[Models, MixInfo]:
    """Line 9, with the policy for what cannot be aggregated: such a node keeps its half-step."""
    finite = np.append(finite_rows(inbox.table), False)
    present, usable = inbox.index >= 0, finite[inbox.index]  # −1 looks up the False at the end
    kept = rule.unfit(present, usable)
    trimmed = np.where(kept, 0, np.maximum((rule.f or 0) - (present & ~usable).sum(axis=1), 0))
    info = MixInfo(kept, trimmed)
    if not kept.any():
        return _aggregated(inbox, rule, slice(None), out), info
    x = np.array(half) if out is None else out
    x[kept] = half[kept]
    if not kept.all():
        x[~kept] = _aggregated(inbox, rule, ~kept, None)
    return x, info


def _aggregated(inbox: Inbox, rule: Rule, nodes: Any, out: Models | None) -> Models:
    weights, hostile = (None if a is None else a[nodes] for a in (inbox.weights, inbox.hostile))
    rule = rule.among(nodes)
    return np.asarray(rule.aggregate(inbox.table, inbox.index[nodes], weights=weights, hostile=hostile, out=out))
