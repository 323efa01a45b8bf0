"""Convolutional networks of the paper's plain form, node by node, forward and backward without a graph.

Invariants: one node is computed by one thread from beginning to end, so the number of threads cannot change a
bit; a thread keeps scratch for one batch of one node and nothing else.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.tasks.engines.engine import Engine, Loss, Probe
from rpel.tasks.engines.linear import Affine, Layers, matching
from rpel.tasks.native.windows import (
    SPARE,
    Place,
    Stage,
    arrange,
    image_gradient,
    place,
    pool,
    pool_gradient,
    pool_images,
    restore,
    stage,
)


def build(module: nn.Module, loss: Loss, probe: Probe) -> "ConvolutionEngine | None":
    """The engine of networks C-R-M-…-L on a CPU, for gradients of whole batches."""
    if probe.device.type != "cpu" or probe.by_example:
        return None
    layers = matching(module, loss, probe)
    if layers is None or not layers.convolutions:
        return None
    return ConvolutionEngine(layers, tuple(probe.inputs.shape[1:]))


class _Scratch:
    """The arrays of one thread for `count` images of one stage, zero where nothing is ever written."""

    def __init__(self, s: Stage, count: int, dtype: Any) -> None:
        self.images = np.zeros(count * s.height * s.width * s.channels + SPARE, dtype)
        self.d_images = np.zeros_like(self.images)
        self.winners = np.zeros(count * s.rows * s.columns * s.filters + SPARE, np.uint8)
        self.weights = np.zeros(s.blocks * s.lanes * s.k * s.k * s.channels, dtype)
        self.offsets = np.zeros(s.blocks * s.lanes, dtype)
        self.taps = np.zeros(s.filters * s.k * s.run + SPARE, dtype)
        self.d_taps = np.zeros_like(self.taps)
        self.begins = np.zeros(max(s.rows * s.columns, s.filters) + 4, np.int64)
        self.factors = np.zeros(len(self.begins), dtype)


class _Head:
    """The linear layers of one node, x (d,), on features (B, width)."""

    def __init__(self, linears: tuple[Affine, ...], log_softmax: bool) -> None:
        self.linears, self.log_softmax = linears, log_softmax

    def forward(self, x: Tensor, features: Tensor, log_softmax: bool = True) -> list[Tensor]:
        """What enters each layer and, last, the log-probabilities (B, classes), or the scores themselves."""
        values = [features]
        for layer in self.linears:
            if len(values) > 1:
                values[-1].relu_()
            weight = x[layer.weight].view(layer.shape)
            values.append(torch.mm(values[-1], weight.mT).add_(x[layer.bias]))
        if log_softmax:
            values[-1] = F.log_softmax(values[-1], dim=1)
        return values

    def backward(self, x: Tensor, values: list[Tensor], labels: Tensor, out: Tensor) -> Tensor:
        """Compute the gradient of the mean negative log-likelihood.

        The layers' gradient goes into `out` (d,); that of the features is returned.
        """
        delta = _scores_gradient(values[-1], labels)
        delta /= len(labels)
        for position in reversed(range(len(self.linears))):
            layer, entered = self.linears[position], values[position]
            torch.mm(delta.mT, entered, out=out[layer.weight].view(layer.shape))
            torch.sum(delta, dim=0, out=out[layer.bias])
            delta = torch.mm(delta, x[layer.weight].view(layer.shape))
            if position:
                delta *= entered > 0
        return delta


def _scores_gradient(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each example's negative log-likelihood with respect to its scores.

    It overwrites the log-probabilities (B, classes).
    """
    delta = scores.exp_()
    return delta.scatter_add_(1, labels[:, None], torch.full_like(delta[:, :1], -1.0))


