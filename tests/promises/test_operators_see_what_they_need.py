"""The service manager, the alerts and the metrics see what an operator has to know about a peer."""

import re
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from support.commands import rpel
from support.paths import ROOT
from support.process_network import Plan, ProcessNetwork, alone

DEPLOY = ROOT / "deploy"


@pytest.mark.integration
def test_service_manager_is_told_that_the_peer_is_ready_and_alive(tmp_path: Path) -> None:
    with (
        ProcessNetwork(tmp_path, alone()) as net,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(f"\0rpel-{tmp_path}"[:100])
        manager.setblocking(False)
        watchdog = str(int(net.membership.period * 1e6))
        address = f"@rpel-{tmp_path}"[:100]
        peer = net.members[0]
        net.start(peer, environment={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": watchdog})
        net.wait(lambda: peer.last >= 3 or peer.ended, "three rounds")
        messages = []
        try:
            while True:
                messages += manager.recv(4096).decode().splitlines()
        except BlockingIOError:
            pass
    assert "READY=1" in messages
    assert "WATCHDOG=1" in messages


def test_unit_waits_for_readiness_and_has_a_watchdog() -> None:
    unit = (DEPLOY / "rpel-peer.service").read_text()
    assert re.search(r"^Type=notify$", unit, re.MULTILINE)
    assert re.search(r"^WatchdogSec=\d", unit, re.MULTILINE)


def test_alert_fires_for_a_peer_that_is_down_altogether() -> None:
    assert re.search(r"\bup\b(\{[^}]*\})? *== *0|\babsent\(", (DEPLOY / "rpel-alerts.yml").read_text())


def test_no_alert_and_no_dashboard_speaks_of_convicted_members() -> None:
    for path in DEPLOY.iterdir():
        assert "convicted" not in path.read_text().lower(), path.name


@pytest.mark.integration
@pytest.mark.xfail(strict=True, reason="nothing says which member is odd [issue 54]")
def test_metrics_show_which_member_is_far_from_the_others(tmp_path: Path) -> None:
    table = {"d": 4, "lr": 0.5, "momentum": 0.0}
    plan = Plan(
        peers=4, byzantine=1, period=0.8, deadline=0.6, start=1.5, task="support.odd_tasks:one_far",
        hyperparameters=table,
    )  # fmt: skip
    with ProcessNetwork(tmp_path, plan) as net:
        asking = net.members[0]
        net.start()
        net.wait(lambda: any(line["received"] == 3 for line in asking.lines), "answers from everyone")
        text = net.page(asking, "/metrics")[1]
    distances = {
        sample.labels["peer"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "rpel_member_distance"
    }
    assert set(distances) == {member.id for member in net.members[1:]}
    assert max(distances, key=distances.__getitem__) == net.members[3].id


@pytest.mark.integration
def test_export_best_gives_the_model_of_the_best_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"d": 4, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "eval_every": 1}
    plan = alone(rounds=6, task="support.odd_tasks:climbing", hyperparameters=table, terms={"linger": 0.0})
    with ProcessNetwork(tmp_path, plan) as net:
        peer = net.members[0]
        net.start(peer)
        net.wait(lambda: peer.ended, "the last round")
        accuracies = [line["accuracy"] for line in peer.lines]
    assert max(accuracies) > max(accuracies[-2:])
    best = tmp_path / "best.safetensors"
    rpel("peer", "export", "--best", "--config", str(peer.config), "--out", str(best), capsys=capsys)
    off = float(abs(load_file(best)["x"] - 2).max())
    assert 1 - off / 10 == pytest.approx(max(accuracies))
