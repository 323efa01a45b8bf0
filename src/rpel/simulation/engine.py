"""The engine of a run: Algorithm 1's problem on the honest nodes, stepped, measured, evaluated and saved.

One process has all nodes. Each of several workers (`rpel.simulation.workers`) has such an engine with a shard
of them: they take the local steps of their own nodes, give the half-step models to everybody, and forge and
aggregate for their own. What is exchanged goes through the communicator, which is nothing to one process.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rpel import algorithm
from rpel.algorithm import Deliver, Info, Problem, remembered
from rpel.attacks import Attack
from rpel.backend.arrays import copy, empty, put, take
from rpel.backend.base import Backend, backend
from rpel.learning import Aggregation, NesterovOuter
from rpel.randomness import draws
from rpel.runs.folder import is_by_row
from rpel.simulation.asynchrony import AsynchronousRounds
from rpel.simulation.build import (
    Published,
    Size,
    build_backend,
    build_local,
    build_task,
    check_memory,
    warn_of_idle_workers,
)
from rpel.simulation.communicator import ALONE, Group, divided
from rpel.simulation.evaluate import (
    GRADIENT_EXAMPLES,
    GRADIENT_NODES,
    Evaluation,
    gradient_norms,
    spread,
    squared_norm,
)
from rpel.simulation.inputs import Gathered
from rpel.simulation.methods import Resolved, messages, schedule
from rpel.simulation.network import CodedNetwork, SimulatedNetwork
from rpel.simulation.private import private
from rpel.spec import Outer, Timing
from rpel.tasks import Objective
from rpel.types import Floats, Integers, Models, RoundInfo
from rpel.wire import Wire

_CHOSEN = "chosen", "chosen_local"


class Engine:
    """Run Algorithm 1 among simulated nodes, one round at a time.

    :meth:`arrays` and :meth:`load` continue it bit by bit.
    """

    def __init__(
        self,
        run: Resolved,
        task: Objective,
        workers: Group = ALONE,
        arrays: Backend | None = None,
        change: Callable[[Problem], Problem] | None = None,
        optimizer: Any = None,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Build the problem; ValueError if it does not fit into memory.

        Args:
            change: from the problem of this run to the one that is played, with another part in it.
            optimizer: a torch class, or what makes one, where the Spec says that the user has brought one.
            sizes: how many examples nodes count as theirs, where an audit gave them others
                (`rpel.tasks.private`).
        """
        spec = run.spec
        self.run, self.spec, self.task, self.workers = run, spec, task, workers
        self.backend = arrays or backend("numba")
        attack, rule = run.attack, run.rule
        self.topology, self.roster, self.graph = run.network
        self.everybody = attack.trains  # under label flip the hostile nodes train too
        h = self.nodes = Size.of(run).half
        self.unit = task.nodes_per_call
        if task.any_grouping:
            self.unit = min(self.unit, -(-h // workers.size))
        self.shards = divided(h, self.unit, workers.size)
        self.mine = self.shards[workers.rank]
        self.rows: Integers = np.arange(h)[self.mine]
        if workers.rank == 0:
            warn_of_idle_workers(self.shards, h, self.unit)
        size, initial = Size.of(run, len(self.rows)), task.initial()
        check_memory(run, size, task, workers.here, initial.nbytes)
        self.wire = Wire(spec.wire)
        # what half-steps and forged rows become on their way
        air = size.table if self.wire.name != "float32" else 0
        whole = empty(air + size.table + size.older, self.backend.array(initial))
        self.table = whole[air:]
        half = self.table[:h]
        space = self.table[h + size.older :]  # gradients are spent before anything is forged
        line9 = Aggregation(rule, spec.rounds, spec.seed, self._ids, self.backend)
        self.gradients, self.budget = private(spec, task, sizes)
        if self.budget is not None and change is not None:
            raise ValueError(
                "problem= may change the local step, so its privacy could not be counted: leave it out"
            )
        local = build_local(spec, task, self.gradients, optimizer, len(self.rows), space, self.backend)
        published = Published(local, half, workers, workers.pieces(self.shards, self.unit), self.mine)
        deliver = self._deliver(attack, line9, half, whole, air)
        after = Outer.of(spec.outer)
        outer = NesterovOuter(after.lr, after.momentum) if after.name == "nesterov" else None
        usual = Problem(published, deliver, line9, outer)
        self.problem = usual if change is None else change(usual)
        self.state = algorithm.init(self.problem)
        self.info: Info | None = None
        timing = Timing.of(spec.timing)
        timed = timing.asynchronous or timing.speeds != "equal"
        self.schedule = schedule(spec, self._ids(1)) if timed else None
        self.windows = self._windows(local, line9, outer, change) if timing.asynchronous else None
        self._chosen_round = 1 + (draws(spec.seed, "output", 0, self.rows, 1)[:, 0] * spec.rounds).astype(int)
        self._chosen: tuple[Models, Models] | None = None
        if spec.output == "uniform":
            self._chosen = copy(self.state.x), copy(self.state.local["buffers"])
        if isinstance(self.state.x, np.ndarray):
            rule.prepare(1 + self.messages // spec.nodes, task.d, self.state.x.dtype, victims=h * spec.rounds)

    @classmethod
    def of(cls, run: Resolved, inputs: Gathered, workers: Group = ALONE) -> Self:
        """Build the engine of a run from its data, on the device of this worker."""
        arrays = build_backend(run.spec, workers.local_rank)
        task = build_task(run, inputs, arrays)
        return cls(run, task, workers, arrays, change=inputs.problem, optimizer=inputs.optimizer)

    def _deliver(self, attack: Attack, line9: Aggregation, half: Models, whole: Models, air: int) -> Deliver:
        """Build lines 7-8: the network with its adversary.

        With a wire format, nodes pull models as the code can represent them; these are the first rows
        (``air``) of ``whole``.
        """
        spec = self.spec
        self.network = SimulatedNetwork(
            self.roster, self.topology, self._ids, attack, line9, whole[:air] if air else self.table,
            self.nodes, self.mine, spec.seed, spec.no_show, spec.silent,
            everyone=lambda own: self.workers.rows(own, self.shards), backend=self.backend, wire=self.wire,
        )  # fmt: skip
        coded = CodedNetwork(self.network, half, whole[: air + len(half)])
        return coded if air else self.network

    def _windows(self, local: Any, line9: Aggregation, outer: Any, change: Any) -> AsynchronousRounds:
        """Rounds without a barrier."""
        if change is not None:
            raise ValueError(
                "timing asynchronous does not go with problem=, which changes rounds that all take together"
            )
        if self.workers.size > 1 and self.unit > 1:
            raise ValueError(
                "timing asynchronous on several workers needs a network whose nodes are computed one by one, "
                f"and here {self.unit} are computed at once: use workers 1"
            )
        assert self.schedule is not None
        windows = AsynchronousRounds(
            self.schedule, local, self.network, line9, outer, self.workers, self.shards, self.mine
        )
        self.state = replace(self.state, network=self.state.network | windows.init(self.state.x))
        return windows

    def _ids(self, t: int) -> Integers:
        """(h,) the node numbers of all rows."""
        return np.arange(self.spec.nodes) if self.everybody else self.roster.honest_ids(t)

    @property
    def each(self) -> int:
        """How often a node may aggregate in a round."""
        return 1 if self.windows is None else self.windows.schedule.most

    @property
    def round(self) -> int:
        """Rounds played so far."""
        return self.state.round

    @property
    def honest(self) -> Integers:
        """(h,) the honest nodes' numbers."""
        return self.roster.honest_ids(1)

    @property
    def time(self) -> float | None:
        """The virtual time at the end of the last round, or None without a model of time."""
        if self.schedule is None:
            return None
        return (self.schedule.time if self.windows is not None else self.schedule.charged)(self.round)

    @property
    def messages(self) -> int:
        """Models sent per round, hostile nodes counted as if they pulled."""
        if self.windows is not None and self.state.round:
            pulls = self.windows.schedule.pulls(self.state.round)
            return self.run.pull * round(pulls * self.spec.nodes / self.nodes)
        return messages(self.spec.method, self.spec.nodes, self.run.pull)

    @property
    def bytes(self) -> int:
        return self.messages * self.wire.nbytes(self.task.d)

    # --- a round ---

    def step(self) -> Info:
        """Take one round of Algorithm 1.

        Raises BudgetSpentError before anything is computed if the privacy budget does not allow it.
        """
        if self.budget is not None:
            self.budget.check(self.round + 1)
        if self.windows is None:
            self.state, self.info = algorithm.step(self.problem, self.state)
        else:
            self.state, self.info = self.windows.step(self.state)
        if self._chosen is not None:
            now = self._chosen_round == self.round
            for kept, value in zip(self._chosen, (self.state.x, self.state.local["buffers"]), strict=True):
                put(kept, now, take(value, now))
        return self.info

    def measure(self, contraction: bool = False) -> RoundInfo:
        """Measure consensus distance, hostile counts and failures of the last round.

        contraction: also measure the realised α and λ.
        """
        info = self.info
        assert info is not None, "a round was taken"
        before = self._spread(info.half) if contraction else None
        mean, consensus = self._spread(self.state.x)
        alpha = lam = None
        if before is not None and before[1] > 0:
            alpha = consensus / before[1]
            lam = squared_norm(mean - before[0], self.backend) / before[1]
        columns = [np.asarray(info.received.met), info.aggregated.degraded, self._diverged(consensus)]
        own = np.column_stack(columns).astype(np.int32)
        counts = self._of_honest(self.workers.rows(own, self.shards))
        *_, degraded, diverged = counts.sum(axis=0).tolist()
        met = (counts[:, 0] if self.each == 1 else counts[:, : self.each].T).astype(np.int64)
        return RoundInfo(info.round, met, degraded, self.messages, consensus, diverged, alpha, lam)

    def _diverged(self, consensus: float) -> NDArray[np.bool_]:
        """Return which of this worker's models are not finite, (c,).

        If a number that depends on all honest models is finite, none has diverged.
        """
        if math.isfinite(consensus):
            return np.zeros(len(self.state.x), dtype=bool)
        return np.asarray(~self.backend.finite_rows(self.state.x))

    def _spread(self, x: Models) -> tuple[NDArray[np.float64], float]:
        """Mean and consensus distance of all honest nodes' models, of which x are this worker's."""
        own = take(x, np.isin(self.rows, self.honest)) if self.everybody else x
        return spread(own, self.workers, self.spec.nodes - self.spec.hostile_count, self.backend)

    def _of_honest(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Select the honest nodes' rows from all workers' rows."""
        return rows[self.honest] if self.everybody and len(rows) == self.nodes else rows

    # --- what it shows ---

    def evaluate(self, subset: Integers | None) -> Evaluation:
        """Accuracy and loss of every honest node on the test examples ``subset`` (None: all), and ‖∇F_H‖².

        ‖∇F_H‖² is of training examples and without noise: a private run has None.
        """
        x, local = self.state.x, self.state.local["buffers"]
        columns = self._scores(x, local, subset)
        norm = None
        if self.budget is None:
            examples = GRADIENT_EXAMPLES if subset is None else min(GRADIENT_EXAMPLES, len(subset))
            norm = self._gradient_norm(examples)
        kept = self._chosen if subset is None else None
        return Evaluation(
            columns["accuracy"], columns["loss"], norm, columns.get("attack_success"),
            None if kept is None else self._scores(*kept, subset)["accuracy"],
            {name: columns[f"metric.{name}"] for name in self.measures}, self.measures,
        )  # fmt: skip

    def _gradient_norm(self, examples: int) -> float:
        """The mean of ‖∇F_H‖² over some honest nodes, spread evenly over all."""
        rows = self.honest if self.everybody else np.arange(self.nodes)
        some = rows[np.unique(np.linspace(0, len(rows) - 1, GRADIENT_NODES).astype(np.int64))]
        here = np.flatnonzero(np.isin(self.rows, some))
        x, local = (take(array, here) for array in (self.state.x, self.state.local["buffers"]))
        norms = self.workers.each(lambda: gradient_norms(self.task, x, local, self.backend, examples))
        return float(np.concatenate(norms).mean())

    def _scores(self, x: Models, local: Models, subset: Integers | None) -> dict[str, Floats]:
        """(h,) each, of every honest node's model, of which x are this worker's, what `evaluate` finds."""
        columns = self.task.measure(x, local, subset, self.rows)
        own = np.stack(list(columns.values()), axis=1).astype(np.float64)
        shown = self._of_honest(self.workers.rows(own, self.shards))
        return dict(zip(columns, shown.T, strict=True))

    @property
    def measures(self) -> Mapping[str, bool]:
        """The names of the task's metrics, and whether more of each is better."""
        return self.task.measures

    def evaluate_initial(self, subset: Integers | None) -> dict[str, float]:
        """What the model shows that all nodes begin with; of their own data nothing is said."""
        x, local = self.backend.array(self.task.initial()[None]), self.backend.array(self.task.local_state(1))
        return {name: float(column[0]) for name, column in self.task.measure(x, local, subset).items()}

    # --- what is kept ---

    def models(self) -> Models:
        """(h, d) the honest nodes' output models, complete at worker 0, good until the next round."""
        return self._of_honest(self.array("x" if self._chosen is None else _CHOSEN[0]))

    def local_states(self) -> Models:
        """(h, q) what stayed with the honest nodes, of the round of their output; complete at worker 0."""
        return self._of_honest(self.array("local.buffers" if self._chosen is None else _CHOSEN[1]))

    def _held(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs: of this worker's nodes what `is_by_row` names."""
        chosen = {} if self._chosen is None else dict(zip(_CHOSEN, self._chosen, strict=True))
        return {**remembered(self.state), **chosen}

    @property
    def keys(self) -> list[str]:
        """The names of :meth:`arrays`."""
        return list(self._held())

    def array(self, key: str) -> NDArray[Any]:
        """One of :meth:`arrays`, complete at worker 0, good until the next call or round."""
        own: NDArray[Any] = self.backend.host(self._held()[key])
        if self.workers.size == 1 or not is_by_row(key):
            return own
        room = self.table[: self.nodes]  # free between rounds
        same = isinstance(room, np.ndarray) and (room.shape[1:], room.dtype) == (own.shape[1:], own.dtype)
        return self.workers.collect(own, self.shards, room if same and self.windows is None else None)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything a bit-exact continuation needs."""
        return {key: self.array(key) for key in self.keys}

    @property
    def nbytes(self) -> int:
        """The size of :meth:`arrays`."""
        share = self.nodes / max(1, len(self.rows))
        held = self._held().items()
        return int(sum(array.nbytes * (share if is_by_row(key) else 1) for key, array in held))

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Continue from :meth:`arrays`; of what is by row only worker 0 needs to have any."""
        for key, array in self._held().items():
            if is_by_row(key):
                mine: Any = self.workers.scatter(arrays.get(key), self.backend.host(array), self.shards)
                array[:] = mine if isinstance(array, np.ndarray) else self.backend.array(mine)
        prefix = "network."
        network = {k.removeprefix(prefix): np.array(v) for k, v in arrays.items() if k.startswith(prefix)}
        self.state = replace(self.state, round=int(arrays["round"]), network=network)
        if self.windows is not None:
            self.windows.load(network)
