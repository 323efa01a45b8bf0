"""A model for texts, data for it, and models that start from one seed."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def made(module: type[nn.Module], *arguments: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return module(*arguments)


class Meaning(nn.Module):
    """The class of a text from the mean of its words; a dict's values come by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.out((self.words(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return result


def texts(count: int = 160) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    y = np.arange(count) % 2
    ids = rng.integers(0, 5, (count, 8)) + 5 * y[:, None]
    mask = np.arange(8) < rng.integers(3, 9, count)[:, None]
    return {"ids": np.where(mask, ids, 0), "mask": mask}, y
