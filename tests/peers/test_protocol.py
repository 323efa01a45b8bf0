"""What a peer survives, under the virtual clock: n = 12, b = 2, s = 8, b_hat = 2. Numbers are those of the issue."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest
from faults import Fault, scheduled
from harness import BEHAVIOURS, DEADLINE, PERIOD, Behaviour, World, forging, not_finite, silent

SEEDS = 10_000


def hostile(world: World, behaviour: Behaviour) -> World:
    world.hostile = dict.fromkeys(world.hostile, behaviour)
    return world


def outcomes(world: World) -> set[str]:
    return {outcome for peer in world.peers for outcome in world.outcomes(peer.number)}


# --- 1: crashes ------------------------------------------------------------------------------------------------------

POINTS: dict[str, Callable[[World], None]] = {
    "before the local step": lambda w: setattr(w.peers[0], "crash_at", ("Step", 3)),
    "in the local step": lambda w: w.at(2 * PERIOD + 0.5, lambda: w.peers[0].crash(5.0)),
    "before the half-step is on disk": lambda w: setattr(w.peers[0], "crash_at", ("Persist", 3)),
    "on disk and not published": lambda w: setattr(w.peers[0], "crash_at", ("Publish", 3)),
    "published and nothing pulled": lambda w: setattr(w.peers[0], "crash_at", ("Pull", 3)),
    "between two answers": lambda w: w.at(2 * PERIOD + 1.3, lambda: w.peers[0].crash(1.5)),
    "aggregated and not saved": lambda w: setattr(w.peers[0], "crash_at", ("Save", 3)),
    "saved and not reported": lambda w: setattr(w.peers[0], "crash_at", ("Tell", 3)),
}


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_any_point_never_makes_two_versions_of_a_round_and_the_peer_comes_back(point: str) -> None:
    for seed in range(50):
        world = hostile(World(seed, rounds=9), forging)
        POINTS[point](world)
        world.run()
        peer = world.peers[0]
        assert world.broken == []
        assert peer.incarnation == 2
        assert peer.reports[-1].round == 9
        assert peer.reports[-1].outcome == "aggregated"


def test_a_restart_in_the_same_round_asks_the_same_peers_and_uses_the_persisted_half_step() -> None:
    world = World(3, rounds=5)
    world.at(2 * PERIOD + 1.4, lambda: world.peers[0].crash(1.0))
    world.run(until=2 * PERIOD + 1.39)
    record = world.peers[0].disk.records[3][0]
    world.run()
    assert world.peers[0].disk.records[3][0].asked == record.asked
    assert [r.round for r in world.peers[0].reports] == [1, 2, 3, 4, 5]
    assert world.outcomes(0)[2] == "aggregated"
    assert world.peers[0].wanted.count("Step") == 5
    assert world.broken == []


def test_all_peers_off_for_a_while_go_on_by_themselves() -> None:
    world = World(0, rounds=20)
    for peer in world.peers:
        world.at(3 * PERIOD + 2, partial(peer.crash, 4 * PERIOD))
    world.run()
    assert world.broken == []
    assert {world.outcomes(p.number)[-1] for p in world.peers} == {"aggregated"}


# --- 2: stops and partitions -----------------------------------------------------------------------------------------


def spread_after(break_it: Callable[[World], None], rounds: int) -> tuple[float, float]:
    """The spread at the end with a fault and without one, each the mean over 12 seeds and the last five rounds."""
    return mean_spread(break_it, rounds), mean_spread(lambda world: None, rounds)


def mean_spread(fault: Callable[[World], None], rounds: int) -> float:
    total: list[float] = []
    for seed in range(12):
        world = World(seed, rounds=rounds)
        fault(world)
        for t in range(rounds - 5, rounds):
            world.at(t * PERIOD + 9.9, partial(lambda world: total.append(world.spread()), world))
        world.run()
        assert world.broken == []
        assert all(report.seconds <= PERIOD for peer in world.peers[1:] for report in peer.reports)
    return float(np.mean(total))


INTERRUPTIONS: dict[str, tuple[Callable[[World], None], int]] = {
    "SIGSTOP for 3 rounds": (
        lambda w: w.at(5 * PERIOD + 3, lambda: setattr(w.peers[0], "paused_until", 8 * PERIOD + 3)),
        8,
    ),
    "6/6 for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: (a < 6) != (c < 6)), 15),
    "one isolated for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: 0 in (a, c)), 15),
    "a one-way link for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: c == 0), 15),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_20_rounds_after_an_interruption_the_spread_is_within_a_tenth_of_what_it_would_be(name: str) -> None:
    fault, last = INTERRUPTIONS[name]
    after, baseline = spread_after(fault, last + 20)
    assert after <= 1.1 * baseline


def test_a_peer_cut_off_stops_stepping_says_so_and_catches_up() -> None:
    world = World(1, rounds=30)
    world.cut(5 * PERIOD, 20 * PERIOD, lambda a, c: 0 in (a, c))
    world.run()
    reports = world.peers[0].reports
    assert [r.round for r in reports] == list(range(1, 31))
    assert [r.outcome for r in reports[5:20]] == ["local_only"] * 15
    assert [r.frozen for r in reports[5:20]] == [False] * 4 + [True] * 11
    assert world.peers[0].wanted.count("Step") == 30 - 10 - 1  # none while frozen, nor in the round that catches up
    assert reports[20].outcome == "caught_up"
    assert {r.outcome for r in reports[21:]} == {"aggregated"}


def test_after_missing_several_rounds_a_peer_takes_the_others_model_and_serves_nothing_meanwhile() -> None:
    world = World(1, rounds=12)
    world.at(4 * PERIOD + 8, lambda: world.peers[0].crash(4.3 * PERIOD))
    world.run()
    back = [r for r in world.peers[0].reports if r.round > 5]
    assert back[0].round == 10
    assert back[0].outcome == "caught_up"
    assert world.peers[0].disk.records[10][0].half is None
    assert {r.outcome for r in back[1:]} == {"aggregated"}


# --- 3: silence, slowness, racing ------------------------------------------------------------------------------------


def slow_honest(world: World) -> None:
    world.latency = lambda a, c: world.coins.uniform(0.5, 2.2)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("honest", [lambda world: None, slow_honest], ids=["quick", "slow"])
def test_every_round_aggregates_in_time_whatever_b_peers_do(
    behaviour: Behaviour, honest: Callable[[World], None]
) -> None:
    world = hostile(World(2, rounds=20), behaviour)
    honest(world)
    world.run()
    assert world.broken == []
    assert outcomes(world) == {"aggregated"}
    assert all(len(peer.reports) == 20 for peer in world.peers)
    assert all(report.seconds <= DEADLINE + 0.5 for peer in world.peers for report in peer.reports)


def test_the_fast_hostile_do_not_gain_when_honest_answers_come_late() -> None:
    world = hostile(World(5, rounds=20), forging)
    world.latency = lambda a, c: world.coins.uniform(1.0, 3.2)  # about half of the honest answers miss the deadline
    world.run()
    assert world.broken == []
    received = [r.received for peer in world.peers for r in peer.reports if r.outcome == "aggregated"]
    assert min(received) < 8
    assert np.abs(np.stack([peer.x for peer in world.peers]) - 1.0).max() < 1.0


def test_an_own_model_that_is_not_finite_is_healed_and_never_served() -> None:
    world = hostile(World(4, rounds=8), not_finite)
    world.at(3 * PERIOD, lambda: setattr(world.peers[0], "momentum", np.full(3, np.nan)))
    world.run()
    assert world.broken == []
    assert world.outcomes(0)[3] == "caught_up"
    assert world.peers[0].wanted.count("Publish") == 1 + 8
    assert np.isfinite(world.peers[0].x).all()
    assert set(world.outcomes(0)[4:]) == {"aggregated"}


# --- 7: disks and clocks ---------------------------------------------------------------------------------------------


def test_a_full_disk_publishes_nothing_and_loses_nothing() -> None:
    world = World(6, rounds=10)
    disk = world.peers[0].disk
    world.at(3 * PERIOD, lambda: setattr(disk, "full", True))
    world.at(5 * PERIOD, lambda: setattr(disk, "full", False))
    world.run(until=5 * PERIOD - 1)
    assert sorted(disk.checkpoints) == [2, 3]
    assert world.peers[0].desk.published == [1, 2, 3]
    assert [r.saved for r in world.peers[0].reports] == [True] * 3 + [False] * 2
    world.run()
    assert world.broken == []
    assert world.outcomes(0)[5:] == ["aggregated"] * 5


@pytest.mark.parametrize("hours", [-1, 1])
def test_setting_the_wall_clock_repeats_no_round_and_skips_none(hours: int) -> None:
    world = World(7, rounds=12)
    for peer in world.peers[:4]:
        world.at(4 * PERIOD + 2, partial(setattr, peer, "wall_error", 3600.0 * hours))
    world.run()
    assert world.broken == []
    assert all([r.round for r in peer.reports] == list(range(1, 13)) for peer in world.peers)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_peer_whose_clock_is_rounds_away_refuses_to_start(hours: int) -> None:
    world = World(8, rounds=6)
    world.peers[0].wall_error = 3600.0 * hours
    world.run()
    assert world.peers[0].refused is not None
    assert "360.0 rounds" in world.peers[0].refused
    assert world.peers[0].reports == []
    assert {world.outcomes(p.number)[-1] for p in world.peers[1:]} == {"aggregated"}


def test_drifting_clocks_follow_the_median_and_stay_in_the_same_round() -> None:
    world = World(9, rounds=60)
    world.peers[0].drift = 0.004  # far worse than any crystal: 2.4 s over the run if nobody minded
    world.run()
    offsets = [abs(report.offset) for report in world.peers[0].reports]
    assert max(offsets) < 0.04 * PERIOD
    assert outcomes(world) == {"aggregated"}


# --- 8: everything at once -------------------------------------------------------------------------------------------


def broken(seed: int) -> list[str]:
    return [f"seed {seed}: {law}" for law in scheduled(seed).run().broken]


def fingerprint(seed: int) -> str:
    return hashlib.sha256(repr(scheduled(seed).run().trace).encode()).hexdigest()


@pytest.mark.slow
def test_no_invariant_breaks_in_10_000_fault_schedules() -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        found = [law for laws in pool.map(broken, range(SEEDS), chunksize=100) for law in laws]
    assert found == []


def test_any_seed_replays_identically() -> None:
    assert [fingerprint(seed) for seed in range(20)] == [fingerprint(seed) for seed in range(20)]
    assert len({fingerprint(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_is_really_injected(fault: Fault) -> None:
    """A world with it runs differently from the same world without it."""
    hit, calm = World(11, rounds=8), World(11, rounds=8)
    fault.strike(hit, hit.peers[0], 2.2 * PERIOD)
    if fault is Fault.WALL_CLOCK:  # which nobody reads but a peer that starts
        for world in (hit, calm):
            world.at(3.5 * PERIOD, partial(world.peers[0].crash, 1.0))
    assert hit.run().trace != calm.run().trace
    assert hit.broken == []


def test_the_invariants_can_fail() -> None:
    """A peer that forgets its disk computes its round again, and the world notices."""
    world = World(12, rounds=6)
    for late in world.peers[5:]:
        late.compute = 4.0

    def wipe() -> None:
        world.peers[0].crash(0.5)
        world.peers[0].disk.records.clear()
        world.peers[0].target = world.peers[0].target + 1.0

    world.at(2 * PERIOD + 2.0, wipe)
    world.run()
    assert any("two versions" in law for law in world.broken)


def test_hostile_answers_are_really_heard() -> None:
    assert hostile(World(1, rounds=5), forging).run().trace != hostile(World(1, rounds=5), silent).run().trace
