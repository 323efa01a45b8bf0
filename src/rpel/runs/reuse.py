"""Which folder a run takes: one that is known to hold the same run, else one of its own.

Invariants: a finished run is returned, and an unfinished one gone on with, only if specification, data and
code are the same; whatever is left aside is said in one line, with the reason;
nothing of another code is overwritten.
"""

import logging
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from rpel.runs.certificate import differences
from rpel.runs.folder import RunFolder, base_of

log = logging.getLogger("rpel")


def alike(base: Path) -> list[RunFolder]:
    """The run folders of one specification and data, whatever code made them;
    the one without a suffix first."""
    there = base.parent.glob(f"{_escaped(base.name)}*") if base.parent.is_dir() else ()
    return [
        RunFolder(path) for path in sorted(there) if base_of(path) == base and (path / "spec.toml").is_file()
    ]


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def choose(
    base: Path, ours: Mapping[str, str], *, known: bool, reuse: bool = False, force: bool = False
) -> Path:
    """The folder for a run whose code is ``ours``: that of the same run, begun or finished, else a free one.

    known: False for a run with objects from Python, which is never taken for another. reuse: a finished run
    of another code, or with such objects, will do. force: it begins anew,
    so what the same code has made may be overwritten.
    """
    there = alike(base)
    for folder in there:
        code = folder.code()  # None: begun, and nothing kept that could be gone on with
        if code is None or (code == ours["code"] and (known or reuse or force)):
            return folder.path
    finished = [folder for folder in there if folder.certificate() is not None]
    if finished and reuse:
        return finished[0].path
    chosen = _free(base, ours["code"])
    if there:
        log.warning(
            "%s not reused (%s): this run goes to %s", there[-1].path, _why(there[-1], ours), chosen.name
        )
    return chosen


def _free(base: Path, code: str) -> Path:
    names = (f"{base.name}-{code[:8]}" + (f"-{i}" if i > 1 else "") for i in count(1))
    return base if not _taken(base) else next(p for name in names if not _taken(p := base.with_name(name)))


def _taken(path: Path) -> bool:
    return (path / "spec.toml").is_file()


def _why(folder: RunFolder, ours: Mapping[str, str]) -> str:
    certificate = folder.certificate()
    theirs = {"code": folder.code() or ""} if certificate is None else certificate.versions
    if not (different := differences(theirs, ours)):
        return "what objects from Python do cannot be known; reuse=True takes it all the same"
    how = (
        "--reuse takes it"
        if certificate is not None
        else f"rpel resume --force {folder.path} goes on with it"
    )
    return f"made by other code: {different}; {how}"


def resumed(path: Path, ours: Mapping[str, str]) -> Path:
    """The folder that is meant by one that a user names: where several hold this run,
    the one of the running code."""
    there = alike(path)
    if len(there) < 2:
        return path
    for folder in there:
        if folder.code() == ours["code"]:
            return folder.path
    names = ", ".join(folder.path.name for folder in there)
    raise ValueError(
        f"several runs of other code are here, name one and give --force to go on with it: {names}"
    )
