"""A data set, a network and a loss as a Task: any torch module, with faster engines for the forms they know.

Invariants:
- equal coordinates give equal gradients, whatever ran before and however many threads there are;
- the plain engine (autograd) and the fast ones differ by rounding only;
- beside x and the result, memory is a batch and a model or two per thread.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.backend.one_thread import share
from rpel.data import Dataset, trees
from rpel.models import Factory, flatten, initialised, parameter_count, shapes
from rpel.randomness import draws
from rpel.tasks.autograd import AutogradEngine
from rpel.tasks.batches import Examples, Shards, Trigger
from rpel.tasks.checks import check_classes, check_fit, check_module, first_line, refusal
from rpel.tasks.convolution import ConvolutionEngine
from rpel.tasks.dropout import altered
from rpel.tasks.linear import LinearEngine, recognise
from rpel.tasks.objective import Columns, Draw, Objective
from rpel.tasks.private import PrivateGradients
from rpel.tasks.task import Engine, Loss, Metric, metrics, tensor
from rpel.tasks.vmap import VmapEngine
from rpel.types import Floats, Integers

_MANY = 32  # groups of nodes that keep all threads busy
_KEPT = 16_000_000  # numbers of test examples that an evaluation keeps ready for all nodes
_FEW, _WAVE = 8, 4  # of so few nodes, full gradients on so many blocks of examples are computed side by side


class Classification(Objective):
    """The task of classifying a data set's examples with a network; node i trains on ``shards[i]``.

    shards: indices by node, or a Virtual partition; they belong to the honest nodes. Nodes in ``flipped``
    hold all training examples with labels C − 1 − y instead; with a ``trigger``, a share of them patched and
    with its target's label. module: a module, whose parameters are the initial model, or a
    function that makes one, called with torch seeded from (seed, "init"). loss(output, target): a mean over
    the batch; cross-entropy if left out, which is also the negative log-likelihood of a module that ends in
    log-softmax.
    metric: a function metric(output, target), a mean over the batch, or a dict of named ones,
    measured beside the loss.
    tests: the test examples that each node calls its own. fast=False keeps to autograd.

    >>> from rpel.data import iid, load
    >>> from rpel.models import model
    >>> sample = load()
    >>> task = Classification(sample, iid(sample.train_y, 4, 25, seed=0), model("linear"), batch_size=25,
    ...     seed=0)
    >>> x, local, ids = np.tile(task.initial(), (4, 1)), task.local_state(4), np.arange(4)
    >>> for t in range(20):
    ...     g, local = task.gradient(x, local, ids, t, k=0)
    ...     x -= 0.1 * g
    >>> accuracy, loss = task.evaluate(x, local)
    >>> bool(accuracy.min() > 0.6)
    True
    """

    module: nn.Module

    def __init__(
        self,
        dataset: Dataset,
        shards: Shards,
        module: nn.Module | Factory,
        loss: Loss | None = None,
        metric: Any = None,
        *,
        batch_size: int,
        seed: int,
        device: str | torch.device = "cpu",
        flipped: Collection[int] = (),
        trigger: Trigger | None = None,
        tests: Sequence[Integers] | None = None,
        fast: bool = True,
    ) -> None:
        self.examples = Examples(dataset, shards, batch_size, seed, flipped, trigger)
        self.seed, self.batch_size, self.loss = seed, batch_size, loss or F.cross_entropy
        self.metrics = metrics(metric)
        self.module = _copied(initialised(module, seed))
        self.d = parameter_count(self.module)
        self.q = sum(buffer.numel() for buffer in self.module.buffers())
        self.engine = self._engine(torch.device(device), fast)
        if not self.engine.accuracy and not self.metrics:
            self.metrics = {"loss": Metric(self.loss, higher_is_better=False)}
            self.engine.metrics = tuple(self.metrics.values())
        self.tests = tests

    def _engine(self, device: torch.device, fast: bool) -> Engine:
        """The fastest engine that knows this network."""
        fast, dataset = fast and device.type == "cpu", self.examples.dataset
        known = fast and self.loss is F.cross_entropy and not self.metrics and _plain(dataset)
        layers, shape = recognise(self.module) if known else None, dataset.shape
        if layers is not None and layers.take(shape):
            check_classes(layers.linears[-1].shape[0], dataset)
            return ConvolutionEngine(layers, shape) if layers.convolutions else LinearEngine(layers)
        named = tuple(self.metrics.values())
        probe, targets = self.probe()
        try:
            plain = AutogradEngine(self.module, self.loss, probe, device, named)
        except Exception as error:  # the module's code may be anything
            raise refusal(error, probe) from error
        plain.accuracy = check_fit(plain, self.module, self.metrics, dataset, probe, targets, self.batch_size)
        many = self._many(plain) if fast else None
        return many if many is not None and many.pays(probe) and many.agrees(plain, probe, targets) else plain

    def _many(self, plain: AutogradEngine) -> VmapEngine | None:
        """The engine for many nodes or examples at once;
        None where what autograd does could not be done so."""
        altering = plain.hidden or any(map(altered, self.module.modules()))
        if altering or self.examples.dataset.collate is not None or plain.device.type != "cpu":
            return None
        many = VmapEngine(self.module, self.loss, tuple(self.metrics.values()))
        many.accuracy = plain.accuracy
        return many

    def engine_by_example(self) -> Engine:
        """The engine whose gradients of single examples are fastest: with one model for all of them, also
        where one by one is faster for nodes with a model each."""
        plain = self.engine
        many = self._many(plain) if isinstance(plain, AutogradEngine) else None
        if many is None or not isinstance(plain, AutogradEngine) or not many.agrees(plain, *self.probe()):
            return plain
        return many

    def batch(
        self, rows: Integers, ids: Integers | None, dtype: torch.dtype, *varied: Any
    ) -> tuple[Any, Any]:
        """Inputs and targets of training rows, as nodes ids see them, where the models are: see `batches`."""
        return self.examples.batch(rows, ids, dtype, *varied)

    def probe(self) -> tuple[Any, Any]:
        """The first and the last training example, and their targets."""
        rows = np.array([[0, self.examples.dataset.size - 1]])
        try:
            inputs, targets = self.examples.batch(rows, None, torch.float32)
        except Exception as error:
            if self.examples.dataset.collate is None:
                raise
            raise ValueError(
                f"collate does not make inputs and targets of a list of examples: {first_line(error)}"
            ) from error
        first, second = (trees.mapped(lambda value: value[0], tree) for tree in (inputs, targets))
        return first, second

    @property
    def nodes_per_call(self) -> int:  # type: ignore[override]
        """Nodes whose steps are computed together."""
        return self.engine.together(self.batch_size)

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        """The module's trained parameters in their order: name and shape."""
        return shapes(self.module)

    def initial(self) -> NDArray[np.float32]:
        """The common initial model (d,)."""
        return flatten(self.module).cpu().numpy().astype(np.float32)

    def local_state(self, h: int) -> NDArray[np.float32]:
        """The module's buffers, one row for each of h nodes: (h, q)."""
        parts = [buffer.detach().cpu().reshape(-1).float() for buffer in self.module.buffers()]
        return np.tile(torch.cat(parts).numpy() if parts else np.empty(0, np.float32), (h, 1))

    def gradient(
        self, x: Floats, local: Floats, ids: Integers, t: int, k: int, out: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Gradients (h, d) at x (h, d) on the batches of nodes ids (h,) in round t, step k,
        and the new local state.

        Each batch is drawn uniformly, with replacement, from the node's examples: see `batches`.
        """
        ids = np.asarray(ids, np.int64)
        self._check(x, local, len(ids))
        out = np.empty(x.shape, x.dtype) if out is None else out
        self._check(out, local, len(ids))
        local = local.copy()
        rows, coins = self.examples.indices(ids, t, k), self.examples.coins(ids, t, k)
        seeds, patched = self._seeds(ids, t, k), self.examples.patched(ids, t, k)
        x_, local_, out_ = tensor(x), tensor(local), tensor(out)

        def work(some: slice) -> None:
            marked = None if patched is None else patched[some]
            varied = None if coins is None else coins[some]
            inputs, labels = self.examples.batch(rows[some], ids[some], x_.dtype, varied, marked)
            noise = [] if seeds is None else seeds[some].tolist()
            self.engine.gradient(x_[some], local_[some], inputs, labels, noise, out_[some], train=True)

        self.over_nodes(work, len(ids))
        return out, local

    def _seeds(self, ids: Integers, t: int, k: int) -> Integers | None:
        """(h,) for the noise in the nodes' networks; None where there is none."""
        if not self.engine.noisy:
            return None
        return (draws(self.seed, ("dropout", k), t, ids, 1)[:, 0] * 2**53).astype(np.int64)

    def _check(self, x: Floats, local: Floats, nodes: int) -> None:
        """Refuse arrays that are not contiguous rows of this task's models and local states."""
        if x.shape != (nodes, self.d) or x.dtype not in (np.float32, np.float64) or not x.flags.c_contiguous:
            raise ValueError(
                f"{nodes} models are needed as contiguous rows ({nodes}, {self.d}) of floats, not {x.shape}"
            )
        if local.shape != (nodes, self.q):
            raise ValueError(f"the local state must have shape ({nodes}, {self.q}), not {local.shape}")

    def over_nodes(self, work: Callable[[slice], None], nodes: int) -> None:
        """work(slice of nodes) over all nodes, as many at once as the engine likes."""
        size = self.nodes_per_call
        share(
            lambda u: work(slice(u * size, min(nodes, (u + 1) * size))), -(-nodes // size), self.engine.serial
        )

    def evaluate(
        self, x: Floats, local: Floats, subset: Integers | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Accuracy (h,) and mean loss (h,) of each model on the test examples `subset` (all if left out).

        The accuracy is NaN where targets are no classes.
        """
        scores = self._measured(x, local, subset)
        return scores["accuracy"], scores["loss"]

    def measure(
        self, x: Floats, local: Floats, subset: Integers | None = None, ids: Integers | None = None
    ) -> Columns:
        """Accuracy, loss, metrics, and the success of a backdoor where there is one."""
        columns = self._measured(x, local, subset)
        if ids is not None:
            columns |= self._measured_own(x, local, ids)
        success = self.attack_success(x, local, subset)
        return columns if success is None else columns | {"attack_success": success}

    def _measured(self, x: Floats, local: Floats, subset: Integers | None) -> Columns:
        """Accuracy, loss and each metric by its name, (h,) each."""
        self._check(x, local, len(x))
        rows = np.arange(self.examples.dataset.test_size) if subset is None else np.asarray(subset, np.int64)
        scores = self._scored(x, local, rows, self.examples.tested)
        return dict(
            zip(("accuracy", "loss", *(f"metric.{name}" for name in self.metrics)), scores, strict=True)
        )

    @property
    def measures(self) -> dict[str, bool]:
        """The columns of :meth:`measure` beside accuracy and loss, and whether more of each is better."""
        own = {} if self.tests is None else {"own_accuracy": True, "own_loss": False}
        named = {name: metric.higher_is_better for name, metric in self.metrics.items()}
        return {
            name: more
            for name, more in (named | own).items()
            if name != "own_accuracy" or self.engine.accuracy
        }

    def _measured_own(self, x: Floats, local: Floats, ids: Integers) -> dict[str, NDArray[np.float64]]:
        """Accuracy and loss, (h,) each, of nodes ids (h,), each on the test examples that are its own;
        {} without."""
        if self.tests is None:
            return {}
        scores = np.array(
            [self._on_own(x[i : i + 1], local[i : i + 1], node) for i, node in enumerate(ids.tolist())]
        )
        named = {"metric.own_accuracy": scores[:, 0], "metric.own_loss": scores[:, 1]}
        return named if self.engine.accuracy else {"metric.own_loss": scores[:, 1]}

    def _on_own(self, x: Floats, local: Floats, node: int) -> tuple[float, float]:
        assert self.tests is not None
        if not len(self.tests[node]):
            return np.nan, np.nan
        right, lost = self._scored(x, local, self.tests[node], self.examples.tested)[:2]
        return float(right[0]), float(lost[0])

    def attack_success(self, x: Floats, local: Floats, subset: Integers | None = None) -> Floats | None:
        """The share (h,) of patched test images of other classes that each model calls the trigger's target.

        None where there is no trigger.
        """
        trigger = self.examples.trigger
        if trigger is None:
            return None
        rows = np.arange(self.examples.dataset.test_size) if subset is None else np.asarray(subset, np.int64)
        return self._scored(
            x, local, rows[self.examples.dataset.test_y[rows] != trigger.target], self._marked
        )[0]

    def _scored(
        self,
        x: Floats,
        local: Floats,
        rows: Integers,
        tested: Callable[[Integers, torch.dtype], tuple[Any, Any]],
    ) -> list[NDArray[np.float64]]:
        """Share of right answers, mean loss and metrics, (h,) each,
        of models on what `tested` makes of test rows."""
        if not len(rows):
            raise ValueError("an evaluation needs at least one test example")
        block, groups = self.engine.block, self._groups(len(x))
        blocks = [rows[at : at + block] for at in range(0, len(rows), block)]
        # A few nodes on many blocks are shared out by both; of many nodes, a unit sums all its blocks.
        parts = len(blocks) if len(groups) < _MANY else 1
        sums = np.zeros((2 + len(self.metrics), len(x), parts))
        x_, local_ = tensor(x), tensor(local)
        loaded = (
            [tested(block, x_.dtype) for block in blocks] if self._values() * len(rows) <= _KEPT else None
        )

        def inputs(part: int) -> tuple[Any, Any]:
            return tested(blocks[part], x_.dtype) if loaded is None else loaded[part]

        def work(unit: int) -> None:
            some, part = groups[unit // parts], unit % parts
            these = (part,) if parts > 1 else range(len(blocks))
            scores = [self.engine.score(x_[some], local_[some], *inputs(one)) for one in these]
            for column, each in zip(sums, zip(*scores, strict=True), strict=True):
                column[some, part] = np.ascontiguousarray(np.stack(each, axis=1)).sum(axis=1)

        share(work, len(groups) * parts, self.engine.serial)
        return [column.sum(axis=1) / len(rows) for column in sums]

    def _values(self) -> int:
        """Numbers in one test example, where that is known."""
        dataset = self.examples.dataset
        return 1 if dataset.collate is not None else sum(x[:1].size for _, x in trees.leaves(dataset.test_x))

    def _groups(self, nodes: int) -> list[slice]:
        """The nodes that are evaluated at once: units cut where they are too large,
        so that whole units share none."""
        size, unit = self.engine.together(), self.nodes_per_call
        units = [range(first, min(first + unit, nodes)) for first in range(0, nodes, unit)]
        return [slice(at, min(at + size, rows.stop)) for rows in units for at in rows[::size]]

    def _marked(self, rows: Integers, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Some test examples with the trigger's patch, and its target as their label."""
        assert self.examples.trigger is not None
        inputs = self.examples.test(rows, dtype)
        self.examples.patch(inputs, np.ones(len(rows), bool))
        return inputs, torch.full((len(rows),), int(self.examples.trigger.target))

    def private(
        self,
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        draw: Draw | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> PrivateGradients:
        """Gradients of this task with each example's clipped, and noise on their sum."""
        return PrivateGradients(self, max_grad_norm, noise_multiplier, draw, sizes)

    def full_gradient(self, x: Floats, local: Floats, size: int | None = None) -> Floats:
        """∇F_H (c, d) at each model of x (c, d):
        the mean over honest nodes of the mean loss on all they hold.

        With ``size``: on that many examples, drawn once from (seed, "full-gradient") so that the result is
        right on average. In evaluation mode: no dropout, no variation of images, local statistics.
        """
        self._check(x, local, len(x))
        block = self.engine.block
        blocks = [
            (rows[at : at + block], weight * len(rows[at : at + block]) / len(rows))
            for rows, weight in self.examples.honest(size)
            for at in range(0, len(rows), block)
        ]
        out, wave = np.zeros(x.shape, x.dtype), _WAVE if len(x) <= _FEW else 1
        parts = np.empty((wave, *x.shape), x.dtype)
        for first in range(0, len(blocks), wave):
            some = blocks[first : first + wave]
            self._gradients_on([rows for rows, _ in some], x, local, parts)
            for (_, weight), part in zip(some, parts, strict=False):  # in order, whoever computed them
                out += weight * part
        return out

    def _gradients_on(self, blocks: list[Integers], x: Floats, local: Floats, parts: Floats) -> None:
        """Each model's gradient on each block of training examples, in evaluation mode, into parts (blocks,
        c, d)."""
        x_, local_, parts_ = tensor(x), tensor(local), tensor(parts)
        size = self.engine.together(self.engine.block)

        def work(unit: int) -> None:
            first, b = unit // len(blocks) * size, unit % len(blocks)
            some = slice(first, min(first + size, len(x)))
            nodes = some.stop - first
            inputs, labels = (
                trees.mapped(lambda value: value.expand(nodes, *value.shape[1:]), tree)
                for tree in self.examples.batch(blocks[b][None], None, x_.dtype)
            )
            self.engine.gradient(x_[some], local_[some], inputs, labels, [], parts_[b, some], train=False)

        share(work, -(-len(x) // size) * len(blocks), self.engine.serial)


def _plain(dataset: Dataset) -> bool:
    """Whether examples are floats, or become some, in one array, with a class each:
    what the fast engines take."""
    one = dataset.collate is None and isinstance(dataset.train_x, np.ndarray) and dataset.labels is not None
    return one and (dataset.mean is not None or dataset.train_x.dtype.kind == "f")


def _copied(module: nn.Module) -> nn.Module:
    """A copy that trains as the module would; ValueError for what a copy in float32 would leave out."""
    for name, value in check_module(module).named_parameters():
        if value._backward_hooks:
            raise ValueError(
                f"parameter {name!r} of the model has a hook, which the nodes' copies would not have: "
                "put it on the layer (register_full_backward_hook)"
            )
        if value.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} of the model is {value.dtype}: the nearest is model.float()"
            )
    return copy.deepcopy(module)
