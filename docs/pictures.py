"""Pictures of the page "The idea in pictures", drawn when the site is built."""

from typing import Any

import numpy as np

from rpel.studies import plots

HONEST, HOSTILE = plots.COLOURS[:2]


def _ring(count: int) -> Any:
    angle = np.linspace(np.pi / 2, np.pi / 2 - 2 * np.pi, count, endpoint=False)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _nodes(axes: Any, places: Any, hostile: set[int], me: int | None = None) -> None:
    colours = [HOSTILE if i in hostile else HONEST for i in range(len(places))]
    axes.scatter(*places.T, s=260, c=colours, zorder=3, edgecolors=plots.PAPER)
    if me is not None:
        axes.scatter(*places[me], s=420, facecolors="none", edgecolors=plots.INK, linewidths=2, zorder=4)
    axes.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
    axes.axis("off")


def _arrow(axes: Any, start: Any, end: Any, colour: str) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 10, "shrinkB": 12, "lw": 1.6},
    )


def round_picture() -> Any:
    """Local step, pull, aggregate."""
    places, hostile, me, asked = _ring(12), {2, 7, 10}, 0, [2, 4, 5, 8, 10]
    figure, (panels,) = plots.canvas(10, 3.6, 1, 3)
    titles = ["1  local step", "2  pull s = 5 random peers", "3  aggregate, tolerating b_hat = 2"]
    for axes, title in zip(panels, titles, strict=True):
        _nodes(axes, places, hostile, me)
        axes.set_title(title, fontsize=11)
    for i in range(12):
        if i not in hostile:
            panels[0].annotate(
                "", places[i] * 0.72, places[i], arrowprops={"arrowstyle": "-|>", "color": HONEST, "lw": 1.6}
            )
    for j in asked:
        _arrow(panels[1], places[j], places[me], HOSTILE if j in hostile else HONEST)
    for j in asked:
        panels[2].plot(*np.stack([places[j], places[me]]).T, color=HOSTILE if j in hostile else HONEST,
            lw=1.6,
                       linestyle=":" if j in hostile else "-", alpha=0.5 if j in hostile else 1)  # fmt: skip
    figure.supxlabel("blue: honest, orange: hostile, ringed: the node that pulls", fontsize=9)
    return figure


def push_picture() -> Any:
    """The hostile share of what one victim holds, push against pull."""
    rng = np.random.default_rng(0)
    rounds = np.arange(1, 201)
    figure, ((axes,),) = plots.canvas(7, 3)
    pulled = rng.hypergeometric(10, 89, 16, size=200) / 17
    honest = rng.binomial(89, 16 / 99, size=200)
    axes.plot(
        rounds, 10 / (honest + 11), color=HOSTILE, lw=1.2, label="push: all 10 hostile nodes send every round"
    )
    axes.plot(rounds, pulled, color=HONEST, lw=1.2, label="pull: 16 peers drawn by the victim")
    axes.axhline(0.5, color=plots.SOFT, linestyle="--", lw=1)
    axes.set(xlabel="round", ylabel="hostile share", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set_title("What one of 100 nodes holds, 10 of them hostile", fontsize=11)
    return figure


def trim_picture() -> Any:
    """One coordinate: honest values, forged ones, mean and trimmed mean."""
    rng = np.random.default_rng(1)
    honest, forged = rng.normal(0.5, 0.12, 9), np.full(7, 2.0) + rng.normal(0, 0.02, 7)
    values = np.sort(np.concatenate([honest, forged]))
    figure, ((axes,),) = plots.canvas(7, 1.9)
    axes.scatter(honest, np.zeros(9), color=HONEST, s=60, label="honest", zorder=3)
    axes.scatter(forged, np.zeros(7), color=HOSTILE, s=60, label="forged", zorder=3)
    axes.axvline(values.mean(), color=plots.SOFT, linestyle="--", label="mean")
    axes.axvline(values[7:-7].mean(), color=plots.INK, label="trimmed mean, f = 7")
    axes.set(yticks=[], xlabel="value of one coordinate")
    axes.spines["left"].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.35))
    return figure
