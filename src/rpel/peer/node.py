"""A peer on a real machine: it answers what ``protocol.py`` wants, by TLS, a disk and the machine's clock.

Invariants:
- the protocol runs in the caller's thread, one want after the other; a thread of its own only moves bytes;
- models lie in one table (1 + s, d), row 0 the half-step, the others where answers arrive: no body is ever copied, and
  before answers come the other rows serve as scratch;
- whenever it ends, by Ctrl-C, by an error in the user's step or by a power cut, the disk is as after the last want that
  was answered, and nothing of an unfinished round was seen outside.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from rpel.aggregation import Rule
from rpel.aggregation.coordinatewise import Coordinatewise, Mixed
from rpel.config.membership import Membership
from rpel.config.peer import Config
from rpel.kernels.compiled import prepare
from rpel.peer import wire
from rpel.peer.background import Background, Woken
from rpel.peer.client import Answer
from rpel.peer.clock import RoundClock, ticks
from rpel.peer.desk import Desk
from rpel.peer.evidence import AUDIT_FILE, Audit, Notary
from rpel.peer.identity import News, read_key, take
from rpel.peer.learner import Learner
from rpel.peer.limits import reserve_descriptors
from rpel.peer.metrics import Metrics, Pages, Repeats, RoundLog, line
from rpel.peer.protocol import (
    AskClocks,
    Checkpoint,
    Coins,
    Enter,
    Memory,
    Persist,
    Publish,
    Pull,
    Pulled,
    Recall,
    Record,
    Report,
    Save,
    Sleep,
    Step,
    Tell,
    Terms,
    Want,
    catching_up,
    rounds,
)
from rpel.peer.server import HttpsTransport
from rpel.peer.store import MODEL_FILE, Body, Store, export, initial_body, initial_model
from rpel.randomness import stream
from rpel.text import duration, shortened
from rpel.types import Models, Outcome, PullResult

log = logging.getLogger("rpel")

_SLICE = 1.0  # seconds slept at once: a machine that was suspended notices within that
_CLOCKS = 3.0  # seconds that members have to tell their clocks
_LARGE = 1_000_000
"""Parameters from which a kernel made for one number of models is worth the second that compiling it takes."""

Progress = Callable[[Report, float | None], None]
"""Told after each round, with the accuracy if it was measured."""


@dataclass(frozen=True)
class Round:
    """A round that begins; ``outcome`` and the numbers are those of the round before, None and 0 if there is none."""

    number: int
    outcome: Outcome | None = None
    asked: int = 0
    received: int = 0
    trim: int = 0


def from_os(round: int, me: int, nodes: int, s: int) -> tuple[int, ...]:
    """s different others, from the operating system's randomness, so that nobody can predict them.

    >>> drawn = from_os(1, 0, 12, 8)
    >>> len(set(drawn)), 0 in drawn
    (8, False)
    """
    return tuple(secrets.SystemRandom().sample([i for i in range(nodes) if i != me], s))


class SecondInstanceError(OSError):
    """This peer's key signed what this peer did not."""


