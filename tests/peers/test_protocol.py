"""What a peer survives, under the virtual clock: n = 12, b = 2, s = 8, b_hat = 2."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from rpel.peer.core import protocol
from rpel.types import Models
from support.virtual_faults import Fault
from support.virtual_network import (
    BEHAVIOURS,
    DEADLINE,
    PERIOD,
    Behaviour,
    Peer,
    VirtualNetwork,
    equivocating,
    forging,
    not_finite,
    silent,
)


def hostile(net: VirtualNetwork, behaviour: Behaviour) -> VirtualNetwork:
    net.hostile = dict.fromkeys(net.hostile, behaviour)
    return net


def outcomes(net: VirtualNetwork) -> set[str]:
    return {outcome for peer in net.peers for outcome in net.outcomes(peer.number)}


# --- 1: crashes ---------------------------------------------------------------------------------------------

POINTS: dict[str, Callable[[VirtualNetwork], None]] = {
    "before the local step": lambda w: setattr(w.peers[0], "crash_at", ("Step", 3)),
    "in the local step": lambda w: w.at(2 * PERIOD + 0.5, lambda: w.peers[0].crash(5.0)),
    "before the half-step is on disk": lambda w: setattr(w.peers[0], "crash_at", ("Persist", 3)),
    "on disk and not published": lambda w: setattr(w.peers[0], "crash_at", ("Publish", 3)),
    "published and nothing pulled": lambda w: setattr(w.peers[0], "crash_at", ("Pull", 3)),
    "between two answers": lambda w: w.at(2 * PERIOD + 1.3, lambda: w.peers[0].crash(1.5)),
    "aggregated and not saved": lambda w: setattr(w.peers[0], "crash_at", ("Save", 3)),
    "saved and not reported": lambda w: setattr(w.peers[0], "crash_at", ("Tell", 3)),
}


@pytest.mark.integration  # for its seconds of computing
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 50), marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("point", POINTS)
def test_killed_peer_never_serves_two_versions_of_a_round(point: str, seeds: range) -> None:
    for seed in seeds:
        net = hostile(VirtualNetwork(seed, rounds=9), forging)
        POINTS[point](net)
        net.run()
        peer = net.peers[0]
        assert net.broken == []
        assert peer.incarnation == 2
        assert peer.reports[-1].round == 9
        assert peer.reports[-1].outcome == "aggregated"


def test_restart_reuses_the_persisted_draw_and_half_step() -> None:
    net = VirtualNetwork(3, rounds=5)
    net.at(2 * PERIOD + 1.4, lambda: net.peers[0].crash(1.0))
    net.run(until=2 * PERIOD + 1.39)
    record = net.peers[0].disk.records[3][0]
    net.run()
    assert net.peers[0].disk.records[3][0].asked == record.asked
    assert [r.round for r in net.peers[0].reports] == [1, 2, 3, 4, 5]
    assert net.outcomes(0)[2] == "aggregated"
    assert net.peers[0].effects.count("Step") == 5
    assert net.broken == []


def test_network_resumes_after_all_peers_were_off() -> None:
    net = VirtualNetwork(0, rounds=20)
    for peer in net.peers:
        net.at(3 * PERIOD + 2, partial(peer.crash, 4 * PERIOD))
    net.run()
    assert net.broken == []
    assert {net.outcomes(p.number)[-1] for p in net.peers} == {"aggregated"}


# --- 2: stops and partitions --------------------------------------------------------------------------------


@cache
def calm_spreads(rounds: int) -> Models:
    """The spreads without a fault, for all tests that compare with them."""
    return spreads(lambda net: None, rounds)


def spreads(fault: Callable[[VirtualNetwork], None], rounds: int) -> Models:
    """The spread at the end for each of 12 seeds, the mean of the last five rounds."""
    found = []
    for seed in range(12):
        total: list[float] = []
        net = VirtualNetwork(seed, rounds=rounds)
        fault(net)
        for t in range(rounds - 5, rounds):
            net.at(t * PERIOD + 9.9, partial(lambda net, total: total.append(net.spread()), net, total))
        net.run()
        assert net.broken == []
        assert all(report.seconds <= PERIOD for peer in net.peers[1:] for report in peer.reports)
        found.append(np.mean(total))
    return np.array(found)


INTERRUPTIONS: dict[str, tuple[Callable[[VirtualNetwork], None], int]] = {
    "SIGSTOP for 3 rounds": (
        lambda w: w.at(5 * PERIOD + 3, lambda: setattr(w.peers[0], "paused_until", 8 * PERIOD + 3)),
        8,
    ),
    "6/6 for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: (a < 6) != (c < 6)), 15),
    "one isolated for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: 0 in (a, c)), 15),
    "a one-way link for 10 rounds": (lambda w: w.cut(5 * PERIOD, 15 * PERIOD, lambda a, c: c == 0), 15),
}


@pytest.mark.full
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_spread_recovers_within_20_rounds_of_an_interruption(name: str) -> None:
    fault, last = INTERRUPTIONS[name]
    interrupted, calm = spreads(fault, last + 20), calm_spreads(last + 20)
    chance = float(np.sqrt((interrupted.var(ddof=1) + calm.var(ddof=1)) / len(calm)))  # one standard error
    assert interrupted.mean() <= 1.1 * calm.mean() + chance


def test_who_restarts_or_wakes_while_rounds_pause_plays_the_first_round_after() -> None:
    """By the times of before the pause it seems to be round 6."""
    net = VirtualNetwork(1, rounds=5)
    net.repace(3, PERIOD, pause=7 * PERIOD)
    net.at(5 * PERIOD, lambda: net.peers[0].crash(PERIOD / 2))
    net.at(1.5 * PERIOD, lambda: setattr(net.peers[1], "paused_until", 5.5 * PERIOD))
    assert net.run().broken == []
    assert [[report.round for report in peer.reports] for peer in net.peers[:3]] == [[1, 2, 3, 4, 5]] * 3


def test_isolated_peer_freezes_and_catches_up() -> None:
    net = VirtualNetwork(1, rounds=30)
    net.cut(5 * PERIOD, 20 * PERIOD, lambda a, c: 0 in (a, c))
    net.run()
    reports = net.peers[0].reports
    assert [r.round for r in reports] == list(range(1, 31))
    assert [r.outcome for r in reports[5:20]] == ["local_only"] * 15
    assert [r.frozen for r in reports[5:20]] == [False] * 4 + [True] * 11
    # none while frozen, nor in the round that catches up
    assert net.peers[0].effects.count("Step") == 30 - 10 - 1
    assert reports[20].outcome == "caught_up"
    assert {r.outcome for r in reports[21:]} == {"aggregated"}


def test_peer_that_missed_rounds_catches_up_and_serves_nothing_meanwhile() -> None:
    net = VirtualNetwork(1, rounds=14)
    net.at(4 * PERIOD + 8, lambda: net.peers[0].crash(4.3 * PERIOD))
    net.run(until=11 * PERIOD)
    assert net.peers[0].disk.records[11][0].half is None
    net.run()
    back = [r for r in net.peers[0].reports if r.round > 5]
    assert back[0].round == 11
    assert back[0].outcome == "caught_up"
    assert {r.outcome for r in back[1:]} == {"aggregated"}
    assert net.peers[0].steps[-3:] == [(12, True), (13, False), (14, False)], "it forgets its momentum once"


# --- 3: silence, slowness, racing ---------------------------------------------------------------------------


def slow_honest(net: VirtualNetwork) -> None:
    net.latency = lambda a, c: net.coins.uniform(0.5, 2.2)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("honest", [lambda net: None, slow_honest], ids=["quick", "slow"])
def test_every_round_aggregates_in_time_whatever_b_peers_do(
    behaviour: Behaviour, honest: Callable[[VirtualNetwork], None]
) -> None:
    net = hostile(VirtualNetwork(2, rounds=20), behaviour)
    honest(net)
    net.run()
    assert net.broken == []
    assert outcomes(net) == {"aggregated"}
    assert all(len(peer.reports) == 20 for peer in net.peers)
    assert all(report.seconds <= DEADLINE + 0.5 for peer in net.peers for report in peer.reports)


def test_late_honest_answers_give_fast_hostile_peers_no_advantage() -> None:
    net = hostile(VirtualNetwork(5, rounds=20), forging)
    # about half of the honest answers miss the deadline
    net.latency = lambda a, c: net.coins.uniform(1.0, 3.2)
    net.run()
    assert net.broken == []
    received = [r.received for peer in net.peers for r in peer.reports if r.outcome == "aggregated"]
    assert min(received) < 8
    assert np.abs(np.stack([peer.x for peer in net.peers]) - 1.0).max() < 1.0


def test_non_finite_own_model_is_replaced_and_never_served() -> None:
    net = hostile(VirtualNetwork(4, rounds=8), not_finite)
    net.at(3 * PERIOD, lambda: setattr(net.peers[0], "momentum", np.full((3, 3), np.nan)))
    net.run()
    assert net.broken == []
    assert net.outcomes(0)[3] == "caught_up"
    assert net.peers[0].effects.count("Publish") == 1 + 8
    assert np.isfinite(net.peers[0].x).all()
    assert set(net.outcomes(0)[4:]) == {"aggregated"}


# --- 7: disks and clocks ------------------------------------------------------------------------------------


def test_full_disk_publishes_nothing_and_loses_nothing() -> None:
    net = VirtualNetwork(6, rounds=10)
    disk = net.peers[0].disk
    net.at(3 * PERIOD, lambda: setattr(disk, "full", True))
    net.at(5 * PERIOD, lambda: setattr(disk, "full", False))
    net.run(until=5 * PERIOD - 1)
    assert sorted(disk.checkpoints) == [2, 3]
    assert net.peers[0].policy.published == [1, 2, 3]
    assert [r.saved for r in net.peers[0].reports] == [True] * 3 + [False] * 2
    net.run()
    assert net.broken == []
    assert net.outcomes(0)[5:] == ["aggregated"] * 5


@pytest.mark.parametrize("hours", [-1, 1])
def test_setting_the_wall_clock_repeats_no_round_and_skips_none(hours: int) -> None:
    net = VirtualNetwork(7, rounds=12)
    for peer in net.peers[:4]:
        net.at(4 * PERIOD + 2, partial(setattr, peer, "wall_error", 3600.0 * hours))
    net.run()
    assert net.broken == []
    assert all([r.round for r in peer.reports] == list(range(1, 13)) for peer in net.peers)


@pytest.mark.parametrize("hours", [-1, 1])
def test_peer_whose_clock_is_rounds_away_refuses_to_start(hours: int) -> None:
    net = VirtualNetwork(8, rounds=6)
    net.peers[0].wall_error = 3600.0 * hours
    net.run()
    assert net.peers[0].refused is not None
    assert "360.0 rounds" in net.peers[0].refused
    assert net.peers[0].reports == []
    assert {net.outcomes(p.number)[-1] for p in net.peers[1:]} == {"aggregated"}


def test_drifting_clocks_follow_the_median_and_stay_in_the_same_round() -> None:
    net = VirtualNetwork(9, rounds=60)
    net.peers[0].drift = 0.004  # far worse than any crystal: 2.4 s over the run if nobody minded
    net.run()
    offsets = [abs(report.offset) for report in net.peers[0].reports]
    assert max(offsets) < 0.04 * PERIOD
    assert outcomes(net) == {"aggregated"}


def test_member_slower_than_the_period_never_aggregates_and_harms_nobody() -> None:
    net = VirtualNetwork(3, rounds=13)
    net.peers[0].compute = 1.3 * PERIOD
    net.run()
    assert net.broken == []
    assert "aggregated" not in net.outcomes(0)
    assert any(forgotten for _, forgotten in net.peers[0].steps), "it catches up"
    assert all(set(net.outcomes(peer.number)) == {"aggregated"} for peer in net.peers[1:])


# --- 8: everything at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_is_really_injected(fault: Fault) -> None:
    """A net with it runs differently from the same net without it."""
    hit, calm = VirtualNetwork(11, rounds=8), VirtualNetwork(11, rounds=8)
    fault.strike(hit, hit.peers[0], 2.2 * PERIOD)
    if fault is Fault.WALL_CLOCK:  # which nobody reads but a peer that starts
        for net in (hit, calm):
            net.at(3.5 * PERIOD, partial(net.peers[0].crash, 1.0))
    hit.run()
    calm.run()
    assert (hit.trace, [peer.roster for peer in hit.peers]) != (
        calm.trace,
        [peer.roster for peer in calm.peers],
    )
    assert hit.broken == []


def test_invariants_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with an emptied disk that serves the running round again is noticed."""
    monkeypatch.setattr(protocol, "_sat_out", lambda clock: float("-inf"))
    net = VirtualNetwork(12, rounds=6)
    for late in net.peers[5:]:
        late.compute = 4.0

    def wipe() -> None:
        net.peers[0].crash(0.5)
        net.emptied(net.peers[0])
        net.peers[0].target = net.peers[0].target + 1.0

    net.at(2.0, wipe)
    net.run()
    assert any("two versions" in invariant for invariant in net.broken)


