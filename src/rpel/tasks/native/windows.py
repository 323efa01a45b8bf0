"""Convolution, rectifier and 2 × 2 max pooling as one pass over the images, and its derivative.

Invariants (arrays of floats are flat and contiguous, positions count elements):
- nothing between an image and its pooled result is ever stored: the four sums of a pooling window stay in
  registers until the largest of them is known;
- only the winner of a window has a gradient,
  so the derivative touches one patch per pooled value and not four;
- images are (rows, columns, channels), so that one row of a patch is one contiguous run;
- what is added to what, and in which order, is written here, so results repeat to the bit;
- reads and writes come in whole vectors of `LANES` or `NARROW` values: what lies beyond a run of values
  meets a factor of zero or is dropped by the caller, and buffers end in `SPARE` values more than they hold.

Plain twin: `max_pool2d(relu(conv2d(x, weight, bias)), 2)` of torch and its derivative.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

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
)
from rpel.types import Floats

LANES = BLOCK  # float32 values of a vector
NARROW = 8  # of a short one, which costs half as much where vectors have 16
# Filters at once: with four sums each (of two windows eight), their taps and a pixel they fill the registers.
# 20 filters in 24 lanes take three quarters of the operations of 32.
FEW, MANY = (24, 32) if WIDE else (16, 24)
SPARE = 3 * LANES
PAIRS = WIDE  # windows in pairs: 32 registers hold the sums of two
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
    lanes: int
    """Filters computed together."""
    blocks: int
    """Times that many are needed for all filters."""
    run: int
    """One row of a patch, rounded up to whole vectors."""


class Place(NamedTuple):
    """The place of pooled values in a flat array: the first one, and the steps between rows and images."""

    at: int
    row: int
    image: int


def stage(height: int, width: int, channels: int, filters: int, k: int) -> Stage:
    """The sizes of a stage on images of (height, width, channels), padding included.

    >>> stage(28, 28, 1, 20, 5)[:7]
    (28, 28, 1, 20, 5, 12, 12)
    """
    rows, columns = (height - k + 1) // 2, (width - k + 1) // 2
    lanes = min((FEW, MANY), key=lambda n: (-(-filters // n) * n, -n))
    narrow = NARROW if k * channels <= NARROW else LANES
    run = -(-k * channels // narrow) * narrow
    return Stage(height, width, channels, filters, k, rows, columns, lanes, -(-filters // lanes), run)


def place(s: Stage, padding: int = 0) -> Place:
    """Return where a stage puts its results for a next stage with that padding.

    >>> place(stage(28, 28, 1, 20, 5), padding=1)
    Place(at=300, row=280, image=3920)
    """
    width = s.columns + 2 * padding
    return Place(
        padding * (width + 1) * s.filters, width * s.filters, (s.rows + 2 * padding) * width * s.filters
    )


# --- inner loops, written down because no optimiser finds them by itself ------------------------------------


@instruction("lanes", "windows")
def pool_window(
    builder: Builder, image: Any, at: Any, row: Any, channels: Any, k: Any, weights: Any, first: Any,
    bias: Any, bias_at: Any, lanes: int, windows: int, best: Any, best_at: Any, winner: Any, winner_at: Any,
    filters: Any,
) -> None:  # fmt: skip
    """Store for each filter the largest of a 2 × 2 window's four sums, and which of the four it is.

    The window's first patch starts at image[at].

    `windows` (a literal) is the number of windows computed side by side, with results `filters` apart; each
    weight is read once.

    best[best_at + j] = max(0, largest), winner[winner_at + j] = 0 … 3 in reading order, or NOBODY if not
    positive. weights[first:] are (k, k · channels, lanes); `lanes` is a literal, a multiple of NARROW. Sums
    run over the patch in order.
    """
    parts = [(p, vector_of(image, min(LANES, lanes - p))) for p in range(0, lanes, LANES)]
    run = builder.mul(k, channels)
    corners = []
    for column in range(0, 2 * windows, 2):
        for line in (at, builder.add(at, row)):
            corners += [builder.add(line, builder.mul(channels, integer(column + x))) for x in range(2)]
    lift = [load(builder, bias, builder.add(bias_at, integer(p)), kind) for p, kind in parts]
    sums = [[cgutils.alloca_once_value(builder, value) for value in lift] for _ in corners]
    with loop(builder, integer(0), k) as (ky, _):
        line = builder.mul(ky, row)
        begin = [builder.add(corner, line) for corner in corners]
        here = builder.add(first, builder.mul(builder.mul(ky, run), integer(lanes)))
        with loop(builder, integer(0), run) as (j, _):
            place = builder.add(here, builder.mul(j, integer(lanes)))
            taps = [load(builder, weights, builder.add(place, integer(p)), kind) for p, kind in parts]
            for totals, corner in zip(sums, begin, strict=True):
                pixel = element(builder, image, builder.add(corner, j))
                for total, tap in zip(totals, taps, strict=True):
                    pixels = spread(builder, pixel, tap.type)
                    builder.store(add_product(builder, builder.load(total), pixels, tap), total)
    for window in range(windows):  # in order: each overwrites what the one before wrote beyond its filters
        apart = builder.mul(filters, integer(window))
        results = (
            builder.gep(best, [builder.add(best_at, apart)]),
            builder.gep(winner, [builder.add(winner_at, apart)]),
        )
        for i, (p, _) in enumerate(parts):
            four = [builder.load(totals[i]) for totals in sums[4 * window : 4 * window + 4]]
            _keep_largest(builder, four, results, integer(p))


def _keep_largest(builder: Builder, sums: list[Any], results: tuple[Any, Any], at: Any) -> None:
    """Store the largest of four sums, rectified, and the number of the first one that is as large.

    NaN compares neither larger nor smaller and therefore stays visible.
    """
    largest, kind = sums[0], sums[0].type
    who, *numbers, nobody = (
        ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [q] * kind.count) for q in (0, 1, 2, 3, NOBODY)
    )
    for q, total in zip(numbers, sums[1:], strict=True):
        wins = builder.fcmp_ordered(">", total, largest)
        largest, who = builder.select(wins, total, largest), builder.select(wins, q, who)
    idle = builder.fcmp_ordered("<=", largest, zero(kind))
    store(builder, builder.select(idle, zero(kind), largest), results[0], at)
    store(
        builder,
        builder.trunc(builder.select(idle, nobody, who), ir.VectorType(ir.IntType(8), kind.count)),
        results[1],
        at,
    )


@instruction("parts", "ways", "lanes")
def add_runs(
    builder: Builder, total: Any, at: Any, stride: Any, source: Any, shift: Any, jump: Any, begins: Any,
    factors: Any, count: Any, parts: int, ways: int, lanes: int,
) -> None:  # fmt: skip
    """Add to total[at + p·stride + j] the weighted sum of runs of the source.

    The sum is Σ_l factors[l] · source[begins[l] + shift + p·jump + j], for p < parts and j < lanes.

    `parts`, `ways` and `lanes` are literals; count is a multiple of `ways`. Way w sums the l ≡ w (mod ways)
    in order.
    """
    kind = vector_of(total, lanes)
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


# --- passes over the images ---------------------------------------------------------------------------------


def arrange(s: Stage, weight: Floats, bias: Floats, weights: Floats, offsets: Floats, taps: Floats) -> None:
    """torch's weight (filters, channels, k, k) in the two orders needed here, the rest left as it is (zero).

    weights (blocks, k, k, channels, lanes) for `pool`, offsets the bias in the same blocks, and
    taps (filters, k, run) for `pool_gradient`.
    """
    block, size = s.lanes, s.k * s.k * s.channels
    given = weight.reshape(s.filters, s.channels, s.k, s.k)
    inner = given.transpose(2, 3, 1, 0).reshape(size, s.filters)
    for b in range(s.blocks):
        some = inner[:, b * block : (b + 1) * block]
        weights[b * size * block :][: size * block].reshape(size, block)[:, : some.shape[1]] = some
    offsets[: s.filters] = bias
    _patches(s, taps)[:] = given.transpose(0, 2, 3, 1).reshape(s.filters, s.k, -1)


def restore(s: Stage, taps: Floats, weight: Floats) -> None:
    """The taps (filters, k, run) in torch's order (filters, channels, k, k)."""
    patches = _patches(s, taps).reshape(s.filters, s.k, s.k, s.channels)
    weight.reshape(s.filters, s.channels, s.k, s.k)[:] = patches.transpose(0, 3, 1, 2)


