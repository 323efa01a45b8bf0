"""Fails when a test can pass without having checked anything, or has a name of more than 80 characters.

A test function must not ``return`` early, and every way through it must meet an assertion: an ``assert``, a
``pytest.raises`` or ``warns``, a subprocess run with ``check=True``, or a call of a function that asserts.
Which do is found in the test's own module and among what it imports from tests/support; beyond those, a name
that starts with ``assert`` or ``check`` is believed. A loop counts as run, and a function defined inside a
test counts where its name is used.

Run from anywhere: python tools/check_tests.py
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
Function = ast.FunctionDef | ast.AsyncFunctionDef
LONGEST = 80  # characters of a test's name
EXPECTING = {"raises", "warns", "deprecated_call", "fail"}


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside, except what belongs to functions and classes defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from own_nodes(child)


def enforced(node: ast.Call) -> bool:
    """Whether it is a call with ``check=True``."""
    return any(
        k.arg == "check" and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in node.keywords
    )


def called(node: ast.Call) -> str:
    """The last part of the name that is called."""
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


class Checker:
    """Decides whether statements always meet an assertion, given the names of functions that do."""

    def __init__(self, asserting: set[str]) -> None:
        self.asserting = asserting

    def names(self, name: str) -> bool:
        return name in self.asserting or name in EXPECTING or name.lstrip("_").startswith(("assert", "check"))

    def expression(self, node: ast.AST) -> bool:
        """Whether evaluating it calls something that asserts,
        or hands such a function to somebody who may."""
        return any(
            (isinstance(one, ast.Call) and (self.names(called(one)) or enforced(one)))
            or (isinstance(one, ast.Name) and one.id in self.asserting)
            for one in ast.walk(node)
        )

    def statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assert():
                return True
            case ast.If(test=test, body=body, orelse=otherwise):
                return self.expression(test) or (self.block(body) and self.block(otherwise))
            case (
                ast.For(iter=head, body=body)
                | ast.AsyncFor(iter=head, body=body)
                | ast.While(test=head, body=body)
            ):
                return self.expression(head) or self.block(body)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return any(self.expression(item.context_expr) for item in items) or self.block(body)
            case ast.Try(body=body, finalbody=final, orelse=otherwise):
                return self.block(body) or self.block(final) or self.block(otherwise)
            case ast.Match(cases=cases):
                return all(self.block(case.body) for case in cases)
            case ast.Raise(exc=ast.Call() as raised):
                return called(raised) == "AssertionError"
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return False
            case _:
                return self.expression(node)

    def block(self, body: Iterable[ast.stmt]) -> bool:
        return any(self.statement(one) for one in body)

    def function(self, node: Function) -> bool:
        """Whether calling it always meets an assertion;
        functions defined inside count where their names are used."""
        inner = [
            one for one in ast.walk(node) if isinstance(one, Function | ast.ClassDef) and one is not node
        ]
        known = self.asserting | {one.name for one in inner if Checker(self.asserting).anything(one)}
        return Checker(known).block(node.body)

    def anything(self, node: Function | ast.ClassDef) -> bool:
        """Whether there is an assertion anywhere inside."""
        return any(isinstance(one, ast.Assert) for one in ast.walk(node)) or self.expression(node)


def asserting(tree: ast.Module, known: set[str]) -> set[str]:
    """The names known and those of a module's functions and methods that assert,
    directly or through each other."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    names = set(known)
    while True:
        more = {node.name for node in functions if node.name not in names and Checker(names).function(node)}
        if not more:
            return names
        names |= more


def imported(tree: ast.Module, support: dict[str, set[str]]) -> set[str]:
    """The functions that assert among those that a module takes from the support package."""
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in support]
    return {
        one.asname or one.name
        for node in taken
        for one in node.names
        if one.name in support[str(node.module)]
    }


def faults(source: str, support: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the tests of one file, each as "line name: fault"; ``support``: what asserts,
    by module."""
    tree = ast.parse(source)
    known = asserting(tree, imported(tree, support))
    for node in ast.walk(tree):
        if isinstance(node, Function) and node.name.startswith("test_"):
            for inside in own_nodes(node):
                if isinstance(inside, ast.Return):
                    yield (
                        f"{inside.lineno} {node.name}: returns early; make no such case, or assume, or "
                        "skip it"
                    )
            if len(node.name) > LONGEST:
                yield (
                    f"{node.lineno} {node.name}: {len(node.name)} characters; say subject and promise in "
                    f"{LONGEST}"
                )
            if not Checker(known - {node.name}).function(node):
                yield f"{node.lineno} {node.name}: may end without having checked anything"


def main() -> int:
    support = {
        f"support.{path.stem}": asserting(ast.parse(path.read_text("utf-8")), set())
        for path in (TESTS / "support").glob("*.py")
    }
    paths = sorted(TESTS.rglob("test_*.py"))
    problems = [
        f"{path.relative_to(TESTS.parent)}:{fault}"
        for path in paths
        for fault in faults(path.read_text("utf-8"), support)
    ]
    print("\n".join([*problems, f"{len(paths)} test files, {len(problems)} faults"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
