"""What a peer does, round after round, without a socket, a file or a clock of its own.

How this works
--------------
:func:`rounds` is a coroutine that awaits *effects*: ``stored = await Recall()`` asks its driver for what the
disk holds and is typed as such. The driver of a real peer (``node/node.py``) answers effects by TLS, a disk
and the machine's clock; the tests' driver (``tests/support/virtual_network.py``) answers them under a virtual
clock and can stop a peer between any two of them. Neither has a rule of its own.

Follow peer A through round 7, with s = 8 and b̂ = 2. ``Sleep`` ends where the timetable puts the start of the
round. ``Enter`` returns the :class:`Terms` of the membership in force, which may be a new one. ``Step``
returns the half-step that training makes of A's model (lines 3-6). A draws eight members, and ``Persist``
writes the draw and the half-step to disk; only then does ``Publish`` let the server give it to others.
``Pull`` asks the eight members at once (line 7). How their replies count is decided by an
:class:`~rpel.peer.core.exchange.Exchange`, which the driver feeds: a member whose key signed two models is
not asked, 425 is asked again, each model brings the signatures that its sender saw in round 6, and the pull
is over when nothing more can come. With 4 answers or more A aggregates them, trimming 2 (lines 8-9); with
fewer it keeps its half-step. ``Save`` writes the checkpoint, ``Tell`` reports the round, and round 8 follows.
If A had missed rounds 5 and 6 it would take no step and publish nothing in round 7, but take a robust
aggregate of the eight. If so many of the eight did the same that 4 answers could not come, all were down
together: A would publish its newest model after all, and pull again.

Invariants
----------
Models in records are never written to after they were made, but for one: a :data:`LentRow`.

1. One draw a round. The peers to pull from are drawn once and persisted before the first pull;
   a restart asks the same.
2. Persist before publish. A half-step is on disk before anybody can see it, and a round that was ever
   recorded is never computed again: no crash can make a peer serve two versions of a round. A peer that
   starts sits out the round that is running unless its record of it is on disk: so neither can an emptied
   disk, nor bring a second draw. Which round runs it knows if 2 b + 1 others tell their clocks; from fewer, b
   liars can keep a clock that is up to a round behind, so it serves what is on disk and computes nothing
   until a whole round has passed since its start.
3. The trim is b̂ of the number of peers asked, never of those that answered. Whoever answers, and whenever:
   hostile(answered) ≤ hostile(asked) ≤ b̂ with the plan's probability.
4. Fewer than 2 b̂ answers change nothing: the peer keeps its half-step and counts a degraded round. After
   ``patience`` in a row it stops taking local steps, and goes on serving what it has and pulling.
5. A peer that missed more than one round, stood still, or has a non-finite model catches up: it takes a
   robust aggregate of the answers, always by nnm+trimmed_mean, and forgets its momentum. Its own model is
   left out of 2 b̂ + 1 answers or more. With exactly 2 b̂ it is added, however old: every coordinate then
   lies between honest values, the old one included, so b liars who repeat that one can hold the peer back,
   but only while no more than 2 b̂ members answer: it takes part again,
   and leaves its own model out in the first round with 2 b̂ + 1 answers.
6. Liveness. The plan secures 2 b̂ answers when all hostile members are silent and F honest ones are down.
   When faults end so, every honest peer aggregates again within 10 rounds: with ``patience`` behind them all
   serve something, and 2 b̂ answers suffice for everybody.
7. An outer step follows an aggregation and nothing else: a round that ends local_only keeps v, catching up
   leaves the aggregate as it is and forgets v. The model before the local steps and v are in the record of
   the half-step, so that a crash in the middle of a round, even after a checkpoint that the disk refused,
   loses neither.
8. When everybody was down, somebody must begin. A peer that has no half-step of the round serves its newest
   model in its place, once at least s - 2 b̂ + 1 of its own draw say that they hold nothing of this round:
   fewer than 2 b̂ answers could come. The plan has s >= 3 b̂ + F, so b̂ liars and F late members cannot cause
   this. Such a model is not trusted: the peer still catches up, and stays as far behind as it was if it
   cannot.
9. The end is the same for all. After its last round a peer serves it for ``linger`` periods; who missed it
   takes a robust aggregate of that round's half-steps, from one more draw, which is recorded like those of
   the rounds. No round follows, so it cannot be sat out: a disk that was emptied or set back since brings
   another draw. Nothing of the former is left then, and nothing of it was ever served.
"""

