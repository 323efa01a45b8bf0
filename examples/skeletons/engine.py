"""An engine to copy: softmax regression, the gradients of all nodes as one batched product.

To put it into the library: the file goes into tasks/engines/, and its module's name into the table ENGINES of
tasks/engines/__init__.py, before the engines that are slower. The tests of the table hold it to what autograd
computes. Here, ``check`` does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rpel.tasks.engines import Engine, Loss, Probe
from rpel.tasks.engines.autograd import AutogradEngine


def build(module: nn.Module, loss: Loss, probe: Probe) -> "SoftmaxEngine | None":
    """Return the engine for an nn.Linear with one class per example, and None for anything else."""
    if type(module) is not nn.Linear or module.bias is None or not probe.labels:
        return None
    fits = loss is F.cross_entropy and all(parameter.requires_grad for parameter in module.parameters())
    return SoftmaxEngine(module.weight.shape, loss) if fits else None


class SoftmaxEngine(Engine):
    """A row x (d,) of a model is its weights (classes, features), flattened, then its biases (classes,)."""

    def __init__(self, shape: torch.Size, loss: Loss) -> None:
        super().__init__(loss)
        self.classes, self.features = shape

    def nodes_per_call(self, batch: int | None = None) -> int:
        """Return how many nodes are computed at once."""
        return 64

    def gradient(
        self, x: Tensor, local: Tensor, inputs: Any, labels: Any, seeds: list[int], out: Tensor, train: bool
    ) -> None:
        """Write the gradients (c, d) of c nodes with batches (c, B, features) and labels (c, B)."""
        scores = self._scores(x, inputs)
        off = (scores.softmax(dim=2) - F.one_hot(labels, self.classes)) / labels.shape[1]
        cut = self.classes * self.features
        out[:, :cut] = (off.transpose(1, 2) @ inputs).flatten(1)
        out[:, cut:] = off.sum(dim=1)

    def outputs(self, x: Tensor, local: Tensor, inputs: Any) -> Tensor:
        """Return the scores (c, N, classes) of c nodes on common inputs (N, features)."""
        return self._scores(x, inputs.expand(len(x), *inputs.shape))

    def _scores(self, x: Tensor, inputs: Tensor) -> Tensor:
        cut = self.classes * self.features
        weight = x[:, :cut].view(-1, self.classes, self.features)
        return inputs @ weight.transpose(1, 2) + x[:, None, cut:]


def check(module: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> None:
    """Assert that the engine computes what autograd does, for three nodes with batches (3, B, …)."""
    probe = Probe(inputs[0, :2], labels[0, :2], inputs.shape[1], torch.device("cpu"), labels=True)
    engine, plain = build(module, loss, probe), AutogradEngine(module, loss, probe)
    assert engine is not None
    d = sum(parameter.numel() for parameter in module.parameters())
    x, local = torch.randn(3, d), torch.empty(3, 0)
    found, expected = torch.empty(3, d), torch.empty(3, d)
    engine.gradient(x, local, inputs, labels, [], found, train=True)
    plain.gradient(x, local, inputs, labels, [], expected, train=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(engine.outputs(x, local, inputs[0]), plain.outputs(x, local, inputs[0]))
    assert build(nn.Sequential(module), loss, probe) is None, "anything else is left to the other engines"


if __name__ == "__main__":
    torch.manual_seed(0)
    check(nn.Linear(5, 3), F.cross_entropy, torch.randn(3, 7, 5), torch.randint(0, 3, (3, 7)))
