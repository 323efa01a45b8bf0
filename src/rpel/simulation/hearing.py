"""Hear of Ctrl-C among many runs: one that came in a run's last round ends that run, and must still stop the rest."""

import contextlib
import signal
import socket
import threading
from types import TracebackType
from typing import Self


class Ear:
    """Inside, :meth:`heard` tells whether SIGINT or SIGTERM has come, whoever handled it; only in the main thread.

    >>> with Ear() as ear:
    ...     ear.heard()
    False
    """

    def __enter__(self) -> Self:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        return self

    def heard(self) -> bool:
        """True if one has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            came = self._near.recv(4096)
            return signal.SIGINT in came or signal.SIGTERM in came
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.set_wakeup_fd(self._before)
        self._near.close()
        self._far.close()