@pytest.mark.parametrize("round", [1, 2, 3])
def test_peer_with_an_emptied_disk_serves_no_round_twice_and_comes_back(round: int) -> None:
    for seed in range(10):
        net = VirtualNetwork(seed, rounds=round + 8)
        peer = net.peers[0]

        def wipe(net: VirtualNetwork = net, peer: Peer = peer) -> None:
            peer.crash(0.5)
            net.emptied(peer)
            peer.target = peer.target + 1.0

        net.at((round - 1) * PERIOD + 2.0, wipe)
        net.run()
        assert net.broken == []
        assert round not in peer.policy.published
        assert set(net.outcomes(0)[-4:]) == {"aggregated"}


# --- 9: it always comes back --------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "b", "s", "b_hat"), [(7, 2, 6, 2), (4, 1, 3, 1)])
@pytest.mark.parametrize("empty", [False, True], ids=["restarted", "emptied"])
def test_2_b_hat_answers_suffice_to_catch_up(n: int, b: int, s: int, b_hat: int, empty: bool) -> None:
    """All hostile members silent and one honest one away for a while: exactly 2 b_hat others remain."""
    net = VirtualNetwork(1, n, b, s, b_hat, rounds=20)

    def away() -> None:
        net.peers[0].crash(3 * PERIOD)
        if empty:
            net.emptied(net.peers[0])

    net.at(2 * PERIOD + 5, away)
    net.run()
    assert net.broken == []
    assert net.outcomes(0)[1:].count("caught_up") >= 1
    for peer in net.peers:
        assert set(net.outcomes(peer.number)[-5:]) == {"aggregated"}


