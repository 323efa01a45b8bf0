"""The contract of a backend: eleven primitives on models, for NumPy arrays or for tensors of a device.

A backend is chosen once for a run and handed down. Everything else that touches models is written over the
array namespace of its input (`rpel.backend.arrays`), beside the rule, attack or module that needs it.

Shapes and types, in all of them:

- ``table`` (n, d) holds n models as rows, C-contiguous float32 or float64, where the backend
  computes;
- ``index`` (h, m) holds, for each of h victims, the rows of the table that it has received, its own in column
  0. Integers on the host. −1 marks an absent row, only where a primitive says so;
- weights, factors and distances have no d in their shape: they are float64 arrays on the host;
- ``out`` (h, d) takes the result, in the table's dtype; it must not overlap the table. Without it the
  result is a new array. Inputs are never changed, unless a primitive says so.

Invariants: results do not depend on the number of threads, bit for bit, and repeat exactly; sums run in
float64 (on a device without it, in float32); a row that is left out is never read into a sum, so a
forged 3e38 leaves no trace; ties go to the lower column.

`rpel.backend.plain` computes each primitive in a few obvious lines. The others must equal it.
"""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpel.errors import nearest
from rpel.types import Floats, Integers, Mix, Out

Operation = Literal["trimmed_mean", "median", "meamed"]
OPERATIONS: tuple[Operation, ...] = ("trimmed_mean", "median", "meamed")

NAMES = ("numba", "plain", "torch")


class Backend(ABC):
    """Eleven primitives; see the module for shapes and types."""

    @abstractmethod
    def array(self, values: ArrayLike | Floats) -> Floats:
        """Move values of any shape to where this backend computes; what is there stays the same object."""

    @abstractmethod
    def host(self, x: ArrayLike | Floats) -> Floats:
        """Move values of any shape to NumPy; a NumPy array stays the same object."""

    @abstractmethod
    def finite_rows(self, table: Floats) -> NDArray[np.bool_]:
        """(n,) Mark the rows whose entries are all finite; on the host."""

    @abstractmethod
    def squared_distances(self, table: Floats, index: Integers) -> Floats:
        """(h, m, m) Squared Euclidean distances among each victim's rows, float64 on the host.

        They are sums of squared differences, symmetric; equal pairs of rows have equal bits wherever they
        stand.
        """

    @abstractmethod
    def distances_to(self, table: Floats, index: Integers, origin: Floats | Integers | None) -> Floats:
        """(h, m) Squared distances of each victim's rows to an origin, float64 on the host; 0 for −1.

        Args:
            table: (n, d).
            index: (h, m), −1 allowed.
            origin: None for zero, (d,) floats for a point, (h, d) floats for a point per victim, or (h,)
                integers for a row of the table per victim.
        """

    @abstractmethod
    def nearest(self, distances: Floats, k: int) -> NDArray[np.int32]:
        """(h, m, k) The k columns nearest to each column, in ascending order, given (h, m, m) distances.

        The column itself is always among them. Integers on the host.
        """

    @abstractmethod
    def combine(self, table: Floats, index: Integers, weights: Floats, out: Out = None) -> Floats:
        """(h, d) Weighted sums Σ_j weights[i, j] · table[index[i, j]]; −1 and weight 0 are not read.

        Args:
            table: (n, d).
            index: (h, m), −1 allowed.
            weights: (h, m) float64.
            out: (h, d), where the result goes.
        """

    @abstractmethod
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

        - ``trimmed_mean``: drop the f lowest and the f highest values, and average the rest;
        - ``median``: the middle value, or the mean of the two middle ones;
        - ``meamed``: the mean of the m′ − f values nearest to the median.

        Args:
            table: (n, d).
            index: (h, m), without −1.
            operation: one of `OPERATIONS`.
            f: how many hostile values to allow for.
            mix: how the m rows become m′ rows before the operation. None: they stay. A number k: each becomes
                the mean of the k rows nearest to it. Integers (h, m′, k): the means of the rows named. Floats
                (h, m′, m): weighted sums, of which weight 0 is not read.
            out: (h, d), where the result goes.
        """

    @abstractmethod
    def moments(
        self, table: Floats, index: Integers, mean_factor: Floats, std_factor: Floats, out: Out = None
    ) -> Floats:
        """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows of index[i].

        σ has the divisor (count − 1) and is 0 for a single row; without any row the result is 0.

        Args:
            table: (n, d).
            index: (h, m), −1 allowed.
            mean_factor: (h,) float64.
            std_factor: (h,) float64; where it is 0, σ is not computed.
            out: (h, d), where the result goes.
        """

    @abstractmethod
    def momentum_step(
        self, x: Floats, m: Floats, g: Floats, beta: float, lr: float, decay: float, out: Out = None
    ) -> tuple[Floats, Floats]:
        """Lines 5 and 6 of Algorithm 1 for h nodes: m ← βm + (1 − β)g, then x − lr · (m + decay · x).

        Args:
            x: (h, d) models; unchanged, unless it is ``out``.
            m: (h, d) momentum, updated in place.
            g: (h, d) gradients.
            beta: the weight of the old momentum.
            lr: the learning rate.
            decay: the weight decay.
            out: (h, d), where the half-step models go.

        Returns:
            (half-step models, m).
        """

    @abstractmethod
    def column_sums(self, x: Floats, columns: slice, total: Floats, mean: Floats | None = None) -> None:
        """Add Σ_i x[i, c], or Σ_i (x[i, c] − mean[c])², to total[c] for these columns, row after row.

        A sum may be continued with further rows, so that workers add up one after another with equal bits.

        Args:
            x: (n, d) models.
            columns: the columns to add up, ``slice(start, stop)``.
            total: (d,) float64 (float32 where the device has nothing wider), added to in place.
            mean: (d,) like ``total``.
        """


def backend(name: str, device: str = "cpu") -> Backend:
    """Return the backend of that name, importing none of the others; device: where torch's arrays live.

    >>> backend("plain").host([1.0, 2.0])
    array([1., 2.])
    >>> backend("nmba")
    Traceback (most recent call last):
    ValueError: there is no backend 'nmba': the nearest is 'numba' (of numba, plain, torch)
    """
    if name == "torch":
        from rpel.backend.tensors import Torch

        return Torch(device)
    if name == "plain":
        from rpel.backend.plain import Plain

        return Plain()
    if name != "numba":
        raise ValueError(f"there is no backend {name!r}: {nearest(name, NAMES)}")
    from rpel.backend.compiled import Compiled

    return Compiled()
