"""Convolutions of 3 × 3 by Winograd's F(4 × 4, 3 × 3): a quarter of the multiplications, forward and backward.

A tile of 6 × 6 pixels d and a filter g give 4 × 4 results Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A: per pair of channels 36 products in
the place of 144, and over all channels and tiles 36 matrix products. The derivative is the transpose of each step.

Invariants (arrays are flat, positions count elements):
- images are (rows, columns, channels), so that every step of a transformation runs along contiguous channels;
- a transformation works on a few images at a time: what it leaves for the matrix products is still in the cache;
- what is added to what, and in which order, depends on the shapes alone.

Plain twin: `conv2d(x, weight, bias, padding=1)` of torch, to 1e-4 of the largest value in float32. A pixel that is not
finite spoils its whole tile instead of its neighbours alone.
Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2016.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor, nn

from rpel.backend.cache import compiled
from rpel.backend.vectors import Builder, add_product, instruction, integer, load, loop, store, vector_of
from rpel.types import Floats

LANES = 8
TILES = 192  # transformed at a time: with 64 channels they take 1.8 MB, and so do their results
FEWEST = 32  # channels on either side from which on it pays: 1.4 times as fast there, .7 with 16

# The points 0, ±1, ±2 and ∞. Bᵀ takes pixels to the points, Aᵀ takes products back, G takes filters to the points.
_B = (
    (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)  # fmt: skip
_A = (1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)
_G = torch.tensor([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]).double() / 24
_FILTERS = torch.kron(_G, _G)  # (36, 9)
MATRICES = _B, tuple(zip(*_B, strict=True)), _A, tuple(zip(*_A, strict=True))
_ENTER, _ENTER_BACK, _LEAVE, _LEAVE_BACK = range(4)


class Sizes(NamedTuple):
    """Images of that many rows, columns and channels, and the distance from one of their 36 matrices to the next."""

    height: int
    width: int
    channels: int
    stride: int


# --- one dimension ----------------------------------------------------------------------------------------------------


@instruction("matrix")
def transform(
    builder: Builder, source: Any, at: Any, step: Any, target: Any, to: Any, jump: Any, count: Any, matrix: int
) -> None:
    """target[to + i·jump + c] = Σ_j M[i][j] · source[at + j·step + c] for c < count, a multiple of `LANES`.

    `matrix` is a literal and names M: see MATRICES. With the transpose of Bᵀ the first two rows are added to what the
    tile before has left in the target.
    """
    rows = MATRICES[matrix]
    kind = vector_of(source, LANES)
    sources = [builder.add(at, builder.mul(step, integer(j))) for j in range(len(rows[0]))]
    targets = [builder.add(to, builder.mul(jump, integer(i))) for i in range(len(rows))]
    with loop(builder, integer(0), count, LANES) as (c, _):
        values = [load(builder, source, builder.add(begin, c), kind) for begin in sources]
        for i, (row, begin) in enumerate(zip(rows, targets, strict=True)):
            place = builder.add(begin, c)
            total = load(builder, target, place, kind) if matrix == _ENTER_BACK and i < 2 else None
            for factor, value in zip(row, values, strict=True):
                if factor:
                    total = _plus(builder, total, factor, value)
            store(builder, total, target, place)


def _plus(builder: Builder, total: Any, factor: int, value: Any) -> Any:
    """total + factor · value; no total yet is zero."""
    if total is not None and abs(factor) == 1:
        return (builder.fadd if factor > 0 else builder.fsub)(total, value)
    if total is None and factor == 1:
        return value
    constant = ir.Constant(value.type, [float(factor)] * LANES)
    return builder.fmul(value, constant) if total is None else add_product(builder, total, value, constant)


# --- both dimensions, all tiles of some images ------------------------------------------------------------------------


@compiled
def enter(images: Floats, z: Sizes, v: Floats) -> None:
    """Bᵀ d B of every tile d: images (n, height, width, channels) into v, 36 matrices (tiles, channels)."""
    c, line, row = z.channels, z.width * z.channels, (z.width + 2) * z.channels
    padded, band = np.zeros((z.height + 2) * row, v.dtype), np.empty(6 * row, v.dtype)
    tile = 0
    for n in range(len(images) // (z.height * line)):
        for y in range(z.height):
            begin = (n * z.height + y) * line
            padded[(y + 1) * row + c : (y + 1) * row + c + line] = images[begin : begin + line]
        for i in range(z.height // 4):
            transform(padded, 4 * i * row, row, band, 0, row, row, _ENTER)
            for j in range(z.width // 4):
                for a in range(6):
                    transform(band, a * row + 4 * j * c, c, v, 6 * a * z.stride + tile * c, z.stride, c, _ENTER)
                tile += 1


@compiled
def enter_back(v: Floats, z: Sizes, images: Floats) -> None:
    """The transpose of `enter`: what overlapping tiles give a pixel is added up."""
    c, line, row = z.channels, z.width * z.channels, (z.width + 2) * z.channels
    padded, band = np.empty((z.height + 2) * row, v.dtype), np.empty(6 * row, v.dtype)
    tile = 0
    for n in range(len(images) // (z.height * line)):
        padded[: 2 * row] = 0
        for i in range(z.height // 4):
            for a in range(6):
                band[a * row : a * row + 2 * c] = 0
            for j in range(z.width // 4):
                for a in range(6):
                    transform(v, 6 * a * z.stride + tile * c, z.stride, band, a * row + 4 * j * c, c, c, _ENTER_BACK)
                tile += 1
            transform(band, 0, row, padded, 4 * i * row, row, row, _ENTER_BACK)
        for y in range(z.height):
            begin = (n * z.height + y) * line
            images[begin : begin + line] = padded[(y + 1) * row + c : (y + 1) * row + c + line]


@compiled
def leave(m: Floats, z: Sizes, images: Floats) -> None:
    """Aᵀ m A of every tile: 36 matrices (tiles, channels) into images (n, height, width, channels)."""
    c, line = z.channels, z.width * z.channels
    half = np.empty(4 * 6 * c, m.dtype)
    tile = 0
    for n in range(len(images) // (z.height * line)):
        for i in range(z.height // 4):
            for j in range(z.width // 4):
                for b in range(6):
                    transform(m, b * z.stride + tile * c, 6 * z.stride, half, b * c, 6 * c, c, _LEAVE)
                for a in range(4):
                    transform(half, 6 * a * c, c, images, (n * z.height + 4 * i + a) * line + 4 * j * c, c, c, _LEAVE)
                tile += 1


@compiled
def leave_back(images: Floats, z: Sizes, m: Floats) -> None:
    """The transpose of `leave`."""
    c, line = z.channels, z.width * z.channels
    half = np.empty(6 * 4 * c, m.dtype)
    tile = 0
    for n in range(len(images) // (z.height * line)):
        for i in range(z.height // 4):
            for j in range(z.width // 4):
                transform(images, (n * z.height + 4 * i) * line + 4 * j * c, line, half, 0, 4 * c, 4 * c, _LEAVE_BACK)
                for a in range(6):
                    transform(half, 4 * a * c, c, m, 6 * a * z.stride + tile * c, z.stride, c, _LEAVE_BACK)
                tile += 1


# --- the convolution --------------------------------------------------------------------------------------------------


class _Matrices:
    """Room for the 36 matrices (tiles, channels) of some images like x (N, height, width, channels)."""

    def __init__(self, x: Tensor) -> None:
        _, self.height, self.width, self.channels = x.shape
        self.tiles = self.height * self.width // 16
        self.images = max(1, TILES // self.tiles)
        self.sizes = Sizes(self.height, self.width, self.channels, self.images * self.tiles * self.channels)
        self.room = torch.empty(36, self.sizes.stride, dtype=x.dtype)
        self.flat = self.room.view(-1).numpy()

    def of(self, images: int) -> Tensor:
        """The matrices of so many images, (36, tiles, channels)."""
        tiles = images * self.tiles
        return self.room[:, : tiles * self.channels].view(36, tiles, self.channels)


def _flat(images: Tensor) -> Any:
    return images.view(-1).numpy()


class _Convolution(torch.autograd.Function):
    """x (N, C, H, W), weight (K, C, 3, 3) and perhaps bias (K,) to (N, K, H, W), images in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        inner = x.permute(0, 2, 3, 1).contiguous()
        out = inner.new_empty(*inner.shape[:3], len(weight))
        v, m, u = _Matrices(inner), _Matrices(out), _filters(weight)
        for some, results in zip(torch.split(inner, v.images), torch.split(out, v.images), strict=True):
            enter(_flat(some), v.sizes, v.flat)
            torch.bmm(v.of(len(some)), u, out=m.of(len(some)))
            leave(m.flat, m.sizes, _flat(results))
            if bias is not None:
                results += bias
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        for_x, for_weight, for_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # somebody differentiates once more: torch's own derivative has a derivative
            size = list(weight.shape[:1]) if for_bias else None
            again = x, weight, size, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, ctx.needs_input_grad
            derivatives: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(gradient, *again)
            return derivatives
        inner, outer = x.permute(0, 2, 3, 1).contiguous(), gradient.permute(0, 2, 3, 1).contiguous()
        d_x, u = torch.empty_like(inner), _filters(weight)
        d_u = torch.zeros_like(u)
        v, d_m = _Matrices(inner), _Matrices(outer)
        for some, d_some, d_out in zip(*(torch.split(images, v.images) for images in (inner, d_x, outer)), strict=True):
            n = len(some)
            leave_back(_flat(d_out), d_m.sizes, d_m.flat)
            if for_weight:
                enter(_flat(some), v.sizes, v.flat)
                torch.baddbmm(d_u, v.of(n).mT, d_m.of(n), out=d_u)
            if for_x:  # v has served
                torch.bmm(d_m.of(n), u.mT, out=v.of(n))
                enter_back(v.flat, v.sizes, _flat(d_some))
        return (
            d_x.permute(0, 3, 1, 2) if for_x else None,
            _filters_back(d_u) if for_weight else None,
            outer.view(-1, len(weight)).sum(0) if for_bias else None,
        )