def test_liars_who_repeat_the_old_model_hold_a_peer_back_only_while_2_b_hat_answer() -> None:
    net = VirtualNetwork(5, 7, 2, 6, 2, rounds=30)
    victim = net.peers[0]
    for peer in net.peers:
        peer.target = np.full(3, 0.0 if peer is victim else 4.0)
    old = victim.x.copy()
    net.hostile = dict.fromkeys(net.hostile, lambda net, me, t: (0.01, old.copy()))
    net.cut(0, 12 * PERIOD, lambda a, c: 0 in (a, c))  # it stands still at its first steps
    # two honest and two liars answer
    net.cut(12 * PERIOD, 20 * PERIOD, lambda a, c: {a, c} in ({0, 1}, {0, 2}))
    net.at(11 * PERIOD + 9, lambda: old.__setitem__(slice(None), victim.x))
    net.run(until=20 * PERIOD - 1)
    others = np.mean([peer.x for peer in net.peers[1:]], axis=0)
    assert float(np.abs(victim.x - others).max()) > 0.5
    assert np.all((victim.x >= np.minimum(old, others) - 0.5) & (victim.x <= np.maximum(old, others) + 0.5))
    net.run(until=21 * PERIOD - 1)  # all four honest ones answer
    assert victim.reports[-1].outcome == "caught_up"
    assert victim.reports[-1].received > 4
    honest = np.array([peer.disk.records[21][0].half for peer in net.peers[1:]], dtype=float)
    assert np.all((victim.x >= honest.min(axis=0) - 1e-9) & (victim.x <= honest.max(axis=0) + 1e-9))


