"""Runs whose models travel in a code: what line 9 and a searching attack see."""

from typing import Any

import numpy as np
import pytest

import rpel
from rpel.attacks import View
from rpel.wire import Wire
from support.simulations import BASE, Quadratic, simulation

SMALL: dict[str, Any] = {
    "nodes": 10, "byzantine": 2, "pull": 6, "rounds": 4, "eval_every": 2, "eval_size": 100, "batch_size": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"method": "cs-plus"}, {"attack": "label_flip"}], ids=["pull", "graph", "train"]
)
def test_line_9_uses_coded_answers_and_the_exact_own_model(changes: dict[str, Any]) -> None:
    nodes = 15 if changes.get("attack") == "label_flip" else 12
    run = simulation(BASE.replace(wire="int8", rule=None, **changes), Quadratic(nodes=nodes))
    info = run.step()
    received, half = info.received, run.table[: run.nodes]
    np.testing.assert_array_equal(received.table[received.index[:, 0]], info.half)
    coded = np.empty_like(half)
    Wire("int8").through(half, coded)
    for row in np.unique(received.index[:, 1:][received.index[:, 1:] >= 0]):
        seen = received.table[row]
        if row < run.nodes:
            np.testing.assert_array_equal(seen, coded[row])
        again = np.empty((1, len(seen)))
        Wire("int8").through(seen[None], again)
        # a forged row, too, is something that the code can say
        np.testing.assert_allclose(again[0], seen, rtol=1e-6)


def test_strongest_attack_weighs_only_vectors_that_the_code_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its search gives to the victims' rule are rows that came through the code."""
    seen: list[np.ndarray[Any, Any]] = []
    plain = View.with_forged

    def watched(view: View, forged: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        table = plain(view, forged)
        seen.append(table[len(view.honest) :].copy())
        return table

    monkeypatch.setattr(View, "with_forged", watched)
    rpel.simulate("linear", wire="int8", attack="strongest", **SMALL | {"rounds": 1})
    assert len(seen) > 10
    for rows in seen:
        again = np.empty_like(rows)
        Wire("int8").through(rows, again)
        np.testing.assert_allclose(again, rows, rtol=1e-6)
        blocks = np.abs(rows[:, :256])
        codes = np.rint(blocks / np.maximum(blocks.max(axis=1, keepdims=True) / 127, 1e-30))
        assert len(np.unique(codes)) <= 128
