"""What the omniscient adversary sees in one round, and the two ways it combines what it sees.

The adversary knows everything: all honest half-step models, who pulled whom, and the rule. Forging goes
through the same compiled kernels as aggregating, because it is as hot.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import zeros
from rpel.backend.base import Backend, backend
from rpel.rules import RoundContext, Rule
from rpel.types import Floats, Integers, Models
from rpel.wire import Wire


@dataclass(frozen=True)
class Spread:
    """The geometry of each victim's A, which are k models, in squared distances."""

    count: Integers  # (v,) k
    diameter: Floats  # (v,) the largest
    total: Floats  # (v,) the largest sum from one of them to all others
    to_mean: Floats  # (v, k) ‖a − μ‖², 0 padded


def _spread(kernels: Backend, models: Models, rows: Integers) -> Spread:
    """Return it from the distances between the models of A, in pieces below 32 MB."""
    present = rows >= 0
    full = np.where(present, rows, rows[:, :1])
    v, k = rows.shape
    diameter, total, to_mean = np.empty(v), np.empty(v), np.empty((v, k))
    step = max(1, 4_000_000 // (k * k))
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, v, step):
            at = slice(start, start + step)
            here = present[at].astype(np.float64)
            squared = (
                np.asarray(kernels.squared_distances(models, full[at])) * here[:, :, None] * here[:, None, :]
            )
            sums, count = squared.sum(axis=2), here.sum(axis=1, keepdims=True)
            diameter[at], total[at] = squared.max(axis=(1, 2)), sums.max(axis=1)
            to_mean[at] = (
                np.maximum(sums / count - sums.sum(axis=1, keepdims=True) / (2 * count**2), 0.0) * here
            )
    return Spread(present.sum(axis=1), diameter, total, to_mean)