def test_peer_forced_to_catch_up_repeatedly_stays_with_the_others() -> None:
    """Its network is cut for six rounds, lets one pass, and so on; liars are among the answers."""
    net = hostile(VirtualNetwork(4, rounds=43), forging)
    for begin in range(2, 43, 7):
        net.cut(begin * PERIOD, (begin + 6) * PERIOD, lambda a, c: 0 in (a, c))
    net.run()
    assert net.broken == []
    back = [report for report in net.peers[0].reports if report.outcome == "caught_up"]
    assert [report.round for report in back] == list(range(9, 43, 7))
    others = np.stack([peer.x for peer in net.peers[1:]])
    assert np.abs(net.peers[0].x - others.mean(axis=0)).max() < 1.0
    assert all(set(net.outcomes(peer.number)) == {"aggregated"} for peer in net.peers[1:])


def test_peer_with_non_finite_steps_catches_up_and_harms_nobody() -> None:
    net = hostile(VirtualNetwork(4, rounds=12), forging)
    sick = net.peers[0]
    sick.target = np.full(3, np.nan)
    net.run()
    assert net.broken == []
    assert net.outcomes(0) == ["caught_up"] * 12
    assert sick.policy.published == []
    others = np.stack([peer.x for peer in net.peers[1:]])
    assert np.abs(sick.x - others.mean(axis=0)).max() < 1.0
    assert all(net.outcomes(peer.number) == ["aggregated"] * 12 for peer in net.peers[1:])


