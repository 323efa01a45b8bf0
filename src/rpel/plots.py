"""Figures from plain arrays. Nothing here knows where the numbers come from; matplotlib is imported when first used."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# Okabe and Ito's palette, told apart by colour-blind readers as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@cache
def _shown() -> "type[Figure]":
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows although pyplot, which would see to that, is never imported."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return Shown


def canvas(width: float = 7.0, height: float = 4.2) -> "tuple[Figure, Axes]":
    """An empty figure in the look of all figures, drawn without a display.

    >>> canvas()[0]._repr_png_()[1:4]  # what a notebook shows
    b'PNG'
    """
    figure = _shown()(figsize=(width, height), layout="constrained")
    return figure, plain(figure.add_subplot())


def plain(axes: "Axes") -> "Axes":
    """Axes in the look of all figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return axes


def curve(axes: "Axes", x: Any, y: "NDArray[Any]", colour: str, alpha: float = 0.2, **style: Any) -> None:
    """The mean of y (k, e) over its rows, and a band from the lowest to the highest where there are several."""
    axes.plot(x, y.mean(axis=0), color=colour, **style)
    if len(y) > 1:
        axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=alpha, linewidth=0)


def stamp(axes: "Axes", words: str) -> None:
    """Write words, if there are any, large and pale behind what is drawn."""
    if words:
        axes.text(
            0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, zorder=0,
            fontsize=44 if len(words) < 8 else 28, rotation=25, color=COLOURS[1], alpha=0.13, weight="bold",
        )  # fmt: skip


def save(figure: "Figure", path: str | Path) -> None:
    """Write the figure in the format of its suffix (.svg, .png, .pdf), making the folder when it is missing.

    Equal data give equal bytes: an SVG has no date, and the names inside it come from its content alone. Raises
    ValueError for a format matplotlib cannot write, and for a name without suffix.
    """
    import matplotlib

    path = Path(path)
    if not path.suffix:
        raise ValueError(f"{str(path)!r} does not say in which format to draw: give a name that ends in .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "rpel"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def accuracy(
    title: str,
    rounds: "NDArray[np.int64]",
    values: "NDArray[np.float64]",
    label: str = "test accuracy",
    more_is_better: bool = True,
) -> "Figure":
    """Mean, worst and the node that ends worst; values (e, h), or (seeds, e, h) with bands over the seeds."""
    runs = values if values.ndim == 3 else values[None]
    last = [int(run[-1].argmin() if more_is_better else run[-1].argmax()) for run in runs]
    lowest = sum(run[:, node] for run, node in zip(runs, last, strict=True)) / len(runs)
    figure, axes = canvas()
    worst = runs.min(axis=2) if more_is_better else runs.max(axis=2)
    curves = {"mean of the honest nodes": runs.mean(axis=2), "worst node of each round": worst}
    for colour, marker, (name, seeds) in zip(COLOURS, "os", curves.items(), strict=False):
        curve(axes, rounds, seeds, colour, marker=marker, markersize=3.5, label=name)
    end = "lowest" if more_is_better else "highest"
    axes.plot(rounds, lowest, color=COLOURS[2], linestyle="--", label=f"node that ends {end}")
    axes.set(xlabel="round", ylabel=label if more_is_better else f"{label} (less is better)", title=title)
    if values.min() >= 0 and values.max() <= 1:
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
    save(figure, path)


def messages_against_nodes(
    path: str | Path, nodes: Sequence[int], curves: dict[str, Sequence[float]], *, title: str
) -> None:
    """Messages per round against n on logarithmic axes, one labelled curve for each way of choosing s."""
    figure, axes = canvas()
    for colour, marker, (label, messages) in zip(COLOURS, "osD^", curves.items(), strict=False):
        axes.loglog(nodes, messages, color=colour, marker=marker, markersize=4, label=label)
    axes.set(xlabel="nodes n", ylabel="models sent per round", title=title)
    axes.legend(frameon=False)
    save(figure, path)


def network(
    path: str | Path,
    places: "NDArray[np.float64]",
    edges: Sequence[Sequence[int]],
    hostile: "NDArray[np.bool_]",
    *,
    title: str,
) -> None:
    """A graph: nodes at places (n, 2), hostile ones and their edges in another colour."""
    figure, axes = canvas(6.0, 6.0)
    axes.set_axis_off()
    for a, b in edges:
        bad = bool(hostile[a] or hostile[b])
        x, y = places[[a, b]].T
        axes.plot(x, y, color=COLOURS[1] if bad else "#999999", linewidth=0.7, alpha=0.6, zorder=1)
    for kind, colour, label in ((~hostile, COLOURS[0], "honest"), (hostile, COLOURS[1], "hostile")):
        x, y = places[kind].T
        axes.scatter(x, y, s=70, color=colour, label=label, zorder=2, edgecolor="white", linewidth=0.8)
    axes.set_title(title)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)
