"""Studies: labelled runs and their table. A sweep, the arena and a figure of the paper are studies.

A study's cells are checked, and their folders are found, before the first of them runs. A cell that cannot
run, or fails, keeps the sentence that says why and stops no other. Cells are trained several at a time, each
in a process of its own or as a task of Ray; those that hold objects from Python are trained here, one after
the other. A finished run is not repeated, an unfinished one goes on.
"""

import json
import logging
import re
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

from rpel.errors import unknown
from rpel.files import write_text
from rpel.integrations.ray import Task
from rpel.processes import Stop, call, cores
from rpel.record import parse_seeds
from rpel.runs.columns import Role, names
from rpel.runs.folder import RunFolder
from rpel.runs.run import Run, spread
from rpel.spec import TO_ALL, Request, load
from rpel.text import value_text

if TYPE_CHECKING:
    from pandas import DataFrame

    from rpel.simulation.inputs import Download

TABLES = ("preset", "base", "grid", "cells")
NUMBERS = (*names(role=Role.MEASURE), *names(role=Role.COST))
POLL_SECONDS = 0.05
FOREIGN = (str(Path(__file__).parents[1]), get_path("stdlib"), "site-packages", "<frozen")
"""Files whose frames tell users nothing about a bug of theirs."""
INTERRUPTED = "interrupted, every run saved: the same command goes on from here"
Labels = Mapping[str, Any]


def sentence(error: BaseException) -> str:
    """Return what is wrong: the sentence of bad input; of a bug in a user's code, its frames and the error.

    >>> sentence(ValueError("nodes 3 is too few")), sentence(KeyError("x"))
    ('nodes 3 is too few', "KeyError: 'x'")
    """
    if isinstance(error, ValueError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in FOREIGN)]
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    return "".join(lines).strip()


# --- cells --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One setting with its labels, and the run it makes or the sentence that says why there is none.

    own: keywords of `rpel.simulate` that are objects; whatever has a name stands in the Request.
    """

    labels: Labels
    spec: Request | None
    error: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells it from the others.

        >>> Cell({"rule": "median", "nodes": 20}, None).name
        'rule median, nodes 20'
        """
        return ", ".join(f"{key} {value_text(value)}" for key, value in self.labels.items()) or "base"


def read(path: str | Path, **fields: Any) -> list[Cell]:
    """Return the cells of a sweep file, all with these fields; an unknown field is an error of the file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: a sweep is a TOML file with [grid]")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return grid(content | fields, re.sub(r"[^\w.+-]", "-", path.stem))


def grid(content: Mapping[str, Any], name: str = "sweep") -> list[Cell]:
    """Return all combinations of [grid], then the [[cells]] given one by one.

    >>> found = grid({"rounds": 5, "grid": {"nodes": [10, 20], "attack": ["alie", "foe"]},
    ...     "cells": [{"nodes": 30}]})
    >>> [cell.name for cell in found][2:]
    ['nodes 20, attack alie', 'nodes 20, attack foe', 'nodes 30']
    >>> grid({"grid": {"nods": [10]}})
    Traceback (most recent call last):
    ValueError: [grid]: unknown field 'nods'; did you mean 'nodes'?
    """
    base, table, given = _base(content), content.get("grid", {}), content.get("cells", [])
    if not isinstance(table, Mapping) or not isinstance(given, list) or not all(
        isinstance(cell, Mapping) for cell in given
    ):  # fmt: skip
        raise ValueError("[grid] is a table of lists, [[cells]] are tables, as in attack = ['alie', 'foe']")
    known = [*Request.model_fields, "preset"]
    places = [("base", key) for key in base] + [("grid", key) for key in table]
    for where, key in places + [("cells", key) for cell in given for key in cell]:
        if key not in known:
            raise ValueError(f"[{where}]: {unknown('field', key, known)}")
    for key, values in table.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} in [grid] is {values!r}: it takes a list such as [{values!r}]")
    combined = [dict(zip(table, values, strict=True)) for values in product(*table.values()) if table]
    combined += [dict(values) for values in given]
    if not combined:
        raise ValueError("the sweep is empty: it needs [grid] or [[cells]]")
    return [made for labels in combined for made in _made({"name": name, **base}, labels)]


def _base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return preset and fields, from the top of the file and from base, which may also be a preset's name."""
    base = content.get("base", {})
    table = {"preset": base} if isinstance(base, str) else dict(base)
    return {key: value for key, value in content.items() if key == "preset" or key not in TABLES} | table


