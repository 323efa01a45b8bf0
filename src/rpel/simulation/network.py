"""The simulated network: it delivers what was pulled, and the adversary and all injected faults live here.

Invariants: the round never learns who is hostile; every fault is drawn from coordinates, so that a round
replays alone; forged vectors are written behind the honest rows of one table,
so that nothing is copied to be aggregated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import Attack, View
from rpel.backend.base import Backend, backend
from rpel.learning import Aggregation
from rpel.randomness import draws, stream
from rpel.types import Arrays, Floats, Integers, Models, Received, Topology
from rpel.wire import Wire

_AUDIENCE = 16
"""Victims over which a search takes the mean harm of a vector that goes to many."""


@dataclass(frozen=True)
class Roster:
    """Which node numbers are hostile."""

    nodes: int
    byzantine: int
    seed: int
    placed: tuple[int, ...] | None = None  # adversarial placement: exactly these

    def hostile(self, t: int) -> NDArray[np.bool_]:
        """(n,) True for the hostile node numbers.

        >>> int(Roster(nodes=10, byzantine=3, seed=0).hostile(1).sum())
        3
        """
        if self.placed is not None:
            return np.isin(np.arange(self.nodes), self.placed)
        coins = stream(self.seed, "placement", 0)
        marks = np.zeros(self.nodes, dtype=bool)
        marks[coins.choice(self.nodes, size=self.byzantine, replace=False)] = True
        return marks

    def honest_ids(self, t: int) -> Integers:
        """(h,) the honest node numbers in ascending order; node i of the cohort goes by the i-th of them."""
        return np.flatnonzero(~self.hostile(t))


@dataclass(frozen=True)
class Ask:
    """Line 7 for some nodes: the peers that each of them pulls, (c, s), −1 where there are fewer.

    On a fixed graph also the gossip weights (c, 1 + s) of the node itself and of those peers.
    """

    round: int
    wanted: Integers
    weights: Floats | None = None


@dataclass(frozen=True)
class SimulatedNetwork:
    """Lines 7-8 from a table: honest rows first, then room for one forged vector per victim.

    ids(t): (h,) the node numbers of the table's rows in a round. models: rows of the table that hold the
    nodes' models, all others are for forged ones. mine: the rows of the nodes that ask. everyone(x):
    the rows of all workers.
    newest: from the rows that are asked to those of the versions that are read, where nodes do not publish
    all at once.
    """

    roster: Roster
    topology: Topology
    ids: Callable[[int], Integers]
    attack: Attack
    rule: Aggregation
    table: Models
    models: int
    mine: slice
    seed: int
    no_show: float = 0.0
    silent: bool = False
    everyone: Callable[[Models], Models] = lambda x: x
    backend: Backend = field(default_factory=lambda: backend("numba"))
    wire: Wire = field(default_factory=Wire)
    newest: Callable[[Integers], Integers] | None = None

    def init(self) -> Arrays:
        """What the attack remembers."""
        return {}

    def nodes(self, t: int) -> Integers:
        """The rows of the nodes that act: all of this worker's, in every round."""
        return np.arange(self.models)[self.mine]

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        """Honest peers answer with their half-step, hostile ones with whatever the attack forges.

        An attack that looks at everybody is computed for all victims, by every worker alike.
        """
        known = self.everyone(before) if "before" in self.attack.needs else None
        forging = not (self.silent or self.attack.trains)
        if not forging or victim_by_victim(self.attack):
            return self.answers(t, nodes, state, known, forging, slice(None))
        return self.answers(t, np.arange(self.models), state, known, forging, self.mine)

    def answers(
        self, t: int, own: Integers, state: Arrays, before: Models | None, forging: bool, wanted: slice
    ) -> tuple[Received, Arrays]:
        """What the nodes in these rows of the table get; of the result, the part that is wanted."""
        ask = self.ask(t, own)
        rows, hostile = self._locate(ask)
        answered = (ask.wanted >= 0) & ~hostile & ~self._late(ask)
        if self.newest is not None:
            rows = self.newest(rows)
        end = self.models
        if forging and hostile.any():
            end += int(hostile.any(axis=1).sum())
            rows, state = self._forge(ask, own, rows, hostile, answered, state, before)
        if not self.silent:  # where hostile nodes train, they stand in the table like the others
            answered = answered | hostile
        rows = np.where(answered, rows, -1)
        received = _received(self.table[:end], own, rows, hostile, ask.weights, wanted)
        return received, state

    def ask(self, t: int, own: Integers) -> Ask:
        """Line 7: S_i^t of the nodes in these rows, drawn once."""
        ids = self.ids(t)[own]
        return Ask(t, self.topology.sample(t, ids), self.topology.weights(ids))

    def _locate(self, ask: Ask) -> tuple[Integers, NDArray[np.bool_]]:
        """(c, s) the table row of every wanted node, and which of them are hostile."""
        row, ids = np.full(self.roster.nodes, -1, dtype=np.int64), self.ids(ask.round)
        row[ids] = np.arange(len(ids))
        wanted = np.maximum(ask.wanted, 0)
        return row[wanted], self.roster.hostile(ask.round)[wanted] & (ask.wanted >= 0)

    def _late(self, ask: Ask) -> NDArray[np.bool_]:
        """Return where the pulled node misses this round's deadline, (h, s).

        A late node is late for every victim.
        """
        if self.no_show == 0:
            return np.zeros(ask.wanted.shape, dtype=bool)
        late = draws(self.seed, "no_show", ask.round, np.arange(self.roster.nodes), 1)[:, 0] < self.no_show
        return np.asarray(late[np.maximum(ask.wanted, 0)])

    def _forge(
        self, ask: Ask, own: Integers, rows: Integers, hostile: NDArray[np.bool_],
        answered: NDArray[np.bool_], state: Arrays, before: Models | None,
    ) -> tuple[Integers, Arrays]:  # fmt: skip
        """Return rows (c, s) in which hostile entries point to the forged vector of their victim.

        A consistent adversary sends one vector per sender instead.
        """
        met = np.flatnonzero(hostile.any(axis=1))
        view = self._view(ask, met, own[met], np.where(answered, rows, -1)[met], hostile[met])
        asked = np.where((ask.wanted >= 0) & ~hostile, rows, -1) if "graph" in self.attack.needs else None
        audience = (
            self._audience(ask, met, hostile) if self.attack.consistent and self.attack.searches else None
        )
        view = replace(view, before=before, graph=asked, audience=audience)
        forged, state = self.attack(view, state)
        view.with_forged(forged)
        row = np.full(len(own), -1, dtype=np.int64)
        row[met] = self.models + np.arange(len(met))
        if not self.attack.consistent:
            return np.where(hostile, row[:, None], rows), state
        return np.where(hostile, row[self._meant(ask, hostile)][np.maximum(ask.wanted, 0)], rows), state

    def _meant(self, ask: Ask, hostile: NDArray[np.bool_]) -> Integers:
        """Draw for every hostile node the victim whose vector it sends to all, (n,).

        The victim is one of the nodes that pulled it.
        """
        victims, places = np.nonzero(hostile)
        senders = ask.wanted[victims, places]
        order = np.argsort(senders, kind="stable")
        count = np.bincount(senders, minlength=self.roster.nodes)
        coins = draws(self.seed, "consistent", ask.round, np.arange(self.roster.nodes), 1)[:, 0]
        chosen = np.cumsum(count) - count + (coins * count).astype(np.int64)
        return np.where(count > 0, victims[order][np.minimum(chosen, len(order) - 1)], 0)

    def _audience(self, ask: Ask, victims: Integers, hostile: NDArray[np.bool_]) -> Integers:
        """Draw some victims that pulled the sender of each victim's vector, as places (v, 16) among victims.

        Unused places are −1.
        """
        place = np.full(len(hostile), -1, dtype=np.int64)
        place[victims] = np.arange(len(victims))
        meant = self._meant(ask, hostile)
        found = np.full((len(victims), _AUDIENCE), -1, dtype=np.int64)
        for sender in np.unique(ask.wanted[hostile]):
            pullers = np.flatnonzero((hostile & (ask.wanted == sender)).any(axis=1))
            coins = stream(self.seed, "audience", ask.round, int(sender))
            drawn = coins.permutation(pullers)[:_AUDIENCE]
            found[place[meant[sender]], : len(drawn)] = place[drawn]
        return found

    def _view(
        self, ask: Ask, met: Integers, victims: Integers, peers: Integers, hostile: NDArray[np.bool_]
    ) -> View:
        """What the adversary sees; on a fixed graph the victim's own model is among those it starts from.

        met: which of those who ask are victims. victims: their rows in the table.
        """
        table = self.table[: self.models + len(victims)]
        counts = hostile.sum(axis=1)
        common: dict[str, Any] = {
            "rule": self.rule.rule, "context": self.rule.context(ask.round, victims), "kernels": self.backend,
            "wire": self.wire,
        }  # fmt: skip
        if ask.weights is None:
            return View(table, victims, _to_the_front(peers), counts, **common)
        own, others = ask.weights[met, :1], ask.weights[met, 1:]
        peers = np.concatenate([victims[:, None], peers], axis=1)
        order = np.argsort(peers < 0, axis=1, kind="stable")
        heavy = np.argsort(~hostile, axis=1, kind="stable")[:, : int(counts.max())]
        return View(
            table,
            victims,
            np.take_along_axis(peers, order, axis=1),
            counts,
            weights=np.take_along_axis(np.concatenate([own, others], axis=1), order, axis=1),
            hostile_weights=np.take_along_axis(np.where(hostile, others, 0.0), heavy, axis=1),
            **common,
        )