from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NewType, TypeVar

import numpy as np

from rpel.backend.base import backend
from rpel.learning import NesterovOuter
from rpel.peer.core.clock import ClockError, RoundClock
from rpel.randomness import stream
from rpel.rules import Rule, aggregate_or_keep, rule
from rpel.types import ROBUST_RULE, Aggregated, Floats, Models, Outcome, PullResult, Received

T = TypeVar("T")
Sampler = Callable[[int, int, int, int], tuple[int, ...]]
"""(round, own number, nodes, s) → s different others. A deployed peer's come from the operating system."""
LentRow = NewType("LentRow", Floats)
"""A model (d,) in a row of the driver's table: valid until the next Step, which overwrites it."""
_AHEAD = 0.05
"""Of a period: how far a peer's clock may have been ahead of the one it adopts after a restart."""
_LEFT = 10.0
"""Seconds for which the others are asked by a peer whose clock says that they have all left."""


@dataclass(frozen=True)
class Terms:
    """What the membership in force says: who I am, the plan, and the times."""

    me: int
    nodes: int
    byzantine: int
    pull: int
    rule: Rule
    deadline: float
    rounds: int
    patience: int = 5
    seed: int = 0
    """For rules that draw at random; a deployed peer's comes from the operating system."""
    outer: NesterovOuter | None = None
    """The step after line 9, for many local steps."""
    linger: float = 0.0
    """Periods after the last round in which it is served to the late."""
    membership: str = ""
    """Its hash: numbers of members are those of this membership."""


# --- what is remembered -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Persisted before anything of the round is seen outside; ``half`` is None when nothing is served for it.

    ``before`` and ``v``: the model before the local steps and what the outer step remembers;
    None without one.
    ``membership``: the hash of the one whose numbers ``asked`` are. The draw of who missed the last round is
    the record of the round after it.
    """

    round: int
    asked: tuple[int, ...]
    half: LentRow | None
    before: Models | None = None
    v: Models | None = None
    membership: str = ""
    stale: bool = False
    """The half-step is an older model, served because everybody was down (invariant 8)."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round: the model, whether to reset the momentum, degraded rounds in a row.

    ``behind``: the peer caught up with its own old model added, and may still be behind (invariant 5). ``v``:
    what the outer step remembers; None: nothing.
    """

    round: int
    x: Models
    fresh: bool = False
    degraded: int = 0
    outcome: str = ""
    behind: bool = False
    v: Models | None = None


@dataclass(frozen=True)
class Stored:
    """What is on disk. ``last_round`` is the newest round ever recorded, readable or not; 0: none."""

    checkpoint: Checkpoint | None = None
    record: Record | None = None
    last_round: int = 0
    published: tuple[int, ...] = ()


# --- effects ------------------------------------------------------------------------------------------------


class Effect(Generic[T]):
    """Something that the protocol asks of its driver; ``await`` returns what the driver sends back, a T."""

    def __await__(self) -> "Generator[Effect[T], T, T]":
        return (yield self)


@dataclass(frozen=True)
class Recall(Effect[Stored]):
    """Read the disk; the local state (momentum) of its record is restored, too."""


@dataclass(frozen=True)
class AskClocks(Effect[list[float | None]]):
    """Ask every member for its clock.

    Returns for each that answers how far it is ahead, or None if it only said that it holds another
    membership.
    """


@dataclass(frozen=True)
class Sleep(Effect[None]):
    """Wait until this peer's clock has that position."""

    until: float


@dataclass(frozen=True)
class Enter(Effect[Terms | None]):
    """Begin this round and return its terms; None: this peer is a member no longer."""

    round: int


@dataclass(frozen=True)
class Step(Effect[LentRow]):
    """Train: the half-step (d,) of x, which stays as it is; ``fresh``: with the momentum forgotten."""

    round: int
    x: Models
    fresh: bool


@dataclass(frozen=True)
class Persist(Effect[bool]):
    """Write the record and the local state; returns whether they are on disk."""

    record: Record


@dataclass(frozen=True)
class Publish(Effect[None]):
    """Serve this round's half-step from now on; ``served`` False: there is nothing to serve."""

    round: int
    served: bool


