"""Rules and attacks for one victim in float64, as the paper and the definitions state them.

Nothing of rpel is imported but its random numbers, which are part of what a run promises. A rule maps models
(m, d), the own one first, to one; on a graph, weights (m,) and marks of hostile neighbours go with them. An
attack maps what is seen of a victim to one forged vector.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.randomness import draws

Array = NDArray[Any]


def squared(x: Array, z: Array) -> Array:
    return np.asarray(np.square(x - z).sum(axis=1))


def lowest(values: Array, k: int) -> Array:
    return np.argsort(values, kind="stable")[:k]


# --- rules --------------------------------------------------------------------------------------------------


def trimmed_mean(x: Array, f: int) -> Array:
    return np.asarray(np.sort(x, axis=0)[f : len(x) - f].mean(axis=0))


def krum_scores(x: Array, f: int) -> Array:
    return np.array([np.sort(squared(x, z))[1 : len(x) - f].sum() for z in x])


def meamed(x: Array, f: int) -> Array:
    order = np.argsort(np.abs(x - np.median(x, axis=0)), axis=0, kind="stable")[: len(x) - f]
    return np.asarray(np.take_along_axis(x, order, axis=0).mean(axis=0))


def bulyan(x: Array, f: int) -> Array:
    left = list(range(len(x)))
    picked = [left.pop(int(np.argmin(krum_scores(x[left], f)))) for _ in range(len(x) - 2 * f)]
    return meamed(x[sorted(picked)], 2 * f)


def geometric_median(x: Array, f: int) -> Array:
    z = np.zeros(x.shape[1])
    for _ in range(3):
        beta = 1 / np.maximum(np.sqrt(squared(x, z)), 0.1)
        z = beta @ x / beta.sum()
    return np.asarray(z)


def centered_clipping(x: Array, f: int) -> Array:
    length = np.maximum(np.sqrt(squared(x, x[0])), 1e-300)
    return np.asarray(x[0] + (np.minimum(1, 100 / length)[:, None] * (x - x[0])).mean(axis=0))


def best_subset(x: Array, f: int, score: Callable[[Array], float]) -> Array:
    subsets = [list(s) for s in combinations(range(len(x)), len(x) - f)]
    return np.asarray(x[min(subsets, key=lambda s: score(x[s]))].mean(axis=0))


RULES: dict[str, Callable[[Array, int], Array]] = {
    "mean": lambda x, f: x.mean(axis=0),
    "median": lambda x, f: np.median(x, axis=0),
    "trimmed_mean": trimmed_mean,
    "krum": lambda x, f: x[np.argmin(krum_scores(x, f))],
    "multi_krum": lambda x, f: x[lowest(krum_scores(x, f), len(x) - f)].mean(axis=0),
    "monna": lambda x, f: x[lowest(squared(x, x[0]), len(x) - f)].mean(axis=0),
    "meamed": meamed,
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "centered_clipping": centered_clipping,
    "mda": lambda x, f: best_subset(x, f, lambda y: max(squared(y, z).max() for z in y)),
    "smea": lambda x, f: best_subset(x, f, lambda y: float(np.linalg.svd(y - y.mean(axis=0))[1][0])),
    "aksel": lambda x, f: x[lowest(squared(x, np.median(x, axis=0)), len(x) - f)].mean(axis=0),
    "cge": lambda x, f: x[lowest(np.square(x).sum(axis=1), len(x) - f)].mean(axis=0),
}


def nnm(x: Array, f: int) -> Array:
    return np.array([x[lowest(squared(x, z), len(x) - f)].mean(axis=0) for z in x])


def arc(x: Array, f: int) -> Array:
    length, m = np.sqrt(np.square(x).sum(axis=1)), len(x)
    limit = np.sort(length)[m - 2 * f * (m - f) // m - 1]
    return np.asarray(x * np.minimum(1, limit / length)[:, None])


def clipping(x: Array, f: int) -> Array:
    return np.asarray(x * np.minimum(1, 2 / np.sqrt(np.square(x).sum(axis=1)))[:, None])


@dataclass(frozen=True)
class Place:
    """Where a rule runs: who draws, and when."""

    seed: int
    round: int
    node: int

    def rule(self, name: str, f: int) -> Callable[[Array], Array]:
        """Return a rule, or a chain of pre-aggregations and one rule."""
        *before, last = name.split("+")
        mixings = {"nnm": nnm, "arc": arc, "clipping": clipping, "bucketing": self.bucketing}

        def whole(x: Array) -> Array:
            for mixing in before:
                x = mixings[mixing](x, f)
            return RULES[last](x, f)

        return whole

    def bucketing(self, x: Array, f: int) -> Array:
        drawn = draws(self.seed, ("bucketing", 0), self.round, np.array([self.node]), len(x))[0]
        order = np.argsort(drawn)
        return np.array([x[order[i : i + 2]].mean(axis=0) for i in range(0, len(x), 2)])


# --- rules on graphs ----------------------------------------------------------------------------------------


def metropolis(adjacency: Array) -> Array:
    """W_ij = 1/(1 + max(deg_i, deg_j)), W_ii what is missing to 1."""
    degree = adjacency.sum(axis=1)
    w = adjacency / (1 + np.maximum(degree[:, None], degree))
    return np.asarray(w + np.diag(1 - w.sum(axis=1)))


def gossip(method: str, x: Array, weights: Array, b_hat: int, marks: Array) -> Array:
    """x_0 + Σ_j a_j (x_j − x_0), with the weights a_j that a method leaves."""
    near = sorted(range(len(x)), key=lambda j: (j != 0, np.sqrt(squared(x[[j]], x[0])[0]), j))
    d, w, bad = (x - x[0])[near], weights[near], marks[near]
    length = np.sqrt(np.square(d).sum(axis=1))
    b_w = w[bad].sum() if method == "clipped-gossip-oracle" else np.sort(weights[1:])[::-1][:b_hat].sum()
    upto, total, tiny = np.cumsum(w), w.sum(), 1e-12

    def clip(tau: float) -> Array:
        return np.asarray(w * np.minimum(1, tau / np.maximum(length, 1e-300)))

    if method == "gts":  # the one exception: it cuts with b_w = 0, too
        edge = int(np.argmax(upto >= total - b_w - tiny))
        a = np.where(np.arange(len(w)) < edge, w, 0.0)
        a[edge] = max(upto[edge] - (total - b_w), 0.0)
    elif b_w <= tiny or method == "d-psgd":
        a = w
    elif method == "cs-plus":
        a = clip(max(length[upto <= total - 2 * b_w + tiny], default=0.0))
    elif method == "gts-exact":
        a = np.clip(total - b_w - (upto - w), 0, w)
    elif method == "clipped-gossip":
        a = clip(np.sqrt((w * length**2)[upto < total - b_w - tiny].sum() / b_w))
    elif method == "clipped-gossip-oracle":
        a = clip(np.sqrt((w * length**2)[~bad].sum() / b_w))
    else:  # rtc
        kept = np.cumsum(w[::-1])[::-1] > b_w + tiny
        a = np.where(kept, clip(np.sqrt((w * length**2)[kept].sum() / b_w)), 0.0)
    return np.asarray(x[0] + a @ d)


def balance(x: Array, share: float) -> Array:
    """Those within .3·exp(−t/T)·‖own‖, averaged, and that with one's own; nobody near: one's own."""
    near = x[1:][np.sqrt(squared(x[1:], x[0])) <= 0.3 * np.exp(-share) * np.sqrt(np.square(x[0]).sum())]
    return np.asarray((x[0] + near.mean(axis=0)) / 2 if len(near) else x[0])


# --- attacks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victim:
    """What the adversary sees of one victim; ``honest`` is A."""

    own: Array
    honest: Array
    hostile: int
    weights: Array | None = None
    """Of the honest answers; None: all models count alike."""
    hostile_weight: float = 0.0
    rule: Callable[[Array], Array] | None = None

    def deviation(self) -> Array:
        return self.honest.std(axis=0, ddof=1) if len(self.honest) > 1 else np.zeros_like(self.own)

    def pushed(self, epsilon: float) -> Array:
        w = np.ones(len(self.honest)) if self.weights is None else self.weights
        total = self.hostile if self.weights is None else self.hostile_weight
        return np.asarray(self.own - epsilon / total * (w @ (self.honest - self.own)))

    def hidden_z(self) -> float:
        m = 1 + len(self.honest) + self.hostile
        missing = m // 2 + 1 - self.hostile
        return NormalDist().inv_cdf((m - self.hostile - missing) / (m - self.hostile))

    def hidden(self, total: bool) -> Array:
        """min_max, or min_sum: as far along −σ as the honest models are from each other."""
        mean, p = self.honest.mean(axis=0), -self.deviation()
        apart = np.array([squared(self.honest, x) for x in self.honest])
        limit = apart.sum(axis=1).max() if total else apart.max()
        low, high = 0.0, 1e6
        for _ in range(200):
            step = (low + high) / 2
            reached = squared(self.honest, mean + step * p)
            low, high = (step, high) if (reached.sum() if total else reached.max()) <= limit else (low, step)
        return np.asarray(mean + low * p)

    def strongest(self, of: Callable[["Victim", float], Array], evaluations: int = 16) -> Array:
        """The factor of most harm: expand, contract, spread points, then above the best."""
        assert self.rule is not None
        rule, best, step, tried = self.rule, 0.0, 1.0, [0.0]
        clean = np.array([self.own, *self.honest])

        def harm(a: float) -> float:
            forged = np.repeat(of(self, a)[None], self.hostile, axis=0)
            reached = rule(np.concatenate([clean, forged]))
            return float(np.linalg.norm(reached - clean.mean(axis=0)))

        reached = harm(0.0)

        def attempt(a: float) -> bool:
            nonlocal best, reached
            value = harm(a)
            tried.append(a)
            if better := value > reached:
                best, reached = a, value
            return better

        expanding, forward = True, True
        for _ in range(evaluations - 1):
            if expanding:
                expanding = attempt(best + step)
                step *= 2 if expanding else 1
            else:
                step *= 0.8
                attempt(best - step if not forward and best >= step else best + step)
                forward = not forward
        spread = (0.06, 0.12, 0.25, 0.5, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0)
        for a in spread:
            attempt(a)
        for _ in range(evaluations - len(spread)):
            above = [a for a in tried if a > best]
            attempt((best + min(above)) / 2 if above else 2 * best)
        return of(self, best)


def foe(victim: Victim, zeta: float = 3.0) -> Array:
    return np.asarray((1 - zeta) * victim.honest.mean(axis=0))


ATTACKS: dict[str, Callable[[Victim], Array]] = {
    "none": lambda v: v.honest.mean(axis=0),
    "sf": lambda v: -v.honest.mean(axis=0),
    "foe": foe,
    "ipm": lambda v: -2 * v.honest.mean(axis=0),
    "alie": lambda v: v.honest.mean(axis=0) + 1.5 * v.deviation(),
    "alie(z=max)": lambda v: v.honest.mean(axis=0) + v.hidden_z() * v.deviation(),
    "dissensus": lambda v: v.pushed(1.0),
    "mimic": lambda v: v.honest[0],
    "min_max": lambda v: v.hidden(total=False),
    "min_sum": lambda v: v.hidden(total=True),
    "strongest(of=foe)": lambda v: v.strongest(foe),
    "strongest(of=dissensus)": lambda v: v.strongest(Victim.pushed),
}
