"""What this machine can do, measured now: memory bandwidth and float32 and float64 arithmetic, on all cores.

Whoever imports this begins as a new user does, with an empty cache of kernels: a folder of the script's own,
given by RPEL_CACHE, which goes when the script ends. Import it before rpel.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PREFIX = "rpel-benchmark-"
# else we are a child of such a script
if not Path(os.environ.get("RPEL_CACHE", "")).name.startswith(_PREFIX):
    os.environ["RPEL_CACHE"] = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, os.environ["RPEL_CACHE"], ignore_errors=True)

from rpel.backend import threads  # noqa: E402  (after the folder is chosen)


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest run: on a shared machine the others measure the neighbours."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


@dataclass(frozen=True)
class Machine:
    """bytes/s moved by a large copy (read + write), flop/s of matrix products in float32 and float64."""

    bandwidth: float
    flops32: float
    flops64: float

    def limit(self, moved: float = 0.0, flops32: float = 0.0, flops64: float = 0.0) -> float:
        """Seconds that the memory or the arithmetic needs at least, whichever is longer."""
        return max(moved / self.bandwidth, flops32 / self.flops32 + flops64 / self.flops64)


def measure() -> Machine:
    """A few hundred milliseconds of measuring."""
    source, target = np.ones(64 << 20, dtype=np.uint8), np.empty(64 << 20, dtype=np.uint8)

    def copy(begin: int, end: int) -> None:
        target[begin << 20 : end << 20] = source[begin << 20 : end << 20]

    moved = 2 * source.nbytes / best(lambda: threads.run(copy, 64))
    rates = []
    for dtype in (np.float32, np.float64):
        a, b = np.ones((1024, 1024), dtype), np.ones((1024, 1024), dtype)
        out = np.empty((1024, 1024), dtype)
        rates.append(2 * 1024**3 / best(lambda a=a, b=b, out=out: np.matmul(a, b, out=out)))  # type: ignore[misc]
    return Machine(moved, *rates)


if __name__ == "__main__":
    m = measure()
    print(
        f"{m.bandwidth / 1e9:.1f} GB/s, {m.flops32 / 1e9:.0f} GFlop/s float32, {m.flops64 / 1e9:.0f} float64"
    )
