"""What the processes that share one simulation say to each other: nothing (alone), or by torch.distributed.

Every worker holds a shard of the honest nodes as its cohort and does the same with it; here is all that they
exchange meanwhile. One process has all nodes, and exchanges nothing.

Invariants:
- shards are whole units of local work, counted from row 0, and each victim is aggregated whole by one worker;
- a sum over nodes goes through the workers in the order of rows,
  so its bits do not depend on how many there are;
- arrays and words go separate ways: arrays, NumPy's or torch's, from memory to memory as bytes, by sends,
  receives and broadcasts that every backend of torch.distributed has; words by gloo. NCCL takes the arrays
  of CUDA devices where it can; gloo moves main memory alone, so what lies on a device goes through buffers
  there, which :meth:`Group.staged` makes.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

_PIECES = 8  # a sum goes through the workers in so many pieces, so that all of them add at the same time
# a shard is sent in so many pieces, each while the next is computed, if they have so many units of work:
_SENT = 4
_WORTH = 16

Shards = list[slice]
"""The rows of every worker."""


class Group:
    """The workers of torch.distributed's group, as one of them sees it; of size 1 it is nothing."""

    def __init__(self, rank: int = 0, size: int = 1, here: int = 1) -> None:
        """here: how many of them are on this machine."""
        self.rank, self.size, self.here = rank, size, here
        self.received = 0
        """Bytes of arrays that came from others."""

    @property
    def local_rank(self) -> int:
        """This worker's number among those on this machine, for who has a device of its own."""
        return int(os.environ.get("LOCAL_RANK", self.rank))

    def pieces(self, shards: Shards, unit: int) -> list[Shards]:
        """Every shard cut into whole units, to be sent one piece after the other.

        >>> Group(size=2).pieces([slice(0, 64), slice(64, 100)], unit=2)
        [[slice(0, 32, None), slice(32, 64, None)], [slice(64, 100, None)]]
        """
        return [shards] if self.size == 1 else [_cut(shard, unit) for shard in shards]

    # --- rows ---

    @contextmanager
    def gathering(self, array: NDArray[Any], pieces: list[Shards]) -> Iterator[Callable[[slice], None]]:
        """Send all rows of a contiguous array to all workers, each once and straight to its place.

        pieces: the rows of every worker, cut. Inside, one tells of each own piece that is there; it is sent
        while the next is made.

        Receiving is asked for first: gloo is half as fast where data come before anybody waits for them. A
        backend that runs what it is asked in order (NCCL) would wait for ever,
        so there a piece's receives go with its sends.
        """
        if self.size == 1:
            yield lambda piece: None
            return
        others = [(self.rank + k) % self.size for k in range(1, self.size)]
        coming = [[(rank, _bytes(array[piece])) for piece in pieces[rank]] for rank in others]
        ahead = not by_nccl(_bytes(array))
        moving = self._moved([], [one for each in coming for one in each]) if ahead else []
        taken = 0

        def ready(piece: slice) -> None:
            nonlocal taken
            now = [] if ahead else [each[taken] for each in coming if taken < len(each)]
            taken += 1
            part = self._leaving(array[piece])
            moving.extend(self._moved([(rank, part) for rank in others], now))

        yield ready
        if not ahead:
            moving.extend(self._moved([], [one for each in coming for one in each[taken:]]))
        for one in moving:
            one.wait()

    def staged(self, part: Tensor) -> Tensor:
        """Return a buffer for these bytes that torch.distributed can move.

        It is the tensor itself, or an empty one in main memory for a device without NCCL, pinned where that
        makes copies faster.
        """
        if reachable(part):
            return part
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)

    def _leaving(self, array: "NDArray[Any] | Tensor") -> Tensor:
        """The bytes of an array where they can be sent from."""
        part = _bytes(array)
        buffer = self.staged(part)
        return part if buffer is part else buffer.copy_(part)

    def _moved(self, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> list[Any]:
        """Sends to and receives from these workers, begun at once; empty ones are left out on both sides."""
        places = [(rank, part, self.staged(part)) for rank, part in into if part.numel()]
        asked = [dist.P2POp(dist.irecv, buffer, rank) for rank, _, buffer in places]
        asked += [dist.P2POp(dist.isend, part, rank) for rank, part in out if part.numel()]
        self.received += sum(part.numel() for _, part in into)
        moving: list[Any] = dist.batch_isend_irecv(asked) if asked else []
        if all(part is buffer for _, part, buffer in places):
            return moving
        # by gloo, where each receive and each send is waited for by itself, in this order
        landing = [
            _Landing(one, part, buffer) for one, (_, part, buffer) in zip(moving, places, strict=False)
        ]
        return [*landing, *moving[len(landing) :]]

    def collect(self, mine: NDArray[Any], shards: Shards, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Collect all workers' rows at worker 0, in ``out`` if given; the others keep their own."""
        if self.size == 1:
            return mine
        if self.rank:
            moving = self._moved([(0, _bytes(np.ascontiguousarray(mine)))], [])
        else:
            out = np.empty((shards[-1].stop, *mine.shape[1:]), mine.dtype) if out is None else out
            out[shards[0]] = mine
            parts = [(rank, _bytes(out[shard])) for rank, shard in enumerate(shards) if rank]
            moving = self._moved([], parts)
        for one in moving:
            one.wait()
        return mine if out is None else out

    def scatter(self, whole: NDArray[Any] | None, mine: NDArray[Any], shards: Shards) -> NDArray[Any]:
        """This worker's rows of what worker 0 has; ``mine`` has their shape and kind."""
        if self.size == 1 and whole is not None:
            return whole
        if whole is not None:
            whole = np.ascontiguousarray(whole, mine.dtype)
            parts = [(rank, _bytes(whole[shard])) for rank, shard in enumerate(shards) if rank]
            mine, moving = whole[shards[0]], self._moved(parts, [])
        else:
            mine = np.empty_like(mine)
            moving = self._moved([], [(0, _bytes(mine))])
        for one in moving:
            one.wait()
        return mine

    def rows(self, mine: Any, shards: Shards) -> Any:
        """This worker's rows, joined by those of all others: (h, …)."""
        if self.size == 1:
            return mine
        shape = (shards[-1].stop, *mine.shape[1:])
        whole: Any = mine.new_empty(shape) if isinstance(mine, Tensor) else np.empty(shape, mine.dtype)
        whole[shards[self.rank]] = mine
        with self.gathering(whole, [[shard] for shard in shards]) as ready:
            ready(shards[self.rank])
        return whole

    def add(self, total: NDArray[np.float64], add: Callable[[slice], None]) -> None:
        """Add every worker's rows to total (d,), in the order of workers.

        add(columns) adds this worker's rows at those columns. The last worker has the result.

        Columns go from worker to worker in pieces: while one adds the next piece, the next one adds this
        piece.
        """
        if self.size == 1:
            add(slice(0, len(total)))
            return
        edges, sent = [len(total) * p // _PIECES for p in range(_PIECES + 1)], list[Any]()
        for left, right in pairwise(edges):
            if left == right:
                continue
            piece = _bytes(total[left:right])
            if self.rank:
                for one in self._moved([], [(self.rank - 1, piece)]):
                    one.wait()
            add(slice(left, right))
            if self.rank < self.size - 1:
                sent += self._moved([(self.rank + 1, self._leaving(total[left:right]))], [])
        for one in sent:
            one.wait()

    def tell_last(self, array: NDArray[Any]) -> None:
        """The last worker's array, to all."""
        if self.size == 1:
            return
        last, part = self.size - 1, _bytes(array)
        buffer = self._leaving(array) if self.rank == last else self.staged(part)
        dist.broadcast(buffer, src=last)
        if self.rank != last:
            self.received += array.nbytes
            part.copy_(buffer)

    def each(self, work: Callable[[], Any]) -> list[Any]:
        """What every worker finds. Where one refuses, all do: ValueError with the sentence of the first."""
        if self.size == 1:
            return [work()]
        found, refused = None, None
        try:
            found = work()
        except (ValueError, OSError) as error:
            refused = error
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, (found, None if refused is None else str(refused), platform.node()))
        for rank, (_, sentence, host) in enumerate(everybody):
            if sentence is not None:
                where = f"worker {rank} on {host}: " if rank else ""
                raise ValueError(where + sentence) from refused
        return [thing for thing, _, _ in everybody]

    def told(self, word: Any = None) -> Any:
        """Worker 0's word, to all."""
        words = [word]
        if self.size > 1:
            dist.broadcast_object_list(words, src=0)
        return words[0]


def divided(rows: int, unit: int, size: int) -> Shards:
    """Divide rows among workers: contiguous, in whole units except the last, as evenly as possible.

    >>> divided(10, unit=2, size=3)
    [slice(0, 2, None), slice(2, 6, None), slice(6, 10, None)]
    """
    units = -(-rows // unit)
    ends = [min(rows, units * r // size * unit) for r in range(size + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def _cut(shard: slice, unit: int) -> Shards:
    units = -(-(shard.stop - shard.start) // unit)
    count = max(1, min(_SENT, units // _WORTH))
    edges = [min(shard.stop, shard.start + units * p // count * unit) for p in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


ALONE = Group()
"""One process that has all nodes."""


class _Landing:
    """Data received in main memory that is copied to its place on a device once it has arrived."""

    def __init__(self, moving: Any, part: Tensor, buffer: Tensor) -> None:
        self.moving, self.part, self.buffer = moving, part, buffer

    def wait(self) -> None:
        self.moving.wait()
        self.part.copy_(self.buffer)


def by_nccl(part: Tensor) -> bool:
    """Whether NCCL moves this memory."""
    return part.is_cuda and "nccl" in dist.get_backend_config()


def reachable(part: Tensor) -> bool:
    """Whether torch.distributed moves this memory where it is."""
    return part.device.type == "cpu" or by_nccl(part)


def _bytes(array: "NDArray[Any] | Tensor") -> Tensor:
    """The same memory, as bytes, wherever it is; the array is contiguous."""
    if isinstance(array, Tensor):
        return array.reshape(-1).view(torch.uint8)
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
