"""Make panels: run what is missing, write numbers, pictures and an index.

Invariants: a run that is finished in OUT/runs is not repeated, whichever panel wanted it; a panel is written as soon as
its runs are there, so an interrupted reproduction leaves everything it had; what cannot be made is named with its
reason and does not stop the rest.
"""

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpel.config.spec import Spec
from rpel.experiments import drawings
from rpel.experiments.panels import PANELS, Panel, chosen
from rpel.experiments.scales import Sized, scale_named, sized
from rpel.files import atomic
from rpel.processes import Stop
from rpel.simulation.certificate import versions
from rpel.simulation.checkpoint import RunFolder
from rpel.simulation.inputs import Download, Inputs, Objects, gather
from rpel.simulation.methods import settle
from rpel.simulation.metrics import check_tensorboard
from rpel.simulation.result import Result
from rpel.simulation.run import Progress, Run, folder_name, pinned, run
from rpel.types import Scale

Row = drawings.Row
Say = Callable[[str], None]
"""Takes a sentence for the user."""


@dataclass(frozen=True)
class PanelRuns:
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
    scale: Scale
    panels: tuple[PanelRuns, ...]
    specs: dict[Path, Spec]
    missing: dict[str, str]
    datasets: "Datasets"
    tensorboard: bool = False
    of_another_version: list[str] = field(default_factory=list)

    @property
    def open(self) -> dict[Path, Spec]:
        """The runs that are not finished."""
        return {path: spec for path, spec in self.specs.items() if RunFolder(path).certificate() is None}


class Datasets:
    """The data sets, each loaded, or found to be missing, once."""

    def __init__(self, download: Download | None) -> None:
        self.download = download
        self.held: dict[str, Inputs] = {}
        self.missing: dict[str, str] = {}

    def take(self, spec: Spec) -> Inputs:
        if spec.dataset in self.missing:
            raise ValueError(self.missing[spec.dataset])
        try:
            if spec.dataset not in self.held:
                self.held[spec.dataset] = gather(spec, Objects(), self.download)
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
        check_tensorboard()
    size, wanted = scale_named(scale), chosen(names)
    if not wanted:
        raise ValueError("name a panel, or all: rpel reproduce --list shows the names")
    where = {"out": str(Path(out) / "runs"), "data_dir": data_dir, "threads": threads}
    datasets = Datasets(download)
    panels: list[PanelRuns] = []
    missing: dict[str, str] = {}
    specs: dict[Path, Spec] = {}
    for panel in wanted:
        try:
            panel_runs, mine = _panel_runs(sized(panel, size, part, **where), datasets)
        except ValueError as error:
            missing[panel.name] = str(error)
            continue
        panels.append(panel_runs)
        specs |= mine
    if not panels:
        raise ValueError(next(iter(missing.values())))
    return Work(Path(out), size, tuple(panels), specs, missing, datasets, tensorboard)


def _panel_runs(asked: Sized, datasets: Datasets) -> tuple[PanelRuns, dict[Path, Spec]]:
    specs: dict[Path, Spec] = {}
    paths = []
    for curve in asked.runs:
        mine = {_folder(spec, datasets): spec for spec in curve}
        paths.append(tuple(mine))
        specs |= mine
    return PanelRuns(asked, tuple(paths)), specs


def _folder(spec: Spec, datasets: Datasets) -> Path:
    """Where :func:`rpel.simulation.run.run` will keep it."""
    return Path(spec.out) / folder_name(settle(spec), datasets.take(spec))


def seconds_needed(work: Work) -> dict[Path, float]:
    """For each open run the seconds it will take, from rounds measured now."""
    todo = work.open
    measured = costs(todo.values(), work.datasets.held)
    return {path: measured[kind(spec)].seconds(spec) for path, spec in todo.items()}


# --- how long it takes: measured on real rounds of each kind of run ---------------------------------------------------

_TIMED = 2
"""Rounds that are timed."""


@dataclass(frozen=True)
class Cost:
    """Seconds that a kind of run takes: to begin, for a round, to evaluate, and to evaluate on all test examples."""

    start: float
    round: float
    evaluation: float
    last: float

    def seconds(self, spec: Spec) -> float:
        """A whole run.

        >>> Cost(start=1.0, round=0.5, evaluation=0.1, last=2.0).seconds(Spec(rounds=60, eval_every=20))
        33.2
        """
        return round(self.start + spec.rounds * self.round + self._evaluations(spec) * self.evaluation + self.last, 6)

    @staticmethod
    def _evaluations(spec: Spec) -> int:
        return (spec.rounds - 1) // spec.eval_every


def kind(spec: Spec) -> str:
    """Runs of one kind cost about the same; the most expensive of them is measured.

    >>> kind(Spec(nodes=30, local_steps=3))
    'mnist-sample with mnist, n = 30, batch 25, 3 local steps'
    """
    searched = ", adaptive attack" if spec.attack == "strongest" else ""
    steps = f"{spec.local_steps} local step{'s' * (spec.local_steps > 1)}"
    return f"{spec.dataset} with {spec.model}, n = {spec.nodes}, batch {spec.batch_size}, {steps}{searched}"


