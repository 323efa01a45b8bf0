"""Who may connect, and how often: limits that are decided before any TLS, by arithmetic alone.

Invariants: refusing costs next to nothing. Whoever has sent no ClientHello gives way first, of the busiest
address and the oldest first, so that silent connections never keep a member out; then whoever stalls a
handshake, at random; an address from which a member came lately gives way after the others, while it takes no
more than half. An address that connects too often waits for its turn; a member or an address that asks too
much slows down itself and nobody else.
"""

import logging
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import IPv6Address, ip_address

log = logging.getLogger("rpel")

_SLOWEST, _FEWEST = 2.0, 20.0  # requests a second and at once that one member always has


@dataclass(frozen=True)
class Limits:
    """What one member or one address may take. Times are seconds.

    ``handshake``: until a ClientHello comes, and again for TLS · ``mute``: connections that have sent none ·
    ``waiting``: connections that wait for their turn · ``pending``, ``pending_each``: handshakes under way,
    of all and of one address (as many of it may wait) · ``connections``: of one member (the oldest gives way)
    · ``write``: a body has left by then, or its reader is dropped; None: five seconds after the membership's
    deadline · ``idle``: an unused connection is closed · ``rate``, ``burst``: requests a second of one
    member, and how many at once · ``total``: requests a second of all members, each of which has an equal
    share · ``hold``: delay of what exceeds that
    """

    handshake: float = 5.0
    mute: int = 256
    waiting: int = 256
    pending: int = 64
    pending_each: int = 32
    connections: int = 4
    write: float | None = None
    idle: float = 90.0
    rate: float = 50.0
    burst: float = 100.0
    total: float = 1000.0
    hold: float = 1.0

    def pace(self, members: int) -> "Pace":
        """Return the pace of requests for this number of members."""
        rate = min(self.rate, max(_SLOWEST, self.total / members))
        return Pace(rate, min(self.burst, max(_FEWEST, 2 * rate)))


