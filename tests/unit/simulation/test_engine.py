"""Algorithm 1 as the simulator runs it, against a plain reading of the paper,
and every fault the network injects."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import data, theory
from rpel.algorithm import PlainMomentumSGD, PlainRule, init, plain, step
from rpel.attacks import View, declare
from rpel.backend.base import backend
from rpel.learning import Aggregation, MomentumSGD
from rpel.models import model
from rpel.rules import aggregate_or_keep
from rpel.runs.certificate import certificate
from rpel.simulation.communicator import Group
from rpel.simulation.engine import Engine
from rpel.simulation.evaluate import spread
from rpel.simulation.methods import Resolved, resolve
from rpel.simulation.network import Roster
from rpel.spec import load
from rpel.tasks import Classification
from rpel.topology import AllToAll, Pull
from rpel.types import Received
from support.simulations import BASE, Quadratic, play, resumes_bit_by_bit, simulation, watched, with_attack

Array = NDArray[Any]


def paper(run: Resolved, task: Quadratic) -> Array:
    """The models after all rounds of the plain page, with a FOE adversary;
    hostile nodes are numbered last there."""
    spec = run.spec
    n, h = spec.nodes, spec.nodes - spec.hostile_count
    hostile = Roster(n, spec.hostile_count, spec.seed).hostile(1)
    honest = np.flatnonzero(~hostile)
    row = np.argsort(np.concatenate([honest, np.flatnonzero(hostile)]))

    def draw(t: int, i: int) -> Array:
        return np.asarray(row[Pull(n, run.pull, spec.seed).sample(t, honest[[i]])[0]])

    def gradient(x: Array, i: int, t: int, k: int) -> Array:
        return np.asarray(task.gradient(x[None], np.zeros((1, 1)), np.array([i]), t, k)[0][0])

    problem = plain(
        gradient, task.initial(), nodes=n, byzantine=n - h, pull=run.pull, b_hat=run.b_hat, lr=spec.rate,
        beta=spec.momentum, decay=spec.weight_decay, steps=spec.local_steps, draw=draw,
    )  # fmt: skip
    state = init(problem)
    for _ in range(spec.rounds):
        state, _ = step(problem, state)
    return state.x


@pytest.mark.parametrize("changes", [{}, {"local_steps": 3}], ids=["plain", "local steps"])
def test_simulator_does_what_the_paper_says(changes: dict[str, Any]) -> None:
    spec = BASE.replace(**changes)
    run = simulation(spec)
    for _ in range(spec.rounds):
        run.step()
    np.testing.assert_allclose(run.models(), paper(resolve(spec), Quadratic()), rtol=0, atol=1e-10)
    assert run.state.local["buffers"].tolist() == [[spec.rounds * spec.local_steps]] * 12


def test_fast_engine_parts_equal_the_plain_ones() -> None:
    """Lines 3-6 by MomentumSGD, line 9 by Aggregation: what simulator and peers call, against the page."""
    task, h, f = Quadratic(), 12, 3
    fast = MomentumSGD(task, lambda t: 0.3 / t, beta=0.8, decay=0.01, steps=2, nodes=h)
    slow = PlainMomentumSGD(
        lambda x, i, t, k: task.gradient(x[None], np.zeros((1, 1)), np.array([i]), t, k)[0][0],
        task.initial(), h, lambda t: 0.3 / t, 0.8, 0.01, 2,
    )  # fmt: skip
    (x, state), (y, plain_state) = fast.init(), slow.init()
    for t in (1, 2):
        x, state = fast(x, state, np.arange(h), t)
        y, plain_state = slow(y, plain_state, np.arange(h), t)
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state["momentum"], plain_state["momentum"], rtol=0, atol=1e-12)
    index = np.stack([np.r_[i, np.delete(np.arange(h), i)[:8]] for i in range(h)])
    rule = Aggregation(rpel.rule("nnm+trimmed_mean", f=f), rounds=2, seed=0, ids=lambda t: np.arange(h))
    received = Received(x, index)
    np.testing.assert_allclose(
        rule(x, received, np.arange(h), 1)[0],
        PlainRule(f)(y, received, np.arange(h), 1)[0],
        rtol=0,
        atol=1e-12,
    )


class Wide(Classification):
    """In double precision, where two backends can be told from rounding."""

    def initial(self) -> Any:
        return super().initial().astype(np.float64)


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "cs-plus"}, pytest.param({"attack": "fang"}, marks=pytest.mark.full)],
    ids=["rpel", "graph", "fang"],
)
def test_quickstart_runs_on_the_plain_backend_with_equal_results(changes: dict[str, Any]) -> None:
    resolved = resolve(load("quickstart").replace(rounds=10, model="mlp", **changes))
    spec = resolved.spec
    dataset = data.load("mnist-sample")
    shards = data.dirichlet(dataset.train_y, spec.nodes - spec.hostile_count, 1.0, spec.batch_size, seed=0)
    values = {}
    for name in ("numba", "plain"):
        task = Wide(dataset, shards, lambda: model(spec.model), batch_size=spec.batch_size, seed=0)
        run = Engine(resolved, task, arrays=backend(name))
        infos = [play(run, contraction=True) for _ in range(spec.rounds)]
        values[name] = np.r_[run.models().ravel(), [info.consensus for info in infos]]
    np.testing.assert_allclose(values["plain"], values["numba"], rtol=0, atol=1e-9)


def test_robust_learning_wins_where_averaging_is_led_astray() -> None:
    results = {}
    for rule in (None, "mean"):
        run = simulation(BASE.replace(rule=rule, rounds=40, lr=0.3))
        for _ in range(40):
            run.step()
        results[rule] = run.evaluate(None).worst
    assert results[None] > 0.9
    assert results["mean"] < 0.4


def test_hostile_counts_are_those_of_the_draw() -> None:
    run = simulation()
    info = play(run)
    hostile = run.roster.hostile(1)
    assert info.hostile.tolist() == [int(hostile[row].sum()) for row in run.topology.sample(1, run.honest)]
    assert info.messages == 15 * 8
    assert run.bytes == 15 * 8 * 4 * 7


@pytest.mark.parametrize(
    "change",
    [{}, {"attack": "mimic_heuristic"}, {"attack": "stale"}, {"output": "uniform"}],
    ids=str,
)
def test_resumed_simulation_continues_bit_by_bit(change: dict[str, Any]) -> None:
    resumes_bit_by_bit(BASE.replace(**change))


def test_uniform_output_is_an_iterate_drawn_for_every_node() -> None:
    run = simulation(BASE.replace(output="uniform"))
    iterates = []
    for _ in range(6):
        run.step()
        iterates.append(run.state.x.copy())
    output = run.models()
    rounds = [next(t for t in range(6) if (iterates[t][i] == output[i]).all()) for i in range(12)]
    assert len(set(rounds)) > 1


def test_silence_and_no_shows_leave_gaps_and_too_few_answers_keep_the_half_step() -> None:
    silent = simulation(BASE.replace(silent=True))
    info = play(silent)
    assert info.hostile.max() > 0
    late = simulation(BASE.replace(no_show=0.6, rounds=10))
    degraded = sum(play(late).degraded for _ in range(10))
    assert degraded > 0
    calm = simulation(BASE.replace(no_show=0.05, silent=True, rounds=40, pull=11, lr=0.3))
    for _ in range(40):
        calm.step()
    assert calm.evaluate(None).worst > 0.9


def test_late_nodes_are_drawn_anew_every_round() -> None:
    run = simulation(
        BASE.replace(no_show=0.5, nodes=12, byzantine=0, b_hat=0, method="all-to-all", rule="mean")
    )
    delivered = watched(run)
    for _ in range(4):
        run.step()
    answered = [
        frozenset(np.unique(inbox.index[inbox.index[:, 0] == 0, 1:]).tolist()) for _, inbox in delivered
    ]
    assert len(set(answered)) == 4


def test_late_node_is_late_for_everybody() -> None:
    run = simulation(BASE.replace(no_show=0.5, nodes=12, byzantine=0, b_hat=0))
    asked = watched(run)
    run.step()
    ask, inbox = asked[0]
    missing = [set(row) - set(got) for row, got in zip(ask.wanted, inbox.index, strict=True)]
    present = [set(row) & set(got) for row, got in zip(ask.wanted, inbox.index, strict=True)]
    assert not set().union(*missing) & set().union(*present)


def test_missing_answers_are_trimmed_by_the_number_asked() -> None:
    """k ≥ 2b̂ answers aggregate with f = b̂ of the s asked; with fewer the node keeps its half-step."""
    table = np.random.default_rng(1).normal(size=(9, 4))
    rule = rpel.rule("nnm+trimmed_mean", f=3)
    index = np.array([[0, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, -1], [2, 0, 1, 3, 4, 5, -1, -1]])
    x, info = aggregate_or_keep(table[:3], Received(table, index), rule)
    np.testing.assert_array_equal(x[0], rule(table[index[0]]))
    np.testing.assert_array_equal(x[1], rule(table[index[1, :7]]))
    np.testing.assert_array_equal(x[2], table[2])
    assert info.degraded.tolist() == [False, False, True]
    assert info.trimmed.tolist() == [3, 3, 0]


@pytest.mark.parametrize("method", ["rpel", "nna", "gts", "d-psgd", "el-local"])
def test_node_that_has_diverged_does_not_stop_the_others(method: str) -> None:
    """Its model is infinite: rules that trust the own model keep it, the others heal it;
    honest peers leave it out."""
    pull = 14 if method == "nna" else 8
    run = simulation(BASE.replace(method=method, pull=pull, b_hat=3, lr=0.1), Quadratic())
    run.state.x[4] = np.inf
    for _ in range(3):
        with np.errstate(invalid="ignore"):
            run.step()
    healed = np.asarray(np.isfinite(run.state.x).all(axis=1))
    assert healed[np.arange(12) != 4].all()
    assert healed[4] == (method in ("rpel", "el-local"))


class Personal(Quadratic):
    """Every node's local state is its own, and counts when it is evaluated."""

    def gradient(
        self, x: Array, local: Array, ids: Array, t: int, k: int, out: Array | None = None
    ) -> tuple[Array, Array]:
        return super().gradient(x, local, ids, t, k, out)[0], local + ids[:, None]

    def evaluate(self, x: Array, local: Array, subset: Array | None = None) -> tuple[Array, Array]:
        accuracy, loss = super().evaluate(x, local, subset)
        return accuracy + local[:, 0], loss


