"""Make panels at the size of one's machine: run what is missing, write numbers, pictures and an index.

Scales: full is the paper's sizes and seeds, unchanged; short keeps data, network and plan and shortens the
schedule; smoke keeps who talks to whom and replaces what is learned,
so it shows that everything works and nothing else.

Invariants: a run that this code has finished in OUT/runs is not repeated, whichever panel wanted it; a panel
is written as soon as its runs are there, so an interrupted reproduction leaves everything it had; what cannot
be made is named with its reason and does not stop the rest; a figure that is not at the paper's
size is stamped.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rpel.attacks import attack
from rpel.errors import nearest
from rpel.experiments import drawings
from rpel.experiments.estimate import costs, kind
from rpel.experiments.panels import PANELS, Curve, Panel, Scale, chosen
from rpel.files import write_text
from rpel.plots import Style
from rpel.processes import Stop
from rpel.record import parse_seeds
from rpel.runs.folder import RunFolder
from rpel.runs.journal import check_tensorboard
from rpel.runs.record import Run
from rpel.runs.table import Table
from rpel.simulation.inputs import Download, Gathered, Inputs, gather, loader
from rpel.simulation.loop import Progress
from rpel.simulation.methods import resolve
from rpel.simulation.run import folder_name, placed, run
from rpel.spec import Spec
from rpel.text import count

_SMOKE: dict[str, Any] = {
    "dataset": "mnist-sample", "model": "mlp", "rounds": 10, "batch_size": 10, "eval_every": 2,
    "eval_size": 200, "checkpoint_every": 0,
}  # fmt: skip
_SHORTER = {"mnist": 0.3, "cifar10": 0.1, "femnist": 0.1}
"""The part of the paper's rounds that a short run makes."""
_POINTS = 6
"""Evaluations of a short run, the last on all test images;
on CIFAR-10 each of the others costs ten rounds."""


@dataclass(frozen=True)
class Sized:
    """A panel at some scale: for each of its curves the runs, one a seed;
    and what the figure says about it."""

    panel: Panel
    scale: Scale
    runs: tuple[tuple[Spec, ...], ...]
    note: str


def scale_named(name: str) -> Scale:
    """The scale of that name.

    >>> scale_named("smok")
    Traceback (most recent call last):
    ValueError: scale 'smok' is unknown: the nearest is 'smoke' (of smoke, short, full)
    """
    names = [scale.value for scale in Scale]
    if name not in names:
        raise ValueError(f"scale {name!r} is unknown: {nearest(name, names)}")
    return Scale(name)


@dataclass(frozen=True)
class Selection:
    """The part of a panel to make: curves under these attacks and methods, these seeds, evaluated this often.

    What is left out is the panel's own. part: how much of the paper's rounds a short run makes; without it .3
    for MNIST and .1 for the larger data sets.
    """

    attacks: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: str | None = None
    eval_every: int | None = None
    part: float | None = None

    def curves(self, panel: Panel) -> tuple[Curve, ...]:
        """The panel's curves that are wanted; ValueError where it has none of them.

        >>> [curve.label for curve in Selection(attacks=["alie", "sf"]).curves(chosen(["cifar10-left"])[0])]
        ['SF', 'ALIE']
        >>> Selection(attacks=["dissensus"]).curves(chosen(["cifar10-left"])[0])
        Traceback (most recent call last):
        ValueError: cifar10-left has no curve under 'dissensus': it has alie, foe, sf
        """
        wanted = {attack(name).name for name in self.attacks}
        curves = []
        for curve in panel.curves:
            spec = curve.spec()
            if (not wanted or attack(spec.attack).name in wanted) and (
                not self.methods or spec.method in self.methods
            ):
                curves.append(curve)
        if panel.curves and not curves:
            asked, key = (self.methods, "method") if self.methods else (self.attacks, "attack")
            has = sorted({str(getattr(curve.spec(), key)) for curve in panel.curves})
            raise ValueError(
                f"{panel.name} has no curve under {', '.join(map(repr, asked))}: it has {', '.join(has)}"
            )
        return tuple(curves)

    def stamp(self, panel: Panel, seeds: Sequence[int]) -> str:
        """What of the panel is missing, for the figure: "FOE only" or nothing."""
        labels = [curve.label for curve in self.curves(panel)]
        only = f"; {', '.join(labels)} only" if len(labels) < len(panel.curves) else ""
        return only + (f"; seed {', '.join(map(str, seeds))}" if self.seeds is not None else "")


