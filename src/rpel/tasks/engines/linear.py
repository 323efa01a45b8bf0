"""Networks of linear layers, whose derivative is written down, so that no graph is built.

The form is ``[C-R-M]… L-R-…-L[-S]`` of the paper's notation: convolutions each followed by rectifier and
pooling by 2, then linear layers with rectifiers between them, then log-softmax or nothing. `recognise`
returns None for any other module, and for one that does something else when it is called (hooks, a forward of
its own); other engines compute those. Networks with convolutions are computed in `rpel.tasks.native`.

The engine computes the layers of many nodes at once: one batched matrix product per layer instead of a loop
over nodes. Values are (nodes, width, examples): examples innermost,
so that a softmax over few classes is a pass over long rows.

Invariants: a node's result does not depend, in value, on which nodes are computed beside it, and for a fixed
division of the nodes not in a single bit; gradients end in the rows of the result.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpel.backend.compile import compiled
from rpel.tasks.engines.dropout import altered
from rpel.tasks.engines.engine import Engine, Loss, Probe, clip_factors, lend, wide
from rpel.types import Integers

CACHE_BYTES, DEVICE_BYTES = 1 << 20, 1 << 28  # of inputs or values computed at once, on a CPU and elsewhere


def build(module: nn.Module, loss: Loss, probe: Probe) -> "LinearEngine | None":
    """The engine of linear layers with rectifiers between them."""
    layers = matching(module, loss, probe)
    return None if layers is None or layers.convolutions else LinearEngine(layers, probe)


@dataclass(frozen=True)
class Affine:
    """A layer's weight and bias: their places in the vector of parameters, and the weight's shape."""

    weight: slice
    bias: slice
    shape: tuple[int, ...]
    padding: int = 0


@dataclass(frozen=True)
class Layers:
    """Convolutions (each with rectifier and pooling), then linear layers (with rectifiers between)."""

    convolutions: tuple[Affine, ...]
    linears: tuple[Affine, ...]
    d: int
    flattens: bool
    log_softmax: bool

    def take(self, shape: tuple[int, ...]) -> bool:
        """Whether they fit on examples of this shape, layer by layer.

        >>> from rpel.models import model
        >>> recognise(model("mnist")).take((1, 28, 28)), recognise(model("mnist")).take((3, 28, 28))
        (True, False)
        """
        if self.convolutions:
            if len(shape) != 3:
                return False
            channels, height, width = shape
            for c in self.convolutions:
                filters, wanted, k, _ = c.shape
                height, width = ((side + 2 * c.padding - k + 1) // 2 for side in (height, width))
                if wanted != channels or min(height, width) < 1:
                    return False
                channels = filters
            shape = (channels, height, width)
        return (self.flattens or len(shape) == 1) and math.prod(shape) == self.linears[0].shape[1]


def recognise(module: nn.Module) -> Layers | None:
    """The layers of a network of this form; None for any other.

    >>> from rpel.models import model
    >>> [len(layers) for layers in (recognise(model("mnist")).convolutions, recognise(model("mlp")).linears)]
    [2, 2]
    >>> recognise(model("cifar10")) is None
    True
    """
    if type(module) is nn.Linear:
        module = nn.Sequential(module)
    if type(module) is not nn.Sequential or any(map(altered, module.modules())):
        return None
    form = _FORM.fullmatch("".join(map(_letter, module)))
    if form is None:
        return None
    layers = [layer for layer in module if isinstance(layer, nn.Conv2d | nn.Linear)]
    if not _just(layers, module):
        return None
    return _placed(layers, form[1].count("C"), "F" in form[1], form[0].endswith("S"))


def matching(module: nn.Module, loss: Loss, probe: Probe) -> Layers | None:
    """The layers of a network of this form that classifies float examples by cross-entropy."""
    if loss is not F.cross_entropy or not probe.labels or not isinstance(probe.inputs, Tensor):
        return None
    layers = recognise(module) if probe.inputs.is_floating_point() else None
    return layers if layers is not None and layers.take(tuple(probe.inputs.shape[1:])) else None


def _just(layers: list[nn.Conv2d | nn.Linear], module: nn.Module) -> bool:
    """Return whether the module holds exactly these layers' weights and biases, in this order."""
    held = list(module.parameters())
    wanted = [id(p) for layer in layers for p in (layer.weight, layer.bias)]
    shapes = [shape for layer in layers for shape in (_shape(layer), _shape(layer)[:1])]
    plain = all(type(p) is nn.Parameter and p.requires_grad for p in held)
    fits = [id(p) for p in held] == wanted and [tuple(p.shape) for p in held] == shapes
    return plain and fits and not list(module.buffers())


