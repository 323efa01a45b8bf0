"""Inner loops written as vector instructions,
because their order of operations is a promise and their speed the point.

Invariants:
- what is added to what, and in which lane, is written here and not left to an optimiser: a pair of rows gets
  the same bits in a tile of one and in a tile of twelve;
- a column's value never depends on its place: either callers pad buffers to whole `BLOCK`s, or the remainder
  of a sweep does to single columns what its body does to vectors.

Each is here because it gains more than 15 % over the loop that numba makes of the same words: `weigh_rows` is
11 times as fast, `moments_of_rows` 7, `add_rows` 2.1, `count_below` 1.8 (m = 31); `copy` makes the
coordinates of a large model (d = 1.3 million) 1.4 times as fast and `convert` its distances 1.2 times,
`fetch` the distances among many nodes 1.2 times.
Sums of squares in lanes and sorting by a network a loop cannot say.

Arrays are contiguous, positions count elements. A vector is 64 bytes where the processor has them (AVX-512:
aggregating takes three quarters of the time, convolutions half), else 32. So the last bits of a distance, or
of a convolution's gradient, may differ between such processors;
the features of a processor are part of the name of its kernels' folder.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic

WIDE = bool(get_host_cpu_features().get("avx512f", False))
_FUSED = bool(get_host_cpu_features().get("fma", False))
BYTES = 64 if WIDE else 32  # of a vector
LANES = BYTES // 8  # float64 values in it
BLOCK = BYTES // 4  # columns every padded buffer is a multiple of: a vector of float32, two of float64
# rows compared with two anchors at a time: with their sums they fill the 32 or 16 registers
TILE = 12 if WIDE else 6
# of tiles: fewer are compiled sooner, and leave more rests
_WIDTHS = (12, 8, 4, 2, 1) if WIDE else (6, 5, 4, 3, 2, 1)
FULL = 4 if WIDE else 1  # what the widths of tiles are best multiples of: few sums wait for each other
_WIDE = 8  # vectors summed side by side when rows are added: hides the latency of one addition

Builder = Any  # llvmlite and numba have no types
cgutils: Any = numba_cgutils
_DOUBLE = ir.DoubleType()


def instruction(*literals: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that writes instructions, f(builder, …), one that compiled functions call,
    without the builder.

    It is given the addresses of arrays, the values of numbers,
    and as Python's numbers those named in `literals`.
    """

    def made(emit: Callable[..., None]) -> Callable[..., None]:
        names = emit.__code__.co_varnames[1 : emit.__code__.co_argcount]

        @wraps(emit)
        def typed(_: Any, *kinds: Any) -> Any:
            def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
                given = list(args)
                for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
                    if isinstance(kind, types.Array):
                        given[place] = context.make_array(kind)(context, builder, args[place]).data
                    elif name in literals:
                        given[place] = kind.literal_value
                emit(builder, *given)
                return context.get_dummy_value()

            return types.void(*kinds), codegen

        return cast(Callable[..., None], intrinsic(prefer_literal=True)(typed))

    return made


def vector_of(data: Any, lanes: int | None = None) -> Any:
    """A vector of an array's elements: of 32 bytes, or of so many lanes."""
    return ir.VectorType(data.type.pointee, lanes or BYTES // _bytes(data.type.pointee))


def _bytes(element: Any) -> int:
    return {"float": 4, "double": 8}.get(str(element)) or int(element.width) // 8


def load(builder: Builder, data: Any, position: Any, vector: Any) -> Any:
    """Rows start anywhere: no more than an element's alignment is assumed."""
    pointer = builder.bitcast(builder.gep(data, [position]), vector.as_pointer())
    return builder.load(pointer, align=_bytes(vector.element))


def store(builder: Builder, value: Any, data: Any, position: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [position]), value.type.as_pointer())
    builder.store(value, pointer, align=_bytes(value.type.element))


