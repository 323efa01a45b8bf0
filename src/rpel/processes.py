"""Child processes, and how a process is told to stop.

Children are forked by multiprocessing's forkserver, which has imported what they need and has one thread. A
child has a session of its own, so Ctrl-C in the terminal reaches the starter alone. It gets SIGTERM when its
starter has gone, however that ended.
"""

import gc
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Self

GRACE_SECONDS = 10.0
"""How long children may take to end after SIGTERM."""
POLL_SECONDS = 0.5
LAST_LINES = 8
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
COLOUR_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
RUN_MODULES = ["rpel.cli", "rpel.simulation.api", "rpel.studies.study", "array_api_compat.numpy"]
PEER_MODULES = ["rpel.cli", "rpel.peer.ops.preload"]
_context = multiprocessing.get_context("forkserver")
_lock = threading.RLock()


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off.

    Imports and compilers make a million objects that stay; searching them takes a tenth of their time.

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


# --- children -----------------------------------------------------------------------------------------------


class ChildError(Exception):
    """A child process died; one sentence, and perhaps its last lines."""


class Child:
    """A function that runs in a process of its own, with the methods of `subprocess.Popen`."""

    def __init__(self, name: str, process: Any, answer: Any, stdout: Path, stderr: Path) -> None:
        self.name, self.stdout, self.stderr = name, stdout, stderr
        self.pid: int = process.pid
        self.returncode: int | None = None
        self._process, self._answer, self._message = process, answer, None

    @property
    def output(self) -> str:
        """What it has printed to standard output."""
        return self.stdout.read_text("utf-8", "replace")

    @property
    def last_lines(self) -> str:
        """The last lines of its standard error."""
        return "\n".join(self.stderr.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])

    def poll(self) -> int | None:
        """Return the exit status, a negative signal number, or None while it runs."""
        with _lock:  # the status can be read once only, and multiprocessing also looks when a child starts
            if self._message is None and self._answer.poll():
                with suppress(EOFError):
                    self._message = self._answer.recv()
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; subprocess.TimeoutExpired if it does not come in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if end is None else end - time.monotonic()
            waited = [self._process.sentinel] if self._message else [self._process.sentinel, self._answer]
            if (left is not None and left <= 0) or not connection.wait(waited, left):
                raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return status

    def result(self) -> Any:
        """Wait, and return what the function returned; raise its exception, or ChildError if it died."""
        status = self.wait()
        if self._message is None:
            raise ChildError(f"{self.name} died with status {status}; its last lines:\n{self.last_lines}")
        value, error = self._message
        if error is not None:
            raise error
        return value

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def call(
    function: Callable[..., Any],
    *arguments: Any,
    stdout: Path,
    stderr: Path,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = RUN_MODULES,
) -> Child:
    """Call a function in a child process.

    Args:
        function: importable by its name; it, its arguments and its result are pickled.
        arguments: passed to the function.
        stdout, stderr: the files for what it prints.
        name: for messages about it; the function's name if left out.
        environment: variables for the child, beside those of this process.
        preload: the modules that children need, imported once, when the first child starts.
    """
    variables = {key: value for key, value in os.environ.items() if key not in COLOUR_VARIABLES}
    variables |= {**ONE_THREAD, **(environment or {})}
    receiver, sender = _context.Pipe(duplex=False)
    with sender, _writing(stdout) as out, _writing(stderr) as err, _lock, _hidden_main():
        _start_forkserver(preload)
        rest = arguments, sender, (out, err), variables
        process = _context.Process(target=_child, args=(function, *rest), name=name or function.__name__)
        try:
            process.start()
        except EOFError as error:
            raise ChildError(f"{process.name} was killed before it began") from error
    return Child(process.name, process, receiver, stdout, stderr)


def start(
    arguments: Sequence[str],
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
    module: str = "rpel",
) -> Child:
    """Run ``python -m rpel``, or another module, with these arguments in a child process.

    Args:
        arguments: the command line.
        stdout, stderr, environment: see :func:`call`.
        module: the module to run.
    """
    preload = PEER_MODULES if arguments and arguments[0] in ("peer", "network") else RUN_MODULES
    return call(
        _run_module, module, [*arguments], stdout=stdout, stderr=stderr, environment=environment,
        name=" ".join([module, *arguments]), preload=preload,
    )  # fmt: skip