def _made(fixed: Mapping[str, Any], labels: Mapping[str, Any]) -> list[Cell]:
    """Return the cell of these labels, or one for each of its seeds."""
    start = load(fixed["preset"]) if "preset" in fixed else Request()
    try:
        start = load(labels["preset"]) if "preset" in labels else start
        fields = {key: value for key, value in labels.items() if key != "preset"}
        own = ("pull", "b_hat") if fields.get("method") in TO_ALL else ()  # those of the other methods
        base = {key: value for key, value in fixed.items() if key not in ("preset", *own)}
        spec = start.replace(**base | fields)
    except ValueError as error:
        return [Cell(labels, None, str(error))]
    return seeded(Cell(labels, spec))


def seeded(cell: Cell) -> list[Cell]:
    """Return a cell for each of its seeds; one without ``seeds`` as it is."""
    if cell.spec is None or cell.spec.seeds is None:
        return [cell]
    return [
        replace(cell, labels={**cell.labels, "seed": seed}, spec=cell.spec.replace(seed=seed, seeds=None))
        for seed in parse_seeds(cell.spec.seeds)
    ]


# --- at work ------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A run of a study: waiting, running, done, failed or stopped. reused: it was finished before."""

    cell: Cell
    folder: Path | None = None
    log: Path | None = None
    status: str = "waiting"
    error: str = ""
    begun: float = 0.0
    seconds: float = 0.0
    reused: bool = False
    made: Run | None = None

    @property
    def run(self) -> Run | None:
        """Its run, once it is done."""
        if self.made is None and self.status == "done" and self.folder is not None:
            self.made = Run.load(self.folder, self.reused)
        return self.made

    @property
    def last_line(self) -> str:
        """What the run said last."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log and self.log.is_file() else []
        return lines[-1] if lines else ""


Watch = Callable[["Study"], None]


class Study:
    """Labelled runs. ``watch`` is told whenever something may have changed; :attr:`results` has the table."""

    def __init__(
        self,
        cells: Sequence[Cell],
        out: str | Path,
        jobs: int | None = None,
        *,
        strict: bool = False,
        together: bool = True,
        ray: Any = None,
        download: "Download | None" = None,
    ) -> None:
        """Check all cells and find their folders.

        Args:
            cells: what is to be run.
            out: the folder for run folders.
            jobs: runs at a time; as many as cores if left out.
            strict: whether a value that no cell can run with is an error.
            together: whether an error that all cells share is raised.
            ray: the module, connected to a cluster whose tasks the runs are; otherwise they run here.
            download: is told of the bytes of data sets.

        Raises:
            ValueError: all cells fail for one reason, or, if strict, all of one value.
        """
        from rpel.simulation.inputs import loader

        self.out = Path(out).resolve() if ray else Path(out)
        available = cores() if ray is None else int(ray.cluster_resources().get("CPU", 1))
        self.jobs = max(1, min(jobs or available, len(cells)))
        self.threads = max(1, available // self.jobs)
        self.start: Callable[..., Any] = call if ray is None else partial(Task, ray, self.threads)
        self.load = loader(download)
        self.cells: list[tuple[Cell, Job]] = []
        self.processes: dict[int, tuple[Job, Any]] = {}
        self.stopping = False
        by_folder: dict[Path, Job] = {}
        for cell in cells:
            job = self._job(cell)
            if job.folder is not None:
                job = by_folder.setdefault(job.folder, job)  # the same run once, whichever cells want it
            self.cells.append((cell, job))
        if together:
            _check(self.cells, strict)

    def _job(self, cell: Cell) -> Job:
        from rpel.simulation.inputs import Inputs
        from rpel.simulation.run import placed, prepared

        if cell.spec is None or cell.own:
            return Job(cell, status="waiting" if cell.own else "failed", error=cell.error)
        spec = cell.spec.replace(out=str(self.out / "runs"), threads=cell.spec.threads or self.threads)
        try:
            resolved, gathered = prepared(spec, Inputs(), self.load)
            folder = placed(resolved.spec, gathered)
        except Exception as error:  # a user's code may raise anything
            return Job(cell, status="failed", error=sentence(error))
        job = Job(replace(cell, spec=spec), folder, self.out / "cells" / f"{folder.name}.log")
        if RunFolder(folder).certificate() is not None:
            job.status, job.reused = "done", True
            if spec.track == "tensorboard":
                RunFolder(folder).copy_events()
        return job

    @property
    def states(self) -> list[Job]:
        """The distinct runs."""
        return list({id(job): job for _, job in self.cells}.values())

    def run(self, watch: Watch = lambda study: None) -> "Results":
        """Run what is missing; Ctrl-C lets the runs save, then passes on."""
        (self.out / "cells").mkdir(parents=True, exist_ok=True)
        waiting = iter([job for job in self.states if job.status == "waiting"])
        watch(self)  # what cannot run is named before the first cell does
        with Stop() as stop:
            try:
                while not stop.asked and (self._fill(waiting) or self.processes):
                    self._collect()
                    watch(self)
                    time.sleep(POLL_SECONDS if self.processes else 0)
                if stop.asked:
                    self._save()
            finally:
                for _, process in self.processes.values():
                    process.kill()
                    process.wait()
        if stop.asked:
            raise KeyboardInterrupt(INTERRUPTED)
        watch(self)
        return self.results

    def _fill(self, waiting: Iterator[Job]) -> bool:
        """Start runs while there are free processes; return whether one was started."""
        before = len(self.processes)
        while len(self.processes) < self.jobs and (job := next(waiting, None)) is not None:
            job.status, job.begun = "running", time.monotonic()
            if job.cell.own:
                self._here(job)
                return True
            files = {"stdout": Path("/dev/null"), "stderr": job.log}
            process = self.start(train, job.cell.spec, **files, name=job.cell.name)
            self.processes[id(job)] = job, process
        return len(self.processes) > before

    def _here(self, job: Job) -> None:
        """Train a cell with objects from Python in this process."""
        from rpel.simulation.api import simulate

        fields = {} if job.cell.spec is None else job.cell.spec.model_dump(exclude_unset=True)
        try:
            job.made = simulate(**{**fields, **job.cell.own, "out": self.out / "runs"})
            self._end(job, "done")
        except Exception as error:  # a user's code may raise anything
            self._end(job, "failed", sentence(error))

    def _collect(self) -> None:
        """Take in what has ended."""
        for key, (job, process) in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[key]
                try:
                    status, words = process.result()
                except Exception:  # killed, or lost with its machine
                    status = "stopped" if self.stopping else "failed"
                    words = job.last_line or f"ended with status {process.returncode}"
                self._end(job, status, words)

    @staticmethod
    def _end(job: Job, status: str, words: str = "") -> None:
        job.seconds, job.status = time.monotonic() - job.begun, status
        if status == "done":
            job.folder = Path(words) if words else job.folder
        else:
            job.error = words

    def _save(self) -> None:
        """Ask every run to save and end, and wait until they have; a second Ctrl-C does not wait."""
        self.stopping = True
        for _, process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        while self.processes:
            self._collect()
            time.sleep(POLL_SECONDS)

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the runs that ended here; None before the first."""
        took = [job.seconds for job in self.states if job.seconds and job.status == "done"]
        if not took:
            return None
        each, now = sum(took) / len(took), time.monotonic()
        waiting = sum(job.status == "waiting" for job in self.states)
        running = (each - (now - job.begun) for job in self.states if job.status == "running")
        return (waiting * each + sum(max(0.0, left) for left in running)) / self.jobs

    @property
    def results(self) -> "Results":
        """What there is so far."""
        return Results(
            [Result(cell.labels, job.run, job.error or job.status, job.status) for cell, job in self.cells]
        )


