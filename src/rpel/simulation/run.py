"""Run a Spec, keep it in its folder, continue it where it stopped.

Invariants: a folder belongs to one meaning (its hash) and one code; a finished run is not repeated, an unfinished one
goes on from its last checkpoint, where both are the same (:mod:`rpel.runs.reuse`); a round is wholly in the
checkpoint or not at all, so a resumed run ends with the same bytes; a signal is obeyed between rounds, and in the last
evaluation, which can be long: the last round is then kept without it.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpel import plots
from rpel.config.record import parse_seeds
from rpel.config.spec import Spec, load_folder, spec_hash, to_toml
from rpel.kernels.pool import set_threads, threads
from rpel.processes import Stop
from rpel.runs.certificate import certificate, differences, versions
from rpel.runs.columns import Row, ends, headline
from rpel.runs.folder import RunFolder, hash_of, is_by_row
from rpel.runs.journal import Journal, check_tensorboard
from rpel.runs.record import Result, Results, Table
from rpel.runs.reuse import choose, resumed
from rpel.simulation import distributed
from rpel.simulation.distributed import ALONE, LostError, Workers
from rpel.simulation.engine import Simulation
from rpel.simulation.evaluation import Evaluation
from rpel.simulation.inputs import Download, Inputs, Objects, available, build_task, code_versions, gather
from rpel.simulation.methods import METHODS, ResolvedSpec, resolve
from rpel.simulation.metrics import Metrics
from rpel.types import RoundInfo

log = logging.getLogger("rpel")

WHEN = "stopping after this round; once more stops at once and loses the rounds since the last checkpoint"
LONG = 2.0
"""Seconds from which on the last evaluation shows how far it is."""


@dataclass(frozen=True)
class Tick:
    """What a progress display is told after each round; accuracies are those of the last evaluation.

    Where there are no classes, they are those of a metric, and ``measure`` is its name.

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

    @property
    def tenth(self) -> bool:
        """Whether a tenth of the rounds ends here, for displays that say no more than that."""
        done = self.round * 10 // self.rounds > (self.round - 1) * 10 // self.rounds
        return self.evaluated is None and (done or self.round == self.rounds)


Progress = Callable[[Tick], None]


def tick(spec: ResolvedSpec, rows: list[Row]) -> Tick:
    """What these rows of a run show."""
    met = max((row["byzantine_max"] for row in rows), default=0)
    return Tick(spec.name, spec.seed, len(rows), spec.rounds, *ends(rows), met, spec.b_hat, measure=headline(rows))


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal after saving; ``path`` is the folder to resume (None when nothing is kept)."""

    def __init__(self, round_: int, rounds: int, path: Path | None) -> None:
        self.round, self.path = round_, path
        saved = "nothing was kept" if path is None else f"saved; go on with: rpel resume {shlex.quote(str(path))}"
        super().__init__(f"interrupted after round {round_} of {rounds}, {saved}")


def run(
    spec: Spec,
    own: Objects | None = None,
    *,
    keep: bool = True,
    progress: Progress | None = None,
    download: Download | None = None,
    force: bool = False,
    reuse: bool = False,
    tensorboard: bool = False,
    stop: Stop | None = None,
) -> Result:
    """Run a Spec, or each of its seeds; a finished one is not repeated, an unfinished one goes on, unless ``force``.

    reuse: a finished run of other code, or with objects from Python, is taken, too.
    stop: the token of a command that runs several; a signal in the last round of a run sets it for the rest.
    """
    if tensorboard:
        check_tensorboard()  # before data are loaded
    own, stop = own or Objects(), stop or Stop(WHEN)
    spec = own.named(spec)
    seeds = parse_seeds(spec.seeds) or [spec.seed]
    runs: list[Result] = []
    with joined(spec, own) as workers:
        for seed in seeds:
            one = spec.replace(seed=seed, seeds=None)
            resolved, inputs = workers.together(partial(prepared, one, own, download))
            folder = None
            if keep:
                place = partial(placed, resolved, inputs, reuse=reuse, force=force)
                folder = RunFolder(workers.first(place), tensorboard)
            if (result := _run_one(resolved, inputs, folder, progress, stop, force, workers)) is not None:
                runs.append(result)
            if workers.any(stop.asked) and seed != seeds[-1]:
                raise Interrupted(spec.rounds, spec.rounds, None if folder is None else folder.path)
    if not runs:
        raise SystemExit(0)  # another worker has the results
    return runs[0] if spec.seeds is None else Results(runs)


def prepared(spec: Spec, own: Objects, download: Download | None) -> tuple[ResolvedSpec, Inputs]:
    """The Spec with nothing left open, and its data."""
    resolved = resolve(available(spec, download))
    return resolved, gather(resolved, own, download)


@contextmanager
def joined(spec: Spec, own: Objects) -> Iterator[Workers]:
    """The workers of this run. What was handed over from Python stays in this process; worker 0 speaks for all."""
    if spec.workers > 1 and own != Objects():
        raise ValueError("workers share runs whose data and model have names: with objects from Python, workers=1")
    with distributed.joined(spec) as workers:
        try:
            yield workers
        except (ValueError, Interrupted) as error:
            if workers.rank and not isinstance(error, LostError):
                raise SystemExit(2 if isinstance(error, ValueError) else 130) from error
            raise


def folder_name(spec: ResolvedSpec, inputs: Inputs) -> str:
    """The name of a run's folder."""
    return f"{spec.name}-{spec_hash(spec, inputs.dataset.checksums, inputs.digests)}"


