"""Processes that start others, and how any of them is told to stop.

Invariants:
- what is started here does not outlive its starter, whichever way that one ends: SIGKILL leaves it no time to
  tell, so the started one looks;
- on Linux what is heavy is imported once: a process that has done so, the nursery, forks one child for each
  start. It has a single thread when it forks; there is one for each environment (numbers of threads are read
  when libraries are loaded), and whatever a child does, what it inherits is as if it had imported it itself.
  Elsewhere, or where forking fails, children are started the slow way.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: imports and compilers make a million objects that stay, and each search
    through them is in vain. It takes a tenth of their time.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def start(
    arguments: Sequence[str],
    stdout: Path,
    stderr: Path,
    threads: int = 1,
    more: Mapping[str, str] | None = None,
    module: str = "rpel",
) -> "subprocess.Popen[bytes]":
    """Run ``rpel``, or another module, with these arguments on so many threads;
    what it prints goes to the two files.

    more: variables for its environment. Colours are for terminals, so nothing asks it for them.

    It has a session of its own: Ctrl-C in the terminal reaches the starter, which passes it on, once.
    """
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    plain = {key: value for key, value in os.environ.items() if key not in _COLOURS}
    with stdout.open("wb") as out, stderr.open("wb") as err:
        if sys.platform == "linux":
            with suppress(OSError, ValueError):
                nursery = _nursery(
                    {**plain, **limits}, _PRELOADED.get(arguments[0] if arguments else "", _SIMULATOR)
                )
                return nursery.start([*arguments], module, dict(more or {}), (out.fileno(), err.fileno()))
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**plain, **limits, **(more or {}), _STARTER: str(os.getpid())},
            start_new_session=True,
        )


def end_with_starter() -> None:
    """In a process that :func:`start` made: when its starter is gone, SIGTERM,
    so that it saves and ends as always.

    So also in a worker that torchrun started: who kills torchrun itself means its workers, too.
    """
    starter = os.environ.pop(_STARTER, None)
    if starter is None and "TORCHELASTIC_RUN_ID" in os.environ:
        starter = str(os.getppid())
    if starter is not None:
        threading.Thread(target=_look, args=(int(starter),), daemon=True).start()


def _look(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


# --- the nursery --------------------------------------------------------------------------------------------

_SIMULATOR = "rpel.cli", "rpel.simulation.run", "matplotlib.figure", "matplotlib.backends.backend_svg"
_PEER = "rpel.cli", "rpel.peer.ops.join", "rpel.peer.api", "rpel.peer.core.protocol:warm"
_PRELOADED = {"peer": _PEER, "network": _PEER, "red-team": _PEER}
"""What children that begin with this word will import, and call; all others are runs."""


class _Forked(subprocess.Popen[bytes]):
    """A child of the nursery, with the face of a child of ours."""

    def __init__(self, pid: int, arguments: list[str], nursery: "_Nursery") -> None:
        self.pid, self.args, self.returncode = pid, arguments, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._nursery = False, nursery

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid, timeout)
        return self.returncode


class _Nursery:
    """The starter's end: a socket to the process that forks. When it closes, children notice it."""

    def __init__(self, environment: Mapping[str, str], preloaded: Sequence[str]) -> None:
        self.owner = os.getpid()
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from rpel.processes import nurse; nurse()"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *preloaded, _ROOM * "-"],
                env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self._gone = dict[int, int]()
        self._lock = threading.Lock()
        atexit.register(self._end)

    def _end(self) -> None:
        """It would end by itself when the link closes; a starter that ends in order sees to it."""
        if self.alive:
            self.process.terminate()
            self.process.wait()
        self.link.close()

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def start(
        self, arguments: list[str], module: str, more: dict[str, str], files: tuple[int, int]
    ) -> _Forked:
        with self._lock:
            request = json.dumps(
                {"arguments": arguments, "module": module, "more": more, "folder": os.getcwd()}
            )
            socket.send_fds(self.link, [request.encode()], files)
            while "born" not in (told := self._hear(None)):
                continue
        return _Forked(told["born"], [sys.executable, "-m", module, *arguments], self)

    def ended(self, pid: int, timeout: float | None) -> int | None:
        """The status of a child that has ended within so many seconds;
        a lost nursery counts as SIGTERM for all."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while pid not in self._gone:
                left = None if until is None else max(0.0, until - time.monotonic())
                try:
                    heard = self._hear(left)
                except OSError:
                    return -signal.SIGTERM
                if not heard and until is not None and time.monotonic() >= until:
                    return None
            return self._gone.pop(pid)

    def _hear(self, timeout: float | None) -> dict[str, int]:
        """One message, or none in so many seconds; OSError when the nursery has gone."""
        if not select.select([self.link], [], [], timeout)[0]:
            return {}
        message = self.link.recv(1 << 12)
        if not message:
            raise ConnectionResetError("the process that starts others has gone")
        told: dict[str, int] = json.loads(message)
        if "ended" in told:
            self._gone[told["ended"]] = told["status"]
        return told


_ROOM = 2000  # bytes for a child's command line
_nurseries: dict[str, _Nursery] = {}


def _nursery(environment: Mapping[str, str], preloaded: Sequence[str]) -> _Nursery:
    """The nursery for this environment."""
    key = json.dumps([dict(sorted(environment.items())), preloaded])
    if key not in _nurseries or not _nurseries[key].alive:
        _nurseries[key] = _Nursery(environment, preloaded)
    return _nurseries[key]


def nurse() -> None:
    """Run as a process: import what the arguments name, and call what follows a colon; then fork a child for
    every request."""
    link = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for name, _, function in (argument.partition(":") for argument in sys.argv[2:-1]):
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    while True:
        ready, _, _ = select.select([link.fileno(), awake], [], [])
        if awake in ready:
            os.read(awake, 1 << 12)
            _reap(link)
        if link.fileno() in ready:
            message, files, _, _ = socket.recv_fds(link, 1 << 20, 2)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                for descriptor in (link.detach(), awake, wake):
                    os.close(descriptor)
                _grow_up(json.loads(message), files)
            for descriptor in files:
                os.close(descriptor)
            link.send(json.dumps({"born": pid}).encode())


def _reap(link: socket.socket) -> None:
    """Tell of all children that have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            link.send(json.dumps({"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}).encode())


def _show(command: list[str]) -> None:
    """Have ps show this command and not the nursery's: written over the arguments,
    whose place the kernel tells."""
    import ctypes

    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
        if start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _grow_up(request: dict[str, Any], files: list[int]) -> None:
    """In the fork: become what was asked for, and never return."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, descriptor in enumerate(files, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.update(request["more"], **{_STARTER: str(os.getppid())})
        sys.argv = [request["module"], *request["arguments"]]
        _show([sys.executable, "-m", *sys.argv])
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: somebody asked this process to leave."""


class Stop:
    """The one way to be told to stop. Inside, the first Ctrl-C or SIGTERM sets ``asked``;
    the next one interrupts.

    Whoever works in steps looks at ``asked`` between them. One token serves a whole command: it is handed
    down, and entering it again changes nothing. Outside the main thread signals are left alone.

    >>> with Stop("after this round") as stop, stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.asked
    True
    """

    def __init__(self, when: str = "", at_once: bool = False) -> None:
        """when: said once, when the first signal comes.

        at_once: the first signal interrupts, for work without steps.
        """
        self.when, self.at_once = when, at_once
        self.asked, self._depth, self._before = False, 0, dict[int, Any]()

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
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


# --- several at once ----------------------------------------------------------------------------------------


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
    """A context manager: processes started in it are ended, by their own ids, when it is left,
    whatever happens."""

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
                raise ChildError(
                    f"{child.name} died with status {status}; its last lines:\n{child.last_words()}"
                )

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


# --- memory -------------------------------------------------------------------------------------------------


def free_memory() -> int | None:
    """Bytes that processes of this machine, or of this container, may still take;
    None where that is not known.

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