@dataclass(frozen=True)
class Pulled:
    """Row 0 of the table (1 + s, d) is the half-step, row j + 1 the answer of the j-th member asked, if OK.

    Without a half-step row 0 is the protocol's to fill. A complete model with a non-finite entry is OK: the
    rule counts it as one of the b̂. ``offsets``: how far the clocks of those that answered were ahead of this
    one at that moment. ``empty``: how many said that they hold nothing of this round.
    """

    table: Models
    results: tuple[PullResult, ...]
    offsets: tuple[float, ...] = ()
    empty: int = 0


@dataclass(frozen=True)
class Pull(Effect[Pulled]):
    """Ask all members at once, as an ``Exchange`` decides, until the deadline (a position) at most.

    ``needed``: answers without which the pull changes nothing.
    """

    round: int
    members: tuple[int, ...]
    half: LentRow | None
    deadline: float
    needed: int


@dataclass(frozen=True)
class Save(Effect[bool]):
    """Write the checkpoint; returns whether it is on disk."""

    checkpoint: Checkpoint


@dataclass(frozen=True)
class Report:
    """What a reader wants to know of one round; ``results`` says what came of each peer asked."""

    round: int
    outcome: Outcome
    asked: int
    received: int
    trim: int
    results: dict[int, PullResult]
    degraded: int
    frozen: bool
    saved: bool
    seconds: float
    offset: float


@dataclass(frozen=True)
class Tell(Effect[None]):
    """Report a round that has ended."""

    report: Report


@dataclass(frozen=True)
class Linger(Effect[None]):
    """Wait until this peer's clock has that position: the last round has ended here, and is served."""

    until: float


Effects = Coroutine[Any, Any, None]
"""The rounds of a peer: ``send`` returns the next effect, and StopIteration is their end."""


