"""Runs without a barrier: against an event loop, one node and moment at a time,
and against synchronous rounds."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

import rpel
from rpel.algorithm import nnm_trimmed_mean
from rpel.planning.law import probability
from rpel.randomness import sample_without_replacement
from rpel.simulation.asynchrony import TICKS, Schedule, slowness
from rpel.simulation.methods import resolve, schedule
from rpel.spec import Spec
from rpel.types import Models
from support.definitions import balance
from support.simulations import BASE, Quadratic, play, resumes_bit_by_bit, simulation

SPEEDS = "lognormal(0.3)+stragglers(0.2, 5)"
SLOWED = BASE.replace(timing=f"asynchronous(speeds={SPEEDS}, jitter=0.2)", rounds=12, lr=0.3)
SMALL: dict[str, Any] = {
    "nodes": 12, "byzantine": 2, "pull": 6, "b_hat": 2, "rounds": 3, "eval_every": 2, "eval_size": 60,
    "batch_size": 10,
}  # fmt: skip


# --- every read and every step, one after the other ---------------------------------------------------------


Aggregate = Callable[[int, Models], Models]
"""(round, models with the own one first) → the model that a node goes on with."""


def trimmed(_: int, models: Models) -> Models:
    return nnm_trimmed_mean(models, 3)


def by_events(spec: Spec, aggregate: Aggregate = trimmed) -> Any:
    """The models at the end of an asynchronous run under FOE, from a heap of events."""
    task, plan, at = Quadratic(), resolve(spec), schedule(resolve(spec).spec)
    ids, h, L = at.ids, len(at.ids), at.wait
    row = {int(node): r for r, node in enumerate(ids)}
    x, momentum = np.zeros((h, 7)), np.zeros((h, 7))
    versions: list[list[tuple[int, Any]]] = [[(0, np.zeros(7))] for _ in range(h)]
    events = [(int(at.lasts(1)[r]), 0, r, 1, 0) for r in range(h)]
    heapq.heapify(events)
    seen: dict[tuple[int, int], int] = {}
    last = at.edge(spec.rounds)
    while events:
        now, reads, r, k, label = heapq.heappop(events)
        if now > last:
            continue
        if not reads:  # the local phase ends: publish
            t = -(-(now + L) // at.cycle)
            label = t + (seen.get((r, t), 0) << 32)
            seen[r, t] = seen.get((r, t), 0) + 1
            g, _ = task.gradient(x[r : r + 1], np.zeros((1, 1)), np.array([r]), label, 0)
            momentum[r] = spec.momentum * momentum[r] + (1 - spec.momentum) * g[0]
            versions[r].append((now, x[r] - spec.rate(t) * (momentum[r] + spec.weight_decay * x[r])))
            heapq.heappush(events, (now + L, 1, r, k, label))
            continue
        asked = sample_without_replacement(spec.seed, "pull", label, ids[r : r + 1], spec.nodes, plan.pull)[0]
        answers = [versions[row[int(node)]] for node in asked if int(node) in row]
        honest = [[model for when, model in answer if when <= now][-1] for answer in answers]
        hostile = sum(int(node) not in row for node in asked)
        own = versions[r][-1][1]
        forged = [-2 * (np.mean(honest, axis=0) if honest else own)] * hostile
        enough = len(honest) + hostile >= 6
        x[r] = aggregate(label & 0xFFFFFFFF, np.stack([own, *honest, *forged])) if enough else own
        heapq.heappush(events, (now + L + int(at.lasts(k + 1)[r]), 0, r, k + 1, 0))
    return x


def by_windows(spec: Spec) -> Any:
    """The same by the simulator."""
    run = simulation(spec)
    for _ in range(spec.rounds):
        run.step()
    return run.models()


def test_windows_equal_a_loop_over_all_events() -> None:
    np.testing.assert_allclose(by_windows(SLOWED), by_events(SLOWED), rtol=1e-9, atol=1e-12)


def test_read_at_the_moment_of_a_publication_gets_the_new_version() -> None:
    spec = SLOWED.replace(timing=f"asynchronous(speeds={[1.0, 1.25, 1.5] * 5}, latency=0.25)")
    at = schedule(resolve(spec).spec)
    first = at.lasts(1)
    assert np.isin(first + at.wait, first).any(), "some node reads when another one publishes"
    np.testing.assert_allclose(by_windows(spec), by_events(spec), rtol=1e-9, atol=1e-12)


def test_balance_decays_with_the_round_however_often_a_node_aggregates() -> None:
    spec = SLOWED.replace(timing=f"asynchronous(speeds={[0.2, 1.0, 1.7] * 5}, jitter=0.2)", rule="balance")
    assert schedule(resolve(spec).spec).most > 1
    np.testing.assert_allclose(
        by_windows(spec),
        by_events(spec, lambda t, models: balance(models, t / spec.rounds)),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    "change",
    [
        {}, {"attack": "alie(targeting=most-exposed)"}, {"attack": "stale"},
        {"attack": "mimic_heuristic"}, {"attack": "fang"}, {"attack": "gaussian"}, {"attack": "strongest"},
        {"silent": True}, {"no_show": 0.2}, {"outer": "nesterov"},
        {"local_steps": 3}, {"output": "uniform"}, {"rule": "krum"}, {"rule": "bucketing+median", "pull": 12},
        {"rule": "balance"}, {"timing": "synchronous(latency=0.37)"},
    ],
    ids=str,
)  # fmt: skip
def test_equal_speeds_give_the_synchronous_states_byte_for_byte(change: dict[str, Any]) -> None:
    spec = BASE.replace(**change)
    one, other = simulation(spec), simulation(spec.replace(timing=f"a{spec.timing}"))
    for _ in range(6):
        first, second = play(one, contraction=True), play(other, contraction=True)
        assert vars(first).keys() == vars(second).keys()
        for key, value in vars(first).items():
            np.testing.assert_array_equal(getattr(second, key), value)
    np.testing.assert_array_equal(other.models(), one.models())
    np.testing.assert_array_equal(other.state.local["momentum"], one.state.local["momentum"])


@pytest.mark.parametrize("change", [{}, {"attack": "stale"}, {"attack": "fang"}], ids=str)
def test_resumed_asynchronous_run_continues_bit_by_bit(change: dict[str, Any]) -> None:
    resumes_bit_by_bit(SLOWED.replace(**change), rounds=12, after=5)


@pytest.mark.parametrize("slowness", [0.1, 1.0, 20.0])
def test_planned_b_hat_holds_over_the_aggregations_of_an_asynchronous_run(slowness: float) -> None:
    fields: dict[str, Any] = {"nodes": 60, "byzantine": 10, "pull": 20, "rounds": 20}
    resolved = resolve(Spec(**fields, timing=f"asynchronous(speeds={[slowness] * 60})"))
    n = schedule(resolved.spec).aggregations()
    law = stats.hypergeom(59, 10, 20).cdf(np.arange(11))
    assert resolved.b_hat == int(np.argmax(law**n >= resolved.spec.confidence))
    synchronous = int(np.argmax(law ** (50 * 20) >= resolved.spec.confidence))
    assert (resolved.b_hat > synchronous, resolved.b_hat < synchronous) == (slowness < 1, slowness > 1)


# --- times --------------------------------------------------------------------------------------------------


def test_aggregation_count_is_known_in_advance_and_certified() -> None:
    fields = SMALL | {"rounds": 6, "timing": f"asynchronous(speeds={SPEEDS}, jitter=0.3)"}
    result = rpel.simulate("linear", **fields)
    n = schedule(resolve(Spec(**fields)).spec).aggregations()
    said = result.certificate
    assert said["aggregations"] == said["plan"]["aggregations"] == n == sum(said["histogram"])
    assert said["plan"]["probability"] == probability(12, 2, 6, 6, 2, n)
    assert sum(result.history["messages"]) == pytest.approx(n * 6 * 12 / 10, rel=0.1)


def test_speed_distributions_have_their_named_parameters() -> None:
    ids, hostile = np.arange(1000), np.arange(100)
    w = slowness("lognormal(0.5)", ids, hostile, 1000, seed=1)
    assert abs(np.log(w).std() - 0.5) < 0.06
    assert abs(np.median(w) - 1) < 0.1
    late = slowness("stragglers(0.1, 10)", ids, hostile, 1000, seed=1) == 10
    assert (late[100:].sum(), late[:100].sum()) == (90, 10)
    both = slowness("lognormal(0.5)+stragglers(0.1, 10)", ids, hostile, 1000, seed=1)
    np.testing.assert_allclose(both, w * np.where(late, 10, 1))
    assert slowness([1, 2, 3], np.array([2, 0]), np.array([]), 3, 0).tolist() == [3, 1]
    assert Schedule(np.ones(1), ids[:1], 1, 0.1, 0.0, 0).lasts(1)[0] == TICKS
