"""What a run trains on and with: data, network and loss, by name or handed over from Python, made into a Task.

What an object does cannot be known from outside, so a run with objects from Python is never taken for another one that
is finished; their digests tell folders apart and no more.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel import data, models, plugins
from rpel.attacks import Poison, attack
from rpel.config.record import OWN
from rpel.config.spec import Spec
from rpel.data import Dataset
from rpel.simulation.certificate import versions
from rpel.simulation.methods import ResolvedSpec, build_network
from rpel.tasks import Classification, Trigger
from rpel.types import Integers

log = logging.getLogger("rpel")

Loss = Callable[[Tensor, Tensor], Tensor]
Download = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Objects:
    """What the user hands over from Python; None is what the Spec names."""

    model: nn.Module | None = None
    train: Any = None
    test: Any = None
    loss: Loss | None = None
    metric: Loss | None = None
    code: bool = False
    """Whether the rule or the attack is an object, too; the Spec has a name for it that only this process knows."""

    def named(self, spec: Spec) -> Spec:
        """The Spec with the word "own" where something was handed over."""
        changes = {} if self.model is None else {"model": OWN}
        if self.train is not None:
            changes["dataset"] = OWN
        if _is_one_per_node(self.train):
            changes["partition"] = OWN
        return spec.replace(**changes)


@dataclass(frozen=True)
class Inputs:
    """Data, network and loss of a run; ``digests`` tell what was handed over from Python apart.

    shards: the training examples of each honest node, where the user brought one data set for each.
    versions: the code of the run, see :func:`rpel.simulation.certificate.versions`.
    known: whether all of it has a name, so that an equal run can be known to be equal.
    """

    dataset: Dataset
    module: nn.Module | None
    loss: Loss | None
    metric: Loss | None = None
    shards: list[Integers] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    known: bool = True

    def subset(self, size: int) -> Integers:
        """The test examples of an evaluation: as many of every class, and the same for every seed."""
        targets = self.dataset.test_y
        classes = np.zeros(len(targets), np.int64) if _is_regression(self.dataset) else targets
        return data.balanced_subset(classes, size, seed=0)


SAMPLES = {"mnist-8x8": "mnist-sample-8x8"}
"""Data sets in whose place the embedded sample may stand, so that the presets with many nodes run everywhere."""


def available(spec: Spec, download: Download | None = None) -> Spec:
    """The Spec, with the embedded sample where a data set of SAMPLES can be neither found nor downloaded."""
    if spec.dataset not in SAMPLES:
        return spec
    try:
        data.load(spec.dataset, spec.data_dir, progress=download)
    except data.MissingDataError as error:
        log.warning("%s; until then the sample in the package, %s, takes its place", error, SAMPLES[spec.dataset])
        return spec.replace(dataset=SAMPLES[spec.dataset])
    return spec


def gather(spec: Spec, own: Objects, download: Download | None = None) -> Inputs:
    """Load or take over what the run needs; ``download(name, done, total)`` hears of bytes that arrive."""
    if (own.train is None) != (own.test is None) and not isinstance(own.train, Dataset):
        raise ValueError("train and test go together: give both, or neither and a dataset's name")
    there = {"model": own.model is not None, "dataset": own.train is not None}
    there["partition"] = _is_one_per_node(own.train)
    for key, given in there.items():
        if getattr(spec, key) == OWN and not given:
            raise ValueError(
                f"this run has a {key} of its own: give it from Python, as in "
                f"rpel.resume(path, model=…, train=…, test=…) or rpel.simulate(model=…, train=…, test=…)"
            )
    shards = None
    if own.train is None:
        dataset = data.load(spec.dataset, spec.data_dir, progress=download)
    elif _is_one_per_node(own.train):
        dataset, shards = _per_node(own.train, own.test, spec.nodes - spec.byzantine)
    else:
        dataset = taken(own.train, own.test)
    if _is_regression(dataset):
        _check_regression(spec, own)
    handed = {"model": own.model, "loss": own.loss, "metric": own.metric}
    digests = {key: described(thing) for key, thing in handed.items() if thing is not None}
    metric = _minus(own.loss) if own.loss is not None and own.metric is None and _is_regression(dataset) else own.metric
    known = not digests and not own.code  # data are known by their content
    return Inputs(dataset, own.model, own.loss, metric, shards, digests, code_versions(spec), known)


def code_versions(spec: Spec) -> dict[str, str]:
    """The code that this Spec runs: ours, and the files of the rules and the attack that are not ours."""
    used = (("rpel.rules", (spec.rule or "").split("+")), ("rpel.attacks", [spec.attack]))
    found = [item for group, names in used for item in plugins.origins(group, names)]
    modules = {
        f"{name} ({package})" if package else name: plugins.code_digest(name, thing) for name, thing, package in found
    }
    return versions(spec.device, modules)


@cache
def data_checksums(dataset: str, data_dir: str | None) -> tuple[tuple[str, str], ...]:
    """The checksums of a data set's files as they lie here now; none where it is missing or damaged."""
    try:
        return tuple(data.load(dataset, data_dir, download=False).checksums.items())
    except (ValueError, OSError):
        return ()


