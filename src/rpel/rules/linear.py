"""Linear rules: m weights computed from the vectors' distances, then one weighted sum.

Some approach their weights step by step. Ties are broken by the lower index, so that the node's own vector
(row 0) comes first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from rpel import theory
from rpel.backend.arrays import empty, lend, namespace, wide_dtype
from rpel.randomness import stream
from rpel.rules.base import Group, Rule
from rpel.rules.inputs import Array, host
from rpel.types import Floats, Integers

__all__ = [
    "aksel", "caf", "centered_clipping", "cge", "dnc", "geometric_median", "krum", "mda", "mean", "monna",
    "multi_krum", "smea",
]  # fmt: skip


@dataclass(frozen=True)
class Linear(Rule):
    """A weighted sum whose weights (h, m) come from the vectors' geometry."""

    weights: Callable[[Group], Floats]

    def run(self, group: Group, out: Array | None = None) -> Array:
        return group.combine(self.weights(group), out)


def _first(values: Floats, k: int) -> Integers:
    """(h, k) The columns of the k smallest values; ties go to the lower column."""
    return np.argsort(values, axis=1, kind="stable")[:, :k]


def _chosen(g: Group, columns: Integers) -> Floats:
    """(h, m) Equal weights on the given columns (h, k)."""
    weights = np.zeros((len(columns), g.m))
    np.put_along_axis(weights, columns, 1 / columns.shape[1], axis=1)
    return weights


def mean(f: int | None = None) -> Rule:
    """The plain mean: exact without hostile vectors, worthless with one.

    >>> mean()(np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([2., 3.])
    """
    return Linear("mean", lambda g: np.full(g.index.shape, 1 / g.m), f=f)


def krum_scores(squared: Floats, f: int, without: int = 1) -> Floats:
    """(h, m) Sums of squared distances to the m − f − ``without`` nearest others."""
    m = squared.shape[2]
    others = np.sort(squared, axis=2)[:, :, 1:]  # the first is the distance to itself, 0
    return np.asarray(others[:, :, : max(m - f - without, 0)].sum(axis=2))


_KRUM_NEIGHBOURS = {"m-f-1": 1, "m-f-2": 2}


def krum(f: int, neighbours: str = "m-f-1") -> Rule:
    """The vector with the lowest Krum score (Blanchard et al., 2017).

    A score sums the squared distances to the m − f − 1 nearest others, which κ is proven for, or, as its
    authors have it, to m − f − 2.

    >>> krum(1)(np.array([[0.0], [0.1], [9.0]]))
    array([0.])
    """
    if neighbours not in _KRUM_NEIGHBOURS:
        raise ValueError(
            f"krum has neighbours {' or '.join(map(repr, _KRUM_NEIGHBOURS))}, not {neighbours!r}"
        )
    without = _KRUM_NEIGHBOURS[neighbours]

    def weights(g: Group) -> Floats:
        return _chosen(g, np.argmin(krum_scores(g.pairwise(), g.f, without), axis=1)[:, None])

    return Linear("krum", weights, known_kappa=theory.kappa_krum if without == 1 else None, f=f)


