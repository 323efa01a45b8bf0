"""Any torch module of moderate size, many nodes at once: `torch.func.vmap` over `functional_call`.

Invariants:
- equal to `autograd` up to rounding: the same dropout masks (each node's own generator, layer after layer),
  the same BatchNorm statistics in the node's local state;
- whether a module is computed here depends on the module and the kind of device alone, never on a clock: a
  resumed run goes on with the same engine.
"""

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from rpel.data import trees
from rpel.models import flatten, trained
from rpel.tasks.engines.autograd import Arguments, AutogradEngine, Copy
from rpel.tasks.engines.dropout import altered, dropout_mask, with_dropout
from rpel.tasks.engines.engine import (
    Engine,
    Loss,
    Probe,
    clip_factors,
    example_parts,
    lend,
    one_by_one,
    wide,
)
from rpel.types import Integers

Named = dict[str, Tensor]

# Measured on a CPU, batch 25, against node by node: 64-10 4 × faster, 64-32-10 with BatchNorm or dropout 6 to
# 8 ×, 784-10 3 ×, 784-64-10 1.25 ×, 784-256-10 .6 ×; convolutions to 4 and 8 channels of 8 × 8 pixels 6 and
# 3 ×, of 28 × 28 .8 ×.
MAX_PARAMETERS, MAX_PARAMETERS_ON_DEVICE = 50_000, 4_000_000
MAX_IMAGE = 100  # values of one example of a module with convolutions, on a CPU
MAX_NODES, MAX_NODES_ON_DEVICE = 256, 128
CACHE_BYTES = 1 << 20  # of models worth having in the cache at once
DEVICE_BYTES = 1 << 30  # of values that nodes computed at once may keep on an accelerator
MAX_UNFOLDED_KERNEL = 5  # sides of convolutions up to which unfolding pays on an accelerator


def build(module: nn.Module, loss: Loss, probe: Probe) -> "VmapEngine | None":
    """The engine, where many at once do what autograd does and were measured to be faster."""
    if not probe.uniform or any(map(altered, module.modules())):
        return None
    engine = VmapEngine(module, loss, probe)
    if not (probe.by_example or engine.pays(probe)):
        return None
    plain = AutogradEngine(module, loss, replace(probe, device=torch.device("cpu")))
    return engine if not plain.draws_elsewhere and engine.agrees(plain, probe) else None


class UnfoldedConvolution(nn.Module):
    """A convolution as one matrix product, so that those of many nodes are one batched product.

    vmap turns convolutions with a node's own weights into grouped ones, whose training is slow on GPUs.

    >>> plain = nn.Conv2d(2, 3, 3, padding=1)
    >>> x = torch.randn(4, 2, 5, 5)
    >>> torch.allclose(UnfoldedConvolution(plain)(x), plain(x), atol=1e-5)
    True
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding = layer.padding

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Whether a layer is a convolution of this form."""
        if type(layer) is not nn.Conv2d or max(layer.kernel_size) > MAX_UNFOLDED_KERNEL:
            return False
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    def _places(self, side: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (side + 2 * int(self.padding[axis]) - reach) // self.stride[axis] + 1

    def forward(self, x: Tensor) -> Tensor:
        height, width = (self._places(int(x.shape[axis]), axis) for axis in (-2, -1))
        columns = F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)  # type: ignore[arg-type]
        flat = columns.transpose(0, 1).reshape(columns.shape[1], -1)  # (channels · kernel, examples · places)
        images = self.weight.reshape(self.weight.shape[0], -1) @ flat
        images = images.reshape(-1, x.shape[0], height, width).transpose(0, 1)
        return images if self.bias is None else images + self.bias[:, None, None]


def with_unfolding(module: nn.Module) -> nn.Module:
    """Replace each convolution that can be a matrix product by one."""
    if UnfoldedConvolution.takes(module):
        return UnfoldedConvolution(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, with_unfolding(child))
    return module


