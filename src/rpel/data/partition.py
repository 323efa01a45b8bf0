"""The training examples of each node: Dirichlet, iid, by writer, one owner each, or virtual.

A virtual partition has more nodes than examples. Invariants of the others: no example is held twice, and
every node can fill one batch; none is lost, except by owners.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rpel.randomness import stream
from rpel.types import Integers

_REDRAWS = 100


def dirichlet(labels: Integers, nodes: int, alpha: float, batch: int, seed: int) -> list[Integers]:
    """Return the examples of each node: every class is cut among the nodes by shares q ~ Dir(α·1).

    Redrawn while a node has less than one batch, at most 100 times.

    >>> parts = dirichlet(np.arange(1000) % 10, nodes=8, alpha=1.0, batch=25, seed=0)
    >>> len(parts), sum(map(len, parts)), min(map(len, parts)) >= 25
    (8, 1000, True)
    """
    _check_sizes(len(labels), nodes, batch)
    _check_alpha(alpha)
    for attempt in range(1 + _REDRAWS):
        parts = _dirichlet_once(labels, nodes, alpha, stream(seed, ("partition", attempt)))
        if min(map(len, parts)) >= batch:
            return parts
    raise ValueError(
        f"after {_REDRAWS} redraws with alpha {alpha:g} one of {nodes} nodes still has less than a batch of "
        f"{batch} out of {len(labels)} examples: take a larger alpha, a smaller batch, fewer nodes or a "
        "virtual partition"
    )


def _dirichlet_once(labels: Integers, nodes: int, alpha: float, rng: np.random.Generator) -> list[Integers]:
    held: list[list[Integers]] = [[] for _ in range(nodes)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(nodes, alpha))
        # the last node takes the rest
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for node, part in enumerate(np.split(members, cuts)):
            held[node].append(part)
    return [np.concatenate(parts) for parts in held]


def iid(labels: Integers, nodes: int, batch: int, seed: int) -> list[Integers]:
    """Return the examples of each node: all are shuffled and dealt in parts of equal size, up to one.

    >>> [len(part) for part in iid(np.zeros(10, np.int64), nodes=3, batch=2, seed=0)]
    [4, 3, 3]
    """
    _check_sizes(len(labels), nodes, batch)
    return np.array_split(stream(seed, ("partition", 0)).permutation(len(labels)), nodes)


def by_writer(writers: NDArray[np.integer], nodes: int, batch: int, seed: int) -> list[Integers]:
    """Return the examples of each node: whole writers, in random order, each to the node that holds least.

    >>> [part.tolist() for part in by_writer(np.array([7, 7, 8, 9, 9, 8]), nodes=3, batch=2, seed=0)]
    [[2, 5], [0, 1], [3, 4]]
    """
    _check_sizes(len(writers), nodes, batch)
    _, first, counts = np.unique(writers, return_index=True, return_counts=True)
    if len(first) < nodes:
        raise ValueError(
            f"{len(first)} writers cannot be dealt to {nodes} nodes: each node needs one of its own"
        )
    groups = np.split(np.argsort(writers, kind="stable"), np.cumsum(counts)[:-1])
    held: list[list[Integers]] = [[] for _ in range(nodes)]
    least = [(0, node) for node in range(nodes)]
    for writer in stream(seed, ("partition", 0)).permutation(len(groups)):
        size, node = heapq.heappop(least)
        held[node].append(groups[writer])
        heapq.heappush(least, (size + len(groups[writer]), node))
    if least[0][0] < batch:
        raise ValueError(
            f"dealing writers leaves a node with {least[0][0]} examples, less than a batch of {batch}"
        )
    return [np.concatenate(parts) for parts in held]


def largest_owners(writers: NDArray[np.integer], nodes: int, batch: int) -> list[Integers]:
    """Return the examples of each node: all of one writer's, the largest first; the rest stay out.

    >>> [part.tolist() for part in largest_owners(np.array([7, 8, 9, 9, 8, 9]), nodes=2, batch=2)]
    [[2, 3, 5], [1, 4]]
    """
    _check_sizes(len(writers), nodes, batch)
    _, counts = np.unique(writers, return_counts=True)
    groups = np.split(np.argsort(writers, kind="stable"), np.cumsum(counts)[:-1])
    order = np.argsort(-counts, kind="stable")[:nodes]
    if len(order) < nodes or counts[order[-1]] < batch:
        able = int((counts >= batch).sum())
        raise ValueError(
            f"{nodes} nodes need an owner of a batch of {batch} examples each, and there are {able}: take "
            "fewer nodes"
        )
    return [groups[writer] for writer in order]


@dataclass(frozen=True, eq=False)
class Virtual:
    """Nodes that share all examples: each draws by its own mixture of classes, or evenly from everything."""

    nodes: int
    pool: Integers
    """(N,) examples sorted by class."""
    start: Integers
    """(classes + 1,) where each class's pool begins, and the end."""
    mixture: NDArray[np.float32] | None
    """(nodes, classes), rows sum to one; None: every node draws evenly from all examples."""

    @property
    def numbers(self) -> int:
        """The number of random numbers that one example takes."""
        return 1 if self.mixture is None else 2

    def draw(self, uniform: NDArray[np.floating], nodes: Integers) -> Integers:
        """Return a batch (h, batch) of example indices for each of the nodes (h,).

        Of ``uniform`` (h, batch, numbers) in [0, 1) the first number chooses the class by the node's mixture,
        the last the example in the class's pool.

        >>> mixture = np.array([[1.0, 0.0], [0.5, 0.5]], np.float32)
        >>> two = Virtual(2, np.array([4, 5, 6, 7]), np.array([0, 3, 4]), mixture)
        >>> two.draw(np.array([[[0.9, 0.0]], [[0.9, 0.5]]]), np.arange(2))
        array([[4],
               [7]])
        """
        if uniform.ndim != 3 or uniform.shape[::2] != (len(nodes), self.numbers):
            needed = f"({len(nodes)}, batch, {self.numbers})"
            raise ValueError(f"uniform numbers of shape {needed} are needed, not {uniform.shape}")
        if self.mixture is None:
            start, size = np.zeros(1, np.int64), np.array([len(self.pool)])
        else:
            label = _classes(self.mixture[nodes], uniform[..., 0])
            start, size = self.start[label], np.diff(self.start)[label]
        offset = np.minimum((uniform[..., -1] * size).astype(np.int64), size - 1)
        drawn: Integers = self.pool[start + offset]
        return drawn

    def shares(self, nodes: Integers) -> NDArray[np.float64]:
        """(classes,) Return the share of each class in what these nodes draw together."""
        if self.mixture is None:
            return np.diff(self.start) / len(self.pool)
        total = self.mixture[nodes].sum(axis=0, dtype=np.float64)
        return np.asarray(total / total.sum())


