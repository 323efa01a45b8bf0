"""The systems RPEL is compared with: equal budgets, connected graphs,
and what each must do where that is known."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import rpel
from rpel.attacks import View, declare
from rpel.graphs import Graph, honest_first, most_central, random_graph
from rpel.randomness import sample_without_replacement
from rpel.simulation import build
from rpel.simulation.methods import METHODS, build_network, messages, resolve
from rpel.spec import Spec
from rpel.topology import FixedGraph, Push, RandomRegular
from support.definitions import metropolis
from support.simulations import BASE, Quadratic, play, schedule, simulation, with_attack

Array = NDArray[Any]
ON_GRAPHS = [name for name, method in METHODS.items() if method.on_graph]
GOSSIP = [name for name in ON_GRAPHS if name != "balance"]
"""Those that weigh neighbours by the graph's weights;
balance leaves out whoever is far in units of its own length."""


def sizes(most_nodes: int, most_pull: int) -> st.SearchStrategy[tuple[int, int]]:
    """(nodes, pull) with pull < nodes."""
    return st.integers(4, most_nodes).flatmap(
        lambda nodes: st.tuples(st.just(nodes), st.integers(2, min(most_pull, nodes - 1)))
    )


@given(sizes(40, 12), st.integers(0, 10**6))
def test_random_graph_is_connected_with_exactly_k_edges(size: tuple[int, int], seed: int) -> None:
    nodes, pull = size
    graph = random_graph(nodes, pull, seed)
    assert graph.edges == nodes * pull // 2
    assert nx.is_connected(graph.networkx())
    assert not graph.adjacency.diagonal().any()
    assert (graph.adjacency == graph.adjacency.T).all()


@given(st.integers(1, 4), st.integers(2, 8), st.integers(1, 20), st.integers(0, 10**6))
def test_honest_first_connects_the_honest_and_attaches_the_hostile(
    b: int, pull: int, more: int, seed: int
) -> None:
    nodes = b + max(b, pull) + more  # a minority is hostile, and the honest alone can have the degree
    hostile = np.arange(nodes) >= nodes - b
    graph = honest_first(nodes, pull, hostile, seed)
    assert graph.edges == nodes * pull // 2
    assert graph.honest_connected(hostile)
    assert (graph.adjacency[hostile].sum(axis=1) > 0).all()
    assert not graph.adjacency[np.ix_(hostile, hostile)].any()


@pytest.mark.parametrize(
    ("nodes", "pull", "words"), [(30, 1, ["too few", "pull 2"]), (4, 5, ["at most pull 3"])]
)
def test_impossible_graphs_are_refused_with_the_nearest_pull(nodes: int, pull: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        random_graph(nodes, pull, seed=0)
    assert all(word in str(caught.value) for word in words)


def test_budgets_are_equal_and_counted_alike() -> None:
    for name in METHODS:
        expected = 30 * 29 if METHODS[name].peers == "everybody" else 30 * 15
        assert messages(name, 30, 15) == expected
    assert messages("cs-plus", 5, 3) == 14  # 7 edges, both ways


@pytest.mark.parametrize("method", ["all-to-all", "nna"])
@pytest.mark.parametrize(("given", "nearest"), [({"pull": 5}, "pull 19"), ({"b_hat": 2}, "b_hat 4")])
def test_methods_in_which_all_hear_all_refuse_another_pull_or_b_hat(
    method: str, given: dict[str, int], nearest: str
) -> None:
    spec = Spec(nodes=20, byzantine=4, method=method)
    assert (resolve(spec).pull, resolve(spec).b_hat) == (19, 4)
    assert resolve(spec.replace(pull=19, b_hat=4)).pull == 19
    with pytest.raises(ValueError, match=f"method {method}.*{nearest}"):
        resolve(spec.replace(**given))


def test_run_that_names_no_pull_takes_the_comfortable_plan_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="rpel")
    quick: dict[str, Any] = {"model": "linear", "rounds": 1, "eval_size": 10, "batch_size": 2, "out": None}
    result = rpel.simulate(nodes=20, byzantine=4, **quick, seeds=[0, 1])
    assert (result.spec.pull, result.spec.b_hat) == (11, 4)
    said = [record.message for record in caplog.records if "comfortable plan" in record.message]
    assert len(said) == 1
    assert said[0].startswith(
        "pull 11 and b_hat 4 by the comfortable plan: a hostile share of at most 0.333, 4 of 12"
    )


def test_oracle_gives_everybody_exactly_s_peers() -> None:
    heard = RandomRegular(10, 3, seed=0).sample(4, np.arange(10))
    assert heard.shape == (10, 3)
    assert all(i in heard[j] for i in range(10) for j in heard[i])
    with pytest.raises(ValueError, match=r"9 × 3.*pull 4"):
        RandomRegular(9, 3, seed=0)


def _peak(work: Callable[[], Any]) -> int:
    """Bytes of arrays that are there at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "method",
    ["el-local", *(f"cs-plus(graph={g}, placement=adversarial)" for g in ("random", "honest-first"))],
)
def test_graphs_and_pushes_need_memory_by_their_messages_and_not_by_pairs_of_nodes(method: str) -> None:
    nodes = 10_000
    spec = Spec(nodes=nodes, byzantine=200, pull=5, b_hat=2, method=method)

    def work() -> None:
        topology, roster, _ = build_network(spec, 5)
        ids = roster.honest_ids(1)
        assert topology.sample(1, ids).shape[1] <= topology.widest
        topology.weights(ids)

    assert _peak(work) < nodes * nodes // 2


