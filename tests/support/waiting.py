"""How long a test waits for what must happen, and how fast its networks play."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE = 600.0
"""Seconds: not what anything may take, but after how long it is said to hang, on the most loaded machine."""


def pace() -> float:
    """By how much the rounds of real peers are stretched here and now: 1 on a free machine,
    more beside other work.

    Rounds have deadlines, so peers that get a tenth of a core miss those of a free machine;
    that is their right.
    """
    busy = os.getloadavg()[0]  # of the last minute: at the beginning of a test run nothing yet
    with suppress(OSError):
        # runnable now
        busy = max(busy, float(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
    return max(1.0, busy / (os.cpu_count() or 1))


def brief(seconds: float) -> float:
    """A time in which something happens on a free machine, and here and now, too."""
    return seconds * pace()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that other tasks of this loop make true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)
