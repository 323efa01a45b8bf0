"""The page that sets the paper beside what we measured: its tables are what its data say,
and hide nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import paper_results as tool
import rpel
from kept_runs import Archive
from rpel.runs.certificate import versions
from rpel.spec import Spec
from rpel.theory import reduction

HEAD = "curve,x,seed,round,accuracy_mean,accuracy_worst,accuracy_lowest,bytes,run\n"


def reproduced(out: Path, name: str, rows: list[str], figure: str = "Figure 4 (x)") -> None:
    """What rpel reproduce leaves of one panel: every row's run has a certificate."""
    runs = list(dict.fromkeys(row.rpartition(",")[2] for row in rows))
    for k, run in enumerate(runs):
        proof = {"plan": {"b_hat": 6}, "max_observed": 5 + k % 2, "held": True, "versions": {"code": "abc"}}
        (out / "runs" / run).mkdir(parents=True)
        (out / "runs" / run / "certificate.json").write_text(json.dumps(proof))
    (out / f"{name}.csv").write_text(HEAD + "\n".join(rows) + "\n")
    for picture in (name, "figure-4"):
        (out / f"{picture}.svg").write_text("<svg/>")
    entry = {
        "name": name,
        "figure": figure,
        "title": "t",
        "scale": "full",
        "note": "200 rounds, 2 seeds",
        "files": [],
    }
    (out / "index.json").write_text(json.dumps([entry | {"runs": [f"runs/{run}" for run in runs]}]))