class ConvolutionEngine(Engine):
    """Stages of convolution, rectifier and pooling, then linear layers."""

    def __init__(self, layers: Layers, shape: tuple[int, ...]) -> None:
        super().__init__(F.cross_entropy)
        self.affines, self.head = layers.convolutions, _Head(layers.linears, layers.log_softmax)
        self.stages, self.places = _stages(layers.convolutions, shape)

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, one after the other."""
        for i in range(len(x)):
            scratch, pooled = self._scratch(inputs.shape[1], x.dtype)
            self._arrange(scratch, x[i].numpy())
            values = self.head.forward(x[i], self._pooled(scratch, pooled, inputs[i]))
            delta = self.head.backward(x[i], values, labels[i], out[i])
            self._backward(scratch, self._inner_order(delta), inputs.shape[1], out[i].numpy())

    def outputs(self, x: Tensor, local: Tensor, inputs: Tensor) -> Tensor:
        """Outputs (c, N, classes) of c nodes on the same inputs (N, C, H, W)."""
        return torch.stack([self._outputs(row, inputs) for row in x])

    def _outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        scratch, pooled = self._scratch(1, x.dtype)
        self._arrange(scratch, x.numpy())
        last = self.stages[-1]
        features = torch.empty(len(inputs), last.filters, last.rows, last.columns, dtype=x.dtype)
        images, weights, offsets, winners = (
            tuple(getattr(own, name) for own in scratch)
            for name in ("images", "weights", "offsets", "winners")
        )
        pool_images(
            tuple(self.stages), tuple(self.places), inputs.numpy(), self.affines[0].padding,
            (*images, pooled), weights, offsets, winners, features.numpy(),
        )  # fmt: skip
        return self.head.forward(x, features.view(len(inputs), -1), self.head.log_softmax)[-1]

    def _scratch(self, count: int, dtype: torch.dtype) -> tuple[list[_Scratch], NDArray[Any]]:
        """This thread's arrays: one set per stage, and the pooled values of the last."""
        if getattr(self.scratch, "key", None) != (count, dtype):
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            self.scratch.scratch = [_Scratch(s, count, kind) for s in self.stages]
            self.scratch.pooled = np.zeros(count * self.places[-1].image + SPARE, kind)
            self.scratch.key = (count, dtype)
        return self.scratch.scratch, self.scratch.pooled

    def _arrange(self, scratch: list[_Scratch], x: NDArray[Any]) -> None:
        for s, affine, own in zip(self.stages, self.affines, scratch, strict=True):
            arrange(s, x[affine.weight], x[affine.bias], own.weights, own.offsets, own.taps)

    def _pooled(self, scratch: list[_Scratch], pooled: NDArray[Any], inputs: Tensor) -> Tensor:
        """What the linear layers see, (B, features) in torch's order (channels, rows, columns)."""
        count = len(inputs)
        self._take(scratch[0].images, inputs)
        targets = [*(own.images for own in scratch[1:]), pooled]
        for s, to, own, out in zip(self.stages, self.places, scratch, targets, strict=True):
            pool(s, count, own.images, own.weights, own.offsets, out, to, own.winners)
        last = self.stages[-1]
        values = torch.from_numpy(pooled)[: count * self.places[-1].image]
        return (
            values.view(count, last.rows, last.columns, last.filters).permute(0, 3, 1, 2).reshape(count, -1)
        )

    def _take(self, images: NDArray[Any], inputs: Tensor) -> None:
        """Copy the inputs (B, C, H, W) into the first stage's padded images (B, H, W, C)."""
        s, p = self.stages[0], self.affines[0].padding
        size = len(inputs) * s.height * s.width * s.channels
        padded = torch.from_numpy(images)[:size].view(len(inputs), s.height, s.width, s.channels)
        padded[:, p : s.height - p, p : s.width - p] = inputs.permute(0, 2, 3, 1)

    def _inner_order(self, delta: Tensor) -> NDArray[Any]:
        """A gradient (B, features) in the order of the last stage's pooled values, flat."""
        last = self.stages[-1]
        grid = delta.view(len(delta), last.filters, last.rows, last.columns)
        flat: NDArray[Any] = grid.permute(0, 2, 3, 1).reshape(-1).numpy()
        return flat

    def _backward(
        self, scratch: list[_Scratch], gradient: NDArray[Any], count: int, out: NDArray[Any]
    ) -> None:
        """Compute the gradients of all convolutions, into one row of the result.

        They follow from the gradient of the last pooled values.
        """
        for i in reversed(range(len(self.stages))):
            s, of, own, affine = self.stages[i], self.places[i], scratch[i], self.affines[i]
            own.d_taps.fill(0)
            bias = out[affine.bias]
            bias.fill(0)
            lists = own.winners, own.begins, own.factors
            pool_gradient(s, count, own.images, gradient, of, *lists, own.d_taps, bias)
            restore(s, own.d_taps, out[affine.weight])
            if i:
                own.d_images.fill(0)
                image_gradient(s, count, own.taps, gradient, of, *lists, own.d_images)
                gradient = own.d_images


def _stages(convolutions: tuple[Affine, ...], shape: tuple[int, ...]) -> tuple[list[Stage], list[Place]]:
    """The sizes of each stage on images (C, H, W), and where each puts its results."""
    stages: list[Stage] = []
    _, height, width = shape
    for c in convolutions:
        filters, channels, k, _ = c.shape
        stages.append(stage(height + 2 * c.padding, width + 2 * c.padding, channels, filters, k))
        height, width = stages[-1].rows, stages[-1].columns
    paddings = [after.padding for _, after in pairwise(convolutions)] + [0]
    return stages, [place(s, padding) for s, padding in zip(stages, paddings, strict=True)]
