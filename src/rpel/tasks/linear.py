"""Linear layers of many nodes at once: one batched matrix product per layer instead of a loop over nodes.

Invariants: a node's result does not depend, in value, on which nodes are computed beside it, and for a fixed division
of the nodes not in a single bit; gradients are written straight into the rows of the result.
Plain twin: autograd on `nn.Linear`, `nn.ReLU` and cross-entropy, node by node.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rpel.tasks.layers import Affine, Layers

_SCRATCH = 1 << 21  # bytes of input that are worth having in the cache at once


class Linears:
    """The linear layers of c nodes, on inputs (c, B, features) of their own or (B, features) common to all."""

    def __init__(self, linears: tuple[Affine, ...]) -> None:
        self.linears = linears

    def forward(self, x: Tensor, inputs: Tensor) -> list[Tensor]:
        """Inputs of each layer and, last, the log-probabilities (c, B, classes); x (c, d) the nodes' parameters."""
        values = [inputs]
        for layer in self.linears:
            if len(values) > 1:
                values[-1].relu_()
            values.append(_affine(x, layer, values[-1]))
        values[-1] = F.log_softmax(values[-1], dim=2)
        return values

    def backward(self, x: Tensor, values: list[Tensor], labels: Tensor, out: Tensor, inward: bool) -> Tensor | None:
        """The gradient of the mean negative log-likelihood into the rows of `out`; of the inputs too if `inward`."""
        delta = values[-1].exp_()
        delta.scatter_add_(2, labels[..., None], torch.full_like(delta[..., :1], -1.0))
        delta /= labels.shape[1]
        for position in reversed(range(len(self.linears))):
            layer, entered = self.linears[position], values[position]
            _product(delta.mT, entered, _matrix(out, layer))
            torch.sum(delta, dim=1, out=out[:, layer.bias])
            if position == 0 and not inward:
                return None
            delta = _product(delta, _matrix(x, layer))
            if position:
                delta *= entered > 0
        return delta


def _matrix(x: Tensor, layer: Affine) -> Tensor:
    """A layer's weights as (c, outputs, inputs), a view of the rows."""
    return x[:, layer.weight].view(len(x), *layer.shape)


def _affine(x: Tensor, layer: Affine, inputs: Tensor) -> Tensor:
    weight, bias = _matrix(x, layer), x[:, layer.bias]
    if inputs.dim() == 2:  # common to all nodes: one product with all their weights side by side
        product = inputs @ weight.reshape(-1, layer.shape[1]).mT
        return product.view(len(inputs), len(x), layer.shape[0]).transpose(0, 1).contiguous().add_(bias[:, None])
    return _product(inputs, weight.mT).add_(bias[:, None])


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The matrix products of each node; for a single one the plain product is quicker than a batch of one."""
    if len(a) > 1:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    return torch.mm(a[0], b[0])[None] if out is None else torch.mm(a[0], b[0], out=out[0])[None]


class LinearEngine:
    """Networks of linear layers only: any number of nodes at once."""

    def __init__(self, layers: Layers) -> None:
        self.layers = Linears(layers.linears)
        self.d = layers.d

    serial = noisy = False

    def together(self, batch: int | None = None) -> int:
        """How many nodes to compute at once: so many that their inputs, or their models, fit into the cache."""
        return max(1, _SCRATCH // (4 * (batch * self.layers.linears[0].shape[1] if batch else self.d)))

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Tensor, labels: Tensor, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, x (c, d), inputs (c, B, …), labels (c, B), into out (c, d)."""
        values = self.layers.forward(x, inputs.flatten(2))
        self.layers.backward(x, values, labels, out, inward=False)

    def outputs(self, x: Tensor, local: Tensor, inputs: Tensor) -> Tensor:
        """Log-probabilities (c, N, classes) of c nodes on the same inputs (N, …)."""
        return self.layers.forward(x, inputs.flatten(1))[-1]
