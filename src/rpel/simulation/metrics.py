"""What a run has shown so far: a row of metrics a round, hostile counts, and every node's accuracy when evaluated.

Law: all of it but the rows goes into the checkpoint, and a row is written before the checkpoint that covers it, so a
resumed run ends with the same record. Numbers that overflowed are written as the largest float, so that every line
stays plain JSON and no value of the last round is null.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.simulation.evaluation import Evaluation
from rpel.types import RoundInfo

COLUMNS = (
    "round", "accuracy_mean", "accuracy_worst", "accuracy_median", "loss", "grad_norm", "alpha_realised",
    "lambda_realised", "consensus", "messages", "bytes", "byzantine_max", "degraded", "seconds",
)  # fmt: skip
_EVALUATED = COLUMNS[1:8]


class Record:
    """Filled round by round; ``counts`` (T, h), ``rows`` one dict a round."""

    def __init__(self, rounds: int, honest: NDArray[np.int64]) -> None:
        self.honest = honest
        self.counts = np.zeros((rounds, len(honest)), dtype=np.int32)
        self.rows: list[dict[str, Any]] = []
        self.eval_rounds: list[int] = []
        self.accuracies: list[NDArray[np.float64]] = []

    @property
    def round(self) -> int:
        return len(self.rows)

    @property
    def last_evaluated(self) -> dict[str, Any] | None:
        """The newest row with accuracies."""
        return self.rows[self.eval_rounds[-1] - 1] if self.eval_rounds else None

    @property
    def byzantine_max(self) -> int:
        """The largest hostile count met so far."""
        return max((row["byzantine_max"] for row in self.rows), default=0)

    def add(self, info: RoundInfo, shown: Evaluation | None, sent: int, seconds: float) -> dict[str, Any]:
        """Take in one round: its info, its evaluation if there was one, bytes and time; returns the new row."""
        self.counts[info.round - 1] = info.hostile
        row = _row(info, shown, sent, seconds)
        self.rows.append(row)
        if shown is not None:
            self.eval_rounds.append(info.round)
            self.accuracies.append(shown.accuracy)
        return row

    def nodes(self) -> dict[str, NDArray[Any]]:
        """Accuracy of every honest node in the rounds evaluated: round (e,), accuracy (e, h)."""
        accuracy = np.array(self.accuracies, np.float64).reshape(-1, len(self.honest))
        return {"round": np.array(self.eval_rounds, np.int64), "accuracy": accuracy}

    def state(self) -> dict[str, NDArray[Any]]:
        """What a checkpoint keeps beside the simulation's own state."""
        nodes = self.nodes()
        counts = self.counts[: self.round]
        return {"record.counts": counts, "record.round": nodes["round"], "record.accuracy": nodes["accuracy"]}

    def load(self, state: Mapping[str, NDArray[Any]], rows: list[dict[str, Any]]) -> None:
        """Continue from a :meth:`state` and the rows up to it."""
        counts = state["record.counts"]
        self.counts[: len(counts)] = counts
        self.rows = [{**dict.fromkeys(COLUMNS), **row} for row in rows]  # an older version may have had fewer columns
        self.eval_rounds = [int(t) for t in state["record.round"]]
        self.accuracies = list(state["record.accuracy"])


def _row(info: RoundInfo, shown: Evaluation | None, sent: int, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"round": info.round, "consensus": _plain(info.consensus), "messages": info.messages, "bytes": sent}
    row |= {"byzantine_max": int(info.hostile.max(initial=0)), "degraded": info.degraded, "seconds": round(seconds, 6)}
    if shown is not None:
        # nodes that agreed before the exchange have no spread to compare with: alpha and lambda are then 0
        values = [shown.mean, shown.worst, shown.median, float(shown.loss.mean()), shown.grad_norm]
        values += [info.alpha_realised or 0.0, info.lambda_realised or 0.0]
        row |= {key: _plain(value) for key, value in zip(_EVALUATED, values, strict=True)}
    return row


def _plain(value: float) -> float:
    """A float that JSON can write.

    >>> _plain(0.5), _plain(float("nan"))
    (0.5, 1.7976931348623157e+308)
    """
    return float(value) if math.isfinite(value) else math.copysign(sys.float_info.max, value)
