"""A peer on a real machine: it answers what ``protocol.py`` wants, by TLS, a disk and the machine's clock.

Invariants:
- the protocol runs in the caller's thread, one want after the other; a thread of its own only moves bytes;
- models lie in one table (1 + s, d), row 0 the half-step, the others where answers arrive: no body is ever copied, and
  before answers come the other rows serve as scratch;
- whenever it ends, by Ctrl-C, by an error in the user's step or by a power cut, the disk is as after the last want that
  was answered, and nothing of an unfinished round was seen outside.
"""

import logging
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from rpel.config.membership import Membership
from rpel.config.peer import Config
from rpel.peer import protocol, wire
from rpel.peer.background import Background, Woken
from rpel.peer.clock import RoundClock, ticks
from rpel.peer.evidence import EquivocationDetector
from rpel.peer.identity import MembershipWatcher, no_core_dumps, read_key, take
from rpel.peer.journal import AUDIT_FILE, Journal, Repeats
from rpel.peer.learner import Learner
from rpel.peer.limits import Limits, reserve_descriptors
from rpel.peer.metrics import Metrics, Pages
from rpel.peer.models import MODEL_FILE, export, initial_body, initial_model
from rpel.peer.protocol import Checkpoint, Effect, Memory, Pulled, Record, Report, Sampler, Terms
from rpel.peer.serve_policy import ServePolicy
from rpel.peer.store import Body, Store
from rpel.peer.transport import HttpsTransport, Pulls
from rpel.rules import rule
from rpel.text import duration
from rpel.types import Models, Outcome

log = logging.getLogger("rpel")