# --- 10: accountability -------------------------------------------------------------------------------------


def test_equivocating_member_is_excluded_and_its_answers_ignored() -> None:
    net = hostile(VirtualNetwork(3, rounds=12), equivocating)
    net.run()
    assert net.broken == []
    assert outcomes(net) == {"aggregated"}
    for peer in net.peers:
        assert {proof.member for proof in peer.proofs} == set(net.hostile)
        late = [peer.reports[-1].results.get(member) for member in net.hostile]
        assert set(late) <= {"refused", None}
        assert peer.reports[-1].trim == 2  # as before: an exclusion never lowers it


def test_member_that_signs_one_model_a_round_is_never_excluded() -> None:
    def consistent(net: VirtualNetwork, me: int, t: int) -> tuple[float, np.ndarray]:
        return 0.01, np.full(3, -5.0 - t)

    net = hostile(VirtualNetwork(3, rounds=8), consistent)
    net.run()
    assert net.broken == []
    assert all(peer.proofs == [] for peer in net.peers)


@pytest.mark.integration
@pytest.mark.parametrize(
    "fault", [Fault.EMPTIED, Fault.SET_BACK, Fault.CRASH_EVERYBODY, Fault.DAMAGED_RECORD]
)
@pytest.mark.parametrize("seeds", [12, pytest.param(40, marks=pytest.mark.full)])
def test_no_fault_excludes_an_honest_peer(fault: Fault, seeds: int) -> None:
    stops = 0
    for seed in range(seeds):
        net = VirtualNetwork(seed, rounds=14)
        fault.strike(net, net.peers[0], (seed % 4) * PERIOD + net.coins.uniform(0.5, 9.5))
        net.run()
        stops += net.peers[0].stops
        assert net.broken == []
        assert net.outcomes(0)[-1] == "aggregated"
    # shown its own signature, it starts anew
    assert (stops > 0) == (fault in (Fault.EMPTIED, Fault.SET_BACK))


LIAR = 11


def one_leaves_and_two_have_new_keys(net: VirtualNetwork, t: int) -> None:
    net.leaving[0] = t
    net.rotations += [(t, 1), (t, 2)]


