"""Declare each column of metrics.jsonl once.

A declaration says what the column means, which direction is better, and how it is shown and compared.

Whoever computes a number puts it into a row under its column's name; tables, reports, ``rpel compare``,
TensorBoard and the reference read the rest here. A column that is not declared here, such as one of a user's
own callback, is shown and compared like a measure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Row = dict[str, Any]
"""One line of metrics.jsonl."""
METRIC = "metric."
"""What the columns of a task's metric begin with: ``metric.<name>_mean`` and ``metric.<name>_worst``."""


class When(Enum):
    """In which rounds a column has a value."""

    ALWAYS = "in every round"
    EVALUATED = "null in rounds not evaluated"
    SOMETIMES = "null where it does not apply"


class Role(Enum):
    """What a column is for."""

    MEASURE = "what a run is judged by at its end: shown, compared, with intervals over seeds"
    COST = "what a run has cost, added up over its rounds"
    DETAIL = "what one run did; not compared"


@dataclass(frozen=True)
class Column:
    """A column. better: +1 if more is better, −1 if less is, 0 if neither. digits: how a value is written."""

    name: str
    meaning: str
    when: When = When.ALWAYS
    role: Role = Role.DETAIL
    better: int = 0
    digits: str = ".4g"
    tag: str | None = None
    """What TensorBoard calls it; None: it is not shown there."""

    @property
    def label(self) -> str:
        return self.name.removeprefix(METRIC).replace("_", " ")

    @property
    def short(self) -> str:
        """The head of a narrow column.

        >>> column("accuracy_worst").short
        'worst'
        """
        return self.name.removeprefix("accuracy_").removeprefix(METRIC)


_ALL, _EVALUATED, _SOMETIMES = When.ALWAYS, When.EVALUATED, When.SOMETIMES
_MEASURE, _COST, _DETAIL = Role.MEASURE, Role.COST, Role.DETAIL
DECLARED = (
    Column("round", "1 to T"),
    Column("accuracy_mean", "mean over the honest nodes", _EVALUATED, _MEASURE, +1, ".4f", "accuracy/mean"),
    Column("accuracy_worst", "of the worst honest node", _EVALUATED, _MEASURE, +1, ".4f", "accuracy/worst"),
    Column("accuracy_median", "median over the honest nodes", _EVALUATED, _MEASURE, +1, ".4f",
        "accuracy/median"),
    Column("loss", "mean test loss of the honest nodes", _EVALUATED, _MEASURE, -1, ".4g", "loss"),
    Column(
        "grad_norm", "estimate of the mean of ‖∇F_H(x_i)‖² over honest nodes, from training examples without "
                     "noise; null in private runs",
        _EVALUATED, tag="grad_norm",
    ),
    Column(
        "alpha_realised", "what the exchange of this round left of the disagreement, relative to that before "
                          "it",
        _EVALUATED, tag="realised/alpha",
    ),
    Column(
        "lambda_realised", "how far the exchange moved the mean, relative to the disagreement before it",
        _EVALUATED, tag="realised/lambda",
    ),
    Column(
        "consensus", "mean squared distance of the honest models to their mean", _ALL, _MEASURE, -1, ".4g",
        "consensus"
    ),
    Column("messages", "models sent", _ALL, _COST, -1, ",.0f"),
    Column("bytes", "their size", _ALL, _COST, -1, ",.0f"),
    Column(
        "byzantine_max", "the most hostile peers any honest node met in this round", _ALL,
        _DETAIL, -1, "d", "hostile/byzantine_max",
    ),
    Column("degraded", "honest nodes that could not aggregate", _ALL, _DETAIL, -1, "d", "hostile/degraded"),
    Column(
        "diverged", "honest nodes whose model is not finite, or whose test loss exceeds 1,000 times the "
                    "initial one (or 1, if that is less); what overflowed is null",
        _ALL, _DETAIL, -1, "d", "diverged",
    ),
    Column(
        "attack_success_mean",
        "share of patched test images taken for the backdoor's target, mean over honest nodes", _SOMETIMES,
        tag="hostile/attack_success_mean", better=-1,
    ),
    Column(
        "attack_success_worst", "the same at the node where it is largest", _SOMETIMES,
        tag="hostile/attack_success_worst", better=-1,
    ),
    Column(
        "output_accuracy_mean", "of the models that output = uniform has drawn, mean over the honest nodes",
        _SOMETIMES, better=+1, digits=".4f", tag="accuracy/output_mean",
    ),
    Column(
        "output_accuracy_worst", "the same at the worst honest node", _SOMETIMES, better=+1, digits=".4f",
        tag="accuracy/output_worst",
    ),
    Column(
        "epsilon", "largest of the honest nodes, of all that others have seen of them so far; null without "
                   "privacy",
        _SOMETIMES, better=-1, tag="epsilon",
    ),
    Column("seconds", "time of the round", _ALL, _COST, -1, ",.1f"),
)  # fmt: skip
COLUMNS = tuple(column.name for column in DECLARED)
"""The names, in the order of a row."""
TIME = Column("time", "virtual time, in units of the median local phase; where speeds are given", _SOMETIMES)
_BY_NAME = {column.name: column for column in (*DECLARED, TIME)}


