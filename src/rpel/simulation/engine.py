"""The simulator: the honest nodes of one worker, as a problem of Algorithm 1 with a simulated network.

Alone, a worker has all nodes. Several have a shard each: they take the local steps of their own nodes, give
the half-step models to everybody, and forge and aggregate for their own.

Three buffers live as long as the run: models and momenta (c, d) of this worker's c nodes, and the table. Its
first h rows are the half-step models of all nodes; the rows behind them hold gradients in the local step and
forged vectors in the exchange. Nothing else of that size is ever made.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import algorithm
from rpel.algorithm import Deliver, Info, Problem, remembered
from rpel.attacks import Attack
from rpel.backend.arrays import copy, empty, put, take, zeros
from rpel.backend.base import Backend, backend
from rpel.learning import Aggregation, NesterovOuter
from rpel.randomness import draws
from rpel.simulation.asynchrony import AsynchronousRounds
from rpel.simulation.build import Published, Size, build_local, check_memory, warn_of_idle_workers
from rpel.simulation.evaluate import (
    GRADIENT_EXAMPLES,
    GRADIENT_NODES,
    Evaluation,
    gradient_norms,
    spread,
    squared_norm,
)
from rpel.simulation.methods import Resolved, messages, schedule
from rpel.simulation.network import CodedNetwork, SimulatedNetwork
from rpel.simulation.private import private
from rpel.simulation.workers import ALONE, Communicator
from rpel.tasks import Objective
from rpel.types import Aggregated, Floats, Integers, Models, Received, RoundInfo
from rpel.wire import Wire

log = logging.getLogger("rpel")
_CHOSEN = "chosen", "chosen_local"
_LOOKS = 20
"""How often an evaluation can be looked into on its way."""


class Simulation:
    """Algorithm 1 among simulated nodes, a round at a time;
    :meth:`arrays` and :meth:`load` continue it bit by bit."""

    def __init__(
        self,
        run: Resolved,
        task: Objective,
        workers: Communicator = ALONE,
        arrays: Backend | None = None,
        change: Callable[[Problem], Problem] | None = None,
        optimizer: Any = None,
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        """change: from the problem of this run to the one that is played, with another part in it.

        optimizer: a torch class, or what makes one, where the Spec says that the user has brought one.
        sizes: how many examples nodes count as theirs,
        where an audit gave them others (`rpel.tasks.private`).
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
        self.shards = workers.shards(h, self.unit)
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
        outer = NesterovOuter(spec.outer_lr, spec.outer_momentum) if spec.outer == "nesterov" else None
        usual = Problem(published, deliver, line9, outer)
        self.problem = usual if change is None else change(usual)
        self.state = algorithm.init(self.problem)
        self.schedule = schedule(spec, self._ids(1)) if spec.asynchronous or spec.speeds != "equal" else None
        self.windows = self._windows(local, line9, outer, change) if spec.asynchronous else None
        self._chosen_round = 1 + (draws(spec.seed, "output", 0, self.rows, 1)[:, 0] * spec.rounds).astype(int)
        self._chosen: tuple[Models, Models] | None = None
        if spec.output == "uniform":
            self._chosen = copy(self.state.x), copy(self.state.local["buffers"])
        if isinstance(self.state.x, np.ndarray):
            rule.prepare(1 + self.messages // spec.nodes, task.d, self.state.x.dtype, victims=h * spec.rounds)

    def _deliver(self, attack: Attack, line9: Aggregation, half: Models, whole: Models, air: int) -> Deliver:
        """Lines 7-8: the network with its adversary; what is pulled is what the code of the wire can say, and
        stands in the first rows (``air``) of the whole."""
        spec = self.spec
        self.network = SimulatedNetwork(
            self.roster, self.topology, self._ids, attack, line9, whole[:air] if air else self.table,
            self.nodes, self.mine, spec.seed, spec.no_show, spec.silent,
            spec.consistent or attack.consistent,
            everyone=self._everyone, backend=self.backend, wire=self.wire,
        )  # fmt: skip
        coded = CodedNetwork(self.network, half, whole[: air + len(half)])
        return coded if air else self.network

    def _windows(self, local: Any, line9: Aggregation, outer: Any, change: Any) -> AsynchronousRounds:
        """Rounds without a barrier."""
        if change is not None:
            raise ValueError(
                "asynchronous does not go with problem=, which changes rounds that all take together"
            )
        if self.workers.size > 1 and self.unit > 1:
            raise ValueError(
                "asynchronous on several workers needs a network whose nodes are computed one by one, and "
                f"here {self.unit} are at once: the nearest is workers 1"
            )
        assert self.schedule is not None
        found = AsynchronousRounds(
            self.schedule,
            local,
            self.network,
            line9,
            outer,
            self.workers,
            self.shards,
            self.mine,
        )
        self.state = replace(self.state, network=self.state.network | found.init(self.state.x))
        return found

    @property
    def each(self) -> int:
        """How often a node may aggregate in a round."""
        return 1 if self.windows is None else self.windows.schedule.most

    @property
    def clock(self) -> Callable[[int], float] | None:
        """The virtual time at the end of a round; None where nobody asked for it."""
        if self.schedule is None:
            return None
        return self.schedule.time if self.spec.asynchronous else self.schedule.charged

    def _everyone(self, own: Models) -> Models:
        """The rows of all workers."""
        return own if self.workers.size == 1 else self.workers.rows(own, self.shards)

    def _ids(self, t: int) -> Integers:
        """(h,) the node numbers of all rows."""
        return np.arange(self.spec.nodes) if self.everybody else self.roster.honest_ids(t)

    @property
    def round(self) -> int:
        """Rounds played so far."""
        return self.state.round

    @property
    def honest(self) -> Integers:
        """(h,) the honest nodes' numbers."""
        return self.roster.honest_ids(1)

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

    def advance(self) -> Info:
        """One round of Algorithm 1; BudgetSpentError, before anything is computed,
        where privacy does not allow it."""
        if self.budget is not None:
            self.budget.check(self.round + 1)
        if self.windows is None:
            self.state, info = algorithm.step(self.problem, self.state)
        else:
            self.state, info = self.windows.step(self.state)
        self._keep_output()
        return info

    def step(self, measured: bool = False) -> RoundInfo:
        """One round, and how far the nodes are apart; measured: also how far line 9 brought them together."""
        return self.measured(self.advance(), measured)

    def played(self) -> Info:
        """The last round as far as it is known after resuming: what was received is not kept."""
        x = self.state.x
        nobody: Integers = np.empty((len(x), 0), np.int64)
        nothing = Aggregated(np.zeros(len(x), dtype=bool), np.zeros(len(x), np.int64))
        return Info(self.state.round, x, Received(x, nobody), nothing)

    def is_evaluated(self, t: int) -> bool:
        """Whether the models of round t are evaluated."""
        return t % self.spec.eval_every == 0 or t == self.spec.rounds

    def _keep_output(self) -> None:
        if self._chosen is not None:
            now = self._chosen_round == self.state.round
            for kept, value in zip(self._chosen, (self.state.x, self.state.local["buffers"]), strict=True):
                put(kept, now, take(value, now))

    def measured(self, info: Info, contraction: bool) -> RoundInfo:
        """Consensus distance, hostile counts and failures of a round; contraction:
        also the realised α and λ."""
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
        """(c,) which of this worker's models are not finite;
        none is if a number that all honest ones enter is."""
        if math.isfinite(consensus):
            return np.zeros(len(self.state.x), dtype=bool)
        return np.asarray(~self.backend.finite_rows(self.state.x))

    def _spread(self, x: Models) -> tuple[NDArray[np.float64], float]:
        """Mean and consensus distance of all honest nodes' models, of which x are this worker's."""
        own = take(x, np.isin(self.rows, self.honest)) if self.everybody else x
        return spread(own, self.workers, self.spec.nodes - self.spec.byzantine, self.backend)

    def _of_honest(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Of all workers' rows those of honest nodes."""
        return rows[self.honest] if self.everybody else rows

    # --- what it shows ---

    def evaluate(
        self, subset: NDArray[np.int64] | None, look: Callable[[float], None] | None = None
    ) -> Evaluation:
        """Accuracy and loss of every honest node on the test examples ``subset`` (None: all), and ‖∇F_H‖².

        ‖∇F_H‖² is of training examples and without noise: a private run has None.
        look: called a few times on the way, on every worker, with the share that is done.
        """
        x, local = self.state.x, self.state.local["buffers"]
        by_name = self._scores(x, local, subset, look)
        shown = by_name["accuracy"]
        rows = self.honest if self.everybody else np.arange(len(shown))
        some = rows[np.unique(np.linspace(0, len(rows) - 1, GRADIENT_NODES).astype(np.int64))]
        here = np.flatnonzero(np.isin(self.rows, some))
        examples = GRADIENT_EXAMPLES if subset is None else min(GRADIENT_EXAMPLES, len(subset))
        norm = None
        if self.budget is None:
            norm = float(np.concatenate(self.workers.each(lambda: self._norms(here, examples))).mean())
        success = by_name.pop("attack_success", None)
        metrics = {
            name.removeprefix("metric."): column
            for name, column in by_name.items()
            if name.startswith("metric.")
        }
        return Evaluation(
            shown, by_name["loss"], norm, success, metrics=metrics, better=self.measures
        )  # fmt: skip

    def _norms(self, rows: Integers, examples: int) -> Floats:
        """(k,) ‖∇F_H‖² at the models of these nodes of this worker."""
        x, local = (take(array, rows) for array in (self.state.x, self.state.local["buffers"]))
        return gradient_norms(self.task, x, local, self.backend, examples)

    def output_accuracy(
        self, subset: Integers | None = None, look: Callable[[float], None] | None = None
    ) -> Floats | None:
        """(h,) of the honest nodes' output models on these test examples (None: all);
        None where those models are the last round's."""
        return None if self._chosen is None else self._scores(*self._chosen, subset, look)["accuracy"]

    def _scores(
        self, x: Models, local: Models, subset: NDArray[np.int64] | None, look: Callable[[float], None] | None
    ) -> dict[str, Floats]:
        """(h,) each, of every honest node's model, of which x are this worker's, what `evaluate` finds."""
        found: list[Floats] = []
        names: list[str] = []
        for done, part in self._parts(1 if look is None else _LOOKS):
            if look is not None and done:
                look(done)
            columns = self.task.measure(x[part], local[part], subset, self.rows[part])
            names, found = (
                list(columns),
                [*found, np.stack(list(columns.values()), axis=1).astype(np.float64)],
            )
        shown = self._of_honest(self.workers.rows(np.concatenate(found), self.shards))
        return dict(zip(names, shown.T, strict=True))

    def _parts(self, most: int) -> Iterator[tuple[float, slice]]:
        """This worker's rows in at most so many parts of whole units, and the share before each;
        as many everywhere."""
        counts = [-(-(shard.stop - shard.start) // self.unit) for shard in self.shards]
        parts, units = max(1, min(most, *counts)), counts[self.workers.rank]
        edges = [units * p // parts * self.unit for p in range(parts + 1)]
        return ((p / parts, slice(a, b)) for p, (a, b) in enumerate(pairwise(edges)))

    @property
    def measures(self) -> Mapping[str, bool]:
        """The names of the task's metrics, and whether more of each is better."""
        return self.task.measures

    def evaluate_initial(self, subset: NDArray[np.int64] | None) -> dict[str, float]:
        """What the model shows that all nodes begin with; of their own data nothing is said."""
        x, local = self.backend.array(self.task.initial()[None]), self.backend.array(self.task.local_state(1))
        found = self.task.measure(x, local, subset)
        return {name: float(column[0]) for name, column in found.items()}

    def models(self) -> Models:
        """(h, d) the honest nodes' output models; complete at worker 0, in the table,
        which is free between rounds."""
        own = self.state.x if self._chosen is None else self._chosen[0]
        whole = self.table[: self.nodes] if self.windows is None else empty(self.nodes, own)
        return self._of_honest(self.backend.host(self._collected(own, whole)))

    def local_states(self) -> Models:
        """(h, q) what stayed with the honest nodes, of the round of their output; complete at worker 0."""
        own = self.state.local["buffers"] if self._chosen is None else self._chosen[1]
        whole = zeros((self.nodes, own.shape[1]), own)
        return self._of_honest(self.backend.host(self._collected(own, whole)))

    def _collected(self, own: Models, whole: Models) -> Models:
        if self.workers.size == 1:
            return own
        whole[self.mine] = own
        self.workers.collect(whole, self.shards)
        return whole

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything a bit-exact continuation needs;
        `checkpoint.is_by_row` says what is of this worker's nodes."""
        kept = {} if self._chosen is None else dict(zip(_CHOSEN, self._chosen, strict=True))
        return {key: self.backend.host(value) for key, value in ({**remembered(self.state), **kept}).items()}

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Continue from :meth:`arrays`."""
        self._fill(self.state.x, arrays["x"])
        for part, held in (("local", self.state.local), ("outer", self.state.outer)):
            for key, array in held.items():
                self._fill(array, arrays[f"{part}.{key}"])
        prefix = "network."
        network = {k.removeprefix(prefix): np.array(v) for k, v in arrays.items() if k.startswith(prefix)}
        self.state = replace(self.state, round=int(arrays["round"]), network=network)
        for key, kept in zip(_CHOSEN, self._chosen or (), strict=False):
            self._fill(kept, arrays[key])

    def _fill(self, array: Models, values: NDArray[Any]) -> None:
        array[:] = values if isinstance(array, np.ndarray) else self.backend.array(values)
