"""Order, written as vector instructions: comparators, the operations on ordered values, and ranks.

Law: comparators are "smaller, else the other" and its mirror: they hand every value on, so ±∞ is ordered and nothing is
lost. As in `vectors`, arrays are flat and contiguous and positions count elements.
"""

from typing import Any

from llvmlite import ir
from numba import types

from rpel.kernels.arguments import OPERATIONS, Operation
from rpel.kernels.cache import intrinsic
from rpel.kernels.sorting import network, ranks
from rpel.kernels.vectors import (
    Builder,
    cgutils,
    data_of,
    doubles,
    integer,
    load,
    spread,
    store,
    vector_of,
    zero,
)


@intrinsic
def count_below(ctx: Any, row: Any, m: Any, padded: Any, rank: Any) -> Any:
    """rank[j] = how many of row[0] … row[m − 1] are below row[j], for j < padded (a multiple of 16); float64, int64."""
    signature = types.void(row, m, padded, rank)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        data, result = data_of(context, builder, row, args[0]), data_of(context, builder, rank, args[3])
        vector, counts = doubles(4), ir.VectorType(ir.IntType(64), 4)
        with cgutils.for_range_slice(builder, integer(0), args[2], integer(16)) as (j, _):
            places = [builder.add(j, integer(4 * part)) for part in range(4)]
            values = [load(builder, data, place, vector) for place in places]
            totals = [cgutils.alloca_once(builder, counts) for _ in places]
            for total in totals:
                builder.store(ir.Constant(counts, [0] * 4), total)
            with cgutils.for_range_slice(builder, integer(0), args[1], integer(1)) as (other, _):
                pivot = spread(builder, builder.load(builder.gep(data, [other])), vector)
                for value, total in zip(values, totals, strict=True):
                    below = builder.sext(builder.fcmp_ordered("<", pivot, value), counts)
                    builder.store(builder.sub(builder.load(total), below), total)
            for place, total in zip(places, totals, strict=True):
                store(builder, builder.load(total), result, place)
        return context.get_dummy_value()

    return signature, codegen


def _exchange(builder: Builder, a: Any, b: Any) -> tuple[Any, Any]:
    """(lower, higher); one comparison decides both, so that no value is lost or doubled."""
    below = builder.fcmp_ordered("<", a, b)
    return builder.select(below, a, b), builder.select(below, b, a)


@intrinsic
def exchange_rows(ctx: Any, y: Any, low: Any, high: Any, columns: Any) -> Any:
    """Column by column, the lower value to y[low + c] and the higher to y[high + c]."""
    signature = types.void(y, low, high, columns)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        vector = vector_of(y)
        data = data_of(context, builder, y, args[0])
        with cgutils.for_range_slice(builder, integer(0), args[3], integer(vector.count)) as (c, _):
            below, above = builder.add(args[1], c), builder.add(args[2], c)
            lower, higher = _exchange(builder, load(builder, data, below, vector), load(builder, data, above, vector))
            store(builder, lower, data, below)
            store(builder, higher, data, above)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def operate(ctx: Any, y: Any, stride: Any, columns: Any, divisor: Any, z: Any, m: Any, f: Any, operation: Any) -> Any:
    """z[c] = the operation over y[r · stride + c], r < m. m, f and operation (its place in OPERATIONS) are literals.

    Straight-line code: m vectors are loaded, pass the network and are summed in ascending rank.
    """
    signature = types.void(y, stride, columns, divisor, z, m, f, operation)
    name = OPERATIONS[operation.literal_value]
    comparators = network(m.literal_value, f.literal_value, name)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        vector = vector_of(y)
        data, result = data_of(context, builder, y, args[0]), data_of(context, builder, z, args[4])
        scale = spread(builder, args[3], vector)
        with cgutils.for_range_slice(builder, integer(0), args[2], integer(vector.count)) as (c, _):
            starts = [builder.add(builder.mul(args[1], integer(r)), c) for r in range(m.literal_value)]
            values = [load(builder, data, start, vector) for start in starts]
            for a, b in comparators:
                values[a], values[b] = _exchange(builder, values[a], values[b])
            total = _total(builder, values, f.literal_value, name, vector)
            store(builder, builder.fdiv(total, scale), result, c)
        return context.get_dummy_value()

    return signature, codegen


def _total(builder: Builder, values: list[Any], f: int, operation: Operation, vector: Any) -> Any:
    """The sum, in ascending rank, of the values the operation keeps. For the median: of the middle one or two."""
    m = len(values)
    if operation == "meamed":
        values = _near_median(builder, values, f, vector)
    total = zero(vector)
    for rank in ranks(m, f, operation):
        total = builder.fadd(total, values[rank])
    return total


def _near_median(builder: Builder, values: list[Any], f: int, vector: Any) -> list[Any]:
    """The m − f values nearest to the median, the others 0.

    They are neighbours in rank. Rank r < f leaves at the bottom exactly when rank r + m − f is strictly nearer and
    enters at the top; so of two equally near values the lower stays.
    """
    m, kept = len(values), len(values) - f
    middle = builder.fadd(values[(m - 1) // 2], values[m // 2])
    median = builder.fmul(middle, ir.Constant(vector, [0.5] * vector.count))
    leaves = [
        builder.fcmp_ordered("<", builder.fsub(values[r + kept], median), builder.fsub(median, values[r]))
        for r in range(f)
    ]
    chosen = list(values)
    for r in range(f):
        chosen[r] = builder.select(leaves[r], zero(vector), chosen[r])
        chosen[r + kept] = builder.select(leaves[r], chosen[r + kept], zero(vector))
    return chosen
