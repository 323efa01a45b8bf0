"""Thousands of networks under the virtual clock, each with faults drawn from its seed:
no invariant ever breaks."""

import hashlib
from functools import partial
from typing import Any

import pytest

from support.virtual_faults import Fault, Strike, healed, schedule, scheduled, shrunk
from support.virtual_network import PERIOD, STATES, VirtualNetwork


def blocks(first: int) -> list[Any]:
    """A hundred blocks of seeds, the first of them for ``make test``, all for ``make test-all``."""
    return [
        pytest.param(i, marks=pytest.mark.integration if i < first else pytest.mark.full) for i in range(100)
    ]


def broken(seed: int) -> list[str]:
    """What broke, and the fewest faults with which something does."""
    if not (found := scheduled(seed).run().broken):
        return []
    few = shrunk(
        schedule(seed, 5 * PERIOD, 10, 5), lambda fewer: bool(scheduled(seed, strikes=fewer).run().broken)
    )
    return [f"seed {seed}: {found}; with {few} alone: {scheduled(seed, strikes=few).run().broken}"]


@pytest.mark.parametrize(("state", "seed"), STATES.items())
def test_schedules_reach_every_interesting_state(state: str, seed: int) -> None:
    """The first seed that comes to it; another one has to be looked for when the faults change."""
    assert state in scheduled(seed, rounds=9 if seed % 2 else 5).run().reached


def test_failing_schedule_is_shrunk_to_the_faults_that_matter() -> None:
    strikes = [Strike(fault, 0, 0.0) for fault in Fault]
    wanted = {Fault.PAUSE, Fault.DRIFT}
    few = shrunk(strikes, lambda fewer: wanted <= {strike.fault for strike in fewer})
    assert {strike.fault for strike in few} == wanted
    assert len(few) == 2


@pytest.mark.parametrize("block", blocks(10))
def test_no_invariant_breaks_in_a_hundred_fault_schedules(block: int) -> None:
    """1,000 schedules by default, 10,000 in ``make test-all``."""
    assert [invariant for seed in range(100 * block, 100 * block + 100) for invariant in broken(seed)] == []


def fingerprint(seed: int) -> str:
    return hashlib.sha256(repr(scheduled(seed).run().trace).encode()).hexdigest()


def test_fault_schedule_replays_identically() -> None:
    first, second = ([fingerprint(seed) for seed in range(8)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 8


def stuck(seed: int) -> list[str]:
    net, found = healed(seed)
    return [f"seed {seed}, {net.n} peers: {what}" for what in (*found, *net.broken)]


@pytest.mark.parametrize("block", blocks(1))
def test_once_faults_end_every_honest_peer_aggregates_within_10_rounds(block: int) -> None:
    """With F honest peers down and the hostile silent, n from 4; beside it no other invariant breaks.

    25 networks by default, 2,500 in ``make test-all``.
    """
    assert [line for seed in range(25 * block, 25 * block + 25) for line in stuck(seed)] == []


def of_four() -> VirtualNetwork:
    """Four peers with a liar among them, for 14 rounds; all faults end with the fifth."""
    net = VirtualNetwork(0, n=4, b=1, s=3, b_hat=1, rounds=14)
    net.at(5 * PERIOD, net.heal)
    return net


def test_wrong_clock_and_one_liar_do_not_end_a_peer_early() -> None:
    """A clock far ahead and one liar outvote the one honest member that answers: no start."""
    net = of_four()
    wrong, down = net.peers[:2]
    wall_clock_ahead = partial(setattr, wrong, "wall_error", 3600.0)
    for act in (wall_clock_ahead, partial(wrong.crash, 1.0), partial(down.crash, 2 * PERIOD)):
        net.at(1.5 * PERIOD, act)
    net.run()
    assert "round 14, the last, is over, and 1 of 2 members" in (wrong.refused or "")
    assert net.stuck(5, 9) + net.broken == []


def test_peer_with_a_clock_past_the_end_takes_part_once_it_is_right() -> None:
    """Nobody answers it, so it believes its clock and ends; with the right time it is started again."""
    net = of_four()
    wrong, ended = net.peers[0], list[bool]()
    net.cut(1.5 * PERIOD, 5 * PERIOD, lambda a, c: wrong.number in (a, c))
    for act in (partial(setattr, wrong, "wall_error", 3600.0), partial(wrong.crash, 1.0)):
        net.at(1.5 * PERIOD, act)
    net.at(4.9 * PERIOD, lambda: ended.append(wrong.left))
    net.run()
    assert ended == [True]
    assert net.stuck(5, 9) + net.broken == []


@pytest.mark.parametrize("period", [PERIOD, PERIOD / 2])
def test_network_that_crashes_while_rounds_pause_plays_on_after_the_pause(period: float) -> None:
    net = VirtualNetwork(0, rounds=12)
    net.repace(3, period, pause=7 * PERIOD)
    for peer in net.peers:
        net.at(5 * PERIOD, partial(peer.crash, net.coins.uniform(0, 1.5) * PERIOD))
    net.run()
    assert {peer.incarnation for peer in net.peers} == {2}
    assert net.stuck(2) + net.broken == []
