"""deploy/: alerts and dashboard ask for what a peer's page has; the rules fire on what they are for."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rpel.peer.core.protocol import Report
from rpel.peer.io.metrics import Metrics
from rpel.types import Measured, Outcome, PullResult
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
ALERTS = (DEPLOY / "rpel-alerts.yml").read_text()
_METRIC = re.compile(r"\b(rpel_\w+)(?:\{([^}]*)\})?")


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every alert and every panel."""
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
        round=1, outcome=Outcome.AGGREGATED, asked=3, received=1, trim=1, results=results, degraded=0, frozen=False,
        saved=True, seconds=0.1, offset=0.0,
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
    assert asked
    for name, matchers in asked:
        assert name in scraped, f"{where}: there is no {name}"
        for label, how, value in re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers):
            assert all(label in labels for labels in scraped[name]), f"{where}: {name} has no label {label}"
            if how == "=":
                assert any(labels[label] == value for labels in scraped[name]), f"{where}: nothing has {label}={value}"
        by = re.findall(r"(?:by|without) \(([^)]*)\)", expression)
        assert all(label.strip() in {*scraped[name][0], "le"} for group in by for label in group.split(","))


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
