"""Inner loops written as vector instructions, because their order of operations is a promise and their speed the point.

Laws:
- what is added to what, and in which lane, is written here and not left to an optimiser: a pair of rows gets the same
  bits in a tile of one and in a tile of seven;
- a column's value never depends on its place: either callers pad buffers to whole `BLOCK`s, or the remainder of a sweep
  does to single columns what its body does to vectors.

Arrays are flat and contiguous, positions count elements. A vector is 32 bytes: 8 float32 or 4 float64.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils

from rpel.kernels.cache import intrinsic

BLOCK = 64  # columns every padded buffer is a multiple of: 8 vectors of float32, 16 of float64
TILE = 7  # rows one anchor is compared with at a time: their sums, the anchor and the differences fill 16 registers
_WIDE = 8  # vectors summed side by side when rows are added: hides the latency of one addition

Builder = Any  # llvmlite and numba have no types
cgutils: Any = numba_cgutils


def _lanes(array: Any) -> int:
    return 8 if array.dtype.bitwidth == 32 else 4


def vector_of(array: Any) -> Any:
    return ir.VectorType(ir.FloatType() if array.dtype.bitwidth == 32 else ir.DoubleType(), _lanes(array))


def data_of(context: Any, builder: Builder, array_type: Any, value: Any) -> Any:
    return context.make_array(array_type)(context, builder, value).data


def _bytes(vector: Any) -> int:
    """Rows start anywhere: no more than an element's alignment may be assumed."""
    return 4 if isinstance(vector.element, ir.FloatType) else 8


def load(builder: Builder, data: Any, position: Any, vector: Any) -> Any:
    pointer = builder.bitcast(builder.gep(data, [position]), vector.as_pointer())
    return builder.load(pointer, align=_bytes(vector))


def store(builder: Builder, value: Any, data: Any, position: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [position]), value.type.as_pointer())
    builder.store(value, pointer, align=_bytes(value.type))


