"""The report's drawings, made here by matplotlib and not in the browser, so that they are there without
JavaScript and on paper.

Colours follow the reader's theme by the style sheet of :mod:`rpel.plots`; each curve carries its number, by
which the page's script hides and shows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from rpel import plots
from rpel.plots import COLOURS, MARKERS
from rpel.report.groups import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 480, 290  # of a chart in a page, in points
LEFT, RIGHT, TOP, BOTTOM = 48, 464, 12, 250
_FLOOR, _CEILING = 1e-12, 1e12  # what logarithmic axes show
_BARS = 24
_MANY = 40  # points from which on they are not marked one by one

Floats = NDArray[np.float64]


# --- curves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """What the axes of a chart show: rounds up to ``last``, values from ``low`` to ``high``."""

    last: float
    low: float
    high: float
    log: bool = False

    def heights(self, values: Floats) -> Floats:
        """Where values lie between low (0) and high (1), the nearest end for those outside.

        >>> Range(10, 0.01, 1.0, log=True).heights(np.array([0.001, 0.1, 1.0])).tolist()
        [0.0, 0.5, 1.0]
        """
        low, high, inside = self.low, self.high, np.clip(values, self.low, self.high)
        if self.log:
            low, high, inside = math.log10(low), math.log10(high), np.log10(inside)
        return np.asarray((inside - low) / (high - low))


def axes_range(chart: Chart, metric: str) -> Range:
    """The range that holds all curves of a chart."""
    last = max(group.rounds(group.columns(metric)[0])[-1] for group in chart.groups)
    columns = [(group, key) for group in chart.groups for key in group.columns(metric)]
    if metric == "accuracy" and chart.measure == "accuracy":
        return Range(last, 0.0, 1.0)
    values = np.concatenate([group.curve(key).ravel() for group, key in columns])
    if metric == "accuracy":
        values = values[np.abs(values) <= _CEILING]
        low, high = (
            (min(0.0, float(values.min())), max(0.0, float(values.max()))) if len(values) else (0.0, 1.0)
        )
        return Range(last, low, high if high > low else low + 1)
    values = values[(values >= _FLOOR) & (values <= _CEILING)]
    low, high = (values.min(), values.max()) if len(values) else (0.1, 1.0)
    first = math.floor(math.log10(low))
    return Range(last, 10.0**first, 10.0 ** max(math.ceil(math.log10(high)), first + 1), log=True)


def draw(chart: Chart, metric: str, salt: str = "chart") -> Markup:
    """One metric of a panel as an SVG element; ``salt`` tells the drawings of a page apart."""
    shown, figure = axes_range(chart, metric), plots.fixed(WIDTH, HEIGHT)
    axes = figure.add_axes(
        (LEFT / WIDTH, 1 - BOTTOM / HEIGHT, (RIGHT - LEFT) / WIDTH, (BOTTOM - TOP) / HEIGHT)
    )
    _curves(plots.plain(axes), chart, metric, shown)
    axes.set_xlabel("round")
    title = escape(f"{chart.stamp} {chart.title}: {_measured(chart, metric)} against rounds".lstrip())
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
        f'data-metric="{metric}" data-last="{shown.last:.0f}" data-left="{LEFT}" data-right="{RIGHT}" '
        f'data-width="{WIDTH}">'
        f"{plots.inline(figure, f'{salt}-{metric}')}"
        f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" hidden=""/></svg>'
    )


def chart_figure(chart: Chart, metric: str) -> "Figure":
    """The same drawing for a file of its own, with its title and its legend."""
    figure, axes = plots.canvas(7.0, 4.2 + 0.22 * len(chart.groups))
    _curves(axes, chart, metric, axes_range(chart, metric))
    lowest = "lowest" if chart.groups[0].more_is_better else "highest"
    words = f"{chart.words}, mean (dashed: the node that ends {lowest})" if metric == "accuracy" else metric
    axes.set(xlabel="round", ylabel=_measured(chart, metric))
    axes.set_title(f"{chart.title}\n{words}", fontsize=10)
    figure.legend(frameon=False, loc="outside lower left")
    return figure


def _measured(chart: Chart, metric: str) -> str:
    return chart.measure if metric == "accuracy" else metric


def _curves(axes: "Axes", chart: Chart, metric: str, shown: Range) -> None:
    """Bands under lines; the first column solid, the second dashed;
    a curve that others cover is wider than they."""
    rounds = [group.rounds(group.columns(metric)[0]) for group in chart.groups]
    means = [shown.heights(group.curve(group.columns(metric)[0])[0]) for group in chart.groups]
    wide = plots.widths(list(zip(rounds, means, strict=True)))
    for k, group in enumerate(chart.groups):
        columns, colour = group.columns(metric), COLOURS[k % len(COLOURS)]
        kinds = ("mean", "worst") if len(columns) > 1 else ("only",)
        for kind, column in zip(kinds, columns, strict=True):
            mean, low, high = np.clip(group.curve(column), shown.low, shown.high)
            if len(group.runs) > 1:
                band = axes.fill_between(rounds[k], low, high, color=colour, alpha=0.16, linewidth=0)
                plots.name(band, f"band {kind}", k)
            worst, marked = kind == "worst", len(rounds[k]) <= _MANY
            (line,) = axes.plot(
                rounds[k], mean, "--" if worst else "-", color=colour, linewidth=1.4 if worst else wide[k],
                marker=MARKERS[shape(k)] if marked else "", markersize=wide[k] + 2.7, clip_on=False,
                markerfacecolor=plots.PAPER if worst else colour, label=None if worst else group.label,
            )  # fmt: skip
            plots.name(line, f"line {kind}", k)
    plots.stamp(axes, chart.stamp)
    axes.set(xlim=(0, shown.last), yscale="log" if shown.log else "linear")
    axes.set_ylim(shown.low, shown.high)
    axes.minorticks_off()
    if shown.log:
        axes.yaxis.set_major_formatter("{x:g}")


def shape(k: int) -> int:
    """Which mark a curve has: seven colours and eight marks, so that no two of 56 curves look alike.

    >>> len({(k % len(COLOURS), shape(k)) for k in range(56)})
    56
    """
    return k % len(MARKERS)


@cache
def swatch(k: int) -> Markup:
    """The sign of a curve in a legend."""
    figure = plots.fixed(28, 12)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 28), ylim=(0, 12))
    axes.set_axis_off()
    colour = COLOURS[k % len(COLOURS)]
    axes.plot([1, 14, 27], [6, 6, 6], color=colour, linewidth=1.8, marker=MARKERS[shape(k)], markevery=[1])
    inside = plots.inline(figure, f"swatch-{k}")
    return Markup(f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">{inside}</svg>')


def values(chart: Chart, metric: str) -> list[dict[str, Any]]:
    """What the page's script shows under the pointer, curve by curve, with six digits."""
    return [
        {
            "rounds": group.rounds(group.columns(metric)[0]),
            "seeds": len(group.runs),
            "columns": [
                [
                    [float(f"{v:.6g}") if math.isfinite(v) else None for v in series]
                    for series in group.curve(column)
                ]
                for column in group.columns(metric)
            ],
        }
        for group in chart.groups
    ]


