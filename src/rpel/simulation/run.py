"""Run a Spec, keep it in its folder, continue it where it stopped.

Invariants: a folder belongs to one meaning (its hash) and one code; a finished run is not repeated, an
unfinished one goes on from its last checkpoint, where both are the same (:mod:`rpel.runs.reuse`); a round is
wholly in the checkpoint or not at all, so a resumed run ends with the same bytes; a signal is obeyed between
rounds, and in the last evaluation, which can be long: the last round is then kept without it.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from rpel.backend.threads import threads
from rpel.processes import Stop
from rpel.record import parse_seeds
from rpel.runs import run as finished
from rpel.runs.certificate import differences, versions
from rpel.runs.folder import RunFolder, hash_of
from rpel.runs.journal import check_tensorboard
from rpel.runs.reuse import choose, resumed
from rpel.simulation.inputs import Download, Gathered, Inputs, Load, available, code_versions, gather, loader
from rpel.simulation.loop import Callback, Interrupted, Progress, TensorBoard, train
from rpel.simulation.methods import Resolved, remark, resolve
from rpel.simulation.workers import Workers
from rpel.spec import Request, load_folder, spec_hash

log = logging.getLogger("rpel")

WHEN = "stopping after this round; once more stops at once and loses the rounds since the last checkpoint"


def run(
    spec: Request,
    own: Inputs | None = None,
    *,
    keep: bool = True,
    progress: Progress | None = None,
    download: Download | None = None,
    force: bool = False,
    reuse: bool = False,
    tensorboard: bool = False,
    stop: Stop | None = None,
) -> finished.Run | finished.Runs:
    """Run a Spec, or each of its seeds; a finished one is not repeated, an unfinished one goes on,
    unless ``force``.

    reuse: a finished run of other code, or with objects from Python, is taken, too.
    stop: the token of a command that runs several; a signal in the last round of a run sets it for the rest.
    """
    if tensorboard:
        check_tensorboard()  # before data are loaded
    own, stop = own or Inputs(), stop or Stop(WHEN)
    spec = own.marked(spec)
    seeds, load = parse_seeds(spec.seeds) or [spec.seed], loader(download)
    if len(seeds) > 1 and isinstance(own.model, nn.Module):
        log.warning(
            "all %d seeds start from the same initial model, the one passed: pass a class or a function that "
            "makes it (model=CNN, not CNN()) to give each seed its own", len(seeds),
        )  # fmt: skip
    runs: list[finished.Run] = []
    with joined(spec, own) as workers:
        for seed in seeds:
            resolved, gathered = prepared(spec.replace(seed=seed, seeds=None), own, load)
            folder = None
            if keep:
                folder = RunFolder(placed(resolved.spec, gathered, reuse=reuse, force=force), tensorboard)
            said = remark(spec, resolved) if seed == seeds[0] else None
            runs.append(
                _run_one(resolved, gathered, folder, progress, stop, force, workers, own.callbacks, said)
            )
            if stop.asked and seed != seeds[-1]:
                raise Interrupted(spec.rounds, spec.rounds, None if folder is None else folder.path)
    return runs[0] if spec.seeds is None else finished.Runs(runs)


def prepared(spec: Request, own: Inputs, load: Load) -> tuple[Resolved, Gathered]:
    """The Spec with nothing left open, and its data."""
    resolved = resolve(available(spec, load), own.rule, own.attack)
    return resolved, gather(resolved, own, load)


def joined(spec: Request, own: Inputs) -> Workers:
    """The workers of this run. User-supplied objects stay in this process."""
    if spec.workers > 1 and own != Inputs():
        raise ValueError(
            "workers share runs whose data and model have names: with objects from Python, workers=1"
        )
    return Workers(spec)


def folder_name(spec: Request, inputs: Gathered) -> str:
    """The name of a run's folder."""
    return f"{spec.name}-{spec_hash(spec, inputs.dataset.checksums, inputs.digests)}"


def placed(spec: Request, inputs: Gathered, *, reuse: bool = False, force: bool = False) -> Path:
    """Where a run is kept: in the folder of its hash, unless another code has made that."""
    base = Path(spec.out) / folder_name(spec, inputs)
    return choose(base, inputs.versions, known=inputs.known, reuse=reuse, force=force)


def resume(
    path: Path,
    own: Inputs,
    *,
    force: bool = False,
    progress: Progress | None = None,
    download: Download | None = None,
    tensorboard: bool = False,
    stop: Stop | None = None,
) -> finished.Run:
    """Go on with the run in a folder; a finished one is returned. force: also if other code has begun it."""
    if tensorboard:
        check_tensorboard()
    spec = load_folder(path)
    try:
        ours = code_versions(spec)
    except ValueError:  # a rule or an attack that is not here: a finished run can be returned all the same
        ours = versions(spec.device)
    folder = RunFolder(path if force else resumed(path, ours), tensorboard)
    code = folder.code()
    if folder.certificate() is None and not force and code not in (None, ours["code"]):
        raise ValueError(
            f"{folder.path} was begun by other code ({code[:8]}, this is {ours['code'][:8]}): --force goes "
            "on with it"
        )
    with joined(spec, own) as workers:
        if (found := stored(folder, ours)) is not None:
            return found
        resolved, gathered = prepared(spec, own, loader(download))
        now, named = hash_of(folder_name(resolved.spec, gathered)), hash_of(folder.path.resolve().name)
        if named not in (None, now):
            raise ValueError(
                f"{path} was started with another specification, other data or another model: hash {now} now"
            )
        return _run_one(
            resolved, gathered, folder, progress, stop or Stop(WHEN), False, workers, own.callbacks
        )


def _run_one(
    resolved: Resolved,
    inputs: Gathered,
    folder: RunFolder | None,
    progress: Progress | None,
    stop: Stop,
    force: bool,
    workers: Workers,
    callbacks: Sequence[Callback] = (),
    said: str | None = None,
) -> finished.Run:
    """The stored result, or the rest of the run."""
    if folder is not None and not force and (found := stored(folder, inputs.versions)) is not None:
        return found
    spec = resolved.spec
    counted = replace(resolved, spec=spec.replace(threads=spec.threads or threads()))
    with ExitStack() as stack:
        engine = stack.enter_context(workers.engine(resolved, inputs))
        if said is not None:  # once nothing is wrong any more
            log.info("%s", said)
        if folder is not None:
            stack.enter_context(folder.locked())
            if force:
                folder.clear()
            elif (found := stored(folder, inputs.versions)) is not None:
                return found  # finished by another process in between
            callbacks = [*callbacks, TensorBoard()] if folder.tensorboard else callbacks
        return train(counted, inputs, engine, folder, callbacks, progress, stop)


def stored(folder: RunFolder, ours: Mapping[str, str]) -> finished.Run | None:
    """The result of a finished run, with a word about it; None when there is none."""
    proof = folder.certificate()
    if proof is None:
        return None
    log.info("%s is finished and not repeated", folder.path)
    if different := differences(proof.versions, ours):
        log.warning("it was made by other code (%s)", different)
    folder.copy_events()
    return finished.Run.load(folder.path, reused=True)