ADDRESSES_FILE = "addresses.json"
_SLICE = 1.0  # seconds slept at once: a machine that was suspended notices within that
_LATE = 3.0  # periods without the end of a round after which a peer is not ready
_UNASKED = 5  # rounds in which nobody had this peer's half-step, after which that is said
_CLOCKS = 3.0  # seconds that members have to tell their clocks

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

    def __init__(
        self, config: Config, coins: Sampler = from_os, progress: Progress | None = None, force: bool = False
    ) -> None:
        """Read and check everything; nothing is opened yet. ``coins`` other than the system's are for tests; ``force``:
        a membership that comes too late, or an older one, is taken all the same."""
        self.config, self._coins, self.progress = config, coins, progress
        self._news = MembershipWatcher(config, self._held_by_others, force)
        self.standing = take(config, self._in_force(Membership.load(config.members)))
        m = self.standing.membership
        self.signature = initial_model(config, m)[0]
        self.clock = RoundClock(m.epoch, m.period, wall=time.time, ticks=ticks)
        self.desk, self.metrics = ServePolicy(), Metrics()
        self.unready, self._digest = "starting", ""
        self._blocked = ""  # why no round can be played
        self._progress_at = 0.0  # where the clock was when this peer was ready or last ended a round
        self._table: Models = np.empty((1 + m.pull, self.signature.d), self.signature.dtype)
        self._x: Models | None = None
        self.last_round: int | None = None
        """The round after which the model in ``model_path`` is, once the rounds are over."""

    def _in_force(self, written: Membership) -> Membership:
        """The membership of this moment: the written one, or its successor if the peer starts after the change."""
        now = int((time.time() - written.epoch) // written.period) + 1
        return self._news.due(written, now, at_start=True) or written

    def _held_by_others(self, hash: str) -> bool:
        """Whether more than b other members said lately that they hold this membership."""
        held = list(self.transport.client.differing.values()) if hasattr(self, "transport") else []
        return held.count(hash) > self.standing.membership.byzantine

    # --- start and end -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._quieten(opened)
            no_core_dumps()
            reserve_descriptors(len(self.standing.membership.members))
            self._store = opened.enter_context(Store(self.config.state_dir, self.signature))
            self.notary = EquivocationDetector(self.config.state_dir / "evidence", self._store.last_round)
            self._appoint()
            self._journal = Journal(
                self.config.log, self.config.state_dir / AUDIT_FILE, self.config.id, self.notary.sign_line
            )
            self._background = Background()
            opened.callback(self._background.close)
            self._open_pages(opened)
            self._open_transport(opened)
            self._opened = opened.pop_all()
        self._news.prepare = self._compile
        self._news.make_ready()
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
        self.pages = Pages(self.metrics, self.why_unready)
        self._background.call(self.pages.start(self.config.metrics_listen))
        opened.callback(lambda: self._background.call(self.pages.stop()))

    def _open_transport(self, opened: ExitStack) -> None:
        here = self.standing
        self.transport = HttpsTransport(
            here.membership, here.certificate, here.key, self.config.listen, self.signature, self,
            Limits(write=max(Limits().write, here.membership.deadline)),  # slow lines read one body after the other
            clock_timeout=min(_CLOCKS, here.membership.period), addresses=self.config.state_dir / ADDRESSES_FILE,
        )  # fmt: skip
        try:
            self._background.call(self.transport.start())
        except OSError as error:
            raise OSError(f"listen {self.config.listen} cannot be used ({error.strerror or error})") from None
        alarm, coming = self._background.wake, self.config.next_members
        self._pulls = Pulls(self.transport, self.notary, self.metrics, alarm, coming)
        opened.callback(lambda: self._background.call(self._pulls.stop()))

    def _appoint(self) -> None:
        here = self.standing
        self.notary.rotate(here.membership, here.me, read_key(here.key))
        self.metrics.identity(here.membership.hash, here.expiry)

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
                if isinstance(want, protocol.Step):
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

    def _begun(self, learner: Learner) -> Generator[Effect, Any, None]:
        """The protocol's wants, after everything it needs is compiled."""
        terms = self.standing.terms
        self._compile(self.standing.membership)
        scratch = self._table[1]
        scratch[:] = self._initial()
        learner.prepare(scratch, scratch=self._table[0])
        return protocol.rounds(terms, self.clock, self._coins, self._initial)

    def _initial(self) -> Models:
        return initial_model(self.config, self.standing.membership)[1]

    def _compile(self, m: Membership) -> None:
        """Make the kernels of a plan. A plan to come has its own made when it is announced, beside the rounds, and uses
        those for any number of models until they are there."""
        for chosen in (rule(m.rule, f=m.b_hat), protocol.catching_up(m.b_hat)):
            protocol.make_ready(chosen, m.pull, self.signature.d, self.signature.dtype)

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
        self.last_round = last
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

    def answer(self, want: Effect, learner: Learner) -> Any:
        """Do what the protocol wants, anything but a local step, and return what it is to be sent."""
        match want:
            case protocol.Recall():
                return self._recall(learner)
            case protocol.AskClocks():
                return self._ask_clocks()
            case protocol.Sleep(until):
                return self.sleep(until)
            case protocol.Enter(round):
                return self._enter(round)
            case protocol.Persist(record):
                return self._persist(record, learner)
            case protocol.Publish(round, served):
                return self._background.call(self._publish(round, served))
            case protocol.Pull():
                return self._pull(want)
            case protocol.Save(checkpoint):
                return self._save(checkpoint)
            case protocol.Tell(report):
                return self._tell(report, learner)
        raise AssertionError(want)

    def why_unready(self) -> str:
        """Why this peer does not train as it should; "" if it does. No round for three periods is a reason, too."""
        m, now = self.standing.membership, self.clock.position()
        late = (now - max(self._progress_at, 0.0)) / m.period
        if not self.unready and late > _LATE and self.clock.round() <= m.rounds:
            return f"no round has ended for {late:.1f} periods"
        return self.unready

    def _recall(self, learner: Learner) -> Memory:
        memory = self._store.memory()
        now = self.clock.round()
        if memory.last_round > max(now, 0) + 1:
            self._blocked = (
                f"the state folder holds a record of round {memory.last_round}, but it is round {now}: no round up to "
                f"that one can be played; remove half-{memory.last_round}.rec if this peer never made it"
            )
            log.error("%s", self._blocked)
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
        offsets = self._background.call(self._pulls.clocks(self.standing))
        if len(offsets) >= 2 * self.standing.membership.byzantine:  # the protocol has all it needs to begin
            if self.unready and not self._blocked:
                log.info("ready: %d members told their clocks", len(offsets))
            self.unready, self._progress_at = self._blocked, self.clock.position()
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
            self._appoint()
            self._background.call(self._rotate())
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
        names = self.standing.names_to(max(report.results, default=0))
        self.metrics.ended(report, names)
        self.metrics.convicted(len(self.notary.convicted))
        self._journal.write(report, names, self.standing.membership.hash, self._digest, self._pulls.came)
        self._blocked, self._progress_at = "", self.clock.position()
        self.unready = self._trouble(report)
        if self.metrics.unasked() == _UNASKED:
            log.warning("nobody has had this peer's model for %d rounds: can the others reach it?", _UNASKED)
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

    def _pull(self, want: protocol.Pull) -> Pulled:
        """All members at once, each into its row."""
        if len(self._table) != 1 + len(want.members):  # another plan came with another membership
            self._table = np.empty((1 + len(want.members), self.signature.d), self.signature.dtype)
        if want.half is not None and not np.may_share_memory(want.half, self._table[0]):
            self._table[0] = want.half
        left = want.deadline - self.clock.position()
        answers = self._background.call(self._pulls.all(want, self._table, left, self.standing))
        offsets = tuple(answer.offset for answer in answers if answer.offset is not None)
        return Pulled(self._table, tuple(answer.result for answer in answers), offsets)

    # --- in the network's thread -------------------------------------------------------------------------------------

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
            "ready": not self.why_unready(),
            "convicted": list(self.notary.convicted),
        }

    def served(self, member: int, code: int, sent: int) -> None:
        """A member's request was answered."""
        names = self.standing.names_to(member)  # a smaller membership may be in force here already, not yet there
        self.metrics.served(names[member], code, sent)
        if code == 200 and sent >= self.signature.size:
            self.metrics.asked(names[member])
