"""When which round begins: an epoch and a period,
and later ones where a membership changes the pace or pauses.

Invariants: a round that has begun never moves, because a later pace begins with a later round, not before the
round before it has ended; whoever holds the newest members.toml alone can say which round it is,
and since when.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import floor
from typing import Annotated

from pydantic import Field

from rpel.config.record import StrictRecord

Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(ge=0.01, le=1e7)]
Since1970 = Annotated[float, Field(ge=0, le=1e11)]

_DAY = 86400.0
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_NEAR = 1e-3  # seconds by which a pace may seem to begin before the round before it ended


def parse_hours(text: str) -> tuple[float, float]:
    """(second of the day at which the hours begin, how many seconds they last) of a text such as 20:00-06:00.

    >>> parse_hours("20:00-06:00"), parse_hours("00:00-00:00")
    ((72000.0, 36000.0), (0.0, 86400.0))
    >>> parse_hours("8pm-6am")
    Traceback (most recent call last):
    ValueError: hours '8pm-6am' are not valid: write the begin and the end of the night, UTC, such as
    20:00-06:00
    """
    match = _HOURS.fullmatch(text)
    if match is None:
        raise ValueError(
            f"hours {text!r} are not valid: write the begin and the end of the night, UTC, such as "
            "20:00-06:00"
        )
    first, last = (3600.0 * int(match[i]) + 60.0 * int(match[i + 1]) for i in (1, 3))
    return first, (last - first) % _DAY or _DAY


class Pace(StrictRecord):
    """Rounds from ``epoch_round`` on: that one begins at ``epoch`` (unix seconds),
    each lasts ``period`` seconds.

    With ``hours`` (UTC) rounds lie wholly within these hours of each day.
    """

    epoch: Since1970
    epoch_round: Count = 1
    period: Seconds
    hours: str = ""

    def start(self, number: int) -> float:
        """Seconds after the epoch at which the round begins that comes ``number`` rounds after the first.

        >>> night = Pace(epoch=0.0, period=3600.0, hours="22:00-00:00")
        >>> [night.start(number) / 3600 for number in range(4)]
        [22.0, 23.0, 46.0, 47.0]
        """
        if not self.hours:
            return number * self.period
        opened, today, daily = self._window()
        if number < today:
            return number * self.period
        days, rest = divmod(number - today, daily)
        return opened + (days + 1) * _DAY + rest * self.period

    def number(self, seconds: float) -> int:
        """How many rounds after the first the newest round is that began before; negative: none did."""
        running = floor(seconds / self.period)
        if not self.hours or seconds < 0:
            return running
        opened, today, daily = self._window()
        days, since = divmod(seconds - opened, _DAY)
        if days < 1:
            return min(running, today - 1)
        return today + int(days - 1) * daily + min(floor(since / self.period), daily - 1)

    def _window(self) -> tuple[float, int, int]:
        """When the hours began before the epoch (0 or less), how many rounds of them are left then,
        and rounds a day.

        Hours that begin at the epoch or after it are those of the day before, of which no round is left.
        """
        first, length = parse_hours(self.hours)
        opened = -((self.epoch - first) % _DAY)
        return opened, floor(max(0.0, opened + length) / self.period), floor(length / self.period)


class Timetable:
    """Paces one after the other. Positions are seconds since the first epoch.

    >>> times = Timetable([Pace(epoch=1000.0, period=10.0), Pace(epoch=1100.0, epoch_round=4, period=60.0)])
    >>> [times.start(t) for t in (1, 3, 4, 5)]  # three rounds of 10 s, a pause of 70 s, rounds of 60 s
    [0.0, 20.0, 100.0, 160.0]
    >>> [times.round(position) for position in (-5.0, 25.0, 99.0, 100.0,
    ...     165.0)], times.period(3), times.end(3)
    ([0, 3, 3, 4, 5], 10.0, 30.0)
    """

    def __init__(self, paces: Sequence[Pace]) -> None:
        self.paces = tuple(paces)
        self.begins = self.paces[0].epoch
        self._from = [pace.epoch_round for pace in self.paces]
        self._at = [pace.epoch - self.begins for pace in self.paces]

    @classmethod
    def steady(cls, epoch: float, period: float) -> "Timetable":
        """One pace for ever."""
        return cls([Pace(epoch=epoch, period=period)])

    def start(self, t: int) -> float:
        """Where round t begins."""
        index = self._place(t)
        return self._at[index] + self.paces[index].start(t - self._from[index])

    def end(self, t: int) -> float:
        """Where round t ends; the next one may begin later."""
        return self.start(t) + self.period(t)

    def period(self, t: int) -> float:
        """How long round t lasts."""
        return self.paces[self._place(t)].period

    def round(self, position: float) -> int:
        """The newest round that has begun by then; 0 or less before the first."""
        index = max(0, bisect_right(self._at, position) - 1)
        number = self._from[index] + self.paces[index].number(position - self._at[index])
        return min(number, self._from[index + 1] - 1) if index + 1 < len(self._from) else number

    def before(self, t: int) -> tuple[Pace, ...]:
        """The paces of the rounds before t."""
        return tuple(pace for pace in self.paces if pace.epoch_round < t)

    def changed(self, t: int, period: float, hours: str, pause: float = 0.0) -> "Timetable":
        """With another pace from round t on, which begins when the one before it has ended,
        or so much later."""
        earlier = Timetable(self.before(t) or self.paces[:1])
        began = self.begins if t == 1 else self.begins + earlier.end(t - 1)
        later = Pace(epoch=began + pause, epoch_round=t, period=period, hours=hours)
        return Timetable([*self.before(t), later])

    def wrong(self) -> Iterator[str]:
        """Sentences on what cannot be."""
        if self._from[0] != 1:
            yield f"epoch_round {self._from[0]} is not valid: the first pace begins with round 1"
        for pace in self.paces:
            if pace.hours and (most := parse_hours(pace.hours)[1]) < pace.period:
                yield f"period {pace.period:g} does not fit hours {pace.hours!r}: the longest is {most:g}"
        for index, pace in enumerate(self.paces[1:], 1):
            before = Timetable(self.paces[:index])
            if pace.epoch_round <= self._from[index - 1]:
                yield (
                    f"epoch_round {pace.epoch_round} comes too early: the nearest is "
                    f"{self._from[index - 1] + 1}"
                )
            elif self._at[index] < (end := before.end(pace.epoch_round - 1)) - _NEAR:
                yield (
                    f"epoch {pace.epoch:.15g} is before the end of the round before: {self.begins + end:.15g}"
                )

    def _place(self, t: int) -> int:
        return max(0, bisect_right(self._from, t) - 1)
