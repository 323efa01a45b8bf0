"""`network status` says of every member how it is, whatever the member says, and names what is wrong."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization

from rpel.cli.network import members_table
from rpel.cli.terminal import stdout
from rpel.peer.net.client import Answer
from rpel.peer.node.node import Node
from rpel.peer.ops import status
from rpel.peer.ops.create import MARGIN
from rpel.peer.ops.status import MemberStatus, State, parse_status, suggest_period
from rpel.planning.traffic import pullers
from rpel.types import PullResult
from support.commands import rpel
from support.thread_network import LAYOUT, NetworkFiles, QuadraticLearner, Running, ended, found, write_init
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

HONEST: dict[str, Any] = {
    "id": "a",
    "round": 3,
    "outcomes": {"aggregated": 2, "local_only": 1, "caught_up": 0},
    "pulls": {"ok": 10, "late": 1, "refused": 2, "malformed": 3, "unreachable": 4},
    "degraded": 1,
    "frozen": False,
    "accuracy": 0.75,
}

# --- what a member says -------------------------------------------------------------------------------------


def test_honest_status_is_shown_unchanged() -> None:
    one = parse_status("a", HONEST, rounds=9)
    assert one == MemberStatus("a", State.TRAINING, "", 3, 0.75, HONEST["pulls"], degraded=1)
    assert one.well
    assert one.same_membership


def test_member_is_ready_only_on_a_boolean_true() -> None:
    assert parse_status("a", HONEST | {"ready": True}, rounds=9).ready
    for said in ({}, {"ready": False}, {"ready": "yes"}, {"ready": 1}):
        assert not parse_status("a", HONEST | said, rounds=9).ready


GONE = Answer(PullResult.UNREACHABLE, reason="[red]no[/]")


@pytest.mark.parametrize(
    ("said", "over", "state"),
    [
        ({"round": 0}, False, "starting"),
        ({"round": 9}, False, "finished"),
        ({"round": 3, "frozen": True}, False, "frozen"),
        ({}, False, "starting"),
        (GONE, False, "unreachable"),
        (GONE, True, "finished"),
        (Answer(PullResult.MALFORMED), True, "malformed"),
        (Answer(PullResult.REFUSED, membership="0" * 64), False, "other membership"),
    ],
)
def test_member_state_is_one_of_the_known_words(said: Any, over: bool, state: str) -> None:
    assert parse_status("a", said, rounds=9, over=over).state == state


@pytest.mark.parametrize(
    "said",
    [
        *({"round": value} for value in (-1, 10**30, True, 1.5, "\x1b[2J")),
        *({"accuracy": value} for value in (2.0, float("nan"), float("inf"), 10**400, "high", True)),
        {"outcomes": []},
        {"outcomes": {"local_only": "many"}},
        {"pulls": {"ok": [1]}},
        {"pulls": "x" * 60_000},
        *({"excluded": value} for value in ("peer-1", [1], ["\x1b[2J"], ["a"] * 1001)),
    ],
)
def test_malformed_status_is_named_and_not_shown(said: Any) -> None:
    one = parse_status("a", HONEST | said, rounds=9)
    assert (one.state, one.round, one.accuracy, one.pulls) == (State.MALFORMED, 0, None, {})


# --- tables -------------------------------------------------------------------------------------------------


def test_table_has_a_row_for_everybody_and_excludes_by_more_than_b(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [parse_status(id, HONEST | {"excluded": ["c"] if id != "c" else ["a"]}, 9) for id in "abc"]
    rows += [parse_status("d", Answer(PullResult.LATE), 9), parse_status("e", HONEST, 9)]
    excluded = status.excluded(rows, byzantine=1)
    assert excluded == {"c"}
    stdout().print(members_table("network [/x]\x1b[2J", rows, hostile={"e"}, excluded=excluded))
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.rstrip() == "network [/x]\\x1b[2J"
    assert [line.split()[-1] for line in lines] == ["training", "training", "excluded", "late", "hostile"]
    assert lines[0].split() == ["a", "3", "0.7500", "10", "1", "2", "7", "1", "training"]
    assert [line.split() for line in lines[3:]] == [["d", "late"], ["e", "hostile"]]


# --- networks that run --------------------------------------------------------------------------------------


@contextmanager
def waiting(net: NetworkFiles, numbers: list[int]) -> Iterator[list[Running]]:
    """These members run, and wait for an epoch that is far away."""
    peers = [Running(Node(net.configs[i]), QuadraticLearner(i)).start() for i in numbers]
    with ended(peers):
        for peer in peers:
            assert peer.entered.wait(PATIENCE)
            assert peer.error is None
        yield peers


@pytest.fixture
def net(tmp_path: Path) -> NetworkFiles:
    """Four members; the fourth asks."""
    return found(tmp_path, 4, period=600.0, soon=600.0)


def asked(
    net: NetworkFiles, capsys: pytest.CaptureFixture[str], code: int, *more: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    path = str(net.configs[3].state_dir.parent / "peer.toml")
    out, _ = rpel(
        "network",
        "status",
        "--config",
        path,
        "--json",
        "--step-seconds",
        "0.5",
        *more,
        capsys=capsys,
        code=code,
    )
    found: dict[str, Any] = json.loads(out)
    return found, found["members"]


def test_status_of_a_healthy_network_is_0_with_a_period(
    net: NetworkFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting(net, [0, 1, 2]):
        told, members = asked(net, capsys, 0)
        path = str(net.configs[3].state_dir.parent / "peer.toml")
        out = rpel("network", "status", "--config", path, "--step-seconds", "0.5", capsys=capsys).out
    assert told["well"]
    assert [member["id"] for member in members] == ["peer-0", "peer-1", "peer-2"]
    for member in members:
        assert member["reachable"] and member["same_membership"] and member["well"]  # noqa: PT018
        assert abs(member["clock_offset"]) < 60
        assert min(member["seconds"], member["megabytes_per_second"]) > 0
        assert member["reaches_you"] is None
    m, slowest = net.membership, max(member["seconds"] for member in members)
    expected = MARGIN * (pullers(m.nodes, m.pull) * slowest + 0.5) * m.period / m.deadline
    assert told["suggested_period"] == pytest.approx(max(1.0, expected))
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["peer-0", "peer-1", "peer-2"]
    assert "all 3 other members are well" in out
    assert "600 s is enough" in out


def test_status_says_who_can_call_back(
    net: NetworkFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting(net, [0, 1, 2, 3]):
        assert [row["reaches_you"] for row in asked(net, capsys, 0)[1]] == [True] * 3
        # asked a moment ago
        assert [row["reaches_you"] for row in asked(net, capsys, 0)[1]] == [None] * 3
    elsewhere = net.membership.members[3].replace(url="https://127.0.0.1:9")
    net.membership.replace(members=(*net.membership.members[:3], elsewhere)).save(tmp_path / "members.toml")
    with waiting(net, [0, 1, 2, 3]):
        assert [row["reaches_you"] for row in asked(net, capsys, 1)[1]] == [False] * 3


def test_status_names_an_absent_member(net: NetworkFiles, capsys: pytest.CaptureFixture[str]) -> None:
    with waiting(net, [0, 2]):
        told, members = asked(net, capsys, 1)
    assert [member["well"] for member in members] == [True, False, True]
    assert members[1]["state"] == "unreachable"
    assert told["suggested_period"] > 0


def test_status_names_a_different_members_file(
    net: NetworkFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting(net, [0, 1, 2]):
        net.membership.replace(rounds=7).save(tmp_path / "members.toml")
        told, members = asked(net, capsys, 1)
    assert {member["state"] for member in members} == {"other membership"}
    assert {member["same_membership"] for member in members} == {False}
    assert told["suggested_period"] is None


def test_status_names_a_wrong_clock(
    net: NetworkFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(net, [0, 1, 2]) as peers:
        monkeypatch.setattr(peers[1].node.service, "position", lambda: peers[1].node.clock.position() - 3600)
        _, members = asked(net, capsys, 1)
    assert [member["well"] for member in members] == [True, False, True]
    assert members[1]["state"] == "wrong clock"
    assert members[1]["clock_offset"] == pytest.approx(-3600, abs=120)


def test_own_initial_model_must_be_that_of_members_toml(
    net: NetworkFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_init(tmp_path, LAYOUT, np.ones(LAYOUT.d))
    path = str(net.configs[3].state_dir.parent / "peer.toml")
    _, err = rpel("network", "status", "--config", path, capsys=capsys, code=2)
    assert "init.safetensors has the hash" in err


def test_suggested_period_allows_the_pulls_of_a_busy_round(net: NetworkFiles) -> None:
    m = net.membership
    busy = pullers(m.nodes, m.pull)
    assert suggest_period(m, [0.1, 0.4, None], 1.0) == pytest.approx(2 * (0.4 * busy + 1.0) / 0.8)
    assert suggest_period(m, [0.01], 0.0) == pytest.approx(1.0)
    assert suggest_period(m, [None], 1.0) is None


# --- watching -----------------------------------------------------------------------------------------------


def test_watch_looks_again_until_ctrl_c_leaves_130(
    net: NetworkFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    async def interrupted(observer: Any, within: float = 3.0) -> list[MemberStatus]:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise KeyboardInterrupt
        return [parse_status("peer-0", HONEST, 9)]

    monkeypatch.setattr(status, "look", interrupted)
    path = str(net.configs[0].state_dir.parent / "peer.toml")
    watch = ("network", "status", "--watch", "--every", "0.1", "--config", path)
    out, err = rpel(*watch, "--json", capsys=capsys, code=130)
    told = [json.loads(line) for line in out.splitlines()]
    assert [one["members"][0]["state"] for one in told] == ["training"] * 2
    assert told[0]["run"] == "consortium"
    assert "Traceback" not in err


def test_stranger_cannot_ask(net: NetworkFiles, capsys: pytest.CaptureFixture[str]) -> None:
    path = net.configs[3].state_dir.parent / "peer.toml"
    path.write_text(path.read_text().replace("peer-3", "stranger"))
    for command in (["status"], ["status", "--watch"], ["drill", "--attack", "alie"]):
        _, err = rpel("network", *command, "--config", str(path), capsys=capsys, code=2)
        assert "'stranger' is not a member" in err


def test_member_whose_key_has_a_passphrase_can_ask(
    net: NetworkFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    own, path = net.configs[3], net.configs[3].state_dir.parent / "peer.toml"
    key = serialization.load_pem_private_key(own.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"correct horse")
    own.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    command = ("network", "status", "--config", str(path), "--step-seconds", "0")
    assert "has a passphrase: name its file" in rpel(*command, capsys=capsys, code=2).err
    path.with_name("passphrase").write_text("correct horse\n")
    path.with_name("passphrase").chmod(0o600)
    path.write_text(path.read_text() + 'passphrase_file = "passphrase"\n')
    assert "peer-0" in rpel(*command, capsys=capsys, code=1).out
