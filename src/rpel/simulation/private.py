"""What a run with privacy may spend and has spent, and the gradients that keep to it.

Invariants: every refusal comes before the first round; one noise serves all nodes, and the largest ε of the honest ones
holds the target; a round whose steps would pass the target is not begun.
"""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rpel import privacy
from rpel.errors import BudgetSpentError
from rpel.learning import Gradients
from rpel.simulation.methods import ResolvedSpec
from rpel.tasks import Classification, Objective
from rpel.tasks.private import PrivateGradients
from rpel.types import Floats

log = logging.getLogger("rpel")


@dataclass(frozen=True)
class Budget:
    """ε of the honest nodes, round by round. rates: (h,) with which each draws its examples; steps: per round."""

    noise_multiplier: float
    max_grad_norm: float
    delta: float
    rates: Floats
    steps: int
    rounds: int
    target: float | None = None

    @cached_property
    def whole(self) -> tuple[float, float]:
        """The largest and the median ε of the nodes after the last round."""
        return privacy.largest_and_median(self.noise_multiplier, self.rates, self.steps * self.rounds, self.delta)

    @cached_property
    def affordable(self) -> int:
        """How many rounds the target allows."""
        if self.target is None or self.whole[0] <= self.target:
            return self.rounds
        steps, worst = self.steps * self.rounds, float(self.rates.max())
        return privacy.steps_within(self.target, self.noise_multiplier, worst, steps, self.delta) // self.steps

    def after(self, t: int) -> float:
        """An upper bound of the largest ε after round t; in the last round what the certificate says."""
        worst, steps = float(self.rates.max()), t * self.steps
        quick = math.inf if t == self.rounds else privacy.epsilon_quickly(
            self.noise_multiplier, worst, steps, self.delta
        )  # fmt: skip
        return min(quick, self.whole[0])

    def check(self, t: int) -> None:
        """BudgetSpentError where round t would pass the target."""
        if t > self.affordable:
            raise BudgetSpentError(
                f"stopped before round {t} of {self.rounds}, which would pass target_epsilon {self.target:g} (delta "
                f"{self.delta:g}) with noise_multiplier {self.noise_multiplier:g}: take more noise or {t - 1} rounds"
            )

    def statement(self) -> dict[str, Any]:
        """For the certificate."""
        largest, median = self.whole
        return {
            "epsilon": largest, "epsilon_median": median, "delta": self.delta, "relation": privacy.RELATION,
            "accountant": privacy.ACCOUNTANT, "version": privacy.version(), "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm, "sampling": "poisson", "steps": self.steps * self.rounds,
        }  # fmt: skip


def is_private(spec: ResolvedSpec) -> bool:
    """Whether noise is asked for."""
    return spec.target_epsilon is not None or bool(spec.noise_multiplier)


def private(spec: ResolvedSpec, task: Objective) -> tuple[Gradients, Budget | None]:
    """The gradients of a run, and its budget where there is noise; the task's own and None without such fields."""
    _check(spec)
    if spec.max_grad_norm is None and spec.sampling != "poisson":
        return task, None
    if not isinstance(task, Classification):
        raise ValueError("clipped gradients and Poisson batches need a task with examples")
    norm = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
    plain = PrivateGradients(task, norm)
    held = list(task.examples.held.values())
    rates = np.array([_rate(spec, len(own)) for own in held])
    if spec.target_delta is None:
        return plain, None
    _check_data(task)
    if weak := privacy.weak_delta(spec.target_delta, min(map(len, held))):
        log.warning("%s", weak)
    noise, steps = spec.noise_multiplier, spec.local_steps * spec.rounds
    if noise is None:
        assert spec.target_epsilon is not None
        noise = privacy.noise_for(spec.target_epsilon, float(rates.max()), steps, spec.target_delta)
    budget = Budget(noise, norm, spec.target_delta, rates, spec.local_steps, spec.rounds, spec.target_epsilon)
    budget.check(1)
    return PrivateGradients(task, norm, noise), budget


def _rate(spec: ResolvedSpec, examples: int) -> float:
    try:
        return privacy.rate(spec.batch_size, examples)
    except ValueError:
        raise ValueError(
            f"a node holds {examples} examples, fewer than batch_size {spec.batch_size}: take batch_size {examples}"
        ) from None


def _check(spec: ResolvedSpec) -> None:
    """ValueError, in one sentence, for fields of privacy that do not go together."""
    asked = "target_epsilon" if spec.target_epsilon is not None else "noise_multiplier"
    value = getattr(spec, asked)
    if spec.target_epsilon is not None and spec.noise_multiplier == 0:
        raise ValueError("noise_multiplier 0 keeps no target_epsilon: leave it out, and the noise is planned")
    if is_private(spec) and spec.max_grad_norm is None:
        raise ValueError(
            f"{asked} {value:g} without max_grad_norm: noise protects only gradients that are clipped; the usual is "
            "max_grad_norm 1"
        )
    if is_private(spec) and spec.target_delta is None:
        raise ValueError(f"{asked} {value:g} needs a target_delta, below one over a node's examples, such as 1e-5")
    if spec.target_delta is not None and not is_private(spec):
        raise ValueError(f"target_delta {spec.target_delta:g} needs a target_epsilon or a noise_multiplier beside it")
    if spec.sampling == "replacement" and spec.max_grad_norm is not None:
        raise ValueError(
            "sampling 'replacement' has no accountant, since an example may be drawn twice: with max_grad_norm, "
            "noise_multiplier or target_epsilon the only one is 'poisson'"
        )
    if spec.partition == "virtual" and (spec.max_grad_norm is not None or spec.sampling == "poisson"):
        raise ValueError(
            "partition 'virtual' shares examples between nodes, so no node could protect its own: the nearest is 'iid'"
        )


def _check_data(task: Classification) -> None:
    """ValueError where examples are held twice, or shown in the evaluation."""
    held, dataset = np.concatenate(list(task.examples.held.values())), task.examples.dataset
    if len(np.unique(held)) < len(held):
        raise ValueError("an example is held by several nodes, so none of them could protect it: give each its own")
    same = dataset.train_x is dataset.test_x
    if isinstance(dataset.train_x, np.ndarray) and isinstance(dataset.test_x, np.ndarray):
        same = same or np.array_equal(dataset.train_x, dataset.test_x)
    if same:
        raise ValueError("the test examples are the training examples, which accuracies would tell of: give others")
