"""What the simulator and the peers ask of a task: `Objective`, the whole contract."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from torch import nn

from rpel.types import Integers, Models

if TYPE_CHECKING:
    from rpel.tasks.private import PrivateGradients

Draw = Callable[[str, int, int, int], Generator]
"""draw(purpose, t, k, node): a generator for local step k of a node in round t."""
Columns = dict[str, NDArray[np.float64]]
"""Measured values (h,) by column: accuracy, loss, ``metric.<name>``, attack_success."""


class Objective(ABC):
    """A loss for every node, its stochastic gradient and its accuracy.

    Models are rows of one array or tensor (h, d), local states rows of another (h, q). A peer needs ``d``,
    ``layout``, ``gradient`` and ``evaluate``; a simulation also ``initial`` and ``full_gradient``. Everything
    else has a default that is right for a task without torch module, metrics or single examples.
    """

    d: int
    """Number of parameters."""

    layout: Mapping[str, tuple[int, ...]]
    """Name and shape of each parameter, in the order of the vector; values are matched by name."""

    module: nn.Module | None = None
    """The torch module whose parameters and buffers the models and local states are."""

    nodes_per_call: int = 1
    """Nodes whose steps are computed together. Results depend on the nodes within such a group only."""

    any_grouping: bool = False
    """Results are equal up to rounding however nodes are grouped, so workers may split a group."""

    device_bytes: int = 0
    """Memory on an accelerator beside the models: data and temporaries."""

    @property
    def measures(self) -> Mapping[str, bool]:
        """Names of the metrics beside accuracy and loss, and whether more of each is better."""
        return {}

    def initial(self) -> Models:
        """The common initial model (d,), from the seed."""
        raise ValueError(f"a {type(self).__name__} has no initial model, which a simulation begins with")

    def local_state(self, h: int) -> Models:
        """Initial local state (h, q) of h nodes, such as BatchNorm's statistics; it is never exchanged."""
        return np.empty((h, 0), np.float32)

    @abstractmethod
    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        """Algorithm 1, lines 3-4: stochastic gradients (h, d) of nodes ``ids``, and their new local state.

        The batch comes from the coordinates (seed, ("batch", k), t, node) and from nothing else.

        Args:
            x: (h, d) the nodes' models.
            local: (h, q) their local state, left as it is.
            ids: (h,) the nodes' numbers.
            t: The round.
            k: The local step within the round.
            out: (h, d) Where to write the gradients.
        """

    @abstractmethod
    def evaluate(
        self, x: Models, local: Models, subset: Integers | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Accuracy (h,) and loss (h,) of each model on the test examples ``subset``, or on all of them.

        The accuracy is NaN where targets are no classes.
        """

    def measure(
        self, x: Models, local: Models, subset: Integers | None = None, ids: Integers | None = None
    ) -> Columns:
        """All columns of each model on the test examples ``subset``, or on all of them.

        Args:
            x: (h, d) the models.
            local: (h, q) their local state.
            subset: The test examples; all if left out.
            ids: (h,) the nodes' numbers, for measures of a node's own test examples; none if left out.
        """
        accuracy, loss = self.evaluate(x, local, subset)
        return {"accuracy": accuracy, "loss": loss}

    def full_gradient(self, x: Models, local: Models, size: int | None = None) -> Models:
        """The gradient (h, d) of F_H, the mean of the honest nodes' losses, at each model.

        With ``size`` it is taken on that many examples.
        """
        raise ValueError(f"a {type(self).__name__} has no full gradient, which a simulation measures")

    def private(
        self,
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        draw: Draw | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> "PrivateGradients":
        """Gradients of this task with each example's clipped, and noise on their sum.

        ValueError for a task without single examples. For the arguments see :class:`PrivateGradients`.
        """
        raise ValueError(
            f"a {type(self).__name__} has no single examples to clip: give an rpel.tasks.Task, or leave out "
            "max_grad_norm"
        )