def _shape(layer: nn.Conv2d | nn.Linear) -> tuple[int, ...]:
    """Return the shape of the weight, as the layer was made."""
    if isinstance(layer, nn.Conv2d):
        return (layer.out_channels, layer.in_channels, *layer.kernel_size)
    return (layer.out_features, layer.in_features)


_FORM = re.compile(r"((?:CRM)+F|F?)(?:LR)*LS?")  # images are flattened before the first linear layer


def _letter(layer: nn.Module) -> str:
    """The layer in the paper's notation, F for flattening; ? for what is not written down here."""
    if type(layer) is nn.Conv2d and layer.bias is not None and isinstance(layer.padding, tuple):
        square = layer.kernel_size[0] == layer.kernel_size[1] and layer.padding[0] == layer.padding[1]
        plain = (layer.stride, layer.dilation, layer.groups, layer.padding_mode) == (
            (1, 1),
            (1, 1),
            1,
            "zeros",
        )
        return "C" if square and plain else "?"
    if type(layer) is nn.MaxPool2d:
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return "M" if sizes == (2, 2, 0, 1) and not layer.ceil_mode and not layer.return_indices else "?"
    if type(layer) is nn.Flatten:
        return "F" if (layer.start_dim, layer.end_dim) == (1, -1) else "?"
    if type(layer) is nn.Linear:
        return "L" if layer.bias is not None else "?"
    if type(layer) is nn.LogSoftmax:
        return "S" if layer.dim in (1, -1) else "?"
    return "R" if type(layer) is nn.ReLU else "?"


def _placed(
    layers: list[nn.Conv2d | nn.Linear], convolutions: int, flattens: bool, log_softmax: bool
) -> Layers | None:
    """Return where each layer's parameters lie in the vector.

    None if the width of a layer differs from that of the layer before it.
    """
    placed, at = [], 0
    for layer in layers:
        weight, end = at + layer.weight.numel(), at + layer.weight.numel() + layer.weight.shape[0]
        padding = int(layer.padding[0]) if isinstance(layer, nn.Conv2d) else 0
        placed.append(Affine(slice(at, weight), slice(weight, end), tuple(layer.weight.shape), padding))
        at = end
    chained = all(a.shape[0] == b.shape[1] for a, b in pairwise(placed) if len(a.shape) == len(b.shape))
    if not chained:
        return None
    return Layers(tuple(placed[:convolutions]), tuple(placed[convolutions:]), at, flattens, log_softmax)


# --- the engine ---------------------------------------------------------------------------------------------


