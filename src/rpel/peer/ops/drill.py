"""What a hostile member does: which model it forges for each victim, and how it answers a request for it.

In the simulator the adversary knows whom each victim pulls from, and the models before the local step. Here
nobody does: all honest models that were pulled stand for the victim's honest peers, less its own, and their
half-steps of the round before for the models before the step; an attack on who asks whom in the round is
refused. A new misbehaviour is one function and a row of a table.
"""

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rpel.attacks import ALIASES, ATTACKS, Attack, State, View, attack
from rpel.backend.base import backend
from rpel.errors import nearest
from rpel.peer.core.wire import Layout, digest
from rpel.randomness import stream
from rpel.rules import RoundContext, Rule
from rpel.types import Integers, Models

_MOST_EXTRA = 1 << 20  # bytes sent beyond a model, whatever was claimed
_CHUNK = 256 << 10


@dataclass(frozen=True)
class Reply:
    """A request that waits for its answer: what a right one would hold, and the connection to misuse."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    layout: Layout
    member: int
    round: int
    position: float
    model: Models
    sign: Callable[[int, bytes], bytes] | None = None
    """(round, hash of the body) → its signature, where half-steps are signed."""

    def head(
        self, *, round: int | None = None, size: int | None = None, model: Models | None = None
    ) -> bytes:
        """The head of a right reply, or of one with another round, size or model."""
        lines = [
            "HTTP/1.1 200 OK",
            f"Content-Length: {self.layout.size if size is None else size}",
            "Content-Type: application/octet-stream",
            f"RPEL-Round: {self.round if round is None else round}",
            f"RPEL-Position: {self.position:.6f}",
        ]
        if self.sign is not None:
            body = bytes.fromhex(digest(self.layout, self.model if model is None else model))
            lines.append(f"RPEL-Signature: {b64encode(self.sign(self.round, body)).decode()}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def send(self, *parts: bytes | memoryview) -> None:
        """Send the parts, in pieces, as fast as they are taken."""
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                self.writer.write(part[begin : begin + _CHUNK])
                await self.writer.drain()

    async def given_up(self) -> None:
        """Wait until the other end hangs up."""
        while await self.reader.read(_CHUNK):
            pass
        raise ConnectionResetError("the other end hung up")


Delivery = Callable[..., Awaitable[None]]


async def plainly(reply: Reply) -> None:
    """A right reply; what it holds is the attack."""
    await reply.send(reply.head(), *reply.layout.body(reply.model))


async def silence(reply: Reply) -> None:
    """The connection stands and nothing comes."""
    await reply.given_up()


async def slow(reply: Reply, rate: float = 1.0) -> None:
    """A right reply at ``rate`` bytes a second."""
    await reply.send(reply.head())
    for byte in b"".join(reply.layout.body(reply.model)):
        await reply.send(bytes([byte]))
        await asyncio.sleep(1 / rate)


async def old_round(reply: Reply, behind: int = 1) -> None:
    """A whole model that says it is of an earlier round."""
    await reply.send(reply.head(round=reply.round - behind), *reply.layout.body(reply.model))


async def wrong_size(reply: Reply, extra: int = 4) -> None:
    """So many bytes more (or fewer, if negative) than a model has;
    of a huge claim only the first are ever sent."""
    size = max(0, reply.layout.size + extra)
    body = b"".join(reply.layout.body(reply.model)) + bytes(max(0, min(extra, _MOST_EXTRA)))
    await reply.send(reply.head(size=size), body[:size])
    if len(body) < size:
        await reply.given_up()


async def nan(reply: Reply) -> None:
    """A whole model of values that are not numbers."""
    model = np.full(reply.layout.d, np.nan, reply.layout.dtype)
    await reply.send(reply.head(model=model), *reply.layout.body(model))


async def garbage(reply: Reply, size: int = 512) -> None:
    """Random bytes where the head should be."""
    await reply.send(stream(0, "garbage", reply.round, reply.member).bytes(size) + b"\r\n\r\n")


MISBEHAVIOURS: dict[str, Delivery] = {
    "silence": silence,
    "slow": slow,
    "old_round": old_round,
    "wrong_size": wrong_size,
    "nan": nan,
    "garbage": garbage,
    "flood": plainly,
}
"""Misbehaviour by name; what it delivers, where it is a model at all, is an average honest one."""

_BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "slow": {"rate": (0.01, 1e9)},
    "old_round": {"behind": (1, 10**9)},
    "wrong_size": {"extra": (-(10**12), 10**15)},
    "garbage": {"size": (1, _MOST_EXTRA)},
    "flood": {"rate": (1, 1000)},
}
"""Parameters of misbehaviours: the least and the largest value of each."""
_FLOOD = 200.0


@dataclass(frozen=True)
class Drill:
    """What a hostile member does: which model it forges, how it delivers it,
    and pulls a second beside that."""

    name: str
    attack: Attack
    deliver: Delivery = plainly
    parameters: dict[str, Any] = field(default_factory=dict)
    flood: float = 0.0


def drill(name: str, parameters: Mapping[str, Any]) -> Drill:
    """The drill of an attack's or a misbehaviour's name, checked.

    >>> drill("alie", {"z": 1.0}).attack.parameters, drill("slow", {}).deliver.__name__
    ({'z': 1.0}, 'slow')
    >>> drill("flod", {})
    Traceback (most recent call last):
    ValueError: there is no attack 'flod'; the nearest is 'flood'
    """
    if name not in MISBEHAVIOURS:
        return Drill(name, _forgery(name, parameters))
    known = _BOUNDS.get(name, {})
    for key, value in parameters.items():
        if key not in known:
            raise ValueError(
                f"{name} knows no parameter {key!r}: it takes {', '.join(sorted(known)) or 'none'}"
            )
        low, high = known[key]
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(
                f"{name}: {key} {value!r} is not valid: it takes a number from {low:g} to {high:g}"
            )
    rest = dict(parameters)
    flood = float(rest.pop("rate", _FLOOD)) if name == "flood" else 0.0
    return Drill(name, attack("none"), MISBEHAVIOURS[name], rest, flood)


def _forgery(name: str, parameters: Mapping[str, Any]) -> Attack:
    choices = [*ATTACKS, *ALIASES, *MISBEHAVIOURS]
    if name not in ATTACKS and name not in ALIASES:
        raise ValueError(f"there is no attack {name!r}; {nearest(name, choices)}")
    chosen = attack(name, **parameters)
    if chosen.trains:
        raise ValueError(
            f"{name} forges nothing: its peer trains on data of its own, so give such data to rpel peer run"
        )
    if "graph" in chosen.needs:
        raise ValueError(f"{name} needs to know who asks whom in this round, which real peers draw in secret")
    return chosen


# --- forging ------------------------------------------------------------------------------------------------


def forge(
    attack: Attack,
    pulled: Models,
    senders: Sequence[int],
    victims: Sequence[int],
    *,
    hostile: int,
    rule: Rule | None = None,
    round: int = 0,
    state: State | None = None,
    before: Models | None = None,
) -> tuple[Models, State]:
    """(forged (v, d), new state) from the models (k, d) of the senders; ``hostile``:
    answers of ours a victim may meet.

    Models that are not finite are left out. A victim whose own model did not come is taken to have the first
    one. ``before`` (k, d): what the senders' models were a round ago.

    >>> from rpel.attacks import attack
    >>> forge(attack("sf"), np.array([[1.0], [3.0], [5.0]]), senders=[0, 1, 2], victims=[0, 7], hostile=1)[0]
    array([[-4.], [-3.]])
    """
    usable = backend("numba").finite_rows(pulled)
    if not usable.any():
        raise ValueError("an attack needs at least one honest model")
    models = pulled[usable]
    row = {sender: i for i, sender in enumerate(np.asarray(senders)[usable].tolist())}
    table = np.concatenate([models, np.zeros((len(victims), models.shape[1]), models.dtype)])
    own = np.array([row.get(victim, 0) for victim in victims], dtype=np.int64)
    known = np.array([victim in row for victim in victims])
    view = View(
        table,
        own=own,
        peers=_others(len(models), np.where(known, own, -1)),
        hostile=np.full(len(victims), hostile, dtype=np.int64),
        rule=rule,
        context=RoundContext(round),
        before=None if before is None else before[usable],
    )
    return attack(view, state)


def _others(count: int, own: Integers) -> Integers:
    """(v, count) the rows 0 … count − 1 of each victim without its own one, −1 at the tail.

    >>> _others(3, np.array([1, -1]))
    array([[ 0,  2, -1], [ 0,  1,  2]])
    """
    rows = np.broadcast_to(np.arange(count), (len(own), count))
    order = np.argsort(rows == own[:, None], axis=1, kind="stable")
    moved = np.take_along_axis(rows, order, axis=1)
    return np.where(moved == own[:, None], -1, moved)
