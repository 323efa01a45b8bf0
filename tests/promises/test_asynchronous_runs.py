"""Asynchronous runs: what equals the synchronous ones, what they gain, what they refuse."""

from typing import Any

import numpy as np
import pytest

import rpel

SPEEDS = "lognormal(0.3)+stragglers(0.2, 5)"
SMALL: dict[str, Any] = {
    "nodes": 12, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3, "eval_every": 2, "eval_size": 60,
    "batch_size": 10,
}  # fmt: skip


def test_asynchronous_run_of_equal_speeds_writes_the_synchronous_bytes(tmp_path: Any) -> None:
    timings = ("synchronous", "asynchronous")
    runs = [rpel.simulate("linear", timing=timing, out=tmp_path, **SMALL) for timing in timings]
    assert runs[0].path is not None
    assert runs[1].path is not None
    for file in ("models.safetensors", "counts.npz", "nodes.npz"):
        assert (runs[0].path / file).read_bytes() == (runs[1].path / file).read_bytes()
    assert list(runs[1].history["time"]) == [1.2, 2.4, 3.6]


def test_slow_nodes_delay_synchronous_rounds_only() -> None:
    slow = "speeds=stragglers(0.1, 10)"
    waiting = rpel.simulate("linear", timing=f"synchronous({slow})", **SMALL)
    free = rpel.simulate("linear", timing=f"asynchronous({slow})", **SMALL)
    assert list(waiting.history["time"]) == pytest.approx([10.2, 20.4, 30.6])
    assert list(free.history["time"]) == pytest.approx([1.2, 2.4, 3.6])


WORKS: list[dict[str, Any]] = [
    {"no_show": 0.2}, {"silent": True},
    {"attack": "label_flip"}, {"attack": "backdoor"}, {"attack": "strongest"}, {"rule": "dnc"},
    {"output": "uniform"}, {"timing": f"asynchronous(speeds={[1.0] * 11 + [4.0]})"},
    {"attack": "alie(targeting=most-exposed)"},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "cs-plus"}, "method rpel"),
    ({"method": "el-local"}, "method rpel"),
    ({"attack": "alie(consistent=true)"}, "consistent"),
    ({"attack": "spectral"}, "graph"),
    ({"timing": "asynchronous(speeds=lognormel)"}, "did you mean 'lognormal'"),
    ({"timing": "asynchronous(speeds=[1, 2])"}, "one for each node"),
    ({"problem": lambda problem: problem}, "problem="),
]


@pytest.mark.parametrize("change", WORKS, ids=str)
def test_asynchronous_rounds_combine_with(change: dict[str, Any]) -> None:
    timing = f"asynchronous(speeds={SPEEDS}, jitter=0.1)"
    result = rpel.simulate("linear", **{**SMALL, "timing": timing, **change})
    assert np.isfinite(result.models).all()


@pytest.mark.parametrize(
    ("change", "words"), REFUSED, ids=lambda value: "+".join(value) if isinstance(value, dict) else ""
)
def test_asynchronous_rounds_are_refused_with(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        rpel.simulate("linear", **{**SMALL, "timing": "asynchronous", **change})
    assert "\n" not in str(refused.value)
