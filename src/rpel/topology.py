"""Who hears whom in a round.

Topologies are small pure objects: ``sample(t, ids)`` names the peers, −1 where there are fewer, and
``widest`` bounds their number for one node, so that the memory of a round is known before the first.

On a fixed graph ``weights(ids)`` gives the gossip weights of the same entries, self first;
elsewhere all count alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

    @property
    def widest(self) -> int:
        return self.pull

    def sample(self, t: int, ids: Integers) -> Integers:
        return sample_without_replacement(self.seed, "pull", t, ids, self.nodes, self.pull)


@dataclass(frozen=True)
class AllToAll(Unweighted):
    """Everybody hears everybody: s = n − 1, nothing to draw.

    >>> AllToAll(nodes=4).sample(1, np.array([0, 2]))
    array([[1, 2, 3], [0, 1, 3]])
    """

    nodes: int

    @property
    def widest(self) -> int:
        return self.nodes - 1

    def sample(self, t: int, ids: Integers) -> Integers:
        others = np.tile(np.arange(self.nodes - 1), (len(ids), 1))
        return np.asarray(others + (others >= ids[:, None]))


@dataclass(frozen=True)
class FixedGraph:
    """A node hears its neighbours, the same in every round, with Metropolis weights."""

    graph: Graph

    @property
    def widest(self) -> int:
        return int(self.graph.neighbours.shape[1])

    def sample(self, t: int, ids: Integers) -> Integers:
        return self.graph.neighbours[ids]

    def weights(self, ids: Integers) -> Floats:
        """(h, 1 + largest degree) own weight, then those of the neighbours."""
        return np.concatenate([self.graph.own_weights[ids, None], self.graph.neighbour_weights[ids]], axis=1)


@dataclass(frozen=True)
class Push(Unweighted):
    """Epidemic Learning by push (EL-Local): every node sends to s random others that it chooses.

    ``flooders(t)`` send to everybody in round t:
    what a hostile node does when nobody has to ask for its model.

    >>> heard = Push(nodes=6, pull=2, seed=0, flooders=lambda t: np.array([5])).sample(1, np.arange(5))
    >>> bool((heard == 5).any(axis=1).all())
    True
    """

    nodes: int
    pull: int
    seed: int
    flooders: Callable[[int], Integers] | None = None

    @property
    def widest(self) -> int:
        """Bound the peers heard, exceeded with probability below 1e-6; flooding senders are included."""
        flooders = 0 if self.flooders is None else len(self.flooders(1))
        return min(self.nodes - 1, self.pull + int(6 * self.pull**0.5) + flooders)

    def sample(self, t: int, ids: Integers) -> Integers:
        flooders = np.empty(0, dtype=np.int64) if self.flooders is None else self.flooders(t)
        others = np.setdiff1d(np.arange(self.nodes), flooders)
        targets = sample_without_replacement(self.seed, "push", t, others, self.nodes, self.pull)
        position = np.full(self.nodes, -1, dtype=np.int64)
        position[ids] = np.arange(len(ids))
        sender, receiver = np.repeat(others, self.pull), position[targets.ravel()]
        flood, all_ = np.tile(flooders, len(ids)), np.repeat(np.arange(len(ids)), len(flooders))
        sender, receiver = (
            np.append(sender, flood[flood != ids[all_]]),
            np.append(receiver, all_[flood != ids[all_]]),
        )
        # without those who ask nothing here
        order = np.lexsort((sender, receiver))[int((receiver < 0).sum()) :]
        sender, receiver = sender[order], receiver[order]
        count = np.bincount(receiver, minlength=len(ids))
        heard = np.full((len(ids), int(count.max(initial=0))), -1, dtype=np.int64)
        heard[receiver, np.arange(len(receiver)) - (np.cumsum(count) - count)[receiver]] = sender
        return heard


@dataclass(frozen=True)
class RandomRegular(Unweighted):
    """EL-Oracle: a random s-regular graph, drawn anew each round by an oracle.

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

    @property
    def widest(self) -> int:
        return self.pull

    def sample(self, t: int, ids: Integers) -> Integers:
        drawn = int(key(self.seed, ("regular", t))[0] % 2**32)
        import networkx as nx

        graph = nx.random_regular_graph(self.pull, self.nodes, seed=drawn)
        return np.array([sorted(graph[int(i)]) for i in ids], dtype=np.int64).reshape(len(ids), self.pull)
