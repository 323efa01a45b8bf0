"""Every rule computes its definition, for one input or many, in NumPy and in torch."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel import rules as A
from support.rule_cases import CASES, GRAPH_RULES, IDS, SHUFFLED, cloud, metropolis_like, table_and_index

Array = NDArray[Any]
DEALT_ALIKE = [case for case in CASES if not case[0].startswith(SHUFFLED)]
"""All but the rules that deal every victim's vectors at random."""


@pytest.mark.parametrize(("name", "parameters", "m", "f"), CASES, ids=IDS)
def test_half_precision_comes_back_as_half_precision(
    name: str, parameters: dict[str, Any], m: int, f: int
) -> None:
    rule, x = rpel.rule(name, **parameters), torch.from_numpy(cloud(2, m, 9)).to(torch.float16)
    assert rule(x).dtype == torch.float16
    np.testing.assert_allclose(rule(x).float().numpy(), rule(x.float()).numpy(), atol=0.05)


@pytest.mark.parametrize(("name", "parameters", "m", "f"), DEALT_ALIKE)
def test_batched_rule_equals_entries_one_by_one(
    name: str, parameters: dict[str, Any], m: int, f: int
) -> None:
    rule = rpel.rule(name, **parameters)
    x = np.stack([[cloud(10 * a + b, m, 17) for b in range(3)] for a in range(2)])
    aggregated = rule(x)
    assert aggregated.shape == (2, 3, 17)
    for a in range(2):
        for b in range(3):
            np.testing.assert_allclose(aggregated[a, b], rule(x[a, b]), rtol=0, atol=1e-12)


def test_torch_table_and_a_torch_out_work_without_a_copy() -> None:
    rule = rpel.rule("nnm+trimmed_mean", f=2)
    table, index = table_and_index(7, np.float32)
    out = torch.empty(12, 41)
    assert rule.aggregate(torch.from_numpy(table), torch.from_numpy(index), out=out) is out
    np.testing.assert_array_equal(out.numpy(), rule.aggregate(table, index))


