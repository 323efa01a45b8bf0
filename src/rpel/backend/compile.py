"""How functions become machine code, and where that code is kept for the next process.

How this works. `compiled` is `numba.njit` with our options and numba's own cache on disk, whose folder
(`NUMBA_CACHE_DIR`, for these functions alone) is named by a hash of all sources that a kernel can consist
of: numba's stamp of a stored function covers the file of that function and none that it calls. `inlined` is
for functions that only kernels call. `written` compiles the text of a function that Python wrote; its text
becomes a file in that folder, so that numba can store it like any other.

Say that two processes start with an empty cache and call `_combine`. Both ask numba's compiler lock first,
and with it, by the listener below, a lock file. One compiles and stores while the other waits, and finds
the kernel when its turn comes. Without the lock both could store different signatures of one function under
one name, and each would load the code of the other.

Kernels release the GIL and start no threads: `rpel.backend.threads` alone decides who runs.
"""

import atexit
import hashlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import numba
import numpy as np
from numba.core import event

from rpel.files import cache_root, locked, write_text
from rpel.processes import uncollected
from rpel.types import Floats

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_BACKEND = Path(__file__).resolve().parent
_numba: Any = numba  # declares no types
_event: Any = event

_features = llvmlite.binding.get_host_cpu_features()
VECTOR_BYTES = 64 if _features.get("avx512f") else 32 if _features.get("avx2") else 16

# On processors with AVX-512 LLVM would keep to vectors of 32 bytes; others ignore this.
if _numba.config.CPU_FEATURES is None:
    _numba.config.CPU_FEATURES = _features.flatten() + ",-prefer-256-bit"


@cache
def folder(package: Path = _BACKEND) -> Path:
    """Return the folder of the machine code of a package's functions; made on first use.

    >>> folder().is_dir()
    True
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted({*_BACKEND.glob("*.py"), *package.glob("*.py")}):
        digest.update(source.name.encode() + source.read_bytes())
    path = cache_root() / "kernels" / digest.hexdigest()[:20]
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    """Return a folder for this process alone: a cache that cannot be written is no error."""
    path = Path(tempfile.mkdtemp(prefix="rpel-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# --- one process compiles, the others wait ------------------------------------------------------------------


class _SharedLock(_event.Listener):  # type: ignore[misc]
    """Extends numba's compiler lock to other processes: a lock file is held around it.

    numba announces its lock before it takes it and after it has freed it, once for each level of nesting.
    """

    def __init__(self) -> None:
        self.own = threading.local()

    def on_start(self, event: Any) -> None:
        self.own.depth = getattr(self.own, "depth", 0) + 1
        if self.own.depth == 1:
            self.own.held = ExitStack()
            self.own.held.enter_context(_alone(folder() / "lock"))
            self.own.held.enter_context(uncollected())

    def on_end(self, event: Any) -> None:
        self.own.depth -= 1
        if self.own.depth == 0:
            self.own.held.close()


class _Announcer(_event.Listener):  # type: ignore[misc]
    """Says, the first time, why the caller has to wait."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("rpel."):
            _announce()

    def on_end(self, event: Any) -> None:
        """Say nothing."""


@cache
def _announce() -> None:
    logging.getLogger("rpel").info("compiling kernels, once for this version: up to half a minute")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock file; say so before waiting for another process."""
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks
            try:
                stack.enter_context(locked(lock, wait=False))
            except BlockingIOError:
                logging.getLogger("rpel").info("waiting for another process that is compiling kernels")
                stack.enter_context(locked(lock))
        yield


_event.register("numba:compiler_lock", _SharedLock())
_event.register("numba:compile", _Announcer())


# --- functions ----------------------------------------------------------------------------------------------


def inlined(function: F, fastmath: Any = False) -> F:
    """Compile a function that only kernels call: it becomes part of each of them, and is not stored alone.

    >>> twice = inlined(lambda x: 2 * x)
    >>> compiled(lambda x: twice(x) + 1)(1)
    3
    """
    inline = "never" if fastmath else "always"  # numba's own inlining drops fastmath, but compiles sooner
    made: F = _numba.njit(function, fastmath=fastmath, inline=inline, no_cpython_wrapper=True, **OPTIONS)
    return made


def compiled(function: F, fastmath: Any = False) -> F:
    """Compile a kernel without the GIL and without bounds checks, stored on disk.

    Args:
        function: what the kernel does; every array it is given should be C-contiguous.
        fastmath: which of LLVM's liberties it may take; by default none: IEEE arithmetic as written.

    >>> compiled(lambda x: x + 1)(1)
    2
    """
    source = Path(function.__code__.co_filename)
    before, stored = _numba.config.CACHE_DIR, source.is_file()  # what was typed at a prompt has no file
    try:
        if stored:
            inside = source.is_relative_to(_BACKEND.parent)
            _numba.config.CACHE_DIR = str(folder(source.resolve().parent if inside else _BACKEND))
        made: F = _numba.njit(function, cache=stored, fastmath=fastmath, **OPTIONS)
    finally:
        _numba.config.CACHE_DIR = before
    return made


def written(lines: list[str], fastmath: Any = False, **names: Any) -> Any:
    """Compile the function `kernel` that these lines define, with names that they may use.

    >>> written(["def kernel(x):", "    return x + more"], more=2)(1)
    3
    """
    text = "\n".join(lines) + "\n"
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    with _alone(path.parent / "lock"):
        if not path.exists():
            write_text(path, text)
    space = {**names, "__name__": __name__}
    exec(compile(text, str(path), "exec"), space)
    return compiled(space["kernel"], fastmath)


def aligned(rows: int, columns: int, dtype: Any) -> Floats:
    """Allocate (rows, columns) that begin where a line of the cache does."""
    size, each = rows * columns, np.dtype(dtype).itemsize
    memory = np.empty(size + 64 // each, dtype)
    skip = -memory.ctypes.data % 64 // each
    return memory[skip : skip + size].reshape(rows, columns)