def placed(spec: ResolvedSpec, inputs: Inputs, *, reuse: bool = False, force: bool = False) -> Path:
    """Where a run is kept: in the folder of its hash, unless another code has made that."""
    base = Path(spec.out) / folder_name(spec, inputs)
    return choose(base, inputs.versions, known=inputs.known, reuse=reuse, force=force)


def resume(
    path: Path,
    own: Objects,
    *,
    force: bool = False,
    progress: Progress | None = None,
    download: Download | None = None,
    tensorboard: bool = False,
    stop: Stop | None = None,
) -> Result:
    """Go on with the run in a folder; a finished one is returned. force: also if other code has begun it."""
    if tensorboard:
        check_tensorboard()
    spec = load_folder(path)
    try:
        ours = code_versions(spec)
    except ValueError:  # a rule or an attack that is not here: a finished run can be returned all the same
        ours = versions(spec.device)
    folder = RunFolder(path if force else resumed(path, ours), tensorboard)
    if not distributed.placed() and (found := stored(folder, ours)) is not None:
        return found
    code = folder.code()
    if not force and code not in (None, ours["code"]):
        raise ValueError(
            f"{folder.path} was begun by other code ({code[:8]}, this is {ours['code'][:8]}): --force goes on with it"
        )
    with joined(spec, own) as workers:
        resolved, inputs = workers.together(lambda: prepared(spec, own, download))
        now, named = hash_of(folder_name(resolved, inputs)), hash_of(folder.path.resolve().name)
        if named not in (None, now):
            raise ValueError(
                f"{path} was started with another specification, other data or another model: hash {now} now"
            )
        result = _run_one(resolved, inputs, folder, progress, stop or Stop(WHEN), False, workers)
    if result is None:
        raise SystemExit(0)  # another worker has the result
    return result