def _check(cells: Sequence[tuple[Cell, Job]], strict: bool) -> None:
    """Raise ValueError if all cells fail for one reason, or, if strict, all of one value."""
    errors = {job.error for _, job in cells}
    if cells and len(errors) == 1 and all(job.status == "failed" for _, job in cells):
        raise ValueError(*errors)
    able = [(cell, job) for cell, job in cells if job.status != "failed"]
    good = {(key, repr(value)) for cell, _ in able for key, value in cell.labels.items()}
    for cell, job in cells if strict else ():
        for key, value in cell.labels.items():
            if (key, repr(value)) not in good:
                raise ValueError(f"{key} {value_text(value)}: {job.error}")


def train(spec: Request) -> tuple[str, str]:
    """Train a run in a child process; return its end, and its folder or what went wrong."""
    from rpel.simulation.run import run

    def tell(tick: Any) -> None:
        print(f"round {tick.round} of {tick.rounds}", file=sys.stderr, flush=True)

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return "done", str(run(spec, progress=tell).path)
    except KeyboardInterrupt:
        return "stopped", ""
    except Exception as error:  # a user's code may raise anything
        return "failed", sentence(error)


# --- results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """A cell's labels and its run, or why there is none."""

    labels: Labels
    run: Run | None
    error: str = ""
    status: str = "done"

    def row(self) -> dict[str, Any]:
        """Return labels, how it ended, its last numbers, and where it is kept."""
        known: dict[str, Any] = {**self.labels, "status": self.status, **dict.fromkeys(NUMBERS)}
        run = self.run
        if run is None:
            return known | {"held": None, "path": None, "error": self.error}
        known |= {key: run.final.get(key) for key in {*names(role=Role.MEASURE), *run.measures}}
        known |= {key: run.total(key) for key in names(role=Role.COST)}
        path = None if run.path is None else str(run.path)
        return known | {"held": run.certificate.held, "path": path, "error": ""}


