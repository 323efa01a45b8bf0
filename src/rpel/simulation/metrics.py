"""What a run has shown so far: a row of metrics a round, hostile counts, and every node's accuracy when evaluated.

Rows are appended to metrics.jsonl and, where that is wanted, copied for TensorBoard.

Invariants:
- all but the rows goes into the checkpoint, and a row is written before the checkpoint that covers it, so a resumed run
  ends with the same metrics;
- a number that overflowed is null, and ``diverged`` counts the honest nodes whose model is not finite;
- metrics.jsonl is what counts: whoever opens it anew begins another event file for TensorBoard with all its rows, and
  readers forget what earlier ones said (purge_step), so every round is there once.
"""

import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel.types import RoundInfo

if TYPE_CHECKING:  # torch comes with it, and a folder is read without
    from rpel.simulation.evaluation import Evaluation

Row = dict[str, Any]
COLUMNS = (
    "round", "accuracy_mean", "accuracy_worst", "accuracy_median", "loss", "grad_norm", "alpha_realised",
    "lambda_realised", "consensus", "messages", "bytes", "byzantine_max", "degraded", "diverged",
    "attack_success_mean", "attack_success_worst", "output_accuracy_mean", "output_accuracy_worst", "seconds",
)  # fmt: skip
_EVALUATED = COLUMNS[1:8]
_AHEAD = "record.ahead."


class Metrics:
    """Filled round by round; ``counts`` (T, h), ``rows`` one dict a round."""

    def __init__(self, rounds: int, honest: NDArray[np.int64]) -> None:
        self.honest = honest
        self.counts = np.zeros((rounds, len(honest)), dtype=np.int32)
        self.rows: list[Row] = []
        self.eval_rounds: list[int] = []
        self.accuracies: list[NDArray[np.float64]] = []
        self.measured: dict[str, list[NDArray[np.float64]]] = {}
        """The same of each metric."""

    @property
    def round(self) -> int:
        return len(self.rows)

    def begin(self, found: Mapping[str, float], names: Sequence[str] = ()) -> None:
        """Take in accuracy and metrics of the common initial model, as round 0; names: of all metrics."""
        h = len(self.honest)
        self.eval_rounds, self.accuracies = [0], [np.full(h, found["accuracy"])]
        self.measured = {name: [np.full(h, found.get(f"{METRIC}{name}", math.nan))] for name in names}

    def add(self, info: RoundInfo, shown: "Evaluation | None", sent: int, seconds: float) -> Row:
        """Take in one round: its info, its evaluation if there was one, bytes and time; returns the new row."""
        self.counts[info.round - 1] = info.hostile
        row = _row(info, shown, sent, seconds) | _metrics(shown, self.measured)
        self.rows.append(row)
        if shown is not None:
            self.eval_rounds.append(info.round)
            self.accuracies.append(shown.accuracy)
            for name, values in self.measured.items():
                values.append(shown.metrics[name])
        return row

    def nodes(self) -> dict[str, NDArray[Any]]:
        """Accuracy and metrics of every honest node in the rounds evaluated, 0 first: round (e,), the others (e, h)."""
        found = {"accuracy": self.accuracies} | {f"{METRIC}{name}": values for name, values in self.measured.items()}
        arrays = {key: np.array(values, np.float64).reshape(-1, len(self.honest)) for key, values in found.items()}
        return {"round": np.array(self.eval_rounds, np.int64), **arrays}

    def state(self, ahead: RoundInfo | None = None) -> dict[str, NDArray[Any]]:
        """What a checkpoint keeps beside the simulation's own state. ahead: of a round that is not yet taken in."""
        nodes = self.nodes()
        counts = self.counts[: self.round]
        known = {} if ahead is None else {key: value for key, value in vars(ahead).items() if value is not None}
        return {
            "record.counts": counts, **{f"record.{key}": values for key, values in nodes.items()},
            **{_AHEAD + key: np.asarray(value) for key, value in known.items()},
        }  # fmt: skip

    def load(self, state: Mapping[str, NDArray[Any]], rows: list[Row]) -> RoundInfo | None:
        """Continue from a :meth:`state` and the rows up to it; returns what it says of a round ahead of them."""
        counts = state["record.counts"]
        self.counts[: len(counts)] = counts
        self.rows = list(rows)
        self.eval_rounds = [int(t) for t in state["record.round"]]
        self.accuracies = list(state["record.accuracy"])
        prefix = f"record.{METRIC}"
        self.measured = {k.removeprefix(prefix): list(v) for k, v in state.items() if k.startswith(prefix)}
        ahead: dict[str, Any] = {
            key.removeprefix(_AHEAD): value if value.ndim else value.item()
            for key, value in state.items()
            if key.startswith(_AHEAD)
        }
        return RoundInfo(**ahead) if ahead else None


