"""Fixed graphs for the baselines: connected, with as many edges as RPEL sends messages for,
and their weights.

K = ⌊ns/2⌋ edges: a uniform random labelled tree first, then uniform extra edges, so that the graph is
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
    import networkx as nx  # a fifth of a second: only who has a fixed graph imports it

_DENSE = 30_000
"""Nodes up to which a row of weights is added up as a whole row: the order of a sum decides its last bit."""
_ROWS = 1 << 21  # numbers of such rows at a time


@dataclass(frozen=True)
class Graph:
    """An undirected graph on n nodes: pairs (K, 2) of neighbours i < j, in ascending order.

    Memory is that of its edges; ``adjacency`` and ``weights``, n × n, are for graphs that somebody looks at.
    """

    nodes: int
    pairs: Integers

    @classmethod
    def of(cls, adjacency: NDArray[np.bool_]) -> "Graph":
        """The graph of a symmetric (n, n) matrix.

        >>> Graph.of(~np.eye(3, dtype=bool)).pairs.tolist()
        [[0, 1], [0, 2], [1, 2]]
        """
        return cls(len(adjacency), np.argwhere(np.triu(adjacency, 1)))

    @cached_property
    def adjacency(self) -> NDArray[np.bool_]:
        """(n, n) whether two nodes are neighbours."""
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
        """(n,) how many neighbours each node has."""
        return np.bincount(self.pairs.ravel(), minlength=self.nodes)

    @cached_property
    def neighbours(self) -> Integers:
        """(n, largest degree) each node's neighbours in ascending order, −1 padded."""
        both = np.concatenate([self.pairs, self.pairs[:, ::-1]])
        both = both[np.lexsort((both[:, 1], both[:, 0]))]
        table = np.full((self.nodes, int(self.degree.max(initial=0))), -1, dtype=np.int64)
        first = np.cumsum(self.degree) - self.degree
        table[both[:, 0], np.arange(len(both)) - first[both[:, 0]]] = both[:, 1]
        return table

    @cached_property
    def neighbour_weights(self) -> Floats:
        """(n, largest degree) the Metropolis weights of the neighbours, 0 padded."""
        near = np.maximum(self.neighbours, 0)
        return np.asarray(
            (self.neighbours >= 0) / (1.0 + np.maximum(self.degree[:, None], self.degree[near]))
        )

    @cached_property
    def own_weights(self) -> Floats:
        """(n,) what a node keeps of its own model, 1 − Σ."""
        if self.nodes > _DENSE:
            return np.asarray(1.0 - self.neighbour_weights.sum(axis=1))
        own, step = np.empty(self.nodes), max(1, _ROWS // self.nodes)
        for start in range(0, self.nodes, step):
            near, weights = (a[start : start + step] for a in (self.neighbours, self.neighbour_weights))
            rows = np.zeros((len(near), self.nodes))
            i, column = np.nonzero(near >= 0)
            rows[i, near[i, column]] = weights[i, column]
            own[start : start + step] = 1.0 - rows.sum(axis=1)
        return own

    @property
    def edges(self) -> int:
        return len(self.pairs)

    def networkx(self) -> "nx.Graph[int]":
        import networkx as nx

        graph: nx.Graph[int] = nx.empty_graph(self.nodes)
        graph.add_edges_from(self.pairs.tolist())
        return graph

    def honest_connected(self, hostile: NDArray[np.bool_]) -> bool:
        """Whether the honest nodes reach each other without the hostile ones."""
        import networkx as nx

        return bool(nx.is_connected(self.networkx().subgraph(np.flatnonzero(~hostile).tolist())))

    def connectivity(self) -> int:
        """How many nodes must go before the graph falls apart; the fixed-graph methods assume at least 2b.

        >>> random_graph(6, 5, seed=0).connectivity()
        5
        """
        import networkx as nx

        return int(nx.node_connectivity(self.networkx()))


def _tree(nodes: list[int], coins: np.random.Generator) -> list[tuple[int, int]]:
    """A uniform random labelled tree, from a random Prüfer sequence."""
    if len(nodes) < 2:
        return []
    if len(nodes) == 2:
        return [(nodes[0], nodes[1])]
    code = coins.integers(0, len(nodes), size=len(nodes) - 2).tolist()
    import networkx as nx

    return [(nodes[a], nodes[b]) for a, b in nx.from_prufer_sequence(code).edges]


class _Pairs:
    """All pairs i < j of nodes that may become neighbours, in ascending order, by their number;
    none is ever listed.

    partners: for the nodes of each kind (n,), in ascending order, those they may be joined to.
    """

    def __init__(self, kind: Integers, partners: tuple[Integers, ...]) -> None:
        self.kind, self.partners = kind, partners
        everybody = np.arange(len(kind))
        self.first = np.choose(kind, [np.searchsorted(some, everybody, side="right") for some in partners])
        count = np.array([len(some) for some in partners])[kind] - self.first
        self.start = np.cumsum(count) - count
        self.total = int(count.sum())

    def number(self, pairs: Integers) -> Integers:
        """(k,) the numbers of pairs (k, 2) that are among these, ascending."""
        i, j = np.sort(pairs, axis=1).T
        rank = np.choose(self.kind[i], [np.searchsorted(some, j) for some in self.partners])
        return np.sort(self.start[i] + rank - self.first[i])

    def pair(self, numbers: Integers) -> Integers:
        """(k, 2) the pairs with these numbers (k,)."""
        i = np.searchsorted(self.start, numbers, side="right") - 1
        rank = self.first[i] + numbers - self.start[i]
        joined = [np.append(some, 0)[np.minimum(rank, len(some))] for some in self.partners]
        return np.stack([i, np.choose(self.kind[i], joined)], axis=1)

    def drawn(self, extra: int, taken: Integers, coins: np.random.Generator) -> Integers:
        """(extra, 2) uniform pairs among those that are not taken (k, 2) yet."""
        known = self.number(taken)
        chosen = coins.choice(self.total - len(known), size=extra, replace=False)
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
    """A random connected graph with ⌊n·s/2⌋ edges.

    >>> random_graph(nodes=30, pull=3, seed=0).edges
    45
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    coins = stream(seed, "graph")
    tree = _array(_tree(list(range(nodes)), coins))
    every = _Pairs(np.zeros(nodes, dtype=np.int64), (np.arange(nodes),))
    return _graph(nodes, tree, every.drawn(edges - (nodes - 1), tree, coins))


def honest_first(nodes: int, pull: int, hostile: NDArray[np.bool_], seed: int) -> Graph:
    """As in the earlier works: a connected honest part first, then the hostile nodes attached;
    ⌊n·s/2⌋ edges in all.

    The honest part gets its share of the edges (that of the pairs), at least a tree;
    each hostile node at least one.

    >>> graph = honest_first(30, 3, np.arange(30) >= 28, seed=0)
    >>> graph.edges, graph.honest_connected(np.arange(30) >= 28)
    (45, True)
    """
    edges = nodes * pull // 2
    _check(nodes, edges, pull)
    coins, honest, others = stream(seed, "graph"), np.flatnonzero(~hostile), np.flatnonzero(hostile)
    h, kind, nobody = len(honest), hostile.astype(np.int64), np.empty(0, dtype=np.int64)
    inside = max(h - 1, min(edges - len(others), round(edges * h * (h - 1) / (nodes * (nodes - 1)))))
    tree = _array(_tree(honest.tolist(), coins))
    more = _Pairs(kind, (honest, nobody)).drawn(inside - (h - 1), tree, coins)
    attached = _array([(int(coins.choice(honest)), int(j)) for j in others])
    rest = _Pairs(kind, (others, honest)).drawn(edges - inside - len(others), attached, coins)
    return _graph(nodes, tree, more, attached, rest)


def most_central(graph: Graph, count: int) -> NDArray[np.bool_]:
    """(n,) the ``count`` nodes that adversarial placement takes:
    greedily those that touch the most honest nodes.

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
