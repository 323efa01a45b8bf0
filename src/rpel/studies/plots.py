"""All figures, in one style, drawn by matplotlib, which is imported when something is drawn.

An SVG keeps its text as text and follows the reader's light or dark theme: it is drawn in light colours, and
a style sheet inside it maps each of them (`DARK`) where the screen is dark. One width for all curves; colour
and marker tell settings apart, solid and dashed tell the mean from the worst node, and the legend says so.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rpel.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from pandas import DataFrame

    from rpel.planning import Plan

Style = Literal["screen", "paper"]

PAPER, INK, SOFT, GRID = "#ffffff", "#1c2126", "#5c6670", "#d9dee3"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
MARKERS = "osD^vP*X"
DARK = {
    PAPER: "#14181c", INK: "#e6eaee", SOFT: "#9ba6b1", GRID: "#333b43", "#0072b2": "#59a3cd",
    "#d55e00": "#f0874a", "#009e73": "#3fc79c", "#cc79a7": "#dfa5c4", "#e69f00": "#f0bd4f",
    "#56b4e9": "#8fd0f4",
}  # fmt: skip
"""Each colour of a drawing, and the one in its place on a dark screen."""
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
COLUMN_INCHES = 3.4
"""The width of one column of a two-column paper."""
MARKS = 10
"""Markers on a curve."""
LARGEST = 1e12
"""What logarithmic axes show of a number that overflowed."""


# --- figures ------------------------------------------------------------------------------------------------


def canvas(
    width: float = 7.0, height: float = 4.2, rows: int = 1, columns: int = 1, **shared: Any
) -> "tuple[Figure, NDArray[Any]]":
    """Make a figure of (rows, columns) axes without a display; a notebook shows it."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows although pyplot is never imported."""

        def _repr_svg_(self) -> str:
            return svg(self)

    figure = Shown(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.tick_params(which="both", color=SOFT, labelcolor=SOFT)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.patch.set_visible(False)
    return figure, grid


def curves(
    axes: "Axes", table: "DataFrame", columns: Sequence[str], x: str = "round", unit: float = 1.0
) -> None:
    """Draw columns of a table against x, one curve for each ``curve``: the first solid, the second dashed.

    Lines are means over the seeds, bands go from the lowest to the highest. The table has the columns curve,
    seed, round, x, and those drawn.
    """
    for k, (label, mine) in enumerate(table.groupby("curve", sort=False)):
        at = mine.groupby("round")[x].first() / unit
        style: dict[str, Any] = {"color": COLOURS[k % len(COLOURS)], "linewidth": 1.8}
        for column, line in zip(columns, ("-", "--"), strict=False):
            seeds = mine.pivot(index="round", columns="seed", values=column).clip(upper=LARGEST)
            seeds = seeds[seeds.notna().all(axis=1)]
            step = max(1, len(seeds) // MARKS)
            (drawn,) = axes.plot(at[seeds.index], seeds.mean(axis=1), line, **style)
            if line == "-":
                drawn.set(label=str(label), marker=MARKERS[k % len(MARKERS)], markersize=4.5)
                drawn.set_markevery((k % step, step))
            if seeds.shape[1] > 1:
                low, high = seeds.min(axis=1), seeds.max(axis=1)
                axes.fill_between(at[seeds.index], low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.set_xlim(left=0)
    if x == "round":
        axes.locator_params(axis="x", integer=True)


def explain(axes: "Axes", meanings: Sequence[str]) -> None:
    """Add what solid and dashed lines mean to the legend."""
    for words, line in zip(meanings, ("-", "--"), strict=False):
        axes.plot([], [], line, color=SOFT, linewidth=1.8, label=words)


def stamp(axes: "Axes", words: str) -> None:
    """Write words, if there are any, large and pale behind the curves."""
    if words:
        axes.text(
            0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, zorder=0, weight="bold",
            fontsize=44 if len(words) < 8 else 24, rotation=25, color=COLOURS[1], alpha=0.15,
        )  # fmt: skip


def shade(value: float) -> tuple[str, str]:
    """Return the colour of a cell with a value from 0 to 1, and that of letters on it.

    The colours are cividis, alike for the colour-blind; neither changes with the theme.

    >>> shade(0.0), shade(1.0)
    (('#00224e', '#fdfdfd'), ('#fee838', '#010101'))
    """
    import matplotlib
    from matplotlib.colors import to_hex

    colour = matplotlib.colormaps["cividis"](min(max(value, 0.0), 1.0))
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return to_hex(colour), "#010101" if luminance > 0.179 else "#fdfdfd"  # the one with more contrast (WCAG)


def heat_maps(maps: "dict[str, DataFrame]") -> "Figure":
    """Draw matrices of accuracies with equal labels below each other; a missing value is a dash."""
    from matplotlib.patches import Rectangle

    rows, columns = next(iter(maps.values())).shape
    figure, grid = canvas(0.62 * columns + 2.4, 0.28 * rows * len(maps) + 1.9, len(maps), 1, sharex=True)
    for axes, (title, matrix) in zip(grid[:, 0], maps.items(), strict=True):
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for i, j in ((i, j) for i in range(rows) for j in range(columns)):
            value = float(matrix.iloc[i, j])
            missing = math.isnan(value)
            colour, ink = ("none", SOFT) if missing else shade(value)
            axes.add_patch(Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, facecolor=colour))
            text = "–" if missing else f"{value:.2f}"
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color=ink)
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
        tilted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(columns), matrix.columns, fontsize=9, **tilted)
        axes.set_yticks(range(rows), matrix.index, fontsize=9)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10.5, loc="left")
    return figure