# --- points and bars ----------------------------------------------------------------------------------------


def scatter(points: Sequence[tuple[str, float, float]], xlabel: str) -> Markup:
    """(label, x, y) as labelled points, y from 0 to 1;
    labels of points at one place stand one below the other."""
    figure = plots.fixed(WIDTH, HEIGHT)
    axes = plots.plain(figure.add_axes((LEFT / WIDTH, 1 - BOTTOM / HEIGHT, 0.86, (BOTTOM - TOP) / HEIGHT)))
    most = max((x for _, x, _ in points), default=1.0) or 1.0
    axes.set(xlim=(0, most * 1.25), ylim=(0, 1), xlabel=xlabel)
    below = math.inf
    for k, (label, x, y) in enumerate(sorted(points, key=lambda point: -point[2])):
        (mark,) = axes.plot([x], [y], MARKERS[shape(k)], color=COLOURS[k % len(COLOURS)], clip_on=False)
        plots.name(mark, "point", title=f"{label}: {y:.4f}, {x:,.4g} {xlabel}")
        below = min(y, below - 0.047)
        right = x > 0.75 * most
        axes.annotate(
            label, (x, below), (-8 if right else 8, 0), textcoords="offset points",
            ha="right" if right else "left", va="center", fontsize=9, color=plots.INK, annotation_clip=False,
        )  # fmt: skip
    return Markup(
        f'<svg class="points" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="accuracy against '
        f'{escape(xlabel)}">'
        f"{plots.inline(figure, 'points')}</svg>"
    )


def histogram(counts: Sequence[int], b_hat: int, salt: str = "bars") -> Markup:
    """How often an honest node met so many hostile peers in a round, and the b_hat that was planned for."""
    bars, step, height = bins(counts, b_hat), 26, 88
    wide = len(bars) * step + 2
    figure = plots.fixed(wide, height)
    axes = figure.add_axes((0, 18 / height, 1, 1 - 18 / height))
    axes.set_axis_off()
    most = max((count for *_, count in bars), default=1) or 1
    axes.set(xlim=(0, wide), ylim=(0, most))
    for k, (first, last, count) in enumerate(bars):
        named = f"{first}" if first == last else f"{first} to {last}"
        tall = max(count, most / 45) if count else 0
        (bar,) = axes.bar(k * step + step / 2, tall, step - 6, color=COLOURS[int(first > b_hat)])
        plots.name(bar, "bar", title=f"{count:,} times {named} hostile")
        axes.annotate(
            str(first),
            (k * step + step / 2, 0),
            (0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    edge = sum(first <= b_hat for first, _, _ in bars) * step
    axes.axvline(edge, color=plots.INK, linewidth=1.5, linestyle=":")
    return Markup(
        f'<svg class="histogram" viewBox="0 0 {wide} {height}" style="max-width:{wide}px" role="img" '
        f'aria-label="hostile peers met by a node in a round">{plots.inline(figure, salt)}</svg>'
    )


def bins(counts: Sequence[int], b_hat: int) -> list[tuple[int, int, int]]:
    """(from, to, how often) from the first count that was met up to the last or b_hat, in at most 24 steps.

    >>> bins([0, 0, 5, 1], 4)
    [(2, 2, 5), (3, 3, 1), (4, 4, 0)]
    >>> bins([1] * 48, 7)[:4]
    [(0, 1, 2), (2, 3, 2), (4, 5, 2), (6, 7, 2)]
    """
    first = next((k for k, count in enumerate(counts) if count), 0)
    first, end = min(first, b_hat), max(len(counts), b_hat + 1)
    step = -(-(end - first) // _BARS)
    return [(k, min(k + step, end) - 1, sum(counts[k : k + step])) for k in range(first, end, step)]


# --- heat map -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatCell:
    """A value from 0 to 1, or None where there is none, and what is shown under the pointer."""

    value: float | None
    hover: str
    missing: str = "no result"

    @property
    def colour(self) -> str:
        """Of the cell."""
        return plots.shade(self.value or 0.0)[0]

    @property
    def ink(self) -> str:
        """Of the number in it."""
        return plots.shade(self.value or 0.0)[1]
