"""The simulated network: it delivers what was pulled, and the adversary and all injected faults live here.

Laws: the round never learns who is hostile; every fault is drawn from coordinates, so that a round replays alone;
forged vectors are written behind the honest rows of one table, so that nothing is copied to be aggregated.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.aggregation import Rule
from rpel.attacks import Attack, View
from rpel.attacks.forgeries import State
from rpel.randomness import draws, stream
from rpel.types import Exchange, Inbox, Integers, Models

_EACH_ALONE = frozenset({"sign_flipping", "foe", "inner_product_manipulation", "alie", "dissensus", "inf"})

_AUDIENCE = 16
"""Victims over which a search takes the mean harm of a vector that goes to many."""


@dataclass(frozen=True)
class Roster:
    """Which node numbers are hostile in a round; with ``roaming`` the attackers change identity each round."""

    nodes: int
    byzantine: int
    seed: int
    roaming: bool = False
    placed: tuple[int, ...] | None = None  # adversarial placement: exactly these

    def hostile(self, t: int) -> NDArray[np.bool_]:
        """(n,) True for the hostile node numbers.

        >>> int(Roster(nodes=10, byzantine=3, seed=0).hostile(1).sum())
        3
        """
        if self.placed is not None:
            return np.isin(np.arange(self.nodes), self.placed)
        coins = stream(self.seed, "placement", t if self.roaming else 0)
        marks = np.zeros(self.nodes, dtype=bool)
        marks[coins.choice(self.nodes, size=self.byzantine, replace=False)] = True
        return marks

    def honest_ids(self, t: int) -> Integers:
        """(h,) the honest node numbers in ascending order; node i of the cohort goes by the i-th of them."""
        return np.flatnonzero(~self.hostile(t))


@dataclass
class SimulatedNetwork:
    """Answers an :class:`Exchange` from the table: honest rows first, then room for one forged vector per victim.

    After a delivery ``hostile`` (h,) holds how many hostile peers each node of the cohort pulled.
    """

    roster: Roster
    attack: Attack
    rule: Rule
    table: Models
    seed: int
    no_show: float = 0.0
    silent: bool = False
    consistent: bool = False
    state: State = field(default_factory=dict)
    hostile: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    before: Models | None = None  # (h, d) the models before the local step, kept only for attacks that need them

    def deliver(self, ask: Exchange, mine: slice = slice(None)) -> Inbox:
        """Line 8: honest peers answer with their half-step, hostile ones with whatever the attack forges.

        All honest nodes ask; ``mine`` are those whose answers are wanted.
        """
        rows, hostile = self._locate(ask)
        self.hostile = hostile.sum(axis=1)
        answered = (ask.wanted >= 0) & ~hostile & ~self._late(ask)
        table = self.table
        if self.attack.trains:  # label flip: hostile nodes stand in the table like the others
            table = table[: len(ask.half)]
        elif not self.silent and hostile.any():
            rows = self._forge(ask, rows, hostile, answered, mine)
        if not self.silent:
            answered = answered | hostile
        return _inbox(table, np.where(answered, rows, -1), hostile, ask.weights, mine)

    def _locate(self, ask: Exchange) -> tuple[Integers, NDArray[np.bool_]]:
        """(h, s) the table row of every wanted node, and which of them are hostile."""
        row = np.full(self.roster.nodes, -1, dtype=np.int64)
        row[ask.ids] = np.arange(len(ask.ids))
        wanted = np.maximum(ask.wanted, 0)
        return row[wanted], self.roster.hostile(ask.round)[wanted] & (ask.wanted >= 0)

    def _late(self, ask: Exchange) -> NDArray[np.bool_]:
        """(h, s) True where the wanted node misses this round's deadline; a late node is late for everybody."""
        if self.no_show == 0:
            return np.zeros(ask.wanted.shape, dtype=bool)
        late = draws(self.seed, "no_show", ask.round, np.arange(self.roster.nodes), 1)[:, 0] < self.no_show
        return np.asarray(late[np.maximum(ask.wanted, 0)])

    def _forge(
        self, ask: Exchange, rows: Integers, hostile: NDArray[np.bool_], answered: NDArray[np.bool_], mine: slice
    ) -> Integers:
        """(h, s) rows; hostile entries point to the forged vector of their victim, or of their sender if consistent."""
        h, met = len(ask.half), hostile.any(axis=1)
        if self._victim_by_victim:
            met &= np.isin(np.arange(h), np.arange(h)[mine])
        victims = np.flatnonzero(met)
        if not len(victims):
            return rows
        view = self._view(ask, victims, np.where(answered, rows, -1)[victims], hostile[victims])
        if self.attack.needs:
            asked = np.where((ask.wanted >= 0) & ~hostile, rows, -1) if "graph" in self.attack.needs else None
            view = replace(view, before=self.before, graph=asked)
        if self.consistent and self.attack.name == "strongest":
            view = replace(view, audience=self._audience(ask, victims, hostile))
        _, self.state = self.attack(view, self.state)
        forged = np.full(h, -1, dtype=np.int64)
        forged[victims] = h + np.arange(len(victims))
        if not self.consistent:
            return np.where(hostile, forged[:, None], rows)
        return np.where(hostile, forged[self._meant(ask, hostile)][np.maximum(ask.wanted, 0)], rows)

    @property
    def _victim_by_victim(self) -> bool:
        """Whether a victim's forged vector depends on no other victim, and nothing is remembered."""
        return self.attack.name in _EACH_ALONE and self.attack.targeting == "all" and not self.consistent

    def _meant(self, ask: Exchange, hostile: NDArray[np.bool_]) -> Integers:
        """(n,) for every hostile node the victim whose vector it sends to all: one of those that pulled it, drawn."""
        victims, places = np.nonzero(hostile)
        senders = ask.wanted[victims, places]
        order = np.argsort(senders, kind="stable")
        count = np.bincount(senders, minlength=self.roster.nodes)
        coins = draws(self.seed, "consistent", ask.round, np.arange(self.roster.nodes), 1)[:, 0]
        chosen = np.cumsum(count) - count + (coins * count).astype(np.int64)
        return np.where(count > 0, victims[order][np.minimum(chosen, len(order) - 1)], 0)

    def _audience(self, ask: Exchange, victims: Integers, hostile: NDArray[np.bool_]) -> Integers:
        """(v, 16) places among the victims of some that pulled whoever sends a victim's vector, drawn; −1 padded."""
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

    def _view(self, ask: Exchange, victims: Integers, peers: Integers, hostile: NDArray[np.bool_]) -> View:
        """What the adversary sees; on a fixed graph the victim's own model is among those it starts from."""
        table = self.table[: len(ask.half) + len(victims)]
        counts = hostile.sum(axis=1)
        common: dict[str, Any] = {"rule": self.rule.among(victims), "round": ask.round, "seed": self.seed}
        if ask.weights is None:
            return View(table, victims, _to_the_front(peers), counts, **common)
        own, others = ask.weights[victims, :1], ask.weights[victims, 1:]
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


def _inbox(
    table: Models, rows: Integers, hostile: NDArray[np.bool_], weights: NDArray[np.float64] | None, mine: slice
) -> Inbox:
    """Own row first, absent answers (−1) at the tail; weights and marks, where there are any, in the same order."""
    own = np.arange(len(rows))[mine, None]
    rows, hostile, weights = rows[mine], hostile[mine], None if weights is None else weights[mine]
    index = np.concatenate([own, rows], axis=1)
    if weights is None:
        return Inbox(table, _to_the_front(index))
    order = np.argsort(index < 0, axis=1, kind="stable")
    marks = np.concatenate([np.zeros((len(rows), 1), dtype=bool), hostile], axis=1)
    index, weights, marks = (np.take_along_axis(a, order, axis=1) for a in (index, weights, marks))
    return Inbox(table, index, weights, marks)


def _to_the_front(rows: Integers) -> Integers:
    """(h, s) present entries first, in their order."""
    if (rows >= 0).all():
        return rows
    return np.take_along_axis(rows, np.argsort(rows < 0, axis=1, kind="stable"), axis=1)
