"""The results pages: their tables are what the archives of runs say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import results as tool
import rpel
from rpel.runs.certificate import versions
from rpel.spec import Request

MADE_ON = {"processor": "AuthenticAMD 25 17"}
"""Certificates of that commit do not name it."""


@pytest.mark.parametrize("name", tool.PAGES)
def test_results_page_matches_its_archive(name: str) -> None:
    page = (tool.DOCS / f"{name}.md").read_text("utf-8")
    assert tool.MARK.search(page)
    assert tool.written(name) == page


def test_every_paper_figure_has_a_verdict_and_valid_links() -> None:
    path = tool.DOCS / "results" / "paper.md"
    page = path.read_text("utf-8")
    verdicts = page.partition("| figure | the paper says |")[2].partition("\n\n")[0]
    named = set[int]()
    for first in re.findall(r"^\| (\d[\d, to]*) ", verdicts, re.MULTILINE):
        numbers = [int(number) for number in re.findall(r"\d+", first)]
        named |= set(range(numbers[0], numbers[-1] + 1)) if "to" in first else set(numbers)
    assert named == set(range(1, 22))
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (path.parent / link).exists(), link


def test_small_files_of_runs_are_kept_and_read_back_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "KEPT", tmp_path)
    run = tmp_path / "runs" / "a-1"
    run.mkdir(parents=True)
    (tmp_path / "page").mkdir()
    (run / "spec.toml").write_text('pull = 6\ndata_dir = "/home/somebody"\n')
    rows: list[dict[str, Any]] = [{"round": 1, "accuracy_mean": None}, {"round": 2, "accuracy_mean": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "certificate.json").write_text(json.dumps({"plan": {"b_hat": 3}, "max_observed": 2}))
    tool.take("page", tmp_path / "runs")
    first = (tmp_path / "page" / "runs.tar.xz").read_bytes()
    (kept,) = tool.archive("page")
    assert (kept.name, kept.spec, kept.rows, kept.evaluated) == ("a-1", {"pull": 6}, rows, rows[1:])
    tool.take("page", tmp_path / "runs")
    assert (tmp_path / "page" / "runs.tar.xz").read_bytes() == first


@pytest.mark.full
def test_kept_run_made_again_has_the_same_numbers(shared_data: Path) -> None:
    """Equal to the last digit on the processor and torch that made it, else within a point."""
    kept = next(
        r for r in tool.archive("paper") if r.name.startswith("mnist-n30-b1-s3-rpel-alie") and not r.seed
    )
    left_out = ("out", "workers")
    fields = {
        key: value for key, value in kept.spec.items() if key in Request.model_fields and key not in left_out
    }
    again = rpel.simulate(**fields | {"data_dir": str(shared_data)})
    here, there = versions(), MADE_ON | kept.proof["versions"]
    if all(here[key] == there[key] for key in ("processor", "torch")):
        assert [row | {"seconds": None} for row in again.rows] == [
            row | {"seconds": None} for row in kept.rows
        ]
    else:
        ends = [[t[-1][key] for key in ("accuracy_mean", "accuracy_worst")] for t in (again.rows, kept.rows)]
        assert ends[0] == pytest.approx(ends[1], abs=0.01)
