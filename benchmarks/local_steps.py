"""How long a local step takes a node: a plain torch loop, a channels_last loop and rpel,
beside the arithmetic limit.

Run: python benchmarks/local_steps.py [--quick] [--cpu]. All lines come from one run, measured in turns, the
best of a few each, because only their ratios mean something on a machine that others use. The limit is the
multiplications and additions of a dense step divided by what a large matrix product reaches on all cores.
rpel does not do all of them: only the winner of a pooling window has a gradient,
and 3 × 3 convolutions of many channels go Winograd's way.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rpel.backend.threads import set_threads
from rpel.data import Dataset, from_arrays, iid, load, virtual
from rpel.models import model, unflatten
from rpel.randomness import draws, sample_without_replacement
from rpel.tasks import Classification

Work = Callable[[], object]


CLOCK = {"now": time.perf_counter}


def best(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Seconds of each, the best of a few turns; a first turn is not counted."""
    actual, now = dict.fromkeys(works, float("inf")), CLOCK["now"]
    for turn in range(1 + repeats):
        for name, work in works.items():
            start = now()
            work()
            if turn:
                actual[name] = min(actual[name], now() - start)
    return actual


def gflops() -> Work:
    a = torch.randn(1536, 1536)
    return lambda: a @ a


GEMM = 2 * 1536**3


