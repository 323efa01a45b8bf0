"""Charts as SVG, made here and not in the browser, so that they are there without JavaScript and on paper.

Colours are classes (c0, c1, …) that the page's style fills in for light and dark; a curve is one group that the page's
script hides and shows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from rpel.plots import COLOURS, canvas, stamp
from rpel.report.groups import Chart
from rpel.runs.record import RunSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 464, 12, 250
_FLOOR, _CEILING = 1e-12, 1e12  # what logarithmic axes show
_MARKS = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", "M-3-3h6v6h-6z", "M0-4L4 3H-4z", "M0-4L4 0L0 4L-4 0z")
_BARS = 24
_MANY = 40  # points from which on they are not marked one by one

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """From values to places: linear, or logarithmic where values stay within what it shows.

    >>> Axis(0, 1, 100, 0).places(np.array([0.0, 0.25, 1.0])).tolist()
    [100.0, 75.0, 0.0]
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def places(self, values: Floats) -> Floats:
        low, high = self.low, self.high
        inside = np.clip(values, low, high)
        if self.log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        return np.asarray(self.start + (inside - low) / (high - low) * (self.end - self.start))

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label), about five of them."""
        if not self.log:
            step = nice_step((self.high - self.low) / 5)
            steps = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
            return [(k * step, f"{k * step:,.10g}") for k in steps]
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [(10.0**k, f"{10.0**k:g}") for k in range(first, last + 1, math.ceil((last - first) / 6))]


def nice_step(least: float) -> float:
    """The least of 1, 2 or 5 times a power of ten that is not below.

    >>> nice_step(0.2), nice_step(12), nice_step(40)
    (0.2, 20.0, 50.0)
    """
    power = 10.0 ** math.floor(math.log10(least) + 1e-9)
    return next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))


def axes(chart: Chart, metric: str) -> tuple[Axis, Axis]:
    """The axes that hold all curves of a chart."""
    rounds = Axis(0, max(group.rounds(group.columns(metric)[0])[-1] for group in chart.groups), LEFT, RIGHT)
    if metric == "accuracy":
        low, high = (0.0, 1.0) if chart.measure == "accuracy" else _range(chart)
        return rounds, Axis(low, high, BOTTOM, TOP)
    values = np.concatenate([group.curve(metric).ravel() for group in chart.groups])
    values = values[(values >= _FLOOR) & (values <= _CEILING)]
    low, high = (values.min(), values.max()) if len(values) else (0.1, 1.0)
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    return rounds, Axis(10.0**first, 10.0**last, BOTTOM, TOP, log=True)


def _range(chart: Chart) -> tuple[float, float]:
    """From zero, or the least, to the most of a measure that has no bounds of its own."""
    values = np.concatenate([group.curve(key).ravel() for group in chart.groups for key in group.columns("accuracy")])
    values = values[np.abs(values) <= _CEILING]
    low, high = (min(0.0, float(values.min())), max(0.0, float(values.max()))) if len(values) else (0.0, 1.0)
    return low, high if high > low else low + 1


def draw(chart: Chart, metric: str) -> Markup:
    """One metric of a panel as an SVG element."""
    across, up = axes(chart, metric)
    curves = "".join(_curve(k, group, metric, across, up) for k, group in enumerate(chart.groups))
    title = escape(f"{chart.stamp} {chart.title}: {_named(chart, metric)} against rounds".lstrip())
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" data-metric="{metric}"'
        f' data-last="{across.high:.0f}" data-left="{LEFT}" data-right="{RIGHT}" data-width="{WIDTH}">'
        f"{_grid(across, up)}{_stamp(chart.stamp)}{curves}"
        f'<line class="cursor" y1="{TOP}" y2="{BOTTOM}" hidden=""/></svg>'
    )


def _stamp(words: str) -> str:
    """The words that say that a panel is not at full size, large and pale across it."""
    if not words:
        return ""
    x, y, size = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "large" if len(words) < 8 else "small"
    place = f'x="{x:g}" y="{y:g}" transform="rotate(-22 {x:g} {y:g})" text-anchor="middle"'
    return f'<text class="stamp {size}" {place} dominant-baseline="middle">{escape(words)}</text>'


def _grid(across: Axis, up: Axis, xlabel: str = "round") -> str:
    lines = []
    for value, label in up.ticks():
        y = up.places(np.array(value)).item()
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in across.ticks():
        x = across.places(np.array(value)).item()
        lines.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>')
        lines.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{label}</text>')
    lines.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    lines.append(f'<text x="{(LEFT + RIGHT) / 2:g}" y="{HEIGHT - 4}" text-anchor="middle">{escape(xlabel)}</text>')
    return "".join(lines)


def _curve(k: int, group: RunSet, metric: str, across: Axis, up: Axis) -> str:
    """Bands under lines under marks; the first column solid, the second dashed."""
    columns = group.columns(metric)
    x = across.places(np.array(group.rounds(columns[0]), np.float64))
    kinds = ("mean", "worst") if len(columns) > 1 else ("only",)
    parts = []
    for kind, column in zip(kinds, columns, strict=True):
        mean, low, high = (up.places(values) for values in group.curve(column))
        if len(group.runs) > 1:
            around = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
            parts.append(f'<polygon class="band {kind}" points="{_points(around)}"/>')
        parts.append(f'<polyline class="line {kind}" points="{_points(zip(x, mean, strict=True))}"/>')
        if len(x) <= _MANY:
            parts.append("".join(_mark(k, kind, *place) for place in zip(x, mean, strict=True)))
    return f'<g class="curve c{k % len(COLOURS)}" data-curve="{k}">{"".join(parts)}</g>'


def _mark(k: int, kind: str, x: float, y: float) -> str:
    return f'<path class="mark {kind}" d="{_MARKS[shape(k)]}" transform="translate({x:.1f} {y:.1f})"/>'


def shape(k: int) -> int:
    """Which mark a curve has: seven colours and four marks, so that no two of 28 curves look alike.

    >>> len({(k % len(COLOURS), shape(k)) for k in range(28)})
    28
    """
    return k % len(_MARKS)


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def swatch(k: int) -> Markup:
    """The sign of a curve in a legend."""
    return Markup(f'<svg class="swatch c{k % len(COLOURS)}" viewBox="0 0 28 12" aria-hidden="true">{_sign(k)}</svg>')


def _sign(k: int) -> str:
    return f'<path class="line" d="M1 6H27"/><path class="mark" d="{_MARKS[shape(k)]}" transform="translate(14 6)"/>'


def values(chart: Chart, metric: str) -> list[dict[str, Any]]:
    """What the page's script shows under the pointer, curve by curve, with six digits."""
    return [
        {
            "rounds": group.rounds(group.columns(metric)[0]),
            "seeds": len(group.runs),
            "columns": [
                [[float(f"{v:.6g}") if math.isfinite(v) else None for v in series] for series in group.curve(column)]
                for column in group.columns(metric)
            ],
        }
        for group in chart.groups
    ]


