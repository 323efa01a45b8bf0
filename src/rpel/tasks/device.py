"""A task on a device of torch: data, models and local steps live there for the whole run.

Invariants:
- what is drawn (batches, crops, dropout masks) is drawn on the host, from the same coordinates as everywhere,
  so a run on a device is the run on the CPU up to rounding;
- examples lie on the device as they were given, images as bytes; a batch is gathered and normalised there;
- many nodes step at once, in chunks that depend on shapes alone;
  nothing with d in its shape leaves the device.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.backend.one_thread import one_torch_thread, share
from rpel.backend.torch import Torch
from rpel.data import trees
from rpel.tasks.autograd import Arguments, AutogradEngine, Copy
from rpel.tasks.batches import Examples
from rpel.tasks.classification import Classification
from rpel.tasks.dropout import altered, with_dropout
from rpel.tasks.task import Engine, Own
from rpel.tasks.vmap import VmapEngine
from rpel.types import Integers

Steps = Literal["unfold", "grouped", "alone"]
"""How many nodes take a step: convolutions as matrix products of unfolded images, as grouped ones,
or node by node."""
_LARGEST = 4_000_000  # parameters from which on a node keeps a device busy by itself
_SMALL_KERNEL = 5  # sides of convolutions up to which unfolding pays
_MOST = 128  # nodes at once
# bytes of values that nodes at once may keep: on a device, and in main memory
_BUDGET, _CACHED = 1 << 30, 1 << 25
_LANES = 4  # streams of a device on which nodes step side by side


class UnfoldedConvolution(nn.Module):
    """A convolution as one matrix product, so that those of many nodes are one batched product.

    Of grouped convolutions, to which `vmap` turns convolutions with weights of their own,
    training is slow on GPUs.

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
        usual = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
        return usual and not isinstance(layer.padding, str) and not altered(layer)

    def _places(self, side: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (side + 2 * int(self.padding[axis]) - reach) // self.stride[axis] + 1

    def forward(self, x: Tensor) -> Tensor:
        height, width = (self._places(int(x.shape[axis]), axis) for axis in (-2, -1))
        columns = F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)  # type: ignore[arg-type]
        flat = columns.transpose(0, 1).reshape(columns.shape[1], -1)  # (channels · kernel, examples · places)
        found = self.weight.reshape(self.weight.shape[0], -1) @ flat
        found = found.reshape(-1, x.shape[0], height, width).transpose(0, 1)
        return found if self.bias is None else found + self.bias[:, None, None]


def with_unfolding(module: nn.Module) -> nn.Module:
    """The module with each convolution that can be so as a matrix product."""
    if UnfoldedConvolution.takes(module):
        return UnfoldedConvolution(module)  # type: ignore[arg-type]
    for name, child in module.named_children():
        setattr(module, name, with_unfolding(child))
    return module


class ManyAtOnce(VmapEngine):
    """Gradients and outputs of many nodes on a device; unfold: with convolutions as matrix products."""

    def __init__(self, plain: AutogradEngine, arrays: Torch, unfold: bool) -> None:
        super().__init__(plain.module, plain.loss, plain.metrics)
        self.arrays, self.unfold, self.accuracy, self.wide = arrays, unfold, plain.accuracy, arrays.wide
        self.serial = not arrays.main
        self.dropouts = any(type(layer) is nn.Dropout and layer.p > 0 for layer in self.module.modules())

    def _copy(self, train: bool) -> tuple[nn.Module, list[Tensor]]:
        if not hasattr(self.own, "module"):
            self.own.masks = []
            copied = copy.deepcopy(self.module)
            copied = with_unfolding(copied) if self.unfold else copied
            self.own.module = with_dropout(copied, lambda p: self._layer(p, self.own.masks))
        self.own.module.train(train)
        return self.own.module, self.own.masks

    def lent(self, numbers: Integers) -> Tensor:
        return self.arrays.lend(numbers)

    def prepare(self, example: Any, dtype: torch.dtype) -> None:
        """Find out where dropout is applied, on inputs (B, …) of the host like these."""
        if self.dropouts:
            self._dropouts(example, dtype)

    def _masks(self, example: Any, seeds: list[int], dtype: torch.dtype) -> list[Tensor]:
        if not self.dropouts:
            return []
        like = trees.mapped(lambda value: torch.zeros(value.shape, dtype=value.dtype), example)
        return [self.arrays.lend(mask) for mask in super()._masks(like, seeds, dtype)]


