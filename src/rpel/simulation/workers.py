"""Several processes that share a run: one drives, and the others do what it says.

Every worker has the engine of its shard (`rpel.simulation.engine`). The loop runs in worker 0 alone, on a
:class:`SharedEngine`: it looks like an engine, says each call to the others, and takes part in it. The others
:func:`serve` until they are told to end. So nothing above knows how many workers there are, and only worker 0
touches the run folder.

Workers are started here (``workers`` of a run) or placed by torchrun and its like; those build their problem
from their own command line. What one worker refuses, all refuse, with the same sentence.
"""

import fcntl
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpel.backend.chunks import local_device, missing, sharing
from rpel.backend.threads import one_torch_thread, set_threads, threads
from rpel.errors import BudgetSpentError
from rpel.processes import Child, ChildError, Children, Stop
from rpel.record import parse_seeds
from rpel.runs.certificate import versions
from rpel.runs.folder import is_by_row
from rpel.simulation.communicator import ALONE, Group
from rpel.simulation.engine import Engine
from rpel.simulation.inputs import Gathered, Inputs, available, gather, loader, run_hash
from rpel.simulation.methods import Resolved, resolve
from rpel.spec import Request

_STORE = "RPEL_WORKERS"
"""In a worker that another one started: the file by which they find each other, how many, which one."""
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and whoever does as it does, tells a worker."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where gloo listens."""
_JOINING, _PATIENCE = timedelta(seconds=90), timedelta(minutes=30)
"""How long to wait for a worker to come, and for one that came to finish what all wait for."""
_SIOCGIFADDR = 0x8915
NCCL = "cpu:gloo,cuda:nccl"
END = "end"
CALLS = {"step", "measure", "evaluate", "models", "local_states"}
"""Methods of an engine that its workers call together; arrays and load are below."""

_stores: Any = dist
"""Documented there, and not marked as exported."""
Processes = list[Child]


class LostError(ValueError):
    """A worker is gone; the same command continues from the last checkpoint."""


# --- the engine of all workers ------------------------------------------------------------------------------


class SharedEngine:
    """The engines of all workers as one; in worker 0."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.own: Any = None
        self.busy = False
        """Whether a call was begun and has not ended: the others cannot be told anything then."""

    @contextmanager
    def built(self, run: Resolved, inputs: Gathered) -> Iterator[Any]:
        """This engine, for a run that all workers have built."""
        self.say("build", run.spec.seed)
        with _built(self.group, run.spec, run, inputs) as self.own:
            self.busy = False
            yield self

    def say(self, name: str, *arguments: Any) -> None:
        """Say to all others what to do next."""
        self.busy = True
        self.group.told((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of every engine; the result of this one."""
        self.say(name, *arguments)
        try:
            result = getattr(self.own, name)(*arguments)
        except BudgetSpentError:  # raised by all alike
            self.busy = False
            raise
        self.busy = False
        return result

    def __getattr__(self, name: str) -> Any:
        """Return a method that all workers have to call, or a value that is the same on all of them.

        Such values are honest, messages, bytes, budget and so on.
        """
        return partial(self.call, name) if name in CALLS else getattr(self.own, name)

    def arrays(self) -> dict[str, Any]:
        return {key: Collected(self, key) for key in self.own.keys}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.say("load", {key: array for key, array in arrays.items() if not is_by_row(key)})
        self.own.load(arrays)
        self.busy = False


class Collected:
    """One of the arrays of all workers, fetched when it is written: not all of them at a time."""

    def __init__(self, engine: SharedEngine, key: str) -> None:
        self.engine, self.key = engine, key

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole: NDArray[Any] = self.engine.call("array", self.key)
        return whole


def serve(group: Group, spec: Request) -> int:
    """Do what worker 0 says, until it says that this is the end; the exit status it wishes.

    spec: of this worker's own command line, the run being one of its seeds.
    """
    engine: Any = None
    with ExitStack() as stack, Stop():  # a signal is for worker 0, which saves first
        while True:
            name, arguments = group.told()
            if name == END:
                return int(arguments[0])
            if name == "build":
                stack.pop_all().close()
                seeds = parse_seeds(spec.seeds) or [spec.seed]
                seed = arguments[0] if arguments[0] in seeds else seeds[0]  # another run: all will refuse
                engine = stack.enter_context(_built(group, spec.replace(seed=seed, seeds=None)))
                continue
            try:
                getattr(engine, name)(*arguments)
            except BudgetSpentError:
                continue  # worker 0 knows, too


