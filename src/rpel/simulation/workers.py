"""What the processes that share one simulation say to each other: nothing (alone), or by torch.distributed.

Every worker holds a shard of the honest nodes as its cohort and runs the same program on it; here is all that
they say to each other. One process is alone, to which all of this is nothing.

Invariants:
- shards are whole units of local work, counted from row 0, and each victim is aggregated whole by one worker;
- a sum over nodes goes through the workers in the order of rows,
  so its bits do not depend on how many there are;
- what one worker refuses, all refuse, with the same sentence;
- arrays and words go separate ways: arrays, NumPy's or torch's, from memory to memory as bytes, by sends,
  receives and broadcasts that every backend of torch.distributed has; words (flags, sentences) by gloo. NCCL
  takes the arrays of CUDA devices where it can; gloo moves main memory alone, so what lies on a device goes
  through buffers there, which :meth:`Group.staged` makes.
"""

import ipaddress
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend.devices import local_device, missing, sharing
from rpel.processes import Child, start
from rpel.runs.certificate import versions
from rpel.spec import Spec, to_toml

log = logging.getLogger("rpel")
_PIECES = 8  # a sum goes through the workers in so many pieces, so that all of them add at the same time
# a shard is sent in so many pieces, each while the next is computed, if they have so many units of work:
_SENT = 4
_WORTH = 16

T = TypeVar("T")
Shards = list[slice]
"""The rows of every worker."""


class LostError(ValueError):
    """A worker is gone; the same command goes on from the last checkpoint."""