class LinearEngine(Engine):
    """Networks of linear layers only: any number of nodes at once."""

    def __init__(self, layers: Layers, probe: Probe) -> None:
        super().__init__(F.cross_entropy)
        self.linears, self.log_softmax = layers.linears, layers.log_softmax
        self.serial = probe.device.type != "cpu"

    def nodes_per_call(self, batch: int | None = None) -> int:
        """Return the number of nodes whose inputs, or whose widest values, fit into the cache."""
        widest = max(layer.shape[0] for layer in self.linears) * self.block
        each = 4 * (batch * self.linears[0].shape[1] if batch else widest)
        return max(1, (DEVICE_BYTES if self.serial else CACHE_BYTES) // each)

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes."""
        values = self._forward(x, inputs.flatten(2).mT)
        delta = _output_gradient(values.pop(), labels)
        delta /= labels.shape[1]
        for position in reversed(range(len(self.linears))):
            layer, entered = self.linears[position], values[position]
            # a product straight into rows that are not one matrix after the other takes three times longer
            _weight(out, layer).copy_(torch.bmm(delta, entered.mT))
            torch.sum(delta, dim=2, out=out[:, layer.bias])
            if position:
                delta = torch.bmm(_weight(x, layer).mT, delta)
                delta *= entered > 0

    def clipped(
        self, x: Tensor, local: Tensor, inputs: Tensor, labels: Tensor, seeds: Integers, present: Any,
        norm: float, out: Tensor,
    ) -> None:  # fmt: skip
        """Sums of clipped gradients of single examples.

        A layer's gradient is an outer product δ aᵀ, with δ for the bias, and ‖δ‖ √(‖a‖² + 1) long: so no
        gradient of a single example is ever made.
        """
        values = self._forward(x, inputs.flatten(2).mT)
        deltas, kind = [_output_gradient(values.pop(), labels)], wide(x)
        squared = x.new_zeros(present.shape, dtype=kind)
        for position in reversed(range(len(self.linears))):
            entered = values[position]
            of_layer = deltas[-1].square().sum(dim=1, dtype=kind)
            squared += of_layer * (1 + entered.square().sum(dim=1, dtype=kind))
            if position:
                deltas.append(torch.bmm(_weight(x, self.linears[position]).mT, deltas[-1]) * (entered > 0))
        there = lend(present, x)
        factors = torch.where(there, clip_factors(squared.sqrt(), norm), 0.0)[:, None].to(x.dtype)
        for layer, entered, delta in zip(self.linears, values, reversed(deltas), strict=True):
            part = torch.where(factors > 0, delta * factors, 0.0)
            _weight(out, layer).copy_(torch.bmm(part, torch.where(factors > 0, entered, 0.0).mT))
            torch.sum(part, dim=2, out=out[:, layer.bias])

    def _forward(self, x: Tensor, inputs: Tensor, log_softmax: bool = True) -> list[Tensor]:
        """What enters each layer and, last, the log-probabilities (c, classes, B), or the scores themselves.

        inputs: (c, features, B), or (features, B) common to all nodes.
        """
        values = [inputs]
        for layer in self.linears:
            if len(values) > 1:
                values[-1].relu_()
            values.append(_product(_weight(x, layer), values[-1]).add_(x[:, layer.bias, None]))
        if log_softmax:
            values[-1] = F.log_softmax(values[-1], dim=1)
        return values

    def outputs(self, x: Tensor, local: Tensor, inputs: Tensor) -> Tensor:
        """Outputs (c, N, classes) of c nodes on the same inputs (N, …)."""
        return self._forward(x, inputs.flatten(1).mT, self.log_softmax)[-1].mT

    def classify(self, x: Tensor, local: Tensor, inputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Right answers (c,) and summed cross-entropy (c,); on a CPU in one pass over long rows."""
        if self.serial:
            return super().classify(x, local, inputs, labels)
        scores = self._forward(x, inputs.flatten(1).mT)[-1].contiguous().numpy()
        right, lost = np.zeros(len(x)), np.zeros(len(x))
        _classify(scores, labels.numpy(), right, lost)
        return torch.from_numpy(right), torch.from_numpy(lost)


def _output_gradient(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each example's negative log-likelihood.

    It overwrites log_probabilities (c, classes, B).
    """
    delta = log_probabilities.exp_()
    return delta.scatter_add_(1, labels[:, None], torch.full_like(delta[:, :1], -1.0))


def _weight(x: Tensor, layer: Affine) -> Tensor:
    """A layer's weights as (c, outputs, inputs), a view of the rows."""
    return x[:, layer.weight].view(len(x), *layer.shape)


def _product(weight: Tensor, values: Tensor) -> Tensor:
    """weight (c, outputs, inputs) times values of each node, or common ones: then with all in one matrix."""
    if values.dim() == 3:
        return torch.bmm(weight, values)
    c, outputs, inputs = weight.shape
    return (weight.reshape(-1, inputs) @ values).view(c, outputs, -1)


@compiled
def _classify(logp: Any, labels: Any, right: Any, lost: Any) -> None:
    """Right answers and summed losses per node of logp (c, classes, N); the first of equals or NaNs wins."""
    nodes, classes, count = logp.shape
    best, who = np.empty(count, logp.dtype), np.empty(count, np.int32)
    for i in range(nodes):
        best[:] = logp[i, 0]
        who[:] = 0
        for k in range(1, classes):
            row = logp[i, k]
            for n in range(count):
                wins = (row[n] > best[n]) | ((row[n] != row[n]) & (best[n] == best[n]))
                best[n] = row[n] if wins else best[n]
                who[n] = k if wins else who[n]
        for n in range(count):
            right[i] += who[n] == labels[n]
            lost[i] -= logp[i, labels[n], n]
