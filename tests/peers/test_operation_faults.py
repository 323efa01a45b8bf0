"""What an operator, a copy or a file of others can do to a peer that is not a matter of rounds."""

import asyncio
import json
import logging
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rpel import cli, models
from rpel.peer.api import run
from rpel.peer.config.membership import Membership
from rpel.peer.core import protocol
from rpel.peer.core.protocol import Checkpoint
from rpel.peer.core.wire import Layout
from rpel.peer.io.metrics import Metrics
from rpel.peer.net.background import Background, Woken
from rpel.peer.node.node import Node
from rpel.peer.ops.join import MEMORY_FILE, join
from rpel.peer.ops.status import Observer
from rpel.peer.state.memberships import MembershipWatcher
from rpel.peer.state.models import read_layout
from rpel.peer.state.store import Store
from rpel.rules import Rule
from rpel.types import Outcome
from support.loopback import SMALL, loopback, model
from support.thread_network import LAYOUT, NetworkFiles, QuadraticLearner, found
from support.waiting import PATIENCE


def test_record_of_a_round_to_come_makes_a_peer_unready_and_says_why(tmp_path: Path) -> None:
    files = found(tmp_path, 2, soon=60.0)
    files.configs[0].state_dir.mkdir(mode=0o700)
    (files.configs[0].state_dir / "half-999999.json").write_bytes(b"planted")
    with Node(files.configs[0]) as node:
        learner = QuadraticLearner(0)
        node.answer(protocol.Recall(), learner)
        node.answer(protocol.AskClocks(), learner)
        assert "a record of round 999999, but it is round" in node.service.why_unready()
        assert node.service.status()["ready"] is False


def test_peer_that_is_frozen_or_ends_no_round_for_three_periods_is_not_ready(tmp_path: Path) -> None:
    files = found(tmp_path, 2, rounds=10_000, period=0.02, soon=0.0)
    with Node(files.configs[0]) as node:
        node.answer(protocol.AskClocks(), QuadraticLearner(0))
        assert node.service.why_unready() == "" or "periods" in node.service.why_unready()
        node.sleep(node.clock.position() + 5 * files.membership.period)
        assert "no round has ended for" in node.service.why_unready()
        report = protocol.Report(9, Outcome.LOCAL_ONLY, 1, 0, 0, {}, 5, True, True, 0.0, 0.0)
        node.service.round_ended(report, exhausted=False)
        assert node.service.unready == "frozen: too few members answer"


def test_metrics_say_who_had_this_peers_model_and_for_how_long_nobody_did() -> None:
    metrics = Metrics()
    metrics.asked("clinic-3")
    assert metrics.unasked() == 0
    assert [metrics.unasked() for _ in range(5)] == [1, 2, 3, 4, 5]
    text = metrics.text().decode()
    assert 'rpel_asked_total{peer="clinic-3"} 1.0' in text
    assert "rpel_unasked_rounds 5.0" in text


def test_peer_warns_of_a_plan_that_promises_more_than_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = found(tmp_path, 4, soon=60.0, byzantine=1)
    net.membership.replace(b_hat=0).save(tmp_path / "members.toml")
    with caplog.at_level("WARNING", "rpel"), Node(net.configs[0]):
        pass
    assert "b_hat 0 has probability 0, below the confidence 0.99" in caplog.messages


def test_peer_whose_model_nobody_had_for_five_rounds_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Node(found(tmp_path, 2, soon=60.0).configs[0]) as node, caplog.at_level("WARNING", "rpel"):
        learner = QuadraticLearner(0)
        warnings = []
        for t in range(1, 8):
            node.answer(protocol.Save(Checkpoint(t, np.zeros(LAYOUT.d))), learner)
            report = protocol.Report(t, Outcome.AGGREGATED, 1, 1, 0, {}, 0, False, True, 0.0, 0.0)
            node.answer(protocol.Tell(report), learner)
            warnings.append(sum("no member has fetched" in line for line in caplog.messages))
    assert warnings == [0, 0, 0, 0, 1, 1, 1]


def test_error_that_asyncio_can_hand_to_nobody_is_one_line_without_a_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """asyncio closes the transport of a handshake that timed out, although the connection is gone."""
    background = Background()
    with caplog.at_level("DEBUG", "rpel"):
        background.loop.call_soon_threadsafe(getattr, None, "close")
        background.call(asyncio.sleep(0))
    background.close()
    (record,) = [record for record in caplog.records if "'NoneType'" in record.getMessage()]
    assert (record.name, record.levelname, record.exc_info) == ("rpel", "DEBUG", None)
    assert "Traceback" not in capfd.readouterr().err


def test_alarm_while_a_peer_closes_does_not_stop_the_closing() -> None:
    """Each member that tells of a second instance raises it, also after the first."""
    background = Background()
    background.wake()
    with pytest.raises(Woken):
        background.call(asyncio.sleep(PATIENCE))
    background.rest()
    background.wake()
    assert background.call(asyncio.sleep(0, result=7)) == 7
    background.close()


def test_state_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (folder / "evidence").mkdir(parents=True)
    for path in (folder / "half-1.json", folder / "evidence" / "a.json"):
        path.write_bytes(b"x")
        path.chmod(0o644)
    folder.chmod(0o755)
    with Store(folder, LAYOUT):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {modes.pop("state"), modes.pop("evidence")} == {0o700}
    assert set(modes.values()) == {0o600}


def test_process_with_a_key_leaves_no_core_dump() -> None:
    program = (
        "import ctypes, resource; from rpel.peer.net.tls import no_core_dumps; no_core_dumps();"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0], ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