@contextmanager
def _built(
    group: Group, spec: Request, run: Resolved | None = None, inputs: Gathered | None = None
) -> Iterator[Engine]:
    """This worker's engine, if all workers can build theirs and would run the same.

    Inside, its share of this machine's threads are used.
    """
    made: list[tuple[Resolved, Gathered]] = []

    def prepare() -> tuple[Any, ...]:
        load = loader()
        resolved = run or resolve(available(spec, load))
        made.append((resolved, inputs or gather(resolved, Inputs(), load)))
        return _identity(*made[0])

    _check_equal(group.each(prepare))
    (run, inputs), engines = made[0], list[Engine]()
    with ExitStack() as stack:
        stack.enter_context(pinned(run.spec.threads or max(1, threads() // group.here)))
        if run.spec.backend == "torch":
            stack.enter_context(one_torch_thread())  # its threads would spin beside ours
        group.each(lambda: engines.append(Engine.of(run, inputs, group)))
        yield engines[0]


def _identity(run: Resolved, inputs: Gathered) -> tuple[Any, ...]:
    """What has to be equal on all workers, and where this one is."""
    name = f"{run.spec.name}-{run_hash(run.spec, inputs)}"
    return name, versions(), platform.node()


def _check_equal(found: list[Any]) -> None:
    """ValueError if a worker would run something else than worker 0, or with other versions."""
    first, ours, _ = found[0]
    for rank, (name, theirs, host) in enumerate(found):
        if theirs != ours:
            key = next(key for key in theirs if key != "code" and theirs[key] != ours[key])
            raise ValueError(
                f"worker {rank} on {host} has {key} {theirs[key]} and worker 0 has {ours[key]}: "
                "install the same everywhere"
            )
        if name != first:
            raise ValueError(
                f"worker {rank} on {host} would run {name} and worker 0 {first}: "
                "give all of them the same specification and the same data"
            )


@contextmanager
def pinned(count: int | None) -> Iterator[int]:
    """Run kernels and torch on this number of threads (None: leave it as it is); yield the number."""
    before, torch_before = threads(), torch.get_num_threads()
    wanted = before if count is None else count
    set_threads(wanted)
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        set_threads(before)
        torch.set_num_threads(torch_before)


# --- who they are -------------------------------------------------------------------------------------------


class Workers:
    """The workers of a command: a context manager, in which runs get their engines.

    In a process that was placed as another worker than 0, entering it serves worker 0 and then ends the
    process. Others are started when the first run asks for its engine.
    """

    def __init__(self, spec: Request) -> None:
        self.spec, self.stack = spec, ExitStack()
        self.shared: SharedEngine | None = None

    def __enter__(self) -> "Workers":
        if placed():
            self._join()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)

    def _join(self) -> None:
        group = self.stack.enter_context(joined(self.spec))
        if group.rank:
            with self.stack:  # leave the group before the process ends
                try:
                    status = serve(group, self.spec)
                except ValueError:  # worker 0 says it
                    status = 2
            raise SystemExit(status)
        self.shared = SharedEngine(group)
        self.stack.push(self._end)

    def _end(self, kind: Any, error: Any, trace: Any) -> None:
        """Tell the others that it is over, if they are listening."""
        if self.shared is not None and not self.shared.busy:
            status = 0 if error is None else 130 if isinstance(error, KeyboardInterrupt) else 2
            self.shared.say(END, status)

    @contextmanager
    def engine(self, run: Resolved, inputs: Gathered) -> Iterator[Engine]:
        """The engine of a run, on all workers."""
        if self.shared is None and self.spec.workers > 1:
            self._join()
        shared = self.shared
        if shared is None:
            with _built(ALONE, self.spec, run, inputs) as engine:
                yield engine
            return
        with shared.built(run, inputs) as engine:
            yield engine


def placed() -> bool:
    """Return whether torchrun or another worker has started this process as a worker."""
    return _STORE in os.environ or all(key in os.environ for key in _ENVIRONMENT)


@contextmanager
def joined(spec: Request) -> Iterator[Group]:
    """The group of this run's workers: the one this process was placed in, or P − 1 others started here."""
    _check_number(spec)
    with (
        tempfile.TemporaryDirectory(prefix="rpel-workers-") as place,
        _restored(_INTERFACE),
        Children(Stop()) as children,
    ):
        store, rank, size = _meeting(Path(place), spec, children)
        _await_all(store, rank, size, children.all)
        alone = isinstance(store, _stores.FileStore)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size if alone else 1))
        moved_by = _agreed(store, rank, size, carrier(spec.device, here))
        try:
            # gloo has been seen to lose a connection while it is made: not for long, then
            with _watched(children.all):
                dist.init_process_group(moved_by, store=store, rank=rank, world_size=size, timeout=_JOINING)
                world = dist.group.WORLD
                assert world is not None
                world.set_timeout(_PATIENCE)
                group = Group(rank, size, here)
                if moved_by == NCCL:  # its first call has to be one that all take part in
                    dist.all_reduce(torch.zeros(1, device=local_device(spec.device, group.local_rank)))
                yield group
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def carrier(device: str, here: int) -> str:
    """Choose what moves the arrays of ``here`` workers on this machine.

    NCCL and gloo if each has a CUDA device of its own; else gloo alone, through main memory (`Group.staged`).

    >>> carrier("cpu", here=2), carrier("mps", here=1)
    ('gloo', 'gloo')
    """
    cuda = device.startswith("cuda") and missing(device) is None and dist.is_nccl_available()
    return NCCL if cuda and sharing(device, here) == 1 else "gloo"