def scatter(points: Sequence[tuple[str, float, float]], xlabel: str) -> Markup:
    """(label, x, y) as labelled points, y from 0 to 1; labels of points at one place stand one below the other."""
    most = max((x for _, x, _ in points), default=1.0) or 1.0
    across, up = Axis(0, nice_step(most / 4) * 5, LEFT, RIGHT), Axis(0, 1, BOTTOM, TOP)
    marks, below = [], -math.inf
    for k, (label, x, y) in enumerate(sorted(points, key=lambda point: -point[2])):
        left, top = across.places(np.array(x)).item(), up.places(np.array(y)).item()
        below = max(top, below + 11)
        side = f'x="{left + 8:.1f}"' if left < RIGHT - 130 else f'x="{left - 8:.1f}" text-anchor="end"'
        marks.append(
            f'<g class="c{k % len(COLOURS)}"><title>{escape(label)}: {y:.4f}, {x:,.4g} {escape(xlabel)}</title>'
            f'{_mark(k, "mean", left, top)}<text class="label" {side} y="{below + 4:.1f}">{escape(label)}</text></g>'
        )
    return Markup(
        f'<svg class="points" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="accuracy against {escape(xlabel)}">'
        f"{_grid(across, up, xlabel)}{''.join(marks)}</svg>"
    )


_FILE_STYLE = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#d9dee3}.axis,.tick{stroke:#5c6670}.band{opacity:.16}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}.line.worst{stroke-dasharray:6 4;stroke-width:1.6}"
    ".stamp{fill:#b23c00;opacity:.14;font-weight:700}.stamp.large{font-size:84px}.stamp.small{font-size:44px}"
)


def _named(chart: Chart, metric: str) -> str:
    return chart.measure if metric == "accuracy" else metric


def _described(chart: Chart, metric: str) -> str:
    lowest = "lowest" if chart.groups[0].more_is_better else "highest"
    return f"{chart.words}, mean (dashed: the node that ends {lowest})" if metric == "accuracy" else metric


