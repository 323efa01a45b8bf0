"""The fixed graph of a baseline, with what its methods' theory asks of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel import plots
from rpel.config.spec import Spec
from rpel.graphs import Graph
from rpel.simulation.methods import build_network, settle


@dataclass(frozen=True)
class Baseline:
    """A graph, who is hostile on it, and the b̂ that its rules would be given."""

    spec: Spec
    graph: Graph
    hostile: NDArray[np.bool_]
    b_hat: int

    def findings(self) -> dict[str, Any]:
        """What there is to say of it, as plain JSON values."""
        s, near = self.spec, self.graph.adjacency & self.hostile[None, :]
        met = near[~self.hostile].sum(axis=1)
        degrees = self.graph.adjacency.sum(axis=1)
        connectivity = self.graph.connectivity()
        return {
            "nodes": s.nodes,
            "byzantine": s.byzantine,
            "pull": s.pull,
            "graph": s.graph,
            "placement": s.placement,
            "seed": s.seed,
            "edges": self.graph.edges,
            "messages": 2 * self.graph.edges,
            "degree_min": int(degrees.min()),
            "degree_max": int(degrees.max()),
            "b_hat": self.b_hat,
            "hostile_neighbours_max": int(met.max(initial=0)),
            "nodes_beyond_b_hat": int((met > self.b_hat).sum()),
            "honest_connected": self.graph.honest_connected(self.hostile),
            "connectivity": connectivity,
            "connectivity_needed": 2 * s.byzantine,
            "sufficiently_connected": connectivity >= 2 * s.byzantine,
        }


def inspect(spec: Spec) -> Baseline:
    """The graph that a fixed-graph method would use under this Spec.

    >>> inspect(Spec(nodes=30, byzantine=6, pull=15)).findings()["edges"]
    225
    """
    settled = settle(spec.but(method="cs-plus", rule=None))
    _, roster, graph = build_network(settled)
    assert graph is not None
    return Baseline(settled, graph, roster.hostile(1), settled.b_hat)


def draw(found: Baseline, path: str | Path) -> None:
    """Honest and hostile nodes on a circle-free layout, edges to hostile nodes in their colour."""
    import networkx as nx

    places = nx.spring_layout(found.graph.networkx(), seed=0, k=2 / np.sqrt(found.spec.nodes))
    where = np.array([places[i] for i in range(found.spec.nodes)])
    a, b = np.nonzero(np.triu(found.graph.adjacency))
    s = found.spec
    title = f"n = {s.nodes}, b = {s.byzantine}, {found.graph.edges} edges ({s.graph}, placement {s.placement})"
    plots.network(path, where, list(zip(a.tolist(), b.tolist(), strict=True)), found.hostile, title=title)
