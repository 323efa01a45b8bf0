"""What is meant to be copied works: the skeletons pass their own checks, by name and in a run."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpel
from support.paths import ROOT

SMALL: dict[str, Any] = {
    "nodes": 8, "byzantine": 2, "pull": 5, "b_hat": 2, "rounds": 2, "eval_size": 50, "out": None,
}  # fmt: skip
SKELETONS = sorted((ROOT / "examples" / "skeletons").glob("*.py"))


@pytest.mark.parametrize("path", SKELETONS, ids=[path.stem for path in SKELETONS])
def test_skeleton_passes_its_own_checks(path: Path) -> None:
    names = runpy.run_path(str(path), run_name="__main__")
    assert names["__doc__"]


@pytest.mark.parametrize(
    "fields",
    [
        {"rule": "rule:NearestHalf"},
        {"rule": "nnm+rule:nearest_half(share=0.6)"},
        {"attack": "attack:against_the_step(speed=3)"},
        {"attack": "attack:drift(targeting=most-exposed)"},
    ],
)
def test_skeleton_is_used_by_name(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples" / "skeletons")
    monkeypatch.syspath_prepend(ROOT / "examples" / "skeletons")
    run = rpel.simulate("linear", **{**SMALL, **fields})
    usual = rpel.simulate("linear", **SMALL)
    assert np.isfinite(run.models).all()
    assert not np.array_equal(run.models, usual.models)
