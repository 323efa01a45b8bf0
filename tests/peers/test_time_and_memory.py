"""Slow members are late and not lost (max_age), and remembered answers count (memory): under the virtual
clock, on disk and over TLS."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest

from rpel.config.membership import Founding, Membership
from rpel.peer.core import protocol
from rpel.peer.core.protocol import Checkpoint, Remembered, Sampler, Terms, make_ready
from rpel.peer.core.serve_policy import GONE, Decision, ServePolicy
from rpel.peer.core.wire import Malformed, Reception
from rpel.peer.io.node import Node
from rpel.peer.io.store import Store
from rpel.rules import rule
from rpel.types import Models, Outcome, PullResult
from support.loopback import SMALL, loopback, model
from support.thread_network import QuadraticLearner, Running, ended, found
from support.virtual_network import PERIOD, VirtualNetwork


def slow(periods: float, max_age: int, memory: int = 1, rounds: int = 13) -> VirtualNetwork:
    """A network whose peer 0 needs so many periods for its local steps."""
    net = VirtualNetwork(3, rounds=rounds)
    net.max_age, net.memory, net.pull = max_age, memory, net.pull // memory
    net.peers[0].compute = periods * PERIOD
    net.run()
    assert net.broken == []
    return net


@pytest.mark.parametrize("memory", [1, 2])
def test_member_slower_than_a_period_takes_part_in_every_second_round(memory: int) -> None:
    net = slow(1.3, max_age=1, memory=memory)
    late = net.peers[0]
    assert [report.round for report in late.reports] == list(range(3, 14, 2))
    assert set(net.outcomes(0)) == {"aggregated"}
    assert [round for round, forgotten in late.steps if forgotten] == []
    for peer in net.peers[1:]:
        assert set(net.outcomes(peer.number)) == {"aggregated"}
    asked = [(r.round, r.results[0]) for peer in net.peers[1:] for r in peer.reports if 0 in r.results]
    assert {result for round, result in asked if round > 3} == {PullResult.OK}
    assert any(round % 2 == 0 for round, _ in asked if round > 3), "it was asked in rounds that it skipped"


def test_slow_member_without_max_age_never_aggregates() -> None:
    net = slow(1.3, max_age=0)
    assert "aggregated" not in net.outcomes(0)
    assert any(forgotten for _, forgotten in net.peers[0].steps)


def test_rounds_skipped_beyond_max_age_are_missed() -> None:
    net = slow(3.5, max_age=1)
    assert set(net.outcomes(0)) == {"caught_up"}


def test_step_too_late_for_its_round_opens_the_next() -> None:
    net = slow(0.35, max_age=1)  # of a deadline of .6: ready before it, and after its half
    # it began the next steps at once
    assert [report.round for report in net.peers[0].reports][:3] == [2, 3, 4]


class Slow(QuadraticLearner):
    """Its local steps take so many seconds."""

    seconds = 0.0

    def half(self, out: Models, scratch: Models) -> None:
        time.sleep(self.seconds)
        super().half(out, scratch)


@pytest.mark.full
@pytest.mark.integration
def test_real_peer_slower_than_the_period_aggregates_and_is_pulled(tmp_path: Path) -> None:
    make_ready(rule("nnm+trimmed_mean", f=0), 6, 6, np.float64)  # before round 1 has a time
    files = found(tmp_path, 4, rounds=9, period=1.5, soon=3.0, linger=5.0, max_age=1, memory=1, wire="int8")
    learners = [Slow(i) for i in range(4)]
    learners[0].seconds = 1.2 * files.membership.period
    running = [
        Running(Node(config), learner) for config, learner in zip(files.configs, learners, strict=True)
    ]
    with ended(running):
        for peer in running:
            peer.start()
        for peer in running:
            peer.join()
    outcomes = [peer.node.summary()["outcomes"] for peer in running]
    assert 3 <= outcomes[0]["aggregated"] < 9
    assert outcomes[0]["local_only"] == 0
    assert all(one["aggregated"] >= 8 for one in outcomes[1:])
    lines = [json.loads(line) for line in Path(files.configs[1].log).read_text().splitlines()]
    heard = [line["results"]["peer-0"] for line in lines if "peer-0" in line["results"] and line["round"] > 3]
    assert heard.count("ok") >= len(heard) - 1
    assert learners[0].steps == learners[0].restored + len(running[0].rounds)


# --- memory -------------------------------------------------------------------------------------------------


def remembering(seed: int = 3, rounds: int = 8) -> VirtualNetwork:
    net = VirtualNetwork(seed, rounds=rounds)
    net.memory, net.pull = 2, 4
    return net


def test_first_round_asks_for_a_whole_window_later_rounds_for_s() -> None:
    net = remembering().run()
    assert net.broken == []
    for peer in net.peers:
        assert [report.asked for report in peer.reports] == [8] + [4] * 7
        assert all(report.received + report.remembered >= 4 for report in peer.reports)
        assert peer.reports[0].remembered == 0 < peer.reports[1].remembered


@pytest.mark.parametrize(
    ("point", "down", "asked"),
    [("Pull", 1.0, [8, 4, 4, 4, 4]), ("Step", 0.1, [8, 4, 4, 4, 4]), ("Pull", 8.0, [8, 4, 4, 8, 4])],
)
def test_restart_uses_what_was_drawn_and_refills_only_for_a_round_never_drawn(
    point: str, down: float, asked: list[int]
) -> None:
    """In round 4: within it the same draw and window; before it was drawn the window; after it, nobody knows
    what they who were asked would have said: c·s at once."""
    net = remembering()
    peer = net.peers[0]
    net.coins.uniform = lambda a, b: down if b == 2.5 * PERIOD else a + (b - a) / 2  # type: ignore[method-assign]
    peer.crash_at = (point, 4)
    net.run()
    assert net.broken == []
    assert peer.crash_at is None
    later = [report for report in peer.reports if report.round <= 6]
    assert [report.asked for report in later][: len(asked)] == asked
    again = next((report for report in later if report.round == 4), None)
    if (point, down) == ("Pull", 1.0):
        assert again is not None
        assert again.outcome is Outcome.AGGREGATED
        assert again.remembered > 0


def test_draws_that_overlap_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(t: int, window: tuple[Remembered, ...], terms: Terms, sampler: Sampler) -> tuple[int, ...]:
        return sampler(t, terms.me, terms.nodes, terms.pull if window else terms.window)

    monkeypatch.setattr(protocol, "_drawn", careless)
    assert any("overlap" in broken for broken in remembering().run().broken)


def test_window_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    rows = np.arange(3 * SMALL.d, dtype=np.float32).reshape(3, -1)
    window = (Remembered(4, (2, 5), rows, "hash"), Remembered(3, (1, 0), rows[:1], "hash"))
    with Store(tmp_path / "state", SMALL) as store:
        assert store.save(
            Checkpoint(4, model(SMALL, 1), v=model(SMALL, 2), window=window), {"mean": np.ones(3)}
        )
        kept = store.memory().checkpoint
    assert kept is not None
    assert kept.v is not None
    assert kept.v.tobytes() == model(SMALL, 2).tobytes()
    assert [(one.round, one.asked, one.membership) for one in kept.window] == [
        (4, (2, 5), "hash"),
        (3, (1, 0), "hash"),
    ]
    assert [one.rows.tobytes() for one in kept.window] == [rows.tobytes(), rows[:1].tobytes()]


def test_founding_plans_for_the_window(tmp_path: Path) -> None:
    one, two = (
        Founding(run="ward", nodes=30, byzantine=3, rounds=200, epoch=1.8e9, memory=c) for c in (1, 2)
    )
    assert (one.plan.pull, two.plan.pull) == (12, 8)
    m = two.membership("0" * 64, "0" * 64)
    assert (m.memory, m.window, m.enough) == (2, 16, 2 * m.b_hat)
    m.replace(pull=15).save(tmp_path / "members.toml")
    with pytest.raises(ValueError, match=r"pull 15.* 14"):
        Membership.load(tmp_path / "members.toml", draft=True)


# --- answers that are older ---------------------------------------------------------------------------------


def test_older_round_is_given_where_the_one_asked_for_is_late_or_was_passed_over() -> None:
    policy = ServePolicy()
    for round in (3, 4):
        policy.publish(round)
    assert policy.look(5, max_age=1).kind == "wait"
    assert policy.look(5, max_age=1, late=True) == Decision("serve", 200, 4)
    assert policy.look(6, max_age=1, late=True).kind == "wait"
    policy.publish(7)
    assert policy.look(5, max_age=1) == Decision("serve", 200, 4)
    assert policy.look(6, max_age=1) == Decision("refuse", GONE)
    assert policy.look(5) == Decision("refuse", GONE)


@pytest.mark.parametrize(("said", "right"), [(7, True), (6, True), (5, True), (4, False), (8, False)])
def test_answer_within_max_age_is_accepted_and_names_its_round(said: int, right: bool) -> None:
    reply = Reception(SMALL, np.zeros(SMALL.d, np.float32), round=7, max_age=2)
    headers = {
        "Content-Length": str(SMALL.size),
        "Content-Type": "application/octet-stream",
        "RPEL-Round": str(said),
    }
    if right:
        reply.head(200, headers)
        assert reply.round == said
    else:
        with pytest.raises(Malformed, match="rpel-round"):
            reply.head(200, headers)


@pytest.mark.integration
def test_late_member_sends_the_newest_half_step_over_tls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with loopback(tmp_path) as net:
            older = net.membership.replace(max_age=1)
            for ends, own in zip(net.transports, net.credentials, strict=True):
                ends.rotate(older, own.certificate, own.key)
            net.stores[1].put(4, model(SMALL, 4))
            net.stores[1].late_in = 0.05
            row = np.zeros(SMALL.d, SMALL.dtype)
            member = net.transports[0].client.member(net.transports[0].now, 1)
            answer = await member.fetch(5, row, asyncio.get_running_loop().time() + 60, max_age=1)
            assert (answer.result, answer.round) == (PullResult.OK, 4)
            assert row.tobytes() == model(SMALL, 4).tobytes()
            answer = await member.fetch(5, row, asyncio.get_running_loop().time() + 60, max_age=0)
            # who holds another opinion of max_age holds another file
            assert answer.result is PullResult.MALFORMED

    asyncio.run(scenario())
