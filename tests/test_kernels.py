"""The kernels' promises: twins agree, threads do not matter, hostile values leave no trace,
machine code is kept."""

import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel.backend import cache, coordinates, distances, pool, sorting
from rpel.backend.base import OPERATIONS, Backend, Operation, backend
from rpel.backend.torch import Torch
from rpel.files import locked
from support.waiting import PATIENCE

Array = NDArray[Any]
FAST = ("compiled", "torch")
plain, compiled = backend("plain"), backend("numba")
SOURCE = Path(rpel.__file__).parents[1]


def call(twin: str, name: str, *arguments: Any, **options: Any) -> Array:
    """A primitive of a twin, NumPy in and out; torch gets a budget so small that it must work in pieces."""
    if twin != "torch":
        module: Backend = {"plain": plain, "compiled": compiled}[twin]
        return np.asarray(getattr(module, name)(*arguments, **options))
    arrays = Torch(budget=20_000)
    table, *rest = arguments
    first = table if name == "nearest" else torch.from_numpy(table.copy())
    return np.asarray(getattr(arrays, name)(first, *rest, **options))


class Case:
    """A table and an index drawn from one seed; with `ties`, small integers, so that every sum is exact."""

    def __init__(self, seed: int, m: int, d: int, dtype: Any, ties: bool, repeats: bool) -> None:
        rng = np.random.default_rng(seed)
        n, self.h = max(m, 2) + int(rng.integers(0, 8)), int(rng.integers(1, 6))
        values = rng.integers(-2, 3, (n, d)) if ties else rng.normal(size=(n, d))
        self.rng, self.m, self.d, self.ties = rng, m, d, ties
        self.table: Array = values.astype(dtype)
        self.index: Array = np.stack([rng.choice(n, m, replace=repeats) for _ in range(self.h)])

    def absent(self) -> Array:
        gaps = self.rng.random(self.index.shape) < 0.3
        return np.asarray(np.where(gaps, -1, self.index))

    def mixes(self, k: int) -> list[Array | None]:
        weights = self.rng.integers(-2, 3, (self.h, max(1, self.m - 1), self.m)) / 2
        stored = np.sort(
            self.rng.permuted(np.tile(np.arange(self.m), (self.h, self.m, 1)), axis=2)[:, :, :k], axis=2
        )
        return [None, stored, weights]


sizes = st.one_of(
    st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 511, 512, 513, 600])
)
cases = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    m=st.integers(1, 33),
    d=sizes,
    dtype=st.sampled_from([np.float32, np.float64]),
    ties=st.booleans(),
    repeats=st.booleans(),
)


