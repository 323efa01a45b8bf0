"""Forgeries: one function each, from a `View` to the forged rows of all victims at once.

An attack is **one function** and its name in the list at the end; what it needs and does stands above it
(`declare`). It returns the rows that it forges. Their memory may be the view's ``out``, so that nothing is
copied; nothing else of a view is written to.

μ and σ are the coordinate-wise mean and standard deviation (divisor k − 1) over A, the models that the honest
peers of the victim sent. There is no Python loop over victims.
"""

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from rpel.attacks.base import ATTACKS, Poison, State, declare, traits_of
from rpel.attacks.view import View
from rpel.backend.arrays import column_blocks, empty, lend, namespace, standard_normal, take, uniform, zeros
from rpel.randomness import stream
from rpel.types import Floats, Integers, Models

per_victim = declare(per_victim=True)


@per_victim
def none(view: View) -> Models:
    """No attack: hostile peers answer μ, as if they were average honest ones."""
    return view.moments(out=view.out)


@per_victim
def sign_flipping(view: View) -> Models:
    """SF: −μ (Li et al., 2020)."""
    return view.moments(-1.0, out=view.out)


@declare(per_victim=True, factor="zeta")
def foe(view: View, zeta: float | Floats = 3.0) -> Models:
    """Fall of Empires: (1 − ζ)μ (Xie et al., 2020)."""
    return view.moments(1.0 - np.asarray(zeta), out=view.out)


@declare(per_victim=True, factor="tau")
def inner_product_manipulation(view: View, tau: float | Floats = 2.0) -> Models:
    """IPM: −τμ, the same family as FOE (Xie et al., 2020)."""
    return view.moments(-np.asarray(tau), out=view.out)


@declare(per_victim=True, factor="z")
def alie(view: View, z: float | str | Floats = 1.5, tau: float | None = None) -> Models:
    """A Little Is Enough: μ + zσ (Baruch et al., 2019).

    z="max" hides as far out as the honest majority allows; ``tau`` is ByzFL's name of z, as in its reference
    vectors.
    """
    z = largest_hidden_z(view.counts, view.hostile) if isinstance(z, str) else z
    return view.moments(1.0, z if tau is None else tau, out=view.out)