# --- data from Python ------------------------------------------------------------------------------------------------


def taken(train: Any, test: Any) -> Dataset:
    """A data set from pairs of arrays, from torch data sets or loaders, or as it is.

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> taken(torch.utils.data.TensorDataset(x, y), (x.numpy(), y.numpy())).classes
    2
    """
    if isinstance(train, Dataset):
        data.check_examples(train.train_x, train.test_x)
        content = (train.train_x, train.train_y, train.test_x, train.test_y)
        return replace(train, checksums=train.checksums or {train.name: digest(*content)})
    (x, y), (test_x, test_y) = _arrays(train, "train"), _arrays(test, "test")
    if y.dtype.kind != "f":
        return data.from_arrays((x, y), (test_x, test_y))
    for part, examples, targets in (("train", x, y), ("test", test_x, test_y)):
        if len(examples) != len(targets) or not len(targets) or targets.dtype.kind != "f":
            raise ValueError(f"the {part} examples {examples.shape} and float targets {targets.shape} do not fit")
        data.check_finite(targets, f"{part} targets")
    data.check_examples(x, test_x)
    checksums = {"own/train": digest(x, y), "own/test": digest(test_x, test_y)}
    return Dataset(OWN, x, y.astype(np.float32), test_x, test_y.astype(np.float32), 0, (0.0,), (1.0,), checksums)


def _is_one_per_node(train: Any) -> bool:
    """Whether a list holds data sets, rather than examples or the pair (x, y)."""
    if not isinstance(train, list) or not train:
        return False
    return all(
        isinstance(one, torch.utils.data.Dataset | torch.utils.data.DataLoader)
        or (isinstance(one, tuple | list) and len(one) == 2 and np.ndim(one[1]) >= 1)
        for one in train
    )


def _per_node(train: list[Any], test: Any, honest: int) -> tuple[Dataset, list[Integers]]:
    """One data set of all nodes' examples, and which of them each node holds."""
    if len(train) != honest:
        raise ValueError(f"train has {len(train)} data sets, but there are {honest} honest nodes (nodes − byzantine)")
    parts = [_arrays(one, f"train[{i}]") for i, one in enumerate(train)]
    ends = np.cumsum([len(y) for _, y in parts])
    if min(len(y) for _, y in parts) == 0:
        raise ValueError("each honest node needs at least one example")
    for i, (x, _) in enumerate(parts):
        data.check_examples(parts[0][0], x, ("train[0]", f"train[{i}]"))
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    found = taken((x, y), test)
    sizes = hashlib.sha256(str(ends.tolist()).encode()).hexdigest()
    return replace(found, checksums={**found.checksums, "own/nodes": sizes}), np.split(np.arange(len(y)), ends[:-1])


def _arrays(part: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """(examples, targets) as arrays; floating-point examples become float32. A loader stands for its data set."""
    if isinstance(part, torch.utils.data.DataLoader):
        part = part.dataset
    if isinstance(part, torch.utils.data.TensorDataset):
        part = part.tensors
    try:
        if not isinstance(part, tuple | list) or len(part) != 2:
            pairs = [part[i] for i in range(len(part))]
            part = (np.stack([np.asarray(x) for x, _ in pairs]), np.array([np.asarray(y) for _, y in pairs]))
        x, y = (np.asarray(values) for values in part)
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{name} is a {type(part).__name__} that cannot be read as examples and targets ({error}): it takes "
            "(x, y) arrays, a torch Dataset with a length, or a list with one of these per honest node"
        ) from None
    return (x.astype(np.float32) if x.dtype.kind == "f" else x), y


