"""Figures from plain arrays, all by matplotlib, which is imported when something is drawn and not before.

An SVG keeps its text as text and follows the reader's light or dark theme: it is drawn in light colours, and
a style sheet inside it maps each of them (``DARK``) where the screen is dark.
Tools that know no style sheets see it light.
"""

import io
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Style = Literal["screen", "paper"]

PAPER, INK, SOFT, GRID = "#ffffff", "#1c2126", "#5c6670", "#d9dee3"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
"""Okabe and Ito's palette, which colour-blind readers can tell apart, too."""
MARKERS = "osD^vP*X"
_FONTS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'.replace('"', "'")

DARK = {
    PAPER: "#14181c", INK: "#e6eaee", SOFT: "#9ba6b1", GRID: "#333b43", "#0072b2": "#59a3cd",
    "#d55e00": "#f0874a", "#009e73": "#3fc79c", "#cc79a7": "#dfa5c4", "#e69f00": "#f0bd4f",
    "#56b4e9": "#8fd0f4",
}  # fmt: skip
"""Each colour of a drawing, and the one in its place on a dark screen."""

_COLUMN = 3.4  # inches: one column of a two-column paper
_NEAR = 0.012  # of the height of the axes: curves that lie closer look like one


def dark_style() -> str:
    """The style sheet that turns drawings dark with the reader's screen; paper stays light.

    >>> '[style*="stroke: #0072b2"]{stroke:#59a3cd!important}' in dark_style()
    True
    """
    rules = "".join(
        f'[style*="{key}: {light}"]{{{key}:{dark}!important}}'
        for light, dark in DARK.items()
        for key in ("stroke", "fill")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


# --- figures ------------------------------------------------------------------------------------------------


@cache
def _shown() -> "type[Figure]":
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows although pyplot, which would see to that, is never imported."""

        def _repr_svg_(self) -> str:
            return svg(self)

    return Shown


def canvas(width: float = 7.0, height: float = 4.2) -> "tuple[Figure, Axes]":
    """An empty figure in the look of all figures, drawn without a display.

    >>> canvas()[0]._repr_svg_()[:5]  # what a notebook shows
    '<?xml'
    """
    figure = _shown()(figsize=(width, height), layout="constrained")
    return figure, plain(figure.add_subplot())


def panels(
    width: float, height: float, rows: int, columns: int, **shared: Any
) -> "tuple[Figure, NDArray[Any]]":
    """A figure of several axes, (rows, columns) of them."""
    figure = _shown()(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in grid.flat:
        plain(axes)
    return figure, grid


def fixed(width: float, height: float) -> "Figure":
    """An empty figure of this size in points, with no layout: for pages that know where its axes lie."""
    return _shown()(figsize=(width / 72, height / 72))


def plain(axes: "Axes") -> "Axes":
    """Axes in the look of all figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", color=SOFT, labelcolor=SOFT)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    return axes


def curve(axes: "Axes", x: Any, y: "NDArray[Any]", colour: str, alpha: float = 0.2, **style: Any) -> None:
    """The mean of y (k, e) over its rows, and a band from the lowest to the highest where there are
    several."""
    axes.plot(x, y.mean(axis=0), color=colour, **style)
    if len(y) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=alpha, linewidth=0)


def widths(curves: "Sequence[tuple[Sequence[float], NDArray[Any]]]", height: float = 1.0) -> list[float]:
    """A line width for each curve (x, y), in the order in which they are drawn:
    wider where later ones cover it.

    >>> import numpy as np
    >>> rounds, flat = [0, 10], np.array([0.1, 0.1])
    >>> widths([(rounds, flat), (rounds, flat + 0.5), (rounds, flat + 0.001)])
    [4.2, 1.8, 1.8]
    """
    import numpy as np

    def covers(j: int, i: int) -> bool:
        (x, y), (other, values) = curves[i], curves[j]
        with np.errstate(invalid="ignore"):
            apart = np.abs(np.interp(x, other, values) - y)
        return (
            bool(np.median(apart[np.isfinite(apart)]) < _NEAR * height) if np.isfinite(apart).any() else False
        )

    above = [sum(covers(j, i) for j in range(i + 1, len(curves))) for i in range(len(curves))]
    return [1.8 + 2.4 * min(count, 3) for count in above]


