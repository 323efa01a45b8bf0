"""Networks whose derivative is written down, so that no graph is built: their form,
and the engine for linear layers.

The form is ``[C-R-M]… L-R-…-L[-S]`` of the paper's notation: convolutions each followed by rectifier and
pooling by 2, then linear layers with rectifiers between them, then log-softmax or nothing. Whatever else a
module contains, or does when it is called (hooks, a forward of its own), makes it a stranger here
(`recognise` returns None), and autograd takes it.

The engine computes the layers of many nodes at once: one batched matrix product per layer instead of a loop
over nodes. Values are (nodes, width, examples): examples innermost,
so that a softmax over few classes is a pass over long rows.

Invariants: a node's result does not depend, in value, on which nodes are computed beside it, and for a fixed
division of the nodes not in a single bit; gradients end in the rows of the result.
Plain twin: autograd on `nn.Linear`, `nn.ReLU` and cross-entropy, node by node.
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

from rpel.backend.cache import compiled
from rpel.tasks.dropout import altered
from rpel.tasks.task import Engine, shortened, tensor
from rpel.types import Floats, Integers

_SCRATCH = 1 << 20  # bytes that are worth having in the cache at once


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
    flattens: bool = True

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
    return _placed(layers, form[1].count("C"), "F" in form[1]) if _just(layers, module) else None


def _just(layers: list[nn.Conv2d | nn.Linear], module: nn.Module) -> bool:
    """Whether the module holds these layers' weights and biases, in this order and each once,
    and nothing else."""
    held = list(module.parameters())
    wanted = [id(p) for layer in layers for p in (layer.weight, layer.bias)]
    shapes = [shape for layer in layers for shape in (_shape(layer), _shape(layer)[:1])]
    plain = all(type(p) is nn.Parameter and p.requires_grad for p in held)
    fits = [id(p) for p in held] == wanted and [tuple(p.shape) for p in held] == shapes
    return plain and fits and not list(module.buffers())


def _shape(layer: nn.Conv2d | nn.Linear) -> tuple[int, ...]:
    """Of the weight, as the layer was made."""
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


def _placed(layers: list[nn.Conv2d | nn.Linear], convolutions: int, flattens: bool) -> Layers | None:
    """Where each layer's parameters lie in the vector;
    None if a layer is not as wide as the one before it."""
    placed, at = [], 0
    for layer in layers:
        weight, end = at + layer.weight.numel(), at + layer.weight.numel() + layer.weight.shape[0]
        padding = int(layer.padding[0]) if isinstance(layer, nn.Conv2d) else 0
        placed.append(Affine(slice(at, weight), slice(weight, end), tuple(layer.weight.shape), padding))
        at = end
    chained = all(a.shape[0] == b.shape[1] for a, b in pairwise(placed) if len(a.shape) == len(b.shape))
    return (
        Layers(tuple(placed[:convolutions]), tuple(placed[convolutions:]), at, flattens) if chained else None
    )


# --- the engine ---------------------------------------------------------------------------------------------


class LinearEngine(Engine):
    """Networks of linear layers only: any number of nodes at once."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.linears = layers.linears

    def together(self, batch: int | None = None) -> int:
        """How many nodes to compute at once: so many that their inputs, or their widest values,
        fit into the cache."""
        widest = max(layer.shape[0] for layer in self.linears) * self.block
        return max(1, _SCRATCH // (4 * (batch * self.linears[0].shape[1] if batch else widest)))

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, x (c, d), inputs (c, B, …), labels (c, B), into out (c, d)."""
        values = self._forward(x, inputs.flatten(2).mT)
        delta = values.pop().exp_()
        delta.scatter_add_(1, labels[:, None], torch.full_like(delta[:, :1], -1.0))
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
        """Sums of single examples' gradients, each shortened to `norm`, of c nodes into out (c, d).

        A layer's gradient is an outer product δ aᵀ, with δ for the bias, and as long as ‖δ‖ √(‖a‖² + 1): so
        no gradient of a single example is ever made.
        """
        values = self._forward(x, inputs.flatten(2).mT)
        delta = values.pop().exp_()
        delta.scatter_add_(1, labels[:, None], torch.full_like(delta[:, :1], -1.0))
        deltas, squared = [delta], torch.zeros(present.shape, dtype=torch.float64)
        for position in reversed(range(len(self.linears))):
            entered = values[position]
            of_layer = deltas[-1].square().sum(dim=1, dtype=torch.float64)
            squared += of_layer * (1 + entered.square().sum(dim=1, dtype=torch.float64))
            if position:
                deltas.append(torch.bmm(_weight(x, self.linears[position]).mT, deltas[-1]) * (entered > 0))
        factors = torch.where(tensor(present), shortened(squared.sqrt(), norm), 0.0)[:, None].to(x.dtype)
        for layer, entered, delta in zip(self.linears, values, reversed(deltas), strict=True):
            part = torch.where(factors > 0, delta * factors, 0.0)
            _weight(out, layer).copy_(torch.bmm(part, torch.where(factors > 0, entered, 0.0).mT))
            torch.sum(part, dim=2, out=out[:, layer.bias])

    def _forward(self, x: Tensor, inputs: Tensor) -> list[Tensor]:
        """What enters each layer and, last, the log-probabilities (c, classes, B).

        inputs: (c, features, B), or (features, B) common to all nodes.
        """
        values = [inputs]
        for layer in self.linears:
            if len(values) > 1:
                values[-1].relu_()
            values.append(_product(_weight(x, layer), values[-1]).add_(x[:, layer.bias, None]))
        values[-1] = F.log_softmax(values[-1], dim=1)
        return values

    def outputs(self, x: Tensor, local: Tensor, inputs: Tensor) -> Tensor:
        """Log-probabilities (c, N, classes) of c nodes on the same inputs (N, …)."""
        return self._forward(x, inputs.flatten(1).mT)[-1].mT

    def score(self, x: Tensor, local: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Floats, Floats]:
        """How many of the common inputs (N, …) each of c nodes gets right (c,),
        and the sum of its losses (c,)."""
        found = self._forward(x, inputs.flatten(1).mT)[-1].contiguous().numpy()
        right, lost = np.zeros(len(x)), np.zeros(len(x))
        _score(found, labels.numpy(), right, lost)
        return right, lost


def _weight(x: Tensor, layer: Affine) -> Tensor:
    """A layer's weights as (c, outputs, inputs), a view of the rows."""
    return x[:, layer.weight].view(len(x), *layer.shape)


def _product(weight: Tensor, values: Tensor) -> Tensor:
    """weight (c, outputs, inputs) times values of each node, or common ones:
    then with all weights in one matrix."""
    if values.dim() == 3:
        return torch.bmm(weight, values)
    c, outputs, inputs = weight.shape
    return (weight.reshape(-1, inputs) @ values).view(c, outputs, -1)


@compiled
def _score(logp: Any, labels: Any, right: Any, lost: Any) -> None:
    """Per node of logp (c, classes, N): right answers, where the first of equals or of NaNs wins,
    and summed losses."""
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
