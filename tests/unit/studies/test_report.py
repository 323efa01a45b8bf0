"""The report: right numbers, nothing hostile comes through, nothing leaves the machine, and it works."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import markupsafe
import numpy as np
import pytest

from rpel.runs.certificate import Robustness, survival
from rpel.runs.folder import RunFolder
from rpel.spec import Request, load_folder, spec_hash, to_toml
from rpel.studies import plots
from rpel.studies.report import charts, collect, compared, of_runs, settings
from support.browser import in_chromium
from support.commands import rpel
from support.paths import ROOT

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&"
PLAN = {"pull": 4, "b_hat": 1, "fraction": 0.2, "probability": 0.97, "confidence": 0.99}
DIGESTS = {"sample": "ab" * 32}
PAPER: dict[str, Any] = {"nodes": 30, "byzantine": 1, "pull": 3}


def put(top: Path, rounds: int = 4, worst: float = 0.5, folder: str | None = None, **fields: Any) -> Path:
    """A run folder as a run leaves it: round t has accuracy t/10, the worst node half of it."""
    base: dict[str, Any] = {"name": "quickstart", "nodes": 10, "byzantine": 2, "pull": 4, "b_hat": 1}
    spec = Request(**{**base, "rule": "median", "rounds": rounds, **fields})
    here = RunFolder(top / (folder or f"{spec.name}-{spec_hash(spec, DIGESTS)}"))
    here.write_text("spec.toml", to_toml(spec))
    rows = [_row(t, t % 2 == 0 or t == rounds, spec.seed, worst) for t in range(1, rounds + 1)]
    here.write_text("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    proof = {
        "plan": {**PLAN, "pull": spec.pull, "b_hat": spec.b_hat}, "guarantee": "plan", "held": True,
        "max_observed": 1, "histogram": [20, 12], "violations": [], "violations_total": 0, "seed": spec.seed,
        "versions": {"rpel": "0.1.0", "code": "cda04cba281a"}, "threads": 1, "data": DIGESTS, "objects": {},
    }  # fmt: skip
    here.write_json("certificate.json", proof)
    return here.path


def _row(t: int, evaluated: bool, seed: int, worst: float) -> dict[str, Any]:
    mean = 0.1 * t + 0.01 * seed
    values = {"accuracy_mean": mean, "accuracy_worst": worst * mean, "accuracy_median": mean, "loss": 1 / t}
    shown = values if evaluated else dict.fromkeys(values)
    rest = {"consensus": 0.5 / t, "messages": 40, "bytes": 4000, "byzantine_max": 1, "seconds": 0.5}
    return {"round": t, **shown, **rest, "degraded": 0, "diverged": 0}


def put_nodes(path: Path, rounds: list[int], accuracy: list[list[float]]) -> None:
    """nodes.npz: a row for each of these rounds, a column a node."""
    RunFolder(path).write_arrays("nodes.npz", {"round": np.array(rounds), "accuracy": np.array(accuracy)})


def change(path: Path, name: str, **values: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**content, **values}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two pulls, two attacks with three seeds at one of them, and a method that asks everybody."""
    top = tmp_path / "runs"
    for seed in range(3):
        put(top / "deep" / "down", seed=seed, attack="alie")
        put(top, seed=seed, attack="foe", worst=0.9)
    put(top, pull=6)
    put(top, method="all-to-all", pull=9, b_hat=2)
    return top


# --- what belongs together ----------------------------------------------------------------------------------


def test_seeds_make_one_curve_and_networks_make_charts(runs: Path) -> None:
    groups = settings(collect([runs]).runs)
    assert [(group.label, len(group)) for group in groups] == [
        ("rpel · median · alie", 3), ("rpel · median · foe", 3), ("rpel · median · alie", 1),
        ("all-to-all · median · alie", 1),
    ]  # fmt: skip
    four, six = charts(groups)
    common = "model mnist, partition dirichlet, lr 0.5, batch_size 25, local_steps 1, rounds 4"
    assert six.common == common
    assert (four.title, six.slug) == ("mnist-sample: n = 10, b = 2, s = 4", "mnist-sample-n10-b2-s6")
    assert [one.label.split(" ")[0] for one in four.settings] == ["rpel", "rpel", "all-to-all"]
    assert [one.label.split(" ")[0] for one in six.settings] == ["rpel", "all-to-all"]
    assert groups[0].interval("accuracy_worst") == pytest.approx((0.205, 0.2, 0.21))
    assert (groups[0].total("messages"), groups[0].total("bytes")) == (480, 48_000)


