"""Algorithm 1 of the paper, to be read beside it: line numbers are the paper's.

A problem is four things that can be exchanged for others:

    local     lines 3-6     models, local state  →  half-step models x^{t+1/2}, local state
    deliver   lines 7-8     half-step models     →  what each node received
    rule      line 9        own and received     →  x^{t+1}
    outer     after line 9  nothing in the paper (None); a step across many local steps

Laws:

1. Nothing in :func:`step` knows where peers live, who is hostile, what arrays are made of, or what time it
   is. A simulator with a million nodes, a cluster and a hospital's peer differ in what is plugged in.
2. State is what the next step needs, info what a reader wants. Models are large: a step may write into the
   arrays of the state it was given, which is then spent,
   and the arrays of an info are good until the next step.
3. The trim of line 9 is b̂ of the number of peers *asked*, never of those that answered, so that silence
   cannot raise the hostile share. A node with too few answers keeps its half-step.

Below :func:`step` stands the paper's problem in plain NumPy, one node at a time. What runs fast
(`rpel.learning`, `rpel.simulation`) equals it, and tests say so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpel.types import Aggregated, Arrays, Integers, Models, Received, Schedule


@dataclass(frozen=True)
class State:
    """What the next round needs.

    x (h, d): the models. The rest is what `local`, `deliver` and `outer` keep between rounds, by name.
    """

    round: int
    x: Models
    local: Arrays
    network: Arrays = field(default_factory=dict)
    outer: Arrays = field(default_factory=dict)


Spent = State
"""A state whose arrays are written to: only what comes back counts."""


@dataclass(frozen=True)
class Info:
    """What a round reports: half (h, d) the half-step models, what was received, what line 9 did."""

    round: int
    half: Models
    received: Received
    aggregated: Aggregated


class Local(Protocol):
    """Lines 3-6.

    Its state consists of arrays with one row for each node, such as momenta, statistics or Adam's moments.
    """

    def init(self) -> tuple[Models, Arrays]:
        """The models that all nodes begin with (h, d), and the local state."""

    def __call__(self, x: Models, state: Arrays, nodes: Integers, t: int) -> tuple[Models, Arrays]:
        """Return the half-step models of the ``nodes`` that act in round t.

        x and state are those of these nodes; x is not changed.
        """


class Deliver(Protocol):
    """Lines 7-8: the network, with everything hostile in it."""

    def init(self) -> Arrays:
        """What it remembers before the first round."""

    def nodes(self, t: int) -> Integers:
        """(h,) the nodes that act in round t."""

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        """What each of the nodes received; ``before`` are their models x^t, which an adversary may know."""


class Rule(Protocol):
    """Line 9."""

    def __call__(
        self, half: Models, received: Received, nodes: Integers, t: int, out: Models | None = None
    ) -> tuple[Models, Aggregated]:
        """x^{t+1} (h, d), written to ``out`` if given, and what was done."""


class Outer(Protocol):
    """After line 9: where a node goes, seen from where it was before its local steps."""

    def init(self, x: Models) -> Arrays:
        """What it remembers before the first round."""

    def __call__(self, x: Models, z: Models, state: Arrays, aggregated: Aggregated) -> tuple[Models, Arrays]:
        """The next models from x^t and from z, what line 9 returned; it may write into both."""


@dataclass(frozen=True)
class Problem:
    """What Algorithm 1 runs on."""

    local: Local
    deliver: Deliver
    rule: Rule
    outer: Outer | None = None


def init(problem: Problem) -> State:
    """Lines 1-2: all nodes begin with the same model, and with zero momentum."""
    x, local = problem.local.init()
    return State(0, x, local, problem.deliver.init(), {} if problem.outer is None else problem.outer.init(x))


def step(problem: Problem, state: Spent) -> tuple[State, Info]:
    """One round.

    >>> problem = plain(lambda x, i, t, k: x - i, np.zeros(1), nodes=5, pull=3, b_hat=1, lr=lambda t: 0.5)
    >>> state = init(problem)
    >>> for _ in range(20):
    ...     state, info = step(problem, state)
    >>> bool((abs(state.x - 2) < 1).all())  # node i alone would end at i; together they stay around 2
    True
    """
    t = state.round + 1
    nodes = problem.deliver.nodes(t)
    half, local = problem.local(state.x, state.local, nodes, t)  # lines 3-6
    received, network = problem.deliver(half, state.network, nodes, t, before=state.x)  # lines 7-8
    room = state.x if problem.outer is None else None  # x^t is needed no more, unless there is an outer step
    x, aggregated = problem.rule(half, received, nodes, t, out=room)  # line 9
    outer = state.outer
    if problem.outer is not None:
        x, outer = problem.outer(state.x, x, outer, aggregated)
    return State(t, x, local, network, outer), Info(t, half, received, aggregated)


# --- the paper's problem, in plain NumPy --------------------------------------------------------------------

Gradient = Callable[[Models, int, int, int], Models]
"""(x (d,), node, round, local step) → a stochastic gradient (d,)."""
Forge = Callable[[Models], Models]
"""What a hostile peer answers a victim, from the honest answers to the same pull (k, d) → (d,)."""


@dataclass(frozen=True)
class PlainMomentumSGD:
    """Lines 3-6 for one node after the other; weight decay acts after momentum."""

    gradient: Gradient
    initial: Models
    honest: int
    lr: Schedule
    beta: float
    decay: float
    steps: int

    def init(self) -> tuple[Models, Arrays]:
        x = np.tile(self.initial, (self.honest, 1))
        return x, {"momentum": np.zeros_like(x)}

    def __call__(self, x: Models, state: Arrays, nodes: Integers, t: int) -> tuple[Models, Arrays]:
        half, momentum = x.copy(), state["momentum"].copy()
        for i in nodes:
            for k in range(self.steps):
                g = self.gradient(half[i], int(i), t, k)  # lines 3-4
                momentum[i] = self.beta * momentum[i] + (1 - self.beta) * g  # line 5
                half[i] = half[i] - self.lr(t) * (momentum[i] + self.decay * half[i])  # line 6
        return half, {"momentum": momentum}


@dataclass(frozen=True)
class PlainPull:
    """Lines 7-8: every honest node asks the peers that ``draw(t, i)`` returns.

    Nodes from number ``honest`` on are hostile and answer with ``forge``.
    """

    honest: int
    draw: Callable[[int, int], Integers]
    forge: Forge

    def init(self) -> Arrays:
        return {}

    def nodes(self, t: int) -> Integers:
        return np.arange(self.honest)

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        table, index, met = list(half), [], []
        for i in nodes:
            asked = self.draw(t, int(i))  # line 7
            answers = [int(j) for j in asked if j < self.honest]
            hostile = len(asked) - len(answers)
            table.append(self.forge(half[answers]) if hostile and answers else half[i])
            index.append([int(i), *answers, *[len(table) - 1] * hostile])  # line 8, the own model first
            met.append(hostile)
        return Received(np.array(table), np.array(index), met=np.array(met)), state


@dataclass(frozen=True)
class PlainRule:
    """Line 9: nearest-neighbour mixing, then the coordinate-wise trimmed mean, both with f = b̂."""

    f: int

    def __call__(
        self, half: Models, received: Received, nodes: Integers, t: int, out: Models | None = None
    ) -> tuple[Models, Aggregated]:
        x = np.stack([nnm_trimmed_mean(received.table[rows], self.f) for rows in received.index])
        kept: NDArray[np.bool_] = np.zeros(len(x), dtype=bool)
        return x, Aggregated(kept, np.full(len(x), self.f))


def nnm_trimmed_mean(vectors: Models, f: int) -> Models:
    """Replace each of m vectors by the mean of the m − f nearest to it; then trim f on either side.

    Takes (m, d) and returns (d,).

    >>> nnm_trimmed_mean(np.array([[0.0], [1.0], [2.0], [50.0]]), f=1).round(2)
    array([1.])
    """
    m = len(vectors)
    mixed = np.empty_like(vectors)
    for i in range(m):
        distances = np.square(vectors - vectors[i]).sum(axis=1)
        distances[i] = -1.0  # sort the vector itself first
        mixed[i] = vectors[np.argsort(distances, kind="stable")[: m - f]].mean(axis=0)
    return np.asarray(np.sort(mixed, axis=0)[f : m - f].mean(axis=0))


def plain(
    gradient: Gradient,
    initial: Models,
    *,
    nodes: int,
    pull: int,
    b_hat: int,
    lr: Schedule,
    byzantine: int = 0,
    beta: float = 0.0,
    decay: float = 0.0,
    steps: int = 1,
    forge: Forge = lambda honest: -2 * honest.mean(axis=0),
    draw: Callable[[int, int], Integers] | None = None,
    seed: int = 0,
) -> Problem:
    """Build the paper's problem.

    The last ``byzantine`` nodes are hostile and answer with Fall of Empires.

    draw(t, i): the s peers of node i in round t; drawn uniformly from the n − 1 others if left out.
    """
    honest = nodes - byzantine

    def uniform(t: int, i: int) -> Integers:
        others = np.delete(np.arange(nodes), i)
        return np.random.default_rng([seed, t, i]).choice(others, pull, replace=False)

    local = PlainMomentumSGD(gradient, np.asarray(initial), honest, lr, beta, decay, steps)
    return Problem(local, PlainPull(honest, draw or uniform, forge), PlainRule(b_hat))


def remembered(state: State) -> Mapping[str, Any]:
    """Name every array of a state, for saving."""
    parts = {"local": state.local, "network": state.network, "outer": state.outer}
    named = {f"{part}.{key}": value for part, arrays in parts.items() for key, value in arrays.items()}
    return {"round": np.array(state.round), "x": state.x, **named}
