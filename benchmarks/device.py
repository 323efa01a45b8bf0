"""Seconds and bytes of each part of a round on a device of torch:
python benchmarks/device.py --device cuda --json.

Beside each part stands its rival: what the device's own rate, measured here, needs for as many bytes (copy)
or as many operations (product). On the CPU there is a second one, numba on one thread, and seconds are those
of the processor.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from rpel.backend.arrays import empty, zeros
from rpel.backend.base import backend
from rpel.backend.chunks import missing
from rpel.backend.tensors import Torch
from rpel.backend.threads import set_threads
from rpel.data import iid, load
from rpel.models import model
from rpel.tasks import Classification


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 or mps")
    parser.add_argument("--nodes", type=int, default=90)
    parser.add_argument("--models", type=int, default=16, help="that each node aggregates, its own included")
    parser.add_argument("--parameters", type=int, default=176_050)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    set_threads(1)
    torch.set_num_threads(1)
    if (why := missing(given.device)) is not None:
        sys.exit(f"device {given.device!r} is not available here: {why}")
    arrays = Torch(given.device)
    about = {"device": given.device, "name": _name(given.device), "torch": torch.__version__}
    copy, product = rates(arrays)
    rows = measured(arrays, given.nodes, given.models, given.parameters, copy)
    rows += trained(arrays, given.nodes, product)
    rows = [{**row, "ratio": row["rival_seconds"] / row["seconds"], **about} for row in rows]
    if given.json:
        print(json.dumps(rows))
        return
    print(
        f"{about['name']}, torch {torch.__version__}: {given.nodes} nodes of {given.parameters:,} "
        f"parameters; copies {1e-9 / copy:.1f} GB/s, products {1e-9 / product:.0f} Gflop/s"
    )
    for row in rows:
        beside = f"{row['rival']:>7} {row['rival_seconds']:9.4f} s, ratio {row['ratio']:.2f}"
        print(f"{row['work']:<24} {row['seconds']:9.4f} s {row['bytes'] / 1e6:9.1f} MB   {beside}")


def rates(arrays: Torch) -> tuple[float, float]:
    """Seconds for each byte of a copy (read or written), and for each operation of a matrix product."""
    source = torch.zeros(1 << 24, device=arrays.device)
    target, square = torch.empty_like(source), torch.randn(1024, 1024, device=arrays.device)
    copied = seconds(arrays.device, lambda: target.copy_(source)) / (8 * len(source))
    return copied, seconds(arrays.device, lambda: square @ square) / (2 * 1024**3)


def measured(arrays: Torch, h: int, m: int, d: int, copy: float) -> list[dict[str, Any]]:
    """Rows for each part; bytes are those that it must read and write at least."""
    coins = np.random.default_rng(0)
    table = arrays.array(np.zeros((2 * h, d), np.float32))
    table[:] = torch.randn(d, device=table.device) + 0.1 * torch.randn(2 * h, d, device=table.device)
    index = np.stack(
        [np.r_[i, coins.choice(np.delete(np.arange(h), i), m - 1, replace=False)] for i in range(h)]
    )
    x = table[:h].clone()
    beside = dict[str, tuple[Callable[[], Any], int]]()
    if arrays.main:
        beside = parts(backend("numba"), table.numpy().copy(), x.numpy().copy(), index)
    values = []
    for name, (work, nbytes) in parts(arrays, table, x, index).items():
        took = seconds(arrays.device, work)
        rivals = {"copy": copy * nbytes}
        if beside:
            rivals["numba"] = seconds("cpu", beside[name][0])
        values += _rows(name, took, nbytes, rivals)
    return values


def _rows(work: str, took: float, nbytes: int, rivals: dict[str, float]) -> list[dict[str, Any]]:
    """One for each rival."""
    return [
        {"work": work, "rival": rival, "rival_seconds": its, "seconds": took, "bytes": nbytes}
        for rival, its in rivals.items()
    ]


def operations(module: torch.nn.Module, examples: int, steps: bool) -> int:
    """Of a network's forward pass, and the way back where it steps."""
    with FlopCounterMode(display=False) as counted:
        made = module(torch.zeros(examples, 1, 28, 28))
        if steps:
            made.sum().backward()
    return int(counted.get_total_flops())


def trained(arrays: Torch, h: int, product: float) -> list[dict[str, Any]]:
    """Local steps of h nodes with the paper's MNIST network, batches of 25,
    and their evaluation on 250 images."""
    sample = load()
    shards, module = iid(sample.train_y, h, 25, seed=0), model("mnist")
    device = Classification(sample, shards, module, batch_size=25, seed=0, device=arrays.device)
    tasks: dict[str, tuple[Any, Any]] = {arrays.device: (device, arrays)}
    if arrays.main:
        tasks["numba"] = Classification(sample, shards, module, batch_size=25, seed=0), backend("numba")
    took: dict[str, list[float]] = {}
    engine = type(device.engine).__name__
    for name, (task, kernels) in tasks.items():
        x, local = kernels.array(np.tile(task.initial(), (h, 1))), kernels.array(task.local_state(h))
        out, ids, some = empty(h, x), np.arange(h), np.arange(250)
        both = partial(task.gradient, x, local, ids, 1, 0, out=out), partial(task.evaluate, x, local, some)
        took[name] = [seconds(arrays.device, work, times=1) for work in both]
    rows = []
    for i, (work, examples) in enumerate({f"local steps ({engine})": 25, "evaluation": 250}.items()):
        rivals = {"product": product * h * operations(module, examples, steps=i == 0)}
        rivals |= {"numba": took["numba"][i]} if arrays.main else {}
        rows += _rows(work, took[arrays.device][i], (2 - i) * 4 * h * device.d, rivals)
    return rows


def parts(arrays: Any, table: Any, x: Any, index: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is measured, and its bytes: the exchange of a round, its momentum step and its mean."""
    (h, m), d = index.shape, table.shape[1]
    momentum, gradient, f, size, ones = 0 * x, 0 * x, (m - 1) // 2, 4 * d, np.ones(h)
    return {
        "momentum step": (lambda: arrays.momentum_step(x, momentum, gradient, 0.9, 0.1, 0.0, out=x),
            5 * h * size),
        "forge (alie)": (lambda: arrays.moments(table, index, ones, ones, out=gradient),
            h * (2 * m + 1) * size),
        "distances": (lambda: arrays.squared_distances(table, index), h * m * size),
        "trimmed mean": (lambda: arrays.coordinatewise(table, index, "trimmed_mean", f, out=x),
            h * (m + 1) * size),
        "nnm + trimmed mean": (
            lambda: arrays.coordinatewise(table, index, "trimmed_mean", f, m - f, out=x),
            h * (2 * m + 1) * size,
        ),
        "mean of all": (lambda: arrays.column_sums(table[:h], slice(0, d), zeros((d,), table, wide=True)),
            h * size),
    }  # fmt: skip


def seconds(device: str, work: Callable[[], Any], times: int = 3) -> float:
    """The quickest of a few calls, each waited for; on the CPU seconds of its processors, one thread."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    work()
    best = float("inf")
    for _ in range(times):
        _wait(device)
        began = clock()
        work()
        _wait(device)
        best = min(best, clock() - began)
    return best


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    main()
