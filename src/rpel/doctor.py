"""Is this machine ready? Each check is ok, or says what is wrong and how to fix it. Nothing is changed.

Invariant: a check that cannot be made is a check that failed, with its reason; it never stops the others.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rpel.files import cache_root
from rpel.processes import cores, free_memory
from rpel.text import human_bytes

_LOW_DISK = 2e9
LIBRARIES = 1_000_000_000
"""Memory of the libraries and of small data."""
_SOON = 30
"""Days before the end of a certificate from which on it is a matter of concern."""


@dataclass(frozen=True)
class Check:
    """One line: what was checked, whether it is ok, what was found, and the remedy if it is not ok."""

    check: str
    ok: bool
    detail: str
    remedy: str = ""


def examine(
    preset: str | None = None, config: Path | None = None, data_dir: str | None = None
) -> list[Check]:
    """Check the machine, the memory that a preset needs, and a peer's files, port and certificate."""
    looks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python), ("packages", _packages), ("threads", _threads), ("vector units", _vectors),
        ("devices", _devices), ("kernels", _kernels), ("kernel cache", _cache),
        ("data sets", lambda: _data(preset, data_dir)),
        ("disk", _disk), ("memory", lambda: _memory(preset)), ("clock", lambda: _clock(config is not None)),
    ]  # fmt: skip
    if config is not None:
        looks += [("peer", lambda: _peer(config))]
    remedies = {"peer": "rpel peer init writes one", "data sets": "give a --data-dir that exists"}
    return [
        check
        for name, look in looks
        for check in _guarded(name, look, remedies.get(name, "python -m pip check"))
    ]


def _guarded(
    name: str, look: Callable[[], Iterator[Check]], remedy: str = "python -m pip check"
) -> list[Check]:
    try:
        return [replace(check, remedy="" if check.ok else check.remedy) for check in look()]
    except ValueError as error:  # one of our own sentences, which says what would be right
        return [Check(name, False, str(error), remedy)]
    except Exception as error:  # whatever is broken on this machine is what we are here to say
        return [Check(name, False, f"{type(error).__name__}: {error}", remedy)]


# --- the machine --------------------------------------------------------------------------------------------


def _python() -> Iterator[Check]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("python", sys.version_info >= (3, 11), detail, "install Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    """Every dependency is there, and not older than what was asked for."""
    try:
        needed = importlib.metadata.requires("rpel") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", True, "rpel is run from its sources: nothing says what it needs")
        return
    wrong, seen = [], 0
    for line in needed:
        requirement = re.match(r"([A-Za-z0-9._-]+)>=([0-9.]+)", line)
        if requirement is None or "extra ==" in line:
            continue
        seen += 1
        try:
            have = importlib.metadata.version(requirement[1])
        except importlib.metadata.PackageNotFoundError:
            have = "0"
        if _numbers(have) < _numbers(requirement[2]):
            wrong.append(
                f"{requirement[1]} "
                f"{'is missing' if have == '0' else f'{have} is older than {requirement[2]}'}"
            )
    detail = "; ".join(wrong) or f"all {seen} that rpel needs"
    yield Check("packages", not wrong, detail, "python -m pip install --upgrade rpel")


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers to compare.

    >>> _numbers("2.13.0+cpu") > _numbers("2.6")
    True
    """
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0])[:3])


def _threads() -> Iterator[Check]:
    limits = [
        f"{key}={os.environ[key]}" for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if key in os.environ
    ]
    yield Check(
        "threads", True, f"{cores()} of {os.cpu_count()} cores" + (f"; {', '.join(limits)}" if limits else "")
    )


def _devices() -> Iterator[Check]:
    """Which devices torch sees, and why not the others."""
    from rpel.backend.chunks import missing

    reasons = {device: missing(device) for device in ("cuda", "mps")}
    yield Check(
        "devices", True, "; ".join(["cpu", *(f"{name}: {why or 'there'}" for name, why in reasons.items())])
    )


def _vectors() -> Iterator[Check]:
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    units = [name for name in ("avx512f", "avx2", "avx", "neon", "sve") if features.get(name)]
    fast = bool({"avx2", "avx512f", "neon"} & set(units))
    detail = f"{llvmlite.binding.get_host_cpu_name()}: {', '.join(units) or 'none known'}"
    yield Check("vector units", True, detail if fast else f"{detail}: rules will be slower than published")


def _kernels() -> Iterator[Check]:
    """Compare the compiled kernels with the plain ones on a small example."""
    import numpy as np

    from rpel.backend.base import backend

    table, index = np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32), np.arange(9)[None]
    ours, meant = (
        kernels.coordinatewise(table, index, "trimmed_mean", 2)
        for kernels in (backend("numba"), backend("plain"))
    )
    same = bool(np.allclose(ours, meant, atol=1e-6))
    detail = "compiled and plain agree" if same else "compiled and plain kernels disagree"
    yield Check("kernels", same, detail, "remove the kernel cache and report this")


def _cache() -> Iterator[Check]:
    from rpel.backend.compile import folder

    path = folder()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    root = cache_root()
    persistent = root in path.parents
    lost = f"{root} cannot be written: kernels are compiled in each process"
    remedy = f"make {root} writable, or set RPEL_CACHE to a folder that is"
    yield Check("kernel cache", persistent, f"{path}, {human_bytes(size)}" if persistent else lost, remedy)


