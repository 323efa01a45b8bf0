"""A drill: be a hostile member of one's own network, with a real member's key.

The hostile member pulls what the honest ones publish, forges one vector, and sends all who ask the same, so
that no two signatures of one round prove it hostile. Or it misbehaves: silence, slowness, wrong sizes,
floods. It keeps the limits that members have, so a drill shows what a hostile member could do. It trains
nothing and writes nothing.

In the simulator the adversary knows whom each victim pulls from, and the models before the local step. Here
nobody does: all honest models that were pulled stand for the victim's peers, their half-steps of the round
before for the models before the step, and an attack on who asks whom is refused.
"""

import asyncio
import itertools
import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rpel.attacks import ALIASES, ATTACKS, Attack, State, View, attack
from rpel.backend.base import backend
from rpel.component import Component, parse
from rpel.errors import nearest
from rpel.peer.config.settings import Config, listen_address
from rpel.peer.core.evidence import of_member, sign
from rpel.peer.core.wire import Layout, digest
from rpel.peer.net.client import Answer
from rpel.peer.net.tls import leaf_fingerprint
from rpel.peer.ops.status import Observer
from rpel.randomness import stream
from rpel.rules import RoundContext, Rule
from rpel.text import count
from rpel.types import Models

_PATIENCE = 0.6  # of the time to the deadline: models that have not come by then are left out
_KEPT = 3  # rounds that are answered, as honest peers do
_AHEAD = 2  # rounds that may be waited for
_IN_FLIGHT = 64  # requests of a flood at the same time
_FLOOD_WAIT = 1.0
_FLOOD_RATE = 200.0
_MOST_EXTRA = 1 << 20  # bytes sent beyond a model, whatever was claimed
_CHUNK = 256 << 10
_LARGEST_HEAD = 4 << 10
_REQUEST = re.compile(rb"GET /v1/(?:model/([1-9][0-9]{0,11})|(init)|(clock)|(status)) HTTP/1\.1\r\n")


# --- what a hostile member sends ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A request for a model: what a right answer would hold, and the connection to misuse."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    layout: Layout
    member: int
    round: int
    position: float
    model: Models
    sign: Callable[[int, bytes], bytes]
    """(round, hash of the body) → its signature."""

    def head(
        self, *, round: int | None = None, size: int | None = None, model: Models | None = None
    ) -> bytes:
        """Return the head of a right reply, or of one with another round, size or model."""
        body = bytes.fromhex(digest(self.layout, self.model if model is None else model))
        headers = {
            "Content-Type": "application/octet-stream",
            "RPEL-Round": self.round if round is None else round,
            "RPEL-Position": f"{self.position:.6f}",
        }
        if self.round:
            headers["RPEL-Signature"] = b64encode(self.sign(self.round, body)).decode()
        return _head(200, self.layout.size if size is None else size, headers)

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
    """A right reply; its content is the attack."""
    await reply.send(reply.head(), *reply.layout.body(reply.model))


async def silence(reply: Reply) -> None:
    """Keep the connection and send nothing."""
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
    """``extra`` bytes more (or fewer) than a model has; of a huge claim only the first are sent."""
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


async def equivocate(reply: Reply) -> None:
    """Another signed model for each victim: two of them prove that its key signed both."""
    model = reply.model + np.asarray(1 + reply.member, reply.layout.dtype)
    await reply.send(reply.head(model=model), *reply.layout.body(model))


MISBEHAVIOURS: dict[str, tuple[Delivery, dict[str, tuple[float, float]]]] = {
    "silence": (silence, {}),
    "slow": (slow, {"rate": (0.01, 1e9)}),
    "old_round": (old_round, {"behind": (1, 10**9)}),
    "wrong_size": (wrong_size, {"extra": (-(10**12), 10**15)}),
    "nan": (nan, {}),
    "equivocate": (equivocate, {}),
    "garbage": (garbage, {"size": (1, _MOST_EXTRA)}),
    "flood": (plainly, {"rate": (1, 1000)}),
}
"""By name: how a model is delivered, and the least and largest value of each parameter.

A model that such a member sends is an average honest one.
"""