class Alone:
    """One process that has all nodes.

    ``here`` workers are on this machine; ``received`` counts the bytes of arrays that came from others.
    """

    rank, size, here, received = 0, 1, 1, 0

    @property
    def local_rank(self) -> int:
        """This worker's number among those on this machine, for who has a device of its own."""
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def shards(self, rows: int, unit: int) -> Shards:
        """Contiguous, whole units but for the last, as equal as that allows.

        >>> Alone().shards(10, unit=2)
        [slice(0, 10, None)]
        """
        return divided(rows, unit, self.size)

    def pieces(self, shards: Shards, unit: int) -> list[Shards]:
        """Every shard cut into whole units, to be sent one piece after the other."""
        return [list(shards)]

    # --- rows ---

    @contextmanager
    def gathering(self, array: NDArray[Any], pieces: list[Shards]) -> Iterator[Callable[[slice], None]]:
        """Everybody's rows of a contiguous array to everybody, each sent once and straight to its place.

        pieces: the rows of every worker, cut. Inside, one tells of each own piece that is there; it is sent
        while the next is made.
        """
        yield lambda piece: None

    def collect(self, array: NDArray[Any], shards: Shards) -> None:
        """Everybody's rows to worker 0."""

    def rows(self, mine: Any, shards: Shards) -> Any:
        """This worker's rows, an array or a tensor, joined by those of all others: (h, …)."""
        return mine

    # --- sums ---

    def add(self, total: NDArray[np.float64], add: Callable[[slice], None]) -> None:
        """Add every worker's rows to total (d,), in the order of workers; add(columns)
        adds this worker's there.

        The last worker has the result.
        """
        add(slice(0, len(total)))

    def tell_last(self, array: NDArray[Any]) -> None:
        """The last worker's array, to all."""

    # --- words ---

    def any(self, said: bool) -> bool:
        """Whether any worker says so."""
        return said

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What every worker finds. Where one refuses, all do:
        ValueError with the sentence of the first that did."""
        return [work()]

    def first(self, work: Callable[[], Any]) -> Any:
        """What worker 0 finds, on every worker; also its refusal."""
        return self.each(work if self.rank == 0 else lambda: None)[0]

    def together(self, work: Callable[[], T]) -> T:
        """What this worker finds, when no worker has refused."""
        found: list[T] = []
        self.each(lambda: found.append(work()))
        return found[0]

    def agree(self, name: str) -> None:
        """ValueError if a worker would run something else than worker 0, or with other versions."""


ALONE = Alone()
Communicator = Alone
"""What a simulation is given: all that a group does, one process does for itself."""


class Group(Alone):
    """The workers of torch.distributed's group, as one of them sees it."""

    def __init__(self, rank: int = 0, size: int = 1, here: int = 1) -> None:
        self.rank, self.size, self.here, self.received = rank, size, here, 0

    def pieces(self, shards: Shards, unit: int) -> list[Shards]:
        """Every shard cut into whole units, to be sent one piece after the other.

        >>> Group(size=2).pieces([slice(0, 64), slice(64, 100)], unit=2)
        [[slice(0, 32, None), slice(32, 64, None)], [slice(64, 100, None)]]
        """
        return [_cut(shard, unit) for shard in shards]

    @contextmanager
    def gathering(self, array: NDArray[Any], pieces: list[Shards]) -> Iterator[Callable[[slice], None]]:
        """Everybody's rows to everybody.

        Receiving is asked for first: gloo is half as fast where data come before anybody waits for them. A
        backend that runs what it is asked in order (NCCL) would wait for ever,
        so there a piece's receives go with its sends.
        """
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        coming = [[(rank, _bytes(array[piece])) for piece in pieces[rank]] for rank in others]
        ahead = not by_nccl(_bytes(array))
        moving = self._moved([], [one for each in coming for one in each]) if ahead else []
        taken = 0

        def ready(piece: slice) -> None:
            nonlocal taken
            now = [] if ahead else [each[taken] for each in coming if taken < len(each)]
            taken += 1
            part = self._leaving(array[piece])
            moving.extend(self._moved([(rank, part) for rank in others], now))

        yield ready
        if not ahead:
            moving.extend(self._moved([], [one for each in coming for one in each[taken:]]))
        for one in moving:
            one.wait()

    def staged(self, part: Tensor) -> Tensor:
        """A buffer that torch.distributed moves for these bytes: themselves, or main memory for those of a
        device without NCCL, pinned where that makes copies faster."""
        if reachable(part):
            return part
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)

    def _leaving(self, array: "NDArray[Any] | Tensor") -> Tensor:
        """The bytes of an array where they can be sent from."""
        part = _bytes(array)
        buffer = self.staged(part)
        return part if buffer is part else buffer.copy_(part)

    def _moved(self, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> list[Any]:
        """Sends to and receives from these workers, begun at once; empty ones are left out on both sides."""
        places = [(rank, part, self.staged(part)) for rank, part in into if part.numel()]
        asked = [dist.P2POp(dist.irecv, buffer, rank) for rank, _, buffer in places]
        asked += [dist.P2POp(dist.isend, part, rank) for rank, part in out if part.numel()]
        self.received += sum(part.numel() for _, part in into)
        moving: list[Any] = dist.batch_isend_irecv(asked) if asked else []
        if all(part is buffer for _, part, buffer in places):
            return moving
        # by gloo, where each receive and each send is waited for by itself, in this order
        landing = [
            _Landing(one, part, buffer) for one, (_, part, buffer) in zip(moving, places, strict=False)
        ]
        return [*landing, *moving[len(landing) :]]

    def collect(self, array: NDArray[Any], shards: Shards) -> None:
        """Everybody's rows to worker 0."""
        if self.rank:
            moving = self._moved([(0, self._leaving(array[shards[self.rank]]))], [])
        else:
            parts = [(rank, _bytes(array[shard])) for rank, shard in enumerate(shards)]
            moving = self._moved([], parts[1:])
        for one in moving:
            one.wait()

    def rows(self, mine: Any, shards: Shards) -> Any:
        """This worker's rows, joined by those of all others: (h, …)."""
        shape = (shards[-1].stop, *mine.shape[1:])
        whole: Any = mine.new_empty(shape) if isinstance(mine, Tensor) else np.empty(shape, mine.dtype)
        whole[shards[self.rank]] = mine
        with self.gathering(whole, [[shard] for shard in shards]) as ready:
            ready(shards[self.rank])
        return whole

    def add(self, total: NDArray[np.float64], add: Callable[[slice], None]) -> None:
        """Columns go from worker to worker in pieces: while one adds the next piece,
        the next one adds this piece."""
        edges, sent = [len(total) * p // _PIECES for p in range(_PIECES + 1)], list[Any]()
        for left, right in pairwise(edges):
            if left == right:
                continue
            piece = _bytes(total[left:right])
            if self.rank:
                for one in self._moved([], [(self.rank - 1, piece)]):
                    one.wait()
            add(slice(left, right))
            if self.rank < self.size - 1:
                sent += self._moved([(self.rank + 1, self._leaving(total[left:right]))], [])
        for one in sent:
            one.wait()

    def tell_last(self, array: NDArray[Any]) -> None:
        """The last worker's array, to all."""
        last, part = self.size - 1, _bytes(array)
        buffer = self._leaving(array) if self.rank == last else self.staged(part)
        dist.broadcast(buffer, src=last)
        if self.rank != last:
            self.received += array.nbytes
            part.copy_(buffer)

    def any(self, said: bool) -> bool:
        """Whether any worker says so."""
        word = torch.tensor([int(said)])
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return bool(word.item())

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What every worker finds, or the refusal of the first that refuses."""
        found, refused = None, None
        try:
            found = work()
        except (ValueError, OSError) as error:
            refused = error
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, (found, None if refused is None else str(refused), platform.node()))
        for rank, (_, sentence, host) in enumerate(everybody):
            if sentence is not None:
                where = f"worker {rank} on {host}: " if rank else ""
                raise ValueError(where + sentence) from refused
        return [thing for thing, _, _ in everybody]

    def agree(self, name: str) -> None:
        """ValueError if a worker would run something else than worker 0, or with other versions."""
        found = self.each(lambda: (name, versions(), _processor(), platform.node()))
        first, ours, processor, _ = found[0]
        for rank, (other, theirs, its, host) in enumerate(found):
            if theirs != ours:
                key = next(key for key in theirs if key != "code" and theirs[key] != ours[key])
                raise ValueError(
                    f"worker {rank} on {host} has {key} {theirs[key]} and worker 0 has {ours[key]}: "
                    "install the same everywhere"
                )
            if other != first:
                raise ValueError(
                    f"worker {rank} on {host} would run {other} and worker 0 {first}: "
                    "give all of them the same specification and the same data"
                )
            if its != processor and self.rank == 0:
                log.warning("worker %d has another processor (%s): the last bits may differ", rank, its)


def divided(rows: int, unit: int, size: int) -> Shards:
    """Rows shared out among so many workers: contiguous, whole units but for the last,
    as equal as that allows.

    >>> divided(10, unit=2, size=3)
    [slice(0, 2, None), slice(2, 6, None), slice(6, 10, None)]
    """
    units = -(-rows // unit)
    ends = [min(rows, units * r // size * unit) for r in range(size + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _cut(shard: slice, unit: int) -> Shards:
    units = -(-(shard.stop - shard.start) // unit)
    count = max(1, min(_SENT, units // _WORTH))
    edges = [min(shard.stop, shard.start + units * p // count * unit) for p in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


class _Landing:
    """What is received in main memory, and goes on to its place on a device once it is there."""

    def __init__(self, moving: Any, part: Tensor, buffer: Tensor) -> None:
        self.moving, self.part, self.buffer = moving, part, buffer

    def wait(self) -> None:
        self.moving.wait()
        self.part.copy_(self.buffer)


def by_nccl(part: Tensor) -> bool:
    """Whether NCCL moves this memory."""
    return part.is_cuda and "nccl" in dist.get_backend_config()


def reachable(part: Tensor) -> bool:
    """Whether torch.distributed moves this memory where it is."""
    return part.device.type == "cpu" or by_nccl(part)


def _bytes(array: "NDArray[Any] | Tensor") -> Tensor:
    """The same memory, as bytes, wherever it is; the array is contiguous."""
    if isinstance(array, Tensor):
        return array.reshape(-1).view(torch.uint8)
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# --- who they are ------------------------------------------------------------------------------------------

_STORE = "RPEL_WORKERS"
"""In a worker that :func:`joined` started: the file by which the workers find each other, how many,
which one."""
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and whoever does as it does, tells a worker."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where gloo listens."""
_JOINING, _PATIENCE = timedelta(seconds=90), timedelta(minutes=30)
"""How long to wait for a worker to come, and for one that came to finish what all wait for."""
_GRACE = 30.0
NCCL = "cpu:gloo,cuda:nccl"

_stores: Any = dist
"""Documented there, and not marked as exported."""
Processes = list[Child]


def placed() -> bool:
    """Return whether torchrun or another worker has started this process as a worker."""
    return _STORE in os.environ or all(key in os.environ for key in _ENVIRONMENT)


@contextmanager
def joined(spec: Spec) -> Iterator[Communicator]:
    """The group of this run's workers: the one this process was placed in, or P − 1 others started here."""
    if not placed() and spec.workers == 1:
        yield ALONE
        return
    _check_number(spec)
    with tempfile.TemporaryDirectory(prefix="rpel-workers-") as place, _restored(_INTERFACE):
        children: Processes = []
        try:
            store, rank, size = _meeting(Path(place), spec, children)
            _await_all(store, rank, size, children)
            here = _here(size if isinstance(store, _stores.FileStore) else 1)
            moved_by = _agreed(store, rank, size, carrier(spec.device, here))
            # gloo has been seen to lose a connection while it is made: not for long, then
            with _watched(children):
                dist.init_process_group(moved_by, store=store, rank=rank, world_size=size, timeout=_JOINING)
                world = dist.group.WORLD
                assert world is not None
                world.set_timeout(_PATIENCE)
                workers = Group(rank, size, here)
                if moved_by == NCCL:  # its first call has to be one that all take part in
                    dist.all_reduce(torch.zeros(1, device=local_device(spec.device, workers.local_rank)))
                yield workers
        except BaseException:
            for child in children:
                child.terminate()
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for child in children:
                _end(child)


def carrier(device: str, here: int) -> str:
    """What could move the arrays of ``here`` workers on this machine: NCCL, if each has a CUDA device of its
    own, beside gloo; else gloo alone, through main memory (`Group.staged`).

    >>> carrier("cpu", here=2), carrier("mps", here=1)
    ('gloo', 'gloo')
    """
    cuda = device.startswith("cuda") and missing(device) is None and dist.is_nccl_available()
    return NCCL if cuda and sharing(device, here) == 1 else "gloo"


def _agreed(store: Any, rank: int, size: int, wish: str) -> str:
    """The carrier that every worker can take: NCCL needs all of them."""
    store.set(f"carrier/{rank}", wish)
    return wish if all(store.get(f"carrier/{other}").decode() == wish for other in range(size)) else "gloo"


def _check_number(spec: Spec) -> None:
    """ValueError if there are more workers to start than nodes to share out."""
    honest = spec.nodes - spec.byzantine
    if not placed() and spec.workers > honest:
        raise ValueError(
            f"workers {spec.workers} are more than the {honest} honest nodes: the nearest is {honest}"
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


def _here(otherwise: int) -> int:
    """Return how many of the workers are on this machine, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", otherwise))


# --- where they meet ----------------------------------------------------------------------------------------


def _meeting(place: Path, spec: Spec, children: Processes) -> tuple[Any, int, int]:
    """Where the workers find each other, which one this is, and how many there are."""
    if _STORE in os.environ:
        name, size, rank = os.environ[_STORE].rsplit(",", 2)
        _use_interface("127.0.0.1")
        return _stores.FileStore(name, int(size)), int(rank), int(size)
    if all(key in os.environ for key in _ENVIRONMENT):
        return _at_address(*(os.environ[key] for key in _ENVIRONMENT))
    _use_interface("127.0.0.1")
    children.extend(_started(spec, place))
    return _stores.FileStore(str(place / "store"), spec.workers), 0, spec.workers


def _at_address(rank: str, size: str, address: str, port: str) -> tuple[Any, int, int]:
    """As torchrun and its like place workers: the first one, or the agent that started them,
    keeps the store."""
    _use_interface(address)
    keeps = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # a worker waits for the others below, with a sentence of its own
        store = _stores.TCPStore(
            address, int(port), int(size), keeps, timeout=_JOINING, wait_for_workers=False
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"the meeting place of the workers, {address}:{port}, cannot be reached: {_line(error)}"
        ) from error
    # torchrun keeps its store when it starts the workers again, with the addresses of those that are gone.
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
    if _INTERFACE in os.environ:
        return
    if address in ("127.0.0.1", "localhost", "::1"):
        os.environ[_INTERFACE] = "lo" if sys.platform == "linux" else "lo0"
    elif (name := _interface(address)) is not None:
        os.environ[_INTERFACE] = name


def _interface(address: str) -> str | None:
    """The interface from which an address is reached, by the routes of this machine;
    None where that is not known."""
    try:
        wanted = int(ipaddress.IPv4Address(socket.gethostbyname(address)))
        lines = Path("/proc/net/route").read_text("utf-8").splitlines()[1:]
    except (OSError, ValueError):
        return None  # not Linux, or not IPv4: gloo takes the host's own address
    found = [line.split() for line in lines]
    routes = [
        (_number(route[7]), route[0]) for route in found if wanted & _number(route[7]) == _number(route[1])
    ]
    return max(routes, default=(0, None))[1]


def _number(text: str) -> int:
    """An address as /proc/net/route writes it: hexadecimal, in the machine's order of bytes."""
    return int.from_bytes(int(text, 16).to_bytes(4, sys.byteorder), "big")


# --- workers that are started here --------------------------------------------------------------------------


def _started(spec: Spec, place: Path) -> Processes:
    """Workers 1 to P − 1, on this machine."""
    children = []
    for rank in range(1, spec.workers):
        folder = place / str(rank)
        folder.mkdir()
        file = folder / "run.toml"
        file.write_text(to_toml(spec), "utf-8")
        more = {_STORE: f"{place / 'store'},{spec.workers},{rank}"}
        children.append(start(["run", str(file)], folder / "stdout", folder / "stderr", more))
    return children


def _last(child: Child) -> str:
    """The status of a worker that ended and the last line it said."""
    return f"status {child.returncode} {child.last_lines.rpartition(chr(10))[2]}".strip()


def _end(child: Child) -> None:
    """It leaves when it is told to, or when its connections are gone."""
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
