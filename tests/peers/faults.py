"""Faults as an enumeration, and worlds with a few of them drawn from a seed."""

from collections.abc import Callable
from enum import Enum

from harness import BEHAVIOURS, PERIOD, Peer, World, wavering

CRASH_POINTS = ("Recall", "AskClocks", "Enter", "Step", "Persist", "Publish", "Pull", "Save", "Tell")


def crash(world: World, peer: Peer, begin: float) -> None:
    down = world.coins.uniform(0.1, 2.5 * PERIOD)
    world.at(begin, lambda: peer.crash(down))


def crash_at_a_want(world: World, peer: Peer, begin: float) -> None:
    peer.crash_at = (world.coins.choice(CRASH_POINTS), int(begin / PERIOD) + 1)


def crash_everybody(world: World, peer: Peer, begin: float) -> None:
    for one in world.peers:
        crash(world, one, begin)


def pause(world: World, peer: Peer, begin: float) -> None:
    until = begin + world.coins.uniform(0.1, 3) * PERIOD
    world.at(begin, lambda: setattr(peer, "paused_until", until))


def partition(world: World, peer: Peer, begin: float) -> None:
    side = set(world.coins.sample(range(world.n), world.n // 2))
    world.cut(begin, begin + world.coins.uniform(0.5, 3) * PERIOD, lambda a, c: (a in side) != (c in side))


def isolation(world: World, peer: Peer, begin: float) -> None:
    me = peer.number
    world.cut(begin, begin + world.coins.uniform(0.5, 3) * PERIOD, lambda a, c: me in (a, c))


def one_way(world: World, peer: Peer, begin: float) -> None:
    me = peer.number
    world.cut(begin, begin + world.coins.uniform(0.5, 3) * PERIOD, lambda a, c: c == me)


def slow_links(world: World, peer: Peer, begin: float) -> None:
    me, usual = peer.number, world.latency
    world.latency = lambda a, c: usual(a, c) + (world.coins.uniform(0, 4) if me in (a, c) else 0.0)


def slow_machine(world: World, peer: Peer, begin: float) -> None:
    peer.compute = world.coins.uniform(1.0, 1.5 * PERIOD)


def disk_full(world: World, peer: Peer, begin: float) -> None:
    world.at(begin, lambda: setattr(peer.disk, "full", True))
    world.at(begin + world.coins.uniform(0.5, 3) * PERIOD, lambda: setattr(peer.disk, "full", False))


def damaged_checkpoint(world: World, peer: Peer, begin: float) -> None:
    def hit() -> None:
        if peer.up:
            peer.crash(world.coins.uniform(0.1, PERIOD))
            world.damage(peer)

    world.at(begin, hit)


def damaged_record(world: World, peer: Peer, begin: float) -> None:
    def hit() -> None:
        if peer.up and peer.disk.records:
            peer.crash(world.coins.uniform(0.1, PERIOD))
            peer.disk.damaged.add(max(peer.disk.records))

    world.at(begin, hit)


def wall_clock(world: World, peer: Peer, begin: float) -> None:
    world.at(begin, lambda: setattr(peer, "wall_error", world.coins.choice([-3600.0, 3600.0])))


def drift(world: World, peer: Peer, begin: float) -> None:
    peer.drift = world.coins.uniform(-2e-3, 2e-3)


class Fault(Enum):
    """What can go wrong; the value does it to a peer from a position on."""

    CRASH = (crash,)
    CRASH_AT_A_WANT = (crash_at_a_want,)
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
    WALL_CLOCK = (wall_clock,)
    DRIFT = (drift,)

    def strike(self, world: World, peer: Peer, begin: float) -> None:
        act: Callable[[World, Peer, float], None] = self.value[0]
        act(world, peer, begin)


def scheduled(seed: int, rounds: int = 5) -> World:
    """A world of twelve with one to five faults and two hostile peers, all drawn from the seed; not run yet."""
    world = World(seed, rounds=rounds)
    coins = world.coins
    for number in world.hostile:
        world.hostile[number] = coins.choice([*BEHAVIOURS, wavering])
    for _ in range(coins.randint(1, 5)):
        fault = coins.choice(list(Fault))
        fault.strike(world, coins.choice(world.peers), coins.uniform(0, (rounds - 1) * PERIOD))
    return world
