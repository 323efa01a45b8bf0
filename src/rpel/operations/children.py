"""Peers as processes of their own on this machine, for as long as a demonstration lasts.

Laws: each is ended by its own id when the block is left, whatever happens, and nothing remains running; each computes
on one thread, because they share the cores; what one of them said before it died is told.
"""

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rpel.processes import start

_GRACE = 10.0  # seconds to end by oneself
_LINES = 8


class Failed(Exception):  # noqa: N818 (said to people, not to programs)
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
    """A context manager: processes started in it are ended with it."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        """Run ``rpel`` with these arguments."""
        process = start(arguments, folder / "stdout", folder / "stderr")
        self.all.append(Child(name, process, folder))

    def check(self) -> None:
        """Failed, with its last lines, if one of them has died."""
        for child in self.all:
            status = child.process.poll()
            if status:
                raise Failed(f"{child.name} died with status {status}; its last lines:\n{child.last_words()}")

    def running(self) -> int:
        """How many have not ended yet."""
        return sum(child.process.poll() is None for child in self.all)

    def end(self) -> None:
        """End all that still run: first politely, then not."""
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