def test_smea_picks_the_subset_with_the_calmest_covariance() -> None:
    x = cloud(7, 8, 5)
    x[2] += 3
    best = min(
        combinations(range(8), 6), key=lambda c: np.linalg.eigvalsh(np.cov(x[list(c)].T, bias=True))[-1]
    )
    np.testing.assert_allclose(A.smea(2)(x), x[list(best)].mean(axis=0), atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 8), st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_smea_leaves_aside_only_subsets_that_cannot_win(seed: int, f: int, equal: int, size: float) -> None:
    """The same bits as when every subset's eigenvalue is computed."""
    x = size * cloud(seed, 8, 5)
    x[:f] *= 10.0 ** (seed % 5)
    x[:equal] = x[0]
    quick = A.smea(f)(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpel.rules.linear._lower_bound", lambda gram: np.zeros(len(gram)))
        assert quick.tobytes() == A.smea(f)(x).tobytes()


def test_caf_equals_its_definition_in_the_full_space() -> None:
    x, f = cloud(8, 9, 4), 2
    x[1] += 4
    c, best, least = np.ones(9), x.mean(axis=0), np.inf
    while c.sum() > 9 - 2 * f:
        mu = c @ x / c.sum()
        values, vectors = np.linalg.eigh((c[:, None] * (x - mu)).T @ (x - mu) / c.sum())
        if values[-1] < least:
            best, least = mu, values[-1]
        tau = ((x - mu) @ vectors[:, -1]) ** 2
        c = c * (1 - np.where(c > 0, tau, 0) / tau[c > 0].max())
    np.testing.assert_allclose(A.caf(f)(x), best, atol=1e-9)


def test_bulyan_equals_its_definition() -> None:
    x, f = cloud(9, 12, 7), 2
    remaining, picked = list(range(12)), []
    for _ in range(12 - 2 * f):
        squared = np.square(x[remaining][:, None] - x[remaining][None]).sum(axis=2)
        scores = [np.sort(np.delete(row, i))[: len(remaining) - f - 1].sum() for i, row in enumerate(squared)]
        picked.append(remaining.pop(int(np.argmin(scores))))
    y = x[picked]
    near = np.argsort(np.abs(y - np.median(y, axis=0)), axis=0, kind="stable")[: len(picked) - 2 * f]
    np.testing.assert_allclose(A.bulyan(f)(x), np.take_along_axis(y, near, axis=0).mean(axis=0), atol=1e-12)


def test_meamed_and_bulyan_break_ties_by_index() -> None:
    assert A.meamed(1)(np.array([[2.0], [0.0], [-2.0]]))[0] == 1.0, "2 comes first"
    assert A.meamed(1)(np.array([[-2.0], [0.0], [2.0]]))[0] == -1.0, "−2 comes first"
    assert A.meamed(1)(torch.tensor([[2.0], [0.0], [-2.0]]))[0] == 1.0
    # krum picks all but the nineties, median 0
    x = np.array([[2.0], [0.0], [-2.0], [0.0], [5.0], [90.0], [-90.0]])
    assert A.bulyan(1)(x)[0] == pytest.approx(2 / 3), "kept are 0, 0 and the first of 2, −2"
    assert A.bulyan(1)(x[[2, 1, 0, 3, 4, 5, 6]])[0] == pytest.approx(-2 / 3)


def test_converged_geometric_median_minimises_the_sum_of_distances() -> None:
    x = cloud(11, 9, 4)
    z = A.geometric_median(tol=1e-10)(x)

    def total(p: Array) -> float:
        return float(np.linalg.norm(x - p, axis=1).sum())

    for direction in np.concatenate([np.eye(4), -np.eye(4)]):
        assert total(z) <= total(z + 1e-3 * direction)


def test_zeros_break_only_the_truncated_geometric_median() -> None:
    x = np.concatenate([np.full((9, 3), 10.0), np.zeros((7, 3))])
    assert np.linalg.norm(A.geometric_median()(x) - 10) > 5
    assert np.linalg.norm(A.geometric_median(tol=1e-9)(x) - 10) < 1e-2


def test_centred_clipping_can_start_from_any_vector() -> None:
    x, v = cloud(12, 5, 3), np.array([0.5, -1.0, 2.0])
    w = v.copy()
    for _ in range(3):
        d = x - w
        w = w + (d * np.minimum(1, 0.7 / np.linalg.norm(d, axis=1))[:, None]).mean(axis=0)
    np.testing.assert_allclose(A.centered_clipping(v, iterations=3, tau=0.7)(x), w, atol=1e-12)


def test_bucketing_averages_every_vector_once() -> None:
    x = cloud(13, 7, 4)
    rows = A.bucketing(size=3, seed=4)(x)
    assert rows.shape == (3, 4)
    np.testing.assert_allclose((rows * np.array([3, 3, 1])[:, None]).sum(axis=0), x.sum(axis=0), atol=1e-12)
    assert not np.allclose(rows, A.bucketing(size=3, seed=5)(x))


def test_aksel_averages_the_nearest_to_the_median() -> None:
    """By hand: the median of (0, 0), (1, 0), (0, 1), (1, 1), (9, 9) is (1, 1); then (1, 1), (1, 0), (0, 1)
    are near."""
    x = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [9.0, 9.0]])
    np.testing.assert_allclose(A.aksel(2)(x), [2 / 3, 2 / 3], atol=1e-12)


def test_cge_averages_the_shortest() -> None:
    """By hand: lengths 5, 1, 2, 10; the two shortest are (1, 0) and (0, −2). Around the own (3, 4)
    they are others."""
    x = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0], [6.0, 8.0]])
    np.testing.assert_allclose(A.cge(1)(x[[0, 1, 2]]), [0.5, -1.0], atol=1e-12)
    np.testing.assert_allclose(A.cge(1)(x), [4 / 3, 2 / 3], atol=1e-12)
    np.testing.assert_allclose(A.cge(1, center="own")(x), [10 / 3, 4.0], atol=1e-12)
    np.testing.assert_array_equal(A.cge(1, center="own")(x), A.monna(1)(x))


