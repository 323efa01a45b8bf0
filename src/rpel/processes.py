"""Processes that start others, and how any of them is told to stop.

Invariant: what is started here does not outlive its starter, whichever way that one ends: SIGKILL leaves it no time to
tell, so the started one looks.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_STARTER = "RPEL_STARTER"
_LOOK = 0.5
_GRACE = 10.0  # seconds to end by oneself
_LINES = 8
_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def start(
    arguments: Sequence[str],
    stdout: Path,
    stderr: Path,
    threads: int = 1,
    more: Mapping[str, str] | None = None,
    module: str = "rpel",
) -> "subprocess.Popen[bytes]":
    """Run ``rpel``, or another module, with these arguments on so many threads; what it prints goes to the two files.

    more: variables for its environment. Colours are for terminals, so nothing asks it for them.

    It has a session of its own: Ctrl-C in the terminal reaches the starter, which passes it on, once.
    """
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    plain = {key: value for key, value in os.environ.items() if key not in _COLOURS}
    with stdout.open("wb") as out, stderr.open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**plain, **limits, **(more or {}), _STARTER: str(os.getpid())},
            start_new_session=True,
        )


def end_with_starter() -> None:
    """In a process that :func:`start` made: when its starter is gone, SIGTERM, so that it saves and ends as always."""
    starter = os.environ.pop(_STARTER, None)
    if starter is not None:
        threading.Thread(target=_look, args=(int(starter),), daemon=True).start()


def _look(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: somebody asked this process to leave."""


class Stop:
    """The one way to be told to stop. Inside, the first Ctrl-C or SIGTERM sets ``asked``; the next one interrupts.

    Whoever works in steps looks at ``asked`` between them. One token serves a whole command: it is handed down, and
    entering it again changes nothing. Outside the main thread signals are left alone.

    >>> with Stop("after this round") as stop, stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.asked
    True
    """

    def __init__(self, when: str = "", at_once: bool = False, file: Path | None = None) -> None:
        """when: said once, when the first signal comes; at_once: for work without steps, that one interrupts.

        file: that it is there asks, too, across machines.
        """
        self.when, self.at_once, self.file = when, at_once, file
        self._asked, self._depth, self._before = False, 0, dict[int, Any]()

    @property
    def asked(self) -> bool:
        return self._asked or (self.file is not None and self.file.exists())

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self._asked = self._asked, True
        if again or self.at_once:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self.when:
            logging.getLogger("rpel").info("%s", self.when)

    def check(self) -> None:
        """KeyboardInterrupt if it was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()


# --- several at once -------------------------------------------------------------------------------------------------


class ChildError(Exception):
    """A process died, or the machine is too busy; one sentence, and perhaps its last lines."""


@dataclass(frozen=True)
class Child:
    """One process: what it prints goes to the files ``stdout`` and ``stderr`` of its folder."""

    name: str
    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def result(self) -> str:
        """All that it printed to standard output."""
        return (self.folder / "stdout").read_text("utf-8", "replace")

    def last_words(self) -> str:
        """The last lines of its standard error."""
        return "\n".join((self.folder / "stderr").read_text("utf-8", "replace").splitlines()[-_LINES:])


class Children:
    """A context manager: processes started in it are ended, by their own ids, when it is left, whatever happens."""

    def __init__(self, stop: Stop) -> None:
        self.all: list[Child] = []
        self.stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, arguments: Sequence[str], folder: Path, module: str = "rpel") -> None:
        """Run ``rpel``, or another module, with these arguments, on one thread: they share the cores."""
        process = start(arguments, folder / "stdout", folder / "stderr", module=module)
        self.all.append(Child(name, process, folder))

    def check(self) -> None:
        """ChildError, with its last lines, if one of them has died; KeyboardInterrupt if they are to stop."""
        self.stop.check()
        for child in self.all:
            status = child.process.poll()
            if status:
                raise ChildError(f"{child.name} died with status {status}; its last lines:\n{child.last_words()}")

    def running(self) -> int:
        """How many have not ended yet."""
        return sum(child.process.poll() is None for child in self.all)

    def end(self) -> None:
        """End all that still run: SIGTERM first, SIGKILL for those left after some seconds."""
        left = [child.process for child in self.all if child.process.poll() is None]
        for process in left:
            process.terminate()
        until = time.monotonic() + _GRACE
        try:
            for process in left:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, until - time.monotonic()))
        finally:  # also when somebody is too impatient for this, and presses Ctrl-C again
            for process in left:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self.all = []


# --- memory ----------------------------------------------------------------------------------------------------------


def free_memory() -> int | None:
    """Bytes that processes of this machine, or of this container, may still take; None where that is not known.

    >>> (free_memory() or 1) > 0
    True
    """
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (int((group / name).read_text("utf-8")) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text("utf-8").splitlines())
    except (OSError, ValueError):
        return free  # no container, or one without a limit
    limit = most - used + int(stat.get("inactive_file", 0))
    return limit if free is None else min(free, limit)
