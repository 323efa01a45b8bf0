"""Run folders' small files (specification, metrics, certificate),
kept in an archive for others to check a page."""

import argparse
import io
import json
import re
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpel.runs.certificate import Certificate
from rpel.runs.record import Run
from rpel.runs.table import Table
from rpel.spec import Spec

SMALL = ("spec.toml", "metrics.jsonl", "certificate.json")


def spec_of(fields: dict[str, Any]) -> Spec:
    """The Spec of an archived run, without fields that have been removed since."""
    return Spec(**{key: value for key, value in fields.items() if key in Spec.model_fields})


@dataclass(frozen=True)
class KeptRun:
    """A finished run: its folder's name, its specification, its rounds, its certificate."""

    name: str
    spec: dict[str, Any]
    rows: list[dict[str, Any]]
    proof: dict[str, Any]

    @property
    def evaluated(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["accuracy_mean"] is not None]

    @property
    def record(self) -> Run:
        """The same as all of rpel reads it."""
        return Run(spec_of(self.spec), history=Table(self.rows), certificate=Certificate(**self.proof))


class Archive:
    """A tar file with NAME/FILE of each run; equal runs give equal bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, bytes] = {}
        if path.is_file():
            with tarfile.open(path, "r:xz") as tar:
                self.files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]

    def take(self, folder: Path, also: tuple[str, ...] = ()) -> None:
        """Add every finished run below the folder; ``also``: more of its files."""
        for proof in sorted(folder.rglob("certificate.json")):
            for name in (*SMALL, *also):
                content = (proof.parent / name).read_bytes()
                if name == "spec.toml":  # where the data lay is nobody's business
                    content = re.sub(rb"(?m)^data_dir = .*\n", b"", content)
                self.files[f"{proof.parent.name}/{name}"] = content

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.path, "w:xz") as tar:
            for name, content in sorted(self.files.items()):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))

    def runs(self) -> list[KeptRun]:
        return [self._run(name) for name in sorted({file.partition("/")[0] for file in self.files})]

    def _run(self, name: str) -> KeptRun:
        spec, metrics, proof = (self.files[f"{name}/{file}"].decode() for file in SMALL)
        return KeptRun(
            name, tomllib.loads(spec), [json.loads(row) for row in metrics.splitlines()], json.loads(proof)
        )


Train = Callable[[Sequence[str], Sequence[int], dict[str, Any]], None]
"""Makes the runs of these names and seeds, with further keywords for all of them."""


def two_steps(
    about: str, names: Iterable[str], train: Train, write: Callable[[Sequence[Path]], None]
) -> None:
    """The command line of a page's tool: `run …` trains,
    anything else keeps the runs below folders and writes."""
    if sys.argv[1:2] != ["run"]:
        write([Path(folder) for folder in sys.argv[1:]])
        return
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="+", choices=list(names), default=list(names), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int)
    given = vars(parser.parse_args(sys.argv[2:]))
    train(given.pop("only"), given.pop("seeds"), {key: value for key, value in given.items() if value})
