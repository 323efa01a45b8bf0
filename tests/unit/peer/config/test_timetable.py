"""When which round begins, with hours, pauses and other periods: every round once, in order,
within its hours."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpel.peer.config.timetable import Pace, Timetable, parse_hours

HOURS = st.sampled_from(["", "20:00-06:00", "08:30-17:15", "00:00-00:00", "23:00-01:00"])
EPOCH = st.integers(0, 3 * 86400).map(lambda seconds: 1.8e9 + seconds)


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    """One to three paces, each from some rounds after the one before."""
    found = Timetable([Pace(epoch=draw(EPOCH), period=draw(st.integers(1, 7000)), hours=draw(HOURS))])
    for _ in range(draw(st.integers(0, 2))):
        first, pause = (
            found.paces[-1].epoch_round + draw(st.integers(1, 40)),
            draw(st.sampled_from([0.0, 5.0, 1e5])),
        )
        found = found.changed(first, draw(st.integers(1, 7000)), draw(HOURS), pause)
    return found


@given(timetables())
def test_rounds_are_consecutive_and_within_the_hours(times: Timetable) -> None:
    assert list(times.faults()) == []
    for t, (start, following) in enumerate(pairwise(times.start(t) for t in range(1, 130)), 1):
        assert following >= times.end(t) - 1e-6
        assert [
            times.round(start + 1e-6),
            times.round(times.end(t) - 1e-6),
            times.round(following - 1e-6),
        ] == [t] * 3
        pace = times.paces[times._index(t)]
        if pace.hours:
            first, length = parse_hours(pace.hours)
            since = (times.begins + start - first) % 86400
            assert since + pace.period <= length + 1e-6
    assert times.round(-1e-6) == 0


def test_night_ends_when_no_whole_round_fits() -> None:
    """A network that begins at 21:30, for the nights from 20:00 to 06:00, rounds of two hours."""
    at = datetime(2030, 1, 7, 21, 30, tzinfo=UTC).timestamp()
    times = Timetable([Pace(epoch=at, period=7200.0, hours="20:00-06:00")])
    begun = [datetime.fromtimestamp(at + times.start(t), UTC).strftime("%d. %H:%M") for t in range(1, 8)]
    assert begun == [
        "07. 21:30",
        "07. 23:30",
        "08. 01:30",
        "08. 03:30",
        "08. 20:00",
        "08. 22:00",
        "09. 00:00",
    ]


@pytest.mark.parametrize(
    ("paces", "words"),
    [
        ([Pace(epoch=0, period=10, epoch_round=2)], "begins with round 1"),
        ([Pace(epoch=0, period=7200, hours="20:00-21:00")], "3600"),
        (
            [Pace(epoch=0, period=10), Pace(epoch=5, period=10, epoch_round=2)],
            "before the end of the previous round, 10",
        ),
        (
            [Pace(epoch=0, period=10), Pace(epoch=50, period=10, epoch_round=1)],
            "must be at least 2",
        ),
    ],
)
def test_impossible_hours_are_refused(paces: list[Pace], words: str) -> None:
    assert words in " ".join(Timetable(paces).faults())
