"""Who the workers of a run are: those that torchrun has placed, or P − 1 others that are started here.

torch.distributed's own launcher starts all P as children, so worker 0 could not return its result to Python,
and who kills it leaves them running; so the workers of ``--workers P`` are started by `processes.start`,
which end with their starter. gloo authenticates nobody:
workers belong on one machine or in a private network.
"""

import ipaddress
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpel.backend.devices import local_device, missing, sharing
from rpel.config.spec import Spec, to_toml
from rpel.processes import start
from rpel.simulation.communicator import ALONE, Communicator, Group, LostError

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
Processes = list["subprocess.Popen[bytes]"]


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
        children.append(
            start(["run", str(file)], folder / "stdout", folder / "stderr", spec.threads or 1, more=more)
        )
    return children


def _last(child: "subprocess.Popen[bytes]") -> str:
    """The status of a worker that ended and the last line it said."""
    arguments: Any = child.args
    said = Path(arguments[-1]).with_name("stderr").read_text("utf-8", "replace").split("\n")
    return f"status {child.returncode} {next((line for line in reversed(said) if line), '')}".strip()


def _end(child: "subprocess.Popen[bytes]") -> None:
    """It leaves when it is told to, or when its connections are gone."""
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
