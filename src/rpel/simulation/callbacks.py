"""What happens after each round of a run: a callback is called with the state,
the info and the row of metrics.

    measure · evaluate · the user's · write the row · save · show · stop

Each is one small class; a user's callback is any callable ``(state, info, row)``. It sees the measured and
evaluated row, and what it puts into the row stands in metrics.jsonl, in tables and in reports.

Invariants: a row is written before the checkpoint that covers it; a signal is obeyed between rounds, and in
the last evaluation, which can be long: the last round is then kept without it.
"""

import logging
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.algorithm import Info, State
from rpel.processes import Stop
from rpel.runs.columns import Row, ends, headline, prefix
from rpel.runs.folder import RunFolder, is_by_row
from rpel.runs.journal import Journal, number
from rpel.simulation.engine import Simulation
from rpel.simulation.evaluate import Evaluation, Metrics
from rpel.simulation.workers import Communicator
from rpel.spec import Spec
from rpel.types import Integers, RoundInfo

log = logging.getLogger("rpel")

Callback = Callable[[State, Info, Row], None]
LONG = 2.0
"""Seconds from which on the last evaluation shows how far it is."""


@dataclass(frozen=True)
class Tick:
    """What a progress display is told after each round; accuracies are those of the last evaluation.

    Where there are no classes, they are those of a metric, and ``measure`` is its name.

    ``error`` is the standard error of the worst accuracy on the examples of an evaluation; None in the last
    round, which takes all of them.

    A last evaluation that takes long says on its way, as ``evaluated``, which share of it is done.
    """

    name: str
    seed: int
    round: int
    rounds: int
    accuracy_mean: float | None
    accuracy_worst: float | None
    byzantine_max: int
    b_hat: int
    evaluated: float | None = None
    measure: str = "accuracy"
    error: float | None = None
    seen_round: int | None = None
    """The round of the last evaluation, whose accuracies these are."""

    @property
    def sentence(self) -> str:
        """The same as a line of text.

        >>> Tick("demo", 0, 10, 60, 0.5, 0.25, 3, 4, seen_round=8).sentence
        'demo, seed 0: round 10 of 60; accuracy in round 8: mean 0.5000, worst 0.2500; hostile met 3, planned
        for 4'
        """
        parts = [f"{self.name}, seed {self.seed}: round {self.round} of {self.rounds}"]
        if self.accuracy_mean is not None and self.accuracy_worst is not None:
            error = "" if self.error is None else f" ± {self.error:.3f}"
            both = f"mean {self.accuracy_mean:.4f}, worst {self.accuracy_worst:.4f}{error}"
            parts.append(f"{self.measure} in round {self.seen_round}: {both}")
        return "; ".join([*parts, f"hostile met {self.byzantine_max}, planned for {self.b_hat}"])

    @property
    def tenth(self) -> bool:
        """Whether a tenth of the rounds ends here, for displays that say no more than that."""
        done = self.round * 10 // self.rounds > (self.round - 1) * 10 // self.rounds
        return self.evaluated is None and (done or self.round == self.rounds)


Progress = Callable[[Tick], None]


