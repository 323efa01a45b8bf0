"""The report keeps its promises: right numbers, nothing hostile comes through, nothing leaves the machine,
it works."""

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import markupsafe
import numpy as np
import pytest
import typer

from rpel.cli.report import report
from rpel.experiments.panels import scale_of
from rpel.report import chart_groups, collect, group_runs, page
from rpel.report.collect import command
from rpel.report.drawing import values
from rpel.report.groups import compared
from rpel.runs.certificate import Robustness, survival
from rpel.runs.folder import RunFolder
from rpel.runs.record import Run
from rpel.runs.table import Table
from rpel.simulation.methods import resolve
from rpel.spec import Spec, load, load_folder, spec_hash, to_toml
from support.browser import in_chromium

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&"
PLAN = {"pull": 4, "b_hat": 1, "fraction": 0.2, "probability": 0.97, "confidence": 0.99}

DIGESTS = {"sample": "ab" * 32}


def put(top: Path, rounds: int = 4, worst: float = 0.5, folder: str | None = None, **fields: Any) -> Path:
    """A run folder as a run leaves it, without the run: round t has accuracy t/10,
    the worst node half of it."""
    base: dict[str, Any] = {
        "name": "quickstart",
        "nodes": 10,
        "byzantine": 2,
        "pull": 4,
        "b_hat": 1,
        "rule": "median",
    }
    spec = Spec(**{**base, "rounds": rounds, **fields})
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
    rest |= {"degraded": 0, "diverged": 0}
    return {"round": t, **shown, **rest}


def put_nodes(path: Path, accuracy: list[list[float]]) -> None:
    """nodes.npz of a run evaluated in rounds 2 and 4: a row a round, a column a node."""
    RunFolder(path).write_arrays("nodes.npz", {"round": np.array([2, 4]), "accuracy": np.array(accuracy)})


def change(path: Path, name: str, **values: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps({**content, **values}))


def rpel_report(*arguments: str) -> None:
    """The command, parsed as on the command line."""
    app = typer.Typer()
    app.command()(report)
    app(list(arguments), standalone_mode=False)


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


def test_seeds_make_one_curve_and_networks_make_panels(runs: Path) -> None:
    groups = group_runs(collect([runs]).runs)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("rpel · median · alie", 3), ("rpel · median · foe", 3), ("rpel · median · alie", 1),
        ("all-to-all · median · alie", 1),
    ]  # fmt: skip
    four, six = chart_groups(groups)
    assert (
        six.common
        == "model mnist, partition dirichlet, alpha 1.0, lr 0.5, batch_size 25, local_steps 1, rounds 4"
    )
    assert (four.title, six.slug) == ("mnist-sample: n = 10, b = 2, s = 4", "mnist-sample-n10-b2-s6")
    assert [setting.label.split(" ")[0] for setting in four.groups] == ["rpel", "rpel", "all-to-all"]
    assert [setting.label.split(" ")[0] for setting in six.groups] == ["rpel", "all-to-all"]


def test_bands_and_intervals_span_the_seeds(runs: Path) -> None:
    setting = group_runs(collect([runs]).runs)[0]
    assert setting.rounds("loss") == [2, 4]
    assert setting.curve("accuracy_mean")[:, -1] == pytest.approx([0.41, 0.40, 0.42])
    mean, low, high = setting.interval("accuracy_worst")
    half = 4.302652729 * 0.005 / 3**0.5  # Student's t with two degrees of freedom
    assert (mean, low, high) == pytest.approx((0.205, 0.205 - half, 0.205 + half))
    assert (setting.total("messages"), setting.total("bytes")) == (480, 48_000)


def test_settings_that_differ_are_never_averaged_and_say_how(tmp_path: Path) -> None:
    put(tmp_path, alpha=0.1)
    put(tmp_path, alpha=1.0, lr="2:0.5,4:0.1")
    (panel,) = chart_groups(group_runs(collect([tmp_path]).runs))
    assert [setting.label for setting in panel.groups] == [
        "rpel · median · alie · alpha 0.1 · lr 0.5", "rpel · median · alie · alpha 1.0 · lr 2:0.5,4:0.1",
    ]  # fmt: skip


