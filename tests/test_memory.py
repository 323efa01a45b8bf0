"""Runs whose nodes remember: what line 9 sees, who is drawn, what is counted,
and that c = 1 is Algorithm 1."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rpel
from rpel.attacks import declare, forgeries, lookahead
from rpel.backend import compiled, plain
from rpel.backend.moving import Moving
from rpel.planning import window_probability
from rpel.randomness import draws, sample_others
from rpel.rules import rule
from rpel.rules.registry import RULES
from rpel.types import Moves, Received
from support.simulations import BASE, Quadratic, resumes_bit_by_bit, simulation

SMALL: dict[str, Any] = {
    "nodes": 14, "byzantine": 2, "pull": 5, "b_hat": 2, "memory": 2, "rounds": 4, "eval_every": 2,
    "eval_size": 60, "batch_size": 10,
}  # fmt: skip
WINDOWS = BASE.replace(pull=4, memory=3)


def vectors(received: Received, node: int) -> np.ndarray[Any, Any]:
    """What line 9 sees at a node, row by row, made by the plain twin."""
    rows, n = received.index[node], len(received.table)
    rows = rows[rows >= 0]
    if received.moves is None or rows.max() < n:
        return np.asarray(received.table[rows])
    return np.asarray(made(received.moves, received.table, rows))


def made(moves: Moves, table: Any, rows: Any) -> Any:
    """The rows of these numbers, by the plain twin."""
    return plain.gathered(moves, table, rows, np.empty((len(rows), table.shape[1]), table.dtype))


# --- line 9 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["foe", "gaussian", "label_flip"])
@pytest.mark.parametrize("memory", [2, 3])
def test_line_9_sees_the_answers_of_the_window_moved_along_with_the_node(memory: int, attack: str) -> None:
    """Every vector against the definition: y + (own half-step now − own half-step when y came),
    in this order."""
    spec = BASE.replace(pull=4, memory=memory, attack=attack)
    run = simulation(spec, Quadratic(nodes=15 if attack == "label_flip" else 12))
    halves: dict[int, Any] = {}
    arrived: dict[int, list[Any]] = {}
    for t in range(1, 7):
        info = run.advance()
        received, halves[t] = info.received, info.half.copy()
        now = [vectors(received, i)[1 : 1 + (memory * 4 if t == 1 else 4)].copy() for i in range(run.nodes)]
        if t == 1:
            for q in range(memory):  # the last list is round 1's
                arrived[q + 2 - memory] = [answers[4 * q : 4 * (q + 1)] for answers in now]
            continue
        arrived[t] = now
        for i in range(run.nodes):
            old = [
                arrived[t - lag][i] + (halves[t][i] - halves[max(t - lag, 1)][i]) for lag in range(1, memory)
            ]
            wanted = np.concatenate([halves[t][i][None], arrived[t][i], *old])
            np.testing.assert_array_equal(vectors(received, i), wanted)


def test_memory_1_is_algorithm_1_byte_for_byte(tmp_path: Any) -> None:
    fields = SMALL | {"memory": 1, "pull": 6}
    one = rpel.simulate("linear", out=tmp_path / "a", **fields)
    del fields["memory"]
    two = rpel.simulate("linear", out=tmp_path / "b", **fields)
    assert one.path is not None
    assert two.path is not None
    assert one.path.name == two.path.name
    for file in ("models.safetensors", "counts.npz", "certificate.json"):
        assert (one.path / file).read_bytes() == (two.path / file).read_bytes()


def test_no_answer_of_a_window_is_stored_twice() -> None:
    """A remembered round costs its half-steps and one forged row for each victim, whatever the pull."""
    run = simulation(WINDOWS)
    run.advance()
    shelf = run.problem.deliver.shelf  # type: ignore[attr-defined]
    assert shelf.past.shape == (2 * 12 * 3, 7)


# --- who is drawn, and what is counted ----------------------------------------------------------------------


@pytest.mark.parametrize("memory", [2, 3])
def test_draws_of_a_window_are_disjoint_and_uniform(memory: int) -> None:
    """Each peer is drawn equally often: 12 nodes · 60 rounds · 4 draws;
    5 σ is one false alarm in a million a cell."""
    run = simulation(BASE.replace(pull=4, memory=memory, rounds=60, lr=0.1))
    network, before, seen = run.problem.deliver, None, []
    for t in range(1, 61):
        asked = network._draw(t, before)  # type: ignore[attr-defined]
        ids = run.roster.honest_ids(t)
        assert all(i not in row and len(set(row)) == len(row) for i, row in zip(ids, asked, strict=True))
        if before is not None:
            assert not any(set(a) & set(b) for a, b in zip(asked, before, strict=True))
        new = asked if before is not None else np.concatenate(
            [asked[:, q * 4 : (q + 1) * 4] for q in range(memory - 1, 0, -1)], axis=1
        )  # fmt: skip
        seen.append(asked[:, -4:])
        before = new if before is None else np.concatenate([new, before], axis=1)[:, : 4 * (memory - 1)]
    counts = np.bincount(np.concatenate(seen).ravel(), minlength=15)
    chances = np.array([(60 * (12 - (i in run.roster.honest_ids(1)))) for i in range(15)])
    expected = chances * 4 / 14
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_lists_of_the_first_round_are_drawn_alike() -> None:
    """Cut as they come from the draw, the first lists would hold low numbers more often than the last."""
    low = np.zeros(3)
    for seed in range(300):
        asked = simulation(WINDOWS.replace(seed=seed)).problem.deliver._draw(1, None)  # type: ignore[attr-defined]
        low += [(asked[:, 4 * q : 4 * (q + 1)] < 7).sum() for q in range(3)]
    assert np.abs(low - low.mean()).max() < 5 * np.sqrt(300 * 12 * 4 / 4)


def test_hostile_answers_are_counted_over_the_window_and_follow_the_exact_law() -> None:
    """The share of 400 runs in which no window held more than 3;
    5 σ off would be one false alarm in a million."""
    held, rounds, runs = 0, 6, 400
    for seed in range(runs):
        run = simulation(BASE.replace(pull=3, memory=2, seed=seed, b_hat=3))
        network = run.problem.deliver
        most, before = 0, None
        hostile = run.roster.hostile(1)
        for t in range(1, rounds + 1):
            asked = network._draw(t, before)  # type: ignore[attr-defined]
            whole = asked if before is None else np.concatenate([asked, before], axis=1)
            most = max(most, int(hostile[whole].sum(axis=1).max()))
            before = asked[:, -3:]
        held += most <= 2
    p = window_probability(15, 3, 3, rounds, 2, 2)
    assert abs(held / runs - p) < 5 * np.sqrt(p * (1 - p) / runs)
    run = simulation(BASE.replace(pull=3, memory=2))
    first, second = run.step(), run.step()
    assert (first.messages, second.messages) == (15 * 6, 15 * 3)
    network = run.problem.deliver
    one = network._draw(1, None)  # type: ignore[attr-defined]
    two = network._draw(2, one[:, 3:])  # type: ignore[attr-defined]
    marks = run.roster.hostile(1)
    np.testing.assert_array_equal(first.hostile, marks[one].sum(axis=1))
    np.testing.assert_array_equal(second.hostile, (marks[one[:, 3:]]).sum(axis=1) + marks[two].sum(axis=1))


def test_certificate_speaks_of_windows_and_counts_aggregations() -> None:
    result = rpel.simulate("linear", **SMALL)
    said = result.certificate
    assert (said["aggregations"], said["plan"]["memory"], said["plan"]["window"]) == (4 * 12, 2, 10)
    assert said["plan"]["probability"] == window_probability(14, 2, 5, 4, 2, 2) == 1.0
    assert "of 11" in said["rule"]["sentence"]
    assert list(result.history["messages"]) == [140, 70, 70, 70]


@given(st.integers(2, 30), st.data())
def test_draw_beside_remembered_peers_leaves_them_out(population: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, population - 1))
    size = data.draw(st.integers(0, population - 1 - k))
    excluded = np.stack(
        [np.random.default_rng(i).permutation(np.delete(np.arange(population), i))[:k] for i in (0, 1)]
    )
    drawn = sample_others(0, "pull", 1, np.array([0, 1]), population, size, excluded)
    for i in (0, 1):
        assert len({*drawn[i], *excluded[i], i}) == size + k + 1
        assert all(0 <= j < population for j in drawn[i])


# --- bit by bit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"memory": 2},
        {"attack": "stale"},
        {"consistent": True},
        {"no_show": 0.2},
        {"silent": True},
        {"wire": "int8"},
    ],
    ids=str,
)
def test_resumed_run_with_memory_continues_bit_by_bit(change: dict[str, Any]) -> None:
    resumes_bit_by_bit(WINDOWS.replace(**change))


# --- moved rows in the kernels ------------------------------------------------------------------------------


def case(seed: int, n: int, p: int, d: int, h: int, m: int, dtype: Any) -> tuple[Any, Moves, Any]:
    """A table, moved rows behind it, and an index that names both."""
    source = np.random.default_rng(seed)
    table, past = source.normal(size=(n, d)).astype(dtype), source.normal(size=(p, d)).astype(dtype)
    own, base, back = (source.integers(0, size, h * m) for size in (n, p, p))
    index = source.integers(0, n + h * m, (h, m))
    return table, Moves(past, own, base, back, plain.largest(past)), index


@given(
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(1, 9),
    st.integers(1, 7), st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_both_twins_compute_on_moved_rows_what_they_compute_on_copies_of_them(
    seed: int, n: int, p: int, d: int, h: int, m: int, dtype: Any
) -> None:
    table, moves, index = case(seed, n, p, d, h, m, dtype)
    whole = made(moves, table, np.arange(n + h * m))
    step = table[moves.own] - moves.past[moves.back]
    np.testing.assert_array_equal(whole, np.concatenate([table, moves.past[moves.base] + step]))
    np.testing.assert_array_equal(
        compiled.gathered(moves, table, index.ravel(), np.empty((h * m, d), dtype)), whole[index.ravel()]
    )
    weights = np.random.default_rng(seed).normal(size=(h, m))
    for twin in (plain, compiled):
        inside: Any = twin
        moving: Any = Moving(inside, moves)
        np.testing.assert_array_equal(
            moving.squared_distances(table, index), inside.squared_distances(whole, index)
        )
        np.testing.assert_array_equal(
            moving.combine(table, index, weights), inside.combine(whole, index, weights)
        )
        for origin in (None, np.ones(d), np.ones((h, d)), index[:, 0].copy()):
            actual = moving.distances_to(table, index, origin)
            np.testing.assert_allclose(actual, inside.distances_to(whole, index, origin), rtol=1e-12)
        for operation in ("trimmed_mean", "median", "meamed"):
            f = (m - 1) // 2
            for mix in (None, max(1, m - f)):
                actual = moving.coordinatewise(table, index, operation, f, mix=mix)
                np.testing.assert_array_equal(
                    actual, inside.coordinatewise(whole, index, operation, f, mix=mix)
                )


@given(st.integers(0, 99), st.sampled_from([np.float32, np.float64]))
def test_moved_row_that_overflows_or_was_not_finite_is_found(seed: int, dtype: Any) -> None:
    table, moves, _ = case(seed, 4, 5, 6, 3, 4, dtype)
    source = np.random.default_rng(seed)
    for array in (table, moves.past):
        array[source.integers(len(array)), source.integers(6)] = source.choice(
            [np.inf, np.nan, np.finfo(dtype).max]
        )
    moves = Moves(moves.past, moves.own, moves.base, moves.back, compiled.largest(moves.past))
    np.testing.assert_array_equal(moves.largest, plain.largest(moves.past))
    whole = made(moves, table, np.arange(4 + 12))
    inside: Any = compiled
    np.testing.assert_array_equal(Moving(inside, moves).finite_rows(table), np.isfinite(whole).all(axis=1))


@pytest.mark.parametrize("name", [name for name in RULES if not rule(name, f=1).on_graph])
def test_every_rule_aggregates_moved_rows_like_copies(name: str) -> None:
    full = rule(f"{name}+median" if rule(name, f=1).unsuited else name, f=1)
    table, moves, _ = case(3, 20, 9, 40, 6, 8, np.float64)
    index = np.stack([np.random.default_rng(i).permutation(20 + 48)[:8] for i in range(6)])
    inside: Any = compiled
    kernels: Any = Moving(inside, moves)
    whole = made(moves, table, np.arange(20 + 48))
    aggregated = full.aggregate(table, index, kernels=kernels, finite=kernels.finite_rows(table))
    np.testing.assert_allclose(aggregated, full.aggregate(whole, index), rtol=1e-12)


# --- what goes together -------------------------------------------------------------------------------------

WORKS: list[dict[str, Any]] = [
    {"wire": "bfloat16"}, {"no_show": 0.2}, {"silent": True},
    {"consistent": True}, {"attack": "strongest"}, {"attack": "strongest", "consistent": True},
    {"attack": "alie", "attack_params": {"targeting": "most-exposed"}}, {"attack": "fang"},
    {"attack": "backdoor"}, {"rule": "krum"}, {"rule": "geometric_median"}, {"output": "uniform"},
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "cs-plus"}, "method rpel"),
    ({"method": "all-to-all", "pull": None, "b_hat": None}, "method rpel"),
    ({"pull": 7}, "the largest pull is 6"),
    ({"pull": 1, "b_hat": 2}, "minority of memory"),
]


@pytest.mark.parametrize("change", WORKS, ids=str)
def test_memory_goes_with(change: dict[str, Any]) -> None:
    result = rpel.simulate("linear", **SMALL | {"rounds": 3} | change)
    assert np.isfinite(result.models).all()


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=str)
def test_memory_is_refused_with(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        rpel.simulate("linear", **SMALL | change)
    assert "\n" not in str(refused.value)


def test_memory_reaches_with_half_the_messages_what_one_round_needs_all_for() -> None:
    fields: dict[str, Any] = {
        "nodes": 20,
        "byzantine": 3,
        "b_hat": 3,
        "rounds": 30,
        "attack": "foe",
        "lr": 0.3,
        "eval_size": 200,
    }
    memory = rpel.simulate("linear", **fields, pull=4, memory=2)
    single = rpel.simulate("linear", **fields, pull=8)
    assert memory.certificate["held"]
    assert memory.accuracy_worst > single.accuracy_worst - 0.04
    assert memory.history["bytes"][-1] * 2 == single.history["bytes"][-1]


# --- an adversary that looks ahead --------------------------------------------------------------------------


def next_window(run: Any, t: int, i: int, forged: Any, z: Any, view: Any) -> tuple[Any, Any]:
    """(all vectors of victim i's next window, the honest ones among them), from the definition,
    row by row."""
    row, n = view.own[i], len(view.honest)
    x, moved = view.table[row], []
    peers = view.peers[i][view.peers[i] >= 0]
    coins = draws(view.seed, "ahead", t, view.own[i : i + 1], n)[0]
    unknown = [k for k in np.argsort(coins, kind="stable") if k != row and k not in peers]
    fresh = [view.table[k] for k in unknown[: view.peers.shape[1]]]
    honest = [z, *fresh, *(view.table[k] + (z - x) for k in peers)]
    moved = [forged + (z - x)] * view.hostile[i]
    older = view.remembered[i][: view.remembered.shape[1] - view.peers.shape[1]]
    past = view.moves.past
    moved += [past[view.moves.base[r]] + (z - past[view.moves.back[r]]) for r in older if r >= 0]
    return np.array(honest + moved), np.array(honest)


@pytest.mark.parametrize("memory", [2, 3])
def test_lookahead_harm_equals_its_definition(memory: int) -> None:
    views: list[Any] = []

    def seen(view: Any) -> Any:
        if view.remembered is not None:
            views.append(replace(view, table=view.table.copy()))
        return view.moments(1.0, -3.0)

    declare(per_victim=True, needs=["own", "rule"], searches=True)(seen)
    spec = BASE.replace(pull=4, memory=memory, rounds=3)
    run = simulation(spec)
    deliver: Any = run.problem.deliver
    watching = replace(deliver.network, attack=rpel.attack(seen))
    run.problem = replace(run.problem, deliver=replace(deliver, network=watching))
    for _ in range(3):
        run.advance()
    view = views[-1]
    forged = view.moments(1.0, -2.0)
    z = forgeries._aggregated(view, view.with_forged(forged))
    actual = forgeries._harm_later(view, z, lookahead.next_round(view))  # type: ignore[arg-type]
    for i in range(view.victims):
        window, honest = next_window(run, 3, i, forged[i], z[i], view)
        wanted = np.linalg.norm(view.rule(window) - honest.mean(axis=0))
        assert actual[i] == pytest.approx(wanted, rel=1e-6)


def test_lookahead_attack_needs_nodes_with_memory() -> None:
    ahead = {"attack": "strongest", "attack_params": {"ahead": 1}}
    near, far = (
        rpel.simulate("linear", **SMALL | {"attack": "strongest", "attack_params": p})
        for p in ({}, {"ahead": 1})
    )
    assert not np.array_equal(near.models, far.models)
    for change, words in (
        ({"memory": 1}, "memory 2 is the least"),
        ({"consistent": True}, "leave out consistent"),
    ):
        with pytest.raises(ValueError, match=words):
            rpel.simulate("linear", **SMALL | ahead | change)
