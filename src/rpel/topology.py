"""Who hears whom in a round. Topologies are small pure objects: ``sample(t, ids)`` names the peers, −1 where fewer.

On a fixed graph ``weights(ids)`` gives the gossip weights of the same entries, self first; elsewhere all count alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import numpy as np

from rpel.graphs import Graph
from rpel.randomness import key, sample_without_replacement
from rpel.types import Floats, Integers


class Unweighted:
    """Every model counts alike."""

    def weights(self, ids: Integers) -> Floats | None:
        return None


@dataclass(frozen=True)
class Pull(Unweighted):
    """RPEL's line 7: every node draws s of the n − 1 others, uniformly, without replacement, anew each round.

    >>> Pull(nodes=10, pull=3, seed=0).sample(1, np.array([4, 7])).shape
    (2, 3)
    """

    nodes: int
    pull: int
    seed: int

    def sample(self, t: int, ids: Integers) -> Integers:
        return sample_without_replacement(self.seed, "pull", t, ids, self.nodes, self.pull)


@dataclass(frozen=True)
class AllToAll(Unweighted):
    """Everybody hears everybody: s = n − 1, nothing to draw.

    >>> AllToAll(nodes=4).sample(1, np.array([0, 2]))
    array([[1, 2, 3], [0, 1, 3]])
    """

    nodes: int

    def sample(self, t: int, ids: Integers) -> Integers:
        others = np.tile(np.arange(self.nodes - 1), (len(ids), 1))
        return np.asarray(others + (others >= ids[:, None]))


@dataclass(frozen=True)
class FixedGraph:
    """A node hears its neighbours, the same in every round, with Metropolis weights."""

    graph: Graph

    def sample(self, t: int, ids: Integers) -> Integers:
        return self.graph.neighbours[ids]

    def weights(self, ids: Integers) -> Floats:
        """(h, 1 + largest degree) own weight, then those of the neighbours."""
        near = self.graph.neighbours[ids]
        others = np.where(near >= 0, self.graph.weights[ids[:, None], np.maximum(near, 0)], 0.0)
        return np.concatenate([self.graph.weights[ids, ids][:, None], others], axis=1)


@dataclass(frozen=True)
class Push(Unweighted):
    """Epidemic Learning by push (EL-Local): every node sends to s random others, so a sender decides who hears it.

    ``flooders(t)`` send to everybody in round t: what a hostile node does when nobody has to ask for its model.

    >>> heard = Push(nodes=6, pull=2, seed=0, flooders=lambda t: np.array([5])).sample(1, np.arange(5))
    >>> bool((heard == 5).any(axis=1).all())
    True
    """

    nodes: int
    pull: int
    seed: int
    flooders: Callable[[int], Integers] | None = None

    def sample(self, t: int, ids: Integers) -> Integers:
        everyone = np.arange(self.nodes)
        sent = np.zeros((self.nodes, self.nodes), dtype=bool)  # sender, receiver
        targets = sample_without_replacement(self.seed, "push", t, everyone, self.nodes, self.pull)
        np.put_along_axis(sent, targets, True, axis=1)
        if self.flooders is not None:
            sent[self.flooders(t)] = True
        np.fill_diagonal(sent, False)
        heard = sent[:, ids].T
        order = np.argsort(~heard, axis=1, kind="stable")[:, : int(heard.sum(axis=1).max(initial=0))]
        return np.where(np.take_along_axis(heard, order, axis=1), order, -1)


@dataclass(frozen=True)
class RandomRegular(Unweighted):
    """EL-Oracle: a random s-regular graph, drawn anew each round by somebody who knows everybody.

    >>> RandomRegular(nodes=6, pull=3, seed=0).sample(1, np.array([0, 4])).shape
    (2, 3)
    """

    nodes: int
    pull: int
    seed: int

    def __post_init__(self) -> None:
        if self.nodes * self.pull % 2:
            raise ValueError(
                f"el-oracle needs nodes × pull even, not {self.nodes} × {self.pull}: try pull {self.pull + 1}"
            )

    def sample(self, t: int, ids: Integers) -> Integers:
        coins = int(key(self.seed, ("regular", t))[0] % 2**32)
        graph = nx.random_regular_graph(self.pull, self.nodes, seed=coins)
        return np.array([sorted(graph[int(i)]) for i in ids], dtype=np.int64).reshape(len(ids), self.pull)
