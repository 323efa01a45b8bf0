"""The demonstration shows robust and plain averaging under an attacker that stays in the network."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.commands import left_running

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Shown:
    """What a demonstration printed, and the folder it left."""

    folder: Path
    result: dict[str, Any]
    errors: str

    def rounds(self, network: str, peer: int) -> list[dict[str, Any]]:
        """The log of one peer."""
        text = (self.folder / network / f"peer-{peer}" / "rounds.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def demonstrate(folder: Path, *arguments: str) -> Shown:
    command = [sys.executable, "-m", "rpel", "network", "demo", "--out", str(folder), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert left_running(folder) == []
    return Shown(folder, json.loads(done.stdout), done.stderr)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Peers 1 to 4 are honest, peer 5 is not."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    return demonstrate(folder, "--peers", "5", "--byzantine", "1", "--rounds", "4")


def test_demo_runs_both_networks_and_prints_accuracies(small: Shown) -> None:
    assert set(small.result) == {
        "peers", "byzantine", "rounds", "pull", "b_hat", "attack", "accuracy_mean", "accuracy_worst",
        "accuracy_mean_averaging", "accuracy_worst_averaging", "outcomes", "seconds",
    }  # fmt: skip
    sizes = [small.result[key] for key in ("peers", "byzantine", "rounds", "pull", "b_hat", "attack")]
    assert sizes == [5, 1, 4, 4, 1, "foe"]
    for end in ("", "_averaging"):
        assert 0 <= small.result[f"accuracy_worst{end}"] <= small.result[f"accuracy_mean{end}"] <= 1
    assert set(small.result["outcomes"]) == {"aggregated", "local_only", "caught_up"}
    assert 0 < sum(small.result["outcomes"].values()) <= 4 * 4
    assert "only 1 honest one may be late" in small.errors
    for network in ("robust", "averaging"):
        keys = [(small.folder / network / f"peer-{i}" / "peer.key").read_bytes() for i in range(1, 6)]
        assert len(set(keys)) == 5
        deeds = (small.folder / network / "peer-5" / "stdout").read_text().splitlines()
        assert {json.loads(deed)["attack"] for deed in deeds} == {"foe"}


@pytest.mark.parametrize("network", ["robust", "averaging"])
def test_hostile_member_of_the_demo_is_never_excluded(small: Shown, network: str) -> None:
    evidence = sorted((small.folder / network).glob("peer-*/state/evidence/*"))
    assert evidence == []
    results = [line["results"].get("peer-5") for i in range(1, 5) for line in small.rounds(network, i)]
    assert "ok" in results
    assert "refused" not in results


@pytest.mark.full
def test_default_demo_shows_robust_at_least_15_points_above_averaging(tmp_path: Path) -> None:
    shown = demonstrate(tmp_path / "out", "--attack", "foe")
    assert shown.result["accuracy_worst"] >= shown.result["accuracy_mean_averaging"] + 0.15
