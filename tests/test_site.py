"""The site: its reference leaves nothing out, its names exist, and its figure answers as the planner does."""

import ast
import doctest
import json
import random
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

import rpel
from rpel.attacks import about as attacks
from rpel.peer.config.membership import Member, Membership
from rpel.peer.config.settings import Config
from rpel.rules.registry import about as rules
from rpel.runs.columns import COLUMNS, DECLARED
from support.paths import ROOT

DOCS = ROOT / "docs"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def in_code(text: str) -> set[str]:
    """What stands in backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_public_name_is_in_the_reference() -> None:
    described = set(re.findall(r"auto(?:function|class):: (?:rpel\.)?(\w+)", page("reference/api")))
    assert described >= set(rpel.__all__) - {"__version__"}


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (
            "reference/files",
            [
                key
                for record in (Membership, Member, Config)
                for key in record.model_fields
                if key != "members"
            ],
        ),
    ],
)
def test_every_key_of_a_file_is_in_the_reference(where: str, names: list[str]) -> None:
    assert set(names) <= in_code(page(where))


def test_table_of_columns_is_on_the_page_of_files_and_says_what_each_means() -> None:
    assert "../_generated/columns.md" in page("reference/files")
    assert {column.name for column in DECLARED if column.meaning} == set(COLUMNS)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r"^([a-z_/A-Z-]+\*?)$", page("index"), re.MULTILINE)
    pages = {
        str(path.relative_to(DOCS).with_suffix(""))
        for path in DOCS.rglob("*.md")
        if path.parent.name[0] != "_"
    }
    assert {name for name in pages if not any(fnmatch(name, entry) for entry in listed)} == {"index"}
    assert {entry for entry in listed if "/" in entry} <= pages


def test_bridge_tables_use_existing_rpel_names() -> None:
    lines = page("coming_from").split("## In a training loop")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    tables = [[row[0].strip("`") for row in rows if len(row) == columns] for columns in (5, 4)]
    for named, known in zip(tables, (rules(), attacks()), strict=True):
        assert len(named) >= 10
        assert set(named) - {"rpel", "---"} <= {name for name, _ in known}


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_python_on_a_page_is_python(path: Path) -> None:
    """Blocks that the build does not execute, because they need a network or a library, at least parse."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    for block in blocks:
        ast.parse(block if ">>>" not in block else doctest.script_from_examples(block))
    assert path.read_text("utf-8").count("```") % 2 == 0, "a block is not closed"


@needs_node
def test_figure_in_the_page_answers_as_the_planner_does() -> None:
    coins = random.Random(0)
    cases = [
        (nodes, max(1, int(nodes * coins.uniform(0.01, 0.3))), coins.choice([10, 200, 2000]), confidence)
        for confidence in (0.9, 0.99, 0.9999)
        for nodes in (10, 11, 30, 100, *(int(10 ** coins.uniform(1, 4.3)) for _ in range(12)))
    ]
    program = (
        f"const {{ plan }} = require({json.dumps(str(ROOT / 'docs/_static/pull.js'))});"
        f"console.log(JSON.stringify({json.dumps(cases)}.map(([n, b, T, p]) => plan(n, b, T, p, n).chosen)))"
    )
    assert NODE is not None
    answers = json.loads(
        subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True).stdout
    )
    for (nodes, byzantine, rounds, confidence), actual in zip(cases, answers, strict=True):
        expected = rpel.plan(nodes=nodes, byzantine=byzantine, rounds=rounds, confidence=confidence)
        assert (actual["s"], actual["bHat"]) == (expected.pull, expected.b_hat)
        assert actual["probability"] == pytest.approx(expected.probability, rel=1e-6)
