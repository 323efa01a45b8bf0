"""Private local steps of a real peer, and what they have spent.

Invariants:
- batches and noise come from the operating system, never from the run's seed, which all members know;
- a round counts as spent when it has begun, whether or not a step was taken in it. So nothing about it has to
  be kept: a restart, or an emptied state folder, spends no less. Only the operator can say that rounds before
  this peer's first one were none of its own (`unspent_rounds`);
- what members.toml asks of everybody is a promise among honest members: nobody can check another one's noise.
"""

import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, Philox

from rpel import privacy
from rpel.peer.config.settings import Config
from rpel.privacy import Budget
from rpel.tasks import Objective
from rpel.tasks.private import PrivateGradients

log = logging.getLogger("rpel")

ASKED = ("target_epsilon", "target_delta")
"""What [hyperparameters] of members.toml may ask of every member:
an epsilon after the last round at most so large."""


class Private(NamedTuple):
    """The gradients of private local steps, and their budget."""

    gradients: PrivateGradients
    budget: Budget


def from_os(purpose: str, t: int, k: int, node: int) -> Generator:
    """Return a generator with a key from the operating system.

    Nobody can repeat it, this peer included.
    """
    return Generator(Philox(key=secrets.randbits(128)))


def asked_of(table: Mapping[str, Any]) -> dict[str, float]:
    """What a table [hyperparameters] asks of every member, checked.

    >>> asked_of({"lr": 0.5}), asked_of({"target_epsilon": 8, "target_delta": 1e-5})
    ({}, {'target_epsilon': 8.0, 'target_delta': 1e-05})
    """
    given = {key: table[key] for key in ASKED if key in table}
    if len(given) == 1:
        raise ValueError(
            f"hyper-parameter {next(iter(given))} alone: target_epsilon and target_delta go together"
        )
    for key, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < (math.inf if key == "target_epsilon" else 1):
            usual = (
                "a positive number such as 8" if key == "target_epsilon" else "a number below 1 such as 1e-5"
            )
            raise ValueError(f"hyper-parameter {key} {value!r} is not valid: it takes {usual}")
    return {key: float(value) for key, value in given.items()}


def private(
    config: Config, table: Mapping[str, Any], task: Objective, index: int, rounds: int, local_steps: int
) -> Private | None:
    """What peer.toml says of privacy, for member ``index``; None where it says nothing.

    table: [hyperparameters] of members.toml. ValueError, one sentence, for what does not go together, or is
    less than members.toml asks.
    """
    asked = asked_of(table)
    if config.noise_multiplier is None and config.target_epsilon is None:
        _check_silent(config, asked)
        return None
    norm, delta = config.max_grad_norm, config.target_delta or asked.get("target_delta")
    if norm is None:
        raise ValueError(
            "peer.toml asks for noise without max_grad_norm, against which it is measured: the usual is 1"
        )
    if delta is None:
        raise ValueError(
            "peer.toml asks for noise without target_delta: one far below one over your examples"
        )
    clipped = task.private(norm)
    examples = clipped.counts[index]
    rate, first = privacy.rate(clipped.batch_size, examples), config.unspent_rounds or 0
    if weak := privacy.weak_delta(delta, examples):
        log.warning("%s", weak)
    steps, noise = local_steps * max(0, rounds - first), config.noise_multiplier
    if noise is None:
        assert config.target_epsilon is not None
        noise = privacy.noise_for(config.target_epsilon, rate, steps, delta)
    if asked and privacy.epsilon(noise, rate, steps, asked["target_delta"]) > asked["target_epsilon"]:
        enough = privacy.noise_for(asked["target_epsilon"], rate, steps, asked["target_delta"])
        raise ValueError(
            f"members.toml asks every member for an epsilon of at most {asked['target_epsilon']:g}, which "
            f"noise_multiplier {noise:g} does not keep over {rounds} rounds: the nearest is {enough:g}"
        )
    budget = Budget(noise, norm, delta, np.array([rate]), local_steps, rounds, config.target_epsilon, first)
    log.info(
        "private: noise multiplier %g, epsilon %.4g (delta %g) after round %d",
        noise,
        budget.whole[0],
        delta,
        rounds,
    )
    return Private(task.private(norm, noise, draw=from_os), budget)


def _check_silent(config: Config, asked: Mapping[str, float]) -> None:
    """Raise ValueError where noise is missing although members.toml or other keys of peer.toml require it."""
    if asked:
        raise ValueError(
            f"members.toml asks every member for an epsilon of at most {asked['target_epsilon']:g}: put "
            f"max_grad_norm = 1.0 and target_epsilon = {asked['target_epsilon']:g} into peer.toml"
        )
    keys = [
        key for key in ("max_grad_norm", "target_delta", "unspent_rounds") if getattr(config, key) is not None
    ]
    if keys:
        raise ValueError(
            f"peer.toml has {keys[0]}, which goes with noise_multiplier or target_epsilon: add one"
        )