def integer(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def element(builder: Builder, data: Any, position: Any) -> Any:
    return builder.load(builder.gep(data, [position]))


def loop(builder: Builder, start: Any, stop: Any, step: int = 1) -> Any:
    """A context manager: its first value counts from start to stop."""
    return cgutils.for_range_slice(builder, start, stop, integer(step))


def spread(builder: Builder, scalar: Any, vector: Any) -> Any:
    """The scalar in every lane."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def zero(vector: Any) -> Any:
    return ir.Constant(vector, [0.0] * vector.count)


def add_product(builder: Builder, total: Any, a: Any, b: Any) -> Any:
    """total + a · b, rounded once where the processor can."""
    return builder.fadd(total, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


def _doubles(lanes: int) -> Any:
    return ir.VectorType(_DOUBLE, lanes)


def _load_double(builder: Builder, data: Any, position: Any, lanes: int) -> Any:
    """Elements of a float32 or float64 array as float64."""
    return _as_double(builder, load(builder, data, position, vector_of(data, lanes)))


def _as_double(builder: Builder, value: Any) -> Any:
    return value if value.type.element == _DOUBLE else builder.fpext(value, _doubles(value.type.count))


def _store_double(builder: Builder, value: Any, data: Any, position: Any) -> None:
    """float64 lanes, rounded to the array's type."""
    narrow = (
        value if data.type.pointee == _DOUBLE else builder.fptrunc(value, vector_of(data, value.type.count))
    )
    store(builder, narrow, data, position)


def _sweep(
    builder: Builder, columns: Any, body: Callable[[Any, int, int], None], steps: tuple[tuple[int, int], ...]
) -> None:
    """body(c, parts, lanes) over all columns: as many (parts × lanes) columns at a time as the first step
    says, what is left by the next."""
    start = integer(0)
    for parts, lanes in steps:
        step = parts * lanes
        stop = builder.sub(columns, builder.srem(builder.sub(columns, start), integer(step)))
        with loop(builder, start, stop, step) as (c, _):
            body(c, parts, lanes)
        start = stop


_ANY = ((_WIDE, LANES), (1, LANES), (1, 1))  # float64 lanes for any number of columns


def _accumulators(builder: Builder, parts: int, vector: Any) -> list[Any]:
    """Sums that start at zero here and live in registers."""
    sums = [cgutils.alloca_once(builder, vector) for _ in range(parts)]
    for total in sums:
        builder.store(zero(vector), total)
    return sums


def _after(builder: Builder, position: Any, part: int, lanes: int) -> Any:
    return builder.add(position, integer(part * lanes))


# --- rows in pairs ------------------------------------------------------------------------------------------


@instruction("both")
def add_pair_sums(
    builder: Builder, x: Any, stride: Any, anchor: Any, members: Any, first: Any, columns: Any, width: Any,
    both: int, out: Any,
) -> None:  # fmt: skip
    """out[first + j] += Σ_c (x_a[c] − x_b[c])² for j < width ≤ TILE, c < columns, of rows a = anchor[0] and
    b = members[first + j] of x, `stride` apart.

    `both` (a literal): the same for a second anchor, anchor[1], to out[first + width + j], each member read
    once. Per pair: lane l of a vector sums the columns ≡ l in ascending order, in the type of x;
    see `_add_lanes`.
    """

    def row(positions: Any, place: Any) -> Any:
        return builder.gep(x, [builder.mul(element(builder, positions, place), stride)])

    def tile(begin: Any, wide: int) -> None:
        """Members begin … begin + wide − 1 of the tile, whose sums stay in registers."""
        vector, at = vector_of(x), builder.add(first, begin)
        rows = [row(members, builder.add(at, integer(j))) for j in range(wide)]
        own = [row(anchor, integer(a)) for a in range(1 + both)]
        sums = [_accumulators(builder, wide, vector) for _ in own]
        with loop(builder, integer(0), columns, vector.count) as (c, _):
            left = [load(builder, start, c, vector) for start in own]
            for j, start in enumerate(rows):
                right = load(builder, start, c, vector)
                for value, totals in zip(left, sums, strict=True):
                    gap = builder.fsub(value, right)
                    builder.store(add_product(builder, builder.load(totals[j]), gap, gap), totals[j])
        for a, totals in enumerate(sums):
            target = builder.add(at, builder.mul(width, integer(a)))
            values = [builder.load(total) for total in totals]
            fours = len(values) // 4 * 4
            for j in range(0, fours, 4):
                _add_lanes_of_four(builder, values[j : j + 4], out, builder.add(target, integer(j)))
            for j in range(fours, len(values)):
                _add_lanes(builder, values[j], builder.gep(out, [builder.add(target, integer(j))]))

    start = integer(0)
    for wide in _WIDTHS:
        stop = builder.sub(width, builder.srem(builder.sub(width, start), integer(wide)))
        with loop(builder, start, stop, wide) as (begin, _):
            tile(begin, wide)
        start = stop


@instruction()
def add_pair_sum(builder: Builder, x: Any, stride: Any, columns: Any, out: Any) -> None:
    """out[0] += what `add_pair_sums` finds for the rows 0 and 1 of x: less code for a pair now and then."""
    vector = vector_of(x)
    (total,) = _accumulators(builder, 1, vector)
    with loop(builder, integer(0), columns, vector.count) as (c, _):
        gap = builder.fsub(load(builder, x, c, vector), load(builder, x, builder.add(stride, c), vector))
        if _FUSED:  # said, since here the compiler would not fuse by itself what it may
            more = _call(builder, f"llvm.fma.v{vector.count}f64", gap, gap, builder.load(total))
        else:
            more = add_product(builder, builder.load(total), gap, gap)
        builder.store(more, total)
    _add_lanes(builder, builder.load(total), out)


def _add_lanes(builder: Builder, total: Any, target: Any) -> None:
    """target += the lanes: halves while there are more than four, then (l0 + l1) + (l2 + l3)."""
    total = _four_lanes(builder, total)
    lanes = [builder.extract_element(total, ir.Constant(ir.IntType(32), at)) for at in range(4)]
    both = builder.fadd(builder.fadd(lanes[0], lanes[1]), builder.fadd(lanes[2], lanes[3]))
    if both.type != target.type.pointee:
        both = builder.fpext(both, target.type.pointee)
    builder.store(builder.fadd(builder.load(target), both), target)


def _add_lanes_of_four(builder: Builder, totals: list[Any], out: Any, at: Any) -> None:
    """The same for four vectors and out[at] … out[at + 3], in the same order: they are transposed,
    not taken apart."""
    a, b, c, d = (_four_lanes(builder, total) for total in totals)
    first, second = (_add_picked(builder, *two, (0, 4, 2, 6), (1, 5, 3, 7)) for two in ((a, b), (c, d)))
    sums = _add_picked(builder, first, second, (0, 1, 4, 5), (2, 3, 6, 7))
    _store_double(
        builder, builder.fadd(_load_double(builder, out, at, 4), _as_double(builder, sums)), out, at
    )


def _four_lanes(builder: Builder, total: Any) -> Any:
    while total.type.count > 4:
        half = total.type.count // 2
        total = _add_picked(builder, total, total, tuple(range(half)), tuple(range(half, 2 * half)))
    return total


def _add_picked(builder: Builder, a: Any, b: Any, left: tuple[int, ...], right: tuple[int, ...]) -> Any:
    """The sum of two choices among the lanes of a and, behind them, b."""
    kind = ir.VectorType(ir.IntType(32), len(left))
    return builder.fadd(
        *(builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes))) for lanes in (left, right))
    )


