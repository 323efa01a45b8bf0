"""Resolve a Spec for its method.

Every method is one topology and one rule; nothing else in the round changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rpel import planning, theory
from rpel.attacks import Attack
from rpel.attacks import attack as attack_by_name
from rpel.graphs import Graph, honest_first, most_central, random_graph
from rpel.record import OWN
from rpel.rules import Rule
from rpel.rules import rule as rule_by_name
from rpel.simulation.asynchrony import Schedule, slowness
from rpel.simulation.network import Roster
from rpel.spec import TO_ALL, Method, Request, Spec, Timing
from rpel.topology import AllToAll, FixedGraph, Pull, Push, RandomRegular
from rpel.types import ROBUST_RULE, Guarantee, Integers, Topology


@dataclass(frozen=True)
class Baseline:
    """How peers are chosen (pull, everybody, graph, push, regular) and the rule that goes with it."""

    peers: str
    rule: str

    @property
    def on_graph(self) -> bool:
        return self.peers == "graph"

    @property
    def guarantee(self) -> Guarantee:
        """What the plan's probability is worth under this way of choosing peers."""
        return {"graph": Guarantee.NONE, "push": Guarantee.VOID}.get(self.peers, Guarantee.PLAN)


METHODS = {
    "rpel": Baseline("pull", ROBUST_RULE),
    "all-to-all": Baseline("everybody", ROBUST_RULE),
    "nna": Baseline("everybody", "monna"),
    "cs-plus": Baseline("graph", "cs_plus"),
    "gts": Baseline("graph", "gts"),
    "gts-exact": Baseline("graph", "gts_exact"),
    "clipped-gossip": Baseline("graph", "clipped_gossip_adaptive"),
    "clipped-gossip-oracle": Baseline("graph", "clipped_gossip_oracle"),
    "rtc": Baseline("graph", "rtc"),
    "ios": Baseline("graph", "ios"),
    "balance": Baseline("graph", "balance"),
    "d-psgd": Baseline("graph", "gossip"),
    "el-local": Baseline("push", "mean"),
    "el-oracle": Baseline("regular", "mean"),
}
"""Every system that RPEL is compared with, by name."""


def baseline(spec: Spec) -> Baseline:
    """Return what the method of a Spec is."""
    return METHODS[Method.of(spec.method).name]


