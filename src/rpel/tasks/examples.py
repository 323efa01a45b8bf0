"""Which examples a node sees in which step, and those examples as tensors on the task's device.

Invariants:
- the batch of node i in round t, local step k depends on (seed, ("batch", k), t, i) alone: any step replays
  by itself. That is why a batch is drawn from the shard with replacement: going through the shard in epochs
  would make a round depend on the rounds before it;
- whatever is drawn is drawn on the host, so a run on a device is the run on the CPU up to rounding;
- examples stay as they were given until they are drawn: images of our own data sets become numbers in a
  batch, floats take the models' precision, whole numbers (such as token ids) and whatever a `collate` makes
  stay what they are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rpel.backend.threads import run
from rpel.data import Dataset, Virtual, trees
from rpel.randomness import draws, stream
from rpel.tasks.engines.engine import lend, tensor, wide
from rpel.types import Integers

Tree = trees.Tree
Shards = Sequence[Integers] | Mapping[int, Integers] | Virtual
Rows = NDArray[np.int32]
"""Numbers of training examples; half the memory of Integers where a million nodes draw a batch each."""

NODES_PER_DRAW = 512  # whose batches are drawn together: their random numbers stay in the cache
CROP_PADDING = 4  # pixels


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
    """The data of all nodes: who holds what, batches by coordinates, and what hostile nodes do to theirs."""

    def __init__(
        self,
        dataset: Dataset,
        shards: Shards,
        batch_size: int,
        seed: int,
        flipped: Collection[int] = (),
        trigger: Trigger | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch needs at least one example, not {batch_size}")
        if trigger is not None:
            trigger.check(dataset)
        self.dataset, self.batch_size, self.seed, self.trigger = dataset, batch_size, seed, trigger
        self.virtual = shards if isinstance(shards, Virtual) else None
        held = {} if isinstance(shards, Virtual) else _by_node(shards)
        self.flipped = np.array(sorted(flipped), np.int64)
        self.held = {node: part for node, part in held.items() if node not in set(flipped)}
        self.pool, self.start, self.size = _table(self.held, self.flipped, dataset.size)
        self._sampled: dict[int, Integers] = {}
        self.anchor = torch.empty(0, device=device)
        self.uniform = dataset.collate is None
        if self.uniform:
            self.train_x, self.train_y, self.test_x, self.test_y = (
                trees.mapped(self._placed, tree)
                for tree in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y)
            )
        if dataset.mean is not None and dataset.std is not None:
            mean, std = (np.array(values, np.float64) for values in (dataset.mean, dataset.std))
            top = 255 if dataset.train_x.dtype == np.uint8 else 1
            per_channel = (-1, *(1,) * (len(dataset.shape) - 1))
            self.scale, self.shift = (
                self._placed(values.reshape(per_channel)) for values in (1 / (top * std), -mean / std)
            )
        if trigger is not None:
            top = 255 if dataset.train_x.dtype == np.uint8 else dataset.train_x.max()
            brightest = self._placed(np.full((1, *dataset.shape), float(top)))
            self.brightest = self._numbers(brightest, torch.float32)[0]

    def _placed(self, values: Any) -> Tensor:
        """An array of the data set on the device; on the CPU it shares memory."""
        array = values if isinstance(values, Tensor) else np.ascontiguousarray(values)
        if isinstance(array, np.ndarray) and array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(np.int64)  # torch hardly computes with other unsigned numbers
        given = tensor(array)
        if given.dtype == torch.float64:
            given = given.to(wide(self.anchor))
        return given if self.on_host else lend(given, self.anchor)

    @property
    def on_host(self) -> bool:
        """Whether the device is the CPU."""
        return self.anchor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """What the data take on the device."""
        kept = (self.train_x, self.train_y, self.test_x, self.test_y) if self.uniform else ()
        return sum(value.numel() * value.element_size() for tree in kept for _, value in trees.leaves(tree))

    # --- what is drawn ---

    def indices(self, ids: Integers, t: int, k: int) -> Rows:
        """The batches (h, batch_size) of nodes ids (h,) in round t, local step k, uniform over shards."""
        drawn = np.empty((len(ids), self.batch_size), np.int32)

        def work(first: int, last: int) -> None:
            for unit in range(first, last):
                some = slice(unit * NODES_PER_DRAW, (unit + 1) * NODES_PER_DRAW)
                drawn[some] = self._draw(ids[some], t, k)

        run(work, -(-len(ids) // NODES_PER_DRAW))
        return drawn

    def _draw(self, ids: Integers, t: int, k: int) -> Integers:
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

    def variations(self, ids: Integers, t: int, k: int) -> NDArray[np.float64] | None:
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

    # --- examples as tensors ---

    def batch(
        self,
        rows: Rows | Integers,
        ids: Integers | None,
        dtype: torch.dtype,
        varied: NDArray[np.float64] | None = None,
        patched: NDArray[np.bool_] | None = None,
    ) -> tuple[Tree, Tree]:
        """Inputs (c, B, …) and targets (c, B, …) of training examples.

        Args:
            rows: (c, B) numbers of examples.
            ids: (c,) the nodes that see them; None: targets as they are.
            dtype: The models' precision.
            varied: (c, B, 3) draws that vary images, see :meth:`variations`.
            patched: (c, B) which images carry the trigger's patch.
        """
        if not self.uniform:  # batches may be padded to different lengths, so nodes come one by one
            pair = self._collated(self.dataset.train_x, rows[0], dtype)
            inputs, targets = (trees.mapped(lambda value: value[None], tree) for tree in pair)
            return inputs, targets
        at: Any = self._lend(np.asarray(rows, np.int64).reshape(-1))
        images = trees.mapped(
            lambda x: self._numbers(self._vary(x.index_select(0, at), varied), dtype), self.train_x
        )
        if patched is not None:
            self._patch(images, self._lend(patched.reshape(-1)))
        targets = trees.mapped(lambda y: floats(y.index_select(0, at), dtype), self.train_y)
        inputs, targets = (
            trees.mapped(lambda value: value.view(*rows.shape, *value.shape[1:]), tree)
            for tree in (images, targets)
        )
        return inputs, targets if ids is None else self._poisoned(targets, ids, patched)

    def _poisoned(self, labels: Any, ids: Integers, patched: NDArray[np.bool_] | None) -> Any:
        """Targets (c, B, …) as hostile nodes see theirs: the trigger's target, or C − 1 − y."""
        if self.trigger is not None and patched is not None:
            return labels.masked_fill(self._lend(patched), self.trigger.target)
        flips = np.isin(ids, self.flipped)
        if not flips.any():
            return labels
        which = self._lend(flips).view(-1, *(1,) * (labels.dim() - 1))
        return torch.where(which, self.dataset.classes - 1 - labels, labels)

    def tested(self, rows: Integers, dtype: torch.dtype, marked: bool = False) -> tuple[Tree, Tree]:
        """Test examples (N, …) and their targets; marked: with the trigger's patch and target."""
        if not self.uniform:
            return self._collated(self.dataset.test_x, rows, dtype)
        at: Any = self._lend(np.asarray(rows, np.int64))
        inputs = trees.mapped(lambda x: self._numbers(x.index_select(0, at), dtype), self.test_x)
        if not marked:
            return inputs, trees.mapped(lambda y: floats(y.index_select(0, at), dtype), self.test_y)
        assert self.trigger is not None
        self._patch(inputs, torch.ones(len(rows), dtype=torch.bool, device=inputs.device))
        return inputs, torch.full((len(rows),), self.trigger.target, device=inputs.device)

    def _collated(self, examples: Any, rows: Rows | Integers, dtype: torch.dtype) -> tuple[Tree, Tree]:
        assert self.dataset.collate is not None
        pair = self.dataset.collate([examples[int(row)] for row in rows])
        inputs, targets = (trees.mapped(lambda x: floats(self._placed(x), dtype), tree) for tree in pair)
        return inputs, targets

    def _lend(self, values: NDArray[Any]) -> Tensor:
        """A small array on the device."""
        return torch.from_numpy(values) if self.on_host else lend(values, self.anchor)

    def _numbers(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Examples (N, …), normalised where the data set asks for that."""
        if self.dataset.mean is None:
            return floats(x, dtype)
        return x.to(dtype, copy=True).mul_(self.scale.to(dtype)).add_(self.shift.to(dtype))

    def _vary(self, images: Tensor, varied: NDArray[np.float64] | None) -> Tensor:
        """Images (N, C, H, W) cropped at random after padding and mirrored with probability ½.

        varied: (…, 3) of N uniform numbers each: row offset, column offset and mirror. The result is that of
        :func:`rpel.data.crop_flip`.
        """
        if varied is None:
            return images
        uniform, (n, channels, height, width) = varied.reshape(-1, 3), images.shape
        top, left = ((uniform[:, k] * (2 * CROP_PADDING + 1)).astype(np.int64)[:, None] for k in (0, 1))
        columns = left + np.arange(width)
        columns = np.where(uniform[:, 2:] < 0.5, columns, columns[:, ::-1])
        down, right = self._lend(top + np.arange(height)), self._lend(columns)
        padded = F.pad(images, (CROP_PADDING,) * 4)
        lines = padded.gather(2, down[:, None, :, None].expand(n, channels, height, padded.shape[3]))
        return lines.gather(3, right[:, None, None, :].expand(n, channels, height, width))

    def _patch(self, images: Tensor, which: Tensor) -> None:
        """Put the patch on those of the normalised images (N, C, H, W)."""
        side = -(-images.shape[3] // 7)
        corner = images[:, :, -side:, -side:]
        bright = self.brightest[:, -side:, -side:].to(images.dtype)
        corner.copy_(torch.where(which[:, None, None, None], bright, corner))

    # --- all that honest nodes hold ---

    def honest(self, size: int | None) -> Iterator[tuple[Integers, float]]:
        """Groups of examples whose weighted mean loss is F_H: exactly, or by `size` fixed, unbiased draws."""
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


def floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in the models' precision, everything else as it is."""
    return x.to(dtype) if x.is_floating_point() else x


def _by_node(shards: Sequence[Integers] | Mapping[int, Integers]) -> dict[int, Integers]:
    return dict(shards if isinstance(shards, Mapping) else enumerate(shards))


def _table(
    held: dict[int, Integers], flipped: Integers, examples: int
) -> tuple[Integers, Integers, Integers]:
    """All shards in one array, where each node's begins, and its length; nodes that flip hold everything."""
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
