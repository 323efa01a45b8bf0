"""The simulator: the honest nodes of one worker as its cohort, driving Algorithm 1 with a simulated delivery.

Alone, a worker has all nodes. Several have a shard each: they take the local steps of their own nodes, give the
half-step models to everybody, and forge and aggregate for their own.

Three buffers live as long as the run: models and momenta (c, d) of this worker's c nodes, and the table. Its first h
rows are the half-step models of all nodes; the rows behind them hold gradients in the local step and forged vectors in
the exchange. Nothing else of that size is ever made.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import attack as attack_by_name
from rpel.kernels.compiled import finite_rows
from rpel.learning import exchange, local_step
from rpel.processes import free_memory
from rpel.randomness import draws
from rpel.simulation.adversary import SimulatedNetwork
from rpel.simulation.distributed import ALONE, Workers
from rpel.simulation.evaluation import GRADIENT_NODES, Evaluation, evaluate, gradient_norms, spread
from rpel.simulation.methods import Settled, build_network, build_rule, messages
from rpel.tasks import Task
from rpel.text import human_bytes
from rpel.types import Cohort, Floats, Integers, MixInfo, Models, RoundInfo

_LOOKS = 20
"""How often an evaluation can be looked into on its way."""


class Simulation:
    """Algorithm 1 among simulated nodes, a round at a time; :meth:`state` and :meth:`load` continue it bit by bit."""

    def __init__(self, spec: Settled, task: Task, workers: Workers = ALONE) -> None:
        self.spec, self.task, self.workers = spec, task, workers
        self.round = 0
        attack = attack_by_name(spec.attack, **spec.attack_params)
        self.rule = build_rule(spec)
        self.topology, self.roster, self.graph = build_network(spec, attack.flood)
        self.everybody = attack.trains  # under label flip the hostile nodes train too
        h = spec.nodes if self.everybody else spec.nodes - spec.byzantine
        self.unit: int = getattr(task, "unit", 1)
        self.shards = workers.shards(h, self.unit)
        self.pieces = workers.pieces(self.shards, self.unit)
        self.mine = self.shards[workers.rank]
        self.rows: Integers = np.arange(h)[self.mine]
        self._stepping = self.rows
        initial = task.initial()
        self.network = SimulatedNetwork(
            self.roster, self.topology, self._ids, attack, self.rule, initial[:0], h, spec.seed, spec.no_show,
            spec.silent, spec.consistent,
        )  # fmt: skip
        behind = len(self.rows) if self.everybody or self.network.victim_by_victim else h
        kept = 2 + (spec.output == "uniform")
        self._check_memory((h + behind + kept * len(self.rows)) * initial.nbytes)
        x = np.tile(initial, (len(self.rows), 1))
        self.table: Models = np.empty((h + behind, task.d), x.dtype)
        self.network.table = self.table
        self._gradients = self.table[h:]  # gradients are spent before anything is forged
        self.cohort = Cohort(self._ids(1)[self.mine], x, np.zeros_like(x), task.local_state(len(x)))
        self._chosen_round = 1 + (draws(spec.seed, "output", 0, self.rows, 1)[:, 0] * spec.rounds).astype(int)
        self._chosen = (x.copy(), self.cohort.local.copy()) if spec.output == "uniform" else None
        self.rule.prepare(1 + self.messages // spec.nodes, task.d, x.dtype, victims=h * spec.rounds)

    def _check_memory(self, needed: int) -> None:
        """ValueError if the workers on this machine need more than it has."""
        free, here = free_memory(), self.workers.here
        if free is not None and needed * here > free:
            each = f" for each of {here} workers" if here > 1 else ""
            raise ValueError(
                f"{self.network.models:,} models of {self.task.d:,} numbers need {human_bytes(needed)}{each}, and "
                f"{human_bytes(free)} are free here: fewer nodes, a smaller model, or workers on more machines"
            )

    def _ids(self, t: int) -> Integers:
        """(h,) the node numbers of all rows in round t. Who roams takes its data and model along: they stay with the
        row."""
        if not self.everybody:
            return self.roster.honest_ids(t)
        ids, trained, now = np.empty(self.spec.nodes, np.int64), self.roster.hostile(1), self.roster.hostile(t)
        ids[~trained], ids[trained] = np.flatnonzero(~now), np.flatnonzero(now)
        return ids

    @property
    def honest(self) -> Integers:
        """(h,) the honest nodes' numbers (those of round 1, when attackers roam)."""
        return self.roster.honest_ids(1)

    @property
    def messages(self) -> int:
        """Models sent per round, hostile nodes counted as if they pulled."""
        return messages(self.spec.method, self.spec.nodes, self.spec.pull)

    @property
    def bytes(self) -> int:
        return self.messages * 4 * self.task.d

    # --- a round ---

    def step(self, measured: bool = False) -> RoundInfo:
        """One round of Algorithm 1."""
        t, s, models = self.round + 1, self.spec, self.cohort.x
        c = self._local_steps(t)
        before = self._spread(c.x) if measured else None
        self.network.rule = self.rule.at(round=t, rounds=s.rounds, seed=s.seed, ids=self._ids(t))
        mixed = self._exchange(c, t, models)
        self.round = t
        self._keep_output(t)
        return self._info(t, mixed, before)

    def _local_steps(self, t: int) -> Cohort:
        """Lines 3-6: the cohort with its half-step models; everybody's stand in the table's first rows."""
        if "before" in self.network.attack.needs:
            self.network.before = self.workers.rows(self.cohort.x, self.shards)
        ids, half, c = self._ids(t)[self.mine], self.table[: self.network.models], self.cohort
        local = np.empty_like(c.local)
        with self.workers.gathering(half, self.pieces) as ready:
            for piece in self.pieces[self.workers.rank]:
                own = slice(piece.start - self.mine.start, piece.stop - self.mine.start)
                part = Cohort(ids[own], c.x[own], c.m[own], c.local[own])
                local[own] = self._stepped(part, t, half[piece], self.rows[own])
                ready(piece)
        return Cohort(ids, half[self.mine], c.m, local)

    def _stepped(self, c: Cohort, t: int, half: Models, rows: Integers) -> Models:
        """Half-step models into their place, momenta in theirs; returns the new local state."""
        s, models = self.spec, c.x
        self._stepping = rows
        for k in range(s.local_steps if len(rows) else 0):
            place = half if k == s.local_steps - 1 else models
            c = local_step(c, t, k, self, beta=s.momentum, lr=s.rate, decay=s.weight_decay, out=place)
        return c.local

    def _exchange(self, c: Cohort, t: int, models: Models) -> MixInfo:
        """Lines 7-9: the cohort with what it aggregated, written to ``models``."""
        round_ = exchange(c, t, self.topology, self.network.rule.among(self.mine), out=models)
        inbox = self.network.deliver(next(round_), self.mine)
        try:
            round_.send(inbox)
        except StopIteration as end:
            self.cohort, mixed = end.value
        info: MixInfo = mixed
        return info

    def gradient(self, x: Models, local: Models, ids: Integers, t: int, k: int) -> tuple[Models, Models]:
        """The task's gradients, written to the one buffer that is kept for them. Data stay with the row, not the id."""
        return self.task.gradient(x, local, self._stepping, t, k, out=self._gradients[: len(x)])

    def _spread(self, x: Models) -> tuple[NDArray[np.float64], float]:
        """Mean and consensus distance of all honest nodes' models, of which x are this worker's."""
        own = x[np.isin(self.rows, self.honest)] if self.everybody else x
        return spread(own, self.workers, self.spec.nodes - self.spec.byzantine)

    def _keep_output(self, t: int) -> None:
        if self._chosen is not None:
            now = self._chosen_round == t
            for kept, value in zip(self._chosen, (self.cohort.x, self.cohort.local), strict=True):
                kept[now] = value[now]

    def _info(self, t: int, mixed: MixInfo, before: Any) -> RoundInfo:
        mean, consensus = self._spread(self.cohort.x)
        alpha = lam = None
        if before is not None and before[1] > 0:
            alpha = consensus / before[1]
            lam = float(np.square(mean - before[0]).sum()) / before[1]
        own = np.stack([self.network.hostile, mixed.degraded, ~finite_rows(self.cohort.x)], axis=1)
        found = self._of_honest(self.workers.rows(own.astype(np.int32), self.shards))
        _, degraded, diverged = found.sum(axis=0).tolist()
        return RoundInfo(t, found[:, 0].astype(np.int64), degraded, self.messages, consensus, diverged, alpha, lam)

    def _of_honest(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Of all workers' rows those of honest nodes."""
        return rows[self.honest] if self.everybody else rows

    # --- what it shows ---

    def evaluate(self, subset: NDArray[np.int64] | None, look: Callable[[float], None] | None = None) -> Evaluation:
        """Accuracy and loss of every honest node on the test examples ``subset`` (None: all), and ‖∇F_H‖².

        look: called a few times on the way, on every worker, with the share that is done.
        """
        x, local = self.cohort.x, self.cohort.local
        shown = self._scores(x, local, subset, look)
        rows = self.honest if self.everybody else np.arange(len(shown))
        some = rows[np.unique(np.linspace(0, len(rows) - 1, GRADIENT_NODES).astype(np.int64))]
        here = np.flatnonzero(np.isin(self.rows, some))
        norms = np.concatenate(self.workers.each(lambda: gradient_norms(self.task, x[here], local[here])))
        success = shown[:, 2] if shown.shape[1] > 2 else None
        return Evaluation(shown[:, 0], shown[:, 1], float(norms.mean()), success)

    def output_accuracy(self, look: Callable[[float], None] | None = None) -> Floats | None:
        """(h,) of the honest nodes' output models on all test examples; None where those are the last round's."""
        return None if self._chosen is None else self._scores(*self._chosen, None, look)[:, 0]

    def _scores(
        self, x: Models, local: Models, subset: NDArray[np.int64] | None, look: Callable[[float], None] | None
    ) -> Floats:
        """(h, …) of every honest node's model, of which x are this worker's, what `evaluate` finds."""
        found: list[Floats] = []
        for done, part in self._parts(1 if look is None else _LOOKS):
            if look is not None and done:
                look(done)
            found.append(evaluate(self.task, x[part], local[part], subset))
        return np.asarray(self._of_honest(self.workers.rows(np.concatenate(found), self.shards)))

    def _parts(self, most: int) -> Iterator[tuple[float, slice]]:
        """This worker's rows in at most so many parts of whole units, and the share before each; as many everywhere."""
        counts = [-(-(shard.stop - shard.start) // self.unit) for shard in self.shards]
        parts, units = max(1, min(most, *counts)), counts[self.workers.rank]
        edges = [units * p // parts * self.unit for p in range(parts + 1)]
        return ((p / parts, slice(a, b)) for p, (a, b) in enumerate(pairwise(edges)))

    def evaluate_initial(self, subset: NDArray[np.int64] | None) -> float:
        """The accuracy of the model that all nodes begin with."""
        accuracy, _ = self.task.evaluate(self.task.initial()[None], self.task.local_state(1), subset)
        return float(accuracy[0])

    def models(self) -> Models:
        """(h, d) the honest nodes' output models; complete at worker 0, in the table, which is free between rounds."""
        own = self.cohort.x if self._chosen is None else self._chosen[0]
        return self._of_honest(self._collected(own, self.table[: self.network.models]))

    def local_states(self) -> Models:
        """(h, q) what stayed with the honest nodes, of the round of their output; complete at worker 0."""
        own = self.cohort.local if self._chosen is None else self._chosen[1]
        return self._of_honest(self._collected(own, np.empty((self.network.models, own.shape[1]), own.dtype)))

    def _collected(self, own: Models, whole: Models) -> Models:
        if self.workers.size == 1:
            return own
        whole[self.mine] = own
        self.workers.collect(whole, self.shards)
        return whole

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything a bit-exact continuation needs, as arrays; ``BY_ROW`` names those of this worker's nodes alone."""
        arrays = {"round": np.array(self.round), "x": self.cohort.x, "m": self.cohort.m, "local": self.cohort.local}
        if self._chosen is not None:
            arrays["chosen"], arrays["chosen_local"] = self._chosen
        arrays |= {f"attack.{key}": np.asarray(value) for key, value in self.network.state.items()}
        return arrays

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from a :meth:`state`."""
        self.round = int(state["round"])
        self.cohort.x[:], self.cohort.m[:] = state["x"], state["m"]
        ids = self._ids(self.round + 1)[self.mine]
        self.cohort = Cohort(ids, self.cohort.x, self.cohort.m, np.array(state["local"]))
        if self._chosen is not None:
            self._chosen[0][:], self._chosen[1][:] = state["chosen"], state["chosen_local"]
        prefix = "attack."
        self.network.state = {k.removeprefix(prefix): np.array(v) for k, v in state.items() if k.startswith(prefix)}
