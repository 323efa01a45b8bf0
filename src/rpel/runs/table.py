"""Rows of equal keys, such as the rounds of a run: as columns, CSV, a pandas DataFrame, text and HTML."""

import csv
import html
import io
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHOWN = 10


class Table:
    """Rows of equal keys.

    >>> t = Table([{"round": 1, "loss": None}, {"round": 2, "loss": 0.5}])
    >>> t.columns, len(t), t["loss"].tolist()
    (('round', 'loss'), 2, [nan, 0.5])
    >>> print(t)
    round  loss
        1
        2   0.5
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = list(rows)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._rows[0]) if self._rows else ()

    def rows(self) -> list[dict[str, Any]]:
        """All rows, each a dict; None where there is no value."""
        return list(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __getitem__(self, column: str) -> NDArray[Any]:
        """A column; missing values are NaN."""
        if column not in self.columns:
            raise KeyError(f"there is no column {column!r}: there are {', '.join(self.columns)}")
        values = [row[column] for row in self._rows]
        return np.array([np.nan if value is None else value for value in values])

    def where(self, column: str) -> "Table":
        """The rows that have a value in this column, such as those that were evaluated.

        >>> len(Table([{"loss": None}, {"loss": 0.5}]).where("loss"))
        1
        """
        return Table([row for row in self._rows if row[column] is not None])

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV, also written to the path when there is one; missing values are empty.

        >>> Table([{"round": 1, "loss": None}]).to_csv()
        'round,loss\\n1,\\n'
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), "utf-8")
        return text.getvalue()

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        if find_spec("pandas") is None:
            raise ValueError("pandas is not installed: pip install 'rpel[pandas]'")
        pandas = import_module("pandas")
        return pandas.DataFrame(self._rows, columns=list(self.columns))

    def _sample(self) -> list[dict[str, Any] | None]:
        """All rows of a short table, else the first and the last with a gap (None) between."""
        if len(self) <= 2 * _SHOWN:
            return list(self._rows)
        return [*self._rows[:_SHOWN], None, *self._rows[-_SHOWN:]]

    def __str__(self) -> str:
        cells = [
            ["…"] * len(self.columns) if row is None else [_cell(v) for v in row.values()]
            for row in self._sample()
        ]
        lines = [list(self.columns), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{'…' if row is None else _cell(row[c])}</td>" for c in self.columns)
            + "</tr>"
            for row in self._sample()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
