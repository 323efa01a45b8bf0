"""Watching shows what members say, whatever they say, and leaves when told to."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from rpel import cli
from rpel.cli.peer import members_now
from rpel.cli.terminal import stdout
from rpel.peer.net.client import Answer
from rpel.peer.node.node import Node
from rpel.peer.ops import watch
from rpel.peer.ops.watch import Seen, State, seen
from rpel.types import PullResult
from support.thread_network import QuadraticLearner, Running, ended, found
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

HONEST = {
    "id": "a",
    "round": 3,
    "outcomes": {"aggregated": 2, "local_only": 1, "caught_up": 0},
    "pulls": {"ok": 10, "late": 1, "refused": 2, "malformed": 3, "unreachable": 4},
    "degraded": 1,
    "frozen": False,
    "accuracy": 0.75,
}


def test_honest_status_is_shown_unchanged() -> None:
    one = seen("a", HONEST, rounds=9)
    assert one == Seen("a", State.TRAINING, 3, 0.75, HONEST["pulls"], degraded=1)  # type: ignore[arg-type]


def test_member_is_shown_ready_only_on_a_boolean_true() -> None:
    assert seen("a", HONEST | {"ready": True}, rounds=9).ready
    for said in ({}, {"ready": False}, {"ready": "yes"}, {"ready": 1}):
        assert not seen("a", HONEST | said, rounds=9).ready


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"round": 0}, "starting"),
        ({"round": 9}, "finished"),
        ({"round": 3, "frozen": True}, "frozen"),
        ({}, "starting"),
        (Answer(PullResult.UNREACHABLE, reason="[red]no[/]"), "unreachable"),
        (Answer(PullResult.REFUSED, membership="0" * 64), "other membership"),
    ],
)
def test_member_state_is_one_of_the_known_words(said: Any, state: str) -> None:
    assert seen("a", said, rounds=9).state == state


@pytest.mark.parametrize(
    "said",
    [
        {"round": -1},
        {"round": 10**30},
        {"round": True},
        {"round": 1.5},
        {"round": "\x1b[2J"},
        {"accuracy": 2.0},
        {"accuracy": float("nan")},
        {"accuracy": float("inf")},
        {"accuracy": 10**400},
        {"accuracy": "high"},
        {"accuracy": True},
        {"outcomes": []},
        {"outcomes": {"local_only": "many"}},
        {"pulls": {"ok": [1]}},
        {"pulls": "x" * 60_000},
        {"excluded": "peer-1"},
        {"excluded": [1]},
        {"excluded": ["\x1b[2J"]},
        {"excluded": ["a"] * 1001},
    ],
)
def test_malformed_status_is_named_and_not_shown(said: Any) -> None:
    assert seen("a", HONEST | said, rounds=9) == Seen("a", State.MALFORMED)


def test_member_is_shown_excluded_when_more_than_b_others_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [seen(id, HONEST | {"excluded": ["c"] if id != "c" else ["a"]}, 9) for id in "abc"]
    assert watch.excluded(rows, byzantine=1) == {"c"}
    stdout().print(members_now("network demo", rows, excluded=watch.excluded(rows, byzantine=1)))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "training", "training", "excluded"
    ]  # fmt: skip


def test_after_the_last_round_a_member_that_left_is_finished() -> None:
    gone = Answer(PullResult.UNREACHABLE, reason="no connection")
    assert seen("a", gone, rounds=9, over=True).state == "finished"
    assert seen("a", gone, rounds=9, over=False).state == "unreachable"
    assert seen("a", Answer(PullResult.MALFORMED), rounds=9, over=True).state == "malformed"


def test_table_fits_80_columns_whatever_the_members_are_called_and_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = HONEST | {"round": 99_999, "pulls": dict.fromkeys(HONEST["pulls"], 99_999)}  # type: ignore[call-overload]
    rows = [
        seen("hospital-of-the-holy-spirit", said, 10**5),
        seen("b", Answer(PullResult.REFUSED, membership="0"), 9),
    ]
    stdout().print(members_now("network demo", rows))
    lines = capsys.readouterr().out.splitlines()
    assert "other file" in lines[3]
    assert max(map(len, lines)) <= 80


def test_network_name_is_shown_without_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    stdout().print(members_now("network [/x]\x1b[2J", [seen("a", HONEST, 9)]))
    assert capsys.readouterr().out.splitlines()[0].rstrip() == "network [/x]\\x1b[2J"


def test_table_has_a_row_for_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [seen("a", HONEST, 9), seen("b", Answer(PullResult.LATE), 9), seen("c", HONEST, 9)]
    stdout().print(members_now("network demo", rows, hostile={"c"}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["a", "3", "0.7500", "10", "1", "2", "7", "1", "training"]
    assert lines[3].split() == ["b", "late"]
    assert lines[4].split() == ["c", "hostile"]


def test_running_network_is_seen_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = found(tmp_path, 4, period=600.0, soon=600.0)
    peers = [Running(Node(net.configs[i]), QuadraticLearner(i)).start() for i in range(3)]
    with ended(peers):
        for peer in peers:
            assert peer.entered.wait(PATIENCE)
        path = net.configs[3].state_dir.parent / "peer.toml"
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main(["watch", "--config", str(path), "--once", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "consortium"
    assert [(one["id"], one["state"]) for one in told["members"]] == [
        ("peer-0", "starting"),
        ("peer-1", "starting"),
        ("peer-2", "starting"),
        ("peer-3", "unreachable"),
    ]


def test_ctrl_c_leaves_with_130_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    async def interrupted(ask: Any, within: float = 3.0) -> list[Seen]:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise KeyboardInterrupt
        return [seen("peer-0", HONEST, 9)]

    net = found(tmp_path, 4)
    monkeypatch.setattr(watch, "look", interrupted)
    path = net.configs[0].state_dir.parent / "peer.toml"
    with pytest.raises(SystemExit, match=r"^130$"):
        cli.main(["watch", "--config", str(path), "--every", "0.1"])
    out, err = capsys.readouterr()
    assert out.count("peer-0") == 2
    assert "Traceback" not in err


def test_stranger_cannot_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = found(tmp_path, 4)
    path = net.configs[3].state_dir.parent / "peer.toml"
    path.write_text(path.read_text().replace("peer-3", "stranger"))
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["watch", "--config", str(path), "--once"])
    assert "'stranger' is not a member" in capsys.readouterr().err


def test_member_whose_key_has_a_passphrase_can_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = found(tmp_path, 4)
    own, path = net.configs[3], net.configs[3].state_dir.parent / "peer.toml"
    key = serialization.load_pem_private_key(own.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"correct horse")
    own.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["watch", "--config", str(path), "--once"])
    assert "has a passphrase: name its file as passphrase_file" in capsys.readouterr().err
    path.with_name("passphrase").write_text("correct horse\n")
    path.with_name("passphrase").chmod(0o600)
    path.write_text(path.read_text() + 'passphrase_file = "passphrase"\n')
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["watch", "--config", str(path), "--once"])
    assert "peer-0" in capsys.readouterr().out
