"""Compare the size of the project with its budgets, and keep the size of src from rising.

    python tools/size.py             lines of code of each part, beside its budget
    python tools/size.py --check     fail if src has more lines than tools/size.lowest says
    python tools/size.py --ratchet   write the lines of src to tools/size.lowest, if they are fewer

A line of code has a token that is neither a comment nor a docstring, so documentation costs nothing.
Templates and scripts inside the package count, too.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = {
    "src/rpel/*.py": 2_500, "src/rpel/planning": 620, "src/rpel/backend": 1_250, "src/rpel/rules": 900,
    "src/rpel/attacks": 560, "src/rpel/tasks": 2_100, "src/rpel/data": 700, "src/rpel/simulation": 1_850,
    "src/rpel/runs": 550, "src/rpel/studies": 1_450, "src/rpel/peer": 4_850, "src/rpel/cli": 950,
    "src/rpel/integrations": 420, "src": 19_000, "tests": 16_000, "tools": 450, "benchmarks": 1_400,
}  # fmt: skip
LOWEST = "tools/size.lowest"
ROUNDED = 50
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of Python that hold code.

    >>> sorted(code_lines('"About."\\n\\nx = 1  # one\\n# nothing\\ny = (2 +\\n     x)\\n'))
    [3, 5, 6]
    """
    used = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                used -= set(range(first, last + 1))
    return used


def size(part: str, root: Path = ROOT) -> int:
    """Return the lines of code of a folder, or of the modules that a pattern names."""
    pattern = part if "*" in part else f"{part}/**/*.py"
    count = sum(len(code_lines(path.read_text("utf-8"))) for path in root.glob(pattern))
    if part.startswith("src") and "*" not in part:
        others = (path for path in (root / part).rglob("*") if path.suffix in {".j2", ".js", ".html", ".css"})
        count += sum(bool(line.strip()) for path in others for line in path.read_text("utf-8").splitlines())
    return count


def longest_functions(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield the lines of code and the place of every function of src."""
    for path in root.glob("src/**/*.py"):
        text = path.read_text("utf-8")
        lines = code_lines(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                inside = lines & set(range(node.lineno, node.end_lineno + 1))
                yield len(inside), f"{path.relative_to(root)}:{node.lineno} {node.name}"


def check(root: Path = ROOT) -> int:
    """Return 1, with a sentence, if src has more lines of code than any commit before."""
    now, lowest = size("src", root), int((root / LOWEST).read_text("utf-8"))
    if now > lowest:
        print(f"src has {now:,} lines of code, {now - lowest:,} more than {LOWEST} allows: remove some")
        return 1
    print(f"src has {now:,} lines of code of {lowest:,}; to keep a lower figure: tools/size.py --ratchet")
    return 0


def ratchet(root: Path = ROOT) -> int:
    """Lower the stored figure to the present size of src, rounded up to fifties; it never rises.

    Rounding leaves changes that land at the same time a little space.
    """
    file = root / LOWEST
    lowest = min(-(-size("src", root) // ROUNDED) * ROUNDED, int(file.read_text("utf-8")))
    file.write_text(f"{lowest}\n", "utf-8")
    return check(root)


def report(root: Path = ROOT) -> int:
    """Print the size of each part beside its budget, and the longest functions."""
    for part, budget in BUDGETS.items():
        count = size(part, root)
        print(f"{part:24}{count:7,} of {budget:7,}{f'   {count - budget:,} over' if count > budget else ''}")
    print(f"{'modules in src':24}{len(list(root.glob('src/**/*.py'))):7,}")
    for count, place in sorted(longest_functions(root), reverse=True)[:5]:
        print(f"{count:4} lines: {place}")
    return 0


if __name__ == "__main__":
    commands = {"--check": check, "--ratchet": ratchet}
    sys.exit(commands.get(" ".join(sys.argv[1:]), report)())
