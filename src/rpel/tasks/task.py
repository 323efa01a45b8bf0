"""Define a task from Python: a network, data and a loss.

The same object serves a simulation and a peer of a network.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import nn

from rpel.data import balanced_subset, user
from rpel.models import Factory
from rpel.tasks.checks import check_loss, check_model
from rpel.tasks.engines.engine import Loss
from rpel.tasks.examples import Shards, Trigger
from rpel.tasks.metrics import metrics
from rpel.tasks.objective import Classification
from rpel.types import Integers


class Task:
    """What is to be learned: a network, data and a loss.

    model: any torch.nn.Module, whose values are the initial model of a simulation (a network of peers pins
    its own), or a class or function without arguments that makes one under the run's seed. Parameters with
    requires_grad=False are neither trained nor exchanged.
    train, test: pairs (x, y) of arrays, tensors or DataFrames, of which x and y may be tuples or dicts; or
    torch data sets or loaders. train may also be a list with one of these for each honest node of a
    simulation. All are used as they are. collate(examples) -> (inputs, targets) makes batches of examples
    that are not alike. loss(output, target): a mean over the batch; cross-entropy if left out. metric: a
    function metric(output, target), or a dict of named ones; a :class:`Metric` says whether more is better.

    What does not fit together is a ValueError of one sentence, here and not in the first round.

    >>> x = torch.randn(40, 3); y = (x[:, 0] > 0).long()
    >>> ward = Task(nn.Linear(3, 2), (x, y), (x, y))
    >>> ward.d, ward.layout
    (8, {'weight': (2, 3), 'bias': (2,)})
    >>> import rpel
    >>> rpel.simulate(task=ward, nodes=6, byzantine=1, rounds=2, batch_size=4, out=None).models.shape
    (5, 8)
    """

    def __init__(
        self,
        model: nn.Module | Factory,
        train: Any,
        test: Any = None,
        loss: Loss | None = None,
        *,
        metric: Any = None,
        collate: user.Collate | None = None,
        name: str = user.NAME,
    ) -> None:
        self.module, self.loss, self.metric = check_model(model), check_loss(loss), metric
        metrics(metric)
        self.shards: list[Integers] | None = None
        if user.is_one_per_node(train):
            self.dataset, self.shards = user.per_node(train, test, len(train), collate=collate)
        else:
            self.dataset = user.dataset(train, test, collate=collate, name=name)
        if loss is None:
            self.dataset = user.with_classes(self.dataset)
        checked = self.among([np.arange(self.dataset.size)], batch_size=2, seed=0)
        self.d, self.layout = checked.d, checked.layout

    def among(
        self,
        shards: Shards,
        *,
        batch_size: int,
        seed: int,
        device: str | torch.device = "cpu",
        flipped: Collection[int] = (),
        trigger: Trigger | None = None,
    ) -> Classification:
        """The task of nodes that hold these training examples; see :class:`Classification`."""
        return Classification(
            self.dataset,
            shards,
            self.module,
            self.loss,
            self.metric,
            batch_size=batch_size,
            seed=seed,
            device=device,
            flipped=flipped,
            trigger=trigger,
        )

    def of_member(self, index: int, *, batch_size: int, seed: int) -> Classification:
        """Return the task of member ``index`` of a network, which holds all training examples given here.

        If `train` is a list with one data set for each member, the member gets the one with its number.
        """
        if self.shards is None:
            return self.among({index: np.arange(self.dataset.size)}, batch_size=batch_size, seed=seed)
        if index >= len(self.shards):
            raise ValueError(f"member {index} has no data: train is a list for {len(self.shards)} members")
        return self.among({index: self.shards[index]}, batch_size=batch_size, seed=seed)

    def subset(self, size: int, seed: int = 0) -> Integers:
        """Return a balanced subset of the test examples: the same number of every class."""
        return balanced_subset(self.dataset.strata(), size, seed)
