"""Rules on weighted graphs: x_i ← x_i + ρ Σ_j a_j (x_j − x_i), with weights W_ij cut down to a_j.

Row 0 is the node itself, d_j = x_j − x_0. The neighbours are sorted by ‖d_j‖, self first; C_k is the
cumulative weight and C the total. b_w bounds the weight of the hostile neighbours; with b_w = 0 every rule
but gts is plain gossip. Cumulative weights are compared with a tolerance of 1e-12, so that equal weights
behave as in exact arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rpel.rules.base import Group, Rule
from rpel.rules.inputs import Array, host
from rpel.types import Floats, Integers

__all__ = [
    "balance", "clipped_gossip_adaptive", "clipped_gossip_oracle", "cs_plus", "gossip", "gts", "gts_exact",
    "ios", "rtc",
]  # fmt: skip

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Neighbourhood:
    """Every victim's neighbours: arrays (h, m), sorted by distance; absent neighbours have weight 0."""

    distance: Floats
    weight: Floats
    hostile: NDArray[np.bool_]
    b_w: Floats  # (h, 1)

    @property
    def cumulative(self) -> Floats:
        return np.cumsum(self.weight, axis=1)

    @property
    def total(self) -> Floats:
        return np.asarray(self.weight.sum(axis=1, keepdims=True))

    def clipped(self, tau: Floats) -> Floats:
        """W_j min(1, τ/‖d_j‖)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(self.distance > tau, tau / self.distance, 1.0)
        return np.asarray(self.weight * factor)

    def spread(self, kept: NDArray[np.bool_]) -> Floats:
        """Σ_kept W_j ‖d_j‖²; what is not kept may be infinite."""
        return np.asarray((self.weight * np.where(kept, self.distance, 0.0) ** 2).sum(axis=1, keepdims=True))


Cut = Callable[[Neighbourhood], Floats]
"""The neighbours' reduced weights a_j (h, m), in sorted order; for b_w = 0 plain gossip is used instead."""


