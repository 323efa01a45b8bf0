"""The shape of src/rpel: modules, lines, import cycles, the longest files and functions.

Run from anywhere: python tools/shape.py [--json]. Lines are all lines of a file; a function's go from ``def``
to its end, docstring included. A cycle is a set of modules that import each other, directly or not; a
package's ``__init__`` that re-exports its own modules is not counted.
"""

import ast
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grimp
import networkx as nx

SOURCE = Path(__file__).parents[1] / "src" / "rpel"
LONGEST = 10


@dataclass(frozen=True)
class Shape:
    """What is printed."""

    modules: int
    lines: int
    functions: int
    median_function: float
    packages: dict[str, tuple[int, int]]
    cycles: list[list[str]]
    longest_files: list[tuple[int, str]]
    longest_functions: list[tuple[int, str]]


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, place) of every function and method in a file."""
    tree = ast.parse(path.read_text("utf-8"))
    return [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(SOURCE.parent)}:{node.lineno} {node.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]


def cycles() -> list[list[str]]:
    """Sets of modules that import each other."""
    graph = grimp.build_graph("rpel")
    edges = [
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
        if not (imported.startswith(f"{module}.") or module.startswith(f"{imported}."))
    ]
    return sorted(
        sorted(cycle) for cycle in nx.strongly_connected_components(nx.DiGraph(edges)) if len(cycle) > 1
    )


def measure() -> Shape:
    """Read the sources."""
    files = sorted(SOURCE.rglob("*.py"))
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    packages: dict[str, tuple[int, int]] = {}
    for path, length in lengths.items():
        inside = path.relative_to(SOURCE).parts
        name = inside[0] + "/" if len(inside) > 1 else "(modules of their own)"
        count, total = packages.get(name, (0, 0))
        packages[name] = count + 1, total + length
    files_by_length = sorted(
        ((n, str(path.relative_to(SOURCE.parent))) for path, n in lengths.items()), reverse=True
    )
    longest = sorted((one for path in files for one in functions(path)), reverse=True)
    return Shape(
        modules=len(files),
        lines=sum(lengths.values()),
        functions=len(longest),
        median_function=median(length for length, _ in longest),
        packages=packages,
        cycles=cycles(),
        longest_files=files_by_length[:LONGEST],
        longest_functions=longest[:LONGEST],
    )


def text(shape: Shape) -> str:
    """For people."""
    rows = [f"{shape.modules} modules, {shape.lines:,} lines"]
    rows += [
        f"  {name:<24}{count:>4} modules {lines:>6,} lines" for name, (count, lines) in shape.packages.items()
    ]
    rows += ["import cycles: none" if not shape.cycles else "import cycles:"]
    rows += [f"  {' · '.join(cycle)}" for cycle in shape.cycles]
    rows += ["longest files", *(f"  {n:>5} {path}" for n, path in shape.longest_files)]
    rows += [f"longest of {shape.functions:,} functions (median {shape.median_function:g} lines)"]
    rows += [f"  {n:>5} {path}" for n, path in shape.longest_functions]
    return "\n".join(rows)


if __name__ == "__main__":
    measured = measure()
    print(json.dumps(asdict(measured)) if "--json" in sys.argv[1:] else text(measured))
