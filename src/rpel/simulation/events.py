"""Scalars for TensorBoard: a copy of metrics.jsonl that can be watched while the run goes on.

Laws: metrics.jsonl is what counts, and whoever opens it anew begins another event file with all its rows, so every
round is there once, however often the run was stopped and even if it began without; readers forget what earlier files
said (purge_step), also those who are looking on. Nothing here is in the run's hash.
"""

import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
TAGS = {
    "accuracy_mean": "accuracy/mean", "accuracy_worst": "accuracy/worst", "accuracy_median": "accuracy/median",
    "loss": "loss", "grad_norm": "grad_norm", "alpha_realised": "realised/alpha", "lambda_realised": "realised/lambda",
    "consensus": "consensus", "byzantine_max": "hostile/byzantine_max", "degraded": "hostile/degraded",
}  # fmt: skip
"""The columns that are shown, and what they are called there."""
_FLUSH = 5  # seconds after which a reader sees rounds that were not evaluated
_LARGEST = 3e38  # of the 32-bit floats that event files hold


def check() -> None:
    """ValueError, with what to do, where TensorBoard is not installed; nothing heavy is imported."""
    if find_spec("tensorboard") is None:
        raise ValueError("TensorBoard is not installed: pip install 'rpel[tensorboard]'")


class Events:
    """The event file of a run: begun anew with the rows so far, then a row a round."""

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        check()
        _wait_for_a_later_name(folder)
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self.writer: Any = writer(str(folder), purge_step=1, flush_secs=_FLUSH)
        at = time.time() - sum(row["seconds"] for row in rows)
        for row in rows:
            at += row["seconds"]
            self.add(row, at)

    def add(self, row: Mapping[str, Any], at: float | None = None) -> None:
        """One round; ``at`` is when it ended, now if left out; a reader sees evaluated rounds at once."""
        for key, tag in TAGS.items():
            value = row.get(key)
            if value is not None:
                self.writer.add_scalar(tag, shown(value), row["round"], walltime=at)
        if at is None and row.get("accuracy_mean") is not None:
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Readers take event files by name, which begins with the second they were made in: no two may share one."""
    made = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
    wait = max((int(second) for second in made if second.isdecimal()), default=0) + 1 - time.time()
    if wait > 1:  # made by a clock that was ahead of ours
        remove(folder)
    elif wait > 0:
        time.sleep(wait)


def remove(folder: Path) -> None:
    """Remove the event files."""
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()


def shown(value: float) -> float:
    """The value as an event file can hold it; what overflowed is infinite.

    >>> shown(0.5), shown(1.7e308)
    (0.5, inf)
    """
    return float(value) if abs(value) < _LARGEST else math.copysign(math.inf, value)