def test_crowded_panel_is_split_by_what_makes_the_fewest_parts(tmp_path: Path) -> None:
    for attack, alpha, steps in product(("alie", "foe", "sf"), (0.5, 1.0, 10.0), (1, 3)):
        put(tmp_path, attack=attack, alpha=alpha, local_steps=steps)
    put(tmp_path, byzantine=3, alpha=0.5)
    first, *_, tenth, last = drawn = chart_groups(group_runs(collect([tmp_path]).runs))
    assert [len(panel.groups) for panel in drawn] == [3] * 6 + [1]
    assert first.title == "mnist-sample: n = 10, b = 2, s = 4, local_steps 1, alpha 0.5"
    assert first.slug == "mnist-sample-n10-b2-s4-local_steps1-alpha0.5"
    assert [setting.label for setting in first.groups] == [
        f"rpel · median · {a}" for a in ("alie", "foe", "sf")
    ]
    assert tenth.title.endswith("local_steps 3, alpha 10.0"), "in the order of the values"
    assert last.slug == "mnist-sample-n10-b3-s4"
    assert len({panel.slug for panel in drawn}) == 7


def test_many_values_of_one_field_stay_together(tmp_path: Path) -> None:
    for tenths in range(1, 11):
        put(tmp_path, alpha=tenths / 10)
    assert [len(panel.groups) for panel in chart_groups(group_runs(collect([tmp_path]).runs))] == [10]


def test_chosen_b_hat_tells_settings_apart(tmp_path: Path) -> None:
    put(tmp_path, b_hat=1)
    put(tmp_path, b_hat=2)
    assert [setting.label[-7:] for setting in group_runs(collect([tmp_path]).runs)] == ["b_hat 1", "b_hat 2"]


def test_copy_of_a_run_counts_once_and_a_different_twin_is_numbered(tmp_path: Path) -> None:
    put(tmp_path / "a")
    put(tmp_path / "b")
    put(tmp_path / "c", worst=0.7)
    collection = collect([tmp_path, tmp_path / "a"])
    assert len(collection.runs) == 3
    assert [setting.label[-3:] for setting in group_runs(collection.runs)] == ["(1)", "(2)"]
    assert "1 more are copies" in page(collection)


def test_overflowed_numbers_are_named_in_the_report(tmp_path: Path) -> None:
    for seed in range(3):
        path = put(tmp_path, seed=seed)
        text = (path / "metrics.jsonl").read_text()
        (path / "metrics.jsonl").write_text(re.sub(r'"loss": [\d.]+', '"loss": null', text))
    assert "overflowed" in page(collect([tmp_path]))


def test_dashed_curve_follows_the_node_that_ends_lowest(tmp_path: Path) -> None:
    path = put(tmp_path)  # its worst: .1 and .2
    put_nodes(path, [[0.1, 0.35], [0.6, 0.2]])
    (setting,) = group_runs(collect([tmp_path]).runs)
    assert setting.curve("accuracy_lowest")[0].tolist() == [0.35, 0.2]
    assert setting.curve("accuracy_worst")[0].tolist() == pytest.approx([0.1, 0.2]), (
        "tables keep the worst of a round"
    )
    (panel,) = chart_groups([setting])
    assert values(panel, "accuracy")[0]["columns"][1][0] == [0.35, 0.2]
    assert "dashed: the node that ends lowest</p>" in page(collect([tmp_path]))
    rpel_report(str(tmp_path), "-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv"))
    lines = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert [line["accuracy_lowest"] for line in lines] == ["", "0.35", "", "0.2"]


@pytest.mark.parametrize("damage", ["none", "nan", "text"])
def test_run_without_node_metrics_shows_the_worst_of_each_round(tmp_path: Path, damage: str) -> None:
    path = put(tmp_path)
    if damage == "text":
        (path / "nodes.npz").write_text("no archive")
    elif damage != "none":
        put_nodes(path, [[0.1, float("nan")], [0.2, 0.3]])
    (setting,) = group_runs(collect([tmp_path]).runs)
    assert setting.curve("accuracy_lowest").tolist() == setting.curve("accuracy_worst").tolist()
    assert "ends lowest (1 run without nodes.npz: the worst of each round)" in page(collect([tmp_path]))


