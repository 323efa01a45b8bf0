"""A panel's numbers and its picture.

Invariant: a panel's picture is drawn from the rows of its CSV alone, so whatever one sees can be read there.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpel import planning, plots
from rpel.experiments.panels import COLUMNS, PULLS, SHARES, SIMULATED_ROUNDS, SIMULATIONS, Curve, Panel, Scale
from rpel.planning.paper import simulate_max
from rpel.runs.record import Run, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Row = dict[str, Any]


# --- numbers ------------------------------------------------------------------------------------------------


def run_rows(result: Run) -> list[Row]:
    """A run's evaluated rounds: accuracies, bytes sent so far, the node that ends lowest;
    round 0 where it has one."""
    sent = np.concatenate([[0], np.cumsum(result.history["bytes"])])
    seen = zip(
        result.nodes["round"].tolist(), result.nodes["accuracy"], result.lowest().tolist(), strict=True
    )
    means = {row["round"]: row for row in result.history.where("accuracy_mean")}
    return [
        {
            "seed": result.spec.seed,
            "round": t,
            "accuracy_mean": means[t]["accuracy_mean"] if t else float(nodes.mean()),
            "accuracy_worst": means[t]["accuracy_worst"] if t else float(nodes.min()),
            "accuracy_lowest": lowest,
            "bytes": int(sent[t]),
            "run": "" if result.path is None else result.path.name,
        }
        for t, nodes, lowest in seen
        if t == 0 or t in means
    ]


def curve_rows(panel: Panel, curve: Curve, runs: Sequence[list[Row]]) -> list[Row]:
    """The rows of one curve over its seeds; a point of a sweep is the last round of each."""
    rows = [row for run in runs for row in (run[-1:] if panel.kind == "final" else run)]
    return [{"curve": curve.label, "x": curve.x, **row} for row in rows]


def fraction_rows(panel: Panel) -> list[Row]:
    """Figure 3: the largest hostile count of five simulations (Algorithm 2),
    and the exact median and 99 % quantile."""
    rows = []
    for share in SHARES:
        b = panel.nodes * share // 100
        exact = planning.quantiles(panel.nodes, b, SIMULATED_ROUNDS, PULLS, [0.5, 0.99])
        for s, median, high in zip(PULLS, *exact.tolist(), strict=True):
            seen = simulate_max(panel.nodes, b, s, SIMULATED_ROUNDS, simulations=SIMULATIONS, seed=b)
            ends = dict(zip(("mean", "low", "high"), interval([k / (s + 1) for k in seen]), strict=True))
            row: Row = {
                "curve": f"{share} % hostile",
                "nodes": panel.nodes,
                "byzantine": b,
                "pull": s,
                **ends,
            }
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


# --- pictures -----------------------------------------------------------------------------------------------


def save(
    panel: Panel,
    rows: Sequence[Row],
    note: str,
    stem: Path,
    scale: Scale = Scale.FULL,
    style: plots.Style = "screen",
) -> None:
    """Draw one panel to STEM.svg and STEM.png, for a paper also to STEM.pdf."""
    figure, axes = plots.canvas(6.4, 4.4)
    _draw(axes, panel, rows, scale)
    prefix = "" if panel.name.startswith("extra-") else panel.figure.partition(" (")[0] + ": "
    axes.set_title(prefix + panel.title, fontsize=11)
    axes.legend(frameon=False, fontsize=9, ncols=2 if panel.kind == "fraction" else 1)
    figure.supxlabel(note, fontsize=8, color=plots.SOFT)
    _write(figure, stem, style)


def save_together(
    panels: Sequence[Panel],
    rows: Mapping[str, Sequence[Row]],
    note: str,
    stem: Path,
    scale: Scale = Scale.FULL,
    style: plots.Style = "screen",
) -> None:
    """Draw a figure of several panels in the paper's arrangement;
    a panel without rows stays empty and says so."""
    columns = COLUMNS[int(panels[0].number.rpartition("-")[2])]
    lines = -(-len(panels) // columns)
    figure, grid = plots.panels(3.9 * columns, 3.1 * lines + 0.8, lines, columns, sharey=True)
    labelled: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.set_title(panel.title, fontsize=10)
        if panel.name not in rows:
            axes.set_axis_off()
            axes.text(
                0.5, 0.5, "not run yet", ha="center", va="center", transform=axes.transAxes, color=plots.SOFT
            )
            continue
        _draw(axes, panel, rows[panel.name], scale)
        axes.label_outer()
        labelled |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.suptitle(panels[0].figure)
    key = figure.legend(
        labelled.values(), labelled, loc="outside lower center", ncols=len(labelled), frameon=False,
        title=note,
    )  # fmt: skip
    key.get_title().set(fontsize=8, color=plots.SOFT)
    _write(figure, stem, style)


def _write(figure: "Figure", stem: Path, style: plots.Style) -> None:
    for suffix in (".svg", ".png"):
        plots.save(figure, stem.with_name(stem.name + suffix))
    if style == "paper":  # last: it changes the figure
        plots.save(figure, stem.with_name(stem.name + ".pdf"), style)


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
    """Accuracy against rounds or gigabytes: the mean over the seeds,
    and a band from the lowest to the highest."""
    column = "accuracy_mean" if panel.measure == "mean" else "accuracy_lowest"
    unit = 1e9 if against == "bytes" else 1
    curves = []
    for label, mine in _by(rows, "curve"):
        seeds = [seed for _, seed in _by(mine, "seed")]
        curves.append(
            (label, _column(seeds[0], against) / unit, np.stack([_column(seed, column) for seed in seeds]))
        )
    wide = plots.widths([(x.tolist(), y.mean(axis=0)) for _, x, y in curves])
    for i, (label, x, y) in enumerate(curves):
        plots.curve(
            axes, x, y, plots.COLOURS[i % len(plots.COLOURS)], marker=plots.MARKERS[i % len(plots.MARKERS)],
            markersize=wide[i] + 2.2, label=label, linewidth=wide[i], markevery=max(1, len(x) // 10),
        )  # fmt: skip
    words = "test accuracy, " + (
        "mean of honest nodes" if panel.measure == "mean" else "node that ends lowest"
    )
    axes.set(
        xlabel="gigabytes sent by all nodes" if against == "bytes" else "round", ylabel=words, ylim=(0, 1.02)
    )
    axes.set_xlim(left=0)


def _draw_final(axes: "Axes", panel: Panel, rows: Sequence[Row]) -> None:
    """Final accuracy against the swept value: mean of the honest nodes, and dashed the worst."""
    for (label, mine), colour, marker in zip(_by(rows, "curve"), plots.COLOURS, plots.MARKERS, strict=False):
        points = sorted(_by(mine, "x"))
        for column, line, words in (("accuracy_mean", "-", "mean"), ("accuracy_worst", "--", "worst node")):
            y = np.stack([_column(seeds, column) for _, seeds in points], axis=1)
            style = {"linestyle": line, "marker": marker, "markersize": 4, "label": f"{label}, {words}"}
            plots.curve(axes, [x for x, _ in points], y, colour, alpha=0.15, **style)
    axes.set(xlabel=panel.xlabel, ylabel="test accuracy after the last round", ylim=(0, 1.02))


def _draw_fraction(axes: "Axes", panel: Panel, rows: Sequence[Row]) -> None:
    for (label, mine), colour in zip(_by(rows, "curve"), plots.COLOURS, strict=False):
        pulls, mean, low, high, median = (
            _column(mine, key) for key in ("pull", "mean", "low", "high", "exact_median")
        )
        axes.plot(pulls, mean, color=colour, label=label)
        axes.fill_between(pulls, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(pulls, median, "o", color=colour, markersize=3)
    axes.axhline(0.5, color=plots.INK, linestyle="--", linewidth=1, label="one half")
    axes.set(xlabel="pulled peers s", ylabel="effective adversarial fraction b̂ / (s+1)", ylim=(0, 1))


def _by(rows: Sequence[Row], key: str) -> list[tuple[Any, list[Row]]]:
    """Rows by what they have in a column, in the order in which they came."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return list(groups.items())


def _column(rows: Sequence[Row], key: str) -> NDArray[np.float64]:
    return np.array([row[key] for row in rows], dtype=np.float64)
