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
from rpel.spec import Partition, Privacy, Spec
from rpel.tasks import Objective

log = logging.getLogger("rpel")


def private(
    spec: Spec, task: Objective, sizes: Mapping[int, int] | None = None
) -> tuple[Gradients, Budget | None]:
    """Return the gradients of a run, and its privacy budget where there is noise.

    Without privacy these are the task's own gradients and None.

    sizes: see :meth:`Objective.private`.
    """
    asked = Privacy.of(spec.privacy)
    if asked.clip is None:
        return task, None
    if Partition.of(spec.partition).name == "virtual":
        raise ValueError(
            "partition 'virtual' shares examples between nodes, so no node could protect its own: the "
            "nearest is 'iid'"
        )
    norm, delta, noise = asked.clip, asked.delta, asked.noise
    plain = task.private(norm, sizes=sizes)
    counts = list(plain.counts.values())
    rates = np.array([_rate(spec, count) for count in counts])
    if delta is None:
        return plain, None
    plain.check_disjoint()
    if weak := privacy.weak_delta(delta, min(counts)):
        log.warning("%s", weak)
    if noise is None:
        assert asked.epsilon is not None
        steps = spec.local_steps * spec.rounds
        noise = privacy.noise_for(asked.epsilon, float(rates.max()), steps, delta)
    budget = Budget(noise, norm, delta, rates, spec.local_steps, spec.rounds, asked.epsilon)
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
