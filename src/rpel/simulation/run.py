"""Run a Spec, keep it in its folder, continue it where it stopped.

Invariants: a folder belongs to one meaning (its hash) and one code; a finished run is not repeated, an
unfinished one goes on from its last checkpoint, where both are the same (:mod:`rpel.runs.reuse`); a round is
wholly in the checkpoint or not at all, so a resumed run ends with the same bytes; a signal is obeyed between
rounds, and in the last evaluation, which can be long: the last round is then kept without it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rpel.backend.one_thread import one_torch_thread
from rpel.backend.pool import set_threads, threads
from rpel.processes import Stop
from rpel.record import parse_seeds
from rpel.runs import run as finished
from rpel.runs.certificate import differences, versions
from rpel.runs.folder import RunFolder, hash_of
from rpel.runs.journal import check_tensorboard
from rpel.runs.reuse import choose, resumed
from rpel.simulation import workers as group
from rpel.simulation.callbacks import Callback, Interrupted, Progress
from rpel.simulation.inputs import Download, Gathered, Inputs, Load, available, code_versions, gather, loader
from rpel.simulation.methods import Resolved, remark, resolve
from rpel.simulation.runner import Run
from rpel.simulation.workers import Communicator, LostError
from rpel.spec import Spec, load_folder, spec_hash

log = logging.getLogger("rpel")

WHEN = "stopping after this round; once more stops at once and loses the rounds since the last checkpoint"


def run(
    spec: Spec,
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
        kept: bool = workers.first(lambda: keep)  # workers that are started here do not know
        for seed in seeds:
            one = spec.replace(seed=seed, seeds=None)
            resolved, gathered = workers.together(partial(prepared, one, own, load))
            said = remark(spec, resolved) if workers.rank == 0 and seed == seeds[0] else None
            folder = None
            if kept:
                place = partial(placed, resolved.spec, gathered, reuse=reuse, force=force)
                chosen: Path = workers.first(place)  # worker 0 chooses, in the folder that all see
                folder = RunFolder(Path(resolved.spec.out) / chosen.name, tensorboard)
            if (
                result := _run_one(
                    resolved, gathered, folder, progress, stop, force, workers, own.callbacks, said
                )
            ) is not None:
                runs.append(result)
            if workers.any(stop.asked) and seed != seeds[-1]:
                raise Interrupted(spec.rounds, spec.rounds, None if folder is None else folder.path)
    if not runs:
        raise SystemExit(0)  # another worker has the results
    return runs[0] if spec.seeds is None else finished.Runs(runs)


def prepared(spec: Spec, own: Inputs, load: Load) -> tuple[Resolved, Gathered]:
    """The Spec with nothing left open, and its data."""
    resolved = resolve(available(spec, load), own.rule, own.attack)
    return resolved, gather(resolved, own, load)


@contextmanager
def joined(spec: Spec, own: Inputs) -> Iterator[Communicator]:
    """The workers of this run. User-supplied objects stay in this process; worker 0 speaks for all."""
    if spec.workers > 1 and own != Inputs():
        raise ValueError(
            "workers share runs whose data and model have names: with objects from Python, workers=1"
        )
    with group.joined(spec) as workers:
        try:
            yield workers
        except (ValueError, Interrupted) as error:
            if workers.rank and not isinstance(error, LostError):
                raise SystemExit(2 if isinstance(error, ValueError) else 130) from error
            raise


def folder_name(spec: Spec, inputs: Gathered) -> str:
    """The name of a run's folder."""
    return f"{spec.name}-{spec_hash(spec, inputs.dataset.checksums, inputs.digests)}"


def placed(spec: Spec, inputs: Gathered, *, reuse: bool = False, force: bool = False) -> Path:
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
    if not group.placed() and (found := stored(folder, ours)) is not None:
        return found
    code = folder.code()
    if not force and code not in (None, ours["code"]):
        raise ValueError(
            f"{folder.path} was begun by other code ({code[:8]}, this is {ours['code'][:8]}): --force goes "
            "on with it"
        )
    with joined(spec, own) as workers:
        resolved, gathered = workers.together(lambda: prepared(spec, own, loader(download)))
        now, named = hash_of(folder_name(resolved.spec, gathered)), hash_of(folder.path.resolve().name)
        if named not in (None, now):
            raise ValueError(
                f"{path} was started with another specification, other data or another model: hash {now} now"
            )
        result = _run_one(
            resolved, gathered, folder, progress, stop or Stop(WHEN), False, workers, own.callbacks
        )
    if result is None:
        raise SystemExit(0)  # another worker has the result
    return result


def _run_one(
    resolved: Resolved,
    inputs: Gathered,
    folder: RunFolder | None,
    progress: Progress | None,
    stop: Stop,
    force: bool,
    workers: Communicator,
    callbacks: Sequence[Callback] = (),
    said: str | None = None,
) -> finished.Run | None:
    """The stored result, or the rest of the run; None but for worker 0."""
    spec = resolved.spec
    workers.agree(f"{folder_name(spec, inputs)} by code {inputs.versions['code'][:8]}")
    with ExitStack() as stack:
        if folder is not None and not force and workers.first(lambda: folder.certificate() is not None):
            return None if workers.rank else stored(folder, inputs.versions)
        count = spec.threads or threads()
        stack.enter_context(pinned(spec.threads or max(1, count // workers.here)))
        if spec.backend == "torch":
            # its own threads would spin beside ours after each small product
            stack.enter_context(one_torch_thread())
        resolved = replace(resolved, spec=spec.replace(threads=count))
        run = workers.together(lambda: Run(resolved, inputs, folder, progress, stop, workers, callbacks))
        if said is not None:  # once nothing is wrong any more
            log.info("%s", said)
        if folder is not None:
            workers.first(lambda: stack.enter_context(folder.locked()))
            workers.each(folder.check_shared)
            if force:
                workers.first(folder.clear)
            elif workers.first(lambda: folder.certificate() is not None):
                # finished by another process in between
                return None if workers.rank else stored(folder, inputs.versions)
        return run.result()


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
