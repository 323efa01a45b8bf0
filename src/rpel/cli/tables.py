"""What `rpel watch`, `rpel network check` and `rpel network demo` draw. Every number is handed in."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rpel.operations.check import Checked
    from rpel.operations.watch import Seen

_STYLES = {"training": "green", "finished": "green", "starting": "yellow"}


def members_now(title: str, seen: Sequence["Seen"], hostile: Collection[str] = ()) -> Table:
    """One row a member; those known to be hostile are marked, since what they say of themselves means nothing."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    table.add_column("peer", no_wrap=True)
    for column in ("round", "accuracy", "pulls ok", "late", "refused", "failed", "degraded"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for member in seen:
        if member.id in hostile:
            table.add_row(Text(member.id, "magenta"), *[""] * 7, Text("hostile", "magenta"))
        elif not member.answered:
            table.add_row(member.id, *[""] * 7, Text(member.state, "red"))
        else:
            table.add_row(member.id, *_numbers(member), Text(member.state, _STYLES.get(member.state, "red")))
    return table


def _numbers(member: "Seen") -> list[str]:
    """Failed pulls are those whose answer was malformed or that reached nobody."""
    pulls = member.pulls
    failed = pulls["malformed"] + pulls["unreachable"]
    accuracy = "" if member.accuracy is None else f"{member.accuracy:.4f}"
    counts = (pulls["ok"], pulls["late"], pulls["refused"], failed, member.degraded)
    return [str(member.round), accuracy, *map(str, counts)]


def checked_members(checked: Sequence["Checked"]) -> Table:
    """One row a member, with a sentence on what is wrong."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("member")
    table.add_column("reachable")
    table.add_column("same file")
    for column in ("clock", "pull", "MB/s"):
        table.add_column(column, justify="right")
    table.add_column("remark", overflow="fold")
    for row in checked:
        table.add_row(
            row.id,
            _yes(row.reachable),
            _yes(row.same_membership),
            "" if row.clock_offset is None else f"{row.clock_offset:+.3f} s",
            "" if row.seconds is None else f"{row.seconds:.3f} s",
            "" if row.megabytes_per_second is None else f"{row.megabytes_per_second:.3g}",
            Text(row.remark, "green" if row.well else "red"),
        )
    return table


def _yes(value: bool | None) -> Text:
    return Text("" if value is None else "yes" if value else "no", "" if value is None else "green" if value else "red")
