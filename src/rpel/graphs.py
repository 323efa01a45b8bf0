"""Fixed graphs for the baselines: connected, with as many edges as RPEL sends messages for, and their weights.

K = ⌊ns/2⌋ edges: a uniform random labelled tree first, then uniform extra edges, so that the graph is connected and
otherwise as random as its size allows.
"""

from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from rpel.randomness import stream
from rpel.types import Floats, Integers


@dataclass(frozen=True)
class Graph:
    """An undirected graph on n nodes: adjacency (n, n) of booleans."""

    adjacency: NDArray[np.bool_]

    @cached_property
    def weights(self) -> Floats:
        """(n, n) Metropolis weights W_ij = 1/(1 + max(deg_i, deg_j)), W_ii = 1 − Σ.

        >>> Graph(np.array([[False, True], [True, False]])).weights
        array([[0.5, 0.5], [0.5, 0.5]])
        """
        degree = self.adjacency.sum(axis=1)
        w = self.adjacency / (1.0 + np.maximum(degree[:, None], degree[None, :]))
        np.fill_diagonal(w, 1.0 - w.sum(axis=1))
        return np.asarray(w)

    @cached_property
    def neighbours(self) -> Integers:
        """(n, largest degree) each node's neighbours in ascending order, −1 padded."""
        degree = self.adjacency.sum(axis=1)
        table = np.full((len(degree), int(degree.max(initial=0))), -1, dtype=np.int64)
        for i, row in enumerate(self.adjacency):
            table[i, : degree[i]] = np.flatnonzero(row)
        return table

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """What is saved with a run: adjacency and weights."""
        return {"adjacency": self.adjacency, "weights": self.weights}

    @property
    def edges(self) -> int:
        return int(self.adjacency.sum()) // 2

    def networkx(self) -> "nx.Graph[int]":
        return nx.from_numpy_array(self.adjacency.astype(np.int8))

    def honest_connected(self, hostile: NDArray[np.bool_]) -> bool:
        """Whether the honest nodes reach each other without the hostile ones."""
        return bool(nx.is_connected(self.networkx().subgraph(np.flatnonzero(~hostile).tolist())))

    def connectivity(self) -> int:
        """How many nodes must go before the graph falls apart; the fixed-graph methods assume at least 2b."""
        return int(nx.node_connectivity(self.networkx()))


def _tree(nodes: list[int], coins: np.random.Generator) -> list[tuple[int, int]]:
    """A uniform random labelled tree, from a random Prüfer sequence."""
    if len(nodes) < 2:
        return []
    if len(nodes) == 2:
        return [(nodes[0], nodes[1])]
    code = coins.integers(0, len(nodes), size=len(nodes) - 2).tolist()
    return [(nodes[a], nodes[b]) for a, b in nx.from_prufer_sequence(code).edges]


def _fill(adjacency: NDArray[np.bool_], allowed: NDArray[np.bool_], extra: int, coins: np.random.Generator) -> None:
    """Add ``extra`` uniform edges among the allowed pairs that are not there yet."""
    a, b = np.nonzero(np.triu(allowed & ~adjacency, 1))
    chosen = coins.choice(len(a), size=extra, replace=False)
    adjacency[a[chosen], b[chosen]] = adjacency[b[chosen], a[chosen]] = True


def _check(nodes: int, edges: int, pull: int) -> None:
    if edges < nodes - 1:
        least = -(-2 * (nodes - 1) // nodes)
        raise ValueError(f"pull {pull} gives {edges} edges, too few to connect {nodes} nodes: at least pull {least}")
    if edges > nodes * (nodes - 1) // 2:
        raise ValueError(f"pull {pull} gives {edges} edges, more than {nodes} nodes can have: at most pull {nodes - 1}")


def random_graph(nodes: int, pull: int, seed: int) -> Graph:
    """A random connected graph with ⌊n·s/2⌋ edges.

    >>> random_graph(nodes=30, pull=3, seed=0).edges
    45
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    coins = stream(seed, "graph")
    adjacency = np.zeros((nodes, nodes), dtype=bool)
    for a, b in _tree(list(range(nodes)), coins):
        adjacency[a, b] = adjacency[b, a] = True
    _fill(adjacency, np.ones_like(adjacency), edges - (nodes - 1), coins)
    return Graph(adjacency)


def honest_first(nodes: int, pull: int, hostile: NDArray[np.bool_], seed: int) -> Graph:
    """As in the earlier works: a connected honest part first, then the hostile nodes attached; ⌊n·s/2⌋ edges in all.

    The honest part gets its share of the edges (that of the pairs), at least a tree; each hostile node at least one.

    >>> graph = honest_first(30, 3, np.arange(30) >= 28, seed=0)
    >>> graph.edges, graph.honest_connected(np.arange(30) >= 28)
    (45, True)
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    coins, honest, others = stream(seed, "graph"), np.flatnonzero(~hostile), np.flatnonzero(hostile)
    h = len(honest)
    inside = max(h - 1, min(edges - len(others), round(edges * h * (h - 1) / (nodes * (nodes - 1)))))
    adjacency = np.zeros((nodes, nodes), dtype=bool)
    for a, b in _tree(honest.tolist(), coins):
        adjacency[a, b] = adjacency[b, a] = True
    both_honest = ~hostile[:, None] & ~hostile[None, :]
    _fill(adjacency, both_honest, inside - (h - 1), coins)
    for j in others:
        i = coins.choice(honest)
        adjacency[i, j] = adjacency[j, i] = True
    _fill(adjacency, hostile[:, None] ^ hostile[None, :], edges - inside - len(others), coins)
    return Graph(adjacency)


def most_central(graph: Graph, count: int) -> NDArray[np.bool_]:
    """(n,) the ``count`` nodes that adversarial placement takes: greedily those that touch the most honest nodes.

    >>> star = Graph(np.array([[False, True, True], [True, False, False], [True, False, False]]))
    >>> most_central(star, 1)
    array([ True, False, False])
    """
    hostile = np.zeros(len(graph.adjacency), dtype=bool)
    for _ in range(count):
        reach = np.where(hostile, -1, (graph.adjacency & ~hostile[None, :]).sum(axis=1))
        hostile[int(np.argmax(reach))] = True
    return hostile
