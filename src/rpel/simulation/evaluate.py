"""What models are worth: accuracy, gradient norm and spread; and the record of a run.

Invariants of the record: everything but its rows goes into the checkpoint, and a row is written before the
checkpoint that covers it, so a resumed run ends with the same metrics; a number that overflowed is null.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.backend.arrays import namespace, wide_dtype, zeros
from rpel.backend.base import Backend, backend
from rpel.runs.columns import COLUMNS, METRIC, Row
from rpel.runs.journal import number
from rpel.simulation.communicator import ALONE, Group
from rpel.tasks import Objective
from rpel.types import Floats, Models, RoundInfo


@dataclass(frozen=True)
class Evaluation:
    """Accuracy (h,) and loss (h,) of the honest nodes; the accuracy is NaN without classes."""

    accuracy: Floats
    loss: Floats
    grad_norm: float | None
    """An estimate of the mean of ‖∇F_H(x_i)‖² over the honest nodes; None in a private run."""
    attack_success: Floats | None = None
    """(h,) the share of images with the backdoor's patch that a node calls its target."""
    output_accuracy: Floats | None = None
    """(h,) of the models kept, where they are not those of the last round."""
    metrics: dict[str, Floats] = field(default_factory=dict)
    better: Mapping[str, bool] = field(default_factory=dict)
    """Of which metrics more is better."""

    @property
    def worst(self) -> float:
        return float(self.accuracy.min())

    def columns(self) -> Row:
        """Return the columns of a row that show it."""
        row: Row = {
            "accuracy_mean": number(float(self.accuracy.mean())), "accuracy_worst": number(self.worst),
            "accuracy_median": number(float(np.median(self.accuracy))),
            "loss": number(float(self.loss.mean())), "grad_norm": number(self.grad_norm),
        }  # fmt: skip
        if self.attack_success is not None:
            row["attack_success_mean"] = float(self.attack_success.mean())
            row["attack_success_worst"] = float(self.attack_success.max())
        if self.output_accuracy is not None:
            row["output_accuracy_mean"] = number(float(self.output_accuracy.mean()))
            row["output_accuracy_worst"] = number(float(self.output_accuracy.min()))
        return row


GRADIENT_NODES, GRADIENT_EXAMPLES = 3, 1000
"""‖∇F_H(x_i)‖² is taken at this many nodes and on this many examples: at all of them it would cost rounds."""


def gradient_norms(
    task: Objective, x: Models, local: Models, arrays: Backend | None = None,
    examples: int = GRADIENT_EXAMPLES,
) -> Floats:  # fmt: skip
    """(h,) ‖∇F_H‖² at every model, each on its own; (b, ε)-resilience as measured."""
    arrays = arrays or backend("numba")
    gradients = (task.full_gradient(x[i : i + 1], local[i : i + 1], examples) for i in range(len(x)))
    return np.array([squared_norm(g, arrays) for g in gradients])