def _patches(s: Stage, taps: Floats) -> Floats:
    """(filters, k, k · channels) the part of the taps that is not padding."""
    return taps[: s.filters * s.k * s.run].reshape(s.filters, s.k, s.run)[:, :, : s.k * s.channels]


@inlined
def _pool_windows(
    s: Stage, two: bool, row: int, images: Floats, at: int, weights: Floats, w0: int, offsets: Floats,
    f0: int, out: Floats, o: int, winners: NDArray[np.uint8], w: int,
) -> None:  # fmt: skip
    """One window, or two beside each other."""
    c, k, n = s.channels, s.k, s.filters
    if s.lanes == FEW and two:
        pool_window(images, at, row, c, k, weights, w0, offsets, f0, FEW, 2, out, o, winners, w, n)
    elif s.lanes == FEW:
        pool_window(images, at, row, c, k, weights, w0, offsets, f0, FEW, 1, out, o, winners, w, n)
    elif two:
        pool_window(images, at, row, c, k, weights, w0, offsets, f0, MANY, 2, out, o, winners, w, n)
    else:
        pool_window(images, at, row, c, k, weights, w0, offsets, f0, MANY, 1, out, o, winners, w, n)


@compiled
def pool(
    s: Stage, count: int, images: Floats, weights: Floats, offsets: Floats, out: Floats, to: Place,
    winners: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Store the pooled values of `count` images at their place in `out`, and their winners.

    winners: (count, rows, columns, filters).
    """
    row = s.width * s.channels
    block = s.lanes
    size = s.k * s.k * s.channels * block
    # The last block may write beyond the last filter, into values of the first block, so it runs before the
    # first. Into a border it writes zeros, because weights and bias beyond the last filter are zero.
    for b in range(s.blocks - 1, -1, -1):
        w0, f0 = b * size, b * block
        for n in range(count):
            for py in range(s.rows):
                at = (n * s.height + 2 * py) * row
                o = to.at + n * to.image + py * to.row + f0
                w = (n * s.rows + py) * s.columns * s.filters + f0
                column = 0
                while column < s.columns:
                    two = PAIRS and column + 2 <= s.columns
                    _pool_windows(s, two, row, images, at, weights, w0, offsets, f0, out, o, winners, w)
                    step = 2 if two else 1
                    column += step
                    at += 2 * step * s.channels
                    o += step * s.filters
                    w += step * s.filters


@inlined
def _add_patches(
    total: Floats, at: int, stride: int, source: Floats, jump: int, begins: NDArray[np.int64],
    factors: Floats, count: int | np.int64, k: int, run: int,
) -> None:  # fmt: skip
    """total[at + y·stride + j] += Σ_l factors[l] · source[begins[l] + y·jump + j] for y < k, j < run."""
    padded = count
    while padded % 4:
        begins[padded] = begins[count - 1]
        factors[padded] = 0
        padded += 1
    if run == NARROW and k == 5:
        add_runs(total, at, stride, source, 0, jump, begins, factors, padded, 5, 2, NARROW)
        return
    if run == NARROW:
        for y in range(k):
            to, shift = at + y * stride, y * jump
            add_runs(total, to, NARROW, source, shift, NARROW, begins, factors, padded, 1, 4, NARROW)
        return
    for y in range(k):
        j, to, shift = 0, at + y * stride, y * jump
        while j + 8 * LANES <= run:
            add_runs(total, to + j, LANES, source, shift + j, LANES, begins, factors, count, 8, 1, LANES)
            j += 8 * LANES
        while j + 7 * LANES <= run:  # a row of 5 × 20 values in vectors of 16
            add_runs(total, to + j, LANES, source, shift + j, LANES, begins, factors, count, 7, 1, LANES)
            j += 7 * LANES
        while j + 4 * LANES <= run:
            add_runs(total, to + j, LANES, source, shift + j, LANES, begins, factors, count, 4, 1, LANES)
            j += 4 * LANES
        while j < run:
            add_runs(total, to + j, LANES, source, shift + j, LANES, begins, factors, padded, 1, 4, LANES)
            j += LANES


@compiled
def pool_images(
    stages: tuple[Stage, ...], places: tuple[Place, ...], inputs: Floats, padding: int,
    images: tuple[Floats, ...], weights: tuple[Floats, ...], offsets: tuple[Floats, ...],
    winners: tuple[NDArray[np.uint8], ...], out: Floats,
) -> None:  # fmt: skip
    """Inputs (N, C, H, W) through all stages into out (N, filters, rows, columns).

    One image after the other: a stage finds in the nearest cache what the one before has left. images,
    winners: of one image for each stage, and images once more for what the last one leaves.
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

    begins and factors are scratch for rows · columns + 4 values.
    Unsigned positions spare a test for negative ones.
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
                    # no branch: whether a window has a winner cannot be predicted
                    found += np.uint64(who != NOBODY)
                    lift += factor
                    at += 2 * s.channels
                    g += step
                    w += step
            d_bias[f] = lift
            _add_patches(
                d_taps, f * s.k * s.run, s.run, images, row, begins, factors, np.int64(found), s.k, s.run
            )


@compiled
def image_gradient(
    s: Stage, count: int, taps: Floats, gradient: Floats, of: Place, winners: NDArray[np.uint8],
    begins: NDArray[np.int64], factors: Floats, d_images: Floats,
) -> None:  # fmt: skip
    """Add the contribution of the pooled values' gradient to d_images.

    begins, factors: scratch for filters + 4 values.
    """
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
                        _add_patches(
                            d_images, at, row, taps, s.run, begins, factors, np.int64(found), s.k, s.run
                        )
