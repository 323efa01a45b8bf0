"""What models show: accuracy of every honest node, the gradient norm, and how far the nodes are apart."""

from dataclasses import dataclass

import numpy as np

from rpel.kernels import compiled
from rpel.tasks import Classification, Task
from rpel.types import Floats, Integers, Models


@dataclass(frozen=True)
class Evaluation:
    """Accuracy (h,) and loss (h,) of the honest nodes; ``grad_norm`` estimates the mean of ‖∇F_H(x_i)‖² over them.

    ``attack_success`` (h,) is the share of images with the backdoor's patch that a node calls its target.
    """

    accuracy: Floats
    loss: Floats
    grad_norm: float
    attack_success: Floats | None = None

    @property
    def mean(self) -> float:
        return float(self.accuracy.mean())

    @property
    def worst(self) -> float:
        return float(self.accuracy.min())

    @property
    def median(self) -> float:
        return float(np.median(self.accuracy))


GRADIENT_NODES, GRADIENT_EXAMPLES = 3, 1000
"""‖∇F_H(x_i)‖² is taken at so many nodes and on so many fixed examples: at all of them it would cost whole rounds."""


def evaluate(task: Task, x: Models, local: Models, subset: Integers | None) -> Evaluation:
    """Evaluate every model on its own; the gradient norm is that of F_H, (b, ε)-resilience as measured."""
    accuracy, loss = task.evaluate(x, local, subset)
    some = np.unique(np.linspace(0, len(x) - 1, GRADIENT_NODES).astype(np.int64))
    gradients = task.full_gradient(x[some], local[some], GRADIENT_EXAMPLES)
    norms = np.square(gradients.astype(np.float64)).sum(axis=1)
    success = task.attack_success(x, local, subset) if isinstance(task, Classification) else None
    return Evaluation(np.asarray(accuracy, np.float64), np.asarray(loss, np.float64), float(norms.mean()), success)


def spread(x: Models) -> tuple[Floats, float]:
    """The mean model (d,) and the consensus distance (1/h) Σ ‖x_i − mean‖².

    >>> mean, distance = spread(np.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> mean.tolist(), distance
    ([1.0, 0.0], 1.0)
    """
    return compiled.spread(x)
