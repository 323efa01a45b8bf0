"""Operations on m values of every coordinate, as elementwise functions of tensors, on any device.

Up to 64 values are ordered by the pruned network of `sorting`: minimum and maximum alone, which torch.compile
can fuse. Sorting along a short axis would keep one block of threads per segment busy.
"""

import torch
from torch import Tensor

from rpel.backend.base import Operation
from rpel.backend.sorting import network, ranks

LONGEST = 64
"""Values up to which a network orders them."""


def operate(x: Tensor, operation: Operation, f: int) -> Tensor:
    """(h, w) the operation over the m values of every coordinate of x (h, m, w), which is overwritten.

    >>> operate(torch.tensor([[[0.0], [9.0], [2.0], [1.0]]]), "trimmed_mean", 1)
    tensor([[1.5000]])
    """
    m = x.shape[1]
    if operation == "meamed":
        return _near_median(x, m - f)
    ordered = _ordered(x, operation, f)
    total = ordered[0]
    for value in ordered[1:]:
        total += value
    return total.div_(len(ordered))


def _ordered(x: Tensor, operation: Operation, f: int) -> list[Tensor]:
    """The values (h, w) at the ranks that an operation looks at, in ascending order; x is overwritten."""
    m, wanted = x.shape[1], ranks(x.shape[1], f, operation)
    if m > LONGEST:
        whole = x.sort(dim=1).values
        return [whole[:, r] for r in wanted]
    lanes, spare = list(x.unbind(1)), torch.empty_like(x[:, 0])
    for a, b in network(m, f, operation):
        lanes[a], lanes[b], spare = _exchanged(lanes[a], lanes[b], spare)
    return [lanes[r] for r in wanted]


def _exchanged(a: Tensor, b: Tensor, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower and the higher values of two lanes, and the lane that is spare now."""
    if torch.compiler.is_compiling():  # fused, nothing in between is stored
        return torch.minimum(a, b), torch.maximum(a, b), spare
    return torch.minimum(a, b, out=spare), torch.maximum(a, b, out=b), a


def _near_median(x: Tensor, k: int) -> Tensor:
    """The mean of the k values nearest to the median, ties to the lower row:
    each is counted among the others."""
    middle = _ordered(x.clone(), "median", 0)
    median = (middle[0] + middle[-1]) / 2
    away = (x - median[:, None]).abs_()
    total, m = torch.zeros_like(median), x.shape[1]
    for j in range(m):
        own = away[:, j : j + 1]
        before = (away[:, :j] <= own).sum(dim=1) + (away[:, j + 1 :] < own).sum(dim=1)
        total += torch.where(before < k, x[:, j], 0.0)
    return total.div_(k)
