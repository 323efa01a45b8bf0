"""A run where its engine says: here, or by workers that Ray places and starts again.

Invariant: a run on Ray is the same run; this process only watches its folder, and asks it to stop.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from rpel.backend.pool import threads
from rpel.config.record import parse_seeds
from rpel.config.spec import Spec
from rpel.processes import Stop
from rpel.runs.folder import RunFolder
from rpel.runs.journal import check_tensorboard
from rpel.runs.record import Run, RunSet
from rpel.simulation import cluster
from rpel.simulation import run as runs_here
from rpel.simulation.callbacks import Interrupted, Progress, tick
from rpel.simulation.communicator import LostError
from rpel.simulation.inputs import Download, Objects, loader
from rpel.simulation.launch import carrier
from rpel.simulation.methods import ResolvedSpec
from rpel.simulation.run import WHEN, placed, prepared, stored

_LOOK = 0.5


def engine(spec: Spec) -> Callable[..., Run | RunSet]:
    """What runs a Spec where its engine says, called like :func:`rpel.simulation.run.run`."""
    return runs_here.run if spec.engine == "local" else on_ray


def on_ray(
    spec: Spec,
    own: Objects | None = None,
    *,
    keep: bool = True,
    progress: Progress | None = None,
    download: Download | None = None,
    force: bool = False,
    reuse: bool = False,
    tensorboard: bool = False,
) -> Run | RunSet:
    """Run a Spec, or each of its seeds, on a Ray cluster; this process watches."""
    if own not in (None, Objects()) or not keep:
        raise ValueError(
            "engine ray shares runs that are kept, whose data and model have names: else engine='local'"
        )
    if tensorboard:
        check_tensorboard()
    seeds, runs, load = parse_seeds(spec.seeds) or [spec.seed], list[Run](), loader(download)
    here = {"engine": "local", "workers": 1, "out": str(Path(spec.out).resolve()), "seeds": None}
    if spec.data_dir is not None:
        here["data_dir"] = str(Path(spec.data_dir).resolve())
    with cluster.connected(spec.address, max(spec.workers, threads())), Stop(WHEN) as stop:
        for seed in seeds:
            one = spec.replace(seed=seed, **here)
            resolved, inputs = prepared(one, Objects(), load)
            folder = RunFolder(placed(resolved, inputs, reuse=reuse, force=force), tensorboard)
            if force:
                with folder.locked():
                    folder.clear()
            if (found := stored(folder, inputs.versions)) is None:
                _supervise(one, resolved, spec.workers, folder, progress, stop)
                found = Run.load(folder.path)
            runs.append(found)
            if stop.asked and seed != seeds[-1]:
                raise Interrupted(spec.rounds, spec.rounds, folder.path)
    return runs[0] if spec.seeds is None else RunSet(runs)


def _supervise(
    spec: Spec, resolved: ResolvedSpec, workers: int, folder: RunFolder, progress: Progress | None, stop: Stop
) -> None:
    """Have Ray run it to its end, and tell of the rounds that its folder shows meanwhile."""
    place = folder.path.with_name(f".{folder.path.name}.ray")
    config = {"spec": spec.model_dump(), "tensorboard": folder.tensorboard, "stop": str(place / "stop")}
    place.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as one:
        moved_by, gpu = carrier(spec.device, here=1), spec.device.startswith("cuda")
        running = one.submit(cluster.supervised, _ray_worker, config, workers, place, moved_by, gpu)
        seen = 0
        while not running.done():
            wait([running], timeout=_LOOK)
            rows = folder.metrics()
            if progress is not None and len(rows) not in (0, seen):
                progress(tick(resolved, rows))
            seen = len(rows)
            if stop.asked:
                with suppress(FileNotFoundError):  # it has just ended
                    (place / "stop").touch()
        said = running.result() or {}
    if "refused" in said:
        raise ValueError(said["refused"])
    if "round" in said:
        raise Interrupted(said["round"], spec.rounds, folder.path)


def _ray_worker(config: dict[str, Any]) -> dict[str, Any]:
    """One worker, in the group that Ray has made. What it refuses it returns:
    starting it again would not help."""
    try:
        runs_here.run(
            Spec(**config["spec"]), tensorboard=config["tensorboard"], stop=Stop(file=Path(config["stop"]))
        )
    except LostError:
        raise
    except Interrupted as interrupted:
        return {"round": interrupted.round}
    except ValueError as error:
        return {"refused": str(error)}
    except SystemExit:
        pass  # another worker has the result
    return {}
