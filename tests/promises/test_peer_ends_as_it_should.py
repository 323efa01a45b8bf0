"""How a peer ends: caught up after the last round, or with the error of its own task."""

from pathlib import Path

import pytest

from support.plain_member import PlainMember
from support.process_network import Plan, ProcessNetwork, alone

pytestmark = pytest.mark.integration


def test_peer_killed_while_it_catches_up_at_the_end_asks_for_the_last_round_again(tmp_path: Path) -> None:
    plan = Plan(peers=2, byzantine=0, rounds=3, period=60.0, deadline=40.0, start=-181.0, stretched=False)
    with ProcessNetwork(tmp_path, plan) as net, PlainMember(net, net.members[1]) as other:

        def asked(life: int) -> list[str]:
            """The models that were asked for in one life, which begins with the question for the time."""
            lives = " ".join(other.requests).split("/v1/clock")[1:]
            return [path for path in " ".join(lives[life : life + 1]).split() if "/v1/model/" in path]

        peer = net.members[0]
        net.start(peer)
        other.wait(lambda: bool(asked(0)), "a request for the last round")
        net.kill(peer)
        net.start(peer)
        other.wait(lambda: bool(asked(1)), "a request after the restart")
        assert asked(0)[0] == "/v1/model/3"
        assert asked(1)[0] == "/v1/model/3"


def test_stop_iteration_in_a_task_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    plan = alone(rounds=50, task="support.odd_tasks:exhausted", hyperparameters={"d": 4, "lr": 0.1})
    with ProcessNetwork(tmp_path, plan) as net:
        peer = net.members[0]
        net.start(peer)
        net.wait(lambda: peer.ended, "its end")
        assert peer.process.status == 1
        assert "StopIteration" in peer.errors
