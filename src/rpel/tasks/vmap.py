"""Any torch module of moderate size, many nodes at once: `torch.func.vmap` over `functional_call`.

Invariants:
- equal to the plain twin, `autograd.AutogradEngine`, up to rounding: the same dropout masks (each node's own
  generator, layer after layer), the same BatchNorm statistics in the node's local state;
- which of the two engines computes a module depends on the module alone, never on a clock: a resumed run goes
  on with the same engine.
"""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from rpel.data import trees
from rpel.models import flatten, trained
from rpel.tasks.autograd import Arguments, AutogradEngine, Copy
from rpel.tasks.dropout import dropout_mask, with_dropout
from rpel.tasks.task import Engine, Loss, Metric, parts, shortened
from rpel.types import Integers

Named = dict[str, Tensor]

# Measured, batch 25, against node by node: 64-10 4 × faster, 64-32-10 with BatchNorm or dropout 6 to 8 ×,
# 784-10 3 ×, 784-64-10 1.25 ×, 784-256-10 .6 ×; convolutions to 4 and 8 channels of 8 × 8 pixels 6 and 3 ×,
# of 28 × 28 .8 ×.
_LARGEST = 50_000  # parameters
_LARGEST_IMAGE = 100  # values of one example of a module with convolutions
_SCRATCH = 1 << 20  # bytes of models or inputs worth having in the cache at once


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

    def __init__(self, module: nn.Module, loss: Loss, metrics: Sequence[Metric] = ()) -> None:
        super().__init__(loss, metrics)
        self.module, self.arguments = module, Arguments(module)
        self.noisy = any(type(layer) is nn.Dropout for layer in module.modules())
        self.parameters, self.buffers = _Places({**trained(module)}), _Places(dict(module.named_buffers()))
        self.frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self.d = sum(shape.numel() for shape in self.parameters.shapes.values())

    def together(self, batch: int | None = None) -> int:
        """So many nodes that their models fit into the cache."""
        return max(2, min(256, _SCRATCH // (4 * max(1, self.d))))

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, x (c, d), inputs (c, B, …), labels (c, B), into out (c, d)."""
        module, given = self._copy(train)
        parameters, buffers = self.parameters.split(x), self._state(local, x.dtype)
        frozen = self._frozen(x)
        masks: list[Tensor] = []
        if train and self.noisy:
            masks = self._masks(trees.mapped(lambda value: value[0], inputs), seeds, x.dtype)

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
        """Sums of single examples' gradients, each shortened to `norm`, of c nodes into out (c, d).

        Many examples at once, with a node's one set of weights:
        most of a step is then products with that matrix.
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
            for part in parts(np.asarray(present)[i], x.shape[1]):
                alone, targets = (self.one_by_one(tree, i, part) for tree in (inputs, labels))
                masks: list[Tensor] = []
                if self.noisy:
                    first = trees.mapped(lambda value: value[0], alone)
                    masks = self._masks(first, seeds[i, part].tolist(), x.dtype)
                found = each(parameters, masks, alone, targets)
                self._add(found, norm, out[i])

    def _add(self, found: Named, norm: float, total: Tensor) -> None:
        """Add to total (d,) the gradients of single examples, each shortened to `norm`;
        they are not copied."""
        flat = {name: value.flatten(1) for name, value in found.items()}
        lengths = [torch.linalg.vector_norm(value, dim=1, dtype=self.wide) for value in flat.values()]
        factors = shortened(torch.stack(lengths).norm(dim=0), norm).to(total.dtype)
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
        if not hasattr(self.own, "module"):
            self.own.masks = []
            self.own.module = with_dropout(
                copy.deepcopy(self.module), lambda p: self._layer(p, self.own.masks)
            )
        self.own.module.train(train)
        return self.own.module, self.own.masks

    @staticmethod
    def _layer(p: float, masks: list[Tensor]) -> nn.Module:
        return _Masked(masks) if p > 0 else nn.Identity()

    def _masks(self, example: Any, seeds: list[int], dtype: torch.dtype) -> list[Tensor]:
        """Masks (c, …) for each dropout layer, as the plain engine draws them:
        from each node's own generator."""
        layers = self._dropouts(example, dtype)
        masks = [torch.empty(len(seeds), *like.shape, dtype=dtype) for _, like in layers]
        generator = torch.Generator()
        for node, seed in enumerate(seeds):
            generator.manual_seed(seed)
            for (p, like), of_nodes in zip(layers, masks, strict=True):
                of_nodes[node] = dropout_mask(p, like, generator)
        return masks

    def _dropouts(self, example: Any, dtype: torch.dtype) -> list[tuple[float, Tensor]]:
        """p and an empty tensor of the shape and layout it is applied to, for each dropout,
        on inputs like these."""
        known = (dtype, [value.shape for _, value in trees.leaves(example)])
        if getattr(self.own, "known", None) != known:
            self.own.known, self.own.dropouts = known, []
            seen = self.own.dropouts
            copied = Copy(self.module, dtype, torch.device("cpu"), lambda p: _Recorder(p, seen))
            copied.module.train()
            with torch.no_grad():
                copied.run(example)
        found: list[tuple[float, Tensor]] = self.own.dropouts
        return found

    def pays(self, probe: Any) -> bool:
        """Whether many nodes at once were measured to be faster than one by one, on modules of this size."""
        convolves = any(len(shape) > 2 for shape in self.parameters.shapes.values())
        largest = max(value[0].numel() for _, value in trees.leaves(probe))
        return self.d <= _LARGEST and (not convolves or largest <= _LARGEST_IMAGE)

    def agrees(self, plain: AutogradEngine, probe: Any, targets: Any) -> bool:
        """Whether two nodes on two examples come out as the plain engine has them:
        a module's code may be anything."""
        x = flatten(self.module).float()
        state = [value.detach().reshape(-1).float() for value in self.module.buffers()]
        x, local = x * torch.tensor([[1.0], [0.9]]), torch.cat([*state, torch.empty(0)]).repeat(2, 1)
        inputs, seeds = trees.mapped(_with_other, probe), [1, 2]
        labels = trees.mapped(lambda values: torch.stack([values, values]), targets)
        results = []
        for engine in (plain, self):
            out, own = torch.empty_like(x), local.clone()
            try:
                with warnings.catch_warnings():
                    # such as: slow, because a layer has no rule for many at once
                    warnings.simplefilter("error")
                    engine.gradient(x, own, inputs, labels, seeds, out, train=True)
                    results.append(torch.cat([out, own, engine.outputs(x, own, probe).flatten(1)], dim=1))
            except Exception:
                # of the module, of the loss, or of vmap: then the plain engine has to say what is wrong
                return False
        return torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-5)
