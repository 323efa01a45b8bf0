"""One table of all rules, for every test that runs them all: (name, parameters, m, f)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CASES: list[tuple[str, dict[str, Any], int, int]] = [
    ("mean", {}, 7, 0),
    ("median", {"f": 3}, 7, 3),
    ("median", {"f": 3}, 8, 3),
    ("trimmed_mean", {"f": 7}, 16, 7),
    ("trimmed_mean", {"f": 0}, 5, 0),
    ("krum", {"f": 3}, 9, 3),
    ("krum", {"f": 3, "neighbours": "m-f-2"}, 9, 3),
    ("multi_krum", {"f": 3}, 9, 3),
    ("geometric_median", {"f": 2, "tol": 1e-7}, 9, 2),
    ("geometric_median", {}, 9, 0),
    ("geometric_median", {"start": "own"}, 9, 0),
    ("geometric_median", {"start": "median"}, 9, 0),
    ("centered_clipping", {"tau": 1.0, "iterations": 3}, 9, 0),
    ("centered_clipping", {"tau": 1.0, "iterations": 2, "center": "zero"}, 9, 0),
    ("mda", {"f": 2}, 7, 2),
    ("monna", {"f": 3}, 8, 3),
    ("meamed", {"f": 3}, 8, 3),
    ("smea", {"f": 2}, 7, 2),
    ("caf", {"f": 2}, 8, 2),
    ("bulyan", {"f": 2}, 11, 2),
    ("aksel", {"f": 3}, 8, 3),
    ("cge", {"f": 3}, 8, 3),
    ("cge", {"f": 3, "center": "own"}, 8, 3),
    ("dnc", {"f": 2}, 9, 2),
    ("dnc", {"f": 0}, 4, 0),
    ("balance", {"gamma": 2.0}, 7, 0),
    ("nnm+aksel", {"f": 2}, 9, 2),
    ("nnm+dnc", {"f": 2}, 9, 2),
    ("nnm+trimmed_mean", {"f": 7}, 16, 7),
    ("nnm+trimmed_mean", {"f": 3}, 7, 3),
    ("nnm+median", {"f": 3}, 8, 3),
    ("nnm+krum", {"f": 3}, 9, 3),
    ("nnm+meamed", {"f": 2}, 9, 2),
    ("nnm+geometric_median", {"f": 2, "tol": 1e-7}, 9, 2),
    ("arc+trimmed_mean", {"f": 2}, 9, 2),
    ("clipping+median", {"f": 2, "c": 1.0}, 9, 2),
    ("bucketing+trimmed_mean", {"f": 1, "size": 2}, 9, 1),
    ("bucketing+krum", {"f": 1, "size": 2}, 9, 1),
    ("arc+nnm+trimmed_mean", {"f": 2}, 9, 2),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(CASES)]

GRAPH_RULES: list[tuple[str, dict[str, Any]]] = [
    ("gossip", {}),
    ("cs_plus", {"b_hat": 2}),
    ("gts", {"b_hat": 2}),
    ("gts_exact", {"b_hat": 2}),
    ("clipped_gossip_adaptive", {"b_hat": 2}),
    ("clipped_gossip_oracle", {}),
    ("rtc", {"b_hat": 2}),
    ("ios", {"b_hat": 2}),
]

SHUFFLED = ("bucketing",)
"""Rules that deal their vectors at random: permuting the input changes the deal."""

OWN = ("monna", "centered_clipping", "cge", "balance")
"""Rules that trust row 0 more than the others: permuting must leave it in place."""


def cloud(seed: int, m: int, d: int, dtype: type = np.float64) -> NDArray[Any]:
    """(m, d) vectors around a common centre."""
    coins = np.random.default_rng(seed)
    return (coins.normal(size=d) + 0.3 * coins.normal(size=(m, d))).astype(dtype)


def table_and_index(m: int, dtype: type = np.float64) -> tuple[NDArray[Any], NDArray[Any]]:
    """12 victims over 20 rows, with shared rows as under pulling."""
    coins = np.random.default_rng(5)
    index = np.stack([coins.permutation(20)[:m] if m <= 20 else np.arange(m) for _ in range(12)])
    return cloud(3, max(20, m), 41, dtype), index


def metropolis_like(h: int, m: int) -> NDArray[Any]:
    w = np.random.default_rng(0).uniform(0.2, 1.0, size=(h, m))
    return np.asarray(w / w.sum(axis=1, keepdims=True))
