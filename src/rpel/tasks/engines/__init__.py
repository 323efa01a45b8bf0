"""Engines: who computes gradients and outputs of a module.

``ENGINES`` is a table of modules. Each has ``build(module, loss, probe) -> Engine | None``: an engine that is
complete, or None for a module it does not compute. The first that accepts computes; `autograd` always
accepts. To add one, write a module with `build` and put its name into the table: the tests of the table hold
it to what autograd computes.
"""

from collections.abc import Sequence
from importlib import import_module

from torch import nn

from rpel.tasks.engines.engine import Engine, Loss, Probe

ENGINES = (
    "rpel.tasks.native.convolution",
    "rpel.tasks.engines.linear",
    "rpel.tasks.engines.vmap",
    "rpel.tasks.native.blocks",
    "rpel.tasks.engines.autograd",
)
PLAIN = ENGINES[-1:]
"""Autograd alone."""


def portable(engines: Sequence[str] = ENGINES) -> tuple[str, ...]:
    """The engines without hand-written kernels.

    >>> [name.rpartition(".")[2] for name in portable()]
    ['linear', 'vmap', 'autograd']
    """
    return tuple(name for name in engines if ".native." not in name)


def choose(module: nn.Module, loss: Loss, probe: Probe, engines: Sequence[str] = ENGINES) -> Engine:
    """The first engine of the table that accepts a module."""
    built = (import_module(name).build(module, loss, probe) for name in engines)
    engine: Engine = next(one for one in built if one is not None)
    return engine


__all__ = ["ENGINES", "PLAIN", "Engine", "Loss", "Probe", "choose", "portable"]
