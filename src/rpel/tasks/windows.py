"""Convolution, rectifier and 2 × 2 max pooling as one pass over the images, and its derivative.

Invariants (arrays of floats are flat and contiguous, positions count elements):
- nothing between an image and its pooled result is ever stored: the four sums of a pooling window stay in registers
  until the largest of them is known;
- only the winner of a window has a gradient, so the derivative touches one patch per pooled value and not four;
- images are (rows, columns, channels), so that one row of a patch is one contiguous run;
- what is added to what, and in which order, is written here, so results repeat to the bit;
- reads and writes come in whole vectors of `LANES` values: what lies beyond a run of values meets a factor of zero or
  is dropped by the caller, and buffers end in `SPARE` values more than they hold.

Plain twin: `max_pool2d(relu(conv2d(x, weight, bias)), 2)` of torch and its derivative.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from rpel.kernels.cache import compiled
from rpel.kernels.vectors import (
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
)
from rpel.types import Floats

LANES = 8
MOST = 3  # vectors of filters at once: with four sums each, their taps and a pixel they fill the sixteen registers
SPARE = MOST * LANES
NOBODY = 4  # the winner of a window in which no sum is positive


class Stage(NamedTuple):
    """One convolution with its pooling, all sizes in elements; height and width include the padding."""

    height: int
    width: int
    channels: int
    filters: int
    k: int
    rows: int
    columns: int
    vectors: int
    """Vectors of filters computed together."""
    blocks: int
    """Times that many are needed for all filters."""
    run: int
    """One row of a patch, rounded up to whole vectors."""


class Place(NamedTuple):
    """Where pooled values lie in a flat array: the first of them, and the steps from row to row and image to image."""

    at: int
    row: int
    image: int


def stage(height: int, width: int, channels: int, filters: int, k: int) -> Stage:
    """The sizes of a stage on images of (height, width, channels), padding included.

    >>> stage(28, 28, 1, 20, 5)
    Stage(height=28, width=28, channels=1, filters=20, k=5, rows=12, columns=12, vectors=3, blocks=1, run=8)
    """
    rows, columns = (height - k + 1) // 2, (width - k + 1) // 2
    needed = -(-filters // LANES)
    vectors = min(range(1, MOST + 1), key=lambda v: (-(-needed // v) * v, -v))
    run = -(-k * channels // LANES) * LANES
    return Stage(height, width, channels, filters, k, rows, columns, vectors, -(-needed // vectors), run)


def place(s: Stage, padding: int = 0) -> Place:
    """Where a stage puts its results for a next stage with that padding.

    >>> place(stage(28, 28, 1, 20, 5), padding=1)
    Place(at=300, row=280, image=3920)
    """
    width = s.columns + 2 * padding
    return Place(padding * (width + 1) * s.filters, width * s.filters, (s.rows + 2 * padding) * width * s.filters)


# --- inner loops, written down because no optimiser finds them by itself ----------------------------------------------


@instruction("vectors")
def pool_window(
    builder: Builder, image: Any, at: Any, row: Any, channels: Any, k: Any, weights: Any, first: Any, bias: Any,
    bias_at: Any, vectors: int, best: Any, best_at: Any, winner: Any, winner_at: Any,
) -> None:  # fmt: skip
    """The 2 × 2 window whose first patch starts at image[at]: per filter the largest of the four sums, and whose it is.

    best[best_at + j] = max(0, largest), winner[winner_at + j] = 0 … 3 in reading order, or NOBODY if not positive.
    weights[first:] are (k, k · channels, vectors · LANES); `vectors` is a literal. Sums run over the patch in order.
    """
    kind, run = vector_of(image, LANES), builder.mul(k, channels)
    corners = [at, builder.add(at, channels), builder.add(at, row)]
    corners.append(builder.add(corners[2], channels))
    lift = [load(builder, bias, builder.add(bias_at, integer(p * LANES)), kind) for p in range(vectors)]
    sums = [[cgutils.alloca_once_value(builder, value) for value in lift] for _ in corners]
    with loop(builder, integer(0), k) as (ky, _):
        line = builder.mul(ky, row)
        begin = [builder.add(corner, line) for corner in corners]
        here = builder.add(first, builder.mul(builder.mul(ky, run), integer(vectors * LANES)))
        with loop(builder, integer(0), run) as (j, _):
            place = builder.add(here, builder.mul(j, integer(vectors * LANES)))
            taps = [load(builder, weights, builder.add(place, integer(p * LANES)), kind) for p in range(vectors)]
            for totals, corner in zip(sums, begin, strict=True):
                pixel = spread(builder, element(builder, image, builder.add(corner, j)), kind)
                for total, tap in zip(totals, taps, strict=True):
                    builder.store(add_product(builder, builder.load(total), pixel, tap), total)
    results = builder.gep(best, [best_at]), builder.gep(winner, [winner_at])
    for p in range(vectors):
        _keep_largest(builder, [builder.load(totals[p]) for totals in sums], kind, results, integer(p * LANES))


def _keep_largest(builder: Builder, sums: list[Any], kind: Any, results: tuple[Any, Any], at: Any) -> None:
    """The first largest of four, rectified, and its number; NaN is neither larger nor smaller and so stays visible."""
    who, *numbers, nobody = (
        ir.Constant(ir.VectorType(ir.IntType(32), LANES), [q] * LANES) for q in (0, 1, 2, 3, NOBODY)
    )
    largest = sums[0]
    for q, total in zip(numbers, sums[1:], strict=True):
        wins = builder.fcmp_ordered(">", total, largest)
        largest, who = builder.select(wins, total, largest), builder.select(wins, q, who)
    idle = builder.fcmp_ordered("<=", largest, zero(kind))
    store(builder, builder.select(idle, zero(kind), largest), results[0], at)
    store(
        builder, builder.trunc(builder.select(idle, nobody, who), ir.VectorType(ir.IntType(8), LANES)), results[1], at
    )


@instruction("parts", "ways")
def add_runs(
    builder: Builder, total: Any, at: Any, stride: Any, source: Any, shift: Any, jump: Any, begins: Any, factors: Any,
    count: Any, parts: int, ways: int,
) -> None:  # fmt: skip
    """total[at + p·stride + j] += Σ_l factors[l] · source[begins[l] + shift + p·jump + j] for p < parts, j < LANES.

    `parts` and `ways` are literals; count is a multiple of `ways`. Way w sums the l ≡ w (mod ways) in order.
    """
    kind = vector_of(total, LANES)
    shifts = [builder.add(shift, builder.mul(jump, integer(p))) for p in range(parts)]
    places = [builder.add(at, builder.mul(stride, integer(p))) for p in range(parts)]
    sums = [[cgutils.alloca_once_value(builder, load(builder, total, place, kind)) for place in places]]
    sums += [[cgutils.alloca_once_value(builder, zero(kind)) for _ in places] for _ in range(ways - 1)]
    with loop(builder, integer(0), count, ways) as (first, _):
        for way, totals in enumerate(sums):
            entry = builder.add(first, integer(way))
            begin = element(builder, begins, entry)
            factor = spread(builder, element(builder, factors, entry), kind)
            for value, more in zip(totals, shifts, strict=True):
                run = load(builder, source, builder.add(begin, more), kind)
                builder.store(add_product(builder, builder.load(value), factor, run), value)
    for p, place in enumerate(places):
        whole = builder.load(sums[0][p])
        for totals in sums[1:]:
            whole = builder.fadd(whole, builder.load(totals[p]))
        store(builder, whole, total, place)


# --- passes over the images -------------------------------------------------------------------------------------------


@compiled
def arrange(s: Stage, weight: Floats, bias: Floats, weights: Floats, offsets: Floats, taps: Floats) -> None:
    """torch's weight (filters, channels, k, k) in the two orders needed here, the rest left as it is (zero).

    weights (blocks, k, k, channels, vectors · LANES) for `pool`, offsets the bias in the same blocks, and taps
    (filters, k, run) for `pool_gradient`.
    """
    block = s.vectors * LANES
    size = s.k * s.k * s.channels
    for f in range(s.filters):
        offsets[f] = bias[f]
        b = f // block
        for c in range(s.channels):
            for ky in range(s.k):
                for kx in range(s.k):
                    value = weight[((f * s.channels + c) * s.k + ky) * s.k + kx]
                    tap = kx * s.channels + c
                    weights[(b * size + ky * s.k * s.channels + tap) * block + f - b * block] = value
                    taps[(f * s.k + ky) * s.run + tap] = value


@compiled
def restore(s: Stage, taps: Floats, weight: Floats) -> None:
    """The taps (filters, k, run) in torch's order (filters, channels, k, k)."""
    for f in range(s.filters):
        for c in range(s.channels):
            for ky in range(s.k):
                for kx in range(s.k):
                    at = ((f * s.channels + c) * s.k + ky) * s.k + kx
                    weight[at] = taps[(f * s.k + ky) * s.run + kx * s.channels + c]


