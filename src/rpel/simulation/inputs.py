"""What a run trains on and with: data, network and loss, by name or user-supplied, made into a Task.

What an object does cannot be known from outside, so a run with objects from Python is never taken for another
one that is finished; their digests tell folders apart and no more.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rpel import component, data, models
from rpel.algorithm import Problem
from rpel.attacks import Attack
from rpel.data import Dataset, trees, user
from rpel.record import OWN
from rpel.rules import Rule
from rpel.runs.certificate import versions
from rpel.simulation.methods import Resolved
from rpel.spec import Partition, Request, spec_hash
from rpel.tasks.checks import check_loss
from rpel.tasks.engines import Loss
from rpel.tasks.metrics import metrics
from rpel.types import ROBUST_RULE, Integers

log = logging.getLogger("rpel")

Download = Callable[[str, int, int | None], None]
Load = Callable[[str, str | None], Dataset]
"""From a data set's name and folder to the data set."""


def loader(download: Download | None = None) -> Load:
    """Return a function that loads each data set once.

    ``download(name, done, total)`` receives the progress of downloads.

    >>> load = loader()
    >>> load("mnist-sample", None) is load("mnist-sample", None)
    True
    """
    return cache(partial(data.load, progress=download))


@dataclass(frozen=True)
class Inputs:
    """What a user supplies from Python, as it is; None is what the Spec names.

    shards: which examples of a Dataset each honest node holds, where the user says so.
    """

    model: nn.Module | models.Factory | None = None
    train: Any = None
    test: Any = None
    loss: Loss | None = None
    metric: Any = None
    rule: Rule | Callable[..., Any] | None = None
    attack: Attack | Callable[..., Any] | None = None
    optimizer: Any = None
    callbacks: tuple[Callable[..., Any], ...] = ()
    problem: Callable[[Problem], Problem] | None = None
    collate: Any = None
    target: str | None = None
    shards: list[Integers] | None = None

    @property
    def divided(self) -> bool:
        """Whether the user says who holds what."""
        return self.shards is not None or user.is_one_per_node(self.train)

    @property
    def objects(self) -> dict[str, Any]:
        """Map each field of a Spec to the object that replaces it."""
        given = {
            "model": self.model, "dataset": self.train, "partition": self.divided or None,
            "rule": self.rule, "attack": self.attack, "optimizer": self.optimizer,
        }  # fmt: skip
        return {field: thing for field, thing in given.items() if thing is not None}

    def marked(self, spec: Request) -> Request:
        """Return the Request with the word "own" where something is user-supplied."""
        return spec.replace(**dict.fromkeys(self.objects, OWN))


@dataclass(frozen=True)
class Gathered:
    """Data, network and loss of a run; ``digests`` tell user-supplied objects apart.

    shards: the training examples of each honest node, where the user brought one data set for each.
    versions: the code of the run, see :func:`rpel.runs.certificate.versions`.
    known: whether all of it has a name, so that an equal run can be known to be equal.
    """

    dataset: Dataset
    module: nn.Module | None
    loss: Loss | None
    metric: Any = None
    shards: list[Integers] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    known: bool = True
    problem: Callable[[Problem], Problem] | None = None
    optimizer: Any = None

    def subset(self, size: int) -> Integers:
        """The test examples of an evaluation: as many of every class, and the same for every seed."""
        return data.balanced_subset(self.dataset.strata(), size, seed=0)


def run_hash(spec: Request, inputs: Gathered) -> str:
    """Return the hash that names a run: its meaning, its data, the user's objects, and the code."""
    code = {"code": inputs.versions["code"]}
    return spec_hash(spec, inputs.dataset.checksums, inputs.digests, code)


SAMPLES = {"mnist-8x8": "mnist-sample-8x8"}
"""Data sets in whose place the embedded sample may stand,
so that the presets with many nodes run everywhere."""


def available(spec: Request, load: Load = data.load) -> Request:
    """The run, with the embedded sample where a data set of SAMPLES can be neither found nor downloaded."""
    if spec.dataset not in SAMPLES:
        return spec
    try:
        load(spec.dataset, spec.data_dir)
    except data.MissingDataError as error:
        log.warning(
            "%s; until then the sample in the package, %s, takes its place", error, SAMPLES[spec.dataset]
        )
        return spec.replace(dataset=SAMPLES[spec.dataset])
    return spec


