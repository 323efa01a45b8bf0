"""Run as a script: a process that has imported rpel and its compiled kernels, and forks peers on request.

A peer of its own making would import for five seconds before its first line; a fork begins at once. What is
forked is a real process with its own number, memory, sockets and files, running what ``rpel peer run`` runs.

Over the socket whose descriptor is the only argument come requests (JSON, with the descriptors for standard
output and error); back go {"born": pid} and, when one ends, {"ended": pid, "status": code}, minus the
signal's number if it was killed. When the socket closes, because whoever asked has gone,
everything that was forked is killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    _warm()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asked; then the socket closes
    alive: set[int] = set()
    link.send(b'{"ready": true}')
    while True:
        ready, _, _ = select.select([link.fileno(), awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _reap(alive, link)
        if link.fileno() in ready and not _serve(alive, link, (awake, wake)):
            break
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _warm() -> None:
    """Everything that a peer imports and compiles."""
    import numpy as np

    import rpel.cli
    import rpel.peer.api
    import rpel.peer.ops.join
    from rpel.peer.core.protocol import make_ready

    for dtype in (np.float32, np.float64):
        make_ready(rpel.rule("nnm+trimmed_mean", f=2), pull=9, d=64, dtype=dtype)


def _serve(alive: set[int], link: socket.socket, ours: tuple[int, int]) -> bool:
    """One request; False when there will be none."""
    message, given, _, _ = socket.recv_fds(link, 1 << 16, 2)
    if not message:
        return False
    pid = os.fork()
    if not pid:
        for descriptor in (link.fileno(), *ours):
            os.close(descriptor)
        _grow_up(json.loads(message), given)
    for descriptor in given:
        os.close(descriptor)
    alive.add(pid)
    link.send(json.dumps({"born": pid}).encode())
    return True


def _reap(alive: set[int], link: socket.socket) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        alive.discard(pid)
        with contextlib.suppress(OSError):
            link.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _grow_up(request: dict[str, Any], given: list[int]) -> None:
    """In the fork: become what was asked for, and never return."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
        for target, descriptor in enumerate(given, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.update(request["environment"])
        if request["namespace"]:
            _enter(request["namespace"])
        import rpel.cli
        from support import process_faults

        process_faults.prepare()
        rpel.cli.main(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    """From here on this process sees the network of a namespace alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter the namespace {namespace}")
    hosts = f"/etc/netns/{namespace}/hosts"
    if os.path.exists(hosts):  # as `ip netns exec` does it
        libc.unshare(CLONE_NEWNS)
        subprocess.run(["mount", "--make-rslave", "/"], check=True)
        subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


if __name__ == "__main__":
    main()
