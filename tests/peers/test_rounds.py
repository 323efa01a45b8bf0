"""The protocol by itself: each effect that it asks for is answered by hand, in the order in which it asks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rpel.learning import NesterovOuter
from rpel.peer.config.timetable import Timetable
from rpel.peer.core import protocol
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.protocol import Checkpoint, LentRow, Pulled, Record, Stored, Terms
from rpel.rules import rule
from rpel.types import Models, Outcome, PullResult

PERIOD = 10.0
TERMS = Terms(
    me=0, nodes=9, byzantine=2, pull=7, rule=rule("nnm+trimmed_mean", f=2), deadline=6.0, rounds=20
)  # fmt: skip


class Driver:
    """Answers the effects of one peer: a disk that works, members whose clocks are right,
    a clock that jumps."""

    def __init__(
        self,
        now: float,
        terms: Terms = TERMS,
        memory: Stored | None = None,
        enter: Callable[[int], Terms | None] | None = None,
        answers: Callable[[int, Models], None] | None = None,
        clocks: Sequence[float] = (0.0,) * 8,
    ) -> None:
        """``answers(round, table)`` may change what was pulled; ``clocks``:
        how far those of members are ahead."""
        self.now, self._memory, self._answers = (
            now,
            memory or Stored(),
            answers or (lambda round, table: None),
        )
        self._terms, self._clocks = enter or (lambda round: terms), clocks
        clock = RoundClock(Timetable.steady(0.0, PERIOD), wall=lambda: self.now, ticks=lambda: self.now)
        self._effects = protocol.rounds(
            terms, clock, lambda t, me, n, s: tuple(range(1, 1 + s)), lambda: np.full(1, 7.0)
        )
        self.seen: list[Any] = []

    def to(self, round: int) -> "Driver":
        """Drive until this round has been told."""
        answer: Any = None
        while True:
            effect = self._effects.send(answer)
            self.seen.append(effect)
            answer = getattr(self, f"_{type(effect).__name__.lower()}", lambda effect: True)(effect)
            if isinstance(effect, protocol.Tell) and effect.report.round == round:
                return self

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def _recall(self, effect: protocol.Recall) -> Stored:
        return self._memory

    def _askclocks(self, effect: protocol.AskClocks) -> list[float]:
        return list(self._clocks)

    def _sleep(self, effect: protocol.Sleep) -> None:
        self.now = max(self.now, effect.until)

    def _enter(self, effect: protocol.Enter) -> Terms | None:
        return self._terms(effect.round)

    def _step(self, effect: protocol.Step) -> Models:
        return effect.x + 1

    def _pull(self, effect: protocol.Pull) -> Pulled:
        table = np.ones((1 + len(effect.members), 1))
        if effect.half is not None:
            table[0] = effect.half
        self._answers(effect.round, table)
        return Pulled(table, (PullResult.OK,) * len(effect.members))


def recorded(round: int) -> Stored:
    """A disk on which this round was recorded and did not end."""
    record = Record(round, tuple(range(1, 8)), LentRow(np.full(1, 3.0)))
    return Stored(Checkpoint(round - 1, np.full(1, 2.0)), record, last_round=round, published=(round,))


def test_round_resumed_after_a_change_of_plan_trims_by_the_new_plan() -> None:
    later = replace(TERMS, rule=rule("nnm+trimmed_mean", f=3))
    driver = Driver(now=41.0, memory=recorded(5), enter=lambda round: later if round >= 5 else TERMS).to(5)
    report = driver.of(protocol.Tell)[0].report
    assert (report.round, report.trim) == (5, 3)
    few = Driver(now=41.0, memory=recorded(5), enter=lambda round: replace(later, rule=rule("mean", f=0))).to(
        5
    )
    assert few.of(protocol.Save)[0].checkpoint.x == pytest.approx((3 + 7 * 1) / 8)  # by the mean, not trimmed


OUTER = replace(TERMS, outer=NesterovOuter(lr=0.5, momentum=0.9))


@pytest.mark.parametrize(
    "checkpoint", [None, Checkpoint(2, np.full(1, 9.0), v=np.full(1, 9.0))], ids=["no", "old"]
)
def test_crash_between_half_step_and_outer_step_loses_neither_x_nor_v(checkpoint: Checkpoint | None) -> None:
    """The checkpoint of the round before was refused by the disk: the record alone has both."""
    record = Record(
        5, tuple(range(1, 8)), LentRow(np.full(1, 3.0)), before=np.full(1, 2.0), v=np.full(1, 4.0)
    )
    memory = Stored(checkpoint, record, last_round=5, published=(5,))
    saved = Driver(now=41.0, memory=memory, enter=lambda round: OUTER).to(5).of(protocol.Save)[0].checkpoint
    v = 0.9 * 4 + (2 - 1)  # the others answer 1, and of two near 3 none is left
    assert (saved.outcome, saved.v) == (Outcome.AGGREGATED, pytest.approx(v))
    assert saved.x == pytest.approx(2 - 0.5 * ((2 - 1) + 0.9 * v))


def test_unfinished_round_keeps_the_outer_velocity() -> None:
    record = Record(
        5, tuple(range(1, 8)), LentRow(np.full(1, 3.0)), before=np.full(1, 2.0), v=np.full(1, 4.0)
    )
    memory = Stored(None, record, last_round=5, published=(5,))
    driver = Driver(now=49.0, memory=memory, enter=lambda round: OUTER).to(6)  # after the deadline of round 5
    assert driver.of(protocol.Step)[0].x == pytest.approx(3)
    assert driver.of(protocol.Save)[0].checkpoint.v == pytest.approx(0.9 * 4 + (3 - 1))


def test_round_recorded_by_a_peer_that_is_a_member_no_longer_asks_nobody() -> None:
    driver = Driver(now=41.0, memory=recorded(5), enter=lambda round: None)
    with pytest.raises(StopIteration):
        driver.to(5)
    assert driver.of(protocol.Pull) == []


def test_model_that_is_not_finite_gives_way_to_the_others_and_is_never_stepped() -> None:
    """Models that diverge are finite one by one, and their mean is not."""

    def diverged(round: int, table: Models) -> None:
        if round == 5:
            table[1:] = 1.7e308

    driver = Driver(now=-1.0, answers=diverged).to(6)
    saved = {effect.checkpoint.round: effect.checkpoint for effect in driver.of(protocol.Save)}
    assert [effect.round for effect in driver.of(protocol.Step)] == [1, 2, 3, 4, 5]
    assert driver.of(protocol.Tell)[-1].report.outcome is Outcome.CAUGHT_UP
    assert saved[6].fresh
    assert np.isfinite(saved[6].x).all()


@pytest.mark.parametrize(
    ("now", "first"),
    [(-0.2, 1), (5.0, 2), (9.4, 2), (9.6, 3), (29.6, 5)],
)
def test_start_sits_out_the_round_that_runs_or_is_about_to_begin(now: float, first: int) -> None:
    driver = Driver(now).to(first)
    assert driver.of(protocol.Tell)[0].report.round == first
    assert [effect.round for effect in driver.of(protocol.Pull)] == [first]


FEW = replace(TERMS, nodes=4, byzantine=1, pull=3, rule=rule("nnm+trimmed_mean", f=1))


@pytest.mark.parametrize(
    ("clocks", "first"),
    [
        (
            (9.0, -1e6),
            10,
        ),  # one honest member and one liar: this clock, 0.9 of a round behind, stays
        ((0.0, 0.0), 10),
        ((0.0, 0.0, -1e6), 9),  # 2b + 1: the median is between honest ones
    ],
)
def test_peer_with_too_few_clock_answers_sits_out_a_whole_round(
    clocks: tuple[float, ...], first: int
) -> None:
    """Its disk may be old and its clock behind:
    a round that it seems to begin may be one that it has played."""
    driver = Driver(now=72.0, terms=FEW, memory=recorded(7), clocks=clocks).to(first)
    assert [effect.record.round for effect in driver.of(protocol.Persist)] == [first]
    assert 7 in [effect.round for effect in driver.of(protocol.Publish) if effect.served]
