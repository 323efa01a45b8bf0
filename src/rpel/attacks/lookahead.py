"""What a forged vector does a round later, where nodes remember: an adversary's guess of the next round.

A node with memory aggregates this round's answers once more, moved along with its own movement: with z its
model after line 9 and x its half-step, an answer y becomes y + (z − x). The adversary takes everybody's next
local step to be the same, which then moves all of the window alike and is left out; it takes the half-steps
of honest peers that the victim does not know yet, drawn, for the new answers, none of them hostile. Harm is
then the distance between what the rule makes of that window and the mean of its honest vectors.

Invariant: a victim's next round depends on no other victim.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from rpel.attacks.view import View
from rpel.backend.base import Backend
from rpel.backend.moving import Moving
from rpel.randomness import draws
from rpel.types import Floats, Integers, Models, Moves


@dataclass(frozen=True)
class NextRound:
    """The windows of all victims in the next round.

    table (n + v, d): the honest half-steps, then room for z; past (p, d): what is moved, this round's table
    first. fresh (v, s) rows that stand for new answers; base, back (v, k) rows of past, −1 absent; honest (v,
    k) which of them are answers that an honest node gave in this round.
    """

    table: Models
    past: Models
    most: Floats
    fresh: Integers
    base: Integers
    back: Integers
    honest: Integers

    def windows(self, kernels: Backend, forged: Models, z: Models) -> tuple[Backend, Integers, Floats]:
        """(kernels that know moved rows, index (v, m), weights (v, m) of the mean of its honest vectors) once
        nodes hold z (v, d), the forged rows standing in this round's table."""
        v = len(z)
        n = len(self.table) - v
        self.table[n:] = z
        if not kernels.shares(self.past, forged):
            self.past[n : n + v] = forged
        self.most[n : n + v] = kernels.largest(forged)
        own = np.repeat(n + np.arange(v), self.base.shape[1])
        moves = Moves(self.past, own, np.maximum(self.base, 0).ravel(), self.back.ravel(), self.most)
        number = np.arange(self.base.size).reshape(self.base.shape)
        moved = np.where(self.base >= 0, n + v + number, -1)
        index = np.concatenate([n + np.arange(v)[:, None], self.fresh, moved], axis=1)
        counted = np.concatenate([np.ones((v, 1), bool), self.fresh >= 0, self.honest], axis=1)
        weights = counted / counted.sum(axis=1, keepdims=True)
        order = np.argsort(index < 0, axis=1, kind="stable")[:, : int((index >= 0).sum(axis=1).max())]
        index, weights = (np.take_along_axis(part, order, axis=1) for part in (index, weights))
        return cast(Backend, Moving(kernels, moves)), index, weights


def next_round(view: View) -> NextRound | None:
    """What the adversary expects; None where nodes remember nothing."""
    if view.remembered is None or view.moves is None:
        return None
    n, v, s = len(view.honest), view.victims, view.peers.shape[1]
    forged = np.where(np.arange(s) < view.hostile[:, None], n + np.arange(v)[:, None], -1)
    remembered = view.remembered[:, : view.remembered.shape[1] - s]  # the oldest answers leave the window
    number, there = np.maximum(remembered, 0), len(view.table)
    base = np.concatenate(
        [view.peers, forged, np.where(remembered >= 0, there + view.moves.base[number], -1)], axis=1
    )
    now = np.repeat(view.own[:, None], 2 * s, axis=1)
    back = np.concatenate([now, there + view.moves.back[number]], axis=1)
    past, most = view.table, view.kernels.largest(view.table)
    if remembered.shape[1]:
        past, most = (
            view.kernels.empty(there + len(view.moves.past), past),
            np.append(most, view.moves.largest),
        )
        past[:there], past[there:] = view.table, view.moves.past
    honest = np.zeros(base.shape, bool)
    honest[:, :s] = view.peers >= 0
    return NextRound(view.kernels.copy(view.table), past, most, _fresh(view, s), base, back, honest)


def _fresh(view: View, s: int) -> Integers:
    """(v, s) honest rows that are neither the victim nor one of its answers, drawn;
    −1 where there are fewer."""
    n = len(view.honest)
    coins = draws(view.seed, "ahead", view.round, view.own, n)
    for known in (view.own[:, None], view.peers):
        where, which = np.nonzero(known >= 0)
        coins[where, known[where, which]] = 2.0
    order = np.argsort(coins, axis=1, kind="stable")[:, :s]
    return np.where(np.take_along_axis(coins, order, axis=1) < 2.0, order, -1)
