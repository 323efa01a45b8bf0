"""What a peer does, round after round, without a socket, a file or a clock of its own.

:func:`rounds` yields effects and is sent what they brought; ``io/node.py`` answers with TLS, a disk and the
machine's clock, the tests with a simulated network under a virtual clock. Models in its records are never
written to after they were made, but for one: a :data:`LentRow`. Its invariants:

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
   left out of 2 b̂ + 1 answers or more. With exactly 2 b̂ it is added, however old: every coordinate then lies
   between honest values, the old one included, so b liars who repeat that one can hold the peer back, but
   only while no more than 2 b̂ members answer: it takes part again,
   and leaves its own model out in the first round with 2 b̂ + 1 answers.
6. Liveness. The plan secures 2 b̂ answers when all hostile members are silent and F honest ones are down. When
   faults end so, every honest peer aggregates again within 10 rounds: with ``patience`` behind them all serve
   something, and 2 b̂ answers suffice for everybody.
7. An outer step follows an aggregation and nothing else: a round that ends local_only keeps v, catching up
   leaves the aggregate as it is and forgets v. The model before the local steps and v are in the record of
   the half-step, so that a crash in the middle of a round, even after a checkpoint that the disk refused,
   loses neither.
8. The end is the same for all. After its last round a peer serves it for ``linger`` periods; who missed it
   takes a robust aggregate of that round's half-steps, from one more draw, which is recorded like those of
   the rounds.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NewType

import numpy as np

from rpel.backend.base import backend
from rpel.learning import NesterovOuter
from rpel.peer.core.clock import ClockError, RoundClock
from rpel.randomness import stream
from rpel.rules import Rule, aggregate_or_keep, rule
from rpel.types import ROBUST_RULE, Aggregated, Floats, Models, Outcome, PullResult, Received

Sampler = Callable[[int, int, int, int], tuple[int, ...]]
"""(round, own number, nodes, s) → s different others. A deployed peer's come from the operating system."""
LentRow = NewType("LentRow", Floats)
"""A model (d,) in a row of the driver's table: valid until the next Step, which overwrites it."""
_AHEAD = 0.05
"""Of a period: how far a peer's clock may have been ahead of the one it adopts after a restart."""


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


@dataclass(frozen=True)
class Checkpoint:
    """Where a round ended: the model, whether the momentum is to be forgotten, degraded rounds in a row.

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
class Memory:
    """What the disk has. ``last_round`` is the newest round ever recorded, readable or not; 0: none."""

    checkpoint: Checkpoint | None = None
    record: Record | None = None
    last_round: int = 0
    published: tuple[int, ...] = ()


# --- what is wanted, and what comes back --------------------------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """→ Memory; the local state (momentum) of its record is restored too."""


@dataclass(frozen=True)
class AskClocks:
    """→ for each member that answered, how far its clock is ahead of this one; None if it only said that it
    holds another membership."""


@dataclass(frozen=True)
class Sleep:
    """→ None, when this peer's clock has that position."""

    until: float


@dataclass(frozen=True)
class Enter:
    """→ the Terms of this round, which begins; None: this peer is a member no longer."""

    round: int


@dataclass(frozen=True)
class Step:
    """→ the half-step (d,) that training makes of x; ``fresh``: with the momentum forgotten.
    x stays as it is."""

    round: int
    x: Models
    fresh: bool


@dataclass(frozen=True)
class Persist:
    """→ whether the record, with the local state, is on disk."""

    record: Record


@dataclass(frozen=True)
class Publish:
    """→ None. From now on this round's half-step is served; ``served`` False: it never will be."""

    round: int
    served: bool


@dataclass(frozen=True)
class Pull:
    """→ Pulled: all members asked at once, and no answer after the deadline (a position)."""

    round: int
    members: tuple[int, ...]
    half: LentRow | None
    deadline: float


