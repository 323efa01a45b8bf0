"""The README's examples run as printed."""

import doctest
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text()
CONSOLE = re.findall(r"```console\n\$ rpel (.*?)\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("arguments", "expected"), CONSOLE)
def test_the_command_line_example_prints_what_the_readme_shows(arguments: str, expected: str) -> None:
    found = subprocess.run([sys.executable, "-m", "rpel", *shlex.split(arguments)], capture_output=True, text=True)
    assert found.returncode == 0
    assert found.stdout.strip() == expected.strip()


def test_the_python_example_gives_what_the_readme_shows() -> None:
    found = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_readme_has_both_kinds_of_example_and_no_dead_link() -> None:
    assert CONSOLE
    links = re.findall(r"\]\(([^)h][^)]*)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)
