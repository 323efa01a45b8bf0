"""All three backends give the results of `plain`, on generated cases and on hostile content."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rpel.backend.base import OPERATIONS, Backend, Operation, backend
from rpel.backend.tensors import Torch

Array = NDArray[Any]
FAST = ("numba", "torch")
ALL = ("plain", *FAST)
plain = backend("plain")


class OnTensors:
    """The torch backend as one of NumPy arrays, with a budget so small that it must work in chunks."""

    def __init__(self) -> None:
        self.torch = Torch(budget=20_000)

    def __getattr__(self, name: str) -> Callable[..., Array]:
        def call(*given: Any, **named: Any) -> Array:
            table, *rest = given
            first = table if name == "nearest" else torch.from_numpy(table.copy())
            return np.asarray(getattr(self.torch, name)(first, *rest, **named))

        return call


def of(name: str) -> Any:
    return OnTensors() if name == "torch" else backend(name)


class Case:
    """A table and an index drawn from one seed; with `ties`, small integers, so that every sum is exact."""

    def __init__(self, seed: int, m: int, d: int, dtype: Any, ties: bool, repeats: bool) -> None:
        rng = np.random.default_rng(seed)
        n, self.h = max(m, 2) + int(rng.integers(0, 8)), int(rng.integers(1, 6))
        values = rng.integers(-2, 3, (n, d)) if ties else rng.normal(size=(n, d))
        self.rng, self.m, self.d, self.ties = rng, m, d, ties
        self.table: Array = values.astype(dtype)
        self.index: Array = np.stack([rng.choice(n, m, replace=repeats) for _ in range(self.h)])
        self.gaps: Array = np.where(rng.random(self.index.shape) < 0.3, -1, self.index)
        self.weights = rng.normal(size=self.index.shape) * (rng.random(self.index.shape) < 0.7)
        self.factors = rng.normal(size=(2, self.h)) * (rng.random((2, self.h)) < 0.7)
        self.k = int(rng.integers(1, m + 1))
        self.k = 1 << (self.k.bit_length() - 1) if ties else self.k  # so that means are exact, too
        stored = rng.permuted(np.tile(np.arange(m), (self.h, m, 1)), axis=2)[:, :, : self.k]
        mixing = rng.integers(-2, 3, (self.h, max(1, m - 1), m)) / 2
        self.mixes: list[Any] = [None, mixing, np.sort(stored, axis=2), self.k]


sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 700]))
cases = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    m=st.integers(1, 33),
    d=sizes,
    dtype=st.sampled_from([np.float32, np.float64]),
    ties=st.booleans(),
    repeats=st.booleans(),
)


def distances(kernels: Backend, case: Case) -> list[Array]:
    squared = kernels.squared_distances(case.table, case.index)
    assert (squared == squared.transpose(0, 2, 1)).all()
    point, points = case.rng.normal(size=case.d), case.rng.normal(size=(case.h, case.d))
    origins = (None, point, points, case.index[:, -1])
    return [squared, *(kernels.distances_to(case.table, case.gaps, origin) for origin in origins)]


def sums(kernels: Backend, case: Case) -> list[Array]:
    return [
        kernels.combine(case.table, case.gaps, case.weights),
        kernels.moments(case.table, case.gaps, *case.factors),
    ]


def coordinates(operation: Operation) -> Callable[[Backend, Case], list[Array]]:
    def results(kernels: Backend, case: Case) -> list[Array]:
        found = []
        # mixed rows are often equal, and rounding would break their ties at the median
        for mix in case.mixes[:2] if operation == "meamed" and not case.ties else case.mixes:
            count = case.m if mix is None or isinstance(mix, int) else mix.shape[1]
            f = (count - 1) // 2
            found.append(kernels.coordinatewise(case.table, case.index, operation, f, mix))
        return found

    return results


def exact(kernels: Backend, case: Case) -> list[Array]:
    squared = plain.squared_distances(case.table, case.index)
    return [kernels.finite_rows(case.table), kernels.nearest(squared, case.k)]


PRIMITIVES: dict[str, tuple[Callable[[Backend, Case], list[Array]], float, float]] = {
    "distances": (distances, 1e-12, 1e-12),
    "sums": (sums, 2e-5, 1e-11),
    **{operation: (coordinates(operation), 2e-5, 1e-11) for operation in OPERATIONS},
    "exact": (exact, 0.0, 0.0),
}
"""What is compared, and the tolerance for float32 and float64."""


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("primitive", PRIMITIVES)
@given(case=cases)
def test_backend_gives_the_results_of_plain(primitive: str, name: str, case: Case) -> None:
    results, single, double = PRIMITIVES[primitive]
    tolerance = single if case.table.dtype == np.float32 else double
    state = case.rng.bit_generator.state
    expected = results(plain, case)
    case.rng.bit_generator.state = state
    for result, wanted in zip(results(of(name), case), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ALL)
def test_rows_without_weight_are_not_read(name: str) -> None:
    table = np.array([[1, 2], [np.nan, np.inf], [3, 4], [np.inf, -np.inf]], np.float32)
    index = np.array([[0, 1, 2], [-1, 3, 2]])
    weights = np.array([[1.0, 0.0, 2.0], [np.nan, 0.0, 1.0]])
    np.testing.assert_array_equal(of(name).combine(table, index, weights), [[7, 10], [3, 4]])
    assert of(name).finite_rows(table).tolist() == [True, False, True, False]
    index[:, 1] = -1
    result, root = of(name).moments(table, index, np.ones(2), np.ones(2)), 2**0.5
    np.testing.assert_allclose(result, np.array([[2 + root, 3 + root], [3, 4]]), rtol=1e-6)
    assert not of(name).moments(table, np.full((1, 3), -1), np.ones(1), np.ones(1)).any()


@pytest.mark.parametrize("name", ALL)
def test_nothing_cancels(name: str) -> None:
    """Rows around 1000 that differ in the seventh digit, and a deviation of 1 around 10⁸."""
    rng = np.random.default_rng(5)
    steps = 1e-3 * np.sqrt(1 + 1e-6 * np.arange(12))
    table = 1000 + rng.normal(size=2000) + steps[:, None] * np.sign(rng.normal(size=2000))
    table[0] = 1000
    single = table.astype(np.float32)
    exactly = np.square(single[:, None].astype(float) - single[None].astype(float)).sum(axis=2)
    found = of(name).squared_distances(single, np.arange(12)[None])[0]
    np.testing.assert_allclose(found, exactly, rtol=1e-12)
    large = np.array([[1e8 + 1], [1e8 + 2], [1e8 + 3]])
    np.testing.assert_allclose(
        of(name).moments(large, np.array([[0, 1, 2]]), np.zeros(1), np.ones(1)), [[1.0]], rtol=1e-12
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("huge", [1e6, 1e8, 3e38, -3e38, "both"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_huge_forged_rows_leave_the_honest_result(name: str, huge: float | str, operation: Operation) -> None:
    m, f, d = 16, 7, 300
    table = np.random.default_rng(7).normal(size=(m, d)).astype(np.float32)
    table[m - f :] = np.where(np.arange(f) % 2, 3e38, -3e38)[:, None] if huge == "both" else float(huge)
    index, honest = np.arange(m)[None], table[: m - f]
    for mix in (None, m - f, of(name).nearest(of(name).squared_distances(table, index), m - f)):
        result = of(name).coordinatewise(table, index, operation, f, mix)
        assert np.isfinite(result).all()
        assert (result >= honest.min(axis=0) - 1e-6).all()
        assert (result <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_finite_rows_near_the_largest_number_are_finite(dtype: Any) -> None:
    table = np.empty((9, 200), dtype)
    table[:] = np.where(np.arange(9) % 2, 1, -1)[:, None] * np.finfo(dtype).max
    everyone = np.tile(np.arange(9), (1, 9, 1))
    for operation in ("trimmed_mean", "median"):
        result = of("numba").coordinatewise(table, np.arange(9)[None], operation, 2, everyone)
        np.testing.assert_allclose(result, -np.finfo(dtype).max / 9, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_mean_of_equal_rows_is_that_row(name: str) -> None:
    row = np.random.default_rng(1).normal(size=500).astype(np.float32)
    table, mix = np.tile(row, (7, 1)), np.tile(np.arange(3), (1, 7, 1))
    for operation in OPERATIONS:
        result = of(name).coordinatewise(table, np.arange(7)[None], operation, 2, mix)
        np.testing.assert_allclose(result[0], row, rtol=2e-7)


@pytest.mark.parametrize("name", ["plain", "numba"])
def test_wrong_arguments_are_refused(name: str) -> None:
    kernels, table = backend(name), np.zeros((9, 20), np.float32)
    index = np.arange(20).reshape(5, 4) % 9
    for bad in (np.array([[9]]), np.array([[-1]]), np.array([0, 1]), np.array([[0.5]])):
        with pytest.raises(ValueError, match="index"):
            kernels.squared_distances(table, bad)
    calls: dict[str, Callable[[], object]] = {
        "table": lambda: kernels.combine(table[:, ::2], index, np.ones((5, 4))),
        "memory": lambda: kernels.combine(table, index[:, :1], np.ones((5, 1)), out=table[:5]),
        "f=2": lambda: kernels.coordinatewise(table, index, "trimmed_mean", 2),
        "operation": lambda: kernels.coordinatewise(table, index, "mode"),  # type: ignore[arg-type]
        "mix holds 4": lambda: kernels.coordinatewise(table, index, "median", mix=np.full((5, 2, 2), 4)),
        "mix must": lambda: kernels.coordinatewise(table, index, "median", mix=5),
    }
    for said, call in calls.items():
        with pytest.raises(ValueError, match=said):
            call()


def test_results_are_written_where_asked_and_inputs_stay() -> None:
    kernels, rng = backend("numba"), np.random.default_rng(0)
    table, index, factors = (
        rng.normal(size=(9, 200)).astype(np.float32),
        np.arange(20).reshape(5, 4) % 9,
        np.ones(5),
    )
    before = table.copy()
    calls: list[Callable[[Any], Array]] = [
        lambda out: kernels.combine(table, index, np.ones((5, 4)), out),
        lambda out: kernels.moments(table, index, factors, factors, out),
        lambda out: kernels.coordinatewise(table, index, "median", 0, 2, out),
    ]
    for call in calls:
        out = np.empty((5, 200), np.float32)
        assert call(out) is out
        np.testing.assert_array_equal(out, call(None))
    np.testing.assert_array_equal(table, before)