@dataclass(frozen=True)
class Drill:
    """What a hostile member forges and how it delivers that; ``flood``: pulls a second beside it."""

    name: str
    attack: Attack
    deliver: Delivery = plainly
    parameters: dict[str, Any] = field(default_factory=dict)
    flood: float = 0.0


def drill(text: str) -> Drill:
    """Return the drill that a text names, an attack or a misbehaviour with its parameters, checked.

    >>> drill("alie(z=1.0)").attack.parameters, drill("slow").deliver.__name__
    ({'z': 1.0}, 'slow')
    >>> drill("flod")
    Traceback (most recent call last):
    ValueError: there is no attack 'flod'; the nearest is 'flood'
    """
    given = parse(text)
    if given.name not in MISBEHAVIOURS:
        return Drill(text, _forging(given))
    deliver, known = MISBEHAVIOURS[given.name]
    parameters = given.bind(known)
    for key, value in parameters.items():
        low, high = known[key]
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(
                f"{text}: {key} {value!r} is not valid: it takes a number from {low:g} to {high:g}"
            )
    flood = float(parameters.pop("rate", _FLOOD_RATE)) if given.name == "flood" else 0.0
    return Drill(text, attack("none"), deliver, parameters, flood)


def _forging(given: Component) -> Attack:
    choices = [*ATTACKS, *ALIASES, *MISBEHAVIOURS]
    if given.name not in choices:
        raise ValueError(f"there is no attack {given.name!r}; {nearest(given.name, choices)}")
    chosen = attack(str(given))
    if chosen.trains:
        raise ValueError(
            f"{given.name} forges nothing: its peer trains on data of its own, so give such "
            "data to rpel peer run"
        )
    if "graph" in chosen.needs:
        raise ValueError(f"{given.name} needs to know who asks whom, which real peers draw in secret")
    return chosen


def forge(
    attack: Attack,
    pulled: Models,
    *,
    hostile: int,
    rule: Rule | None = None,
    round: int = 0,
    state: State | None = None,
    before: Models | None = None,
) -> tuple[Models, State]:
    """Forge one vector (d,) for all victims from honest models (k, d); returns it and the new state.

    Models that are not finite are left out. The first one stands for the victim's own.

    Args:
        attack: What is forged.
        pulled: The honest models.
        hostile: How many hostile answers a victim may meet.
        rule: The victims' rule.
        round: The number of the round.
        state: What the attack remembers.
        before: (k, d) The senders' models of the round before, if the attack needs them.

    >>> from rpel.attacks import attack
    >>> forge(attack("sf"), np.array([[1.0], [3.0], [5.0]]), hostile=1)[0]
    array([-4.])
    """
    usable = backend("numba").finite_rows(pulled)
    if not usable.any():
        raise ValueError("an attack needs at least one honest model")
    models = pulled[usable]
    view = View(
        np.concatenate([models, np.zeros_like(models[:1])]),
        own=np.zeros(1, np.int64),
        peers=np.arange(min(1, len(models) - 1), len(models))[None],
        hostile=np.array([hostile]),
        rule=rule,
        context=RoundContext(round),
        before=None if before is None else before[usable],
    )
    forged, state = attack(view, state)
    return forged[0], state


# --- its rounds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strike:
    """What was done in one round, members by id. ``flood``: results of the extra pulls, by kind."""

    round: int
    attack: str
    pulled: tuple[str, ...]
    answered: tuple[str, ...]
    flood: dict[str, int]

    def sentence(self) -> str:
        """Describe it in one line.

        >>> Strike(3, "alie", ("a", "b"), ("b",), {}).sentence()
        'round 3: pulled 2 honest models, served alie to b'
        """
        flood = ", ".join(f"{times} {result}" for result, times in sorted(self.flood.items()))
        return (
            f"round {self.round}: pulled {count(len(self.pulled), 'honest model')}, "
            f"served {self.attack} to {', '.join(self.answered) or 'nobody (nobody asked)'}"
            + (f"; flood of {sum(self.flood.values())} pulls: {flood}" if flood else "")
        )


