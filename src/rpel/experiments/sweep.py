"""Sweeps: a base, a grid over any fields, cells of their own; run several processes at a time.

A sweep file is a run file with more: ``preset`` and fields (at the top or under [base]), [grid] with lists of
values, all combinations of which are run, and [[cells]] with further combinations.

Invariants: the whole grid is checked before the first cell runs. A field that does not exist, and a value
that no cell can run with, are errors of the file; a combination that cannot run is a failed cell, and the
others run. A cell is one ``rpel run`` in a process of its own, so a failure stays there; a cell that has its
result, from the same data and code, is not run again; a stopped sweep has every run saved; the result is a
table with a row for every cell, failed ones with their sentence.
"""

import hashlib
import json
import re
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from rpel.errors import nearest
from rpel.files import write_text
from rpel.integrations.ray import Task
from rpel.processes import Stop, cores, start
from rpel.runs.columns import Role, names
from rpel.runs.folder import RunFolder
from rpel.runs.journal import check_tensorboard
from rpel.runs.record import Run
from rpel.runs.table import Table
from rpel.spec import TO_ALL, Spec, load, load_folder, to_toml
from rpel.text import value_text

_TABLES = ("preset", "base", "grid", "cells")
_NUMBERS = (*names(role=Role.MEASURE), *names(role=Role.COST))
_POLL = 0.05


@dataclass(frozen=True)
class Cell:
    """One combination: what the grid gave it, and the run it makes or the sentence that says why there is
    none."""

    values: Mapping[str, Any]
    spec: Spec | None
    error: str = ""
    name: str = ""

    @property
    def label(self) -> str:
        return (
            self.name
            or ", ".join(f"{key} {value_text(value)}" for key, value in self.values.items())
            or "base"
        )

    @cached_property
    def key(self) -> str:
        """Twelve hexadecimal digits of what is run: the fields, the code, and the data as they lie here."""
        if self.spec is None:
            return hashlib.sha256(self.label.encode()).hexdigest()[:12]
        from rpel.simulation.inputs import code_versions, data_checksums

        spec = self.spec
        what: list[Any] = [spec.identity(), spec.name, spec.seeds, code_versions(spec)["code"]]
        what.append(data_checksums(spec.dataset, spec.data_dir))
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def forget_checksums() -> None:
    """Look at the data anew: they may have changed since."""
    from rpel.simulation.inputs import data_checksums

    data_checksums.cache_clear()


def read(path: str | Path) -> list[Cell]:
    """The cells of a sweep file; a field that does not exist is an error,
    a value that cannot be is a failed cell."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: a sweep is a TOML file with [grid]")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return cells(content, re.sub(r"[^\w.+-]", "-", path.stem))


def cells(content: Mapping[str, Any], name: str = "sweep") -> list[Cell]:
    """All combinations of the grid, then the cells given one by one.

    >>> found = cells({"rounds": 5, "grid": {"nodes": [10, 20], "attack": ["alie", "foe"]},
    ...     "cells": [{"nodes": 30}]})
    >>> [cell.label for cell in found][2:]
    ['nodes 20, attack alie', 'nodes 20, attack foe', 'nodes 30']
    >>> cells({"grid": {"nods": [10]}})
    Traceback (most recent call last):
    ValueError: there is no field 'nods' in [grid]; the nearest is 'nodes'
    """
    base, grid, given = _base(content), content.get("grid", {}), content.get("cells", [])
    if (
        not isinstance(grid, Mapping)
        or not isinstance(given, list)
        or not all(isinstance(c, Mapping) for c in given)
    ):
        raise ValueError(
            "[grid] is a table of lists and [[cells]] are tables, as in attack = ['alie', 'foe']"
        )
    known = [*Spec.model_fields, "preset"]
    for where, key in (
        [("base", k) for k in base] + [("grid", k) for k in grid] + [("cells", k) for c in given for k in c]
    ):
        if key not in known:
            raise ValueError(f"there is no field {key!r} in [{where}]; {nearest(key, known)}")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} in [grid] is {values!r}: it takes a list such as [{values!r}]")
    combinations = (
        [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []
    )
    combinations += [dict(values) for values in given]
    if not combinations:
        raise ValueError("the sweep is empty: it needs [grid] or [[cells]]")
    preset = load(base["preset"]) if "preset" in base else Spec()
    fixed = {"name": name, **{key: value for key, value in base.items() if key != "preset"}}
    by_key: dict[str, Cell] = {}
    for values in combinations:
        cell = _cell(preset, fixed, values)
        by_key.setdefault(repr(cell.spec) if cell.spec else cell.label, cell)  # the same run only once
    return list(by_key.values())


def checked(cells: list[Cell]) -> list[Cell]:
    """The cells, those that cannot run with their sentence; ValueError for a value that no cell can run with.

    >>> [cell.error for cell in checked(cells({"grid": {"nodes": [6, 20], "byzantine": [1, 4]}}))][1]
    'byzantine 4 is not a minority of nodes 6: the most is 2'
    >>> checked(cells({"grid": {"rule": ["mean", "krumm"]}}))
    Traceback (most recent call last):
    ValueError: rule krumm: unknown rule 'krumm'; did you mean 'krum'?
    """
    tried = [_tried(cell) for cell in cells]
    good = {
        (key, repr(value)) for cell in tried if cell.spec is not None for key, value in cell.values.items()
    }
    for cell in tried:
        for key, value in cell.values.items():
            if cell.spec is None and (key, repr(value)) not in good:
                raise ValueError(f"{key} {value_text(value)}: {cell.error}")
    return tried


def _tried(cell: Cell) -> Cell:
    from rpel.simulation.methods import resolve

    try:
        if cell.spec is not None:
            resolve(cell.spec)
    except ValueError as error:
        return replace(cell, spec=None, error=str(error))
    return cell


def _base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Preset and fields, from the top of the file and from base, which may also be a preset's name."""
    base = content.get("base", {})
    table = {"preset": base} if isinstance(base, str) else dict(base)
    top = {key: value for key, value in content.items() if key == "preset" or key not in _TABLES}
    return {**top, **table}


