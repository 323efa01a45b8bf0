"""Which examples a node sees in which step, and those examples as numbers.

Invariants:
- the batch of node i in round t, local step k depends on (seed, ("batch", k), t, i) alone: any step replays
  by itself. That is why a batch is drawn from the shard with replacement: going through the shard in epochs
  would make a round depend on the rounds before it;
- examples stay as they were given until they are drawn: images of our own data sets become numbers in a
  batch, floats take the models' precision, whole numbers (such as token ids)
  and whatever a `collate` makes stay what they are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend.cache import compiled
from rpel.backend.pool import run
from rpel.data import Dataset, Virtual, crop_flip, trees
from rpel.randomness import draws, stream
from rpel.types import Integers

Tree = trees.Tree
Shards = Sequence[Integers] | Mapping[int, Integers] | Virtual


@compiled
def _normalise(images: Any, rows: Any, scale: Any, shift: Any, out: Any) -> None:
    """out[r, j] = images[rows[r], j] · scale[j] + shift[j]."""
    kind = scale.dtype.type
    for r in range(len(rows)):
        image, result = images[rows[r]], out[r]
        for j in range(len(scale)):
            result[j] = kind(image[j]) * scale[j] + shift[j]


Rows = NDArray[np.int32]
"""Numbers of training examples; half the memory of Integers where a million nodes draw a batch each."""

_NODES = 512  # whose batches are drawn together: their random numbers stay in the cache


@dataclass(frozen=True)
class Trigger:
    """A backdoor: a share of the hostile nodes' images carry a patch and the label `target`.

    The patch is a square in the lower right corner, a seventh of the width, at the largest pixel value.
    """

    target: int = 0
    share: float = 0.5

    def check(self, dataset: Dataset) -> None:
        """Refuse data without images, and a target that is no class of theirs."""
        if dataset.collate is not None or not isinstance(dataset.train_x, np.ndarray):
            raise ValueError(f"a backdoor needs images, and an example of {dataset.name} is not one array")
        if len(dataset.shape) != 3:
            raise ValueError(
                f"a backdoor needs images, and examples of {dataset.name} have the shape {dataset.shape}"
            )
        if self.target not in range(dataset.classes):
            raise ValueError(
                f"target {self.target} is not a class of {dataset.name}: they go to {dataset.classes - 1}"
            )


class Examples:
    """The data of all nodes: whose is what, batches by coordinates, normalisation,
    what hostile nodes do to theirs."""

    def __init__(
        self,
        dataset: Dataset,
        shards: Shards,
        batch_size: int,
        seed: int,
        flipped: Collection[int],
        trigger: Trigger | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch needs at least one example, not {batch_size}")
        if trigger is not None:
            trigger.check(dataset)
        self.trigger = trigger
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.virtual = shards if isinstance(shards, Virtual) else None
        held = {} if isinstance(shards, Virtual) else _by_node(shards)
        self.flipped = np.array(sorted(flipped), np.int64)
        self.held = {node: part for node, part in held.items() if node not in set(flipped)}
        self.pool, self.start, self.size = _table(self.held, self.flipped, dataset.size)
        if dataset.mean is not None and dataset.std is not None:
            per_channel = (-1, *(1,) * (len(dataset.shape) - 1))
            mean, std = (np.array(v, np.float64).reshape(per_channel) for v in (dataset.mean, dataset.std))
            top = 255 if dataset.train_x.dtype == np.uint8 else 1
            self.scale = np.broadcast_to(1 / (top * std), dataset.shape).ravel()
            self.shift = np.broadcast_to(-mean / std, dataset.shape).ravel()
        self._sampled: dict[int, Integers] = {}

    def indices(self, ids: Integers, t: int, k: int) -> Rows:
        """The batches (h, batch_size) of nodes ids (h,) in round t, local step k:
        uniform over each node's examples."""
        drawn = np.empty((len(ids), self.batch_size), np.int32)

        def work(first: int, last: int) -> None:
            for unit in range(first, last):
                some = slice(unit * _NODES, (unit + 1) * _NODES)
                drawn[some] = self._drawn(ids[some], t, k)

        run(work, -(-len(ids) // _NODES))
        return drawn

    def _drawn(self, ids: Integers, t: int, k: int) -> Integers:
        numbers = 1 if self.virtual is None else self.virtual.numbers
        uniform = draws(self.seed, ("batch", k), t, ids, numbers * self.batch_size)
        if self.virtual is None:
            return self._from_table(uniform, ids)
        own = ~np.isin(ids, self.flipped)
        drawn = np.empty((len(ids), self.batch_size), np.int64)
        drawn[own] = self.virtual.draw(uniform[own].reshape(-1, self.batch_size, numbers), ids[own])
        drawn[~own] = self._from_table(uniform[~own, : self.batch_size], ids[~own])
        return drawn

    def _from_table(self, uniform: NDArray[np.float64], ids: Integers) -> Integers:
        known = (ids >= 0) & (ids < len(self.size))
        if not known.all() or not self.size[ids].all():
            missing = next(int(i) for i in ids if not 0 <= i < len(self.size) or not self.size[i])
            raise ValueError(f"node {missing} holds no examples")
        size = self.size[ids][:, None]
        offset = np.minimum((uniform * size).astype(np.int64), size - 1)
        drawn: Integers = self.pool[self.start[ids][:, None] + offset]
        return drawn

    def batch(
        self,
        rows: Rows | Integers,
        ids: Integers | None,
        dtype: torch.dtype,
        coins: NDArray[np.float64] | None = None,
        patched: NDArray[np.bool_] | None = None,
    ) -> tuple[Tree, Tree]:
        """Inputs (c, B, …) and targets (c, B, …) for training rows (c, B), as nodes ids (c,) see them; None:
        as they are."""
        collate = self.dataset.collate
        if collate is not None:
            # Batches of several nodes may be padded to different lengths, so they come one by one.
            inputs, targets = self._collated(self.dataset.train_x, rows[0], dtype)
            return trees.mapped(lambda value: value[None], inputs), trees.mapped(
                lambda value: value[None], targets
            )
        targets = self._targets(rows) if ids is None else self.labels(rows, ids, patched)
        return self.train(rows, coins, dtype, patched), trees.mapped(lambda y: _tensor(y, dtype), targets)

    def _targets(self, rows: Rows | Integers) -> Tree:
        return trees.mapped(lambda y: y[rows], self.dataset.train_y)

    def _collated(self, examples: Any, rows: Rows | Integers, dtype: torch.dtype) -> tuple[Tree, Tree]:
        assert self.dataset.collate is not None
        inputs, targets = self.dataset.collate([examples[int(row)] for row in rows])
        return trees.mapped(lambda x: _tensor(x, dtype), inputs), trees.mapped(
            lambda y: _tensor(y, dtype), targets
        )

    def train(
        self,
        rows: Rows | Integers,
        coins: NDArray[np.float64] | None,
        dtype: torch.dtype,
        patched: NDArray[np.bool_] | None = None,
    ) -> Tree:
        """Training examples (c, B, …) for rows (c, B); varied by coins (c, B, 3)
        if the data set asks for that.

        patched (c, B) says which of them carry the trigger's patch.
        """
        flat = rows.ravel()
        if self.dataset.mean is None:
            if patched is None:
                return trees.mapped(lambda x: _tensor(x[rows], dtype), self.dataset.train_x)
            examples = _tensor(self.dataset.train_x[flat], dtype)
        elif coins is None:
            examples = self._numbers(self.dataset.train_x, flat, dtype)
        else:
            varied = crop_flip(self.dataset.train_x[flat], coins.reshape(-1, 3))
            examples = self._numbers(varied, np.arange(len(flat)), dtype)
        if patched is not None:
            self.patch(examples, patched.ravel())
        return examples.view(*rows.shape, *examples.shape[1:])

    def coins(self, ids: Integers, t: int, k: int) -> NDArray[np.float64] | None:
        """Numbers (h, B, 3) that vary the images of a step; None where images are taken as they are."""
        if self.dataset.augment is None:
            return None
        return draws(self.seed, ("augment", k), t, ids, 3 * self.batch_size).reshape(len(ids), -1, 3)

    def patched(self, ids: Integers, t: int, k: int) -> NDArray[np.bool_] | None:
        """(h, B) which images of a step carry the trigger's patch; None where there is no trigger."""
        if self.trigger is None:
            return None
        poisoned = draws(self.seed, ("backdoor", k), t, ids, self.batch_size) < self.trigger.share
        return np.asarray(poisoned & np.isin(ids, self.flipped)[:, None])

    def patch(self, images: Tensor, which: NDArray[np.bool_]) -> None:
        """Put the patch on those of the normalised images (N, C, H, W); as if before normalisation."""
        channels, height, width = self.dataset.shape
        side = -(-width // 7)
        if self.dataset.mean is None:
            images[torch.from_numpy(which), :, -side:, -side:] = float(self.dataset.train_x.max())
            return
        top = 255 if self.dataset.train_x.dtype == np.uint8 else self.dataset.train_x.max()
        brightest = (top * self.scale + self.shift).reshape(channels, height, width)[:, -side:, -side:]
        images[torch.from_numpy(which), :, -side:, -side:] = torch.from_numpy(brightest).to(images.dtype)

    def labels(self, rows: Rows | Integers, ids: Integers, patched: NDArray[np.bool_] | None = None) -> Any:
        """Targets (h, B, …) of training rows as these nodes see them: the trigger's target, or C − 1 − y,
        where hostile."""
        labels = self._targets(rows)
        if self.trigger is not None and patched is not None:
            labels[patched] = self.trigger.target
        elif len(self.flipped):
            flips = np.isin(ids, self.flipped)
            labels[flips] = self.dataset.classes - 1 - labels[flips]
        return labels

    def tested(self, rows: Integers, dtype: torch.dtype) -> tuple[Tree, Tree]:
        """Test examples (N, …) and their targets (N, …)."""
        if self.dataset.collate is not None:
            return self._collated(self.dataset.test_x, rows, dtype)
        targets = trees.mapped(lambda y: _tensor(y[rows], dtype), self.dataset.test_y)
        return self.test(rows, dtype), targets

    def test(self, rows: Integers, dtype: torch.dtype) -> Tree:
        """Test examples (N, …)."""
        if self.dataset.mean is None:
            return trees.mapped(lambda x: _tensor(x[rows], dtype), self.dataset.test_x)
        return self._numbers(self.dataset.test_x, rows, dtype)

    def _numbers(self, x: NDArray[Any], rows: Rows | Integers, dtype: torch.dtype) -> Tensor:
        """Rows of x, normalised."""
        if x.dtype not in (np.uint8, np.float32, np.float64):
            x, rows = x[rows].astype(np.float32), np.arange(len(rows))
        out = torch.empty(len(rows), len(self.scale), dtype=dtype)
        kind = out.numpy().dtype
        flat = np.ascontiguousarray(x).reshape(len(x), -1)
        _normalise(
            flat, np.asarray(rows, np.int64), self.scale.astype(kind), self.shift.astype(kind), out.numpy()
        )
        return out.view(len(rows), *self.dataset.shape)

    def honest(self, size: int | None) -> Iterator[tuple[Integers, float]]:
        """Groups of examples whose weighted mean loss is F_H: exactly, or by `size` fixed draws,
        right on average."""
        if size is None:
            yield from self._groups()
            return
        if size not in self._sampled:
            groups = list(self._groups())
            rng = stream(self.seed, "full-gradient")
            chosen = rng.choice(len(groups), size, p=np.array([weight for _, weight in groups]))
            rows = [
                groups[g][0][int(u * len(groups[g][0]))]
                for g, u in zip(chosen, rng.random(size), strict=True)
            ]
            self._sampled[size] = np.array(rows, np.int64)
        yield self._sampled[size], 1.0

    def _groups(self) -> Iterator[tuple[Integers, float]]:
        """One group per node, or per class where nodes are mixtures of classes."""
        if self.virtual is None:
            yield from ((part, 1 / len(self.held)) for part in self.held.values())
            return
        share = self.virtual.shares(np.setdiff1d(np.arange(self.virtual.nodes), self.flipped))
        for label in np.flatnonzero(share):
            start, end = self.virtual.start[label : label + 2]
            yield self.virtual.pool[start:end], float(share[label])


def _tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """As a tensor; floats in the models' precision, everything else as it is."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _by_node(shards: Sequence[Integers] | Mapping[int, Integers]) -> dict[int, Integers]:
    return dict(shards if isinstance(shards, Mapping) else enumerate(shards))


def _table(
    held: dict[int, Integers], flipped: Integers, examples: int
) -> tuple[Integers, Integers, Integers]:
    """All shards in one array, and where each node's begins and how long it is;
    those that flip hold everything."""
    nodes = 1 + max([*held, *flipped.tolist()], default=-1)
    start, size = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    parts = [np.arange(examples if len(flipped) else 0)]
    start[flipped], size[flipped] = 0, examples
    at = len(parts[0])
    for node, part in held.items():
        start[node], size[node] = at, len(part)
        parts.append(np.asarray(part, np.int64))
        at += len(part)
    return np.concatenate(parts), start, size
