"""Any torch module, by autograd, one node after the other: what the other engines are compared with.

Invariants:
- the caller's module is never touched: each thread works on a copy, into which a node's row is loaded;
- frozen parameters are the module's own, for every node;
- buffers (BatchNorm's statistics) are loaded from the node's local state and written back after training;
- dropout draws from a generator seeded for the node. A module that draws random numbers in any other way is
  detected when the engine is built; then nodes are computed one at a time, with torch's global generator
  seeded for each and restored afterwards.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rpel.data import trees
from rpel.models import trained
from rpel.tasks.engines.dropout import Dropout, DropoutLayer, with_dropout
from rpel.tasks.engines.engine import Engine, Loss, Probe

Rewrite = Callable[[nn.Module], nn.Module]


def build(module: nn.Module, loss: Loss, probe: Probe) -> "AutogradEngine":
    """The engine of any module."""
    return AutogradEngine(module, loss, probe)


class Arguments:
    """How a module is called: tuples and dicts are unpacked where its `forward` takes them so."""

    def __init__(self, module: nn.Module) -> None:
        self.signature = inspect.signature(module.forward)

    def __call__(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and named ones.

        >>> Arguments(nn.Bilinear(1, 1, 1))((1, 2)), Arguments(nn.Linear(1, 1))({"ids": 3})
        (((1, 2), {}), (({'ids': 3},), {}))
        """
        if isinstance(inputs, tuple) and self._fit(*inputs):
            return inputs, {}
        named = isinstance(inputs, dict) and all(map(str, inputs))
        if named and self._fit(**{str(key): 0 for key in inputs}):
            return (), inputs
        return (inputs,), {}

    def _fit(self, *positional: Any, **named: Any) -> bool:
        try:
            self.signature.bind(*positional, **named)
        except TypeError:
            return False
        return True


class Copy:
    """A thread's copy of a module, with dropout(p) in the place of each nn.Dropout."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        dropout: DropoutLayer | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        self.generator, self.arguments = torch.Generator(), Arguments(module)
        layer = dropout or (lambda p: Dropout(p, self.generator))
        self.module = with_dropout(copy.deepcopy(module), layer).to(device, dtype)
        if rewrite is not None:
            self.module = rewrite(self.module)
        self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = list(trained(self.module).values())
        self.buffers = list(self.module.buffers())

    def load(self, x: Tensor, local: Tensor, train: bool) -> None:
        """Become the node with parameters x (d,) and local state (q,)."""
        self.module.train(train)
        with torch.no_grad():
            for tensors, row in ((self.parameters, x), (self.buffers, local)):
                for value, part in zip(tensors, _parts(row, tensors), strict=True):
                    value.copy_(part)

    def run(self, inputs: Any) -> Any:
        """The module's output; images are laid out as the convolutions want them."""
        positional, named = self.arguments(trees.mapped(_channels_last, inputs))
        return self.module(*positional, **named)

    def store_buffers(self, local: Tensor) -> None:
        """Write the buffers to a node's local state (q,)."""
        for place, buffer in zip(_parts(local, self.buffers), self.buffers, strict=True):
            place.copy_(buffer)

    def store_gradient(self, loss: Tensor, out: Tensor) -> None:
        """Write the loss's gradient to out (d,); unused parameters have gradient zero."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for place, g in zip(_parts(out, self.parameters), gradients, strict=True):
            place.copy_(torch.zeros_like(place) if g is None else g)


def _channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _parts(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector, each of the shape of one of the tensors."""
    parts = torch.split(vector, [value.numel() for value in tensors]) if tensors else ()
    return [part.view(value.shape) for part, value in zip(parts, tensors, strict=True)]


class AutogradEngine(Engine):
    """Gradients of any module and any loss(output, target).

    rewrite: replaces layers of a thread's copy of the module by equal ones.
    """

    def __init__(self, module: nn.Module, loss: Loss, probe: Probe, rewrite: Rewrite | None = None) -> None:
        super().__init__(loss)
        self.module, self.device, self.rewrite = module, probe.device, rewrite
        # CIFAR-10's network keeps 13 MB of values a layer for 50 images; with 250 it waits for the memory
        self.block = 50 if any(value.dim() == 4 for _, value in trees.leaves(probe.inputs)) else 250
        self.draws_elsewhere = _draws_elsewhere(module, probe.inputs)
        self.noisy = self.draws_elsewhere or any(type(layer) is nn.Dropout for layer in module.modules())
        self.serial = self.draws_elsewhere or probe.device.type != "cpu"

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, one after the other."""
        own = self._copy(x.dtype)
        for i in range(len(x)):
            own.load(x[i], local[i], train)
            with self._seeded(own, seeds[i] if train and self.noisy else 0):
                mine, targets = (trees.mapped(lambda value, i=i: value[i], tree) for tree in (inputs, labels))
                loss = self.loss(own.run(mine), targets)
            own.store_gradient(loss, out[i])
            if train:
                own.store_buffers(local[i])

    @torch.no_grad()
    def outputs(self, x: Tensor, local: Tensor, inputs: Any) -> Any:
        """Outputs (c, N, …) of c nodes on common inputs (N, …), with the nodes' own statistics."""
        own = self._copy(x.dtype)
        results = []
        for i in range(len(x)):
            own.load(x[i], local[i], train=False)
            # a module may write into what it is given
            results.append(own.run(trees.mapped(torch.clone, inputs)))
        return torch.stack(results) if all(isinstance(one, Tensor) for one in results) else results

    def _copy(self, dtype: torch.dtype) -> Copy:
        """This thread's copy."""
        if getattr(self.scratch, "dtype", None) != dtype:
            self.scratch.copy = Copy(self.module, dtype, self.device, rewrite=self.rewrite)
            self.scratch.dtype = dtype
        found: Copy = self.scratch.copy
        return found

    @contextmanager
    def _seeded(self, own: Copy, seed: int) -> Iterator[None]:
        own.generator.manual_seed(seed)
        if not self.draws_elsewhere:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def _draws_elsewhere(module: nn.Module, inputs: Any) -> bool:
    """Whether a training step moves torch's global generator."""
    own = Copy(module, torch.float32)
    own.module.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        own.run(trees.mapped(torch.clone, inputs))
        return not torch.equal(before, torch.get_rng_state())
