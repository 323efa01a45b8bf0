"""One simulation on several workers, byte for byte as on one: torch.distributed with gloo carries the arrays.

Every worker takes the local steps of its share of the honest nodes, receives everybody's half-step models, and forges
and aggregates for its own victims. Worker 0 also holds all models after the exchange: it evaluates, saves and reports,
and tells the others what to do next.

Invariants:
- a share is made of whole units of local work, counted from row 0, and each victim is aggregated whole by one worker:
  so results do not depend on the number of workers;
- attacks that look at all victims at once, or remember, are computed by every worker from the same models.

gloo authenticates nobody: workers belong on one machine or in a private network.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rpel.config.spec import Spec, to_toml
from rpel.learning import exchange, local_step
from rpel.processes import start
from rpel.simulation.certificate import versions
from rpel.simulation.evaluation import Evaluation
from rpel.simulation.methods import Settled
from rpel.simulation.simulator import Simulation
from rpel.tasks import Task
from rpel.types import Cohort, Exchange, Integers, MixInfo, Models

log = logging.getLogger("rpel")
_STORE = "RPEL_WORKERS"
"""In a worker that :func:`joined` started: the file by which the workers find each other."""
_PATIENCE = timedelta(minutes=30)
_GRACE = 30.0


class Command(IntEnum):
    """What worker 0 tells the others."""

    STEP = 1
    COLLECT = 2
    LOAD = 3
    END = 4


class Workers:
    """The group of processes that share a simulation, as one of them sees it."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def shares(self, rows: int, unit: int) -> list[slice]:
        """The rows of every worker: contiguous, whole units but for the last, as equal as that allows."""
        units = -(-rows // unit)
        ends = [min(rows, units * r // self.size * unit) for r in range(self.size + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def spread(self, array: NDArray[Any], shares: list[slice]) -> None:
        """Everybody's rows to everybody."""
        for rank, share in enumerate(shares):
            if share.start < share.stop:
                dist.broadcast(torch.from_numpy(array[share]), src=rank)

    def collect(self, array: NDArray[Any], shares: list[slice]) -> None:
        """Everybody's rows to worker 0."""
        for rank, share in enumerate(shares):
            if rank and share.start < share.stop and array[share].size:
                rows = torch.from_numpy(array[share])
                if self.rank == 0:
                    dist.recv(rows, src=rank)
                elif self.rank == rank:
                    dist.send(rows, dst=0)

    def tell(self, command: Command | None = None) -> Command:
        """Worker 0 says what comes next; the others hear it."""
        word = torch.tensor([0 if command is None else int(command)])
        dist.broadcast(word, src=0)
        return Command(int(word))

    def share_object(self, thing: Any) -> Any:
        """Worker 0's object, on every worker."""
        held = [thing]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def agree(self, what: str) -> None:
        """ValueError if the workers have other specifications, data or code."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (what, versions()))
        for rank, (name, theirs) in enumerate(found):
            if name != found[0][0]:
                raise ValueError(f"worker {rank} would run {name}, worker 0 {found[0][0]}: other data or specification")
            if theirs != found[0][1]:
                raise ValueError(f"worker {rank} has other versions than worker 0: {theirs} and {found[0][1]}")


class SharedSimulation(Simulation):
    """A simulation of which this worker has a share."""

    def __init__(self, spec: Settled, task: Task, workers: Workers) -> None:
        super().__init__(spec, task)
        engine = getattr(task, "engine", None)
        self.workers = workers
        self.shares = workers.shares(len(self.cohort.x), 1 if engine is None else engine.together(spec.batch_size))
        self.mine = self.shares[workers.rank]
        self.rows = np.arange(len(self.cohort.x))[self.mine]

    # --- the parts of a round that are shared ---

    def _local_steps(self, t: int) -> Cohort:
        """The half-steps of this worker's nodes, then everybody's in the table."""
        if self.workers.rank == 0:
            self.workers.tell(Command.STEP)
        s, ids, mine = self.spec, self._ids(t), self.mine
        whole = self.cohort
        c = Cohort(ids[mine], whole.x[mine], whole.m[mine], whole.local[mine])
        half = self.table[: len(whole.x)]
        if "before" in self.network.attack.needs:
            self.workers.spread(whole.x, self.shares)
            self.network.before = whole.x.copy()
        for k in range(s.local_steps if len(c.ids) else 0):
            place = half[mine] if k == s.local_steps - 1 else whole.x[mine]
            c = local_step(c, t, k, self, beta=s.momentum, lr=s.rate, decay=s.weight_decay, out=place)
        whole.m[mine], whole.local[mine] = c.m, c.local
        self.workers.spread(half, self.shares)
        return Cohort(ids, half, whole.m, whole.local)

    def _exchange(self, c: Cohort, t: int, models: Models) -> MixInfo:
        """The models of this worker's nodes, then everybody's at worker 0."""
        mine, degraded = self.mine, np.zeros((len(c.ids), 1), np.uint8)
        everybody = Exchange(t, c.ids, self.topology.sample(t, c.ids), c.x, self.topology.weights(c.ids))
        inbox = self.network.deliver(everybody, mine)
        if len(self.rows):
            own = Cohort(c.ids[mine], c.x[mine], c.m[mine], c.local[mine])
            round_ = exchange(own, t, self.topology, self.network.rule.among(mine), out=models[mine])
            next(round_)
            try:
                round_.send(inbox)
            except StopIteration as end:
                mixed, info = end.value
                models[mine], degraded[mine, 0] = mixed.x, info.degraded
        self.workers.collect(models, self.shares)
        self.workers.collect(degraded, self.shares)
        self.cohort = Cohort(c.ids, models, c.m, c.local)
        return MixInfo(degraded[:, 0].astype(bool), np.zeros(len(c.ids), np.int64))

    # --- what worker 0 needs of all ---

    def evaluate(self, subset: Integers | None) -> Evaluation:
        self._collect()
        return super().evaluate(subset)

    def state(self) -> dict[str, NDArray[Any]]:
        self._collect()
        return super().state()

    def _collect(self) -> None:
        """Momenta and local states of all nodes at worker 0."""
        if self.workers.rank == 0:
            self.workers.tell(Command.COLLECT)
        self.workers.collect(self.cohort.m, self.shares)
        self.workers.collect(self.cohort.local, self.shares)

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from a state that worker 0 has."""
        if self.workers.rank == 0:
            self.workers.tell(Command.LOAD)
        super().load(self.workers.share_object(state))

    def follow(self) -> None:
        """What a worker other than 0 does: as it is told, until the end."""
        while (command := self.workers.tell()) is not Command.END:
            if command is Command.STEP:
                t = self.round + 1
                models = self.cohort.x
                c = self._local_steps(t)
                self.network.rule = self.rule.at(round=t, rounds=self.spec.rounds, seed=self.spec.seed, ids=c.ids)
                self._exchange(c, t, models)
                self.round = t
            elif command is Command.COLLECT:
                self._collect()
            else:
                self.load({})


# --- who the workers are ---------------------------------------------------------------------------------------------


def called_for(spec: Spec) -> bool:
    """Whether a run is to be shared: its Spec has workers, or torchrun or another worker started this process."""
    return spec.workers > 1 or _STORE in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def joined(spec: Spec) -> Iterator[Workers]:
    """The group of this run's workers: that of torchrun, of the worker that started this one, or P − 1 started here."""
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="rpel-workers-") as place:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
            store, size, rank = Path(place) / "store", spec.workers, 0
            if _STORE in os.environ:
                name, size, rank = _from(os.environ[_STORE])
                store = Path(name)
            children = [] if rank else _started(spec, Path(place), store)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_PATIENCE
            )
        try:
            yield Workers()
        except RuntimeError as error:
            raise ValueError(
                f"a worker was lost ({str(error).splitlines()[0][:100]}): the same command goes on from the last "
                "checkpoint"
            ) from error
        finally:
            dist.destroy_process_group()
            for child in children:
                _end(child)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """It leaves when it is told to, or when its connections are gone."""
    try:
        child.wait(_GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _from(text: str) -> tuple[str, int, int]:
    name, size, rank = text.rsplit(",", 2)
    return name, int(size), int(rank)


def _started(spec: Spec, place: Path, store: Path) -> "list[subprocess.Popen[bytes]]":
    """Workers 1 to P − 1, on this machine."""
    file = place / "run.toml"
    file.write_text(to_toml(spec), "utf-8")
    return [
        start(
            ["run", str(file)], place / f"{rank}.out", place / f"{rank}.log", spec.threads or 1,
            more={_STORE: f"{store},{spec.workers},{rank}"},
        )
        for rank in range(1, spec.workers)
    ]  # fmt: skip
