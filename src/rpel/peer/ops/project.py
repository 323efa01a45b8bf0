"""A project to begin with: a task, data, a test, and a network on one machine that runs as it is."""

import csv
import io
import re
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from rpel.files import write_text
from rpel.peer.config.settings import Config

FILES = (
    "README.md", "training.py", "test_training.py", "local.sh", "Dockerfile", "compose.yaml", "gitignore",
    "dockerignore",
)  # fmt: skip
_EXAMPLES = 600


def create(folder: Path) -> list[Path]:
    """Write the project into a folder that is new or empty; its name becomes the project's.

    Returns the files. Raises ValueError for a folder that holds something,
    or a name that cannot be a member's.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(f"{name!r} cannot be a member's name: letters, digits and . _ -, such as clinic-3")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty, and nothing is overwritten: choose another folder")
    templates = Environment(
        loader=PackageLoader("rpel.peer.ops"), undefined=StrictUndefined, keep_trailing_newline=True,
        autoescape=False,
    )  # fmt: skip
    texts = {file: templates.get_template(f"{file}.j2").render(name=name) for file in FILES}
    texts = {f".{file}" if file.endswith("ignore") else file: text for file, text in texts.items()}
    texts["data/patients.csv"] = example()
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / file, text)
    (folder / "local.sh").chmod(0o755)
    (folder / "state").mkdir()  # so that a container can mount it on a folder that it cannot write
    settings = {"id": name, "listen": "0.0.0.0:7443", "task": "training:task", "data": "data"}
    Config.of(settings, folder.resolve()).save(folder / "peer.toml")
    return [folder / file for file in (*texts, "peer.toml")]


def example() -> str:
    """Made-up patients as CSV: four measurements, and an outcome that depends on them with some noise.

    >>> example().splitlines()[0], len(example().splitlines())
    ('age,pressure,cholesterol,pulse,ill', 601)
    """
    rng = np.random.default_rng(0)
    scaled = rng.normal(size=(_EXAMPLES, 4))
    risk = (
        scaled @ np.array([0.9, 0.6, 0.4, -1.1])
        + 0.8 * scaled[:, 0] * scaled[:, 1]
        + 0.5 * rng.normal(size=_EXAMPLES)
    )
    values = np.array([60.0, 130.0, 245.0, 150.0]) + scaled * np.array([12.0, 18.0, 50.0, 23.0])
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["age", "pressure", "cholesterol", "pulse", "ill"])
    rows.writerows([*map(round, row.tolist()), int(bad)] for row, bad in zip(values, risk > 0, strict=True))
    return file.getvalue()
