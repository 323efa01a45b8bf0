"""The rival that an expert writes with PyTorch in an afternoon:
two threads of autograd on channels_last images.

Every core has a thread of its own with one torch thread, and takes a node, later a victim, after the other. A
victim's table is forged, compared by a Gram matrix and mixed by a matrix product in blocks of columns that
fit the cache, and trimmed by a sorting network pruned to the ranks that are needed, in place. Small models go
through batched matrix products instead. Run by `rivals.py`.
"""

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from contestant import BETA, DECAY, Work, Z, comparators, race
from rpel.models import model  # the same networks; nothing else of rpel

CORES = len(os.sched_getaffinity(0))
BLOCK = 4096  # columns of a victim's rows at a time


class Rival:
    """The round in float32; in float64 (`dtype`) what all contestants are compared with."""

    def __init__(self, work: Work, dtype: torch.dtype = torch.float32) -> None:
        self.work, (_, self.h, self.batch), self.m = work, work.labels.shape, work.peers.shape[2] + 1
        self.dtype = dtype
        self.x = torch.from_numpy(work.initial.copy()).to(dtype).repeat(self.h, 1)
        self.momentum, self.half, self.g = (torch.zeros_like(self.x) for _ in range(3))
        self.network = comparators(self.m, range(work.f, self.m - work.f))
        small = work.network == "linear"
        shape = tuple(work.inputs.shape[3:])
        net = model(work.network, shape, dropout=0.0).to(dtype)
        last = {"memory_format": torch.channels_last}
        self.modules = [] if small else [copy.deepcopy(net).to(**last) for _ in range(CORES)]  # type: ignore[call-overload]
        self.local = self._linear if small else self._autograd
        self.mix = self._mixed_together if small else self._mixed
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(CORES)

    def models(self) -> Tensor:
        return self.x

    def step(self, t: int) -> None:
        w = self.work
        self.inputs, self.labels = (
            torch.from_numpy(w.inputs[t].copy()).to(self.dtype),
            torch.from_numpy(w.labels[t].copy()).long(),
        )
        self.peers = torch.from_numpy(w.peers[t].copy()).long()
        self._share(self.local)
        self._share(self.mix)

    def _share(self, work: Callable[[int, range], None]) -> None:
        parts = [range(self.h * c // CORES, self.h * (c + 1) // CORES) for c in range(CORES)]
        for done in [self.pool.submit(self._alone, work, c, part) for c, part in enumerate(parts)]:
            done.result()

    @staticmethod
    def _alone(work: Callable[[int, range], None], core: int, part: range) -> None:
        torch.set_num_threads(1)
        work(core, part)

    # --- local steps ---

    def _autograd(self, core: int, part: range) -> None:
        module = self.modules[core]
        parameters = list(module.parameters())
        for i in part:
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(self.x[i], parameters)
            images = self.inputs[i].contiguous(memory_format=torch.channels_last)
            loss = F.nll_loss(module(images), self.labels[i])
            actual = torch.autograd.grad(loss, parameters)
            torch.cat([g.reshape(-1) for g in actual], out=self.g[i])
            self._momentum(slice(i, i + 1))

    def _linear(self, core: int, part: range) -> None:
        for first in range(part.start, part.stop, 256):
            some = slice(first, min(first + 256, part.stop))
            inputs, c = self.inputs[some].flatten(2), some.stop - first
            width = inputs.shape[2]
            weight, bias = self.x[some, : 10 * width].view(c, 10, width), self.x[some, 10 * width :]
            delta = torch.baddbmm(bias[:, None], inputs, weight.mT).softmax(2)
            delta.scatter_add_(2, self.labels[some, :, None], self.x.new_full((c, self.batch, 1), -1.0))
            delta /= self.batch
            self.g[some, : 10 * width] = torch.bmm(delta.mT, inputs).flatten(1)
            self.g[some, 10 * width :] = delta.sum(1)
            self._momentum(some)

    def _momentum(self, some: slice) -> None:
        m = self.momentum[some].mul_(BETA).add_(self.g[some], alpha=1 - BETA)
        torch.add(m, self.x[some], alpha=DECAY, out=self.half[some])
        self.half[some].mul_(-self.work.lr).add_(self.x[some])

    # --- exchange ---

    def _gram(self, x: Tensor) -> Tensor:
        """(…, m, m) of rows (…, m, d) seen from the first one: models are long and near each other, so that
        products of the rows themselves lose the order of their distances (on Zen 4 for half of the nodes)."""
        blocks = (x[..., at : at + BLOCK] for at in range(0, x.shape[-1], BLOCK))
        moved = (block - block[..., :1, :] for block in blocks)
        return torch.stack([block @ block.mT for block in moved]).sum(0)

    def _weights(self, x: Tensor) -> Tensor:
        """(…, m, m) of nearest-neighbour mixing among rows (…, m, d)."""
        gram = self._gram(x)
        norms = gram.diagonal(dim1=-2, dim2=-1)
        squared = norms[..., None] + norms[..., None, :] - 2 * gram
        squared.diagonal(dim1=-2, dim2=-1).fill_(-1)
        near = squared.topk(self.m - self.work.f, largest=False).indices
        return torch.zeros_like(squared).scatter_(-1, near, 1 / (self.m - self.work.f))

    def _trimmed(self, y: list[Tensor], spare: Tensor) -> Tensor:
        """The mean of the middle ranks of m rows, which are overwritten."""
        for low, high in self.network:
            torch.minimum(y[low], y[high], out=spare)
            torch.maximum(y[low], y[high], out=y[high])
            y[low], spare = spare, y[low]
        f = self.work.f
        total = y[f]
        for row in y[f + 1 : self.m - f]:
            total += row
        return total.div_(self.m - 2 * f)

    def _mixed(self, core: int, part: range) -> None:
        d = self.x.shape[1]
        table, y, spare = (self.x.new_empty(size) for size in ((self.m, d), (self.m, BLOCK), (BLOCK,)))
        for i in part:
            honest = self.peers[i][self.peers[i] >= 0]
            answers = 1 + len(honest)
            rows = table[1:answers]
            torch.index_select(self.half, 0, honest, out=rows)
            table[0] = self.half[i]
            if answers < self.m:
                self._forge(rows, table[answers])
                table[answers + 1 :] = table[answers]
            weights = self._weights(table)
            for at in range(0, d, BLOCK):
                some = table[:, at : at + BLOCK]
                mixed = torch.mm(weights, some, out=y[:, : some.shape[1]])
                self.x[i, at : at + BLOCK] = self._trimmed(list(mixed), spare[: some.shape[1]])

    @staticmethod
    def _forge(rows: Tensor, out: Tensor) -> None:
        for at in range(0, rows.shape[1], BLOCK):
            some = rows[:, at : at + BLOCK]
            mean = some.mean(0)
            deviation = (some - mean).square_().sum(0).div_(len(rows) - 1).sqrt_()
            torch.add(mean, deviation, alpha=Z, out=out[at : at + BLOCK])

    def _mixed_together(self, core: int, part: range) -> None:
        for first in range(part.start, part.stop, 32):
            some = slice(first, min(first + 32, part.stop))
            peers = self.peers[some]
            honest = (peers >= 0).to(self.dtype)[:, None]
            rows = self.half[peers.clamp(min=0)]
            count = honest.sum(2, keepdim=True)
            mean = honest @ rows / count
            forged = mean + Z * (honest @ (rows - mean).square_() / (count - 1)).sqrt_()
            x = torch.cat([self.half[some, None], torch.where(honest.mT > 0, rows, forged)], 1)
            y = (self._weights(x) @ x).transpose(0, 1).contiguous()
            self.x[some] = self._trimmed(list(y), torch.empty_like(y[0]))


if __name__ == "__main__":
    race(Rival)
