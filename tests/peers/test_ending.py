"""The end of a run: peers serve their last round a while longer; a late member ends like the others."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rpel.peer.core.protocol import Save, make_ready
from rpel.peer.node.node import Node
from rpel.rules import rule
from rpel.types import Models
from support.thread_network import QuadraticLearner, Running, ended, found
from support.virtual_network import PERIOD, VirtualNetwork
from support.waiting import until

ROUNDS = 6


def late(net: VirtualNetwork, back: float) -> VirtualNetwork:
    """Peer 0 stops in round 3 and is started again so many periods after the last round has ended."""
    net.at(2.5 * PERIOD, net.peers[0].stop)
    net.at((ROUNDS + back) * PERIOD, net.peers[0].boot)
    return net


def friendly(linger: float) -> VirtualNetwork:
    net = VirtualNetwork(3, n=8, b=0, s=5, b_hat=0, rounds=ROUNDS)
    net.linger = linger
    return net


def test_member_that_missed_the_last_round_ends_like_the_others_while_they_linger() -> None:
    for seed in range(5):
        net = VirtualNetwork(seed, rounds=ROUNDS)
        net.linger = 4.0
        late(net, back=1.5).run(until=(ROUNDS + 6) * PERIOD)
        assert net.broken == []
        assert (net.peers[0].reports[-1].round, net.outcomes(0)[-1]) == (ROUNDS, "caught_up")
        others = np.stack([peer.x for peer in net.peers[1:]])
        assert np.abs(net.peers[0].x - others.mean(axis=0)).max() < 0.2
        assert all(peer.left for peer in net.peers)


def test_peers_serve_the_last_round_for_linger_periods_and_leave() -> None:
    net = friendly(linger=2.0).run(until=(ROUNDS + 1.9) * PERIOD)
    assert not any(peer.left for peer in net.peers)
    net.run(until=(ROUNDS + 2.1) * PERIOD)
    assert all(peer.left for peer in net.peers)


def test_late_member_gives_up_after_all_have_left() -> None:
    net = VirtualNetwork(1, rounds=ROUNDS)
    late(net, back=2.0).run(until=(ROUNDS + 5) * PERIOD)
    assert net.broken == []
    assert net.peers[0].left
    assert net.peers[0].reports[-1].round < ROUNDS


@pytest.mark.parametrize(("effect", "after"), [("Persist", 1), ("Pull", 1), ("Save", 2)])
def test_crash_while_catching_up_at_the_end_repeats_the_same_draw(effect: str, after: int) -> None:
    for seed in (0, 2, 3, 4, 5):  # with seed 1 the answers come so early that it saves a round before
        net = VirtualNetwork(seed, rounds=ROUNDS)
        net.linger = 6.0
        late(net, back=0.5)
        net.peers[0].crash_at = (effect, ROUNDS + after)
        net.run(until=(ROUNDS + 8) * PERIOD)
        assert net.peers[0].crash_at is None
        assert net.broken == []
        assert (net.peers[0].reports[-1].round, net.outcomes(0)[-1]) == (ROUNDS, "caught_up")


def test_models_given_out_by_the_protocol_are_never_overwritten() -> None:
    net = friendly(linger=0.0)
    handed: list[tuple[Models, bytes]] = []
    for peer in net.peers:
        usual = peer.on_save

        def noted(effect: Save, usual: Callable[[Save], None] = usual) -> None:
            handed.append((effect.checkpoint.x, effect.checkpoint.x.tobytes()))
            usual(effect)

        peer.on_save = noted  # type: ignore[method-assign]
    net.run()
    assert len(handed) == ROUNDS * len(net.peers)
    assert all(x.tobytes() == before for x, before in handed)


@pytest.mark.integration
def test_real_peer_started_after_the_last_round_ends_with_the_others_model(tmp_path: Path) -> None:
    make_ready(rule("nnm+trimmed_mean", f=0), 2, 6, np.float64)  # before round 1 has a time
    files = found(tmp_path, 3, rounds=2, period=1.0, soon=2.0, linger=1000.0)
    running = [Running(Node(config), QuadraticLearner(i)) for i, config in enumerate(files.configs)]
    with ended(running[:2]):
        for peer in running[:2]:
            peer.start()
        asyncio.run(until(lambda: all(peer.node.service.ended for peer in running[:2])))
        late = Running(Node(files.configs[2]), QuadraticLearner(2)).start()
        with ended([late]):
            asyncio.run(until(lambda: late.node.service.ended))
    assert all(peer.error is None for peer in (late, *running[:2]))
    assert late.rounds == []
    assert late.node.last_round == 2
    assert late.node.summary()["outcomes"]["caught_up"] == 1
    models = [peer.learner.x for peer in (late, *running) if isinstance(peer.learner, QuadraticLearner)]
    assert abs(models[0] - models[1]).max() < 0.2  # where the others are, and not where all began
    assert abs(models[0]).max() > 1.0
