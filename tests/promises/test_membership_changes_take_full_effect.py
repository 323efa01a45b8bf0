"""A changed membership changes everything that depends on it, and leaving as agreed is no failure."""

import shutil
import time
from pathlib import Path

import pytest

from support.commands import rpel
from support.plain_member import PlainMember, ask
from support.process_network import Member, Plan, ProcessNetwork, alone

pytestmark = pytest.mark.integration


def change(
    net: ProcessNetwork, capsys: pytest.CaptureFixture[str], members: list[Member], *arguments: str
) -> int:
    """Announce a change by a command and give the file to these members; returns its round."""
    m = net.membership
    soon = int((time.time() - m.epoch) / m.period) + 6
    files = ("--from-round", str(soon), "--members", str(net.folder / "members.toml"))
    rpel("network", *arguments, *files, capsys=capsys)
    for member in members:
        shutil.copy(net.folder / "members.next.toml", member.folder)
    return soon


def test_member_that_was_down_during_two_changes_takes_part_with_the_newest_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessNetwork(tmp_path, Plan(peers=4, byzantine=1, period=0.6, deadline=0.4, start=1.5)) as net:
        up, down = net.members[:3], net.members[3]
        net.start(*up)
        net.wait_round(1, *up)
        first = change(net, capsys, up, "change", "--rounds", "90000")
        net.wait_round(first, *up)
        second = change(net, capsys, net.members, "change", "--rounds", "80000")
        net.start(down)
        net.wait_round(second, *up)
        net.wait_aggregated()
        assert down.rounds[0] >= second
        assert down.processes == [down.process]


def test_longer_period_gives_readers_more_time_for_a_body(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d, table = 2_000_000, {"lr": 0.1, "momentum": 0.0, "noise": 0.0}
    plan = alone(peers=2, deadline=0.45, hyperparameters=table | {"d": d})

    def gone(path: str) -> tuple[int, bytes, dict[str, str]] | None:
        return (410, b"", {}) if path.startswith("/v1/model/") else None

    with ProcessNetwork(tmp_path, plan) as net, PlainMember(net, net.members[1], gone):
        peer, other = net.members
        net.start(peer)
        net.wait(lambda: bool(peer.lines) or peer.ended, "the first round")
        # longer than the old deadline and the five seconds that a reader has beyond it
        first = change(net, capsys, [peer], "change", "--period", "8")
        net.put_in_force(net.folder / "members.next.toml")
        net.wait(lambda: peer.last >= first or peer.ended, "the longer rounds")
        with ask(net, other, peer, "/v1/init") as response:
            net.wait(lambda: peer.last > first or peer.ended, "a whole long round")
            assert len(response.read()) > 4 * d


def test_member_that_leaves_as_agreed_ends_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessNetwork(tmp_path, alone()) as net:
        leaving = net.members[2]
        net.start(leaving)
        net.wait(lambda: bool(leaving.lines) or leaving.ended, "the first round")
        last = change(net, capsys, [leaving], "remove", leaving.id) - 1
        net.wait(lambda: leaving.ended, "its end")
        assert leaving.last == last
        assert leaving.process.status == 0
