"""Members come and go by command, and the clock changes by command, while rounds go on;
nobody edits a file by hand."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.ops.change import change
from rpel.peer.ops.join import join
from rpel.peer.ops.status import Observer, look
from support.commands import rpel
from support.process_network import Member, Plan, ProcessNetwork
from support.thread_network import NetworkFiles, found
from support.waiting import PATIENCE


def entry(folder: Path, id: str, url: str, **options: Any) -> Path:
    """A new key in a folder, and the file with its entry."""
    folder.mkdir(exist_ok=True)
    joined = join(id=id, url=url, folder=folder, members=folder / "members.toml", **options)
    (folder / "entry.toml").write_text(joined.member.toml())
    return folder / "entry.toml"


@pytest.fixture
def net(tmp_path: Path) -> NetworkFiles:
    """Six members, one of them possibly hostile, that begin in a minute."""
    return found(tmp_path, 6, rounds=200, period=60.0, soon=60.0, byzantine=1)


def test_membership_commands_report_changes_and_keep_pending_ones(
    net: NetworkFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> str:
        return rpel("network", *arguments, "--members", str(tmp_path / "members.toml"), capsys=capsys).out

    new = entry(tmp_path / "new", "clinic-7", "https://127.0.0.1:7447")
    out = told("add", str(new), "--from-round", "20")
    assert "joins:   clinic-7" in out
    assert "nodes:   6 → 7" in out
    assert "pull:    5 → 6" in out
    assert "all 6 members that stay: put members.next.toml beside members.toml" in out
    out = told("remove", "peer-2", "--from-round", "20")
    assert "joins:   clinic-7" in out
    assert "leaves:  peer-2" in out
    assert "nodes:" not in out
    turned = entry(tmp_path / "turned", "peer-1", "https://127.0.0.1:7448")
    out = told("change", "--replace", str(turned), "--from-round", "30")
    assert "new key: peer-1" in out
    assert "takes effect: round 30" in out
    assert "peer.next.key" in out
    out = told("change", "--no-shows", "1", "--rounds", "300", "--from-round", "30")
    assert "rounds:  200 → 300" in out
    night = ("--hours", "20:00-06:00", "--pause-until", "+9000")
    said = json.loads(told("change", "--period", "120", *night, "--from-round", "30", "--json"))
    assert said["changed"] == {
        "period": [60.0, 120.0], "deadline": [48.0, 96.0], "hours": ["", "20:00-06:00"], "rounds": [200, 300],
    }  # fmt: skip
    assert (said["joined"], said["left"], said["altered"]) == (["clinic-7"], ["peer-2"], ["peer-1"])
    after = Membership.load(tmp_path / "members.next.toml")
    stay = [f"peer-{i}" for i in (0, 1, 3, 4, 5)]
    assert [member.id for member in after.members] == [*stay, "clinic-7"]
    assert after.timetable.before(30) == net.membership.timetable.paces
    assert after.hash == said["membership"]
    assert after.timetable.start(30) >= net.membership.timetable.end(29) + 7000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["remove", "peer-9", "--from-round", "9"], "'peer-9' is not a member: the members are peer-0"),
        (["remove", "peer-0", "peer-1", "peer-2", "--from-round", "9"], "hostile"),
        (["remove", "peer-1", "--from-round", "1"], "between 2 and 200"),
        (["remove", "peer-1", "--from-round", "900"], "between 2 and 200"),
        (["change", "--period", "60000", "--hours", "20:00-06:00", "--from-round", "9"], "36000"),
        (["change", "--hours", "8pm-6am", "--from-round", "9"], "such as 20:00-06:00"),
        (["change", "--byzantine", "4", "--from-round", "9"], "4"),
    ],
)
def test_impossible_membership_change_is_refused_and_writes_nothing(
    net: NetworkFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    _, err = rpel("network", *arguments, "--members", str(tmp_path / "members.toml"), capsys=capsys, code=2)
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "members.next.toml").exists()


def test_before_the_network_begins_members_toml_is_edited(net: NetworkFiles, tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    new = entry(tmp_path / "new", "clinic-7", "https://127.0.0.1:7447")
    grown = change(path, add=[new]).after
    assert (grown.nodes, grown.pull, len(grown.members)) == (7, 6, 7)
    shrunk = change(path, remove=["clinic-7"], rounds=300, period=30.0).after
    assert (shrunk.nodes, shrunk.pull, shrunk.period, shrunk.deadline) == (6, 5, 30.0, 24.0)
    later = change(path, pause_until=shrunk.epoch + 600).after
    assert (later.epoch, later.timetable.start(1)) == (shrunk.epoch + 600, 0.0)
    assert Membership.load(path) == later
    assert not (tmp_path / "members.next.toml").exists()
    with pytest.raises(ValueError, match=r"--from-round, for example 11"):
        change(path, add=[new], now=later.epoch + 1)


def test_pending_change_and_its_period_move_with_the_next_change(net: NetworkFiles, tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    change(path, 20, period=30.0)
    after = change(path, 40, remove=["peer-5"]).after
    assert [(pace.epoch_round, pace.period) for pace in after.timetable.paces] == [(1, 60.0), (40, 30.0)]
    with pytest.raises(ValueError, match=r"between 40 and .* round 40"):
        change(path, 30, remove=["peer-4"])


# --- while rounds go on -------------------------------------------------------------------------------------


def hand_out(net: ProcessNetwork, *members: Member) -> None:
    for member in members:
        shutil.copy(net.folder / "members.next.toml", member.folder / "members.next.toml")


def in_force(net: ProcessNetwork, *members: Member, since: int) -> None:
    net.wait_round(since, *members)
    net.wait_aggregated(*members, times=2)


def test_member_joins_rotates_and_leaves_by_command_while_rounds_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProcessNetwork(tmp_path, Plan(peers=5, byzantine=1)) as net, asyncio.Runner() as runner:
        first, turning, leaver = net.members[0], net.members[1], net.members[2]
        net.start()
        net.wait_aggregated(times=1)
        watching = Observer.of(Config.load(first.config))

        def watched() -> dict[str, str]:
            watching.follow()
            return {one.id: one.state.value for one in runner.run(look(watching, within=PATIENCE))}

        assert watched() == {member.id: "training" for member in net.members}

        def ahead() -> tuple[str, str]:
            return "--from-round", str(max(member.last for member in net.members) + 4)

        files = ("--members", str(tmp_path / "members.toml"))
        newcomer = Member(5, "newcomer", tmp_path / "newcomer")
        task = {"task": "support.quadratic:task", "listen": net.listen(5), "metrics_listen": net.metrics(5)}
        new = entry(newcomer.folder, "newcomer", net.url(5), **task)
        shutil.copy(tmp_path / "init.safetensors", newcomer.folder)
        with newcomer.config.open("a") as file:
            file.write('\nlog = "-"\n')
        turned = entry(tmp_path / "turned", turning.id, net.url(1))
        for name in ("key", "crt"):
            shutil.copy(tmp_path / "turned" / f"peer.{name}", turning.folder / f"peer.next.{name}")
        round = ahead()
        rpel("network", "add", str(new), *round, *files, capsys=capsys)
        rpel("network", "change", "--replace", str(turned), *round, *files, capsys=capsys)
        hand_out(net, *net.members, newcomer)
        net.members.append(newcomer)
        net.start(newcomer)
        in_force(net, *net.members, since=int(round[1]) + 1)
        assert "joins with round" in newcomer.errors
        assert watched() == {member.id: "training" for member in net.members}
        assert turning.id in {
            id for line in newcomer.lines for id, how in line["results"].items() if how == "ok"
        }

        round = ahead()
        rpel("network", "remove", leaver.id, *round, *files, capsys=capsys)
        staying = [member for member in net.members if member is not leaver]
        hand_out(net, *net.members)  # over the file that is in force
        announced = f"takes effect at round {round[1]}"
        net.wait(lambda: all(announced in member.errors for member in net.members), "the file to be seen")
        shown = [str(first.config.with_name(f"members{end}.toml")) for end in ("", ".next")]
        out, _ = rpel("network", "show", *shown, capsys=capsys)
        assert f"leaves:  {leaver.id}" in out
        net.kill(first)  # it has both the first file and the coming one; that in force is in its state folder
        net.start(first)
        net.wait(lambda: leaver.process.status is not None, "the leaver's end")
        in_force(net, *staying, since=int(round[1]) + 1)
        assert "as agreed" in leaver.errors
        assert {line["asked"] for member in staying for line in member.lines[-1:]} == {4}
        assert all(member.rounds == sorted(set(member.rounds)) for member in staying)
        assert watched() == {member.id: "training" for member in staying}
        runner.run(watching.close())


def test_unannounced_newcomer_is_refused_with_the_reason(net: NetworkFiles, tmp_path: Path) -> None:
    from rpel.peer.node.node import Node

    entry(tmp_path / "new", "clinic-7", "https://127.0.0.1:7447")
    shutil.copy(tmp_path / "members.toml", tmp_path / "new")
    shutil.copy(tmp_path / "init.safetensors", tmp_path / "new")
    config = Config.load(tmp_path / "new" / "peer.toml")
    with pytest.raises(ValueError, match="'clinic-7'"):
        Node(config)
    change(tmp_path / "members.toml", 20, add=[tmp_path / "new" / "entry.toml"])
    shutil.copy(tmp_path / "members.next.toml", tmp_path / "new")
    assert Node(config).now.membership.from_round == 20