@dataclass(frozen=True)
class Pulled:
    """Row 0 of the table (1 + s, d) is the half-step, row j + 1 the answer of the j-th member asked, if OK.

    Without a half-step row 0 is the protocol's to fill. A complete model with a non-finite entry is OK: the
    rule counts it as one of the b̂. ``offsets``: how far the clocks of those that answered were ahead of this
    one at that moment.
    """

    table: Models
    results: tuple[PullResult, ...]
    offsets: tuple[float, ...] = ()


@dataclass(frozen=True)
class Save:
    """→ whether the checkpoint is on disk."""

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
class Tell:
    """→ None."""

    report: Report


@dataclass(frozen=True)
class Linger:
    """→ None, when this peer's clock has that position: the last round has ended here, and is served."""

    until: float


Effect = Recall | AskClocks | Sleep | Enter | Step | Persist | Publish | Pull | Save | Tell | Linger
Effects = Generator[Effect, Any, None]


# --- the rounds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What the next round needs. ``round``: the last one that x stands for; ``last``:
    the last one ever recorded. The rest is as in a Checkpoint.
    """

    x: Models
    round: int = 0
    last: int = 0
    degraded: int = 0
    fresh: bool = False
    behind: bool = False
    v: Models | None = None


def rounds(terms: Terms, clock: RoundClock, sampler: Sampler, initial: Callable[[], Models]) -> Effects:
    """From start to the last round, under the invariants above.
    ``initial()`` is everybody's first model (d,), anew."""
    memory: Memory = yield Recall()
    for t in memory.published:
        yield Publish(t, served=True)
    yield Publish(memory.last_round, served=False)
    began = clock.position()
    agreed = yield from _agree(clock, terms)
    if agreed is None:
        return
    terms, clocks = agreed
    sat_out = _sat_out(clock)
    if 0 < clocks <= 2 * terms.byzantine:
        sat_out = max(sat_out, began + clock.period)
    state = _restored(memory, initial)
    if memory.record is not None and memory.record.round > state.round:
        state = yield from _resumed(memory.record, state, terms, clock)
    while True:
        t, entered = yield from _next(state, terms, clock)
        if entered is None:
            return
        terms = entered
        if t > terms.rounds:
            break
        t, entered = yield from _entered(t, state, clock)
        if entered is None:
            return
        terms = entered
        if clock.start(t) <= sat_out:
            yield Publish(t, served=False)
            state = replace(state, last=t)
            continue
        if not backend("numba").finite_rows(state.x[None])[0]:
            state = replace(state, x=initial(), round=0, fresh=True, v=None)
        began, half = clock.position(), None
        if _may_step(t, state, terms):
            half, state = yield from _stepped(t, state)
        state = yield from _round(t, half, state, terms, clock, sampler, began)
    end = clock.end(terms.rounds) + terms.linger * clock.period
    if state.round < terms.rounds and clock.position() < end:
        yield from _final(memory.record, state, terms, clock, sampler)
    yield Linger(end)


def _next(state: State, terms: Terms, clock: RoundClock) -> Generator[Effect, Any, tuple[int, Terms | None]]:
    """The round to play next, more than T when the last is over, and the terms; None:
    this peer is a member no longer.

    Whoever slept through the end of the last round may have slept through a membership that pauses before it.
    """
    t, entered = max(clock.open_round(), state.last + 1), terms
    if state.last < terms.rounds < t:
        entered = yield Enter(terms.rounds)
        t = max(clock.open_round(), state.last + 1)
    return t, entered


def _entered(t: int, state: State, clock: RoundClock) -> Generator[Effect, Any, tuple[int, Terms | None]]:
    """Wait for a round and begin it, under its terms; None: this peer is a member no longer.

    A membership that takes effect may begin it later, and rounds that were not played before it: then the
    first of them is begun.
    """
    yield Sleep(clock.start(t))
    entered: Terms | None = yield Enter(t)
    if entered is not None and clock.position() < clock.start(t):
        t = max(clock.open_round(), state.last + 1)
        yield Sleep(clock.start(t))
    return t, entered


