"""The torch backend: the eleven primitives on tensors of any device, the CPU included.

How this works. Whatever has d in its shape stays on the device; indices, weights and factors come from the
host as NumPy arrays, and distances and flags go there (`rpel.backend.chunks`). A chunk of victims and
columns is gathered to (v, m, w), mixed by a batched product with weights, and put in order by the network
of `rpel.backend.coordinates`: minimum and maximum of whole lanes, which torch.compile can fuse, where
sorting along a short axis would keep one block of threads per segment busy.

Distances come from Gram matrices in float64 around a row of the group, and from differences where these
cancel; on a device without float64 (mps) from differences in compensated float32. Results repeat exactly on
one device; they equal the other backends to rounding, not bit by bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend.base import Backend, Operation
from rpel.backend.checks import check_operation
from rpel.backend.chunks import Chunks
from rpel.backend.coordinates import network, ranks
from rpel.backend.plain import Plain
from rpel.backend.threads import share
from rpel.types import Integers

SPANS = 8  # parts of the columns that are summed by themselves
CANCELLED = 1e-3  # of two rows' squared lengths: a distance below it has lost too many digits
LONGEST = 64  # values up to which a network orders them


class Torch(Chunks, Backend):
    """Primitives on tensors of one device.

    >>> arrays = Torch("cpu")
    >>> x = arrays.array(np.array([[0.0, 0.0], [3.0, 4.0]]))
    >>> arrays.distances_to(x, np.array([[0, 1]]), None)
    array([[ 0., 25.]])
    """

    # --- distances ---

    def finite_rows(self, table: Any) -> Any:
        lowest, highest = self._ends(table)
        return self.read(torch.isfinite(lowest) & torch.isfinite(highest))

    def _ends(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) the least and the greatest number of each row; NaN where there is one."""
        lowest, highest = table.new_zeros((2, len(table)))

        def work(rows: slice, _: slice) -> None:
            torch.aminmax(table[rows], dim=1, out=(lowest[rows], highest[rows]))

        if table.numel():
            self._over(work, len(table), 1, self._cached(table.shape[1] * table.dtype.itemsize))
        return lowest, highest

    def squared_distances(self, table: Any, index: Any) -> Any:
        return self.read(self._squared(table, np.asarray(index)))

    def _squared(self, table: Tensor, index: Integers) -> Tensor:
        """(h, m, m) squared distances, on the device; each pair of rows once, where that is less work."""
        (h, m), marks = index.shape, np.zeros(len(table), bool)
        marks[index] = True
        used = np.flatnonzero(marks)
        if len(used) ** 2 > 2 * h * m * m:
            return self._pairwise(table, index)
        place = self.lend((np.cumsum(marks) - 1)[index])
        return self._pairwise(table, used[None])[0][place[:, :, None], place[:, None, :]]

    def _pairwise(self, table: Tensor, index: Integers) -> Tensor:
        """(g, r, r) squared distances among the rows of each group (g, r)."""
        rows, (g, r), kind = self.lend(index), index.shape, self.wide
        if kind != torch.float64:
            pairs = np.stack(np.meshgrid(np.arange(g), np.arange(r), np.arange(r), indexing="ij")).reshape(
                3, -1
            )
            return self._apart(table, index[pairs[0], pairs[1]], index[pairs[0], pairs[2]]).view(g, r, r)
        products = self._products(table, rows)
        lengths = products.diagonal(dim1=1, dim2=2)
        both = lengths[:, :, None] + lengths[:, None, :]
        found = both - (products + products.transpose(1, 2))
        same = rows[:, :, None] == rows[:, None, :]
        doubtful = ~(found > CANCELLED * both) & ~same
        found.masked_fill_(same, 0.0)
        if self.read(doubtful.any()):
            at = np.nonzero(self.read(doubtful))
            exact = self._apart(table, index[at[0], at[1]], index[at[0], at[2]])
            found[tuple(self.lend(place) for place in at)] = exact
        return found

    def _products(self, table: Tensor, rows: Tensor) -> Tensor:
        """(g, r, r) inner products in float64 among the rows of each group (g, r), around its first."""
        (g, r), d, kind = rows.shape, table.shape[1], torch.float64
        spans = SPANS if self.main and g < SPANS else 1  # units of work where groups are too few
        each, width = r * (table.dtype.itemsize + 2 * kind.itemsize), -(-d // spans)
        groups = list(self._pieces(g, each * next(self._pieces(width, each), slice(0, 0)).stop))
        found = torch.zeros((spans, g, r, r), dtype=kind, device=table.device)

        def work(unit: int) -> None:
            span, some = unit % spans, groups[unit // spans]
            for piece in self._pieces(max(0, min(width, d - span * width)), each):
                at = slice(span * width + piece.start, span * width + piece.stop)
                x = self._gathered(table, rows[some], at).to(kind)
                x -= x[:, :1].clone()
                found[span, some].baddbmm_(x, x.transpose(1, 2))

        share(work, spans * len(groups), serial=not self.main)
        return found.sum(dim=0) if spans > 1 else found[0]

    def _apart(self, table: Tensor, a: Integers, b: Integers) -> Tensor:
        """(k,) the squared distances of rows a_i and b_i, from differences."""
        left, right = self.lend(a), self.lend(b)
        return self._summed(
            len(a), table, lambda some, at: self._gathered(table, left[some], at).to(self.wide).sub_(
                self._gathered(table, right[some], at)), 1,
        )  # fmt: skip

    def _summed(self, h: int, table: Tensor, rows: Callable[[slice, slice], Tensor], m: int) -> Tensor:
        """Compute Σ x² over the columns of rows(victims, columns) (v, …, w) for each of h victims.

        m: rows per victim. The tensors that `rows` returns are overwritten.
        """
        d, each = table.shape[1], m * (2 * table.dtype.itemsize + self.wide.itemsize)
        columns = list(self._pieces(d, each))
        parts = list(self._pieces(h, each * (columns[0].stop if columns else 0)))
        found: list[Any] = [None] * len(parts)

        def work(part: int) -> None:
            total = _Sum()
            for at in columns:
                total.add(rows(parts[part], at).square_().sum(dim=-1))
            found[part] = total.value

        share(work, len(parts), serial=not self.main)
        return torch.cat(found)

    def distances_to(self, table: Any, index: Any, origin: Any) -> Any:
        rows = self.lend(index)
        h, m = rows.shape
        if not h or not m:
            return np.zeros((h, m))
        present = rows.clamp(min=0)
        points = None if origin is None else self.array(origin)

        def moved(victims: slice, columns: slice) -> Tensor:
            x = self._gathered(table, present[victims], columns).to(self.wide, copy=True)
            if points is None:
                return x
            if not points.is_floating_point():  # rows of the table, of which there is no copy
                return x.sub_(self._gathered(table, points[victims, None].long(), columns))
            return x.sub_(points[victims, None, columns] if points.ndim == 2 else points[columns])

        return self.read(self._summed(h, table, moved, m).masked_fill_(rows < 0, 0.0))

    def nearest(self, distances: Any, k: int) -> Any:
        return Plain().nearest(distances, k)

    @staticmethod
    def _nearest(distances: Tensor, k: int) -> Tensor:
        """(h, m, k) as `nearest`, in no order of columns."""
        own = torch.eye(distances.shape[1], dtype=torch.bool, device=distances.device)
        return torch.sort(distances.masked_fill(own, -1.0), dim=2, stable=True).indices[:, :, :k]

    # --- sums and operations ---

    def combine(self, table: Any, index: Any, weights: Any, out: Any = None) -> Any:
        result = self._result(table, len(index), out)
        self._weighted(table, index, weights, result)
        return result

    def _weighted(self, table: Tensor, index: Any, weights: Any, result: Tensor) -> None:
        """Compute `combine` into a result.

        Rows without weight are never read, so a value in them that is not finite has no effect.
        """
        given, index = np.asarray(weights, np.float64), np.asarray(index)
        used = (index >= 0) & (given != 0)
        rows = self._standing(index, used)
        factors = self.array(np.where(used, given, 0.0)).to(table.dtype)[:, None]

        def work(victims: slice, columns: slice) -> None:
            found = torch.bmm(factors[victims], self._gathered(table, rows[victims], columns))
            result[victims, columns] = found[:, 0]

        self._over(work, len(index), table.shape[1], (rows.shape[1] + 1) * table.dtype.itemsize)
        self._zero(result, ~used.any(axis=1))

    def _standing(self, index: Integers, used: NDArray[np.bool_]) -> Tensor:
        """(h, m) rows on the device; one that is used stands in the place of those that are not."""
        some = np.take_along_axis(index, used.argmax(axis=1)[:, None], axis=1)
        return self.lend(np.maximum(np.where(used, index, some), 0))

    def _zero(self, x: Tensor, rows: NDArray[np.bool_]) -> None:
        """x[rows] = 0."""
        if rows.any():
            x.index_fill_(0, self.lend(np.flatnonzero(rows)), 0.0)

    def coordinatewise(
        self, table: Any, index: Any, operation: Any, f: int = 0, mix: Any = None, out: Any = None
    ) -> Any:
        h, m = index.shape
        result = self._result(table, h, out)
        check_operation(operation, m if mix is None or isinstance(mix, int) else mix.shape[1], f)
        if not isinstance(mix, int):
            self._operated(table, index, operation, f, None if mix is None else self.lend(mix), result)
            return result
        for part in self._pieces(h, 8 * self.wide.itemsize * m * m):
            kept = self._nearest(self._squared(table, index[part]), mix)
            self._operated(table, index[part], operation, f, kept, result[part])
        return result

    def _operated(
        self, table: Tensor, index: Any, operation: Operation, f: int, mix: Tensor | None, result: Tensor
    ) -> None:
        rows, (h, m) = self.lend(index), index.shape
        weights, divisor = (None, 1) if mix is None else _weights(mix, m, table.dtype)

        def work(victims: slice, columns: slice) -> None:
            x = self._gathered(table, rows[victims], columns)
            if weights is not None:
                x = torch.bmm(weights[victims], x)
            torch.div(operate(x, operation, f), divisor, out=result[victims, columns])

        lanes = (m if weights is None else m + weights.shape[1]) + 1
        self._over(
            work, h, table.shape[1], lanes * table.dtype.itemsize * (3 if operation == "meamed" else 1)
        )

    def moments(self, table: Any, index: Any, mean_factor: Any, std_factor: Any, out: Any = None) -> Any:
        rows, kind = np.asarray(index), table.dtype
        present, result = rows >= 0, self._result(table, len(rows), out)
        count, means, spreads = present.sum(axis=1), np.asarray(mean_factor), np.asarray(std_factor)
        flat = (count < 2) | (spreads == 0)
        if flat.all():
            self._weighted(table, rows, present * (means / np.maximum(count, 1))[:, None], result)
            return result
        per_row = [present / np.maximum(divisor, 1)[:, None] for divisor in (count, count - 1)]
        shares, squares = (self.array(weights).to(kind)[:, None] for weights in per_row)
        factors, spread_factors = (self.array(a).to(kind)[:, None, None] for a in (means, spreads))
        used, still = self._standing(rows, present), self.lend(flat)[:, None, None] if flat.any() else None

        def work(victims: slice, columns: slice) -> None:
            x = self._gathered(table, used[victims], columns)
            mean = torch.bmm(shares[victims], x)
            spread = torch.bmm(squares[victims], x.sub_(mean).square_()).sqrt_().mul_(spread_factors[victims])
            if still is not None:
                spread.masked_fill_(still[victims], 0.0)
            result[victims, columns] = spread.addcmul_(mean, factors[victims])[:, 0]

        self._over(work, len(rows), table.shape[1], (rows.shape[1] + 2) * kind.itemsize)
        self._zero(result, count == 0)
        return result

    # --- the local step, and sums over nodes ---

    def momentum_step(
        self, x: Any, m: Any, g: Any, beta: float, lr: float, decay: float, out: Any = None
    ) -> tuple[Any, Any]:
        half = torch.empty_like(x) if out is None else out

        def work(*at: slice) -> None:
            m[at].mul_(beta).add_(g[at], alpha=1 - beta)
            torch.mul(x[at], 1 - lr * decay, out=half[at]).add_(m[at], alpha=-lr)

        self._over(work, len(x), x.shape[1], self._cached(4 * x.dtype.itemsize))
        return half, m

    def column_sums(self, x: Any, columns: slice, total: Any, mean: Any = None) -> None:
        def values(at: slice) -> Tensor:
            wide: Tensor = x[:, at].to(total.dtype)
            return wide if mean is None else (wide - mean[at]).square_()

        self._add_to(total, columns, values, len(x))

    def _add_to(self, total: Tensor, columns: slice, values: Callable[[slice], Tensor], n: int) -> None:
        """total[c] += Σ_i values(c)[i] of n rows, for these columns."""

        def work(_: slice, piece: slice) -> None:
            at = slice(columns.start + piece.start, columns.start + piece.stop)
            total[at] += values(at).sum(dim=0)

        self._over(work, 1, columns.stop - columns.start, 2 * n * total.dtype.itemsize)


class _Sum:
    """A sum of parts, compensated (Kahan) where the type is not float64."""

    value: Any = None
    lost: Any = 0.0

    def add(self, part: Tensor) -> None:
        if self.value is None or part.dtype == torch.float64:
            self.value = part if self.value is None else self.value.add_(part)
            return
        wanted = part - self.lost
        total = self.value + wanted
        self.lost = torch.nan_to_num((total - self.value) - wanted)
        self.value = total


def _weights(mix: Tensor, m: int, kind: torch.dtype) -> tuple[Tensor, int]:
    """A mixing as weights (h, m′, m), and by what to divide what they sum."""
    if mix.is_floating_point():
        return mix.to(kind), 1
    kept = mix.long()
    weights = torch.zeros((*kept.shape[:2], m), dtype=kind, device=mix.device)
    return weights.scatter_add_(2, kept, torch.ones_like(kept, dtype=kind)), kept.shape[2]


# --- operations on m values of every coordinate -------------------------------------------------------------


def operate(x: Tensor, operation: Operation, f: int) -> Tensor:
    """(h, w) the operation over the m values of every coordinate of x (h, m, w), which is overwritten.

    >>> operate(torch.tensor([[[0.0], [9.0], [2.0], [1.0]]]), "trimmed_mean", 1)
    tensor([[1.5000]])
    """
    m = x.shape[1]
    if operation == "meamed":
        return _near_median(x, m - f)
    ordered = _ordered(x, operation, f)
    total = ordered[0]
    for value in ordered[1:]:
        total += value
    return total.div_(len(ordered))


def _ordered(x: Tensor, operation: Operation, f: int) -> list[Tensor]:
    """The values (h, w) at the ranks that an operation looks at, in any order; x is overwritten."""
    m, wanted = x.shape[1], ranks(x.shape[1], f, operation)
    if m > LONGEST:
        whole = x.sort(dim=1).values
        return [whole[:, r] for r in wanted]
    lanes, spare = list(x.unbind(1)), torch.empty_like(x[:, 0])
    for a, b in network(m, wanted):
        lanes[a], lanes[b], spare = _exchanged(lanes[a], lanes[b], spare)
    return [lanes[r] for r in wanted]


def _exchanged(a: Tensor, b: Tensor, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower and the higher values of two lanes, and the lane that is spare now."""
    if torch.compiler.is_compiling():  # fused, nothing in between is stored
        return torch.minimum(a, b), torch.maximum(a, b), spare
    return torch.minimum(a, b, out=spare), torch.maximum(a, b, out=b), a


def _near_median(x: Tensor, k: int) -> Tensor:
    """Average the k values nearest to the median, with ties going to the lower row.

    A value belongs to them if fewer than k others come before it.
    """
    middle = _ordered(x.clone(), "median", 0)
    median = (middle[0] + middle[-1]) / 2
    away = (x - median[:, None]).abs_()
    total, m = torch.zeros_like(median), x.shape[1]
    for j in range(m):
        own = away[:, j : j + 1]
        before = (away[:, :j] <= own).sum(dim=1) + (away[:, j + 1 :] < own).sum(dim=1)
        total += torch.where(before < k, x[:, j], 0.0)
    return total.div_(k)
