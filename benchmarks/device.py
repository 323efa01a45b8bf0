"""Seconds and bytes of each part of a round on a device of torch:
python benchmarks/device.py --device cuda --json.

Beside each part stands what the device's own copy and matrix-product rates, measured here,
would need for its bytes.
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

from rpel.backend.base import backend
from rpel.backend.devices import missing
from rpel.backend.pool import set_threads
from rpel.backend.torch import Torch
from rpel.data import iid, load
from rpel.models import model
from rpel.tasks import Classification
from rpel.tasks.device import DeviceTask


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
    rows = measured(arrays, given.nodes, given.models, given.parameters) + trained(arrays, given.nodes)
    about = {"device": given.device, "torch": torch.__version__, "name": _name(given.device)}
    if given.json:
        print(json.dumps({**about, "nodes": given.nodes, "parameters": given.parameters, "parts": rows}))
        return
    print(
        f"{about['name']}, torch {torch.__version__}: {given.nodes} nodes of {given.parameters:,} parameters"
    )
    for row in rows:
        beside = f" {row['seconds'] / row['numba']:6.1f} x numba" if "numba" in row else ""
        size = f"{row['bytes'] / 1e6:12.1f} MB {row['of_copy']:6.1f} x copy"
        print(f"{row['part']:<24} {row['seconds']:9.4f} s {size}{beside}")


def measured(arrays: Torch, h: int, m: int, d: int) -> list[dict[str, Any]]:
    """A row for each part; bytes are those that it must read and write at least. On the CPU numba's seconds,
    too."""
    coins = np.random.default_rng(0)
    table = arrays.repeated(np.zeros(d, np.float32), 2 * h)
    table[:] = torch.randn(d, device=table.device) + 0.1 * torch.randn(2 * h, d, device=table.device)
    index = np.stack(
        [np.r_[i, coins.choice(np.delete(np.arange(h), i), m - 1, replace=False)] for i in range(h)]
    )
    x = table[:h].clone()
    copied = seconds(arrays.device, lambda: x.copy_(table[:h])) / (8 * h * d)
    beside = dict[str, tuple[Callable[[], Any], int]]()
    if arrays.main:
        beside = parts(backend("numba"), table.numpy().copy(), x.numpy().copy(), index)
    values = []
    for name, (work, nbytes) in parts(arrays, table, x, index).items():
        took = seconds(arrays.device, work)
        row = {"part": name, "seconds": took, "bytes": nbytes, "of_copy": took / (copied * nbytes)}
        values.append(row | ({"numba": seconds("cpu", beside[name][0])} if beside else {}))
    square = torch.randn(1024, 1024, device=table.device)
    product = seconds(arrays.device, lambda: square @ square)
    values.append({"part": "product 1024", "seconds": product, "bytes": 12 * 1024**2, "of_copy": 0.0,
                  "flops_per_second": 2 * 1024**3 / product})  # fmt: skip
    return values


def trained(arrays: Torch, h: int) -> list[dict[str, Any]]:
    """Local steps of h nodes with the paper's MNIST network, batches of 25,
    and their evaluation on 250 images."""
    sample, found = load(), list[dict[str, Any]]()
    shards, module = iid(sample.train_y, h, 100, seed=0), model("mnist")
    device = DeviceTask(arrays, sample, shards, module, batch_size=25, seed=0)
    tasks: list[tuple[Any, Any]] = [(device, arrays)]
    if arrays.main:
        tasks.append((Classification(sample, shards, module, batch_size=25, seed=0), backend("numba")))
    for task, kernels in tasks:
        x, local = kernels.repeated(task.initial(), h), kernels.array(task.local_state(h))
        out, ids, some = kernels.empty(h, x), np.arange(h), np.arange(250)
        work = {
            f"local steps ({device.steps})": partial(task.gradient, x, local, ids, 1, 0, out=out),
            "evaluation, 250 images": partial(task.evaluate, x, local, some),
        }
        for i, (name, one) in enumerate(work.items()):
            took = seconds(kernels.device if task is device else "cpu", one, times=1)
            if task is device:
                found.append(
                    {"part": name, "seconds": took, "bytes": (2 - i) * 4 * h * task.d, "of_copy": 0.0}
                )
            else:
                found[i]["numba"] = took
    return found


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
        "mean of all": (lambda: arrays.mean(table[:h]), h * size),
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
