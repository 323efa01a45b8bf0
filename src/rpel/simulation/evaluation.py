"""What models show: accuracy of every honest node, the gradient norm, and how far the nodes are apart."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rpel.backend.base import Backend, backend
from rpel.simulation.communicator import ALONE, Communicator
from rpel.tasks import Classification, Objective
from rpel.types import Floats, Integers, Models


@dataclass(frozen=True)
class Evaluation:
    """Accuracy (h,) and loss (h,) of the honest nodes;
    ``grad_norm`` estimates the mean of ‖∇F_H(x_i)‖² over them; None in a private run.

    ``attack_success`` (h,) is the share of images with the backdoor's patch that a node calls its target;
    ``output_accuracy`` (h,) is that of the models kept, where they are not those of the last round;
    ``metrics`` (h,) each, by name, and ``better`` says of which more is better.
    Without classes the accuracy is NaN.
    """

    accuracy: Floats
    loss: Floats
    grad_norm: float | None
    attack_success: Floats | None = None
    output_accuracy: Floats | None = None
    metrics: dict[str, Floats] = field(default_factory=dict)
    better: dict[str, bool] = field(default_factory=dict)

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
"""‖∇F_H(x_i)‖² is taken at so many nodes and on at most so many fixed examples:
at all of them it would cost rounds."""


def evaluate(
    task: Objective, x: Models, local: Models, subset: Integers | None, rows: Integers
) -> dict[str, NDArray[np.float64]]:
    """Columns (h,) of the models of the nodes in these rows: accuracy, loss, metrics as ``metric.<name>``,
    and the success of a backdoor, where there is one."""
    if not isinstance(task, Classification):
        return dict(zip(("accuracy", "loss"), task.evaluate(x, local, subset), strict=True))
    found = task.measure(x, local, subset) | task.measure_own(x, local, rows)
    success = task.attack_success(x, local, subset)
    return found if success is None else found | {"attack_success": success}


def gradient_norms(
    task: Objective,
    x: Models,
    local: Models,
    arrays: Backend | None = None,
    examples: int = GRADIENT_EXAMPLES,
) -> Floats:
    """(h,) ‖∇F_H‖² at every model, each on its own; (b, ε)-resilience as measured."""
    arrays = arrays or backend("numba")
    found = [task.full_gradient(x[i : i + 1], local[i : i + 1], examples) for i in range(len(x))]
    return np.array([arrays.squared_lengths(g)[0] for g in found])


def spread(
    x: Models, workers: Communicator = ALONE, nodes: int | None = None, arrays: Backend | None = None
) -> tuple[Floats, float]:
    """The mean (d,) of all workers' models, and the consensus distance (1/h) Σ ‖x_i − mean‖²; nodes: h,
    of all.

    >>> mean, distance = spread(np.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> mean.tolist(), distance
    ([1.0, 0.0], 1.0)
    """
    arrays = arrays or backend("numba")
    h, d = len(x) if nodes is None else nodes, x.shape[1]
    mean, deviation = arrays.sums(d, x), arrays.sums(d, x)
    workers.add(mean, lambda columns: arrays.add_rows(x, columns, mean))
    mean /= h
    workers.tell_last(mean)
    workers.add(deviation, lambda columns: arrays.add_deviations(x, mean, columns, deviation))
    distance = np.array([arrays.sum_columns(deviation) / h])
    workers.tell_last(distance)
    return mean, float(distance[0])