def _row(info: RoundInfo, shown: "Evaluation | None", sent: int, seconds: float) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"round": info.round, "consensus": number(info.consensus), "messages": info.messages, "bytes": sent}
    row |= {"byzantine_max": int(info.hostile.max(initial=0)), "degraded": info.degraded}
    row |= {"diverged": info.diverged, "seconds": round(seconds, 6)}
    if shown is not None:
        # nodes that agreed before the exchange have no spread to compare with: alpha and lambda are then 0
        values = [shown.mean, shown.worst, shown.median, float(shown.loss.mean()), shown.grad_norm]
        values += [info.alpha_realised or 0.0, info.lambda_realised or 0.0]
        row |= {key: number(value) for key, value in zip(_EVALUATED, values, strict=True)}
        if (success := shown.attack_success) is not None:
            row |= {"attack_success_mean": float(success.mean()), "attack_success_worst": float(success.max())}
        if (output := shown.output_accuracy) is not None:
            found = {"output_accuracy_mean": float(output.mean()), "output_accuracy_worst": float(output.min())}
            row |= {key: number(value) for key, value in found.items()}
    return row


METRIC = "metric."
"""What the columns of a metric begin with: ``metric.<name>_mean`` and ``metric.<name>_worst``."""


def _metrics(shown: "Evaluation | None", names: Iterable[str]) -> Row:
    """The columns of the metrics: the mean over the honest nodes, and the worst of them."""
    row: Row = {}
    for name in names:
        mean = worst = None
        if shown is not None:
            values = shown.metrics[name]
            worst = number(float(values.min() if shown.better[name] else values.max()))
            mean = number(float(values.mean()))
        row |= {f"{METRIC}{name}_mean": mean, f"{METRIC}{name}_worst": worst}
    return row


def headline(rows: Sequence[Row]) -> str:
    """What rows are judged by: "accuracy", or where there are no classes the first metric.

    >>> headline([{"accuracy_mean": None, "metric.mae_mean": 0.5}]), headline([{"accuracy_mean": 0.5}])
    ('mae', 'accuracy')
    """
    named = [key for key in (rows[-1] if rows else {}) if key.startswith(METRIC) and key.endswith("_mean")]
    if not named or any(row["accuracy_mean"] is not None for row in rows):
        return "accuracy"
    return named[0].removeprefix(METRIC).removesuffix("_mean")


def ends(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Mean and worst of the last evaluation among rows, by their :func:`headline`."""
    name = headline(rows)
    key = name if name == "accuracy" else f"{METRIC}{name}"
    seen: Row = next((row for row in reversed(rows) if row[f"{key}_mean"] is not None), {})
    return seen.get(f"{key}_mean"), seen.get(f"{key}_worst")


def number(value: float | None) -> float | None:
    """A number as a row holds it: None where there is none and where it overflowed.

    >>> number(0.5), number(float("nan")), number(float("inf"))
    (0.5, None, None)
    """
    return None if value is None or not math.isfinite(value) else value


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


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
    """metrics.jsonl, open: a line a round, and the same for TensorBoard if that is wanted."""

    def __init__(self, file: io.TextIOWrapper, copy: "Events | None" = None) -> None:
        self.file, self.copy = file, copy

    def add(self, row: Row) -> None:
        self.file.write(lines([row]))
        self.file.flush()
        if self.copy is not None:
            self.copy.add(row)

    def sync(self) -> None:
        """Make all lines durable, before a checkpoint relies on them."""
        os.fsync(self.file.fileno())


# --- TensorBoard -----------------------------------------------------------------------------------------------------

EVENTS = "tensorboard"
"""The folder, in a run folder, for event files."""
TAGS = {
    "accuracy_mean": "accuracy/mean", "accuracy_worst": "accuracy/worst", "accuracy_median": "accuracy/median",
    "loss": "loss", "grad_norm": "grad_norm", "alpha_realised": "realised/alpha", "lambda_realised": "realised/lambda",
    "consensus": "consensus", "diverged": "diverged", "byzantine_max": "hostile/byzantine_max",
    "degraded": "hostile/degraded", "attack_success_mean": "hostile/attack_success_mean",
    "attack_success_worst": "hostile/attack_success_worst", "output_accuracy_mean": "accuracy/output_mean",
    "output_accuracy_worst": "accuracy/output_worst",
}  # fmt: skip
"""The columns that are shown, and what they are called there."""
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
        for key, tag in TAGS.items():
            value = row.get(key)
            if value is not None:
                self.writer.add_scalar(tag, shown(value), row["round"], walltime=at)
        for key, value in row.items():
            if key.startswith(METRIC) and value is not None:
                self.writer.add_scalar(key, shown(value), row["round"], walltime=at)
        if at is None and row.get("loss") is not None:
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Readers take event files by name, which begins with the second they were made in: no two may share one."""
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