@pytest.mark.parametrize("nodes", [5, 40, 300])
def test_sparse_graphs_and_pushes_equal_those_by_whole_matrices(nodes: int) -> None:
    graph, pull = random_graph(nodes, 3, seed=nodes), 3
    np.testing.assert_allclose(graph.weights, metropolis(graph.adjacency), rtol=0, atol=1e-15)
    hostile = np.zeros(nodes, dtype=bool)
    for _ in range(nodes // 4):
        hostile[np.argmax(np.where(hostile, -1, (graph.adjacency & ~hostile[None, :]).sum(axis=1)))] = True
    np.testing.assert_array_equal(most_central(graph, nodes // 4), hostile)
    sent = np.zeros((nodes, nodes), dtype=bool)
    np.put_along_axis(
        sent, sample_without_replacement(7, "push", 2, np.arange(nodes), nodes, pull), True, axis=1
    )
    sent[hostile] = True
    np.fill_diagonal(sent, False)
    heard = Push(nodes, pull, 7, lambda t: np.flatnonzero(hostile)).sample(2, np.arange(nodes)[::2])
    assert [row[row >= 0].tolist() for row in heard] == [
        np.flatnonzero(sent[:, i]).tolist() for i in range(0, nodes, 2)
    ]


def test_flooded_nodes_that_do_not_fit_are_refused_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "free_memory", lambda: 8 << 30)
    flood = {"attack": "alie(flood=true)"} | {"method": "el-local", "pull": 10, "b_hat": 2}
    with pytest.raises(ValueError, match=r"9\d\d,\d{3},\d{3} "):
        simulation(BASE.replace(nodes=100_000, byzantine=10_000, **flood), Quadratic())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "balance"])
def test_every_method_learns_when_nobody_is_hostile(method: str) -> None:
    base = BASE.replace(
        nodes=12, byzantine=0, b_hat=0, pull=4, rounds=60, lr=schedule(lambda t: 0.3 / t**0.5, 60)
    )
    spec = base.replace(method=method)
    run = simulation(spec, Quadratic())
    for _ in range(60):
        run.step()
    assert run.evaluate(None).worst > 0.7


def rounds_of_gossip(rule: rpel.Rule, graph: Graph, x: Array, rounds: int) -> list[float]:
    """Largest distance between two models after each round without gradients."""
    topology, ids, spreads = FixedGraph(graph), np.arange(len(x)), []
    near, weights = topology.sample(1, ids), topology.weights(ids)
    index = np.concatenate([ids[:, None], near], axis=1)
    for _ in range(rounds):
        spreads.append(float(np.linalg.norm(x[:, None] - x[None], axis=2).max()))
        x = rule.aggregate(x, index, weights=weights, hostile=np.zeros(index.shape, bool))
    return spreads


