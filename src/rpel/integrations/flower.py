"""rpel's rules as a Flower strategy: a server that averages robustly. Needs the package flwr (1.20 or newer).

    strategy = RpelStrategy(rule="nnm+trimmed_mean", f=2, fraction_train=1.0)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=10)

A server is a party that everybody trusts: this protects it from hostile clients,
as rpel's peers protect each other.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from rpel.rules import Rule
from rpel.rules import rule as rule_by_name


class RpelStrategy(FedAvg):  # type: ignore[misc]  # flwr is not installed where types are checked
    """FedAvg with one of rpel's rules in the place of the weighted mean.

    rule: a name such as "nnm+trimmed_mean", made to survive f hostile replies, or a Rule. Clients weigh
    alike: one that lies may also lie about its number of examples. A reply that lacks an array or has another
    shape counts as one that did not come; with fewer than 2f + 1 usable replies the round keeps the model it
    had. Metrics are combined by their medians. Other keywords are FedAvg's.
    """

    def __init__(self, rule: str | Rule = "nnm+trimmed_mean", f: int = 1, **given: Any) -> None:
        super().__init__(**given)
        self.rule = rule_by_name(rule, f=f) if isinstance(rule, str) else rule
        self._expected: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any
    ) -> Iterable[Message]:
        """FedAvg's, noting which arrays the clients are given and so must give back."""
        numpys = {name: array.numpy() for name, array in arrays.items()}
        self._expected = {name: (array.shape, array.dtype) for name, array in numpys.items()}
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The rule's result over the usable replies, and the medians of their metrics."""
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        usable = [(found, reply) for reply in valid if (found := self._vector(reply)) is not None]
        if len(usable) < self.rule.min_vectors(self.rule.f or 0):
            return None, None
        combined = self.rule(np.stack([vector for vector, _ in usable]))
        return self._record(combined), _medians([reply for _, reply in usable])

    def _vector(self, reply: Message) -> NDArray[np.float32] | None:
        """(d,) the arrays of a reply end to end; None unless they are those that were sent out."""
        try:
            arrays = {name: array.numpy() for name, array in reply.content[self.arrayrecord_key].items()}
        except Exception:  # whatever a hostile client put there
            return None
        if {name: array.shape for name, array in arrays.items()} != {
            k: shape for k, (shape, _) in self._expected.items()
        }:
            return None
        parts = [np.asarray(arrays[name], np.float32).ravel() for name in self._expected]
        return np.concatenate(parts)

    def _record(self, vector: NDArray[np.float32]) -> ArrayRecord:
        arrays, at = {}, 0
        for name, (shape, dtype) in self._expected.items():
            size = int(np.prod(shape))
            values = vector[at : at + size].reshape(shape)
            arrays[name] = Array(
                np.round(values).astype(dtype) if dtype.kind in "iu" else values.astype(dtype)
            )
            at += size
        return ArrayRecord(arrays)


def _medians(replies: list[Message]) -> MetricRecord:
    """The median of every number that all replies report under the same name."""
    tables = [dict(record) for reply in replies for record in list(reply.content.metric_records.values())[:1]]
    common = set.intersection(*map(set, tables)) if len(tables) == len(replies) else set()
    numbers = {key: [table[key] for table in tables] for key in common}
    return MetricRecord(
        {
            k: float(np.median(v))
            for k, v in sorted(numbers.items())
            if all(isinstance(x, int | float) for x in v)
        }
    )
