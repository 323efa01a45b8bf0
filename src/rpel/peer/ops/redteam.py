"""The rounds of a hostile member: pull what the honest ones publish, forge,
answer each victim before the deadline.

Invariants: it holds a key of the membership and keeps the limits that members have (one body of each a
round), so that a drill shows what a hostile member could do and not what a broken network does;
it trains nothing and writes nothing.
"""

import asyncio
import itertools
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rpel.attacks import State
from rpel.backend.base import backend
from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config, listen_address
from rpel.peer.core.evidence import of_member, sign
from rpel.peer.core.wire import Malformed
from rpel.peer.net.client import Answer
from rpel.peer.net.http import CLOCK, INIT, LARGEST_HEAD, MODEL, STATUS, Reply, json_reply, parse_request
from rpel.peer.net.tls import leaf_fingerprint
from rpel.peer.ops import drill as drills
from rpel.peer.ops.drill import drill, forge, plainly
from rpel.peer.ops.watch import Observer
from rpel.text import count
from rpel.types import Models

_PATIENCE = 0.6  # of the time to the deadline: who has not published by then is forged without
_KEPT = 3  # rounds that are answered, as honest peers do
_AHEAD = 2  # rounds that may be waited for
_IN_FLIGHT = 64  # requests of a flood at the same time
_FLOOD_WAIT = 1.0


@dataclass(frozen=True)
class Deed:
    """What was done in one round, members by id. ``flood``: results of the pulls beside, by kind."""

    round: int
    attack: str
    pulled: tuple[str, ...]
    answered: tuple[str, ...]
    flood: dict[str, int]

    def sentence(self) -> str:
        """For people.

        >>> Deed(3, "alie", ("a", "b"), ("b",), {}).sentence()
        'round 3: pulled 2 honest models, served alie to b'
        """
        flood = ", ".join(f"{times} {result}" for result, times in sorted(self.flood.items()))
        return (
            f"round {self.round}: pulled {count(len(self.pulled), 'honest model')}, "
            f"served {self.attack} to {', '.join(self.answered) or 'nobody (nobody asked)'}"
            + (f"; flood of {sum(self.flood.values())} pulls: {flood}" if flood else "")
        )