@instruction()
def count_below(builder: Builder, row: Any, m: Any, padded: Any, rank: Any) -> None:
    """rank[j] = how many of row[0] … row[m − 1] are below row[j], for j < padded (a multiple of 16); float64,
    int64."""
    vector, counts = _doubles(4), ir.VectorType(ir.IntType(64), 4)
    with loop(builder, integer(0), padded, 16) as (j, _):
        places = [_after(builder, j, part, 4) for part in range(4)]
        values = [load(builder, row, place, vector) for place in places]
        totals = [cgutils.alloca_once(builder, counts) for _ in places]
        for total in totals:
            builder.store(ir.Constant(counts, [0] * 4), total)
        with loop(builder, integer(0), m) as (other, _):
            pivot = spread(builder, element(builder, row, other), vector)
            for value, total in zip(values, totals, strict=True):
                below = builder.sext(builder.fcmp_ordered("<", pivot, value), counts)
                builder.store(builder.sub(builder.load(total), below), total)
        for place, total in zip(places, totals, strict=True):
            store(builder, builder.load(total), rank, place)


# --- rows brought near --------------------------------------------------------------------------------------


@instruction()
def copy(builder: Builder, source: Any, start: Any, count: Any, target: Any, at: Any) -> None:
    """target[at + c] = source[start + c] for c < count; both of one type, apart in memory."""
    lanes = vector_of(source).count

    def body(c: Any, parts: int, lanes: int) -> None:
        for part in range(parts):
            column = _after(builder, c, part, lanes)
            value = load(builder, source, builder.add(start, column), vector_of(source, lanes))
            store(builder, value, target, builder.add(at, column))

    _sweep(builder, count, body, ((_WIDE, lanes), (1, lanes), (1, 1)))


