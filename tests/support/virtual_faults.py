"""Faults as an enumeration, and networks with a few of them drawn from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from rpel.learning import NesterovOuter
from support.virtual_network import BEHAVIOURS, PERIOD, Peer, VirtualNetwork, wavering

CRASH_POINTS = ("Recall", "AskClocks", "Enter", "Step", "Persist", "Publish", "Pull", "Save", "Tell")


def crash(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    down = net.coins.uniform(0.1, 2.5 * PERIOD)
    net.at(begin, lambda: peer.crash(down))


def crash_at_an_effect(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    peer.crash_at = (net.coins.choice(CRASH_POINTS), net.times.round(begin))


def crash_everybody(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """A power cut: all are back at about the same time."""
    down = net.coins.uniform(0.1, 4) * PERIOD
    for one in net.peers:
        net.at(begin, partial(one.crash, down + net.coins.uniform(0, 0.5) * PERIOD))


def pause(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    until = begin + net.coins.uniform(0.1, 3) * PERIOD
    net.at(begin, lambda: setattr(peer, "paused_until", max(peer.paused_until, until)))  # pauses overlap


def partition(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    side = set(net.coins.sample(range(net.n), net.n // 2))
    net.cut(begin, begin + net.coins.uniform(0.5, 3) * PERIOD, lambda a, c: (a in side) != (c in side))


def isolation(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    me = peer.number
    net.cut(begin, begin + net.coins.uniform(0.5, 3) * PERIOD, lambda a, c: me in (a, c))


def one_way(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    me = peer.number
    net.cut(begin, begin + net.coins.uniform(0.5, 3) * PERIOD, lambda a, c: c == me)


def slow_links(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    me, usual = peer.number, net.latency
    net.latency = lambda a, c: usual(a, c) + (net.coins.uniform(0, 4) if me in (a, c) else 0.0)


def slow_machine(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    peer.compute = net.coins.uniform(1.0, 1.5 * PERIOD)


def disk_full(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    net.at(begin, lambda: setattr(peer.disk, "full", True))
    net.at(begin + net.coins.uniform(0.5, 3) * PERIOD, lambda: setattr(peer.disk, "full", False))


def damaged_checkpoint(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    def hit() -> None:
        if peer.up:
            peer.crash(net.coins.uniform(0.1, PERIOD))
            net.damage(peer)

    net.at(begin, hit)


def damaged_record(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    def hit() -> None:
        if peer.up and peer.disk.records:
            peer.crash(net.coins.uniform(0.1, PERIOD))
            peer.disk.damaged.add(max(peer.disk.records))

    net.at(begin, hit)


def emptied(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """The state folder is deleted while the peer restarts."""

    def hit() -> None:
        if peer.up:
            peer.crash(net.coins.uniform(0.1, 1.5 * PERIOD))
            net.emptied(peer)

    net.at(begin, hit)


def set_back(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """A copy of the state folder, made a round or two before, is put back while the peer restarts."""

    def hit() -> None:
        if peer.up:
            peer.crash(net.coins.uniform(0.1, PERIOD))
            net.set_back(peer)

    net.at(begin - net.coins.uniform(0.2, 2) * PERIOD, peer.disk.snapshot)
    net.at(begin, hit)


def rotated(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """It, or a hostile member, has a new key from the next round on."""
    net.rotations.append((net.times.round(begin) + 1, net.coins.choice([peer.number, *net.hostile])))


def left(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """A member, honest or not, leaves with the next round, if the others are enough;
    they have other numbers then."""
    if net.n - len(net.leaving) - 1 > net.pull:
        net.leaving[net.coins.choice([peer.number, *net.hostile])] = net.times.round(begin) + 1


def doubled(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """A second peer runs with its key, perhaps from the start:
    the one case in which an honest key may be excluded."""
    net.at(net.coins.choice([begin, -1.0]), lambda: net.double(peer))


def wall_clock(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    net.at(begin, lambda: setattr(peer, "wall_error", net.coins.choice([-3600.0, 3600.0])))


def clock_behind(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    """Its next start finds the wall clock up to a round behind, and perhaps an old disk."""

    def hit() -> None:
        if peer.up:
            peer.wall_error = -net.coins.uniform(0.5, 0.95) * PERIOD
            peer.crash(net.coins.uniform(0.01, 0.5) * PERIOD)
            net.set_back(peer)

    net.at(begin - net.coins.uniform(0.2, 1) * PERIOD, peer.disk.snapshot)
    net.at(begin, hit)


def drift(net: VirtualNetwork, peer: Peer, begin: float) -> None:
    peer.drift = net.coins.uniform(-2e-3, 2e-3)


class Fault(Enum):
    """What can go wrong; the value does it to a peer from a position on."""

    CRASH = (crash,)
    CRASH_AT_AN_EFFECT = (crash_at_an_effect,)
    CRASH_EVERYBODY = (crash_everybody,)
    PAUSE = (pause,)
    PARTITION = (partition,)
    ISOLATION = (isolation,)
    ONE_WAY = (one_way,)
    SLOW_LINKS = (slow_links,)
    SLOW_MACHINE = (slow_machine,)
    DISK_FULL = (disk_full,)
    DAMAGED_CHECKPOINT = (damaged_checkpoint,)
    DAMAGED_RECORD = (damaged_record,)
    EMPTIED = (emptied,)
    SET_BACK = (set_back,)
    ROTATED = (rotated,)
    LEFT = (left,)
    DOUBLED = (doubled,)
    WALL_CLOCK = (wall_clock,)
    CLOCK_BEHIND = (clock_behind,)
    DRIFT = (drift,)

    def strike(self, net: VirtualNetwork, peer: Peer, begin: float) -> None:
        act: Callable[[VirtualNetwork, Peer, float], None] = self.value[0]
        act(net, peer, begin)


def repaced(net: VirtualNetwork, seed: int) -> None:
    """In every fourth network a membership changes the period, pauses, or both,
    while other things go wrong."""
    coins = random.Random(-seed)
    if seed % 4 == 1:
        net.repace(
            coins.randint(2, 4), coins.choice([0.5, 1, 2.5]) * PERIOD, coins.choice([0, 0.3, 7]) * PERIOD
        )


@dataclass(frozen=True)
class Strike:
    """One fault of a schedule: what strikes whom from when on."""

    fault: Fault
    peer: int
    begin: float


def schedule(seed: int, end: float, peers: int, most: int) -> list[Strike]:
    """One to so many faults; some classes of faults are off in each schedule, so that the others come
    together."""
    coins = random.Random(f"schedule {seed}")
    on = [fault for fault in Fault if coins.random() < 0.5] or list(Fault)
    count = coins.randint(1, most)
    return [Strike(coins.choice(on), coins.randrange(peers), coins.uniform(0, end)) for _ in range(count)]


def struck(net: VirtualNetwork, seed: int, strikes: list[Strike]) -> VirtualNetwork:
    """A network with these faults, an outer step in every third and hostile peers drawn from the seed."""
    repaced(net, seed)
    net.outer = NesterovOuter() if seed % 3 == 0 else None  # then the local steps are Adam's
    net.linger = net.coins.choice([0.0, 2.0])
    for number in net.hostile:
        net.hostile[number] = net.coins.choice([*BEHAVIOURS, wavering])
    for strike in strikes:
        strike.fault.strike(net, net.peers[strike.peer], strike.begin)
    return net


def scheduled(seed: int, rounds: int = 5, strikes: list[Strike] | None = None) -> VirtualNetwork:
    """A net of twelve with one to five faults and two hostile peers, all drawn from the seed; not run yet."""
    net = VirtualNetwork(seed, rounds=rounds)
    drawn = schedule(seed, rounds * PERIOD, len(net.peers), 5) if strikes is None else strikes
    return struck(net, seed, drawn)


def shrunk(strikes: list[Strike], fails: Callable[[list[Strike]], bool]) -> list[Strike]:
    """The faults without which it does not fail: each that can be left out is."""
    for strike in strikes:
        if fails(fewer := [other for other in strikes if other is not strike]):
            return shrunk(fewer, fails)
    return strikes


PLANS = (
    (4, 1, 3, 1, 0),
    (5, 1, 4, 1, 1),
    (7, 2, 6, 2, 0),
    (8, 2, 7, 2, 1),
    (10, 3, 9, 3, 0),
    (12, 2, 8, 2, 2),
)
"""(n, b, s, b_hat, F): networks whose rounds go on with all hostile members silent and F honest ones down."""


def healed(seed: int, faulty: int = 4, after: int = 10) -> tuple[VirtualNetwork, list[str]]:
    """A network of any size with faults in its first rounds, run to ``after`` rounds past their end;
    who is stuck."""
    coins = random.Random(seed)
    n, b, s, b_hat, late = coins.choice(PLANS)
    end = faulty + 2  # what strikes in the last faulty round is over by then
    net = VirtualNetwork(seed, n, b, s, b_hat, rounds=end + after)
    struck(net, seed, schedule(seed, faulty * PERIOD, len(net.peers), 4))
    net.at(net.times.start(end + 1), lambda: net.heal(down=late))
    net.run()
    return net, net.stuck(end, after)
