"""One run on its way: round by round, saved, restored, stopped between rounds, finished.

Laws: a round is either wholly in the checkpoint or not at all, so a resumed run ends with the same bytes; a signal is
obeyed between rounds, never inside one.
"""

import logging
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.config.spec import to_toml
from rpel.data import balanced_subset
from rpel.simulation import figure
from rpel.simulation.environment import Stop, versions
from rpel.simulation.evaluation import Evaluation, certificate
from rpel.simulation.folder import Journal, RunFolder
from rpel.simulation.material import Material, build_task
from rpel.simulation.methods import METHODS
from rpel.simulation.metrics import Record
from rpel.simulation.result import Result
from rpel.simulation.settle import Settled, spec_hash
from rpel.simulation.simulator import Setting, Simulation
from rpel.simulation.table import Table

log = logging.getLogger("rpel")


@dataclass(frozen=True)
class Tick:
    """What a progress display is told after each round; accuracies are those of the last evaluation."""

    name: str
    seed: int
    round: int
    rounds: int
    accuracy_mean: float | None
    accuracy_worst: float | None
    byzantine_max: int
    b_hat: int


Progress = Callable[[Tick], None]


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal after saving; ``path`` is the folder to resume (None when nothing is kept)."""

    def __init__(self, round_: int, rounds: int, path: Path | None) -> None:
        self.path = path
        saved = "nothing was kept" if path is None else f"saved; go on with: rpel resume {shlex.quote(str(path))}"
        super().__init__(f"interrupted after round {round_} of {rounds}, {saved}")


class Running:
    """One run on its way."""

    def __init__(
        self, settled: Settled, material: Material, folder: RunFolder | None, progress: Progress | None, threads: int
    ) -> None:
        self.settled, self.material, self.folder, self.progress = settled, material, folder, progress
        self.spec, self.threads = settled.spec.but(threads=threads), threads
        self.simulation = Simulation(setting(settled), build_task(self.spec, material))
        self.record = Record(self.spec.rounds, self.simulation.honest)
        # the same examples for every seed
        self.subset = balanced_subset(material.dataset.test_y, self.spec.eval_size, seed=0)
        self.path = None if folder is None else folder.path
        self.saved = 0
        self.asked_to_stop = False  # by a signal in the last round: too late for this run, in time for the next seed

    def result(self) -> Result:
        """Go on from the last checkpoint to the end."""
        with ExitStack() as stack:
            stop = stack.enter_context(Stop())
            journal = None
            if self.folder is not None:
                self.folder.write_text("spec.toml", to_toml(self.spec.but(out="runs")))
                if self.simulation.graph is not None:
                    hostile = self.simulation.roster.hostile(1)
                    self.folder.write_arrays("graph.npz", {**self.simulation.graph.arrays(), "hostile": hostile})
                self._restore(self.folder)
                journal = stack.enter_context(self.folder.journal(self.record.rows))
            while self.record.round < self.spec.rounds:
                self._round(journal)
                if stop.asked and self.record.round < self.spec.rounds:
                    self._save(journal)
                    raise Interrupted(self.record.round, self.spec.rounds, self.path)
            self.asked_to_stop = stop.asked
        return self._finish()

    def _round(self, journal: Journal | None) -> None:
        started, t = time.perf_counter(), self.record.round + 1
        evaluated = t % self.spec.eval_every == 0 or t == self.spec.rounds
        info = self.simulation.step(measured=evaluated)
        shown = self._evaluate(t) if evaluated else None
        row = self.record.add(info, shown, self.simulation.bytes, time.perf_counter() - started)
        if journal is not None:
            journal.add(row)
        every = self.spec.checkpoint_every
        if every and t % every == 0 and t < self.spec.rounds:
            self._save(journal)
        if self.progress is not None:
            self.progress(self._tick())

    def _evaluate(self, t: int) -> Evaluation:
        return self.simulation.evaluate(None if t == self.spec.rounds else self.subset)

    def _tick(self) -> Tick:
        seen = self.record.last_evaluated or {}
        accuracies = seen.get("accuracy_mean"), seen.get("accuracy_worst")
        where = self.spec.name, self.spec.seed, self.record.round, self.spec.rounds
        return Tick(*where, *accuracies, self.record.byzantine_max, self.settled.b_hat)

    # --- checkpoints ---

    @cached_property
    def _hash(self) -> str:
        return spec_hash(self.spec, self.material.dataset.checksums, self.material.digests)

    def _save(self, journal: Journal | None) -> None:
        if self.folder is None or journal is None or self.saved == self.record.round:
            return
        journal.sync()
        about = {"run.hash": np.array(self._hash), "run.code": np.array(versions()["code"])}
        self.folder.save(self.record.round, {**self.simulation.state(), **self.record.state(), **about})
        self.saved = self.record.round

    def _restore(self, folder: RunFolder) -> None:
        """Load the newest good checkpoint, if it is this run's and metrics.jsonl reaches so far."""
        state = folder.restore()
        if state is None:
            return
        if str(state.pop("run.hash", "")) != self._hash:
            raise ValueError(f"the checkpoint in {folder.path} belongs to another specification or other data")
        if str(state.pop("run.code", "")) != versions()["code"]:
            log.warning("the checkpoint was made by another code version: the rest may differ in the last bits")
        rows, done = folder.metrics(), len(state["record.counts"])
        if len(rows) < done:
            log.warning("metrics.jsonl ends before the checkpoint of round %d: starting again from round 0", done)
            return
        self.simulation.load({key: value for key, value in state.items() if not key.startswith("record.")})
        self.record.load(state, rows[:done])
        self.saved = done
        log.info("going on after round %d of %d", done, self.spec.rounds)

    # --- the end ---

    def _finish(self) -> Result:
        proof = certificate(
            self.settled.plan.to_dict(),
            self.record.counts.astype(np.int64),
            self.settled.b_hat,
            self.record.honest,
            seed=self.spec.seed,
            versions=versions(),
            threads=self.threads,
            data=self.material.dataset.checksums,
            guarantee=METHODS[self.spec.method].guarantee,
        )
        models, nodes = np.ascontiguousarray(self.simulation.models(), np.float32), self.record.nodes()
        result = Result(self.spec, Table(self.record.rows), proof, nodes, self.path, kept=models)
        if self.folder is not None:
            self._write(self.folder, result)
        return result

    def _write(self, folder: RunFolder, result: Result) -> None:
        """All files of a finished run, the certificate last."""
        honest = self.record.honest.astype(np.int64)
        tensors: dict[str, NDArray[Any]] = {"ids": honest, "models": result.models}
        local = self.simulation.state()["local"]
        if local.size:  # what never left the nodes: BatchNorm's statistics after the last round
            tensors["local"] = local if len(local) == len(honest) else local[honest]
        folder.write_tensors("models.safetensors", tensors)
        folder.write_arrays("nodes.npz", result.nodes)
        folder.write_arrays("counts.npz", {"counts": self.record.counts, "ids": honest})
        figure.save(result.plot(), folder.path / "accuracy.svg")
        folder.write_json("certificate.json", result.certificate)
        folder.finish()


def setting(settled: Settled) -> Setting:
    """What the engine is told."""
    spec = settled.spec
    return Setting(
        nodes=spec.nodes,
        byzantine=spec.byzantine,
        pull=settled.pull,
        b_hat=settled.b_hat,
        rounds=spec.rounds,
        lr=spec.rate,
        method=spec.method,
        rule=spec.rule,
        attack=spec.attack,
        attack_params=dict(spec.attack_params),
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        local_steps=spec.local_steps,
        output=spec.output,
        no_show=spec.no_show,
        silent=spec.silent,
        roaming=spec.roaming,
        placement=spec.placement,
        graph=spec.graph,
        seed=spec.seed,
    )