def values_kept(module: nn.Module, inputs: Any) -> int:
    """How many numbers the layers of a module make of one example, unfolded images included."""
    copied, kept = copy.deepcopy(module).eval(), 0

    def note(layer: nn.Module, given: Any, made: Any) -> None:
        nonlocal kept
        kept += sum(value.numel() for _, value in trees.leaves(made) if isinstance(value, Tensor))
        if isinstance(layer, UnfoldedConvolution):
            kept += 2 * layer.weight[0].numel() * made[:, 0].numel()

    for layer in copied.modules():
        if not list(layer.children()):
            layer.register_forward_hook(note)
    positional, named = Arguments(copied)(trees.mapped(torch.clone, inputs))
    with torch.no_grad():
        copied(*positional, **named)
    return -(-kept // len(trees.first(inputs)))


class _Masked(nn.Module):
    """Dropout whose masks are passed in: those of all layers, in the order of their calls."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        return x * self.masks.pop(0) if self.training else x


class _Recorder(nn.Module):
    """Dropout that notes what it is applied to."""

    def __init__(self, p: float, seen: list[tuple[float, Tensor]]) -> None:
        super().__init__()
        self.p, self.seen = p, seen

    def forward(self, x: Tensor) -> Tensor:
        if self.p > 0:
            self.seen.append((self.p, torch.empty_like(x)))
        return x


class _Places:
    """Where named tensors lie in a row, and the rows as named tensors."""

    def __init__(self, tensors: Named) -> None:
        self.shapes = {name: value.shape for name, value in tensors.items()}
        self.dtypes = {name: value.dtype for name, value in tensors.items()}

    def split(self, rows: Tensor) -> Named:
        """Views (c, *shape) of rows (c, width)."""
        parts = torch.split(rows, [shape.numel() for shape in self.shapes.values()], dim=1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(len(rows), *shape) for (name, shape), part in named}

    def store(self, values: Named, rows: Tensor) -> None:
        """The named tensors into the rows; zero where there is none."""
        at = 0
        for name, shape in self.shapes.items():
            part = rows[:, at : at + shape.numel()]
            if name in values:
                part.copy_(values[name].reshape(len(rows), -1))
            else:
                part.zero_()
            at += shape.numel()


def _with_other(values: Tensor) -> Tensor:
    """Two examples and two others: the negatives of floats, else the same in the other order."""
    return torch.stack([values, -values if values.is_floating_point() else values.flip(0)])


class VmapEngine(Engine):
    """Gradients of a module and any loss(output, target), many nodes at once."""

    def __init__(self, module: nn.Module, loss: Loss, probe: Probe) -> None:
        super().__init__(loss)
        self.on_host = probe.device.type == "cpu"
        self.module = module if self.on_host else with_unfolding(copy.deepcopy(module))
        self.serial, self.arguments = not self.on_host, Arguments(module)
        self.noisy = any(type(layer) is nn.Dropout for layer in module.modules())
        self.parameters, self.buffers = _Places({**trained(module)}), _Places(dict(module.named_buffers()))
        self.frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self.d = sum(shape.numel() for shape in self.parameters.shapes.values())
        self.values = 0 if self.on_host else values_kept(self.module, probe.inputs)

    def nodes_per_call(self, batch: int | None = None) -> int:
        """Return the number of nodes whose models fit the cache, or whose data fit the device's budget."""
        if self.on_host:
            return max(2, min(MAX_NODES, CACHE_BYTES // (4 * max(1, self.d))))
        kept = 4 * (2 * self.values * (batch or self.block) + 4 * self.d)
        return max(1, min(MAX_NODES_ON_DEVICE, DEVICE_BYTES // kept))

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes at once."""
        module, given = self._copy(train)
        parameters, buffers = self.parameters.split(x), self._state(local, x.dtype)
        frozen = self._frozen(x)
        masks: list[Tensor] = []
        if train and self.noisy:
            masks = self._masks(trees.mapped(lambda value: value[0], inputs), seeds, x)

        def loss(parameters: Named, state: Named, masks: list[Tensor], batch: Any, target: Any) -> Any:
            given[:] = masks
            state = {name: value.clone() for name, value in state.items()}  # BatchNorm writes into it
            output = functional_call(module, (parameters, frozen, state), *self.arguments(batch))
            return self.loss(output, target), state

        step = vmap(grad(loss, has_aux=True))
        found, state = step(parameters, buffers, masks, inputs, labels)
        self.parameters.store(found, out)
        if train:
            self.buffers.store(state, local)

    def clipped(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: Integers, present: Any, norm: float,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Sums of clipped gradients of single examples.

        Many examples at once, with a node's one set of weights: most of a step is products with that matrix.
        """
        module, given = self._copy(train=True)
        frozen = self._frozen(x)

        def loss(parameters: Named, masks: list[Tensor], example: Any, target: Any) -> Any:
            given[:] = masks
            output = functional_call(module, (parameters, frozen, state), *self.arguments(example))
            return self.loss(output, target)

        each = vmap(grad(loss), in_dims=(None, 0, 0, 0))
        for i in range(len(x)):
            parameters = {name: value[0] for name, value in self.parameters.split(x[i : i + 1]).items()}
            state = {name: value[0] for name, value in self._state(local[i : i + 1], x.dtype).items()}
            out[i].zero_()
            for part in example_parts(np.asarray(present)[i], x.shape[1]):
                alone, targets = (one_by_one(tree, i, part) for tree in (inputs, labels))
                masks: list[Tensor] = []
                if self.noisy:
                    first = trees.mapped(lambda value: value[0], alone)
                    masks = self._masks(first, seeds[i, part].tolist(), x)
                found = each(parameters, masks, alone, targets)
                self._add(found, norm, out[i])

    def _add(self, found: Named, norm: float, total: Tensor) -> None:
        """Add gradients of single examples, each clipped to `norm`, to total (d,); they are not copied."""
        flat = {name: value.flatten(1) for name, value in found.items()}
        lengths = [torch.linalg.vector_norm(value, dim=1, dtype=wide(total)) for value in flat.values()]
        factors = clip_factors(torch.stack(lengths).norm(dim=0), norm).to(total.dtype)
        for name, place in self.parameters.split(total[None]).items():
            if name in flat:
                flat[name].masked_fill_((factors == 0)[:, None], 0)
                place.view(-1).add_(factors @ flat[name])

    @torch.no_grad()
    def outputs(self, x: Tensor, local: Tensor, inputs: Any) -> Tensor:
        """Outputs (c, N, …) of c nodes on common inputs (N, …), with the nodes' own statistics."""
        module, _ = self._copy(train=False)
        frozen = self._frozen(x)

        def output(parameters: Named, buffers: Named) -> Any:
            return functional_call(module, (parameters, frozen, buffers), *self.arguments(inputs))

        found: Tensor = vmap(output)(self.parameters.split(x), self._state(local, x.dtype))
        return found

    def _frozen(self, x: Tensor) -> Named:
        """The frozen parameters, on the device and in the precision of the models x."""
        return {name: value.to(x) for name, value in self.frozen.items()}

    def _state(self, local: Tensor, dtype: torch.dtype) -> Named:
        """The buffers in rows of local state; what counts there as a whole number does so again."""
        kinds = self.buffers.dtypes
        named = self.buffers.split(local).items()
        return {
            name: value.to(dtype if kinds[name].is_floating_point else kinds[name]) for name, value in named
        }

    def _copy(self, train: bool) -> tuple[nn.Module, list[Tensor]]:
        """This thread's copy of the module, and the list from which its dropout layers take their masks."""
        if not hasattr(self.scratch, "module"):
            self.scratch.masks = []
            self.scratch.module = with_dropout(
                copy.deepcopy(self.module), lambda p: self._layer(p, self.scratch.masks)
            )
        self.scratch.module.train(train)
        return self.scratch.module, self.scratch.masks

    @staticmethod
    def _layer(p: float, masks: list[Tensor]) -> nn.Module:
        return _Masked(masks) if p > 0 else nn.Identity()

    def _masks(self, example: Any, seeds: list[int], x: Tensor) -> list[Tensor]:
        """Masks (c, …) for each dropout layer, as autograd draws them: from each node's own generator."""
        layers = self.dropouts(example, x.dtype)
        masks = [torch.empty(len(seeds), *like.shape, dtype=x.dtype) for _, like in layers]
        generator = torch.Generator()
        for node, seed in enumerate(seeds):
            generator.manual_seed(seed)
            for (p, like), of_nodes in zip(layers, masks, strict=True):
                of_nodes[node] = dropout_mask(p, like, generator)
        return masks if self.on_host else [lend(mask, x) for mask in masks]

    def dropouts(self, example: Any, dtype: torch.dtype) -> list[tuple[float, Tensor]]:
        """p, and an empty tensor like that to which it is applied, of each dropout on such inputs."""
        known = (dtype, [value.shape for _, value in trees.leaves(example)])
        if getattr(self.scratch, "known", None) != known:
            self.scratch.known, self.scratch.dropouts = known, []
            seen = self.scratch.dropouts
            copied = Copy(self.module, dtype, dropout=lambda p: _Recorder(p, seen))
            copied.module.train()
            with torch.no_grad():
                copied.run(trees.mapped(lambda value: torch.zeros(value.shape, dtype=value.dtype), example))
        found: list[tuple[float, Tensor]] = self.scratch.dropouts
        return found

    def pays(self, probe: Probe) -> bool:
        """Whether many nodes at once were measured to be faster than one by one, on modules of this size."""
        if not self.on_host:
            return self.d <= MAX_PARAMETERS_ON_DEVICE
        convolves = any(len(shape) > 2 for shape in self.parameters.shapes.values())
        largest = max(value[0].numel() for _, value in trees.leaves(probe.inputs))
        return self.d <= MAX_PARAMETERS and (not convolves or largest <= MAX_IMAGE)

    def agrees(self, plain: AutogradEngine, probe: Probe) -> bool:
        """Whether two nodes come out as autograd has them: a module's code may be anything."""
        x = flatten(self.module).float()
        state = [value.detach().reshape(-1).float() for value in self.module.buffers()]
        x, local = x * torch.tensor([[1.0], [0.9]]), torch.cat([*state, torch.empty(0)]).repeat(2, 1)
        inputs, seeds = trees.mapped(_with_other, probe.inputs), [1, 2]
        labels = trees.mapped(lambda values: torch.stack([values, values]), probe.targets)
        results = []
        for engine in (plain, self):
            out, own = torch.empty_like(x), local.clone()
            try:
                with warnings.catch_warnings():
                    # such as: slow, because a layer has no rule for many at once
                    warnings.simplefilter("error")
                    engine.gradient(x, own, inputs, labels, seeds, out, train=True)
                    outputs = engine.outputs(x, own, probe.inputs).flatten(1)
                    results.append(torch.cat([out, own, outputs], dim=1))
            except Exception:
                # of the module, of the loss, or of vmap: then autograd has to say what is wrong
                return False
        return torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-5)
