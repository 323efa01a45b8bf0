"""The parts of Algorithm 1 that simulator and peers share: lines 3-6 of many nodes at once, and line 9.

`rpel.algorithm` says what they mean, one node at a time; a peer is a cohort of one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rpel.backend.arrays import empty, namespace
from rpel.backend.base import Backend, backend
from rpel.rules import RoundContext, Rule, aggregate_or_keep
from rpel.types import Aggregated, Arrays, Integers, Models, Received, Schedule


class Gradients(Protocol):
    """The part of a task that lines 3-4 need."""

    def initial(self) -> Models:
        """The common initial model (d,)."""

    def local_state(self, h: int) -> Models:
        """Return the initial local state (h, q) of h nodes, which is never exchanged.

        An example is BatchNorm's statistics.
        """

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        """Stochastic gradients (h, d) at x on node i's data, and the nodes' new local state."""


class LocalSteps:
    """What local strategies on a task share: how nodes begin."""

    task: Gradients
    nodes: int
    backend: Backend

    def init(self) -> tuple[Models, Arrays]:
        """All nodes with the common initial model, and what they remember before their first step."""
        initial = self.backend.array(self.task.initial())
        x = empty(self.nodes, initial)
        x[:] = initial
        return x, self.remembers(x)

    def remembers(self, x: Models) -> Arrays:
        """Return the state of nodes with these models before their first step.

        Everything but the task's buffers is zero.
        """
        return self._zeros(x) | {"buffers": self.backend.array(self.task.local_state(len(x)))}

    def _zeros(self, x: Models) -> Arrays:
        raise NotImplementedError


@dataclass(frozen=True)
class MomentumSGD(LocalSteps):
    """Lines 3-6, the paper's local steps: m = βm + (1 − β)g, then x − η(m + λx), ``steps`` times a round.

    scratch: memory for the gradients, at least as many rows as nodes; new if left out.
    """

    task: Gradients
    lr: Schedule
    beta: float
    decay: float
    steps: int = 1
    nodes: int = 1
    scratch: Models | None = None
    backend: Backend = field(default_factory=lambda: backend("numba"))

    def _zeros(self, x: Models) -> Arrays:
        return {"momentum": namespace(x).zeros_like(x)}

    def __call__(
        self, x: Models, state: Arrays, nodes: Integers, t: int, out: Models | None = None
    ) -> tuple[Models, Arrays]:
        """The half-step models, written to ``out`` if given; the arrays of the state are written to."""
        half, at = empty(len(x), x) if out is None else out, x
        scratch = None if self.scratch is None else self.scratch[: len(x)]
        for k in range(self.steps if len(nodes) else 0):
            # lines 3-4
            g, state["buffers"][:] = self.task.gradient(at, state["buffers"], nodes, t, k, out=scratch)
            # 5-6
            self.backend.momentum_step(at, state["momentum"], g, self.beta, self.lr(t), self.decay, out=half)
            at = half
        return half, state


@dataclass(frozen=True)
class NesterovOuter:
    """An outer step for many local steps (DiLoCo): Δ = x − z, v ← μv + Δ, x ← x − η(Δ + μv).

    x is a node's model before its local steps, z what line 9 returned. A node that could not aggregate goes
    on from its half-step and keeps its v.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def init(self, x: Models) -> Arrays:
        """v, zero."""
        return {"v": namespace(x).zeros_like(x)}

    def __call__(self, x: Models, z: Models, state: Arrays, aggregated: Aggregated) -> tuple[Models, Arrays]:
        """The next models, written to z; v is updated in place.

        >>> x, z, outer = np.ones((1, 1)), np.zeros((1, 1)), NesterovOuter(lr=0.5)
        >>> aggregated = Aggregated(np.array([False]), np.array([0]))
        >>> outer(x, z, outer.init(x), aggregated)[0].round(3)
        array([[0.05]])
        """
        v = state["v"]
        for i in np.flatnonzero(~aggregated.degraded).tolist():
            step = x[i] - z[i]
            v[i] = self.momentum * v[i] + step
            z[i] = x[i] - self.lr * (step + self.momentum * v[i])
        return z, state


@dataclass(frozen=True)
class Aggregation:
    """Line 9 for a rule that may draw at random or change over time.

    The rule receives the round and the nodes' numbers.

    ids(t): (n,) the numbers of all nodes in round t, of which ``nodes`` are some.
    """

    rule: Rule
    rounds: int
    seed: int
    ids: Callable[[int], Integers]
    backend: Backend | None = None

    def __call__(
        self, half: Models, received: Received, nodes: Integers, t: int, out: Models | None = None
    ) -> tuple[Models, Aggregated]:
        """x^{t+1} of these nodes, and what was done."""
        rule = replace(self.rule, context=self.context(t, nodes))
        return aggregate_or_keep(half, received, rule, out, self.backend)

    def context(self, t: int, nodes: Integers) -> RoundContext:
        """What the rule is told of a round, for some nodes."""
        return RoundContext(t, self.rounds, self.seed, self.ids(t)[nodes])