# --- runs that are not at full size -------------------------------------------------------------------------


def test_runs_that_are_not_at_full_size_are_stamped_wherever_they_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper: dict[str, Any] = {"nodes": 30, "byzantine": 1, "pull": 3}
    put(tmp_path / "runs", **paper)
    put(tmp_path / "runs", attack="foe", **paper)
    figures = tmp_path / "figures"
    rpel_report(
        str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--figures", str(figures), "--json"
    )
    assert [one["stamp"] for one in json.loads(capsys.readouterr().out)["settings"]] == ["SMOKE", "SMOKE"]
    text = (tmp_path / "page.html").read_text()
    assert "<title>SMOKE: rpel report</title>" in text
    assert "All settings here only show that everything works" in text
    assert text.count('class="stamp"') == 3, "on each chart"
    assert ' <span class="badge">SMOKE</span></h3>' in text
    assert text.count('data-key="SMOKE · rpel · median · alie"') == 2, "in both tables"
    for path in figures.glob("*.svg"):
        assert "SMOKE" in path.read_text()


def test_panel_with_some_short_runs_says_which(tmp_path: Path) -> None:
    paper: dict[str, Any] = {"nodes": 30, "byzantine": 1, "pull": 3, "dataset": "mnist"}
    put(tmp_path, rounds=60, **paper)
    put(tmp_path, rounds=200, **paper)
    (panel,) = chart_groups(group_runs(collect([tmp_path]).runs))
    assert panel.stamp == "partly SHORT"
    assert sorted((scale_of(setting.spec).stamp, setting.label) for setting in panel.groups) == [
        ("", "rpel · median · alie · rounds 200"), ("SHORT", "SHORT · rpel · median · alie · rounds 60"),
    ]  # fmt: skip
    text = page(collect([tmp_path]))
    assert "1 of 2 settings here have fewer rounds" in text
    assert text.count('class="stamp"') == 3


def test_at_full_size_nothing_is_stamped(runs: Path) -> None:
    text = page(collect([runs]))
    assert "<title>rpel report</title>" in text
    assert 'class="stamp"' not in text
    assert '<p class="stamped"' not in text


# --- the page -----------------------------------------------------------------------------------------------


