"""CPU milliseconds that a local step and an evaluation take a node: rpel beside a plain torch loop.

Run: python benchmarks/local_steps.py [WORK…] [--against SRC] [--turns 3]. Every turn is a process of its own;
with --against, the folder src of another commit takes turns with this one. The best of each counts, because
only ratios mean something on a machine that others use.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rpel.data import Dataset, from_arrays, iid, load, virtual
from rpel.models import model, unflatten
from rpel.tasks import Classification

HERE = Path(__file__).resolve().parents[1] / "src"
EXAMPLES = 500  # of an evaluation
Work = Callable[[], object]


def cifar_like() -> Dataset:
    """Random images of CIFAR-10's shape: the arithmetic is the same."""
    x, y = np.random.default_rng(0).integers(0, 256, (1000, 3, 32, 32)).astype(np.uint8), np.arange(1000) % 10
    return from_arrays((x, y), (x, y), mean=(0.5,) * 3, std=(0.25,) * 3)


def unknown_form() -> nn.Module:
    """A module that none of the hand-written derivatives covers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 10)
    )


SMALL = "mnist-sample-8x8"
WORKS: dict[str, tuple[Callable[[], Dataset], Callable[[Dataset], nn.Module], int, int]] = {
    "mnist": (load, lambda data: model("mnist"), 25, 30),
    "femnist": (load, lambda data: model("femnist", classes=10), 50, 3),
    "cifar10": (cifar_like, lambda data: model("cifar10"), 50, 2),
    "linear": (load, lambda data: model("linear"), 25, 2000),
    "linear 8 x 8": (lambda: load(SMALL), lambda data: model("linear", data.shape), 25, 5000),
    "mlp": (load, lambda data: model("mlp"), 25, 30),
    "unknown form": (lambda: load(SMALL), lambda data: unknown_form(), 25, 500),
}
"""Data, network, batch size and nodes of each."""


def seconds(work: Work, times: int = 4) -> float:
    """CPU seconds of the quickest call; a first one is not counted."""
    work()
    best = float("inf")
    for _ in range(times):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def torch_loop(task: Classification, data: Dataset, x: Any, batch: int) -> Work:
    """autograd on one node, its inputs ready normalised and laid out as torch is fastest."""
    module = task.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs, labels = torch.from_numpy(data.normalised(data.train_x[:batch])), data.train_y[:batch]
    targets = torch.from_numpy(labels)

    def work() -> None:
        unflatten(module, torch.from_numpy(x[0]))
        loss = F.cross_entropy(module(inputs), targets)
        torch.autograd.grad(loss, list(module.parameters()))

    return work


def measured(name: str) -> dict[str, float]:
    """Milliseconds a node of one work."""
    make, network, batch, nodes = WORKS[name]
    data = make()
    per_node = nodes * batch <= data.size
    shards = iid(data.train_y, nodes, batch, 0) if per_node else virtual(data.train_y, nodes, 1.0, 0)
    task = Classification(data, shards, network(data), batch_size=batch, seed=0)
    x, local = np.tile(task.initial(), (nodes, 1)), task.local_state(nodes)
    out, ids, few = np.empty_like(x), np.arange(nodes), min(nodes, 500)
    subset = np.arange(min(EXAMPLES, len(data.test_y)))
    step = seconds(lambda: task.gradient(x, local, ids, 0, 0, out=out)) / nodes
    evaluation = seconds(lambda: task.evaluate(x[:few], local[:few], subset)) / few
    loop = seconds(torch_loop(task, data, x, batch))
    return {"step": 1e3 * step, "evaluation": 1e3 * evaluation, "torch": 1e3 * loop}


def turn(source: Path, name: str) -> dict[str, float]:
    """One work in a process of its own, with the library of this folder."""
    command = [sys.executable, __file__, name, "--here"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(source)}, check=True, capture_output=True, text=True
    )
    values: dict[str, float] = json.loads(done.stdout)
    return values


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    options.add_argument("--against", type=Path, help="the folder src of another commit")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.here:
        print(json.dumps(measured(given.works[0])))
        return
    sources = [HERE, *([given.against] if given.against else [])]
    for name in given.works:
        turns = [[turn(source, name) for source in sources] for _ in range(given.turns)]
        for what in ("step", "evaluation"):
            ours = min(each[0][what] for each in turns)
            line = f"{name:14s} {what:11s} {ours:8.3f} ms a node"
            if what == "step":
                line += f"   torch {min(each[0]['torch'] for each in turns) / ours:5.1f} × as long"
            if given.against:
                ratios = sorted(each[0][what] / each[1][what] for each in turns)
                line += f"   {ratios[len(ratios) // 2]:.2f} × the other commit"
            print(line, flush=True)


if __name__ == "__main__":
    main()
