"""Watching a network: what every member says of itself, asked over mutual TLS with one's own key.

Law: members may be hostile, so what they say is bounded and taken apart by kind; nothing of it is shown as text. And
they may lie: what is shown of a member is its own claim.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rpel.operations.asking import Asking
from rpel.peer.client import Answer
from rpel.types import Outcome, PullResult

_LARGEST = 10**12


@dataclass(frozen=True)
class Seen:
    """One member at one moment. ``state``: starting, training, frozen, finished; or why it did not say.

    ``degraded``: rounds that ended with the half-step alone, for lack of answers
    """

    id: str
    state: str
    round: int = 0
    accuracy: float | None = None
    pulls: Mapping[str, int] = field(default_factory=dict)
    degraded: int = 0
    caught_up: int = 0

    @property
    def answered(self) -> bool:
        """Did it say anything that can be shown?"""
        return self.state in ("starting", "training", "frozen", "finished")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


async def look(ask: Asking, within: float = 3.0) -> list[Seen]:
    """All members at once, in the order of members.toml; who has not answered within so many seconds is unreachable."""
    deadline = asyncio.get_running_loop().time() + within
    m = ask.standing.membership
    said = await asyncio.gather(*(ask.client.status(number, deadline) for number in range(m.nodes)))
    return [seen(member.id, answer, m.rounds) for member, answer in zip(m.members, said, strict=True)]


def seen(id: str, said: Mapping[str, Any] | Answer, rounds: int) -> Seen:
    """What a member's answer amounts to; one that makes no sense is "malformed" and nothing else.

    >>> seen("a", {"round": 7, "accuracy": 0.5, "pulls": {"ok": 12}}, rounds=9)
    Seen(id='a', state='training', round=7, accuracy=0.5, pulls={'ok': 12, 'late': 0, 'refused': 0, 'malformed': 0,
    'unreachable': 0}, degraded=0, caught_up=0)
    >>> seen("b", {"round": "7" * 1000}, rounds=9).state, seen("c", Answer(PullResult.LATE), rounds=9).state
    ('malformed', 'late')
    """
    if isinstance(said, Answer):
        return Seen(id, "other membership" if said.membership else said.result.value)
    try:
        round, frozen = _count(said, "round"), said.get("frozen", False) is True
        outcomes = {name.value: _count(_table(said, "outcomes"), name) for name in Outcome}
        pulls = {name.value: _count(_table(said, "pulls"), name) for name in PullResult}
        accuracy = _share(said.get("accuracy"))
    except ValueError:
        return Seen(id, "malformed")
    state = "frozen" if frozen else "starting" if not round else "finished" if round >= rounds else "training"
    return Seen(id, state, round, accuracy, pulls, outcomes["local_only"], outcomes["caught_up"])


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 0)
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(key)
    return value


def _table(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = said.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(key)
    return value


def _share(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:  # NaN is not either
        raise ValueError("accuracy")
    return float(value)
