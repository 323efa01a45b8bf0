"""Who is given which round, and when a clock is followed: the decisions alone."""

import pytest

from rpel.peer.config.timetable import Timetable
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.serve_policy import EARLY, GONE, TOO_MANY, Decision, ServePolicy


def test_member_has_two_requests_open_and_the_third_is_refused() -> None:
    desk = ServePolicy()
    assert [desk.request(7, round).kind for round in (1, 2)] == ["wait", "wait"]
    third = desk.request(7, round=1)  # of which it may have one more body
    assert (third.kind, third.code) == ("refuse", TOO_MANY)
    assert desk.request(8, round=1).kind == "wait"  # others are not held up
    desk.done(7, round=1, full=False)
    assert desk.request(7, round=1).kind == "wait"


def test_initial_models_are_limited_like_half_steps_per_period() -> None:
    desk = ServePolicy()
    for period in (-3, -2, 1):  # before the first round, too
        for _ in range(2):
            assert desk.request(7, round=0, period=period).kind == "serve"
            desk.done(7, round=0, full=True)
        assert desk.request(7, round=0, period=period) == Decision("refuse", TOO_MANY)
        assert desk.request(8, round=0, period=period).kind == "serve"
        desk.done(8, round=0, full=False)


@pytest.mark.parametrize(
    ("round", "kind", "code"), [(3, "refuse", GONE), (5, "wait", EARLY), (6, "wait", EARLY)]
)
def test_next_two_rounds_may_be_waited_for(round: int, kind: str, code: int) -> None:
    desk = ServePolicy()
    desk.skip(3)
    desk.publish(4)
    found = desk.request(0, round)
    assert (found.kind, found.code) == (kind, code)


def test_round_further_ahead_is_refused_at_once() -> None:
    desk = ServePolicy()
    desk.publish(4)
    for round in (7, 8, 24, 10**9):
        found = desk.request(0, round)
        assert (found.kind, found.code) == ("refuse", EARLY)


@pytest.mark.parametrize(("offsets", "moved"), [([], 0.0), ([5.0], 0.0), ([5.0] * 3, 0.0), ([5.0] * 4, 0.1)])
def test_clock_follows_only_answers_enough_to_outvote_the_hostile(offsets: list[float], moved: float) -> None:
    clock = RoundClock(Timetable.steady(0.0, 10.0), wall=lambda: 25.0, ticks=lambda: 0.0)
    assert clock.slew(offsets, hostile=2) == (5.0 if moved else 0.0)
    assert clock.position() == pytest.approx(25.0 + moved)
