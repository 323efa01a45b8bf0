"""What the simulator and the peers ask of a task, and the answer for a network on a data set.

`Objective` is the whole contract. `Classification` is one, for any torch module, data and loss.

Invariants:
- equal coordinates give equal gradients, whatever ran before and however many threads there are;
- all engines compute what autograd computes, up to rounding;
- beside x and the result, memory is a batch and a model or two per thread.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.backend.threads import share
from rpel.data import Dataset, trees
from rpel.models import Factory, flatten, initialised, parameter_count, shapes
from rpel.randomness import draws
from rpel.tasks.checks import check_fit, check_module, first_line, refusal
from rpel.tasks.engines import ENGINES, Engine, Loss, Probe, choose, portable
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.engine import tensor, wide
from rpel.tasks.examples import Examples, Shards, Trigger
from rpel.tasks.metrics import Metric, metrics
from rpel.tasks.private import Draw, PrivateGradients
from rpel.types import Integers, Models

Columns = dict[str, NDArray[np.float64]]
"""Measured values (h,) by column: accuracy, loss, ``metric.<name>``, attack_success."""

MANY_GROUPS = 32  # groups of nodes that keep all threads busy
MAX_LOADED = 16_000_000  # numbers of test examples that an evaluation keeps ready for all nodes
FEW_NODES, BLOCKS_IN_PARALLEL = 8, 4  # of few nodes, full gradients on some blocks are computed in parallel
STEP_BYTES = 1 << 30  # what local steps may keep on an accelerator


class Objective(ABC):
    """A loss for every node, its stochastic gradient and its accuracy.

    Models are rows of one array or tensor (h, d), local states rows of another (h, q). A peer needs ``d``,
    ``layout``, ``gradient`` and ``evaluate``; a simulation also ``initial`` and ``full_gradient``. Everything
    else has a default that is right for a task without torch module, metrics or single examples.
    """

    d: int
    """Number of parameters."""

    layout: Mapping[str, tuple[int, ...]]
    """Name and shape of each parameter, in the order of the vector; values are matched by name."""

    module: nn.Module | None = None
    """The torch module whose parameters and buffers the models and local states are."""

    nodes_per_call: int = 1
    """Nodes whose steps are computed together. Results depend on the nodes within such a group only."""

    any_grouping: bool = False
    """Results are equal up to rounding however nodes are grouped, so workers may split a group."""

    device_bytes: int = 0
    """Memory on an accelerator beside the models: data and temporaries."""

    @property
    def measures(self) -> Mapping[str, bool]:
        """Names of the metrics beside accuracy and loss, and whether more of each is better."""
        return {}

    def initial(self) -> Models:
        """The common initial model (d,), from the seed."""
        raise ValueError(f"a {type(self).__name__} has no initial model, which a simulation begins with")

    def local_state(self, h: int) -> Models:
        """Initial local state (h, q) of h nodes, such as BatchNorm's statistics; it is never exchanged."""
        return np.empty((h, 0), np.float32)

    @abstractmethod
    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        """Algorithm 1, lines 3-4: stochastic gradients (h, d) of nodes ``ids``, and their new local state.

        The batch comes from the coordinates (seed, ("batch", k), t, node) and from nothing else.

        Args:
            x: (h, d) the nodes' models.
            local: (h, q) their local state, left as it is.
            ids: (h,) the nodes' numbers.
            t: The round.
            k: The local step within the round.
            out: (h, d) Where to write the gradients.
        """

    @abstractmethod
    def evaluate(
        self, x: Models, local: Models, subset: Integers | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Accuracy (h,) and loss (h,) of each model on the test examples ``subset``, or on all of them.

        The accuracy is NaN where targets are no classes.
        """

    def measure(
        self, x: Models, local: Models, subset: Integers | None = None, ids: Integers | None = None
    ) -> Columns:
        """All columns of each model on the test examples ``subset``, or on all of them.

        Args:
            x: (h, d) the models.
            local: (h, q) their local state.
            subset: The test examples; all if left out.
            ids: (h,) the nodes' numbers, for measures of a node's own test examples; none if left out.
        """
        accuracy, loss = self.evaluate(x, local, subset)
        return {"accuracy": accuracy, "loss": loss}

    def full_gradient(self, x: Models, local: Models, size: int | None = None) -> Models:
        """The gradient (h, d) of F_H, the mean of the honest nodes' losses, at each model.

        With ``size`` it is taken on that many examples.
        """
        raise ValueError(f"a {type(self).__name__} has no full gradient, which a simulation measures")

    def private(
        self,
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        draw: Draw | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> PrivateGradients:
        """Gradients of this task with each example's clipped, and noise on their sum.

        ValueError for a task without single examples. For the arguments see :class:`PrivateGradients`.
        """
        raise ValueError(
            f"a {type(self).__name__} has no single examples to clip: give an rpel.tasks.Task, or leave out "
            "max_grad_norm"
        )


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
    tests: the test examples that each node calls its own. device: where examples and models are.
    native=False: without the hand-written kernels. engines: the table to choose from.

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
        native: bool = True,
        engines: Sequence[str] = ENGINES,
    ) -> None:
        self.device = torch.device(device)
        self.examples = Examples(dataset, shards, batch_size, seed, flipped, trigger, self.device)
        self.seed, self.batch_size, self.loss = seed, batch_size, loss or F.cross_entropy
        self.metrics, self.tests = metrics(metric), tests
        self.module = _copied(initialised(module, seed))
        self.d, self.layout = parameter_count(self.module), shapes(self.module)
        self.q = sum(buffer.numel() for buffer in self.module.buffers())
        self.probe = self._probe()
        self.classes = self._check_fit()
        if not self.classes and not self.metrics:
            self.metrics = {"loss": Metric(self.loss, higher_is_better=False)}
        self.engines = tuple(engines) if native else portable(engines)
        self.engine = choose(self.module, self.loss, self.probe, self.engines)
        self.nodes_per_call = self.engine.nodes_per_call(batch_size)
        self.any_grouping = self.device.type != "cpu"
        if self.any_grouping:
            self.device_bytes = self.examples.nbytes + STEP_BYTES

    def _probe(self) -> Probe:
        """The first and the last training example."""
        dataset = self.examples.dataset
        try:
            pair = self.examples.batch(np.array([[0, dataset.size - 1]]), None, torch.float32)
        except Exception as error:
            if dataset.collate is None:
                raise
            raise ValueError(
                f"collate does not make inputs and targets of a list of examples: {first_line(error)}"
            ) from error
        inputs, targets = (trees.mapped(lambda value: value[0].cpu(), tree) for tree in pair)
        labels, uniform = dataset.labels is not None, dataset.collate is None
        return Probe(inputs, targets, self.batch_size, self.device, labels and uniform, uniform)

    def _check_fit(self) -> bool:
        """Whether outputs and targets are classes; ValueError where network, loss and data do not fit."""
        try:
            plain = AutogradEngine(self.module, self.loss, replace(self.probe, device=torch.device("cpu")))
        except Exception as error:  # the module's code may be anything
            raise refusal(error, self.probe.inputs) from error
        return check_fit(plain, self.metrics, self.examples.dataset, self.probe)

    def engine_by_example(self) -> Engine:
        """The engine whose gradients of single examples are fastest."""
        engines = portable(self.engines) or self.engines
        return choose(self.module, self.loss, replace(self.probe, by_example=True), engines)

    def initial(self) -> NDArray[np.float32]:
        """The common initial model (d,)."""
        return flatten(self.module).cpu().numpy().astype(np.float32)

    def local_state(self, h: int) -> NDArray[np.float32]:
        """The module's buffers, one row for each of h nodes: (h, q)."""
        parts = [buffer.detach().cpu().reshape(-1).float() for buffer in self.module.buffers()]
        return np.tile(torch.cat(parts).numpy() if parts else np.empty(0, np.float32), (h, 1))

    # --- gradients ---

    def gradient(
        self, x: Models, local: Models, ids: Integers, t: int, k: int, out: Models | None = None
    ) -> tuple[Models, Models]:
        """Gradients (h, d) on the batches of nodes ids (h,) in round t, step k, and the new local state.

        Each batch is drawn uniformly, with replacement, from the node's examples.
        """
        ids, x_ = np.asarray(ids, np.int64), tensor(x)
        self._check(x, local, len(ids))
        out_, local_ = torch.empty_like(x_) if out is None else tensor(out), tensor(local).clone()
        self._check(out_, local, len(ids))
        rows, varied = self.examples.indices(ids, t, k), self.examples.variations(ids, t, k)
        seeds, patched = self._seeds(ids, t, k), self.examples.patched(ids, t, k)

        def work(some: slice) -> None:
            drawn = None if varied is None else varied[some]
            marked = None if patched is None else patched[some]
            inputs, labels = self.examples.batch(rows[some], ids[some], x_.dtype, drawn, marked)
            noise = [] if seeds is None else seeds[some].tolist()
            self.engine.gradient(x_[some], local_[some], inputs, labels, noise, out_[some], train=True)

        self.over_nodes(work, len(ids))
        return _alike(out_, x) if out is None else out, _alike(local_, local)

    def _seeds(self, ids: Integers, t: int, k: int) -> Integers | None:
        """(h,) for the noise in the nodes' networks; None where there is none."""
        if not self.engine.noisy:
            return None
        return (draws(self.seed, ("dropout", k), t, ids, 1)[:, 0] * 2**53).astype(np.int64)

    def _check(self, x: Any, local: Any, nodes: int) -> None:
        """Refuse arrays that are not contiguous rows of this task's models and local states."""
        contiguous = x.is_contiguous() if isinstance(x, Tensor) else x.flags.c_contiguous
        numbers = str(x.dtype).removeprefix("torch.") in ("float32", "float64")
        if tuple(x.shape) != (nodes, self.d) or not numbers or not contiguous:
            raise ValueError(
                f"{nodes} models are needed as contiguous rows ({nodes}, {self.d}) of floats, not "
                f"{tuple(x.shape)}"
            )
        if tuple(local.shape) != (nodes, self.q):
            raise ValueError(f"the local state must have shape ({nodes}, {self.q}), not {tuple(local.shape)}")

    def over_nodes(self, work: Callable[[slice], None], nodes: int) -> None:
        """Call work(slice of nodes) over all nodes, as many at once as the engine computes."""
        size = self.nodes_per_call
        share(
            lambda u: work(slice(u * size, min(nodes, (u + 1) * size))), -(-nodes // size), self.engine.serial
        )

    def private(
        self,
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        draw: Draw | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> PrivateGradients:
        """Gradients of this task with each example's clipped, and noise on their sum."""
        return PrivateGradients(self, max_grad_norm, noise_multiplier, draw, sizes)

    def full_gradient(self, x: Models, local: Models, size: int | None = None) -> Models:
        """∇F_H (c, d) at each model: the mean over honest nodes of the mean loss on all they hold.

        With ``size``: on that many examples, drawn once from (seed, "full-gradient") so that the result is
        right on average. In evaluation mode: no dropout, no variation of images, local statistics.
        """
        self._check(x, local, len(x))
        block, x_ = self.engine.block, tensor(x)
        blocks = [
            (rows[at : at + block], weight * len(rows[at : at + block]) / len(rows))
            for rows, weight in self.examples.honest(size)
            for at in range(0, len(rows), block)
        ]
        out, wave = torch.zeros_like(x_), BLOCKS_IN_PARALLEL if len(x) <= FEW_NODES else 1
        parts = x_.new_empty((wave, *x_.shape))
        for first in range(0, len(blocks), wave):
            some = blocks[first : first + wave]
            self._gradients_on([rows for rows, _ in some], x_, tensor(local), parts)
            for (_, weight), part in zip(
                some, parts, strict=False
            ):  # in order, whichever thread computed them
                out += weight * part
        full: Models = _alike(out, x)
        return full

    def _gradients_on(self, blocks: list[Integers], x: Tensor, local: Tensor, parts: Tensor) -> None:
        """Each model's gradient on each block of training examples, into parts (blocks, c, d)."""
        size = self.engine.nodes_per_call(self.engine.block)

        def work(unit: int) -> None:
            first, b = unit // len(blocks) * size, unit % len(blocks)
            some = slice(first, min(first + size, len(x)))
            nodes = some.stop - first
            inputs, labels = (
                trees.mapped(lambda value: value.expand(nodes, *value.shape[1:]), tree)
                for tree in self.examples.batch(blocks[b][None], None, x.dtype)
            )
            self.engine.gradient(x[some], local[some], inputs, labels, [], parts[b, some], train=False)

        share(work, -(-len(x) // size) * len(blocks), self.engine.serial)

    # --- evaluation ---

    def evaluate(
        self, x: Models, local: Models, subset: Integers | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Accuracy (h,) and mean loss (h,) of each model on the test examples `subset` (all if left out)."""
        accuracy, loss, *_ = self._scores(x, local, self._test_rows(subset))
        return accuracy, loss

    def measure(
        self, x: Models, local: Models, subset: Integers | None = None, ids: Integers | None = None
    ) -> Columns:
        """Accuracy, loss, metrics, and the success of a backdoor where there is one."""
        rows, trigger = self._test_rows(subset), self.examples.trigger
        names = "accuracy", "loss", *(f"metric.{name}" for name in self.metrics)
        columns = dict(zip(names, self._scores(x, local, rows), strict=True))
        if ids is not None and self.tests is not None:
            models = ((x[i : i + 1], local[i : i + 1]) for i in range(len(x)))
            own = np.array([self._own_scores(*each, node) for each, node in zip(models, ids, strict=True)])
            columns |= {"metric.own_accuracy": own[:, 0]} if self.classes else {}
            columns |= {"metric.own_loss": own[:, 1]}
        if trigger is not None:  # the share of patched images of other classes that are called the target
            others = rows[self.examples.dataset.test_y[rows] != trigger.target]
            columns["attack_success"] = self._scores(x, local, others, marked=True)[0]
        return columns

    @property
    def measures(self) -> dict[str, bool]:
        """The metrics of :meth:`measure`, and whether more of each is better."""
        named = {name: metric.higher_is_better for name, metric in self.metrics.items()}
        if self.tests is None:
            return named
        return named | ({"own_accuracy": True} if self.classes else {}) | {"own_loss": False}

    def _test_rows(self, subset: Integers | None) -> Integers:
        return np.arange(self.examples.dataset.test_size) if subset is None else np.asarray(subset, np.int64)

    def _own_scores(self, x: Models, local: Models, node: int) -> tuple[float, float]:
        """Accuracy and loss of a node on the test examples that are its own."""
        assert self.tests is not None
        if not len(self.tests[node]):
            return np.nan, np.nan
        right, lost, *_ = self._scores(x, local, self.tests[node])
        return float(right[0]), float(lost[0])

    def _scores(
        self, x: Models, local: Models, rows: Integers, marked: bool = False
    ) -> list[NDArray[np.float64]]:
        """Share of right answers, mean loss and metrics, (h,) each, on these test examples."""
        self._check(x, local, len(x))
        if not len(rows):
            raise ValueError("an evaluation needs at least one test example")
        block, groups, x_, local_ = self.engine.block, self._groups(len(x)), tensor(x), tensor(local)
        blocks = [rows[at : at + block] for at in range(0, len(rows), block)]
        # A few nodes on many blocks are shared out by both; of many nodes, a unit takes all its blocks.
        parts = len(blocks) if len(groups) < MANY_GROUPS else 1
        sums = torch.zeros((2 + len(self.metrics), len(x), len(blocks)), dtype=wide(x_), device=x_.device)
        values = sum(value.numel() for _, value in trees.leaves(self.probe.inputs)) // 2
        loaded = None
        if self.probe.uniform and values * len(rows) <= MAX_LOADED:
            loaded = [self.examples.tested(one, x_.dtype, marked) for one in blocks]

        def work(unit: int) -> None:
            some, part = groups[unit // parts], unit % parts
            for b in (part,) if parts > 1 else range(len(blocks)):
                pair = self.examples.tested(blocks[b], x_.dtype, marked) if loaded is None else loaded[b]
                inputs, labels = pair
                sums[:, some, b] = torch.stack(self._sums(x_[some], local_[some], inputs, labels))

        share(work, len(groups) * parts, self.engine.serial)
        return [column.sum(axis=1) / len(rows) for column in on_host(sums)]

    def _sums(self, x: Tensor, local: Tensor, inputs: Any, labels: Any) -> list[Tensor]:
        """Right answers, losses and metrics of c nodes, (c,) each, summed over the examples (N, …).

        Of targets with several classes each, such as the pixels of an image, an example counts as the share
        that is right. Without classes right answers are NaN.
        """
        kind, count = wide(x), len(trees.first(labels))
        by_class = self.classes and self.loss is F.cross_entropy and labels.dim() == 1
        if by_class and not self.metrics:
            return [column.to(kind) for column in self.engine.classify(x, local, inputs, labels)]
        outputs = self.engine.outputs(x, local, inputs)
        functions = [self.loss, *(metric.function for metric in self.metrics.values())]
        each = [
            torch.stack([torch.as_tensor(f(one, labels)).to(x.device) for one in outputs]) for f in functions
        ]
        right = torch.full((len(x),), torch.nan)
        if self.classes:
            hits = outputs.argmax(dim=2) == labels
            right = (hits.flatten(2).to(kind).mean(dim=2) if labels.dim() > 1 else hits).sum(dim=1)
        return [right.to(x.device, kind), *(column.detach().to(kind) * count for column in each)]

    def _groups(self, nodes: int) -> list[slice]:
        """Nodes that are evaluated at once: calls' groups, cut where they are too large."""
        size, group = self.engine.nodes_per_call(), self.nodes_per_call
        groups = [range(first, min(first + group, nodes)) for first in range(0, nodes, group)]
        return [slice(at, min(at + size, rows.stop)) for rows in groups for at in rows[::size]]


def on_host(values: Tensor) -> NDArray[Any]:
    """Numbers of a device on the host."""
    return np.asarray(values.cpu().numpy())


def _alike(result: Tensor, given: Models) -> Any:
    """The result as an array where the given models are an array."""
    return result if isinstance(given, Tensor) else result.numpy()


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