@given(st.integers(0, 10**6), st.sampled_from(GOSSIP), st.integers(0, 2))
def test_spread_without_gradients_never_grows(seed: int, method: str, b_hat: int) -> None:
    rule = rpel.rule(METHODS[method].rule, b_hat=b_hat)
    x = np.random.default_rng(seed).normal(size=(10, 3))
    spreads = rounds_of_gossip(rule, random_graph(10, 4, seed), x, 5)
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(spreads))


@pytest.mark.parametrize("method", GOSSIP)
def test_spread_on_complete_graphs_contracts_under_minority_hostile_weight(method: str) -> None:
    rule = rpel.rule(METHODS[method].rule, b_hat=2)
    complete = Graph.of(~np.eye(9, dtype=bool))
    spreads = rounds_of_gossip(rule, complete, np.random.default_rng(1).normal(size=(9, 3)), 12)
    assert spreads[-1] < 0.2 * spreads[0]


@pytest.mark.parametrize("method", ["rpel", "gts"])
def test_attack_receives_only_declared_inputs(method: str) -> None:
    """The models before the local steps, and whom each honest node asks;
    both only for those that need them."""
    seen: list[View] = []

    def curious(view: View) -> Array:
        seen.append(replace(view, before=None if view.before is None else view.before.copy()))
        return view.moments()

    spec = BASE.replace(method=method, local_steps=2, lr=0.1)
    for needs in (frozenset(), frozenset({"before", "graph"})):
        run = simulation(spec, Quadratic())
        with_attack(run, rpel.attack(declare(needs=needs)(curious)))
        run.step()
        before = run.state.x.copy()
        run.step()
    assert seen[1].before is None
    assert seen[1].graph is None
    view, ids, hostile = seen[3], run.roster.honest_ids(2), run.roster.hostile(2)
    np.testing.assert_array_equal(view.before, before)
    assert view.graph is not None
    for i, asked in enumerate(run.topology.sample(2, ids)):
        wanted = [j for j in asked if j >= 0 and not hostile[j]]
        assert sorted(ids[view.graph[i][view.graph[i] >= 0]]) == sorted(wanted)


def test_mimic_on_a_graph_sends_a_neighbours_model() -> None:
    run = simulation(BASE.replace(method="d-psgd", attack="mimic", pull=5, b_hat=2), Quadratic())
    seen, forge = [], run.network.attack.function

    def kept(view: View) -> Array:
        seen.append(view)
        return np.asarray(forge(view))

    with_attack(run, replace(run.network.attack, function=kept)).step()
    v = seen[0]
    neighbours = [[j for j in v.peers[i] if j >= 0 and j != v.own[i]] for i in range(v.victims)]
    assert v.victims
    assert all(neighbours)
    for i, near in enumerate(neighbours):
        np.testing.assert_array_equal(v.out[i], v.honest[near[0]])


def test_flooding_breaks_pushing_where_pulling_stands() -> None:
    results = {}
    for method, params in [("rpel", ""), ("el-local", "(flood=true)")]:
        spec = BASE.replace(method=method, attack=f"foe{params}", rounds=40, lr=0.3)
        run = simulation(spec, Quadratic())
        for _ in range(40):
            info = play(run)
        results[method] = (run.evaluate(None).worst, int(info.hostile.max()), int(info.hostile.min()))
    assert results["rpel"][0] > 0.9
    assert results["el-local"][0] < 0.4
    assert results["el-local"][1:] == (3, 3), "all three hostile nodes reach everybody"


@pytest.mark.parametrize("fields", [{"attack": "spectral"}, {"attack": "strongest(of=all)"}])
def test_attack_limited_in_nodes_is_refused_by_resolve(fields: dict[str, Any]) -> None:
    assert resolve(Spec(nodes=2200, byzantine=200, **fields)).spec.attack == fields["attack"]
    with pytest.raises(ValueError, match=r"2000.*2001"):
        resolve(Spec(nodes=2201, byzantine=200, **fields))