def spread(
    x: Models, workers: Group = ALONE, nodes: int | None = None, arrays: Backend | None = None
) -> tuple[Floats, float]:
    """Compute the mean (d,) of all workers' models and the consensus distance (1/h) Σ ‖x_i − mean‖².

    nodes: the number h of nodes of all workers.

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


class Record:
    """Filled round by round; ``counts`` (T, h), ``rows`` one dict a round."""

    def __init__(self, rounds: int, honest: NDArray[np.int64], each: int = 1) -> None:
        """Start an empty record.

        each: how often a node may aggregate in a round. Counts have shape (T, each, h), and −1 where it did
        not.
        """
        self.honest = honest
        shape = (rounds, len(honest)) if each == 1 else (rounds, each, len(honest))
        self.counts = np.zeros(shape, dtype=np.int32)
        self.rows: list[Row] = []
        self.initial_loss = math.nan
        self.eval_rounds: list[int] = []
        self.per_node: dict[str, list[NDArray[np.float64]]] = {}
        """(h,) accuracies and metrics in the rounds evaluated."""

    @property
    def round(self) -> int:
        return len(self.rows)

    def begin(self, initial: Mapping[str, float], metrics: Sequence[str] = ()) -> None:
        """Take in what the common initial model shows, as round 0; metrics: their names."""
        h = len(self.honest)
        self.initial_loss, self.eval_rounds = initial["loss"], [0]
        keys = ["accuracy", *(f"{METRIC}{name}" for name in metrics)]
        self.per_node = {key: [np.full(h, initial.get(key, math.nan))] for key in keys}

    def row(self, info: RoundInfo, shown: Evaluation | None, sent: int) -> Row:
        """Return the row of a round: what was measured, its evaluation if there was one, and the bytes."""
        row: Row = dict.fromkeys(COLUMNS)
        row |= {
            "round": info.round, "consensus": number(info.consensus), "messages": info.messages,
            "bytes": sent, "byzantine_max": int(info.hostile.max(initial=0)), "degraded": info.degraded,
            "diverged": info.diverged if shown is None else max(info.diverged, self._diverged(shown)),
        }  # fmt: skip
        if shown is not None:
            row |= shown.columns()
            # nodes that agreed before the exchange have no spread to compare with: these are then 0
            row |= {key: number(getattr(info, key) or 0.0) for key in ("alpha_realised", "lambda_realised")}
        for key in self.per_node:
            if key != "accuracy":
                row |= _mean_and_worst(key, shown)
        return row

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
            for key, values in self.per_node.items():
                values.append(
                    shown.accuracy if key == "accuracy" else shown.metrics[key.removeprefix(METRIC)]
                )

    def nodes(self) -> dict[str, NDArray[Any]]:
        """Return accuracy and metrics of every honest node in the evaluated rounds, round 0 first.

        `round` has shape (e,), the others (e, h).
        """
        h = len(self.honest)
        arrays = {key: np.array(values, np.float64).reshape(-1, h) for key, values in self.per_node.items()}
        return {"round": np.array(self.eval_rounds, np.int64), **arrays}

    def state(self, ahead: RoundInfo | None = None) -> dict[str, NDArray[Any]]:
        """What a checkpoint keeps beside the engine's own state; ahead: of a round that is not yet added."""
        known = {} if ahead is None else {k: v for k, v in vars(ahead).items() if v is not None}
        return {
            "record.counts": self.counts[: self.round], _INITIAL_LOSS: np.array(self.initial_loss),
            **{f"record.{key}": values for key, values in self.nodes().items()},
            **{_AHEAD + key: np.asarray(value) for key, value in known.items()},
        }  # fmt: skip

    def load(self, state: Mapping[str, NDArray[Any]], rows: list[Row]) -> RoundInfo | None:
        """Continue from a :meth:`state` and the rows up to it.

        Returns what the state says about a round after those rows.
        """
        counts = state["record.counts"]
        self.counts[: len(counts)] = counts
        self.rows, self.initial_loss = list(rows), float(state[_INITIAL_LOSS])
        self.eval_rounds = [int(t) for t in state["record.round"]]
        self.per_node = {
            key.removeprefix("record."): list(values)
            for key, values in state.items()
            if key == "record.accuracy" or key.startswith(f"record.{METRIC}")
        }
        ahead: dict[str, Any] = {
            key.removeprefix(_AHEAD): value if value.ndim else value.item()
            for key, value in state.items()
            if key.startswith(_AHEAD)
        }
        return RoundInfo(**ahead) if ahead else None


def _mean_and_worst(key: str, shown: Evaluation | None) -> Row:
    """The two columns of a metric: the mean over the honest nodes, and the worst of them."""
    if shown is None:
        return {f"{key}_mean": None, f"{key}_worst": None}
    name = key.removeprefix(METRIC)
    values = shown.metrics[name]
    worst = values.min() if shown.better[name] else values.max()
    return {f"{key}_mean": number(float(values.mean())), f"{key}_worst": number(float(worst))}
