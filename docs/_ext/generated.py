"""Tables made from the program itself, so that they cannot fall behind it, and how cells of notebooks are shown."""

from html import escape
from pathlib import Path
from typing import Any, get_args, get_origin

from docutils.nodes import SkipNode, Text, literal_block  # type: ignore[import-untyped]

from rpel.config.spec import Spec, load, presets


def spec_fields() -> str:
    """Every field of a run with its default and its meaning."""
    rows = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, field in Spec.model_fields.items():
        kind = ", ".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is not None else ""
        values = kind.replace("|", "or") if "<class" not in kind and "typing" not in kind else ""
        rows.append(f"| `{name}` | {values} | `{field.default}` | {field.description} |")
    return "\n".join(rows) + "\n"


def preset_table() -> str:
    """What each preset sets beyond the defaults."""
    rows = ["| preset | sets |", "|---|---|"]
    for name in presets():
        given = load(name).model_dump(exclude_unset=True, exclude={"name"})
        rows.append(f"| `{name}` | " + ", ".join(f"{key} = {value}" for key, value in given.items()) + " |")
    return "\n".join(rows) + "\n"


def write(app: Any) -> None:
    """Write the tables that pages include, before Sphinx reads any page."""
    folder = Path(app.srcdir) / "_generated"
    folder.mkdir(exist_ok=True)
    for name, text in {"spec": spec_fields(), "presets": preset_table()}.items():
        (folder / f"{name}.md").write_text(text, "utf-8")


def plain_cells(app: Any, document: Any) -> None:
    """Cells of shell commands and of files as a reader would type them, without the notebook's words for them."""
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


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write)
    app.connect("doctree-read", plain_cells)
    app.add_html_math_renderer("text", (_as_text, None), (_as_text, None))
    return {"parallel_read_safe": True}
