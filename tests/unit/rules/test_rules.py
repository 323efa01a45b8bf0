"""Divide and conquer on drawn coordinates, and graph rules on nodes of unequal degrees."""

from typing import Any

import numpy as np
import pytest

import rpel
from rpel import rules as A
from rpel.backend.base import backend
from rpel.backend.tensors import Torch
from rpel.randomness import stream
from support.rule_cases import GRAPH_RULES, cloud, metropolis_like, table_and_index

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
