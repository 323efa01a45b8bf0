"""Reference pages that are made from the program itself, so that they cannot fall behind it."""

from pathlib import Path
from typing import Any, get_args, get_origin

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


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
