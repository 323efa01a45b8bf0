"""The paper's formulas and nothing else: κ of each rule, the reduction (α, λ), the theorem.

Letters as in the paper: n nodes, b Byzantine, h = n − b honest, s pulled, m = s + 1 aggregated, b̂ (``b_hat``)
hostile answers survived, ĥ = m − b̂, T rounds. Where the paper slips,
the corrected form stands here and says so.
"""

import math
from dataclasses import dataclass


def _breakdown(m: int, f: int) -> float:
    """r = f / (m − 2f), the unit in which every κ below is written; infinite from one half on."""
    return f / (m - 2 * f) if 2 * f < m else math.inf


def kappa_trimmed_mean(m: int, f: int) -> float:
    """κ = 6r(1 + r): zero without hostile vectors, since the trimmed mean is then the mean.

    >>> kappa_trimmed_mean(16, 0), kappa_trimmed_mean(16, 4)
    (0.0, 4.5)
    """
    r = _breakdown(m, f)
    return 6 * r * (1 + r)


def kappa_krum(m: int, f: int) -> float:
    """κ = 6(1 + r).

    >>> kappa_krum(16, 4)
    9.0
    """
    return 6 * (1 + _breakdown(m, f))


def kappa_median(m: int, f: int) -> float:
    """κ = 4(1 + r)², for the coordinate-wise and for the converged geometric median.

    >>> kappa_median(16, 4)
    9.0
    """
    return 4 * (1 + _breakdown(m, f)) ** 2


def kappa_nnm(m: int, f: int, kappa: float) -> float:
    """κ of nearest-neighbour mixing before a rule with the given κ: 8f/(m − f) · (κ + 1).

    >>> kappa_nnm(16, 4, kappa_trimmed_mean(16, 4))
    14.666666666666666
    """
    return 8 * f / (m - f) * (kappa + 1) if f else 0.0


@dataclass(frozen=True)
class Reduction:
    """One round's effect on honest models: spread shrinks by α, the mean moves by at most λ · spread."""

    kappa: float
    alpha: float
    lambda_: float
    h_hat: int

    @property
    def contracts(self) -> bool:
        """The convergence theorem needs α < 1 (and λ finite, which follows)."""
        return self.alpha < 1

    @property
    def guaranteed(self) -> bool:
        """The paper's simpler sufficient condition, κ + 1/ĥ < 1/6."""
        return self.kappa + 1 / self.h_hat < 1 / 6


def reduction(nodes: int, byzantine: int, pull: int, b_hat: int) -> Reduction | None:
    """Return the (α, λ)-reduction of a round with NNM + trimmed mean (lemma "rag"); None if 2b̂ ≥ m.

    >>> round(reduction(nodes=30, byzantine=0, pull=6, b_hat=0).alpha, 2)
    0.68
    """
    h, m = nodes - byzantine, pull + 1
    if 2 * b_hat >= m:
        return None
    h_hat = m - b_hat
    kappa = kappa_nnm(m, b_hat, kappa_trimmed_mean(m, b_hat))
    # variance of a mean of ĥ drawn from h without replacement
    v = (h - h_hat) / ((h - 1) * h_hat) if h > 1 else 0.0
    return Reduction(kappa, alpha=6 * kappa + 6 * v, lambda_=kappa + v / h, h_hat=h_hat)


@dataclass(frozen=True)
class Convergence:
    """The theorem's numbers for one setting; ``bound`` limits the mean of ‖∇F_H(x_i^t)‖² over t = 0…T."""

    c0: float
    c1: float
    c2: float
    c3: float
    eta_max: float
    bound: float
    corollary: float


def convergence(
    red: Reduction,
    *,
    nodes: int,
    byzantine: int,
    pull: int,
    b_hat: int,
    rounds: int,
    L: float,
    sigma: float,
    G: float,
    gap: float,
) -> Convergence | None:
    """Theorem "BEL_cv" with its misprints corrected; None when it does not apply (α ≥ 1).

    Corrected: the last term is c₃G² (printed G³), c₂ carries no L (printed 72L, and the bound multiplies by L
    again). ``corollary`` is the order of ε in the corollary, without its constants: √((b̂+1)σ²/((s+1)T))
    + (b̂+1)/(s+1)·G².

    >>> red = reduction(nodes=100, byzantine=0, pull=99, b_hat=0)
    >>> convergence(red, nodes=100, byzantine=0, pull=99, b_hat=0, rounds=1000, L=1, sigma=0, G=0,
    ...     gap=1).bound
    0.144
    """
    if not red.contracts:
        return None
    h, T = nodes - byzantine, rounds
    alpha, lam = red.alpha, red.lambda_
    c0 = 12 * gap
    c1 = 18 * alpha * (1 + alpha) / (1 - alpha) ** 2
    c2 = 72 * (3 / h + 2 * c1 + 4.5 * lam * (2 * c1 + 3))
    c3 = 6 * (6 * c1 + 4.5 * lam * (4 * c1 + 9))
    noise = c2 * L * sigma**2 + 432 * L / T * sigma**2 / h
    drift = 9 * c1 * nodes * L**2 * (sigma**2 + G**2)
    eta_max = min(
        1 / (12 * L),
        (c0 / (T * drift)) ** (1 / 3) if drift else math.inf,
        math.sqrt(c0 / (T * noise)) if noise else math.inf,
    )
    bound = (
        2 * math.sqrt(noise * c0 / T) + 2 * (c0**2 * drift / T**2) ** (1 / 3) + 12 * L * c0 / T + c3 * G**2
    )
    share = (b_hat + 1) / (pull + 1)
    return Convergence(c0, c1, c2, c3, eta_max, bound, corollary=math.sqrt(share / T) * sigma + share * G**2)