class Results(Sequence[Result]):
    """The table of a study: a row a run, its labels beside its last numbers."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = tuple(results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, at: Any) -> Any:
        return self.results[at]

    def where(self, **labels: Any) -> "Results":
        """Return the results with these labels."""
        return Results([one for one in self if labels.items() <= dict(one.labels).items()])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict a run, with None for what is missing."""
        return [result.row() for result in self]

    @cached_property
    def frame(self) -> "DataFrame":
        """The rows as a DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    @cached_property
    def curves(self) -> "DataFrame":
        """The evaluated rounds of all runs, with their labels and seeds."""
        import pandas

        tables = [r.run.curve.assign(**{"seed": r.run.spec.seed} | dict(r.labels)) for r in self if r.run]
        return pandas.concat(tables, ignore_index=True) if tables else pandas.DataFrame()

    def final(self, column: str, *by: str) -> "DataFrame":
        """Return mean, lowest and highest of a column's last value over the seeds, a row for each ``by``."""
        import pandas

        there = self.frame[self.frame["status"] == "done"]
        groups = there.groupby(list(by), sort=False)[column]
        rows = [(*spread(values.tolist()), len(values)) for _, values in groups]
        return pandas.DataFrame(rows, groups.first().index, ["mean", "lowest", "highest", "seeds"])

    def errors(self) -> dict[str, list[str]]:
        """Return what went wrong, each error once, with the names of its cells."""
        shared: dict[str, list[str]] = {}
        for one in self:
            if one.status in ("failed", "stopped"):
                shared.setdefault(one.error, []).append(Cell(one.labels, None).name)
        return shared

    def write(self, out: Path, name: str = "sweep") -> None:
        """Write the table as NAME.csv and NAME.json."""
        write_text(out / f"{name}.csv", self.frame.to_csv(index=False))
        write_text(out / f"{name}.json", json.dumps(self.rows, indent=2, default=str) + "\n")


# --- from Python --------------------------------------------------------------------------------------------


def sweep(
    model: Any = None, train: Any = None, test: Any = None, loss: Any = None,
    *, grid: Mapping[str, Sequence[Any]], out: str | Path = "sweep", jobs: int | None = None, **fields: Any,
) -> Results:  # fmt: skip
    """Run all combinations of a grid, in which values may be objects, and return their table.

    Args:
        model, train, test, loss: as for `rpel.simulate`; left out: by the names in ``fields``.
        grid: a list of values for each field, such as ``{"rule": ["median", MyRule()], "seed": range(3)}``.
        out: the folder for runs and table.
        jobs: runs at a time, if all values have names; runs with objects are made one after the other.
        fields: what all runs share: the keywords of `rpel.simulate`.
    """
    own = {"model": model, "train": train, "test": test, "loss": loss}
    cells = combinations(own | fields, grid)
    study = Study(cells, out, jobs, strict=True)
    try:
        return study.run()
    finally:
        with suppress(ValueError):
            study.results.write(Path(out))


def combinations(fields: Mapping[str, Any], table: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Return a cell for each combination of values, objects or names."""
    shared = {key: value for key, value in fields.items() if value is not None}
    return [
        cell
        for values in product(*table.values())
        for cell in _of_python(shared, dict(zip(table, values, strict=True)))
    ]


def _of_python(shared: Mapping[str, Any], values: Mapping[str, Any]) -> list[Cell]:
    given = {**shared, **values}
    own = {key: value for key, value in given.items() if not _has_name(key, value)}
    named = {key: value for key, value in given.items() if key not in own}
    labels = {key: value if key in named else label(value) for key, value in values.items()}
    try:
        return seeded(Cell(labels, Request(**named), own=own))
    except ValueError as error:
        return [Cell(labels, None, str(error))]


def _has_name(key: str, value: Any) -> bool:
    """Whether a value can stand in a Request: a word, a number, or a collection of such."""
    if key not in Request.model_fields:
        return False
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | range):
        return all(_has_name(key, one) for one in value)
    return value is None or isinstance(value, str | int | float | Path)


def label(value: Any) -> str:
    """Return what a table calls an object.

    >>> label(min), label(Cell({}, None))
    ('min', 'Cell')
    """
    return str(getattr(value, "__name__", type(value).__name__))
