"""The picture of a run: accuracy of the honest nodes against rounds. Equal data give equal bytes."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rpel import plots
from rpel.config.spec import Spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def accuracy(spec: Spec, rounds: NDArray[np.int64], values: NDArray[np.float64]) -> "Figure":
    """Mean, worst and the node that ends lowest; values (e, h), or (seeds, e, h) with bands over the seeds."""
    runs = values if values.ndim == 3 else values[None]
    lowest = np.stack([run[:, int(np.argmin(run[-1]))] for run in runs])
    sketch, axes = plots.canvas()
    curves = {"mean of the honest nodes": runs.mean(axis=2), "worst node of each round": runs.min(axis=2)}
    for colour, marker, (label, curve) in zip(plots.COLOURS, "os", curves.items(), strict=False):
        axes.plot(rounds, curve.mean(axis=0), color=colour, marker=marker, markersize=3.5, label=label)
        if len(runs) > 1:
            axes.fill_between(rounds, curve.min(axis=0), curve.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.plot(rounds, lowest.mean(axis=0), color=plots.COLOURS[2], linestyle="--", label="node that ends lowest")
    axes.set(xlabel="round", ylabel="test accuracy", title=_title(spec, len(runs)), ylim=(0, 1.02))
    axes.set_xlim(0, float(rounds[-1]) * 1.02)
    axes.legend(frameon=False, loc="best")
    return sketch


def _title(spec: Spec, seeds: int) -> str:
    many = f", {seeds} seeds" if seeds > 1 else ""
    hostile = f"{spec.byzantine:,} of {spec.nodes:,} hostile ({spec.attack})"
    return f"{spec.name}: {spec.method}, {hostile}, pull {spec.pull}{many}"


def save(sketch: "Figure", path: Path) -> None:
    """Write the figure; the names inside an SVG come from its content alone."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "rpel"}):
        plots.save(sketch, path)
