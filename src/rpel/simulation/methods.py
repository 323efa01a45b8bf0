"""Every method is one topology and one rule; nothing else in the round changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpel.aggregation import Rule
from rpel.aggregation import rule as rule_by_name
from rpel.graphs import Graph, honest_first, most_central, random_graph
from rpel.simulation.adversary import Roster
from rpel.topology import AllToAll, FixedGraph, Pull, Push, RandomRegular
from rpel.types import Topology


@dataclass(frozen=True)
class Method:
    """How peers are chosen (pull, everybody, graph, push, regular) and the rule that goes with it."""

    peers: str
    rule: str

    @property
    def on_graph(self) -> bool:
        return self.peers == "graph"

    @property
    def guarantee(self) -> str:
        """What the plan's probability is worth under this way of choosing peers."""
        if self.on_graph:
            return "none: neighbours are fixed, so the law of the pull does not apply; the counts are what was met"
        if self.peers == "push":
            return "void: whoever pushes chooses whom it reaches"
        return "the plan's probability"


METHODS = {
    "rpel": Method("pull", "nnm+trimmed_mean"),
    "all-to-all": Method("everybody", "nnm+trimmed_mean"),
    "nna": Method("everybody", "monna"),
    "cs-plus": Method("graph", "cs_plus"),
    "gts": Method("graph", "gts"),
    "clipped-gossip": Method("graph", "clipped_gossip_adaptive"),
    "clipped-gossip-oracle": Method("graph", "clipped_gossip_oracle"),
    "rtc": Method("graph", "rtc"),
    "d-psgd": Method("graph", "gossip"),
    "el-local": Method("push", "mean"),
    "el-oracle": Method("regular", "mean"),
}
"""Every system that RPEL is compared with, by name."""


def messages(method: str, nodes: int, pull: int) -> int:
    """Models sent per round from one node to another, hostile nodes counted as if they pulled.

    >>> messages("rpel", 30, 15), messages("cs-plus", 30, 15), messages("all-to-all", 30, 29)
    (450, 450, 870)
    """
    per_round: dict[str, Callable[[], int]] = {
        "everybody": lambda: nodes * (nodes - 1),
        "graph": lambda: 2 * (nodes * pull // 2),
    }
    return per_round.get(METHODS[method].peers, lambda: nodes * pull)()


def build_rule(method: str, rule: str | None, b_hat: int) -> Rule:
    """The method's rule, or another one, made to survive b̂ hostile answers."""
    return rule_by_name(rule or METHODS[method].rule, f=b_hat)


def build_network(
    method: str,
    *,
    nodes: int,
    byzantine: int,
    pull: int,
    seed: int,
    graph: str = "random",
    placement: str = "random",
    roaming: bool = False,
    flood: bool = False,
) -> tuple[Topology, Roster, Graph | None]:
    """Who hears whom, who is hostile, and the graph when there is a fixed one."""
    roster = Roster(nodes, byzantine, seed, roaming)
    chosen = METHODS[method]
    if chosen.on_graph:
        drawn = (
            honest_first(nodes, pull, roster.hostile(1), seed)
            if graph == "honest-first"
            else random_graph(nodes, pull, seed)
        )
        if placement == "adversarial":
            roster = Roster(
                nodes, byzantine, seed, placed=tuple(np.flatnonzero(most_central(drawn, byzantine)).tolist())
            )
        return FixedGraph(drawn), roster, drawn
    if chosen.peers == "push":
        flooders = tuple(np.flatnonzero(roster.hostile(1)).tolist()) if flood else ()
        return Push(nodes, pull, seed, flooders), roster, None
    topologies: dict[str, Callable[[], Any]] = {
        "pull": lambda: Pull(nodes, pull, seed),
        "everybody": lambda: AllToAll(nodes),
        "regular": lambda: RandomRegular(nodes, pull, seed),
    }
    return topologies[chosen.peers](), roster, None
