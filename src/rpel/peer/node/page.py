"""The page that a peer's operator looks at: how the training goes, seen from this peer alone.

Invariants: nothing can be changed from it, it runs no script and asks nobody for anything; members' ids and
organisations are hostile text, and everything but the page's own style is escaped.
"""

import base64
import hashlib
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rpel.peer.config.membership import PROTOCOL
from rpel.peer.io.service import PeerService
from rpel.peer.state.journal import Point
from rpel.text import count, duration, visible
from rpel.types import Outcome, PullResult
from rpel.version import __version__

REFRESH = 10
"""Seconds after which a browser looks again; a tenth of a period where that is more."""

_SHOWN = 90  # rounds in the strip
_MOST_DOTS = 60
_CLOCK = 0.1  # of a period by which clocks may differ without a word
_SOON = 30 * 86400.0
_WORDS = {
    PullResult.OK: ("answered", "good"),
    PullResult.LATE: ("late", "warn"),
    PullResult.REFUSED: ("refused", "bad"),
    PullResult.MALFORMED: ("sent rubbish", "bad"),
    PullResult.UNREACHABLE: ("not reached", "bad"),
}


def headers() -> dict[str, str]:
    """What the page is sent with."""
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": f"{policy()}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


@cache
def policy() -> str:
    """Its style, by hash, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _style() -> str:
    return (resources.files("rpel.peer.node") / "templates" / "page.css").read_text("utf-8")


@cache
def _environment() -> Environment:
    loader = PackageLoader("rpel.peer.node", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def page(service: PeerService) -> str:
    """The whole page, of this moment."""
    m, now = service.now.membership, time.time()
    why = service.why_unready()
    points = list(service.metrics.history)
    return (
        _environment()
        .get_template("page.html")
        .render(
            policy=policy(),
            style=Markup(_style()),
            refresh=max(REFRESH, round(m.period / 10)),
            id=service.now.own.id,
            organisation=visible(service.now.own.organisation),
            run=visible(m.run),
            well=not why or service.ended,
            headline=_headline(service, why),
            tiles=list(_tiles(service)),
            warnings=list(warnings(service, now)),
            accuracy=drawn([(p.round, p.accuracy) for p in points if p.accuracy is not None]),
            loss=drawn([(p.round, p.loss) for p in points if p.loss is not None]),
            strip=list(_strip(points[-_SHOWN:])),
            rounds_text=_rounds(service),
            members=list(_members(service)),
            version=__version__,
            python=platform.python_version(),
            protocol=PROTOCOL,
            membership=m.hash[:16],
            from_round=m.from_round,
            expires=_day(service.now.own.expires),
            now=f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S}",
        )
    )


def _headline(service: PeerService, why: str) -> str:
    if service.ended:
        return "finished: the last round is over"
    return f"not taking part: {visible(why)}" if why else "taking part"


# --- numbers ------------------------------------------------------------------------------------------------


def _tiles(service: PeerService) -> Iterator[dict[str, str]]:
    m, metrics, clock = service.now.membership, service.metrics, service.clock
    t, position = clock.round(), clock.position()
    running = min(max(t, 0), m.rounds)
    open = 1 <= t <= m.rounds and position < clock.end(t)
    yield _tile(
        "round", f"{running} of {m.rounds}", "running" if open else "over" if t > m.rounds else "waiting"
    )
    if t < m.rounds:
        begins = clock.start(max(t, 0) + 1)
        moment = datetime.fromtimestamp(clock.timetable.begins + begins, UTC)
        yield _tile(
            "next round", f"in {duration(max(0.0, begins - position))}", f"{moment:%Y-%m-%d %H:%M:%S} UTC"
        )
    for name in ("accuracy", "loss"):
        known = [p for p in metrics.history if getattr(p, name) is not None]
        more = f"after round {known[-1].round}, on this peer's test data" if known else "not measured yet"
        yield _tile(name, f"{getattr(known[-1], name):.4g}" if known else "none", more)
    if (last := metrics.last) is not None:
        about = f"in round {last.round}; {m.enough} are enough"
        yield _tile("answers", f"{last.received} of {last.asked}", about)
        yield _tile("clock", f"{0.0 - last.offset:+.3f} s", "ahead of (+) or behind the members' median")
        yield _tile("others' models", _ago(last.degraded), "when this peer's model last took them in")


def _tile(name: str, value: str, more: str) -> dict[str, str]:
    return {"name": name, "value": value, "more": more}


def _ago(rounds: int) -> str:
    return f"{count(rounds, 'round')} ago" if rounds else "this round"


def _rounds(service: PeerService) -> str:
    outcomes = service.metrics.outcomes
    words = {
        Outcome.AGGREGATED: "aggregated",
        Outcome.LOCAL_ONLY: "with too few answers",
        Outcome.CAUGHT_UP: "caught up",
    }
    counts = ", ".join(f"{outcomes[one]} {text}" for one, text in words.items() if outcomes[one])
    return f"{counts} since the start" if counts else "no round has ended yet"


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def warnings(service: PeerService, now: float) -> Iterator[str]:
    """What its operator should do something about, in plain words."""
    m, metrics = service.now.membership, service.metrics
    if (why := service.why_unready()) and not service.ended:
        yield f"This peer does not take part: {visible(why)}."
    if metrics.unasked_rounds >= 5 and m.nodes > 1:
        yield (
            f"Nobody has taken this peer's model for {metrics.unasked_rounds} rounds: can the others reach "
            "it? `rpel network status` asks them to call back."
        )
    for id in service.excluded():
        yield f"{id} signed two models of one round and is excluded: the proof is in the evidence folder."
    last = metrics.last
    if last is not None and abs(last.offset) > _CLOCK * m.period:
        yield f"This machine's clock is {abs(last.offset):.2g} s off the members' median: is NTP running?"
    if last is not None and last.degraded:
        yield (
            f"Too few members answered in the last {count(last.degraded, 'round')}: {m.enough} answers "
            "are needed."
        )
    if last is not None and not last.saved:
        yield "The last checkpoint could not be written: is the disk full?"
    if service.now.own.expires - now < _SOON:
        yield (
            f"This peer's certificate ends on {_day(service.now.own.expires)}: rpel network change --replace "
            "replaces it."
        )
    if (coming := service.coming()) is not None:
        new = f"{coming.hash[:12]}, {coming.nodes} members"
        yield f"A new membership ({new}) takes effect with round {coming.from_round}."


# --- members ------------------------------------------------------------------------------------------------


def _members(service: PeerService) -> Iterator[dict[str, Any]]:
    now, metrics = service.now, service.metrics
    excluded = set(service.excluded())
    for number, member in enumerate(now.membership.members):
        if number == now.me:
            continue
        seen = metrics.members[member.id]
        state, tone = ("not asked yet", "soft") if seen.result is None else _WORDS[seen.result]
        if member.id in excluded:
            state, tone = "excluded", "bad"
        counts = seen.counts
        yield {
            "id": member.id,
            "organisation": visible(member.organisation)[:80],
            "state": state,
            "tone": tone,
            "ok": counts[PullResult.OK],
            "late": counts[PullResult.LATE],
            "refused": counts[PullResult.REFUSED],
            "failed": counts[PullResult.MALFORMED] + counts[PullResult.UNREACHABLE],
            "age": f"round {seen.answered}" if seen.answered else "none",
            "clock": "" if seen.offset is None else f"{seen.offset:+.3f} s",
            "asked_us": seen.asked_us,
            "version": seen.version,
        }


# --- drawings -----------------------------------------------------------------------------------------------


def drawn(values: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
    """A curve of (round, value) in a box of 480 by 180; None without values.

    >>> drawn([(1, 0.0), (3, 1.0)])["points"]
    '44,152 472,12'
    """
    if not values:
        return None
    rounds, heights = [t for t, _ in values], [v for _, v in values]
    low, high = min(heights), max(heights)
    if low == high:
        low, high = low - 0.5 * abs(low or 1.0), high + 0.5 * abs(high or 1.0)
    span = max(1, rounds[-1] - rounds[0])

    def y(value: float) -> float:
        return round(152 - 140 * (value - low) / (high - low), 1)

    spots = [(round(44 + 428 * (t - rounds[0]) / span, 1), y(v), t, v) for t, v in values]
    every = -(-len(spots) // _MOST_DOTS)
    return {
        "grid": [{"y": y(v), "label": f"{v:.3g}"} for v in (low, (low + high) / 2, high)],
        "points": " ".join(f"{x:g},{height:g}" for x, height, _, _ in spots),
        "dots": [{"x": x, "y": h, "round": t, "value": f"{v:.4g}"} for x, h, t, v in spots[::-every][::-1]],
        "first_round": rounds[0],
        "last_round": rounds[-1],
        "last": f"{heights[-1]:.4g} after round {rounds[-1]}",
    }


def _strip(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    width = 480 / max(30, len(points))
    for column, point in enumerate(points):
        text = (
            f"round {point.round}: {point.outcome.replace('_', ' ')}, {point.received} of {point.asked} "
            "answered"
        )
        yield {
            "outcome": point.outcome,
            "x": round(column * width, 2),
            "width": round(width - 1, 2),
            "text": text,
        }