class Node:
    """One peer from its start to its end: a context manager, inside which :meth:`live` is the training."""

    def __init__(self, config: Config, coins: Coins = from_os, progress: Progress | None = None) -> None:
        """Read and check everything; nothing is opened yet. ``coins`` other than the system's are for tests."""
        self.config, self._coins, self.progress = config, coins, progress
        self._news = News(config)
        self.standing = take(config, self._in_force(Membership.load(config.members)))
        m = self.standing.membership
        self.signature = initial_model(config, m)[0]
        self.clock = RoundClock(m.epoch, m.period, wall=time.time, ticks=ticks)
        self.desk, self.metrics = Desk(), Metrics()
        self._log = RoundLog(config.log)
        self.unready, self._digest, self._other = "starting", "", ""
        self._table: Models = np.empty((1 + m.pull, self.signature.d), self.signature.dtype)
        self._x: Models | None = None
        self._silent: tuple[int, ...] = ()
        self._came: dict[int, str] = {}
        self._gossiping: set[asyncio.Task[None]] = set()
        self._impostor_found = False

    def _in_force(self, written: Membership) -> Membership:
        """The membership of this moment: the written one, or its successor if the peer starts after the change."""
        now = int((time.time() - written.epoch) // written.period) + 1
        return self._news.due(written, now) or written

    # --- start and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._quieten(opened)
            reserve_descriptors(len(self.standing.membership.members))
            self._store = opened.enter_context(Store(self.config.state_dir, self.signature))
            self.notary = Notary(self.config.state_dir / "evidence", self._store.last_round)
            self._appoint()
            self._audit = Audit(self.config.state_dir / AUDIT_FILE)
            self._background = Background()
            opened.callback(self._background.close)
            self._open_pages(opened)
            self._open_transport(opened)
            self._opened = opened.pop_all()
        self._identify()
        self._introduce()
        return self

    def __exit__(self, *_: object) -> None:
        self._background.rest()
        self._opened.close()

    def _quieten(self, opened: ExitStack) -> None:
        """A line that repeats itself, for whatever reason, must not fill the disk."""
        repeats = Repeats()
        for name in ("rpel", "asyncio"):
            logging.getLogger(name).addFilter(repeats)
            opened.callback(logging.getLogger(name).removeFilter, repeats)

    def _open_pages(self, opened: ExitStack) -> None:
        self.pages = Pages(self.metrics, lambda: self.unready)
        self._background.call(self.pages.start(self.config.metrics_listen))
        opened.callback(lambda: self._background.call(self.pages.stop()))

    def _open_transport(self, opened: ExitStack) -> None:
        here = self.standing
        self.transport = HttpsTransport(
            here.membership,
            here.certificate,
            here.key,
            self.config.listen,
            self.signature,
            self,
            clock_timeout=min(_CLOCKS, here.membership.period),
        )
        try:
            self._background.call(self.transport.start())
        except OSError as error:
            raise OSError(f"listen {self.config.listen} cannot be used ({error.strerror or error})") from None
        opened.callback(lambda: self._background.call(self._hang_up()))

    def _appoint(self) -> None:
        self.notary.rotate(self.standing.membership, self.standing.me, read_key(self.standing.key))

    def _identify(self) -> None:
        self.metrics.identity(self.standing.membership.hash, self.standing.expiry)

    def _introduce(self) -> None:
        """Say where this peer listens, among how many members, and which round it is."""
        m, now = self.standing.membership, self.clock.round()
        begins = datetime.fromtimestamp(m.epoch, UTC)
        when = f"round 1 begins {begins:%Y-%m-%d %H:%M:%S} UTC" if now < 1 else f"round {now} of {m.rounds} is running"
        if now < 1:
            when += f", in {duration(-self.clock.position())}"
        if not self.over:
            log.info("%s listens at %s, one of %d members; %s", self.config.id, self.config.listen, m.nodes, when)

    def stop(self) -> None:
        """End :meth:`live` from another thread, as soon as it waits for something."""
        self.unready = "stopping"
        self._background.wake()

    def summary(self) -> dict[str, Any]:
        """Who this is and how the rounds since the start went."""
        own = {"id": self.config.id, "membership": self.standing.membership.hash}
        return own | {"rounds": self.standing.membership.rounds} | self.metrics.summary()

    # --- the rounds --------------------------------------------------------------------------------------------------

    def live(self, learner: Learner) -> Generator[Round, None, None]:
        """Drive the protocol to its end, yielding at each local step between the learner's ``load`` and ``half``.

        Whoever leaves at a yield leaves the round: nothing of it is on disk and nothing is seen outside. At the end the
        learner is loaded with the last round's model.
        """
        self._learner = learner
        if self.over:
            self._finish()
            return
        living = self._begun(learner)
        try:
            want = next(living)
            while True:
                if isinstance(want, Step):
                    learner.load(want.round, want.x, want.fresh)
                    yield self._beginning(want.round)
                    learner.half(self._table[0], scratch=self._table[1])
                    answer: Any = self._table[0]
                else:
                    answer = self.answer(want, learner)
                want = living.send(answer)
        except StopIteration:
            self._finish()
        except Woken:
            self.unready = "stopped"
            if self.notary.impostor:
                raise SecondInstanceError(
                    f"somebody else signed a half-step of round {self.notary.impostor} with this peer's key: a second "
                    f"peer runs with it, or the folder {self.config.state_dir} was set back or emptied"
                ) from None
        finally:
            living.close()

    def _begun(self, learner: Learner) -> Generator[Want, Any, None]:
        """The protocol's wants, after everything it needs is compiled."""
        terms = self.standing.terms
        self._compile(terms)
        scratch = self._table[1]
        scratch[:] = self._initial()
        learner.prepare(scratch, scratch=self._table[0])
        return rounds(terms, self.clock, self._coins, self._initial)

    def _initial(self) -> Models:
        return initial_model(self.config, self.standing.membership)[1]

    def _compile(self, terms: Terms) -> None:
        for rule in (terms.rule, catching_up(terms.rule.f or 0)):
            make_ready(rule, terms.pull, self.signature.d, self.signature.dtype)

    def _finish(self) -> None:
        """Load the learner with the last model kept, and write it as model.safetensors."""
        self.unready = "finished"
        if self._x is None:
            self._recall(self._learner)
        if self._x is None:
            return
        try:
            last = self.export(self.model_path)
        except (OSError, ValueError) as error:
            log.error("%s could not be written: %s", self.model_path, error)
            last = self.metrics.summary()["round"]
        self._learner.load(last, self._x, fresh=False)

    def export(self, to: Path, round: int | None = None) -> int:
        """Write the model after a round (None: the newest kept) to a safetensors file; returns the round."""
        m = self.standing.membership
        return export(self.config.state_dir, self.signature, to, round, run=m.run, id=self.config.id)

    @property
    def model_path(self) -> Path:
        """Where the model lies after the last round."""
        return self.config.state_dir / MODEL_FILE

    @property
    def over(self) -> bool:
        """Whether the last round has ended, by this peer's clock."""
        return self.clock.round() > self.standing.membership.rounds

    def _beginning(self, number: int) -> Round:
        last = self.metrics.last
        return Round(number) if last is None else Round(number, last.outcome, last.asked, last.received, last.trim)

    def answer(self, want: Want, learner: Learner) -> Any:
        """Do what the protocol wants, anything but a local step, and return what it is to be sent."""
        match want:
            case Recall():
                return self._recall(learner)
            case AskClocks():
                return self._ask_clocks()
            case Sleep(until):
                return self.sleep(until)
            case Enter(round):
                return self._enter(round)
            case Persist(record):
                return self._persist(record, learner)
            case Publish(round, served):
                return self._background.call(self._publish(round, served))
            case Pull():
                return self._pull(want)
            case Save(checkpoint):
                return self._save(checkpoint)
            case Tell(report):
                return self._tell(report, learner)
        raise AssertionError(want)

    def _recall(self, learner: Learner) -> Memory:
        memory = self._store.memory()
        if memory.checkpoint is not None:
            self._x = memory.checkpoint.x
        record = memory.record
        if record is None:
            return memory
        if blob := self._store.state(record.round):
            learner.restore(blob)
        if record.half is not None:
            self._table[0] = record.half
            record = replace(record, half=self._table[0])
            self._digest = wire.digest(self.signature, self._table[0])
        return replace(memory, record=record)

    def _ask_clocks(self) -> list[float]:
        offsets = self._background.call(self.transport.clocks())
        self._compare()
        needed, silent = 2 * self.standing.membership.byzantine, self.transport.client.silent
        if len(offsets) < needed and silent != self._silent:
            log.info(
                "waiting until %d members tell their clocks; %d did, not yet: %s",
                needed,
                len(offsets),
                shortened([self.standing.names[member] for member in silent]),
            )
        self._silent = silent
        if len(offsets) >= needed:  # the protocol has all it needs to begin
            if self.unready:
                log.info("ready: %d members told their clocks", len(offsets))
            self.unready = ""
        return offsets

    def sleep(self, until: float) -> None:
        """Wait until this peer's clock has that position."""
        while (left := until - self.clock.position()) > 0:
            self._background.sleep(min(left, _SLICE))

    def _enter(self, round: int) -> Terms | None:
        """The terms of this round; a membership that takes effect with it is put in force first."""
        coming = self._news.due(self.standing.membership, round, patience=self.clock.period / 20)
        if coming is not None:
            if all(member.id != self.config.id for member in coming.members):
                log.warning("%r is not a member from round %d on: this peer stops", self.config.id, round)
                return None
            self.standing = take(self.config, coming)
            self._compile(self.standing.terms)
            self._appoint()
            self._background.call(self._rotate())
            self._identify()
            log.info("membership %s is in force", coming.hash[:12])
        return self.standing.terms

    def _persist(self, record: Record, learner: Learner) -> bool:
        if record.half is None:
            log.info("round %d: catching up: the others' models take the place of this peer's", record.round)
        self._digest = "" if record.half is None else wire.digest(self.signature, record.half)
        signature = self.notary.sign(record.round, bytes.fromhex(self._digest)) if self._digest else b""
        return self._store.persist(record, learner.state(), signature)

    def _save(self, checkpoint: Checkpoint) -> bool:
        self._x = checkpoint.x
        saved = self._store.save(checkpoint, self._learner.buffers())
        if saved:
            self.metrics.saved()
        return saved

    def _tell(self, report: Report, learner: Learner) -> None:
        """The log, the metrics, and while there is nothing else to do the accuracy."""
        names = self.names(max(report.results, default=0))
        self.metrics.ended(report, names)
        self._log.write(line(report, names, self._digest, time.time()))
        self._account(report, names)
        self.unready = self._trouble(report)
        assert self._x is not None, "saved just before"
        accuracy = learner.accuracy(self._x, report.round, last=report.round >= self.standing.membership.rounds)
        if accuracy is not None:
            self.metrics.accuracy = accuracy
        if self.progress is not None:
            self.progress(report, accuracy)

    def _trouble(self, report: Report) -> str:
        """Why this peer does not train as it should; "" if it does."""
        if self._store.trouble:
            return f"the state folder cannot be written: {self._store.trouble}"
        if self.transport.client.exhausted:
            return "no file descriptors are left: raise the limit of open files"
        return "frozen: too few members answer" if report.frozen else ""

    def _account(self, report: Report, names: tuple[str, ...]) -> None:
        """A line of the audit log: what was aggregated, by its hash; and who is convicted."""
        aggregated = {names[member]: digest for member, digest in self._came.items()}
        content = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "round": report.round,
            "membership": self.standing.membership.hash,
            "outcome": report.outcome,
            "asked": [names[member] for member in report.results],
            "trim": report.trim,
            "own": self._digest,
            "aggregated": {} if report.outcome is Outcome.LOCAL_ONLY else aggregated,
        }
        try:
            self._audit.write(content)
        except OSError as error:
            log.warning("the audit log cannot be written (%s): rounds go on without it", error.strerror)
        self.metrics.convicted(len(self.notary.convicted))

    def _pull(self, want: Pull) -> Pulled:
        """All members at once, each into its row."""
        if len(self._table) != 1 + len(want.members):  # another plan came with another membership
            self._table = np.empty((1 + len(want.members), self.signature.d), self.signature.dtype)
        if want.half is not None and not np.may_share_memory(want.half, self._table[0]):
            self._table[0] = want.half
        self.transport.client.exhausted = False
        answers = self._background.call(self._pull_all(want))
        pairs = zip(want.members, answers, strict=True)
        self._came = {member: answer.signed.digest.hex() for member, answer in pairs if answer.signed is not None}
        self._compare()
        offsets = tuple(answer.offset for answer in answers if answer.offset is not None)
        return Pulled(self._table, tuple(answer.result for answer in answers), offsets)

    def _compare(self) -> None:
        """Say once that this peer's members.toml is not the others', when more say so than can be hostile."""
        here = self.standing.membership
        for other, count in Counter(self.transport.client.differing.values()).most_common(1):
            if count > here.byzantine and other != self._other:
                self._other = other
                log.warning(
                    "%d members hold the membership %s and refuse this peer, which holds %s: get their file and put it "
                    "at %s",
                    count,
                    other[:12],
                    here.hash[:12],
                    self.config.next_members,
                )

    # --- in the network's thread -------------------------------------------------------------------------------------

    async def _pull_all(self, want: Pull) -> list[Answer]:
        deadline = asyncio.get_running_loop().time() + want.deadline - self.clock.position()
        rows = zip(want.members, self._table[1:], strict=True)
        return await asyncio.gather(*(self.ask(member, want.round, row, deadline) for member, row in rows))

    async def ask(self, member: int, round: int, row: Models, deadline: float) -> Answer:
        """Pull one member's model of a round into its row; whatever goes wrong is an Answer."""
        began = time.monotonic()
        if self.names(member)[member] in self.notary.convicted:  # a no-show, whatever it would say
            return Answer(PullResult.REFUSED, reason="it was convicted of signing two half-steps of one round")
        try:
            answer = await self.transport.pull(member, round, row, deadline)
        except Exception as error:  # whatever a member makes of its answer, it must not end this peer
            log.exception("round %d: asking %s failed", round, self.names(member)[member])
            answer = Answer(PullResult.MALFORMED, reason=repr(error))
        self.metrics.pulled(time.monotonic() - began, answer.received)
        if answer.result is not PullResult.OK:
            log.debug("round %d: %s is %s: %s", round, self.names(member)[member], answer.result, answer.reason)
        elif answer.signed is not None:
            self.notary.saw(member, round, answer.signed)
            asking = asyncio.get_running_loop().create_task(self._gossip(member, round - 1, deadline))
            self._gossiping.add(asking)
            asking.add_done_callback(self._gossiping.discard)
        return answer

    async def _gossip(self, member: int, round: int, deadline: float) -> None:
        """What a member saw signed in the round before; whoever does not say is not asked again."""
        told = await self.transport.client.seen(member, round, deadline) if round > 0 else None
        if isinstance(told, dict):
            self.notary.hear(round, told)
        if self.notary.impostor and not self._impostor_found:
            self._impostor_found = True
            self._background.wake()  # see live

    def names(self, most: int) -> tuple[str, ...]:
        """Ids by number, up to ``most``: a draw from before a change of membership may hold numbers beyond it."""
        names = self.standing.names
        return names + tuple(f"former-{number}" for number in range(len(names), most + 1))

    async def _publish(self, round: int, served: bool) -> None:
        if served:
            self.desk.publish(round)
        else:
            self.desk.skip(round)
        self.transport.announce()

    def signature_of(self, round: int) -> bytes | None:
        """The signature of a published half-step."""
        return self._store.signature(round)

    def seen(self, round: int) -> dict[str, object] | None:
        """What this peer saw signed in a round."""
        return self.notary.seen(round)

    async def _hang_up(self) -> None:
        for asking in self._gossiping:
            asking.cancel()
        await self.transport.stop()

    async def _rotate(self) -> None:
        self.transport.rotate(self.standing.membership, self.standing.certificate, self.standing.key)

    def open_body(self, round: int) -> Body | None:
        """The half-step of a published round; round 0: the common initial model."""
        return self._store.open_body(round) if round else initial_body(self.config, self.signature)

    def position(self) -> float:
        """This peer's round clock."""
        return self.clock.position()

    def status(self) -> dict[str, object]:
        """What `rpel watch` shows of this peer."""
        return self.summary() | {
            "position": self.position(),
            "ready": not self.unready,
            "convicted": list(self.notary.convicted),
        }

    def served(self, member: int, code: int, sent: int) -> None:
        """A member's request was answered."""
        self.metrics.served(self.standing.names[member], code, sent)