def _run_one(
    spec: ResolvedSpec,
    inputs: Inputs,
    folder: RunFolder | None,
    progress: Progress | None,
    stop: Stop,
    force: bool,
    workers: Workers,
) -> Result | None:
    """The stored result, or the rest of the run; None but for worker 0."""
    workers.agree(f"{folder_name(spec, inputs)} by code {inputs.versions['code'][:8]}")
    with ExitStack() as stack:
        if folder is not None and not force and workers.first(lambda: folder.certificate() is not None):
            return None if workers.rank else stored(folder, inputs.versions)
        count = spec.threads or threads()
        stack.enter_context(pinned(spec.threads or max(1, count // workers.here)))
        spec = spec.model_copy(update={"threads": count})
        run = workers.together(lambda: Run(spec, inputs, folder, progress, stop, workers))
        if folder is not None:
            workers.first(lambda: stack.enter_context(folder.locked()))
            workers.each(folder.check_shared)
            if force:
                workers.first(folder.clear)
            elif workers.first(lambda: folder.certificate() is not None):  # finished by another process in between
                return None if workers.rank else stored(folder, inputs.versions)
        return run.result()


def stored(folder: RunFolder, ours: Mapping[str, str]) -> Result | None:
    """The result of a finished run, with a word about it; None when there is none."""
    proof = folder.certificate()
    if proof is None:
        return None
    log.info("%s is finished and not repeated", folder.path)
    if different := differences(proof["versions"], ours):
        log.warning("it was made by other code (%s)", different)
    folder.copy_events()
    return Result.load(folder.path, reused=True)


@contextmanager
def pinned(count: int | None) -> Iterator[int]:
    """Inside, kernels and torch use that many threads (None: as many as now); yields the number."""
    before, torch_before = threads(), torch.get_num_threads()
    wanted = before if count is None else count
    set_threads(wanted)
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        set_threads(before)
        torch.set_num_threads(torch_before)


# --- one run ---------------------------------------------------------------------------------------------------------


class Run:
    """One run on its way: round by round, saved, restored, stopped between rounds, finished."""

    def __init__(
        self,
        spec: ResolvedSpec,
        inputs: Inputs,
        folder: RunFolder | None = None,
        progress: Progress | None = None,
        stop: Stop | None = None,
        workers: Workers = ALONE,
    ) -> None:
        """Bad input fails here, before anything is written; ``folder`` None keeps nothing."""
        self.spec, self.inputs, self.folder, self.workers = spec, inputs, folder, workers
        self.progress = None if workers.rank else progress
        self.stop = stop or Stop()
        self.simulation = Simulation(spec, build_task(spec, inputs), workers)
        self.metrics = Metrics(spec.rounds, self.simulation.honest)
        self.subset = inputs.subset(spec.eval_size)
        self.path = None if folder is None else folder.path
        self.saved = 0
        self.ahead: RoundInfo | None = None
        """Of a round that was played and not yet evaluated."""

    def result(self) -> Result | None:
        """Go on from the last checkpoint to the end; every worker takes part, worker 0 writes and has the result."""
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            journal = None
            if self.folder is not None:
                self._restore(self.folder)
                if self.workers.rank == 0:
                    self._begin(self.folder)
                    journal = stack.enter_context(self.folder.journal(self.metrics.rows))
            if not self.metrics.round:
                self.metrics.begin(self.simulation.evaluate_initial(self.subset), list(self.simulation.measures))
            while self.metrics.round < self.spec.rounds:
                self._round(journal)
                if self.workers.any(self.stop.asked) and self.metrics.round < self.spec.rounds:
                    self._save(journal)
                    raise Interrupted(self.metrics.round, self.spec.rounds, self.path)
        return self._finish()

    def _begin(self, folder: RunFolder) -> None:
        """What a folder says of a run before its first round."""
        folder.write_text("spec.toml", to_toml(self.spec.replace(out="runs", workers=1, engine="local", address=None)))
        if self.simulation.graph is not None:
            hostile = self.simulation.roster.hostile(1)
            folder.write_arrays("graph.npz", {**self.simulation.graph.arrays(), "hostile": hostile})

    def _round(self, journal: Journal | None) -> None:
        started, t = time.perf_counter(), self.metrics.round + 1
        evaluated = t % self.spec.eval_every == 0 or t == self.spec.rounds
        info = self.ahead = self.ahead or self.simulation.step(measured=evaluated)
        shown = self._evaluate(t, journal) if evaluated else None
        row = self.metrics.add(info, shown, self.simulation.bytes, time.perf_counter() - started)
        self.ahead = None
        if journal is not None:
            journal.add(row)
        every = self.spec.checkpoint_every
        if every and t % every == 0 and t < self.spec.rounds:
            self._save(journal)
        if self.progress is not None:
            self.progress(tick(self.spec, self.metrics.rows))

    def _evaluate(self, t: int, journal: Journal | None) -> Evaluation:
        if t < self.spec.rounds:
            return self.simulation.evaluate(self.subset)

        began = time.monotonic()

        def look(done: float) -> None:
            if self.workers.any(self.stop.asked):
                self._save(journal)
                raise Interrupted(t, t, self.path)
            if self.progress is not None and time.monotonic() - began >= LONG:
                self.progress(replace(tick(self.spec, self.metrics.rows), evaluated=done))

        shown = self.simulation.evaluate(None, look)
        return replace(shown, output_accuracy=self.simulation.output_accuracy(look))

    # --- checkpoints ---

    @cached_property
    def _hash(self) -> str:
        return spec_hash(self.spec, self.inputs.dataset.checksums, self.inputs.digests)

    def _save(self, journal: Journal | None) -> None:
        """Every worker writes the rows of its nodes, then worker 0 the rest: with that the checkpoint is there."""
        folder, t, workers = self.folder, self.simulation.round, self.workers
        if folder is None or self.saved == t:
            return
        if journal is not None:
            journal.sync()
        about = {"run.hash": np.array(self._hash), "run.code": np.array(self.inputs.versions["code"])}
        arrays, edges = {**self.simulation.arrays(), **self.metrics.state(self.ahead), **about}, list[int]()
        if workers.size > 1:
            rows, own = self.simulation.mine, {key: arrays.pop(key) for key in list(arrays) if is_by_row(key)}
            workers.each(lambda: folder.save_rows(t, rows.start, own) if rows.start < rows.stop else None)
            edges = sorted({0, *(shard.stop for shard in self.simulation.shards)})
        workers.first(lambda: folder.save(t, arrays, edges))
        self.saved = t

    def _restore(self, folder: RunFolder) -> None:
        """Load the newest good checkpoint, if it is this run's and metrics.jsonl reaches so far."""
        state = self._newest(folder)
        if state is None:
            return
        if str(state.pop("run.hash", "")) != self._hash:
            raise ValueError(f"the checkpoint in {folder.path} belongs to another specification or other data")
        if str(state.pop("run.code", "")) != self.inputs.versions["code"]:
            self._warn("the checkpoint was made by other code: the rest may differ")
        rows, done = self.workers.first(folder.metrics), len(state["record.counts"])
        if len(rows) < done:
            self._warn(f"metrics.jsonl ends before the checkpoint of round {done}: starting again from round 0")
            return
        self.simulation.load({key: value for key, value in state.items() if not key.startswith("record.")})
        self.ahead = self.metrics.load(state, rows[:done])
        self.saved = self.simulation.round
        if self.workers.rank == 0:
            log.info("going on after round %d of %d", self.saved, self.spec.rounds)

    def _newest(self, folder: RunFolder) -> dict[str, NDArray[Any]] | None:
        """The newest checkpoint that all workers can read, with this worker's rows."""
        for round_ in self.workers.first(lambda: [t for t, _ in folder.checkpoints]):
            state = folder.read(round_, self.simulation.mine)
            if not self.workers.any(state is None):
                return state
        return None

    def _warn(self, sentence: str) -> None:
        if self.workers.rank == 0:
            log.warning("%s", sentence)

    # --- the end ---

    def _finish(self) -> Result | None:
        tensors = self._tensors()
        if self.workers.rank:
            return None
        proof = certificate(
            self.spec.plan.to_dict(),
            self.metrics.counts.astype(np.int64),
            self.spec.b_hat,
            self.simulation.roster.honest_ids,
            seed=self.spec.seed,
            versions=self.inputs.versions,
            threads=self.spec.threads or threads(),
            data=self.inputs.dataset.checksums,
            rule=self.spec.rule,
            guarantee=METHODS[self.spec.method].guarantee,
            objects=self.inputs.digests,
            metrics=self.simulation.measures,
        )
        module = getattr(self.simulation.task, "module", None)
        nodes = self.metrics.nodes()
        rows = Table(self.metrics.rows)
        result = Result(self.spec.replace(), rows, proof, nodes, self.path, kept=tensors, module=module)
        if self.folder is not None:
            self._write(self.folder, result)
        return result

    def _tensors(self) -> dict[str, NDArray[Any]]:
        """What is kept of the honest nodes: their output models, and what never left them (BatchNorm's statistics)."""
        honest = self.metrics.honest.astype(np.int64)
        tensors: dict[str, NDArray[Any]] = {
            "ids": honest, "models": np.ascontiguousarray(self.simulation.models(), np.float32),
        }  # fmt: skip
        local = self.simulation.local_states()
        if local.size:
            tensors["local"] = local
        return tensors

    def _write(self, folder: RunFolder, result: Result) -> None:
        """All files of a finished run, the certificate last."""
        honest = self.metrics.honest.astype(np.int64)
        folder.write_tensors("models.safetensors", result.tensors)
        folder.write_arrays("nodes.npz", result.nodes)
        ids = honest
        if self.spec.roaming:  # (T, h): who the nodes were in each round
            ids = np.stack([self.simulation.roster.honest_ids(t) for t in range(1, self.spec.rounds + 1)])
        folder.write_arrays("counts.npz", {"counts": self.metrics.counts, "ids": ids})
        plots.save(result.plot(), folder.path / "accuracy.svg")
        folder.certify(result.certificate)
        folder.finish()
