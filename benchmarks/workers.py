"""A shared run's round against what its bytes need: workers in network namespaces, links held to some Mbit/s.

Run as root: python benchmarks/workers.py [--nodes 10000] [--workers 3] [--mbit 1000] [--pull 10] [--local].

Each worker has a namespace, an address and one thread of its own; they meet at the first one's address. The
bytes are those of the models, 4hd(P − 1)/P a worker and round; beside them stands what the kernel counted on
the interfaces. --local: processes on loopback, P from 1 on, without limits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.namespaces import NET, Namespaces, possible  # noqa: E402

HOSTILE = 0.1


def spec(given: argparse.Namespace, out: Path) -> Path:
    nodes, rounds = given.nodes, given.rounds
    fields = {
        "name": "workers", "dataset": given.dataset, "model": "linear", "nodes": nodes, "rounds": rounds,
        "byzantine": int(HOSTILE * nodes), "pull": given.pull, "b_hat": given.pull // 3, "eval_every": rounds,
        "eval_size": 100, "batch_size": 10, "lr": 0.1, "attack": "alie", "partition": "virtual",
        "checkpoint_every": 0, "threads": 1, "out": str(out),
    }  # fmt: skip
    file = out / "spec.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    return file


def run(file: Path, address: str, places: list[list[str]]) -> None:
    """One worker in each place, which is what stands before its command; they meet at the address."""
    meeting = {
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": "1",
    }
    running = [
        subprocess.Popen(
            [*position, sys.executable, "-m", "rpel", "run", str(file)],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank, position in enumerate(places)
    ]
    statuses = [one.wait() for one in running]
    if any(statuses):
        sys.exit(f"workers ended with {statuses}")


def in_namespaces(file: Path, workers: int, mbit: int) -> list[int]:
    """Run it, one worker a namespace; the bytes that each interface received."""
    network = Namespaces(workers)
    network.make()
    try:
        for rank in range(workers):
            held = f"tc qdisc add dev net root tbf rate {mbit}mbit burst 256kb latency 5ms"
            subprocess.run(["ip", "netns", "exec", network.namespace(rank), *held.split()], check=True)
        before = [_received(network.namespace(rank)) for rank in range(workers)]
        run(file, f"{NET}.1", [["ip", "netns", "exec", network.namespace(rank)] for rank in range(workers)])
        return [_received(network.namespace(rank)) - before[rank] for rank in range(workers)]
    finally:
        network.remove()


def _received(namespace: str) -> int:
    path = "/sys/class/net/net/statistics/rx_bytes"
    return int(
        subprocess.run(
            ["ip", "netns", "exec", namespace, "cat", path], capture_output=True, check=True
        ).stdout
    )


def seconds(out: Path) -> float:
    """A round's, the median of all but the first, which compiles, and the last, which is evaluated."""
    (file,) = out.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return float(statistics.median(row["seconds"] for row in rows[1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pull", type=int, default=10)
    parser.add_argument("--dataset", default="mnist-sample")
    parser.add_argument("--local", action="store_true")
    given = parser.parse_args()
    d = 650 if given.dataset.endswith("8x8") else 7850
    h = given.nodes - int(HOSTILE * given.nodes)
    if given.local:
        for workers in range(1, given.workers + 1):
            with tempfile.TemporaryDirectory() as folder:
                file = spec(given, Path(folder))
                run(file, "127.0.0.1", [[] for _ in range(workers)])
                need = 4 * h * d * (workers - 1) / workers
                print(
                    f"{workers} workers: {seconds(Path(folder)):.3f} s a round, {need / 1e6:.0f} MB for each"
                )
        return
    if why := possible():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        file = spec(given, Path(folder))
        received = in_namespaces(file, given.workers, given.mbit)
        need = 4 * h * d * (given.workers - 1) / given.workers
        least, took = need / (given.mbit * 1e6 / 8), seconds(Path(folder))
    print(
        f"{given.workers} workers, {given.nodes:,} nodes, d = {d:,}, s = {given.pull}, links of {given.mbit} "
        "Mbit/s"
    )
    print(f"a round takes {took:.2f} s, its {need / 1e6:.0f} MB need {least:.2f} s: {took / least:.2f} x")
    for rank, count in enumerate(received):
        # worker 0 is also sent all final models, once
        rounds = given.rounds + (1 if rank == 0 else 0)
        print(
            f"interface of worker {rank}: {count / 1e6:.0f} MB, {count / need / rounds:.3f} x the models' "
            "bytes"
        )


if __name__ == "__main__":
    main()
