"""What a run trains on and with: data, network and loss, by name or handed over from Python, made into a Task."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel import data, models
from rpel.attacks import attack
from rpel.config.spec import OWN, Spec
from rpel.data import Dataset
from rpel.simulation.digest import digest
from rpel.simulation.methods import build_network
from rpel.tasks import Classification

Loss = Callable[[Tensor, Tensor], Tensor]
Download = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Own:
    """What the user hands over from Python; None is what the Spec names."""

    model: nn.Module | None = None
    train: Any = None
    test: Any = None
    loss: Loss | None = None

    def named(self, spec: Spec) -> Spec:
        """The Spec with the word "own" where something was handed over."""
        changes = {} if self.model is None else {"model": OWN}
        if self.train is not None:
            changes["dataset"] = OWN
        return spec.but(**changes)


@dataclass(frozen=True)
class Material:
    """Data, network and loss of a run; ``digests`` identify what was handed over from Python."""

    dataset: Dataset
    module: nn.Module | None
    loss: Loss | None
    digests: dict[str, str] = field(default_factory=dict)


def gather(spec: Spec, own: Own, download: Download | None = None) -> Material:
    """Load or take over what the run needs; ``download(name, done, total)`` hears of bytes that arrive."""
    if (own.train is None) != (own.test is None) and not isinstance(own.train, Dataset):
        raise ValueError("train and test go together: give both, or neither and a dataset's name")
    for key, missing in (("model", own.model is None), ("dataset", own.train is None)):
        if getattr(spec, key) == OWN and missing:
            raise ValueError(
                f"this run has a {key} of its own: give it from Python, as in "
                f"rpel.resume(path, model=…, train=…, test=…) or rpel.simulate(model=…, train=…, test=…)"
            )
    dataset = (
        data.load(spec.dataset, spec.data_dir, progress=download) if own.train is None else taken(own.train, own.test)
    )
    handed = {"model": own.model, "loss": own.loss}
    digests = {key: digest(thing) for key, thing in handed.items() if thing is not None}
    return Material(dataset, own.model, own.loss, digests)


def taken(train: Any, test: Any) -> Dataset:
    """A data set from pairs of arrays, from torch data sets, or as it is.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> taken(torch.utils.data.TensorDataset(x, y), (x.numpy(), y.numpy())).classes
    2
    """
    if not isinstance(train, Dataset):
        return data.from_arrays(_arrays(train), _arrays(test))
    content = (train.train_x, train.train_y, train.test_x, train.test_y)
    return replace(train, checksums=train.checksums or {train.name: digest(content)})


def _arrays(part: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """(examples, labels) as arrays; floating-point examples become float32."""
    if isinstance(part, torch.utils.data.TensorDataset):
        part = part.tensors
    if not isinstance(part, tuple | list) or len(part) != 2:
        pairs = [part[i] for i in range(len(part))]
        part = (np.stack([np.asarray(x) for x, _ in pairs]), np.array([int(y) for _, y in pairs]))
    x, y = (np.asarray(values) for values in part)
    return (x.astype(np.float32) if x.dtype.kind == "f" else x), y


def build_task(spec: Spec, material: Material) -> Classification:
    """The Task of the honest nodes; under label flip also of the hostile ones."""
    dataset, h = material.dataset, spec.nodes - spec.byzantine
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available here: the nearest is 'cpu'")
    module = material.module or models.model(spec.model, dataset.shape, dataset.classes, seed=spec.seed)
    trains = attack(spec.attack, **spec.attack_params).trains
    hostile = _hostile(spec) if trains else []
    shards = shared_out(spec, dataset, spec.nodes if trains and spec.partition == "virtual" else h)
    if trains and isinstance(shards, list):
        honest = np.setdiff1d(np.arange(spec.nodes), hostile)
        shards = dict(zip(honest.tolist(), shards, strict=True))
    return Classification(
        dataset,
        shards,
        module,
        material.loss,
        batch_size=spec.batch_size,
        seed=spec.seed,
        device=spec.device,
        flipped=hostile,
    )


def _hostile(spec: Spec) -> list[int]:
    """Who is hostile in round 1, as the engine will place them."""
    assert spec.pull is not None, "settled before"
    _, roster, _ = build_network(
        spec.method,
        nodes=spec.nodes,
        byzantine=spec.byzantine,
        pull=spec.pull,
        seed=spec.seed,
        graph=spec.graph,
        placement=spec.placement,
        roaming=spec.roaming,
    )
    return [int(i) for i in np.flatnonzero(roster.hostile(1))]


def shared_out(spec: Spec, dataset: Dataset, nodes: int) -> Any:
    """Who holds which training examples."""
    labels, batch, seed = dataset.train_y, spec.batch_size, spec.seed
    if spec.partition == "virtual":
        return data.virtual(labels, nodes, spec.alpha, seed)
    if spec.partition == "iid":
        return data.iid(labels, nodes, batch, seed)
    if spec.partition == "dirichlet":
        return data.dirichlet(labels, nodes, spec.alpha, batch, seed)
    if dataset.writers is None:
        raise ValueError(
            f"partition 'writer' needs to know who wrote what, and {dataset.name} does not: try 'dirichlet'"
        )
    return data.by_writer(dataset.writers, nodes, batch, seed)