# --- figures of runs ----------------------------------------------------------------------------------------


def table_of(runs: Sequence[Run], label: str = "") -> "DataFrame":
    """Return the curves of runs of one setting, with its label and their seeds."""
    import pandas

    return pandas.concat(
        [run.curve.assign(curve=label, seed=run.spec.seed) for run in runs], ignore_index=True
    )


def ends(run: Run) -> tuple[list[str], list[str]]:
    """Return the columns of mean and worst node, and what a legend says of them."""
    lowest = "lowest" if run.more_is_better else "highest"
    words = ["mean of the honest nodes", f"node that ends {lowest}"]
    return [f"{run.key}_mean", f"{run.key}_lowest"], words


def measured(run: Run) -> str:
    """Return what the axis of a run's measure says."""
    if run.measure == "accuracy":
        return "test accuracy"
    return f"{run.measure} on test data ({'more' if run.more_is_better else 'less'} is better)"


def of_runs(runs: Sequence[Run]) -> "Figure":
    """Draw mean and worst node against rounds, with bands over the seeds."""
    run, spec = runs[0], runs[0].spec
    figure, ((axes,),) = canvas()
    columns, words = ends(run)
    curves(axes, table_of(runs, spec.method), columns)
    explain(axes, words)
    hostile = f"{spec.hostile_count:,} of {spec.nodes:,} hostile ({spec.attack})"
    seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
    axes.set(xlabel="round", ylabel=measured(run), title=f"{spec.name}: {hostile}, pull {spec.pull}{seeds}")
    if run.measure == "accuracy":
        axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="best")
    return figure


