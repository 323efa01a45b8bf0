"""The simulator: all honest nodes as one cohort on one machine, driving Algorithm 1 with a simulated delivery.

Three buffers live as long as the run: models and momenta (h, d), and the table (2h, d). Its first h rows are the
half-step models; its last h rows hold gradients in the local step and forged vectors in the exchange. Nothing else of
that size is ever made.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.attacks import attack as attack_by_name
from rpel.kernels.compiled import finite_rows
from rpel.learning import exchange, local_step
from rpel.randomness import draws
from rpel.simulation.adversary import SimulatedNetwork
from rpel.simulation.evaluation import Evaluation, evaluate, spread
from rpel.simulation.methods import Settled, build_network, build_rule, messages
from rpel.tasks import Task
from rpel.types import Cohort, Integers, MixInfo, Models, RoundInfo


class Simulation:
    """Algorithm 1 among simulated nodes, a round at a time; :meth:`state` and :meth:`load` continue it bit by bit."""

    def __init__(self, spec: Settled, task: Task) -> None:
        self.spec, self.task = spec, task
        self.round = 0
        attack = attack_by_name(spec.attack, **spec.attack_params)
        self.rule = build_rule(spec)
        self.topology, self.roster, self.graph = build_network(spec, attack.flood)
        self.everybody = attack.trains  # under label flip the hostile nodes train too
        h = spec.nodes if self.everybody else spec.nodes - spec.byzantine
        x = np.tile(task.initial(), (h, 1))
        self.table: Models = np.empty((2 * h, task.d), dtype=x.dtype)
        self.network = SimulatedNetwork(
            self.roster, attack, self.rule, self.table, spec.seed, spec.no_show, spec.silent, spec.consistent
        )
        self.rows: Integers = np.arange(h)
        self._gradients = self.table[h:]  # gradients are spent before anything is forged
        self.cohort = Cohort(self._ids(1), x, np.zeros_like(x), task.local_state(h))
        self._chosen_round = 1 + (draws(spec.seed, "output", 0, np.arange(h), 1)[:, 0] * spec.rounds).astype(int)
        self._chosen = x.copy() if spec.output == "uniform" else None
        self.rule.prepare(1 + self.messages // spec.nodes, task.d, x.dtype, victims=h * spec.rounds)

    def _ids(self, t: int) -> Integers:
        """The node numbers of the cohort's rows in round t. Who roams takes its data and model along: they stay with
        the row."""
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

    def step(self, measured: bool = False) -> RoundInfo:
        """One round of Algorithm 1."""
        t, s, models = self.round + 1, self.spec, self.cohort.x
        c = self._local_steps(t)
        before = spread(self._honest_rows(c.x)) if measured else None
        self.network.rule = self.rule.at(round=t, rounds=s.rounds, seed=s.seed, ids=c.ids)
        mixed = self._exchange(c, t, models)
        self.round = t
        self._keep_output(t)
        return self._info(t, mixed, before)

    def _local_steps(self, t: int) -> Cohort:
        """Lines 3-6: the cohort with its half-step models, which stand in the table's first rows."""
        s, models = self.spec, self.cohort.x
        c = Cohort(self._ids(t), models, self.cohort.m, self.cohort.local)
        if "before" in self.network.attack.needs:
            self.network.before = models.copy()
        for k in range(s.local_steps):
            place = self.table[: len(models)] if k == s.local_steps - 1 else models
            c = local_step(c, t, k, self, beta=s.momentum, lr=s.rate, decay=s.weight_decay, out=place)
        return c

    def _exchange(self, c: Cohort, t: int, models: Models) -> MixInfo:
        """Lines 7-9: the cohort with what it aggregated, written to ``models``."""
        round_ = exchange(c, t, self.topology, self.network.rule, out=models)
        inbox = self.network.deliver(next(round_))
        try:
            round_.send(inbox)
        except StopIteration as end:
            self.cohort, mixed = end.value
        info: MixInfo = mixed
        return info

    def gradient(self, x: Models, local: Models, ids: Integers, t: int, k: int) -> tuple[Models, Models]:
        """The task's gradients, written to the one buffer that is kept for them. Data stay with the row, not the id."""
        return self.task.gradient(x, local, self.rows, t, k, out=self._gradients[: len(x)])

    def _honest_rows(self, x: Models) -> Models:
        return x[self.honest] if self.everybody else x

    def _keep_output(self, t: int) -> None:
        if self._chosen is not None:
            now = self._chosen_round == t
            self._chosen[now] = self.cohort.x[now]

    def _info(self, t: int, mixed: MixInfo, before: Any) -> RoundInfo:
        mean, consensus = spread(self._honest_rows(self.cohort.x))
        alpha = lam = None
        if before is not None and before[1] > 0:
            alpha = consensus / before[1]
            lam = float(np.square(mean - before[0]).sum()) / before[1]
        hostile = self.network.hostile[self.honest] if self.everybody else self.network.hostile
        short = mixed.degraded[self.honest] if self.everybody else mixed.degraded
        diverged = int((~finite_rows(self._honest_rows(self.cohort.x))).sum())
        return RoundInfo(t, hostile, int(short.sum()), self.messages, consensus, diverged, alpha, lam)

    def evaluate(self, subset: NDArray[np.int64] | None) -> Evaluation:
        """Accuracy and loss of every honest node on the test examples ``subset`` (None: all), and ‖∇F_H‖²."""
        rows = self.honest if self.everybody else slice(None)
        return evaluate(self.task, self.cohort.x[rows], self.cohort.local[rows], subset)

    def evaluate_initial(self, subset: NDArray[np.int64] | None) -> float:
        """The accuracy of the model that all nodes begin with; before the first round."""
        accuracy, _ = self.task.evaluate(self.cohort.x[:1], self.cohort.local[:1], subset)
        return float(accuracy[0])

    def models(self) -> Models:
        """(h, d) the honest nodes' output models."""
        return self._honest_rows(self.cohort.x if self._chosen is None else self._chosen)

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything a bit-exact continuation needs, as arrays."""
        arrays = {"round": np.array(self.round), "x": self.cohort.x, "m": self.cohort.m, "local": self.cohort.local}
        if self._chosen is not None:
            arrays["chosen"] = self._chosen
        arrays |= {f"attack.{key}": np.asarray(value) for key, value in self.network.state.items()}
        return arrays

    def load(self, state: dict[str, NDArray[Any]]) -> None:
        """Continue from a :meth:`state`."""
        self.round = int(state["round"])
        self.cohort.x[:], self.cohort.m[:] = state["x"], state["m"]
        self.cohort = Cohort(self._ids(self.round + 1), self.cohort.x, self.cohort.m, np.array(state["local"]))
        if self._chosen is not None:
            self._chosen[:] = state["chosen"]
        prefix = "attack."
        self.network.state = {k.removeprefix(prefix): np.array(v) for k, v in state.items() if k.startswith(prefix)}