class NodeByNode(AutogradEngine):
    """One node after the other on an accelerator, on a few side streams with a copy of the network each."""

    def __init__(self, plain: AutogradEngine, arrays: Torch) -> None:
        Engine.__init__(self, plain.loss, plain.metrics)
        self.module, self.device, self.serial = plain.module, torch.device(arrays.device), True
        self.hidden, self.noisy, self.accuracy, self.wide = (
            plain.hidden,
            plain.noisy,
            plain.accuracy,
            arrays.wide,
        )
        self.many, self.masks = ManyAtOnce(plain, arrays, unfold=False), list[Tensor]()
        self.lane, self.copies = 0, dict[tuple[int, torch.dtype], Copy]()

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """The gradients of c nodes, x (c, d), inputs (c, B, …), labels (c, B, …), into out (c, d)."""
        with _lanes(self.device) as lane:
            for i in range(len(x)):
                one, noise = slice(i, i + 1), seeds[i : i + 1]
                mine, theirs = (
                    trees.mapped(lambda value, one=one: value[one], tree) for tree in (inputs, labels)
                )
                if train and self.many.dropouts:
                    example = trees.mapped(lambda value: value[0], mine)
                    self.masks[:] = [mask[0] for mask in self.many._masks(example, noise, x.dtype)]
                self.lane = i % _LANES
                with lane(self.lane):
                    super().gradient(x[one], local[one], mine, theirs, noise, out[one], train)
        self.lane = 0

    def lent(self, numbers: Integers) -> Tensor:
        return self.many.lent(numbers)

    def _copy(self, dtype: torch.dtype) -> Copy:
        key = (self.lane, dtype)
        if key not in self.copies:
            layer = partial(ManyAtOnce._layer, masks=self.masks)
            self.copies[key] = Copy(self.module, dtype, self.device, layer)
        return self.copies[key]


@contextmanager
def _lanes(device: torch.device) -> Iterator[Callable[[int], Any]]:
    """lane(i): where node i steps; on CUDA one of a few side streams,
    which begin after and end before the main one."""
    if device.type != "cuda":
        yield lambda i: nullcontext()
        return
    streams = [torch.cuda.Stream(device) for _ in range(_LANES)]  # type: ignore[no-untyped-call]
    main = torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(main)
    yield lambda i: torch.cuda.stream(streams[i])
    for stream in streams:
        main.wait_stream(stream)