@dataclass(frozen=True)
class View:
    """What the omniscient adversary sees in one round, and memory for what it forges.

    Shapes, with n honest nodes, v victims and d parameters::

      table    (n + v, d): n honest half-step models, then v rows of memory, ``out``
      own      (v,) the victims' own rows
      peers    (v, k) the rows A that each victim received honestly, −1 padded at the tail (on a fixed graph
               the victim's own row is one of them; under pulling it is not)
      hostile  (v,) how many hostile answers each victim gets, all of them the same forged vector
      rule     the victims' rule, and context: the round, the run's seed, and who the victims are
      weights  None when every model counts alike (pulling), else the gossip weights (v, k) of the peers
      hostile_weights  and (v, b) of the hostile neighbours, 0 padded
      before   (n, d) the honest models before this round's local step, for attacks that declare to need it
      graph    (n, s) the honest rows that each honest node asks this round, −1 padded, likewise
      audience (v, k) which victims get a victim's vector when hostile nodes must send all the same one, −1
               padded; empty: this victim's vector is not sent
      wire     what models travel as: a forged row arrives as the vector that this code can say
    """

    table: Models
    own: Integers
    peers: Integers
    hostile: Integers
    rule: Rule | None = None
    context: RoundContext = field(default_factory=RoundContext)
    weights: Floats | None = None
    hostile_weights: Floats | None = None
    kernels: Backend = field(default_factory=lambda: backend("numba"))
    before: Models | None = None
    graph: Integers | None = None
    audience: Integers | None = None
    wire: Wire = field(default_factory=Wire)

    @property
    def victims(self) -> int:
        return len(self.own)

    @property
    def round(self) -> int:
        return self.context.round

    @property
    def seed(self) -> int:
        return self.context.seed

    @property
    def honest(self) -> Models:
        """(n, d) all honest half-step models."""
        return self.table[: len(self.table) - self.victims]

    @cached_property
    def out(self) -> Models:
        """(v, d) Memory for the rows that an attack returns, so that they need not be copied."""
        return self.table[len(self.table) - self.victims :]

    def with_forged(self, forged: Models) -> Models:
        """(n + v, d) Return the honest models, then these forged rows (v, d) as they arrive, in ``out``."""
        if forged is not self.out:
            self.out[:] = forged
        self.wire.through(self.out, self.out)
        return self.table

    @property
    def sources(self) -> Integers:
        """(v, k) the rows of A; a victim without honest peers has its own model there instead."""
        alone = self.peers[:, 0] < 0 if self.peers.shape[1] else np.ones(self.victims, dtype=bool)
        rows = self.peers if self.peers.shape[1] else np.full((self.victims, 1), -1, dtype=np.int64)
        if not alone.any():
            return rows
        rows = rows.copy()
        rows[alone, 0] = self.own[alone]
        return rows

    @property
    def counts(self) -> Integers:
        """(v,) m of each victim: its own model, the honest answers, the hostile ones."""
        others = (self.peers >= 0) & (self.peers != self.own[:, None])
        return np.asarray(1 + others.sum(axis=1) + self.hostile)

    @property
    def change(self) -> Floats:
        """(d,) the honest nodes' mean change in this round's local step."""
        if self.before is None:
            raise ValueError("this attack needs the models before the local step (needs = {'before'})")
        return self.mean(self.honest) - self.mean(self.before)

    def mean(self, models: Models) -> Models:
        """(d,) Return the mean of some models (k, d), in the widest type."""
        total = zeros(models.shape[1:], models, wide=True)
        self.kernels.column_sums(models, slice(0, len(total)), total)
        return total / len(models)

    @cached_property
    def finite(self) -> NDArray[np.bool_]:
        """(n,) Marks of the honest models whose entries are all finite."""
        return np.asarray(self.kernels.finite_rows(self.honest))

    @cached_property
    def spread(self) -> Spread:
        """How far the models of A are from each other and from μ, for every victim."""
        return _spread(self.kernels, self.honest, self.sources)

    def moments(
        self, mean: float | Floats = 1.0, deviation: float | Floats = 0.0, *, out: Models | None = None
    ) -> Models:
        """(v, d) Return mean · μ + deviation · σ; factors are numbers, or one per victim."""
        means, deviations = (
            np.broadcast_to(np.asarray(a, dtype=np.float64), (self.victims,)).copy()
            for a in (mean, deviation)
        )
        return self.kernels.moments(self.honest, self.sources, means, deviations, out=out)

    def combine(self, own: Floats, peers: Floats, *, out: Models | None = None) -> Models:
        """(v, d) Return own · x_i + Σ_k peers_k · x_k; own (v,), peers (v, k)."""
        index = np.concatenate([self.own[:, None], self.peers], axis=1)
        weights = np.concatenate([own[:, None], peers], axis=1)
        return self.kernels.combine(self.honest, index, weights, out=out)

    def average(self, rows: Integers) -> Models:
        """(…, d) Return the mean of the honest models in each row of an index, −1 left out."""
        weights = (rows >= 0) / np.maximum((rows >= 0).sum(axis=1, keepdims=True), 1)
        return self.kernels.combine(self.honest, rows, weights)

    def answers(self) -> tuple[Integers, Floats | None]:
        """(v, m) Return the rows that each victim aggregates, its forged one repeated, and their weights."""
        forged = len(self.table) - self.victims + np.arange(self.victims)
        times = np.arange(int(self.hostile.max(initial=0)))[None, :] < self.hostile[:, None]
        others = np.where(self.peers == self.own[:, None], -1, self.peers)
        index = np.concatenate([self.own[:, None], others, np.where(times, forged[:, None], -1)], axis=1)
        order = np.argsort(index < 0, axis=1, kind="stable")[:, : int(self.counts.max(initial=1))]
        index = np.take_along_axis(index, order, axis=1)
        if self.weights is None or self.hostile_weights is None:
            return index, None
        rest = np.concatenate(
            [np.where(others >= 0, self.weights, 0.0), self.hostile_weights[:, : times.shape[1]]], axis=1
        )
        weights = np.concatenate([1 - rest.sum(axis=1, keepdims=True), rest], axis=1)
        return index, np.take_along_axis(weights, order, axis=1)
