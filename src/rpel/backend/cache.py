"""How a function becomes machine code, and where that code is stored for the next process.

Invariants:
- kernels release the GIL and never start threads of their own: `pool` alone decides who runs;
- a stored kernel depends on sources, numba, llvmlite and the processor, and on nothing else: an edit is never
  missed, and another clone of the same sources, wherever it lies, finds the same kernels;
- processes that compile at the same time never mix up each other's files: one compiles,
  the others wait and load;
- a folder that cannot be written costs a compilation, never an error.

This is numba's own cache with a locator of ours. Alone it does not keep the invariants: its stamp covers the
file of the outermost function and none that it calls, its folder is named after the absolute path of the
sources, and two processes that store two signatures of one function at the same time may each get the other's
code. So the locator names a folder by a hash over all that matters,
and compilations hold a lock between processes.

The folder is below ``kernels`` in :func:`rpel.files.cache_root`, else one for this process in the temporary
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
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime.nrt import rtsys

from rpel.files import cache_root, locked
from rpel.processes import uncollected

F = TypeVar("F", bound=Callable[..., Any])

_HERE = Path(__file__).resolve()
_RPEL = _HERE.parents[1]
_UNUSED = 30 * 86_400  # seconds after which stored kernels are removed
LONG = 20.0  # seconds after which a wait for another process is explained
_OURS = re.compile(r"[0-9a-f]{20}")


def _sources(source: Path) -> list[Path]:
    """The files a compiled function may consist of: those of kernels,
    and its own package's (or its own file)."""
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
    path = cache_root() / "kernels" / _fingerprint(tuple(_sources(source)))
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
    """Have the folder there, and note that it is in use."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.utime(path)


def _prune(kernels: Path) -> None:
    """Remove the folders of ours that nobody has used for long. Under the lock nobody begins to use one
    meanwhile, and a process that runs so long makes its own again when it next compiles."""
    for path in kernels.iterdir():
        if _OURS.fullmatch(path.name) and path.is_dir() and time.time() - path.stat().st_mtime > _UNUSED:
            shutil.rmtree(path, ignore_errors=True)


@cache
def _passing() -> Path:
    """A folder for this process alone."""
    path = Path(tempfile.mkdtemp(prefix="rpel-kernels-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class _Locator(_CacheLocator):
    """Tells numba's cache where the machine code of a function lies: in the folder that its sources name."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._py_file, self.source = source, Path(source).resolve()
        inside = self.source.parent.relative_to(_RPEL).parts if self.source.is_relative_to(_RPEL) else ()
        self.place = "_".join((*inside, str(function.__code__.co_firstlineno)))

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> "_Locator":
        return cls(function, source)

    def get_cache_path(self) -> str:
        return str(folder(self.source))

    def get_source_stamp(self) -> str:
        return folder(self.source).name

    def get_disambiguator(self) -> str:
        return self.place


class _Code(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012 - as numba declares it


class _Store(FunctionCache):
    _impl_class = _Code

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As numba's, without importing all that numba can compile: that is a second of each process, and who
        compiles does it anyway."""
        runtime: Any = rtsys  # numba declares no types
        load: Any = self._load_overload
        runtime.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return load(sig, target_context)

    @property
    def is_new(self) -> bool:
        """Whether nothing of the function is stored yet."""
        return not Path(self.cache_path, f"{self._impl.filename_base}.nbi").exists()


_depth = 0


@contextmanager
def _compiling() -> Iterator[None]:
    """Hold numba's lock and ours between processes.
    A kernel compiles those it calls inside its own compilation."""
    global _depth
    with global_compiler_lock, ExitStack() as stack:
        _depth += 1
        try:
            if _depth == 1:
                stack.enter_context(held(folder() / "lock"))
                stack.enter_context(uncollected())
            yield
        finally:
            _depth -= 1


@cache
def announce() -> None:
    """Say, the first time, why the caller has to wait."""
    logging.getLogger("rpel").info("compiling kernels, once for this version: up to half a minute")


class _Part(CPUDispatcher):
    """A compiled function. One that calls it with the number 1 calls the code for any number: numba alone
    would compile it once more for that literal."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        plain: Any = types.unliteral  # numba declares no types
        return super().get_call_template(
            [plain(kind) for kind in args], {name: plain(kws[name]) for name in kws}
        )


class _Linked(JITCodeLibrary):
    """Code that is linked into that of others, and optimised and made machine code there: alone it never
    runs, and numba would do both for it, too."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    @property
    def codegen(self) -> "_Linked":
        """Whom numba tells where a function's environment is: nothing here is at an address."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        pass


class _InnerCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, *given: Any) -> None:
        begin: Any = super().__init__  # numba declares no types
        linked: Any = _Linked
        begin(typing, target, library or linked(target.codegen(), "inlined"), *given)


def inlined(function: F) -> F:
    """A function that compiled functions call and nobody else: it becomes part of each of them.

    It has no entry from Python, which would take a good part of its compilation,
    and is not stored on its own.

    >>> twice = inlined(lambda x: 2 * x)
    >>> compiled(lambda x: twice(x) + 1)(1)
    3
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, _Part(function, targetoptions={**_OPTIONS, **options}, pipeline_class=_InnerCompiler))


_OPTIONS: dict[str, Any] = {"nopython": True, "boundscheck": None, "nogil": True, "error_model": "numpy"}


class _Kernel(_Part):
    """A compiled function that is stored in our folder; one process compiles it, the others wait and load."""

    def enable_caching(self) -> None:
        store: Any = _Store  # numba declares no types
        self._cache = store(self.py_func)

    def compile(self, signature: Any) -> Any:
        with suppress(OSError):
            _use(Path(self._cache.cache_path))
        with _compiling():
            if self._cache.is_new:
                announce()
            return super().compile(signature)


def compiled(function: F) -> F:
    """numba's njit without the GIL, IEEE arithmetic as written, no bounds checks, stored on disk.

    >>> compiled(lambda x: x + 1)(1)
    2
    """
    # what was typed at a prompt has no source to be known by
    if not Path(function.__code__.co_filename).is_file():
        return cast(F, _Part(function, targetoptions=_OPTIONS))
    kernel = _Kernel(function, targetoptions=_OPTIONS)
    kernel.enable_caching()
    return cast(F, kernel)