@compiled
def pool(
    s: Stage, count: int, images: Floats, weights: Floats, offsets: Floats, out: Floats, to: Place,
    winners: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Pooled values of `count` images at their place in `out`, and winners (count, rows, columns, filters)."""
    row = s.width * s.channels
    block = s.vectors * LANES
    size = s.k * s.k * s.channels * block
    # The last block may write beyond the last filter, where the first block writes afterwards: so it goes first. Into a
    # border it writes zeros, because weights and bias beyond the last filter are zero.
    for b in range(s.blocks - 1, -1, -1):
        w0, f0 = b * size, b * block
        for n in range(count):
            for py in range(s.rows):
                at = (n * s.height + 2 * py) * row
                o = to.at + n * to.image + py * to.row + f0
                w = (n * s.rows + py) * s.columns * s.filters + f0
                for _ in range(s.columns):
                    if s.vectors == 1:
                        pool_window(images, at, row, s.channels, s.k, weights, w0, offsets, f0, 1, out, o, winners, w)
                    elif s.vectors == 2:
                        pool_window(images, at, row, s.channels, s.k, weights, w0, offsets, f0, 2, out, o, winners, w)
                    else:
                        pool_window(images, at, row, s.channels, s.k, weights, w0, offsets, f0, 3, out, o, winners, w)
                    at += 2 * s.channels
                    o += s.filters
                    w += s.filters


@compiled
def _add_patches(
    total: Floats, at: int, stride: int, source: Floats, jump: int, begins: NDArray[np.int64], factors: Floats,
    count: int | np.int64, k: int, run: int,
) -> None:  # fmt: skip
    """total[at + y·stride + j] += Σ_l factors[l] · source[begins[l] + y·jump + j] for y < k, j < run."""
    while count % 4:
        begins[count] = begins[count - 1]
        factors[count] = 0
        count += 1
    if run == LANES and k == 5:
        add_runs(total, at, stride, source, 0, jump, begins, factors, count, 5, 2)
        return
    for y in range(k):
        j = 0
        while j + 8 * LANES <= run:
            add_runs(total, at + y * stride + j, LANES, source, y * jump + j, LANES, begins, factors, count, 8, 1)
            j += 8 * LANES
        while j + 4 * LANES <= run:
            add_runs(total, at + y * stride + j, LANES, source, y * jump + j, LANES, begins, factors, count, 4, 1)
            j += 4 * LANES
        while j < run:
            add_runs(total, at + y * stride + j, LANES, source, y * jump + j, LANES, begins, factors, count, 1, 4)
            j += LANES


@compiled
def pool_images(
    stages: tuple[Stage, ...], places: tuple[Place, ...], inputs: Floats, padding: int, images: tuple[Floats, ...],
    weights: tuple[Floats, ...], offsets: tuple[Floats, ...], winners: tuple[NDArray[np.uint8], ...], out: Floats,
) -> None:  # fmt: skip
    """Inputs (N, C, H, W) through all stages into out (N, filters, rows, columns).

    One image after the other: a stage finds in the nearest cache what the one before has left. images, winners: of one
    image for each stage, and images once more for what the last one leaves.
    """
    first, last = stages[0], stages[-1]
    for n in range(len(inputs)):
        for c in range(first.channels):
            for y in range(inputs.shape[2]):
                at = ((y + padding) * first.width + padding) * first.channels + c
                for x in range(inputs.shape[3]):
                    images[0][at + x * first.channels] = inputs[n, c, y, x]
        for i in range(len(stages)):
            pool(stages[i], 1, images[i], weights[i], offsets[i], images[i + 1], places[i], winners[i])
        left = images[len(stages)]
        for f in range(last.filters):
            for y in range(last.rows):
                for x in range(last.columns):
                    out[n, f, y, x] = left[places[-1].at + y * places[-1].row + x * last.filters + f]


@compiled
def pool_gradient(
    s: Stage, count: int, images: Floats, gradient: Floats, of: Place, winners: NDArray[np.uint8],
    begins: NDArray[np.int64], factors: Floats, d_taps: Floats, d_bias: Floats,
) -> None:  # fmt: skip
    """Add to d_taps (filters, k, run) and d_bias (filters,) what the gradient of the pooled values gives.

    begins and factors are scratch for rows · columns + 4 values. Unsigned positions spare a test for negative ones.
    """
    row = s.width * s.channels
    zero, step, nothing = np.uint64(0), np.uint64(s.filters), d_bias.dtype.type(0)
    corner = np.array([0, s.channels, row, row + s.channels, 0])
    for n in range(count):
        for f in range(s.filters):
            found = zero
            lift = d_bias[f]
            w = np.uint64(n * s.rows * s.columns * s.filters + f)
            for py in range(s.rows):
                at = (n * s.height + 2 * py) * row
                g = np.uint64(of.at + n * of.image + py * of.row + f)
                for _ in range(s.columns):
                    who = winners[w]
                    factor = gradient[g] if who != NOBODY else nothing
                    begins[found] = at + corner[who]
                    factors[found] = factor
                    found += np.uint64(who != NOBODY)  # no branch: whether a window has a winner cannot be predicted
                    lift += factor
                    at += 2 * s.channels
                    g += step
                    w += step
            d_bias[f] = lift
            _add_patches(d_taps, f * s.k * s.run, s.run, images, row, begins, factors, np.int64(found), s.k, s.run)


@compiled
def image_gradient(
    s: Stage, count: int, taps: Floats, gradient: Floats, of: Place, winners: NDArray[np.uint8],
    begins: NDArray[np.int64], factors: Floats, d_images: Floats,
) -> None:  # fmt: skip
    """Add to d_images what the gradient of the pooled values gives; begins, factors: scratch for filters + 4 values."""
    row = s.width * s.channels
    zero, one = np.uint64(0), np.uint64(1)
    for n in range(count):
        for py in range(s.rows):
            for px in range(s.columns):
                first = np.uint64(((n * s.rows + py) * s.columns + px) * s.filters)
                begin = np.uint64(of.at + n * of.image + py * of.row + px * s.filters)
                for corner in range(4):
                    found, w, g = zero, first, begin
                    for f in range(s.filters):
                        begins[found] = f * s.k * s.run
                        factors[found] = gradient[g]
                        found += np.uint64(winners[w] == corner)
                        w += one
                        g += one
                    at = (n * s.height + 2 * py + (corner >> 1)) * row + (2 * px + (corner & 1)) * s.channels
                    if found:
                        _add_patches(d_images, at, row, taps, s.run, begins, factors, np.int64(found), s.k, s.run)
