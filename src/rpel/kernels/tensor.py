"""The torch twin: the same primitives for a table that lies on an accelerator (or in CPU tensors).

What each function computes, with examples, is written in `plain`.

Invariants: work is cut into pieces of victims and columns so that no temporary exceeds `budget_bytes`; nothing is
copied to the host, nothing written to its inputs; distances are differences in float64 (so a device without float64 is
not served), summed over column pieces that do not depend on the victims.

Results repeat exactly on one device; they equal the other twins to rounding, not bit by bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rpel.kernels.plain import Operation, check_operation

BUDGET = 256 << 20


def _pieces(size: int, bytes_each: int, budget: int) -> Iterator[slice]:
    """Slices of 0 … size − 1 whose temporaries fit the budget; at least one element each."""
    step = max(1, budget // max(1, bytes_each))
    for start in range(0, size, step):
        yield slice(start, min(size, start + step))


def _grid(h: int, d: int, values: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """(victims, columns) pieces of an (h, d) result that needs `values` float64 temporaries per entry.

    Columns are cut first to what one victim may use, then as many victims as fit.
    """
    for columns in _pieces(d, 8 * values, budget):
        width = columns.stop - columns.start
        for victims in _pieces(h, 8 * values * width, budget):
            yield victims, columns


def _result(table: Tensor, h: int, out: Tensor | None) -> Tensor:
    return table.new_empty((h, table.shape[1])) if out is None else out


def finite_rows(table: Tensor, budget_bytes: int = BUDGET) -> Tensor:
    """(n,) True where every entry of the row is finite."""
    pieces = _pieces(len(table), table.shape[1], budget_bytes)
    return torch.cat(
        [torch.isfinite(table[rows]).all(dim=1) for rows in pieces] or [table.new_empty(0, dtype=torch.bool)]
    )


def squared_distances(table: Tensor, index: Tensor, budget_bytes: int = BUDGET) -> Tensor:
    """(h, m, m) squared Euclidean distances among the rows of each victim, float64."""
    h, m = index.shape
    result = torch.zeros((h, m, m), dtype=torch.float64, device=table.device)
    for victims, columns in _grid(h, table.shape[1], 4 * m, budget_bytes):
        x = table[:, columns][index[victims]].double()
        for a in range(m):
            result[victims, a] += (x - x[:, a : a + 1]).square_().sum(dim=2)
    return result


def distances_to(table: Tensor, index: Tensor, origin: Tensor | None, budget_bytes: int = BUDGET) -> Tensor:
    """(h, m) squared distances of the rows to an origin: None is zero, (d,) floats a point, (h,) integers rows,
    (h, d) floats a point for each victim.
    """
    h, m = index.shape
    result = torch.zeros((h, m), dtype=torch.float64, device=table.device)
    present = index.clamp(min=0)
    for victims, columns in _grid(h, table.shape[1], 3 * m, budget_bytes):
        x = table[:, columns][present[victims]].double()
        if origin is not None and origin.is_floating_point():
            x -= origin[victims, None, columns].double() if origin.ndim == 2 else origin[columns].double()
        elif origin is not None:
            x -= table[:, columns][origin[victims]].double()[:, None]
        result[victims] += x.square_().sum(dim=2)
    return result.masked_fill_(index < 0, 0.0)


def nearest(distances: Tensor, k: int) -> Tensor:
    """(h, m, k) for every anchor the k nearest columns, itself included, in ascending order of column."""
    own = torch.eye(distances.shape[1], dtype=torch.bool, device=distances.device)
    kept = torch.sort(distances.masked_fill(own, -1.0), dim=2, stable=True).indices[:, :, :k]
    return kept.sort(dim=2).values


def combine(
    table: Tensor, index: Tensor, weights: Tensor, out: Tensor | None = None, budget_bytes: int = BUDGET
) -> Tensor:
    """(h, d) weighted sums; weight 0 and index −1 are skipped, whatever stands there."""
    h, m = index.shape
    result = _result(table, h, out)
    used = (index >= 0) & (weights != 0)
    factors = weights.double().masked_fill(~used, 0.0)
    for victims, columns in _grid(h, table.shape[1], 3, budget_bytes):
        total = table.new_zeros((victims.stop - victims.start, columns.stop - columns.start), dtype=torch.float64)
        for j in range(m):
            row = table[:, columns][index[victims, j].clamp(min=0)].double()
            row.masked_fill_(~used[victims, j, None], 0.0)
            total += row.mul_(factors[victims, j, None])
        result[victims, columns] = total.to(table.dtype)
    return result


def coordinatewise(
    table: Tensor,
    index: Tensor,
    operation: Operation,
    f: int = 0,
    mix: Tensor | int | None = None,
    out: Tensor | None = None,
    budget_bytes: int = BUDGET,
) -> Tensor:
    """(h, d) trimmed_mean, median or meamed of each coordinate, after mixing; see `plain.coordinatewise`."""
    h, m = index.shape
    mixed = mix.shape[1] if isinstance(mix, Tensor) else m
    check_operation(operation, mixed, f)
    result = _result(table, h, out)
    if isinstance(mix, int):
        for part in _pieces(h, 8 * m * m, budget_bytes):
            kept = nearest(squared_distances(table, index[part], budget_bytes), mix)
            coordinatewise(table, index[part], operation, f, kept, result[part], budget_bytes)
        return result
    for victims, columns in _grid(h, table.shape[1], m + 6 * mixed, budget_bytes):
        x = table[:, columns][index[victims]]
        y = x if mix is None else _mixed(x, mix[victims])
        result[victims, columns] = _operate(y, operation, f).to(table.dtype)
    return result


def _mixed(x: Tensor, mix: Tensor) -> Tensor:
    """(h, m′, w) from x (h, m, w), in float64: one row at a time, so that ∞ never meets −∞ and zeros are skipped."""
    total = torch.zeros((*mix.shape[:2], x.shape[2]), dtype=torch.float64, device=x.device)
    for j in range(mix.shape[2]):
        if mix.is_floating_point():
            weight = mix[:, :, j, None]
            total += torch.where(weight != 0, weight.double() * x[:, j, None].double(), 0.0)
        else:
            picked = mix[:, :, j, None].long().expand(-1, -1, x.shape[2])
            total += torch.gather(x, 1, picked).double()
    return total if mix.is_floating_point() else total / mix.shape[2]


def _operate(y: Tensor, operation: Operation, f: int) -> Tensor:
    """(h, w) the operation over the second axis of y (h, m′, w)."""
    m = y.shape[1]
    values = y.double()
    ordered = values.sort(dim=1).values
    median = (ordered[:, (m - 1) // 2] + ordered[:, m // 2]) / 2
    if operation == "median":
        return median
    if operation == "trimmed_mean":
        return ordered[:, f : m - f].mean(dim=1)
    kept = (values - median[:, None]).abs().sort(dim=1, stable=True).indices[:, : m - f]
    return values.gather(1, kept).mean(dim=1)


def moments(
    table: Tensor,
    index: Tensor,
    mean_factor: Tensor,
    std_factor: Tensor,
    out: Tensor | None = None,
    budget_bytes: int = BUDGET,
) -> Tensor:
    """(h, d) mean_factor[i] · μ + std_factor[i] · σ per coordinate, over the present rows of index[i]."""
    h, m = index.shape
    result = _result(table, h, out)
    present = index >= 0
    count = present.sum(dim=1, keepdim=True).double()
    spread = std_factor.double()[:, None] * (count > 1)
    for victims, columns in _grid(h, table.shape[1], 5, budget_bytes):
        rows = [(index[victims, j].clamp(min=0), present[victims, j, None]) for j in range(m)]
        mean = torch.zeros((len(rows[0][0]), columns.stop - columns.start), dtype=torch.float64, device=table.device)
        for row, here in rows:
            mean += table[:, columns][row].double().masked_fill_(~here, 0.0)
        mean /= count[victims].clamp(min=1)
        square = torch.zeros_like(mean)
        if spread[victims].any():
            for row, here in rows:
                square += (table[:, columns][row].double() - mean).square_().masked_fill_(~here, 0.0)
        deviation = (square / (count[victims] - 1).clamp(min=1)).sqrt_()
        total = mean_factor.double()[victims, None] * mean + spread[victims] * deviation
        result[victims, columns] = total.to(table.dtype)
    return result