def test_settings_that_differ_are_never_averaged_and_say_how(tmp_path: Path) -> None:
    put(tmp_path / "a", partition="dirichlet(0.1)")
    put(tmp_path / "a", lr="steps(2:0.5, 4:0.1)")
    assert [group.label for group in settings(collect([tmp_path / "a"]).runs)] == [
        "rpel · median · alie · partition dirichlet · lr steps(2:0.5, 4:0.1)",
        "rpel · median · alie · partition dirichlet(0.1) · lr 0.5",
    ]  # fmt: skip
    put(tmp_path / "b", b_hat=1)
    put(tmp_path / "b", b_hat=2)
    assert [group.label[-7:] for group in settings(collect([tmp_path / "b"]).runs)] == ["b_hat 1", "b_hat 2"]


def test_hostile_nodes_given_by_number_are_told_from_drawn_ones(tmp_path: Path) -> None:
    put(tmp_path, byzantine=2)
    put(tmp_path, byzantine=[3, 5])
    (chart,) = charts(settings(collect([tmp_path]).runs))
    assert {one.label.rpartition("byzantine ")[2] for one in chart.settings} == {"2", "3,5"}
    assert "each of 8 honest nodes" in of_runs(collect([tmp_path]))


def test_crowded_chart_is_split_and_shows_every_setting_once(tmp_path: Path) -> None:
    for attack, alpha, steps in product(("alie", "foe", "sf"), (0.5, 1, 2), (1, 3)):
        put(tmp_path, attack=attack, partition=f"dirichlet({alpha})", local_steps=steps)
    drawn = charts(settings(collect([tmp_path]).runs))
    assert [len(chart.settings) for chart in drawn] == [3] * 6
    assert len({chart.slug for chart in drawn}) == 6
    assert drawn[0].title.endswith("local_steps 1, attack alie")
    assert [one.label for one in drawn[0].settings] == [
        f"rpel · median · alie · partition dirichlet({alpha})" for alpha in (0.5, 1, 2)
    ]


def test_copy_of_a_run_counts_once_and_a_different_twin_is_numbered(tmp_path: Path) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b")
    put(tmp_path / "c", worst=0.7)
    collection = collect([tmp_path, tmp_path / "a"])
    assert len(collection.runs) == 3
    assert [group.label[-4:] for group in settings(collection.runs)] == ["alie", " (2)"]
    assert "1 more are copies" in of_runs(collection)


def test_run_with_damaged_node_metrics_shows_the_worst_of_each_round(tmp_path: Path) -> None:
    (put(tmp_path) / "nodes.npz").write_text("no archive")
    (group,) = settings(collect([tmp_path]).runs)
    table = plots.table_of(group.runs)
    assert table["accuracy_lowest"].tolist() == table["accuracy_worst"].tolist()


# --- runs that are not at the paper's size ------------------------------------------------------------------


def test_runs_that_are_not_at_full_size_are_stamped_wherever_they_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "runs", **PAPER)
    put(tmp_path / "runs", attack="foe", **PAPER)
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    command = ("report", str(tmp_path / "runs"), "-o", str(page), "--figures", str(figures), "--json")
    content = json.loads(rpel(*command, capsys=capsys)[0])
    assert [one["stamp"] for one in content["settings"]] == ["SMOKE", "SMOKE"]
    text = page.read_text()
    assert "<title>SMOKE: rpel report</title>" in text
    assert text.count('data-key="SMOKE · rpel · median · alie"') == 2, "in both tables"
    assert all(">SMOKE</text>" in path.read_text() for path in figures.glob("*.svg"))


def test_chart_with_some_short_runs_says_which(tmp_path: Path) -> None:
    put(tmp_path, rounds=60, dataset="mnist", **PAPER)
    put(tmp_path, rounds=200, dataset="mnist", **PAPER)
    (chart,) = charts(settings(collect([tmp_path]).runs))
    assert chart.stamp == "partly 30 % of the rounds"
    assert {one.label.partition(" · ")[0] for one in chart.settings} == {"rpel", "30 % of the rounds"}


# --- the page -----------------------------------------------------------------------------------------------


