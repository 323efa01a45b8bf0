"""The compiled kernels: threads and forms change no bit, loops are vectorised, code is stored."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel.backend import coordinates, distances, rows, threads
from rpel.backend.base import OPERATIONS, backend

Array = NDArray[Any]
kernels = backend("numba")
SOURCE = Path(rpel.__file__).parents[1]


def same(left: Array, right: Array) -> None:
    """Bit for bit."""
    assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def wide(n: int, d: int, h: int, m: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(n + d)
    index = np.stack([rng.choice(n, m, replace=False) for _ in range(h)])
    return rng.normal(size=(n, d)).astype(dtype), index


def everything(table: Array, index: Array) -> list[Array]:
    (h, m), f = index.shape, (index.shape[1] - 1) // 2
    factors, weights = np.linspace(-1, 1, h), np.linspace(-1, 1, h * m).reshape(h, m)
    mixing = np.repeat(weights[:, None], 3, axis=1)
    return [
        kernels.squared_distances(table, index),
        *(kernels.coordinatewise(table, index, operation, f, m - f) for operation in OPERATIONS),
        kernels.coordinatewise(table, index, "median", mix=mixing),
        kernels.combine(table, index, weights),
        kernels.moments(table, index, factors, factors),
        kernels.distances_to(table, index, None),
        kernels.distances_to(table, index, index[:, -1]),
    ]


SHAPES = [(12, 9001, 9, 7), (12, 9001, 1, 7), (400, 70, 300, 9), (400, 170, 390, 9)]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = threads.threads()
    yield
    threads.set_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_depend_neither_on_threads_nor_on_which_victims_share_a_call(
    shape: tuple[int, int, int, int], dtype: Any
) -> None:
    table, index = wide(*shape, dtype)
    expected = everything(table, index)
    for count in (1, 2, 3):
        threads.set_threads(count)
        for result, wanted in zip(everything(table, index), expected, strict=True):
            same(result, wanted)
    m, f = index.shape[1], (index.shape[1] - 1) // 2
    for some in (slice(0, 2), slice(len(index) // 2, None)):
        part = [kernels.coordinatewise(table, index[some], "trimmed_mean", f, m - f)]
        part += [kernels.squared_distances(table, index[some])]
        for result, wanted in zip(part, (expected[1], expected[0]), strict=True):
            same(result, np.ascontiguousarray(wanted[some]))


def test_concurrent_calls_do_not_disturb_each_other() -> None:
    tables = [wide(12, 5001, 9, 7), wide(30, 3001, 20, 7)]
    alone = [everything(*pair) for pair in tables]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda turn: everything(*tables[turn % 2]), range(12)))
    for turn, results in enumerate(together):
        for expected, result in zip(alone[turn % 2], results, strict=True):
            same(result, expected)


@pytest.mark.parametrize(
    ("m", "f", "dtype"),
    [
        pytest.param(m, f, dtype, marks=() if (m, dtype) == (7, np.float32) else pytest.mark.full)
        for m, f in ((1, 0), (2, 0), (7, 3), (16, 7), (33, 13))
        for dtype in (np.float32, np.float64)
    ],
)
def test_written_kernel_and_the_one_for_any_m_give_the_same_bits(m: int, f: int, dtype: Any) -> None:
    table, index = wide(40, 333, 5, m, dtype)
    table[0, ::3] = -0.0
    codes = coordinates.encode(distances.neighbours(table, index, m - f))
    for mix, k in ((None, 1), (codes, m - f)):
        any_m, written = (
            coordinates.coordinatewise(
                table, index, "trimmed_mean", f, mix, k, np.empty((5, 333), dtype), fast
            )
            for fast in (False, True)
        )
        same(any_m, written)


@pytest.mark.parametrize("step", [0.0, 1e-9, 1e-7, 3e-6, 1e-3])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("h", [3, 200])
def test_neighbours_of_float32_rows_are_those_of_exact_distances(step: float, scale: float, h: int) -> None:
    """Rows whose distances from the first differ by tiny shares, some of them held several times."""
    rng, k = np.random.default_rng(8), 7
    table = rng.normal(size=(40, 1500)) * np.sqrt(1 + step * rng.permutation(40))[:, None]
    table[20:] = table[:20] * (1 + step)
    table[0] = 0
    table[5], table[6] = 1e8, -1e8
    single = (table * scale).clip(-3e38, 3e38).astype(np.float32)
    index = np.stack([rng.choice(40, 13, replace=True) for _ in range(h)])
    squared = backend("plain").squared_distances(single, index)
    kept = distances.neighbours(single, index, k)
    assert (kept == distances.neighbours(single, index, k, alone=True)).all()
    assert (kept.sum(axis=2) == k).all()
    assert kept[:, np.arange(13), np.arange(13)].all()
    own = np.eye(13, dtype=bool)
    farthest = np.where(kept & ~own, squared, 0).max(axis=2)
    nearest_left = np.where(kept, np.inf, squared).min(axis=2)
    assert (farthest <= nearest_left * (1 + 1e-14)).all()
    same_row = index[:, :, None] == index[:, None, :]  # of one row held several times the first are kept
    for i, first, second in np.argwhere(np.triu(same_row, 1)):
        assert (kept[i, :, first] | ~kept[i, :, second] | own[second]).all()


def nanoseconds(call: Callable[[], object], size: float) -> float:
    """Least CPU time of a few calls, for each of so many steps."""
    call()
    took = []
    for _ in range(7):
        start = time.process_time()
        call()
        took.append(time.process_time() - start)
    return min(took) * 1e9 / size


@pytest.mark.usefixtures("_threads")
def test_loops_are_vectorised() -> None:
    """Falling back to scalars costs a factor of eight and more, and nothing but time shows it."""
    threads.set_threads(1)
    n, h, m, d = 40, 36, 16, 8_192
    table, index = wide(n, d, h, m)
    out = np.empty((h, d), np.float32)
    codes = coordinates.encode(distances.neighbours(table, index, 9))
    a, b = np.ones((2, 4096), np.float32)
    least = nanoseconds(lambda: [np.minimum(a, b, out=a) for _ in range(500)], 500 * 4096)
    pairs, sorting, mixing = (
        len(distances._all_pairs(n)[0]) * 8,
        2 * len(coordinates.network(m, range(7, 9))),
        16 * 6,
    )
    steps: dict[str, tuple[Callable[[], object], float]] = {
        "distances": (lambda: distances.squared_distances(table, index, np.float32), pairs * d),
        "combine": (lambda: rows.combine(table, index, np.ones((h, m)), out, True), h * m * d),
        "moments": (lambda: rows.moments(table, index, np.ones((h, 2)), out, True), 2 * h * m * d),
    }

    def trimmed(mix: Array | None, k: int, fast: bool) -> Callable[[], object]:
        return lambda: coordinates.coordinatewise(table, index, "trimmed_mean", 7, mix, k, out, fast)

    for fast in (False, True):
        steps[f"sorting, {fast}"] = trimmed(None, 1, fast), h * sorting * d
        steps[f"mixing, {fast}"] = trimmed(codes, 9, fast), h * (sorting + mixing) * d
    steps["meamed"] = (
        lambda: coordinates.coordinatewise(table, index, "meamed", 7, None, 1, out, False),
        h * 4 * len(list(coordinates.merge_exchange(m))) * d,
    )
    ratios = {name: nanoseconds(call, size) / least for name, (call, size) in steps.items()}
    assert max(ratios.values()) < 1.5, ratios


# --- machine code on disk -----------------------------------------------------------------------------------

PROBE = """
import logging, sys, numpy as np
said = []
logging.getLogger("rpel").setLevel(logging.INFO)
handler = logging.Handler()
handler.emit = said.append
logging.getLogger("rpel").addHandler(handler)
from rpel.backend.base import backend
kernels = backend("numba")
from numba.core import event
with event.install_recorder("numba:compile") as compiling:
    for dtype in sys.argv[1:]:
        table = np.arange(900, dtype=dtype).reshape(9, 100)
        result = kernels.combine(table, np.arange(9)[None], np.ones((1, 9)))
        assert (result == table.sum(axis=0)).all() and result.dtype == dtype
        assert kernels.squared_distances(table, np.arange(9)[None])[0, 0, 1] == 1e6
