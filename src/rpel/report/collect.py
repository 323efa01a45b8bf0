"""Run folders under some paths: the finished, the unfinished and the broken, each read once."""

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rpel.record import OWN
from rpel.runs.certificate import made_here
from rpel.runs.folder import RunFolder, base_of
from rpel.runs.record import Run
from rpel.spec import Spec, load, load_folder, presets
from rpel.text import value_text

_MARKS = {"spec.toml", "metrics.jsonl"}


@dataclass(frozen=True)
class Unfinished:
    """A run that has not come to its end."""

    path: Path
    place: str
    spec: Spec
    rounds: int


@dataclass(frozen=True)
class Broken:
    """A folder that cannot be read, and why."""

    path: Path
    place: str
    reason: str


@dataclass(frozen=True)
class Collection:
    """All that lies under some paths, in the order of their names;
    ``shown`` is how the paths are written on a page."""

    shown: tuple[str, ...]
    runs: tuple[Run, ...]
    unfinished: tuple[Unfinished, ...]
    broken: tuple[Broken, ...]


def collect(paths: Iterable[str | Path]) -> Collection:
    """Read every run folder at or under the paths; one reached twice counts once.

    >>> collect(["nowhere"])
    Traceback (most recent call last):
    ValueError: there is no folder 'nowhere': give run folders or folders above them
    """
    given = [Path(path) for path in paths]
    folders: dict[Path, str] = {}
    for path in given:
        if not path.is_dir():
            raise ValueError(f"there is no folder {str(path)!r}: give run folders or folders above them")
        under = {folder.resolve(): _place(path, folder) for folder in _folders(path)}
        if not under:
            raise ValueError(f"there is no run in {str(path)!r}: rpel run PRESET --out {path} makes one")
        folders = under | folders
    read = [_read(path, name) for path, name in sorted(folders.items(), key=lambda item: (item[1], item[0]))]
    return Collection(
        tuple(shown(path) for path in given),
        tuple(one for one in read if isinstance(one, Run)),
        tuple(one for one in read if isinstance(one, Unfinished)),
        tuple(one for one in read if isinstance(one, Broken)),
    )


def by_code(collection: Collection, say: Callable[[str], None]) -> Collection:
    """Of a run that several codes have made, the one by the running code; where there is none, all,
    and they are named.

    What is left out, or stands beside each other, is said.
    """
    alike: dict[Path, list[Run]] = {}
    for run in collection.runs:
        alike.setdefault(base_of(Path(run.place)), []).append(run)
    out: set[str] = set()
    for runs in alike.values():
        names = ", ".join(run.place for run in runs)
        if len(runs) > 1 and (ours := [run for run in runs if made_here(run.certificate.versions)]):
            out |= {run.place for run in runs} - {run.place for run in ours}
            say(f"of {names} only what this code has made is shown: {', '.join(run.place for run in ours)}")
        elif len(runs) > 1:
            say(f"one run by several other codes, all shown: {names}")
    done = {base for base, runs in alike.items() if any(made_here(run.certificate.versions) for run in runs)}
    waiting = tuple(one for one in collection.unfinished if base_of(Path(one.place)) not in done)
    return replace(
        collection, runs=tuple(run for run in collection.runs if run.place not in out), unfinished=waiting
    )


def shown(path: Path) -> str:
    """A path as a page shows it: without the folders of this machine that lie above.

    >>> shown(Path("runs/mnist")), shown(Path("/home/somebody/runs"))
    ('runs/mnist', 'runs')
    """
    if not path.is_absolute():
        return path.as_posix()
    whole, here = path.resolve(), Path.cwd().resolve()
    return whole.relative_to(here).as_posix() if here in whole.parents else whole.name


def _place(top: Path, folder: Path) -> str:
    return (Path(shown(top)) / folder.relative_to(top)).as_posix()


def _folders(top: Path) -> Iterator[Path]:
    """The run folders at or under a folder; links are followed, circles are not."""
    seen = set()
    for where, folders, files in os.walk(top, followlinks=True):
        here = Path(where)
        if (real := here.resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        if _MARKS & set(files):
            folders.clear()
            yield here


# --- reading one folder -------------------------------------------------------------------------------------


def _read(path: Path, name: str) -> Run | Unfinished | Broken:
    try:
        folder, spec = RunFolder(path), load_folder(path)
        certificate = folder.certificate()
        if certificate is None:
            return Unfinished(path, name, spec, len(folder.metrics()))
        spec = spec.replace(pull=certificate.pull, b_hat=certificate.b_hat)
        run = Run(spec, path, certificate=certificate, place=name)
        _ = run.history
        return run
    except (OSError, ValueError) as error:
        return Broken(path, name, str(error).replace(str(path), name))


# --- the command that makes a run again ---------------------------------------------------------------------

# where things lie on one machine, and what one run of several does not know
_LEFT_OUT = ("data_dir", "out", "seeds")


def command(spec: Spec) -> str | None:
    """The command line, from the preset the run is named after or else the nearest;
    None for objects from Python.

    >>> command(load("mnist-30").replace(attack="foe", seed=3))
    'rpel run mnist-30 --attack foe --seed 3'
    """
    if OWN in (spec.dataset, spec.model):
        return None
    differences = {name: _differences(spec, preset) for name, preset in _presets().items()}
    near = min(differences, key=lambda name: (name != spec.name, len(differences[name]), name))
    flags = [word for key, value in differences[near] for word in _flag(key, value)]
    return shlex.join(["rpel", "run", near, *flags])


@cache
def _presets() -> dict[str, Spec]:
    return {name: load(name) for name in presets()}


def _differences(spec: Spec, base: Spec) -> list[tuple[str, Any]]:
    """(field, value) wherever the run is not as the preset; what is unset needs no option."""
    pairs = [
        (key, getattr(spec, key), getattr(base, key)) for key in Spec.model_fields if key not in _LEFT_OUT
    ]
    return [(key, value) for key, value, theirs in pairs if value is not None and value != theirs]


def _flag(key: str, value: Any) -> list[str]:
    """The option that sets a field.

    >>> _flag("b_hat", 4), _flag("silent", False)
    (['--b-hat', '4'], ['--not-silent'])
    """
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--not-{key}"]
    return [f"--{name}", value_text(value)]