class Bucket:
    """``burst`` tokens, refilled at ``rate`` a second; each thing done takes one, if need be in advance.

    >>> bucket = Bucket(rate=2.0, burst=1.0, now=0.0)
    >>> bucket.turn(0.0), bucket.turn(0.0), bucket.turn(0.0, queue=1), bucket.turn(1.0)
    (0.0, None, 0.5, 0.0)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self._left, self._at = rate, burst, burst, now

    def turn(self, now: float, queue: int = 0) -> float | None:
        """Return the seconds until one more action is allowed, and count that action.

        None, without counting, if more than ``queue`` actions wait already.
        """
        left = self._level(now) - 1
        if left < -queue:
            return None
        self._left, self._at = left, now
        return max(0.0, -left / self.rate)

    def full(self, now: float) -> bool:
        """Has nothing been taken for a while?"""
        return self._level(now) >= self.burst

    def _level(self, now: float) -> float:
        return min(self.burst, self._left + (now - self._at) * self.rate)


class Pace:
    """One bucket for each name that asks, forgotten when it is full again.

    >>> pace = Pace(rate=1.0, burst=1.0)
    >>> pace.turn("a", 0.0), pace.turn("a", 0.0), pace.turn("b", 0.0)
    (0.0, None, 0.0)
    """

    def __init__(self, rate: float, burst: float, queue: int = 0, remembered: int = 1024) -> None:
        self.rate, self.burst, self._queue, self._remembered = rate, burst, queue, remembered
        self._buckets: dict[str, Bucket] = {}

    def turn(self, name: str, now: float) -> float | None:
        """Seconds until this name may do one more thing; None: not at all."""
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= self._remembered:
                self._buckets = {other: held for other, held in self._buckets.items() if not held.full(now)}
            bucket = self._buckets[name] = Bucket(self.rate, self.burst, now)
        return bucket.turn(now, self._queue)

    def __len__(self) -> int:
        return len(self._buckets)


class Stage(Enum):
    """How far a connection has come."""

    MUTE = auto()
    WAITING = auto()
    PENDING = auto()
    MEMBER = auto()
    GONE = auto()


@dataclass(eq=False)
class Ticket:
    """One connection from an address; ``counted`` among those that the address has open."""

    address: str
    stage: Stage = Stage.MUTE
    counted: bool = False


class Gate:
    """Counts connections and handshakes by address; ``drop(ticket)`` is called for those that give way.

    Every ticket given out is handed back by :meth:`leave`, those that gave way too. One address may be that
    of many members (one office, one test machine), so its limits grow with their number.

    >>> dropped = []
    >>> gate = Gate(members=2, limits=Limits(mute=2), drop=dropped.append)
    >>> first, second, third = (gate.arrive("10.0.0.1") for _ in range(3))
    >>> dropped == [first], gate.speak(second, now=0.0), gate.begin(second)
    (True, 0.0, True)
    """

    def __init__(
        self, members: int, limits: Limits, drop: Callable[[Ticket], None], rng: random.Random | None = None
    ) -> None:
        self._limits, self._drop, self._rng = limits, drop, rng or random.SystemRandom()
        self._tickets: dict[Stage, dict[Ticket, None]] = {
            stage: {} for stage in (Stage.MUTE, Stage.WAITING, Stage.PENDING)
        }
        self._open: Counter[str] = Counter()
        self._known: dict[str, float] = {}  # addresses from which a member came, and when
        self.resize(members)

    def resize(self, members: int) -> None:
        """Set the number of members."""
        self._remembered = 4 * members
        self._most = self._limits.connections * members + 2 * self._limits.pending_each
        self._pace = Pace(rate=10 + members / 2, burst=20 + 2 * members, queue=self._limits.pending_each)

    def count(self, stage: Stage) -> int:
        """Connections that have come so far: mute, waiting or pending."""
        return len(self._tickets[stage])

    def arrive(self, address: str) -> Ticket:
        """A connection was accepted and has sent nothing yet."""
        ticket = Ticket(origin(address))
        mute = self._tickets[Stage.MUTE]
        mute[ticket] = None
        if len(mute) > self._limits.mute:
            self._give_way(self._busiest(self._expendable(mute, self._limits.mute)))
        return ticket

    def speak(self, ticket: Ticket, now: float) -> float | None:
        """Its ClientHello came: seconds until its handshake may begin; None: close it."""
        self._to(ticket, Stage.WAITING)
        waiting, address = self._tickets[Stage.WAITING], ticket.address
        wait = self._pace.turn(address, now)
        if wait is None:  # its address comes too often: one of those that wait gives way, whoever came first
            alike = [other for other in waiting if other.address == address]
            self._give_way(self._rng.choice(alike))
            wait = self._limits.pending_each / self._pace.rate
        elif len(waiting) > self._limits.waiting:
            self._give_way(self._rng.choice(self._expendable(waiting, self._limits.waiting)))
        if ticket.stage is not Stage.WAITING or self._open[address] >= self._most:
            return None
        self._open[address] += 1
        ticket.counted = True
        return wait

    def begin(self, ticket: Ticket) -> bool:
        """Its handshake begins, unless it gave way meanwhile."""
        if ticket.stage is not Stage.WAITING:
            return False
        self._to(ticket, Stage.PENDING)
        pending = self._tickets[Stage.PENDING]
        alike = [other for other in pending if other.address == ticket.address and other is not ticket]
        if len(alike) >= self._limits.pending_each:
            self._give_way(self._rng.choice(alike))
        elif len(pending) > self._limits.pending:
            others = (other for other in pending if other is not ticket)
            self._give_way(self._rng.choice(self._expendable(others, self._limits.pending)))
        return True

    def admit(self, ticket: Ticket, now: float) -> None:
        """The handshake is over, and it is a member's."""
        self._to(ticket, Stage.MEMBER)
        self._known.pop(ticket.address, None)
        self._known[ticket.address] = now
        while len(self._known) > self._remembered:
            del self._known[next(iter(self._known))]

    def leave(self, ticket: Ticket) -> None:
        """The connection is closed; a second time changes nothing."""
        self._to(ticket, Stage.GONE)
        if ticket.counted:
            ticket.counted = False
            self._open[ticket.address] -= 1
            if self._open[ticket.address] <= 0:
                del self._open[ticket.address]

    def _to(self, ticket: Ticket, stage: Stage) -> None:
        if ticket.stage in self._tickets:
            self._tickets[ticket.stage].pop(ticket, None)
        if ticket.stage is not Stage.GONE:
            ticket.stage = stage
            if stage in self._tickets:
                self._tickets[stage][ticket] = None

    def _give_way(self, ticket: Ticket) -> None:
        self._to(ticket, Stage.GONE)
        self._drop(ticket)

    def _expendable(self, tickets: Iterable[Ticket], room: int) -> list[Ticket]:
        """Return the tickets from addresses from which no member came lately.

        If the others take more than half of the room, return the others instead.
        """
        known: list[Ticket] = []
        unknown: list[Ticket] = []
        for ticket in tickets:
            (known if ticket.address in self._known else unknown).append(ticket)
        return unknown if unknown and 2 * len(known) <= room else known or unknown

    def _busiest(self, among: list[Ticket]) -> Ticket:
        """The oldest of the address with the most connections."""
        counts = Counter(ticket.address for ticket in among)
        most = max(counts.values())
        return next(ticket for ticket in among if counts[ticket.address] == most)


def reserve_descriptors(members: int, limits: Limits | None = None) -> int:
    """Let this process open as many files as all these limits together may take.

    Returns how many it may open.

    >>> reserve_descriptors(members=4) > 0
    True
    """
    limits = limits or Limits()
    # Connections from and to members, unidentified connections, then files, pages and the interpreter.
    needed = 2 * limits.connections * members + limits.mute + limits.waiting + limits.pending + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "this process may open %d files, but %d members may take %d: raise its limit",
            hard,
            members,
            needed,
        )
    return max(allowed, soft)


def origin(address: str) -> str:
    """Whom an address stands for: itself, or the network of 2⁶⁴ that one IPv6 customer is given.

    >>> origin("10.1.2.3"), origin("2001:db8:1:2:3:4:5:6"), origin("::ffff:10.1.2.3")
    ('10.1.2.3', '2001:db8:1:2::', '10.1.2.3')
    """
    parsed = ip_address(address.partition("%")[0])
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> 64 << 64))
