"""Run a Spec, keep it in its folder, continue it where it stopped.

Laws: a folder belongs to one meaning (its hash); a finished run is not repeated; an unfinished one goes on from its
last checkpoint. How a run goes on is in `running`.
"""

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from rpel.config.spec import Spec, load_folder
from rpel.config.values import parse_seeds
from rpel.simulation.environment import pinned, versions
from rpel.simulation.events import check
from rpel.simulation.folder import RunFolder
from rpel.simulation.material import Download, Loss, Material, Own, gather
from rpel.simulation.result import Result, Results
from rpel.simulation.running import Interrupted, Progress, Running, Tick
from rpel.simulation.settle import Settled, settle, spec_hash

__all__ = ["Interrupted", "Own", "Progress", "Tick", "resume", "run", "simulate"]

log = logging.getLogger("rpel")


# --- the three ways in -----------------------------------------------------------------------------------------------


def simulate(
    model: str | nn.Module | None = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    *,
    out: str | Path | None = "runs",
    progress: Progress | None = None,
    force: bool = False,
    tensorboard: bool = False,
    **fields: Any,
) -> Result:
    """Run Algorithm 1 among simulated nodes and return what it shows.

    model: a name, the paper's notation, or any torch.nn.Module, whose values are the common initial model. train, test:
    torch data sets or pairs of arrays (examples, labels). loss(output, target): cross-entropy if left out. fields:
    those of :class:`rpel.config.spec.Spec`; what is left out has the quickstart's value, pull and b_hat are
    planned. out=None keeps nothing on disk. With ``seeds`` the result is a :class:`Results`. tensorboard: the
    metrics also go to the run folder's ``tensorboard``, as rounds pass.

    >>> result = simulate("linear", nodes=6, byzantine=1, rounds=2, eval_size=100, out=None)
    >>> len(result.history), result.certificate["held"], result.models.shape
    (2, True, (5, 7850))
    """
    own = Own(model if isinstance(model, nn.Module) else None, train, test, loss)
    if isinstance(model, str):
        fields["model"] = model
    if out is not None:
        fields["out"] = str(out)
    if tensorboard and out is None:
        raise ValueError("tensorboard=True needs a run folder to write to: give out='runs' instead of out=None")
    return run(Spec(**fields), own, keep=out is not None, progress=progress, force=force, tensorboard=tensorboard)


def run(
    spec: Spec,
    own: Own | None = None,
    *,
    keep: bool = True,
    progress: Progress | None = None,
    download: Download | None = None,
    force: bool = False,
    tensorboard: bool = False,
) -> Result:
    """Run a Spec, or each of its seeds; a finished one is not repeated, an unfinished one goes on, unless ``force``."""
    if tensorboard:
        check()  # before data are loaded
    own = own or Own()
    spec = own.named(spec)
    seeds = parse_seeds(spec.seeds) or [spec.seed]
    runs: list[Result] = []
    for seed in seeds:
        settled = settle(spec.but(seed=seed, seeds=None))
        material = gather(settled.spec, own, download)
        folder = None
        if keep:
            name = f"{spec.name}-{spec_hash(settled.spec, material.dataset.checksums, material.digests)}"
            folder = RunFolder(Path(spec.out) / name, tensorboard)
        result, stop = _run_one(settled, material, folder, progress, force)
        runs.append(result)
        if stop and seed != seeds[-1]:
            raise Interrupted(spec.rounds, spec.rounds, result.path)
    return runs[0] if spec.seeds is None else Results(runs)


def resume(
    path: str | Path,
    model: nn.Module | None = None,
    train: Any = None,
    test: Any = None,
    loss: Loss | None = None,
    *,
    progress: Progress | None = None,
    download: Download | None = None,
    tensorboard: bool = False,
) -> Result:
    """Go on with a run from its last checkpoint, bit by bit as if it had not stopped; a finished one is returned.

    A run with a model, data or loss of the user's own needs them again.
    """
    if tensorboard:
        check()
    folder = RunFolder(Path(path), tensorboard)
    spec = load_folder(folder.path)
    stored = _stored(folder)
    if stored is not None:
        return stored
    settled = settle(spec)
    material = gather(settled.spec, Own(model, train, test, loss), download)
    name = spec_hash(settled.spec, material.dataset.checksums, material.digests)
    found = re.search(r"-([0-9a-f]{12})$", folder.path.resolve().name)
    if found and found[1] != name:
        raise ValueError(f"{path} was started with another specification, other data or another model: hash {name} now")
    return _run_one(settled, material, folder, progress, force=False)[0]


# --- one run ---------------------------------------------------------------------------------------------------------


def _run_one(
    settled: Settled, material: Material, folder: RunFolder | None, progress: Progress | None, force: bool
) -> tuple[Result, bool]:
    """The stored result, or the rest of the run; and whether a signal came too late to stop it."""
    if folder is not None and not force and (stored := _stored(folder)) is not None:
        return stored, False
    with ExitStack() as stack:
        threads = stack.enter_context(pinned(settled.spec.threads))
        running = Running(
            settled, material, folder, progress, threads
        )  # bad input fails here, before anything is written
        if folder is not None:
            stack.enter_context(folder.locked())
            if force:
                folder.clear()
            elif (stored := _stored(folder)) is not None:  # finished by another process in between
                return stored, False
        return running.result(), running.asked_to_stop


def _stored(folder: RunFolder) -> Result | None:
    """The result of a finished run, with a word about it; None when there is none."""
    proof = folder.certificate()
    if proof is None:
        return None
    log.info("%s is finished and not repeated", folder.path)
    theirs, ours = proof["versions"], versions()
    if theirs.get("code") != ours["code"]:
        log.warning(
            "it was made by another code version (rpel %s, code %s; this is rpel %s, code %s): --force repeats it",
            theirs.get("rpel"), theirs.get("code"), ours["rpel"], ours["code"],
        )  # fmt: skip
    folder.copy_events()
    return Result.load(folder.path, reused=True)
