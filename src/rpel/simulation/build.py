"""From a Spec and its data to the parts of Algorithm 1's problem, and the memory that they need.

The buffers: models and momenta (c, d) of this worker's c nodes, and the table. The table's first h rows are
the half-step models of all nodes; the rows behind them hold gradients in the local step and forged vectors in
the exchange. Nothing else of that size is ever made.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rpel import data, models
from rpel.attacks import Poison
from rpel.backend.base import Backend, backend
from rpel.backend.chunks import free_memory as free_device_memory
from rpel.backend.chunks import sharing
from rpel.data import Dataset
from rpel.learning import MomentumSGD
from rpel.optim import OptimizerSteps, local_steps
from rpel.processes import free_memory
from rpel.simulation.asynchrony import of_round
from rpel.simulation.communicator import Group, Shards
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import Resolved
from rpel.simulation.network import victim_by_victim
from rpel.spec import Partition, Spec, Timing
from rpel.tasks import Classification, Objective, Trigger
from rpel.text import count, human_bytes
from rpel.types import Arrays, Integers, Models

log = logging.getLogger("rpel")
ANSWER_BYTES = 64
"""Memory of an answer beside the model: who is asked, the row of the answer, and its place in the order."""


def build_backend(spec: Spec, local_rank: int = 0) -> Backend:
    """Return the backend on the device of this run.

    Each of several workers on one machine has its own device. Raises ValueError where there is none.
    """
    if spec.backend != "torch":
        return backend(spec.backend)
    from rpel.backend.chunks import local_device, missing
    from rpel.backend.tensors import Torch

    device = local_device(spec.device, local_rank)
    if (why := missing(device)) is not None:
        raise ValueError(f"device {spec.device!r} is not available here: {why}; the nearest is 'cpu'")
    return cast(Backend, Torch(device))


def build_task(run: Resolved, inputs: Gathered, arrays: Backend | None = None) -> Classification:
    """Build the task of the honest nodes.

    Under label flip and backdoor hostile nodes train, too, and the task includes them.

    arrays: the backend of the run; a task lives where its arrays do.
    """
    spec, dataset, made = run.spec, inputs.dataset, run.attack
    h = spec.nodes - spec.hostile_count
    module = inputs.module
    if module is None:
        module = models.model(spec.model, dataset.shape, dataset.classes, seed=spec.seed)
        if dataset.mean is None and models.takes_numbers(spec.model) and dataset.train_x.dtype.kind != "f":
            dataset = replace(dataset, mean=(0.0,), std=(1.0,))  # whole numbers, or pixels from 0 to 1
    trains = made.trains
    hostile = _hostile(run) if trains else []
    shards: Any = inputs.shards
    tests = None
    sharing = Partition.of(spec.partition).name
    if sharing == "owner":
        shards, tests = _by_owner(run, dataset)
    elif shards is None:
        shards = shared_out(spec, dataset, spec.nodes if trains and sharing == "virtual" else h)
    if trains and isinstance(shards, list):
        honest = np.setdiff1d(np.arange(spec.nodes), hostile)
        shards = dict(zip(honest.tolist(), shards, strict=True))
    device = cast(Any, arrays or build_backend(spec)).device if spec.backend == "torch" else "cpu"
    return Classification(
        dataset,
        shards,
        module,
        inputs.loss,
        inputs.metric,
        batch_size=spec.batch_size,
        seed=spec.seed,
        device=device,
        flipped=hostile,
        trigger=Trigger(**made.parameters) if made.poisons is Poison.PATCH else None,
        tests=tests,
        native=spec.native,
    )


def _hostile(run: Resolved) -> list[int]:
    """Return the hostile nodes of round 1, as the simulator will place them."""
    return [int(i) for i in np.flatnonzero(run.network.roster.hostile(1))]


def _by_owner(run: Resolved, dataset: Dataset) -> tuple[list[Integers], list[Integers] | None]:
    """Give each honest node all training and test examples of one owner.

    The data of owners that fall to hostile nodes are unused.
    """
    spec = run.spec
    if dataset.writers is None:
        raise ValueError(
            f"partition 'owner' needs the owner of each example, which {dataset.name} does not record: "
            "try 'dirichlet'"
        )
    held = data.largest_owners(dataset.writers, spec.nodes, spec.batch_size)
    if run.attack.trains:
        raise ValueError(
            f"attack {spec.attack!r} trains on all data, and partition 'owner' gives none to hostile nodes"
        )
    honest = [held[i] for i in run.network.roster.honest_ids(1)]
    if dataset.test_writers is None:
        return honest, None
    return honest, [np.flatnonzero(dataset.test_writers == dataset.writers[part[0]]) for part in honest]


def shared_out(spec: Spec, dataset: Dataset, nodes: int) -> Any:
    """Divide the training examples among the nodes."""
    labels, batch, seed = dataset.train_y, spec.batch_size, spec.seed
    how = Partition.of(spec.partition)
    if how.name == "virtual":
        return data.virtual(labels, nodes, how.alpha, seed)
    if how.name == "iid":
        return data.iid(np.zeros(dataset.size, np.int64), nodes, batch, seed)
    if how.name == "dirichlet":
        return data.dirichlet(labels, nodes, how.alpha, batch, seed)
    if dataset.writers is None:
        raise ValueError(
            f"partition 'writer' needs the writer of each example, which {dataset.name} does not record: "
            "try 'dirichlet'"
        )
    return data.by_writer(dataset.writers, nodes, batch, seed)


def build_local(
    spec: Spec, task: Objective, gradients: Any, optimizer: Any, nodes: int, scratch: Models,
    arrays: Backend,
) -> MomentumSGD | OptimizerSteps:  # fmt: skip
    """Build lines 3-6 of this number of nodes; ``gradients`` are the task's, or private ones."""
    common: dict[str, Any] = {
        "steps": spec.local_steps, "nodes": nodes, "scratch": scratch, "backend": arrays,
    }  # fmt: skip

    def rate(t: int) -> float:
        return spec.rate(of_round(t))

    return local_steps(
        gradients, optimizer or spec.optimizer, rate, list(task.layout.values()), momentum=spec.momentum,
        weight_decay=spec.weight_decay, **common,
    )  # fmt: skip


