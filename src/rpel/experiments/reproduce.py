"""Make panels: run what is missing, write numbers, pictures and an index.

Laws: a run that is finished in OUT/runs is not repeated, whichever panel wanted it; a panel is written as soon as its
runs are there, so an interrupted reproduction leaves everything it had; what cannot be made is named with its reason
and does not stop the rest.
"""

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpel.config.spec import Spec
from rpel.experiments import estimate
from rpel.experiments import pictures as panels
from rpel.experiments.panels import PANELS, Panel, chosen
from rpel.experiments.scales import ScaleName, Sized, checked, sized
from rpel.files import atomic
from rpel.simulation.environment import versions
from rpel.simulation.events import check
from rpel.simulation.folder import RunFolder
from rpel.simulation.hearing import Ear
from rpel.simulation.material import Download, Material, Own, gather
from rpel.simulation.result import Result
from rpel.simulation.run import run
from rpel.simulation.running import Progress
from rpel.simulation.settle import settle, spec_hash

Row = panels.Row
Told = Callable[[str], None]
"""Hears a sentence."""


@dataclass(frozen=True)
class Piece:
    """A panel, its runs' folders curve by curve, and their specifications."""

    sized: Sized
    paths: tuple[tuple[Path, ...], ...]

    @property
    def panel(self) -> Panel:
        return self.sized.panel

    @property
    def runs(self) -> list[Path]:
        return list(dict.fromkeys(path for curve in self.paths for path in curve))


@dataclass(frozen=True)
class Work:
    """Everything that was asked for: panels, distinct runs by folder, and what cannot be made with the reason.

    ``of_another_version`` fills with the runs that were there and came from another version of the code.
    """

    out: Path
    scale: ScaleName
    pieces: tuple[Piece, ...]
    specs: dict[Path, Spec]
    missing: dict[str, str]
    shelf: "Shelf"
    tensorboard: bool = False
    of_another_version: list[str] = field(default_factory=list)

    @property
    def open(self) -> dict[Path, Spec]:
        """The runs that are not finished."""
        return {path: spec for path, spec in self.specs.items() if RunFolder(path).certificate() is None}


class Shelf:
    """The data sets, each loaded, or found to be missing, once."""

    def __init__(self, download: Download | None) -> None:
        self.download = download
        self.held: dict[str, Material] = {}
        self.missing: dict[str, str] = {}

    def take(self, spec: Spec) -> Material:
        if spec.dataset in self.missing:
            raise ValueError(self.missing[spec.dataset])
        try:
            if spec.dataset not in self.held:
                self.held[spec.dataset] = gather(spec, Own(), self.download)
        except (ValueError, OSError) as error:
            self.missing[spec.dataset] = str(error)
            raise ValueError(str(error)) from None
        return self.held[spec.dataset]


# --- before ----------------------------------------------------------------------------------------------------------


def prepare(
    names: Sequence[str],
    scale: str,
    out: str | Path,
    *,
    part: float | None = None,
    data_dir: str | None = None,
    threads: int | None = None,
    tensorboard: bool = False,
    download: Download | None = None,
) -> Work:
    """Find the panels, load their data, and name their runs; ValueError when nothing at all can be made."""
    if tensorboard:
        check()
    size, wanted = checked(scale), chosen(names)
    if not wanted:
        raise ValueError("name a panel, or all: rpel reproduce --list shows the names")
    where = {"out": str(Path(out) / "runs"), "data_dir": data_dir, "threads": threads}
    shelf = Shelf(download)
    pieces: list[Piece] = []
    missing: dict[str, str] = {}
    specs: dict[Path, Spec] = {}
    for panel in wanted:
        try:
            piece, mine = _piece(sized(panel, size, part, **where), shelf)
        except ValueError as error:
            missing[panel.name] = str(error)
            continue
        pieces.append(piece)
        specs |= mine
    if not pieces:
        raise ValueError(next(iter(missing.values())))
    return Work(Path(out), size, tuple(pieces), specs, missing, shelf, tensorboard)


def _piece(asked: Sized, shelf: Shelf) -> tuple[Piece, dict[Path, Spec]]:
    specs: dict[Path, Spec] = {}
    paths = []
    for curve in asked.runs:
        mine = {_folder(spec, shelf): spec for spec in curve}
        paths.append(tuple(mine))
        specs |= mine
    return Piece(asked, tuple(paths)), specs


def _folder(spec: Spec, shelf: Shelf) -> Path:
    """Where :func:`rpel.simulation.run.run` will keep it."""
    return Path(spec.out) / f"{spec.name}-{spec_hash(settle(spec).spec, shelf.take(spec).dataset.checksums)}"