def shade(value: float) -> tuple[str, str]:
    """The colour of a cell with a value from 0 to 1, and of letters on it: cividis,
    alike for the colour-blind.

    >>> shade(0.0), shade(1.0)
    (('#00224e', '#fdfdfd'), ('#fee838', '#010101'))
    """
    import matplotlib
    from matplotlib.colors import to_hex

    red, green, blue, _ = matplotlib.colormaps["cividis"](min(max(value, 0.0), 1.0))
    light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.4
    return to_hex((red, green, blue)), "#010101" if light else "#fdfdfd"  # neither turns with the theme


def stamp(axes: "Axes", words: str) -> None:
    """Write words, if there are any, large and pale behind what is drawn."""
    if words:
        text = axes.text(
            0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, zorder=0,
            fontsize=44 if len(words) < 8 else 28, rotation=25, color=COLOURS[1], alpha=0.13, weight="bold",
        )  # fmt: skip
        name(text, "stamp")


# --- files --------------------------------------------------------------------------------------------------


def save(figure: "Figure", path: str | Path, style: Style = "screen") -> None:
    """Write the figure in the format of its suffix (.svg, .png, .pdf), making the folder when it is missing.

    ``style="paper"`` sets it for one column of a paper: 3.4 inches wide, 8-point Times-like letters, no title
    (a paper has a caption). Equal data give equal bytes: no dates, and the names inside an SVG come from its
    content alone. Raises ValueError for a format matplotlib cannot write, and for a name without suffix.
    """
    import matplotlib

    path = Path(path)
    if not path.suffix:
        raise ValueError(f"{str(path)!r} does not say in which format to draw: give a name that ends in .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    if style == "paper":
        _for_paper(figure)
    if path.suffix == ".svg":
        path.write_text(svg(figure, follows=style == "screen"), "utf-8")
        return
    _coloured(figure)
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # letters that publishers accept and search finds
        figure.savefig(path, dpi=150, metadata=metadata)


def svg(figure: "Figure", follows: bool = True, salt: str = "rpel") -> str:
    """The figure as the text of an SVG file; ``follows`` the reader's theme."""
    import matplotlib

    _coloured(figure)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none" if follows else "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = re.sub(r'<g id="rpel-([^"]*)">', _named, text.getvalue())
    if not follows:
        return drawing
    drawing = re.sub(r"(font: [^;\"]*?px) '[^;\"]*", rf"\1 {_FONTS}", drawing)
    return drawing.replace("</defs>", f'<style type="text/css">{dark_style()}</style>\n </defs>', 1)


def name(artist: Any, kind: str, curve: int | None = None, title: str = "") -> None:
    """Give a drawn thing a class, the number of its curve, and words under the pointer,
    for pages that show it."""
    artist.set_gid("rpel-" + "|".join([quote(kind), "" if curve is None else str(curve), quote(title)]))


def _named(match: re.Match[str]) -> str:
    kind, curve, title = match[1].split("|")
    number = f' data-curve="{curve}"' if curve else ""
    return f'<g class="{escape(unquote(kind))}"{number}>' + (
        f"<title>{escape(unquote(title))}</title>" if title else ""
    )


def inline(figure: "Figure", salt: str) -> str:
    """What is inside the SVG, for a page that has the style sheet: no names that another drawing may have,
    no links.

    Nothing is clipped, so what is drawn must stay within its axes. ``salt`` tells drawings of one page apart.
    """
    figure.patch.set_visible(False)
    inside = svg(figure, salt=salt).partition("</metadata>")[2].rpartition("</svg>")[0]
    inside = re.sub(
        r"<style.*?</style>|<clipPath.*?</clipPath>| clip-path=\"[^\"]*\"", "", inside, flags=re.DOTALL
    )
    return re.sub(r' id="(?!m[0-9a-f]{10}")[^"]*"|<!--.*?-->', "", inside)


def _coloured(figure: "Figure") -> None:
    """Letters in the ink of all figures, which a dark screen turns light."""
    from matplotlib.text import Text

    figure.set_facecolor(PAPER)
    for text in figure.findobj(Text):
        if text.get_color() in ("black", "#000000"):
            text.set_color(INK)


def _for_paper(figure: "Figure") -> None:
    """One column wide, letters of 7 and 8 points, thinner lines, no titles."""
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    if width == _COLUMN:  # it was saved for a paper before
        return
    scale = _COLUMN / width
    figure.set_size_inches(_COLUMN, max(height * scale, 1.6))
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


# --- drawings -----------------------------------------------------------------------------------------------


def accuracy(
    title: str,
    rounds: "NDArray[np.int64]",
    values: "NDArray[np.float64]",
    label: str = "test accuracy",
    more_is_better: bool = True,
) -> "Figure":
    """Mean, worst and the node that ends worst; values (e, h), or (seeds, e, h) with bands over the seeds."""
    import numpy as np

    runs = values if values.ndim == 3 else values[None]
    last = [int(run[-1].argmin() if more_is_better else run[-1].argmax()) for run in runs]
    followed = np.stack([run[:, node] for run, node in zip(runs, last, strict=True)])
    figure, axes = canvas()
    worst = runs.min(axis=2) if more_is_better else runs.max(axis=2)
    end = "lowest" if more_is_better else "highest"
    curves = {
        "mean of the honest nodes": runs.mean(axis=2),
        "worst node of each round": worst,
        f"node that ends {end}": followed.mean(axis=0, keepdims=True),
    }
    bounded = values.min() >= 0 and values.max() <= 1
    height = 1.02 if bounded else float(np.ptp(values)) or 1.0
    wide = widths([(rounds.tolist(), seeds.mean(axis=0)) for seeds in curves.values()], height)
    for k, (words, seeds) in enumerate(curves.items()):
        style: dict[str, Any] = {"linestyle": "--" if k == 2 else "-", "linewidth": wide[k], "label": words}
        if k < 2 and len(rounds) <= 40:
            style |= {"marker": MARKERS[k], "markersize": wide[k] + 1.7}
        curve(axes, rounds, seeds, COLOURS[k], **style)
    axes.set(xlabel="round", ylabel=label if more_is_better else f"{label} (less is better)", title=title)
    if bounded:
        axes.set_ylim(0, 1.02)
    axes.set_xlim(0, float(rounds[-1]) * 1.02)
    axes.legend(frameon=False, loc="best")
    return figure


def fraction_against_pull(
    path: str | Path,
    pulls: Sequence[int],
    median: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    title: str,
    chosen: int | None = None,
    band: str = "1 % to 99 %",
    style: Style = "screen",
) -> None:
    """The effective adversarial fraction b̂/(s+1) against s, with its quantile band and the chosen s."""
    figure, axes = canvas()
    axes.fill_between(pulls, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, step="mid", label=band)
    axes.step(pulls, median, where="mid", color=COLOURS[0], label="median")
    axes.axhline(0.5, color=COLOURS[1], linestyle="--", linewidth=1, label="one half: no rule survives")
    if chosen is not None:
        axes.axvline(chosen, color=COLOURS[2], linewidth=1.5, label=f"plan: pull {chosen}")
    axes.set(xlabel="pulled peers s", ylabel="hostile share b̂ / (s+1)", title=title, ylim=(0, None))
    axes.set_xlim(min(pulls), max(pulls))
    axes.legend(frameon=False)
    save(figure, path, style)
