"""Rounds as an adversary sees them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import rpel
from rpel.attacks import View
from rpel.backend.base import backend
from rpel.rules import RoundContext

Array = NDArray[Any]


def pulled_view(seed: int, n: int = 12, s: int = 7, dtype: type = np.float64, kernels: str = "numba") -> View:
    """Five victims that pulled s peers each, one to three of them hostile."""
    coins = np.random.default_rng(seed)
    hostile = np.array([1, 2, 3, 1, 2])
    peers = np.full((5, s), -1)
    for i, b in enumerate(hostile):
        peers[i, : s - b] = coins.choice(np.delete(np.arange(n), i), size=s - b, replace=False)
    table: Array = np.concatenate(
        [coins.normal(size=9) + 0.3 * coins.normal(size=(n, 9)), np.zeros((5, 9))]
    ).astype(dtype)
    rule = rpel.rule("nnm+trimmed_mean", f=3)
    return View(
        table,
        np.arange(5),
        peers,
        hostile,
        rule=rule,
        context=RoundContext(round=3, seed=1),
        kernels=backend(kernels),
    )
