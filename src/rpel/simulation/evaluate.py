"""What models show: accuracy of each honest node, the gradient norm, the spread; and the run's record of it.

Invariants of the record: everything but its rows goes into the checkpoint, and a row is written before the
checkpoint that covers it, so a resumed run ends with the same metrics; a number that overflowed is null.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import namespace, wide_dtype, zeros
from rpel.backend.base import Backend, backend
from rpel.runs.columns import COLUMNS, METRIC, Row
from rpel.runs.journal import number
from rpel.simulation.workers import ALONE, Communicator
from rpel.tasks import Objective
from rpel.types import Floats, Models, RoundInfo


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
    better: Mapping[str, bool] = field(default_factory=dict)

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
    return np.array([squared_norm(g, arrays) for g in found])


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
    mean, deviation = zeros((d,), x, wide=True), zeros((d,), x, wide=True)
    workers.add(mean, lambda columns: arrays.column_sums(x, columns, mean))
    mean /= h
    workers.tell_last(mean)
    workers.add(deviation, lambda columns: arrays.column_sums(x, columns, deviation, mean))
    distance = np.array([_sum(deviation, arrays) / h])
    workers.tell_last(distance)
    return mean, float(distance[0])


_BLOCK = 1024  # numbers that are summed before they join the total


def _sum(values: Floats, arrays: Backend) -> float:
    """The sum of (d,) values, block by block."""
    xp = namespace(values)
    blocks = [xp.sum(values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK)]
    return float(arrays.host(xp.sum(xp.stack(blocks))))


def squared_norm(vector: Floats, arrays: Backend) -> float:
    """‖v‖² of any array of numbers, in float64."""
    xp = namespace(vector)
    return float(arrays.host(xp.sum(xp.square(xp.astype(vector, wide_dtype(vector))))))


# --- the record ---------------------------------------------------------------------------------------------

_AHEAD = "record.ahead."
_INITIAL_LOSS = "record.initial_loss"
DIVERGED = 1000.0
"""A node has diverged when its test loss exceeds the initial one, or 1 if that is less, by this factor."""


class Metrics:
    """Filled round by round; ``counts`` (T, h), ``rows`` one dict a round."""

    def __init__(self, rounds: int, honest: NDArray[np.int64], each: int = 1) -> None:
        """each: how often a node may aggregate in a round; counts are then (T, each, h),
        −1 where it did not."""
        self.honest = honest
        self.counts = np.zeros(
            (rounds, len(honest)) if each == 1 else (rounds, each, len(honest)), dtype=np.int32
        )
        self.rows: list[Row] = []
        self.initial_loss = math.nan
        self.eval_rounds: list[int] = []
        self.accuracies: list[NDArray[np.float64]] = []
        self.measured: dict[str, list[NDArray[np.float64]]] = {}
        """The same of each metric."""

    @property
    def round(self) -> int:
        return len(self.rows)

    def begin(self, found: Mapping[str, float], names: Sequence[str] = ()) -> None:
        """Take in what the common initial model shows, as round 0; names: of all metrics."""
        h = len(self.honest)
        self.initial_loss = found["loss"]
        self.eval_rounds, self.accuracies = [0], [np.full(h, found["accuracy"])]
        self.measured = {name: [np.full(h, found.get(f"{METRIC}{name}", math.nan))] for name in names}

    def row(self, info: RoundInfo, shown: Evaluation | None, sent: int, seconds: float) -> Row:
        """The row of a round: what was measured, its evaluation if there was one, bytes and time."""
        diverged = info.diverged if shown is None else max(info.diverged, self._diverged(shown))
        return _row(info, shown, sent, seconds) | {"diverged": diverged} | _metrics(shown, self.measured)

    def _diverged(self, shown: Evaluation) -> int:
        """The number of honest nodes whose test loss says that they diverged."""
        limit = DIVERGED * max(self.initial_loss, 1.0)  # a loss may begin near 0, or below
        return int(np.sum(~(shown.loss <= (limit if math.isfinite(limit) else math.inf))))

    def add(self, info: RoundInfo, shown: Evaluation | None, row: Row) -> None:
        """Take in one round with its row."""
        self.counts[info.round - 1] = info.hostile
        self.rows.append(row)
        if shown is not None:
            self.eval_rounds.append(info.round)
            self.accuracies.append(shown.accuracy)
            for name, values in self.measured.items():
                values.append(shown.metrics[name])

    def nodes(self) -> dict[str, NDArray[Any]]:
        """Accuracy and metrics of every honest node in the rounds evaluated, 0 first: round (e,),
        the others (e, h)."""
        found = {"accuracy": self.accuracies} | {
            f"{METRIC}{name}": values for name, values in self.measured.items()
        }
        arrays = {
            key: np.array(values, np.float64).reshape(-1, len(self.honest)) for key, values in found.items()
        }
        return {"round": np.array(self.eval_rounds, np.int64), **arrays}

    def state(self, ahead: RoundInfo | None = None) -> dict[str, NDArray[Any]]:
        """What a checkpoint keeps beside the simulation's own state. ahead:
        of a round that is not yet taken in."""
        nodes = self.nodes()
        counts = self.counts[: self.round]
        known = (
            {} if ahead is None else {key: value for key, value in vars(ahead).items() if value is not None}
        )
        return {
            "record.counts": counts, _INITIAL_LOSS: np.array(self.initial_loss),
            **{f"record.{key}": values for key, values in nodes.items()},
            **{_AHEAD + key: np.asarray(value) for key, value in known.items()},
        }  # fmt: skip

    def load(self, state: Mapping[str, NDArray[Any]], rows: list[Row]) -> RoundInfo | None:
        """Continue from a :meth:`state` and the rows up to it;
        returns what it says of a round ahead of them."""
        counts = state["record.counts"]
        self.counts[: len(counts)] = counts
        self.rows, self.initial_loss = list(rows), float(state[_INITIAL_LOSS])
        self.eval_rounds = [int(t) for t in state["record.round"]]
        self.accuracies = list(state["record.accuracy"])
        prefix = f"record.{METRIC}"
        self.measured = {k.removeprefix(prefix): list(v) for k, v in state.items() if k.startswith(prefix)}
        ahead: dict[str, Any] = {
            key.removeprefix(_AHEAD): value if value.ndim else value.item()
            for key, value in state.items()
            if key.startswith(_AHEAD)
        }
        return RoundInfo(**ahead) if ahead else None


def _row(info: RoundInfo, shown: Evaluation | None, sent: int, seconds: float) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {
        "round": info.round,
        "consensus": number(info.consensus),
        "messages": info.messages,
        "bytes": sent,
    }
    row |= {"byzantine_max": int(info.hostile.max(initial=0)), "degraded": info.degraded}
    row |= {"seconds": round(seconds, 6)}
    if shown is not None:
        # nodes that agreed before the exchange have no spread to compare with: alpha and lambda are then 0
        values = {"accuracy_mean": shown.mean, "accuracy_worst": shown.worst, "accuracy_median": shown.median}
        values |= {"loss": float(shown.loss.mean())}
        if shown.grad_norm is not None:
            values["grad_norm"] = shown.grad_norm
        values |= {
            "alpha_realised": info.alpha_realised or 0.0,
            "lambda_realised": info.lambda_realised or 0.0,
        }
        row |= {key: number(value) for key, value in values.items()}
        if (success := shown.attack_success) is not None:
            row |= {
                "attack_success_mean": float(success.mean()),
                "attack_success_worst": float(success.max()),
            }
        if (output := shown.output_accuracy) is not None:
            found = {
                "output_accuracy_mean": float(output.mean()),
                "output_accuracy_worst": float(output.min()),
            }
            row |= {key: number(value) for key, value in found.items()}
    return row


def _metrics(shown: Evaluation | None, names: Iterable[str]) -> Row:
    """The columns of the metrics: the mean over the honest nodes, and the worst of them."""
    row: Row = {}
    for name in names:
        mean = worst = None
        if shown is not None:
            values = shown.metrics[name]
            worst = number(float(values.min() if shown.better[name] else values.max()))
            mean = number(float(values.mean()))
        row |= {f"{METRIC}{name}_mean": mean, f"{METRIC}{name}_worst": worst}
    return row
