"""The processes that share one simulation: torch.distributed with gloo carries the arrays.

Every worker holds a shard of the honest nodes as its cohort and runs the same program on it; here is all that they say
to each other. One process alone is a group of one, to which all of this is nothing.

Invariants:
- shards are whole units of local work, counted from row 0, and each victim is aggregated whole by one worker;
- a sum over nodes goes through the workers in the order of rows, so its bits do not depend on how many there are;
- what one worker refuses, all refuse, with the same sentence.

gloo authenticates nobody: workers belong on one machine or in a private network.
"""

import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from rpel.config.spec import Spec, to_toml
from rpel.processes import start
from rpel.runs.certificate import versions

log = logging.getLogger("rpel")
_STORE = "RPEL_WORKERS"
"""In a worker that :func:`joined` started: the file by which the workers find each other, how many, which one."""
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and whoever does as it does, tells a worker."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where gloo listens."""
_JOINING, _PATIENCE = timedelta(seconds=90), timedelta(minutes=30)
"""How long to wait for a worker to come, and for one that came to finish what all wait for."""
_GRACE = 30.0
_PIECES = 8  # a sum goes through the workers in so many pieces, so that all of them add at the same time
_SENT = 4  # a shard is sent in so many pieces, each while the next is computed, if they have so many units of work:
_WORTH = 16

T = TypeVar("T")
Shards = list[slice]
"""The rows of every worker."""


class LostError(ValueError):
    """A worker is gone; the same command goes on from the last checkpoint."""


