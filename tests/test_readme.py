"""The README's examples run as printed."""

import ast
import doctest
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from rpel.cli import app
from rpel.spec import load
from rpel.studies.paper import chosen
from rpel.studies.study import read
from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """The rpel commands in shell blocks of the README and the pages beside it, one by one."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [
        block for page in pages for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for path in sorted((ROOT / "examples").glob("*.py")) for line in shown(path)]
    return [line for line in lines if line.startswith("rpel ")]


def shown(path: Path) -> list[str]:
    """The indented lines of a module's docstring, which are commands."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("folder", ["examples", "tools", "benchmarks"])
def test_commands_in_module_docstrings_stand_on_a_line_each(folder: str) -> None:
    known = re.compile(r"(?:^|\s)(?:python (?:examples|tools|benchmarks)/|rpel [a-z])")
    lines = [line for path in sorted((ROOT / folder).glob("*.py")) for line in shown(path)]
    assert lines
    assert [line for line in lines if len(known.findall(line)) != 1 or not known.match(line)] == []


def expanded(word: str) -> list[str]:
    """A word with braces as a shell reads it.

    >>> expanded("s{3,4}-b{0,1}")
    ['s3-b0', 's3-b1', 's4-b0', 's4-b1']
    """
    values = re.search(r"\{([^{}]*)\}", word)
    if values is None:
        return [word]
    heads = [word[: values.start()] + choice for choice in values[1].split(",")]
    return [head + tail for head in heads for tail in expanded(word[values.end() :])]


# What an argument names is there; finding it raises if it is not.
NAMED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "reproduce": lambda given: bool(given["listed"]) or bool(chosen(given["names"])),
    "run": lambda given: bool(load(given["source"])),
    "sweep": lambda given: all(cell.spec for cell in read(ROOT / given["file"])),
}


@pytest.mark.parametrize("line", commands())
def test_command_in_the_documentation_is_one_that_rpel_takes(line: str) -> None:
    """Its options exist, its values are of the right kind, and the panels,
    presets and files it names are there."""
    _, name, *arguments = shlex.split(line.partition(" > ")[0].removesuffix(" &"), comments=True)
    arguments = [word for argument in arguments for word in expanded(argument.replace("…", "x"))]
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):  # rpel network new …
        command, name, arguments = command.commands[arguments[0]], f"{name} {arguments[0]}", arguments[1:]
    given = command.make_context(name, arguments, resilient_parsing=False).params
    assert set(given) == {parameter.name for parameter in command.params if parameter.expose_value}
    assert name not in NAMED or NAMED[name](given)


def test_python_example_gives_what_the_readme_shows() -> None:
    outcome = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_readme_has_no_dead_link() -> None:
    links = re.findall(r"\]\(([^)h][^)]*)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TOP = r"(?:src|tests|tools|benchmarks|examples|docs|deploy)/"


def test_files_of_this_repository_that_a_page_names_are_there() -> None:
    """`src/rpel/algorithm.py` from the top, or `simulation/engine.py` from the package,
    as in docs/architecture.md."""
    packages = "|".join(
        path.name for path in (ROOT / "src" / "rpel").iterdir() if (path / "__init__.py").exists()
    )
    named = re.compile(rf"`({TOP}[\w./-]+|(?:{packages})/[\w./-]+(?:\.py|/))[` :]")
    actual = {(page, path) for page in PAGES for path in named.findall(page.read_text("utf-8"))}
    assert len(actual) > 50
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page, path in sorted(actual)
        if not ((ROOT / path).exists() or (ROOT / "src" / "rpel" / path).exists())
    ]
    assert missing == []


@pytest.mark.full
def test_first_picture_and_caption_are_what_make_demo_produces(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    caption = re.search(r"ends at (\d+) % accuracy at every node, plain averaging stays at chance", README)
    robust, averaging, _ = re.findall(r" (\d\.\d+) +(\d\.\d+)$", done.stdout, re.MULTILINE)
    assert caption is not None
    assert round(100 * float(robust[1])) == int(caption[1])
    assert float(averaging[0]) < 0.15
    drawn = (tmp_path / "demo" / "accuracy.svg").read_text()
    shown = (ROOT / "docs" / "images" / "demo.svg").read_text()
    assert drawn.count("<path") == shown.count("<path")