def test_label_flip_nodes_train_beside_the_honest_and_are_counted() -> None:
    run = simulation(BASE.replace(attack="label_flip"), Personal(nodes=15))
    info = play(run)
    assert len(run.state.x) == 15
    assert info.hostile.shape == (12,)
    assert run.models().shape == (12, 7)
    assert run.evaluate(None).accuracy.shape == (12,)
    honest = run.state.x[run.honest]
    assert info.consensus == pytest.approx(spread(honest)[1])
    assert info.consensus != pytest.approx(spread(run.state.x)[1])
    np.testing.assert_array_equal(run.models(), honest)
    stored = run.honest[:, None].astype(float)
    np.testing.assert_array_equal(run.evaluate(None).accuracy, run.task.evaluate(honest, stored)[0])
    np.testing.assert_array_equal(run.local_states(), stored)


def test_hostile_nodes_are_those_that_train_on_flipped_labels() -> None:
    run = simulation(BASE.replace(attack="label_flip"), Quadratic(nodes=15))
    flipped, seen = run.roster.hostile(1), watched(run)
    for _ in range(4):
        info = play(run)
        index = seen[-1][1].index
        met = np.where(index >= 0, flipped[index], False)[:, 1:].sum(axis=1)
        np.testing.assert_array_equal(info.hostile, met[~flipped])


