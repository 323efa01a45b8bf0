"""A check says of every member what is wrong with it, and only of those with which something is."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import cli
from rpel.peer.node.node import Node
from rpel.peer.ops.check import MARGIN, Checked, suggestion
from rpel.types import Health
from support.thread_network import LAYOUT, NetworkFiles, QuadraticLearner, Running, ended, found, write_init
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration


@contextmanager
def waiting(net: NetworkFiles, numbers: list[int]) -> Iterator[None]:
    """These members run, and wait for an epoch that is far away."""
    peers = [Running(Node(net.configs[i]), QuadraticLearner(i)).start() for i in numbers]
    with ended(peers):
        for peer in peers:
            assert peer.entered.wait(PATIENCE)
            assert peer.error is None
        yield


def checked(net: NetworkFiles, capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    path = net.configs[3].state_dir.parent / "peer.toml"
    with pytest.raises(SystemExit, match=str(status)):
        cli.main(["network", "check", "--config", str(path), "--json", "--step-seconds", "0.5"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_network_check_of_a_healthy_network_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    with waiting(net, [0, 1, 2]):
        told = checked(net, capsys, status=0)
    assert told["well"]
    assert [member["id"] for member in told["members"]] == ["peer-0", "peer-1", "peer-2"]
    for member in told["members"]:
        assert member["reachable"]
        assert member["same_membership"]
        assert member["well"]
        assert abs(member["clock_offset"]) < 60
        assert member["seconds"] > 0
        assert member["megabytes_per_second"] > 0
    slowest = max(member["seconds"] for member in told["members"])
    m = net.membership
    expected = MARGIN * (m.pull * slowest + 0.5) * m.period / m.deadline
    assert told["suggested_period"] == pytest.approx(max(1.0, expected))


def test_network_check_prints_a_table_and_a_suggested_period(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    path = net.configs[3].state_dir.parent / "peer.toml"
    with waiting(net, [0, 1, 2]), pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["network", "check", "--config", str(path), "--step-seconds", "0.5"])
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["peer-0", "peer-1", "peer-2"]
    assert "all 3 other members are well" in out
    assert "suggested period" in out
    assert "2 times the slowest pull" in out
    assert "600 s is enough" in out


def test_network_check_reports_who_can_call_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    path = str(net.configs[3].state_dir.parent / "peer.toml")
    with waiting(net, [0, 1, 2, 3]):
        told = checked(net, capsys, status=0)
        assert [row["reaches_you"] for row in told["members"]] == [True] * 3
        again = checked(net, capsys, status=0)
        assert [row["reaches_you"] for row in again["members"]] == [None] * 3
    elsewhere = net.membership.members[3].replace(url="https://127.0.0.1:9")
    net.membership.replace(members=(*net.membership.members[:3], elsewhere)).save(tmp_path / "members.toml")
    with waiting(net, [0, 1, 2, 3]), pytest.raises(SystemExit, match=r"^1$"):
        cli.main(["network", "check", "--config", path, "--step-seconds", "0.5"])
    out = capsys.readouterr().out
    assert "0 of 3 reach you: is the port of your url open?" in out


def test_network_check_names_an_absent_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    with waiting(net, [0, 2]):
        told = checked(net, capsys, status=1)
    assert [member["reachable"] for member in told["members"]] == [True, False, True]
    assert [member["well"] for member in told["members"]] == [True, False, True]
    assert told["members"][1]["health"] == "unreachable"
    assert told["members"][1]["remark"].startswith("it cannot be reached")
    assert told["suggested_period"] > 0


def test_network_check_names_a_different_members_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    with waiting(net, [0, 1, 2]):
        net.membership.replace(rounds=7).save(tmp_path / "members.toml")
        told = checked(net, capsys, status=1)
    assert [member["same_membership"] for member in told["members"]] == [False] * 3
    assert {member["health"] for member in told["members"]} == {"other_membership"}
    assert "another members.toml" in told["members"][0]["remark"]
    assert told["suggested_period"] is None


def test_network_check_names_a_wrong_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    peers = [Running(Node(net.configs[i]), QuadraticLearner(i)) for i in range(3)]
    monkeypatch.setattr(peers[1].node.service, "position", lambda: peers[1].node.clock.position() - 3600)
    for peer in peers:
        peer.start()
    with ended(peers):
        for peer in peers:
            assert peer.entered.wait(PATIENCE)
        told = checked(net, capsys, status=1)
    assert [member["well"] for member in told["members"]] == [True, False, True]
    assert told["members"][1]["health"] == "wrong_clock"
    assert "behind" in told["members"][1]["remark"]
    assert told["members"][1]["clock_offset"] == pytest.approx(-3600, abs=120)


def test_network_check_names_a_different_initial_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    with waiting(net, [0, 1, 2]):
        other = write_init(tmp_path, LAYOUT, np.ones(LAYOUT.d))
        assert other != net.membership.init_sha256
        path = net.configs[3].state_dir.parent / "peer.toml"
        with pytest.raises(SystemExit, match=r"^2$"):
            cli.main(["network", "check", "--config", str(path)])
    assert "init.safetensors has the hash" in capsys.readouterr().err


def test_suggested_period_allows_s_of_the_slowest_pulls(tmp_path: Path) -> None:
    m = found(tmp_path, 4, period=10.0).membership
    rows = [
        Checked("a", "", seconds=0.1),
        Checked("b", "", seconds=0.4),
        Checked("c", "", Health.UNREACHABLE),
    ]
    assert suggestion(m, rows, step_seconds=1.0) == pytest.approx(2 * (0.4 * m.pull + 1.0) / 0.8)
    assert suggestion(m, rows[:1], step_seconds=0.0) == pytest.approx(1.0)
    assert suggestion(m, rows[2:], step_seconds=1.0) is None
