"""Run a Spec, keep it in its folder, continue it where it stopped.

Invariants: a folder's name has the hash of all that determines the run's numbers, code included; so a
finished run is not repeated, and an unfinished one goes on from its last checkpoint. Nobody can know what
objects from Python do, so a run with some has a folder of its own each time. A round is wholly in the
checkpoint or not at all, so a resumed run ends with the same bytes. A signal is obeyed between rounds, and in
the last evaluation, which can be long: the last round is then kept without it.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from torch import nn

from rpel.backend.threads import threads
from rpel.processes import Stop
from rpel.record import parse_seeds
from rpel.runs import run as finished
from rpel.runs.certificate import differences, versions
from rpel.runs.folder import RunFolder, hash_of
from rpel.runs.journal import check_tensorboard
from rpel.simulation.inputs import (
    Download,
    Gathered,
    Inputs,
    Load,
    available,
    code_versions,
    gather,
    loader,
    run_hash,
)  # fmt: skip
from rpel.simulation.loop import Callback, Interrupted, Progress, TensorBoard, Tracker, train
from rpel.simulation.methods import Resolved, remark, resolve
from rpel.simulation.workers import Workers
from rpel.spec import Request, load_folder

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
    stop: Stop | None = None,
) -> finished.Run | finished.Runs:
    """Run a Spec, or each of its seeds.

    A finished run is not repeated and an unfinished one continues, unless ``force``.

    stop: the token of a command that runs several; a signal in the last round of a run sets it for the rest.
    """
    tracker(spec)  # refused before data are loaded
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
                folder = RunFolder(placed(resolved.spec, gathered, force=force))
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


def placed(spec: Request, inputs: Gathered, *, force: bool = False) -> Path:
    """The folder of a run. One with objects from Python takes the first that is free, unless ``force``."""
    named, out = run_hash(spec, inputs), Path(spec.out)
    folder, again = out / f"{spec.name}-{named}", 0
    while not (inputs.known or force) and (folder / "spec.toml").is_file():
        again += 1
        folder = out / f"{spec.name}-{hashlib.sha256(f'{named} {again}'.encode()).hexdigest()[:12]}"
    return folder


def resume(
    path: Path,
    own: Inputs,
    *,
    force: bool = False,
    progress: Progress | None = None,
    download: Download | None = None,
    stop: Stop | None = None,
) -> finished.Run:
    """Go on with the run in a folder; a finished one is returned. force: start it again."""
    spec, folder = load_folder(path), RunFolder(path)
    tracker(spec)
    if force:
        again = spec.replace(out=str(path.resolve().parent))
        result = run(again, own, progress=progress, download=download, force=True, stop=stop)
        assert isinstance(result, finished.Run)
        return result
    try:
        ours = code_versions(spec)
    except ValueError:  # a rule or an attack that is not here: a finished run can be returned all the same
        ours = versions(spec.device)
    code = folder.code()
    if folder.certificate() is None and code not in (None, ours["code"]):
        raise ValueError(
            f"{path} was begun by other code ({code[:8]}, now {ours['code'][:8]}): --force starts it again"
        )
    with joined(spec, own) as workers:
        if (found := stored(folder, ours, spec)) is not None:
            return found
        resolved, gathered = prepared(spec, own, loader(download))
        now, named = run_hash(resolved.spec, gathered), hash_of(path.resolve().name)
        if gathered.known and named not in (None, now):
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
    spec = resolved.spec
    if folder is not None and not force and (found := stored(folder, inputs.versions, spec)) is not None:
        return found
    counted = replace(resolved, spec=spec.replace(threads=spec.threads or threads()))
    with ExitStack() as stack:
        engine = stack.enter_context(workers.engine(resolved, inputs))
        if said is not None:  # once nothing is wrong any more
            log.info("%s", said)
        if folder is not None:
            stack.enter_context(folder.locked())
            if force:
                folder.clear()
            elif (found := stored(folder, inputs.versions, spec)) is not None:
                return found  # finished by another process in between
        callbacks = [*callbacks, *tracker(spec)]
        return train(counted, inputs, engine, folder, callbacks, progress, stop)


def tracker(spec: Request) -> list[Tracker]:
    """Return the tracker that a run asks for, if any; ValueError if its library is not installed."""
    if spec.track is None:
        return []
    if spec.track == "tensorboard":
        check_tensorboard()
        return [TensorBoard()]
    trackers = import_module("rpel.integrations.trackers")  # above this layer: it knows other libraries
    return [trackers.MLflow() if spec.track == "mlflow" else trackers.WandB()]


def stored(folder: RunFolder, ours: Mapping[str, str], spec: Request) -> finished.Run | None:
    """Return the result of a finished run, with a word about it; None when there is none."""
    proof = folder.certificate()
    if proof is None:
        return None
    log.info("%s is finished and not repeated", folder.path)
    if different := differences(proof.versions, ours):
        log.warning("it was made by other code (%s)", different)
    if spec.track == "tensorboard":
        folder.copy_events()
    return finished.Run.load(folder.path, reused=True)