class DeviceTask(Classification):
    """A :class:`Classification` whose arrays are tensors of a device; takes what that takes, and the backend.

    >>> from rpel.data import iid, load
    >>> from rpel.models import model
    >>> sample, arrays = load(), Torch("cpu")
    >>> task = DeviceTask(arrays, sample, iid(sample.train_y, 4, 25, seed=0), model("linear"), batch_size=25,
    ...     seed=0)
    >>> x, local = arrays.array(np.tile(task.initial(), (4, 1))), arrays.array(task.local_state(4))
    >>> task.gradient(x, local, np.arange(4), t=1, k=0)[0].shape
    torch.Size([4, 7850])
    """

    def __init__(self, arrays: Torch, *given: Any, **named: Any) -> None:
        # what does not fit together is refused there, on the host
        super().__init__(*given, **named, fast=False)
        self.arrays, self.plain = arrays, cast(AutogradEngine, self.engine)
        self.data = DeviceExamples(self.examples, arrays)
        self.use(self._steps())

    def _steps(self) -> Steps:
        """By the network and the kind of device alone."""
        kernels = [layer for layer in self.module.modules() if isinstance(layer, nn.Conv2d)]
        if self.d > _LARGEST or (kernels and self.arrays.main):
            return "alone"  # in main memory convolutions of one node are faster than matrix products of many
        if self._together() is None:
            return "alone"
        small = all(
            max(layer.kernel_size) <= _SMALL_KERNEL and UnfoldedConvolution.takes(layer) for layer in kernels
        )
        return "unfold" if small else "grouped"

    def use(self, steps: Steps) -> None:
        """Let nodes step like this."""
        self.steps, alone = steps, steps == "alone"
        values = _values(self.module, self.probe()[0], steps == "unfold")
        budget = _CACHED if self.arrays.main else _BUDGET
        each = 4 * (2 * values * self.batch_size + 4 * self.d)
        self.chunk = 1 if alone else max(1, min(_MOST, budget // each))
        self.step_bytes = each * (_LANES if alone and not self.arrays.main else self.chunk)
        if not alone:
            self.engine = ManyAtOnce(self.plain, self.arrays, steps == "unfold")
        elif self.arrays.main:
            self.engine = copy.copy(self.plain)
            self.engine.own = Own()  # copies of the network that are laid out for this precision
        else:
            self.engine = NodeByNode(self.plain, self.arrays)
        self.scored = (
            1 if alone else max(1, min(_MOST, budget // (4 * (values * self.engine.block + self.d))))
        )
        many = self.engine.many if isinstance(self.engine, NodeByNode) else self.engine
        if isinstance(many, ManyAtOnce) and self.data.here:
            rows = np.zeros((1, self.batch_size), np.int64)
            batch = self.examples.batch(rows, None, torch.float32)[0]
            many.prepare(trees.mapped(lambda value: value[0], batch), torch.float32)

    def engine_by_example(self) -> Engine:
        """The engine whose gradients of single examples are fastest,
        all of one node's at once where that can be."""
        if not isinstance(self.engine, ManyAtOnce) and self._together() is not None:
            return ManyAtOnce(self.plain, self.arrays, unfold=False)
        return self.engine

    def _together(self) -> VmapEngine | None:
        """The engine for many at once, where it does what autograd does; None where not."""
        many = self._many(self.plain)
        return many if many is not None and many.agrees(self.plain, *self.probe()) else None

    def batch(
        self, rows: Integers, ids: Integers | None, dtype: torch.dtype, *varied: Any
    ) -> tuple[Any, Any]:
        """As everywhere, on the device."""
        return self.data.batch(rows, ids, dtype, *varied)

    any_grouping = True
    """Results are equal up to rounding, so workers may share what one would take together."""

    @property
    def nodes_per_call(self) -> int:  # type: ignore[override]
        """How many nodes take a step together."""
        return self.chunk

    @property
    def device_bytes(self) -> int:  # type: ignore[override]
        """What a run takes on the device beside its models: data,
        and room for steps and for pieces of aggregation."""
        return self.data.nbytes + self.step_bytes + self.arrays.budget

    def _check(self, x: Any, local: Any, nodes: int) -> None:
        if tuple(x.shape) != (nodes, self.d) or not x.is_contiguous():
            raise ValueError(
                f"{nodes} models are needed as contiguous rows ({nodes}, {self.d}), not {tuple(x.shape)}"
            )
        if tuple(local.shape) != (nodes, self.q):
            raise ValueError(f"the local state must have shape ({nodes}, {self.q}), not {tuple(local.shape)}")

    def gradient(self, x: Any, local: Any, ids: Integers, t: int, k: int, out: Any = None) -> tuple[Any, Any]:
        """As everywhere; x, local and what comes back are tensors of the device."""
        ids = np.asarray(ids, np.int64)
        self._check(x, local, len(ids))
        out, local = torch.empty_like(x) if out is None else out, local.clone()
        rows, coins = self.examples.indices(ids, t, k), self.examples.coins(ids, t, k)
        seeds, patched = self._seeds(ids, t, k), self.examples.patched(ids, t, k)

        def work(some: slice) -> None:
            varied, marked = (
                None if coins is None else coins[some],
                None if patched is None else patched[some],
            )
            inputs, labels = self.data.batch(rows[some], ids[some], x.dtype, varied, marked)
            noise = [] if seeds is None else seeds[some].tolist()
            self.engine.gradient(x[some], local[some], inputs, labels, noise, out[some], train=True)

        self.over_nodes(work, len(ids))
        return out, local

    def _scored(
        self, x: Any, local: Any, rows: Integers, tested: Callable[..., Any]
    ) -> list[NDArray[np.float64]]:
        """Share of right answers, mean loss and metrics, (h,) each; they are read once."""
        if not len(rows):
            raise ValueError("an evaluation needs at least one test example")
        marked, block = tested != self.examples.tested, self.engine.block
        sums = torch.zeros((2 + len(self.metrics), len(x)), dtype=self.arrays.wide, device=x.device)
        for at in range(0, len(rows), block):
            inputs, labels = self.data.tested(rows[at : at + block], x.dtype, marked)

            def work(unit: int, inputs: Any = inputs, labels: Any = labels) -> None:
                some = slice(unit * self.scored, (unit + 1) * self.scored)
                found = self.engine.sums(x[some], local[some], inputs, labels)
                sums[:, some] += torch.stack([column.to(sums.dtype) for column in found])

            share(work, -(-len(x) // self.scored), self.engine.serial)
        return list(np.asarray(self.arrays.read(sums), np.float64) / len(rows))

    def full_gradient(self, x: Any, local: Any, size: int | None = None) -> Any:
        """∇F_H (c, d) at each model of x (c, d), on the device."""
        self._check(x, local, len(x))
        out, part = torch.zeros_like(x), torch.empty_like(x)
        for rows, weight in self.examples.honest(size):
            for at in range(0, len(rows), self.engine.block):
                some = rows[at : at + self.engine.block]
                inputs, labels = (
                    trees.mapped(lambda value: value.expand(len(x), *value.shape[1:]), tree)
                    for tree in self.data.batch(some[None], None, x.dtype)
                )
                with one_torch_thread():
                    self.engine.gradient(x, local, inputs, labels, [], part, train=False)
                out.add_(part, alpha=weight * len(some) / len(rows))
        return out


class DeviceExamples:
    """A data set on a device, as it was given; batches are gathered there."""

    def __init__(self, examples: Examples, arrays: Torch) -> None:
        self.examples, self.arrays, dataset = examples, arrays, examples.dataset
        self.here = dataset.collate is None
        if self.here:
            self.train_x, self.train_y, self.test_x, self.test_y = (
                trees.mapped(self._sent, tree)
                for tree in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y)
            )
        if dataset.mean is not None:
            self.scale, self.shift = (
                self._sent(a.reshape(dataset.shape)) for a in (examples.scale, examples.shift)
            )

    def _sent(self, values: Any) -> Tensor:
        return self.arrays.lend(values if isinstance(values, Tensor) else np.ascontiguousarray(values))

    @property
    def nbytes(self) -> int:
        """What the data take on the device."""
        kept = (self.train_x, self.train_y, self.test_x, self.test_y) if self.here else ()
        return sum(value.numel() * value.element_size() for tree in kept for _, value in trees.leaves(tree))

    def batch(
        self,
        rows: Any,
        ids: Integers | None,
        dtype: torch.dtype,
        coins: NDArray[np.float64] | None = None,
        patched: NDArray[np.bool_] | None = None,
    ) -> tuple[Any, Any]:
        """Inputs (c, B, …) and targets (c, B, …) for training rows (c, B), as nodes ids (c,) see them."""
        if not self.here:
            pair = self.examples.batch(rows, ids, dtype, coins, patched)
            return tuple(trees.mapped(self.arrays.lend, tree) for tree in pair)
        at = self.arrays.lend(np.asarray(rows, np.int64).reshape(-1))
        shape = rows.shape
        inputs = trees.mapped(lambda x: self._numbers(x.index_select(0, at), dtype, coins), self.train_x)
        if patched is not None:
            inputs = self._patched(inputs, self.arrays.lend(patched.reshape(-1)))
        targets = trees.mapped(lambda y: _floats(y.index_select(0, at), dtype), self.train_y)
        inputs, targets = (
            trees.mapped(lambda v: v.view(*shape, *v.shape[1:]), tree) for tree in (inputs, targets)
        )
        return inputs, targets if ids is None else self._seen(targets, ids, patched)

    def _seen(self, labels: Any, ids: Integers, patched: NDArray[np.bool_] | None) -> Any:
        """The targets as hostile nodes see theirs."""
        trigger, flipped = self.examples.trigger, self.examples.flipped
        if trigger is not None and patched is not None:
            return labels.masked_fill(self.arrays.lend(patched), trigger.target)
        if not len(flipped):
            return labels
        flips = self.arrays.lend(np.isin(ids, flipped)).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(flips, self.examples.dataset.classes - 1 - labels, labels)

    def tested(self, rows: Integers, dtype: torch.dtype, marked: bool = False) -> tuple[Any, Any]:
        """Test examples (N, …) and their targets; marked: with the trigger's patch,
        and its target as their label."""
        if not self.here:
            return tuple(trees.mapped(self.arrays.lend, tree) for tree in self.examples.tested(rows, dtype))
        at = self.arrays.lend(np.asarray(rows, np.int64))
        inputs = trees.mapped(lambda x: self._numbers(x.index_select(0, at), dtype, None), self.test_x)
        if not marked:
            return inputs, trees.mapped(lambda y: _floats(y.index_select(0, at), dtype), self.test_y)
        assert self.examples.trigger is not None
        which = torch.ones(len(rows), dtype=torch.bool, device=inputs.device)
        target = int(self.examples.trigger.target)
        return self._patched(inputs, which), torch.full((len(rows),), target, device=inputs.device)

    def _numbers(self, x: Tensor, dtype: torch.dtype, coins: NDArray[np.float64] | None) -> Tensor:
        """Examples (N, …), varied and normalised where the data set asks for that."""
        if self.examples.dataset.mean is None:
            return _floats(x, dtype)
        if coins is not None:
            x = self._varied(x, coins.reshape(-1, 3))
        return x.to(dtype) * self.scale.to(dtype) + self.shift.to(dtype)

    def _varied(self, images: Tensor, uniform: NDArray[np.float64], padding: int = 4) -> Tensor:
        """`rpel.data.crop_flip`, on the device: row offset,
        column offset and mirror of each image are small."""
        n, channels, height, width = images.shape
        top, left = ((uniform[:, k] * (2 * padding + 1)).astype(np.int64)[:, None] for k in (0, 1))
        columns = left + np.arange(width)
        columns = np.where(uniform[:, 2:] < 0.5, columns, columns[:, ::-1])
        rows_, columns_ = self.arrays.lend(top + np.arange(height)), self.arrays.lend(columns)
        padded = F.pad(images, (padding,) * 4)
        found = padded.gather(2, rows_[:, None, :, None].expand(n, channels, height, padded.shape[3]))
        return found.gather(3, columns_[:, None, None, :].expand(n, channels, height, width))

    def _patched(self, images: Tensor, which: Tensor) -> Tensor:
        """The patch on those of the normalised images (N, C, H, W)."""
        dataset = self.examples.dataset
        channels, height, width = dataset.shape
        side = -(-width // 7)
        if dataset.mean is None:
            bright = np.full((channels, side, side), float(dataset.train_x.max()))
        else:
            top = 255 if dataset.train_x.dtype == np.uint8 else dataset.train_x.max()
            whole = (top * self.examples.scale + self.examples.shift).reshape(channels, height, width)
            bright = np.ascontiguousarray(whole[:, -side:, -side:])
        corner = images[:, :, -side:, -side:]
        value = self.arrays.lend(bright).to(images.dtype)
        found = images.clone()
        found[:, :, -side:, -side:] = torch.where(which[:, None, None, None], value, corner)
        return found


def _floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in the models' precision, everything else as it is."""
    return x.to(dtype) if x.is_floating_point() else x


def _values(module: nn.Module, probe: Any, unfolded: bool) -> int:
    """How many numbers the layers of a module make of one example, unfolded images included."""
    found, copied = 0, copy.deepcopy(module).eval()

    def note(layer: nn.Module, given: Any, made: Any) -> None:
        nonlocal found
        for value in made if isinstance(made, tuple) else (made,):
            found += value.numel() if isinstance(value, Tensor) else 0
        if unfolded and isinstance(layer, nn.Conv2d):
            places = made.shape[0] * made.shape[-1] * made.shape[-2]
            found += 2 * int(layer.weight[0].numel()) * int(places)

    for layer in copied.modules():
        if not list(layer.children()):
            layer.register_forward_hook(note)
    positional, named = Arguments(copied)(trees.mapped(torch.clone, probe))
    with torch.no_grad():
        copied(*positional, **named)
    return -(-found // len(trees.first(probe)))
