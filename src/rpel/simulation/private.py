"""What a run with privacy may spend and has spent, and the gradients that keep to it.

Invariants: every refusal comes before the first round; one noise serves all nodes, and the largest ε of the
honest ones holds the target; a round whose steps would pass the target is not begun.
"""

import logging
from collections.abc import Mapping

import numpy as np

from rpel import privacy
from rpel.learning import Gradients
from rpel.privacy import Budget
from rpel.spec import Spec
from rpel.tasks import Objective

log = logging.getLogger("rpel")


def is_private(spec: Spec) -> bool:
    """Whether noise is asked for."""
    return spec.target_epsilon is not None or bool(spec.noise_multiplier)


def private(
    spec: Spec, task: Objective, sizes: Mapping[int, int] | None = None
) -> tuple[Gradients, Budget | None]:
    """The gradients of a run, and its budget where there is noise;
    the task's own and None without such fields.

    sizes: see :meth:`Objective.private`.
    """
    _check(spec)
    if spec.max_grad_norm is None:
        return task, None
    norm = spec.max_grad_norm
    plain = task.private(norm, sizes=sizes)
    counts = list(plain.counts.values())
    rates = np.array([_rate(spec, count) for count in counts])
    if spec.target_delta is None:
        return plain, None
    plain.check_disjoint()
    if weak := privacy.weak_delta(spec.target_delta, min(counts)):
        log.warning("%s", weak)
    noise, steps = spec.noise_multiplier, spec.local_steps * spec.rounds
    if noise is None:
        assert spec.target_epsilon is not None
        noise = privacy.noise_for(spec.target_epsilon, float(rates.max()), steps, spec.target_delta)
    budget = Budget(noise, norm, spec.target_delta, rates, spec.local_steps, spec.rounds, spec.target_epsilon)
    budget.check(1)
    return task.private(norm, noise, sizes=sizes), budget


def _rate(spec: Spec, examples: int) -> float:
    try:
        return privacy.rate(spec.batch_size, examples)
    except ValueError:
        raise ValueError(
            f"a node holds {examples} examples, fewer than batch_size {spec.batch_size}: take batch_size "
            f"{examples}"
        ) from None


def _check(spec: Spec) -> None:
    """ValueError, in one sentence, for fields of privacy that do not go together."""
    asked = "target_epsilon" if spec.target_epsilon is not None else "noise_multiplier"
    value = getattr(spec, asked)
    if spec.target_epsilon is not None and spec.noise_multiplier == 0:
        raise ValueError("noise_multiplier 0 keeps no target_epsilon: leave it out, and the noise is planned")
    if is_private(spec) and spec.max_grad_norm is None:
        raise ValueError(
            f"{asked} {value:g} without max_grad_norm: noise protects only gradients that are clipped; the "
            "usual is max_grad_norm 1"
        )
    if is_private(spec) and spec.target_delta is None:
        raise ValueError(
            f"{asked} {value:g} needs a target_delta, below one over a node's examples, such as 1e-5"
        )
    if spec.target_delta is not None and not is_private(spec):
        raise ValueError(
            f"target_delta {spec.target_delta:g} needs a target_epsilon or a noise_multiplier beside it"
        )
    if spec.partition == "virtual" and spec.max_grad_norm is not None:
        raise ValueError(
            "partition 'virtual' shares examples between nodes, so no node could protect its own: the "
            "nearest is 'iid'"
        )