# --- before a peer is ready -------------------------------------------------------------------------------------------


def sizes(rule: Rule, pull: int) -> Iterator[tuple[int, int]]:
    """(m, f) for which the rule may run after s peers were asked.

    >>> from rpel.aggregation import rule
    >>> list(sizes(rule("trimmed_mean", f=1), pull=4))
    [(3, 1), (4, 1), (5, 1), (2, 0), (3, 0), (4, 0)]
    """
    f = rule.f or 0
    for left_out in range(f + 1):
        least = max(1, rule.least(f) - left_out)
        yield from ((m, f - left_out) for m in range(least, pull + 2 - left_out))


def make_ready(rule: Rule, pull: int, d: int, dtype: Any) -> None:
    """Run the rule once for each of its sizes on one coordinate; for large models make the kernels of each size too.

    >>> import numpy as np
    >>> from rpel.aggregation import rule
    >>> make_ready(rule("median", f=1), pull=3, d=10, dtype=np.float32)
    """
    last = rule.rule if isinstance(rule, Mixed) else rule
    for m, f in sizes(rule, pull):
        rule.with_f(f)(stream(0, "ready").standard_normal((m, 1)).astype(dtype))
        if d >= _LARGE and isinstance(last, Coordinatewise):
            prepare(m, f, last.operation, isinstance(rule, Mixed), dtype)