def column(name: str) -> Column:
    """Return the column of that name; an undeclared one is a measure.

    >>> column("loss").better, column("fairness").role
    (-1, <Role.MEASURE: 'what a run is judged by at its end: shown, compared, with intervals over seeds'>)
    """
    return _BY_NAME.get(name) or Column(name, "", When.SOMETIMES, Role.MEASURE, tag=name)


def names(*, role: Role | None = None, when: When | None = None) -> tuple[str, ...]:
    """The declared columns of a role, or with values in these rounds.

    >>> names(role=Role.MEASURE)
    ('accuracy_mean', 'accuracy_worst', 'accuracy_median', 'loss', 'consensus')
    """
    return tuple(c.name for c in DECLARED if role in (None, c.role) and when in (None, c.when))


def measures(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Name the columns by which these last rows of runs are judged.

    First come accuracies where there are classes; then the columns of metrics and undeclared columns that all
    rows have; then loss and consensus; and epsilon where all runs are private.

    >>> rows = [{"accuracy_mean": None, "loss": 1.0, "metric.mae_mean": 0.5},
    ...     {"loss": 2.0, "metric.mae_mean": None}]
    >>> measures(rows)
    ('metric.mae_mean', 'loss', 'consensus')
    """
    last = list(rows)
    declared = names(role=Role.MEASURE)
    classes = [
        key
        for key in declared
        if key.startswith("accuracy") and any(row.get(key) is not None for row in last)
    ]
    each = [
        {key for key, value in row.items() if value is not None or key.startswith(METRIC)} for row in last
    ]
    others = [
        key for key in (last[0] if last else ()) if key not in _BY_NAME and all(key in keys for keys in each)
    ]
    spent = ("epsilon",) if last and all(row.get("epsilon") is not None for row in last) else ()
    return (*classes, *others, *(key for key in declared if not key.startswith("accuracy")), *spent)


def headline(rows: Sequence[Row]) -> str:
    """What rows are judged by: "accuracy", or where there are no classes the first metric.

    >>> headline([{"accuracy_mean": None, "metric.mae_mean": 0.5}]), headline([{"accuracy_mean": 0.5}])
    ('mae', 'accuracy')
    """
    named = [key for key in (rows[-1] if rows else {}) if key.startswith(METRIC) and key.endswith("_mean")]
    if not named or any(row["accuracy_mean"] is not None for row in rows):
        return "accuracy"
    return named[0].removeprefix(METRIC).removesuffix("_mean")


def prefix(measure: str) -> str:
    """What the columns of a :func:`headline` begin with.

    >>> prefix("accuracy"), prefix("mae")
    ('accuracy', 'metric.mae')
    """
    return measure if measure == "accuracy" else f"{METRIC}{measure}"


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Return whether models were evaluated in this round.

    Without classes the realised alpha decides, because it cannot overflow.

    >>> is_evaluated({"accuracy_mean": 0.5}), is_evaluated({"accuracy_mean": None, "metric.mae_mean": None})
    (True, False)
    """
    metrics = any(key.startswith(METRIC) for key in row)
    return row.get("accuracy_mean") is not None or (metrics and row.get("alpha_realised") is not None)


def ends(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Mean and worst of the last evaluation among rows, by their :func:`headline`."""
    key = prefix(headline(rows))
    seen: Row = next((row for row in reversed(rows) if row[f"{key}_mean"] is not None), {})
    return seen.get(f"{key}_mean"), seen.get(f"{key}_worst")
