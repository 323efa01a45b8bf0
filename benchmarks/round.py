"""A full round of mnist-100 (local steps, forging, pull, aggregation):
rpel against a plain PyTorch loop with ByzFL.

Run: `python benchmarks/round.py [--data-dir DIR]` (MNIST; without it the embedded sample, whose batches cost
the same). The rival is written below as one would write it today: a loop over nodes with autograd, then a
loop over victims that forges ALIE and aggregates with ByzFL. Forging and aggregating are done twice, with
torch and with NumPy, and the better of the two counts. Everything is timed in one run on one machine,
from an empty cache of kernels.
"""

import resource
import sys
import time
from typing import Any

import numpy as np
import torch

import machine
from rpel.data import Dataset, balanced_subset, dirichlet, load
from rpel.models import model
from rpel.simulation.engine import Engine
from rpel.simulation.methods import resolve
from rpel.spec import Spec
from rpel.tasks import Classification
from rpel.types import Integers, Models
from rules import import_byzfl

NODES, BYZANTINE, PULL, B_HAT, BATCH = 100, 10, 15, 7, 25
HONEST = NODES - BYZANTINE


def resident() -> float:
    """Largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def simulation(data: Dataset) -> Engine:
    shards = dirichlet(data.train_y, HONEST, 1.0, BATCH, seed=0)
    task = Classification(data, shards, lambda: model("mnist"), batch_size=BATCH, seed=0)
    spec = Spec(nodes=NODES, byzantine=BYZANTINE, pull=PULL, b_hat=B_HAT, rounds=200, attack="alie")
    return Engine(resolve(spec), task)


def parts(run: Engine, repeats: int = 5) -> dict[str, float]:
    """Seconds of each part of a round, best of a few."""
    problem, state = run.problem, run.state
    nodes, values = problem.deliver.nodes(1), {}
    values["local steps"] = machine.best(lambda: problem.local(state.x, state.local, nodes, 1), repeats)
    half, _ = problem.local(state.x, state.local, nodes, 1)
    values["pull and forging"] = machine.best(lambda: problem.deliver(half, {}, nodes, 1, state.x), repeats)
    received, _ = problem.deliver(half, {}, nodes, 1, state.x)
    values["aggregation"] = machine.best(lambda: problem.rule(half, received, nodes, 1, out=state.x), repeats)
    values["whole round"] = machine.best(run.step, repeats)
    return values


def plain_round(data: Dataset) -> dict[str, float]:
    """The rival: one round, node by node and victim by victim."""
    byzfl = import_byzfl()
    coins = np.random.default_rng(0)
    images = torch.from_numpy(data.normalised(data.train_x[:5000]))
    labels = torch.from_numpy(data.train_y[:5000])
    nets = [model("mnist") for _ in range(HONEST)]
    momenta = [[torch.zeros_like(p) for p in net.parameters()] for net in nets]
    start = time.perf_counter()
    for net, momentum in zip(nets, momenta, strict=True):
        batch = torch.from_numpy(coins.integers(0, len(images), BATCH))
        net.zero_grad()
        torch.nn.functional.nll_loss(net(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p, m in zip(net.parameters(), momentum, strict=True):
                m.mul_(0.9).add_(p.grad, alpha=0.1)  # type: ignore[arg-type]
                p.sub_(0.5 * (m + 1e-4 * p))
    local = time.perf_counter() - start
    with torch.no_grad():
        flat = torch.stack([torch.cat([p.reshape(-1) for p in net.parameters()]) for net in nets])
    forging, mixing = {"torch": 0.0, "numpy": 0.0}, {"torch": 0.0, "numpy": 0.0}
    nnm, trimmed = byzfl.NNM(B_HAT), byzfl.TrMean(B_HAT)
    for i in range(HONEST):
        pulled = coins.choice(np.delete(np.arange(NODES), i), PULL, replace=False)
        answers: Any = None
        for path, forge in (("torch", forged_by_torch), ("numpy", forged_by_numpy)):
            start = time.perf_counter()
            answers = forge(flat, i, pulled)
            forging[path] += time.perf_counter() - start
            start = time.perf_counter()
            trimmed(nnm(answers))
            mixing[path] += time.perf_counter() - start
    print(
        f"ByzFL's aggregation of {HONEST} victims: torch {mixing['torch']:.2f} s, NumPy "
        f"{mixing['numpy']:.2f} s"
    )
    least = min(forging.values()), min(mixing.values())
    return {
        "local steps": local,
        "pull and forging": least[0],
        "aggregation": least[1],
        "whole round": local + sum(least),
    }


def forged_by_torch(flat: torch.Tensor, own: int, pulled: Integers) -> torch.Tensor:
    """(m, d) what a victim aggregates: its own model, the honest ones, ALIE's for every hostile one."""
    received = flat[pulled[pulled < HONEST]]
    forged = received.mean(0) + 1.5 * received.std(0)
    return torch.cat([flat[own : own + 1], received, forged.repeat(int((pulled >= HONEST).sum()), 1)])


def forged_by_numpy(flat: torch.Tensor, own: int, pulled: Integers) -> Models:
    """The same."""
    x = flat.numpy()
    received = x[pulled[pulled < HONEST]]
    forged = received.mean(axis=0) + np.float32(1.5) * received.std(axis=0, ddof=1)
    return np.concatenate([x[own : own + 1], received, np.tile(forged, (int((pulled >= HONEST).sum()), 1))])


def main() -> None:
    folder = sys.argv[sys.argv.index("--data-dir") + 1] if "--data-dir" in sys.argv else None
    imported = resident()
    data = load("mnist", folder) if folder else load()
    run = simulation(data)
    mine = parts(run)
    used = resident() - imported
    subset = balanced_subset(data.test_y, 1000, seed=0)
    evaluating = machine.best(lambda: run.evaluate(subset), 3)
    power = machine.measure()
    theirs = plain_round(data)
    print(
        f"mnist-100, one round: n={NODES} b={BYZANTINE} s={PULL} b_hat={B_HAT}, ALIE; "
        f"{power.flops32 / 1e9:.0f} GFlop/s"
    )
    for part, seconds in mine.items():
        print(
            f"  {part:18} ours {seconds:7.3f} s   plain loop {theirs[part]:7.3f} s   "
            f"{theirs[part] / seconds:6.1f}x"
        )
    # 3 products (forward, and two in backward) of the network's 1.09 million multiply-adds,
    # for 25 examples a node
    macs = 20 * 25 * 576 + 20 * 20 * 25 * 64 + 320 * 500 + 500 * 10
    least = 2 * 3 * macs * BATCH * HONEST / power.flops32
    print(f"  local steps at {mine['local steps'] / least:.1f}x the arithmetic limit of {least:.3f} s")
    floor = 2 * macs * 1000 * HONEST / power.flops32
    share = evaluating / (20 * mine["whole round"] + evaluating)
    print(
        f"  evaluation of {HONEST} nodes on 1,000 images {evaluating:.2f} s: {share:.0%} of a run that "
        f"evaluates every 20 rounds (its arithmetic alone needs {floor:.2f} s, "
        f"{floor / (20 * mine['whole round'] + floor):.0%})"
    )
    print(f"  memory above the import: {used:,.0f} MB")


if __name__ == "__main__":
    main()
