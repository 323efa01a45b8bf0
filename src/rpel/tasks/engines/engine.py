"""What an engine is: gradients and outputs of a few nodes, computed in the calling thread.

Invariant: a unit of work is fixed by shapes alone and computed by one thread, with torch held to one thread
inside it. So results do not depend on the number of threads, bit for bit.
"""

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend import arrays
from rpel.data import trees
from rpel.types import Integers

Loss = Callable[[Any, Any], Any]
"""loss(output, target), a mean over the batch."""
_EXAMPLE_GRADIENTS = 1 << 22  # numbers in the gradients of single examples that are held at once


@dataclass(frozen=True)
class Probe:
    """Two training examples on the host, and what else decides which engine computes.

    inputs, targets: trees of tensors (2, …). labels: each target is one class, and none is ignored. uniform:
    all examples have one shape, so that batches of several nodes can be stacked. device: where models and
    examples are. by_example: the engine is for gradients of single examples.
    """

    inputs: Any
    targets: Any
    batch_size: int
    device: torch.device
    labels: bool = False
    uniform: bool = True
    by_example: bool = False


class ThreadScratch(threading.local):
    """Attributes of one thread, such as its copy of the module; never pickled."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ThreadScratch, ()


class Engine(ABC):
    """Gradients and outputs of a few nodes. Tensors are views of the caller's rows."""

    serial: bool = False
    """Units must not run side by side."""

    block: int = 250
    """Examples to evaluate a node on at once: more would not stay in the cache."""

    noisy: bool = False
    """Training draws random numbers, for which ``gradient`` needs seeds."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.scratch = loss, ThreadScratch()

    def nodes_per_call(self, batch: int | None = None) -> int:
        """How many nodes to pass at once: with batches of that size, or with common inputs."""
        return 1

    @abstractmethod
    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """Write gradients of the mean loss of c nodes into ``out``.

        Args:
            x: (c, d) the nodes' models.
            local: (c, q) their local state, changed in place when training.
            inputs: (c, B, …) a batch for each node.
            labels: (c, B, …) its targets.
            seeds: (c,) for noise in the network; empty if it is not noisy.
            out: (c, d) the result.
            train: Apply noise and update the local state; otherwise use it as in evaluation.
        """

    def clipped(
        self,
        x: Tensor,
        local: Tensor,
        inputs: Any,
        labels: Any,
        seeds: Integers,
        present: Any,
        norm: float,
        out: Tensor,
    ) -> None:
        """Write sums of single examples' gradients, each clipped to ``norm``, of c nodes into ``out``.

        Here each example is a node of its own, with a batch of one. ``local`` is left alone.

        Args:
            x: (c, d) the nodes' models.
            local: (c, q) their local state.
            inputs: (c, B, …) a batch for each node.
            labels: (c, B, …) its targets.
            seeds: (c, B) for noise in the network.
            present: (c, B), on the host: which examples exist; the others are padding.
            norm: The largest length of an example's gradient.
            out: (c, d) the result.
        """
        for i in range(len(x)):
            out[i].zero_()
            for part in example_parts(np.asarray(present)[i], x.shape[1]):
                alone, targets = (one_by_one(tree, i, part) for tree in (inputs, labels))
                each, states = x.new_empty((len(part), x.shape[1])), local[i].repeat(len(part), 1)
                at = x[i].expand(len(part), -1)
                self.gradient(at, states, alone, targets, seeds[i, part].tolist(), each, train=True)
                add_clipped(each, norm, out[i])

    @abstractmethod
    def outputs(self, x: Tensor, local: Tensor, inputs: Any) -> Any:
        """Outputs (c, N, …) of c nodes on common inputs (N, …), in evaluation mode.

        A list of c where the module's output is not a tensor.
        """

    def classify(self, x: Tensor, local: Tensor, inputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Right answers and summed cross-entropy (c,) of c nodes on common inputs with a class each."""
        outputs, kind = self.outputs(x, local, inputs), wide(x)
        chosen = F.log_softmax(outputs, dim=2).gather(2, labels.expand(len(outputs), -1)[..., None])
        right = (outputs.argmax(dim=2) == labels).sum(dim=1)
        return right, -chosen.mean(dim=(1, 2), dtype=kind) * len(labels)


def one_by_one(tree: Any, i: int, part: Integers) -> Any:
    """Some of node i's examples (c, B, …), each as a batch of one: (p, 1, …)."""

    def chosen(value: Tensor) -> Tensor:
        return value[i].index_select(0, lend(part, value))[:, None]

    return trees.mapped(chosen, tree)


def clip_factors(lengths: Tensor, norm: float) -> Tensor:
    """Factors that make vectors of these lengths at most ``norm`` long; 0 where a length is not finite.

    >>> clip_factors(torch.tensor([0.0, 0.5, 2.0, torch.nan]), 1.0).tolist()
    [1.0, 1.0, 0.5, 0.0]
    """
    return torch.where(lengths.isfinite(), (norm / lengths.clamp(min=1e-300)).clamp(max=1.0), 0.0)


def example_parts(present: NDArray[np.bool_], d: int) -> list[Integers]:
    """The numbers of the examples that exist, in parts whose gradients (d,) may be held at once.

    >>> example_parts(np.array([True, False, True]), d=10), example_parts(np.array([False]), d=10)
    ([array([0, 2])], [])
    """
    there, step = np.flatnonzero(present), max(1, _EXAMPLE_GRADIENTS // d)
    return [there[at : at + step] for at in range(0, len(there), step)]


def add_clipped(gradients: Tensor, norm: float, total: Tensor) -> None:
    """Add gradients (B, d), each clipped to ``norm``, to total (d,); one that is not finite is left out.

    >>> total = torch.zeros(2); add_clipped(torch.tensor([[3.0, 4.0], [0.0, torch.inf]]), 1.0, total); total
    tensor([0.6000, 0.8000])
    """
    lengths = gradients.norm(dim=1, dtype=wide(gradients))
    factors = clip_factors(lengths, norm).to(gradients.dtype)
    gradients.masked_fill_((factors == 0)[:, None], 0)
    total += factors @ gradients


def lend(values: Any, like: Tensor) -> Tensor:
    """A small array of the host, where a tensor is."""
    lent: Any = arrays.lend(values, like)  # type: ignore[arg-type]
    return lent  # type: ignore[no-any-return]


def wide(like: Tensor) -> torch.dtype:
    """The type in which sums are taken: float64, and float32 on devices without it."""
    dtype: Any = arrays.wide_dtype(like)  # type: ignore[arg-type]
    return dtype  # type: ignore[no-any-return]


def tensor(array: Any) -> Tensor:
    """The same memory as a tensor; a warning about read-only arrays is dropped, as nothing writes to them."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        if not array.flags.writeable:
            warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