def sized(panel: Panel, scale: Scale, selection: Selection | None = None, **where: Any) -> Sized:
    """The panel's runs at this scale; ``where`` are fields without meaning: out, data_dir, threads,
    device."""
    selection = selection or Selection()
    part = selection.part
    if part is not None and (scale is not Scale.SHORT or not 0 < part <= 1):
        raise ValueError(
            f"part {part:g} is not valid: it takes a share of the rounds such as 0.1, with scale short"
        )
    selected = replace(panel, curves=selection.curves(panel))
    specs = [curve.spec() for curve in selected.curves]
    seeds = parse_seeds(Spec(seeds=selection.seeds or (panel.seeds if scale is Scale.FULL else "0")).seeds)
    often = {} if selection.eval_every is None else {"eval_every": selection.eval_every}
    resized = [_resized(spec, scale, part).replace(**where, **often) for spec in specs]
    runs = tuple(tuple(spec.replace(seed=seed, seeds=None) for seed in seeds) for spec in resized)
    note = _note(selected, scale, specs, resized, len(seeds)) + selection.stamp(panel, seeds)
    return Sized(selected, scale, runs, note)


def _resized(spec: Spec, scale: Scale, part: float | None) -> Spec:
    if scale is Scale.SMOKE:
        rate = spec.rate(1)
        return spec.replace(
            **_SMOKE, lr=rate, name=spec.name.replace(spec.dataset, "smoke", 1), data_dir=None
        )
    if scale is Scale.SHORT:
        return shortened(spec, part or _SHORTER[spec.dataset]).replace(name=f"short-{spec.name}")
    return spec