@dataclass(frozen=True)
class CodedNetwork:
    """A network whose models travel in a code: pulled models are what the code can represent.

    This includes forged rows.

    network: answers from the first rows of ``whole``, which begin with what everybody's half-steps (h, d)
    become, written here, and have room for forged ones. Behind them stand the half-steps:
    a node's own row stays exact.
    """

    network: SimulatedNetwork
    half: Models
    whole: Models

    def init(self) -> Arrays:
        """What the attack remembers."""
        return self.network.init()

    def nodes(self, t: int) -> Integers:
        """The rows of the nodes that act."""
        return self.network.nodes(t)

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        """Send the honest half-steps through the code.

        The attack forges from what arrives, and its vectors go through the code, too.
        """
        h, exact = len(self.half), len(self.whole) - len(self.half)
        self.network.wire.through(self.half, self.whole[:h])
        received, state = self.network(half, state, nodes, t, before)
        index = received.index.copy()
        index[:, 0] = exact + nodes
        return replace(received, table=self.whole, index=index), state


def victim_by_victim(attack: Attack) -> bool:
    """Whether a victim's forged vector depends on no other victim, and nothing is remembered."""
    return attack.per_victim and "graph" not in attack.needs and not attack.consistent


def _received(
    table: Models,
    own: Integers,
    rows: Integers,
    hostile: NDArray[np.bool_],
    weights: NDArray[np.float64] | None,
    wanted: slice,
) -> Received:
    """Put a node's own row first and absent answers (−1) last.

    Weights and marks, where there are any, follow the same order.
    """
    rows, hostile, weights = rows[wanted], hostile[wanted], None if weights is None else weights[wanted]
    met = hostile.sum(axis=1)
    index = np.concatenate([own[wanted, None], rows], axis=1)
    if weights is None:
        return Received(table, _to_the_front(index), met=met)
    order = np.argsort(index < 0, axis=1, kind="stable")
    marks = np.concatenate([np.zeros((len(rows), 1), dtype=bool), hostile], axis=1)
    index, weights, marks = (np.take_along_axis(a, order, axis=1) for a in (index, weights, marks))
    return Received(table, index, weights, marks, met)


def _to_the_front(rows: Integers) -> Integers:
    """(h, s) present entries first, in their order."""
    if (rows >= 0).all():
        return rows
    return np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