def test_million_tensor_names_are_refused_within_a_second(tmp_path: Path) -> None:
    for count, words in {1_000_000: "its header would have", 30_000: "30,000 tensors"}.items():
        entries = {
            f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(count)
        }
        header = json.dumps(entries).encode()
        (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * count))
        began = time.process_time()
        with pytest.raises(ValueError, match=words):
            read_layout(tmp_path / "m")
        assert time.process_time() - began < 1.0


async def test_certificate_that_ends_while_connected_is_answered_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loopback(tmp_path) as net:
        net.stores[1].put(1, model(SMALL, 1))
        assert (await net.pull(0, 1, 1))[0] == "ok"
        assert net.transports[1].server.connections() == 1
        later = time.time() + 40 * 365 * 86400
        monkeypatch.setattr(time, "time", lambda: later)
        assert (await net.pull(0, 1, 1, within=0.5))[0] != "ok"
        assert [code for _, code, _ in net.stores[1].answered] == [200]


# --- memberships --------------------------------------------------------------------------------------------


def announced(files: NetworkFiles, from_round: int, **changes: object) -> Membership:
    later = files.membership.replace(from_round=from_round, confidence=0.98, **changes)
    later.save(files.configs[0].next_members)
    return later


def test_membership_for_a_begun_round_is_refused_unless_others_hold_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = found(tmp_path, 4)
    later = announced(files, from_round=5)
    with caplog.at_level(logging.WARNING, "rpel"):
        assert MembershipWatcher(files.configs[0]).due(files.membership, 8, 0.0) is None
    assert "this peer would be split off" in caplog.text
    assert (
        MembershipWatcher(files.configs[0], held=lambda hash: hash == later.hash).due(
            files.membership, 8, 0.0
        )
        == later
    )
    assert MembershipWatcher(files.configs[0], force=True).due(files.membership, 8, 0.0) == later
    assert MembershipWatcher(files.configs[0]).due(files.membership, 8, 0.0, at_start=True) == later
    assert MembershipWatcher(files.configs[0]).due(files.membership, 5, 0.0) == later
    early = MembershipWatcher(files.configs[0])
    assert early.due(files.membership, 4, 0.0) is None
    assert early.due(files.membership, 6, 0.0) == later  # it was there in time


def test_observer_that_begins_after_a_change_asks_by_the_new_membership(tmp_path: Path) -> None:
    files = found(tmp_path, 2, rounds=1000, soon=-60.0)
    later = announced(files, from_round=2)
    assert Observer.of(files.configs[0]).now.membership == later


def test_older_membership_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = found(tmp_path, 4)
    later = announced(files, from_round=5)
    announced(files, from_round=3)
    with caplog.at_level(logging.WARNING, "rpel"):
        assert MembershipWatcher(files.configs[0]).due(later, 7, 0.0) is None
    assert "its from_round is 3, and 5 is in force" in caplog.text


def test_announced_plan_is_compiled_ahead_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, compiling, over = found(tmp_path, 5, rounds=100, soon=60.0), threading.Event(), threading.Event()
    plans: list[int] = []

    def slowly(chosen: Rule, pull: int, d: int, dtype: object) -> None:
        plans.append(pull)
        compiling.set()
        over.wait()

    monkeypatch.setattr(protocol, "make_ready", slowly)
    with Node(files.configs[0]) as node:
        learner = QuadraticLearner(0)
        announced(files, from_round=7, pull=3)
        node.answer(protocol.Enter(5), learner)  # two rounds before
        assert compiling.wait(PATIENCE)
        assert plans == [3]
        terms = node.answer(protocol.Enter(7), learner)
        assert terms.pull == 3
        assert not over.is_set()
        over.set()


def test_private_addresses_need_the_networks_permission(tmp_path: Path) -> None:
    files = found(tmp_path, 2)
    open_ = files.membership.replace(allow_private=False)
    open_.save(tmp_path / "open.toml")
    with pytest.raises(ValueError, match=r"'peer-0'.*127\.0\.0\.1"):
        Membership.load(tmp_path / "open.toml")
    assert open_.hash != files.membership.hash


# --- the end, and the start ---------------------------------------------------------------------------------


def test_member_stopped_early_reports_the_round_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout.of(models.model("mnist").named_parameters())
    files = found(tmp_path, 2, rounds=9, period=0.01, soon=-60.0, layout=layout)
    with Store(files.configs[0].state_dir, layout) as store:
        store.save(Checkpoint(6, np.zeros(layout.d, layout.dtype), outcome=Outcome.AGGREGATED))
    config = files.configs[0].state_dir.parent / "peer.toml"
    assert run(files.configs[0])["model_round"] == 6
    with pytest.raises(SystemExit) as left:
        cli.main(["peer", "run", "--config", str(config)])
    assert left.value.code == 3
    assert "after round 6 only: another member has that of round 9" in "".join(capsys.readouterr())


def test_new_member_is_told_the_memory_the_plan_needs(tmp_path: Path) -> None:
    files = found(tmp_path, 3)
    home, members = tmp_path / "new", tmp_path / "members.toml"
    made = join(id="late", url="https://clinic.example:7443", members=members, folder=home)
    text = (home / MEMORY_FILE).read_text()
    needed = int(text.split("MemoryMax=")[1].split("M")[0]) * 1e6
    assert needed == pytest.approx(1.5 * (6e8 + (files.membership.pull + 6) * LAYOUT.size), rel=0.01)
    assert made.memory == home / MEMORY_FILE