def tick(spec: Spec, rows: list[Row]) -> Tick:
    """What these rows of a run show."""
    met = max((row["byzantine_max"] for row in rows), default=0)
    mean, worst = ends(rows)
    shown = headline(rows)
    error = None
    if worst is not None and shown == "accuracy" and len(rows) < spec.rounds:
        error = math.sqrt(max(worst * (1 - worst), 0.0) / spec.eval_size)
    key = f"{prefix(shown)}_mean"
    seen = next((row["round"] for row in reversed(rows) if row.get(key) is not None), None)
    return Tick(
        spec.name, spec.seed, len(rows), spec.rounds, mean, worst, met, spec.b_hat or 0, measure=shown,
        error=error, seen_round=seen,
    )  # fmt: skip


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal after saving; ``path`` is the folder to resume (None when nothing is kept)."""

    def __init__(self, round_: int, rounds: int, path: Path | None) -> None:
        self.round, self.path = round_, path
        saved = (
            "nothing was kept" if path is None else f"saved; go on with: rpel resume {shlex.quote(str(path))}"
        )
        super().__init__(f"interrupted after round {round_} of {rounds}, {saved}")


# --- measuring ----------------------------------------------------------------------------------------------


@dataclass
class Measure:
    """How far the nodes are apart, whom they met, who diverged: every round.

    ``found`` is of a round whose row is not complete;
    where a run was stopped in its last evaluation it is restored.
    """

    simulation: Simulation
    found: RoundInfo | None = None

    def __call__(self, state: State, info: Info, row: Row) -> None:
        if self.found is None:
            self.found = self.simulation.measured(info, contraction=self.simulation.is_evaluated(info.round))


@dataclass
class Evaluate:
    """Accuracy and loss of every honest node: on a subset every few rounds, in the last one on all
    test examples.

    look: told a few times, on the way of the last one, which share of it is done.
    """

    simulation: Simulation
    subset: Integers
    look: Callable[[float], None] | None = None
    shown: Evaluation | None = None

    def __call__(self, state: State, info: Info, row: Row) -> None:
        run, last = self.simulation, info.round == self.simulation.spec.rounds
        self.shown = None
        if last:
            self.shown = replace(
                run.evaluate(None, self.look),
                output_accuracy=run.output_accuracy(None, self.look),
            )
        elif run.is_evaluated(info.round):
            self.shown = run.evaluate(self.subset)


@dataclass
class Rows:
    """What was measured and evaluated, as the row of the round and in the run's metrics."""

    measure: Measure
    evaluate: Evaluate
    metrics: Metrics
    began: float = field(default_factory=time.perf_counter)

    def __call__(self, state: State, info: Info, row: Row) -> None:
        assert self.measure.found is not None, "measured before it is written"
        sent, now = self.measure.simulation.bytes, time.perf_counter()
        row |= self.metrics.row(self.measure.found, self.evaluate.shown, sent, now - self.began)
        if (clock := self.measure.simulation.clock) is not None:
            row["time"] = number(clock(info.round))
        if (budget := self.measure.simulation.budget) is not None:
            row["epsilon"] = budget.after(info.round)
        if row["diverged"] and self.measure.simulation.workers.rank == 0:
            self._warn_once(info.round, row)

    def _warn_once(self, round: int, row: Row) -> None:
        if not any(earlier["diverged"] for earlier in self.metrics.rows):
            loss = "" if row["loss"] is None else f", mean test loss {row['loss']:.3g}"
            log.warning(
                "round %d: %d of %d honest nodes have diverged%s: try a smaller lr, or a rule that survives "
                "the attack", round, row["diverged"], len(self.metrics.honest), loss,
            )  # fmt: skip


@dataclass
class UserCallbacks:
    """The user's, in their order; what they put into the row is a number, or nothing.

    One may also have ``begin(spec)``, called before the first round of this process, and ``close()``,
    after its last.
    """

    callbacks: Sequence[Callback]

    def begin(self, spec: Spec) -> None:
        """Tell those who want to know what is about to run."""
        self._told("begin", spec)

    def close(self) -> None:
        """Tell those who want to know that it has ended, however it has."""
        self._told("close")

    def _told(self, what: str, *about: Any) -> None:
        for callback in self.callbacks:
            if callable(hear := getattr(callback, what, None)):
                hear(*about)

    def __call__(self, state: State, info: Info, row: Row) -> None:
        known = set(row)
        for callback in self.callbacks:
            callback(state, info, row)
        for key in set(row) - known:
            value = row[key]
            if value is not None and not isinstance(value, int | float | np.integer | np.floating):
                raise ValueError(
                    f"a callback put {type(value).__name__} into column {key!r}: a column takes a number"
                )
            row[key] = None if value is None else number(float(value))


# --- keeping, showing, stopping -----------------------------------------------------------------------------


@dataclass
class Write:
    """The row into the run's metrics, and into metrics.jsonl where there is one."""

    rows: Rows
    journal: Journal | None

    def __call__(self, state: State, info: Info, row: Row) -> None:
        measure, evaluate = self.rows.measure, self.rows.evaluate
        assert measure.found is not None
        self.rows.metrics.add(measure.found, evaluate.shown, row)
        measure.found = None
        if self.journal is not None:
            self.journal.add(row)


