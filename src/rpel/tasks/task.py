"""What a task asks of an engine, and how engines share the cores.

Invariant: a unit of work is fixed by the shapes alone and computed by one thread, with torch held to one
thread inside it. So results do not depend on the number of threads, bit for bit; two threads with whole nodes
each are also faster than torch's own threads inside every small product.
"""

import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rpel.data import trees
from rpel.types import Floats, Integers

_TOGETHER = 1 << 22  # numbers in gradients of single examples that are there at once

Loss = Callable[[Any, Any], Any]
"""loss(output, target), a mean over the batch."""


@dataclass(frozen=True)
class Metric:
    """metric(output, target), a mean over the batch, and whether more of it is better.

    >>> Metric(F.l1_loss, higher_is_better=False).direction
    'less is better'
    """

    function: Loss
    higher_is_better: bool = True

    @property
    def direction(self) -> str:
        """In words, for tables and plots."""
        return f"{'more' if self.higher_is_better else 'less'} is better"


def metrics(given: Any) -> dict[str, Metric]:
    """Named metrics of a function, a :class:`Metric`, or a dict of named ones; ValueError for anything else.

    A function goes by its own name. Less is better where an attribute `higher_is_better` is False, as
    torchmetrics has it, or where a Metric says so.

    >>> metrics({"mae": Metric(F.l1_loss, higher_is_better=False)})["mae"].direction
    'less is better'
    >>> list(metrics(F.l1_loss)), metrics(None)
    (['l1_loss'], {})
    """
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {_name(given): given}
    if not named:
        raise ValueError(
            "metric is an empty dict: name one, as in metric={'mae': torch.nn.functional.l1_loss}"
        )
    return {_checked_name(name): _metric(name, one) for name, one in named.items()}


def _name(metric: Any) -> str:
    function = metric.function if isinstance(metric, Metric) else metric
    name = getattr(function, "__name__", type(function).__name__)
    return "metric" if name == "<lambda>" else name


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"metric {name!r} cannot be the name of a column: use letters, digits, _ and -")
    return name


def _metric(name: str, one: Any) -> Metric:
    if isinstance(one, Metric):
        return one
    if not callable(one):
        raise ValueError(f"metric {name!r} is a {type(one).__name__}: give a function metric(output, target)")
    return Metric(one, getattr(one, "higher_is_better", None) is not False)