def dense_flops(module: nn.Module, shape: tuple[int, ...], batch: int, backward: bool = True) -> float:
    """Of forward, and of both products of the backward pass;
    the first layer needs no gradient of its input."""
    total, first = 0.0, True
    x = torch.zeros(batch, *shape)
    for layer in module.eval():  # type: ignore[attr-defined]
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            products = (2 if first else 3) if backward else 1
            places = batch * (x[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1)
            total += products * 2 * places * layer.weight.numel()
            first = False
    module.train()
    return total


@dataclass
class Setting:
    """A task, models for its nodes, and the same as a plain loop."""

    task: Classification
    module: nn.Module
    nodes: int

    def __post_init__(self) -> None:
        self.x = np.tile(self.task.initial(), (self.nodes, 1))
        self.local, self.ids = self.task.local_state(self.nodes), np.arange(self.nodes)
        self.out = np.empty_like(self.x)

    def ours(self) -> None:
        self.task.gradient(self.x, self.local, self.ids, 0, 0, out=self.out)

    def loop(self, nodes: int, channels_last: bool) -> Work:
        """autograd, node after node, torch's own threads; its inputs are ready normalised."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        module = self.module.to(memory_format=layout)  # type: ignore[call-overload]
        rows = self.task.examples.indices(self.ids[:nodes], 0, 0)
        inputs, labels = self.task.examples.batch(rows, self.ids[:nodes], torch.float32)
        x = torch.from_numpy(self.x)

        def work() -> None:
            for i in range(nodes):
                unflatten(module, x[i])
                batch = inputs[i].contiguous(memory_format=layout) if inputs[i].dim() == 4 else inputs[i]
                loss = F.nll_loss(module(batch), labels[i])
                parts = torch.autograd.grad(loss, list(module.parameters()))
                self.out[i] = torch.cat([part.reshape(-1) for part in parts]).numpy()

        return work


def steps(title: str, s: Setting, batch: int, shape: tuple[int, ...], some: int, repeats: int) -> None:
    """Compare a step of all nodes with loops over `some` of them."""
    contiguous, last = copy.copy(s), copy.copy(s)
    contiguous.module, last.module = copy.deepcopy(s.module), copy.deepcopy(s.module)
    actual = best(
        {
            "gemm": gflops(),
            "loop": contiguous.loop(some, channels_last=False),
            "last": last.loop(some, channels_last=True),
            "ours": s.ours,
        },
        repeats,
    )
    speed, flops = GEMM / actual["gemm"], dense_flops(s.module, shape, batch)
    limit, ours = flops / speed * 1e3, actual["ours"] / s.nodes * 1e3
    kind = type(s.task.engine).__name__
    print(f"\n{title}: {s.task.d:,} parameters, batch {batch}, {s.nodes} nodes, {kind}")
    print(
        f"  arithmetic limit      {limit:8.3f} ms a node  ({flops / 1e6:.1f} Mflop at {speed / 1e9:.0f} "
        "Gflop/s)"
    )
    for name, key in (("plain torch loop", "loop"), ("channels_last loop", "last")):
        each = actual[key] / some * 1e3
        print(
            f"  {name:20s}  {each:8.3f} ms a node  {each / limit:5.1f} × the limit, {each / ours:5.1f} × rpel"
        )
    print(f"  rpel                  {ours:8.3f} ms a node  {ours / limit:5.1f} × the limit")


def evaluation(s: Setting, shape: tuple[int, ...], nodes: int, some: int, repeats: int) -> None:
    """Compare evaluating `nodes` models on 1,000 test images with a loop over `some` of them."""
    data = s.task.examples.dataset
    subset = np.arange(min(1000, len(data.test_y)))
    inputs = torch.from_numpy(data.normalised(data.test_x[subset]))

    @torch.no_grad()
    def loop() -> None:
        for i in range(some):
            unflatten(s.module, torch.from_numpy(s.x[i]))
            for part in torch.split(inputs, 250):
                s.module(part).argmax(1)

    works = {
        "gemm": gflops(),
        "loop": loop,
        "ours": lambda: s.task.evaluate(s.x[:nodes], s.local[:nodes], subset),
    }
    actual = best(works, repeats)
    speed = GEMM / actual["gemm"]
    limit = dense_flops(s.module, shape, len(subset), backward=False) / speed
    loop_, ours = actual["loop"] / some, actual["ours"] / nodes
    print(
        f"  evaluation, {len(subset)} images: limit {limit * 1e3:.2f} ms a node, torch {loop_ * 1e3:.2f},",
        end=" ",
    )
    print(f"rpel {ours * 1e3:.2f} ({ours / limit:.1f} × the limit); all {nodes} nodes {ours * nodes:.2f} s")


def randomness(repeats: int) -> None:
    ids = np.arange(100_000)
    works: dict[str, Work] = {
        "draws, 100,000 nodes × 32": lambda: draws(0, "batch", 0, ids, 32),
        "35 of 100,000 without replacement, each": lambda: sample_without_replacement(
            0, "pull", 0, ids, 100_000, 35
        ),
    }
    print("\nrandomness")
    for name, seconds in best(works, repeats).items():
        print(f"  {name:42s}{seconds * 1e3:8.1f} ms")


def cifar_like() -> Dataset:
    """Random images of CIFAR-10's shape: the arithmetic does not mind."""
    x = np.random.default_rng(0).integers(0, 256, (1000, 3, 32, 32)).astype(np.uint8)
    return from_arrays((x, np.arange(1000) % 10), (x, np.arange(1000) % 10), mean=(0.5,) * 3, std=(0.25,) * 3)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument(
        "--quick", action="store_true", help="fewer repeats, no CIFAR-10 and FEMNIST networks"
    )
    options.add_argument(
        "--cpu", action="store_true", help="CPU seconds of one thread, for a machine that is not free"
    )
    given = options.parse_args()
    quick = given.quick
    if given.cpu:
        torch.set_num_threads(1)
        set_threads(1)
        CLOCK["now"] = time.process_time
    repeats = 2 if quick else 5
    sample = load()
    print(f"{torch.get_num_threads()} threads")

    net = model("mnist")
    s = Setting(Classification(sample, iid(sample.train_y, 90, 25, 0), net, batch_size=25, seed=0), net, 90)
    steps("MNIST network", s, 25, (1, 28, 28), some=30, repeats=repeats)
    evaluation(s, (1, 28, 28), nodes=90, some=5, repeats=min(repeats, 3))

    net = model("linear")
    shared = virtual(sample.train_y, 10_000, 1.0, 0)
    s = Setting(Classification(sample, shared, net, batch_size=25, seed=0), net, 10_000)
    steps("linear model", s, 25, (1, 28, 28), some=300, repeats=repeats)
    evaluation(s, (1, 28, 28), nodes=1000, some=50, repeats=repeats)

    small = load("mnist-sample-8x8")
    net = model("linear", small.shape)
    everything = virtual(small.train_y, 10_000, float("inf"), 0)
    s = Setting(Classification(small, everything, net, batch_size=25, seed=0), net, 10_000)
    steps("linear model, 8 × 8 pixels", s, 25, small.shape, some=300, repeats=repeats)
    evaluation(s, small.shape, nodes=2000, some=50, repeats=repeats)

    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 10)
    )
    s = Setting(Classification(small, everything, net, batch_size=25, seed=0), net, 1000)
    steps("a module of no known form", s, 25, small.shape, some=100, repeats=repeats)
    evaluation(s, small.shape, nodes=500, some=50, repeats=repeats)

    randomness(repeats)
    if quick:
        return
    net = model("femnist", classes=10)
    s = Setting(Classification(sample, iid(sample.train_y, 10, 50, 0), net, batch_size=50, seed=0), net, 10)
    steps("FEMNIST network", s, 50, (1, 28, 28), some=4, repeats=3)
    evaluation(s, (1, 28, 28), nodes=4, some=1, repeats=2)
    net = model("cifar10")
    images = cifar_like()
    s = Setting(Classification(images, iid(images.train_y, 4, 50, 0), net, batch_size=50, seed=0), net, 4)
    steps("CIFAR-10 network", s, 50, (3, 32, 32), some=2, repeats=2)
    evaluation(s, (3, 32, 32), nodes=4, some=1, repeats=2)


if __name__ == "__main__":
    main()
