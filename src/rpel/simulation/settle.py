"""From what was asked to what is run: pull and b_hat planned, names checked, and the hash that names the run.

Law: equal hashes mean equal results. Every field that can change a file of the run is in the hash, planned values as
planned, with the checksums of the data; paths, threads, device and how often one saves are not.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rpel import planning, theory
from rpel.config.spec import Spec

if TYPE_CHECKING:
    from rpel.simulation.methods import Method

_OTHER_RULES = ("rpel", "all-to-all")  # the methods that take another rule than their own


@dataclass(frozen=True)
class Settled:
    """A Spec with nothing left open, and the plan it follows."""

    spec: Spec
    plan: planning.Plan

    @property
    def pull(self) -> int:
        return self.plan.pull

    @property
    def b_hat(self) -> int:
        return self.plan.b_hat


def settle(spec: Spec) -> Settled:
    """Plan what was left out and check that the parts exist and fit together.

    >>> settle(Spec(nodes=30, byzantine=6, pull=15, rounds=200)).b_hat
    6
    >>> settle(Spec(attack="alei"))
    Traceback (most recent call last):
    ValueError: there is no attack 'alei'; the nearest is 'alie'
    """
    from rpel.attacks import attack  # numba comes with them
    from rpel.simulation.methods import METHODS

    found = attack(spec.attack, **spec.attack_params)
    method = METHODS[spec.method]
    plan = _plan(spec, method)
    if spec.rule not in (None, method.rule) and spec.method not in _OTHER_RULES:
        raise ValueError(
            f"rule {spec.rule!r} goes only with method rpel or all-to-all: {spec.method} has {method.rule!r}"
        )
    rule = spec.rule or method.rule
    if not method.on_graph:
        _check_rule(rule, plan)
    return Settled(spec.but(pull=plan.pull, b_hat=plan.b_hat, rule=rule, attack=found.name), plan)


def _plan(spec: Spec, method: "Method") -> planning.Plan:
    """The plan for the given pull and b_hat, or the best for what is left out; baselines get RPEL's budget."""
    if method.peers == "everybody":
        spec = spec.but(pull=spec.nodes - 1, b_hat=spec.byzantine)
    elif method.on_graph and spec.placement == "adversarial" and spec.b_hat is None:
        spec = spec.but(
            b_hat=spec.byzantine
        )  # whoever chooses his place may sit beside one victim with all his friends
    pull = spec.pull
    if pull is None and spec.b_hat is not None:
        pull = min(max(_planned(spec, None).pull, 2 * spec.b_hat), spec.nodes - 1)
    plan = _planned(spec, pull)
    if spec.b_hat is not None:
        plan = _with_b_hat(plan, spec.b_hat)
    if 2 * plan.b_hat >= plan.pull + 1:
        raise ValueError(_no_minority(spec, plan))
    return plan


def _planned(spec: Spec, pull: int | None) -> planning.Plan:
    return planning.plan(
        nodes=spec.nodes,
        byzantine=spec.byzantine,
        rounds=spec.rounds,
        pull=pull,
        confidence=spec.confidence,
        silent=spec.silent,
    )


def _with_b_hat(plan: planning.Plan, b_hat: int) -> planning.Plan:
    """The same pull with a b_hat that somebody chose, and the probability with which that one holds."""
    if b_hat == plan.b_hat:
        return plan
    cdf = planning.max_byzantine_cdf(plan.nodes, plan.byzantine, plan.pull, plan.rounds)
    reduction = theory.reduction(plan.nodes, plan.byzantine, plan.pull, b_hat)
    return replace(
        plan,
        b_hat=b_hat,
        fraction=b_hat / (plan.pull + 1),
        probability=float(cdf[b_hat]) if b_hat < len(cdf) else 1.0,
        feasible=2 * b_hat < plan.pull + 1,
        kappa=reduction.kappa if reduction else None,
        alpha=reduction.alpha if reduction else None,
        lambda_=reduction.lambda_ if reduction else None,
        theorem_applies=reduction is not None and reduction.contracts,
    )


def _no_minority(spec: Spec, plan: planning.Plan) -> str:
    half = plan.pull // 2
    cdf = planning.max_byzantine_cdf(plan.nodes, plan.byzantine, plan.pull, plan.rounds)
    holds = float(cdf[half]) if half < len(cdf) else 1.0
    why = f"b_hat {plan.b_hat} is not a minority of pull + 1 = {plan.pull + 1}"
    if spec.b_hat is None:
        needed = f"pull {plan.pull} needs b_hat {plan.b_hat} at confidence {plan.confidence:g}"
        why = f"{needed}, which is not a minority of {plan.pull + 1}"
    return f"{why}: best_below_half is b_hat {half}, which holds with probability {holds:.6g}"


def _check_rule(name: str, plan: planning.Plan) -> None:
    from rpel.aggregation import rule
    from rpel.aggregation.mixing import Mixer

    found = rule(name, f=plan.b_hat)
    if found.on_graph:
        raise ValueError(f"rule {name!r} works on fixed graphs only: the nearest is 'nnm+trimmed_mean'")
    if isinstance(found, Mixer):
        raise ValueError(f"rule {name!r} mixes but does not aggregate: the nearest is '{name}+trimmed_mean'")
    least = found.least(plan.b_hat)
    if plan.pull + 1 < least:
        raise ValueError(f"rule {name!r} needs {least} models for b_hat {plan.b_hat}: the nearest pull is {least - 1}")


def spec_hash(spec: Spec, data: Mapping[str, str], own: Mapping[str, str] | None = None) -> str:
    """Twelve hexadecimal digits that name this run: its meaning, its data, and the user's own objects if there are any.

    >>> a, b = Spec(threads=1, out="here"), Spec(threads=2, out="there")
    >>> spec_hash(a, {}) == spec_hash(b, {}), spec_hash(a, {}) == spec_hash(a.but(seed=1), {})
    (True, False)
    """
    settled = settle(spec).spec
    meaning = settled.identity()
    if isinstance(settled.lr, float):
        meaning["lr"] = [[settled.rounds, settled.lr]]
    content = json.dumps([meaning, dict(data), dict(own or {})], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:12]
