"""One program in a race of rounds: it is handed the same work as the others and takes a round when it is told
to.

The work is a folder of arrays that `rivals.py` wrote: the common initial model, what every node learns from
in every round, and whom it pulls. `rival_jax.py` runs where rpel is not installed,
so nothing but NumPy is imported here.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BETA, DECAY, Z = 0.9, 1e-4, 1.5  # momentum, weight decay, ALIE's z


@dataclass(frozen=True)
class Work:
    """h nodes of d parameters. Inputs are (rounds, h, B, C, H, W), labels (rounds, h, B), peers (rounds, h,
    s) rows of honest nodes, −1 for hostile ones;
    a hostile peer answers μ + zσ over the victim's honest peers."""

    network: str
    initial: NDArray[Any]
    inputs: NDArray[Any]
    labels: NDArray[Any]
    peers: NDArray[Any]
    f: int
    lr: float


def read(folder: Path) -> Work:
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in ("initial", "inputs", "labels", "peers")
    }
    return Work(**arrays, **json.loads((folder / "work.json").read_text()))


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory() -> float:
    """Largest memory of this process in MB; getrusage would count what its starter had before."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


def comparators(m: int, needed: range) -> list[tuple[int, int]]:
    """Batcher's merge exchange for m values, without what the needed ranks do not depend on."""
    pairs, top = [], 1 << (m - 1).bit_length() - 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(m - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    alive, stored = set(needed), []
    for low, high in reversed(pairs):
        if low in alive or high in alive:
            stored.append((low, high))
            alive |= {low, high}
    return stored[::-1]


def race(make: Callable[[Work], Any]) -> None:
    """Answer the starter's lines: `round T` with the seconds it took, `models FILE` by writing them there.

    make: from the work to an object with step(t), which returns when the round is computed, and models().
    """
    talk, sys.stdout = sys.stdout, sys.stderr
    contestant = make(read(Path(sys.argv[1])))
    for line in sys.stdin:
        command, value = line.split()
        if command == "round":
            wall, used = time.perf_counter(), cpu()
            contestant.step(int(value))
            answer = {"wall": time.perf_counter() - wall, "cpu": cpu() - used}
        else:
            np.save(value, np.asarray(contestant.models()))
            answer = {"megabytes": memory()}
        print(json.dumps(answer), file=talk, flush=True)