def test_equal_runs_give_equal_bytes_wherever_they_lie(runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "runs"
    shutil.copytree(runs, elsewhere)
    assert of_runs(collect([runs])) == of_runs(collect([elsewhere]))


def test_report_loads_nothing_and_shows_no_path_of_its_machine(runs: Path) -> None:
    (put(runs, seed=7) / "certificate.json").unlink()
    text = of_runs(collect([runs]))
    targets = set(re.findall(r"""\s(?:src|href|action|poster|data)\s*=\s*["']?([^"'\s>]*)""", text))
    assert all(target.startswith(("data:image/svg+xml;base64,", "#run-")) for target in targets)
    bare = re.sub(r'src="data:[^"]*"', "", text)
    assert not re.search(r"url\(|@import|https?:|//\w+\.\w|fetch\(|XMLHttp|WebSocket", bare)
    assert "default-src 'none'" in text
    assert str(runs.parent) not in text


def test_hostile_texts_come_through_as_text(tmp_path: Path) -> None:
    path = put(tmp_path, folder="<b onclick=x>&", model=HOSTILE, data_dir=HOSTILE, seed=1)
    change(path, "certificate.json", versions={HOSTILE: HOSTILE}, data={HOSTILE: HOSTILE})
    named = put(tmp_path, seed=2)
    (named / "spec.toml").write_text((named / "spec.toml").read_text().replace("quickstart", "<script>x"))
    (put(tmp_path, folder="<i>", seed=3) / "certificate.json").unlink()
    collection = collect([tmp_path])
    assert (len(collection.runs), len(collection.unfinished), len(collection.broken)) == (1, 1, 1)
    text = of_runs(collection)
    assert text.count("<script") == 1
    assert not re.search(r"<(b|i)[\s>]", re.sub(r"<b>[\w ]+:</b>", "", text).replace("<b>SHA-256", ""))
    assert not re.search(r"<img(?! alt=)", text)
    assert str(markupsafe.escape(HOSTILE)) in text


def test_unfinished_and_broken_folders_are_listed_and_stop_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = put(runs, seed=7)
    (unfinished / "certificate.json").unlink()
    damaged: dict[str, tuple[str, str]] = {
        "cut": ("metrics.jsonl", '{"round": 1'), "bytes": ("certificate.json", "\x00"),
        "toml": ("spec.toml", "= 1"),
    }  # fmt: skip
    for name, (file, content) in damaged.items():
        (put(runs, folder=name, seed=8) / file).write_text(content)
    (put(runs, folder="headless", seed=8) / "spec.toml").unlink()
    put(runs, folder=os.fsdecode(b"\xff"), seed=9)
    page = tmp_path / "page.html"
    out, err = rpel(
        "report", str(runs), "-o", str(page), "--csv", str(tmp_path / "a.csv"), "--json", capsys=capsys
    )
    listing = json.loads(out)
    assert (listing["runs"], listing["unfinished"]) == (9, [str(unfinished)])
    assert set(listing["broken"]) == {str(runs / name) for name in [*damaged, "headless"]}
    assert len(err.splitlines()) == 5
    text = page.read_text()
    assert f"runs/{unfinished.name}: 4 of 4 rounds; go on: rpel resume runs/{unfinished.name}" in text
    assert text.count('class="run"') == 9


def test_report_without_runs_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for name, words in (("nothing", "no run in"), ("nowhere", "no folder")):
        with pytest.raises(ValueError, match=rf"{words} '.*/{name}'"):
            collect([tmp_path / name])


def test_certificate_shows_plan_counts_violations_and_checksums(tmp_path: Path) -> None:
    violations = [{"round": 3, "node": 5, "count": 2}, {"round": 4, "node": 6, "count": 2}]
    found = {"held": False, "violations": violations, "violations_total": 2, "histogram": [20, 10, 2]}
    change(put(tmp_path), "certificate.json", **found)
    text = of_runs(collect([tmp_path]))
    words = (
        "b_hat = 1",
        "97.0000 %",
        "violated 2 times",
        "round 3 node 5: 2",
        "0: 20, 1: 10, 2: 2",
        "ab" * 32,
    )
    assert [word for word in words if word not in text] == []
    assert "the plan was violated in 1" in text


@pytest.mark.parametrize(
    ("rule", "robustness", "sampling", "second"),
    [
        ("nnm+trimmed_mean", Robustness.PROVEN, 'class="held"', 'class="held" data-key="survives b_hat"'),
        ("caf", Robustness.UNKNOWN, 'class="held"', 'class="plain" data-key="no bound known"'),
        ("mean", Robustness.NONE, 'class="plain"', 'class="violated" data-key="not robust"'),
    ],
)
def test_that_the_sampling_held_never_says_that_the_rule_does(
    tmp_path: Path, rule: str, robustness: Robustness, sampling: str, second: str
) -> None:
    put(tmp_path, rule=rule)
    assert survival(rule, 4, 1).robustness is robustness
    text = of_runs(collect([tmp_path]))
    assert text.count(f'<td {sampling} data-key="0">within the plan') == 2, "in both tables"
    assert text.count(f"<td {second}>") == 2
    assert ("the rule of 1 setting is not robust" in text) == (robustness is Robustness.NONE)
    green = '"held"' in text.partition("<main>")[2]
    assert green == (robustness is not Robustness.NONE), "nothing about mean is green"


def test_overflowed_and_undeclared_columns_are_shown_and_compared(tmp_path: Path) -> None:
    for seed in range(2):
        path = put(tmp_path, seed=seed)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "loss": None, "fairness": 0.25 * row["round"] + seed} for row in rows]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = of_runs(collect([tmp_path]))
    assert "overflowed" in text
    assert "fairness" in text
    (group,) = settings(collect([tmp_path]).runs)
    final = compared(group, group)["final"]["fairness"]
    assert (final["a"], final["difference"]) == (1.5, 0)


