"""The rules of the field, each a few lines: m vectors, at most f of them hostile, one vector out.

Two kinds suffice for nearly all. A *linear* rule computes m weights from the distances between the vectors and returns
the weighted sum; a *coordinate-wise* rule sorts the m values of each coordinate. Ties are broken by the lower index,
the node's own vector (row 0) first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np

from rpel import theory
from rpel.aggregation.arrays import Array, Floats, Integers
from rpel.aggregation.base import Group, Rule

Kappa = Callable[[int, int], float]


@dataclass(frozen=True)
class Linear(Rule):
    """A weighted sum whose weights (h, m) come from the vectors' geometry."""

    weights: Callable[[Group], Floats]
    known_kappa: Kappa | None = None

    def run(self, group: Group, out: Array | None = None) -> Array:
        return group.combine(self.weights(group), out)

    def kappa(self, m: int) -> float | None:
        return None if self.known_kappa is None or self.f is None else self.known_kappa(m, self.f)


@dataclass(frozen=True)
class Coordinatewise(Rule):
    """An operation on the sorted values of each coordinate; fuses with a mixing before it."""

    operation: Literal["trimmed_mean", "median", "meamed"]
    known_kappa: Kappa | None = None

    def run(self, group: Group, out: Array | None = None, mix: Any = None) -> Array:
        return group.coordinatewise(self.operation, group.f, mix, out)

    def kappa(self, m: int) -> float | None:
        return None if self.known_kappa is None or self.f is None else self.known_kappa(m, self.f)


def checked(name: str, f: int | None) -> int | None:
    if f is not None and (isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0):
        raise ValueError(f"{name} needs a whole number f of hostile vectors, 0 or more, not {f!r}")
    return None if f is None else int(f)


def _chosen(h: int, m: int, columns: Integers) -> Floats:
    """(h, m) equal weights on the given columns (h, k)."""
    weights = np.zeros((h, m))
    np.put_along_axis(weights, columns, 1 / columns.shape[1], axis=1)
    return weights


# --- linear rules ----------------------------------------------------------------------------------------------------


def mean(f: int | None = None) -> Rule:
    """The plain mean: exact without hostile vectors, worthless with one.

    >>> mean()(np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([2., 3.])
    """
    return Linear("mean", lambda g: np.full(g.index.shape, 1 / g.m), f=checked("mean", f))


def krum_scores(squared: Floats, f: int) -> Floats:
    """(h, m) sums of squared distances to the m − f − 1 nearest others."""
    m = squared.shape[2]
    others = np.sort(squared, axis=2)[:, :, 1:]  # the first is the distance to itself, 0
    return np.asarray(others[:, :, : max(m - f - 1, 0)].sum(axis=2))


def krum(f: int) -> Rule:
    """The vector with the lowest Krum score (Blanchard et al., 2017).

    >>> krum(1)(np.array([[0.0], [0.1], [9.0]]))
    array([0.])
    """

    def weights(g: Group) -> Floats:
        best = np.argmin(krum_scores(g.pairwise(), g.f), axis=1)
        return _chosen(len(best), g.m, best[:, None])

    return Linear("krum", weights, theory.kappa_krum, f=checked("krum", f))


