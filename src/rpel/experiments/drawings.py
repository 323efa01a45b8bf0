"""A panel's numbers and its picture; the fixed graph of a baseline, judged and drawn.

Invariant: a panel's picture is drawn from the rows of its CSV alone, so whatever one sees can be read there.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel import planning, plots
from rpel.config.spec import Spec
from rpel.experiments.panels import COLUMNS, PULLS, SHARES, SIMULATED_ROUNDS, SIMULATIONS, Curve, Panel
from rpel.graphs import Graph
from rpel.simulation.methods import build_network, settle
from rpel.simulation.result import Result, interval
from rpel.types import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Row = dict[str, Any]
_MARKERS = "osD^vP*X"


# --- numbers ---------------------------------------------------------------------------------------------------------


def run_rows(result: Result) -> list[Row]:
    """A run's evaluated rounds: accuracies, bytes sent so far, and the node that ends lowest."""
    sent = np.cumsum(result.history["bytes"])
    lowest = dict(zip(result.nodes["round"].tolist(), result.lowest().tolist(), strict=True))
    where = "" if result.path is None else result.path.name
    rows = [
        {
            "seed": result.spec.seed,
            "round": row["round"],
            "accuracy_mean": row["accuracy_mean"],
            "accuracy_worst": row["accuracy_worst"],
            "accuracy_lowest": lowest[row["round"]],
            "bytes": int(sent[row["round"] - 1]),
            "run": where,
        }
        for row in result.history.where("accuracy_mean")
    ]
    return [*_start(result, lowest, where), *rows]


def _start(result: Result, lowest: Mapping[int, float], where: str) -> list[Row]:
    """Round 0, the common initial model, where the run evaluated it."""
    if 0 not in lowest:
        return []
    first = result.nodes["accuracy"][0]
    accuracies = {"accuracy_mean": float(first.mean()), "accuracy_worst": float(first.min())}
    return [
        {"seed": result.spec.seed, "round": 0, **accuracies, "accuracy_lowest": lowest[0], "bytes": 0, "run": where}
    ]


def curve_rows(panel: Panel, curve: Curve, runs: Sequence[list[Row]]) -> list[Row]:
    """The rows of one curve over its seeds; a point of a sweep is the last round of each."""
    rows = [row for run in runs for row in (run[-1:] if panel.kind == "final" else run)]
    return [{"curve": curve.label, "x": curve.x, **row} for row in rows]


def fraction_rows(panel: Panel) -> list[Row]:
    """Figure 3: the largest hostile count of five simulations (Algorithm 2), and the exact median and 99 % quantile."""
    rows = []
    for share in SHARES:
        b = panel.nodes * share // 100
        exact = planning.quantiles(panel.nodes, b, SIMULATED_ROUNDS, PULLS, [0.5, 0.99])
        for s, median, high in zip(PULLS, *exact.tolist(), strict=True):
            seen = planning.simulate_max(panel.nodes, b, s, SIMULATED_ROUNDS, simulations=SIMULATIONS, seed=b)
            ends = dict(zip(("mean", "low", "high"), interval([k / (s + 1) for k in seen]), strict=True))
            row: Row = {"curve": f"{share} % hostile", "nodes": panel.nodes, "byzantine": b, "pull": s, **ends}
            row |= {"exact_median": median / (s + 1), "b_hat_median": median, "b_hat_99": high}
            rows.append(row | {f"simulation_{i}": k for i, k in enumerate(seen, 1)})
    return rows


def read_rows(path: Path) -> list[Row]:
    """The rows of a panel's CSV; numbers as numbers, an empty cell as None."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


# --- pictures --------------------------------------------------------------------------------------------------------


def save(panel: Panel, rows: Sequence[Row], note: str, stem: Path, scale: Scale = Scale.FULL) -> None:
    """Draw one panel to STEM.svg and STEM.png."""
    sketch, axes = plots.canvas(6.4, 4.4)
    _draw(axes, panel, rows, scale)
    place = "" if panel.name.startswith("extra-") else panel.figure.partition(" (")[0] + ": "
    axes.set_title(place + panel.title, fontsize=11)
    axes.legend(frameon=False, fontsize=9, ncols=2 if panel.kind == "fraction" else 1)
    sketch.supxlabel(note, fontsize=8, color="#666666")
    _write(sketch, stem)


def save_together(
    panels: Sequence[Panel], rows: Mapping[str, Sequence[Row]], note: str, stem: Path, scale: Scale = Scale.FULL
) -> None:
    """Draw a figure of several panels in the paper's arrangement; a panel without rows stays empty and says so."""
    from matplotlib.figure import Figure

    columns = COLUMNS[int(panels[0].number.rpartition("-")[2])]
    lines = -(-len(panels) // columns)
    sketch = Figure(figsize=(3.9 * columns, 3.1 * lines + 0.8), layout="constrained")
    grid = sketch.subplots(lines, columns, sharey=True, squeeze=False)
    labelled: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_title(panel.title, fontsize=10)
        if panel.name not in rows:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "not run yet", ha="center", va="center", transform=axes.transAxes, color="#666666")
            continue
        _draw(axes, panel, rows[panel.name], scale)
        axes.label_outer()
        labelled |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    sketch.suptitle(panels[0].figure)
    key = sketch.legend(
        labelled.values(), labelled, loc="outside lower center", ncols=len(labelled), frameon=False, title=note,
    )  # fmt: skip
    key.get_title().set(fontsize=8, color="#666666")
    _write(sketch, stem)


