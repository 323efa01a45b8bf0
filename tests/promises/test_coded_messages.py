"""Runs whose messages are coded: their bytes, their accuracy, hostile entries."""

from typing import Any

import numpy as np

import rpel
from rpel.attacks import View

SMALL: dict[str, Any] = {
    "nodes": 10, "byzantine": 2, "pull": 6, "rounds": 4, "eval_every": 2, "eval_size": 100, "batch_size": 10,
}  # fmt: skip


def test_bytes_are_those_of_the_messages_and_accuracy_stays() -> None:
    result = {
        wire: rpel.simulate("linear", wire=wire, **SMALL | {"rounds": 20}) for wire in ("float32", "int8")
    }
    d = result["float32"].models.shape[1]
    assert result["int8"].history["bytes"][0] == 10 * 6 * (d + 4 * -(-d // 256))
    assert abs(result["int8"].accuracy_mean - result["float32"].accuracy_mean) < 0.02
    assert not np.array_equal(result["int8"].models, result["float32"].models)


def test_workers_change_no_byte_of_a_coded_run_that_is_not_kept() -> None:
    runs = [rpel.simulate("linear", wire="int8", workers=p, **SMALL) for p in (1, 2)]
    assert np.array_equal(runs[0].models, runs[1].models)


def huge_entry(view: View) -> np.ndarray[Any, Any]:
    """The mean of what the victim received, with one entry in each block so large that the rest of it becomes
    0."""
    forged = view.moments()
    forged[:, ::256] = 1e30
    return forged


def test_huge_entries_harm_no_run_whose_rule_survives_liars() -> None:
    runs = [
        rpel.simulate("linear", wire="int8", attack=a, **SMALL | {"rounds": 20}) for a in ("none", huge_entry)
    ]
    assert runs[1].accuracy_worst > runs[0].accuracy_worst - 0.05