@instruction()
def convert(builder: Builder, source: Any, start: Any, count: Any, target: Any, at: Any) -> None:
    """target[at + c] = source[start + c] in the target's type for c < count."""

    def body(c: Any, parts: int, lanes: int) -> None:
        for part in range(parts):
            column = _after(builder, c, part, lanes)
            value = _load_double(builder, source, builder.add(start, column), lanes)
            _store_double(builder, value, target, builder.add(at, column))

    _sweep(builder, count, body, _ANY)


@instruction()
def fetch(builder: Builder, x: Any, start: Any, count: Any) -> None:
    """Have x[start] … x[start + count − 1] brought to the second cache meanwhile."""
    byte, size = ir.IntType(8).as_pointer(), integer(_bytes(x.type.pointee))
    data = builder.bitcast(x, byte)
    kind = ir.FunctionType(ir.VoidType(), [byte] + [ir.IntType(32)] * 3)
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    begin, end = builder.mul(start, size), builder.mul(builder.add(start, count), size)
    flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 2, 1)]  # to read, soon, data
    with loop(builder, begin, end, 64) as (at, _):
        builder.call(prefetch, [builder.gep(data, [at]), *flags])


# --- sums of rows -------------------------------------------------------------------------------------------


@instruction()
def add_rows(
    builder: Builder, x: Any, rows: Any, first: Any, count: Any, stride: Any, columns: Any, y: Any, at: Any
) -> None:
    """y[at + c] = Σ_j x[rows[first + j] · stride + c] for j < count, one by one, in the order given; c <
    columns, a multiple of `BLOCK`.

    One running sum per column: finite values may overflow to ±∞ on the way, but ∞ never meets −∞,
    so no NaN arises.
    """
    vector, stop = vector_of(x), builder.add(first, count)

    def body(c: Any, parts: int, lanes: int) -> None:
        sums = _accumulators(builder, parts, vector)
        with loop(builder, first, stop) as (j, _):
            row = builder.sext(element(builder, rows, j), ir.IntType(64))
            start = builder.add(builder.mul(row, stride), c)
            for part, total in enumerate(sums):
                value = load(builder, x, _after(builder, start, part, lanes), vector)
                builder.store(builder.fadd(builder.load(total), value), total)
        for part, total in enumerate(sums):
            store(builder, builder.load(total), y, _after(builder, builder.add(at, c), part, lanes))

    _sweep(builder, columns, body, ((_WIDE, vector.count), (1, vector.count)))


