"""The checks of the repository itself: tools/check_tests.py, tools/size.py, and what texts may refer to."""

import ast
import doctest
import re
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

sys.path.append(str(ROOT / "tools"))
import check_tests
import size

EMPTY = {
    "returns": "def test_a():\n    if x:\n        return\n    assert x",
    "nothing": "def test_a():\n    compute()",
    "one branch": "def test_a():\n    if x:\n        assert x",
    "a helper that only computes": "def prepare():\n    compute()\n\ndef test_a():\n    prepare()",
    "a helper that may not assert": "def verify():\n    if x:\n        assert x\n\ndef test_a():\n    "
    "verify()",
    "an inner function never used": "def test_a():\n    def inner():\n        assert x\n    compute()",
}
WHOLE = {
    "assert": "def test_a():\n    assert x",
    "raises": "def test_a():\n    with pytest.raises(ValueError):\n        compute()",
    "both branches": "def test_a():\n    if x:\n        assert x\n    else:\n        assert y",
    "a helper": "def verify():\n    assert x\n\ndef test_a():\n    verify()",
    "a helper by way of another": "def a():\n    b()\n\ndef b():\n    assert x\n\ndef test_a():\n    a()",
    "a method": "class A:\n    def verify(self):\n        assert x\n\ndef test_a():\n    A().verify()",
    "an inner coroutine": "def test_a():\n    async def inner():\n        assert x\n    asyncio.run(inner())",
    "an inner function that returns": "def test_a():\n    def inner():\n        return 1\n    assert inner()",
    "numpy": "def test_a():\n    np.testing.assert_allclose(x, y)",
}


@pytest.mark.parametrize("source", EMPTY.values(), ids=list(EMPTY))
def test_test_that_may_check_nothing_is_found(source: str) -> None:
    assert len(list(check_tests.faults(source, {}))) == 1


@pytest.mark.parametrize("source", WHOLE.values(), ids=list(WHOLE))
def test_test_that_always_checks_is_left_alone(source: str) -> None:
    assert list(check_tests.faults(source, {})) == []


def test_functions_of_the_support_package_count_if_they_assert() -> None:
    names = check_tests.asserting(
        ast.parse("def same(a, b):\n    assert a == b\n\ndef make():\n    pass"), set()
    )
    support, head = {"support.runs": names}, "from support.runs import make, same\n\ndef test_a():\n    "
    assert list(check_tests.faults(f"{head}same(1, 1)", support)) == []
    assert len(list(check_tests.faults(f"{head}make()", support))) == 1
    assert len(list(check_tests.faults("def test_a():\n    x.same()", support))) == 1


def write_project(root: Path, lines: int, lowest: int) -> Path:
    (root / "src" / "rpel").mkdir(parents=True)
    (root / "tools").mkdir()
    module = '"""About."""\n\n# a comment\ndef f() -> int:\n    """Docstring."""\n    return 1\n'
    (root / "src" / "rpel" / "module.py").write_text(module + "\n".join(["x = 1"] * (lines - 2)))
    (root / size.LOWEST).write_text(str(lowest))
    return root


@pytest.mark.parametrize(("lines", "status"), [(9, 0), (10, 0), (11, 1)])
def test_src_may_not_have_more_lines_of_code_than_ever(lines: int, status: int, tmp_path: Path) -> None:
    assert size.check(write_project(tmp_path, lines, lowest=10)) == status


@pytest.mark.parametrize(("lines", "status", "stored"), [(90, 0, 100), (100, 0, 100), (200, 1, 120)])
def test_stored_size_of_src_only_falls(lines: int, status: int, stored: int, tmp_path: Path) -> None:
    root = write_project(tmp_path, lines, lowest=120)
    assert size.ratchet(root) == status
    assert int((root / size.LOWEST).read_text()) == stored


def test_definitions_compute_what_they_say() -> None:
    outcome = doctest.testfile(str(ROOT / "docs" / "reference" / "definitions.md"), module_relative=False)
    assert outcome.attempted >= 4
    assert outcome.failed == 0


def test_no_text_refers_to_a_file_that_is_not_in_the_repository() -> None:
    outside = re.compile(
        r"\b(REFERENCE|INTERFACE|DESIGN)(\.md|\b(?=[ ,:;)]))|\bthe issue\b|\bplan of the house\b"
    )
    places = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("src", "tests", "docs", "examples", "benchmarks", "tools", "deploy"):
        places += [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md", ".toml", ".sh"}]
    texts = {path: path.read_text("utf-8") for path in places if path.name != "test_tools.py"}
    assert len(texts) > 200
    assert [f"{path}: {actual}" for path, text in texts.items() for actual in outside.findall(text)] == []