def _classes(mixture: NDArray[np.float32], uniform: NDArray[np.floating]) -> Integers:
    """(h, batch) Return the class that each number chooses by its row of the mixture (h, classes)."""
    label = np.zeros(uniform.shape, np.int64)
    for edge in np.cumsum(mixture, axis=1, dtype=np.float64)[:, :-1].T:  # never (h, batch, classes) in memory
        label += uniform >= edge[:, None]
    # A sum rounded below 1 must not lead into a trailing class of share zero.
    last = mixture.shape[1] - 1 - np.argmax(mixture[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(label, last[:, None]))


_ROWS = 1 << 14  # mixtures drawn at once, in float64


def virtual(labels: Integers, nodes: int, alpha: float, seed: int) -> Virtual:
    """Return mixtures of classes q ~ Dir(α·1) for all nodes; with α = ∞ every node draws from all data.

    It keeps 8 bytes for each example and, with finite α, 4 for each node and class: 40 MB for a million nodes
    and ten classes.

    >>> shared = virtual(np.arange(100) % 10, nodes=100_000, alpha=1.0, seed=0)
    >>> shared.mixture.shape, shared.mixture.dtype, shared.pool.shape
    ((100000, 10), dtype('float32'), (100,))
    >>> virtual(np.arange(100) % 10, nodes=1_000_000, alpha=float("inf"), seed=0).mixture is None
    True
    """
    if nodes < 1 or not len(labels):
        raise ValueError(f"a virtual partition needs nodes and examples, not {nodes} and {len(labels)}")
    if not alpha > 0:
        raise ValueError(f"alpha must be a positive number or inf, not {alpha}")
    counts = np.bincount(labels)
    pool, start = np.argsort(labels, kind="stable"), np.concatenate([[0], np.cumsum(counts)])
    if math.isinf(alpha):
        return Virtual(nodes, pool, start, None)
    present = np.flatnonzero(counts)
    mixture = np.zeros((nodes, len(counts)), np.float32)
    rng = stream(seed, ("partition", 0))
    for at in range(0, nodes, _ROWS):
        some = mixture[at : at + _ROWS]
        some[:, present] = rng.dirichlet(np.full(len(present), alpha), size=len(some))
    return Virtual(nodes, pool, start, mixture)


def balanced_subset(labels: Integers, size: int, seed: int) -> Integers:
    """Return ``size`` indices in rising order with class counts as equal as the data allow, or all.

    >>> subset = balanced_subset(np.arange(100) % 10, 20, seed=0)
    >>> np.bincount(subset % 10)
    array([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    if size < 1:
        raise ValueError(f"a subset needs at least one example, not {size}")
    rng = stream(seed, "evaluation")
    turn = np.empty(len(labels), np.int64)  # the rank of an example within its class, at random
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        turn[members] = rng.permutation(len(members))
    return np.sort(np.lexsort((labels, turn))[:size])


def _check_sizes(examples: int, nodes: int, batch: int) -> None:
    if nodes < 1 or batch < 1:
        raise ValueError(f"a partition needs at least one node and a batch of one, not {nodes} and {batch}")
    if nodes * batch > examples:
        raise ValueError(
            f"{nodes} nodes with a batch of {batch} need {nodes * batch} examples, but there are {examples}: "
            "take fewer nodes, a smaller batch or a virtual partition"
        )


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        remedy = ": for equal shares take partition iid" if alpha == math.inf else ""
        raise ValueError(f"alpha must be a positive number, not {alpha}{remedy}")