def messages(method: str, nodes: int, pull: int) -> int:
    """Models sent per round from one node to another, hostile nodes counted as if they pulled.

    >>> messages("rpel", 30, 15), messages("cs-plus", 30, 15), messages("all-to-all", 30, 29)
    (450, 450, 870)
    """
    per_round: dict[str, Callable[[], int]] = {
        "everybody": lambda: nodes * (nodes - 1),
        "graph": lambda: 2 * (nodes * pull // 2),
    }
    return per_round.get(METHODS[Method.of(method).name].peers, lambda: nodes * pull)()


_OTHER_RULES = ("rpel", "all-to-all")  # the methods that take another rule than their own


class Network(NamedTuple):
    """Who hears whom, who is hostile, and the graph when there is a fixed one."""

    topology: Topology
    roster: Roster
    graph: Graph | None


@dataclass(frozen=True)
class Resolved:
    """A Spec with nothing left open, the plan that it follows, and what it names; made once per run."""

    spec: Request
    plan: planning.Plan
    rule: Rule
    attack: Attack
    network: Network

    @property
    def pull(self) -> int:
        return self.plan.pull

    @property
    def b_hat(self) -> int:
        return self.plan.b_hat


def resolve(
    spec: Spec,
    rule: Rule | Callable[..., Any] | None = None,
    attack: Attack | Callable[..., Any] | None = None,
) -> Resolved:
    """Plan what was left out and check that the parts exist and fit together.

    Args:
        spec: the fields.
        rule, attack: the objects that stand in the place of those that the Spec names.

    >>> resolve(Spec(nodes=30, byzantine=6, pull=15, rounds=200)).b_hat
    6
    >>> resolve(Spec(attack="alei"))
    Traceback (most recent call last):
    ValueError: unknown attack 'alei'; did you mean 'alie'?
    """
    job = spec if isinstance(spec, Request) else Request(**spec.model_dump(exclude_unset=True))
    for what, given in (("rule", rule), ("attack", attack)):
        if getattr(spec, what) == OWN and given is None:
            raise ValueError(missing(what))
    adversary = attack_by_name(attack or spec.attack)
    adversary.check_size(spec.nodes - spec.hostile_count)
    choice = Method.of(spec.method)
    method = METHODS[choice.name]
    _check_asynchronous(spec, adversary)
    plan = _plan(spec, method, choice.placement)
    name = spec.rule or method.rule
    if name != method.rule and choice.name not in _OTHER_RULES:
        raise ValueError(
            f"rule {name!r} goes only with method rpel or all-to-all: {spec.method} has {method.rule!r}"
        )
    # epidemic learning averages however few have come
    bound = {} if method.peers in ("push", "regular") else {"f": plan.b_hat}
    made = rule_by_name(rule or name, **bound)
    if not method.on_graph:
        _check_rule(made, name, plan)
    planned: dict[str, Any] = {"pull": plan.pull, "b_hat": plan.b_hat, "rule": name}
    named = {} if attack is not None else {"attack": str(adversary)}
    job = job.replace(**planned, **named, backend=_backend(spec))
    return Resolved(job, plan, made, adversary, build_network(spec, plan.pull, adversary.flood))


def missing(what: str) -> str:
    """Say that a run needs an object from Python that was not passed.

    >>> missing("rule")
    'this run has a rule of its own: pass it again, as in rpel.resume(path, rule=…)'
    """
    return f"this run has a {what} of its own: pass it again, as in rpel.resume(path, {what}=…)"


def _backend(spec: Spec) -> str:
    """Choose the backend; ValueError if it cannot compute on the device."""
    name = str(spec.backend) if spec.backend != "auto" else "numba" if spec.device == "cpu" else "torch"
    if name != "torch" and spec.device != "cpu":
        raise ValueError(
            f"backend {name!r} computes on the cpu: device {spec.device!r} goes with backend 'torch'"
        )
    return name


def _plan(spec: Spec, method: Baseline, placement: str) -> planning.Plan:
    """Return the plan for the given pull and b_hat, or the best one where they are left out.

    Baselines get RPEL's budget.
    """
    if method.peers == "everybody":
        spec = _all_of_them(spec)
    elif method.on_graph and placement == "adversarial" and spec.b_hat is None:
        # attackers that choose their places may all be neighbours of one victim
        spec = spec.replace(b_hat=spec.hostile_count)
    pull = spec.pull
    if pull is None and spec.b_hat is not None:
        pull = min(max(_planned(spec, None).pull, 2 * spec.b_hat + 2), spec.nodes - 1)
    plan = _planned(spec, pull)
    if spec.b_hat is not None:
        plan = _with_b_hat(plan, spec.b_hat)
    if 2 * plan.b_hat >= plan.models:
        raise ValueError(_no_minority(spec, plan))
    return plan


def _all_of_them(spec: Spec) -> Spec:
    """Set pull and b_hat of a method in which all nodes hear each other; ValueError for other values."""
    only = {"pull": spec.nodes - 1, "b_hat": spec.hostile_count}
    for key, value in only.items():
        if getattr(spec, key) not in (None, value):
            raise ValueError(
                f"{key} {getattr(spec, key)} does not go with method {spec.method}, in which all "
                f"{spec.nodes} nodes hear each other: the nearest is {key} {value}, or method rpel"
            )
    return spec.replace(**only)


def _planned(spec: Spec, pull: int | None) -> planning.Plan:
    """Plan for this pull, or for the comfortable one if it is None."""
    if pull is None:
        return planning.comfortable(
            nodes=spec.nodes,
            byzantine=spec.hostile_count,
            rounds=spec.rounds,
            confidence=spec.confidence,
            silent=spec.silent,
            aggregations=aggregations(spec),
        )
    return planning.plan(
        nodes=spec.nodes,
        byzantine=spec.hostile_count,
        rounds=spec.rounds,
        pull=pull,
        confidence=spec.confidence,
        silent=spec.silent,
        aggregations=aggregations(spec),
    )


def _with_b_hat(plan: planning.Plan, b_hat: int) -> planning.Plan:
    """Return the plan with the given b_hat and the probability that it holds."""
    if b_hat == plan.b_hat:
        return plan
    reduction = theory.reduction(plan.nodes, plan.byzantine, plan.pull, b_hat)
    return replace(
        plan,
        b_hat=b_hat,
        fraction=b_hat / plan.models,
        probability=plan.question().probability(plan.pull, b_hat),
        feasible=2 * b_hat < plan.models,
        kappa=reduction.kappa if reduction else None,
        alpha=reduction.alpha if reduction else None,
        lambda_=reduction.lambda_ if reduction else None,
        theorem_applies=reduction is not None and reduction.contracts,
    )


def _no_minority(spec: Spec, plan: planning.Plan) -> str:
    half = plan.pull // 2
    holds = plan.question().probability(plan.pull, half)
    why = f"b_hat {plan.b_hat} is not a minority of pull + 1 = {plan.models}"
    if spec.b_hat is None:
        needed = f"pull {plan.pull} needs b_hat {plan.b_hat} at confidence {plan.confidence:g}"
        why = f"{needed}, which is not a minority of {plan.models}"
    return f"{why}: best_below_half is b_hat {half}, which holds with probability {holds:.6g}"


def _check_rule(rule: Rule, name: str, plan: planning.Plan) -> None:
    if rule.pull_error:
        raise ValueError(f"rule {name!r} {rule.pull_error}")
    least = rule.min_vectors(plan.b_hat)
    if plan.models < least:
        raise ValueError(
            f"rule {name!r} needs {least} models for b_hat {plan.b_hat}: the nearest pull is {least - 1}"
        )


def roster_of(spec: Spec) -> Roster:
    """Choose the hostile nodes: those that the Spec lists, or a number of them by its seed."""
    placed = spec.byzantine if isinstance(spec.byzantine, tuple) else None
    return Roster(spec.nodes, spec.hostile_count, spec.seed, placed)


def schedule(spec: Spec, ids: Integers | None = None) -> Schedule:
    """When the nodes of these numbers (the honest ones) publish and read."""
    roster = roster_of(spec)
    numbers = roster.honest_ids(1) if ids is None else ids
    timing = Timing.of(spec.timing)
    w = slowness(timing.speeds, numbers, np.flatnonzero(roster.hostile(1)), spec.nodes, spec.seed)
    return Schedule(w, numbers, spec.rounds, timing.latency, timing.jitter, spec.seed)


def aggregations(spec: Spec) -> int | None:
    """Count the aggregations of all honest nodes of an asynchronous run.

    None where each aggregates once a round.
    """
    return schedule(spec).aggregations() if Timing.of(spec.timing).asynchronous else None


def _check_asynchronous(spec: Spec, attack: Attack) -> None:
    """ValueError, one sentence, for what does not go with rounds without a barrier."""
    timing = Timing.of(spec.timing)
    if timing.speeds != "equal":
        schedule(spec)
    if not timing.asynchronous:
        return
    for other, why in (
        (spec.method != "rpel", f"method {spec.method}: the nearest is method rpel"),
        (spec.wire != "float32", f"wire {spec.wire}: the nearest is wire float32"),
        (
            spec.privacy != "none",
            "privacy: fast nodes would spend more privacy than is counted",
        ),
        (attack.consistent, "consistent: who asks at another moment is answered from other models"),
        ("graph" in attack.needs, f"attack {attack.name}, which looks at a round's graph: there is none"),
    ):
        if other:
            raise ValueError(f"asynchronous does not go with {why}")


# --- what there is to say before a run ----------------------------------------------------------------------


def remark(spec: Spec, resolved: Resolved) -> str | None:
    """What was planned for a run that names no pull.

    >>> spec = Spec(nodes=7, byzantine=2)
    >>> remark(spec, resolve(spec))
    'pull 6 and b_hat 2 by the comfortable plan: a hostile share of at most 0.286, 3 of 7 models left after
    trimming'
    """
    if spec.pull is not None or spec.method in TO_ALL:
        return None
    m, b_hat = resolved.pull + 1, resolved.b_hat
    return (
        f"pull {resolved.pull} and b_hat {b_hat} by the comfortable plan: a hostile share of at most "
        f"{b_hat / m:.3g}, {m - 2 * b_hat} of {m} models left after trimming"
    )


# --- the network --------------------------------------------------------------------------------------------


def build_network(spec: Spec, pull: int, flood: bool = False) -> Network:
    """Return the network of a method; flood: hostile nodes push to all."""
    nodes, seed = spec.nodes, spec.seed
    roster = roster_of(spec)
    choice = Method.of(spec.method)
    peers = METHODS[choice.name].peers
    if peers == "graph":
        graph = _graph(spec, pull, roster)
        if choice.placement == "adversarial" and roster.placed is None:
            placed = np.flatnonzero(most_central(graph, spec.hostile_count))
            roster = Roster(nodes, spec.hostile_count, seed, placed=tuple(placed.tolist()))
        return Network(FixedGraph(graph), roster, graph)
    if peers == "push":
        flooders = (lambda t: np.flatnonzero(roster.hostile(t))) if flood else None
        return Network(Push(nodes, pull, seed, flooders), roster, None)
    topologies: dict[str, Callable[[], Topology]] = {
        "pull": lambda: Pull(nodes, pull, seed),
        "everybody": lambda: AllToAll(nodes),
        "regular": lambda: RandomRegular(nodes, pull, seed),
    }
    return Network(topologies[peers](), roster, None)


def _graph(spec: Spec, pull: int, roster: Roster) -> Graph:
    if Method.of(spec.method).graph == "honest-first":
        return honest_first(spec.nodes, pull, roster.hostile(1), spec.seed)
    return random_graph(spec.nodes, pull, spec.seed)
