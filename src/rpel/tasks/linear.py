"""Linear layers of many nodes at once: one batched matrix product per layer instead of a loop over nodes.

Values are (nodes, width, examples): examples innermost, so that a softmax over few classes is a pass over long rows.

Invariants: a node's result does not depend, in value, on which nodes are computed beside it, and for a fixed division
of the nodes not in a single bit; gradients end in the rows of the result.
Plain twin: autograd on `nn.Linear`, `nn.ReLU` and cross-entropy, node by node.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rpel.kernels.cache import compiled
from rpel.tasks.layers import Affine, Layers
from rpel.types import Floats

_SCRATCH = 1 << 20  # bytes that are worth having in the cache at once


class LinearEngine:
    """Networks of linear layers only: any number of nodes at once."""

    def __init__(self, layers: Layers) -> None:
        self.linears, self.d = layers.linears, layers.d

    serial = noisy = False
    block = 250

    def together(self, batch: int | None = None) -> int:
        """How many nodes to compute at once: so many that their inputs, or their widest values, fit into the cache."""
        widest = max(layer.shape[0] for layer in self.linears) * self.block
        return max(1, _SCRATCH // (4 * (batch * self.linears[0].shape[1] if batch else widest)))

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Tensor, labels: Tensor, seeds: list[int], out: Tensor, train: bool
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
        """How many of the common inputs (N, …) each of c nodes gets right (c,), and the sum of its losses (c,)."""
        found = self._forward(x, inputs.flatten(1).mT)[-1].contiguous().numpy()
        right, lost = np.zeros(len(x)), np.zeros(len(x))
        _score(found, labels.numpy(), right, lost)
        return right, lost


def _weight(x: Tensor, layer: Affine) -> Tensor:
    """A layer's weights as (c, outputs, inputs), a view of the rows."""
    return x[:, layer.weight].view(len(x), *layer.shape)


def _product(weight: Tensor, values: Tensor) -> Tensor:
    """weight (c, outputs, inputs) times values of each node, or common ones: then with all weights in one matrix."""
    if values.dim() == 3:
        return torch.bmm(weight, values)
    c, outputs, inputs = weight.shape
    return (weight.reshape(-1, inputs) @ values).view(c, outputs, -1)


@compiled
def _score(logp: Any, labels: Any, right: Any, lost: Any) -> None:
    """Per node of logp (c, classes, N): right answers, where the first of equals or of NaNs wins, and summed losses."""
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
