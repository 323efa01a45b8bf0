"""Tables made from the program itself, so that they cannot fall behind it,
and how cells of notebooks are shown."""

import os
import re
import time
from html import escape
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from docutils.nodes import SkipNode, Text, literal_block  # type: ignore[import-untyped]

from rpel.cli import app as cli
from rpel.runs.columns import DECLARED, When
from rpel.spec import Spec, load, presets


def spec_fields() -> str:
    """Every field of a run with its default and its meaning."""
    rows = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, field in Spec.model_fields.items():
        kind = (
            ", ".join(map(str, get_args(field.annotation)))
            if get_origin(field.annotation) is not None
            else ""
        )
        values = kind.replace("|", "or") if "<class" not in kind and "typing" not in kind else ""
        rows.append(f"| `{name}` | {values} | `{field.default}` | {field.description} |")
    return "\n".join(rows) + "\n"


def column_table() -> str:
    """Every column of metrics.jsonl with its meaning."""
    rows = ["| key | meaning | |", "|---|---|---|"]
    rows += [
        f"| `{one.name}` | {one.meaning} | {'' if one.when is When.ALWAYS else one.when.value} |"
        for one in DECLARED
    ]
    return "\n".join(rows) + "\n"


def preset_table() -> str:
    """What each preset sets beyond the defaults."""
    rows = ["| preset | sets |", "|---|---|"]
    for name in presets():
        given = load(name).model_dump(exclude_unset=True, exclude={"name"})
        rows.append(f"| `{name}` | " + ", ".join(f"{key} = {value}" for key, value in given.items()) + " |")
    return "\n".join(rows) + "\n"


def commands() -> str:
    """The help of every command, under a heading of its own."""
    parts = []
    for name, command in typer.main.get_command(cli).commands.items():  # type: ignore[attr-defined]
        for path, one in [
            (name, command),
            *((f"{name} {n}", c) for n, c in getattr(command, "commands", {}).items()),
        ]:
            context = one.make_context(f"rpel {path}", [], resilient_parsing=True, max_content_width=96)
            parts.append(f"## rpel {path}\n\n```text\n{context.get_help()}\n```\n")
    return "\n".join(parts)


def listed_arguments(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """In a docstring, ``name: what it is`` in the lines below ``Heading:`` as a list;
    elsewhere nothing changes."""
    below: int | None = None
    listed: list[str] = []
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if below is None or (line.strip() and indent <= below):
            listed += [""] if below is not None else []
            begins = line.endswith(":") and not line.endswith("::") and i + 1 < len(lines)
            below = indent if begins and lines[i + 1].startswith(" " * (indent + 4)) else None
            listed += [line, ""] if below is not None else [line]
        elif match := re.match(r" +(\**)(\w+(?:, \w+)*)(?: \([^)]*\))?: ", line):
            named = match[1] + match[2]
            bold = f"**{named.replace('*', chr(92) + '*')}**"
            listed.append(f"{' ' * indent}- {line.strip().replace(named, bold, 1)}")
        else:
            listed.append(f"  {line}" if line.strip() else line)
    lines[:] = listed


def write(app: Any) -> None:
    """Write the tables that pages include, before Sphinx reads any page."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    tables = {
        "spec": spec_fields(), "columns": column_table(), "presets": preset_table(), "commands": commands(),
    }  # fmt: skip
    for name, text in tables.items():
        (folder / f"{name}.md").write_text(text, "utf-8")


def plain_cells(app: Any, document: Any) -> None:
    """Cells of shell commands and of files as a reader would type them,
    without the notebook's words for them."""
    for block in document.findall(literal_block):
        head, _, rest = block.astext().partition("\n")
        if head == "%%bash":
            block["language"], text = "bash", rest
        elif head.startswith("%%writefile "):
            text = f"# {head.partition(' ')[2]}\n{rest}"
        else:
            continue
        block.rawsource = text
        block.children = [Text(text)]


def _as_text(writer: Any, node: Any) -> None:
    writer.body.append(f"<code>{escape(node.astext())}</code>")
    raise SkipNode


class Progress:
    """A line for each page that is read, which for most means executed, and the time that all took:
    seconds, and those of processors."""

    def __init__(self) -> None:
        self.begun, self.pages, self.read = time.monotonic(), 0, 0

    def count(self, app: Any, env: Any, names: list[str]) -> None:
        self.pages = len(names)

    def page(self, app: Any, name: str, source: list[str]) -> None:
        self.read += 1
        print(f"[{self.read}/{self.pages}] {name}, after {self._spent()}", flush=True)

    def end(self, app: Any, error: Any) -> None:
        print(f"built in {self._spent()}", flush=True)

    def _spent(self) -> str:
        return f"{time.monotonic() - self.begun:.0f} s ({sum(os.times()[:4]):.0f} CPU-s)"


def setup(app: Any) -> dict[str, bool]:
    progress = Progress()
    app.connect("env-before-read-docs", progress.count)
    app.connect("source-read", progress.page)
    app.connect("build-finished", progress.end)
    app.connect("builder-inited", write)
    app.connect("doctree-read", plain_cells)
    app.connect("autodoc-process-docstring", listed_arguments)
    app.add_html_math_renderer("text", (_as_text, None), (_as_text, None))
    return {"parallel_read_safe": True}
