"""Pages of the documentation that promise something are executed as they stand."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from support.commands import rpel
from support.paths import ROOT


def cells(page: str) -> list[str]:
    """The blocks of Python of a tutorial, in order."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text("utf-8")
    return re.findall(r"^```(?:\{code-cell\}|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_five_networks_of_ten_lines_each_train_as_the_tutorial_has_them() -> None:
    actual, names = cells("any_network"), dict[str, Any]()
    assert len(actual) == 5
    for cell in actual:
        statements = [line for line in cell.splitlines() if line]
        assert len(statements) <= 10
        torch.manual_seed(0)
        exec(compile(cell, "any_network.md", "exec"), names)
        result = names["result"]
        worst = result.accuracy_worst if result.more_is_better else 1 - result.final["metric.error_worst"]
        assert worst > 0.85, cell


FASTER = {"heart": {"rounds": "3"}, "reviews": {"rounds": "1", "local-steps": "1"}}
FASTER |= {"writers": {"rounds": "1", "local-steps": "1", "nodes": "12", "byzantine": "2"}}
FASTER |= {"shakespeare": {"rounds": "1", "local-steps": "1", "eval-size": "2"}}
"""What makes a page's runs short; its words and its Python stay."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "page", [page if page == "heart" else pytest.param(page, marks=pytest.mark.full) for page in FASTER]
)
def test_commands_and_the_python_of_a_federation_s_tutorial_run(
    page: str,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RPEL_DATA", str(shared_data))
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text("utf-8")
    runs = [shlex.split(line, comments=True) for line in re.findall(r"^rpel (run .*)$", text, re.MULTILINE)]
    assert runs
    for run in runs:
        rpel(
            *run,
            *(word for key, value in FASTER[page].items() for word in (f"--{key}", value)),
            capsys=capsys,
        )
    capsys.readouterr()
    for cell in cells(page):
        exec(compile(cell, f"{page}.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 1