# --- the rounds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What the next round needs.

    ``round``: the last round that x stands for; ``last``: the last one ever recorded. The rest is as in a
    Checkpoint.
    """

    x: Models
    round: int = 0
    last: int = 0
    degraded: int = 0
    fresh: bool = False
    behind: bool = False
    v: Models | None = None


def rounds(terms: Terms, clock: RoundClock, sampler: Sampler, initial: Callable[[], Models]) -> Effects:
    """Run from start to the last round, under the invariants above.

    ``initial()`` is everybody's first model (d,), anew.
    """
    return _Rounds(terms, clock, sampler, initial).play()


class _RetiredError(Exception):
    """This peer is a member no longer, or has come when all is over."""


class _Rounds:
    """One process of a peer: what it knows between two effects."""

    def __init__(
        self, terms: Terms, clock: RoundClock, sampler: Sampler, initial: Callable[[], Models]
    ) -> None:
        self.terms, self.clock, self.sampler, self.initial = terms, clock, sampler, initial
        self.state: State

    async def play(self) -> None:
        """All rounds, one after the other."""
        stored = await Recall()
        for t in stored.published:
            await Publish(t, served=True)
        await Publish(stored.last_round, served=False)
        try:
            began, clocks = self.clock.position(), await self.agree()
            sat_out = _sat_out(self.clock)
            if 0 < clocks <= 2 * self.terms.byzantine:
                sat_out = max(sat_out, began + self.clock.period)
            self.state = _restored(stored, self.initial)
            if stored.record is not None and stored.record.round > self.state.round:
                await self.resume(stored.record)
            while (t := await self.next_round()) <= self.terms.rounds:
                if self.clock.start(t) <= sat_out:
                    await Publish(t, served=False)
                    self.state = replace(self.state, last=t)
                else:
                    await self.play_round(t)
            end = self.clock.end(self.terms.rounds) + self.terms.linger * self.clock.period
            if self.state.round < self.terms.rounds and self.clock.position() < end:
                await self.catch_up_at_the_end(stored.record)
        except _RetiredError:
            return
        await Linger(end)

    # --- before a round -------------------------------------------------------------------------------------

    async def enter(self, t: int) -> None:
        """Begin a round, under the terms of the membership that is in force with it."""
        entered = await Enter(t)
        if entered is None:
            raise _RetiredError
        self.terms = entered

    async def agree(self) -> int:
        """Wait until 2b members have told their clocks, and for more if they are there; then take the median.

        Members that hold another membership tell nothing: this one may be outdated, so the driver looks for
        its successor before each attempt. When this machine's clock says that all is over, that is believed
        if after a whole period (or ten seconds, if the others must have left) at most b members answer that
        they hold another membership: a wrong clock is told by the others'. Returns the number of clocks.
        """
        clock, began = self.clock, self.clock.position()
        while True:
            told = await AskClocks()
            offsets = [offset for offset in told if offset is not None]
            terms = self.terms
            if len(offsets) >= 2 * terms.byzantine:
                break
            left = clock.position() >= clock.end(terms.rounds) + terms.linger * clock.period
            patience = min(clock.period, _LEFT) if left else clock.period
            over = clock.round() > terms.rounds and clock.position() > began + patience
            if over and len(told) - len(offsets) <= terms.byzantine:
                raise _RetiredError
            await Sleep(clock.position() + min(1.0, clock.period / 10))
            await self.enter(clock.round())
        while 0 < len(offsets) <= 2 * terms.byzantine:
            more = [offset for offset in await AskClocks() if offset is not None]
            if len(more) > len(offsets):
                offsets = more
            elif clock.position() > -_AHEAD * clock.period:  # before the epoch there is time to wait for them
                break
            else:
                await Sleep(clock.position() + min(1.0, clock.period / 10))
        positions = [clock.position() + offset for offset in offsets]
        clock.adopt(offsets, terms.byzantine)
        _check_over(clock, terms, positions)
        return len(offsets)

    async def next_round(self) -> int:
        """Wait for the next round and begin it; more than T when the last is over.

        Whoever slept through the end of the last round may have slept through a membership that pauses before
        it. A membership that takes effect may begin a round later, and rounds that were not played before it:
        then the first of them is begun.
        """
        clock, last = self.clock, self.state.last
        t = max(clock.open_round(), last + 1)
        if last < self.terms.rounds < t:
            await self.enter(self.terms.rounds)
            t = max(clock.open_round(), last + 1)
        if t > self.terms.rounds:
            return t
        await Sleep(clock.start(t))
        await self.enter(t)
        if clock.position() < clock.start(t):
            t = max(clock.open_round(), last + 1)
            await Sleep(clock.start(t))
        return t

    # --- a round --------------------------------------------------------------------------------------------

    async def play_round(self, t: int) -> None:
        """One round of Algorithm 1; a peer without a model to trust takes no step."""
        if not backend("numba").finite_rows(self.state.x[None])[0]:
            self.state = replace(self.state, x=self.initial(), round=0, fresh=True, v=None)
        began, half = self.clock.position(), None
        if self.frozen:
            half = LentRow(self.state.x)
        elif not self.behind(t):
            half = await self.local_step(t)
        terms, state = self.terms, self.state
        asked = self.sampler(t, terms.me, terms.nodes, terms.pull)
        record = self.recorded(Record(t, asked, None, membership=terms.membership), half)
        self.state = replace(state, last=t)
        if await Persist(record):
            await Publish(t, served=half is not None)
            record, result = await self.pull(record, self.clock.start(t) + terms.deadline)
        else:
            await Publish(t, served=False)
            result = _Result(Outcome.LOCAL_ONLY)
        await self.end_round(record, result, began)

    @property
    def frozen(self) -> bool:
        """Too few members have answered for too long: what there is is served, and no step is taken."""
        return self.state.degraded >= self.terms.patience

    def behind(self, t: int) -> bool:
        """Return whether this peer missed more than one round before t and has to catch up."""
        return t - self.state.round > 2

    def recorded(self, record: Record, half: LentRow | None) -> Record:
        """The record with what is served as this peer's half-step, and what the outer step needs."""
        if self.terms.outer is None or half is None:
            return replace(record, half=half)
        return replace(record, half=half, before=self.state.x, v=self.state.v)

    async def local_step(self, t: int) -> LentRow | None:
        """Lines 3-6: the half-step, None if it is not finite."""
        half = await Step(t, self.state.x, self.state.fresh)
        finite = backend("numba").finite_rows(half[None])[0]
        self.state = replace(self.state, fresh=not finite)
        return half if finite else None

    async def pull(
        self, record: Record, deadline: float, missed: int | None = None
    ) -> tuple[Record, "_Result"]:
        """Lines 7-9 with the draw of the record, and what is recorded by then.

        ``missed``: the last round, which is asked for although the record is of the round after it; nothing
        is served for it.
        """
        t, b_hat = record.round if missed is None else missed, self.terms.rule.f or 0

        pulled = await Pull(t, record.asked, record.half, deadline, 2 * b_hat)
        everybody_down = pulled.empty > len(record.asked) - 2 * b_hat
        if everybody_down and record.half is None and missed is None:
            record = self.recorded(replace(record, stale=True), LentRow(self.state.x))
            if await Persist(record):
                await Publish(t, served=True)
                pulled = await Pull(t, record.asked, record.half, deadline, 2 * b_hat)
        return record, self.aggregate(replace(record, round=t), pulled)

    def aggregate(self, record: Record, pulled: Pulled) -> "_Result":
        """Lines 8-9, or catching up as invariant 5 says."""
        terms, state, b_hat = self.terms, self.state, self.terms.rule.f or 0
        trusted = record.half is not None and not self.frozen and not record.stale
        ended = _Result(
            Outcome.LOCAL_ONLY,
            results=dict(zip(record.asked, pulled.results, strict=True)),
            offset=self.clock.slew(list(pulled.offsets), b_hat),
        )
        received = sum(result is PullResult.OK for result in pulled.results)
        if not trusted and received < 2 * b_hat:
            return ended
        without_own = received > 2 * b_hat and (state.behind or not trusted)
        if record.half is None:
            pulled.table[0] = state.x
        ordinary = trusted and not without_own
        rule, rows = terms.rule if ordinary else catching_up(b_hat), _received(pulled, own=not without_own)
        rule = rule.at(round=record.round, rounds=terms.rounds, seed=terms.seed, ids=np.array([terms.me]))
        z, done = aggregate_or_keep(pulled.table[:1], rows, rule)  # a cohort of one
        if done.degraded[0]:
            return ended
        if not ordinary:
            return replace(ended, outcome=Outcome.CAUGHT_UP, x=z[0], behind=not without_own)
        x, v = (z[0], None) if terms.outer is None else _outward(terms.outer, state, z, done)
        return replace(ended, outcome=Outcome.AGGREGATED, x=x, behind=state.behind, v=v)

    async def end_round(self, record: Record, result: "_Result", began: float) -> None:
        """Save what the round came to, say so, and go on."""
        if result.x is not None:
            fresh = self.state.fresh or result.outcome is Outcome.CAUGHT_UP
            self.state = replace(
                self.state, x=result.x, round=record.round, degraded=0, fresh=fresh, behind=result.behind,
                v=result.v,
            )  # fmt: skip
        else:
            self.state = self.with_half(record, replace(self.state, degraded=self.state.degraded + 1))
        state = self.state
        saved = await Save(
            Checkpoint(
                state.round, state.x, state.fresh, state.degraded, result.outcome, state.behind, state.v
            )
        )
        await Tell(
            Report(
                round=record.round,
                outcome=result.outcome,
                asked=len(record.asked),
                received=sum(result is PullResult.OK for result in result.results.values()),
                trim=self.terms.rule.f or 0,
                results=result.results,
                degraded=state.degraded,
                frozen=self.frozen,
                saved=saved,
                seconds=self.clock.position() - began,
                offset=result.offset,
            )
        )

    def with_half(self, record: Record, state: State) -> State:
        """The state after a round that changed nothing: its half-step, unless that is an older model."""
        if record.half is None or record.stale:
            return state
        return replace(state, x=record.half.copy(), round=record.round)

    # --- what was not ended ---------------------------------------------------------------------------------

    async def resume(self, record: Record) -> None:
        """Go on with the round that was recorded and did not end.

        If it still runs its own draw is pulled again, else its half-step stands.
        """
        began, clock, t = self.clock.position(), self.clock, record.round
        if record.half is not None:
            self.state = replace(self.state, fresh=False)
        if record.before is not None:
            self.state = replace(self.state, x=record.before, v=record.v)
        if t <= self.terms.rounds and clock.round() == t and began < clock.start(t) + self.terms.deadline:
            await self.enter(t)
            if self.terms.membership == record.membership:  # else its numbers are others' by now
                record, result = await self.pull(record, clock.start(t) + self.terms.deadline)
                await self.end_round(record, result, began)
                return
        self.state = self.with_half(record, self.state)

    async def catch_up_at_the_end(self, before: Record | None) -> None:
        """Take an aggregate of the last round's half-steps, which was missed.

        It has a draw of its own, asked twice if need be.
        """
        began, t = self.clock.position(), self.terms.rounds
        await self.enter(t)
        terms = self.terms
        record = Record(
            t + 1, self.sampler(t + 1, terms.me, terms.nodes, terms.pull), None, membership=terms.membership
        )
        if before is not None and before.round == t + 1:
            record = before
        elif self.state.last > t or not await Persist(record):  # drawn before, and no longer known
            return
        if record.membership != terms.membership:
            return
        for _ in range(2):
            _, result = await self.pull(record, self.clock.position() + terms.deadline, missed=t)
            if PullResult.OK in result.results.values() and result.x is not None:
                await self.end_round(replace(record, round=t), result, began)
                return