def close(left: Array, right: Array, dtype: Any) -> None:
    tolerance = 2e-5 if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def same(left: Array, right: Array) -> None:
    """Bit for bit."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = pool.threads()
    yield
    pool.set_threads(before)


@pytest.mark.parametrize("twin", FAST)
@given(case=cases)
def test_compiled_distances_equal_plain_distances(twin: str, case: Case) -> None:
    squared = call(twin, "squared_distances", case.table, case.index)
    np.testing.assert_allclose(squared, plain.squared_distances(case.table, case.index), rtol=1e-12)
    same(squared, np.ascontiguousarray(squared.transpose(0, 2, 1)))
    index = case.absent()
    for origin in (None, case.rng.normal(size=case.d), case.rng.integers(0, len(case.table), case.h)):
        expected = plain.distances_to(case.table, index, origin)
        np.testing.assert_allclose(
            call(twin, "distances_to", case.table, index, origin), expected, rtol=1e-12
        )


@pytest.mark.parametrize("twin", FAST)
@given(case=cases, share=st.floats(0, 1))
def test_nearest_is_stable_and_holds_the_anchor(twin: str, case: Case, share: float) -> None:
    k = 1 + round(share * (case.m - 1))
    squared = plain.squared_distances(case.table, case.index)
    nearest = call(twin, "nearest", squared, k)
    assert np.array_equal(nearest, plain.nearest(squared, k))
    assert (nearest == np.arange(case.m)[:, None]).any(axis=2).all()
    assert (np.diff(nearest, axis=2) > 0).all()


@pytest.mark.parametrize("twin", FAST)
@given(case=cases)
def test_compiled_sums_and_moments_equal_plain_ones(twin: str, case: Case) -> None:
    index, dtype = case.absent(), case.table.dtype
    weights = case.rng.normal(size=index.shape) * (case.rng.random(index.shape) < 0.7)
    mean, std = case.rng.normal(size=(2, case.h)) * (case.rng.random((2, case.h)) < 0.7)
    close(call(twin, "combine", case.table, index, weights), plain.combine(case.table, index, weights), dtype)
    moments = call(twin, "moments", case.table, index, mean, std)
    close(moments, plain.moments(case.table, index, mean, std), dtype)
    assert np.array_equal(call(twin, "finite_rows", case.table), plain.finite_rows(case.table))


def coordinatewise(twin: str, case: Case, operation: Operation, f: int, mix: Array | None) -> Array:
    if twin == "generic":
        out = np.empty((case.h, case.d), case.table.dtype)
        return coordinates.coordinatewise(
            case.table, case.index, operation, f, as_int32(mix), out, specialise=False
        )
    return call(twin, "coordinatewise", case.table, case.index, operation, f, mix)


def as_int32(mix: Array | None) -> Array | None:
    return mix.astype(np.int32) if mix is not None and mix.dtype.kind == "i" else mix


@pytest.mark.parametrize("twin", ["generic", "torch"])
@pytest.mark.parametrize("operation", OPERATIONS)
@given(case=cases, share=st.floats(0, 1))
def test_compiled_coordinate_rules_equal_plain_ones(
    twin: str, operation: Operation, case: Case, share: float
) -> None:
    for mix in case.mixes(1 + round(share * (case.m - 1))):
        count = case.m if mix is None else mix.shape[1]
        f = int(share * (count - 1)) // (1 if operation == "meamed" else 2)
        if operation == "meamed" and mix is not None and mix.dtype.kind == "i" and case.ties:
            continue  # equal distances to the median, unequal after float64 rounding of the plain means
        result = coordinatewise(twin, case, operation, f, mix)
        close(result, plain.coordinatewise(case.table, case.index, operation, f, mix), case.table.dtype)


def near_median_by_index(x: Array, f: int) -> Array:
    """(d,) the mean of the m − f values nearest to the median, ties to the lower row:
    coordinate by coordinate."""
    median, values = np.median(x, axis=0), []
    for column, middle in zip(x.T, median, strict=True):
        order = sorted(range(len(x)), key=lambda j: (abs(column[j] - middle), j))
        values.append(sum(column[j] for j in order[: len(x) - f]) / (len(x) - f))
    return np.array(values)


@pytest.mark.parametrize("twin", ["plain", "generic", "specialised", "torch"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_at_the_median_go_to_the_lower_row(twin: str, dtype: Any) -> None:
    table: Array = np.random.default_rng(3).integers(-3, 4, (9, 300)).astype(dtype)
    table[:, :40] = 5.0  # all equal
    table[:, 40] = [2, 0, 0, 0, 0, 0, 0, 0, -2]
    table[:, 41] = [-2, 0, 0, 0, 0, 0, 0, 0, 2]
    for f in (2, 4) if twin == "specialised" else range(5):  # each f there is compiled anew
        rows = np.array([[3, 1, 4, 0, 5, 8, 2, 6, 7], np.arange(9)])
        if twin in ("plain", "torch"):
            actual = call(twin, "coordinatewise", table, rows, "meamed", f)
        else:
            out = np.empty((2, 300), dtype)
            actual = coordinates.coordinatewise(table, rows, "meamed", f, None, out, twin == "specialised")
        for result, own in zip(actual, rows, strict=True):
            np.testing.assert_allclose(
                result, near_median_by_index(table[own].astype(np.float64), f), atol=1e-6
            )


@pytest.mark.parametrize(
    ("m", "f", "dtype"),
    [
        pytest.param(m, f, dtype, marks=() if (m, dtype) == (7, np.float32) else pytest.mark.full)
        for m, f in ((1, 0), (2, 0), (7, 3), (16, 7), (33, 13))
        for dtype in (np.float32, np.float64)
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_specialised_and_generic_kernels_give_the_same_bits(
    m: int, f: int, operation: Operation, dtype: Any
) -> None:
    for ties in (False, True):
        case = Case(m, m, 300, dtype, ties=ties, repeats=False)
        case.table[0, ::3] = -0.0
        for mix in (None, *case.mixes(m - f)[1:2]):
            out = np.empty((case.h, case.d), dtype)
            generic = coordinatewise("generic", case, operation, f, mix)
            straight = coordinates.coordinatewise(
                case.table, case.index, operation, f, as_int32(mix), out, True
            )
            same(straight, generic)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(values=st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=33), share=st.floats(0, 0.49))
def test_networks_put_the_needed_ranks_in_order(
    operation: Operation, values: list[float], share: float
) -> None:
    m, f = len(values), max(1, int(share * len(values)))
    row = list(values)
    for low, high in sorting.network(m, f, operation):
        row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
    wanted = sorting.ranks(m, f, operation)
    assert len(wanted) > 0
    assert [row[rank] for rank in wanted] == [sorted(values)[rank] for rank in wanted]


def everything(table: Array, index: Array) -> list[Array]:
    h, m = index.shape
    f = (m - 1) // 2
    squared = compiled.squared_distances(table, index)
    nearest = compiled.nearest(squared, m - f)
    factors = np.linspace(-1, 1, h)
    weights = np.linspace(-1, 1, h * m).reshape(h, m)
    return [
        squared,
        nearest,
        *(compiled.coordinatewise(table, index, operation, f, nearest) for operation in OPERATIONS),
        compiled.coordinatewise(table, index, "median", mix=np.repeat(weights[:, None], 3, axis=1)),
        compiled.combine(table, index, weights),
        compiled.moments(table, index, factors, factors),
        compiled.distances_to(table, index, None),
        compiled.distances_to(table, index, index[:, -1]),
        compiled.finite_rows(table),
    ]


def wide(n: int, d: int, h: int, m: int, dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(n + d)
    return rng.normal(size=(n, d)).astype(dtype), np.stack(
        [rng.choice(n, m, replace=False) for _ in range(h)]
    )


@pytest.mark.parametrize("shape", [(12, 9001, 9, 7), (12, 9001, 1, 7), (400, 70, 300, 9)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_do_not_depend_on_the_number_of_threads(shape: tuple[int, int, int, int], dtype: Any) -> None:
    table, index = wide(*shape, dtype)
    results = []
    for count in (1, 2, 3):
        pool.set_threads(count)
        results.append(everything(table, index))
    for first, second, third in zip(*results, strict=True):
        same(first, second)
        same(first, third)


def test_concurrent_calls_do_not_disturb_each_other() -> None:
    tables = [wide(12, 5001, 9, 7), wide(30, 3001, 20, 7)]
    alone = [everything(*pair) for pair in tables]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda turn: everything(*tables[turn % 2]), range(12)))
    for turn, results in enumerate(together):
        for expected, result in zip(alone[turn % 2], results, strict=True):
            same(result, expected)


def test_inputs_are_not_written_to() -> None:
    table, index = wide(12, 700, 9, 7)
    copies = table.copy(), index.copy()
    table.setflags(write=False)
    index.setflags(write=False)
    everything(table, index)
    same(table, copies[0])
    same(index, copies[1])


@pytest.mark.parametrize("d", [700, 3000])
def test_shared_and_per_victim_distances_give_the_same_bits(d: int) -> None:
    table, index = wide(90, d, 1, 1)[0], np.arange(90).reshape(10, 9)
    often = np.tile(index, (20, 1))
    assert distances.are_shared(table, often)
    assert not distances.are_shared(table, index)
    same(compiled.squared_distances(table, often)[:10], compiled.squared_distances(table, index))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "shape", [(400, 70, 300, 9), (12, 2001, 9, 7), (400, 650, 30, 31), (90, 20_000, 40, 9)]
)
def test_neighbours_found_on_the_way_and_beforehand_give_the_same_bits(
    operation: Operation, shape: tuple[int, int, int, int]
) -> None:
    table, index = wide(*shape)
    m, f = shape[3], shape[3] // 3
    nearest = compiled.nearest(compiled.squared_distances(table, index), m - f)
    result = compiled.coordinatewise(table, index, operation, f, m - f)
    same(result, compiled.coordinatewise(table, index, operation, f, nearest))
    for twin in ("plain", "torch"):
        close(call(twin, "coordinatewise", table, index[:5], operation, f, m - f), result[:5], table.dtype)


@pytest.mark.parametrize("step", [0.0, 1e-9, 1e-7, 3e-6, 1e-3])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("h", [3, 200])
def test_neighbours_of_float32_rows_are_those_of_exact_distances(step: float, scale: float, h: int) -> None:
    """Rows whose distances from the first differ by tiny shares, some of them held several times."""
    rng = np.random.default_rng(8)
    m, k, d = 13, 7, 1500
    table = rng.normal(size=(40, d)) * np.sqrt(1 + step * rng.permutation(40))[:, None]
    table[20:] = table[:20] * (1 + step)
    table[0] = 0
    table[5], table[6] = 1e8, -1e8
    single = (table * scale).clip(-3e38, 3e38).astype(np.float32)
    index = np.stack([rng.choice(40, m, replace=True) for _ in range(h)])
    expected = compiled.nearest(compiled.squared_distances(single, index), k)
    same(distances.neighbours(single, index, k), expected)
    stored = np.empty_like(expected)
    distances.neighbours_of(single, index, k, stored)
    same(stored, expected)


def test_function_called_with_a_written_number_is_compiled_once() -> None:
    @cache.inlined
    def added(x: int, more: int) -> int:
        return x + more

    @cache.compiled
    def twice(x: int) -> int:
        return added(x, 1) + added(x, 2)

    assert twice(1) == 5
    part: Any = added
    assert len(part.signatures) == 1


def test_equal_pairs_of_rows_have_equal_distances_wherever_they_stand() -> None:
    rng = np.random.default_rng(3)
    two = rng.normal(size=(2, 1777)).astype(np.float32)
    table = two[rng.integers(0, 2, 40)]
    kind = table[:, 0] == two[1, 0]
    for h in (1, 30):
        index = np.stack([rng.choice(40, 19, replace=False) for _ in range(h)])
        squared = compiled.squared_distances(table, index)
        expected = (kind[index][:, :, None] != kind[index][:, None, :]) * squared.max()
        same(squared, expected)


@pytest.mark.parametrize("twin", ["plain", *FAST])
def test_near_equal_rows_are_ordered_as_in_float64(twin: str) -> None:
    """Rows around 1000 that differ in the seventh digit: a Gram matrix would see noise,
    differences see the order."""
    rng = np.random.default_rng(5)
    centre = 1000 + rng.normal(size=2000)
    steps = 1e-3 * np.sqrt(1 + 1e-6 * np.arange(12))
    table = centre + steps[:, None] * np.sign(rng.normal(size=2000))
    table[0] = centre
    squared = call(twin, "squared_distances", np.ascontiguousarray(table), np.arange(12)[None])
    assert (np.diff(squared[0, 0, 1:]) > 0).all()
    single = table.astype(np.float32)
    exact = np.square(single[:, None].astype(float) - single[None].astype(float)).sum(axis=2)
    np.testing.assert_allclose(
        call(twin, "squared_distances", single, np.arange(12)[None])[0], exact, rtol=1e-12
    )


@pytest.mark.parametrize("twin", ["plain", *FAST])
@pytest.mark.parametrize("huge", [1e6, 1e8, 3e38, -3e38, "both"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_huge_forged_rows_leave_the_honest_result(twin: str, huge: float | str, operation: Operation) -> None:
    """f forged rows of m: whatever their size, the result stays inside the range of the honest values."""
    m, f, d = 16, 7, 300
    rng = np.random.default_rng(7)
    table = rng.normal(size=(m, d)).astype(np.float32)
    forged = np.where(np.arange(f) % 2, 3e38, -3e38)[:, None] if huge == "both" else float(huge)
    table[m - f :] = forged
    index = np.arange(m)[None]
    nearest = call(twin, "nearest", call(twin, "squared_distances", table, index), m - f)
    honest = table[: m - f]
    for mix in (nearest, None):
        result = call(twin, "coordinatewise", table, index, operation, f, mix)
        assert np.isfinite(result).all()
        assert (result >= honest.min(axis=0) - 1e-6).all()
        assert (result <= honest.max(axis=0) + 1e-6).all()
    if operation != "meamed":
        np.testing.assert_allclose(
            call(twin, "coordinatewise", table, index, operation, f, nearest)[0],
            plain.coordinatewise(table.astype(np.float64), index, operation, f, nearest)[0],
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("twin", ["plain", *FAST])
def test_rows_without_weight_are_not_read(twin: str) -> None:
    table = np.array([[1, 2], [np.nan, np.inf], [3, 4], [np.inf, -np.inf]], np.float32)
    index = np.array([[0, 1, 2], [-1, 3, 2]])
    weights = np.array([[1.0, 0.0, 2.0], [np.nan, 0.0, 1.0]])
    result = call(twin, "combine", table, index, weights)
    np.testing.assert_array_equal(result, [[7, 10], [3, 4]])
    index[:, 1] = -1
    result = call(twin, "moments", table, index, np.ones(2), np.ones(2))
    root = math.sqrt(2)
    np.testing.assert_allclose(result, np.array([[2 + root, 3 + root], [3, 4]]), rtol=1e-6)


@pytest.mark.parametrize("twin", ["plain", *FAST])
def test_great_mean_does_not_cancel_the_deviation(twin: str) -> None:
    table = np.array([[1e8 + 1], [1e8 + 2], [1e8 + 3]])
    result = call(twin, "moments", table, np.array([[0, 1, 2]]), np.zeros(1), np.ones(1))
    np.testing.assert_allclose(result, [[1.0]], rtol=1e-12)


@pytest.mark.parametrize("twin", ["plain", *FAST])
def test_mean_of_equal_rows_is_that_row(twin: str) -> None:
    row = np.random.default_rng(1).normal(size=500).astype(np.float32)
    table, index = np.tile(row, (7, 1)), np.arange(7)[None]
    mix = np.tile(np.arange(3), (1, 7, 1))
    for operation in OPERATIONS:
        np.testing.assert_allclose(
            call(twin, "coordinatewise", table, index, operation, 2, mix)[0], row, rtol=2e-7
        )


def test_results_are_written_where_asked() -> None:
    table, index = wide(9, 200, 5, 4)
    factors = np.ones(5)
    calls: list[Callable[[Array | None], Array]] = [
        lambda out: compiled.combine(table, index, np.ones((5, 4)), out),
        lambda out: compiled.moments(table, index, factors, factors, out),
        lambda out: compiled.coordinatewise(table, index, "median", out=out),
    ]
    for function in calls:
        out = np.empty((5, 200), np.float32)
        assert function(out) is out
        same(out, function(None))


@pytest.mark.parametrize("module", [plain, compiled])
def test_wrong_kernel_arguments_are_refused(module: Any) -> None:
    table, index = wide(9, 20, 5, 4)
    for bad in (np.array([[9]]), np.array([[-1]]), np.array([0, 1]), np.array([[0.5]])):
        with pytest.raises(ValueError, match="index"):
            module.squared_distances(table, bad)
    with pytest.raises(ValueError, match="table"):
        module.combine(table[:, ::2], index, np.ones((5, 4)))
    with pytest.raises(ValueError, match=r"\d"):
        module.coordinatewise(table, index, "trimmed_mean", 2)
    with pytest.raises(ValueError, match="operation"):
        module.coordinatewise(table, index, "mode")
    with pytest.raises(ValueError, match="mix"):
        module.coordinatewise(table, index, "median", mix=np.full((5, 2, 2), 4))
    with pytest.raises(ValueError, match="mix"):
        module.coordinatewise(table, index, "median", mix=5)
    with pytest.raises(ValueError, match="memory"):
        module.combine(table, index[:, :1], np.ones((5, 1)), out=table[:5])


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
        assert kernels.finite_rows(table).all()
        result = kernels.combine(table, np.arange(9)[None], np.ones((1, 9)))
        assert (result == table.sum(axis=0)).all() and result.dtype == dtype
starts = [event.data["dispatcher"].py_func for _, event in compiling.buffer if event.is_start]
ours = [function for function in starts if function.__module__.startswith("rpel")]
print(len(ours), sum("compiling kernels" in record.getMessage() for record in said))
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
    compiled_, said = printed.split()
    return int(compiled_), int(said)


def compilations(process: subprocess.Popen[str]) -> int:
    return outcome(process)[0]


def clone(folder: Path) -> Path:
    shutil.copytree(SOURCE / "rpel", folder / "rpel", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.integration
def test_second_process_and_another_clone_compile_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    count, said = outcome(start_probe(cache, "float32"))
    assert count > 0
    assert said == 1
    assert outcome(start_probe(cache, "float32")) == (0, 0)
    assert outcome(start_probe(cache, "float32", source=clone(tmp_path / "elsewhere"))) == (0, 0)


@pytest.mark.integration
def test_edit_in_a_file_that_a_kernel_calls_is_not_missed(tmp_path: Path) -> None:
    source, cache = clone(tmp_path / "clone"), tmp_path / "cache"
    before = compilations(start_probe(cache, "float32", source=source))
    with (source / "rpel" / "backend" / "vectors.py").open("a") as file:
        file.write("\n# edited\n")
    assert compilations(start_probe(cache, "float32", source=source)) == before


def aged(folder: Path, days: float) -> Path:
    """A folder with a file in it, last used so many days ago."""
    folder.mkdir(parents=True)
    (folder / "kernel.nbi").write_bytes(b"machine code")
    os.utime(folder, (time.time() - days * 86_400,) * 2)
    return folder


@pytest.mark.integration
def test_new_folder_of_kernels_removes_those_unused_for_a_month_and_nothing_else(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    old, recent, other = (
        aged(kernels / name, days) for name, days in (("0" * 20, 31), ("1" * 20, 29), ("notes", 90))
    )
    compilations(start_probe(tmp_path, "float32"))
    assert not old.exists()
    assert (recent / "kernel.nbi").exists()
    assert (other / "kernel.nbi").exists()
    used = {path.name for path in kernels.iterdir() if path.is_dir()} - {recent.name, other.name}
    for name in used:
        os.utime(kernels / name, (time.time() - 40 * 86_400,) * 2)
    aged(kernels / ("2" * 20), 40)
    # old, but used: and no folder was new, so all stay
    assert compilations(start_probe(tmp_path, "float32")) == 0
    assert {path.name for path in kernels.iterdir() if path.is_dir()} == used | {
        recent.name,
        other.name,
        "2" * 20,
    }
    assert all(time.time() - (kernels / name).stat().st_mtime < 86_400 for name in used)


REMOVED = """
import shutil, sys, numpy as np
from rpel.backend.base import backend
kernels = backend("numba")
from rpel.backend.cache import folder
shutil.rmtree(folder())
total = np.zeros(3)
kernels.column_sums(np.ones((2, 3)), slice(0, 3), total)
assert (total == 2).all()
assert any(folder().rglob("*_add_rows*.nbi"))
"""


def test_process_whose_folder_was_removed_meanwhile_compiles_and_stores_again(tmp_path: Path) -> None:
    environment = {**os.environ, "RPEL_CACHE": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", REMOVED], env=environment, check=True)


@pytest.mark.integration
def test_processes_that_compile_at_the_same_time_compile_everything_once_and_right(tmp_path: Path) -> None:
    kinds = [("float32",), ("float64",)]
    together = [start_probe(tmp_path / "together", *dtypes) for dtypes in kinds]
    counts = [compilations(process) for process in together]
    assert sum(counts) == sum(compilations(start_probe(tmp_path / "in turn", *dtypes)) for dtypes in kinds)
    assert compilations(start_probe(tmp_path / "together", "float32", "float64")) == 0


WORK = """
import numpy as np, rpel
from rpel.backend.cache import folder
table, index = np.zeros((5000, 1000), np.float32), np.arange(5000)[:, None] % [[1000, 900, 800, 700, 600]]
for _ in range(2):
    rpel.rule("trimmed_mean", f=1).aggregate(table, index)  # 2.5e7 values a call
    print([path.name for path in folder().glob("*.ready")])