class Engine(ABC):
    """Gradients and outputs of a few nodes, in the calling thread. Tensors are views of the caller's rows."""

    serial: bool = False
    """Whether units must not run side by side."""

    block: int = 250
    """How many examples to evaluate a node on at once: more would not stay in the cache."""

    noisy: bool = False
    """Whether training draws random numbers, for which `gradient` wants seeds."""

    accuracy: bool = True
    """Whether outputs (N, C, …) are scores of classes and targets (N, …) are classes."""

    wide: torch.dtype = torch.float64
    """In what means are taken."""

    def __init__(self, loss: Loss = F.cross_entropy, metrics: Sequence[Metric] = ()) -> None:
        self.loss, self.metrics, self.own = loss, tuple(metrics), Own()

    def together(self, batch: int | None = None) -> int:
        """How many nodes to pass at once: with batches of that size of their own,
        or with common inputs."""
        return 1  # nodes share nothing

    @abstractmethod
    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """Gradients of the mean loss of c nodes into out (c, d), at x (c, d) on inputs (c, B, …)
        with labels (c, B, …).

        local (c, q) is changed in place. `seeds` (c,) are for noise in the network, if it is noisy. Without
        `train`: no noise, local statistics used and left alone.
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
        """Sums of the gradients of single examples, each shortened to `norm`, of c nodes into out (c, d).

        inputs (c, B, …), labels (c, B, …), seeds (c, B); present (c, B), on the host: which examples there
        are. local is left alone. Here each example is a node of its own, with a batch of one.
        """
        for i in range(len(x)):
            out[i].zero_()
            for part in parts(np.asarray(present)[i], x.shape[1]):
                alone, targets = (self.one_by_one(tree, i, part) for tree in (inputs, labels))
                each, states = x.new_empty((len(part), x.shape[1])), local[i].repeat(len(part), 1)
                at = x[i].expand(len(part), -1)
                self.gradient(at, states, alone, targets, seeds[i, part].tolist(), each, train=True)
                add_shortened(each, norm, out[i], self.wide)

    def one_by_one(self, tree: Any, i: int, part: Integers) -> Any:
        """Of node i's examples (c, B, …) some, each as a batch of one: (p, 1, …)."""
        numbers = self.lent(part)
        return trees.mapped(lambda value: value[i].index_select(0, numbers)[:, None], tree)

    def lent(self, numbers: Integers) -> Tensor:
        """Numbers of examples, where the models are."""
        return torch.from_numpy(numbers)

    @abstractmethod
    def outputs(self, x: Tensor, local: Tensor, inputs: Any) -> Any:
        """Outputs (c, N, …) of c nodes on common inputs (N, …), in evaluation mode; a list of c where the
        module's output is not a tensor."""

    def score(self, x: Tensor, local: Tensor, inputs: Any, labels: Any) -> tuple[Floats, ...]:
        """Of each of c nodes (c,), summed over the common inputs (N, …): right answers, losses,
        and each metric.

        Of targets with several classes each, such as the pixels of an image, an example counts as the share
        that is right. Without classes right answers are NaN.
        """
        return tuple(column.numpy() for column in self.sums(x, local, inputs, labels))

    def sums(self, x: Tensor, local: Tensor, inputs: Any, labels: Any) -> list[Tensor]:
        """:meth:`score`, where the models are."""
        outputs, count = self.outputs(x, local, inputs), len(trees.first(labels))
        sums = [self._right(outputs, labels), self._lost(outputs, labels) * count]
        for metric in self.metrics:
            each = [
                torch.as_tensor(metric.function(one, labels), dtype=self.wide, device=x.device)
                for one in outputs
            ]
            sums.append(torch.stack(each).detach() * count)
        return sums

    def _right(self, outputs: Any, labels: Any) -> Tensor:
        if not self.accuracy:
            return torch.full((len(outputs),), torch.nan, dtype=self.wide, device=trees.first(labels).device)
        right: Tensor = outputs.argmax(dim=2) == labels
        if labels.dim() > 1:
            right = right.flatten(2).to(self.wide).mean(dim=2)
        return right.sum(dim=1)

    def _lost(self, outputs: Any, labels: Any) -> Tensor:
        if self.loss is F.cross_entropy and self.accuracy and labels.dim() == 1:
            chosen = F.log_softmax(outputs, dim=2).gather(2, labels.expand(len(outputs), -1)[..., None])
            return -chosen.mean(dim=(1, 2), dtype=self.wide)
        return torch.stack([self.loss(one, labels).detach() for one in outputs])


def shortened(lengths: Tensor, norm: float) -> Tensor:
    """By what to multiply vectors of these lengths so that none is longer than `norm`;
    0 where one is not finite.

    >>> shortened(torch.tensor([0.0, 0.5, 2.0, torch.nan]), 1.0).tolist()
    [1.0, 1.0, 0.5, 0.0]
    """
    return torch.where(lengths.isfinite(), (norm / lengths.clamp(min=1e-300)).clamp(max=1.0), 0.0)


def parts(present: NDArray[np.bool_], d: int) -> list[Integers]:
    """Which examples there are, in parts whose gradients (d,) may be there at once;
    none where there is no example.

    >>> parts(np.array([True, False, True]), d=10), parts(np.array([False]), d=10)
    ([array([0, 2])], [])
    """
    there, step = np.flatnonzero(present), max(1, _TOGETHER // d)
    return [there[at : at + step] for at in range(0, len(there), step)]


def add_shortened(gradients: Tensor, norm: float, total: Tensor, wide: torch.dtype = torch.float64) -> None:
    """Add to total (d,) the gradients (B, d), each shortened to `norm`; what is not finite is left out.

    >>> total = torch.zeros(2); add_shortened(torch.tensor([[3.0, 4.0], [0.0, torch.inf]]), 1.0, total); total
    tensor([0.6000, 0.8000])
    """
    factors = shortened(gradients.norm(dim=1, dtype=wide), norm).to(gradients.dtype)
    gradients.masked_fill_((factors == 0)[:, None], 0)
    total += factors @ gradients


class Own(threading.local):
    """What each thread keeps for itself; a copy, also one in another process, begins with nothing."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Own, ()


def tensor(array: Any) -> Tensor:
    """The same memory as a tensor; torch warns of arrays that may not be written,
    but here nobody writes into x."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        if not array.flags.writeable:
            warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
