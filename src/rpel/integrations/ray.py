"""Runs of a sweep as tasks of a Ray cluster: ``rpel sweep grid.toml --engine ray``.

Nothing on such a cluster is encrypted, so it belongs in a private network. A cluster that is started here
listens on the loopback interface only.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rpel.processes import call

MAX_RETRIES = 8
"""How often a task is started again after its machine was lost."""
CONNECT_TIMEOUT = 10.0
NO_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Unless this is 0 when Ray is imported, Ray replaces 127.0.0.1 by an address of the network."""


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """Connect to the Ray cluster at an address and yield the module ``ray``.

    Without an address a cluster with this number of CPUs is started on loopback.
    """
    for key in ("RAY_USAGE_STATS_ENABLED", *[NO_LOOPBACK] * (address is None)):
        os.environ.setdefault(key, "0")
    try:
        import ray
    except ImportError:
        raise ValueError("engine ray needs Ray: pip install 'rpel[cluster]'") from None
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        _check_reachable(address)
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises plain Exceptions, too
        reason = str(error).strip().splitlines()[0][:160]
        raise ValueError(f"no Ray cluster answers at {address or 'this machine'}: {reason}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise OSError if nothing listens at host:port; Ray itself would retry for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=CONNECT_TIMEOUT).close()


class Task:
    """A function call as a Ray task, with the methods of `rpel.processes.Child` that a study uses."""

    def __init__(
        self,
        ray: Any,
        threads: int,
        function: Callable[..., Any],
        *arguments: Any,
        stdout: Path,
        stderr: Path,
        name: str = "",
    ) -> None:
        self._ray, self.returncode = ray, cast("int | None", None)
        remote = ray.remote(num_cpus=threads, max_retries=MAX_RETRIES)(_call)
        self._running = remote.remote(function, arguments, str(stdout.resolve()), str(stderr.resolve()), name)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs, 1 if Ray could not finish it."""
        if self.returncode is None and self._ray.wait([self._running], timeout=0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        try:
            self.result()
            self.returncode = 0
        except Exception as error:
            self.returncode = 130 if "Cancelled" in type(error).__name__ else 1
        return self.returncode

    def result(self) -> Any:
        """Wait, and return what the function returned; raise what it or Ray raised."""
        return self._ray.get(self._running)

    def send_signal(self, number: int) -> None:
        """Ask it to save and end."""
        with suppress(Exception):
            self._ray.cancel(self._running, recursive=False)

    def kill(self) -> None:
        """End it without saving."""
        with suppress(Exception):
            self._ray.cancel(self._running, force=True, recursive=False)


def _call(function: Callable[..., Any], arguments: Sequence[Any], stdout: str, stderr: str, name: str) -> Any:
    """Call the function in a process of its own, inside the task.

    Cancelling the task passes Ctrl-C on to the process, which also notices when the task is gone.
    """
    child = call(function, *arguments, stdout=Path(stdout), stderr=Path(stderr), name=name)
    try:
        return child.result()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        return child.result()
