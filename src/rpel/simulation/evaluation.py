"""What a run shows: accuracy of every honest node, how far they are apart, and the certificate of its sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.kernels import steps
from rpel.tasks import Task
from rpel.types import Integers, Models

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """Accuracy (h,) and loss (h,) of the honest nodes; ``grad_norm`` estimates the mean of ‖∇F_H(x_i)‖² over them."""

    accuracy: Floats
    loss: Floats
    grad_norm: float

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
    return Evaluation(np.asarray(accuracy, np.float64), np.asarray(loss, np.float64), float(norms.mean()))


def spread(x: Models) -> tuple[Floats, float]:
    """The mean model (d,) and the consensus distance (1/h) Σ ‖x_i − mean‖².

    >>> mean, distance = spread(np.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> mean.tolist(), distance
    ([1.0, 0.0], 1.0)
    """
    return steps.spread(x)


def certificate(
    plan: Mapping[str, Any],
    counts: Integers,
    b_hat: int,
    honest: Integers,
    *,
    seed: int,
    versions: Mapping[str, str],
    threads: int,
    data: Mapping[str, str],
    guarantee: str = "the plan's probability",
    most: int = 1000,
) -> dict[str, Any]:
    """What a run proves about its sampling: counts (T, h) of hostile peers against b̂, each violation by node and round.

    >>> counts, honest = np.array([[1, 0], [3, 1]]), np.array([4, 9])
    >>> found = certificate({}, counts, 2, honest, seed=0, versions={}, threads=1, data={})
    >>> found["held"], found["violations"], found["histogram"]
    (False, [{'round': 2, 'node': 4, 'count': 3}], [1, 2, 0, 1])
    """
    rounds, nodes = np.nonzero(counts > b_hat)
    listed = zip(rounds[:most].tolist(), nodes[:most].tolist(), strict=True)
    return {
        "plan": dict(plan),
        "guarantee": guarantee,
        "held": not len(rounds),
        "max_observed": int(counts.max(initial=0)),
        "histogram": np.bincount(counts.ravel()).tolist() if counts.size else [],
        "violations": [{"round": t + 1, "node": int(honest[i]), "count": int(counts[t, i])} for t, i in listed],
        "violations_total": len(rounds),
        "seed": seed,
        "versions": dict(versions),
        "threads": threads,
        "data": dict(data),
    }