CHANGES: dict[str, Callable[[VirtualNetwork, int], None]] = {
    "an honest member has a new key": lambda net, t: net.rotations.append((t, 0)),
    "an honest member leaves": lambda net, t: net.leaving.update({3: t}),
    "the other hostile member leaves": lambda net, t: net.leaving.update({10: t}),
    "one leaves and two have new keys": one_leaves_and_two_have_new_keys,
}


def lying_once(round: int) -> Behaviour:
    """It equivocates in one round and says the same to all in the others."""

    def told(net: VirtualNetwork, me: int, t: int) -> tuple[float, np.ndarray]:
        return equivocating(net, me, t) if t == round and me == LIAR else (0.01, np.full(3, t / 10))

    return told


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("later", [0, 1, 2])
def test_equivocation_is_proven_across_a_membership_change(change: str, later: int) -> None:
    """The change takes effect in the round of the lie, or when it is told of, or after."""
    for seed in range(5):
        net = hostile(VirtualNetwork(seed, rounds=10), lying_once(4))
        CHANGES[change](net, 4 + later)
        net.run()
        assert net.broken == []
        for peer in net.peers:
            if not peer.retired:
                assert {proof.fingerprint for proof in peer.proofs} == {str(LIAR)}
                assert peer.witness.excluded(peer.members) == {str(LIAR)}
                assert net.outcomes(peer.number)[-1] == "aggregated"


def test_new_key_clears_an_exclusion_and_the_old_proof_remains() -> None:
    net = hostile(VirtualNetwork(1, rounds=12), lying_once(3))
    net.rotations.append((8, LIAR))
    net.run(until=7 * PERIOD - 1)
    assert all(peer.witness.excluded(peer.members) == {str(LIAR)} for peer in net.peers)
    net.run()
    assert net.broken == []
    assert all(peer.witness.excluded(peer.members) == set() for peer in net.peers)
    assert {str(LIAR)} == {proof.fingerprint for peer in net.peers for proof in peer.proofs}
    last = [
        r.results[LIAR] for peer in net.peers for r in peer.reports if r.round == 12 and LIAR in r.results
    ]
    assert set(last) == {"ok"}


@pytest.mark.parametrize(
    "fault",
    [Fault.EMPTIED, *(pytest.param(f, marks=pytest.mark.full) for f in (Fault.SET_BACK, Fault.CRASH))],
)
def test_key_rotated_in_the_round_of_a_crash_excludes_nobody(fault: Fault) -> None:
    for seed in range(20):
        net = VirtualNetwork(seed, rounds=12)
        struck = 2 + seed % 3
        net.rotations.append((struck + seed % 2, 0))
        fault.strike(net, net.peers[0], (struck - 1) * PERIOD + net.coins.uniform(0.5, 9.5))
        net.run()
        assert net.broken == []
        assert all(peer.proofs == [] for peer in net.peers)
        assert net.outcomes(0)[-1] == "aggregated"


def doubled(seed: int, begin: float) -> VirtualNetwork:
    """A second peer with the key of peer 0 begins then, at its address:
    others get its model or the first one's."""
    net = VirtualNetwork(seed, rounds=10)
    net.at(begin, lambda: net.double(net.peers[0]))
    net.run()
    assert net.broken == []
    for peer in net.peers[1:]:
        assert set(net.outcomes(peer.number)) == {"aggregated"}
    return net


def test_second_peer_with_the_same_key_stops_before_serving() -> None:
    for seed in range(10):
        net = doubled(seed, 2.5 * PERIOD)
        assert net.twins[0].stops > 0
        assert all(record.half is None for record, _ in net.twins[0].disk.records.values())
        assert net.peers[0].stops == 0
        assert all(peer.proofs == [] for peer in net.peers)


def test_two_live_peers_with_one_key_both_stop() -> None:
    for seed in range(10):
        net = doubled(seed, -1.0)
        assert net.peers[0].stops > 0
        assert net.twins[0].stops > 0
        assert {proof.fingerprint for peer in net.peers[1:] for proof in peer.proofs} == {"0"}


