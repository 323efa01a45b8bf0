"""Forgeries: what the hostile peers answer, one vector per victim and round, for all victims at once.

An attack is **one function** from a :class:`View` to the forged rows and **one row** of the table ``ATTACKS`` at the
end. μ and σ are the coordinate-wise mean and standard deviation (divisor k − 1) over A, the models the victim's honest
peers sent. No Python loop over victims.
"""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np

from rpel.attacks.view import View
from rpel.randomness import stream
from rpel.types import Floats, Integers, Models

State = dict[str, Any]
"""What an attack remembers from round to round: arrays and numbers, checkpointed with the run."""


def none(view: View) -> Models:
    """No attack: hostile peers answer μ, as if they were average honest ones."""
    return view.moments()


def sign_flipping(view: View) -> Models:
    """SF: −μ (Li et al., 2020)."""
    return view.moments(-1.0)


def foe(view: View, zeta: float | Floats = 3.0) -> Models:
    """Fall of Empires: (1 − ζ)μ (Xie et al., 2020)."""
    return view.moments(1.0 - np.asarray(zeta))


def inner_product_manipulation(view: View, tau: float | Floats = 2.0) -> Models:
    """IPM: −τμ, the same family as FOE (Xie et al., 2020)."""
    return view.moments(-np.asarray(tau))


def alie(view: View, z: float | str | Floats = 1.5) -> Models:
    """A Little Is Enough: μ + zσ (Baruch et al., 2019); z="max" hides as far out as the honest majority allows."""
    return view.moments(1.0, largest_hidden_z(view.counts, view.hostile) if isinstance(z, str) else z)


