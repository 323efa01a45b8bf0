"""A round among many nodes with a small model, part by part, beside what this machine could do.

Run: python benchmarks/scale.py [NODES …] [--million] [--json FILE] (1,000, 10,000 and 100,000 by default; the
file is what tools/results.py makes a table of). The setting is that of the presets scale-100k and scale-1m:
softmax regression on 8 × 8 digits (d = 650), s = 34, b_hat = 17, ALIE, a tenth of the nodes hostile. Each
size runs in a process of its own, so that its memory is its own; the cache of kernels is empty at first.

Limits, at the rates measured in the same process: local step, forging and evaluation need their bytes moved
or their arithmetic done, whichever is longer; aggregation as in rules.py; the draw as long as NumPy needs for
as many numbers of the same generator, on every core.
A table larger than the last cache is read anew for every victim.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from rpel.backend.threads import threads
from rpel.data import balanced_subset, load, virtual
from rpel.models import model
from rpel.randomness import stream
from rpel.simulation.engine import Engine
from rpel.simulation.methods import resolve
from rpel.spec import Spec
from rpel.tasks import Classification
from rules import limit

DATA, BATCH, PULL, B_HAT, SHOWN = "mnist-sample-8x8", 25, 34, 17, 1000
LAST_CACHE = 32 << 20


def resident() -> float:
    """Largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1e3


def simulation(nodes: int) -> Engine:
    data = load(DATA)
    shards = virtual(data.train_y, nodes - nodes // 10, math.inf, seed=0)
    task = Classification(data, shards, lambda: model("linear", data.shape), batch_size=BATCH, seed=0)
    spec = Spec(nodes=nodes, byzantine=nodes // 10, pull=PULL, b_hat=B_HAT, rounds=200, lr=0.5, attack="alie")
    return Engine(resolve(spec), task)


def parts(run: Engine, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds of each part of a round, and the least it could take."""
    power, problem, state, s = machine.measure(), run.problem, run.state, run.spec
    h, d = state.x.shape
    nodes = problem.deliver.nodes(1)
    subset = balanced_subset(load(DATA).test_y, SHOWN, seed=0)

    def best(work: Callable[[], object]) -> float:
        return machine.best(work, repeats)

    step = best(lambda: problem.local(state.x, state.local, nodes, 1))
    half, _ = problem.local(state.x, state.local, nodes, 1)
    draw = best(lambda: run.network.ask(1, nodes))
    forge = best(lambda: problem.deliver(half, {}, nodes, 1, state.x)) - draw
    received, _ = problem.deliver(half, {}, nodes, 1, state.x)
    aggregate = best(lambda: problem.rule(half, received, nodes, 1, out=state.x))
    evaluate = best(lambda: run.evaluate(subset))
    m, row = received.index.shape[1], 4 * d
    honest = (PULL * (1 - s.hostile_count / s.nodes)) if run.table.nbytes > LAST_CACHE else 1
    numbers = machine.best(lambda: stream(0, "pull").random(10**6)) / 10**6
    part = slice(0, min(h, 20_000))
    return {
        "local step": (step, h * power.limit(6 * row + BATCH * 64 * 4, 2 * 2 * BATCH * d)),
        "draw": (draw, h * PULL * numbers / threads()),
        "forge": (forge, h * power.limit((honest + 1) * row, 0, 2 * 3 * PULL * 0.9 * d)),
        "aggregate": (aggregate, h * limit(m, B_HAT, d, received.index[part], power)),
        "evaluate": (evaluate, h * power.limit(row, 2 * SHOWN * d)),
    }


def measure(nodes: int) -> dict[str, Any]:
    """A whole round and its parts at one size: seconds, the least seconds of each part,
    and memory above the import."""
    imported = resident()
    run = simulation(nodes)
    run.step()  # compiles, and touches all memory
    h, d = run.state.x.shape
    repeats = max(1, min(9, 300_000 // nodes))
    whole = machine.best(run.step, repeats)
    used = resident() - imported
    return {
        "nodes": nodes, "honest": h, "model_bytes": 4 * h * d, "bytes": used, "seconds": whole,
        "parts": parts(run, repeats),
    }  # fmt: skip


def show(size: dict[str, Any]) -> None:
    h = size["honest"]
    print(
        f"{size['nodes']:,} nodes, {h:,} honest: {size['seconds']:.2f} s a round, "
        f"memory above the import {size['bytes'] / size['model_bytes']:.1f} x the models"
    )
    for name, (seconds, least) in size["parts"].items():
        print(f"  {name:10} {seconds / h * 1e3:8.4f} ms a node   {seconds / least:5.1f} x the limit")
    print(f"  {'round':10} {size['seconds'] / h * 1e3:8.4f} ms a node", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A round among many nodes, part by part.")
    parser.add_argument("nodes", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--million", action="store_true", help="measure 1,000,000 nodes, too (12 GB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.nodes[0])))
        return
    sizes = []
    for nodes in asked.nodes + [1_000_000] * asked.million:
        command = [sys.executable, __file__, "--one", str(nodes)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sizes.append(json.loads(done.stdout.splitlines()[-1]))
        show(sizes[-1])
        if asked.json:
            asked.json.write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
