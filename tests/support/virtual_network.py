"""Peers under a virtual clock: all of ``peer/core``, with a network and disks that fail on cue.

This is a driver: it carries messages, keeps time and stores bytes, and decides nothing about rounds, replies,
signatures or clocks. The network is a heap of events; every effect takes virtual time, so a crash can fall
between any two of them, and everything random comes from its seed, so any run replays. What must never happen
is written down in ``VirtualNetwork.broken`` as it happens, interesting states in ``VirtualNetwork.reached``.
"""

import hashlib
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rpel.learning import NesterovOuter
from rpel.peer.config.timetable import Timetable
from rpel.peer.core import evidence, protocol
from rpel.peer.core.clock import ClockError, RoundClock, ahead, offset
from rpel.peer.core.evidence import Proof, Signed, Witness
from rpel.peer.core.exchange import PAUSES, Exchange, SecondInstanceError
from rpel.peer.core.protocol import (
    Checkpoint,
    Effect,
    LentRow,
    Record,
    Report,
    Stored,
    Terms,
)
from rpel.peer.core.serve_policy import OTHER_MEMBERSHIP, SERVED, ServePolicy
from rpel.peer.state.store import CHECKPOINTS, RECORDS
from rpel.rules import rule
from rpel.types import Models, Outcome, PullResult

PERIOD, SHARE = 10.0, 0.6
DEADLINE = SHARE * PERIOD
D = 3
STATES = {
    "frozen and came back": 59,
    "two memberships in one round": 26,
    "caught up at the end": 0,
    "everybody down": 13,
}
"""What schedules must come to, or they prove nothing about it, each with a seed that does."""
Reply = Callable[..., None]
"""(status code, model, clock position, seconds that the request waited): what a server sends back."""
Behaviour = Callable[["VirtualNetwork", int, int], tuple[float, Models | None] | None]
"""(net, own number, round) → when after the request it answers, and with what (None:
with a malformed body)."""


class Disk:
    """What survives a crash. A write is there as a whole or not at all.

    Real files (``Store`` in memory, .2 ms a write) would cost a schedule 24 of its 39 ms once more: so this
    one only remembers, and test_store holds it to what a ``Store`` makes of the same writes and damages.
    """

    def __init__(self) -> None:
        self.records: dict[int, tuple[Record, Models]] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.damaged: set[int] = set()  # records
        self.truncated: set[int] = set()  # checkpoints
        self.full = False
        self.snapshot()

    def persist(self, record: Record, momentum: Models) -> bool:
        if not self.full:
            half = None if record.half is None else LentRow(record.half.copy())
            before, v = (None if x is None else x.copy() for x in (record.before, record.v))
            self.records[record.round] = (replace(record, half=half, before=before, v=v), momentum.copy())
            for old in sorted(self.records)[:-RECORDS]:
                del self.records[old]
        return not self.full

    def save(self, checkpoint: Checkpoint) -> bool:
        if not self.full:
            v = None if checkpoint.v is None else checkpoint.v.copy()
            self.checkpoints[checkpoint.round] = replace(checkpoint, x=checkpoint.x.copy(), v=v)
            self.truncated.discard(checkpoint.round)
            for old in sorted(self.checkpoints)[:-CHECKPOINTS]:
                del self.checkpoints[old]
        return not self.full

    def snapshot(self) -> None:
        """A copy of the state folder is made."""
        self._copy = dict(self.records), dict(self.checkpoints), set(self.damaged), set(self.truncated)

    def set_back(self) -> None:
        """The state folder is what it was when the copy was made."""
        records, checkpoints, damaged, truncated = self._copy
        self.records, self.checkpoints = dict(records), dict(checkpoints)
        self.damaged, self.truncated = set(damaged), set(truncated)

    def empty(self) -> None:
        """Somebody deleted the state folder."""
        for kept in (self.records, self.checkpoints, self.damaged, self.truncated):
            kept.clear()

    def truncate_newest(self) -> None:
        """The newest checkpoint of several is found damaged when it is read."""
        if len(whole := self.checkpoints.keys() - self.truncated) > 1:
            self.truncated.add(max(whole))

    @property
    def last_checkpoint(self) -> int:
        """The round of the newest whole one; 0: none."""
        return max(self.checkpoints.keys() - self.truncated, default=0)

    def memory(self) -> Stored:
        readable = [t for t in self.records if t not in self.damaged]
        served = tuple(t for t in sorted(readable) if self.records[t][0].half is not None)
        kept = self.checkpoints.get(self.last_checkpoint)
        record = self.records[max(readable)][0] if readable else None
        if kept is not None:
            kept = replace(kept, x=kept.x.copy(), v=None if kept.v is None else kept.v.copy())
        if record is not None and record.before is not None:
            record = replace(
                record, before=record.before.copy(), v=None if record.v is None else record.v.copy()
            )
        return Stored(
            checkpoint=kept,
            record=record,
            last_round=max(self.records, default=0),
            published=served,
        )