def _is_regression(dataset: Dataset) -> bool:
    return dataset.train_y.dtype.kind == "f"


def _check_regression(spec: Spec, own: Objects) -> None:
    """What float targets need: a module, a loss, and a partition that asks for no classes."""
    if own.loss is None or own.model is None:
        raise ValueError("float targets need a model= and a loss= of your own: cross-entropy and our networks classify")
    if spec.partition not in ("iid", OWN):
        raise ValueError(
            f"partition {spec.partition!r} shares out classes, and float targets have none: use partition='iid', or "
            "give train= as a list with one data set per honest node"
        )
    if attack(spec.attack, **spec.attack_params).trains:
        raise ValueError(f"attack {spec.attack!r} works on classes, and float targets have none: the nearest is 'alie'")


def _minus(loss: Loss) -> Loss:
    """What stands in place of an accuracy where nothing else is given: larger is better."""
    return lambda output, target: -loss(output, target)


# --- the task --------------------------------------------------------------------------------------------------------


def build_task(spec: ResolvedSpec, inputs: Inputs) -> Classification:
    """The Task of the honest nodes; where the hostile ones train, under label flip and backdoor, also of those."""
    dataset, h = inputs.dataset, spec.nodes - spec.byzantine
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available here: the nearest is 'cpu'")
    module = inputs.module or models.model(spec.model, dataset.shape, dataset.classes, seed=spec.seed)
    made = attack(spec.attack, **spec.attack_params)
    trains = made.trains
    hostile = _hostile(spec) if trains else []
    shards: Any = inputs.shards
    if shards is None:
        shards = shared_out(spec, dataset, spec.nodes if trains and spec.partition == "virtual" else h)
    if trains and isinstance(shards, list):
        honest = np.setdiff1d(np.arange(spec.nodes), hostile)
        shards = dict(zip(honest.tolist(), shards, strict=True))
    return Classification(
        dataset,
        shards,
        module,
        inputs.loss,
        inputs.metric,
        batch_size=spec.batch_size,
        seed=spec.seed,
        device=spec.device,
        flipped=hostile,
        trigger=Trigger(**made.parameters) if made.poisons is Poison.PATCH else None,
    )


def _hostile(spec: ResolvedSpec) -> list[int]:
    """Who is hostile in round 1, as the simulator will place them."""
    _, roster, _ = build_network(spec)
    return [int(i) for i in np.flatnonzero(roster.hostile(1))]


def shared_out(spec: Spec, dataset: Dataset, nodes: int) -> Any:
    """Who holds which training examples."""
    labels, batch, seed = dataset.train_y, spec.batch_size, spec.seed
    if spec.partition == "virtual":
        return data.virtual(labels, nodes, float(spec.alpha), seed)
    if spec.partition == "iid":
        return data.iid(labels, nodes, batch, seed)
    if spec.partition == "dirichlet":
        return data.dirichlet(labels, nodes, float(spec.alpha), batch, seed)
    if dataset.writers is None:
        raise ValueError(
            f"partition 'writer' needs to know who wrote what, and {dataset.name} does not: try 'dirichlet'"
        )
    return data.by_writer(dataset.writers, nodes, batch, seed)


# --- digests ---------------------------------------------------------------------------------------------------------


def digest(*arrays: NDArray[Any]) -> str:
    """SHA-256 of the content of arrays, one after the other.

    >>> digest(np.zeros(2)) == digest(np.zeros(2)), digest(np.zeros(2)) == digest(np.zeros((2, 1)))
    (True, False)
    """
    each = (_sha256(f"{array.dtype} {array.shape}".encode(), np.ascontiguousarray(array).tobytes()) for array in arrays)
    return _sha256(*(one.encode() for one in each))


def _sha256(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def described(thing: Any) -> str:
    """A digest that tells objects apart by what is seen at once: a network's parts and values, a function's name."""
    if isinstance(thing, nn.Module):
        values = {key: value for key, value in thing.state_dict().items() if isinstance(value, Tensor)}
        arrays = [value.detach().cpu().reshape(-1).view(torch.uint8).numpy() for value in values.values()]
        return _sha256(repr(thing).encode(), repr(list(values)).encode(), digest(*arrays).encode())
    return _sha256(plugins.place_of(thing).encode())