class RedTeam:
    """A hostile member with the key of a peer.toml; :meth:`run` runs it until the network's last round."""

    def __init__(
        self,
        config: Config,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        allies: Iterable[str] = (),
        tell: Callable[[Deed], None] | None = None,
    ) -> None:
        """Read and check everything; ValueError unless the key is a member's. ``allies``:
        other red-team members."""
        self._drill = drill(name, parameters or {})
        own = Observer.of(config)
        self.now, self._layout, self._initial = own.now, own.layout, own.initial
        self._clock, self._client, self._config, self._tell = own.clock, own.client, config, tell
        m = self.now.membership
        ours = {self.now.me, *(m.index(ally) for ally in allies)}
        self._ours = len(ours)
        self._honest = [number for number in range(m.nodes) if number not in ours]
        self._state: State = {}
        # what the honest sent in the round before, if the attack needs it
        self._before: dict[int, Models] = {}
        self._forged: dict[int, asyncio.Future[dict[int, Models]]] = {}
        self._round = 0
        self._answered: dict[int, set[int]] = {}

    async def run(self) -> None:
        """Attack until the last round is over."""
        here, m = self.now, self.now.membership
        server = HostileServer(
            m, here.server_context, self._answer, {CLOCK: self._position, STATUS: self._status}
        )
        await asyncio.to_thread(self._warm_up)
        await server.start(*listen_address(self._config.listen))
        try:
            await self._agree()
            for t in range(self._first(), m.rounds + 1):
                await self._one(t)
            await self._until(self._clock.start(m.rounds + 1))
        finally:
            await server.stop()
            await self._client.close()

    def _warm_up(self) -> None:
        """Compile what the attack needs, before it counts."""
        few = np.eye(len(self._honest), 1, dtype=self._layout.dtype)
        self.forge(few, self._honest, 0, {})

    async def _agree(self) -> None:
        """Take the members' time, as honest peers do."""
        m = self.now.membership
        while (
            len(offsets := await self._client.clocks(self.now, _now() + min(3.0, m.period))) < 2 * m.byzantine
        ):
            await asyncio.sleep(min(1.0, m.period / 10))
        self._clock.adopt(list(offsets.values()))

    def _first(self) -> int:
        """The round that runs, if there is time enough to strike in it, else the next."""
        t = max(1, self._clock.round())
        over = self._clock.position() > self._clock.start(t) + _PATIENCE * self.now.membership.deadline / 2
        return t + over

    # --- a round --------------------------------------------------------------------------------------------

    async def _one(self, t: int) -> None:
        m = self.now.membership
        await self._until(self._clock.start(t))
        self._round = t
        for old in [old for old in self._forged if old <= t - _KEPT]:
            self._forged.pop(old).cancel()
        deadline = self._clock.start(t) + m.deadline
        counts: Counter[str] = Counter()
        flood = asyncio.create_task(self._flood(t, counts))
        try:
            pulled = await self._strike(t)
            await self._until(deadline)
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
        if self._tell is not None:
            who, victims = (
                tuple(self.now.names[member] for member in members)
                for members in (pulled, sorted(self._answered.pop(t, ())))
            )
            self._tell(Deed(t, self._drill.name, who, victims, dict(counts)))

    async def _strike(self, t: int) -> list[int]:
        """Pull, forge and let the waiting victims have it; returns who was pulled."""
        rows = np.empty((len(self._honest), self._layout.d), self._layout.dtype)
        left = self._clock.start(t) + _PATIENCE * self.now.membership.deadline - self._clock.position()
        until = _now() + left
        asked = zip(self._honest, rows, strict=True)
        answers: list[Answer] = await asyncio.gather(
            *(self._client.member(self.now, member).fetch(t, row, until) for member, row in asked)
        )
        columns = [i for i, answer in enumerate(answers) if answer.result == "ok"]
        self._clock.slew([answer.offset for answer in answers if answer.offset is not None], self._ours)
        senders, models = [self._honest[i] for i in columns], rows[columns]
        forged: dict[int, Models] = {}  # nobody to learn from: the common initial model will do
        if backend("numba").finite_rows(models).any():
            vectors, self._state = await asyncio.to_thread(self.forge, models, senders, t, self._state)
            forged = dict(zip(self._honest, vectors, strict=True))
        waiting = self._waiting(t)
        if not waiting.done():
            waiting.set_result(forged)
        return senders

    def forge(self, models: Models, senders: list[int], t: int, state: State) -> tuple[Models, State]:
        """(forged (v, d) for all honest members, new state) from what the senders published in round t; 0:
        a trial."""
        attack, before = self._drill.attack, None
        if "before" in attack.needs:  # in the first round that was the common initial model
            known = {sender: self._before.get(sender, self._initial[: models.shape[1]]) for sender in senders}
            before = np.stack([known[sender] for sender in senders])
            self._before = dict(zip(senders, models, strict=True)) if t else {}
        return forge(
            attack,
            models,
            senders,
            self._honest,
            hostile=self._ours,
            rule=self.now.terms.rule,
            round=t,
            state=state,
            before=before,
        )

    async def _flood(self, t: int, counts: Counter[str]) -> None:
        """Ask everybody again and again, so many times a second, until cancelled."""
        scratch = np.empty(self._layout.d, self._layout.dtype)
        under_way: set[asyncio.Task[None]] = set()

        async def ask(victim: int) -> None:
            answer = await self._client.member(self.now, victim).fetch(t, scratch, _now() + _FLOOD_WAIT)
            counts[answer.result] += 1

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

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, member: int, round: int
    ) -> None:
        """A member asks for a model."""
        if round and not -_KEPT < round - self._round <= _AHEAD:
            writer.write(bytes(Reply(410 if round < self._round else 425)))
            return
        forged = await asyncio.shield(self._waiting(round)) if round else {}
        model = forged.get(member, self._initial)
        sign = self._sign if round else None
        reply = drills.Reply(reader, writer, self._layout, member, round, self._clock.position(), model, sign)
        if not round:
            await plainly(reply)
            return
        self._answered.setdefault(round, set()).add(member)
        await self._drill.deliver(reply, **self._drill.parameters)

    def _sign(self, round: int, digest: bytes) -> bytes:
        return sign(self.now.secret, of_member(self.now.membership, self.now.me), round, digest)

    def _waiting(self, t: int) -> "asyncio.Future[dict[int, Models]]":
        if t not in self._forged:
            self._forged[t] = asyncio.get_running_loop().create_future()
        return self._forged[t]

    def _position(self) -> dict[str, object]:
        return {"position": self._clock.position()}

    def _status(self) -> dict[str, object]:
        """What `rpel watch` is told: as little as possible."""
        m = self.now.membership
        return {"id": self._config.id, "membership": m.hash, "rounds": m.rounds, "round": self._round}

    async def _until(self, position: float) -> None:
        await asyncio.sleep(max(0.0, position - self._clock.position()))


def _now() -> float:
    return asyncio.get_running_loop().time()


# --- serving ------------------------------------------------------------------------------------------------


_MODEL = re.compile(re.escape(MODEL) + "([1-9][0-9]{0,11})")

Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int, int], Awaitable[None]]
"""(reader, writer, member, round; 0: the common initial model): do something with the connection."""


class HostileServer:
    """Listens, knows members by their pin, and leaves requests for models to ``answer``."""

    def __init__(
        self,
        membership: Membership,
        context: ssl.SSLContext,
        answer: Respond,
        texts: Mapping[str, Callable[[], dict[str, object]]],
    ) -> None:
        self._membership, self._context, self._answer, self._texts = membership, context, answer, texts
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(
            self._serve, host, port, ssl=self._context, ssl_handshake_timeout=5.0, limit=LARGEST_HEAD
        )

    async def stop(self) -> None:
        """Stop listening and drop all connections."""
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(
                OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError
            ):
                member = self._membership.by_fingerprint(
                    leaf_fingerprint(writer.get_extra_info("ssl_object"))
                )
                while member is not None:
                    await self._one(await reader.readuntil(b"\r\n\r\n"), reader, writer, member)
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _one(
        self, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, member: int
    ) -> None:
        try:
            path = parse_request(request.removesuffix(b"\r\n\r\n")).path
        except Malformed:
            path = ""
        model = _MODEL.fullmatch(path)
        if model or path == INIT:
            await self._answer(reader, writer, member, int(model[1]) if model else 0)
        elif path in self._texts:
            writer.write(bytes(json_reply(self._texts[path]())))
        else:
            writer.write(bytes(Reply(404)))
        await writer.drain()
