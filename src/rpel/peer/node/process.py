"""The process that a peer runs in: settings that it borrows, and the service manager that it reports to."""

import asyncio
import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


@contextmanager
def restored_settings() -> Iterator[None]:
    """Give the process its limits back at the end, and whether others may look inside: it is the user's."""
    limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)}
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    dumpable = prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) if prctl else 0
    try:
        yield
    finally:
        for kind, both in limits.items():
            resource.setrlimit(kind, both)
        if prctl and dumpable == 1:
            prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


async def notify() -> None:
    """Send READY=1, and WATCHDOG=1 twice in the time that the manager allows, if there is one.

    It runs in the network's loop, so that a loop that hangs ends the messages, and the manager restarts the
    peer.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)
        message, allowed = b"READY=1", int(os.environ.get("WATCHDOG_USEC", "0"))
        while True:
            with suppress(OSError):  # a manager that does not listen is no reason to stop
                manager.sendto(message, f"\0{address[1:]}" if address.startswith("@") else address)
            if not allowed:
                return
            await asyncio.sleep(0 if message == b"READY=1" else allowed / 2e6)
            message = b"WATCHDOG=1"