def _run_module(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _writing(file: Path) -> connection.Connection:
    """Open a file for writing, as an object that multiprocessing passes to a child."""
    return connection.Connection(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), readable=False)


def _start_forkserver(preload: Sequence[str]) -> None:
    """Start the forkserver, unless it runs; libraries read the number of threads when they are loaded."""
    before = {key: os.environ.get(key) for key in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    _context.set_forkserver_preload([*preload] if sys.platform == "linux" else [])
    forkserver.ensure_running()
    for key, value in before.items():
        os.environ.pop(key)
        if value is not None:
            os.environ[key] = value


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a child from importing the script of its starter, which would run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _child(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    sender: connection.Connection,
    output: tuple[connection.Connection, connection.Connection],
    environment: dict[str, str],
) -> None:
    """Run in the child: leave the starter's session, redirect output, call the function."""
    os.setsid()
    for target, file in enumerate(output, start=1):
        with file:
            os.dup2(file.fileno(), target)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], daemon=True).start()
    try:
        value, error = function(*arguments), None
    except Exception as raised:
        value, error = None, raised
    sender.send((value, error))
    if error is not None:
        raise error


def _end_with(starter: Any) -> None:
    starter.join()
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_torchrun() -> None:
    """Send this process SIGTERM when torchrun, if that has started it, is gone."""
    if "TORCHELASTIC_RUN_ID" in os.environ and multiprocessing.parent_process() is None:
        threading.Thread(target=_watch_parent, args=[os.getppid()], daemon=True).start()


def _watch_parent(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


class Children:
    """A context manager that ends the processes started in it when it is left."""

    def __init__(self, stop: "Stop") -> None:
        self.all: list[Child] = []
        self.stop = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, arguments: Sequence[str], folder: Path) -> Child:
        """Run ``rpel`` with these arguments; what it prints goes to stdout and stderr in the folder."""
        return self._add(name, start(arguments, folder / "stdout", folder / "stderr"))

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, folder: Path) -> Child:
        """Call a function; what it prints goes to stdout and stderr in the folder."""
        return self._add(name, call(function, *arguments, stdout=folder / "stdout", stderr=folder / "stderr"))

    def _add(self, name: str, child: Child) -> Child:
        child.name = name
        self.all.append(child)
        return child

    def check(self) -> None:
        """Raise ChildError if a child has died, and KeyboardInterrupt if the children have to stop."""
        self.stop.check()
        for child in self.all:
            if status := child.poll():
                raise ChildError(
                    f"{child.name} died with status {status}; its last lines:\n{child.last_lines}"
                )

    def running(self) -> int:
        """Return how many have not ended yet."""
        return sum(child.poll() is None for child in self.all)

    def end(self) -> None:
        """End all that still run: SIGTERM first, SIGKILL for those left after some seconds."""
        for child in self.all:
            child.terminate()
        until = time.monotonic() + GRACE_SECONDS
        try:
            for child in self.all:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.1, until - time.monotonic()))
        finally:  # also when Ctrl-C is pressed again
            for child in self.all:
                child.kill()
                child.wait()
        self.all = []


# --- stopping -----------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


class Stop:
    """The one way to be told to stop.

    Inside, the first Ctrl-C or SIGTERM sets ``asked``; the next one interrupts. Work in steps looks at
    ``asked`` between them. One token serves a whole command: it is passed down, and entering it again changes
    nothing. Outside the main thread signals are left alone.

    >>> with Stop("after this round") as stop, stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.asked
    True
    """

    def __init__(self, when: str = "", at_once: bool = False) -> None:
        """Say ``when`` at the first signal; at_once: the first signal interrupts, for work without steps."""
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

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a signal interrupts at once, also one that has come before."""
        self.check()
        before, self.at_once = self.at_once, True
        try:
            yield
        finally:
            self.at_once = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was asked for."""
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


# --- memory -------------------------------------------------------------------------------------------------


def free_memory() -> int | None:
    """Return the bytes that processes of this machine or container may still take; None if unknown.

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