def _data(preset: str | None, data_dir: str | None) -> Iterator[Check]:
    """Look for all data sets; a missing one that can be downloaded is no fault."""

    from rpel.data.sources import SOURCES, search_folders
    from rpel.spec import DATASETS, load

    search_folders(data_dir)  # raises for a folder that is not there
    wanted = load(preset).dataset if preset is not None else None
    states = {name: _there(name, data_dir) for name in DATASETS}
    for name, damaged in states.items():
        if damaged:
            yield Check(f"data set {name}", False, damaged, "remove the damaged file: it is downloaded again")
    if wanted is not None and states[wanted] is None and wanted in SOURCES and not SOURCES[wanted].files:
        detail = f"{preset} needs {wanted}, which is not here and cannot be downloaded"
        yield Check("data", False, detail, f"give --data-dir a folder with {SOURCES[wanted].layout}")
    present, missing = ([name for name, state in states.items() if state == kind] for kind in ("", None))
    later = f"; not here, looked for or downloaded when first used: {', '.join(missing)}" if missing else ""
    detail = f"found: {', '.join(present) or 'none'}{later}"
    yield Check("data sets", bool(present), detail, "reinstall rpel: even its sample is missing")


def _there(name: str, data_dir: str | None) -> str | None:
    """ "" if the data set is here, None if it is not, and what is wrong with it if it is damaged."""
    from rpel.data import MissingDataError, load

    try:
        load(name, data_dir, download=False)
    except MissingDataError:
        return None
    except ValueError as error:
        return str(error)
    return ""


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "disk", free >= _LOW_DISK, f"{human_bytes(free)} free here", "make room, or give --out elsewhere"
    )


def _memory(preset: str | None) -> Iterator[Check]:
    total = free_memory()
    if preset is None:
        yield Check("memory", True, f"{human_bytes(total)} free" if total else "not known on this system")
        return
    from rpel.data.federations import HEART_FEATURES
    from rpel.models import model, parameter_count
    from rpel.simulation.build import Size, memory_needed
    from rpel.simulation.methods import resolve
    from rpel.spec import load

    run = resolve(load(preset))
    spec = run.spec
    shapes = {"heart-disease": (HEART_FEATURES,), "cifar10": (3, 32, 32), "mnist-8x8": (1, 8, 8)}
    shape = shapes.get(spec.dataset, (1, 28, 28))  # models of text take no shape
    d = parameter_count(model(spec.model, shape))
    needed = memory_needed(run, Size.of(run), row_bytes=4 * d) + LIBRARIES
    detail = f"{preset} needs about {human_bytes(needed)} (d = {d:,})"
    detail += f"; {human_bytes(total)} are free" if total else ""
    remedy = "fewer --nodes, a smaller --model, or a larger machine"
    yield Check("memory", not total or needed < total, detail, remedy)


def _clock(matters: bool) -> Iterator[Check]:
    """Whether the system's clock follows others; only real peers depend on it."""
    synchronised = _synchronised()
    state = {True: "synchronised", False: "not synchronised", None: "state not known"}[synchronised]
    good = synchronised is not False or not matters
    remedy = "run an NTP service: rounds of real peers follow the clock"
    yield Check("clock", good, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {state}", remedy)


def _synchronised() -> bool | None:
    """What the kernel says of its clock (adjtimex), on Linux."""
    if sys.platform != "linux":
        return None
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != 5)  # TIME_ERROR


# --- a peer -------------------------------------------------------------------------------------------------


def _peer(path: Path) -> Iterator[Check]:
    from rpel.peer.config.settings import Config

    config = Config.load(path)
    yield Check("peer.toml", True, f"{path}: {config.id}")
    yield from _guarded(
        "members", lambda: _members(config), "rpel network new writes it; all members hold the same"
    )
    yield from _guarded(
        "certificate", lambda: _certificate(config), "rpel peer init makes a key and a certificate"
    )
    yield from _guarded("port", lambda: _port(config.listen), "choose another listen in peer.toml")


def _members(config: Any) -> Iterator[Check]:
    from rpel.peer.config.membership import Membership

    members = Membership.load(config.members)
    mine = any(member.id == config.id for member in members.members)
    stranger = "" if mine else f", {config.id!r} is not one of them"
    detail = f"{config.members}: {len(members.members)} members{stranger}"
    yield Check("members", mine, detail, "add the entry that rpel peer init printed")


def _certificate(config: Any) -> Iterator[Check]:
    from rpel.certificates import read_certificate

    certificate = read_certificate(config.certificate.read_text("utf-8"))
    left = certificate.not_after - datetime.now(UTC)
    remedy = "rpel peer init --dir new makes another; all members need its entry (rotating a key)"
    state = (
        f"valid for {left.days} more days"
        if left.days >= 0
        else f"expired on {certificate.not_after:%Y-%m-%d}"
    )
    yield Check("certificate", left.days > _SOON, f"{config.certificate}: {state}", remedy)
    mode = config.key.stat().st_mode & 0o077
    detail = f"{config.key} is {'readable by others' if mode else 'private'}"
    yield Check("key", not mode, detail, f"chmod 600 {config.key}")


def _port(listen: str) -> Iterator[Check]:
    from rpel.peer.config.settings import listen_address

    host, port = listen_address(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            why = "stop what uses it (this peer, if it is running), or choose another listen"
            yield Check("port", False, f"{listen}: {error.strerror}", why)
            return
    yield Check("port", True, f"{listen} can be listened on")
