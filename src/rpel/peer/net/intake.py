"""A slow line, used for one model after the other: as many bodies at a time as keep it full,
in the order drawn.

Everybody drawn is asked at once, so that whoever is slow to publish holds up nobody; but when bodies come
faster than the line carries them, all of them end late together. So only the first few of those that have
begun are read, and the others' senders wait. How many is found by trying, over some rounds if need be: one
fewer as long as that costs no bytes a second, one more as long as that brings more. What a body that is not
read still fills, some hundred kilobytes on its way, would deceive these measurements,
so each waits a little first.

Invariants: the order is that of the draw, which was fixed before anybody answered, so the plan's law is
untouched; no body is given up for another; a sender that stands still, or trickles so that its body could not
come in time by far, is read beside the others and does not count among them.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

FIRST = 2  # bodies read at once before anything is known of the line
_TICKS = 60  # measurements in the time that a round's pulls have
_SETTLE, _WINDOW = 5, 8  # ticks that are not counted after a change, and from one change to the next
_GRACE = 2  # ticks that are not held against a body that has just begun
_BETTER = 1.1  # times as many bytes a second: one more was worth it
_ALIKE = 0.93  # as many: one fewer does as well
_HOPELESS = 0.2  # of the speed at which a body just comes in time: slower ones do not count


class Flow(Protocol):
    """A connection whose reading can be held up."""

    def hold(self) -> None: ...

    def release(self) -> None: ...


@dataclass(eq=False)
class Place:
    """The body of one member: its number in the draw, the connection on which it comes,
    what came of it lately."""

    number: int
    flow: Flow | None = None
    held: bool = False
    hopeless: bool = False
    taken: int = 0
    ticks: int = 0


class Intake:
    """Decides which bodies of a round are read, each of ``size`` bytes within ``seconds``.

    >>> class Noted:
    ...     def __init__(self, name): self.name = name
    ...     def hold(self): print("hold", self.name)
    ...     def release(self): print("release", self.name)
    >>> intake = Intake(size=1000, seconds=60.0, width=1)
    >>> one, two = intake.place(0), intake.place(1)
    >>> intake.begin(two, Noted("two")); intake.begin(one, Noted("one"))
    hold two
    >>> intake.end(one)
    release two
    """

    def __init__(self, size: int, seconds: float, width: int = FIRST) -> None:
        self.width = width
        """How many bodies are read at once."""
        self.tick = max(0.02, seconds / _TICKS)
        """Seconds between two calls of :meth:`measure`."""
        self._least = _HOPELESS * size / seconds * self.tick
        self._begun: list[Place] = []
        self._window: list[int] = []
        self._total = 0
        self._before: float | None = None  # bytes a tick before the change that is being tried
        self._way = -1

    def place(self, number: int) -> Place:
        """A place in the order of the draw."""
        return Place(number)

    def begin(self, place: Place, flow: Flow) -> None:
        """Its body begins to come."""
        self.end(place)  # of an attempt before
        place.flow = flow
        self._begun = sorted([*self._begun, place], key=lambda other: other.number)
        self._apply()

    def end(self, place: Place) -> None:
        """Its body is there, or will not come."""
        if place in self._begun:
            self._begun.remove(place)
            if place.held and place.flow is not None:
                place.flow.release()
            place.flow, place.held, place.hopeless, place.taken, place.ticks = None, False, False, 0, 0
            self._apply()

    def measure(self) -> None:
        """A tick has passed: who stands still, and, every few ticks, would more bodies at once be better,
        or fewer?"""
        self._window.append(self._total)
        self._total = 0
        for place in self._begun:
            place.ticks = 0 if place.held else place.ticks + 1
            if place.ticks > _GRACE:
                place.hopeless = place.taken < self._least
            place.taken = 0
        if len(self._window) >= _WINDOW:
            measured = self._window[_SETTLE:]
            self._judge(sum(measured) / len(measured))
            self._window = []
        self._apply()

    def took(self, place: Place, count: int) -> None:
        """So many bytes of a body came."""
        place.taken += count
        self._total += count

    def _judge(self, rate: float) -> None:
        """Keep what was tried if it did well, take it back if not; then try the next."""
        if self._before is not None:
            if rate >= (_BETTER if self._way > 0 else _ALIKE) * self._before:
                self._try(rate, self._way)
            else:
                self.width -= self._way
                self._before = None
        else:
            self._try(rate, -self._way)

    def _try(self, rate: float, way: int) -> None:
        """One more, or one fewer, if there is such a thing."""
        self._way, wanted = way, self.width + way
        possible = 1 <= wanted <= max(1, len(self._begun))
        self._before = rate if possible else None
        self.width = wanted if possible else self.width

    def _apply(self) -> None:
        read = 0
        for place in self._begun:
            held = read >= self.width
            read += not place.hopeless
            if held != place.held and place.flow is not None:
                place.held = held
                (place.flow.hold if held else place.flow.release)()

    async def watch(self) -> None:
        """Measure again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(self.tick)
            self.measure()
