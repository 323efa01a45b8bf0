"""How soon rpel is at work: CPU seconds of fresh processes,
with an empty cache of kernels and with a full one.

Run: python benchmarks/start.py [--repeats 2] [--json]. CPU seconds (user and system, children included) and
not wall time, because a compiler that fills both cores is not quicker, and because others use the machine.
Python keeps the bytecode of rpel's modules, as it does where rpel is installed: the second repeat finds it.
The first round of mnist-100 is also JAX's, whose program compiles anew in every process;
its environment is that of `rivals.py`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rivals

RPEL = [sys.executable, "-m", "rpel"]
QUICKSTART = [*RPEL, "run", "quickstart", "--force", "--json", "--out"]


def cpu_seconds(command: list[str], cache: Path, lines: str = "") -> float:
    """What a command and its children need."""
    before = os.times()
    environment = {**os.environ, "RPEL_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(
        command, input=lines, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, check=True,
        env=environment, cwd=rivals.HERE,
    )  # fmt: skip
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def least(command: list[str], cache: Path, repeats: int, cold: bool = False, lines: str = "") -> float:
    """The best of a few, each from an empty cache if `cold`."""
    values = []
    for _ in range(repeats):
        if cold:
            shutil.rmtree(cache, ignore_errors=True)
        values.append(cpu_seconds(command, cache, lines))
    return min(values)


def measure(repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="rpel-benchmark-") as temporary:
        folder, cache = Path(temporary), Path(temporary) / "rpel-benchmark-cache"
        rivals.write(rivals.ours("mnist-100", None), "mnist-100", 1, folder)
        commands = rivals.commands("mnist-100", folder, None)
        theirs = least(commands["jax"], cache, repeats, lines="round 0\n")
        cold = least(commands["rpel"], cache, repeats, cold=True, lines="round 0\n")
        warm = least(commands["rpel"], cache, repeats, lines="round 0\n")
        works: dict[str, tuple[float, float | None]] = {
            "first round of mnist-100, empty cache": (cold, theirs),
            "first round of mnist-100, full cache": (warm, theirs),
            "quickstart, empty cache": (least([*QUICKSTART, temporary], cache, repeats, cold=True), None),
            "quickstart, full cache": (least([*QUICKSTART, temporary], cache, repeats), None),
            "rpel --help": (least([*RPEL, "--help"], cache, repeats), None),
            "rpel plan": (
                least(
                    [*RPEL, "plan", "--nodes", "100", "--byzantine", "10", "--rounds", "200"], cache, repeats
                ),
                None,
            ),
        }
    return [
        {
            "work": work,
            "rival": rival and "jax",
            "rival_seconds": rival,
            "seconds": ours,
            "ratio": rival and rival / ours,
        }
        for work, (ours, rival) in works.items()
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--repeats", type=int, default=2, help="of each, the best counts")
    options.add_argument("--json", action="store_true", help="a list of objects instead of lines")
    given = options.parse_args()
    actual = measure(given.repeats)
    if given.json:
        print(json.dumps(actual))
        return
    for one in actual:
        beside = f"   jax {one['rival_seconds']:6.2f}   {one['ratio']:.2f} x" if one["rival"] else ""
        print(f"{one['work']:40} {one['seconds']:6.2f} CPU-s{beside}")


if __name__ == "__main__":
    main()