def gather(run: Resolved, own: Inputs, load: Load = data.load) -> Gathered:
    """Load or take over what the run needs."""
    spec = run.spec
    if (own.train is None) != (own.test is None) and not isinstance(own.train, Dataset):
        raise ValueError("train and test go together: give both, or neither and a dataset's name")
    for key in ("model", "dataset", "partition", "optimizer"):
        if getattr(spec, key) == OWN and key not in own.objects:
            raise ValueError(
                f"this run has a {key} of its own: give it from Python, as in "
                f"rpel.resume(path, model=…, train=…, test=…) or rpel.simulate(model=…, train=…, test=…)"
            )
    shards, honest = own.shards, spec.nodes - spec.hostile_count
    if shards is not None and len(shards) != honest:
        raise ValueError(
            f"train has {len(shards)} data sets, but there are {honest} honest nodes (nodes − byzantine)"
        )
    if own.train is None:
        dataset = load(spec.dataset, spec.data_dir)
    elif user.is_one_per_node(own.train):
        dataset, shards = user.per_node(own.train, own.test, honest, collate=own.collate, target=own.target)
    else:
        dataset = user.dataset(own.train, own.test, collate=own.collate, target=own.target)
    if own.loss is None:
        dataset = user.with_classes(dataset)
    if own.train is not None:
        _check_network(own, dataset)
    check_loss(own.loss)
    if spec.partition != OWN:
        _check_classes(run, dataset)
    module = None if own.model is None else models.initialised(own.model, spec.seed)
    handed = {"model": module} | {
        key: getattr(own, key) for key in ("loss", "collate", "optimizer", "rule", "attack", "problem")
    }
    handed |= {f"metric {name}": metric.function for name, metric in metrics(own.metric).items()}
    digests = {key: described(thing) for key, thing in handed.items() if thing is not None}
    known = not digests and not own.callbacks  # data are known by their content
    return Gathered(
        dataset, module, own.loss, own.metric, shards, digests, code_versions(spec), known,
        own.problem, own.optimizer,
    )  # fmt: skip


def code_versions(spec: Request) -> dict[str, str]:
    """The code that this Spec runs: ours, and the files of rules, attacks and networks that are not ours."""
    used = [("rpel.rules", spec.rule or ROBUST_RULE), ("rpel.attacks", spec.attack)]
    if component.is_own(spec.model.partition("(")[0]):
        used.append(("rpel.models", spec.model))
    found = [
        item
        for group, text in used
        for item in component.origins(group, [part.name for part in component.parse_chain(text)])
    ]
    modules = {
        f"{name} ({package})" if package else name: component.code_digest(name, thing)
        for name, thing, package in found
    }
    return versions(spec.device, modules)


@cache
def data_checksums(dataset: str, data_dir: str | None) -> tuple[tuple[str, str], ...]:
    """The checksums of a data set's files as they lie here now; none where it is missing or damaged."""
    try:
        return tuple(data.load(dataset, data_dir, download=False).checksums.items())
    except (ValueError, OSError):
        return ()


# --- what does not fit together -----------------------------------------------------------------------------


def _check_classes(run: Resolved, dataset: Dataset) -> None:
    """What examples without a class of their own, such as those with float targets, do not have."""
    spec = run.spec
    if dataset.labels is not None:
        return
    if Partition.of(spec.partition).name in ("dirichlet", "virtual"):
        raise ValueError(
            f"partition {spec.partition!r} shares out classes, and these examples have no single one: use "
            "partition='iid', or give train= as a list with one data set per honest node"
        )
    if run.attack.trains:
        raise ValueError(
            f"attack {spec.attack!r} works on classes, and these targets are none: the nearest is 'alie'"
        )


def _check_network(own: Inputs, dataset: Dataset) -> None:
    """Our networks take one array of numbers and classify it."""
    if own.loss is None and _has_floats(dataset.train_y):
        raise ValueError(
            "float targets need a model= and a loss= of your own: cross-entropy and our networks classify"
        )
    if own.model is None and (
        not dataset.shape or dataset.collate is not None or _has_floats(dataset.train_y)
    ):
        raise ValueError(
            "a network by name takes examples that are one array, with a class each: give a model= of your "
            "own"
        )


def _has_floats(tree: Any) -> bool:
    return any(getattr(value, "dtype", np.dtype(bool)).kind == "f" for _, value in trees.leaves(tree))


# --- digests ------------------------------------------------------------------------------------------------


def digest(*arrays: NDArray[Any]) -> str:
    """SHA-256 of the content of arrays, one after the other.

    >>> digest(np.zeros(2)) == digest(np.zeros(2)), digest(np.zeros(2)) == digest(np.zeros((2, 1)))
    (True, False)
    """
    each = (
        _sha256(f"{array.dtype} {array.shape}".encode(), np.ascontiguousarray(array).tobytes())
        for array in arrays
    )
    return _sha256(*(one.encode() for one in each))


def _sha256(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def described(thing: Any) -> str:
    """Compute a digest that tells objects apart by what is visible.

    For a network these are its modules and values, for a function its name.
    """
    if isinstance(thing, nn.Module):
        values = {key: value for key, value in thing.state_dict().items() if isinstance(value, Tensor)}
        arrays = [value.detach().cpu().reshape(-1).view(torch.uint8).numpy() for value in values.values()]
        parts = [repr(thing), repr(list(values)), digest(*arrays)]
        if len(models.trained(thing)) < len(list(thing.parameters())):  # frozen parameters change the vector
            parts.append(repr(list(models.trained(thing))))
        return _sha256(*(part.encode() for part in parts))
    return _sha256(component.place_of(thing).encode())
