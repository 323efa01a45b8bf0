"""The loop of a run: step, measure, evaluate, callbacks, row, checkpoint, progress, stop.

Invariants: a row is written before the checkpoint that covers it; a round is wholly in a checkpoint or not at
all, so a resumed run ends with the same bytes; a signal is obeyed between rounds, and at once in the last
evaluation, which can be long: the round is saved before it.
"""

import logging
import math
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.algorithm import State
from rpel.backend.threads import threads
from rpel.errors import BudgetSpentError
from rpel.processes import Stop
from rpel.record import OWN
from rpel.runs.certificate import certificate
from rpel.runs.columns import Row, ends, headline, prefix
from rpel.runs.folder import RunFolder
from rpel.runs.journal import EVENTS, Events, Journal, number
from rpel.runs.run import Run
from rpel.simulation.engine import Engine
from rpel.simulation.evaluate import Record
from rpel.simulation.inputs import Gathered, run_hash
from rpel.simulation.methods import Resolved, baseline
from rpel.spec import Request, to_toml
from rpel.types import RoundInfo

log = logging.getLogger("rpel")

Callback = Callable[[State, Row], Mapping[str, Any] | None]
"""callback(state, row): called after every round; what it returns, numbers by name, joins the row."""
LONG = 2.0
"""Seconds from which on the last evaluation is announced."""
LINE_BYTES = 1_000
"""A generous size of a line of metrics.jsonl."""


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal after saving; ``path`` is the folder to resume (None when nothing is kept)."""

    def __init__(self, round_: int, rounds: int, path: Path | None) -> None:
        self.round, self.path = round_, path
        saved = (
            "nothing was kept" if path is None else f"saved; go on with: rpel resume {shlex.quote(str(path))}"
        )
        super().__init__(f"interrupted after round {round_} of {rounds}, {saved}")


class Tracker(ABC):
    """A callback that is opened before the first round and closed after the last."""

    @abstractmethod
    def begin(self, spec: Request, path: Path | None, rows: Sequence[Row]) -> None:
        """Open it for a run in this folder (None: nothing is kept) that has these rows already."""

    @abstractmethod
    def __call__(self, state: State, row: Row) -> None:
        """Take in a round."""

    @abstractmethod
    def close(self) -> None:
        """Close it, however the run has ended."""


class TensorBoard(Tracker):
    """Copies the metrics to event files in the run folder, for TensorBoard."""

    def begin(self, spec: Request, path: Path | None, rows: Sequence[Row]) -> None:
        assert path is not None, "refused by simulate"
        self.events = Events(path / EVENTS, rows)

    def __call__(self, state: State, row: Row) -> None:
        self.events.add(row)

    def close(self) -> None:
        self.events.close()


def train(
    run: Resolved,
    inputs: Gathered,
    engine: Engine,
    folder: RunFolder | None = None,
    callbacks: Sequence[Callback] = (),
    progress: "Progress | None" = None,
    stop: Stop | None = None,
) -> Run:
    """Play the rounds of a run, from its last checkpoint on, and return what it shows.

    Args:
        run: with its number of threads.
        inputs: what the engine was built from.
        engine: of one process or of several.
        folder: locked by the caller; None keeps nothing.
        callbacks: called after every round, in their order.
        progress: told of every round, once it is kept.
        stop: the token by which the caller learns of a signal, too.
    """
    spec, stop = run.spec, stop or Stop()
    subset = inputs.subset(spec.eval_size)
    record = Record(spec.rounds, engine.honest, engine.each)
    checkpoints = Checkpoints(folder, engine, record, spec, inputs)
    with ExitStack() as stack:
        stack.enter_context(stop)
        measured = checkpoints.restore()  # of a round that was stopped in its last evaluation
        if folder is not None:
            folder.check_room(2 * engine.nbytes + LINE_BYTES * spec.rounds)  # two checkpoints for a moment
            folder.write_text("spec.toml", to_toml(spec.replace(out="runs", workers=1)))
            checkpoints.journal = stack.enter_context(folder.journal(record.rows))
        if not record.rows:
            record.begin(engine.evaluate_initial(subset), list(engine.measures))
        for tracker in callbacks:
            if isinstance(tracker, Tracker):
                tracker.begin(spec, None if folder is None else folder.path, record.rows)
                stack.callback(tracker.close)
        evaluation = 0.0
        while record.round < spec.rounds:
            began, last = time.perf_counter(), record.round + 1 == spec.rounds
            evaluated = last or (record.round + 1) % spec.eval_every == 0
            if measured is None:
                # Step 1: a round of Algorithm 1.
                try:
                    engine.step()
                except BudgetSpentError:
                    checkpoints.save()
                    raise
                # Step 2: how far the nodes are apart, whom they met, who diverged.
                measured = engine.measure(evaluated)
            # Step 3: accuracy and loss of every honest node, in the last round on all test examples.
            shown, before = None, time.perf_counter()
            if last:
                checkpoints.save(measured)
                if evaluation * inputs.dataset.test_size > LONG * len(subset):
                    log.info("evaluating on all %d test examples", inputs.dataset.test_size)
                try:
                    with stop.interrupting():
                        shown = engine.evaluate(None)
                except KeyboardInterrupt:
                    raise Interrupted(spec.rounds, spec.rounds, checkpoints.path) from None
            elif evaluated:
                shown = engine.evaluate(subset)
                evaluation = time.perf_counter() - before
            # Step 4: the row, and what callbacks add to it.
            row = record.row(measured, shown, engine.bytes)
            row["seconds"] = round(time.perf_counter() - began, 6)
            row |= {} if engine.time is None else {"time": number(engine.time)}
            row |= {} if engine.budget is None else {"epsilon": engine.budget.after(record.round + 1)}
            for callback in callbacks:
                row |= _numbers(callback(engine.state, row))
            # Step 5: keep it.
            _warn_of_divergence(record, row)
            record.add(measured, shown, row)
            measured = None
            if checkpoints.journal is not None:
                checkpoints.journal.add(row)
            # Step 6: the checkpoint, where one is due.
            if spec.checkpoint_every and record.round % spec.checkpoint_every == 0 and not last:
                checkpoints.save()
            # Step 7: progress.
            if progress is not None:
                progress(tick(run, record.rows))
            # Step 8: stop, if a signal has asked for it.
            if stop.asked and not last:
                checkpoints.save()
                raise Interrupted(record.round, spec.rounds, checkpoints.path)
    return _finish(run, inputs, engine, folder, record)


def _numbers(columns: Mapping[str, Any] | None) -> Row:
    """The columns that a callback has returned, as a row holds them; ValueError for what is no number."""
    for key, value in (columns or {}).items():
        if value is not None and not isinstance(value, int | float | np.integer | np.floating):
            raise ValueError(
                f"a callback returned {type(value).__name__} for column {key!r}: a column takes a number"
            )
    given = (columns or {}).items()
    return {key: None if value is None else number(float(value)) for key, value in given}


def _warn_of_divergence(record: Record, row: Row) -> None:
    """Log a warning the first time that nodes diverge."""
    if row["diverged"] and not any(earlier["diverged"] for earlier in record.rows):
        loss = "" if row["loss"] is None else f", mean test loss {row['loss']:.3g}"
        log.warning(
            "round %d: %d of %d honest nodes have diverged%s: try a smaller lr, or a rule that survives the "
            "attack", row["round"], row["diverged"], len(record.honest), loss,
        )  # fmt: skip


def _finish(run: Resolved, inputs: Gathered, engine: Engine, folder: RunFolder | None, record: Record) -> Run:
    """Build the finished run, and write its files, the certificate last."""
    spec, honest = run.spec, record.honest.astype(np.int64)
    local, models = engine.local_states().copy(), np.ascontiguousarray(engine.models(), np.float32)
    tensors: dict[str, NDArray[Any]] = {"ids": honest, "models": models}
    tensors |= {"local": local} if local.size else {}
    proof = certificate(
        run.plan.to_dict(),
        record.counts.astype(np.int64),
        run.b_hat,
        engine.roster.honest_ids,
        seed=spec.seed,
        versions=inputs.versions,
        threads=spec.threads or threads(),
        data=inputs.dataset.checksums,
        rule=run.rule.name if spec.rule == OWN else str(spec.rule),
        guarantee=baseline(spec).guarantee,
        objects=inputs.digests,
        metrics=engine.measures,
        privacy=None if engine.budget is None else engine.budget.statement(),
    )
    nodes = record.nodes()
    path = None if folder is None else folder.path
    result = Run(
        spec, path, rows=record.rows, certificate=proof, nodes=nodes, tensors=tensors,
        module=engine.task.module,
    )  # fmt: skip
    if folder is not None:
        folder.write_tensors("models.safetensors", tensors)
        folder.write_arrays("nodes.npz", nodes)
        folder.write_arrays("counts.npz", {"counts": record.counts, "ids": honest})
        folder.write_json("certificate.json", proof.to_dict())
        folder.finish()
    return result


# --- checkpoints --------------------------------------------------------------------------------------------


class Checkpoints:
    """What a bit-exact continuation needs, in the run folder, if there is one."""

    def __init__(
        self, folder: RunFolder | None, engine: Engine, record: Record, spec: Request, inputs: Gathered
    ) -> None:
        self.folder, self.engine, self.record = folder, engine, record
        named = run_hash(spec, inputs)
        self.about = {"run.hash": named, "run.code": inputs.versions["code"]}
        self.journal: Journal | None = None
        self.saved = 0  # the round of the last one

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder.path

    def save(self, measured: RoundInfo | None = None) -> None:
        """Write the checkpoint of the engine's round, unless it exists.

        measured: the measurements of a round whose row is not complete.
        """
        t = self.engine.round
        if self.folder is None or self.saved == t:
            return
        if self.journal is not None:
            self.journal.sync()
        about = {key: np.array(value) for key, value in self.about.items()}
        self.folder.save(t, {**self.engine.arrays(), **self.record.state(measured), **about})
        self.saved = t

    def restore(self) -> RoundInfo | None:
        """Load the newest good checkpoint, provided that metrics.jsonl reaches its round.

        Returns the measurements of a round that is not in metrics.jsonl. Raises ValueError if the checkpoint
        belongs to another run.
        """
        state = None if self.folder is None else self.folder.restore()
        if self.folder is None or state is None:
            return None
        if str(state.pop("run.hash", "")) != self.about["run.hash"]:
            raise ValueError(
                f"the checkpoint in {self.folder.path} belongs to another specification, other data or "
                "another model"
            )
        if str(state.pop("run.code", "")) != self.about["run.code"]:
            log.warning("the checkpoint was made by other code: the rest may differ")
        rows, done = self.folder.metrics(), len(state["record.counts"])
        if len(rows) < done:
            log.warning(
                "metrics.jsonl ends before the checkpoint of round %d: starting again from round 0", done
            )
            return None
        self.engine.load({key: array for key, array in state.items() if not key.startswith("record.")})
        measured = self.record.load(state, rows[:done])
        self.saved = self.engine.round
        log.info("going on after round %d of %d", self.saved, self.engine.spec.rounds)
        return measured


# --- progress -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """What a progress display is told after each round; accuracies are those of the last evaluation.

    Where there are no classes, they are those of a metric, and ``measure`` is its name.

    ``error`` is the standard error of the worst accuracy on the examples of an evaluation; None in the last
    round, which takes all of them.
    """

    name: str
    seed: int
    round: int
    rounds: int
    accuracy_mean: float | None
    accuracy_worst: float | None
    byzantine_max: int
    b_hat: int
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
        return done or self.round == self.rounds


Progress = Callable[[Tick], None]


def tick(run: Resolved, rows: list[Row]) -> Tick:
    """What these rows of a run show."""
    spec = run.spec
    met = max((row["byzantine_max"] for row in rows), default=0)
    mean, worst = ends(rows)
    shown = headline(rows)
    error = None
    if worst is not None and shown == "accuracy" and len(rows) < spec.rounds:
        error = math.sqrt(max(worst * (1 - worst), 0.0) / spec.eval_size)
    key = f"{prefix(shown)}_mean"
    seen = next((row["round"] for row in reversed(rows) if row.get(key) is not None), None)
    return Tick(
        spec.name, spec.seed, len(rows), spec.rounds, mean, worst, met, run.b_hat, measure=shown,
        error=error, seen_round=seen,
    )  # fmt: skip
