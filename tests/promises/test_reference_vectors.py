"""Rules and attacks against the reference vectors: ByzFL 0.0.11 and the published code of the CS+ paper,
in float64."""

import json
from typing import Any

import numpy as np
import pytest

import rpel
from support.paths import ROOT

VECTORS = np.load(ROOT / "tests" / "golden" / "reference-vectors.npz")
CASES: list[dict[str, Any]] = json.loads(str(VECTORS["manifest"]))


def test_golden_manifest_has_all_cases() -> None:
    assert len(CASES) == 132


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['rule']}-{case['output']}")
def test_results_equal_the_reference_to_1e_9(case: dict[str, Any]) -> None:
    kind, _, name = case["rule"].rpartition(":")
    x, parameters = VECTORS[case["input"]], dict(case["params"])
    if kind == "attack":
        forged = rpel.attack(name, **parameters).forge(x)
    elif kind == "gossip":
        parameters.pop("node")
        weights = VECTORS[parameters.pop("weights")]
        rule = rpel.rule(name, **parameters)
        forged = rule(x, weights=weights)
    else:
        forged = rpel.rule(name, **parameters)(x)
    np.testing.assert_allclose(forged, VECTORS[case["output"]], rtol=0, atol=1e-9)
