"""What robustness means: with at most f hostile vectors the result stays near the honest,
whatever they contain."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel import rules as A
from support.rule_cases import CASES, GRAPH_RULES, IDS, OWN, cloud

Array = NDArray[Any]


def measures_lengths(name: str, parameters: dict[str, Any]) -> bool:
    """Clipping and cge promise something about lengths, not about the honest mean."""
    return name.startswith("clipping") or (name == "cge" and "center" not in parameters)


ROBUST = [case for case in CASES if case[3] > 0]
NEAR = [case for case in ROBUST if not measures_lengths(*case[:2])]
NEAR_IDS = [i for i, c in zip(IDS, CASES, strict=True) if c in NEAR]
HOSTILE = {
    "nan": np.nan,
    "inf": np.inf,
    "minus_inf": -np.inf,
    "huge": 3.4e38,
    "minus_huge": -3.4e38,
    "large": 1e8,
    "zero": 0.0,
}


def error_and_variance(result: Array, honest: Array) -> tuple[float, float]:
    """‖R − mean‖² and (1/|U|) Σ ‖v − mean‖² over the honest vectors."""
    centre = honest.astype(np.float64).mean(axis=0)
    variance = np.square(honest - centre).sum(axis=1).mean()
    return float(np.square(result - centre).sum()), float(variance)


def reach(case: tuple[str, dict[str, Any], int, int], honest: Array) -> float:
    """How far a rule without κ may lead from the honest mean: in diameters,
    or boxes if it goes by coordinate."""
    name, _, m, _ = case
    box = float(np.linalg.norm(honest.max(axis=0) - honest.min(axis=0)))
    diameter = float(np.linalg.norm(honest[:, None] - honest[None], axis=2).max())
    by_coordinate = any(part in name for part in ("meamed", "bulyan", "trimmed_mean", "median"))
    return 2 * box if by_coordinate else (np.sqrt(m) + 2) * diameter


def check(case: tuple[str, dict[str, Any], int, int], x: Array, honest: Array) -> None:
    """Finite, and within κ of the honest mean (or, without κ, within a few diameters)."""
    name, parameters, m, _ = case
    rule = rpel.rule(name, **parameters)
    result = rule(x)
    assert np.isfinite(result).all()
    error, variance = error_and_variance(result, honest)
    kappa = rule.kappa(m)
    slack = 1e-9 * float(np.square(honest).max()) * honest.shape[1]  # rounding of the vectors themselves
    bound = reach(case, honest) ** 2 if kappa is None else kappa * variance
    assert error <= bound * (1 + 1e-6) + slack * (100 if x.dtype == np.float32 else 1)


@given(st.integers(0, 10**6), st.sampled_from(NEAR), st.sampled_from([1.0, 10.0, 1e4]), st.booleans())
def test_random_hostile_vectors_stay_within_kappa(
    seed: int, case: tuple[str, dict[str, Any], int, int], scale: float, first: bool
) -> None:
    name, _, m, f = case
    x = cloud(seed, m, 8)
    hostile = np.arange(f) if first and name not in OWN else np.arange(m - f, m)
    x[hostile] += scale * np.random.default_rng(seed).normal(size=(f, 8))
    check(case, x, np.delete(x, hostile, axis=0))


@pytest.mark.parametrize("case", NEAR, ids=NEAR_IDS)
@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hostile_content_leaves_a_finite_result_near_the_honest(
    case: tuple[str, dict[str, Any], int, int], content: str, dtype: type
) -> None:
    _, _, m, f = case
    for spread_out in (False, True):
        x = cloud(21, m, 12, dtype)
        if spread_out:  # one entry only: the vector looks honest elsewhere
            x[m - f :, 5] = HOSTILE[content]
        else:
            x[m - f :] = HOSTILE[content]
        check(case, x, x[: m - f])


@pytest.mark.parametrize("case", NEAR, ids=NEAR_IDS)
def test_equal_and_nearly_equal_vectors_are_handled(case: tuple[str, dict[str, Any], int, int]) -> None:
    name, parameters, m, f = case
    base = np.random.default_rng(4).normal(size=40).astype(np.float32)
    equal = np.tile(base, (m, 1))
    np.testing.assert_allclose(rpel.rule(name, **parameters)(equal), base, rtol=1e-6)
    near = (base * (1 + 1e-6 * np.random.default_rng(5).normal(size=(m, 40)))).astype(np.float32)
    check(case, near, near[: m - f])


def test_nearly_equal_models_are_ordered_as_in_float64() -> None:
    """A float32 Gram matrix would lose the order: the relative differences are 1e-6."""
    base = np.random.default_rng(6).normal(size=2000)
    x = np.array([base * (1 + 1e-6 * a) for a in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]).astype(np.float32)
    stored = A.monna(3)(x)
    expected = x[:4].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(stored, expected, rtol=1e-7)
    best = int(np.argmin(np.linalg.norm(x - A.krum(3)(x), axis=1)))
    plain_best = int(
        np.argmin(np.linalg.norm(x.astype(np.float64) - A.krum(3)(x.astype(np.float64)), axis=1))
    )
    assert best == plain_best


@pytest.mark.parametrize("forged", [1e6, 1e8, 3e38])
@pytest.mark.parametrize("name", ["nnm+trimmed_mean", "nnm+median"])
def test_huge_forged_entries_do_not_touch_the_honest_mean_as_sum_minus_dropped_would(
    name: str, forged: float
) -> None:
    x = np.full((16, 1000), 0.101, dtype=np.float32)
    x[9:] = forged
    np.testing.assert_allclose(rpel.rule(name, f=7)(x), 0.101, rtol=1e-6)


@pytest.mark.parametrize("content", HOSTILE)
def test_cge_gives_nothing_longer_than_the_longest_honest_vector(content: str) -> None:
    x = cloud(21, 8, 12)
    x[5:] = HOSTILE[content]
    assert np.linalg.norm(A.cge(3)(x)) <= np.linalg.norm(x[:5], axis=1).max()


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("hostile", [1, 5])
def test_balance_moves_at_most_half_its_reach(content: str, hostile: int) -> None:
    x = cloud(21, 8, 12)
    x[8 - hostile :] = HOSTILE[content]
    moved = np.linalg.norm(A.balance()(x) - x[0])
    assert moved <= 0.5 * 0.3 * np.linalg.norm(x[0])


@pytest.mark.parametrize("content", HOSTILE)
def test_clipping_shortens_whatever_comes_to_the_length_promised(content: str) -> None:
    """It shortens honest vectors, too: its promise is about length, not about their mean."""
    rule, x = rpel.rule("clipping+median", f=2, c=1.0), cloud(21, 9, 12)
    x[7:] = HOSTILE[content]
    result = rule(x)
    assert np.isfinite(result).all()
    length = np.linalg.norm(x[:7], axis=1, keepdims=True)
    honest = x[:7] * np.minimum(1, 1.0 / length)
    assert (result >= honest.min(axis=0) - 1e-12).all()
    assert (result <= honest.max(axis=0) + 1e-12).all()


def test_non_finite_vectors_count_among_the_f() -> None:
    """g left out first, then the rule on m − g with f − g."""
    x = cloud(23, 11, 5)
    x[4], x[9] = np.nan, np.inf
    rest = np.delete(x, [4, 9], axis=0)
    for name in ("trimmed_mean", "krum", "nnm+trimmed_mean", "multi_krum", "meamed"):
        np.testing.assert_allclose(rpel.rule(name, f=4)(x), rpel.rule(name, f=2)(rest), atol=1e-12)
    np.testing.assert_allclose(A.mean()(x), rest.mean(axis=0), atol=1e-12)


def test_non_finite_centre_is_refused() -> None:
    x = cloud(24, 5, 3)
    x[0, 0] = np.nan
    for rule in (A.monna(1), A.centered_clipping()):
        with pytest.raises(ValueError, match=r"finite .*column 0.*centre"):
            rule(x)


def test_pivot_stays_the_pivot_without_earlier_vectors() -> None:
    x = cloud(27, 8, 4)
    x[1] = np.nan
    rest = np.delete(x, 1, axis=0)
    np.testing.assert_allclose(A.monna(3, pivot=4)(x), A.monna(2, pivot=3)(rest), atol=1e-12)


def test_pre_aggregation_alone_hands_non_finite_rows_through() -> None:
    x = cloud(25, 7, 3)
    x[2] = np.inf
    rows = A.nnm(2)(x)
    assert np.isinf(rows[2]).all()
    np.testing.assert_allclose(np.delete(rows, 2, axis=0), A.nnm(1)(np.delete(x, 2, axis=0)), atol=1e-12)
    assert A.bucketing(size=2)(x).shape == (4, 3)  # three buckets of six, and the infinite one


@pytest.mark.parametrize(("name", "parameters"), GRAPH_RULES[1:])
@pytest.mark.parametrize("content", HOSTILE)
def test_graph_rules_survive_hostile_content(name: str, parameters: dict[str, Any], content: str) -> None:
    rule = rpel.rule(name, **parameters)
    x = cloud(26, 9, 12, np.float32)
    x[7:] = HOSTILE[content]
    hostile = np.arange(9) >= 7
    result = rule(x, weights=np.full(9, 1 / 9), hostile=hostile)
    assert np.isfinite(result).all()
    honest = x[:7]
    diameter = np.linalg.norm(honest[:, None] - honest[None], axis=2).max()
    assert np.linalg.norm(result - honest.mean(axis=0)) <= 3 * diameter
