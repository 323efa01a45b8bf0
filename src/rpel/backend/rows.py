"""Weighted sums and moments of rows.

How this works. A victim's rows 3, 7, 0, 9 and 4 are summed in blocks of `BLOCK` columns, whose sums stay in
the first cache. Four rows at a time are added in one pass over the block, which reads and writes the sums
once, and row 4 in a pass of its own (`_in_steps`). Within a column the rows are added one after the other,
in float64.

Moments add differences to the first row, here row 3, and their squares: σ² = (Σg² − (Σg)² / 5) / 4. Row 3
is among the rows, so it is never more than a few σ away from their mean, and little cancels.

The length of a block is a constant: of a loop of unknown length LLVM makes vectors, too, but does not enter
them where it must first compare many addresses. A row that is no multiple of a block ends with one that
overlaps the one before; those columns are computed twice, with the same bits. A table narrower than a block
is padded.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from rpel.backend import threads
from rpel.backend.compile import aligned, compiled, written
from rpel.types import Floats, Integers

BLOCK = 128  # columns
NARROW_VICTIMS = 1024  # whose rows are copied at once where a table is narrower than a block
FUSED = {"contract"}  # a product and a sum are rounded once


def _in_steps(first: str, before: list[str], each: str, sums: dict[str, str]) -> list[str]:
    """Write a loop over rows[first … count − 1] that adds four, two or one of them to sums of a block.

    Args:
        first: the first row.
        before: statements for each column.
        each: a statement for each row and column, of x0[c], x1[c], …, which the text calls x#.
        sums: what is added to the sum of each name, for each row.
    """
    lines = [f"j = {first}"]
    for step in (4, 2, 1):
        rows = [str(q) for q in range(step)]
        lines += [f"while j + {step} <= count:"]
        lines += [f"    x{q} = table[rows[j + {q}], start:]; f{q} = factors[j + {q}]" for q in rows]
        lines += [f"    for c in range({BLOCK}):", *(f"        {line}" for line in before)]
        lines += [f"        {each.replace('#', q)}" for q in rows]
        for name, term in sums.items():
            terms = " + ".join(term.replace("#", q) for q in rows)
            lines += [f"        {name}[c] = {name}[c] + {terms}"]
        lines += [f"    j += {step}"]
    return lines


def _write_weigh() -> Any:
    """Write kernel(table, rows, factors, count, start, total): Σ_j factors[j] · row j over one block."""
    return written([
        "def kernel(table, rows, factors, count, start, total):",
        f"    for c in range({BLOCK}): total[c] = 0.0",
        *(f"    {line}" for line in _in_steps("0", [], "w# = f# * x#[c]", {"total": "w#"})),
    ], FUSED)  # fmt: skip


def _write_deviations() -> Any:
    """Write kernel(table, rows, factors, count, start, first, second): Σ (row j − row 0) and its squares."""
    steps = _in_steps("1", ["own = o[c] * 1.0"], "g# = x#[c] - own", {"first": "g#", "second": "g# * g#"})
    return written([
        "def kernel(table, rows, factors, count, start, first, second):",
        f"    for c in range({BLOCK}): first[c] = 0.0; second[c] = 0.0",
        "    o = table[rows[0], start:]",
        *(f"    {line}" for line in steps),
    ], FUSED)  # fmt: skip


weigh_block, _deviations_of_block = _write_weigh(), _write_deviations()


def _combine_kernel(
    table: Floats, index: Integers, weights: Floats, left: int, right: int,
    listed: Integers, factors: Floats, sums: Floats, out: Floats,
) -> None:  # fmt: skip
    """out[i] = Σ_j weights[i, j] · table[index[i, j]] over some columns; weight 0 and −1 are not read.

    listed (m,), factors (m,) and sums (2, BLOCK) are scratch.
    """
    total = sums[0]
    for i in range(len(index)):
        count = 0
        for j in range(index.shape[1]):
            if index[i, j] >= 0 and weights[i, j] != 0.0:
                listed[count], factors[count] = index[i, j], weights[i, j]
                count += 1
        for begin in range(left, right, BLOCK):
            start = min(begin, table.shape[1] - BLOCK)
            weigh_block(table, listed, factors, count, start, total)
            result = out[i, start:]
            for c in range(BLOCK):
                result[c] = total[c]


def _moments_kernel(
    table: Floats, index: Integers, weights: Floats, left: int, right: int,
    listed: Integers, factors: Floats, sums: Floats, out: Floats,
) -> None:  # fmt: skip
    """out[i] = weights[i, 0] · μ + weights[i, 1] · σ over the present rows of index[i]; scratch as above.

    One row has no deviation, and no row counts as a row of zeros.
    """
    first, second = sums[0], sums[1]
    for i in range(len(index)):
        count = 0
        for j in range(index.shape[1]):
            if index[i, j] >= 0:
                listed[count] = index[i, j]
                count += 1
        if count == 0:
            out[i, left:right] = 0
            continue
        f0, f1, share, fewer = weights[i, 0], weights[i, 1], 1.0 / count, 1.0 / max(1, count - 1)
        for begin in range(left, right, BLOCK):
            start = min(begin, table.shape[1] - BLOCK)
            _deviations_of_block(table, listed, factors, count, start, first, second)
            own, result = table[listed[0], start:], out[i, start:]
            for c in range(BLOCK):
                off = first[c] * share  # of the mean from the first row
                variance = max(0.0, (second[c] - first[c] * off) * fewer)
                result[c] = f0 * (own[c] + off) + f1 * np.sqrt(variance)


_combine, _moments = compiled(_combine_kernel, FUSED), compiled(_moments_kernel, FUSED)


# --- which columns ------------------------------------------------------------------------------------------

Columns = Callable[[Integers, slice, int, int, Floats], None]
"""work(index, some, left, right, out) computes columns left … right − 1 of out for some victims,
whose index it is given."""


def over_columns(
    table: Floats, index: Integers, make: Callable[[Floats], Columns], out: Floats, small: bool
) -> None:
    """Compute out (h, d), a block of columns of all victims after the other, on all threads.

    Args:
        table: (n, d); a copy of its rows, padded with zeros, where it is narrower than a block.
        index: (h, m), −1 allowed.
        make: called with the table once for each share of a thread: makes scratch, and returns what computes.
        out: (h, d), where the result goes.
        small: whether one thread is enough.
    """
    h, d = out.shape
    if d < BLOCK:
        for first in range(0, h, NARROW_VICTIMS):
            some = slice(first, min(h, first + NARROW_VICTIMS))
            rows = np.unique(index[some])
            rows = rows[rows >= 0] if (rows >= 0).any() else np.zeros(1, np.int64)
            local = np.where(index[some] < 0, -1, np.searchsorted(rows, index[some]))
            wide, result = (
                np.zeros((len(rows), BLOCK), table.dtype),
                np.empty((len(local), BLOCK), table.dtype),
            )
            wide[:, :d] = table[rows]
            make(wide)(local, some, 0, BLOCK, result)
            out[some] = result[:, :d]
        return
    cut = threads.cut(len(table), h, d, table.itemsize)
    parts = -(-h // cut.chunk)

    def work(begin: int, end: int) -> None:
        run = make(table)
        for unit in range(begin, end):
            left, first = unit // parts * cut.columns, unit % parts * cut.chunk
            some = slice(first, min(h, first + cut.chunk))
            run(index[some], some, left, min(d, left + cut.columns), out[some])

    threads.run(work, cut.total, small=small)


def combine(table: Floats, index: Integers, weights: Floats, out: Floats, small: bool) -> None:
    """Compute out = Σ_j weights[i, j] · table[index[i, j]] (h, d); weight 0 and −1 are not read."""
    _weigh(_combine, table, index, weights, out, small)


def moments(table: Floats, index: Integers, factors: Floats, out: Floats, small: bool) -> None:
    """Compute out = factors[i, 0] · μ + factors[i, 1] · σ (h, d) over the present rows of index[i]."""
    _weigh(_moments, table, index, factors, out, small)


def _weigh(kernel: Any, table: Floats, index: Integers, weights: Floats, out: Floats, small: bool) -> None:
    m = index.shape[1]

    def make(table: Floats) -> Columns:
        scratch = np.empty(m, np.int64), np.ones(m), aligned(2, BLOCK, np.float64)
        return lambda index, some, left, right, out: kernel(
            table, index, weights[some], left, right, *scratch, out
        )

    over_columns(table, index, make, out, small)
