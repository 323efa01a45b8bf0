"""The page's panels as SVG and PNG files, drawn by matplotlib for papers and slides."""

from pathlib import Path
from typing import TYPE_CHECKING

from rpel import plots
from rpel.report.drawing import axes, shape
from rpel.report.settings import METRICS, Panel, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("svg", "png")


def save(panels: list[Panel], folder: Path) -> list[Path]:
    """Write every metric of every panel in both formats; returns the files."""
    written = []
    for panel in panels:
        for metric in METRICS:
            sketch = draw(panel, metric)
            for ending in _FORMATS:
                path = folder / f"{panel.slug}-{metric}.{ending}"
                plots.save(sketch, path)
                written.append(path)
    return written


def draw(panel: Panel, metric: str) -> "Figure":
    """One metric of a panel: the same curves, bands, colours and marks as on the page."""
    sketch, place = plots.canvas()
    plots.stamp(place, panel.stamp)
    for k, setting in enumerate(panel.settings):
        _curve(place, k, setting, metric)
    across, up = axes(panel, metric)
    if up.log:
        place.set_yscale("log")
    label = "test accuracy (mean; dashed: the node that ends lowest)" if metric == "accuracy" else metric
    place.set(xlabel="round", ylabel=label, title=panel.title, xlim=(0, across.high * 1.02))
    place.set_ylim(up.low, up.high * (1 if up.log else 1.02))
    place.locator_params(axis="x", integer=True)
    sketch.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    return sketch


def _curve(place: "Axes", k: int, setting: Setting, metric: str) -> None:
    colour = plots.COLOURS[k % len(plots.COLOURS)]
    for dash, column in zip(("-", "--"), METRICS[metric], strict=False):
        mean, low, high = setting.curve(column)
        label = setting.label.replace("$", r"\$") if dash == "-" else None
        place.plot(
            setting.rounds, mean, dash, color=colour, marker="os^D"[shape(k)], markersize=3.5,
            markerfacecolor=colour if dash == "-" else "white", label=label,
        )  # fmt: skip
        if len(setting.runs) > 1:
            place.fill_between(setting.rounds, low, high, color=colour, alpha=0.16, linewidth=0)
