"""deploy/: Prometheus scrapes a peer and evaluates every expression of alerts and dashboard; the rules fire
on what they are for. Without Prometheus the names and labels in the expressions are compared with the peer's
page."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpel.peer.core.protocol import Report
from rpel.peer.io.metrics import Metrics
from rpel.peer.node.node import Node
from rpel.peer.ops.demo import free_ports
from rpel.types import Measured, Outcome, PullResult
from support.paths import ROOT
from support.thread_network import Measuring, Running, ended, found
from support.waiting import PATIENCE

DEPLOY = ROOT / "deploy"
ALERTS = (DEPLOY / "rpel-alerts.yml").read_text()
_METRIC = re.compile(r"\b(rpel_\w+)(?:\{([^}]*)\})?")


def expressions(alerts: bool = True) -> Iterator[tuple[str, str]]:
    """(where, expression) of every alert, if these are wanted, and every panel."""
    if alerts:
        yield from re.findall(r"- alert: (\w+)\s+expr: (.*?)\n +(?:for|annotations):", ALERTS, re.DOTALL)
    for panel in json.loads((DEPLOY / "rpel-dashboard.json").read_text())["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


@pytest.fixture(scope="module")
def scraped() -> dict[str, list[dict[str, str]]]:
    """By name of a sample: its labels, as Prometheus reads them from a peer that has played a round."""
    metrics = Metrics()
    metrics.identity("abc", 2e9)
    results = {0: PullResult.OK, 1: PullResult.LATE, 2: PullResult.MALFORMED}
    report = Report(
        round=1, outcome=Outcome.AGGREGATED, asked=3, received=1, trim=1, results=results, degraded=0,
        frozen=False, saved=True, seconds=0.1, offset=0.0,
    )  # fmt: skip
    metrics.ended(report, ("a", "b", "c"))
    metrics.scored(Measured(0.5, 1.0))
    metrics.asked("a")
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append({**sample.labels, "instance": "peer", "job": "rpel"})
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_alert_and_dashboard_expressions_match_exported_metrics(
    scraped: dict[str, list[dict[str, str]]], where: str, expression: str
) -> None:
    asked = _METRIC.findall(expression)
    assert asked or where == "PeerDown"  # that one is about Prometheus's own series
    for name, matchers in asked:
        assert name in scraped, f"{where}: there is no {name}"
        for label, how, value in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers):
            assert all(label in labels for labels in scraped[name]), f"{where}: {name} has no label {label}"
            if how == "=":
                assert any(labels[label] == value for labels in scraped[name]), (
                    f"{where}: nothing has {label}={value}"
                )
        by = re.findall(r"(?:by|without) \(([^)]*)\)", expression)
        assert all(label.strip() in {*scraped[name][0], "le"} for group in by for label in group.split(","))


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str], Any]]:
    """A real one on loopback that scrapes a peer; what it yields asks its API for a path."""
    server = shutil.which("prometheus")
    if server is None:
        pytest.skip("needs prometheus (Debian: prometheus)")
    shutil.copy(DEPLOY / "rpel-alerts.yml", folder)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: "
        "[rpel-alerts.yml]\n"
        f"scrape_configs: [{{job_name: rpel, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        server,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=tsdb",
        f"--web.listen-address={listen}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://{listen}/api/v1/{path}", timeout=60) as reply:
            return json.load(reply)["data"]

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_prometheus_scrapes_a_peer_and_evaluates_every_expression(tmp_path: Path) -> None:
    net = found(tmp_path, 5, rounds=10_000, byzantine=1)
    peers = [Running(Node(config), Measuring(number)) for number, config in enumerate(net.configs[:4])]
    with ended([peer.start() for peer in peers]):
        assert all(peer.entered.wait(PATIENCE) for peer in peers)
        with prometheus(tmp_path, "{}:{}".format(*peers[0].node.pages.address)) as ask:

            def value(expression: str) -> dict[str, float]:
                """By member, or "" where that is no label: the samples that an expression has now."""
                query = urllib.parse.urlencode({"query": expression.replace("$instance", ".*")})
                samples = ask(f"query?{query}")["result"]
                return {sample["metric"].get("peer", ""): float(sample["value"][1]) for sample in samples}

            def rules() -> list[dict[str, Any]]:
                return [rule for group in ask("rules")["groups"] for rule in group["rules"]]

            def unanswering() -> dict[str, str]:
                """By member: the state of the alert that it does not answer; one was never started."""
                alerts = [
                    one for rule in rules() if rule["name"] == "MemberDoesNotAnswer" for one in rule["alerts"]
                ]
                return {alert["labels"]["peer"]: alert["state"] for alert in alerts}

            def evaluated() -> bool:
                played = value(
                    "rpel_round >= 3 and count_over_time(rpel_round[1h]) >= 3 and rpel_accuracy > 0"
                )
                return bool(played) and "peer-4" in unanswering()

            until = time.monotonic() + PATIENCE
            while True:
                with suppress(OSError):  # it is starting
                    if evaluated():
                        break
                assert time.monotonic() < until, (tmp_path / "prometheus.log").read_text()
                time.sleep(0.5)
            assert [(rule["name"], rule.get("lastError")) for rule in rules() if rule["health"] != "ok"] == []
            for where, expression in expressions():
                for name, matchers in _METRIC.findall(expression):
                    assert value(f"{name}{{{matchers}}}"), f"{where}: {name}{{{matchers}}} finds nothing"
            panels = [(where, value(expression)) for where, expression in expressions(alerts=False)]
            assert [where for where, found in panels if not found or any(map(isnan, found.values()))] == []
            shares = dict(panels)["Who answers, share of an hour"]
            assert {peer: share > 0 for peer, share in shares.items()} == {
                f"peer-{i}": i < 4 for i in (1, 2, 3, 4)
            }
            assert unanswering()["peer-4"] == "pending"  # it fires after an hour


def test_alerts_fire_on_what_they_are_for_and_not_on_a_peer_that_is_well() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    for what in (("check", "rules", "rpel-alerts.yml"), ("test", "rules", "rpel-alerts-test.yml")):
        done = subprocess.run([promtool, *what], cwd=DEPLOY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = re.findall(r"alertname: (\w+)", (DEPLOY / "rpel-alerts-test.yml").read_text())
    assert sorted(tested) == sorted(2 * re.findall(r"- alert: (\w+)", ALERTS))


def test_unit_is_clean_for_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    text = (DEPLOY / "rpel-peer.service").read_text().replace("/opt/rpel/bin/rpel", "/bin/true")
    unit = tmp_path / "rpel-peer.service"
    unit.write_text(text)
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "rpel-peer" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
