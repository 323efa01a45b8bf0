"""A run's picture as SVG, in the look of `plots` but written here:
importing matplotlib takes as long as rounds do."""

import math
from collections.abc import Mapping
from html import escape

import numpy as np
from numpy.typing import NDArray

from rpel.plots import COLOURS, GRID, INK, PAPER, dark_style

Floats = NDArray[np.float64]

_MARKS = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", "M-3-3h6v6h-6z")
_MANY = 40  # points from which on they are not marked one by one
_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 620, 36, 350


def picture(title: str, label: str, rounds: NDArray[np.int64], curves: Mapping[str, Floats]) -> str:
    """Curves over rounds as an SVG document, the third one dashed; what overflowed lies at the top.

    >>> picture("A <run>", "accuracy", np.array([0, 10]), {"mean": np.array([0.1, 0.9])}).count("<polyline")
    1
    """
    last = max(1.0, 1.02 * float(rounds[-1]))
    low, high = _range(np.concatenate(list(curves.values())))

    def place(x: float, y: float) -> tuple[float, float]:
        y = min(high, max(low, high if math.isnan(y) else y))
        return (
            _LEFT + x / last * (_RIGHT - _LEFT),
            _BOTTOM - (y - low) / (high - low) * (_BOTTOM - _TOP),
        )

    lines = []
    for value, words in _ticks(low, high):
        y = place(0, value)[1]
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" style="stroke: {GRID}"/>')
        lines.append(_text(_LEFT - 8, y + 4, words, "end"))
    for value, words in _ticks(0, last):
        lines.append(_text(place(value, low)[0], _BOTTOM + 18, words))
    lines.append(f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" style="stroke: {INK}; fill: none"/>')
    for k, (name, values) in enumerate(curves.items()):
        drawn = [place(float(x), float(y)) for x, y in zip(rounds, values, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        lines.append(f'<polyline points="{points}" style="{_stroke(k)}"/>')
        if len(drawn) <= _MANY:
            lines += [_mark(k, x, y) for x, y in drawn]
        y = _BOTTOM - 60 + 18 * k
        lines += [f'<path d="M{_RIGHT - 196} {y}h28" style="{_stroke(k)}"/>', _mark(k, _RIGHT - 182, y)]
        lines.append(_text(_RIGHT - 160, y + 4, name, "start"))
    beside = f'<g transform="translate(16 {(_TOP + _BOTTOM) / 2:g}) rotate(-90)">{_text(0, 0, label)}</g>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
            f' height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<style type="text/css">{dark_style()}</style>',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill: {PAPER}"/>',
            _text(_WIDTH / 2, 20, title),
            _text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, "round"),
            beside,
            *(line for line in lines if line),
            "</svg>\n",
        ]
    )


def _range(values: Floats) -> tuple[float, float]:
    """From zero, or the least, to one for shares, else to the most."""
    finite = values[np.isfinite(values)]
    low, high = (min(0.0, float(finite.min())), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low == 0 and high <= 1:
        return 0.0, 1.02
    return low, high if high > low else low + 1


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """(value, label), about five of them, multiples of 1, 2 or 5 times a power of ten.

    >>> [words for _, words in _ticks(0, 61.2)]
    ['0', '20', '40', '60']
    """
    least = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(least))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))
    steps = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(k * step, f"{k * step:,.10g}") for k in steps]


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill: {INK}">{escape(words)}</text>'


def _stroke(k: int) -> str:
    return f"stroke: {COLOURS[k]}; fill: none; stroke-width: 1.7" + (
        "; stroke-dasharray: 6 4" if k > 1 else ""
    )


def _mark(k: int, x: float, y: float) -> str:
    """The sign of a point of curve k; none for what is dashed."""
    if k >= len(_MARKS):
        return ""
    return f'<path d="{_MARKS[k]}" transform="translate({x:.1f} {y:.1f})" style="fill: {COLOURS[k]}"/>'