def test_gradient_norm_is_that_of_several_nodes() -> None:
    run, x = simulation(), np.random.default_rng(0).normal(size=(12, 7))
    run.state.x[:] = x
    norms = np.square(x - Quadratic().targets.mean(axis=0)).sum(axis=1)
    assert run.evaluate(None).grad_norm == pytest.approx(norms[[0, 5, 11]].mean())


def test_certificate_lists_a_thousand_violations_and_counts_all() -> None:
    counts = np.full((40, 50), 3)
    values = certificate({}, counts, 2, lambda t: np.arange(50), seed=0, versions={}, threads=1, data={})
    assert (len(values["violations"]), values["violations_total"]) == (1000, 2000)
    assert values["violations"][51] == {"round": 2, "node": 1, "count": 3}


def test_all_to_all_hears_everybody() -> None:
    ids = np.array([0, 5, 9])
    heard = AllToAll(10).sample(3, ids)
    assert all(set(row) == set(range(10)) - {i} for i, row in zip(ids, heard, strict=True))
    run = simulation(BASE.replace(method="all-to-all", pull=14))
    info = play(run)
    assert info.hostile.tolist() == [3] * 12
    assert info.messages == 15 * 14


def test_round_reports_the_realised_contraction() -> None:
    run = simulation()
    run.step()
    info = play(run, contraction=True)
    assert info.alpha_realised is not None
    assert 0 < info.alpha_realised < 1
    assert info.lambda_realised is not None
    assert info.consensus > 0


