"""Fixed graphs for the baselines, with one edge for every two messages of RPEL, and their weights.

A graph has K = ⌊ns/2⌋ edges: a uniform random labelled tree first, then uniform extra edges, so that it is
connected and otherwise as random as its size allows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rpel.randomness import stream
from rpel.types import Floats, Integers

if TYPE_CHECKING:
    import networkx as nx  # takes a fifth of a second: functions that need it import it


@dataclass(frozen=True)
class Graph:
    """An undirected graph on n nodes: pairs (K, 2) of neighbours i < j, in ascending order.

    It takes the memory of its edges; only ``adjacency`` and ``weights`` are n × n.
    """

    nodes: int
    pairs: Integers

    @classmethod
    def of(cls, adjacency: NDArray[np.bool_]) -> "Graph":
        """Return the graph of a symmetric (n, n) matrix.

        >>> Graph.of(~np.eye(3, dtype=bool)).pairs.tolist()
        [[0, 1], [0, 2], [1, 2]]
        """
        return cls(len(adjacency), np.argwhere(np.triu(adjacency, 1)))

    @cached_property
    def adjacency(self) -> NDArray[np.bool_]:
        """(n, n) Mark the pairs of neighbours."""
        matrix = np.zeros((self.nodes, self.nodes), dtype=bool)
        matrix[self.pairs[:, 0], self.pairs[:, 1]] = matrix[self.pairs[:, 1], self.pairs[:, 0]] = True
        return matrix

    @cached_property
    def weights(self) -> Floats:
        """(n, n) Metropolis weights W_ij = 1/(1 + max(deg_i, deg_j)), W_ii = 1 − Σ.

        >>> Graph.of(np.array([[False, True], [True, False]])).weights
        array([[0.5, 0.5], [0.5, 0.5]])
        """
        w = np.diag(self.own_weights)
        rows, places = np.nonzero(self.neighbours >= 0)
        w[rows, self.neighbours[rows, places]] = self.neighbour_weights[rows, places]
        return w

    @cached_property
    def degree(self) -> Integers:
        """(n,) The number of neighbours of each node."""
        return np.bincount(self.pairs.ravel(), minlength=self.nodes)

    @cached_property
    def neighbours(self) -> Integers:
        """(n, largest degree) Each node's neighbours in ascending order, padded with −1."""
        both = np.concatenate([self.pairs, self.pairs[:, ::-1]])
        both = both[np.lexsort((both[:, 1], both[:, 0]))]
        table = np.full((self.nodes, int(self.degree.max(initial=0))), -1, dtype=np.int64)
        first = np.cumsum(self.degree) - self.degree
        table[both[:, 0], np.arange(len(both)) - first[both[:, 0]]] = both[:, 1]
        return table

    @cached_property
    def neighbour_weights(self) -> Floats:
        """(n, largest degree) The Metropolis weights of the neighbours, padded with 0."""
        near = np.maximum(self.neighbours, 0)
        return np.asarray(
            (self.neighbours >= 0) / (1.0 + np.maximum(self.degree[:, None], self.degree[near]))
        )

    @cached_property
    def own_weights(self) -> Floats:
        """(n,) The weight of a node's own model, 1 − Σ."""
        return np.asarray(1.0 - self.neighbour_weights.sum(axis=1))

    @property
    def edges(self) -> int:
        """The number of edges."""
        return len(self.pairs)

    def networkx(self) -> "nx.Graph[int]":
        """Return the graph as an object of networkx."""
        import networkx as nx

        graph: nx.Graph[int] = nx.empty_graph(self.nodes)
        graph.add_edges_from(self.pairs.tolist())
        return graph

    def honest_connected(self, hostile: NDArray[np.bool_]) -> bool:
        """Say whether the honest nodes reach each other without the hostile ones."""
        import networkx as nx

        return bool(nx.is_connected(self.networkx().subgraph(np.flatnonzero(~hostile).tolist())))

    def connectivity(self) -> int:
        """Return how many nodes must be removed to disconnect it; fixed-graph methods assume at least 2b.

        >>> random_graph(6, 5, seed=0).connectivity()
        5
        """
        import networkx as nx

        return int(nx.node_connectivity(self.networkx()))


def _tree(nodes: list[int], rng: np.random.Generator) -> list[tuple[int, int]]:
    """Draw a uniform labelled tree, from a random Prüfer sequence."""
    if len(nodes) < 2:
        return []
    if len(nodes) == 2:
        return [(nodes[0], nodes[1])]
    code = rng.integers(0, len(nodes), size=len(nodes) - 2).tolist()
    import networkx as nx

    return [(nodes[a], nodes[b]) for a, b in nx.from_prufer_sequence(code).edges]


