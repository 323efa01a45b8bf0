"""A full round of the preset scale-100k at growing n: seconds, time per honest node, memory.

Run: python benchmarks/scale.py [NODES …] (1000 and 10000 by default; 100000 needs 12 GB and three minutes). Each size
runs in a process of its own, so that its memory is its own.
"""

import resource
import subprocess
import sys
import time

from rpel.config.spec import Spec
from rpel.data import load, virtual
from rpel.models import model
from rpel.simulation.methods import settle
from rpel.simulation.simulator import Simulation
from rpel.tasks import Classification


def measure(nodes: int) -> None:
    honest = nodes - nodes // 10
    data = load()
    shards = virtual(data.train_y, honest, 1.0, seed=0)
    task = Classification(data, shards, lambda: model("linear"), batch_size=25, seed=0)
    spec = Spec(nodes=nodes, byzantine=nodes // 10, pull=34, b_hat=17, rounds=5, lr=0.1, attack="alie")
    run = Simulation(settle(spec), task)
    run.step()  # compiles, and touches all memory
    start = time.perf_counter()
    run.step()
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{nodes:>8,} nodes {seconds:8.2f} s a round {seconds / honest * 1e3:6.2f} ms a node {used:6.1f} GB", flush=True
    )


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        measure(int(sys.argv[2]))
        return
    for nodes in sys.argv[1:] or ["1000", "10000"]:
        subprocess.run([sys.executable, __file__, "--one", nodes], check=True)


if __name__ == "__main__":
    main()
