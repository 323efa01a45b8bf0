"""Every rule keeps what all rules promise: kinds, shapes, batches, absent answers, errors,
and its own definition."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel import rules as A
from rpel.backend.base import backend
from rpel.backend.tensors import Torch
from rpel.randomness import stream
from support.paths import ROOT
from support.rule_cases import CASES, GRAPH_RULES, IDS, cloud, metropolis_like, table_and_index

Array = NDArray[Any]


@pytest.mark.parametrize(("name", "parameters", "m", "f"), CASES, ids=IDS)
@pytest.mark.parametrize(
    "kernels", [backend("plain"), backend("numba"), Torch()], ids=["plain", "compiled", "torch"]
)
def test_many_victims_over_one_table_get_what_each_would_get_alone(
    name: str, parameters: dict[str, Any], m: int, f: int, kernels: Any
) -> None:
    rule = rpel.rule(name, **parameters)
    table, index = table_and_index(m)
    alone = rule(table[index])  # one batch, so that a shuffling rule deals the same cards
    aggregated = rule.aggregate(kernels.array(table), index, kernels=kernels)
    np.testing.assert_allclose(aggregated, alone, rtol=0, atol=1e-9)
    out = np.empty_like(alone)
    assert rule.aggregate(table, index, out=out) is out
    np.testing.assert_allclose(out, alone, rtol=0, atol=1e-9)


# --- definitions, written once more as the reference page states them ---------------------------------------


def test_dnc_equals_its_definition_on_drawn_coordinates() -> None:
    x = cloud(31, 9, 50)
    x[3] += 2
    rule = A.dnc(2, passes=3, coordinates=7).at(round=4, rounds=10, seed=5, ids=np.array([6]))
    dropped: set[int] = set()
    for k in range(3):
        columns = stream(5, ("dnc", k), 4, 6).choice(50, 7, replace=False)
        y = x[:, columns] - x[:, columns].mean(axis=0)
        along = (y @ np.linalg.svd(y)[2][0]) ** 2
        dropped |= set(np.argsort(along)[-2:].tolist())
    stored = [j for j in range(9) if j not in dropped]
    assert 3 not in stored
    assert 5 <= len(stored) < 7, "the passes differ"
    np.testing.assert_allclose(rule(x), x[stored].mean(axis=0), atol=1e-12)


def published_gts(x: Array, w: Array, b_w: float) -> Array:
    """GTS as Gaucher et al. published it, neighbour after neighbour."""
    d = x - x[0]
    order = np.argsort(np.linalg.norm(d, axis=1), kind="stable")
    step, weight = np.zeros(x.shape[1]), 0.0
    for j in order:
        weight += w[j]
        if weight >= w.sum() - b_w - 1e-12:
            return np.asarray(x[0] + step + max(weight - (w.sum() - b_w), 0.0) * d[j])
        step += w[j] * d[j]
    raise AssertionError("the boundary was not reached")


@given(seed=st.integers(0, 2**32 - 1), m=st.integers(2, 12), b_hat=st.integers(0, 4), equal=st.booleans())
def test_gts_equals_its_authors_code(seed: int, m: int, b_hat: int, equal: bool) -> None:
    coins = np.random.default_rng(seed)
    x = coins.normal(size=(m, 3))
    w = np.full(m, 1 / m) if equal else coins.dirichlet(np.ones(m))
    b_w = float(np.sort(w[1:])[::-1][:b_hat].sum())
    expected = published_gts(x, w, b_w)
    np.testing.assert_allclose(A.gts(b_hat=b_hat)(x, weights=w), expected, atol=1e-12)
    np.testing.assert_allclose(
        A.gts(b_hat=b_hat).aggregate(x, np.arange(m)[None], weights=w[None], kernels=backend("plain"))[0],
        expected,
        atol=1e-12,
    )


@pytest.mark.parametrize(("name", "parameters"), GRAPH_RULES)
@pytest.mark.parametrize(
    "kernels", [backend("plain"), backend("numba"), Torch()], ids=["plain", "compiled", "torch"]
)
def test_graph_rules_take_unequal_degrees_and_leaves(
    name: str, parameters: dict[str, Any], kernels: Any
) -> None:
    rule = rpel.rule(name, **parameters)
    table, index = table_and_index(7)
    index[3, 2:] = -1
    index[4, 1:] = -1  # a node without neighbours keeps its model
    w = np.where(index >= 0, metropolis_like(12, 7), 0.0)
    hostile = np.random.default_rng(2).random(index.shape) < 0.3
    hostile[:, 0] = False
    aggregated = np.asarray(
        rule.aggregate(kernels.array(table), index, weights=w, hostile=hostile, kernels=kernels)
    )
    np.testing.assert_allclose(aggregated[4], table[index[4, 0]], atol=1e-12)
    for i in range(12):
        here = index[i] >= 0
        alone = rule(table[index[i][here]], weights=w[i][here], hostile=hostile[i][here])
        np.testing.assert_allclose(aggregated[i], alone, atol=1e-9)


def test_every_rule_stands_in_the_documentation() -> None:
    text = (ROOT / "docs" / "rules.md").read_text()
    assert all(f"`{name}`" in text for name in A.RULES)