def test_equal_runs_give_equal_bytes_wherever_they_lie(runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "runs"
    shutil.copytree(runs, elsewhere)
    assert page(collect([runs])) == page(collect([elsewhere]))
    rpel_report(str(runs), "-o", str(tmp_path / "a.html"))
    rpel_report(str(elsewhere), "-o", str(tmp_path / "b.html"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_report_links_to_nothing_outside_the_page(runs: Path) -> None:
    text = page(collect([runs]))
    targets = re.findall(r"""(?:src|href|action|poster|data)\s*=\s*["']?([^"'\s>]*)""", text)
    inside = set(re.findall(r'<path id="([^"]+)"', text))
    assert set(targets) <= {"data:,"} | {f"#run-{k}" for k in range(8)} | {f"#{name}" for name in inside}
    assert not re.search(r"url\(|@import|https?:|//\w+\.\w|fetch\(|XMLHttp|WebSocket", text)
    assert "default-src 'none'" in text
    assert str(runs.parent) not in text, "a page shows no path of the machine that made it"


def test_hostile_texts_come_through_as_text(tmp_path: Path) -> None:
    path = put(tmp_path, folder="<b onclick=x>&", model=HOSTILE, attack=HOSTILE, data_dir=HOSTILE, seed=1)
    change(path, "certificate.json", versions={HOSTILE: HOSTILE}, data={HOSTILE: HOSTILE})
    named = put(tmp_path, seed=2)
    (named / "spec.toml").write_text((named / "spec.toml").read_text().replace("quickstart", "<script>x"))
    unfinished = put(tmp_path, folder="<i>", seed=3)
    (unfinished / "certificate.json").unlink()
    collection = collect([tmp_path])
    assert (len(collection.runs), len(collection.unfinished), len(collection.broken)) == (1, 1, 1)
    text = page(collection)
    assert text.count("<script") == 2
    assert not re.search(r"<(img|b|i)[\s>]", re.sub(r"<b>(Guarantee|The \w+):</b>", "", text))
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
    rpel_report(str(runs), "-o", str(tmp_path / "page.html"), "--json")
    out, err = capsys.readouterr()
    listing = json.loads(out)
    assert listing["runs"] == 8
    assert listing["unfinished"] == [str(unfinished)]
    assert set(listing["broken"]) == {str(runs / name) for name in [*damaged, "headless"]}
    assert len(err.splitlines()) == 5
    text = (tmp_path / "page.html").read_text()
    assert f"rpel resume runs/{unfinished.name}" in text
    assert "4 of 4 rounds" in text
    assert text.count('class="run"') == 8


def test_folder_whose_name_is_not_unicode_is_reported(tmp_path: Path) -> None:
    put(tmp_path / "runs", folder=os.fsdecode(b"\xff"))
    rpel_report(str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv"))
    assert (tmp_path / "page.html").read_text().count('class="run"') == 1


def test_report_without_runs_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"no run in '.*/nothing'"):
        rpel_report(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"no folder '.*/nowhere'"):
        rpel_report(str(tmp_path / "nowhere"))
    put(tmp_path / "some")
    with pytest.raises(ValueError, match=r"folder.*file"):
        rpel_report(str(tmp_path / "some"), "-o", str(tmp_path))


def test_certificate_shows_plan_counts_violations_and_checksums(tmp_path: Path) -> None:
    path = put(tmp_path)
    violations = [{"round": 3, "node": 5, "count": 2}, {"round": 4, "node": 6, "count": 2}]
    change(
        path, "certificate.json", held=False, violations=violations, violations_total=2, histogram=[20, 10, 2]
    )
    text = page(collect([tmp_path]))
    for words in (
        "b_hat = 1",
        "97.0000 %",
        "violated 2 times",
        "round 3 node 5: 2",
        "2 times 2 hostile",
        "ab" * 32,
    ):
        assert words in text
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
    text = page(collect([tmp_path]))
    assert text.count(f'<td {sampling} data-key="0.0">within the plan') == 2, "in both tables"
    assert text.count(f"<td {second}>") == 2
    assert ("the rule of 1 setting is not robust" in text) == (robustness is Robustness.NONE)
    green = '"held"' in text.partition("<main>")[2]
    assert green == (robustness is not Robustness.NONE), "nothing about mean is green"


def test_curves_begin_in_round_0_if_evaluated(tmp_path: Path) -> None:
    path = put(tmp_path)
    accuracy = np.array([[0.05, 0.15], [0.1, 0.35], [0.6, 0.2]])
    RunFolder(path).write_arrays("nodes.npz", {"round": np.array([0, 2, 4]), "accuracy": accuracy})
    (setting,) = group_runs(collect([tmp_path]).runs)
    assert setting.rounds("accuracy_mean") == [0, 2, 4]
    assert setting.rounds("loss") == [2, 4]
    assert setting.curve("accuracy_mean")[0].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert setting.curve("accuracy_lowest")[0].tolist() == [0.15, 0.35, 0.2]
    (chart,) = chart_groups([setting])
    assert values(chart, "accuracy")[0]["rounds"] == [0, 2, 4]


# --- numbers, commands, figures -----------------------------------------------------------------------------


def test_csv_holds_every_number_of_every_run(runs: Path, tmp_path: Path) -> None:
    rpel_report(str(runs), "-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv"))
    lines = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    for path in runs.rglob("quickstart-*"):
        mine = [line for line in lines if line["run"] == path.name]
        rows = RunFolder(path).metrics()
        assert len(mine) == len(rows) == 4
        for line, row in zip(mine, rows, strict=True):
            assert {key: float(line[key]) if line[key] else None for key in row} == row
            assert int(line["seed"]) == load_folder(path).seed


def test_figures_are_the_charts_of_the_page_as_files_with_equal_bytes(tmp_path: Path) -> None:
    for seed in range(2):
        put(tmp_path / "runs", seed=seed, attack="<b>")
    for name in "ab":
        rpel_report(
            str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--figures", str(tmp_path / name)
        )
    files = sorted((tmp_path / "a").glob("*.svg"))
    assert [path.name for path in files] == [
        f"mnist-sample-n10-b2-s4-{metric}.svg" for metric in ("accuracy", "consensus", "loss")
    ]
    pictures = sorted((tmp_path / "a").glob("*.png"))
    assert [path.stem for path in pictures] == [path.stem for path in files]
    for path in pictures:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        assert path.read_bytes().startswith(b"\x89PNG")
    page_text = (tmp_path / "page.html").read_text()
    for path in files:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        metric = path.stem.rpartition("-")[2]
        drawn, shown = (
            _lines(text) for text in (path.read_text(), page_text.partition(f'data-metric="{metric}"')[2])
        )
        assert len(drawn) == (2 if metric == "accuracy" else 1)
        assert np.allclose(drawn, shown[: len(drawn)], atol=1e-3)
        assert "rpel · median · &lt;b&gt;" in path.read_text()
        assert "prefers-color-scheme:dark" in path.read_text()


def _lines(text: str) -> list[Any]:
    """The curves of an SVG, each from 0 to 1 from left to right,
    heights against the first point in the same unit."""
    paths = re.findall(r'<g class="line \w+" data-curve="\d+">\s*<path d="([^"]+)"', text)
    curves = [np.array(re.findall(r"[-\d.]+", path), float).reshape(-1, 2) for path in paths]
    return [(curve - curve[0])[:, 1] / np.ptp(curves[0][:, 1]) for curve in curves]


def test_paper_figures_are_one_column_wide_and_embed_their_letters(tmp_path: Path) -> None:
    put(tmp_path / "runs")
    out = ("-o", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures"))
    rpel_report(str(tmp_path / "runs"), *out, "--style", "paper")
    files = sorted((tmp_path / "figures").iterdir())
    assert [path.suffix for path in files] == [".pdf"] * 3
    for path in files:
        match = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", path.read_bytes())
        assert match is not None
        assert float(match[1]) == pytest.approx(3.4 * 72, abs=0.1)
        assert b"STIXGeneral" in path.read_bytes()


def test_latex_table_has_a_row_a_setting_and_escapes_names(runs: Path, tmp_path: Path) -> None:
    put(runs, rule="nnm+trimmed_mean", seed=0)
    rpel_report(str(runs), "-o", str(tmp_path / "page.html"), "--latex", str(tmp_path / "table.tex"))
    text = (tmp_path / "table.tex").read_text()
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == 5
    assert all(line.count(" & ") == 7 and line.endswith(r"\\") for line in body)
    assert any(line.startswith(r"rpel $\cdot$ nnm+trimmed\_mean $\cdot$ alie") for line in body)
    assert any(r"0.4100 $\pm$ 0.0248" in line for line in body), "Student's t over three seeds"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_table_compiles_whatever_names_are_called(tmp_path: Path) -> None:
    for attack in ("alie", r"100% of_it & {more} #1 ^ ~ \end $x$ <ü>"):
        put(tmp_path / "runs", attack=attack)
    rpel_report(
        str(tmp_path / "runs"), "-o", str(tmp_path / "page.html"), "--latex", str(tmp_path / "table.tex")
    )
    head = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table}\end{document}"
    (tmp_path / "whole.tex").write_text(head)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "whole.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-1500:]
    assert (tmp_path / "whole.pdf").stat().st_size > 1000


@pytest.mark.parametrize(
    "spec",
    [
        load("mnist-30").replace(attack="foe", seed=3, pull=15, b_hat=6, rule="nnm+trimmed_mean"),
        Spec(
            name="mine", silent=True, lr="30:0.5,60:0.1", attack_params={"z": 1.5}, model="(1, 28, 28)-L(10)"
        ),
        load("cifar10-20").replace(name="cifar10-20", method="gts", threads=2, data_dir="here"),
    ],
)
def test_command_of_a_run_means_the_same_run(spec: Spec) -> None:
    line = command(spec)
    assert line is not None
    rpel, run, base, *flags = shlex.split(line)
    assert (rpel, run) == ("rpel", "run")
    given: dict[str, Any] = {}
    while flags:
        key = flags.pop(0).removeprefix("--").replace("-", "_")
        given[key] = True if key == "silent" else flags.pop(0)
    again = load(base).replace(**given)
    assert spec_hash(resolve(again).spec, {}) == spec_hash(resolve(spec).spec, {})
    assert (again.name, again.threads) == (spec.name, spec.threads)


def test_run_with_objects_from_python_has_no_command(tmp_path: Path) -> None:
    put(tmp_path, dataset="own", model="own")
    assert "rpel.simulate" in page(collect([tmp_path]))


def test_reading_runs_needs_no_torch() -> None:
    script = (
        "import sys, rpel.report; assert not {'torch', 'numba', 'matplotlib', 'scipy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- in a browser -------------------------------------------------------------------------------------------

DRIVE = (Path(__file__).parent / "browser" / "report.js").read_text("utf-8")


def test_report_toggles_and_sorts_in_a_browser(runs: Path, tmp_path: Path) -> None:
    collection = in_chromium(page(collect([runs])), DRIVE, tmp_path)
    assert collection["problems"] == []
    assert collection["charts"] == 6
    assert collection["toggle"] == {
        "before": True,
        "off": False,
        "pressed": "false",
        "other": True,
        "loss": False,
        "on": True,
    }
    assert collection["worst"] == {"before": True, "off": False}
    assert collection["mean"] == {"off": False, "loss": True}, "one switch for accuracies, none for the loss"
    assert collection["hover"]["shown"]
    assert "round 2" in collection["hover"]["text"]
    assert "mean 0.2100" in collection["hover"]["text"]
    assert "0.2000 to 0.2200" in collection["hover"]["text"]
    assert "round 4" in collection["keyboard"]
    numbers, words = collection["sorted"]["mean"], collection["sorted"]["setting"]
    assert numbers["down"] == sorted(numbers["down"], reverse=True)
    assert numbers["up"] == sorted(numbers["up"])
    assert (numbers["aria"], words["aria"]) == (["descending", "ascending"], ["ascending", "descending"])
    assert words["up"] == sorted(words["up"], reverse=True)
    assert collection["link_opens"]
    assert collection["width"] <= collection["window"], "the page does not scroll sideways"


def test_report_runs_no_hostile_text_in_a_browser(tmp_path: Path) -> None:
    for seed in range(2):
        put(
            tmp_path / "runs",
            model=HOSTILE,
            attack=HOSTILE,
            seed=seed,
            folder=f"<img src=x onerror=alert({seed})>",
        )
    collection = in_chromium(page(collect([tmp_path / "runs"])), DRIVE, tmp_path)
    assert collection["problems"] == []
    assert collection["images"] == 0


def test_real_run_is_reported(tmp_path: Path) -> None:
    from rpel.simulation.api import simulate

    result = simulate(
        "linear", nodes=8, byzantine=1, pull=4, rounds=4, eval_every=2, eval_size=50, out=tmp_path
    )
    (run,) = collect([tmp_path]).runs
    assert isinstance(run, Run)
    assert run.end("accuracy_mean") == result.accuracy_mean
    assert run.certificate.held == result.certificate["held"]
    assert run.curves.quartiles[0] == result.accuracy_worst
    text = page(collect([tmp_path]))
    assert f"{result.accuracy_mean:.4f}" in text
    assert f"by quarters: {result.accuracy_worst:.4f}" in text


def test_column_that_nobody_declared_stands_in_table_report_and_compare(tmp_path: Path) -> None:
    for seed in range(2):
        path = put(tmp_path / "runs", seed=seed)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [{**row, "fairness": 0.25 * row["round"] + seed} for row in lines]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Table(RunFolder(path).metrics())["fairness"].tolist() == [1.25, 1.5, 1.75, 2.0]
    assert "fairness" in page(collect([tmp_path / "runs"]))
    (group,) = group_runs(collect([tmp_path / "runs"]).runs)
    assert compared(group, group)["final"]["fairness"]["a"] == 1.5