def _agree(clock: RoundClock, terms: Terms) -> Generator[Effect, Any, tuple[Terms, int] | None]:
    """Wait until 2b members have told their clocks, and for more if they are there; then take the median.

    Members that hold another membership tell nothing: this one may be outdated, so the driver looks for its
    successor before each attempt.

    Returns the terms and the number of clocks, or None if this peer is a member no longer, or if the last
    round is over and after a whole period at most b members say that they hold another membership.
    """
    began = clock.position()
    while True:
        told: list[float | None] = yield AskClocks()
        offsets = [offset for offset in told if offset is not None]
        if len(offsets) >= 2 * terms.byzantine:
            break
        over = clock.round() > terms.rounds and clock.position() > began + clock.period
        if over and len(told) - len(offsets) <= terms.byzantine:
            return None
        yield Sleep(clock.position() + min(1.0, clock.period / 10))
        entered: Terms | None = yield Enter(clock.round())
        if entered is None:
            return None
        terms = entered
    while 0 < len(offsets) <= 2 * terms.byzantine:
        more = [offset for offset in (yield AskClocks()) if offset is not None]
        if len(more) > len(offsets):
            offsets = more
        elif clock.position() > -_AHEAD * clock.period:  # before the epoch there is time to wait for them
            break
        else:
            yield Sleep(clock.position() + min(1.0, clock.period / 10))
    positions = [clock.position() + offset for offset in offsets]
    clock.adopt(offsets, terms.byzantine)
    _check_over(clock, terms, positions)
    return terms, len(offsets)