def test_momentum_step_and_spread_equal_their_formulas() -> None:
    coins = np.random.default_rng(2)
    dtypes: list[Any] = [np.float32, np.float64]
    for dtype in dtypes:
        x, m, g = (np.asarray(coins.normal(size=(5, 3000)), dtype) for _ in range(3))
        expected_m = 0.9 * m + 0.1 * g
        half, momentum = backend("numba").momentum_step(x, m.copy(), g, 0.9, 0.5, 1e-2)
        np.testing.assert_allclose(momentum, expected_m, rtol=1e-5)
        np.testing.assert_allclose(half, x - 0.5 * (expected_m + 1e-2 * x), rtol=1e-4, atol=1e-6)
        mean, distance = spread(x)
        np.testing.assert_allclose(mean, x.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-9)
        assert distance == pytest.approx(np.square(x - mean).sum() / 5, rel=1e-6)


def test_theorem_and_the_reduction_hold_on_a_quadratic_where_alpha_is_below_one() -> None:
    """L, σ, G and the gap are known, momentum is off as in the proof,
    η is the largest that the theorem allows."""
    task, n, s, T = Quadratic(nodes=12, noise=0.1), 12, 9, 200
    red = theory.reduction(n, 0, s, 0)
    assert red is not None
    assert red.contracts
    centre = task.targets.mean(axis=0)
    G = float(np.sqrt(np.square(task.targets - centre).sum(axis=1).mean()))
    constants: dict[str, Any] = {
        "L": 1.0,
        "sigma": 0.1 * np.sqrt(task.d),
        "G": G,
        "gap": float(np.square(centre).sum()) / 2,
    }
    sizes: dict[str, Any] = {"nodes": n, "byzantine": 0, "pull": s, "b_hat": 0, "rounds": T}
    promised = theory.convergence(red, **sizes, **constants)
    assert promised is not None
    spec = BASE.replace(**sizes, lr=promised.eta_max, momentum=0.0, weight_decay=0.0, attack="none")
    run = simulation(spec, task)
    gradients, alphas, lambdas = [np.square(run.state.x - centre).sum(axis=1)], [], []
    for _ in range(T):
        info = play(run, contraction=True)
        gradients.append(np.square(run.state.x - centre).sum(axis=1))
        alphas.append(info.alpha_realised)
        lambdas.append(info.lambda_realised)
    assert np.mean(gradients, axis=0).max() <= promised.bound
    assert np.mean([a for a in alphas if a is not None]) <= red.alpha
    assert np.mean([a for a in lambdas if a is not None]) <= red.lambda_