def test_dnc_drops_along_the_direction_of_largest_variance() -> None:
    """By hand: the vectors vary along the first axis, around 2.2; there (8, 0) is farthest, then (0, 0)."""
    x = np.array([[0.0, 0.0], [1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [8.0, 0.0]])
    np.testing.assert_allclose(A.dnc(1)(x), [0.75, 0.0], atol=1e-12)
    np.testing.assert_allclose(A.dnc(2)(x), [1.0, 0.0], atol=1e-12)


def test_dnc_falls_back_to_the_median_when_too_few_are_left() -> None:
    x = cloud(32, 9, 60)
    rule, aggregated = A.dnc(3, passes=8, coordinates=2), 0
    for node in range(40):
        told = rule.at(round=1, rounds=2, seed=0, ids=np.array([node]))
        result = told(x)
        near = np.argsort(np.linalg.norm(x - np.median(x, axis=0), axis=1))[:3]
        aggregated += bool(np.allclose(result, x[near].mean(axis=0), atol=1e-12))
    assert aggregated > 30


def test_ios_by_hand() -> None:
    """Mean of 0, 1, 2, 10 is 3.25: 10 goes; the mean of 0, 1, 2 is 1: 0 is oneself, so 2 goes;
    0.5 is left."""
    x, w = np.array([[0.0], [1.0], [2.0], [10.0]]), np.full(4, 0.25)
    assert A.ios(b_hat=1)(x, weights=w)[0] == pytest.approx(1.0)
    assert A.ios(b_hat=2)(x, weights=w)[0] == pytest.approx(0.5)
    assert A.ios(b_hat=9)(x, weights=w)[0] == 0.0, "oneself is never dropped"
    assert A.ios(byzantine_weight=0.49)(x, weights=w)[0] == pytest.approx(1.0), (
        "a second one would be too much"
    )
    assert A.ios(byzantine_weight=0.5)(x, weights=w)[0] == pytest.approx(0.5)
    heavy = np.array([0.1, 0.1, 0.2, 0.6])  # now the mean is 6.5, and oneself is farthest: then 1 goes
    assert A.ios(b_hat=1)(x, weights=heavy)[0] == pytest.approx((0.4 + 6.0) / 0.9)


def test_balance_by_hand() -> None:
    """‖x_i‖ = 2: kept are those within 0.6 in the first round's threshold, within 0.6/e in the last."""
    x = np.array([[2.0], [2.5], [1.5], [1.8], [9.0]])
    assert A.balance()(x)[0] == pytest.approx(0.5 * 2 + 0.5 * (2.5 + 1.5 + 1.8) / 3)
    last = A.balance().at(round=10, rounds=10, seed=0, ids=np.array([3]))
    assert last(x)[0] == pytest.approx(0.5 * 2 + 0.5 * 1.8)
    assert A.balance(gamma=0.01)(x)[0] == 2.0, "none kept"
    assert A.balance(alpha=0.25)(x)[0] == pytest.approx(0.25 * 2 + 0.75 * (2.5 + 1.5 + 1.8) / 3)
    assert A.balance()(x, weights=np.full(5, 0.2))[0] == A.balance()(x)[0], "gossip weights are not looked at"


def test_rules_that_draw_do_so_anew_for_every_node_and_round_and_repeat() -> None:
    table = cloud(33, 9, 40)
    index = np.tile(np.arange(9), (12, 1))
    for rule in (rpel.rule("bucketing+trimmed_mean", f=1), rpel.rule("dnc", f=2, passes=1, coordinates=3)):
        told = rule.at(round=3, rounds=9, seed=1, ids=np.arange(100, 112))
        first = told.aggregate(table, index)
        assert len(np.unique(first.round(9), axis=0)) > 6, "nodes differ"
        later = rule.at(round=4, rounds=9, seed=1, ids=np.arange(100, 112)).aggregate(table, index)
        assert not np.allclose(later, first), "rounds differ"
        np.testing.assert_array_equal(told.aggregate(table, index), first)
        some = np.array([2, 7, 11])  # whoever aggregates a part of the nodes gets what they would have got
        context = A.RoundContext(round=3, rounds=9, seed=1, ids=np.arange(100, 112))
        aggregated = rule.aggregate(table, index[some], context=context.among(some))
        np.testing.assert_array_equal(aggregated, first[some])


def test_gts_exact_with_equal_weights_is_nearest_neighbour_averaging() -> None:
    """On a complete graph with equal weights and ρ = C/(C − b_w)."""
    x, b = cloud(14, 10, 5), 3
    w = np.full(10, 0.1)
    rule = A.gts_exact(b_hat=b, rho=1 / (1 - 0.1 * b))
    np.testing.assert_allclose(rule(x, weights=w), A.monna(b)(x), atol=1e-12)


@pytest.mark.parametrize(("name", "parameters"), [case for case in GRAPH_RULES if case[0] != "gts"])
def test_graph_rules_without_hostile_weight_are_plain_gossip(name: str, parameters: dict[str, Any]) -> None:
    rule = rpel.rule(name, byzantine_weight=0.0)
    x, w = cloud(15, 8, 5), metropolis_like(1, 8)[0]
    expected = x[0] + (w[:, None] * (x - x[0])).sum(axis=0)
    np.testing.assert_allclose(rule(x, weights=w, hostile=np.zeros(8, bool)), expected, atol=1e-12)


def test_gts_with_equal_weights_keeps_one_neighbour_fewer_than_gts_exact() -> None:
    x, w = np.array([[0.0], [1.0], [2.0], [4.0], [50.0]]), np.full(5, 0.2)
    assert A.gts_exact(b_hat=1)(x, weights=w)[0] == pytest.approx(0.2 * (1 + 2 + 4))
    assert A.gts(b_hat=1)(x, weights=w)[0] == pytest.approx(0.2 * (1 + 2))
    assert A.gts(b_hat=0)(x, weights=w)[0] == pytest.approx(0.2 * (1 + 2 + 4)), (
        "the farthest is dropped all the same"
    )


@pytest.mark.parametrize("neighbours", ["m-f-1", "m-f-2"])
def test_krum_sums_the_requested_number_of_neighbours(neighbours: str) -> None:
    differs = 0
    for seed in range(30):
        x, m, f = cloud(seed, 9, 4), 9, 3
        squared = np.square(x[:, None] - x[None]).sum(axis=2)
        others = np.sort(squared, axis=1)[:, 1:]
        counts = {"m-f-1": m - f - 1, "m-f-2": m - f - 2}
        picks = {name: int(np.argmin(others[:, :count].sum(axis=1))) for name, count in counts.items()}
        np.testing.assert_array_equal(rpel.rule("krum", f=f, neighbours=neighbours)(x), x[picks[neighbours]])
        differs += picks["m-f-1"] != picks["m-f-2"]
    assert differs, "no input tells them apart"
    assert (A.krum(3, neighbours=neighbours).kappa(9) is None) == (neighbours == "m-f-2"), (
        "kappa is of m - f - 1"
    )
    with pytest.raises(ValueError, match=r"'m-f-1'.*'m-f-2'.*'m-f-3'"):
        A.krum(1, neighbours="m-f-3")


@pytest.mark.parametrize("name", ["nnm", "krum", "nnm+trimmed_mean"])
def test_missing_rule_parameter_is_named_in_one_sentence(name: str) -> None:
    first = name.partition("+")[0]
    with pytest.raises(ValueError, match=f"^rule '{first}' needs its parameter 'f'"):
        rpel.rule(name)
    assert rpel.rule(name, f=1).name == name


@pytest.mark.parametrize("value", [3, None, np.ones(2)])
def test_object_that_cannot_be_a_rule_or_an_attack_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^rule .*'nnm\+trimmed_mean', a rpel\.rules\.Rule"):
        rpel.rule(value)
    with pytest.raises(ValueError, match=r"^attack .*'alie' .*a rpel\.attacks\.Attack"):
        rpel.attack(value)


def test_rtc_gts_exact_and_the_oracle_follow_their_definitions() -> None:
    x, w, b_w = cloud(16, 9, 5), metropolis_like(1, 9)[0], 0.25
    d = x - x[0]
    norm = np.linalg.norm(d, axis=1)
    order = np.argsort(norm, kind="stable")
    assert order[0] == 0
    # RTC
    stored, removed = list(order), 0.0
    while removed + w[stored[-1]] <= b_w:
        removed += w[stored.pop()]
    tau = np.sqrt((w[stored] * norm[stored] ** 2).sum() / b_w)
    expected = x[0] + sum(w[j] * d[j] * min(1, tau / norm[j]) for j in stored if j)
    np.testing.assert_allclose(A.rtc(byzantine_weight=b_w)(x, weights=w), expected, atol=1e-12)
    # GTS by definition
    left, step = 1 - b_w, np.zeros(5)
    for j in order:
        step += min(w[j], left) * d[j]
        left = max(0.0, left - w[j])
    np.testing.assert_allclose(A.gts_exact(byzantine_weight=b_w)(x, weights=w), x[0] + step, atol=1e-12)
    # the oracle
    hostile = np.arange(9) >= 7
    tau = np.sqrt((w * norm**2)[~hostile].sum() / w[hostile].sum())
    expected = x[0] + sum(w[j] * d[j] * min(1, tau / norm[j]) for j in range(1, 9))
    aggregated = A.clipped_gossip_oracle(byzantine_weight=b_w)(x, weights=w, hostile=hostile)
    np.testing.assert_allclose(aggregated, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: A.trimmed_mean(4)(cloud(0, 8, 3)), ["trimmed_mean", "f=4", "m=9", "8", "f=3"]),
        (lambda: A.bulyan(2)(cloud(0, 10, 3)), ["bulyan", "f=2", "m=11", "10"]),
        (lambda: A.krum(-1), ["krum", "-1"]),
        (lambda: A.krum(1.5), ["krum", "1.5"]),  # type: ignore[arg-type]
        (lambda: A.median()(np.arange(6).reshape(2, 3)), ["median", "int64"]),
        (lambda: A.median()(torch.ones(2, 3, dtype=torch.int32)), ["median", "int32"]),
        (lambda: A.median()(cloud(0, 3, 3)[0]), ["median", "(3,)"]),
        (lambda: A.mda(15)(cloud(0, 31, 3)), ["mda", "m=31", "f=15", "1,000,000"]),
        (lambda: A.median().aggregate(cloud(0, 3, 3), np.array([[0, 3]])), ["median", "2", "3"]),
        (lambda: A.median().aggregate(cloud(0, 3, 3), np.array([[0, -1, 2]])), ["median", "tail"]),
        (lambda: A.median().aggregate(cloud(0, 3, 3), np.array([[-1, 0, 2]])), ["median", "own"]),
        (lambda: A.median().aggregate(cloud(0, 3, 3), np.array([0, 1])), ["median", "(2,)"]),
        (lambda: A.median().aggregate(cloud(0, 3, 3), np.array([[0.0, 1.0]])), ["median", "float64"]),
        (lambda: A.krum(1).aggregate(cloud(0, 5, 3), np.array([[0, 1, -1]])), ["krum", "f=1", "2"]),
        (lambda: A.krum(1).aggregate(cloud(0, 5, 3), np.array([[0, 1, 2]]), f=2), ["krum", "f=2", "m=5"]),
        (
            lambda: A.krum(1).aggregate(cloud(0, 5, 3), np.array([[0, 1, 2]]), weights=np.ones((1, 3))),
            ["weights"],
        ),
        (lambda: rpel.rule("trimed_mean", f=1), ["'trimed_mean'", "'trimmed_mean'"]),
        (lambda: rpel.rule("nnm+trimmed_mean", f=1, size=2), ["'size'", "f"]),
        (lambda: rpel.rule("krum"), ["krum", "f"]),
        (lambda: rpel.rule("krum+nnm", f=1), ["krum", "last"]),
        (lambda: rpel.rule("nnm+arc", f=1), ["arc"]),
        (lambda: A.chain(), ["at least one"]),
        (lambda: A.cs_plus(), ["cs_plus", "b_hat"]),
        (lambda: A.cs_plus(b_hat=1)(cloud(0, 4, 3)), ["cs_plus", "weights"]),
        (lambda: A.cs_plus(b_hat=1)(cloud(0, 4, 3)[0], weights=np.ones(4)), ["cs_plus", "(3,)"]),
        (lambda: A.cs_plus(b_hat=1)(cloud(0, 4, 3), weights=-np.ones(4)), ["cs_plus", "weights"]),
        (lambda: A.clipped_gossip_oracle()(cloud(0, 4, 3), weights=np.ones(4) / 4), ["hostile"]),
        (lambda: A.centered_clipping("middle"), ["middle"]),
        (lambda: A.centered_clipping(tau=0.0), ["tau"]),
        (lambda: A.centered_clipping(np.array([np.nan])), ["finite"]),
        (lambda: A.geometric_median(start="there"), ["there"]),
        (lambda: A.bucketing(size=0), ["size", "0"]),
        (lambda: A.clipping(c=-1.0), ["-1"]),
    ],
)
def test_rule_errors_name_the_rule_and_the_numbers(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_chain_by_name_is_the_chain_by_hand() -> None:
    x = cloud(17, 16, 20)
    by_name, by_hand = rpel.rule("nnm+trimmed_mean", f=7), rpel.chain(A.nnm(7), A.trimmed_mean(7))
    assert by_name.name == by_hand.name
    np.testing.assert_array_equal(by_name(x), by_hand(x))
    step_by_step = A.trimmed_mean(7)(A.nnm(7)(x))
    np.testing.assert_allclose(by_name(x), step_by_step, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rule_writes_into_the_given_out_array(dtype: torch.dtype) -> None:
    table, index = table_and_index(9)
    models, out = torch.from_numpy(table).to(dtype), torch.zeros((len(index), table.shape[1]), dtype=dtype)
    for stored, rows in ((out, models), (np.zeros(out.shape, models.numpy().dtype), models.numpy())):
        aggregated = A.trimmed_mean(2).aggregate(rows, index, out=stored)
        assert aggregated is stored
        np.testing.assert_array_equal(
            np.asarray(stored), np.asarray(A.trimmed_mean(2).aggregate(rows, index))
        )


def test_f_can_be_overridden_per_call() -> None:
    table, index = table_and_index(9)
    aggregated = rpel.rule("nnm+trimmed_mean", f=4).aggregate(table, index, f=2)
    np.testing.assert_array_equal(aggregated, rpel.rule("nnm+trimmed_mean", f=2).aggregate(table, index))