@dataclass(frozen=True)
class GossipRule(Rule):
    """A gossip step along a graph's edges, the neighbours' weights cut down by ``cut``."""

    cut: Cut
    b_hat: int | None = None
    byzantine_weight: float | None = None
    rho: float = 1.0
    needs_hostile: bool = False
    always_cuts: bool = False  # also where b_w = 0
    on_graph: ClassVar[bool] = True

    @property
    def pull_error(self) -> str:
        """Say that it needs a graph."""
        return "works on fixed graphs only; use for example 'nnm+trimmed_mean'"

    def with_f(self, f: int) -> Self:
        return replace(self, b_hat=f, byzantine_weight=None)

    def cannot_aggregate(self, present: NDArray[np.bool_], usable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(h,) Mark victims whose own model is not finite; lost answers only take their weight along."""
        return np.asarray(~usable[:, 0])

    def compute(self, asked: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate after the checks; −1 marks absent neighbours."""
        weights = self._check(asked.index, asked.weights, "weights", float)
        hostile = asked.hostile
        if hostile is None and not self.needs_hostile:
            hostile = np.zeros(asked.index.shape, bool)
        marks = self._check(asked.index, hostile, "hostile= marks", bool)
        finite = asked.finite_rows()[asked.index]
        if not finite[:, 0].all():
            raise ValueError(f"{self.name} needs a finite own vector in column 0")
        # a non-finite answer is left out, and its weight is off the hostile weight
        index = np.where(finite, asked.index, -1)
        return self.run(replace(asked, index=index, weights=weights, hostile=marks), out)

    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate for victims with weights and marks; some neighbours may be absent."""
        weights, marks = np.asarray(group.weights), np.asarray(group.hostile)
        return group.combine(self.coefficients(group, weights, group.index >= 0, marks), out)

    def coefficients(
        self, seen: Group, weight: Floats, present: NDArray[np.bool_], hostile: NDArray[np.bool_]
    ) -> Floats:
        """(h, m) Return the weight of each of the victim's rows in the result; they sum to 1."""
        distance = np.sqrt(seen.to(0))
        lost = np.where(present, 0.0, weight).sum(axis=1, keepdims=True)
        b_w = np.maximum(self._hostile_weight(weight, hostile) - lost, 0.0)
        weight = np.where(present, weight, 0.0)
        order = np.argsort(np.where(present, distance, np.inf), axis=1, kind="stable")
        order = np.take_along_axis(order, np.argsort(order != 0, axis=1, kind="stable"), axis=1)  # self first
        distance, weight_, hostile = (
            np.take_along_axis(column, order, axis=1)
            for column in (np.where(present, distance, 0.0), weight, hostile)
        )
        near = Neighbourhood(distance, weight_, hostile, b_w)
        cut = np.where(self.always_cuts | (b_w > TOLERANCE), self.cut(near), near.weight)
        coefficients = np.zeros_like(weight)
        np.put_along_axis(coefficients, order, self.rho * cut, axis=1)
        coefficients[:, 0] = 1 - coefficients[:, 1:].sum(axis=1)
        return coefficients

    def _hostile_weight(self, weight: Floats, hostile: NDArray[np.bool_]) -> Floats:
        """(h, 1) Return b_w: for the oracle the true one, else as given, or the b_hat largest weights."""
        if self.needs_hostile:
            return np.asarray(np.where(hostile, weight, 0.0).sum(axis=1, keepdims=True))
        if self.byzantine_weight is not None:
            return np.full((len(weight), 1), self.byzantine_weight)
        largest = np.sort(weight[:, 1:], axis=1)[:, ::-1]
        return np.asarray(largest[:, : self.b_hat or 0].sum(axis=1, keepdims=True))

    def _check(self, index: Integers, values: Array | None, what: str, kind: type) -> Any:
        """Return weights or marks (h, m) of the neighbours, 0 where one is absent."""
        if values is None:
            raise ValueError(f"{self.name} needs {what} (h, m), self first")
        checked: NDArray[Any] = np.asarray(host(values), dtype=kind)
        if checked.shape != index.shape or not np.isfinite(checked).all() or (checked < 0).any():
            raise ValueError(
                f"{self.name} needs {what} of shape {index.shape}, finite and >= 0, not {checked.shape}"
            )
        return np.where(index >= 0, checked, kind(0))


def _graph_rule(
    name: str,
    cut: Cut,
    needs_hostile: bool = False,
    always_cuts: bool = False,
    kind: type[GossipRule] = GossipRule,
) -> Callable[..., GossipRule]:
    """Return a constructor; it takes b_hat (also called f) or a hostile weight where the rule needs one."""
    needed = name != "gossip" and not needs_hostile

    def constructor(
        b_hat: int | None = None,
        byzantine_weight: float | None = None,
        rho: float = 1.0,
        f: int | None = None,
    ) -> GossipRule:
        b_hat = f if b_hat is None else b_hat
        if needed and (b_hat is None) == (byzantine_weight is None):
            raise ValueError(f"{name} needs either b_hat or byzantine_weight")
        if (b_hat or 0) < 0 or not (byzantine_weight or 0.0) >= 0:
            raise ValueError(
                f"{name} needs a hostile weight of 0 or more, not b_hat={b_hat}, {byzantine_weight=}"
            )
        return kind(name, cut, b_hat, byzantine_weight, rho, needs_hostile, always_cuts, pivot=0)

    constructor.__name__, constructor.__doc__ = name, cut.__doc__ if kind is GossipRule else kind.__doc__
    return constructor


def _plain(n: Neighbourhood) -> Floats:
    """Plain gossip: x_i + ρ Σ W_ij d_j (D-PSGD)."""
    return n.weight


def _cs_plus(n: Neighbourhood) -> Floats:
    """CS+: clip to the largest ‖d_(k)‖ with C_k ≤ C − 2b_w, zero if there is none (Gaucher et al., 2025)."""
    inside = n.cumulative <= n.total - 2 * n.b_w + TOLERANCE
    tau = np.where(inside, n.distance, 0.0).max(axis=1, keepdims=True)
    return n.clipped(tau)


def _gts(n: Neighbourhood) -> Floats:
    """GTS as in its authors' code: all before the boundary, and the excess over C − b_w of the one on it.

    The boundary is the first k with C_k ≥ C − b_w; it counts with C_k − (C − b_w). For equal weights that is
    one neighbour fewer than ``gts_exact`` keeps, and with b_w = 0 the farthest is dropped (Gaucher et al.,
    2025).
    """
    limit = n.total - n.b_w
    reached = n.cumulative >= limit - TOLERANCE
    before = n.cumulative - n.weight < limit - TOLERANCE  # of those that have reached it, the first
    return np.where(reached, np.where(before, np.maximum(n.cumulative - limit, 0.0), 0.0), n.weight)


def _gts_exact(n: Neighbourhood) -> Floats:
    """GTS by definition: the nearest of total weight C − b_w, the last one with the part that fits."""
    left = n.total - n.b_w - (n.cumulative - n.weight)
    return np.clip(np.where(np.abs(left) <= TOLERANCE, 0.0, left), 0.0, n.weight)


def _adaptive(n: Neighbourhood) -> Floats:
    """ClippedGossip, adaptive: τ² = (1/b_w) Σ W_(k)‖d_(k)‖² over k with C_k < C − b_w (He et al., 2022)."""
    inside = n.cumulative < n.total - n.b_w - TOLERANCE
    with np.errstate(divide="ignore", invalid="ignore"):
        return n.clipped(np.sqrt(n.spread(inside) / n.b_w))


def _oracle(n: Neighbourhood) -> Floats:
    """ClippedGossip, told who is hostile: τ² = (1/δ) Σ_honest W_ij‖d_j‖², δ the hostile weight."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return n.clipped(np.sqrt(n.spread(~n.hostile) / n.b_w))


def _rtc(n: Neighbourhood) -> Floats:
    """RTC: drop the farthest of total weight at most b_w, clip to τ² = (1/b_w) Σ_kept W_ij‖d_j‖²."""
    from_far = np.cumsum(n.weight[:, ::-1], axis=1)[:, ::-1]  # weight of this one and all farther ones
    kept = from_far > n.b_w + TOLERANCE
    with np.errstate(divide="ignore", invalid="ignore"):
        tau = np.sqrt(n.spread(kept) / n.b_w)
    return np.where(kept, n.clipped(tau), 0.0)


gossip = _graph_rule("gossip", _plain)
cs_plus = _graph_rule("cs_plus", _cs_plus)
gts = _graph_rule("gts", _gts, always_cuts=True)
gts_exact = _graph_rule("gts_exact", _gts_exact)
clipped_gossip_adaptive = _graph_rule("clipped_gossip_adaptive", _adaptive)
clipped_gossip_oracle = _graph_rule("clipped_gossip_oracle", _oracle, needs_hostile=True)
rtc = _graph_rule("rtc", _rtc)


# --- rules on graphs that do not sort by the distance to oneself --------------------------------------------


@dataclass(frozen=True)
class OutlierScissor(GossipRule):
    """Iterative outlier scissor: drop the neighbours farthest from the weighted mean (Wu et al., 2023).

    Drop b̂ times the vector farthest from the weighted mean of those left; the own vector is part of that mean
    and never dropped. Return the weighted mean of the rest. With ``byzantine_weight``, drop as long as the
    removed weight is at most that.

    >>> ios(b_hat=1)(np.array([[0.0], [1.0], [50.0]]), weights=np.full(3, 1 / 3))
    array([0.5])
    """

    def coefficients(
        self, seen: Group, weight: Floats, present: NDArray[np.bool_], hostile: NDArray[np.bool_]
    ) -> Floats:
        lost = np.where(present, 0.0, weight)  # non-finite answers: dropped before all others
        count = np.full(len(weight), np.inf) if self.b_hat is None else self.b_hat - (lost > 0).sum(axis=1)
        spare = np.inf if self.byzantine_weight is None else self.byzantine_weight - lost.sum(axis=1)
        left = np.where(present, weight, 0.0)
        # an absent neighbour is replaced by the own vector with weight 0
        filled = replace(seen, index=np.where(present, seen.index, seen.index[:, :1]))
        squared = np.minimum(filled.pairwise(), 1e300)  # sums of a few stay finite
        droppable, rows = present & (np.arange(weight.shape[1]) > 0), np.arange(len(weight))
        while True:
            far = weight.shape[1] - 1 - np.argmax(_from_mean(squared, left, droppable)[:, ::-1], axis=1)
            drop = droppable[rows, far] & (count >= 1) & (weight[rows, far] <= spare + TOLERANCE)
            if not drop.any():
                break
            left[rows[drop], far[drop]] = 0.0
            droppable[rows[drop], far[drop]] = False
            count, spare = count - drop, spare - np.where(drop, weight[rows, far], 0.0)
            droppable &= drop[:, None]  # a victim that could not drop its farthest is done
        weights = self.rho * left / left.sum(axis=1, keepdims=True)
        weights[:, 0] += 1 - self.rho
        return np.asarray(weights)


def _from_mean(squared: Floats, weight: Floats, droppable: NDArray[np.bool_]) -> Floats:
    """(h, m) Squared distances to the weighted mean; −1 for vectors that cannot be dropped."""
    share = weight / weight.sum(axis=1, keepdims=True)
    used = np.where((share > 0)[:, None, :], squared, 0.0)
    to_mean = np.einsum("hij,hj->hi", used, share)
    return np.where(droppable, to_mean, -1.0)  # less the same variance for every row, which changes no order


ios = _graph_rule("ios", _plain, kind=OutlierScissor)


@dataclass(frozen=True)
class Balance(Rule):
    """Average with the neighbours that are near in units of the node's own length; see `balance`."""

    gamma: float = 0.3
    decay: float = 1.0
    alpha: float = 0.5

    def refuse_weights(self, weights: Array | None, hostile: Array | None) -> None:
        """Ignore gossip weights: on a graph all neighbours count alike."""

    def with_f(self, f: int) -> Self:
        return self

    def run(self, group: Group, out: Array | None = None) -> Array:
        at = group.context
        within = self.gamma * np.exp(-self.decay * (at.round & 0xFFFFFFFF) / at.rounds)
        near = np.sqrt(group.to(0)) <= within * group.norms()[:, :1]
        near[:, 0] = False
        count = near.sum(axis=1, keepdims=True)
        weights = (1 - self.alpha) * near / np.maximum(count, 1)
        weights[:, 0] = np.where(count[:, 0] > 0, self.alpha, 1.0)
        return group.combine(weights, out)


def balance(gamma: float = 0.3, kappa: float = 1.0, alpha: float = 0.5, f: int | None = None) -> Rule:
    """BALANCE: average with the x_j for which ‖x_i − x_j‖ ≤ γ·exp(−κ·t/T)·‖x_i‖ (Fang et al., 2024).

    The result is α x_i + (1 − α)·mean(kept), or x_i if none is kept. f is accepted and has no effect.

    >>> balance()(np.array([[1.0], [1.2], [50.0]]))
    array([1.1])
    """
    if not (gamma >= 0 and kappa >= 0 and 0 <= alpha <= 1):
        raise ValueError(
            f"balance needs gamma >= 0, kappa >= 0 and alpha in [0, 1], not {gamma}, {kappa}, {alpha}"
        )
    return Balance("balance", gamma, kappa, alpha, pivot=0)
