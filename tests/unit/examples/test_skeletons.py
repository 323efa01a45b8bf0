"""What is meant to be copied works: the skeletons pass their own checks, by name and in a run."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import rpel
from rpel.data import user
from rpel.tasks import Classification
from rpel.tasks.engines import ENGINES
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


def test_skeleton_of_an_engine_trains_as_the_librarys_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "skeletons")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3
    data, shards = user.dataset((x, y), (x, y)), np.array_split(np.arange(60), 3)
    ours, usual = (
        Classification(data, shards, nn.Linear(5, 3), batch_size=8, seed=0, engines=table)
        for table in (("engine", *ENGINES), ENGINES)
    )
    assert type(ours.engine).__name__ == "SoftmaxEngine"
    models, ids = rng.normal(size=(3, ours.d)).astype(np.float32), np.arange(3)
    found, expected = (task.gradient(models, task.local_state(3), ids, 1, 0)[0] for task in (ours, usual))
    np.testing.assert_allclose(found, expected, atol=1e-6)
