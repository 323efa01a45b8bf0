"""Compute convolution, rectifier, batch normalisation, pooling and dropout in one pass over the images.

A block C-R-B(-M(-D)) writes its rectified convolution r and nothing else of that size: the normalisation,
which needs the mean and variance of all of r first, is a scale and a shift that the next block applies where
it reads. Backward, a block's derivative is made of r a few images at a time, in the cache,
where the convolution's derivative reads it.

Invariants (arrays are flat, images are (rows, columns, channels), positions count elements):
- moments are taken about a pivot, the running mean, and added up in float64:
  a mean far from zero costs no digits;
- the buffers between a forward and its backward belong to the module, of which each thread has its own: a
  forward that comes before the last one's backward would spoil it, so only a plain nn.Sequential, run once,
  is rewritten;
- what is added to what, and in which order, depends on the shapes alone.

The result is that of the layers themselves, to 1e-4 of the largest value in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rpel.backend.compile import compiled, inlined
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.dropout import Dropout, altered, dropout_mask
from rpel.tasks.engines.engine import Loss, Probe
from rpel.tasks.native.vectors import (
    Builder,
    add_product,
    cgutils,
    instruction,
    integer,
    load,
    loop,
    store,
    vector_of,
    zero,
)
from rpel.tasks.native.winograd import (
    FEWEST,
    LANES,
    Sizes,
    add_moments,
    convolve,
    differentiate,
    filters,
    filters_back,
    flat,
    matrices_size,
    over_pixels,
    product,
    raised,
    sizes,
)  # fmt: skip
from rpel.types import Floats

# --- pixels -------------------------------------------------------------------------------------------------


@instruction()
def rectify(
    builder: Builder, images: Any, at: Any, pixels: Any, channels: Any, bias: Any, pivot: Any, sums: Any
) -> None:
    """Set images to the positive part of images + bias.

    The difference from the pivot and its square are added to the sums.
    """
    kind = vector_of(images, LANES)
    step = builder.mul(channels, integer(4))
    with cgutils.for_range_slice(builder, integer(0), builder.mul(pixels, channels), step) as (p, _):  # noqa: SIM117
        with loop(builder, integer(0), channels, LANES) as (c, _):
            more, centre, values = load(builder, bias, c, kind), load(builder, pivot, c, kind), []
            for k in range(4):
                place = builder.add(builder.add(at, p), builder.add(builder.mul(channels, integer(k)), c))
                value = raised(builder, builder.fadd(load(builder, images, place, kind), more), zero(kind))
                store(builder, value, images, place)
                values.append(builder.fsub(value, centre))
            add_moments(builder, values, sums, c, channels)


@instruction()
def correlate(
    builder: Builder, d: Any, r: Any, at: Any, pixels: Any, channels: Any, mean: Any, sums: Any
) -> None:
    """Σ d and Σ d · (r − mean) of pixels that begin there, added to the sums (2, channels)."""
    kind = vector_of(d, LANES)

    def body(p: Any, c: Any) -> None:
        place, second = builder.add(at, p), builder.add(channels, c)
        value = load(builder, d, place, kind)
        above = builder.fsub(load(builder, r, place, kind), load(builder, mean, c, kind))
        store(builder, builder.fadd(load(builder, sums, c, kind), value), sums, c)
        store(builder, add_product(builder, load(builder, sums, second, kind), value, above), sums, second)

    over_pixels(builder, pixels, channels, body)


def _through(builder: Builder, r: Any, given: Any, factor: Any, shift: Any) -> Any:
    """given + factor · r + shift, or zero where the rectifier let nothing through."""
    value = builder.fadd(given, add_product(builder, shift, r, factor))
    return builder.select(builder.fcmp_ordered("<=", r, zero(r.type)), zero(r.type), value)


@instruction()
def derive(
    builder: Builder, r: Any, d: Any, at: Any, target: Any, to: Any, pixels: Any, channels: Any,
    terms: Any, sums: Any,
) -> None:  # fmt: skip
    """Set target to a · d + e · r + b where r is positive, else to 0, and add it to the sums.

    The terms a, e and b are one array (3, channels).
    """
    kind = vector_of(r, LANES)

    def body(p: Any, c: Any) -> None:
        a, e, b = (
            load(builder, terms, builder.add(c, builder.mul(channels, integer(i))), kind) for i in range(3)
        )
        place = builder.add(at, p)
        given = builder.fmul(a, load(builder, d, place, kind))
        found = _through(builder, load(builder, r, place, kind), given, e, b)
        store(builder, found, target, builder.add(to, p))
        store(builder, builder.fadd(load(builder, sums, c, kind), found), sums, c)

    over_pixels(builder, pixels, channels, body)


def _windows(builder: Builder, at: Any, line: Any, channels: Any, x: Any, c: Any) -> list[Any]:
    """Return the places of the four pixels of window x in a row of windows."""
    first = builder.add(builder.add(at, c), builder.mul(x, builder.mul(channels, integer(2))))
    below = builder.add(first, line)
    return [first, builder.add(first, channels), below, builder.add(below, channels)]


@instruction()
def derive_pooled(
    builder: Builder, r: Any, at: Any, q: Any, d: Any, begin: Any, target: Any, to: Any, width: Any,
    channels: Any, terms: Any, sums: Any,
) -> None:  # fmt: skip
    """Do the same as `derive` for a row of pooling windows.

    d goes to the first pixel of a window that equals its winner q.
    """
    kind = vector_of(r, LANES)
    line, half = builder.mul(width, channels), builder.sdiv(width, integer(2))
    with loop(builder, integer(0), half) as (x, _), loop(builder, integer(0), channels, LANES) as (c, _):
        a, e, b = (
            load(builder, terms, builder.add(c, builder.mul(channels, integer(i))), kind) for i in range(3)
        )
        place = builder.add(begin, builder.add(builder.mul(x, channels), c))
        winner, given = load(builder, q, place, kind), builder.fmul(a, load(builder, d, place, kind))
        total = load(builder, sums, c, kind)
        pairs = zip(*(_windows(builder, start, line, channels, x, c) for start in (at, to)), strict=True)
        for source, goal in pairs:
            value = load(builder, r, source, kind)
            wins = builder.fcmp_ordered("==", value, winner)
            found = _through(builder, value, builder.select(wins, given, zero(kind)), e, b)
            given = builder.select(wins, zero(kind), given)
            store(builder, found, target, goal)
            total = builder.fadd(total, found)
        store(builder, total, sums, c)


@instruction()
def pool_row(
    builder: Builder, r: Any, at: Any, q: Any, y: Any, to: Any, width: Any, channels: Any, scale: Any,
    shift: Any,
) -> None:  # fmt: skip
    """Find in each window of a row the pixel that is largest after scale and shift.

    Its value is stored before (q) and after (y) scale and shift.
    """
    kind = vector_of(r, LANES)
    line, half = builder.mul(width, channels), builder.sdiv(width, integer(2))
    with loop(builder, integer(0), half) as (x, _), loop(builder, integer(0), channels, LANES) as (c, _):
        factor, more = load(builder, scale, c, kind), load(builder, shift, c, kind)
        values = [load(builder, r, place, kind) for place in _windows(builder, at, line, channels, x, c)]
        high = low = values[0]
        for value in values[1:]:
            high = raised(builder, value, high)
            low = builder.select(builder.fcmp_ordered(">", value, low), low, value)
        winner = builder.select(builder.fcmp_ordered("<", factor, zero(kind)), low, high)
        place = builder.add(to, builder.add(builder.mul(x, channels), c))
        store(builder, winner, q, place)
        store(builder, add_product(builder, more, winner, factor), y, place)


# --- images -------------------------------------------------------------------------------------------------


@compiled
def pool(r: Floats, z: Sizes, scale: Floats, shift: Floats, q: Floats, y: Floats) -> None:
    """The winners q of 2 × 2 pooling of scale · r + shift, and their values y."""
    line = z.width * z.outer
    for row in range(len(r) // (2 * line)):
        pool_row(r, 2 * row * line, q, y, row * (line // 2), z.width, z.outer, scale, shift)


@compiled
def correlation(d: Floats, r: Floats, channels: int, mean: Floats, found: Floats) -> None:
    """Σ d and Σ d · (r − mean) of each channel, added to `found` (2, channels)."""
    sums = np.empty(2 * channels, r.dtype)
    step = 256 * channels
    for at in range(0, len(r), step):
        sums[:] = 0
        correlate(d, r, at, min(step, len(r) - at) // channels, channels, mean, sums)
        found += sums


@inlined
def _derivative(
    r: Floats, q: Floats, d: Floats, first: int, some: int, z: Sizes, terms: Floats, target: Floats,
    sums: Floats, found: Floats,
) -> None:  # fmt: skip
    """What reaches the convolution's results of some images, into `target`, and its sum, added to `found`."""
    line, whole = z.width * z.outer, z.height * z.width * z.outer
    sums[:] = 0
    if len(q) == 0:
        derive(r, d, first * whole, target, 0, some * z.height * z.width, z.outer, terms, sums)
    else:
        for row in range(some * z.height // 2):
            at, begin = first * whole + 2 * row * line, first * (whole // 4) + row * (line // 2)
            derive_pooled(r, at, q, d, begin, target, 2 * row * line, z.width, z.outer, terms, sums)
    found += sums


@compiled
def back(
    x: Floats, z: Sizes, scale: Floats, shift: Floats, u: Floats, r: Floats, q: Floats, d: Floats,
    terms: Floats, v: Floats, m: Floats, d_u: Floats, d_x: Floats, d_bias: Floats, mean: Floats,
    before: Floats,
) -> None:  # fmt: skip
    """The derivative of a block from d, that of its results: of filters, bias and the scaled x.

    before (2, inner), if there is room: sums of d_x, and of d_x · (x − mean), which the block before needs.
    """
    whole = z.height * z.width
    padded = np.zeros((z.height + 2) * (z.width + 2) * z.inner, v.dtype)
    sums, of_bias, of_x = np.empty_like(padded), np.empty(z.outer, v.dtype), np.empty(2 * z.inner, v.dtype)
    target = np.empty(z.images * whole * z.outer, v.dtype)
    count = len(x) // (whole * z.inner)
    for first in range(0, count, z.images):
        some = min(z.images, count - first)
        _derivative(r, q, d, first, some, z, terms, target, of_bias, d_bias)
        differentiate(x, first, some, z, scale, shift, target, 0, u, v, m, padded, sums, d_u, d_x)
        if len(before):
            of_x[:] = 0
            correlate(d_x, x, first * whole * z.inner, some * whole, z.inner, mean, of_x)
            before += of_x


# --- few channels: patches as rows --------------------------------------------------------------------------


@inlined
def _unfold(x: Floats, n: int, z: Sizes, padded: Floats, patches: Floats) -> None:
    """The 3 × 3 patches of image n as rows (pixels, 9 · inner)."""
    c, line, row = z.inner, z.width * z.inner, (z.width + 2) * z.inner
    for y in range(z.height):
        begin, inside = (n * z.height + y) * line, (y + 1) * row + c
        for i in range(line):
            padded[inside + i] = x[begin + i]
    to = 0
    for y in range(z.height):
        for j in range(z.width):
            for a in range(3):
                at = (y + a) * row + j * c
                for i in range(3 * c):
                    patches[to + i] = padded[at + i]
                to += 3 * c


@compiled
def convolve_patches(
    x: Floats, z: Sizes, weight: Floats, bias: Floats, pivot: Floats, out: Floats, moments: Floats
) -> None:
    """Compute the positive part of a convolution with weight (9 · inner, outer).

    The moments are those of `winograd.convolve`.
    """
    whole, run = z.height * z.width, 9 * z.inner
    padded, patches = (
        np.zeros((z.height + 2) * (z.width + 2) * z.inner, x.dtype),
        np.empty(whole * run, x.dtype),
    )
    sums = np.empty(2 * z.outer, x.dtype)
    for n in range(len(x) // (whole * z.inner)):
        _unfold(x, n, z, padded, patches)
        at = n * whole * z.outer
        product(patches, 0, run, 1, weight, 0, out, at, whole, run, z.outer, 0)
        sums[:] = 0
        rectify(out, at, whole, z.outer, bias, pivot, sums)
        moments += sums


@compiled
def back_patches(
    x: Floats, z: Sizes, r: Floats, q: Floats, d: Floats, terms: Floats, d_weight: Floats, d_bias: Floats
) -> None:
    """The derivative of `convolve_patches` and what follows it in a block; the input needs none."""
    whole, run = z.height * z.width, 9 * z.inner
    padded, patches = (
        np.zeros((z.height + 2) * (z.width + 2) * z.inner, x.dtype),
        np.empty(whole * run, x.dtype),
    )
    target, sums = np.empty(whole * z.outer, x.dtype), np.empty(z.outer, x.dtype)
    for n in range(len(x) // (whole * z.inner)):
        _derivative(r, q, d, n, 1, z, terms, target, sums, d_bias)
        _unfold(x, n, z, padded, patches)
        product(patches, 0, 1, run, target, 0, d_weight, 0, run, whole, z.outer, 1)


# --- blocks -------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The layers of a block."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    pooled: bool
    dropout: nn.Module | None

    @property
    def patches(self) -> bool:
        """Channels are too few for Winograd's algorithm."""
        return not all(map(_many, (self.convolution.in_channels, self.convolution.out_channels)))


@dataclass
class _Kept:
    """What a block keeps for its derivative."""

    x: Tensor
    z: Sizes
    enter: tuple[Tensor, Tensor]
    r: Tensor
    mean: Tensor
    inverse: Tensor
    scale: Tensor
    q: Tensor
    mask: Tensor | None = None
    before: Tensor = field(default_factory=lambda: torch.empty(0))


class Blocks(nn.Module):
    """The blocks that a network begins with, in the place of their layers."""

    def __init__(self, layers: Sequence[nn.Module], blocks: Sequence[Block]) -> None:
        super().__init__()
        self.layers, self.blocks = nn.ModuleList(layers), list(blocks)
        self.kept: list[_Kept] = []
        self.buffers_by_name: dict[tuple[Any, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Function.apply(self, x, *self.parameters())  # type: ignore[no-untyped-call]
        return out

    def buffer_like(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """A buffer that stays from step to step: new memory of this size costs more than a pass over it."""
        key = name, like.dtype, shape
        if key not in self.buffers_by_name:
            self.buffers_by_name[key] = like.new_empty(shape)
        return self.buffers_by_name[key]

    # --- forward ---

    def run(self, x: Tensor) -> Tensor:
        """The blocks' output (N, C, H, W)."""
        images, self.kept = x.permute(0, 2, 3, 1).contiguous(), []
        enter = images.new_ones(images.shape[3]), images.new_zeros(images.shape[3])
        for i, block in enumerate(self.blocks):
            images, enter = self._block(i, block, images, enter)
        return torch.addcmul(enter[1], images, enter[0]).permute(0, 3, 1, 2)

    def _block(
        self, i: int, block: Block, x: Tensor, enter: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layer, norm = block.convolution, block.norm
        n, height, width, inner = x.shape
        z, outer = sizes(height, width, inner, layer.out_channels), layer.out_channels
        r = self.buffer_like(f"r{i}", x, n, height, width, outer)
        assert norm.running_mean is not None
        pivot = norm.running_mean.to(x.dtype, copy=True)
        bias = x.new_zeros(outer) if layer.bias is None else layer.bias
        moments = torch.zeros(2, outer, dtype=torch.float64)
        if block.patches:
            weight = flat(layer.weight.detach().permute(2, 3, 1, 0).reshape(-1, outer).contiguous())
            convolve_patches(flat(x), z, weight, flat(bias), flat(pivot), flat(r), flat(moments))
        else:
            (scale, shift), (v, m), u = map(flat, enter), self._matrices(x, z), flat(filters(layer.weight))
            convolve(flat(x), z, scale, shift, u, flat(bias), flat(pivot), v, m, flat(r), flat(moments))
        mean, inverse = _normal(norm, pivot, moments, n * height * width)
        factor = norm.weight.detach() * inverse
        leave = factor.to(x.dtype), (norm.bias.detach() - mean * factor).to(x.dtype)
        kept = _Kept(x, z, enter, r, mean.to(x.dtype), inverse, leave[0], r.new_empty(0))
        self.kept.append(kept)
        return self._pooled(i, block, kept, leave[1]) if block.pooled else (r, leave)

    def _matrices(self, x: Tensor, z: Sizes) -> tuple[Any, Any]:
        """Memory for the matrices of what comes in and of what goes out."""
        inner, outer = (self.buffer_like(name, x, matrices_size(z, channels)) for name, channels in
                        (("v", z.inner), ("m", z.outer)))  # fmt: skip
        return flat(inner), flat(outer)

    def _pooled(
        self, i: int, block: Block, kept: _Kept, shift: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        n, height, width, outer = kept.r.shape
        kept.q = self.buffer_like(f"q{i}", kept.r, n, height // 2, width // 2, outer)
        y = self.buffer_like(f"y{i}", kept.q, *kept.q.shape)
        pool(flat(kept.r), kept.z, flat(kept.scale), flat(shift), flat(kept.q), flat(y))
        if isinstance(block.dropout, Dropout) and block.dropout.active:
            mask = dropout_mask(block.dropout.p, y.permute(0, 3, 1, 2), block.dropout.generator)
            kept.mask = mask.permute(0, 2, 3, 1)
            y *= kept.mask
        return y, (y.new_ones(outer), y.new_zeros(outer))

    # --- backward ---

    def run_back(self, d: Tensor) -> list[Tensor]:
        """The derivatives of the parameters; the input is data and needs none."""
        d = d.permute(0, 2, 3, 1).contiguous()
        gradients: list[Tensor] = []
        for i in reversed(range(len(self.blocks))):
            of_block, d = self._block_back(i, d)
            gradients = of_block + gradients
        return gradients

    def _block_back(self, i: int, d: Tensor) -> tuple[list[Tensor], Tensor]:
        block, kept = self.blocks[i], self.kept[i]
        layer, z = block.convolution, kept.z
        if kept.mask is not None:
            d = d * kept.mask
        sums = kept.before
        if not len(sums):
            sums = torch.zeros(2, z.outer, dtype=torch.float64)
            results = kept.q if block.pooled else kept.r
            correlation(flat(d), flat(results), z.outer, flat(kept.mean), flat(sums))
        terms, d_bias = _terms(block.norm, kept, sums), torch.zeros(z.outer, dtype=torch.float64)
        given = flat(kept.r), flat(kept.q), flat(d), flat(terms)
        if block.patches:
            d_weight = d.new_zeros(3, 3, z.inner, z.outer)
            back_patches(flat(kept.x), z, *given, flat(d_weight), flat(d_bias))
            of_layer, d_x = d_weight.permute(3, 2, 0, 1), d
        else:
            of_layer, d_x = self._filters_back(i, given, d_bias)
        norms = [(sums[1] * kept.inverse).to(d.dtype), sums[0].to(d.dtype)]
        return [of_layer, *([] if layer.bias is None else [d_bias.to(d.dtype)]), *norms], d_x

    def _filters_back(self, i: int, given: tuple[Any, ...], d_bias: Tensor) -> tuple[Tensor, Tensor]:
        kept, layer = self.kept[i], self.blocks[i].convolution
        x, z = kept.x, kept.z
        d_x = self.buffer_like(f"dx{i}", x, *x.shape) if i else x.new_empty(0)
        dense = i > 0 and not self.blocks[i - 1].pooled
        mean, before = x.new_empty(0), torch.zeros(2 * z.inner if dense else 0, dtype=torch.float64)
        if dense:
            self.kept[i - 1].before, mean = before.view(2, -1), self.kept[i - 1].mean
        d_u, turned = x.new_zeros(36, z.inner, z.outer), filters(layer.weight).mT.contiguous()
        (scale, shift), (r, q, d, terms), (v, m) = map(flat, kept.enter), given, self._matrices(x, z)
        back(
            flat(x), z, scale, shift, flat(turned), r, q, d, terms, v, m, flat(d_u), flat(d_x), flat(d_bias),
            flat(mean), flat(before),
        )  # fmt: skip
        return filters_back(d_u), d_x


def _normal(norm: nn.BatchNorm2d, pivot: Tensor, moments: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and 1 / √(variance + ε) of each channel, in float64; in training the running ones move."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    if not norm.training:
        return norm.running_mean.double(), (norm.running_var.double() + norm.eps).rsqrt()
    above = moments[0] / count
    mean, variance = pivot + above, (moments[1] / count - above.square()).clamp(min=0)
    norm.num_batches_tracked += 1
    assert norm.momentum is not None
    norm.running_mean.lerp_(mean.to(pivot.dtype), norm.momentum)
    norm.running_var.lerp_((variance * (count / (count - 1))).to(pivot.dtype), norm.momentum)
    return mean, (variance + norm.eps).rsqrt()


def _terms(norm: nn.BatchNorm2d, kept: _Kept, sums: Tensor) -> Tensor:
    """a, e and b (3, channels): before the rectifier the derivative is a · d + e · r + b."""
    scale = kept.scale.double()
    count = kept.r.numel() // len(scale)
    moved = torch.zeros_like(scale) if not norm.training else scale / count
    factor = -moved * kept.inverse.square() * sums[1]
    return torch.stack([scale, factor, -moved * sums[0] - factor * kept.mean]).to(kept.r.dtype)


class _Function(torch.autograd.Function):
    """Blocks for autograd."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, x: Tensor, *_: Tensor) -> Tensor:
        ctx.blocks = blocks
        return blocks.run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.blocks.run_back(gradients[0])


# --- which layers -------------------------------------------------------------------------------------------


def build(module: nn.Module, loss: Loss, probe: Probe) -> AutogradEngine | None:
    """Autograd with blocks in the place of the layers that a plain nn.Sequential begins with, on a CPU."""
    images = probe.inputs
    if probe.device.type != "cpu" or probe.by_example or not isinstance(images, Tensor) or images.dim() != 4:
        return None
    if type(module) is not nn.Sequential or any(map(altered, module.modules())):
        return None
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        return None  # a new Sequential would lose what is registered on the old one
    blocks, _ = leading_blocks(list(module))
    if not blocks or images.shape[1] != blocks[0].convolution.in_channels or not images.is_floating_point():
        return None
    height, width = images.shape[2:]
    for block in blocks:  # images are whole tiles before each block
        if height % 4 or width % 4:
            return None
        height, width = (height // 2, width // 2) if block.pooled else (height, width)
    return AutogradEngine(module, loss, probe, with_blocks)


def with_blocks(module: nn.Module) -> nn.Module:
    """Put blocks in the place of the layers that a Sequential begins with.

    >>> from rpel.models import model
    >>> [type(layer).__name__ for layer in with_blocks(model("cifar10", dropout=0))][:3]
    ['Blocks', 'Flatten', 'Linear']
    """
    layers = list(module)  # type: ignore[call-overload]
    blocks, taken = leading_blocks(layers)
    return nn.Sequential(Blocks(layers[:taken], blocks), *layers[taken:])


def leading_blocks(layers: list[nn.Module]) -> tuple[list[Block], int]:
    """The blocks that the layers begin with, and how many layers they are."""
    blocks: list[Block] = []
    taken = 0
    while (block := _first(layers[taken:], not blocks)) is not None:
        blocks.append(block)
        taken += 3 + block.pooled + (block.dropout is not None)
    return blocks, taken


def _first(layers: list[nn.Module], begins: bool) -> Block | None:
    """The block that the layers begin with; begins: nothing comes before it, so channels may be few."""
    if [type(layer) for layer in layers[:3]] != [nn.Conv2d, nn.ReLU, nn.BatchNorm2d]:
        return None
    convolution, _, norm = layers[:3]
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    usual = norm.affine and norm.track_running_stats and norm.momentum is not None
    if not usual or not _is_plain(convolution) or convolution.out_channels % LANES:
        return None
    pooled = len(layers) > 3 and _halves(layers[3])
    dropout = layers[4] if pooled and len(layers) > 4 and type(layers[4]) in (Dropout, nn.Dropout) else None
    block = Block(convolution, norm, pooled, dropout)
    return block if begins or not block.patches else None


def _is_plain(layer: nn.Conv2d) -> bool:
    """Whether a layer is a 3 × 3 convolution that keeps the size of images, and nothing more."""
    return (
        layer.kernel_size == (3, 3)
        and layer.padding in ((1, 1), "same")
        and layer.padding_mode == "zeros"
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
    )


def _many(channels: int) -> bool:
    """Whether channels are enough for Winograd's algorithm to be faster."""
    return channels >= FEWEST and channels % LANES == 0


def _halves(layer: nn.Module) -> bool:
    """Whether a layer is max pooling of 2 × 2."""
    if type(layer) is not nn.MaxPool2d:
        return False
    twos = all(size in (2, (2, 2)) for size in (layer.kernel_size, layer.stride))
    return (
        twos and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1)) and not layer.return_indices
    )