def largest_hidden_z(m: Integers, hostile: Integers) -> Floats:
    """z_max = Φ⁻¹((m − b − q)/(m − b)) with q = ⌊m/2 + 1⌋ − b, the supporters still missing for a majority.

    >>> largest_hidden_z(np.array([16, 16, 7]), np.array([7, 6, 3])).round(4)
    array([0.7647, 0.5244, 0.6745])
    """
    honest = m - hostile
    share = np.clip((honest - (m // 2 + 1 - hostile)) / honest, 1e-9, 1 - 1e-9)
    return np.array([NormalDist().inv_cdf(float(p)) for p in share])


def dissensus(view: View, epsilon: float | Floats = 1.0) -> Models:
    """x_i − (ε / Σ_hostile W_ij) Σ_honest W_ik (x_k − x_i): push the victim away from its peers (He et al., 2022)."""
    present = view.peers >= 0
    weights = present / 1.0 if view.weights is None else np.where(present, view.weights, 0.0)
    total = view.hostile if view.hostile_weights is None else view.hostile_weights.sum(axis=1)
    scale = np.where(total > 0, np.asarray(epsilon) / np.where(total > 0, total, 1.0), 0.0)  # nobody hostile: no push
    pull = weights * scale[:, None]
    return view.combine(1.0 + pull.sum(axis=1), -pull)


def mimic(view: View, epsilon: int = 0) -> Models:
    """One honest peer's model, the epsilon-th of A: all hostile peers over-represent it (Karimireddy et al., 2022)."""
    rows = view.sources
    column = epsilon % np.maximum((rows >= 0).sum(axis=1), 1)
    view.space[:] = view.table[np.take_along_axis(rows, column[:, None], axis=1)[:, 0]]
    return view.space


def mimic_heuristic(view: View, state: State, learning_rounds: int = 20) -> tuple[Models, State]:
    """Learn the direction z of largest variance of the honest models, then mimic the extreme node along it for good.

    One step of Oja's rule a round: z ← normalised Σ_i (x_i − mean)⟨x_i − mean, z⟩.
    """
    rounds = int(state.get("rounds", 0))
    if rounds >= learning_rounds and "node" in state:
        node = int(state["node"])
    else:
        centred = view.honest - view.honest.mean(axis=0, dtype=np.float64)
        z = state.get("direction")
        along = centred @ (stream(view.seed, "mimic").standard_normal(centred.shape[1]) if z is None else z)
        z = along @ centred
        z = z / max(float(np.linalg.norm(z)), np.finfo(np.float64).tiny)
        node = int(np.argmax(np.abs(centred @ z)))
        state = {"rounds": rounds + 1, "node": node, "direction": z}
    view.space[:] = view.honest[node]
    return view.space, state


def stale(view: View, state: State, delay: int = 10) -> tuple[Models, State]:
    """The honest mean of ``delay`` rounds ago (of the first round until then): a peer that never caught up."""
    past = state.get("past", np.empty((0, view.honest.shape[1]), view.honest.dtype))
    now = view.honest.mean(axis=0, dtype=np.float64).astype(view.honest.dtype)
    past = np.concatenate([past, now[None]])[-(delay + 1) :]
    view.space[:] = past[0]
    return view.space, {"past": past}


def inf(view: View) -> Models:
    """+∞ everywhere: a crash test for rules that add before they look."""
    view.space[:] = np.inf
    return view.space


def gaussian(view: View, mu: float = 0.0, sigma: float = 1.0) -> Models:
    """Noise N(μ, σ²), fresh for every victim and round."""
    noise = stream(view.seed, "gaussian", view.round).standard_normal(view.space.shape, dtype=np.float32)
    np.multiply(noise, sigma, out=view.space)
    np.add(view.space, mu, out=view.space)
    return view.space


# --- strongest: a search of the factor against the victim's actual rule ----------------------------------------------

FACTORS = {"alie": "z", "foe": "zeta", "inner_product_manipulation": "tau", "dissensus": "epsilon"}


def strongest(view: View, of: str = "alie", evaluations: int = 16) -> Models:
    """The given attack with the factor a ≥ 0 that moves the victim's own aggregate farthest from its honest mean.

    J(a) = ‖R(A ∪ own ∪ forged(a)) − mean(A ∪ own)‖ for every victim at once, J(0) included in the budget. From a = 0
    with step 1, move while better and double the step; then shrink the step by .8 before each try, trying a + step and
    a − step in turn.
    """
    if view.rule is None:
        raise ValueError("strongest needs the victim's rule")
    name = ALIASES.get(of, of)
    if name not in FACTORS:
        raise ValueError(f"strongest searches the factor of {', '.join(FACTORS)}, not of {of!r}")
    forge, key = ATTACKS[name], FACTORS[name]
    honest = _honest_mean(view)

    def harm(a: Floats) -> Floats:
        forge(view, **{key: a})
        with np.errstate(over="ignore", invalid="ignore"):  # a rule that breaks may be driven to infinity
            return np.asarray(np.linalg.norm(_aggregated(view).astype(np.float64) - honest, axis=1))

    best = np.zeros(view.victims)
    reached, step = harm(best), np.ones(view.victims)
    expanding, forward = np.ones(view.victims, dtype=bool), np.ones(view.victims, dtype=bool)
    for _ in range(evaluations - 1):
        step = np.where(expanding, step, 0.8 * step)
        back = ~expanding & ~forward & (best >= step)
        tried = np.where(back, best - step, best + step)
        value = harm(tried)
        better = value > reached
        best, reached = np.where(better, tried, best), np.where(better, value, reached)
        forward = np.where(expanding, True, ~forward)
        step = np.where(expanding & better, 2 * step, step)
        expanding &= better
    return forge(view, **{key: best})  # type: ignore[no-any-return]


def _honest_mean(view: View) -> Models:
    """(v, d) the mean of A and the victim's own model."""
    others = np.where(view.peers == view.own[:, None], -1, view.peers)
    index = np.concatenate([view.own[:, None], others], axis=1)
    weights = (index >= 0) / (index >= 0).sum(axis=1, keepdims=True)
    return np.asarray(view.kernels.combine(view.table, index, weights))


def _aggregated(view: View) -> Models:
    """(v, d) what each victim's rule makes of what it receives."""
    assert view.rule is not None
    index, weights = view.answers()
    return np.asarray(view.rule.aggregate(view.table, index, weights=weights, kernels=view.kernels))


# --- the table -------------------------------------------------------------------------------------------------------

ATTACKS: dict[str, Callable[..., Any]] = {
    "none": none,
    "sign_flipping": sign_flipping,
    "foe": foe,
    "inner_product_manipulation": inner_product_manipulation,
    "alie": alie,
    "dissensus": dissensus,
    "mimic": mimic,
    "mimic_heuristic": mimic_heuristic,
    "stale": stale,
    "inf": inf,
    "gaussian": gaussian,
    "strongest": strongest,
}
"""Every forgery by its name. A new attack is a function above and a row here."""

ALIASES = {"sf": "sign_flipping", "ipm": "inner_product_manipulation"}

LABEL_FLIP = "label_flip"
"""Not a forgery: its nodes follow the protocol on data with labels C − 1 − y, and their own rows are pulled."""
