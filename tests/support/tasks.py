"""Small tasks of every form of network, and what plain torch computes for them."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel.data import Dataset, from_arrays, iid
from rpel.models import build, unflatten
from rpel.tasks import Classification
from rpel.tasks.engines.autograd import AutogradEngine
from rpel.tasks.engines.linear import LinearEngine
from rpel.tasks.engines.vmap import VmapEngine
from rpel.tasks.native.convolution import ConvolutionEngine

# The paper's three networks and the two small ones, narrower and on smaller images: notation, images, kernel,
# padding.
MNIST = ("C(5)-R-M-C(6)-R-M-L(9)-R-L(4)-S", (1, 16, 16), 5, 0)


FEMNIST = ("C(16)-R-M-C(26)-R-M-L(12)-R-L(4)-S", (1, 18, 16), 5, 0)


CIFAR = ("C(4)-R-B-C(4)-R-B-M-D-C(6)-R-B-C(6)-R-B-M-D-L(8)-R-D-L(4)-S", (3, 8, 8), 3, 1)


WIDE = ("C(32)-R-B-C(32)-R-B-M-D-C(40)-R-L(4)-S", (3, 8, 8), 3, 1)  # convolutions by Winograd's way


LINEAR = ("L(4)-S", (1, 6, 5), 5, 0)


MLP = ("L(7)-R-L(6)-R-L(4)-S", (1, 6, 5), 5, 0)


NETWORKS = {"mnist": MNIST, "femnist": FEMNIST, "cifar10": CIFAR, "wide": WIDE, "linear": LINEAR, "mlp": MLP}


SHAPES = {name: shape for name, (_, shape, _, _) in NETWORKS.items()} | {
    "mixed": (1, 6, 5),
    "small": (1, 6, 5),
}


EXPECTED = {
    "mnist": ConvolutionEngine,
    "femnist": ConvolutionEngine,
    "cifar10": AutogradEngine,
    "wide": AutogradEngine,
    "linear": LinearEngine,
    "mlp": LinearEngine,
    "mixed": VmapEngine,
    "small": VmapEngine,
}


# a batched product may round differently for another number of nodes
MANY_AT_ONCE = (LinearEngine, VmapEngine)


NODES, BATCH = 6, 5


def network(name: str, dropout: float = 0.0) -> nn.Module:
    if name not in NETWORKS:
        return _unknown(name, dropout)
    notation, shape, kernel, padding = NETWORKS[name]
    return build(notation, shape, kernel=kernel, padding=padding, dropout=dropout, seed=3)


def _unknown(name: str, dropout: float) -> nn.Module:
    """Networks of forms that no engine knows: with BatchNorm, dropout, a frozen and a shared layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "mixed":
            twice = nn.Linear(7, 7)
            hidden = (
                nn.BatchNorm1d(7),
                nn.Tanh(),
                nn.Dropout(dropout),
                twice,
                nn.Tanh(),
                nn.Dropout(dropout),
                twice,
            )
            module = nn.Sequential(
                nn.Flatten(), nn.Linear(30, 7), *hidden, nn.Linear(7, 4), nn.LogSoftmax(dim=1)
            )
        else:
            layers = (nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Dropout(dropout), nn.Tanh())
            module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 4), nn.LogSoftmax(dim=1))
        return module


def dataset(shape: tuple[int, ...], examples: int = 90) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (examples, *shape)).astype(np.uint8)
    mean, std = tuple(0.1 * c + 0.2 for c in range(shape[0])), tuple(0.1 * c + 0.3 for c in range(shape[0]))
    y = rng.integers(0, 4, examples)
    return from_arrays((x, y), (x[:31], y[:31]), classes=4, mean=mean, std=std)


def task(name: str, dropout: float = 0.0, **options: Any) -> Classification:
    data = dataset(SHAPES[name])
    shards = options.pop("shards", iid(data.train_y, NODES, BATCH, seed=0))
    return Classification(data, shards, network(name, dropout), batch_size=BATCH, seed=1, **options)


def models(t: Classification, h: int = NODES, dtype: Any = np.float32) -> NDArray[Any]:
    """Models near the initial one, all different."""
    noise = np.random.default_rng(5).standard_normal((h, t.d))
    return (t.initial() * (1 + 0.2 * noise) + 0.02 * noise).astype(dtype)


def plain_gradient(module: nn.Module, x: NDArray[Any], inputs: Tensor, labels: Tensor) -> NDArray[Any]:
    """One node, plain torch."""
    unflatten(module, torch.from_numpy(x))
    loss = F.nll_loss(module(inputs.to(torch.from_numpy(x).dtype)), labels)
    parts = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


def batch(t: Classification, node: int, round: int, k: int) -> tuple[Tensor, Tensor]:
    """The batch of one node, gathered and normalised the plain way."""
    rows = t.examples.indices(np.array([node]), round, k)[0]
    data = t.examples.dataset
    return torch.from_numpy(data.normalised(data.train_x[rows])), torch.from_numpy(data.train_y[rows])


def relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