@pytest.mark.parametrize("method", ["rpel", "cs-plus"])
def test_consistent_hostile_node_sends_one_vector_to_all_victims(method: str) -> None:
    """Of those forged in that round for one of its victims; without the flag each victim gets its own."""
    for consistent in (True, False):
        run = simulation(
            BASE.replace(method=method, attack=f"foe(consistent={str(consistent).lower()})", rounds=3)
        )
        stored = watched(run)
        shared = False
        for t in range(1, 4):
            run.step()
            ask, inbox = stored[-1]
            hostile = run.roster.hostile(t)
            sent: dict[int, set[int]] = {}
            for wanted, rows in zip(ask.wanted, inbox.index[:, 1:], strict=True):
                for node, row in zip(wanted[wanted >= 0], rows, strict=False):
                    if hostile[node]:
                        sent.setdefault(int(node), set()).add(int(row))
            assert all(row >= 12 for rows in sent.values() for row in rows), (
                "forged vectors stand behind honest rows"
            )
            shared |= any(len(rows) > 1 for rows in sent.values())
        assert shared != consistent


def test_consistent_attack_is_drawn_anew_every_round_and_for_every_hostile_node() -> None:
    run = simulation(BASE.replace(method="all-to-all", attack="foe(consistent=true)"))
    delivered = watched(run)
    for _ in range(4):
        run.step()
    forged = [tuple(sorted(set(inbox.index[inbox.index >= 12].tolist()))) for _, inbox in delivered]
    assert all(1 <= len(rows) <= 3 for rows in forged), "at most one vector for each of three hostile nodes"
    assert len(set(forged)) > 1


def test_consistent_search_looks_at_those_who_pulled_the_sender() -> None:
    run = simulation(BASE.replace(attack="strongest(consistent=true)", rounds=3))
    views: list[Any] = []
    forge = run.network.attack.function

    @declare(needs={"rule"})
    def watching(view: View) -> Any:
        views.append(view)
        return forge(view)

    stored = watched(with_attack(run, replace(run.network.attack, function=watching)))
    for t in range(1, 4):
        run.step()
        ask, hostile, view = stored[-1][0], run.roster.hostile(t), views[-1]
        met = np.flatnonzero(hostile[ask.wanted].any(axis=1))
        pullers = {
            int(j): set(np.flatnonzero((ask.wanted == j).any(axis=1))) for j in np.flatnonzero(hostile)
        }
        for row in view.audience[(view.audience >= 0).any(axis=1)]:
            assert set(met[row[row >= 0]]) in pullers.values()
        assert 1 <= (view.audience >= 0).any(axis=1).sum() <= 3


def test_violations_name_the_node_and_its_round() -> None:
    result = rpel.simulate("linear", nodes=20, byzantine=6, pull=6, b_hat=2, rounds=4, out=None, eval_size=50)
    hostile, listed = Roster(20, 6, seed=0).hostile(1), result.certificate["violations"]
    assert len(listed) > 3
    for actual in listed:
        node = actual["node"]
        assert not hostile[node]
        assert hostile[Pull(20, 6, 0).sample(actual["round"], np.array([node]))[0]].sum() == actual["count"]


def test_workers_without_a_unit_of_work_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Together(Quadratic):
        nodes_per_call = 8  # as many nodes as an engine takes at once

    with caplog.at_level("WARNING", "rpel"):
        Engine(resolve(BASE), Together(), Group(0, 4, 4))
    assert "2 of 4 workers" in caplog.text
    assert "2 units" in caplog.text
