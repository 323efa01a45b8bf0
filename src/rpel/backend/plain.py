"""The reference backend: NumPy, one victim at a time, in float64. The other backends must equal these lines.

It is written to be read, not to be fast: tests and `rpel.testing` compare the others with it.
`rpel.backend.base` says what each primitive means; the examples are here.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpel.backend.base import Backend, Operation
from rpel.backend.checks import check_index, check_mix, check_operation, check_table, result_array
from rpel.types import Floats, Integers, Mix, Out


class Plain(Backend):
    """The eleven primitives on NumPy arrays.

    >>> plain = Plain()
    >>> table = np.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    """

    def array(self, values: ArrayLike | Floats) -> Floats:
        return np.asarray(values)

    def host(self, x: ArrayLike | Floats) -> Floats:
        return np.asarray(x)

    def finite_rows(self, table: Floats) -> NDArray[np.bool_]:
        """(n,) Mark the rows whose entries are all finite.

        >>> Plain().finite_rows(np.array([[1.0, 2.0], [np.inf, 0.0]]))
        array([ True, False])
        """
        check_table(table)
        return np.array([np.isfinite(row).all() for row in table], bool)

    def squared_distances(self, table: Floats, index: Integers) -> Floats:
        """(h, m, m) Squared Euclidean distances among each victim's rows.

        >>> Plain().squared_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1]]))
        array([[[ 0., 25.],
                [25.,  0.]]])
        """
        check_index(table, index)
        h, m = index.shape
        result = np.empty((h, m, m))
        with np.errstate(over="ignore"):
            for i, rows in enumerate(index):
                x = table[rows].astype(np.float64)
                for a in range(m):
                    result[i, a] = np.square(x - x[a]).sum(axis=1)
        return result

    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
        """(h, m) Squared distances of each victim's rows to an origin; 0 for −1.

        >>> Plain().distances_to(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0, 1], [1, -1]]), None)
        array([[ 0., 25.],
               [25.,  0.]])
        """
        check_index(table, index, absent=True)
        result = np.zeros(index.shape)
        with np.errstate(over="ignore"):
            for i, j in np.argwhere(index >= 0):
                x = table[index[i, j]].astype(np.float64)
                result[i, j] = np.square(x - _origin(table, origin, i)).sum()
        return result

    def nearest(self, distances: Floats, k: int) -> NDArray[np.int32]:
        """(h, m, k) The k columns nearest to each column, itself among them, in ascending order.

        >>> Plain().nearest(np.array([[[0.0, 9.0, 1.0], [9.0, 0.0, 4.0], [1.0, 4.0, 0.0]]]), 2)
        array([[[0, 2],
                [1, 2],
                [0, 2]]], dtype=int32)
        """
        m = distances.shape[1]
        own_first = np.where(np.eye(m, dtype=bool), -1.0, distances)
        chosen = np.argsort(own_first, axis=2, kind="stable")[:, :, :k]
        return np.sort(chosen, axis=2).astype(np.int32)

    def combine(self, table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
        """(h, d) Weighted sums of rows; −1 and weight 0 are not read.

        >>> Plain().combine(np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[0, 1]]), np.array([[2.0, 0.0]]))
        array([[2., 4.]])
        """
        check_index(table, index, absent=True)
        result = result_array(table, len(index), out)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, rows in enumerate(index):
                total = np.zeros(table.shape[1])
                for row, weight in zip(rows, weights[i], strict=True):
                    if row >= 0 and weight != 0:
                        total += weight * table[row].astype(np.float64)
                result[i] = total
        return result

    def coordinatewise(
        self,
        table: Floats,
        index: Integers,
        operation: Operation,
        f: int = 0,
        mix: Mix = None,
        out: Out = None,
    ) -> Floats:
        """(h, d) Apply an operation to each coordinate's values, after mixing the rows.

        >>> table, everyone = np.array([[0.0], [1.0], [2.0], [9.0]]), np.array([[0, 1, 2, 3]])
        >>> [float(Plain().coordinatewise(table, everyone, name, 1)[0, 0]) for name
        ...     in ("trimmed_mean", "median", "meamed")]
        [1.5, 1.5, 1.0]
        """
        check_index(table, index)
        check_operation(operation, check_mix(mix, *index.shape), f)
        result = result_array(table, len(index), out)
        if isinstance(mix, int):
            mix = self.nearest(self.squared_distances(table, index), mix)
        with np.errstate(over="ignore", invalid="ignore"):
            for i, rows in enumerate(index):
                x = table[rows].astype(np.float64)
                result[i] = _operate(x if mix is None else _mixed(x, mix[i]), operation, f)
        return result

    def moments(
        self, table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Out = None
    ) -> Floats:
        """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows.

        >>> Plain().moments(np.array([[1.0], [3.0]]), np.array([[0, 1]]), np.array([1.0]),
        ...     np.array([2.0])) == 2 + 2 * 2**0.5
        array([[ True]])
        """
        check_index(table, index, absent=True)
        result = result_array(table, len(index), out)
        for i, rows in enumerate(index):
            x = table[rows[rows >= 0]].astype(np.float64)
            mean = x.mean(axis=0) if len(x) else np.zeros(table.shape[1])
            deviation = x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(table.shape[1])
            result[i] = mean_factor[i] * mean + (std_factor[i] * deviation if std_factor[i] else 0.0)
        return result

    def momentum_step(
        self, x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Out = None
    ) -> tuple[Floats, Floats]:
        """Lines 5 and 6 of Algorithm 1: (half-step models, m), m updated in place.

        >>> half, m = Plain().momentum_step(np.ones((1, 1)), np.zeros((1, 1)), np.ones((1, 1)), 0.9, 0.5, 0.0)
        >>> half.round(3), m.round(3)
        (array([[0.95]]), array([[0.1]]))
        """
        m[:] = beta * m + (1 - beta) * g
        half = np.empty_like(x) if out is None else out
        half[:] = x - lr * (m + decay * x)
        return half, m

    def column_sums(self, x: Floats, columns: slice, total: Floats, mean: Floats | None = None) -> None:
        """Add the rows, or their squared differences from a mean, to a total.

        >>> total = np.zeros(2)
        >>> Plain().column_sums(np.array([[1.0, 2.0], [3.0, 4.0]]), slice(0, 2), total)
        >>> total
        array([4., 6.])
        >>> Plain().column_sums(np.array([[1.0, 2.0]]), slice(1, 2), total, mean=np.zeros(2))
        >>> total
        array([ 4., 10.])
        """
        for row in x:
            values = row[columns].astype(np.float64)
            total[columns] += values if mean is None else np.square(values - mean[columns])


def _origin(table: Floats, origin: Floats | Integers | None, victim: int) -> Floats:
    """(d,) the point from which one victim's distances are measured."""
    if origin is None:
        return np.zeros(table.shape[1])
    if origin.dtype.kind in "iu":
        return np.asarray(table[origin[victim]], np.float64)
    return np.asarray(origin[victim] if origin.ndim == 2 else origin, np.float64)


def _mixed(x: Floats, mix: Floats | Integers) -> Floats:
    """(m′, d) the mixed rows of one victim."""
    if mix.dtype.kind in "iu":
        return np.stack([x[chosen].sum(axis=0) / len(chosen) for chosen in mix])
    return np.stack([row[row != 0] @ x[row != 0] for row in mix])


def _operate(y: Floats, operation: Operation, f: int) -> Floats:
    """(d,) the operation over the rows of y (m′, d)."""
    ordered = np.sort(y, axis=0)
    m = len(y)
    median = (ordered[(m - 1) // 2] + ordered[m // 2]) / 2
    if operation == "median":
        return np.asarray(median, np.float64)
    if operation == "trimmed_mean":
        return np.asarray(ordered[f : m - f].mean(axis=0), np.float64)
    # meamed: ties in the distance go to the lower row
    chosen = np.argsort(np.abs(y - median), axis=0, kind="stable")[: m - f]
    return np.asarray(np.take_along_axis(y, chosen, axis=0).mean(axis=0), np.float64)
