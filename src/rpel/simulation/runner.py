"""One run, round by round: Algorithm 1's step, then the callbacks; and what is kept of it in the end."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend.pool import threads
from rpel.errors import BudgetSpentError
from rpel.processes import Stop
from rpel.record import OWN
from rpel.runs import run as finished
from rpel.runs.certificate import certificate
from rpel.runs.columns import Row
from rpel.runs.folder import RunFolder
from rpel.simulation.build import build_backend, build_task
from rpel.simulation.callbacks import (
    Callback,
    Checkpoint,
    Evaluate,
    Measure,
    ObeyStop,
    Progress,
    Rows,
    Show,
    UserCallbacks,
    Write,
)
from rpel.simulation.engine import Simulation
from rpel.simulation.evaluate import Metrics
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import METHODS, Resolved
from rpel.simulation.workers import ALONE, Communicator
from rpel.spec import spec_hash, to_toml


class Run:
    """One run on its way: Algorithm 1's step and then the callbacks, round by round; saved, restored,
    finished."""

    def __init__(
        self,
        run: Resolved,
        inputs: Gathered,
        folder: RunFolder | None = None,
        progress: Progress | None = None,
        stop: Stop | None = None,
        workers: Communicator = ALONE,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Bad input fails here, before anything is written; ``folder`` None keeps nothing."""
        spec = run.spec
        self.run, self.spec, self.inputs, self.folder, self.workers = run, spec, inputs, folder, workers
        self.user = UserCallbacks(callbacks)
        self.progress, self.stop = None if workers.rank else progress, stop or Stop()
        self.arrays = build_backend(spec, workers.local_rank)
        task = build_task(run, inputs, self.arrays)
        self.simulation = Simulation(
            run, task, workers, self.arrays, change=inputs.problem, optimizer=inputs.optimizer
        )  # fmt: skip
        self.metrics = Metrics(spec.rounds, self.simulation.honest, self.simulation.each)
        self.path = None if folder is None else folder.path
        self.measure = Measure(self.simulation)
        self.evaluate = Evaluate(self.simulation, inputs.subset(spec.eval_size))
        named = spec_hash(spec, inputs.dataset.checksums, inputs.digests)
        about = {"run.hash": named, "run.code": inputs.versions["code"]}
        self.checkpoint = Checkpoint(self.simulation, self.measure, self.metrics, folder, workers, about)

    def result(self) -> finished.Run | None:
        """Go on from the last checkpoint to the end; every worker takes part,
        worker 0 writes and has the result."""
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            self.checkpoint.restore()
            if self.folder is not None and self.workers.rank == 0:
                self._begin(self.folder)
                self.checkpoint.journal = stack.enter_context(self.folder.journal(self.metrics.rows))
            if not self.metrics.round:
                self.metrics.begin(
                    self.simulation.evaluate_initial(self.evaluate.subset), list(self.simulation.measures)
                )
            stack.callback(self.user.close)
            self.user.begin(self.spec)
            self._play()
        return self._finish()

    def _play(self) -> None:
        """The loop. A round that was played before a stop in the last evaluation is not played again."""
        rows, callbacks = self._callbacks()
        while self.metrics.round < self.spec.rounds:
            rows.began, row = time.perf_counter(), Row()
            try:
                info = self.simulation.advance() if self.measure.found is None else self.simulation.played()
            except BudgetSpentError:
                self.checkpoint.save()
                raise
            for callback in callbacks:
                callback(self.simulation.state, info, row)

    def _callbacks(self) -> tuple[Rows, list[Callback]]:
        """All that happens after a step, in its order; every worker has the same."""
        rows, user = Rows(self.measure, self.evaluate, self.metrics), self.user
        write, obey = Write(rows, self.checkpoint.journal), ObeyStop(self.stop, self.checkpoint)
        show = None if self.progress is None else Show(self.progress, self.spec, self.metrics)

        def look(done: float) -> None:
            # theirs must see the last round, which a resumed run does not play again
            if not self.user.callbacks:
                obey.look(done)
            if show is not None:
                show.look(done)

        self.evaluate.look = look
        shown: list[Callback] = [] if show is None else [show]
        return rows, [self.measure, self.evaluate, rows, user, write, self.checkpoint, *shown, obey]

    def _begin(self, folder: RunFolder) -> None:
        """What a folder says of a run before its first round."""
        folder.write_text("spec.toml", to_toml(self.spec.replace(out="runs", workers=1)))

    # --- the end ---

    def _finish(self) -> finished.Run | None:
        tensors = self._tensors()
        if self.workers.rank:
            return None
        proof = certificate(
            self.run.plan.to_dict(),
            self.metrics.counts.astype(np.int64),
            self.run.b_hat,
            self.simulation.roster.honest_ids,
            seed=self.spec.seed,
            versions=self.inputs.versions,
            threads=self.spec.threads or threads(),
            data=self.inputs.dataset.checksums,
            rule=self.run.rule.name if self.spec.rule == OWN else str(self.spec.rule),
            guarantee=METHODS[self.spec.method].guarantee,
            objects=self.inputs.digests,
            metrics=self.simulation.measures,
            privacy=None if self.simulation.budget is None else self.simulation.budget.statement(),
        )
        module = self.simulation.task.module
        nodes = self.metrics.nodes()
        result = finished.Run(
            self.spec.replace(),
            self.path,
            rows=self.metrics.rows,
            certificate=proof,
            nodes=nodes,
            tensors=tensors,
            module=module,
        )
        if self.folder is not None:
            self._write(self.folder, result)
        return result

    def _tensors(self) -> dict[str, NDArray[Any]]:
        """What is kept of the honest nodes: their output models,
        and what never left them (BatchNorm's statistics)."""
        honest = self.metrics.honest.astype(np.int64)
        tensors: dict[str, NDArray[Any]] = {
            "ids": honest, "models": np.ascontiguousarray(self.simulation.models(), np.float32),
        }  # fmt: skip
        local = self.simulation.local_states()
        if local.size:
            tensors["local"] = local
        return tensors

    def _write(self, folder: RunFolder, result: finished.Run) -> None:
        """All files of a finished run, the certificate last."""
        honest = self.metrics.honest.astype(np.int64)
        folder.write_tensors("models.safetensors", result.tensors)
        folder.write_arrays("nodes.npz", result.nodes)
        folder.write_arrays("counts.npz", {"counts": self.metrics.counts, "ids": honest})
        folder.write_json("certificate.json", result.certificate.to_dict())
        folder.finish()
