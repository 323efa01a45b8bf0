"""A slow line: the last bodies of a draw are held back when the first ones would be late otherwise.

Everybody drawn is asked at once; when bodies come faster than the line carries them, all of them end late
together. So while the first 2 b_hat + 1 of a draw are projected to miss the deadline, the others are not
read, and their senders wait. The order is that of the draw, which was fixed before anybody answered, so the
plan's law is untouched. A sender that stands still or trickles does not count among the first.
"""

import asyncio
from collections.abc import Callable, Sequence

_TICK = 0.05  # seconds after which a body that is held back looks again
_SETTLED = 0.1  # of the time for the pulls: before that nothing is projected
_SPARE = 0.2  # of the time for the pulls, in which the first ones are not to end
_HOPELESS = 0.2  # of the speed at which a body just comes in time


class Turns:
    """Decide which members of a draw are read now.

    ``needed`` bodies of ``size`` bytes come first, by ``deadline``.

    >>> time = [0.0]
    >>> turns = Turns([7, 8], needed=1, size=100, deadline=10.0, clock=lambda: time[0])
    >>> turns.took(7, 1), turns.took(8, 1)
    (None, None)
    >>> time[0] = 5.0; turns.took(7, 30); turns.held(7), turns.held(8)  # 7 would end at 16.7
    (False, True)
    >>> turns.end(7); turns.held(8)
    False
    """

    def __init__(
        self, draw: Sequence[int], needed: int, size: int, deadline: float, clock: Callable[[], float]
    ) -> None:
        self._draw, self._needed, self._size, self._clock = tuple(draw), needed, size, clock
        self._began, self._deadline = clock(), deadline
        self._taken: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._ended: set[int] = set()

    def took(self, member: int, taken: int) -> None:
        """Note how many bytes of a member's body have come by now."""
        self._since.setdefault(member, self._clock())
        self._taken[member] = taken

    def end(self, member: int) -> None:
        """A member's body is there, or will not come."""
        self._ended.add(member)
        self._taken.pop(member, None)

    def held(self, member: int) -> bool:
        """Whether this member's body has to wait."""
        now, span = self._clock(), self._deadline - self._began
        if now < self._began + _SETTLED * span:
            return False
        rates = {
            other: self._taken[other] / max(now - self._since[other], 1e-3)
            for other in self._draw
            if other in self._taken
        }
        hopeful = [other for other, rate in rates.items() if rate > _HOPELESS * self._size / span]
        first = hopeful[: max(0, self._needed - len(self._ended))]
        if member in first:
            return False
        due = self._deadline - _SPARE * span
        return any(now + (self._size - self._taken[one]) / rates[one] > due for one in first)

    async def turn(self, member: int, taken: int) -> None:
        """Wait until more of this member's body, of which so much has come, may be read."""
        self.took(member, taken)
        while self.held(member):
            await asyncio.sleep(_TICK)