def integer(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def spread(builder: Builder, scalar: Any, vector: Any) -> Any:
    """The scalar in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def zero(vector: Any) -> Any:
    return ir.Constant(vector, [0.0] * vector.count)


def doubles(lanes: int) -> Any:
    return ir.VectorType(ir.DoubleType(), lanes)


def _load_double(builder: Builder, array: Any, data: Any, position: Any, lanes: int) -> Any:
    """Elements of a float32 or float64 array as float64."""
    vector = ir.VectorType(vector_of(array).element, lanes)
    value = load(builder, data, position, vector)
    return value if array.dtype.bitwidth == 64 else builder.fpext(value, doubles(lanes))


def _store_double(builder: Builder, value: Any, array: Any, data: Any, position: Any) -> None:
    """float64 lanes, rounded to the array's type."""
    vector = ir.VectorType(vector_of(array).element, value.type.count)
    store(builder, value if array.dtype.bitwidth == 64 else builder.fptrunc(value, vector), data, position)


def _sweep(builder: Builder, columns: Any, body: Callable[[Any, int, int], None]) -> None:
    """body(c, parts, lanes) over all columns: steps of 8 vectors of 4, then of one vector, then of one column."""
    start = integer(0)
    for parts, lanes in ((_WIDE, 4), (1, 4), (1, 1)):
        step = integer(parts * lanes)
        stop = builder.sub(columns, builder.srem(builder.sub(columns, start), step))
        with cgutils.for_range_slice(builder, start, stop, step) as (c, _):
            body(c, parts, lanes)
        start = stop


@intrinsic
def add_pair_sums(ctx: Any, x: Any, anchor: Any, members: Any, first: Any, columns: Any, width: Any, out: Any) -> Any:
    """out[first + j] += Σ_c (x[anchor + c] − x[members[first + j] + c])² for j < width (a literal), c < columns.

    Per pair: lane l sums the columns ≡ l (mod 4) in ascending order, then (l0 + l1) + (l2 + l3).
    """
    signature = types.void(x, anchor, members, first, columns, width, out)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        vector = vector_of(x)
        data, others = data_of(context, builder, x, args[0]), data_of(context, builder, members, args[2])
        result = data_of(context, builder, out, args[6])
        slots = [builder.add(args[3], integer(j)) for j in range(width.literal_value)]
        rows = [builder.gep(data, [builder.load(builder.gep(others, [slot]))]) for slot in slots]
        own = builder.gep(data, [args[1]])
        sums = [cgutils.alloca_once_value(builder, zero(vector)) for _ in rows]
        with cgutils.for_range_slice(builder, integer(0), args[4], integer(vector.count)) as (c, _):
            left = load(builder, own, c, vector)
            for row, total in zip(rows, sums, strict=True):
                gap = builder.fsub(left, load(builder, row, c, vector))
                square = builder.fmul(gap, gap, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), square, flags=("contract",)), total)
        for slot, total in zip(slots, sums, strict=True):
            lanes = [builder.extract_element(builder.load(total), ir.Constant(ir.IntType(32), at)) for at in range(4)]
            both = builder.fadd(builder.fadd(lanes[0], lanes[1]), builder.fadd(lanes[2], lanes[3]))
            target = builder.gep(result, [slot])
            builder.store(builder.fadd(builder.load(target), both), target)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_rows(ctx: Any, x: Any, rows: Any, first: Any, count: Any, stride: Any, columns: Any, y: Any, at: Any) -> Any:
    """y[at + c] = Σ_j x[rows[first + j] · stride + c] for c < columns, j < count: one by one, in the order given.

    One running sum per column: finite values may overflow to ±∞ on the way, but ∞ never meets −∞, so no NaN arises.
    """
    signature = types.void(x, rows, first, count, stride, columns, y, at)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        vector = vector_of(x)
        wide = vector.count * _WIDE
        data, picks = data_of(context, builder, x, args[0]), data_of(context, builder, rows, args[1])
        result = data_of(context, builder, y, args[6])
        stop = builder.add(args[2], args[3])
        with cgutils.for_range_slice(builder, integer(0), args[5], integer(wide)) as (c, _):
            sums = [cgutils.alloca_once(builder, vector) for _ in range(_WIDE)]
            for total in sums:
                builder.store(zero(vector), total)
            with cgutils.for_range_slice(builder, args[2], stop, integer(1)) as (j, _):
                row = builder.sext(builder.load(builder.gep(picks, [j])), ir.IntType(64))
                start = builder.add(builder.mul(row, args[4]), c)
                for part, total in enumerate(sums):
                    value = load(builder, data, builder.add(start, integer(part * vector.count)), vector)
                    builder.store(builder.fadd(builder.load(total), value), total)
            for part, total in enumerate(sums):
                position = builder.add(builder.add(args[7], c), integer(part * vector.count))
                store(builder, builder.load(total), result, position)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def copy(ctx: Any, source: Any, start: Any, count: Any, target: Any, at: Any) -> Any:
    """target[at + c] = source[start + c] for c < count; both of one type, apart in memory."""
    signature = types.void(source, start, count, target, at)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        left = builder.gep(data_of(context, builder, source, args[0]), [args[1]])
        right = builder.gep(data_of(context, builder, target, args[3]), [args[4]])
        cgutils.raw_memcpy(builder, right, left, args[2], integer(source.dtype.bitwidth // 8))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def convert(ctx: Any, source: Any, start: Any, count: Any, target: Any, at: Any) -> Any:
    """target[at + c] = source[start + c] in float64 for c < count."""
    signature = types.void(source, start, count, target, at)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        left, right = data_of(context, builder, source, args[0]), data_of(context, builder, target, args[3])

        def body(c: Any, parts: int, lanes: int) -> None:
            for part in range(parts):
                column = builder.add(c, integer(part * lanes))
                value = _load_double(builder, source, left, builder.add(args[1], column), lanes)
                _store_double(builder, value, target, right, builder.add(args[4], column))

        _sweep(builder, args[2], body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def weigh_rows(
    ctx: Any, x: Any, starts: Any, weights: Any, count: Any, offset: Any, columns: Any, y: Any, at: Any
) -> Any:
    """y[at + c] = Σ_j weights[j] · x[starts[j] + offset + c] for c < columns, j < count, in float64, row after row."""
    signature = types.void(x, starts, weights, count, offset, columns, y, at)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        data, firsts, factors, result = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 1, 2, 6))

        def body(c: Any, parts: int, lanes: int) -> None:
            sums = _accumulators(builder, parts, lanes)
            with cgutils.for_range_slice(builder, integer(0), args[3], integer(1)) as (j, _):
                factor = spread(builder, builder.load(builder.gep(factors, [j])), doubles(lanes))
                row = builder.add(builder.load(builder.gep(firsts, [j])), builder.add(args[4], c))
                for part, total in enumerate(sums):
                    value = _load_double(builder, x, data, builder.add(row, integer(part * lanes)), lanes)
                    product = builder.fmul(factor, value, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            for part, total in enumerate(sums):
                position = builder.add(builder.add(args[7], c), integer(part * lanes))
                _store_double(builder, builder.load(total), y, result, position)

        _sweep(builder, args[5], body)
        return context.get_dummy_value()

    return signature, codegen


def _accumulators(builder: Builder, parts: int, lanes: int) -> list[Any]:
    """Sums that start at zero here and live in registers."""
    sums = [cgutils.alloca_once(builder, doubles(lanes)) for _ in range(parts)]
    for total in sums:
        builder.store(zero(doubles(lanes)), total)
    return sums


@intrinsic
def moments_of_rows(
    ctx: Any, x: Any, starts: Any, count: Any, offset: Any, columns: Any, mean: Any, std: Any, y: Any, at: Any
) -> Any:
    """y[at + c] = mean · μ + std · σ over x[starts[j] + offset + c], j < count, in float64.

    Two passes: μ, then squared deviations from it, divided by count − 1. `std` 0 skips the second.
    """
    signature = types.void(x, starts, count, offset, columns, mean, std, y, at)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        data, firsts, result = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 1, 7))
        number = builder.sitofp(args[2], ir.DoubleType())
        fewer = builder.fsub(number, ir.Constant(ir.DoubleType(), 1.0))
        wanted = builder.fcmp_ordered("!=", args[6], ir.Constant(ir.DoubleType(), 0.0))

        def add(c: Any, lanes: int, sums: list[Any], term: Callable[[int, Any], Any]) -> None:
            with cgutils.for_range_slice(builder, integer(0), args[2], integer(1)) as (j, _):
                row = builder.add(builder.load(builder.gep(firsts, [j])), builder.add(args[3], c))
                for part, total in enumerate(sums):
                    value = _load_double(builder, x, data, builder.add(row, integer(part * lanes)), lanes)
                    added = builder.fadd(builder.load(total), term(part, value), flags=("contract",))
                    builder.store(added, total)

        def body(c: Any, parts: int, lanes: int) -> None:
            vector = doubles(lanes)
            sums, squares = _accumulators(builder, parts, lanes), _accumulators(builder, parts, lanes)
            add(c, lanes, sums, lambda part, value: value)
            means = [builder.fdiv(builder.load(total), spread(builder, number, vector)) for total in sums]

            def square(part: int, value: Any) -> Any:
                gap = builder.fsub(value, means[part])
                return builder.fmul(gap, gap, flags=("contract",))

            with builder.if_then(wanted):
                add(c, lanes, squares, square)
                kind = ir.FunctionType(vector, [vector])
                root = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{lanes}f64")
                for total in squares:
                    variance = builder.fdiv(builder.load(total), spread(builder, fewer, vector))
                    deviation = builder.call(root, [variance])
                    builder.store(builder.fmul(deviation, spread(builder, args[6], vector)), total)
            for part, total in enumerate(squares):
                scaled = builder.fmul(means[part], spread(builder, args[5], vector))
                position = builder.add(builder.add(args[8], c), integer(part * lanes))
                _store_double(builder, builder.fadd(scaled, builder.load(total)), y, result, position)

        _sweep(builder, args[4], body)
        return context.get_dummy_value()

    return signature, codegen
