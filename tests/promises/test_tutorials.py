"""Pages of the documentation that promise something are executed as they stand."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import rpel
from support.paths import ROOT


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / "docs" / f"{page}.md").read_text("utf-8")


def cells(text: str) -> list[str]:
    """Return the blocks of Python of a text, in order."""
    return re.findall(r"^```(?:\{code-cell\}|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_five_networks_of_ten_lines_each_train_as_the_page_has_them() -> None:
    section = read("bring_your_own").partition("## Five networks")[2].partition("\n## ")[0]
    actual, names = cells(section), dict[str, Any]()
    assert len(actual) == 5
    for cell in actual:
        statements = [line for line in cell.splitlines() if line]
        assert len(statements) <= 10
        torch.manual_seed(0)
        exec(compile(cell, "bring_your_own.md", "exec"), names)
        result = names["result"]
        worst = result.accuracy_worst if result.more_is_better else 1 - result.final["metric.error_worst"]
        assert worst > 0.85, cell


FASTER = {"heart-4": {"rounds": "3"}, "reviews-16": {"rounds": "1", "local_steps": "1"}}
FASTER |= {"femnist-writers": {"rounds": "1", "local_steps": "1", "nodes": "12", "byzantine": "2"}}
FASTER |= {"shakespeare": {"rounds": "1", "local_steps": "1", "eval_size": "2"}}
"""What makes the runs of a federation short."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "preset", [name if name == "heart-4" else pytest.param(name, marks=pytest.mark.full) for name in FASTER]
)
def test_commands_and_python_for_data_with_real_owners_run(
    preset: str,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPEL_DATA", str(shared_data))
    section = read("bring_your_own").partition("## Data with real owners\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^rpel run \S+ (.*)$", "\n".join(re.findall(rf"^.*{preset}.*$", section, re.M)), re.M)
    runs = [["run", preset, *shlex.split(line, comments=True)] for line in lines]
    assert runs
    shorter = [word for key, value in FASTER[preset].items() for word in ("-s", f"{key}={value}")]
    for run in runs:
        rpel(*run, *shorter, capsys=capsys)
    capsys.readouterr()
    for cell in cells(section):
        exec(compile(cell, "bring_your_own.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == len(runs)