@dataclass(frozen=True)
class Roster:
    """A membership: who has which place in it, and with which key."""

    ids: tuple[int, ...]
    keys: tuple[str, ...]

    @cached_property
    def hash(self) -> str:
        return repr(self)


@dataclass(eq=False)
class Waiting:
    """A request for a round to come."""

    member: int
    round: int
    reply: Reply
    came: float


@dataclass
class Asking:
    """The pulls of one round on their way; the members' places are those of ``roster``."""

    exchange: Exchange
    roster: Roster
    began: float
    table: Models
    over: bool = False


class Peer:
    """One peer: its protocol, its serve policy, its disk and its clock. ``number`` is its name, whatever its
    place."""

    def __init__(self, net: "VirtualNetwork", number: int) -> None:
        self.net, self.number = net, number
        self.disk = Disk()
        self.up = False
        self.incarnation = 0
        self.paused_until = float("-inf")
        self.wall_error = 0.0
        self.drift = 0.0
        self.compute = 1.0
        self.target = np.full(D, 1.0) + net.coins.uniform(-0.5, 0.5)
        # of Adam: mean, mean of squares, number of steps; else the first row is used
        self.momentum = np.zeros((3, D))
        self.v: Models | None = None  # of the outer step, as it must be
        self.x = np.zeros(D)
        self.reports: list[Report] = []
        self.effects: list[str] = []
        self.steps: list[tuple[int, bool]] = []  # (round, with the momentum forgotten)
        self.crash_at: tuple[str, int] | None = None  # (effect, round): crash when it comes
        self.refused: str | None = None
        self.retired = False  # down for good
        self.left = False  # it has nothing more to do
        self.newest_file = 10**9  # the last round whose membership it was given
        self.stops = 0  # because its own signature was shown to it
        self.proofs: list[Proof] = []  # on disk, so to say

    # --- from start to crash ---

    def boot(self) -> None:
        """Start the process: nothing in memory, everything from the disk."""
        if self.up or self.retired or self.left:
            return
        self.up, self.incarnation = True, self.incarnation + 1
        self.policy = ServePolicy()
        self.waiting: list[Waiting] = []
        self.bodies: dict[int, Models] = {}
        wall = self.net.now + self.wall_error
        times = self.net.timetable(self.file_of(self.net.times.round(wall)))
        self.clock = RoundClock(times, wall=lambda: wall, ticks=self.ticks)
        terms = self.net.terms(self, self.file_of(self.clock.round()))
        if terms is None:
            self.leave()
            return
        self.rounds = protocol.rounds(terms, self.clock, self.draw, lambda: np.zeros(D))
        self.momentum, self.v = np.zeros((3, D)), None
        self.witness = Witness(last=max(self.disk.records, default=0))
        self.join(self.net.roster(self.file_of(self.clock.round())))
        for proof in self.proofs:
            self.witness.restore(proof)
        self.go(None)

    def join(self, roster: Roster) -> None:
        """This membership is in force: with its number there, and as its witness sees it."""
        self.roster, self.place = roster, roster.ids.index(self.number)
        self.members = evidence.Roster(self.place, roster.keys, self.signed_by, self.net.pull)

    def file_of(self, t: int) -> int:
        """A round with the membership that this peer takes for that of round t."""
        return min(t, self.newest_file)

    def leave(self) -> None:
        """It is a member no longer."""
        self.up, self.retired = False, True

    def signed_by(self, member: int, t: int, found: bytes, signature: bytes) -> bool:
        return signature == signed(self.roster.keys[member], t, found).signature

    def crash(self, down: float) -> None:
        """kill -9, and a start later on."""
        if self.up:
            self.stop()
            self.net.after(down, self.boot)

    def stop(self) -> None:
        """kill -9."""
        if self.up:
            self.up = False
            self.rounds.close()

    def ticks(self) -> float:
        return self.net.now * (1 + self.drift)

    def draw(self, t: int, me: int, nodes: int, pull: int) -> tuple[int, ...]:
        return tuple(self.net.coins.sample([i for i in range(nodes) if i != me], pull))

    def later(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do it then, unless this process is gone by then; a stopped process does it when it goes on."""
        born = self.incarnation

        def act() -> None:
            if not self.up or self.incarnation != born:
                return
            if self.net.now < self.paused_until:
                self.net.after(self.paused_until - self.net.now, act)
            else:
                action(*arguments)

        self.net.after(seconds, act)

    # --- driving the protocol ---

    def go(self, answer: Any) -> None:
        try:
            effect = self.rounds.send(answer)
        except StopIteration:
            self.up, self.left = False, True
            return
        except ClockError as error:  # a start that is refused
            self.refused = str(error)
            self.up = False
            return
        kind = type(effect).__name__
        self.effects.append(kind)
        if self.crash_at is not None and self.crash_at == (kind, self.clock.round()):
            self.crash_at = None
            self.crash(self.net.coins.uniform(0.1, 2.5 * PERIOD))
            return
        getattr(self, f"on_{kind.lower()}")(effect)

    def on_recall(self, effect: Effect[Any]) -> None:
        memory = self.disk.memory()
        if memory.record is not None:
            self.momentum = self.disk.records[memory.record.round][1].copy()
        kept: Checkpoint | Record | None = memory.checkpoint
        if memory.record is not None and memory.record.before is not None:
            kept = memory.record if kept is None or memory.record.round > kept.round else kept
        self.v = None if kept is None or kept.v is None else kept.v.copy()
        for t in memory.published:
            half = self.disk.records[t][0].half
            assert half is not None
            self.bodies[t] = half
        if memory.checkpoint is not None:
            self.net.recalled(self, memory)
        self.later(0.01, self.go, memory)

    def on_askclocks(self, effect: Effect[Any]) -> None:
        self.later(0.05, self.go, self.clock_offsets())

    def clock_offsets(self) -> list[float | None]:
        """How far the clocks of those that answer are ahead; None of those that hold another membership."""
        offsets: list[float | None] = []
        sent = self.clock.position()
        for p in self.net.peers:
            way, back = self.net.send(self.number, p.number), self.net.send(p.number, self.number)
            if (
                p.number == self.number
                or not p.up
                or self.net.now < p.paused_until
                or way is None
                or back is None
            ):
                continue
            told = offset(p.clock.position() + way, sent, sent + way + back)
            offsets.append(told if p.roster == self.roster else None)
        liars = [p for p in self.net.hostile if self.net.connected(self.number, p)]
        return offsets + [1e6 if (self.number + p) % 2 else -1e6 for p in liars]

    def on_sleep(self, effect: protocol.Sleep | protocol.Linger) -> None:
        self.later((effect.until - self.clock.position()) / (1 + self.drift) + 1e-9, self.go, None)

    on_linger = on_sleep

    def on_enter(self, effect: protocol.Enter) -> None:
        # who has the files knows by them which round runs
        t = self.file_of(max(effect.round, self.net.times.round(self.clock.position())))
        terms = self.net.terms(self, t)
        if terms is None:
            self.go(None)
            self.leave()
            return
        self.join(self.net.roster(t))
        self.clock.timetable = self.net.timetable(t)
        self.later(0.001, self.go, terms)

    def on_step(self, effect: protocol.Step) -> None:
        self.steps.append((effect.round, effect.fresh))
        if effect.fresh:
            self.momentum = np.zeros((3, D))
        self.before = effect.x.copy()
        self.later(self.compute, self.go, self.stepped(effect.x))

    def stepped(self, x: Models) -> Models:
        """The local step: by momentum, or by Adam where the network has an outer step."""
        gradient = x - self.target
        if self.net.outer is None:
            self.momentum[0] = 0.5 * self.momentum[0] + 0.5 * gradient
            return np.asarray(x - 0.3 * self.momentum[0])
        mean, squares, steps = self.momentum
        mean, squares, steps = 0.5 * mean + 0.5 * gradient, 0.9 * squares + 0.1 * gradient**2, steps + 1
        self.momentum = np.stack([mean, squares, steps])
        return np.asarray(x - 0.1 * mean / (1 - 0.5**steps) / (np.sqrt(squares / (1 - 0.9**steps)) + 1e-3))

    def on_persist(self, effect: protocol.Persist) -> None:
        if effect.record.stale:
            self.net.reached.add("everybody down")
        half = effect.record.half
        if half is not None and self.net.outer is not None:
            self.net.outer_recorded(self, effect.record)
        self.witness.recorded(effect.record.round, None if half is None else digest(half))
        self.later(0.05, lambda: self.go(self.disk.persist(effect.record, self.momentum)))

    def on_publish(self, effect: protocol.Publish) -> None:
        if effect.served:
            record = self.disk.records.get(effect.round)
            if record is None or record[0].half is None:
                self.net.break_("published before it was on disk", self.number, effect.round)
            else:
                self.bodies[effect.round] = record[0].half
            self.policy.publish(effect.round)
        else:
            self.policy.skip(effect.round)
        for request in self.waiting:
            self.later(0.0, self.look, request)
        self.later(0.001, self.go, None)

    def on_save(self, effect: protocol.Save) -> None:
        self.x = effect.checkpoint.x.copy()
        if self.net.outer is not None:
            self.net.outer_kept(self, effect.checkpoint)
        if not np.isfinite(effect.checkpoint.x).all():
            self.net.break_("a model that is not finite was kept", self.number, effect.checkpoint.round)
        self.later(0.05, lambda: self.go(self.disk.save(effect.checkpoint)))

    def on_tell(self, effect: protocol.Tell) -> None:
        self.net.told(self, effect.report)
        self.reports.append(effect.report)
        self.later(0.0, self.go, None)

    # --- pulling ---

    def on_pull(self, effect: protocol.Pull) -> None:
        self.net.asked(self, effect)
        table = np.full((1 + len(effect.members), D), np.nan)
        if effect.half is not None:
            table[0] = effect.half
        exchange = Exchange(effect, self.members, self.witness)
        asking = Asking(exchange, self.roster, self.clock.position(), table)
        self.later(effect.deadline - self.clock.position(), self.close, asking)
        for member in exchange.members:
            self.ask(asking, member)
        self.close_if_over(asking)

    def ask(self, asking: Asking, member: int, pause: float = PAUSES[0]) -> None:
        """One request; who does not answer yet is asked again, ever more slowly."""
        if asking.over:
            return
        born, meant, sent = self.incarnation, asking.roster.ids[member], self.clock.position()

        def reply(code: int, model: Models | None, position: float, waited: float) -> None:
            if not self.up or self.incarnation != born or asking.over:
                return
            exchange = asking.exchange
            if code == SERVED and model is not None:
                asking.table[exchange.pull.members.index(member) + 1] = model
                off = ahead(position, sent, self.clock.position(), waited)
                own = signed(asking.roster.keys[member], exchange.pull.round, digest(model))
                self.prove(exchange.answered(member, own, off))
                self.gossip(asking, meant)
            elif code == SERVED:
                exchange.failed(member, PullResult.MALFORMED)
            elif code == 0 or exchange.refused(member, code):
                self.later(pause, self.ask, asking, member, min(2 * pause, PAUSES[1]))
            else:
                exchange.failed(member, PullResult.REFUSED)
            self.close_if_over(asking)

        arrived = self.net.send(self.number, meant)
        if arrived is None:
            self.later(pause, self.ask, asking, member, min(2 * pause, PAUSES[1]))
        else:
            self.net.after(arrived, lambda: self.net.serve(meant, self, asking.exchange.pull.round, reply))

    def gossip(self, asking: Asking, meant: int) -> None:
        """Ask a member that answered what it saw signed in the round before."""
        way, back = self.net.send(self.number, meant), self.net.send(meant, self.number)
        if not asking.exchange.tells or way is None or back is None:
            return

        def hear() -> None:
            message = self.net.told_by(meant, asking.roster, asking.exchange.tells)
            try:
                self.prove(asking.exchange.told(message))
            except SecondInstanceError:
                self.stops += 1
                self.crash(2 * PERIOD)

        self.later(way + back, hear)

    def prove(self, proofs: list[Proof]) -> None:
        for proof in proofs:
            self.proofs.append(proof)
            self.net.excluded(proof)

    def close_if_over(self, asking: Asking) -> None:
        if asking.exchange.over:
            self.later(0.0, self.close, asking)

    def close(self, asking: Asking) -> None:
        if not asking.over:
            asking.over = True
            pulled = asking.exchange.pulled(asking.table)
            self.net.pulled(self, asking, pulled.results)
            self.go(pulled)

    # --- serving ---

    def serve(self, puller: "Peer", t: int, reply: Reply) -> None:
        """What the server does with a request, with the real desk."""
        if self.net.now < self.paused_until:
            self.later(0.0, self.serve, puller, t, reply)
            return
        if puller.roster != self.roster:
            self.net.reached.add("two memberships in one round")
            reply(OTHER_MEMBERSHIP, None, 0.0, 0.0)
            return
        member, came = puller.number, self.net.now
        decision = self.policy.request(member, t)
        if decision.kind == "refuse":
            reply(decision.code, None, 0.0, 0.0)
        elif decision.kind == "serve":
            self.send(member, t, reply, came)
        else:
            request = Waiting(member, t, reply, came)
            self.waiting.append(request)
            self.later(self.policy.patience, self.look, request)

    def look(self, request: "Waiting") -> None:
        decision = self.policy.look(request.round, self.net.now - request.came)
        if request not in self.waiting or decision.kind == "wait":
            return
        self.waiting.remove(request)
        if decision.kind == "serve":
            self.send(request.member, request.round, request.reply, request.came)
        else:
            self.policy.done(request.member, request.round, full=False)
            request.reply(decision.code, None, 0.0, 0.0)

    def send(self, member: int, t: int, reply: Reply, came: float) -> None:
        """Answer with the half-step of round t."""
        body = self.bodies[t].copy()
        self.net.served(self, t, body)
        self.policy.done(member, t, full=True)
        way = self.net.send(self.number, member)
        if way is not None:
            position, waited = self.clock.position(), self.net.now - came
            self.net.after(way, lambda: reply(SERVED, body, position, waited))


def same(a: Models | None, b: Models | None) -> bool:
    """Whether both are the same vector, or neither is there."""
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


def digest(model: Models) -> bytes:
    return hashlib.sha256(model.tobytes()).digest()


def signed(key: str, t: int, found: bytes) -> Signed:
    """A signature that only this key makes, as far as this network goes."""
    return Signed(found, hashlib.sha256(f"{key} {t} ".encode() + found).digest())


class VirtualNetwork:
    """n peers, the last b of them hostile, joined by a network that does what it is told."""

    def __init__(
        self, seed: int, n: int = 12, b: int = 2, s: int = 8, b_hat: int = 2, rounds: int = 20
    ) -> None:
        self.coins = random.Random(seed)
        self.now = -5.0
        self.n, self.b, self.rounds = n, b, rounds
        self.pull, self.rule = s, rule("nnm+trimmed_mean", f=b_hat)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.peers = [Peer(self, i) for i in range(n - b)]
        self.twins: dict[int, Peer] = {}  # second peers with the key of one of those
        self.rotations: list[tuple[int, int]] = []  # (from this round on, who has a new key)
        self.leaving: dict[int, int] = {}  # who leaves with which round
        self.times = Timetable.steady(0.0, PERIOD)  # with all paces to come
        self.hostile: dict[int, Behaviour] = dict.fromkeys(range(n - b, n), silent)
        self.latency: Callable[[int, int], float] = lambda a, c: self.coins.uniform(0.01, 0.2)
        self.cuts: list[tuple[float, float, Callable[[int, int], bool]]] = []
        self.broken: list[str] = []
        self.reached: set[str] = set()
        self.linger = 0.0
        self.outer: NesterovOuter | None = None
        self.trace: list[tuple[Any, ...]] = []
        self._rosters: dict[tuple[int, int, int], Roster] = {}
        self._draws: dict[tuple[Peer, int], tuple[int, ...]] = {}
        self._versions: dict[tuple[Peer, int], bytes] = {}
        self._durable: defaultdict[Peer, int] = defaultdict(int)

    # --- time ---

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + max(0.0, seconds), self.count, action))

    def at(self, position: float, action: Callable[[], None]) -> None:
        self.after(position - self.now, action)

    def run(self, until: float | None = None) -> "VirtualNetwork":
        """Let it happen; without ``until`` to the end of the last round."""
        end = self.times.end(self.rounds) + 1.5 * PERIOD if until is None else until
        if self.count == 0 or not any(p.incarnation for p in self.peers):
            for peer in self.peers:
                self.after(self.coins.uniform(0, 2), peer.boot)
        while self.events and self.events[0][0] <= end:
            self.now, _, action = heapq.heappop(self.events)
            action()
        self.now = end
        return self

    # --- the network ---

    def cut(self, first: float, last: float, which: Callable[[int, int], bool]) -> None:
        """Between these positions nothing goes from a to c where which(a, c)."""
        self.cuts.append((first, last, which))

    def connected(self, a: int, c: int) -> bool:
        """Whether requests and their answers pass: both ways."""
        return self.send(a, c) is not None and self.send(c, a) is not None

    def send(self, a: int, c: int) -> float | None:
        """How long a message takes, or None when it does not arrive."""
        if self.cuts and any(first <= self.now < last and which(a, c) for first, last, which in self.cuts):
            return None
        return self.latency(a, c)

    def serve(self, member: int, puller: Peer, t: int, reply: Reply) -> None:
        if member in self.hostile:
            answer = self.hostile[member](self, member, t)
            if answer is not None:
                delay, model = answer
                self.after(delay, lambda: reply(SERVED, model, 1e6, 0.0))
            return
        up = [peer for peer in self.answering(member) if peer.up]
        if up:
            self.coins.choice(up).serve(puller, t, reply)
        else:
            self.after(0.01, lambda: reply(0, None, 0.0, 0.0))

    def answering(self, member: int) -> list[Peer]:
        """Who answers at a member's address: one peer, or two that share a key."""
        return [self.peers[member], *(twin for number, twin in self.twins.items() if number == member)]

    def told_by(self, member: int, roster: Roster, t: int) -> dict[str, Any]:
        """What a member says it saw; the hostile repeat what is true, and add what is not."""
        told = self.coins.choice(self.peers if member in self.hostile else self.answering(member))
        known = told.incarnation > 0 and told.roster == roster
        entries = told.witness.seen(told.members, t) if known else {"seen": []}
        if member not in self.hostile:
            return entries
        lie = [self.coins.randrange(self.n), "A" * 44, "A" * 44]
        proofs = [[0, max(t, 1), "A" * 44, "A" * 44, "B" * 44, "A" * 44], "no"]
        return {"seen": [*entries["seen"], lie], "proofs": proofs}

    # --- memberships ---

    def roster(self, t: int) -> Roster:
        """The membership of a round."""
        known = (t, len(self.rotations), len(self.leaving))
        if known not in self._rosters:
            ids = tuple(i for i in range(self.n) if t < self.leaving.get(i, t + 1))
            turns = Counter(number for first, number in self.rotations if first <= t)
            self._rosters[known] = Roster(ids, tuple(f"{i}{chr(39) * turns[i]}" for i in ids))
        return self._rosters[known]

    def timetable(self, t: int) -> Timetable:
        """The one of the membership of a round, which knows of no pace to come."""
        return Timetable(self.times.before(t + 1) or self.times.paces[:1])

    def repace(self, t: int, period: float, pause: float) -> None:
        """Another period from a round on, which begins later by a pause."""
        self.times = self.times.changed(t, period, "", pause)

    def terms(self, peer: Peer, t: int) -> Terms | None:
        """What the membership of a round says to a peer; None: it is not one of its members."""
        roster = self.roster(t)
        ids = roster.ids
        if peer.number not in ids:
            return None
        return Terms(
            ids.index(peer.number), len(ids), self.b, self.pull, self.rule, SHARE * self.times.period(t),
            self.rounds, outer=self.outer, linger=self.linger, membership=roster.hash,
        )  # fmt: skip

    # --- what must never happen ---

    def break_(self, invariant: str, *where: Any) -> None:
        self.broken.append(f"{invariant}: {where} at {self.now:.2f}")

    def asked(self, peer: Peer, effect: protocol.Pull) -> None:
        # whoever missed the last round asks for it with a draw of its own
        t = max(peer.disk.records, default=0)
        if t == self.rounds + 1 == effect.round + 1:
            self.reached.add("caught up at the end")
        else:
            t = effect.round
        known = self._draws.setdefault((peer, t), effect.members)
        if (
            known != effect.members
            or len(set(effect.members)) != len(effect.members)
            or peer.place in effect.members
        ):
            self.break_("one draw a round", peer.number, effect.round)
        record = peer.disk.records.get(t)
        if record is None or record[0].asked != effect.members:
            self.break_("the draw is on disk before the first pull", peer.number, effect.round)
            return
        if len(effect.members) != self.pull:
            self.break_("s are asked", peer.number, effect.round)

    def served(self, peer: Peer, t: int, body: Models) -> None:
        if self._versions.setdefault((peer, t), body.tobytes()) != body.tobytes():
            self.break_("two versions of a round", peer.number, t)

    def pulled(self, peer: Peer, asking: Asking, results: Iterable[PullResult]) -> None:
        pull = asking.exchange.pull
        late = peer.clock.position() - max(pull.deadline, asking.began)
        if late > 0.5 and self.now >= peer.paused_until + PERIOD:
            self.break_(f"pulls ended {late:.2f} s after the deadline", peer.number, pull.round)
        came = [m for m, result in zip(pull.members, results, strict=True) if result is PullResult.OK]
        if sum(asking.roster.ids[m] in self.hostile for m in came) > (self.rule.f or 0):
            self.break_("more hostile models than b_hat", peer.number, pull.round)

    def told(self, peer: Peer, report: Report) -> None:
        self.trace.append(
            (self.now, peer.number, report.round, report.outcome, report.received, peer.x.tobytes())
        )
        if peer.reports and peer.reports[-1].frozen and report.outcome is not Outcome.LOCAL_ONLY:
            self.reached.add("frozen and came back")
        if report.round <= self._durable[peer]:
            self.break_("a round was repeated", peer.number, report.round)
        if report.trim != self.rule.f:
            self.break_("trimmed by something else than b_hat of the number asked", peer.number, report.round)
        if report.outcome is not Outcome.LOCAL_ONLY and report.received < 2 * report.trim:
            self.break_("aggregated too few answers", peer.number, report.round)
        if np.abs(peer.x).max() > 10:
            self.break_("an honest model was carried away", peer.number, report.round)
        if report.saved:
            self._durable[peer] = peer.disk.last_checkpoint

    def outer_recorded(self, peer: Peer, record: Record) -> None:
        """What the outer step needs is with the half-step: the model before the local steps,
        and the last v."""
        stepped = peer.steps and peer.steps[-1][0] == record.round
        if record.before is None or (stepped and not np.array_equal(record.before, peer.before)):
            self.break_("the model before the local steps is not in the record", peer.number, record.round)
        if not same(record.v, peer.v):
            self.break_(
                "the record has another v than the round before ended with", peer.number, record.round
            )

    def outer_kept(self, peer: Peer, kept: Checkpoint) -> None:
        """v moves with an aggregation, stays with a local round and is forgotten by catching up."""
        assert self.outer is not None
        if kept.outcome == Outcome.AGGREGATED:
            before = peer.disk.records[kept.round][0].before
            assert before is not None
            assert kept.v is not None
            # x' = x - eta (delta + mu v'), v' = mu v + delta
            delta = kept.v - self.outer.momentum * (np.zeros(D) if peer.v is None else peer.v)
            right = before - self.outer.lr * (delta + self.outer.momentum * kept.v)
            if not np.allclose(kept.x, right, rtol=1e-9, atol=1e-9):
                self.break_(
                    "an outer step from another model than before the local steps", peer.number, kept.round
                )
        elif not same(kept.v, None if kept.outcome == Outcome.CAUGHT_UP else peer.v):
            self.break_(f"v after a round that ended {kept.outcome}", peer.number, kept.round)
        peer.v = None if kept.v is None else kept.v.copy()

    def recalled(self, peer: Peer, memory: Stored) -> None:
        assert memory.checkpoint is not None
        if memory.checkpoint.round < self._durable[peer]:
            self.break_("a saved round was lost", peer.number, memory.checkpoint.round)

    def damage(self, peer: Peer) -> None:
        """Truncate the newest checkpoint; what is then expected to be there is the one before."""
        peer.disk.truncate_newest()
        self._durable[peer] = peer.disk.last_checkpoint

    def excluded(self, proof: Proof) -> None:
        """Somebody has a proof: it must not be against an honest peer,
        unless a second one lives with its key."""
        number = int(proof.fingerprint.rstrip("'"))
        if proof.fingerprint not in self.roster(self.times.round(self.now)).keys:
            self.reached.add("equivocation across a key rotation")
        if number not in self.hostile and number not in self.twins:
            self.break_("an honest peer was excluded", number, proof.round)

    def double(self, peer: Peer) -> None:
        """A second peer with the same key and an empty disk begins, at the same address."""
        self.twins.setdefault(peer.number, Peer(self, peer.number)).boot()

    def set_back(self, peer: Peer) -> None:
        """A peer's disk is what it was when it was copied."""
        peer.disk.set_back()
        self.lost(peer)

    def emptied(self, peer: Peer) -> None:
        """Empty a peer's disk; nothing is expected to be there then."""
        peer.disk.empty()
        self.lost(peer)

    def lost(self, peer: Peer) -> None:
        """An older disk is in place: without the draw of who missed the last round, another follows."""
        self._durable[peer] = peer.disk.last_checkpoint
        if self.rounds + 1 not in peer.disk.records:
            self._draws.pop((peer, self.rounds + 1), None)

    # --- how faults end ---

    def heal(self, down: int = 0) -> None:
        """All faults end: the network is quick, disks and clocks are right, everybody is up but ``down``
        honest peers and the hostile, who are silent.
        Whose key two had has a new one from the round after next."""
        self.cuts.clear()
        for number, twin in self.twins.items():
            twin.retired = True
            twin.stop()
            self.rotations.append((self.times.round(self.now) + 1, number))
        self.latency = lambda a, c: self.coins.uniform(0.01, 0.2)
        self.hostile = dict.fromkeys(self.hostile, silent)
        for peer in self.coins.sample(self.peers, down):
            peer.retired = True
            peer.crash(0.0)
        for peer in self.peers:
            peer.disk.full, peer.wall_error, peer.crash_at = False, 0.0, None
            peer.compute = 1.0
            peer.left = False  # its clock said that the run was over (status 3): its operator starts it again
            # its clock is set right: a new start
            if peer.up and abs(peer.clock.position() - self.now) > 0.2 * PERIOD:
                peer.crash(0.0)
            peer.boot()

    def stuck(self, since: int, within: int = 10) -> list[str]:
        """Liveness: who is up and has not aggregated in that many rounds after round ``since``."""
        ended = range(since + 1, since + within + 1)
        return [
            f"not live: peer {peer.number} did not aggregate in rounds {since + 1} to {since + within}"
            for peer in self.peers
            if not peer.retired
            and not any(r.round in ended and r.outcome is Outcome.AGGREGATED for r in peer.reports)
        ]

    # --- what is measured ---

    def spread(self) -> float:
        """The mean squared distance of the honest models from their mean."""
        models = np.stack([peer.x for peer in self.peers])
        return float(np.square(models - models.mean(axis=0)).sum(axis=1).mean())

    def outcomes(self, number: int) -> list[str]:
        return [report.outcome for report in self.peers[number].reports]


# --- what hostile peers do ----------------------------------------------------------------------------------


def silent(net: VirtualNetwork, me: int, t: int) -> None:
    """Takes the request and never answers; also what 1 byte/s comes to."""


def honest_mean(net: VirtualNetwork) -> Models:
    return np.asarray(np.mean([peer.x for peer in net.peers], axis=0))


def forging(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models]:
    """Answers at once with something that pulls away."""
    return 0.0, honest_mean(net) - 1.5


def huge(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models]:
    return 0.01, np.full(D, 3.4e38)


def not_finite(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models]:
    return 0.01, np.array([np.nan, np.inf, 0.0])


def malformed(net: VirtualNetwork, me: int, t: int) -> tuple[float, None]:
    return 0.01, None


def just_late(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models]:
    return DEADLINE, honest_mean(net) + 1.0


def equivocating(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models]:
    """Tells every victim something else."""
    return 0.01, honest_mean(net) + net.coins.uniform(-2, 2)


def wavering(net: VirtualNetwork, me: int, t: int) -> tuple[float, Models | None] | None:
    """Something else each time."""
    return net.coins.choice(BEHAVIOURS)(net, me, t)


BEHAVIOURS: list[Behaviour] = [silent, forging, equivocating, huge, not_finite, malformed, just_late]