@pytest.mark.parametrize(("missed", "steps"), [(0, True), (1, False), (2, False)])
def test_peer_steps_on_after_one_missed_round_and_catches_up_after_more(missed: int, steps: bool) -> None:
    net = VirtualNetwork(1, rounds=12)
    net.at(4 * PERIOD + 9, lambda: net.peers[0].crash((missed + 0.5) * PERIOD))  # round 5 has ended
    net.run()
    first = next(r for r in net.peers[0].reports if r.round > 5)
    assert first.outcome == ("aggregated" if steps else "caught_up")
    assert (first.round in dict(net.peers[0].steps)) == steps


def test_fewer_than_2b_clocks_do_not_begin_a_peer() -> None:
    net = VirtualNetwork(2, rounds=6)
    for peer in net.peers[3:]:
        peer.retired = True
    # two honest others and one hostile: 3 of 4 clocks
    net.cut(-10, 1000, lambda a, c: max(a, c) >= net.n - net.b + 1)
    net.run()
    assert all(peer.reports == [] for peer in net.peers)
    assert set(net.peers[0].effects[2:]) == {"AskClocks", "Sleep", "Enter"}


def test_peer_with_an_outdated_membership_waits_for_its_file_and_takes_part() -> None:
    """By the period that it knows the last round is over, and the others go on."""
    net = VirtualNetwork(4, rounds=12)
    net.repace(3, 4 * PERIOD, pause=0.0)
    net.rotations.append((3, 1))
    late = net.peers[0]
    late.retired, late.newest_file = True, 2

    def start() -> None:
        late.retired = False
        late.boot()

    net.at(net.times.start(4), start)
    net.at(net.times.start(8), lambda: setattr(late, "newest_file", 12))
    net.run()
    assert late.reports[0].round == 9  # it sits out round 8
    assert net.outcomes(0)[-1] == "aggregated"
    assert net.broken == []


def test_peer_leaves_after_the_last_round_although_b_liars_hold_another_membership() -> None:
    net = VirtualNetwork(4, rounds=2)
    late = net.peers[0]
    late.clock_offsets = lambda: [None] * net.b  # type: ignore[method-assign]
    late.retired = True

    def start() -> None:
        late.retired = False
        late.boot()

    net.at(net.times.end(2) + 1, start)
    net.run(until=net.times.end(2) + 3 * PERIOD)
    assert late.left
    assert late.reports == []


def test_more_clocks_than_2b_are_waited_for_when_they_are_there() -> None:
    """With exactly 2b clocks, b of them lies, an own clock that is wrong would decide;
    the others come soon after."""
    net = VirtualNetwork(3, rounds=6)
    net.hostile = dict.fromkeys(net.hostile, silent)
    wrong = net.peers[0]
    wrong.wall_error = 0.9 * PERIOD
    for peer in net.peers[3:]:
        net.at(-0.5, peer.boot)
    wrong_clock = wrong.clock_offsets
    calls: list[int] = []

    def offsets() -> list[float | None]:
        calls.append(len(calls))
        heard = wrong_clock()
        first: list[float | None] = [0.9 * PERIOD, 0.9 * PERIOD, -0.9 * PERIOD, -0.9 * PERIOD]
        return first if len(calls) == 1 else heard

    wrong.clock_offsets = offsets  # type: ignore[method-assign]
    net.run(until=PERIOD)
    assert len(calls) == 2
    assert abs(wrong.clock.position() - net.now) < 0.1


def test_hostile_answers_are_really_heard() -> None:
    assert (
        hostile(VirtualNetwork(1, rounds=5), forging).run().trace
        != hostile(VirtualNetwork(1, rounds=5), silent).run().trace
    )


def test_old_disk_and_a_clock_behind_among_four_with_a_liar_frame_nobody() -> None:
    """The disk of a peer is put back while it restarts, and its wall clock is most of a round behind."""
    for seed in range(60):
        net = hostile(VirtualNetwork(seed, 4, 1, 3, 1, rounds=16), forging)
        Fault.CLOCK_BEHIND.strike(net, net.peers[seed % 3], 5 * PERIOD + 1.2 + seed % 12 / 10)
        net.at(9 * PERIOD, net.heal)
        net.run()
        assert net.broken == [], seed
        assert net.stuck(9, 7) == [], seed
