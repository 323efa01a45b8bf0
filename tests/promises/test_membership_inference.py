"""The command for membership inference: its output and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

import rpel as package
from support.commands import rpel

RUN: dict[str, Any] = {
    "model": "linear", "nodes": 20, "byzantine": 2, "rounds": 16, "batch_size": 50, "partition": "iid",
    "lr": 0.02, "momentum": 0.0, "privacy": "dp(clip=0.1, noise=4, delta=1e-6)",
    "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**RUN, "rounds": 3, "nodes": 8, "byzantine": 1, "momentum": 0.9}
    run = package.simulate(**fields, out=tmp_path_factory.mktemp("runs"))
    return Path(run.path)


def test_attack_command_gives_curves_of_both_members_as_json_table_and_picture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", str(folder), "--points", "2", "--canaries", "40", "--shadows", "2"]
    out, err = rpel(*words, "--json", "--plot", str(tmp_path / "attack.svg"), capsys=capsys)
    content = json.loads(out)
    assert [p["round"] for p in content["curves"]["every round"]] == [2, 3]
    assert [p["met"] for p in content["curves"]["every round"]] == [2, 3]
    assert all(p["met"] <= p["round"] for p in content["curves"]["by draws"])
    assert 0 <= content["curves"]["every round"][-1]["ratio_auc"] <= 1
    stated = json.loads((folder / "certificate.json").read_text())["privacy"]
    # the victim's own, and the largest
    assert 0.9 * stated["epsilon"] < content["stated"][-1] <= stated["epsilon"]
    assert "</svg>" in (tmp_path / "attack.svg").read_text()
    assert "watching: round 3/3" in err
    assert "shadow 2 of 2: round 3/3" in err
    out, _ = rpel(*words[:-2], capsys=capsys)
    assert "a member that sees it by draws" in out
    assert "nothing speaks against it" in out


def test_audit_says_beforehand_what_its_canaries_can_show(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", str(folder), "--points", "1", "--canaries", "40", "--delta"]
    out, err = rpel(*words, "1e-4", "--json", capsys=capsys)
    content = json.loads(out)
    assert content["delta"] == 1e-4
    assert content["most"] == pytest.approx(2.1, abs=0.1)
    stated = json.loads((folder / "certificate.json").read_text())["privacy"]
    assert content["stated"][-1] < stated["epsilon"]  # that of the run is at 1e-6
    said = f"40 canaries can show an epsilon of at most {content['most']:.2f}"
    assert err.index(said) < err.index("watching")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--canaries 3", "3 canaries"),
        ("--delta 0.05", "200 canaries show no epsilon at delta 0.05"),
        ("--delta 2", "delta 2"),
        ("--shadows 3", "shadows 3 must be even, since they come in pairs: the nearest is 4"),
        ("--victim 7", "victim 7 is none of the 7 honest nodes: the last is 6"),
        ("--points 0", "a curve needs at least 1 point, not 0"),
    ],
)
def test_attack_command_refuses_bad_options(
    options: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = rpel("audit", str(folder), *options.split(), capsys=capsys, code=2)
    assert words in err
    assert err.count("\n") == 1
    assert not out