@dataclass(frozen=True)
class _Result:
    """What the pulls of a round came to; x is None when they change nothing."""

    outcome: Outcome
    x: Models | None = None
    results: dict[int, PullResult] = field(default_factory=dict)
    offset: float = 0.0
    behind: bool = False
    v: Models | None = None


def _check_over(clock: RoundClock, terms: Terms, clocks: Sequence[float]) -> None:
    """Raise ClockError if this clock is past the last round and at most b others' are, but not all.

    One liar and this machine's wrong clock may outvote one honest member;
    believing them would end this peer for good.
    """
    end = clock.end(terms.rounds)
    over = sum(position >= end for position in clocks)
    if clock.position() >= end and over <= terms.byzantine and over < len(clocks):
        raise ClockError(
            f"this machine's clock says that round {terms.rounds}, the last, is over, and "
            f"{len(clocks) - over} of {len(clocks)} members that told theirs say that it is not: set it and "
            "start again"
        )


def _sat_out(clock: RoundClock) -> float:
    """Up to where this peer may have begun rounds before: now, or a little later.

    A clock that was ahead before the restart may have begun the next round already;
    before the epoch nobody has.
    """
    return clock.position() + (_AHEAD * clock.period if clock.round() >= 1 else 0.0)


def _restored(stored: Stored, initial: Callable[[], Models]) -> State:
    saved = stored.checkpoint
    if saved is None or not backend("numba").finite_rows(saved.x[None])[0]:
        return State(initial(), last=stored.last_round)
    last = max(stored.last_round, saved.round)
    return State(saved.x, saved.round, last, saved.degraded, saved.fresh, saved.behind, saved.v)