def _write(sketch: Any, stem: Path) -> None:
    for suffix in (".svg", ".png"):
        plots.save(sketch, stem.with_name(stem.name + suffix))


def _draw(axes: "Axes", panel: Panel, rows: Sequence[Row], scale: Scale) -> None:
    plots.stamp(axes, scale.stamp)
    kinds: dict[str, Callable[[Axes, Panel, Sequence[Row]], None]] = {
        "accuracy": partial(_draw_runs, against="round"),
        "bytes": partial(_draw_runs, against="bytes"),
        "fraction": _draw_fraction,
        "final": _draw_final,
    }
    kinds[panel.kind](axes, panel, rows)


def _draw_runs(axes: "Axes", panel: Panel, rows: Sequence[Row], against: str) -> None:
    """Accuracy against rounds or gigabytes: the mean over the seeds, and a band from the lowest to the highest.

    Lines grow thinner, so that one that lies exactly under another is still seen.
    """
    column = "accuracy_mean" if panel.measure == "mean" else "accuracy_lowest"
    unit = 1e9 if against == "bytes" else 1
    for i, (label, mine) in enumerate(_curves(rows)):
        colour, marker = plots.COLOURS[i % len(plots.COLOURS)], _MARKERS[i % len(_MARKERS)]
        x = np.array(_of_seed(mine, against)[0]) / unit
        y = np.array(_of_seed(mine, column))
        look: dict[str, Any] = {"linewidth": max(1.0, 2.8 - 0.45 * i), "markevery": max(1, len(x) // 10)}
        axes.plot(x, y.mean(axis=0), color=colour, marker=marker, markersize=4, label=label, **look)
        if len(y) > 1:
            axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    words = "test accuracy, " + ("mean of honest nodes" if panel.measure == "mean" else "node that ends lowest")
    axes.set(xlabel="gigabytes sent by all nodes" if against == "bytes" else "round", ylabel=words, ylim=(0, 1.02))
    axes.set_xlim(left=0)


def _draw_final(axes: "Axes", panel: Panel, rows: Sequence[Row]) -> None:
    """Final accuracy against the swept value: mean of the honest nodes, and dashed the worst."""
    for (label, mine), colour, marker in zip(_curves(rows), plots.COLOURS, _MARKERS, strict=False):
        x = sorted({row["x"] for row in mine})
        for column, line, words in (("accuracy_mean", "-", "mean"), ("accuracy_worst", "--", "worst node")):
            y = [[row[column] for row in mine if row["x"] == at] for at in x]
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "label": f"{label}, {words}"}
            axes.plot(x, [float(np.mean(v)) for v in y], line, **style)
            axes.fill_between(x, [min(v) for v in y], [max(v) for v in y], color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel=panel.xlabel, ylabel="test accuracy after the last round", ylim=(0, 1.02))


def _draw_fraction(axes: "Axes", panel: Panel, rows: Sequence[Row]) -> None:
    for (label, mine), colour in zip(_curves(rows), plots.COLOURS, strict=False):
        pulls, mean, low, high, median = (_column(mine, key) for key in ("pull", "mean", "low", "high", "exact_median"))
        axes.plot(pulls, mean, color=colour, label=label)
        axes.fill_between(pulls, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(pulls, median, "o", color=colour, markersize=3)
    axes.axhline(0.5, color="#000000", linestyle="--", linewidth=1, label="one half")
    axes.set(xlabel="pulled peers s", ylabel="effective adversarial fraction b̂ / (s+1)", ylim=(0, 1))


def _curves(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by curve, in the order in which they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["curve"], []).append(row)
    return list(found.items())


def _of_seed(rows: Sequence[Row], column: str) -> list[list[float]]:
    """The column of each seed."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append(row[column])
    return list(found.values())


def _column(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows], dtype=np.float64)


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


def baseline(spec: Spec) -> Baseline:
    """The graph that a fixed-graph method would use under this Spec.

    >>> baseline(Spec(nodes=30, byzantine=6, pull=15)).findings()["edges"]
    225
    """
    settled = settle(spec.but(method="cs-plus", rule=None))
    _, roster, graph = build_network(settled)
    assert graph is not None
    return Baseline(settled, graph, roster.hostile(1), settled.b_hat)


def draw_graph(found: Baseline, path: str | Path) -> None:
    """Honest and hostile nodes on a circle-free layout, edges to hostile nodes in their colour."""
    import networkx as nx

    places = nx.spring_layout(found.graph.networkx(), seed=0, k=2 / np.sqrt(found.spec.nodes))
    where = np.array([places[i] for i in range(found.spec.nodes)])
    a, b = np.nonzero(np.triu(found.graph.adjacency))
    s = found.spec
    title = f"n = {s.nodes}, b = {s.byzantine}, {found.graph.edges} edges ({s.graph}, placement {s.placement})"
    plots.network(path, where, list(zip(a.tolist(), b.tolist(), strict=True)), found.hostile, title=title)
