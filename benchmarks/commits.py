"""Two commits beside each other: the same work through the public names, alternating,
median of several turns.

    python benchmarks/commits.py adcc308 HEAD

CPU seconds of all threads, because others use the machine. Every turn is a process of its own; each commit
has its own empty kernel cache, filled by a turn that does not count.
A line says which parts became slower by more than 5 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = """
import json, time
import numpy as np
import rpel

def best(work, times):
    seconds = []
    for _ in range(times):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)

coins = np.random.default_rng(0)
table = coins.normal(size=(90, 176_050)).astype(np.float32)
index = np.stack([np.roll(np.arange(90), -i)[:16] for i in range(90)])
small = coins.normal(size=(2000, 650)).astype(np.float32)
many = np.stack([np.roll(np.arange(2000), -i)[:31] for i in range(2000)])
rule, wide = rpel.rule("nnm+trimmed_mean", f=7), rpel.rule("nnm+trimmed_mean", f=13)
times = {
    "plan, n = 100,000": best(lambda: rpel.plan(nodes=100_000, byzantine=10_000, rounds=200), 5),
    "nnm+trimmed_mean, 90 victims, d = 176,050": best(lambda: rule.aggregate(table, index), 3),
    "nnm+trimmed_mean, 2,000 victims, d = 650": best(lambda: wide.aggregate(small, many), 3),
}
for model in ("mnist", "linear"):
    marks = []
    rpel.simulate(nodes=30, byzantine=6, pull=15, rounds=12, model=model, attack="alie", eval_every=12,
                  eval_size=100, out=None, progress=lambda tick: marks.append(time.process_time()))
    times[f"a round of 24 nodes, {model}"] = sorted(np.diff(marks[:11]))[4]
print(json.dumps(times))
"""


def turn(tree: Path, cache: Path) -> dict[str, float]:
    """One process with that commit's code; its times by name."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "RPEL_CACHE": str(cache),
        "HOME": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", WORK], capture_output=True, text=True, env=environment, cwd=cache
    )
    if done.returncode:
        raise SystemExit(f"the work failed at {tree.name}:\n{done.stderr[-2000:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        for name in ("old", "new"):
            trees[name] = Path(folder) / name
            trees[name].mkdir()
            archive = subprocess.run(
                ["git", "archive", getattr(given, name)], capture_output=True, check=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", str(trees[name])], input=archive, check=True)
            (Path(folder) / f"cache-{name}").mkdir()
        times: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for number in range(given.turns + 1):
            for name, tree in trees.items():
                actual = turn(tree, Path(folder) / f"cache-{name}")
                if number:  # the first turn compiles
                    times[name].append(actual)
            print(f"turn {number} of {given.turns}", file=sys.stderr)
    slower: list[str] = []
    print(f"{'':44}{given.old:>10}{given.new:>10}   new/old")
    for work in times["old"][0]:
        old, new = (statistics.median(each[work] for each in times[name]) for name in ("old", "new"))
        print(f"{work:44}{1000 * old:8.1f}ms{1000 * new:8.1f}ms{new / old:10.2f}")
        slower += [work] if new > 1.05 * old else []
    print(f"slower by more than 5 %: {'; '.join(slower) or 'nothing'}")


if __name__ == "__main__":
    main()