def _outward(outer: NesterovOuter, state: State, z: Models, done: Aggregated) -> tuple[Models, Models]:
    """The model after the outer step, and its new v."""
    x = state.x[None]
    memory = outer.init(x) if state.v is None else {"v": state.v[None]}
    stepped, after = outer(x, z, memory, done)
    return stepped[0], after["v"][0]


def _received(pulled: Pulled, own: bool) -> Received:
    """The rows that came, in the order asked, behind the own one if that counts."""
    rows = [0] * own + [j for j, result in enumerate(pulled.results, start=1) if result is PullResult.OK]
    return Received(pulled.table, np.array([rows], dtype=np.int64))


def catching_up(b_hat: int) -> Rule:
    """The rule of a peer that has no model to trust: rules around the own one have no centre then."""
    return rule(ROBUST_RULE, f=b_hat)


# --- before the first round ---------------------------------------------------------------------------------

_LARGE = 1_000_000
"""Parameters from which a kernel made for one number of models is worth the second that compiling it
takes."""


def sizes(rule: Rule, pull: int) -> Iterator[tuple[int, int]]:
    """(m, f) for which the rule may run after s peers were asked.

    >>> from rpel.rules import rule
    >>> list(sizes(rule("trimmed_mean", f=1), pull=4))
    [(3, 1), (4, 1), (5, 1), (2, 0), (3, 0), (4, 0)]
    """
    f = rule.f or 0
    for left_out in range(f + 1):
        least = max(1, rule.min_vectors(f) - left_out)
        yield from ((m, f - left_out) for m in range(least, pull + 2 - left_out))


def make_ready(rule: Rule, pull: int, d: int, dtype: Any) -> None:
    """Run the rule once for each of its sizes on one coordinate.

    For large models, compile the kernels of each size, too.

    >>> import numpy as np
    >>> from rpel.rules import rule
    >>> make_ready(rule("median", f=1), pull=3, d=10, dtype=np.float32)
    """
    for m, f in sizes(rule, pull):
        chosen = rule.with_f(f)
        chosen(stream(0, "ready").standard_normal((m, 1)).astype(dtype))
        if d >= _LARGE:
            chosen.prepare(m, d, dtype, victims=1 << 20)


def warm() -> None:
    """Load the kernels that every peer needs.

    A process that forks peers calls it once for all of them.
    """
    make_ready(catching_up(1), pull=4, d=1, dtype=np.float32)
