"""Networks whose derivative is written down here, so that no graph is built: recognised from a torch module.

``[C-R-M]… L-R-…-L[-S]`` of the paper's notation: convolutions each followed by rectifier and pooling by 2, then linear
layers with rectifiers between them, then log-softmax or nothing. Whatever else a module contains makes it a stranger
here (`recognise` returns None), and autograd takes it.
"""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn


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
    if type(module) is not nn.Sequential:
        return None
    children = list(module)
    if children and type(children[-1]) is nn.LogSoftmax and children[-1].dim in (1, -1):
        children.pop()
    split = next((i for i, child in enumerate(children) if type(child) in (nn.Flatten, nn.Linear)), len(children))
    convolutions, linears = children[:split], children[split:]
    if linears and _is_flatten(linears[0]):
        linears = linears[1:]
    elif convolutions:
        return None
    if not _are_convolutions(convolutions) or not _are_linears(linears):
        return None
    found = [layer for layer in (*convolutions, *linears) if isinstance(layer, nn.Conv2d | nn.Linear)]
    return _placed(found, len(convolutions) // 3)


def _is_flatten(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _are_convolutions(layers: list[nn.Module]) -> bool:
    """Triples of convolution, rectifier and pooling by 2."""
    return len(layers) % 3 == 0 and all(
        _is_plain_convolution(c) and type(r) is nn.ReLU and _is_pooling_by_two(m)
        for c, r, m in zip(layers[::3], layers[1::3], layers[2::3], strict=True)
    )


def _is_plain_convolution(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer.bias is None or not isinstance(layer.padding, tuple):
        return False
    square = layer.kernel_size[0] == layer.kernel_size[1] and layer.padding[0] == layer.padding[1]
    plain = (layer.stride, layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
    return square and plain


def _is_pooling_by_two(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d:
        return False
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return sizes == (2, 2, 0, 1) and not layer.ceil_mode and not layer.return_indices


def _are_linears(layers: list[nn.Module]) -> bool:
    """Linear layers with a bias, a rectifier between each two."""
    return len(layers) % 2 == 1 and all(
        (type(layer) is nn.Linear and layer.bias is not None) if i % 2 == 0 else type(layer) is nn.ReLU
        for i, layer in enumerate(layers)
    )


def _placed(layers: list[nn.Conv2d | nn.Linear], convolutions: int) -> Layers | None:
    """Where each layer's parameters lie in the vector; None if parameters are shared, frozen or of the wrong width."""
    parameters = [p for layer in layers for p in layer.parameters()]
    if len({id(p) for p in parameters}) < len(parameters) or not all(p.requires_grad for p in parameters):
        return None
    placed, at = [], 0
    for layer in layers:
        weight, end = at + layer.weight.numel(), at + layer.weight.numel() + layer.weight.shape[0]
        padding = int(layer.padding[0]) if isinstance(layer, nn.Conv2d) else 0
        placed.append(Affine(slice(at, weight), slice(weight, end), tuple(layer.weight.shape), padding))
        at = end
    chained = all(a.shape[0] == b.shape[1] for a, b in pairwise(placed) if len(a.shape) == len(b.shape))
    return Layers(tuple(placed[:convolutions]), tuple(placed[convolutions:]), at) if chained else None
