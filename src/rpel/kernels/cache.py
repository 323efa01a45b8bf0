"""How a function becomes machine code, and where that code waits for the next process.

Laws:
- kernels release the GIL and never start threads of their own: `threads` alone decides who runs;
- a stored kernel is used only by the sources that made it. numba looks at the file of the outermost function alone,
  so an edit in a file it calls would go unnoticed; here the folder's name is a hash over every source of this
  room, numba's version and the processor, and the stamp one over the sources beside the function;
- a folder that cannot be written costs a compilation, never an error.

The folder is ``$RPEL_CACHE/kernels`` or ``~/.cache/rpel/kernels``, else one for this process in the temporary
directory.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba.core import caching
from numba.extending import intrinsic as numba_intrinsic

F = TypeVar("F", bound=Callable[..., Any])


@cache
def fingerprint(room: Path = Path(__file__).parent) -> str:
    """Names the sources in a folder, numba and the processor: what a stored kernel depends on.

    >>> len(fingerprint())
    20
    """
    digest = hashlib.sha256()
    for source in sorted(room.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    digest.update(llvmlite.binding.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:20]


@cache
def folder() -> Path:
    """Where the machine code of these sources is stored; made on first use.

    >>> folder().is_dir()
    True
    """
    chosen = os.environ.get("RPEL_CACHE")
    root = Path(chosen) if chosen else Path.home() / ".cache" / "rpel"
    path = root / "kernels" / fingerprint()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="rpel-kernels-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path


class _Locator(caching._CacheLocator):
    """Tells numba the folder, and as a stamp the sources beside the function, which may live in another room."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._py_file, self._lineno = source, function.__code__.co_firstlineno
        place = f"{source}:{self._lineno} {function.__qualname__}"
        self._disambiguator = hashlib.sha256(place.encode()).hexdigest()[:8]

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return fingerprint(Path(self._py_file).resolve().parent)

    def get_disambiguator(self) -> str:
        return self._disambiguator

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> "_Locator":
        return cls(function, source)


class _Storage(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012  (numba's own attribute)


class _Cache(caching.FunctionCache):
    _impl_class = _Storage


def compiled(function: F) -> F:
    """numba's njit without the GIL, IEEE arithmetic as written, no bounds checks, stored on disk.

    >>> compiled(lambda x: x + 1)(1)
    2
    """
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if Path(function.__code__.co_filename).is_file():  # what was typed at a prompt has no source to be known by
        storage: Any = _Cache
        dispatcher._cache = storage(function)
    return cast(F, dispatcher)


def intrinsic(function: Callable[..., Any]) -> Callable[..., None]:
    """numba's intrinsic: a function made of LLVM instructions, called in compiled ones without its first argument."""
    return cast(Callable[..., None], numba_intrinsic(prefer_literal=True)(function))