class HostileMember:
    """A hostile member with the key of a peer.toml; :meth:`run` attacks until the last round is over."""

    def __init__(
        self,
        config: Config,
        attack: str,
        allies: Iterable[str] = (),
        report: Callable[[Strike], None] | None = None,
    ) -> None:
        """Read and check everything; ValueError unless the key is a member's.

        Args:
            config: The settings of the member that turns hostile.
            attack: An attack or a misbehaviour, such as ``alie(z=1.5)``.
            allies: Other hostile members, whose models are left out.
            report: Called after each round.
        """
        self._drill, self._report = drill(attack), report
        self._observer = Observer.of(config)
        self.now, self._clock = self._observer.now, self._observer.clock
        m = self.now.membership
        ours = {self.now.me, *(m.index(ally) for ally in allies)}
        self._hostile = len(ours)
        self._honest = [number for number in range(m.nodes) if number not in ours]
        self._state: State = {}
        self._before: dict[int, Models] = {}  # what members sent a round ago, if the attack needs it
        self._forged: dict[int, asyncio.Future[Models]] = {}
        self._round = 0
        self._answered: dict[int, set[int]] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Attack until the last round is over."""
        few = np.eye(len(self._honest), 1, dtype=self._observer.layout.dtype)
        await asyncio.to_thread(self.forge, few, self._honest, 0)  # compile what the attack needs
        listen = listen_address(self._observer.config.listen)
        server = await asyncio.start_server(
            self._serve, *listen, ssl=self.now.server_context, ssl_handshake_timeout=5.0, limit=_LARGEST_HEAD
        )
        try:
            await self._agree()
            t = max(1, self._clock.round())
            deadline = self.now.membership.deadline
            late = self._clock.position() > self._clock.start(t) + _PATIENCE * deadline / 2
            for number in range(t + late, self.now.membership.rounds + 1):
                await self._play(number)
            await self._until(self._clock.start(self.now.membership.rounds + 1))
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._observer.close()

    async def _agree(self) -> None:
        """Take the members' time, as honest peers do."""
        m, client = self.now.membership, self._observer.client
        while len(offsets := await client.clocks(self.now, _now() + min(3.0, m.period))) < 2 * m.byzantine:
            await asyncio.sleep(min(1.0, m.period / 10))
        self._clock.adopt(list(offsets.values()))

    async def _play(self, t: int) -> None:
        await self._until(self._clock.start(t))
        self._round = t
        for old in [old for old in self._forged if old <= t - _KEPT]:
            self._forged.pop(old).cancel()
        counts: Counter[str] = Counter()
        flood = asyncio.create_task(self._flood(t, counts))
        try:
            pulled = await self._strike(t)
            await self._until(self._clock.start(t) + self.now.membership.deadline)
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
        if self._report is not None:
            pairs = (pulled, sorted(self._answered.pop(t, ())))
            asked, victims = (tuple(self.now.names[member] for member in members) for members in pairs)
            self._report(Strike(t, self._drill.name, asked, victims, dict(counts)))

    async def _strike(self, t: int) -> list[int]:
        """Pull, forge, and release the forged model to the victims that wait; returns who was pulled."""
        layout, client = self._observer.layout, self._observer.client
        rows = np.empty((len(self._honest), layout.d), layout.dtype)
        left = self._clock.start(t) + _PATIENCE * self.now.membership.deadline - self._clock.position()
        asked = zip(self._honest, rows, strict=True)
        answers: list[Answer] = await asyncio.gather(
            *(client.member(self.now, member).fetch(t, row, _now() + left) for member, row in asked)
        )
        columns = [i for i, answer in enumerate(answers) if answer.result == "ok"]
        offsets = [answer.offset for answer in answers if answer.offset is not None]
        self._clock.slew(offsets, self._hostile)
        senders, models = [self._honest[i] for i in columns], rows[columns]
        forged = self._observer.initial  # there may be nobody to learn from
        if backend("numba").finite_rows(models).any():
            forged = await asyncio.to_thread(self.forge, models, senders, t)
        if not (waiting := self._waiting(t)).done():
            waiting.set_result(forged)
        return senders

    def forge(self, models: Models, senders: list[int], t: int) -> Models:
        """Return the vector (d,) of round t, from what the senders published in it; round 0 is a trial."""
        chosen, before = self._drill.attack, None
        if "before" in chosen.needs:  # in the first round that was the common initial model
            initial = self._observer.initial[: models.shape[1]]
            before = np.stack([self._before.get(sender, initial) for sender in senders])
            self._before = dict(zip(senders, models, strict=True)) if t else {}
        rule, state = self.now.terms.rule, self._state if t else {}
        forged, state = forge(
            chosen, models, hostile=self._hostile, rule=rule, round=t, state=state, before=before
        )
        self._state = state if t else {}
        return forged

    async def _flood(self, t: int, counts: Counter[str]) -> None:
        """Ask all members again and again, at the drill's rate, until cancelled."""
        scratch = np.empty(self._observer.layout.d, self._observer.layout.dtype)
        under_way: set[asyncio.Task[None]] = set()

        async def ask(victim: int) -> None:
            remote = self._observer.member(victim)
            counts[(await remote.fetch(t, scratch, _now() + _FLOOD_WAIT)).result] += 1

        turns = itertools.cycle(self._honest)
        try:
            while self._drill.flood:
                if len(under_way) < _IN_FLIGHT:
                    asking = asyncio.create_task(ask(next(turns)))
                    under_way.add(asking)
                    asking.add_done_callback(under_way.discard)
                await asyncio.sleep(1 / self._drill.flood)
        finally:
            for asking in under_way:
                asking.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    # --- answers --------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests, one after the other."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            member = self.now.membership.by_fingerprint(leaf_fingerprint(writer.get_extra_info("ssl_object")))
            while member is not None:
                await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer, member)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer(
        self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, member: int
    ) -> None:
        match = _REQUEST.match(request)
        round = int(match[1]) if match and match[1] else 0
        if match is None:
            writer.write(_head(404))
        elif match[3]:
            writer.write(_json({"position": self._clock.position()}))
        elif match[4]:
            m = self.now.membership
            names = {"id": self._observer.config.id, "membership": m.hash}
            writer.write(_json({**names, "rounds": m.rounds, "round": self._round}))
        elif round and not -_KEPT < round - self._round <= _AHEAD:
            writer.write(_head(410 if round < self._round else 425))
        else:
            model = await asyncio.shield(self._waiting(round)) if round else self._observer.initial
            layout, position = self._observer.layout, self._clock.position()
            exact = layout if round else layout.exact
            reply = Reply(reader, writer, exact, member, round, position, model, self._sign)
            if round:
                self._answered.setdefault(round, set()).add(member)
                await self._drill.deliver(reply, **self._drill.parameters)
            else:
                await plainly(reply)

    def _sign(self, round: int, digest: bytes) -> bytes:
        return sign(self.now.secret, of_member(self.now.membership, self.now.me), round, digest)

    def _waiting(self, t: int) -> "asyncio.Future[Models]":
        if t not in self._forged:
            self._forged[t] = asyncio.get_running_loop().create_future()
        return self._forged[t]

    async def _until(self, position: float) -> None:
        await asyncio.sleep(max(0.0, position - self._clock.position()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _head(status: int, size: int = 0, headers: Mapping[str, object] | None = None) -> bytes:
    """Return the head of a reply."""
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}", f"Content-Length: {size}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _json(content: Mapping[str, object]) -> bytes:
    body = json.dumps(content).encode()
    return _head(200, len(body), {"Content-Type": "application/json"}) + body