class Workers:
    """The group of processes that share a simulation, as one of them sees it.

    ``here`` of them are on this machine; ``received`` counts the bytes of arrays that came from others.
    """

    def __init__(self, rank: int = 0, size: int = 1, here: int = 1) -> None:
        self.rank, self.size, self.here, self.received = rank, size, here, 0

    def shards(self, rows: int, unit: int) -> Shards:
        """Contiguous, whole units but for the last, as equal as that allows.

        >>> Workers(size=3).shards(10, unit=2)
        [slice(0, 2, None), slice(2, 6, None), slice(6, 10, None)]
        """
        units = -(-rows // unit)
        ends = [min(rows, units * r // self.size * unit) for r in range(self.size + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def pieces(self, shards: Shards, unit: int) -> list[Shards]:
        """Every shard cut into whole units, to be sent one piece after the other.

        >>> Workers(size=2).pieces([slice(0, 64), slice(64, 100)], unit=2)
        [[slice(0, 32, None), slice(32, 64, None)], [slice(64, 100, None)]]
        """
        return [_cut(shard, unit) for shard in shards] if self.size > 1 else [list(shards)]

    # --- rows ---

    @contextmanager
    def gathering(self, array: NDArray[Any], pieces: list[Shards]) -> Iterator[Callable[[slice], None]]:
        """Everybody's rows of a contiguous array to everybody, each sent once and straight to its place.

        pieces: the rows of every worker, cut. Inside, one tells of each own piece that is there; it is sent while the
        next is made. Receiving is asked for first: gloo is half as fast where data come before anybody waits for them.
        """
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        coming = [(rank, _bytes(array[piece])) for rank in others for piece in pieces[rank]]
        moving = [dist.irecv(part, src=rank) for rank, part in coming if part.numel()]

        def ready(piece: slice) -> None:
            part = _bytes(array[piece])
            moving.extend(dist.isend(part, dst=rank) for rank in others if part.numel())

        yield ready
        for one in moving:
            _wait(one)
        self.received += sum(part.numel() for _, part in coming)

    def collect(self, array: NDArray[Any], shards: Shards) -> None:
        """Everybody's rows to worker 0."""
        parts = [_bytes(array[shard]) for shard in shards]
        if self.rank:
            moving = [dist.isend(parts[self.rank], dst=0)] if parts[self.rank].numel() else []
        else:
            moving = [dist.irecv(part, src=rank) for rank, part in enumerate(parts) if rank and part.numel()]
            self.received += sum(part.numel() for part in parts[1:])
        for one in moving:
            _wait(one)

    def rows(self, mine: NDArray[Any], shards: Shards) -> NDArray[Any]:
        """This worker's rows, joined by those of all others: (h, …)."""
        whole = np.empty((shards[-1].stop, *mine.shape[1:]), mine.dtype)
        whole[shards[self.rank]] = mine
        with self.gathering(whole, [[shard] for shard in shards]) as ready:
            ready(shards[self.rank])
        return whole

    # --- sums ---

    def add(self, total: NDArray[np.float64], add: Callable[[slice], None]) -> None:
        """Add every worker's rows to total (d,), in the order of workers; add(columns) adds this worker's there.

        The last worker has the result.
        Columns go from worker to worker in pieces: while one adds the next piece, the next one adds this piece.
        """
        edges = [len(total) * p // _PIECES for p in range(_PIECES + 1)] if self.size > 1 else [0, len(total)]
        sent = []
        for left, right in pairwise(edges):
            piece = _bytes(total[left:right])
            if not piece.numel():
                continue
            if self.rank:
                dist.recv(piece, src=self.rank - 1)
                self.received += piece.numel()
            add(slice(left, right))
            if self.rank < self.size - 1:
                sent.append(dist.isend(piece, dst=self.rank + 1))
        for one in sent:
            _wait(one)

    def tell_last(self, array: NDArray[Any]) -> None:
        """The last worker's array, to all."""
        if self.size > 1:
            dist.broadcast(_bytes(array), src=self.size - 1)
            self.received += 0 if self.rank == self.size - 1 else array.nbytes

    # --- words ---

    def any(self, said: bool) -> bool:
        """Whether any worker says so."""
        if self.size == 1:
            return said
        word = torch.tensor([int(said)])
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return bool(word.item())

    def first(self, work: Callable[[], Any]) -> Any:
        """What worker 0 finds, on every worker; also its refusal."""
        return self.each(work if self.rank == 0 else lambda: None)[0]

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What every worker finds. Where one refuses, all do: ValueError with the sentence of the first that did."""
        found: tuple[Any, BaseException | None]
        try:
            found = work(), None
        except (ValueError, OSError) as error:
            if self.size == 1:
                raise
            found = None, error
        if self.size == 1:
            return [found[0]]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, (found[0], None if found[1] is None else str(found[1]), platform.node()))
        for rank, (_, sentence, host) in enumerate(everybody):
            if sentence is not None:
                where = f"worker {rank} on {host}: " if rank else ""
                raise ValueError(where + sentence) from found[1]
        return [thing for thing, _, _ in everybody]

    def together(self, work: Callable[[], T]) -> T:
        """What this worker finds, when no worker has refused."""
        found: list[T] = []
        self.each(lambda: found.append(work()))
        return found[0]

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


ALONE = Workers()
"""One process that has all nodes."""


def _cut(shard: slice, unit: int) -> Shards:
    units = -(-(shard.stop - shard.start) // unit)
    count = max(1, min(_SENT, units // _WORTH))
    edges = [min(shard.stop, shard.start + units * p // count * unit) for p in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def _bytes(array: NDArray[Any]) -> Tensor:
    """The same memory, as bytes; the array is contiguous."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _wait(work: Any) -> None:
    assert work is not None, "every worker belongs to the group"
    work.wait()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# --- who the workers are ---------------------------------------------------------------------------------------------


def placed() -> bool:
    """Whether this process is one worker of a group that somebody else started: torchrun, Ray, or another worker."""
    return _STORE in os.environ or dist.is_initialized() or all(key in os.environ for key in _ENVIRONMENT)


@contextmanager
def joined(spec: Spec) -> Iterator[Workers]:
    """The group of this run's workers: the one this process was placed in, or P − 1 others started here."""
    if dist.is_initialized():
        with _watched([]):
            yield Workers(dist.get_rank(), dist.get_world_size(), _here(1))
        return
    if not placed() and spec.workers == 1:
        yield ALONE
        return
    _check_number(spec)
    with tempfile.TemporaryDirectory(prefix="rpel-workers-") as place, _restored(_INTERFACE):
        children: list[subprocess.Popen[bytes]] = []
        try:
            store, rank, size = _meeting(Path(place), spec, children)
            _await_all(store, rank, size, children)
            with _watched(children):  # gloo has been seen to lose a connection while it is made: not for long, then
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_JOINING)
                _set_pg_timeout(_PATIENCE)
                yield Workers(rank, size, _here(size if isinstance(store, FileStore) else 1))
        except BaseException:
            for child in children:
                child.terminate()
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for child in children:
                _end(child)


def _check_number(spec: Spec) -> None:
    """ValueError if there are more workers to start than nodes to share out."""
    honest = spec.nodes - spec.byzantine
    if not placed() and spec.workers > honest:
        raise ValueError(f"workers {spec.workers} are more than the {honest} honest nodes: the nearest is {honest}")


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
    """How many of the workers are on this machine, as torchrun and Ray tell."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", otherwise))


def _meeting(place: Path, spec: Spec, children: "list[subprocess.Popen[bytes]]") -> tuple[Store, int, int]:
    """Where the workers find each other, which one this is, and how many there are."""
    if _STORE in os.environ:
        name, size, rank = _from(os.environ[_STORE])
        _use_interface("127.0.0.1")
        return FileStore(name, size), rank, size
    if all(key in os.environ for key in _ENVIRONMENT):
        address = os.environ["MASTER_ADDR"]
        _use_interface(address)
        try:
            store, rank, size = next(iter(rendezvous("env://", timeout=_JOINING)))
        except (RuntimeError, OSError) as error:
            where = f"{address}:{os.environ['MASTER_PORT']}"
            raise ValueError(f"the meeting place of the workers, {where}, cannot be reached: {_line(error)}") from error
        # torchrun keeps its store when it starts the workers again, with the addresses of those that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt {attempt} of {size} workers", store), int(rank), int(size)
    _use_interface("127.0.0.1")
    children.extend(_started(spec, place))
    return FileStore(str(place / "store"), spec.workers), 0, spec.workers


def _await_all(store: Store, rank: int, size: int, children: "list[subprocess.Popen[bytes]]") -> None:
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
def _watched(children: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    """What gloo raises when a worker is gone, as one sentence."""
    try:
        yield
    except RuntimeError as error:
        ended = next((child for child in children if child.poll()), None)
        why = _line(error) if ended is None else _last(ended)
        raise LostError(f"a worker was lost ({why}): the same command goes on from the last checkpoint") from error


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:120]


def _last(child: "subprocess.Popen[bytes]") -> str:
    """The status of a worker that ended and the last line it said."""
    arguments: Any = child.args
    said = Path(arguments[-1]).with_name("stderr").read_text("utf-8", "replace").split("\n")
    return f"status {child.returncode} {next((line for line in reversed(said) if line), '')}".strip()


def _use_interface(address: str) -> None:
    """Have gloo listen on the interface from which that address is reached, and on no other."""
    if _INTERFACE in os.environ:
        return
    if address in ("127.0.0.1", "localhost", "::1"):
        os.environ[_INTERFACE] = "lo" if sys.platform == "linux" else "lo0"
    elif (name := _interface(address)) is not None:
        os.environ[_INTERFACE] = name


def _interface(address: str) -> str | None:
    """The name of the interface from which an address is reached; None where that cannot be found out."""
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.connect((address, 9))  # sends nothing
            own = socket.inet_aton(one.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(one, 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
                except OSError:
                    continue  # it has no address
                if found[20:24] == own:
                    return name
    except OSError:
        return None
    return None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """It leaves when it is told to, or when its connections are gone."""
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _from(text: str) -> tuple[str, int, int]:
    name, size, rank = text.rsplit(",", 2)
    return name, int(size), int(rank)


def _started(spec: Spec, place: Path) -> "list[subprocess.Popen[bytes]]":
    """Workers 1 to P − 1, on this machine."""
    children = []
    for rank in range(1, spec.workers):
        folder = place / str(rank)
        folder.mkdir()
        file = folder / "run.toml"
        file.write_text(to_toml(spec), "utf-8")
        more: Mapping[str, str] = {_STORE: f"{place / 'store'},{spec.workers},{rank}"}
        children.append(start(["run", str(file)], folder / "stdout", folder / "stderr", spec.threads or 1, more=more))
    return children
