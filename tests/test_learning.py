"""Line 9 is one function for all: what a peer makes of its answers is what the simulator makes of the same
rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel.peer.config.timetable import Timetable
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.protocol import (
    AskClocks,
    Enter,
    Persist,
    Pull,
    Pulled,
    Recall,
    Save,
    Step,
    Stored,
    Terms,
    rounds,
)
from rpel.rules import aggregate_or_keep
from rpel.types import Outcome, PullResult, Received

Array = NDArray[Any]
OK, LATE = PullResult.OK, PullResult.LATE


def one_round(rule: rpel.Rule, half: Array, answers: Array, results: tuple[PullResult, ...]) -> Any:
    """The checkpoint of a peer that takes its first local step to ``half`` and hears ``answers``."""
    s = len(results)
    terms = Terms(me=0, nodes=s + 1, byzantine=rule.f or 0, pull=s, rule=rule, deadline=0.5, rounds=1)
    clock = RoundClock(Timetable.steady(0.0, 1.0), wall=lambda: -0.5, ticks=lambda: 0.0)
    replies: dict[type, Callable[[], Any]] = {
        Recall: lambda: Stored(),
        AskClocks: lambda: [0.0] * s,
        Enter: lambda: terms,
        Step: lambda: half.copy(),
        Persist: lambda: True,
        Pull: lambda: Pulled(np.concatenate([half[None], answers]), results),
        Save: lambda: True,
    }
    peer, reply = rounds(terms, clock, lambda *_: tuple(range(1, s + 1)), lambda: np.zeros_like(half)), None
    while True:
        want = peer.send(reply)
        if isinstance(want, Save):
            return want.checkpoint
        reply = replies.get(type(want), lambda: None)()


@pytest.mark.parametrize("name", ["nnm+trimmed_mean", "monna", "median"])
@pytest.mark.parametrize("missing", [(), (2,), (2, 5)])
def test_peer_aggregates_pulled_models_like_the_simulator(name: str, missing: tuple[int, ...]) -> None:
    coins = np.random.default_rng(3)
    models, rule = coins.normal(size=(8, 12)).astype(np.float32), rpel.rule(name, f=2)
    models[4] = np.nan  # counts among the two
    received = [j for j in range(1, 8) if j not in missing]
    stored = one_round(rule, models[0], models[1:], tuple(LATE if j in missing else OK for j in range(1, 8)))
    index = np.full((1, 8), -1)
    index[0, : 1 + len(received)] = [0, *received]
    expected, info = aggregate_or_keep(models[:1], Received(models, index), rule)
    assert not info.degraded.any()
    assert info.trimmed.tolist() == [1]
    assert stored.outcome == Outcome.AGGREGATED
    np.testing.assert_array_equal(stored.x, expected[0])


def test_peer_with_too_few_answers_keeps_the_half_step_like_the_simulator() -> None:
    models, rule = (
        np.random.default_rng(4).normal(size=(8, 12)).astype(np.float32),
        rpel.rule("trimmed_mean", f=3),
    )
    stored = one_round(rule, models[0], models[1:], (OK,) * 5 + (LATE,) * 2)
    expected, info = aggregate_or_keep(
        models[:1], Received(models, np.array([[0, 1, 2, 3, 4, 5, -1, -1]])), rule
    )
    assert info.degraded.all()
    assert (stored.outcome, stored.degraded) == (Outcome.LOCAL_ONLY, 1)
    np.testing.assert_array_equal(stored.x, expected[0])
    nobody = one_round(rule, models[0], models[1:], (LATE,) * 7)
    np.testing.assert_array_equal(nobody.x, models[0])