def cells(text: str) -> list[list[str]]:
    """The rows of a Markdown table without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """A comparison of four methods with two seeds, a sweep, and nothing else."""
    methods = {"RPEL": 0.98, "CS+": 0.8, "GTS": 0.96, "ClippedGossip": 0.9}
    rows = [
        f"{label},,{seed},{t},{accuracy - seed / 100},0.1,{accuracy / 2},10,{label}-{seed}"
        for label, accuracy in methods.items() for seed in (0, 1) for t in (100, 200)
    ]  # fmt: skip
    reproduced(tmp_path / "a", "alie-mean-s3-b1", rows)
    swept = [f"{label},{x},0,200,0.9,0.{x},0.{x},10,{label}-{x}" for label in ("ALIE", "FOE") for x in (4, 6)]
    reproduced(tmp_path / "b", "extra-pull", swept, "Beyond the paper")
    for name in "ab":
        tool.take(tmp_path / name, tmp_path / "kept")
    return tool.Panels(tmp_path / "kept")


def test_tables_hold_the_last_round_of_every_seed(kept: Any) -> None:
    rows = cells(tool.of_runs(kept, ["alie-mean-s3-b1"]))
    assert rows[0] == [
        "n = 30, s = 3, b = 1",
        "RPEL",
        "200",
        "0.980, 0.970",
        "0.100, 0.100",
        "5, 6 of 6",
        "0.0",
    ]
    assert len(rows) == 4
    compared = cells(tool.of_methods(kept, ["alie-mean-s3-b1"]))
    expected = ["0.980, 0.970", "0.800, 0.790", "0.960, 0.950", "0.900, 0.890", "+0.020"]
    assert compared == [["n = 30, s = 3, b = 1", *expected]]
    assert cells(tool.of_sweep(kept, ["extra-pull"]))[0] == ["4", "0.900", "0.400", "0.900", "0.400"]


def test_paper_page_names_panels_not_run(kept: Any) -> None:
    assert "not run" in tool.of_runs(kept, ["mnist-left"])
    assert "not run" in tool.of_methods(kept, ["alie-mean-s3-b0"])
    assert "not run" in tool.of_sweep(kept, ["extra-b-hat"])
    assert "not run" in tool.of_fractions(kept, ["fraction-1000"])
    made = {row[0]: row[1:] for row in cells(tool.of_figures(kept, []))[:-2]}
    assert made["Figure 4"] == ["1 of 9", "200 rounds, 2 seeds"]
    assert made["Figure 21"] == ["0 of 1", "not run"]
    assert "Runs: 12; the plan held in 12. Code versions (runs): abc (12)." in tool.of_figures(kept, [])


def test_only_marked_tables_are_written(kept: Any) -> None:
    page = "Before.\n\n<!-- methods alie-mean-s3-b1 -->\nold\n<!-- end -->\n\nAfter.\n"
    text = tool.written(page, kept)
    assert text.startswith("Before.\n\n<!-- methods alie-mean-s3-b1 -->\n| panel |")
    assert text.endswith("|\n<!-- end -->\n\nAfter.\n")
    assert tool.written(text, kept) == text


def test_pictures_come_as_the_paper_arranges_them(kept: Any) -> None:
    assert {path.name for path in kept.folder.glob("*.svg")} == {"figure-4.svg", "extra-pull.svg"}


# --- the page itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", tool.PAGES, ids=lambda path: path.stem)
def test_paper_page_matches_its_data(path: Path) -> None:
    page = path.read_text("utf-8")
    assert tool.MARK.search(page)
    assert tool.written(page, tool.Panels(tool.PAGE.with_suffix(""))) == page


def test_every_paper_figure_has_a_verdict_and_valid_links() -> None:
    page = tool.PAGE.read_text("utf-8")
    verdicts = page.partition("| figure | the paper says |")[2].partition("\n\n")[0]
    named = set[int]()
    for first in re.findall(r"^\| (\d[\d, to]*) ", verdicts, re.MULTILINE):
        numbers = [int(number) for number in re.findall(r"\d+", first)]
        named |= set(range(numbers[0], numbers[-1] + 1)) if "to" in first else set(numbers)
    assert named == set(range(1, 22))
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (tool.PAGE.parent / link).exists(), link


def finished(folder: Path, name: str, spec: str, accuracies: list[float | None]) -> None:
    """The small files of a finished run, one accuracy (or none) a round."""
    (folder / name).mkdir(parents=True)
    (folder / name / "spec.toml").write_text(spec)
    rows = ({"round": t, "accuracy_mean": a, "accuracy_worst": a} for t, a in enumerate(accuracies, 1))
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    proof = {"plan": {"b_hat": 3}, "max_observed": 2}
    (folder / name / "certificate.json").write_text(json.dumps(proof))


def test_small_files_of_runs_are_kept_and_read_back_the_same(tmp_path: Path) -> None:
    finished(tmp_path / "runs", "a-1", "pull = 6\n", [None, 0.5])
    archive = Archive(tmp_path / "kept" / "runs.tar.xz")
    archive.take(tmp_path / "runs")
    archive.write()
    first = archive.path.read_bytes()
    (run,) = Archive(archive.path).runs()
    assert (run.name, run.spec["pull"], [row["accuracy_mean"] for row in run.rows]) == ("a-1", 6, [None, 0.5])
    assert [row["round"] for row in run.evaluated] == [2]
    again = Archive(archive.path)
    again.take(tmp_path / "runs")
    again.write()
    assert archive.path.read_bytes() == first


def test_cifar10_verdict_uses_the_papers_schedule_or_says_partial(tmp_path: Path) -> None:
    spec = 'name = "cifar10-20"\nattack = "alie"\npull = {}\nalpha = 0.5\nlr = [[500, 0.5], [{}, 0.004]]\n'
    finished(
        tmp_path / "runs", "long", spec.format(6, 2000), [None] * 499 + [0.6] + [None] * 1498 + [0.75, 0.8]
    )
    finished(tmp_path / "runs", "begun", spec.format(19, 2000), [None] * 998 + [0.8, 0.7])
    finished(tmp_path / "runs", "short", spec.format(6, 120), [0.8] * 120)
    archive = Archive(tmp_path / "runs.tar.xz")
    archive.take(tmp_path / "runs")
    archive.write()
    assert cells(tool.KINDS["long"](tool.Panels(tmp_path), [])) == [
        ["6", "ALIE", "α = 0.5", "0", "2,000", "0.600", "", "", "0.800", "0.800", "1,999", "2 of 3"],
        [
            "19",
            "ALIE",
            "α = 0.5",
            "0",
            "the first 1,000",
            "",
            "0.700",
            "",
            "0.700",
            "0.700",
            "never",
            "2 of 3",
        ],
    ]


def test_measured_contraction_stands_beside_the_lemma(tmp_path: Path) -> None:
    spec = 'dataset = "mnist"\nmethod = "{}"\nrule = "nnm+trimmed_mean"\nattack = "sign_flipping"\n'
    sizes = "nodes = 30\nbyzantine = 6\npull = 15\n"
    for k, method in enumerate(("rpel", "rpel", "all-to-all")):
        finished(tmp_path / "runs", f"{k}", spec.format(method) + sizes, [])
        rows = [{"alpha_realised": None}, {"alpha_realised": 0.25 + k, "lambda_realised": 0.01}]
        (tmp_path / "runs" / f"{k}" / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    archive = Archive(tmp_path / "runs.tar.xz")
    archive.take(tmp_path / "runs")
    archive.write()
    promised = reduction(30, 6, 15, 3)
    assert promised is not None
    (row,) = cells(tool.KINDS["reductions"](tool.Panels(tmp_path), []))
    assert row[:7] == ["mnist", "30", "6", "15", "3", "SF", "2 of 2 runs"]
    assert [float(cell) for cell in (row[7], row[10])] == pytest.approx(
        [promised.alpha, promised.lambda_], rel=0.01
    )
    assert (row[8:10], row[11:]) == (["0.750", "1.25"], ["0.0100", "0.0100"])


def test_pages_of_presets_list_every_seed_of_a_setting_once(tmp_path: Path) -> None:
    spec = 'dataset = "mnist"\nmethod = "{}"\nrule = "{}"\nattack = "alie"\nrounds = {}\nseed = {}\n'
    sizes = "nodes = 30\nbyzantine = 6\npull = 15\n"
    runs = [
        ("rpel", "mean", 200, 1),
        ("rpel", "mean", 200, 0),
        ("rpel", "mean", 60, 2),
        ("gts", "gts", 200, 0),
    ]
    for k, fields in enumerate([*runs, runs[0]]):
        finished(tmp_path / "runs", f"{k}", spec.format(*fields) + sizes, [0.5, 0.9 - fields[3] / 10])
    archive = Archive(tmp_path / "runs.tar.xz")
    archive.take(tmp_path / "runs")
    archive.write()
    rows = cells(tool.KINDS["settings"](tool.Panels(tmp_path), ["mnist"]))
    ends = "0.9000, 0.8000"
    assert rows == [["rpel", "mean", "30", "6", "15", "3", "alie", "0, 1", ends, ends, "2, 2"]]
    (row,) = cells(tool.KINDS["settings"](tool.Panels(tmp_path), ["baselines"]))
    assert row[0] == "gts"


MADE_ON = {"processor": "AuthenticAMD 25 17"}
"""Certificates of that commit do not name it."""


@pytest.mark.full
def test_kept_run_made_again_has_the_same_numbers(shared_data: Path) -> None:
    """Equal to the last digit on the processor and torch that made it, else within a point."""
    runs = Archive(tool.PAGE.with_suffix("") / "runs.tar.xz").runs()
    kept = next(
        run for run in runs if run.name.startswith("mnist-n30-b1-s3-rpel-alie") and run.spec["seed"] == 0
    )
    fields = {
        key: value
        for key, value in kept.spec.items()
        if key in Spec.model_fields and key not in ("out", "workers")
    }
    again = rpel.simulate(**fields | {"data_dir": str(shared_data)})
    here, there = versions(), MADE_ON | kept.proof["versions"]
    if all(here[key] == there[key] for key in ("processor", "torch")):
        rows = [[{**row, "seconds": None} for row in table] for table in (again.rows, kept.rows)]
        assert rows[0] == rows[1]
    else:
        ends = [
            [table[-1][key] for key in ("accuracy_mean", "accuracy_worst")]
            for table in (again.rows, kept.rows)
        ]
        assert ends[0] == pytest.approx(ends[1], abs=0.01)
