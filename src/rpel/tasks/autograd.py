"""Any torch module, by autograd: the plain twin of the other engines,
and the engine for everything they do not know.

Invariants:
- the caller's module is never touched: each thread works on a copy of its own,
  into which a node's row is loaded;
- frozen parameters are the module's own, for every node;
- buffers (BatchNorm's statistics) are loaded from the node's local state and written back after training;
- dropout draws from a generator seeded for the node. A module that draws random numbers in any other way is
  found out when the engine is made, and then nodes are computed one after the other, torch's global generator
  seeded for each and put back afterwards.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rpel.data import trees
from rpel.models import trained
from rpel.tasks.blocks import with_blocks
from rpel.tasks.dropout import Dropout, DropoutLayer, with_dropout
from rpel.tasks.task import Engine, Loss, Metric
from rpel.tasks.winograd import with_winograd


class Arguments:
    """How a module is called: a tuple's values one by one and a dict's by name, where its `forward` takes
    them so; otherwise the tuple or the dict as one argument."""

    def __init__(self, module: nn.Module) -> None:
        self.signature = inspect.signature(module.forward)

    def __call__(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and named ones.

        >>> Arguments(nn.Bilinear(1, 1, 1))((1, 2)), Arguments(nn.Linear(1, 1))({"ids": 3})
        (((1, 2), {}), (({'ids': 3},), {}))
        """
        if isinstance(inputs, tuple) and self._fit(*inputs):
            return inputs, {}
        if (
            isinstance(inputs, dict)
            and all(map(str, inputs))
            and self._fit(**{str(key): 0 for key in inputs})
        ):
            return (), inputs
        return (inputs,), {}

    def _fit(self, *positional: Any, **named: Any) -> bool:
        try:
            self.signature.bind(*positional, **named)
        except TypeError:
            return False
        return True


class Copy:
    """One thread's copy of the module, with dropout(p) in the place of each nn.Dropout."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        dropout: DropoutLayer | None = None,
    ) -> None:
        self.generator, self.arguments = torch.Generator(device), Arguments(module)
        layer = dropout or (lambda p: Dropout(p, self.generator))
        self.module = with_dropout(copy.deepcopy(module), layer).to(device, dtype)
        if device.type == "cpu":
            self.module = with_blocks(with_winograd(self.module))
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = list(trained(self.module).values())
        self.buffers = list(self.module.buffers())
        self.device = device

    def load(self, x: Tensor, local: Tensor, train: bool) -> None:
        """Become the node with parameters x (d,) and local state (q,)."""
        self.module.train(train)
        with torch.no_grad():
            for tensors, row in ((self.parameters, x), (self.buffers, local)):
                for tensor, part in zip(tensors, _parts(row, tensors), strict=True):
                    tensor.copy_(part)

    def run(self, inputs: Any) -> Any:
        """The module's output; images are laid out as the convolutions want them."""
        positional, named = self.arguments(trees.mapped(self._laid_out, inputs))
        return self.module(*positional, **named)

    def _laid_out(self, value: Tensor) -> Tensor:
        value = value.to(self.device)
        if value.dim() == 4 and self.device.type == "cpu":
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    def store_buffers(self, local: Tensor) -> None:
        for place, buffer in zip(_parts(local, self.buffers), self.buffers, strict=True):
            place.copy_(buffer)

    def store_gradient(self, loss: Tensor, out: Tensor) -> None:
        """The loss's gradient into out (d,); unused parameters have gradient zero."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for place, g in zip(_parts(out, self.parameters), found, strict=True):
            place.copy_(torch.zeros_like(place) if g is None else g)


def _parts(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector, each of the shape of one of the tensors."""
    parts = torch.split(vector, [tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class AutogradEngine(Engine):
    """Gradients of any module and any loss(output, target), node by node."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        probe: Any,
        device: torch.device,
        metrics: Sequence[Metric] = (),
    ) -> None:
        super().__init__(loss, metrics)
        self.module, self.device = module, device
        # CIFAR-10's network keeps 13 MB of values a layer for 50 images; with 250 it waits for the memory
        self.block = 50 if any(value.dim() == 4 for _, value in trees.leaves(probe)) else 250
        self.hidden = self._draws_elsewhere(probe)
        self.noisy = self.hidden or any(type(layer) is nn.Dropout for layer in module.modules())
        self.serial = self.hidden or device.type != "cpu"

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, x (c, d), inputs (c, B, …), labels (c, B), into out (c, d)."""
        own = self._copy(x.dtype)
        for i in range(len(x)):
            own.load(x[i], local[i], train)
            with self._seeded(own, seeds[i] if train and self.noisy else 0):
                mine = trees.mapped(lambda value, i=i: value[i], inputs)
                output = own.run(mine)
                loss = self.loss(output, trees.mapped(lambda value, i=i: value[i].to(self.device), labels))
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
        if getattr(self.own, "dtype", None) != dtype:
            self.own.copy, self.own.dtype = Copy(self.module, dtype, self.device), dtype
        found: Copy = self.own.copy
        return found

    @contextmanager
    def _seeded(self, own: Copy, seed: int) -> Iterator[None]:
        own.generator.manual_seed(seed)
        if not self.hidden:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def _draws_elsewhere(self, probe: Any) -> bool:
        """Whether a training step moves torch's global generator."""
        own = Copy(self.module, torch.float32, self.device)
        own.module.train()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            own.run(probe)
            return not torch.equal(before, torch.get_rng_state())
