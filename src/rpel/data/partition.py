"""Who holds which training examples: Dirichlet, independent, by writer, or virtual (more nodes than examples).

Invariants of the first three: no example is held twice, none is lost, every node can fill one batch.
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
    """Integers held by each node: every class is cut among the nodes by shares q ~ Dir(α·1).

    Redrawn while a node has less than one batch, at most 100 times.

    >>> parts = dirichlet(np.arange(1000) % 10, nodes=8, alpha=1.0, batch=25, seed=0)
    >>> len(parts), sum(map(len, parts)), min(map(len, parts)) >= 25
    (8, 1000, True)
    """
    _check_room(len(labels), nodes, batch)
    _check_alpha(alpha)
    for attempt in range(1 + _REDRAWS):
        parts = _dirichlet_once(labels, nodes, alpha, stream(seed, ("partition", attempt)))
        if min(map(len, parts)) >= batch:
            return parts
    raise ValueError(
        f"after {_REDRAWS} redraws with alpha {alpha:g} one of {nodes} nodes still has less than a batch of {batch} "
        f"out of {len(labels)} examples: take a larger alpha, a smaller batch, fewer nodes or a virtual partition"
    )


def _dirichlet_once(labels: Integers, nodes: int, alpha: float, rng: np.random.Generator) -> list[Integers]:
    held: list[list[Integers]] = [[] for _ in range(nodes)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(nodes, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)  # the last node takes the rest
        for node, part in enumerate(np.split(members, cuts)):
            held[node].append(part)
    return [np.concatenate(parts) for parts in held]


def iid(labels: Integers, nodes: int, batch: int, seed: int) -> list[Integers]:
    """Integers held by each node: all examples shuffled and dealt in parts whose sizes differ by at most one.

    >>> [len(part) for part in iid(np.zeros(10, np.int64), nodes=3, batch=2, seed=0)]
    [4, 3, 3]
    """
    _check_room(len(labels), nodes, batch)
    return np.array_split(stream(seed, ("partition", 0)).permutation(len(labels)), nodes)


def by_writer(writers: NDArray[np.integer], nodes: int, batch: int, seed: int) -> list[Integers]:
    """Integers held by each node: whole writers, in random order, each to the node that holds least so far.

    >>> [part.tolist() for part in by_writer(np.array([7, 7, 8, 9, 9, 8]), nodes=3, batch=2, seed=0)]
    [[2, 5], [0, 1], [3, 4]]
    """
    _check_room(len(writers), nodes, batch)
    _, first, counts = np.unique(writers, return_index=True, return_counts=True)
    if len(first) < nodes:
        raise ValueError(f"{len(first)} writers cannot be dealt to {nodes} nodes: each node needs one of its own")
    groups = np.split(np.argsort(writers, kind="stable"), np.cumsum(counts)[:-1])
    held: list[list[Integers]] = [[] for _ in range(nodes)]
    least = [(0, node) for node in range(nodes)]
    for writer in stream(seed, ("partition", 0)).permutation(len(groups)):
        size, node = heapq.heappop(least)
        held[node].append(groups[writer])
        heapq.heappush(least, (size + len(groups[writer]), node))
    if least[0][0] < batch:
        raise ValueError(f"dealing writers leaves a node with {least[0][0]} examples, less than a batch of {batch}")
    return [np.concatenate(parts) for parts in held]


@dataclass(frozen=True, eq=False)
class Virtual:
    """A mixture of classes for each node, drawing from pools that all nodes share."""

    mixture: NDArray[np.float64]
    """(nodes, classes), rows sum to one."""
    pool: Integers
    """(N,) examples sorted by class."""
    start: Integers
    """(classes + 1,) where each class's pool begins, and the end."""

    def draw(self, uniform: NDArray[np.floating], nodes: Integers | None = None) -> Integers:
        """A batch for each node: uniform (h, batch, 2) in [0, 1) gives example indices (h, batch).

        The first number chooses the class by the node's mixture, the second the example in the class's pool. ``nodes``
        (h,) says which nodes these are; all of them, in order, if left out.

        >>> two = Virtual(np.array([[1.0, 0.0], [0.5, 0.5]]), pool=np.array([4, 5, 6, 7]), start=np.array([0, 3, 4]))
        >>> two.draw(np.array([[[0.9, 0.0]], [[0.9, 0.5]]]))
        array([[4],
               [7]])
        """
        mixture = self.mixture if nodes is None else self.mixture[nodes]
        if uniform.ndim != 3 or uniform.shape[::2] != (len(mixture), 2):
            raise ValueError(f"uniform numbers of shape ({len(mixture)}, batch, 2) are needed, not {uniform.shape}")
        label = np.zeros(uniform.shape[:2], np.int64)
        for edge in np.cumsum(mixture, axis=1)[:, :-1].T:  # one class at a time: never (h, batch, classes) in memory
            label += uniform[..., 0] >= edge[:, None]
        # An edge rounded below 1 must not lead into a trailing class of share zero.
        label = np.minimum(label, _last_present(mixture)[:, None])
        size = self.start[label + 1] - self.start[label]
        offset = np.minimum((uniform[..., 1] * size).astype(np.int64), size - 1)
        drawn: Integers = self.pool[self.start[label] + offset]
        return drawn


def _last_present(mixture: NDArray[np.float64]) -> Integers:
    """The last class with a positive share in each row."""
    last: Integers = mixture.shape[1] - 1 - np.argmax(mixture[:, ::-1] > 0, axis=1)
    return last


def virtual(labels: Integers, nodes: int, alpha: float, seed: int) -> Virtual:
    """A class mixture q ~ Dir(α·1) for each node over the classes that occur, and the pools to draw from.

    >>> shared = virtual(np.arange(100) % 10, nodes=100_000, alpha=1.0, seed=0)
    >>> shared.mixture.shape, shared.pool.shape
    ((100000, 10), (100,))
    """
    if nodes < 1 or not len(labels):
        raise ValueError(f"a virtual partition needs nodes and examples, not {nodes} and {len(labels)}")
    _check_alpha(alpha)
    counts = np.bincount(labels)
    present = np.flatnonzero(counts)
    mixture = np.zeros((nodes, len(counts)))
    mixture[:, present] = stream(seed, ("partition", 0)).dirichlet(np.full(len(present), alpha), size=nodes)
    return Virtual(mixture, np.argsort(labels, kind="stable"), np.concatenate([[0], np.cumsum(counts)]))


def balanced_subset(labels: Integers, size: int, seed: int) -> Integers:
    """``size`` indices in rising order, class counts as equal as the data allow; all indices if there are no more.

    >>> subset = balanced_subset(np.arange(100) % 10, 20, seed=0)
    >>> np.bincount(subset % 10)
    array([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    if size < 1:
        raise ValueError(f"a subset needs at least one example, not {size}")
    rng = stream(seed, "evaluation")
    turn = np.empty(len(labels), np.int64)  # the how-manieth of its class an example is, in random order
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        turn[members] = rng.permutation(len(members))
    return np.sort(np.lexsort((labels, turn))[:size])


def _check_room(examples: int, nodes: int, batch: int) -> None:
    if nodes < 1 or batch < 1:
        raise ValueError(f"a partition needs at least one node and a batch of one, not {nodes} and {batch}")
    if nodes * batch > examples:
        raise ValueError(
            f"{nodes} nodes with a batch of {batch} need {nodes * batch} examples, but there are {examples}: "
            "take fewer nodes, a smaller batch or a virtual partition"
        )


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be a positive number, not {alpha}")