def measure(spec: Spec, inputs: Inputs) -> Cost:
    """Begin the run, keep nothing, and time two rounds (after one that compiles) and one evaluation."""
    with pinned(spec.threads):
        begun = time.perf_counter()
        running = Run(settle(spec), inputs)
        start = time.perf_counter() - begun
        running.simulation.step(measured=False)
        steps = _timed(lambda: [running.simulation.step(measured=False) for _ in range(_TIMED)])
        evaluation = _timed(lambda: running.simulation.evaluate(running.subset))
    share = len(inputs.dataset.test_y) / len(running.subset)
    return Cost(start, steps / _TIMED, evaluation, evaluation * share)


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def costs(specs: Iterable[Spec], inputs: Mapping[str, Inputs], kind: Callable[[Spec], str] = kind) -> dict[str, Cost]:
    """The measured cost of each kind among these runs."""
    dearest: dict[str, Spec] = {}
    for spec in specs:
        held = dearest.setdefault(kind(spec), spec)
        if _dearness(spec) > _dearness(held):
            dearest[kind(spec)] = spec
    return {name: _measured(spec, inputs[spec.dataset]) for name, spec in dearest.items()}


def _measured(spec: Spec, inputs: Inputs) -> Cost:
    """Nothing for a run that cannot begin: it will say so itself, and the others go on."""
    try:
        return measure(spec, inputs)
    except ValueError:
        return Cost(0.0, 0.0, 0.0, 0.0)


def _dearness(spec: Spec) -> tuple[int, bool, int]:
    return spec.pull or 0, spec.attack in ("alie", "strongest"), -spec.byzantine


# --- at work ---------------------------------------------------------------------------------------------------------


def make(
    work: Work,
    needed: dict[Path, float] | None = None,
    *,
    progress: Progress | None = None,
    say: Say = lambda sentence: None,
) -> list[dict[str, Any]]:
    """Run what is open, write each panel when its runs are there; returns the index entries of the panels made.

    What failed is added to ``work.missing``. Ctrl-C saves the run on its way and passes on.
    """
    work.datasets.held.clear()  # a run loads its own
    clock = Clock(dict(needed or {}))
    finished: dict[Path, list[Row]] = {}
    made = []
    for panel_runs in work.panels:
        try:
            for path in panel_runs.runs:
                if path not in finished:
                    finished[path] = drawings.run_rows(_result(work, path, clock, progress, say))
        except ValueError as error:
            work.missing[panel_runs.panel.name] = str(error)
            say(f"{panel_runs.panel.name} cannot be made: {error}")
            continue
        made.append(_write(work, panel_runs, finished))
    for number in dict.fromkeys(panel_runs.panel.number for panel_runs in work.panels):
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


def _result(work: Work, path: Path, clock: Clock, progress: Progress | None, say: Say) -> Result:
    folder = RunFolder(path, work.tensorboard)
    proof = folder.certificate()
    if proof is not None:
        if proof["versions"].get("code") != versions()["code"]:
            work.of_another_version.append(path.name)
        folder.copy_events()
        return Result.load(path, reused=True)
    begun = time.perf_counter()
    stop = Stop("stopping after this round")
    result = run(work.specs[path], progress=progress, tensorboard=work.tensorboard, stop=stop)
    if stop.asked:
        raise KeyboardInterrupt
    left = clock.done(path, time.perf_counter() - begun)
    if clock.runs:
        minutes = f", about {left / 60:.0f} minutes left" if left > 90 else ""
        say(f"{clock.runs - len(clock.needed)} of {clock.runs} runs done: {path.name}{minutes}")
    return result


# --- what is written -------------------------------------------------------------------------------------------------


def _write(work: Work, panel_runs: PanelRuns, finished: dict[Path, list[Row]]) -> dict[str, Any]:
    """NAME.csv, NAME.svg, NAME.png and the entry of the index."""
    panel, note = panel_runs.panel, panel_runs.sized.note
    if panel.kind == "fraction":
        rows = drawings.fraction_rows(panel)
    else:
        both = zip(panel.curves, panel_runs.paths, strict=True)
        rows = [row for curve, paths in both for row in drawings.curve_rows(panel, curve, [finished[p] for p in paths])]
    _write_csv(work.out / f"{panel.name}.csv", rows)
    drawings.save(panel, rows, note, work.out / panel.name, work.scale)
    entry = {
        "name": panel.name,
        "figure": panel.figure,
        "title": panel.title,
        "scale": work.scale,
        "note": note,
        "files": [f"{panel.name}.{suffix}" for suffix in ("csv", "svg", "png")],
        "runs": [path.relative_to(work.out).as_posix() for path in panel_runs.runs],
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
    there = {
        panel.name: drawings.read_rows(work.out / f"{panel.name}.csv") for panel in together if panel.name in notes
    }
    if len(together) > 1 and there:
        note = "; ".join(dict.fromkeys(notes[name] for name in there))
        drawings.save_together(together, there, note, work.out / number, work.scale)