# --- files --------------------------------------------------------------------------------------------------


def test_csv_holds_every_number_of_every_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv"))
    rpel("report", str(runs), *files, capsys=capsys)
    lines = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    for path in runs.rglob("quickstart-*"):
        mine = [line for line in lines if line["run"] == path.name]
        rows = RunFolder(path).metrics()
        assert len(mine) == len(rows) == 4
        for line, row in zip(mine, rows, strict=True):
            assert {key: float(line[key]) if line[key] else None for key in row} == row
            assert int(line["seed"]) == load_folder(path).seed


def test_figures_have_equal_bytes_and_paper_figures_are_one_column_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        put(tmp_path / "runs", seed=seed, attack="mine(text='<b>')")
    base = ("report", str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--figures")
    for name, style in (("a", "screen"), ("b", "screen"), ("paper", "paper")):
        rpel(*base, str(tmp_path / name), "--style", style, capsys=capsys)
    names = [f"mnist-sample-n10-b2-s4-{metric}" for metric in ("accuracy", "consensus", "loss")]
    for name in names:
        for suffix in ("svg", "png"):
            first, second = ((tmp_path / folder / f"{name}.{suffix}").read_bytes() for folder in "ab")
            assert first == second
        text = (tmp_path / "a" / f"{name}.svg").read_text()
        assert "&lt;b&gt;" in text
        assert "prefers-color-scheme:dark" in text
        pdf = (tmp_path / "paper" / f"{name}.pdf").read_bytes()
        width = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", pdf)
        assert width is not None
        assert float(width[1]) == pytest.approx(3.4 * 72, abs=0.1)
        assert b"STIXGeneral" in pdf


def test_latex_table_leaves_out_constant_columns_and_escapes_names(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(runs, rule="nnm+trimmed_mean", seed=0)
    table = tmp_path / "table.tex"
    rpel("report", str(runs), "-o", str(tmp_path / "page.html"), "--latex", str(table), capsys=capsys)
    text = table.read_text()
    head, *body = [line for line in text.splitlines() if "&" in line]
    assert head == r"setting & data & s & seeds & mean & worst node \\"
    assert len(body) == 5
    numbers = r"3 & 0.4100 (0.4000 to 0.4200) & 0.2050 (0.2000 to 0.2100) \\"
    assert body[0] == rf"rpel · median · alie & mnist-sample & 4 & {numbers}"
    assert any(r"nnm+trimmed\_mean" in line for line in body)
    assert "% mean over the seeds (lowest to highest)" in text


def test_reading_runs_needs_no_torch() -> None:
    script = (
        "import sys, rpel.studies.report;"
        "assert not {'torch', 'numba', 'matplotlib', 'scipy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- in a browser -------------------------------------------------------------------------------------------

DRIVE = (ROOT / "tests" / "browser" / "report.js").read_text("utf-8")


def test_report_sorts_and_opens_runs_in_a_browser(runs: Path, tmp_path: Path) -> None:
    found = in_chromium(of_runs(collect([runs])), DRIVE, tmp_path)
    assert found["problems"] == []
    assert found["broken_images"] == 0
    numbers, words = found["sorted"]["mean"], found["sorted"]["setting"]
    assert numbers["first"] == sorted(numbers["first"], reverse=True)
    assert numbers["again"] == sorted(numbers["again"])
    assert (numbers["aria"], words["aria"]) == (["descending", "ascending"], ["ascending", "descending"])
    assert words["again"] == sorted(words["again"], reverse=True)
    assert found["link_opens"]
    assert found["width"] <= found["window"], "the page does not scroll sideways"


def test_report_runs_no_hostile_text_in_a_browser(tmp_path: Path) -> None:
    for seed in range(2):
        folder = f"<img src=x onerror=alert({seed})>"
        put(tmp_path / "runs", model=HOSTILE, seed=seed, folder=folder)
    found = in_chromium(of_runs(collect([tmp_path / "runs"])), DRIVE, tmp_path)
    assert found["problems"] == []
    assert found["broken_images"] == 0
