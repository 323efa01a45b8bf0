"""Dropout that draws from a node's own generator, in the place of torch's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

DropoutLayer = Callable[[float], nn.Module]
"""Makes what stands in a module for nn.Dropout(p)."""


class Dropout(nn.Module):
    """Dropout that draws from a given generator on the host, so that every device drops the same values."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p, self.generator = p, generator

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        return x * dropout_mask(self.p, x, self.generator) if self.active else x


def dropout_mask(p: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Factors of dropout for values laid out like these: 0 with probability p, else 1 / (1 − p).

    One number of the generator decides on four values, so p counts in steps of 2**-16; a number for each, as
    bernoulli_ draws, took a twentieth of a step of CIFAR-10's network.

    >>> dropout_mask(0.5, torch.empty(8), torch.Generator().manual_seed(1))
    tensor([0., 0., 0., 2., 2., 0., 2., 0.])
    """
    steps = round(p * 2**16)
    if steps == 2**16:
        return torch.zeros_like(like)
    numbers = torch.empty(-(-like.numel() // 4), dtype=torch.int64)
    draws = numbers.random_(-(2**63), None, generator=generator).view(torch.int16)[: like.numel()]
    kept = torch.empty_like(like, device="cpu")  # without gaps, so that it is a vector in its memory's order
    torch.ge(draws, steps - 2**15, out=kept.as_strided((like.numel(),), (1,)))
    return kept.mul_(2**16 / (2**16 - steps)).to(like.device)


def altered(layer: nn.Module) -> bool:
    """Whether calling this layer does more than its class says: it has hooks, or a forward of its own.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(lambda layer, given, output: 0 * output)
    >>> altered(layer), altered(nn.Linear(2, 2))
    (True, False)
    """
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    everywhere = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    return any(hooks) or any(everywhere) or "forward" in vars(layer)


def with_dropout(module: nn.Module, layer: DropoutLayer) -> nn.Module:
    """Replace each nn.Dropout of a module, at any depth, by layer(p).

    >>> with_dropout(nn.Sequential(nn.Dropout(0.5)), lambda p: nn.Identity())
    Sequential(
      (0): Identity()
    )
    """
    if type(module) is nn.Dropout and not altered(module):
        return layer(module.p)
    for name, child in module.named_children():
        setattr(module, name, with_dropout(child, layer))
    return module
