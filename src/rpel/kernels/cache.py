"""How a function becomes machine code, and where that code is stored for the next process.

Invariants:
- kernels release the GIL and never start threads of their own: `pool` alone decides who runs;
- a stored kernel depends on sources, numba, llvmlite and the processor, and on nothing else: an edit is never missed,
  and another clone of the same sources, wherever it lies, finds the same kernels;
- processes that compile at the same time never mix up each other's files: one compiles, the others wait and load;
- a folder that cannot be written costs a compilation, never an error.

This is numba's own ``cache=True``. Alone it does not keep the invariants: its stamp covers the file of the outermost
function and none that it calls, its folder is named after the absolute path of the sources, and two processes that
store two signatures of one function at the same time may each get the other's code. So a function is compiled as if
its file lay in our folder, which is named by a hash over all that matters (numba stores beside the file), and under a
lock.

The folder is below ``$RPEL_CACHE/kernels`` or ``~/.cache/rpel/kernels``, else one for this process in the temporary
directory. Whoever makes a new one removes those that nobody has used for 30 days.
"""

import atexit
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba.core.compiler_lock import global_compiler_lock

from rpel.files import locked

F = TypeVar("F", bound=Callable[..., Any])

_HERE = Path(__file__).resolve()
_RPEL = _HERE.parents[1]
_UNUSED = 30 * 86_400  # seconds after which stored kernels are removed
LONG = 20.0  # seconds after which a wait for another process is explained
_OURS = re.compile(r"[0-9a-f]{20}")


def _sources(source: Path) -> list[Path]:
    """The files a compiled function may consist of: those of kernels, and its own package's (or its own file)."""
    inside = source.is_relative_to(_RPEL) and source.parent != _RPEL
    own = sorted((_RPEL / source.relative_to(_RPEL).parts[0]).rglob("*.py")) if inside else [source]
    return list(dict.fromkeys([*sorted(_HERE.parent.glob("*.py")), *own]))


@cache
def _fingerprint(sources: tuple[Path, ...]) -> str:
    """Names all that machine code depends on: sources, numba, llvmlite, the processor."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    versions = numba.__version__, llvmlite.__version__, llvmlite.binding.get_host_cpu_name()
    digest.update(" ".join((*versions, llvmlite.binding.get_host_cpu_features().flatten())).encode())
    return digest.hexdigest()[:20]


@cache
def folder(source: Path = _HERE) -> Path:
    """Where the machine code of the functions in a file is stored; made on first use.

    >>> folder().is_dir()
    True
    """
    chosen = os.environ.get("RPEL_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "rpel"
    path = root / "kernels" / _fingerprint(tuple(_sources(source)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with held(path.parent / "lock") as alone:
            new = not path.is_dir()
            _use(path)
            if new and alone:
                _prune(path.parent)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return _passing()


@contextmanager
def held(lock: Path) -> Iterator[bool]:
    """Hold a lock between processes; False on a file system that has none. A long wait is explained."""
    with ExitStack() as stack:
        patience = threading.Timer(LONG, explain)
        patience.daemon = True
        patience.start()
        try:
            stack.enter_context(locked(lock))
            alone = True
        except OSError:
            alone = False
        finally:
            patience.cancel()
        yield alone


@cache
def explain() -> None:
    """Say, once, what a long wait is for."""
    logging.getLogger("rpel").warning(
        "waiting for another process that is compiling kernels; if it was suspended, end it or let it go on"
    )


def _use(path: Path) -> None:
    """Have the folder there, numba's own inside it, and note that it is in use."""
    (path / "__pycache__").mkdir(parents=True, exist_ok=True, mode=0o700)
    os.utime(path)


def _prune(kernels: Path) -> None:
    """Remove the folders of ours that nobody has used for long. Under the lock nobody begins to use one meanwhile, and
    a process that runs so long makes its own again when it next compiles."""
    for path in kernels.iterdir():
        if _OURS.fullmatch(path.name) and path.is_dir() and time.time() - path.stat().st_mtime > _UNUSED:
            shutil.rmtree(path, ignore_errors=True)


@cache
def _passing() -> Path:
    """A folder for this process alone."""
    path = Path(tempfile.mkdtemp(prefix="rpel-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _copy(source: Path) -> Path:
    """The source in the folder of its kernels: numba wants the file it names, and stores beside it."""
    inside = source.is_relative_to(_RPEL)
    path = folder(source) / ("_".join(source.relative_to(_RPEL).parts) if inside else source.name)
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
            new.write(source.read_bytes())
        os.replace(new.name, path)
    return path


_depth = 0


@contextmanager
def _compiling() -> Iterator[None]:
    """Hold numba's lock and ours between processes. A kernel compiles those it calls inside its own compilation."""
    global _depth
    with global_compiler_lock, ExitStack() as stack:
        _depth += 1
        try:
            if _depth == 1:
                stack.enter_context(held(folder() / "lock"))
            yield
        finally:
            _depth -= 1


@cache
def announce() -> None:
    """Say, the first time, why the caller has to wait."""
    logging.getLogger("rpel").info("compiling kernels, once for this version: up to half a minute")


def inlined(function: F) -> F:
    """A function that compiled functions call and nobody else: it becomes part of each of them.

    It has no entry from Python, which would take a good part of its compilation, and is not stored on its own.

    >>> twice = inlined(lambda x: 2 * x)
    >>> compiled(lambda x: twice(x) + 1)(1)
    3
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(nogil=True, error_model="numpy", **options)(function))


def compiled(function: F) -> F:
    """numba's njit without the GIL, IEEE arithmetic as written, no bounds checks, stored on disk.

    >>> compiled(lambda x: x + 1)(1)
    2
    """
    source = Path(function.__code__.co_filename).resolve()
    if not source.is_file():  # what was typed at a prompt has no source to be known by
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
    place = _copy(source)
    function.__code__ = function.__code__.replace(co_filename=str(place))
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    compile_, name = dispatcher.compile, function.__qualname__.replace("<", "").replace(">", "")

    def compile_alone(signature: Any) -> Any:
        with suppress(OSError):
            _use(place.parent)
        with _compiling():
            if not any(place.parent.rglob(f"{place.stem}.{name}-*.nbi")):
                announce()
            return compile_(signature)

    dispatcher.compile = compile_alone
    return cast(F, dispatcher)