def svg_file(chart: Chart, metric: str) -> str:
    """The same drawing as a file of its own, with its title and its legend."""
    colours = "".join(
        f".c{k} .line{{stroke:{c}}}.c{k} .band,.c{k} .mark{{fill:{c}}}.c{k} .mark.worst{{fill:#fff;stroke:{c}}}"
        for k, c in enumerate(COLOURS)
    )
    inside = draw(chart, metric).partition(">")[2].rpartition("<line")[0]
    legend = "".join(
        f'<g class="c{k % len(COLOURS)}" transform="translate({LEFT} {HEIGHT + 16 * k})">{_sign(k)}'
        f'<text x="34" y="10">{escape(group.label)}</text></g>'
        for k, group in enumerate(chart.groups)
    )
    top, tall = -20, HEIGHT + 16 * len(chart.groups) + 24
    what = _described(chart, metric)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {WIDTH} {tall}" width="{WIDTH}" height="{tall}">'
        f"<style>{_FILE_STYLE}{colours}</style>"
        f'<text x="{LEFT}" y="-4">{escape(f"{chart.title}: {what}")}</text>{inside}{legend}</svg>\n'
    )


def png_figure(chart: Chart, metric: str) -> "Figure":
    """The same curves drawn by matplotlib, for slides and documents that take no SVG."""
    figure, place = canvas(7.0, 4.2 + 0.22 * len(chart.groups))
    across, up = axes(chart, metric)
    for k, group in enumerate(chart.groups):
        columns, colour = group.columns(metric), COLOURS[k % len(COLOURS)]
        rounds = group.rounds(columns[0])
        for column, style in zip(columns, ("-", "--"), strict=False):
            mean, low, high = np.clip(group.curve(column), up.low, up.high)
            mark = "osD^"[shape(k)] if len(rounds) <= _MANY else ""
            label = group.label if style == "-" else None
            place.plot(rounds, mean, style, marker=mark, markersize=3.5, color=colour, label=label)
            if len(group.runs) > 1:
                place.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    place.set(xlabel="round", yscale="log" if up.log else "linear")
    place.set_title(f"{chart.title}\n{_described(chart, metric)}", fontsize=10)
    place.set(xlim=(0, across.high), ylim=(up.low, up.high * (1 if up.log else 1.02)))
    stamp(place, chart.stamp)
    figure.legend(frameon=False, loc="outside lower left")
    return figure


def histogram(counts: Sequence[int], b_hat: int) -> Markup:
    """How often an honest node met so many hostile peers in a round, and the b_hat that was planned for."""
    bars, step, height = bins(counts, b_hat), 26, 70
    most = max((count for *_, count in bars), default=1) or 1
    parts = []
    for k, (first, last, count) in enumerate(bars):
        tall = max(height * count / most, 1.5) if count else 0
        name = f"{first}" if first == last else f"{first} to {last}"
        parts.append(
            f'<rect class="{"over" if first > b_hat else "within"}" x="{k * step + 3}" y="{height - tall:.1f}" '
            f'width="{step - 6}" height="{tall:.1f}"><title>{count:,} times {name} hostile</title></rect>'
            f'<text x="{k * step + step // 2}" y="{height + 14}" text-anchor="middle">{first}</text>'
        )
    edge = sum(first <= b_hat for first, _, _ in bars) * step
    parts.append(f'<line class="limit" x1="{edge}" x2="{edge}" y1="0" y2="{height}"/>')
    wide = len(bars) * step + 2
    return Markup(
        f'<svg class="histogram" viewBox="0 0 {wide} {height + 18}" style="max-width:{wide}px" role="img" '
        f'aria-label="hostile peers met by a node in a round">{"".join(parts)}</svg>'
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


# --- heat map --------------------------------------------------------------------------------------------------------


_STOPS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
"""Cividis, from dark blue to yellow: evenly brighter, and alike for most kinds of colour blindness."""


@dataclass(frozen=True)
class HeatCell:
    """A value from 0 to 1, or None where there is none, and what is shown under the pointer."""

    value: float | None
    hover: str
    missing: str = "no result"

    @property
    def colour(self) -> str:
        """Of the cell."""
        return shade(self.value or 0.0)

    @property
    def ink(self) -> str:
        """Of the number in it."""
        return "#000000" if _brightness(self.colour) > 0.4 else "#ffffff"


def shade(value: float) -> str:
    """The colour of a value from 0 to 1.

    >>> shade(0.0), shade(1.0), shade(0.5)
    ('#00224e', '#fee838', '#7d7c76')
    """
    at = min(max(value, 0.0), 1.0) * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    return mixed(_STOPS[low], _STOPS[low + 1], at - low)


def mixed(colour: str, other: str, share: float) -> str:
    """A colour with so much of another in it."""
    pairs = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def channels(colour: str) -> list[int]:
    """Red, green and blue, from 0 to 255."""
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def _brightness(colour: str) -> float:
    red, green, blue = channels(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