def seconds_needed(work: Work) -> dict[Path, float]:
    """For each open run the seconds it will take, from rounds measured now."""
    todo = work.open
    measured = estimate.costs(todo.values(), work.shelf.held)
    return {path: measured[estimate.kind(spec)].seconds(spec) for path, spec in todo.items()}


# --- at work ---------------------------------------------------------------------------------------------------------


def make(
    work: Work,
    needed: dict[Path, float] | None = None,
    *,
    progress: Progress | None = None,
    say: Told = lambda sentence: None,
) -> list[dict[str, Any]]:
    """Run what is open, write each panel when its runs are there; returns the index entries of the panels made.

    What failed is added to ``work.missing``. Ctrl-C saves the run on its way and passes on.
    """
    work.shelf.held.clear()  # a run loads its own
    clock = Clock(dict(needed or {}))
    finished: dict[Path, list[Row]] = {}
    made = []
    for piece in work.pieces:
        try:
            for path in piece.runs:
                if path not in finished:
                    finished[path] = panels.run_rows(_result(work, path, clock, progress, say))
        except ValueError as error:
            work.missing[piece.panel.name] = str(error)
            say(f"{piece.panel.name} cannot be made: {error}")
            continue
        made.append(_write(work, piece, finished))
    for number in dict.fromkeys(piece.panel.number for piece in work.pieces):
        _write_together(work, number)
    if work.of_another_version:
        count, example = len(work.of_another_version), work.of_another_version[0]
        say(f"{count} runs came from another code version and were kept, such as {example}: remove them to repeat")
    return made


class Clock:
    """What is left of an estimate, corrected by how long the runs so far really took."""

    def __init__(self, needed: dict[Path, float]) -> None:
        self.needed, self.runs = needed, len(needed)
        self.expected = self.spent = 0.0

    def done(self, path: Path, seconds: float) -> float:
        """Note a finished run; returns the seconds left."""
        self.expected += self.needed.pop(path, 0.0)
        self.spent += seconds
        return sum(self.needed.values()) * (self.spent / self.expected if self.expected else 1.0)


def _result(work: Work, path: Path, clock: Clock, progress: Progress | None, say: Told) -> Result:
    folder = RunFolder(path, work.tensorboard)
    proof = folder.certificate()
    if proof is not None:
        if proof["versions"].get("code") != versions()["code"]:
            work.of_another_version.append(path.name)
        folder.copy_events()
        return Result.load(path, reused=True)
    begun = time.perf_counter()
    with Ear() as ear:
        result = run(work.specs[path], progress=progress, tensorboard=work.tensorboard)
        if ear.heard():
            raise KeyboardInterrupt
    left = clock.done(path, time.perf_counter() - begun)
    if clock.runs:
        minutes = f", about {left / 60:.0f} minutes left" if left > 90 else ""
        say(f"{clock.runs - len(clock.needed)} of {clock.runs} runs done: {path.name}{minutes}")
    return result


# --- what is written -------------------------------------------------------------------------------------------------


def _write(work: Work, piece: Piece, finished: dict[Path, list[Row]]) -> dict[str, Any]:
    """NAME.csv, NAME.svg, NAME.png and the entry of the index."""
    panel, note = piece.panel, piece.sized.note
    if panel.kind == "fraction":
        rows = panels.fraction_rows(panel)
    else:
        both = zip(panel.curves, piece.paths, strict=True)
        rows = [row for curve, paths in both for row in panels.curve_rows(panel, curve, [finished[p] for p in paths])]
    _write_csv(work.out / f"{panel.name}.csv", rows)
    panels.save(panel, rows, note, work.out / panel.name)
    entry = {
        "name": panel.name,
        "figure": panel.figure,
        "title": panel.title,
        "scale": work.scale,
        "note": note,
        "files": [f"{panel.name}.{suffix}" for suffix in ("csv", "svg", "png")],
        "runs": [path.relative_to(work.out).as_posix() for path in piece.runs],
    }
    kept = {old["name"]: old for old in _index(work.out)} | {panel.name: entry}
    with atomic(work.out / "index.json") as file:
        file.write((json.dumps(list(kept.values()), indent=2, ensure_ascii=False) + "\n").encode())
    return entry


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic(path) as file:
        file.write(text.getvalue().encode())


def _index(out: Path) -> list[dict[str, Any]]:
    path = out / "index.json"
    found: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return found


def _write_together(work: Work, number: str) -> None:
    """The paper's figure with several panels, from those of this scale that are there."""
    together = [panel for panel in PANELS if panel.number == number]
    notes = {old["name"]: old["note"] for old in _index(work.out) if old["scale"] == work.scale}
    there = {panel.name: panels.read_rows(work.out / f"{panel.name}.csv") for panel in together if panel.name in notes}
    if len(together) > 1 and there:
        note = "; ".join(dict.fromkeys(notes[name] for name in there))
        panels.save_together(together, there, note, work.out / number)