def shortened(spec: Spec, part: float) -> Spec:
    """The same run with a part of its rounds: b_hat as planned for all of them,
    the steps of the schedule moved along.

    >>> from rpel.spec import load
    >>> short = shortened(load("cifar10-20"), 0.1)
    >>> short.rounds, short.lr, short.b_hat, short.eval_every
    (200, ((50, 0.5), (100, 0.1), (150, 0.02), (200, 0.004)), 3, 34)
    """
    planned = resolve(spec)
    rounds = max(1, round(part * spec.rounds))
    lr = (
        spec.lr
        if isinstance(spec.lr, float | str)
        else tuple((round(part * last), rate) for last, rate in spec.lr)
    )
    return planned.spec.replace(rounds=rounds, lr=lr, eval_every=-(-rounds // _POINTS))


def _note(panel: Panel, scale: Scale, specs: list[Spec], resized: list[Spec], made_seeds: int) -> str:
    """One line for the figure."""
    if panel.kind == "fraction":
        text = "5 simulations a point, bands: 95 %, dots: the exact median"
        return f"SMOKE (here as at full size): {text}" if scale is Scale.SMOKE else text
    spec, made, seeds = specs[0], resized[0], len(parse_seeds(panel.seeds))
    shown = f"{made_seeds} of {seeds} seeds" if made_seeds < seeds else f"{made_seeds} seeds"
    if scale is Scale.SMOKE:
        full = {"mnist": "all of MNIST", "cifar10": "CIFAR-10", "femnist": "FEMNIST"}[spec.dataset]
        size = f"{made.rounds} rounds, {count(made_seeds, 'seed')}"
        return f"SMOKE: a sample of MNIST instead of {full}, a small network, {size}"
    if scale is Scale.SHORT:
        return f"SHORT: {made.rounds} of {spec.rounds} rounds, {shown}"
    return f"{spec.rounds} rounds, {shown}, bands from lowest to highest"


# --- what is to be made -------------------------------------------------------------------------------------


Row = drawings.Row
Say = Callable[[str], None]
"""Takes a sentence for the user."""


@dataclass(frozen=True)
class PanelRuns:
    """A panel at some scale, and for each of its curves the runs by folder."""

    sized: Sized
    curves: tuple[dict[Path, Spec], ...]

    @property
    def panel(self) -> Panel:
        return self.sized.panel

    @property
    def runs(self) -> dict[Path, Spec]:
        return {path: spec for curve in self.curves for path, spec in curve.items()}


@dataclass(frozen=True)
class Work:
    """Everything that was asked for: panels, and what cannot be made with the reason."""

    out: Path
    scale: Scale
    panels: tuple[PanelRuns, ...]
    missing: dict[str, str]
    datasets: "Datasets"
    tensorboard: bool = False
    reuse: bool = False
    style: Style = "screen"

    @property
    def specs(self) -> dict[Path, Spec]:
        """The distinct runs by folder."""
        return {path: spec for panel_runs in self.panels for path, spec in panel_runs.runs.items()}

    @property
    def open(self) -> dict[Path, Spec]:
        """The runs that are not finished."""
        return {path: spec for path, spec in self.specs.items() if RunFolder(path).certificate() is None}


class Datasets:
    """The data sets, each loaded, or found to be missing, once."""

    def __init__(self, download: Download | None) -> None:
        self.download = download
        self.held: dict[str, Gathered] = {}
        self.missing: dict[str, str] = {}

    def take(self, spec: Spec) -> Gathered:
        if spec.dataset not in self.held and spec.dataset not in self.missing:
            try:
                self.held[spec.dataset] = gather(resolve(spec), Inputs(), loader(self.download))
            except (ValueError, OSError) as error:
                self.missing[spec.dataset] = str(error)
        if spec.dataset in self.missing:
            raise ValueError(self.missing[spec.dataset])
        return self.held[spec.dataset]


# --- before -------------------------------------------------------------------------------------------------


def prepare(
    names: Sequence[str],
    scale: str,
    out: str | Path,
    *,
    selection: Selection | None = None,
    data_dir: str | None = None,
    threads: int | None = None,
    reuse: bool = False,
    tensorboard: bool = False,
    download: Download | None = None,
    style: Style = "screen",
) -> Work:
    """Find the panels, load their data, and name their runs; ValueError when nothing at all can be made.

    reuse: finished runs of other code are taken, too.
    """
    if tensorboard:
        check_tensorboard()
    size, wanted = scale_named(scale), chosen(names)
    if not wanted:
        raise ValueError("name a panel, or all: rpel reproduce --list shows the names")
    where = {"out": str(Path(out) / "runs"), "data_dir": data_dir, "threads": threads}
    datasets = Datasets(download)
    folders = Folders(datasets)
    panels: list[PanelRuns] = []
    missing: dict[str, str] = {}
    for panel in wanted:
        try:
            asked = sized(panel, size, selection, **where)
            curves = tuple({folders.of(spec, reuse): spec for spec in curve} for curve in asked.runs)
            panels.append(PanelRuns(asked, curves))
        except ValueError as error:
            missing[panel.name] = str(error)
    if not panels:
        raise ValueError(next(iter(missing.values())))
    return Work(Path(out), size, tuple(panels), missing, datasets, tensorboard, reuse, style)


class Folders:
    """Where :func:`rpel.simulation.run.run` will keep each run; what is not reused is said once."""

    def __init__(self, datasets: Datasets) -> None:
        self.datasets = datasets
        self.found: dict[str, Path] = {}

    def of(self, spec: Spec, reuse: bool) -> Path:
        resolved, inputs = resolve(spec), self.datasets.take(spec)
        name = folder_name(resolved.spec, inputs)
        if name not in self.found:
            self.found[name] = placed(resolved.spec, inputs, reuse=reuse)
        return self.found[name]


def seconds_needed(work: Work) -> dict[Path, float]:
    """For each open run the seconds it will take, from rounds measured now."""
    todo = work.open
    measured = costs(todo.values(), work.datasets.held)
    return {path: measured[kind(spec)].seconds(spec) for path, spec in todo.items()}


# --- at work ------------------------------------------------------------------------------------------------


def make(
    work: Work,
    needed: dict[Path, float] | None = None,
    *,
    progress: Progress | None = None,
    say: Say = lambda sentence: None,
) -> list[dict[str, Any]]:
    """Run what is open, write each panel when its runs are there;
    returns the index entries of the panels made.

    What failed is added to ``work.missing``. Ctrl-C saves the run on its way and passes on.
    """
    work.datasets.held.clear()  # a run loads its own
    clock = Clock(dict(needed or {}))
    finished: dict[Path, list[Row]] = {}
    made = []
    with Stop("stopping after this round") as stop:
        for panel_runs in work.panels:
            try:
                for path, spec in panel_runs.runs.items():
                    if path not in finished:
                        finished[path] = drawings.run_rows(
                            _result(work, path, spec, clock, stop, progress, say)
                        )
            except ValueError as error:
                work.missing[panel_runs.panel.name] = str(error)
                say(f"{panel_runs.panel.name} cannot be made: {error}")
                continue
            made.append(_write(work, panel_runs, finished))
    for number in dict.fromkeys(panel_runs.panel.number for panel_runs in work.panels):
        _write_together(work, number)
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


def _result(
    work: Work, path: Path, spec: Spec, clock: Clock, stop: Stop, progress: Progress | None, say: Say
) -> Run:
    stop.check()
    folder = RunFolder(path, work.tensorboard)
    if folder.certificate() is not None:
        folder.copy_events()
        return Run.load(path, reused=True)
    begun = time.perf_counter()
    run(spec, progress=progress, reuse=work.reuse, tensorboard=work.tensorboard, stop=stop)
    stop.check()
    left = clock.done(path, time.perf_counter() - begun)
    if clock.runs:
        minutes = f", about {left / 60:.0f} minutes left" if left > 90 else ""
        say(f"{clock.runs - len(clock.needed)} of {clock.runs} runs done: {path.name}{minutes}")
    return Run.load(path)


# --- what is written ----------------------------------------------------------------------------------------


def _write(work: Work, panel_runs: PanelRuns, finished: dict[Path, list[Row]]) -> dict[str, Any]:
    """NAME.csv, NAME.svg, NAME.png (NAME.pdf for a paper) and the entry of the index."""
    panel, note = panel_runs.panel, panel_runs.sized.note
    if panel.kind == "fraction":
        rows = drawings.fraction_rows(panel)
    else:
        both = zip(panel.curves, panel_runs.curves, strict=True)
        rows = [
            row
            for curve, runs in both
            for row in drawings.curve_rows(panel, curve, [finished[p] for p in runs])
        ]
    write_text(work.out / f"{panel.name}.csv", Table(rows).to_csv())
    drawings.save(panel, rows, note, work.out / panel.name, work.scale, work.style)
    entry = {
        **{key: getattr(panel, key) for key in ("name", "figure", "title")},
        "scale": work.scale,
        "note": note,
        "files": [f"{panel.name}.{suffix}" for suffix in ("csv", "svg", "png")],
        "runs": [path.relative_to(work.out).as_posix() for path in panel_runs.runs],
    }
    entries = {old["name"]: old for old in _index(work.out)} | {panel.name: entry}
    write_text(
        work.out / "index.json", json.dumps(list(entries.values()), indent=2, ensure_ascii=False) + "\n"
    )
    return entry


def _index(out: Path) -> list[dict[str, Any]]:
    path = out / "index.json"
    entries: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return entries


def _write_together(work: Work, number: str) -> None:
    """The paper's figure with several panels, from those of this scale that are there."""
    together = [panel for panel in PANELS if panel.number == number]
    notes = {old["name"]: old["note"] for old in _index(work.out) if old["scale"] == work.scale}
    there = {
        panel.name: drawings.read_rows(work.out / f"{panel.name}.csv")
        for panel in together
        if panel.name in notes
    }
    if len(together) > 1 and there:
        note = "; ".join(dict.fromkeys(notes[name] for name in there))
        drawings.save_together(together, there, note, work.out / number, work.scale, work.style)
