"""A model and data as a user brings them from Python: three classes of points in five dimensions."""

from typing import Any

import numpy as np
import torch
from torch import nn

from support.runs import TINY

OWN: dict[str, Any] = {**TINY, "batch_size": 10, "rounds": 12, "lr": 1.0}
del OWN["model"]


def blobs(seed: int, count: int = 240) -> tuple[Any, Any]:
    """Return (count, 5) inputs and (count,) labels."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    return (rng.normal(size=(count, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def fixed_net(seed: int = 0) -> Net:
    """Return the network with the values of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()
