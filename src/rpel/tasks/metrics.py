"""Measures of a user beside accuracy and loss."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpel.tasks.engines.engine import Loss


@dataclass(frozen=True)
class Metric:
    """metric(output, target), a mean over the batch, and whether more of it is better.

    >>> import torch.nn.functional as F
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

    >>> import torch.nn.functional as F
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
