"""A peer takes the members' time, and one whose own clock is wrong says so and may start again."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.paths import ROOT
from support.plain_member import PlainMember, Reply, answer_json, ask
from support.process_network import Plan, ProcessNetwork, alone
from support.waiting import pace

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessNetwork]:
    """Round 3 of 30; three of four members are there and tell the right time."""
    plan = Plan(peers=4, byzantine=1, rounds=30, period=20.0, deadline=15.0, start=-50.0, stretched=False)
    with ProcessNetwork(tmp_path_factory.mktemp("clock"), plan) as net, ExitStack() as members:
        for member in net.members[1:]:
            members.enter_context(PlainMember(net, member))
        yield net


@pytest.mark.parametrize("wrong_by", [200, -7200, 7200])
def test_peer_with_a_wrong_clock_names_it_and_is_started_again(
    running: ProcessNetwork, wrong_by: int
) -> None:
    peer = running.members[0]
    running.start(peer, environment={"RPEL_TEST_WALL": str(wrong_by)})
    running.wait(lambda: peer.ended, "its end")
    unit = (ROOT / "deploy" / "rpel-peer.service").read_text()
    final = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert peer.process.lines == []
    assert "clock" in "".join(peer.process.errors)
    assert peer.process.status
    assert str(peer.process.status) not in " ".join(final).split()


def test_slow_answers_do_not_set_a_clock_back(tmp_path: Path) -> None:
    passing = threading.Event()

    def slowly(path: str) -> Reply | None:
        """The time is read halfway through the time that the answer takes, as on any symmetric slow line."""
        if path.startswith("/v1/model/"):
            return 410, b"", {}
        if path != "/v1/clock":
            return None
        passing.wait(1.2)
        reply = answer_json({"position": members[0].position()})
        passing.wait(1.2)
        return reply

    plan = Plan(peers=4, byzantine=1, period=4.0, deadline=3.0, start=3.0 + pace(), stretched=False)
    with ProcessNetwork(tmp_path, plan) as net, ExitStack() as opened:
        members = [PlainMember(net, member, slowly) for member in net.members[1:]]
        for member in members:
            opened.enter_context(member)
        peer = net.members[0]
        net.start(peer)
        asked = members[0].requests
        members[0].wait(lambda: any("/v1/model/" in path for path in asked), "the first round")
        before = members[0].position()
        with ask(net, net.members[1], peer, "/v1/clock") as response:
            told = json.loads(response.read())["position"]
        after = members[0].position()
    assert before - 0.5 < told < after + 0.5


def test_page_of_a_peer_that_is_behind_the_members_says_so(tmp_path: Path) -> None:
    def ahead(path: str) -> Reply | None:
        """Half a round ahead, since the peer has taken the right time at its start."""
        number = path.removeprefix("/v1/model/")
        return other.half_step(int(number), ahead=0.5 * period) if number != path else None

    with ProcessNetwork(tmp_path, alone(peers=2)) as net:
        peer, period = net.members[0], net.membership.period
        other = PlainMember(net, net.members[1], ahead)
        with other:
            net.start(peer)
            net.wait(lambda: bool(peer.lines) or peer.ended, "the first round")
            assert peer.lines[0]["received"] == 1
            page = re.sub("<[^>]*>", " ", net.page(peer, "/")[1])
    shown = re.search(r"([+-]?[\d.]+) s +ahead of \(\+\) or behind", page)
    assert shown is not None
    assert float(shown[1]) < 0