@dataclass
class Checkpoint:
    """What a bit-exact continuation needs, every few rounds; every worker writes the rows of its nodes.

    about: the names of what it belongs to. saved: the round of the last one.
    """

    simulation: Simulation
    measure: Measure
    metrics: Metrics
    folder: RunFolder | None
    workers: Communicator
    about: dict[str, str]
    journal: Journal | None = None
    saved: int = 0

    def __call__(self, state: State, info: Info, row: Row) -> None:
        every, rounds = self.simulation.spec.checkpoint_every, self.simulation.spec.rounds
        if every and info.round % every == 0 and info.round < rounds:
            self.save()

    def save(self) -> None:
        """Worker 0 writes last: with that the checkpoint is there."""
        folder, t, workers = self.folder, self.simulation.round, self.workers
        if folder is None or self.saved == t:
            return
        if self.journal is not None:
            self.journal.sync()
        about = {key: np.array(value) for key, value in self.about.items()}
        arrays = {**self.simulation.arrays(), **self.metrics.state(self.measure.found), **about}
        edges = list[int]()
        if workers.size > 1:
            rows, own = self.simulation.mine, {key: arrays.pop(key) for key in list(arrays) if is_by_row(key)}
            workers.each(lambda: folder.save_rows(t, rows.start, own) if rows.start < rows.stop else None)
            edges = sorted({0, *(shard.stop for shard in self.simulation.shards)})
        workers.first(lambda: folder.save(t, arrays, edges))
        self.saved = t

    def restore(self) -> None:
        """Load the newest good checkpoint, if it is this run's and metrics.jsonl reaches so far."""
        folder, state = self.folder, self._newest()
        if folder is None or state is None:
            return
        if str(state.pop("run.hash", "")) != self.about["run.hash"]:
            raise ValueError(
                f"the checkpoint in {folder.path} belongs to another specification or other data"
            )
        if str(state.pop("run.code", "")) != self.about["run.code"]:
            self._warn("the checkpoint was made by other code: the rest may differ")
        rows, done = self.workers.first(folder.metrics), len(state["record.counts"])
        if len(rows) < done:
            self._warn(
                f"metrics.jsonl ends before the checkpoint of round {done}: starting again from round 0"
            )
            return
        self.simulation.load({key: value for key, value in state.items() if not key.startswith("record.")})
        self.measure.found = self.metrics.load(state, rows[:done])
        self.saved = self.simulation.round
        if self.workers.rank == 0:
            log.info("going on after round %d of %d", self.saved, self.simulation.spec.rounds)

    def _newest(self) -> dict[str, NDArray[Any]] | None:
        """The newest checkpoint that all workers can read, with this worker's rows."""
        folder = self.folder
        if folder is None:
            return None
        for round_ in self.workers.first(lambda: [t for t, _ in folder.checkpoints]):
            state = folder.read(round_, self.simulation.mine)
            if not self.workers.any(state is None):
                return state
        return None

    def _warn(self, sentence: str) -> None:
        if self.workers.rank == 0:
            log.warning("%s", sentence)


@dataclass
class Show:
    """The round to a progress display, and how far a long last evaluation is."""

    progress: Progress
    spec: Spec
    metrics: Metrics
    began: float | None = None

    def __call__(self, state: State, info: Info, row: Row) -> None:
        self.progress(tick(self.spec, self.metrics.rows))

    def look(self, done: float) -> None:
        """Which share of the last evaluation is done."""
        self.began = self.began or time.monotonic()
        if time.monotonic() - self.began >= LONG:
            self.progress(replace(tick(self.spec, self.metrics.rows), evaluated=done))


@dataclass
class ObeyStop:
    """Save and leave, if any worker was asked to: between rounds, and in the last evaluation."""

    stop: Stop
    checkpoint: Checkpoint

    def __call__(self, state: State, info: Info, row: Row) -> None:
        if info.round < self.checkpoint.simulation.spec.rounds:
            self.look()

    def look(self, done: float = 0.0) -> None:
        """Raises Interrupted after saving."""
        if self.checkpoint.workers.any(self.stop.asked):
            self.checkpoint.save()
            folder = self.checkpoint.folder
            t, rounds = self.checkpoint.simulation.round, self.checkpoint.simulation.spec.rounds
            raise Interrupted(t, rounds, None if folder is None else folder.path)
