"""Compute 3 × 3 convolutions by Winograd's F(4 × 4, 3 × 3) with a quarter of the multiplications.

This holds forward and backward.

A tile of 6 × 6 pixels d and a filter g give 4 × 4 results Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A: per pair of channels 36
products in the place of 144, and over all channels and tiles 36 matrix products.
The derivative is the transpose of each step.

Invariants (arrays are flat, positions count elements):
- images are (rows, columns, channels), so that every step of a transformation runs along contiguous channels;
- a few images at a time go through all steps: what one leaves for the next is still in the second cache;
- layers before and after a convolution that look at single pixels are computed where its transformations read
  and write them, see `rpel.tasks.native.blocks`;
- what is added to what, and in which order, depends on the shapes alone.

The result is that of `conv2d(x, weight, bias, padding=1)`, to 1e-4 of the largest value in float32. A pixel
that is not finite spoils its whole tile instead of its neighbours alone.
Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2016.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from rpel.backend.compile import compiled, inlined
from rpel.tasks.native.vectors import (
    BLOCK,
    WIDE,
    Builder,
    add_product,
    cgutils,
    element,
    instruction,
    integer,
    load,
    loop,
    spread,
    store,
    vector_of,
    zero,
)  # fmt: skip
from rpel.types import Floats

LANES = BLOCK
# numbers in the 36 matrices of the images that are taken at once: with their results they fit the cache
MATRIX_NUMBERS = 1 << 18
FEWEST = 32  # channels on either side from which on it pays: 1.4 times as fast there, .7 with 16
ROWS, VECTORS = 4, 4 if WIDE else 2  # of a block of a matrix product: its sums fill half of the registers

# The points 0, ±1, ±2 and ∞. Bᵀ takes pixels to the points, Aᵀ takes products back,
# G takes filters to the points.
_B = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1),
)  # fmt: skip
_A = (1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)
_G = torch.tensor([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]).double() / 24
_FILTERS = torch.kron(_G, _G)  # (36, 9)
MATRICES = _B, tuple(zip(*_B, strict=True)), _A, tuple(zip(*_A, strict=True))
_ENTER, _ENTER_BACK, _LEAVE, _LEAVE_BACK = range(4)


class Sizes(NamedTuple):
    """Images of that many rows, columns and channels, and how many are taken at once.

    inner: channels that come in; outer: that go out; tiles: of an image.
    """

    height: int
    width: int
    inner: int
    outer: int
    tiles: int
    images: int


def sizes(height: int, width: int, inner: int, outer: int) -> Sizes:
    """As many images at once as fit `MATRIX_NUMBERS`.

    >>> sizes(32, 32, 64, 64).images, sizes(16, 16, 128, 128).images
    (1, 3)
    """
    tiles = height * width // 16
    return Sizes(
        height, width, inner, outer, tiles, max(1, MATRIX_NUMBERS // (36 * tiles * max(inner, outer)))
    )


def matrices_size(z: Sizes, channels: int) -> int:
    """Numbers in the 36 matrices (tiles, channels) of the images taken at once.

    They are a vector more apart than they are long: at distances of whole pages they would share a few lines
    of the first cache.
    """
    return 36 * (z.images * z.tiles * channels + LANES)


# --- tiles --------------------------------------------------------------------------------------------------


def _times(builder: Builder, matrix: int, values: Sequence[Any]) -> list[Any]:
    """The rows of a matrix times some vectors."""
    return [_weighed(builder, row, values) for row in MATRICES[matrix]]


def _weighed(builder: Builder, row: Sequence[int], values: Sequence[Any]) -> Any:
    total = None
    for factor, value in zip(row, values, strict=True):
        if factor:
            total = _plus(builder, total, factor, value)
    return total


def _plus(builder: Builder, total: Any, factor: int, value: Any) -> Any:
    """total + factor · value; no total yet is zero."""
    if total is not None and abs(factor) == 1:
        return (builder.fadd if factor > 0 else builder.fsub)(total, value)
    if total is None and factor == 1:
        return value
    constant = ir.Constant(value.type, [float(factor)] * LANES)
    return builder.fmul(value, constant) if total is None else add_product(builder, total, value, constant)


class _Tile:
    """Vectors that lie in a square: `down` from row to row and `right` from column to column."""

    def __init__(self, builder: Builder, data: Any, at: Any, down: Any, right: Any, side: int) -> None:
        self.builder, self.data, self.kind = builder, data, vector_of(data, LANES)
        rows = [builder.add(at, builder.mul(down, integer(i))) for i in range(side)]
        self.places = [
            [builder.add(row, builder.mul(right, integer(j))) for j in range(side)] for row in rows
        ]

    def transformed(self, matrix: int, c: Any) -> list[list[Any]]:
        """M t Mᵀ at channels c …, row by row."""
        columns = [
            _times(
                self.builder,
                matrix,
                [load(self.builder, self.data, self.builder.add(p, c), self.kind) for p in places],
            )
            for places in zip(*self.places, strict=True)
        ]
        return [_times(self.builder, matrix, row) for row in zip(*columns, strict=True)]

    def put(self, values: list[list[Any]], c: Any, added: bool = False) -> None:
        for places, row in zip(self.places, values, strict=True):
            for place, value in zip(places, row, strict=True):
                at = self.builder.add(place, c)
                old = load(self.builder, self.data, at, self.kind) if added else None
                store(self.builder, self.builder.fadd(old, value) if added else value, self.data, at)


@instruction("matrix")
def transform(
    builder: Builder, source: Any, at: Any, down: Any, right: Any, target: Any, to: Any, below: Any,
    beside: Any, channels: Any, matrix: int,
) -> None:  # fmt: skip
    """M t Mᵀ of a tile t, for every channel; what `_ENTER_BACK` makes is added to what is there.

    `matrix` is a literal and names M: see MATRICES.
    """
    rows = MATRICES[matrix]
    tile = _Tile(builder, source, at, down, right, len(rows[0]))
    found = _Tile(builder, target, to, below, beside, len(rows))
    with loop(builder, integer(0), channels, LANES) as (c, _):
        found.put(tile.transformed(matrix, c), c, added=matrix == _ENTER_BACK)


@instruction()
def finish(
    builder: Builder, source: Any, at: Any, stride: Any, target: Any, to: Any, line: Any, channels: Any,
    bias: Any, pivot: Any, sums: Any,
) -> None:  # fmt: skip
    """Write the positive part of Aᵀ m A + bias of a tile m.

    The difference from the pivot and its square are added to the sums (2, channels).
    """
    tile = _Tile(builder, source, at, builder.mul(stride, integer(6)), stride, 6)
    found = _Tile(builder, target, to, line, channels, 4)
    kind = tile.kind
    with loop(builder, integer(0), channels, LANES) as (c, _):
        more, centre = load(builder, bias, c, kind), load(builder, pivot, c, kind)
        values = [[builder.fadd(value, more) for value in row] for row in tile.transformed(_LEAVE, c)]
        values = [[raised(builder, value, zero(kind)) for value in row] for row in values]
        found.put(values, c)
        add_moments(
            builder, [builder.fsub(value, centre) for row in values for value in row], sums, c, channels
        )


def raised(builder: Builder, value: Any, floor: Any) -> Any:
    """The larger of both; NaN stays."""
    return builder.select(builder.fcmp_ordered("<", value, floor), floor, value)


def add_moments(builder: Builder, values: list[Any], sums: Any, c: Any, channels: Any) -> None:
    """Add the values and their squares to the sums (2, channels), from channel c on."""
    first = values[0]
    total, square = first, builder.fmul(first, first)
    for value in values[1:]:
        total, square = builder.fadd(total, value), add_product(builder, square, value, value)
    for place, more in ((c, total), (builder.add(channels, c), square)):
        store(builder, builder.fadd(load(builder, sums, place, first.type), more), sums, place)


@instruction()
def scaled(
    builder: Builder, source: Any, at: Any, target: Any, to: Any, pixels: Any, channels: Any, scale: Any,
    shift: Any,
) -> None:  # fmt: skip
    """Set target to scale · source + shift for these pixels, whose number is a multiple of four."""
    kind = vector_of(source, LANES)

    def body(p: Any, c: Any) -> None:
        value = load(builder, source, builder.add(at, p), kind)
        moved = add_product(builder, load(builder, shift, c, kind), value, load(builder, scale, c, kind))
        store(builder, moved, target, builder.add(to, p))

    over_pixels(builder, pixels, channels, body)


def over_pixels(builder: Builder, pixels: Any, channels: Any, body: Any) -> None:
    """Call body(place, channel) for every vector of these pixels.

    The number of pixels is a multiple of four; four are processed side by side.
    """
    count, step = builder.mul(pixels, channels), builder.mul(channels, integer(4))
    with cgutils.for_range_slice(builder, integer(0), count, step) as (p, _):  # noqa: SIM117 - one inside the other
        with loop(builder, integer(0), channels, LANES) as (c, _):
            for k in range(4):
                body(builder.add(builder.add(p, builder.mul(channels, integer(k))), c), c)


# --- matrix products ----------------------------------------------------------------------------------------


@instruction("rows", "vectors")
def add_block(
    builder: Builder, a: Any, at: Any, down: Any, along: Any, b: Any, begin: Any, step: Any, c: Any, to: Any,
    below: Any, inner: Any, keep: Any, rows: int, vectors: int,
) -> None:  # fmt: skip
    """Multiply one block of two matrices.

    c[to + i·below + j] = Σ_k a[at + i·down + k·along] · b[begin + k·step + j], for i < rows and j in the
    given number of vectors; both numbers are literals. If `keep`, the product is added to the present values.
    The sums stay in registers.
    """
    kind = vector_of(b, LANES)
    places = [
        [
            builder.add(builder.add(to, builder.mul(below, integer(i))), integer(LANES * j))
            for j in range(vectors)
        ]
        for i in range(rows)
    ]
    sums = [[cgutils.alloca_once(builder, kind) for _ in row] for row in places]
    for row, totals in zip(places, sums, strict=True):
        for place, total in zip(row, totals, strict=True):
            builder.store(zero(kind), total)
            with builder.if_then(builder.icmp_signed("!=", keep, integer(0))):
                builder.store(load(builder, c, place, kind), total)
    lines = [builder.add(at, builder.mul(down, integer(i))) for i in range(rows)]
    with loop(builder, integer(0), inner) as (k, _):
        right = [
            load(builder, b, builder.add(builder.add(begin, builder.mul(k, step)), integer(LANES * j)), kind)
            for j in range(vectors)
        ]
        for line, totals in zip(lines, sums, strict=True):
            left = spread(builder, element(builder, a, builder.add(line, builder.mul(k, along))), kind)
            for total, value in zip(totals, right, strict=True):
                builder.store(add_product(builder, builder.load(total), left, value), total)
    for row, totals in zip(places, sums, strict=True):
        for place, total in zip(row, totals, strict=True):
            store(builder, builder.load(total), c, place)


@inlined
def product(
    a: Floats, at: int, down: int, along: int, b: Floats, begin: int, c: Floats, to: int, rows: int,
    inner: int, columns: int, keep: int,
) -> None:  # fmt: skip
    """Write a · b (inner, columns) into c (rows, columns) at `to`; columns in whole vectors.

    If `keep`, the product is added to the present values.
    """
    j = 0
    while j < columns:
        wide = j + VECTORS * LANES <= columns
        i = 0
        while i < rows:
            left, place = at + i * down, to + i * columns + j
            if wide and i + ROWS <= rows:
                add_block(
                    a, left, down, along, b, begin + j, columns, c, place, columns, inner, keep, ROWS, VECTORS
                )
                i += ROWS
            elif wide:
                add_block(
                    a, left, down, along, b, begin + j, columns, c, place, columns, inner, keep, 1, VECTORS
                )
                i += 1
            elif i + ROWS <= rows:
                add_block(
                    a, left, down, along, b, begin + j, columns, c, place, columns, inner, keep, ROWS, 1
                )
                i += ROWS
            else:
                add_block(a, left, down, along, b, begin + j, columns, c, place, columns, inner, keep, 1, 1)
                i += 1
        j += VECTORS * LANES if wide else LANES


# --- a few images -------------------------------------------------------------------------------------------


@inlined
def _enter(
    x: Floats, first: int, some: int, z: Sizes, scale: Floats, shift: Floats, padded: Floats, v: Floats
) -> None:
    """Bᵀ d B of every tile d of scale · image + shift into v, 36 matrices (tiles, channels)."""
    c, stride = z.inner, len(v) // 36
    line, row = z.width * c, (z.width + 2) * c
    to = 0
    for n in range(first, first + some):
        for y in range(z.height):
            scaled(x, (n * z.height + y) * line, padded, (y + 1) * row + c, z.width, c, scale, shift)
        for i in range(z.height // 4):
            for j in range(z.width // 4):
                transform(padded, 4 * i * row + 4 * j * c, row, c, v, to, 6 * stride, stride, c, _ENTER)
                to += c


@inlined
def _enter_back(v: Floats, first: int, some: int, z: Sizes, padded: Floats, images: Floats) -> None:
    """The transpose of `_enter`, but for the scale: what overlapping tiles give a pixel is added up."""
    c, stride = z.inner, len(v) // 36
    line, row = z.width * c, (z.width + 2) * c
    at = 0
    for n in range(first, first + some):
        padded[:] = 0
        for i in range(z.height // 4):
            for j in range(z.width // 4):
                transform(v, at, 6 * stride, stride, padded, 4 * i * row + 4 * j * c, row, c, c, _ENTER_BACK)
                at += c
        for y in range(z.height):
            begin, inside = (n * z.height + y) * line, (y + 1) * row + c
            images[begin : begin + line] = padded[inside : inside + line]


@inlined
def _leave_back(images: Floats, begin: int, some: int, z: Sizes, m: Floats) -> None:
    """The transpose of Aᵀ m A: images that begin there into 36 matrices (tiles, channels)."""
    c, stride = z.outer, len(m) // 36
    line = z.width * c
    to = 0
    for n in range(some):
        for i in range(z.height // 4):
            for j in range(z.width // 4):
                at = begin + (n * z.height + 4 * i) * line + 4 * j * c
                transform(images, at, line, c, m, to, 6 * stride, stride, c, _LEAVE_BACK)
                to += c


@inlined
def differentiate(
    x: Floats, first: int, some: int, z: Sizes, scale: Floats, shift: Floats, d_out: Floats, begin: int,
    u: Floats, v: Floats, m: Floats, padded: Floats, sums: Floats, d_u: Floats, d_x: Floats,
) -> None:  # fmt: skip
    """Add some images' contribution to the gradient of the filters, and of the scaled images.

    The derivative of the output is `d_out` from `begin` on. The filters' gradient is added to d_u (36, inner,
    outer); the images' goes into d_x unless it is empty. u: filters (36, outer, inner). sums: as large as
    `padded`.
    """
    tiles, c, k = some * z.tiles, z.inner, z.outer
    of_v, of_m = len(v) // 36, len(m) // 36
    _leave_back(d_out, begin, some, z, m)
    _enter(x, first, some, z, scale, shift, padded, v)
    for i in range(36):
        product(v, i * of_v, 1, c, m, i * of_m, d_u, i * c * k, c, tiles, k, 1)
    if len(d_x):
        for i in range(36):
            product(m, i * of_m, k, 1, u, i * c * k, v, i * of_v, tiles, k, c, 0)
        _enter_back(v, first, some, z, sums, d_x)


@compiled
def convolve(
    x: Floats, z: Sizes, scale: Floats, shift: Floats, u: Floats, bias: Floats, pivot: Floats,
    v: Floats, m: Floats, out: Floats, moments: Floats,
) -> None:  # fmt: skip
    """The positive part of the convolution of scale · x + shift with filters u (36, inner, outer), plus bias.

    moments (2, outer): sums of what `out` is above the pivot, and of its squares.
    """
    c, k, line = z.inner, z.outer, z.width * z.outer
    of_v, of_m = len(v) // 36, len(m) // 36
    padded = np.zeros((z.height + 2) * (z.width + 2) * c, v.dtype)
    sums = np.empty(2 * k, v.dtype)
    count = len(x) // (z.height * z.width * c)
    for first in range(0, count, z.images):
        some = min(z.images, count - first)
        _enter(x, first, some, z, scale, shift, padded, v)
        for i in range(36):
            product(v, i * of_v, c, 1, u, i * c * k, m, i * of_m, some * z.tiles, c, k, 0)
        sums[:] = 0
        at = 0
        for n in range(first, first + some):
            for i in range(z.height // 4):
                for j in range(z.width // 4):
                    to = (n * z.height + 4 * i) * line + 4 * j * k
                    finish(m, at, of_m, out, to, line, k, bias, pivot, sums)
                    at += k
        moments += sums


# --- filters ------------------------------------------------------------------------------------------------


def flat(values: Tensor) -> Any:
    """The numbers as they lie in memory, for kernels."""
    return values.detach().view(-1).numpy()


def filters(weight: Tensor) -> Tensor:
    """G g Gᵀ of every filter: weight (K, C, 3, 3) to (36, C, K).

    >>> filters(torch.ones(2, 3, 3, 3)).shape
    torch.Size([36, 3, 2])
    """
    outer, inner, *_ = weight.shape
    values = weight.detach().permute(2, 3, 1, 0).reshape(9, -1)
    return torch.mm(_FILTERS.to(weight.dtype), values).view(36, inner, outer)


def filters_back(d_u: Tensor) -> Tensor:
    """The transpose of :func:`filters`."""
    _, inner, outer = d_u.shape
    values = torch.mm(_FILTERS.to(d_u.dtype).mT, d_u.view(36, -1))
    return values.view(3, 3, inner, outer).permute(3, 2, 0, 1)