def _agreed(store: Any, rank: int, size: int, wish: str) -> str:
    """The carrier that every worker can take: NCCL needs all of them."""
    store.set(f"carrier/{rank}", wish)
    return wish if all(store.get(f"carrier/{other}").decode() == wish for other in range(size)) else "gloo"


def _check_number(spec: Request) -> None:
    """ValueError if there are more workers to start than nodes to share out."""
    honest = spec.nodes - spec.hostile_count
    if not placed() and spec.workers > honest:
        raise ValueError(
            f"workers {spec.workers} are more than the {honest} honest nodes: use at most {honest}"
        )


@contextmanager
def _restored(key: str) -> Iterator[None]:
    """Afterwards the environment has what it had under that key: the next group may meet elsewhere."""
    before = os.environ.get(key)
    try:
        yield
    finally:
        os.environ.pop(key, None)
        if before is not None:
            os.environ[key] = before


# --- where they meet ----------------------------------------------------------------------------------------


def _meeting(place: Path, spec: Request, children: Children) -> tuple[Any, int, int]:
    """Return the workers' common store, the number of this worker, and how many there are."""
    if _STORE in os.environ:
        name, size, rank = os.environ[_STORE].rsplit(",", 2)
        _use_interface("127.0.0.1")
        return _stores.FileStore(name, int(size)), int(rank), int(size)
    if all(key in os.environ for key in _ENVIRONMENT):
        return _at_address(*(os.environ[key] for key in _ENVIRONMENT))
    _use_interface("127.0.0.1")
    for number in range(1, spec.workers):
        folder = place / str(number)
        folder.mkdir()
        where = f"{place / 'store'},{spec.workers},{number}"
        try:
            children.call(f"worker {number}", _serve, spec, where, folder=folder)
        except ChildError as error:
            raise LostError(str(error)) from error
    return _stores.FileStore(str(place / "store"), spec.workers), 0, spec.workers


def _serve(spec: Request, where: str) -> None:
    """Run in a worker that is started here."""
    os.environ[_STORE] = where
    with Workers(spec):
        raise AssertionError("a worker ends before")


def _at_address(rank: str, size: str, address: str, port: str) -> tuple[Any, int, int]:
    """Connect workers as torchrun and similar launchers place them.

    The first worker, or the agent that started them, keeps the store.
    """
    _use_interface(address)
    keeps = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # _await_all waits for the other workers and has better error messages
        store = _stores.TCPStore(
            address, int(port), int(size), keeps, timeout=_JOINING, wait_for_workers=False
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"the workers' rendezvous at {address}:{port} cannot be reached: {_line(error)}"
        ) from error
    # When torchrun restarts the workers it keeps its store, with the addresses of the old ones.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _stores.PrefixStore(f"attempt {attempt} of {size} workers", store), int(rank), int(size)


def _await_all(store: Any, rank: int, size: int, children: Processes) -> None:
    """ValueError if a worker has not come in time, or has died before."""
    store.set(f"here/{rank}", platform.node())
    until = time.monotonic() + _JOINING.total_seconds()
    for other in range(size):
        while not store.check([f"here/{other}"]):
            for number, child in enumerate(children, 1):
                if child.poll() is not None:
                    raise LostError(f"worker {number} ended before it had joined the others: {_last(child)}")
            if time.monotonic() > until:
                seconds = _JOINING.total_seconds()
                raise LostError(f"worker {other} of {size} has not come within {seconds:.0f} seconds")
            time.sleep(0.02)


@contextmanager
def _watched(children: Processes) -> Iterator[None]:
    """What gloo raises when a worker is gone, as one sentence."""
    try:
        yield
    except RuntimeError as error:
        ended = next((child for child in children if child.poll()), None)
        why = _line(error) if ended is None else _last(ended)
        raise LostError(
            f"a worker was lost ({why}): the same command goes on from the last checkpoint"
        ) from error


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120]


# --- where gloo listens -------------------------------------------------------------------------------------


def _use_interface(address: str) -> None:
    """Have gloo listen on the interface from which that address is reached, and on no other."""
    if _INTERFACE not in os.environ and (name := _interface(address)) is not None:
        os.environ[_INTERFACE] = name


def _interface(address: str) -> str | None:
    """The interface whose own address reaches this one; None where that is not known."""
    if sys.platform != "linux":
        return "lo0" if address == "127.0.0.1" else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # of a datagram: nothing is sent
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                if fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))[20:24] == own:
                    return name
    return None


def _last(child: Child) -> str:
    """The status of a worker that ended and the last line it said."""
    return f"status {child.returncode} {child.last_lines.rpartition(chr(10))[2]}".strip()