def _check_over(clock: RoundClock, terms: Terms, clocks: Sequence[float]) -> None:
    """ClockError where this peer's clock is past the last round and no b + 1 others' are,
    though some are not.

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


def _restored(memory: Memory, initial: Callable[[], Models]) -> State:
    saved = memory.checkpoint
    if saved is None or not backend("numba").finite_rows(saved.x[None])[0]:
        return State(initial(), last=memory.last_round)
    last = max(memory.last_round, saved.round)
    return State(saved.x, saved.round, last, saved.degraded, saved.fresh, saved.behind, saved.v)


def _resumed(record: Record, state: State, terms: Terms, clock: RoundClock) -> Generator[Effect, Any, State]:
    """The round that was recorded and did not end: its own draw again if it still runs,
    else its half-step stands."""
    began = clock.position()
    if record.half is not None:
        state = replace(state, fresh=False)
    if record.before is not None:
        state = replace(state, x=record.before, v=record.v)
    if clock.round() == record.round and began < clock.start(record.round) + terms.deadline:
        entered: Terms | None = yield Enter(record.round)
        # else its numbers are others' by now
        if entered is not None and entered.membership == record.membership:
            deadline = clock.start(record.round) + entered.deadline
            result = yield from _answers(record, state, entered, clock, deadline)
            return (yield from _ended(record, state, result, entered, clock, began))
    return state if record.half is None else replace(state, x=record.half.copy(), round=record.round)


def _final(
    before: Record | None, state: State, terms: Terms, clock: RoundClock, sampler: Sampler
) -> Generator[Effect, Any, None]:
    """The last round was missed: catch up with its half-steps, by a draw of its own,
    asked twice if need be."""
    began, t = clock.position(), terms.rounds
    entered: Terms | None = yield Enter(t)
    if entered is None:
        return
    drawn = sampler(t + 1, entered.me, entered.nodes, entered.pull)
    record = Record(t + 1, drawn, None, membership=entered.membership)
    if before is not None and before.round == t + 1:
        record = before
    elif state.last > t or not (yield Persist(record)):  # drawn before, and no longer known
        return
    if record.membership != entered.membership:
        return
    missed = replace(record, round=t)
    for _ in range(2):
        result = yield from _answers(missed, state, entered, clock, clock.position() + entered.deadline)
        if PullResult.OK in result.results.values() and result.x is not None:
            yield from _ended(missed, state, result, entered, clock, began)
            return


def _may_step(t: int, state: State, terms: Terms) -> bool:
    """Whether local steps are taken from x in round t: not by a peer that stands still or is to catch up."""
    return state.degraded < terms.patience and t - state.round <= 2


def _stepped(t: int, state: State) -> Generator[Effect, Any, tuple[LentRow | None, State]]:
    """Lines 3-6: the half-step, None if it is not finite."""
    half: LentRow = yield Step(t, state.x, state.fresh)
    finite = backend("numba").finite_rows(half[None])[0]
    return half if finite else None, replace(state, fresh=not finite)


def _round(
    t: int,
    half: LentRow | None,
    state: State,
    terms: Terms,
    clock: RoundClock,
    sampler: Sampler,
    began: float,
) -> Generator[Effect, Any, State]:
    """One round of Algorithm 1 after the local steps; no half-step: what there is to serve, if anything."""
    if state.degraded >= terms.patience:
        half = LentRow(state.x)
    asked = sampler(t, terms.me, terms.nodes, terms.pull)
    record = Record(t, asked, half, membership=terms.membership)
    if terms.outer is not None and half is not None:
        record = replace(record, before=state.x, v=state.v)
    state = replace(state, last=t)
    written = yield Persist(record)
    yield Publish(t, served=written and half is not None)
    result = _Result(Outcome.LOCAL_ONLY)
    if written:
        result = yield from _answers(record, state, terms, clock, clock.start(t) + terms.deadline)
    return (yield from _ended(record, state, result, terms, clock, began))


@dataclass(frozen=True)
class _Result:
    """What the pulls of a round came to; x is None when they change nothing."""

    outcome: Outcome
    x: Models | None = None
    results: dict[int, PullResult] = field(default_factory=dict)
    offset: float = 0.0
    behind: bool = False
    v: Models | None = None


def _answers(
    record: Record, state: State, terms: Terms, clock: RoundClock, deadline: float
) -> Generator[Effect, Any, _Result]:
    """Lines 8-9 with the draw of the record, or catching up as invariant 5 says."""
    trusted = record.half is not None and state.degraded < terms.patience
    b_hat = terms.rule.f or 0
    pulled: Pulled = yield Pull(record.round, record.asked, record.half, deadline)
    ended = _Result(
        Outcome.LOCAL_ONLY,
        results=dict(zip(record.asked, pulled.results, strict=True)),
        offset=clock.slew(list(pulled.offsets), b_hat),
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


def _outward(outer: NesterovOuter, state: State, z: Models, done: Aggregated) -> tuple[Models, Models]:
    """The model after the outer step, and its new v."""
    x = state.x[None]
    memory = outer.init(x) if state.v is None else {"v": state.v[None]}
    stepped, after = outer(x, z, memory, done)
    return stepped[0], after["v"][0]


def _ended(
    record: Record, state: State, result: _Result, terms: Terms, clock: RoundClock, began: float
) -> Generator[Effect, Any, State]:
    """Save what the round came to, say so, and go on."""
    if result.x is not None:
        fresh = state.fresh or result.outcome is Outcome.CAUGHT_UP
        state = replace(
            state, x=result.x, round=record.round, degraded=0, fresh=fresh, behind=result.behind, v=result.v
        )
    else:
        state = replace(state, degraded=state.degraded + 1)
        if record.half is not None:
            state = replace(state, x=record.half.copy(), round=record.round)
    checkpoint = Checkpoint(
        state.round, state.x, state.fresh, state.degraded, result.outcome, state.behind, state.v
    )
    saved = yield Save(checkpoint)
    yield Tell(
        Report(
            round=record.round,
            outcome=result.outcome,
            asked=len(record.asked),
            received=sum(result is PullResult.OK for result in result.results.values()),
            trim=terms.rule.f or 0,
            results=result.results,
            degraded=state.degraded,
            frozen=state.degraded >= terms.patience,
            saved=saved,
            seconds=clock.position() - began,
            offset=result.offset,
        )
    )
    return state


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
    """Run the rule once for each of its sizes on one coordinate;
    for large models make the kernels of each size too.

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
    """Load the kernels that every peer needs: for a process from which peers are forked,
    once for all of them."""
    make_ready(catching_up(1), pull=4, d=1, dtype=np.float32)