def _cell(preset: Spec, fixed: Mapping[str, Any], values: Mapping[str, Any]) -> Cell:
    try:
        start = load(values["preset"]) if "preset" in values else preset
        fields = {key: value for key, value in values.items() if key != "preset"}
        own = () if fields.get("method") not in TO_ALL else ("pull", "b_hat")  # those of the other methods
        return Cell(
            values, start.replace(**{key: value for key, value in fixed.items() if key not in own} | fields)
        )
    except ValueError as error:
        return Cell(values, None, str(error))


# --- the processes ------------------------------------------------------------------------------------------


@dataclass
class CellRun:
    """A cell on its way: waiting, running, done, failed or stopped."""

    cell: Cell
    status: str = "waiting"
    result: dict[str, Any] | None = None
    error: str = ""
    begun: float = 0.0
    seconds: float = 0.0
    reused: bool = False
    log: Path | None = None

    @property
    def end(self) -> Run | str:
        """The run of a cell with one seed; where there is none, why."""
        if self.result is None:
            return self.error or self.status
        path = Path(self.result["path"])
        return Run(load_folder(path), path, reused=self.reused)

    @property
    def last_line(self) -> str:
        """What the run said last."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log and self.log.is_file() else []
        return lines[-1] if lines else ""


Watch = Callable[["Sweep"], None]


class Sweep:
    """All cells, those on their way in processes; ``watch`` is told whenever something may have changed."""

    def __init__(
        self,
        cells: list[Cell],
        out: str | Path,
        jobs: int | None = None,
        tensorboard: bool = False,
        ray: Any = None,
        reuse: bool = False,
    ) -> None:
        """ray: the module, connected to a cluster, that runs the cells as its tasks; else they run here.

        reuse: finished runs of other code are taken, too.
        """
        if tensorboard:
            check_tensorboard()
        self.out, self.tensorboard, self.reuse = Path(out).resolve() if ray else Path(out), tensorboard, reuse
        available = cores() if ray is None else int(ray.cluster_resources().get("CPU", 1))
        self.jobs = max(1, min(jobs or available, len(cells)))
        self.threads = max(1, available // self.jobs)
        self.start: Callable[..., Any] = start if ray is None else partial(Task, ray, self.threads)
        forget_checksums()
        self.states = [CellRun(cell, log=self._file(cell, "log")) for cell in cells]
        self.processes: dict[int, Any] = {}  # as subprocess.Popen: poll, returncode, send_signal, kill, wait
        self.stopping = False

    def _file(self, cell: Cell, suffix: str) -> Path:
        return self.out / "cells" / f"{cell.key}.{suffix}"

    def run(self, watch: Watch = lambda sweep: None) -> list[CellRun]:
        """Run everything; Ctrl-C lets the runs save, then passes on."""
        (self.out / "cells").mkdir(parents=True, exist_ok=True)
        self.recall()
        watch(self)  # what cannot run is said before the first cell does
        waiting = iter([i for i, state in enumerate(self.states) if state.status == "waiting"])
        with Stop() as stop:
            try:
                while not stop.asked and (self._fill(waiting) or self.processes):
                    self._collect()
                    watch(self)
                    time.sleep(_POLL)
                if stop.asked:
                    self._save()
            finally:
                for process in self.processes.values():
                    process.kill()
                    process.wait()
                self.write()
        if stop.asked:
            raise KeyboardInterrupt("interrupted, every run saved: the same command goes on from here")
        watch(self)
        return self.states

    def recall(self) -> None:
        """Cells that have their result, or never can."""
        for state in self.states:
            if state.cell.spec is None:
                state.status, state.error = "failed", state.cell.error
                continue
            stored = self._file(state.cell, "json")
            result = json.loads(stored.read_text("utf-8")) if stored.is_file() else None
            seeds = [] if result is None else result.get("runs", [result])
            runs = [RunFolder(Path(seed["path"]), self.tensorboard) for seed in seeds]
            if runs and all(run.certificate() is not None for run in runs):
                state.result, state.status, state.reused = result, "done", True
                for run in runs:
                    run.copy_events()

    def _fill(self, waiting: Iterator[int]) -> bool:
        """Start cells while there is room; True if one was started."""
        started = list(islice(waiting, self.jobs - len(self.processes)))
        for i in started:
            self._start(i)
        return bool(started)

    def _start(self, i: int) -> None:
        state = self.states[i]
        cell = state.cell
        assert cell.spec is not None
        spec = cell.spec.replace(threads=cell.spec.threads or self.threads, out=str(self.out / "runs"))
        file = self._file(cell, "toml")
        file.write_text(to_toml(spec), "utf-8")
        command = [
            "run",
            str(file),
            "--json",
            *["--tensorboard"] * self.tensorboard,
            *["--reuse"] * self.reuse,
        ]
        self.processes[i] = self.start(command, self._file(cell, "out"), self._file(cell, "log"))
        state.status, state.begun = "running", time.monotonic()

    def _collect(self) -> None:
        """Take in what has ended."""
        for i, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[i]
                self._ended(self.states[i], process.returncode)

    def _ended(self, state: CellRun, code: int) -> None:
        state.seconds = time.monotonic() - state.begun
        output = self._file(state.cell, "out")
        if code == 0:
            text = output.read_text("utf-8")
            state.result, state.status = json.loads(text), "done"
            state.reused = state.result["reused"]
            write_text(self._file(state.cell, "json"), text)
        else:
            state.status = "stopped" if self.stopping else "failed"
            state.error = state.last_line.removeprefix("rpel: ") or f"ended with status {code}"
        output.unlink(missing_ok=True)

    def _save(self) -> None:
        """Ask every run to save and end, and wait until they have; a second Ctrl-C does not wait."""
        self.stopping = True
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        while self.processes:
            self._collect()
            time.sleep(_POLL)

    # --- what is known ---

    @property
    def seconds_left(self) -> float | None:
        """From the cells that ended in this sweep; None before the first."""
        took = [state.seconds for state in self.states if state.seconds and state.status == "done"]
        if not took:
            return None
        each = sum(took) / len(took)
        waiting = sum(state.status == "waiting" for state in self.states)
        now = time.monotonic()
        on_way = sum(
            max(0.0, each - (now - state.begun)) for state in self.states if state.status == "running"
        )
        return (waiting * each + on_way) / self.jobs

    def rows(self) -> list[dict[str, Any]]:
        """A row a cell: its values, how it ended, its last numbers, where it lies."""
        keys = list(dict.fromkeys(key for state in self.states for key in state.cell.values))
        rows = []
        for state in self.states:
            result = state.result or {}
            spec = state.cell.spec
            row = {key: state.cell.values.get(key, getattr(spec, key, None)) for key in keys}
            row |= {"status": state.status, **{key: result.get(key) for key in _NUMBERS}}
            row |= {
                "held": result.get("certificate", {}).get("held"),
                "path": result.get("path"),
                "error": state.error,
            }
            rows.append(row)
        return rows

    def write(self) -> None:
        """sweep.csv and sweep.json."""
        rows = self.rows()
        write_text(self.out / "sweep.csv", Table(rows).to_csv())
        write_text(self.out / "sweep.json", json.dumps(rows, indent=2) + "\n")
