"""Vector instructions for the hand-written convolutions, as functions that kernels call.

Arrays are contiguous, positions count elements. A vector is 64 bytes where the processor has them
(AVX-512), else 32; a column's value never depends on its place, because buffers are padded to whole
`BLOCK`s.
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
BYTES = 64 if WIDE else 32  # of a vector
BLOCK = BYTES // 4  # columns every padded buffer is a multiple of: a vector of float32, two of float64

Builder = Any  # llvmlite and numba have no types
cgutils: Any = numba_cgutils


def instruction(*literals: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn f(builder, …), which emits instructions, into a function that compiled code calls without builder.

    f receives the addresses of arrays, the values of numbers, and the parameters named in `literals` as
    Python numbers.
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
    """Return a vector type of an array's elements: of 32 bytes, or of the given number of lanes."""
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