def _filters(weight: Tensor) -> Tensor:
    """G g Gᵀ of every filter: weight (K, C, 3, 3) to (36, C, K)."""
    filters, channels, *_ = weight.shape
    values = weight.detach().permute(2, 3, 1, 0).reshape(9, -1)
    return torch.mm(_FILTERS.to(weight.dtype), values).view(36, channels, filters)


def _filters_back(d_u: Tensor) -> Tensor:
    _, channels, filters = d_u.shape
    values = torch.mm(_FILTERS.to(d_u.dtype).mT, d_u.view(36, -1))
    return values.view(3, 3, channels, filters).permute(3, 2, 0, 1)


class WinogradConv2d(nn.Conv2d):
    """nn.Conv2d that takes the short way where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.dim() == 4 and len(x) > 0 and x.shape[2] % 4 == x.shape[3] % 4 == 0
        if not whole or x.dtype != self.weight.dtype or x.dtype not in (torch.float32, torch.float64):
            return super().forward(x)
        out: Tensor = _Convolution.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


def suits(layer: nn.Module) -> bool:
    """Whether a layer is a convolution that the short way knows, with channels enough for it to pay.

    >>> suits(nn.Conv2d(64, 64, 3, padding=1)), suits(nn.Conv2d(3, 64, 3, padding=1)), suits(nn.Conv2d(64, 64, 5))
    (True, False, False)
    """
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (3, 3)
        and layer.padding in ((1, 1), "same")
        and layer.padding_mode == "zeros"
        and layer.stride == layer.dilation == (1, 1)
        and layer.groups == 1
        and all(n >= FEWEST and n % LANES == 0 for n in (layer.in_channels, layer.out_channels))
    )


def with_winograd(module: nn.Module) -> nn.Module:
    """The module, each convolution that suits taking the short way from now on.

    >>> with_winograd(nn.Sequential(nn.Conv2d(32, 64, 3, padding=1)))
    Sequential(
      (0): WinogradConv2d(32, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    )
    """
    for layer in module.modules():
        if suits(layer):
            layer.__class__ = WinogradConv2d
    return module
