"""metrics.jsonl: a line a round, and the same for TensorBoard if that is wanted.

Invariant: metrics.jsonl is what counts. Whoever opens it anew begins another event file for TensorBoard with
all its rows, and readers forget what earlier ones said (purge_step), so every round is there once.
"""

import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rpel.files import naming_the_disk
from rpel.runs.columns import COLUMNS, Row, column


def number(value: float | None) -> float | None:
    """A number as a row holds it: None where there is none and where it overflowed.

    >>> number(0.5), number(float("nan")), number(float("inf"))
    (0.5, None, None)
    """
    return None if value is None or not math.isfinite(value) else value


# --- metrics.jsonl ------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """The complete lines of a metrics.jsonl, up to the first damaged one; columns that it lacks are None."""
    rows: list[Row] = []
    for line in path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith("\n") or row["round"] != len(rows) + 1:
            break
        rows.append(dict.fromkeys(COLUMNS) | row)
    return rows


def lines(rows: Sequence[Row]) -> str:
    """Rows as the lines of a metrics.jsonl."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


class Journal:
    """metrics.jsonl, open: a line a round."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self.file = file

    def add(self, row: Row) -> None:
        with naming_the_disk(Path(self.file.name)):
            self.file.write(lines([row]))
            self.file.flush()

    def sync(self) -> None:
        """Make all lines durable, before a checkpoint relies on them."""
        os.fsync(self.file.fileno())


# --- TensorBoard --------------------------------------------------------------------------------------------

EVENTS = "tensorboard"
"""The folder, in a run folder, for event files."""
_FLUSH = 5  # seconds after which a reader sees rounds that were not evaluated
_LARGEST = 3e38  # of the 32-bit floats that event files hold


def check_tensorboard() -> None:
    """ValueError, with what to do, where TensorBoard is not installed; nothing heavy is imported."""
    if find_spec("tensorboard") is None:
        raise ValueError("TensorBoard is not installed: pip install 'rpel[tensorboard]'")


class Events:
    """The event file of a run: begun anew with the rows so far, then a row a round."""

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        check_tensorboard()
        _wait_for_a_later_name(folder)
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self.writer: Any = writer(str(folder), purge_step=1, flush_secs=_FLUSH)
        at = time.time() - sum(row["seconds"] for row in rows)
        for row in rows:
            at += row["seconds"]
            self.add(row, at)

    def add(self, row: Mapping[str, Any], at: float | None = None) -> None:
        """One round; ``at`` is when it ended, now if left out; a reader sees evaluated rounds at once."""
        for key, value in row.items():
            if value is not None and (tag := column(key).tag) is not None:
                self.writer.add_scalar(tag, shown(value), row["round"], walltime=at)
        if at is None and row.get("loss") is not None:
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Make sure that a new event file gets a later name than the existing ones.

    Readers sort event files by name, which begins with the second of creation, so no two may share one.
    """
    made = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
    wait = max((int(second) for second in made if second.isdecimal()), default=0) + 1 - time.time()
    if wait > 1:  # made by a clock that was ahead of ours
        remove_events(folder)
    elif wait > 0:
        time.sleep(wait)


def remove_events(folder: Path) -> None:
    """Remove the event files."""
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()


def shown(value: float) -> float:
    """The value as an event file can hold it; what overflowed is infinite.

    >>> shown(0.5), shown(1.7e308)
    (0.5, inf)
    """
    return float(value) if abs(value) < _LARGEST else math.copysign(math.inf, value)
