"""Algorithm 1 as the simulator runs it: against the plain page, and with hostile and late nodes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpel
from rpel import theory
from rpel.algorithm import init, plain, step
from rpel.rules import aggregate_or_keep
from rpel.runs.certificate import certificate
from rpel.simulation.communicator import Group
from rpel.simulation.engine import Engine
from rpel.simulation.evaluate import spread
from rpel.simulation.methods import Resolved, resolve
from rpel.simulation.network import Roster
from rpel.topology import Pull
from rpel.types import Received
from support.simulations import BASE, Quadratic, play, resumes_bit_by_bit, simulation, watched

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


def test_workers_without_a_unit_of_work_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Together(Quadratic):
        nodes_per_call = 8  # as many nodes as an engine takes at once

    with caplog.at_level("WARNING", "rpel"):
        Engine(resolve(BASE), Together(), Group(0, 4, 4))
    assert "2 of 4 workers" in caplog.text
    assert "2 units" in caplog.text
