"""When each round begins: an epoch and a period, and later ones if a membership changes the pace or pauses.

Invariants: a round that has begun never moves, because a later pace begins with a later round, and not before
the previous round has ended. The newest members.toml alone says which round it is and since when.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import floor
from typing import Annotated

from pydantic import Field

from rpel.record import StrictRecord

Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(ge=0.01, le=1e7)]
Since1970 = Annotated[float, Field(ge=0, le=1e11)]

_DAY = 86400.0
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_ROUNDING = 1e-3  # seconds by which a pace may seem to begin before the previous round has ended


def parse_hours(text: str) -> tuple[float, float]:
    """Return (second of the day at which the hours begin, how many seconds they last).

    >>> parse_hours("20:00-06:00"), parse_hours("00:00-00:00")
    ((72000.0, 36000.0), (0.0, 86400.0))
    """
    match = _HOURS.fullmatch(text)
    if match is None:
        raise ValueError(f"hours {text!r} are not valid: write begin and end in UTC, such as 20:00-06:00")
    first, last = (3600.0 * int(match[i]) + 60.0 * int(match[i + 1]) for i in (1, 3))
    return first, (last - first) % _DAY or _DAY


class Pace(StrictRecord):
    """Rounds from ``epoch_round`` on, which begins at ``epoch``; each lasts ``period`` seconds.

    With ``hours`` (UTC) every round lies within these hours of a day.
    """

    epoch: Since1970
    epoch_round: Count = 1
    period: Seconds
    hours: str = ""

    def start(self, number: int) -> float:
        """Return the seconds from the epoch to the round that comes ``number`` rounds after the first.

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
        """Return how many rounds after the first the newest round begins; negative before the first."""
        running = floor(seconds / self.period)
        if not self.hours or seconds < 0:
            return running
        opened, today, daily = self._window()
        days, since = divmod(seconds - opened, _DAY)
        if days < 1:
            return min(running, today - 1)
        return today + int(days - 1) * daily + min(floor(since / self.period), daily - 1)

    def _window(self) -> tuple[float, int, int]:
        """Return (begin of the hours before the epoch, 0 or less; rounds left of them; rounds a day).

        Hours that begin at the epoch or after it are those of the previous day, with no round left.
        """
        first, length = parse_hours(self.hours)
        opened = -((self.epoch - first) % _DAY)
        return opened, floor(max(0.0, opened + length) / self.period), floor(length / self.period)


class Timetable:
    """A sequence of paces. Positions are seconds since the first epoch.

    >>> times = Timetable([Pace(epoch=1000.0, period=10.0), Pace(epoch=1100.0, epoch_round=4, period=60.0)])
    >>> [times.start(t) for t in (1, 3, 4, 5)]  # three rounds of 10 s, a pause of 70 s, rounds of 60 s
    [0.0, 20.0, 100.0, 160.0]
    >>> [times.round(position) for position in (-5.0, 25.0, 99.0, 100.0, 165.0)], times.end(3)
    ([0, 3, 3, 4, 5], 30.0)
    """

    def __init__(self, paces: Sequence[Pace]) -> None:
        self.paces = tuple(paces)
        self.begins = self.paces[0].epoch
        self._from = [pace.epoch_round for pace in self.paces]
        self._at = [pace.epoch - self.begins for pace in self.paces]

    @classmethod
    def steady(cls, epoch: float, period: float) -> "Timetable":
        """Return a timetable with one pace."""
        return cls([Pace(epoch=epoch, period=period)])

    def _index(self, t: int) -> int:
        return max(0, bisect_right(self._from, t) - 1)

    def start(self, t: int) -> float:
        """Return where round t begins."""
        index = self._index(t)
        return self._at[index] + self.paces[index].start(t - self._from[index])

    def end(self, t: int) -> float:
        """Return where round t ends; the next one may begin later."""
        return self.start(t) + self.period(t)

    def period(self, t: int) -> float:
        """Return how long round t lasts."""
        return self.paces[self._index(t)].period

    def round(self, position: float) -> int:
        """Return the newest round that has begun by then, 0 or less before the first."""
        index = max(0, bisect_right(self._at, position) - 1)
        number = self._from[index] + self.paces[index].number(position - self._at[index])
        return min(number, self._from[index + 1] - 1) if index + 1 < len(self._from) else number

    def before(self, t: int) -> tuple[Pace, ...]:
        """Return the paces of the rounds before t."""
        return tuple(pace for pace in self.paces if pace.epoch_round < t)

    def changed(self, t: int, period: float, hours: str, pause: float = 0.0) -> "Timetable":
        """Return it with another pace from round t on, which begins ``pause`` seconds after round t − 1."""
        earlier = Timetable(self.before(t) or self.paces[:1])
        began = self.begins if t == 1 else self.begins + earlier.end(t - 1)
        later = Pace(epoch=began + pause, epoch_round=t, period=period, hours=hours)
        return Timetable([*self.before(t), later])

    def faults(self) -> Iterator[str]:
        """Yield sentences about paces that are impossible."""
        if self._from[0] != 1:
            yield f"epoch_round {self._from[0]} is not valid: the first pace begins with round 1"
        for pace in self.paces:
            if pace.hours and (most := parse_hours(pace.hours)[1]) < pace.period:
                yield f"period {pace.period:g} does not fit hours {pace.hours!r}, which last {most:g} seconds"
        for index, pace in enumerate(self.paces[1:], 1):
            if pace.epoch_round <= self._from[index - 1]:
                yield f"epoch_round {pace.epoch_round} must be at least {self._from[index - 1] + 1}"
                continue
            end = Timetable(self.paces[:index]).end(pace.epoch_round - 1)
            if self._at[index] < end - _ROUNDING:
                end += self.begins
                yield f"epoch {pace.epoch:.15g} is before the end of the previous round, {end:.15g}"