def multi_krum(f: int) -> Rule:
    """The mean of the m − f vectors with the lowest Krum scores.

    >>> multi_krum(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        order = np.argsort(krum_scores(g.pairwise(), g.f), axis=1, kind="stable")
        return _chosen(len(order), g.m, order[:, : g.m - g.f])

    return Linear("multi_krum", weights, f=checked("multi_krum", f))


def monna(f: int, pivot: int = 0) -> Rule:
    """The mean of the m − f vectors nearest to the node's own (Farhadkhani et al., 2023; on graphs NNA).

    >>> monna(1)(np.array([[0.0], [9.0], [1.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        near = g.to(0)  # the base brings the pivot to the front
        near[:, 0] = -1  # first even among equals
        return _chosen(len(near), g.m, np.argsort(near, axis=1, kind="stable")[:, : g.m - g.f])

    return Linear("monna", weights, f=checked("monna", f), pivot=pivot)


def _subsets(name: str, m: int, f: int) -> Integers:
    """(C, m − f) all candidate sets of honest vectors, in lexicographic order."""
    if comb(m, f) > 10**6:
        raise ValueError(f"{name} with m={m} and f={f} would try {comb(m, f):,} subsets: at most 1,000,000 are allowed")
    return np.array(list(combinations(range(m), m - f)), dtype=np.int64).reshape(-1, m - f)


def mda(f: int) -> Rule:
    """Minimum diameter averaging: the mean of the (m − f)-subset of least diameter.

    >>> mda(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        sets = _subsets("mda", g.m, g.f)
        pairs = np.array(list(combinations(range(g.m - g.f), 2)), dtype=np.int64).reshape(-1, 2)
        best = []
        for squared in g.pairwise():
            diameter = np.zeros(len(sets))
            for a, b in pairs:
                np.maximum(diameter, squared[sets[:, a], sets[:, b]], out=diameter)
            best.append(sets[np.argmin(diameter)])
        return _chosen(len(best), g.m, np.array(best))

    return Linear("mda", weights, f=checked("mda", f))


def _centred_gram(squared: Floats, c: Floats) -> Floats:
    """(…, m, m) inner products of the vectors around their c-weighted mean, from squared distances; c sums to 1."""
    to_mean = np.einsum("...ij,...j->...i", squared, c)
    spread = np.einsum("...i,...i->...", to_mean, c)
    return np.asarray((to_mean[..., :, None] + to_mean[..., None, :] - spread[..., None, None] - squared) / 2)


def smea(f: int) -> Rule:
    """Smallest maximum eigenvalue averaging: the (m − f)-subset whose covariance has the least largest eigenvalue.

    >>> smea(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        sets = _subsets("smea", g.m, g.f)
        k = g.m - g.f
        best = []
        for squared in g.pairwise():
            gram = _centred_gram(squared[sets[:, :, None], sets[:, None, :]], np.full((len(sets), k), 1 / k))
            best.append(sets[np.argmin(np.linalg.eigvalsh(gram)[:, -1])])
        return _chosen(len(best), g.m, np.array(best))

    return Linear("smea", weights, f=checked("smea", f))


def caf(f: int) -> Rule:
    """Covariance-bound agnostic filter: down-weight along the direction of largest variance, keep the calmest mean.

    >>> caf(1)(np.array([[0.0], [1.0], [9.0]])).round(2)
    array([0.56])
    """

    def weights(g: Group) -> Floats:
        return np.array([_caf_weights(squared, g.f) for squared in g.pairwise()]).reshape(-1, g.m)

    return Linear("caf", weights, f=checked("caf", f))


def _caf_weights(squared: Floats, f: int) -> Floats:
    m = len(squared)
    c = np.ones(m)
    best, least = c / m, np.inf
    while f > 0 and c.sum() > m - 2 * f:
        share = c / c.sum()
        # Covariance Σ share (x−μ)(x−μ)ᵀ has the eigenvalues of the Gram matrix scaled by √share on both sides, and
        # ⟨x_i − μ, v⟩ = (gram · √share · u)_i / √λ for its unit eigenvector u.
        gram, root = _centred_gram(squared, share), np.sqrt(share)
        values, vectors = np.linalg.eigh(gram * root[:, None] * root[None, :])
        top = max(float(values[-1]), 0.0)
        if top < least:
            best, least = share, top
        if top == 0.0:
            break
        tau = (gram @ (root * vectors[:, -1])) ** 2
        tau[c == 0] = 0.0
        if tau.max() == 0.0:
            break
        c = c * (1 - tau / tau.max())
    return best


# --- coordinate-wise rules -------------------------------------------------------------------------------------------


def trimmed_mean(f: int) -> Rule:
    """Per coordinate, drop the f lowest and the f highest values and average the rest (Yin et al., 2018).

    >>> trimmed_mean(1)(np.array([[0.0], [1.0], [2.0], [90.0]]))
    array([1.5])
    """
    return Coordinatewise("trimmed_mean", "trimmed_mean", theory.kappa_trimmed_mean, f=checked("trimmed_mean", f))


def median(f: int | None = None) -> Rule:
    """Per coordinate, the middle value (Yin et al., 2018). f enters only κ and the check of m.

    >>> median()(np.array([[0.0], [1.0], [90.0]]))
    array([1.])
    """
    return Coordinatewise("median", "median", theory.kappa_median, f=checked("median", f))


def meamed(f: int) -> Rule:
    """Per coordinate, the mean of the m − f values nearest to the median (Xie et al., 2018).

    >>> meamed(1)(np.array([[0.0], [1.0], [90.0]]))
    array([0.5])
    """
    return Coordinatewise("meamed", "meamed", f=checked("meamed", f))


@dataclass(frozen=True)
class Bulyan(Rule):
    """Krum picks θ = m − 2f vectors in turn; then per coordinate the θ − 2f values nearest to their median."""

    def least(self, f: int) -> int:
        return 4 * f + 3 if f else 1

    def run(self, group: Group, out: Array | None = None) -> Array:
        picked = self._picks(group.pairwise(), group.f)
        chosen = replace(group, index=np.take_along_axis(group.index, picked, axis=1))
        return chosen.coordinatewise("meamed", 2 * group.f, out=out)

    @staticmethod
    def _picks(squared: Floats, f: int) -> Integers:
        """(h, θ) columns picked by Krum among those that remain, in ascending order."""
        h, m, _ = squared.shape
        remaining = np.tile(np.arange(m), (h, 1))
        picked = np.empty((h, m - 2 * f), dtype=np.int64)
        for k in range(m - 2 * f):
            sub = np.take_along_axis(squared, remaining[:, :, None], axis=1)
            sub = np.take_along_axis(sub, np.repeat(remaining[:, None, :], remaining.shape[1], axis=1), axis=2)
            best = np.argmin(krum_scores(sub, f), axis=1)
            picked[:, k] = remaining[np.arange(h), best]
            keep = np.arange(remaining.shape[1]) != best[:, None]
            remaining = remaining[keep].reshape(h, -1)
        return np.sort(picked, axis=1)


def bulyan(f: int) -> Rule:
    """Bulyan of Krum (El Mhamdi et al., 2018); needs m ≥ 4f + 3.

    >>> bulyan(1)(np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [90.0]]))
    array([2.])
    """
    return Bulyan("bulyan", f=checked("bulyan", f))