starts = [event.data["dispatcher"].py_func for _, event in compiling.buffer if event.is_start]
ours = [function for function in starts if function.__module__.startswith("rpel")]
print(len(ours), sum("compiling kernels, once" in record.getMessage() for record in said))
"""


def start_probe(cache: Path, *dtypes: str, source: Path = SOURCE) -> subprocess.Popen[str]:
    """A process that needs the kernels of these types and prints how many it had to compile."""
    environment = {**os.environ, "RPEL_CACHE": str(cache), "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", PROBE, *dtypes]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, int]:
    """How many functions the process compiled, and how often it said so."""
    printed = process.communicate()[0]
    assert process.returncode == 0
    count, said = printed.split()
    return int(count), int(said)


@pytest.mark.integration
def test_code_is_stored_until_a_source_changes(tmp_path: Path) -> None:
    source, cache = tmp_path / "clone", tmp_path / "cache"
    shutil.copytree(SOURCE / "rpel", source / "rpel", ignore=shutil.ignore_patterns("__pycache__"))
    count, said = outcome(start_probe(cache, "float32", source=source))
    assert count > 0
    assert said == 1
    assert outcome(start_probe(cache, "float32", source=source)) == (0, 0)
    with (source / "rpel" / "backend" / "threads.py").open("a") as file:
        file.write("\n# edited\n")
    assert outcome(start_probe(cache, "float32", source=source)) == (count, 1)


@pytest.mark.integration
def test_processes_that_compile_at_the_same_time_compile_each_kernel_once_and_right(tmp_path: Path) -> None:
    together = [start_probe(tmp_path / "together", dtype) for dtype in ("float32", "float64", "float32")]
    counts = [outcome(process)[0] for process in together]
    in_turn = [outcome(start_probe(tmp_path / "in turn", dtype))[0] for dtype in ("float32", "float64")]
    assert sum(counts) == sum(in_turn)
    assert outcome(start_probe(tmp_path / "together", "float32", "float64"))[0] == 0


@pytest.mark.integration
def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert outcome(start_probe(blocked, "float32"))[0] > 0


def test_import_of_the_compiled_backend_does_not_load_torch() -> None:
    code = "import sys, rpel.backend.compiled, rpel.backend.plain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
