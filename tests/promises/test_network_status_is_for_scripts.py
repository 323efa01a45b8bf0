"""`network status` tells a script whether rounds can work, and agrees with the planner."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.commands import rpel
from support.plain_member import PlainMember, Reply
from support.process_network import Plan, ProcessNetwork

pytestmark = pytest.mark.integration

STATUS = ("network", "status")
BITS_PER_SECOND = 1_000_000


class SlowLine:
    """What all members send goes, one after the other, over a line of 1 Mbit/s."""

    def __init__(self, size: int) -> None:
        self._taken, self._passing, self._seconds = (
            threading.Lock(),
            threading.Event(),
            8 * size / BITS_PER_SECOND,
        )

    def __call__(self, path: str) -> Reply | None:
        if path == "/v1/init":
            with self._taken:
                self._passing.wait(self._seconds)
        return None


def slow_network(folder: Path, period: float) -> tuple[ProcessNetwork, SlowLine]:
    """Four members with models of 64 kB, which take half a second on their line."""
    plan = Plan(
        peers=4,
        byzantine=1,
        period=period,
        deadline=0.6 * period,
        start=3600.0,
        stretched=False,
        hyperparameters={"d": 16_000, "lr": 0.1},
    )
    return ProcessNetwork(folder, plan), SlowLine(4 * 16_000)


def status(net: ProcessNetwork, line: SlowLine, capsys: pytest.CaptureFixture[str], code: int) -> float:
    """The period that the command suggests; its exit status is checked."""
    with ExitStack() as members:
        for member in net.members[1:]:
            members.enter_context(PlainMember(net, member, line))
        settings = ("--config", str(net.members[0].config), "--step-seconds", "0", "--json")
        out, _ = rpel(*STATUS, *settings, capsys=capsys, code=code)
    found = json.loads(out)
    assert [member["well"] for member in found["members"]] == [True] * 3
    return float(found["suggested_period"])


def test_status_of_a_network_with_time_enough_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1.0 < status(*slow_network(tmp_path, period=600.0), capsys, code=0) < 600.0


def test_status_of_a_network_whose_period_is_too_short_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*slow_network(tmp_path, period=1.0), capsys, code=1) > 1.0


def test_planned_and_measured_shortest_periods_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, line = slow_network(tmp_path, period=600.0)
    measured = status(net, line, capsys, code=0)
    size = ("--peers", "4", "--byzantine", "1", "--rounds", "100", "--task", "none")
    files = ("--model", str(net.folder / "init.safetensors"), "--out", str(tmp_path / "planned"))
    (tmp_path / "planned").mkdir()
    out, _ = rpel("network", "new", *size, *files, "--upstream", "1Mbit", "--json", capsys=capsys)
    planned = float(json.loads(out)["shortest_period"])
    assert planned == pytest.approx(measured, rel=0.3)