def multi_krum(f: int) -> Rule:
    """The mean of the m − f vectors with the lowest Krum scores.

    >>> multi_krum(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        return _chosen(g, _first(krum_scores(g.pairwise(), g.f), g.m - g.f))

    return Linear("multi_krum", weights, f=f)


def monna(f: int, pivot: int = 0) -> Rule:
    """The mean of the m − f vectors nearest to the node's own (Farhadkhani et al., 2023; on graphs NNA).

    >>> monna(1)(np.array([[0.0], [9.0], [1.0]]))
    array([0.5])
    """

    def weights(g: Group) -> Floats:
        near = g.to(0)
        near[:, 0] = -1  # the pivot comes first, even among equals
        return _chosen(g, _first(near, g.m - g.f))

    return Linear("monna", weights, f=f, pivot=pivot)


def _best_subset(name: str, f: int, score: Callable[[Floats, Integers], Floats]) -> Rule:
    """The mean of the (m − f)-subset of least score.

    ``score`` maps squared distances (m, m) and subsets (C, m − f) to (C,).
    """

    def weights(g: Group) -> Floats:
        m, tried = g.m, comb(g.m, g.f)
        if tried > 10**6:
            raise ValueError(
                f"{name} with m={m} and f={g.f} would try {tried:,} subsets: at most 1,000,000 are allowed"
            )
        sets = np.array(list(combinations(range(m), m - g.f)), dtype=np.int64).reshape(-1, m - g.f)
        return _chosen(g, np.array([sets[np.argmin(score(squared, sets))] for squared in g.pairwise()]))

    return Linear(name, weights, f=f)


def mda(f: int) -> Rule:
    """Minimum diameter averaging: the mean of the (m − f)-subset of least diameter.

    >>> mda(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def diameter(squared: Floats, sets: Integers) -> Floats:
        largest = np.zeros(len(sets))
        for a, b in combinations(range(sets.shape[1]), 2):
            np.maximum(largest, squared[sets[:, a], sets[:, b]], out=largest)
        return largest

    return _best_subset("mda", f, diameter)


def _centred_gram(squared: Floats, c: Floats) -> Floats:
    """(…, m, m) Inner products around the c-weighted mean, from squared distances; c sums to 1."""
    to_mean = np.einsum("...ij,...j->...i", squared, c)
    spread = np.einsum("...i,...i->...", to_mean, c)
    return np.asarray((to_mean[..., :, None] + to_mean[..., None, :] - spread[..., None, None] - squared) / 2)


def smea(f: int) -> Rule:
    """Smallest maximum eigenvalue averaging: the (m − f)-subset of least largest covariance eigenvalue.

    >>> smea(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """

    def largest_eigenvalue(squared: Floats, sets: Integers) -> Floats:
        gram = _centred_gram(
            squared[sets[:, :, None], sets[:, None, :]], np.full(sets.shape, 1 / sets.shape[1])
        )
        bound = _lower_bound(gram)
        # Eigenvalues are expensive: skip subsets whose bound exceeds the eigenvalue of another.
        near = bound <= max(np.linalg.eigvalsh(gram[bound.argmin()])[-1], 0.0) * (1 + 1e-9)
        values = np.full(len(sets), np.inf)
        values[near] = np.linalg.eigvalsh(gram[near])[:, -1]
        return values

    return _best_subset("smea", f, largest_eigenvalue)


def _lower_bound(gram: Floats) -> Floats:
    """(C,) Bound the largest eigenvalue of each Gram matrix (C, k, k) from below.

    The bound is that of Σ λ^16 ≤ λ_max^8 · Σ λ^8; it is 0 where the spread is zero or overflows.
    """
    trace = np.einsum("sii->s", gram)
    with np.errstate(invalid="ignore", divide="ignore"):
        power = gram / trace[:, None, None]  # so that no power leaves the range of numbers
        for _ in range(2):
            power = power @ power
        eighth, power = np.einsum("sij,sij->s", power, power), power @ power
        bound = trace * (np.einsum("sij,sij->s", power, power) / eighth) ** (1 / 8)
    return np.asarray(np.nan_to_num(bound, posinf=0.0))


def caf(f: int) -> Rule:
    """Covariance-bound agnostic filter: down-weight along the direction of largest variance.

    The result is the weighted mean with the smallest largest eigenvalue.

    >>> caf(1)(np.array([[0.0], [1.0], [9.0]])).round(2)
    array([0.56])
    """

    def weights(g: Group) -> Floats:
        return np.array([_caf_weights(squared, g.f) for squared in g.pairwise()]).reshape(-1, g.m)

    return Linear("caf", weights, f=f)


def _caf_weights(squared: Floats, f: int) -> Floats:
    m = len(squared)
    c = np.ones(m)
    best, least = c / m, np.inf
    while f > 0 and c.sum() > m - 2 * f:
        share = c / c.sum()
        # Covariance Σ share (x−μ)(x−μ)ᵀ has the eigenvalues of the Gram matrix scaled by √share on both
        # sides, and ⟨x_i − μ, v⟩ = (gram · √share · u)_i / √λ for its unit eigenvector u.
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


def cge(f: int, center: str = "zero") -> Rule:
    """Comparative gradient elimination: the mean of the m − f shortest vectors (Gupta, Vaidya, 2020).

    ``center="own"`` measures from the node's own vector, which is monna by another name.

    >>> cge(1)(np.array([[1.0], [-1.0], [9.0]]))
    array([0.])
    """
    if center not in ("zero", "own"):
        raise ValueError(f"cge has center 'zero' or 'own', not {center!r}")
    if center == "own":
        return replace(monna(f), name="cge")

    return Linear("cge", lambda g: _chosen(g, _first(g.distances_to(None), g.m - g.f)), f=f)


@dataclass(frozen=True)
class Aksel(Rule):
    """The mean of the m − f vectors nearest to their coordinate-wise median."""

    def run(self, group: Group, out: Array | None = None) -> Array:
        buffer = empty(len(group.index), group.table) if out is None else out
        near = _nearest_to_median(group, group.m - group.f, buffer)
        return group.combine(_chosen(group, near), buffer)


def aksel(f: int) -> Rule:
    """The mean of the m − f vectors nearest to the coordinate-wise median (after Boussetta et al., 2021).

    >>> aksel(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """
    return Aksel("aksel", f=f)


@dataclass(frozen=True)
class DivideAndConquer(Rule):
    """Drop, in several passes, the f vectors farthest along the direction of largest variance; see `dnc`."""

    passes: int = 3
    coordinates: int = 1000

    def run(self, group: Group, out: Array | None = None) -> Array:
        buffer = empty(len(group.index), group.table) if out is None else out
        d = int(group.table.shape[1])
        kept = np.ones(group.index.shape, dtype=bool)
        # on all coordinates one pass is as good as three
        for k in range(self.passes if d > self.coordinates else 1):
            np.put_along_axis(kept, self._farthest(group, k, d), False, axis=1)
        weights = kept / np.maximum(kept.sum(axis=1, keepdims=True), 1)
        least = group.m - 2 * group.f
        few = kept.sum(axis=1) < least
        if few.any():
            weights[few] = _chosen(group, _nearest_to_median(group, least, buffer))[few]
        return group.combine(weights, buffer)

    def _farthest(self, group: Group, k: int, d: int) -> Integers:
        """(h, f) Columns of the f largest ⟨x_j − μ, v⟩², v the top singular vector of the centred vectors."""
        q, farthest = min(d, self.coordinates), []
        step = max(1, 4_000_000 // (group.m * q))  # victims at a time: a gathered piece stays below 32 MB
        for start in range(0, len(group.index), step):
            piece = slice(start, start + step)
            columns = self._columns(group, piece, k, d)
            along = group.kernels.host(_along_top_direction(group.table, group.index[piece], columns))
            farthest.append(np.argsort(along, axis=1, kind="stable")[:, group.m - group.f :])
        return np.concatenate(farthest)

    def _columns(self, group: Group, piece: slice, k: int, d: int) -> Integers | None:
        """(victims, q) The coordinates of pass k; None: all."""
        if d <= self.coordinates:
            return None
        at = group.context
        streams = (stream(at.seed, ("dnc", k), at.round, int(node)) for node in group.nodes[piece])
        return np.array([np.sort(rng.choice(d, self.coordinates, replace=False)) for rng in streams])


def _along_top_direction(table: Array, index: Integers, columns: Integers | None) -> Array:
    """(h, m) Values proportional to ⟨x_j − μ, v⟩², v the direction in which a victim's rows vary most.

    ``columns`` (h, q) are the coordinates used; None: all.
    """
    xp, rows = namespace(table), lend(index, table)
    picked = table[rows] if columns is None else table[rows[:, :, None], lend(columns, table)[:, None, :]]
    x = xp.astype(picked, wide_dtype(table))
    x = x - x[:, :1]  # around the own vector first: a mean of forged ones may be huge
    x = x / xp.clip(xp.max(xp.abs(x), axis=(1, 2), keepdims=True), min=xp.finfo(x.dtype).smallest_normal)
    x = x - xp.mean(x, axis=1, keepdims=True)
    return xp.linalg.eigh(x @ xp.matrix_transpose(x))[1][:, :, -1] ** 2  # of the Gram matrix


def dnc(f: int, passes: int = 3, coordinates: int = 1000) -> Rule:
    """Divide and conquer: the mean of the vectors that no pass dropped (Shejwalkar, Houmansadr, 2021).

    Each pass uses ``coordinates`` of the d coordinates, drawn anew for each node and round, and drops the f
    vectors farthest along the direction of largest variance. If fewer than m − 2f are left, the result is the
    mean of the m − 2f nearest to the coordinate-wise median.

    >>> dnc(1)(np.array([[0.0], [1.0], [9.0]]))
    array([0.5])
    """
    if passes < 1 or coordinates < 1:
        raise ValueError(f"dnc needs passes and coordinates of at least 1, not {passes} and {coordinates}")
    return DivideAndConquer("dnc", passes, coordinates, f=f, is_random=True)


def _nearest_to_median(group: Group, k: int, buffer: Array) -> Integers:
    """(h, k) The columns nearest to the coordinate-wise median, which is written to ``buffer`` (h, d)."""
    return _first(group.distances_to(group.coordinatewise("median", 0, out=buffer)), k)


# --- step by step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iterated(Rule):
    """Move z step by step towards a weighted sum, with weights from the distances ‖x_i − z‖.

    ``step(distances (h, m), group)`` returns the vectors' weights (h, m); the rest to 1 stays on z itself.
    """

    step: Callable[[Floats, Group], Floats]
    start: Any  # "zero", "own", "median" or a vector (d,)
    iterations: int
    tol: float | None = None

    def run(self, group: Group, out: Array | None = None) -> Array:
        z = empty(len(group.index), group.table) if out is None else out
        mine, rest = np.zeros(group.index.shape), np.ones(len(group.index))  # z = rest · start + Σ mine_j x_j
        given = not isinstance(self.start, str)
        if given or self.start == "zero":
            z[:] = group.kernels.array(self.start) if given else 0.0
        elif self.start == "median":
            group.coordinatewise("median", 0, out=z)
        else:  # its own vector, which is one of the m
            mine[:, 0], rest[:] = 1.0, 0.0
            group.combine(mine, z)
        moving = np.ones(len(mine), dtype=bool)
        for _ in range(self.iterations):
            weights = self.step(np.sqrt(group.distances_to(z)), group)
            keep = 1 - weights.sum(axis=1)
            keep[np.abs(keep) < 1e-15] = 0.0
            # A victim that has converged stays where it is, so that its result does not depend on the others.
            after = np.where(moving[:, None], keep[:, None] * mine + weights, mine)
            rest = np.where(moving, keep * rest, rest)
            shift, mine = np.abs(after - mine).max(axis=1), after
            group.combine(mine, z)
            if given and rest.any():
                z += group.kernels.array(rest)[:, None] * group.kernels.array(self.start)
            if self.tol is not None:
                moving &= shift > self.tol
                if not moving.any():
                    break
        return z


def geometric_median(
    nu: float = 0.1, iterations: int = 3, tol: float | None = None, start: str = "zero", f: int | None = None
) -> Rule:
    """Smoothed Weiszfeld iterations towards a point near most vectors (Pillutla et al., 2022).

    Args:
        nu: the smoothing; absolute, or relative to the vectors' spread with ``tol``.
        iterations: how many, without ``tol``. No κ holds for this truncated form.
        tol: iterate until weights move by at most this, from the coordinate-wise median.
        start: zero, own or median.
        f: enters only κ and the check of m.

    >>> geometric_median(tol=1e-9)(np.array([[0.0], [1.0], [50.0]])).round(2)
    array([1.])
    """
    converge = tol is not None
    begin = "median" if converge and start == "zero" else start
    if begin not in ("zero", "own", "median"):
        raise ValueError(f"geometric_median starts at zero, own or median, not {start!r}")

    def step(distances: Floats, g: Group) -> Floats:
        smallest = nu * np.median(distances, axis=1, keepdims=True) * 1e-3 if converge else nu
        beta = 1 / np.maximum(distances, np.maximum(smallest, np.finfo(np.float64).tiny))
        beta /= beta.max(axis=1, keepdims=True)  # the scale cancels; this one cannot overflow
        return np.asarray(beta / beta.sum(axis=1, keepdims=True))

    kappa = theory.kappa_median if converge else None
    count = 1000 if converge else iterations
    return Iterated("geometric_median", step, begin, count, tol, known_kappa=kappa, f=f)


def centered_clipping(
    center: Any = "own", iterations: int = 1, tau: float = 100.0, f: int | None = None
) -> Rule:
    """Move the centre by the mean of the clipped differences to it (Karimireddy et al., 2021).

    Args:
        center: own, zero or a vector.
        iterations: how many moves.
        tau: the length to which differences are clipped.
        f: enters only the check of m.

    >>> centered_clipping("zero", iterations=1, tau=1.0)(np.array([[1.0], [0.5], [90.0]])).round(4)
    array([0.8333])
    """
    if isinstance(center, str) and center not in ("own", "zero"):
        raise ValueError(f"centered_clipping has center 'own', 'zero' or a vector, not {center!r}")
    if not isinstance(center, str) and not np.isfinite(host(center)).all():
        raise ValueError("centered_clipping needs a finite centre")
    if not tau > 0 or iterations < 1:
        raise ValueError(f"centered_clipping needs tau > 0 and iterations >= 1, not {tau} and {iterations}")

    def step(distances: Floats, g: Group) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(np.minimum(1.0, tau / distances) / g.m)

    own = isinstance(center, str) and center == "own"
    return Iterated("centered_clipping", step, center, iterations, f=f, pivot=0 if own else None)
