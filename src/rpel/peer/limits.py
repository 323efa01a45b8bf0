"""Who may knock, and how often: limits that are decided before any TLS, by arithmetic alone.

Invariants: refusing costs next to nothing; an address that connects too often waits for its turn, and its queue is
short; whoever stalls a handshake gives way to whoever comes next, so that stalled handshakes never keep a member out; a
member or an address that asks too much slows down itself and nobody else.
"""

from collections import Counter
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address


@dataclass(frozen=True)
class Limits:
    """What one member or one address may take. Times are seconds.

    ``handshake``: for TLS · ``waiting``: connections that wait for their turn · ``pending``, ``pending_each``:
    handshakes under way, of all and of one address (as many of it may wait) · ``connections``: of one member (the
    oldest gives way) · ``patience``: a request waits so long for its round · ``write``: a body has left by then, or its
    reader is dropped · ``idle``: an unused connection is closed · ``rate``, ``burst``: requests a second of one member,
    and how many at once · ``hold``: delay of what exceeds that
    """

    handshake: float = 5.0
    waiting: int = 256
    pending: int = 64
    pending_each: int = 32
    connections: int = 4
    patience: float = 20.0
    write: float = 60.0
    idle: float = 90.0
    rate: float = 50.0
    burst: float = 100.0
    hold: float = 1.0


class Bucket:
    """``burst`` tokens, refilled at ``rate`` a second; each thing done takes one, if need be in advance.

    >>> bucket = Bucket(rate=2.0, burst=1.0, now=0.0)
    >>> bucket.turn(0.0), bucket.turn(0.0), bucket.turn(0.0, queue=1), bucket.turn(1.0)
    (0.0, None, 0.5, 0.0)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self._left, self._at = rate, burst, burst, now

    def turn(self, now: float, queue: int = 0) -> float | None:
        """Seconds until one more thing may be done, which is then counted; None: more than ``queue`` wait already."""
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


@dataclass(eq=False)
class Ticket:
    """One connection from an address, and how many seconds it waits before its handshake."""

    address: str
    wait: float


class Gate:
    """Counts connections and handshakes by address. Every ticket given out is handed back by :meth:`leave`.

    One address may be that of many members (one office, one test machine), so its limits grow with their number.

    >>> gate = Gate(members=2, limits=Limits(pending_each=1))
    >>> first, second = (gate.arrive("10.0.0.1", now=0.0) for _ in range(2))
    >>> gate.begin(first), gate.begin(second) is first
    (None, True)
    """

    def __init__(self, members: int, limits: Limits) -> None:
        self._limits = limits
        self._pending: dict[Ticket, None] = {}  # oldest first
        self._waiting: set[Ticket] = set()
        self._open: Counter[str] = Counter()
        self.resize(members)

    def resize(self, members: int) -> None:
        """There are so many members from now on."""
        self._most = self._limits.connections * members + 2 * self._limits.pending_each
        self._pace = Pace(rate=10 + members / 2, burst=20 + 2 * members, queue=self._limits.pending_each)

    def arrive(self, address: str, now: float) -> Ticket | None:
        """A connection was accepted: its ticket, which says how long it waits; None: close it at once."""
        address = origin(address)
        if self._open[address] >= self._most or len(self._waiting) >= self._limits.waiting:
            return None
        wait = self._pace.turn(address, now)
        if wait is None:
            return None
        ticket = Ticket(address, wait)
        self._waiting.add(ticket)
        self._open[address] += 1
        return ticket

    def begin(self, ticket: Ticket) -> Ticket | None:
        """Its handshake begins: the ticket whose handshake gives way to it, if there are too many."""
        self._waiting.discard(ticket)
        alike = [other for other in self._pending if other.address == ticket.address]
        gives_way = None
        if len(alike) >= self._limits.pending_each:
            gives_way = alike[0]
        elif len(self._pending) >= self._limits.pending:
            gives_way = next(iter(self._pending))
        if gives_way is not None:
            self.settle(gives_way)
        self._pending[ticket] = None
        return gives_way

    def settle(self, ticket: Ticket) -> None:
        """The handshake is over, one way or the other."""
        self._waiting.discard(ticket)
        self._pending.pop(ticket, None)

    def leave(self, ticket: Ticket) -> None:
        """The connection is closed."""
        self.settle(ticket)
        self._open[ticket.address] -= 1
        if self._open[ticket.address] <= 0:
            del self._open[ticket.address]


def origin(address: str) -> str:
    """Whom an address stands for: itself, or the network of 2⁶⁴ that one IPv6 customer is given.

    >>> origin("10.1.2.3"), origin("2001:db8:1:2:3:4:5:6"), origin("::ffff:10.1.2.3")
    ('10.1.2.3', '2001:db8:1:2::', '10.1.2.3')
    """
    found = ip_address(address.partition("%")[0])
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(IPv6Address(int(found) >> 64 << 64))
