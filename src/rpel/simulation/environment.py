"""The process a run lives in: its threads, its versions, and the signals that ask it to stop."""

import hashlib
import importlib.metadata
import logging
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from rpel.kernels.pool import set_threads, threads
from rpel.version import __version__

log = logging.getLogger("rpel")


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


@cache
def versions() -> dict[str, str]:
    """What the result depends on beside the specification; ``code`` is a digest of rpel's own source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "numba", "scipy")}
    own = {"rpel": __version__, "code": digest.hexdigest()[:12], "python": platform.python_version()}
    return own | packages


class Stop:
    """Inside, the first Ctrl-C (or SIGTERM) only sets ``asked``; a second one interrupts at once.

    Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.info("stopping after this round; once more stops at once and loses the rounds since the last checkpoint")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
