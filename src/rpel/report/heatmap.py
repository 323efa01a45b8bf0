"""A heat map as a table: it prints, sorts by row and by column, and tells its numbers to whoever cannot see colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STOPS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
"""Cividis, from dark blue to yellow: evenly brighter, and alike for most kinds of colour blindness."""


@dataclass(frozen=True)
class HeatCell:
    """A value from 0 to 1, or None where there is none, and what is shown under the pointer."""

    value: float | None
    hover: str
    missing: str = "no result"


def heat_map(
    name: str, corner: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[HeatCell]]
) -> str:
    """The table; cells row by row."""
    head = "".join(f'<th scope="col"><button type="button">{escape(one)}</button></th>' for one in columns)
    body = "".join(
        f'<tr><th scope="row"><button type="button">{escape(label)}</button></th>{"".join(map(_cell, line))}</tr>'
        for label, line in zip(rows, cells, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(corner)}">'
        f'<table class="heat" id="{name}"><thead><tr><th scope="col">{escape(corner)}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: HeatCell) -> str:
    hover = f' title="{escape(cell.hover)}"'
    if cell.value is None:
        return f'<td class="unable" data-key=""{hover}>{escape(cell.missing)}</td>'
    colour = shade(cell.value)
    ink = "#000000" if _brightness(colour) > 0.4 else "#ffffff"
    style = f"background:{colour};color:{ink}"
    return f'<td style="{style}" data-key="{cell.value!r}"{hover}>{cell.value:.3f}</td>'


def shade(value: float) -> str:
    """The colour of a value from 0 to 1.

    >>> shade(0.0), shade(1.0), shade(0.5)
    ('#00224e', '#fee838', '#7d7c76')
    """
    at = min(max(value, 0.0), 1.0) * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    pair = zip(_parts(_STOPS[low]), _parts(_STOPS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pair)


def _parts(colour: str) -> list[int]:
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def _brightness(colour: str) -> float:
    red, green, blue = _parts(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