def largest_hidden_z(m: Integers, hostile: Integers) -> Floats:
    """Return z_max = Φ⁻¹((m − b − q)/(m − b)), q = ⌊m/2 + 1⌋ − b the supporters missing for a majority.

    >>> largest_hidden_z(np.array([16, 16, 7]), np.array([7, 6, 3])).round(4)
    array([0.7647, 0.5244, 0.6745])
    """
    honest = m - hostile
    share = np.clip((honest - (m // 2 + 1 - hostile)) / honest, 1e-9, 1 - 1e-9)
    return np.array([NormalDist().inv_cdf(float(p)) for p in share])


@declare(per_victim=True, needs={"own"}, factor="epsilon")
def dissensus(view: View, epsilon: float | Floats = 1.0) -> Models:
    """x_i − (ε / Σ_hostile W_ij) Σ_honest W_ik (x_k − x_i), away from the peers (He et al., 2022)."""
    present = view.peers >= 0
    weights = present / 1.0 if view.weights is None else np.where(present, view.weights, 0.0)
    total = view.hostile if view.hostile_weights is None else view.hostile_weights.sum(axis=1)
    scale = np.where(total > 0, np.asarray(epsilon) / np.where(total > 0, total, 1.0), 0.0)
    pull = weights * scale[:, None]
    return view.combine(1.0 + pull.sum(axis=1), -pull, out=view.out)


@per_victim
def mimic(view: View, epsilon: int = 0) -> Models:
    """The model of the victim's honest peer number epsilon, over-represented (Karimireddy et al., 2022)."""
    # on a graph the victim itself is one of A
    peers = np.where(view.peers == view.own[:, None], -1, view.peers)
    rows = np.concatenate([peers, view.own[:, None]], axis=1)  # for victims without honest peers
    order = np.argsort(rows < 0, axis=1, kind="stable")
    column = epsilon % np.maximum((peers >= 0).sum(axis=1), 1)
    chosen = np.take_along_axis(order, column[:, None], axis=1)
    return _filled(view, take(view.honest, np.take_along_axis(rows, chosen, axis=1)[:, 0]))


def mimic_heuristic(view: View, state: State, learning_rounds: int = 20) -> tuple[Models, State]:
    """Learn the direction z of largest variance of the honest models, then mimic the extreme node along it.

    One step of Oja's rule a round: z ← normalised Σ_i (x_i − mean)⟨x_i − mean, z⟩.
    """
    rounds = int(state.get("rounds", 0))
    if rounds >= learning_rounds and "node" in state:
        node = int(state["node"])
    else:
        z = state.get("direction")
        if z is None:
            wide = zeros((1,), view.honest, wide=True)
            z = standard_normal(stream(view.seed, "mimic"), view.honest.shape[1:], wide)
        xp = namespace(view.honest)
        centred = view.honest - view.mean(view.honest)
        z = (centred @ view.kernels.array(z)) @ centred
        z = z / xp.clip(xp.sqrt(z @ z), min=xp.finfo(z.dtype).smallest_normal)
        node = int(np.argmax(view.kernels.host(xp.abs(centred @ z))))
        state = {"rounds": rounds + 1, "node": node, "direction": z}
    return _filled(view, view.honest[node]), state


def stale(view: View, state: State, delay: int = 10) -> tuple[Models, State]:
    """The honest mean of ``delay`` rounds ago (of the first round until then)."""
    xp, past = namespace(view.honest), state.get("past")
    past = empty(0, view.honest) if past is None else view.kernels.array(past)
    latest = xp.astype(view.mean(view.honest), past.dtype)
    past = xp.concat([past, latest[None]])[-(delay + 1) :]
    return _filled(view, past[0]), {"past": past}


@per_victim
def inf(view: View) -> Models:
    """+∞ everywhere: a crash test for rules that add before they look."""
    return _filled(view, np.inf)


def gaussian(view: View, mu: float = 0.0, sigma: float = 1.0) -> Models:
    """Noise N(μ, σ²), fresh for every victim and round."""
    noise = standard_normal(stream(view.seed, "gaussian", view.round), tuple(view.out.shape), view.out)
    noise *= sigma
    noise += mu
    return noise


def _filled(view: View, rows: Any) -> Models:
    """(v, d) Return these rows, or copies of one."""
    view.out[:] = rows
    return view.out


# --- hidden in the spread of the honest models --------------------------------------------------------------


@declare(per_victim=True, factor="a")
def min_max(view: View, direction: str = "std", a: float | Floats = 1.0) -> Models:
    """As far along a direction as no honest model is from another: μ + aγp (Shejwalkar, Houmansadr, 2021).

    p is −σ ("std"), −μ/‖μ‖ ("unit") or −sign μ ("sign"), and γ the largest with
    max ‖μ + γp − x‖ ≤ max ‖x − x'‖ over A.
    """
    spread, (length, along) = view.spread, _aside(view, direction)
    slack = np.maximum(spread.diameter[:, None] - spread.to_mean, 0.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # of ‖p‖²γ² + 2γ⟨p, μ − x⟩ = slack, without cancellation
        root = np.sqrt(along**2 + length[:, None] * slack)
        steps = np.where(along > 0, slack / (along + root), (root - along) / length[:, None])
    steps = np.where(view.sources >= 0, steps, np.inf).min(axis=1)
    # not finite: the honest models have diverged
    hides = (length > 0) & (spread.diameter > 0) & np.isfinite(steps)
    return _along(view, direction, np.asarray(a) * np.where(hides, steps, 0.0))


@declare(per_victim=True, factor="a")
def min_sum(view: View, direction: str = "std", a: float | Floats = 1.0) -> Models:
    """min_max with sums of squared distances: Σ ‖μ + γp − x‖² ≤ max Σ ‖x − x'‖² (the same authors)."""
    spread, (length, _) = view.spread, _aside(view, direction)
    slack = np.maximum(spread.total - spread.to_mean.sum(axis=1), 0.0)
    scale = spread.count * length
    hides = (scale > 0) & np.isfinite(scale + slack)
    gamma = np.sqrt(np.where(hides, slack, 0.0) / np.where(hides, scale, 1.0))
    return _along(view, direction, np.asarray(a) * gamma)


def _along(view: View, direction: str, gamma: Floats) -> Models:
    """Return μ + γp; γ (v,)."""
    if direction == "std":
        return view.moments(1.0, -gamma, out=view.out)
    mean = view.moments(1.0, out=view.out)
    if direction == "unit":
        norm = _norms(view, mean)
        factor = 1.0 - np.where(norm > 0, gamma / np.where(norm > 0, norm, 1.0), 0.0)
        return view.moments(factor, out=view.out)
    step, xp = view.kernels.array(gamma)[:, None], namespace(mean)
    for at in column_blocks(*mean.shape):
        mean[:, at] -= step * xp.sign(mean[:, at])
    return mean


def _aside(view: View, direction: str) -> tuple[Floats, Floats]:
    """Return ‖p‖² (v,), and ⟨p, μ − x⟩ (v, k) for the models x of A from the distances to μ + p."""
    spread = view.spread
    if direction == "std":
        length = spread.to_mean.sum(axis=1) / np.maximum(spread.count - 1, 1)
    else:
        mean = view.moments(1.0, out=view.out)
        if direction == "sign":
            length = view.kernels.host(namespace(mean).count_nonzero(mean, axis=1))
        else:
            length = np.where(_norms(view, mean) > 0, 1.0, 0.0)
    moved = _along(view, direction, np.ones(view.victims))
    reached = np.asarray(view.kernels.distances_to(view.honest, view.sources, moved))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(length, np.float64), (reached - length[:, None] - spread.to_mean) / 2


def _norms(view: View, rows: Models) -> Floats:
    """(v,) Return the lengths of the rows."""
    squared = view.kernels.distances_to(rows, np.arange(view.victims)[:, None], None)
    return np.asarray(np.sqrt(squared[:, 0]))


@declare(per_victim=True, needs={"before"})
def fang(view: View) -> Models:
    """Against the honest change of each coordinate, beyond the honest extremes (after Fang et al., 2020).

    δ is the sign of the honest nodes' mean change in this round's local step. Where δ ≥ 0 the value is
    min − u(max − min) over A, else max + u(max − min), with one u ~ U(0, 1) for each round and coordinate;
    where max = min, a thousandth of it takes the place of the range.
    """
    rising = view.change >= 0
    u = uniform(stream(view.seed, "fang", view.round), len(rising), view.honest)
    rows = lend(np.where(view.sources >= 0, view.sources, view.sources[:, :1]), view.honest)
    xp = namespace(view.honest)
    for at in column_blocks(rows.size if isinstance(rows, np.ndarray) else rows.numel(), len(rising)):
        x = view.honest[:, at][rows]
        low, high = (xp.astype(end(x, axis=1), u.dtype) for end in (xp.min, xp.max))
        beyond = xp.where(high > low, u[at] * (high - low), 1e-3 * xp.abs(low))
        view.out[:, at] = xp.where(rising[at], low - beyond, high + beyond)
    return view.out


# --- along the honest graph's weakest cut -------------------------------------------------------------------


@declare(needs={"own", "graph"}, factor="a", most=2000)  # it needs all eigenvalues of the honest graph
def spectral(view: View, a: float | Floats = 1.0) -> Models:
    """SpH: x_i + a·v_i·Σ_j v_j x_j, v the second eigenvector of the honest graph (Gaucher et al., 2025).

    j runs over the honest nodes; v belongs to the second-smallest eigenvalue of their Laplacian, and an edge
    joins two of them if either asks the other this round. So the two sides of the weakest cut are driven
    apart.
    """
    if view.graph is None:
        raise ValueError("spectral needs the round's graph (needs = {'graph'})")
    n = len(view.honest)
    adjacency = np.zeros((n, n), dtype=bool)
    who, whom = np.repeat(np.arange(n), view.graph.shape[1]), view.graph.reshape(-1)
    adjacency[who[whom >= 0], whom[whom >= 0]] = True
    v = second_eigenvector(np.packbits(adjacency | adjacency.T).tobytes(), n, view.seed)
    push = view.kernels.combine(view.honest, np.arange(n)[None], v[None])
    factors, own = view.kernels.array(np.asarray(a) * v[view.own])[:, None], lend(view.own, view.honest)
    for at in column_blocks(*view.out.shape):
        view.out[:, at] = factors * push[:, at]
        view.out[:, at] += view.honest[:, at][own]
    return view.out


@lru_cache(maxsize=2)
def second_eigenvector(packed: bytes, n: int, seed: int) -> Floats:
    """(n,) Return that of a graph's Laplacian, of length 1; the adjacency (n, n) as packed bits.

    Among eigenvalues within 1e-9 of the second, a direction of their space is drawn; the first non-zero entry
    is positive.

    >>> path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=bool)
    >>> second_eigenvector(np.packbits(path).tobytes(), 3, seed=0).round(3) + 0.0
    array([ 0.707,  0.   , -0.707])
    """
    import torch

    from rpel.backend.threads import one_torch_thread

    adjacency = np.unpackbits(np.frombuffer(packed, np.uint8), count=n * n).reshape(n, n).astype(np.float64)
    np.fill_diagonal(adjacency, 0.0)
    laplacian = torch.from_numpy(np.diag(adjacency.sum(axis=1)) - adjacency)
    with one_torch_thread():  # so that the result does not depend on the number of threads
        values, vectors = (part.numpy() for part in torch.linalg.eigh(laplacian))
    space = vectors[:, np.abs(values - values[min(1, n - 1)]) <= 1e-9]
    drawn = space @ (space.T @ stream(seed, "spectral").standard_normal(n))
    v = space[:, 0] if space.shape[1] == 1 else drawn
    v = v / np.linalg.norm(v)
    return np.asarray(v * np.sign(v[np.abs(v) > 1e-12][0]))


# --- nothing forged -----------------------------------------------------------------------------------------


@declare(poisons=Poison.LABELS)
def label_flip() -> None:
    """Hostile nodes train beside the honest ones, on labels C − 1 − y."""


@declare(poisons=Poison.PATCH)
def backdoor(target: int = 0, share: float = 0.5) -> None:
    """Hostile nodes train on images of which a share carry a patch and the label target."""


# --- the table ----------------------------------------------------------------------------------------------

ATTACKS.update(
    (function.__name__, function)
    for function in (
        none, sign_flipping, alie, foe, inner_product_manipulation, dissensus, mimic, mimic_heuristic, stale,
        inf, gaussian, min_max, min_sum, fang, spectral, label_flip, backdoor,
    )
)  # fmt: skip
FACTORS = {name: factor for name, attack in ATTACKS.items() if (factor := traits_of(attack).factor)}
"""The attacks that have a factor a ≥ 0, and its parameter."""
