"""Tell the service manager that the peer is ready, and that its network's thread is alive."""

import asyncio
import os
import socket
from contextlib import suppress


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
