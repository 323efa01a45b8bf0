"""Who is given which round: pure decisions, the same for the real server and the simulated one.

Invariants: a round is served from the moment it is published until it is the fourth newest, always the same
bytes; a round that was passed over is served only if it is the newest and published after all (as when
everybody was down). A request for a round to come waits for it, for ``patience`` seconds. A member has at
most two requests open and is given at most two full bodies for a round that it asks for (two, because a peer
that restarts asks again), so that one member cannot take the others' share. The initial model, which
everybody has and `rpel network status` measures with, is given as often in each period. Members are known by
their pins, whatever their numbers in the membership of the moment.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

SERVED, OTHER_MEMBERSHIP, GONE, EARLY, TOO_MANY = 200, 409, 410, 425, 429


@dataclass(frozen=True)
class Decision:
    """What to do with a request.

    serve: send the body. wait: it may still come (ask again with :meth:`ServePolicy.look`). refuse: answer
    with this status code.
    """

    kind: Literal["serve", "wait", "refuse"]
    code: int


_SERVE, _WAIT = Decision("serve", SERVED), Decision("wait", EARLY)


class ServePolicy:
    """Track what is published and who is being served.

    Every request that was not refused ends with one :meth:`done`.

    >>> policy = ServePolicy()
    >>> policy.request(member="pin", round=1).kind, policy.publish(1), policy.look(1).kind
    ('wait', [], 'serve')
    >>> policy.done(member="pin", round=1, full=True)
    """

    def __init__(self, slots: int = 3, in_flight: int = 2, bodies: int = 2, patience: float = 20.0) -> None:
        self.slots, self.in_flight, self.bodies, self.patience = slots, in_flight, bodies, patience
        self.published: list[int] = []
        self.passed = 0  # the newest round that is published or will never be
        self._open: Counter[Hashable] = Counter()
        self._given: Counter[tuple[Hashable, int]] = Counter()
        # by member: a period, and how many it had in that
        self._initials: dict[Hashable, tuple[int, int]] = {}

    def publish(self, round: int) -> list[int]:
        """Serve this round from now on; returns the rounds that are served no longer."""
        if round < self.passed and round not in self.published:
            raise ValueError(f"round {round} was passed over and cannot be published any more")
        self.published = sorted({*self.published, round})
        gone, self.published = self.published[: -self.slots], self.published[-self.slots :]
        self._pass(round)
        return gone

    def skip(self, round: int) -> None:
        """Nothing will be served for this round."""
        self._pass(round)

    def _pass(self, round: int) -> None:
        self.passed = max(self.passed, round)
        held = self.passed - 2 * self.slots  # older counts decide nothing any more
        self._given = Counter({key: count for key, count in self._given.items() if key[1] > held})

    def look(self, round: int, waited: float = 0.0) -> Decision:
        """Decide whether this round can be sent now; every peer has round 0, the common initial model.

        ``waited``: seconds since the request came.
        """
        if round in self.published or round == 0:
            return _SERVE
        if round <= self.passed:
            return Decision("refuse", GONE)
        soon = round <= self.passed + 2 and waited < self.patience
        return _WAIT if soon else Decision("refuse", EARLY)

    def request(self, member: Hashable, round: int, period: int = 0) -> Decision:
        """A member asks for a round, in this period by the peer's clock."""
        if self._open[member] >= self.in_flight or self._had(member, round, period) >= self.bodies:
            return Decision("refuse", TOO_MANY)
        decision = self.look(round)
        if decision.kind != "refuse":
            self._open[member] += 1
            if round:
                self._given[member, round] += 1
            else:
                self._initials[member] = (period, self._had(member, 0, period) + 1)
        return decision

    def _had(self, member: Hashable, round: int, period: int) -> int:
        """How many bodies of a round a member has had; of the initial model, in this period."""
        if round:
            return self._given[member, round]
        when, count = self._initials.get(member, (period, 0))
        return count if when == period else 0

    def open(self, member: Hashable) -> int:
        """How many requests of a member are not answered yet."""
        return self._open[member]

    def done(self, member: Hashable, round: int, full: bool) -> None:
        """A request has ended; ``full``: a whole body left."""
        self._open[member] -= 1
        if full:
            return
        if round == 0:
            when, count = self._initials[member]
            self._initials[member] = (when, max(0, count - 1))
        elif self._given[member, round]:  # else it was forgotten meanwhile
            self._given[member, round] -= 1
