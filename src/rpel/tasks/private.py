"""Clip the gradients of single examples to C and add Gaussian noise σ·C to their sum.

The result is divided by the nominal batch size:

    g = (1/B₀) (Σ_{ξ in batch} clip_C(∇ℓ(x, ξ)) + N(0, σ²C²))        clip_C(v) = v · min(1, C/‖v‖)

Invariants, on which `rpel.privacy` counts:
- each of a node's N examples is in a batch with probability B₀/N, independently of all others; no batch is
  cut short, and an empty one still gives noise;
- what one example adds to the sum is at most C long: its gradient is computed from it alone, and one that is
  not finite adds nothing;
- batches and noise come from generators that nothing else draws from.
Plain twin: a loop over examples, in tests/test_privacy.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import nn

from rpel.backend.arrays import empty, standard_normal
from rpel.randomness import stream
from rpel.tasks.engines.autograd import Copy
from rpel.tasks.engines.engine import tensor
from rpel.types import Floats, Integers

if TYPE_CHECKING:
    from rpel.tasks.objective import Classification

Draw = Callable[[str, int, int, int], Generator]
"""draw(purpose, t, k, node): a generator for local step k of a node in round t."""


class PrivateGradients:
    """The gradients of a task, made private; everything else about it stays what it is.

    max_grad_norm: C; infinite: nothing is clipped. noise_multiplier: σ. draw: where batches and noise come
    from; by default the task's seed, which is right for simulations and wrong where others know the seed.
    sizes: N of nodes for which others count another number of examples than they hold,
    as an audit does that adds and leaves out some.

    >>> from rpel.data import iid, load
    >>> from rpel.models import model
    >>> from rpel.tasks import Classification
    >>> sample = load()
    >>> task = Classification(sample, iid(sample.train_y, 4, 25, seed=0), model("linear"), batch_size=25,
    ...     seed=0)
    >>> private = PrivateGradients(task, max_grad_norm=1.0)
    >>> x, local = np.tile(task.initial(), (4, 1)), task.local_state(4)
    >>> g, _ = private.gradient(x, local, np.arange(4), t=1, k=0)
    >>> g.shape, bool(np.linalg.norm(g, axis=1).max() < 2)  # a batch of about 25 gradients of norm 1, over 25
    ((4, 7850), True)
    """

    def __init__(
        self,
        task: "Classification",
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        draw: Draw | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        check_module(task.module)
        check_forward(task.module, task.probe.inputs)
        if noise_multiplier and not math.isfinite(max_grad_norm):
            raise ValueError(
                f"noise_multiplier {noise_multiplier:g} needs a max_grad_norm: noise is measured against it"
            )
        if task.examples.virtual is not None:
            raise ValueError(
                "partition 'virtual' shares examples between nodes, so no node could protect its own"
            )
        self.task, self.max_grad_norm, self.noise_multiplier = task, max_grad_norm, noise_multiplier
        self.engine, self.sizes = task.engine_by_example(), dict(sizes or {})
        self.draw = draw or (lambda purpose, t, k, node: stream(task.seed, (purpose, k), t, node))

    @property
    def batch_size(self) -> int:
        """The nominal batch size B₀."""
        return self.task.batch_size

    @property
    def counts(self) -> dict[int, int]:
        """N of each honest node."""
        held = self.task.examples.held
        return {node: self.sizes.get(node, len(own)) for node, own in held.items()}

    def check_disjoint(self) -> None:
        """ValueError where an example is held by two nodes, or also shown in the evaluation."""
        held, dataset = np.concatenate(list(self.task.examples.held.values())), self.task.examples.dataset
        if len(np.unique(held)) < len(held):
            raise ValueError(
                "an example is held by several nodes, so none of them could protect it: give each its own"
            )
        same = dataset.train_x is dataset.test_x
        if isinstance(dataset.train_x, np.ndarray) and isinstance(dataset.test_x, np.ndarray):
            same = same or np.array_equal(dataset.train_x, dataset.test_x)
        if same:
            raise ValueError(
                "the test examples are the training examples, which accuracies would tell of: give others"
            )

    def initial(self) -> Floats:
        """The common initial model (d,)."""
        return self.task.initial()

    def local_state(self, h: int) -> Floats:
        """(h, q) what stays with h nodes, as it is at first."""
        return self.task.local_state(h)

    def gradient(
        self, x: Floats, local: Floats, ids: Integers, t: int, k: int, out: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Private gradients (h, d) at x (h, d) of nodes ids (h,); the local state is left as it is."""
        ids = np.asarray(ids, np.int64)
        out = empty(len(x), x) if out is None else out
        x_, local_, out_ = tensor(x), tensor(local), tensor(out)

        def work(some: slice) -> None:
            rows, present = self.batches(ids[some], t, k)
            self._add(x_[some], local_[some], ids[some], t, k, rows, present, out_[some])
            self._blur(out[some], ids[some], t, k)

        self.task.over_nodes(work, len(ids))
        return out, local

    def batches(self, ids: Integers, t: int, k: int) -> tuple[Integers, NDArray[np.bool_]]:
        """Draw the Poisson batches of some nodes: rows (c, widest), and which of them are real.

        The others are padding.
        """
        examples, batch = self.task.examples, self.task.batch_size
        drawn = []
        for node in ids.tolist():
            held, start = int(examples.size[node]), int(examples.start[node])
            size = self.sizes.get(node, held)
            if size < batch:
                raise ValueError(
                    f"node {node} holds {size} examples, fewer than batch_size {batch}: choose {size}"
                )
            inside = self.draw("private-batch", t, k, node).random(held) < batch / size
            drawn.append(examples.pool[start + np.flatnonzero(inside)])
        widest = max(1, *map(len, drawn))
        rows = np.repeat(examples.pool[examples.start[ids], None], widest, axis=1)
        present = np.arange(widest) < np.array([[len(own)] for own in drawn])
        rows[present] = np.concatenate(drawn)
        return rows, present

    def _add(
        self,
        x: Any,
        local: Any,
        ids: Integers,
        t: int,
        k: int,
        rows: Integers,
        present: NDArray[np.bool_],
        out: Any,
    ) -> None:
        """The sums of the clipped gradients of c nodes into out (c, d)."""
        examples, engine = self.task.examples, self.engine
        varied = patched = None
        if examples.dataset.augment is not None:
            varied = self._uniform("private-augment", ids, t, k, (rows.shape[1], 3))
        if examples.trigger is not None:
            poisoned = self._uniform("private-backdoor", ids, t, k, rows.shape[1:]) < examples.trigger.share
            patched = np.asarray(poisoned & np.isin(ids, examples.flipped)[:, None])
        seeds = np.zeros(rows.shape, np.int64)
        if engine.noisy:
            seeds = (self._uniform("private-dropout", ids, t, k, rows.shape[1:]) * 2**53).astype(np.int64)
        if examples.dataset.collate is None:
            inputs, labels = examples.batch(rows, ids, x.dtype, varied, patched)
            engine.clipped(x, local, inputs, labels, seeds, present, self.max_grad_norm, out)
            return
        out.zero_()
        one = torch.empty_like(out[:1])
        for i, place in zip(*np.nonzero(present), strict=True):  # of examples that are not alike, one by one
            node, each = slice(i, i + 1), slice(place, place + 1)
            inputs, labels = examples.batch(rows[node, each], ids[node], x.dtype)
            there = np.ones((1, 1), bool)
            engine.clipped(
                x[node], local[node], inputs, labels, seeds[node, each], there, self.max_grad_norm, one
            )
            out[node] += one

    def _uniform(
        self, purpose: str, ids: Integers, t: int, k: int, shape: tuple[int, ...]
    ) -> NDArray[np.float64]:
        return np.stack([self.draw(purpose, t, k, node).random(shape) for node in ids.tolist()])

    def _blur(self, out: Floats, ids: Integers, t: int, k: int) -> None:
        """Noise on the sums, which are then divided by the nominal batch size."""
        deviation = self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0
        for row, node in zip(out, ids.tolist(), strict=True):
            if deviation:
                noise = standard_normal(self.draw("private-noise", t, k, node), (len(row),), row)
                noise *= deviation
                row += noise
            row /= self.task.batch_size


def check_module(module: nn.Module) -> None:
    """Raise ValueError for a network that mixes the examples of a batch or keeps traces without noise."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False):
            raise ValueError(
                f"layer {name or 'model'!r} is {kind}, which mixes the examples of a batch, so that no "
                "gradient is of one example alone: the nearest is nn.GroupNorm"
            )


def check_forward(module: nn.Module, inputs: Any) -> None:
    """ValueError for a network whose forward pass writes to its own buffers or parameters."""
    own = Copy(module, torch.float32)
    own.module.train()
    before = {name: (value, value._version, value.detach().clone()) for name, value in _state(own.module)}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        own.run(inputs)
    for name, value in _state(own.module):
        tensor, version, content = before[name]
        if value is not tensor or value._version != version or not torch.equal(value, content):
            kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
            raise ValueError(
                f"the model's forward pass writes to its {kind} {name!r}, so that one example's gradient may "
                "depend on other examples: private training needs a forward pass that leaves it unchanged"
            )


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