class _Pairs:
    """All pairs i < j of nodes that may become neighbours, numbered in ascending order but never listed.

    ``partners`` lists, for the nodes of each kind (n,), the nodes that they may be joined to, ascending.
    """

    def __init__(self, kind: Integers, partners: tuple[Integers, ...]) -> None:
        self.kind, self.partners = kind, partners
        ids = np.arange(len(kind))
        self.first = np.choose(kind, [np.searchsorted(some, ids, side="right") for some in partners])
        count = np.array([len(some) for some in partners])[kind] - self.first
        self.start = np.cumsum(count) - count
        self.total = int(count.sum())

    def number(self, pairs: Integers) -> Integers:
        """(k,) The numbers of pairs (k, 2), ascending."""
        i, j = np.sort(pairs, axis=1).T
        rank = np.choose(self.kind[i], [np.searchsorted(some, j) for some in self.partners])
        return np.sort(self.start[i] + rank - self.first[i])

    def pair(self, numbers: Integers) -> Integers:
        """(k, 2) The pairs with these numbers (k,)."""
        i = np.searchsorted(self.start, numbers, side="right") - 1
        rank = self.first[i] + numbers - self.start[i]
        joined = [np.append(some, 0)[np.minimum(rank, len(some))] for some in self.partners]
        return np.stack([i, np.choose(self.kind[i], joined)], axis=1)

    def draw(self, extra: int, taken: Integers, rng: np.random.Generator) -> Integers:
        """(extra, 2) Draw uniform pairs among those that are not taken (k, 2) yet."""
        known = self.number(taken)
        chosen = rng.choice(self.total - len(known), size=extra, replace=False)
        return self.pair(chosen + np.searchsorted(known - np.arange(len(known)), chosen, side="right"))


def _graph(nodes: int, *parts: Integers) -> Graph:
    pairs = np.sort(np.concatenate(parts), axis=1)
    return Graph(nodes, pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])


def _array(pairs: list[tuple[int, int]]) -> Integers:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _check(nodes: int, edges: int, pull: int) -> None:
    if edges < nodes - 1:
        least = -(-2 * (nodes - 1) // nodes)
        raise ValueError(
            f"pull {pull} gives {edges} edges, too few to connect {nodes} nodes: at least pull {least}"
        )
    if edges > nodes * (nodes - 1) // 2:
        raise ValueError(
            f"pull {pull} gives {edges} edges, more than {nodes} nodes can have: at most pull {nodes - 1}"
        )


def random_graph(nodes: int, pull: int, seed: int) -> Graph:
    """Draw a random connected graph with ⌊n·s/2⌋ edges.

    >>> random_graph(nodes=30, pull=3, seed=0).edges
    45
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    rng = stream(seed, "graph")
    tree = _array(_tree(list(range(nodes)), rng))
    every = _Pairs(np.zeros(nodes, dtype=np.int64), (np.arange(nodes),))
    return _graph(nodes, tree, every.draw(edges - (nodes - 1), tree, rng))


def honest_first(nodes: int, pull: int, hostile: NDArray[np.bool_], seed: int) -> Graph:
    """Draw a connected honest part first, then attach the hostile nodes, as in the earlier works.

    Of the ⌊n·s/2⌋ edges the honest part gets its share of the pairs, at least a tree, and each hostile node
    at least one.

    >>> graph = honest_first(30, 3, np.arange(30) >= 28, seed=0)
    >>> graph.edges, graph.honest_connected(np.arange(30) >= 28)
    (45, True)
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    rng, honest, others = stream(seed, "graph"), np.flatnonzero(~hostile), np.flatnonzero(hostile)
    h, kind, none = len(honest), hostile.astype(np.int64), np.empty(0, dtype=np.int64)
    inside = max(h - 1, min(edges - len(others), round(edges * h * (h - 1) / (nodes * (nodes - 1)))))
    tree = _array(_tree(honest.tolist(), rng))
    more = _Pairs(kind, (honest, none)).draw(inside - (h - 1), tree, rng)
    attached = _array([(int(rng.choice(honest)), int(j)) for j in others])
    rest = _Pairs(kind, (others, honest)).draw(edges - inside - len(others), attached, rng)
    return _graph(nodes, tree, more, attached, rest)


def most_central(graph: Graph, count: int) -> NDArray[np.bool_]:
    """(n,) Mark the ``count`` nodes that greedily touch the most honest nodes: adversarial placement.

    >>> star = Graph.of(np.array([[False, True, True], [True, False, False], [True, False, False]]))
    >>> most_central(star, 1)
    array([ True, False, False])
    """
    hostile, reach = np.zeros(graph.nodes, dtype=bool), graph.degree.copy()
    for _ in range(count):
        taken = int(np.argmax(np.where(hostile, -1, reach)))
        hostile[taken] = True
        near = graph.neighbours[taken]
        reach[near[near >= 0]] -= 1
    return hostile
