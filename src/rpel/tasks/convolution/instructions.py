"""Vector instructions for the inner loops of `windows`, written down because no optimiser finds them by itself.

Invariants:
- what is added to what, and in which order, is written here, so results repeat to the bit;
- reads and writes come in whole vectors of `LANES` values: what lies beyond a run of values meets a factor of zero or
  is dropped by the caller, and buffers end in `SPARE` values more than they hold;
- arrays are flat and contiguous, positions count elements.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils

from rpel.kernels.cache import intrinsic

LANES = 8
MOST = 3  # vectors of filters at once: with four sums each, their taps and a pixel they fill the sixteen registers
SPARE = MOST * LANES
NOBODY = 4  # the winner of a window in which no sum is positive

Builder = Any  # llvmlite has no types
cgutils: Any = untyped_cgutils


def _instruction(function: Callable[..., Any]) -> Any:
    """numba's intrinsic; callers leave out the first argument."""
    return intrinsic(function)


def _vector(array: Any) -> Any:
    return ir.VectorType(ir.FloatType() if array.dtype.bitwidth == 32 else ir.DoubleType(), LANES)


def _data(context: Any, builder: Builder, array_type: Any, value: Any) -> Any:
    return context.make_array(array_type)(context, builder, value).data


def _int(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _pointer(builder: Builder, data: Any, at: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _load(builder: Builder, data: Any, at: Any, kind: Any) -> Any:
    return builder.load(_pointer(builder, data, at, kind), align=4)


def _store(builder: Builder, value: Any, data: Any, at: Any, align: int = 4) -> None:
    builder.store(value, _pointer(builder, data, at, value.type), align=align)


def _spread(builder: Builder, scalar: Any, kind: Any) -> Any:
    """The scalar in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _all(ir.VectorType(ir.IntType(32), LANES), 0))


def _add_product(builder: Builder, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


@_instruction
def pool_window(
    ctx: Any, image: Any, at: Any, row: Any, channels: Any, k: Any, weights: Any, first: Any, bias: Any, bias_at: Any,
    vectors: Any, best: Any, best_at: Any, winner: Any, winner_at: Any,
) -> Any:  # fmt: skip
    """The 2 × 2 window whose first patch starts at image[at]: per filter the largest of the four sums, and whose it is.

    best[best_at + j] = max(0, largest), winner[winner_at + j] = 0 … 3 in reading order, or NOBODY if not positive.
    weights[first:] are (k, k · channels, vectors · LANES); `vectors` is a literal. Sums run over the patch in order.
    """
    signature = types.void(
        image, at, row, channels, k, weights, first, bias, bias_at, vectors, best, best_at, winner, winner_at
    )

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        kind, parts = _vector(image), vectors.literal_value
        source, table = _data(context, builder, image, args[0]), _data(context, builder, weights, args[5])
        start, row_, channels_, k_ = args[1:5]
        run = builder.mul(k_, channels_)
        corners = [start, builder.add(start, channels_), builder.add(start, row_)]
        corners.append(builder.add(corners[2], channels_))
        offset = _data(context, builder, bias, args[7])
        lift = [_load(builder, offset, builder.add(args[8], _int(p * LANES)), kind) for p in range(parts)]
        sums = [[cgutils.alloca_once_value(builder, value) for value in lift] for _ in corners]
        with cgutils.for_range_slice(builder, _int(0), k_, _int(1)) as (ky, _):
            line = builder.mul(ky, row_)
            begin = [builder.add(corner, line) for corner in corners]
            here = builder.add(args[6], builder.mul(builder.mul(ky, run), _int(parts * LANES)))
            with cgutils.for_range_slice(builder, _int(0), run, _int(1)) as (j, _):
                place = builder.add(here, builder.mul(j, _int(parts * LANES)))
                taps = [_load(builder, table, builder.add(place, _int(p * LANES)), kind) for p in range(parts)]
                for totals, corner in zip(sums, begin, strict=True):
                    pixel = _spread(builder, builder.load(builder.gep(source, [builder.add(corner, j)])), kind)
                    for total, tap in zip(totals, taps, strict=True):
                        builder.store(_add_product(builder, builder.load(total), pixel, tap), total)
        values = builder.gep(_data(context, builder, best, args[10]), [args[11]])
        winners = builder.gep(_data(context, builder, winner, args[12]), [args[13]])
        for p in range(parts):
            four = [builder.load(totals[p]) for totals in sums]
            _keep_largest(builder, four, kind, (values, winners), _int(p * LANES))
        return context.get_dummy_value()

    return signature, codegen


def _keep_largest(builder: Builder, sums: list[Any], kind: Any, results: tuple[Any, Any], at: Any) -> None:
    """The first largest of four, rectified, and its number; NaN is neither larger nor smaller and so stays visible."""
    number = ir.VectorType(ir.IntType(32), LANES)
    largest, who = sums[0], _all(number, 0)
    for q, total in enumerate(sums[1:], 1):
        wins = builder.fcmp_ordered(">", total, largest)
        largest, who = builder.select(wins, total, largest), builder.select(wins, _all(number, q), who)
    idle = builder.fcmp_ordered("<=", largest, _all(kind, 0.0))
    _store(builder, builder.select(idle, _all(kind, 0.0), largest), results[0], at)
    who = builder.trunc(builder.select(idle, _all(number, NOBODY), who), ir.VectorType(ir.IntType(8), LANES))
    _store(builder, who, results[1], at, align=1)


@_instruction
def add_runs(
    ctx: Any, total: Any, at: Any, stride: Any, source: Any, shift: Any, jump: Any, begins: Any, factors: Any,
    count: Any, parts: Any, ways: Any,
) -> Any:  # fmt: skip
    """total[at + p·stride + j] += Σ_l factors[l] · source[begins[l] + shift + p·jump + j] for p < parts, j < LANES.

    `parts` and `ways` are literals; count is a multiple of `ways`. Way w sums the l ≡ w (mod ways) in order.
    """
    signature = types.void(total, at, stride, source, shift, jump, begins, factors, count, parts, ways)

    def codegen(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        kind, side = _vector(total), ways.literal_value
        target, runs, starts, scale = (_data(context, builder, sig.args[i], args[i]) for i in (0, 3, 6, 7))
        shifts = [builder.add(args[4], builder.mul(args[5], _int(p))) for p in range(parts.literal_value)]
        places = [builder.add(args[1], builder.mul(args[2], _int(p))) for p in range(parts.literal_value)]
        sums = [[cgutils.alloca_once_value(builder, _load(builder, target, place, kind)) for place in places]]
        sums += [[cgutils.alloca_once_value(builder, _all(kind, 0.0)) for _ in places] for _ in range(side - 1)]
        with cgutils.for_range_slice(builder, _int(0), args[8], _int(side)) as (first, _):
            for way, totals in enumerate(sums):
                entry = builder.add(first, _int(way))
                begin = builder.load(builder.gep(starts, [entry]))
                factor = _spread(builder, builder.load(builder.gep(scale, [entry])), kind)
                for value, more in zip(totals, shifts, strict=True):
                    run = _load(builder, runs, builder.add(begin, more), kind)
                    builder.store(_add_product(builder, builder.load(value), factor, run), value)
        for p, place in enumerate(places):
            whole = builder.load(sums[0][p])
            for totals in sums[1:]:
                whole = builder.fadd(whole, builder.load(totals[p]))
            _store(builder, whole, target, place)
        return context.get_dummy_value()

    return signature, codegen