# --- memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How many rows of a model's size a worker holds, and how many answers it handles in a round."""

    own: int
    """Nodes of this worker."""
    half: int
    """Half-step models, of all nodes."""
    behind: int
    """Rows of the table for gradients and forged vectors."""
    older: int
    """Rows for versions that are replaced within a window of an asynchronous run."""
    answers: int

    @classmethod
    def of(cls, run: Resolved, own: int | None = None) -> "Size":
        """Return the size of a run on a worker with that many nodes; left out: with all of them."""
        spec, attack, everybody = run.spec, run.attack, run.attack.trains
        half = spec.nodes if everybody else spec.nodes - spec.hostile_count
        own = half if own is None else own
        alone = victim_by_victim(attack)
        behind = own if everybody or alone else half
        older = half if Timing.of(spec.timing).asynchronous else 0
        return cls(own, half, behind, older, run.network.topology.widest * (own if alone else half))

    @property
    def table(self) -> int:
        return self.half + self.behind


def memory_needed(run: Resolved, size: Size, row_bytes: int, task_bytes: int = 0) -> int:
    """Return the bytes that a worker of this size needs, beside the data and the libraries.

    Models and momenta; what another optimiser, an outer step or a uniform output remembers of each node; the
    table, once more as it was encoded; and what an attack that searches compares.

    Args:
        row_bytes: of one model.
        task_bytes: what the task keeps on the device.
    """
    spec = run.spec
    each = 2 + (spec.output == "uniform") + 2 * (spec.optimizer != "momentum") + 2 * (spec.outer != "none")
    # copies of nodes that act together: models, momenta, half-steps, results
    each += 4 * Timing.of(spec.timing).asynchronous
    searched = 4 * size.behind * run.attack.searches  # honest means, aggregates, and the best so far
    encoded = spec.wire != "float32"
    rows = each * size.own + size.table * (1 + encoded) + size.older + searched
    return rows * row_bytes + ANSWER_BYTES * size.answers + task_bytes


def check_memory(run: Resolved, size: Size, task: Objective, here: int, row_bytes: int) -> None:
    """Raise ValueError if the ``here`` workers on this machine need more memory than is free."""
    spec, needed = run.spec, memory_needed(run, size, row_bytes, task.device_bytes)
    device = free_device_memory(spec.device)
    free = free_memory() if device is None else device
    here = here if device is None else sharing(spec.device, here)
    if free is not None and needed * here > free:
        each = f" for each of {here} workers" if here > 1 else ""
        raise ValueError(
            f"{size.half:,} models of {task.d:,} numbers and {size.answers:,} answers a round need "
            f"{human_bytes(needed)}{each}, and {human_bytes(free)} are free here: use fewer nodes, a smaller "
            "model, or workers on more machines"
        )


# --- several workers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """Lines 3-6 of one worker's nodes, whose half-steps stand in the table of every worker.

    half: the table's rows of all nodes. pieces: the rows of every worker, cut;
    each is sent while the next is computed.
    """

    local: "MomentumSGD | OptimizerSteps"
    half: Models
    workers: Group
    pieces: list[Shards]
    mine: slice

    def init(self) -> tuple[Models, Arrays]:
        """The models and the local state of this worker's nodes."""
        return self.local.init()

    def __call__(self, x: Models, state: Arrays, nodes: Integers, t: int) -> tuple[Models, Arrays]:
        """Return the half-steps of this worker's nodes, and put those of all nodes into the table."""
        with self.workers.gathering(self.half, self.pieces) as ready:
            for piece in self.pieces[self.workers.rank]:
                own = slice(piece.start - self.mine.start, piece.stop - self.mine.start)
                part = {key: array[own] for key, array in state.items()}
                self.local(x[own], part, nodes[own], t, out=self.half[piece])
                ready(piece)
        return self.half[self.mine], state


def warn_of_idle_workers(shards: Shards, nodes: int, unit: int) -> None:
    """Log a warning if there is less work than workers."""
    idle = sum(shard.start == shard.stop for shard in shards)
    if idle:
        log.warning(
            "%d of %d workers have nothing to do: %d nodes are %s of local work",
            idle, len(shards), nodes, count(-(-nodes // unit), "unit"),
        )  # fmt: skip