@instruction()
def weigh_rows(
    builder: Builder,
    x: Any,
    starts: Any,
    weights: Any,
    count: Any,
    offset: Any,
    columns: Any,
    y: Any,
    at: Any,
) -> None:
    """y[at + c] = Σ_j weights[j] · x[starts[j] + offset + c] for c < columns, j < count, in float64,
    row after row."""

    def body(c: Any, parts: int, lanes: int) -> None:
        sums = _accumulators(builder, parts, _doubles(lanes))
        with loop(builder, integer(0), count) as (j, _):
            factor = spread(builder, element(builder, weights, j), _doubles(lanes))
            row = builder.add(element(builder, starts, j), builder.add(offset, c))
            for part, total in enumerate(sums):
                value = _load_double(builder, x, _after(builder, row, part, lanes), lanes)
                builder.store(add_product(builder, builder.load(total), factor, value), total)
        for part, total in enumerate(sums):
            _store_double(builder, builder.load(total), y, _after(builder, builder.add(at, c), part, lanes))

    _sweep(builder, columns, body, _ANY)


@instruction()
def moments_of_rows(
    builder: Builder,
    x: Any,
    starts: Any,
    count: Any,
    offset: Any,
    columns: Any,
    mean: Any,
    std: Any,
    y: Any,
    at: Any,
) -> None:
    """y[at + c] = mean · μ + std · σ over x[starts[j] + offset + c], j < count, in float64.

    Two passes: μ, then squared deviations from it. `std` 0 skips the second. No vector is divided: that takes
    as long as adding eight rows.
    """
    number, one = builder.sitofp(count, _DOUBLE), ir.Constant(_DOUBLE, 1.0)
    inverse = builder.fdiv(one, number)
    fewer = _call(builder, "llvm.sqrt.f64", builder.fsub(number, one))
    wanted = builder.fcmp_ordered("!=", std, ir.Constant(_DOUBLE, 0.0))
    scale = builder.fdiv(std, fewer)

    def add(c: Any, lanes: int, sums: list[Any], term: Callable[[int, Any], Any]) -> None:
        with loop(builder, integer(0), count) as (j, _):
            row = builder.add(element(builder, starts, j), builder.add(offset, c))
            for part, total in enumerate(sums):
                value = _load_double(builder, x, _after(builder, row, part, lanes), lanes)
                added = builder.fadd(builder.load(total), term(part, value), flags=("contract",))
                builder.store(added, total)

    def body(c: Any, parts: int, lanes: int) -> None:
        vector = _doubles(lanes)
        sums, squares = _accumulators(builder, parts, vector), _accumulators(builder, parts, vector)
        add(c, lanes, sums, lambda part, value: value)
        means = [_quotient(builder, builder.load(total), number, inverse) for total in sums]

        def square(part: int, value: Any) -> Any:
            gap = builder.fsub(value, means[part])
            return builder.fmul(gap, gap, flags=("contract",))

        with builder.if_then(wanted):
            add(c, lanes, squares, square)
            for total in squares:
                root = _call(builder, f"llvm.sqrt.v{lanes}f64", builder.load(total))
                builder.store(builder.fmul(root, spread(builder, scale, vector)), total)
        for part, total in enumerate(squares):
            scaled = builder.fmul(means[part], spread(builder, mean, vector))
            value = builder.fadd(scaled, builder.load(total))
            _store_double(builder, value, y, _after(builder, builder.add(at, c), part, lanes))

    _sweep(builder, columns, body, _ANY)


def _call(builder: Builder, name: str, *values: Any) -> Any:
    """An intrinsic function of LLVM."""
    kind = ir.FunctionType(values[0].type, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _quotient(builder: Builder, total: Any, number: Any, inverse: Any) -> Any:
    """total / number, a whole number, as a division rounds it where that is a value: a product,
    and what it lacks."""
    vector = total.type
    if not _FUSED:
        return builder.fdiv(total, spread(builder, number, vector))
    near = builder.fmul(total, spread(builder, inverse, vector))
    name = f"llvm.fma.v{vector.count}f64"
    lacking = _call(builder, name, builder.fneg(near), spread(builder, number, vector), total)
    found = _call(builder, name, lacking, spread(builder, inverse, vector), near)
    return builder.select(builder.fcmp_unordered("uno", found, found), near, found)  # ∞ − ∞