def of_plan(plan: "Plan") -> "Figure":
    """Draw the hostile share b_hat/(s+1) against s, with its quantiles and the chosen pull."""
    case = plan.question()
    most = min(case.nodes - 1, max(2 * plan.pull, 20))
    pulls = sorted({*range(1, most, max(1, most // 200)), most})
    levels = [replace(case, confidence=q) for q in (0.01, 0.5, 0.99)]
    low, median, high = ([one.b_hat(s) / (s + 1) for s in pulls] for one in levels)
    figure, ((axes,),) = canvas()
    band: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.2, "linewidth": 0, "step": "mid"}
    axes.fill_between(pulls, low, high, label="1 % to 99 %", **band)
    axes.step(pulls, median, where="mid", color=COLOURS[0], label="median")
    axes.axhline(0.5, color=COLOURS[1], linestyle="--", linewidth=1, label="one half: no rule survives")
    axes.axvline(plan.pull, color=COLOURS[2], linewidth=1.5, label=f"plan: pull {plan.pull}")
    sizes = f"n = {plan.nodes:,}, b = {plan.byzantine:,}, T = {plan.rounds:,}"
    axes.set(xlabel="pulled peers s", ylabel="hostile share b̂ / (s+1)", ylim=(0, None))
    axes.set(title=f"{sizes}: worst hostile share any node ever meets", xlim=(min(pulls), max(pulls)))
    axes.legend(frameon=False)
    return figure


# --- files --------------------------------------------------------------------------------------------------


def save(figure: "Figure", path: str | Path, style: Style = "screen") -> None:
    """Write the figure in the format of its suffix (.svg, .png, .pdf), making the folder if needed.

    ``style="paper"`` sets it for one column of a paper: 3.4 inches wide, 8-point Times-like letters, no title
    (a paper has a caption). Equal data give equal bytes. Raises ValueError for a format that matplotlib
    cannot write, and for a name without suffix.
    """
    import matplotlib

    path = Path(path)
    if not path.suffix:
        raise ValueError(f"{str(path)!r} does not say in which format to draw: give a name that ends in .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    if style == "paper":
        _for_paper(figure)
    if path.suffix == ".svg":
        path.write_text(svg(figure, follow=style == "screen"), "utf-8")
        return
    _colour(figure)
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters that publishers accept and search finds
        figure.savefig(path, dpi=150, metadata=metadata)


def save_all(figure: "Figure", stem: Path, style: Style = "screen") -> None:
    """Write STEM.svg and STEM.png, for a paper also STEM.pdf."""
    for suffix in (".svg", ".png"):
        save(figure, stem.with_name(stem.name + suffix))
    if style == "paper":  # last: it changes the figure
        save(figure, stem.with_name(stem.name + ".pdf"), style)


def svg(figure: "Figure", follow: bool = True) -> str:
    """Return the figure as the text of an SVG file that follows the reader's theme, or not."""
    import matplotlib

    _colour(figure)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rpel", "svg.fonttype": "none" if follow else "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    if not follow:
        return text.getvalue()
    rules = "".join(
        f'[style*="{key}: {light}"]{{{key}:{dark}!important}}'
        for light, dark in DARK.items()
        for key in ("stroke", "fill")
    )
    sheet = f'<style type="text/css">@media screen and (prefers-color-scheme:dark){{{rules}}}</style>'
    drawing = re.sub(r"(font: [^;\"]*?px) '[^;\"]*", rf"\1 {FONTS}", text.getvalue())
    return drawing.replace("</defs>", f"{sheet}\n </defs>", 1)


def _colour(figure: "Figure") -> None:
    """Set black letters in the ink of all figures, which a dark screen turns light."""
    from matplotlib.text import Text

    figure.set_facecolor(PAPER)
    for text in figure.findobj(Text):
        if text.get_color() in ("black", "#000000"):
            text.set_color(INK)


def _for_paper(figure: "Figure") -> None:
    """Make it one column wide, with letters of 7 and 8 points, thinner lines and no titles."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    if width == COLUMN_INCHES:  # it was saved for a paper before
        return
    figure.set_size_inches(COLUMN_INCHES, max(height * COLUMN_INCHES / width, 1.6))
    figure.suptitle("")
    for axes in figure.axes:
        axes.set_title("")
        axes.tick_params(which="both", labelsize=7, labelfontfamily="STIXGeneral", labelcolor=INK)
    for text in figure.findobj(Text):
        text.set(fontsize=8 if float(text.get_fontsize()) >= 10 else 7, family="STIXGeneral")
    for legend in figure.findobj(Legend):
        for text in legend.get_texts():
            text.set_fontsize(6.5)
    for line in figure.findobj(Line2D):
        line.set(linewidth=line.get_linewidth() * 0.6, markersize=line.get_markersize() * 0.6)
