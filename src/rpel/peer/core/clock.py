"""Which round is it? An agreed timetable, then a clock that nobody can set.

Invariants: the wall clock is read once, at the start; from then on time is what the machine counts since it
booted, so that setting the wall clock repeats no round and skips none. A start is refused when the members'
clocks, by their median (with one's own, unless they are enough without), are more than a round away. Later
drift is followed by at most 1 % of a period a round, and only what exceeds 2 %: an answer's position is older
than its arrival by the way it took, and following that would slow everybody.
"""

from collections.abc import Callable, Sequence
from statistics import median

from rpel.peer.config.timetable import Timetable

_SLEW = 0.01
_IGNORED = 0.02


class ClockError(OSError):
    """This peer's clock and those of the other members are more than a round apart.

    No bad input: a machine that has just booted may have the right time a minute later.
    """


def ahead(position: float, sent: float, received: float, waited: float = 0.0) -> float:
    """How far ahead a member's clock is; request and reply were sent and came at these own positions.

    The member read its clock somewhere between, after the request had ``waited`` there. What the way to it
    and back can explain is no difference: otherwise all members would follow each other's delays, ever
    further.

    >>> ahead(10.2, sent=10.0, received=10.5), ahead(11.5, 10.0, 11.0, waited=0.75)
    (0.0, 0.5)
    >>> ahead(10.5, 10.0, 11.0, waited=0.75)
    -0.25
    """
    late = position - received
    return max(late, min(0.0, position - sent - max(0.0, waited)))


def offset(position: float, sent: float, received: float) -> float:
    """How far ahead a clock is that was read, as far as one can know, midway between sending and receiving.

    >>> offset(10.25, sent=10.0, received=12.0)
    -0.75
    """
    return position - (sent + received) / 2


class RoundClock:
    """Positions are seconds since the epoch; which round begins where is in the timetable.

    A later membership may bring another one, in which no round that has begun moves.

    >>> clock = RoundClock(Timetable.steady(epoch=1000.0, period=10.0), wall=lambda: 1025.0,
    ...     ticks=lambda: 7.0)
    >>> clock.position(), clock.round(), clock.start(3), clock.end(3)
    (25.0, 3, 20.0, 30.0)
    """

    def __init__(self, timetable: Timetable, wall: Callable[[], float], ticks: Callable[[], float]) -> None:
        self.timetable, self._ticks = timetable, ticks
        self._zero = wall() - timetable.begins - ticks()

    @property
    def period(self) -> float:
        """How long the round that runs now lasts."""
        return self.timetable.period(self.round())

    def position(self) -> float:
        """Seconds since the epoch, negative before it."""
        return self._ticks() + self._zero

    def round(self, position: float | None = None) -> int:
        """The round that runs now, or at that position, or ran last before it; 0 or less before the first."""
        return self.timetable.round(self.position() if position is None else position)

    def open_round(self) -> int:
        """The round that runs now or, while rounds pause, the next one.

        >>> times = Timetable.steady(0.0, 10.0).changed(3, 10.0, "", pause=70.0)
        >>> [RoundClock(times, wall=lambda: now, ticks=lambda: 0.0).open_round() for now
        ...     in (15.0, 25.0, 95.0)]
        [2, 3, 3]
        """
        t = self.round()
        return t if self.position() < self.end(t) else t + 1

    def start(self, t: int) -> float:
        """Return the position at which round t begins."""
        return self.timetable.start(t)

    def end(self, t: int) -> float:
        """Return the position at which round t ends."""
        return self.timetable.end(t)

    def adopt(self, offsets: Sequence[float], hostile: int = 0) -> None:
        """Set the clock to the median of the members' clocks and this one; refuse more than one round.

        ``offsets`` say how far the members' clocks are ahead. If there are enough of them to outvote
        ``hostile`` liars, this clock is left out, because a wrong one would count as one more liar.

        >>> clock = RoundClock(Timetable.steady(0.0, 10.0), wall=lambda: 25.0, ticks=lambda: 0.0)
        >>> clock.adopt([2.0, 1.0, 1e9]); clock.position()
        26.5
        >>> clock.adopt([63.0, 64.0])
        Traceback (most recent call last):
        rpel.peer.core.clock.ClockError: this machine's clock is 6.3 rounds behind the members': set it and
        start again
        """
        off = median(offsets if 0 < 2 * hostile < len(offsets) else [*offsets, 0.0])
        if abs(off) > self.period:
            way = "behind" if off > 0 else "ahead of"
            far = f"{abs(off) / self.period:.1f} rounds"
            raise ClockError(f"this machine's clock is {far} {way} the members': set it and start again")
        self._zero += off

    def slew(self, offsets: Sequence[float], hostile: int) -> float:
        """Move the clock a little towards the median and return how far off it was.

        With too few answers to outvote the hostile members, the clock stays as it is.

        >>> clock = RoundClock(Timetable.steady(0.0, 10.0), wall=lambda: 25.0, ticks=lambda: 0.0)
        >>> clock.slew([1.0, 1.0], hostile=1), clock.position()
        (1.0, 25.1)
        """
        if len(offsets) < 2 * hostile:
            return 0.0
        off = median([*offsets, 0.0])
        beyond = max(0.0, abs(off) - _IGNORED * self.period)
        step = min(beyond, _SLEW * self.period)
        self._zero += step if off > 0 else -step
        return off