"""


@pytest.mark.integration
def test_specialised_kernel_is_compiled_for_many_small_calls(tmp_path: Path) -> None:
    environment = {**os.environ, "RPEL_CACHE": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    run = subprocess.run(
        [sys.executable, "-c", WORK], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == ["[]", "['trimmed_mean-5-1-float32-rows.ready']"]


@pytest.mark.integration
def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert compilations(start_probe(blocked, "float32")) > 0


def test_import_of_the_fast_twin_does_not_load_torch() -> None:
    code = "import sys, rpel.backend.compiled, rpel.backend.plain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_long_wait_for_another_process_that_compiles_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LONG", 0.0)
    cache.explain.cache_clear()
    held, waited = threading.Event(), threading.Event()
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            waited.set()

    def wait() -> None:
        with cache.held(tmp_path / "lock"):
            held.set()

    listener, waiting = Listener(), threading.Thread(target=wait)
    logging.getLogger("rpel").addHandler(listener)
    try:
        with locked(tmp_path / "lock"):
            waiting.start()
            assert waited.wait(PATIENCE)
            assert not held.is_set()
        assert held.wait(PATIENCE)
    finally:
        logging.getLogger("rpel").removeHandler(listener)
        waiting.join()
    assert "compiling kernels" in said[0]
