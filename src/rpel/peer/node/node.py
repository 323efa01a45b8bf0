"""Run a peer on a real machine: the driver of ``core/protocol.py``.

It answers the protocol's effects with TLS, a disk and a clock.

Invariants:
- the protocol runs in the caller's thread, one effect after the other; a thread of its own only moves bytes;
- models lie in one table (1 + s, d), row 0 the half-step, the others where answers arrive: no body is ever
  copied, and before answers come the other rows serve as scratch;
- whenever it ends, by Ctrl-C, by an error in the user's step or by a power cut, the disk is as after the last
  effect that was answered, and nothing of an unfinished round was seen outside.
"""

import json
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

from rpel.files import write_text
from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config, listen_address
from rpel.peer.core import protocol, wire
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.evidence import Witness, of_member, sign
from rpel.peer.core.protocol import (
    Checkpoint,
    Effect,
    LentRow,
    Linger,
    Record,
    Report,
    Sampler,
    Stored,
    Terms,
)
from rpel.peer.io.metrics import Pages
from rpel.peer.io.proofs import proofs
from rpel.peer.io.pulls import Pulls
from rpel.peer.io.service import PeerService
from rpel.peer.learn.learner import Learner
from rpel.peer.net.background import Background, Woken
from rpel.peer.net.client import Client
from rpel.peer.net.http import Reply
from rpel.peer.net.limits import reserve_descriptors
from rpel.peer.net.server import Server
from rpel.peer.net.snapshot import Snapshot, take
from rpel.peer.net.tls import no_core_dumps
from rpel.peer.node.page import headers, page
from rpel.peer.node.process import notify, restored_settings
from rpel.peer.state.journal import AUDIT_FILE, Journal, Repeats, history
from rpel.peer.state.memberships import IN_FORCE, MembershipWatcher, in_force
from rpel.peer.state.models import MODEL_FILE, export, initial_model, keep_best
from rpel.peer.state.store import Store, rounds_kept
from rpel.rules import rule
from rpel.text import duration
from rpel.types import Measured, Models, Outcome

log = logging.getLogger("rpel")

PRIVACY_FILE = "privacy.json"
_SLICE = 1.0  # seconds slept at once: a machine that was suspended notices within that
_UNASKED = 5  # rounds in which nobody had this peer's half-step, after which that is said
_CLOCKS = 3.0  # seconds that members have to tell their clocks

Progress = Callable[[Report, Measured, str], None]
"""Told after each round, with accuracy and loss where they were measured, and what is wrong."""


@dataclass(frozen=True)
class Round:
    """A round that begins.

    ``outcome`` and the numbers are those of the round before, or None and 0 if there is none.
    """

    number: int
    outcome: Outcome | None = None
    asked: int = 0
    received: int = 0
    trim: int = 0


def ticks() -> float:
    """Return the seconds since this machine booted, which nobody can set.

    Where the system provides it, the time during which the machine was suspended counts, too.

    >>> ticks() <= ticks()
    True
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def from_os(round: int, me: int, nodes: int, s: int) -> tuple[int, ...]:
    """Draw s different others from the operating system's randomness, so that the draw is unpredictable.

    >>> drawn = from_os(1, 0, 12, 8)
    >>> len(set(drawn)), 0 in drawn
    (8, False)
    """
    return tuple(secrets.SystemRandom().sample([i for i in range(nodes) if i != me], s))


def _next(effects: protocol.Effects, answer: Any) -> Effect[Any] | None:
    """The next effect; None: there is no other. A StopIteration of anything else must not look like that."""
    try:
        effect: Effect[Any] = effects.send(answer)
    except StopIteration:
        return None
    return effect


class Node:
    """One peer from its start to its end: a context manager, inside which :meth:`live` is the training."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler = from_os,
        progress: Progress | None = None,
        force: bool = False,
    ) -> None:
        """Read and check everything; nothing is opened yet.

        ``sampler``: replaces the operating system's randomness in tests. ``force``: accept a membership that
        comes too late, or an older one.
        """
        self.config, self._sampler, self.progress = config, sampler, progress
        self._client: Client | None = None
        self._watcher = MembershipWatcher(config, self._held_by_others, force)
        now = take(config, in_force(config, self._watcher))
        m = now.membership
        self.layout = initial_model(config, m)[0]
        self.clock = RoundClock(m.timetable, wall=time.time, ticks=ticks)
        self.service = PeerService(config, now, self.layout, self.clock)
        self.service.coming = lambda: self._watcher.announced(self.now.membership)
        self.metrics = self.service.metrics
        self.said = Measured()
        """What a user's own loop has measured in the present round."""
        self._digest = ""
        self._fatal: OSError | None = None
        self._table: Models = np.empty((1 + m.pull, self.layout.d), self.layout.dtype)
        self._x: Models | None = None
        self.last_round: int | None = None
        """The round after which the model in ``model_path`` is, once the rounds are over."""
        self.left: int | None = None
        """The first round that this peer is no member of, if it left as agreed."""

    @property
    def now(self) -> Snapshot:
        """The membership in force."""
        return self.service.now

    def _held_by_others(self, hash: str) -> bool:
        """Whether more than b other members said lately that they hold this membership."""
        return (
            self._client is not None
            and self._client.held_elsewhere(self.now)[hash] > self.now.membership.byzantine
        )

    # --- start and end --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        service, folder = self.service, self.config.state_dir
        with ExitStack() as opened:
            self._quieten(opened)
            opened.enter_context(restored_settings())
            no_core_dumps()
            reserve_descriptors(len(self.now.membership.members))
            service.store = opened.enter_context(Store(folder, self.layout, self.now.membership.run))
            service.witness = Witness(service.store.last_round)
            self._restore_proofs()
            self._show_identity()
            self._journal = Journal(folder / AUDIT_FILE, self.config.log, self.config.id)
            self._background = Background()
            opened.callback(self._background.close)
            self._open_pages(opened)
            self._open_network(opened)
            self._opened = opened.pop_all()
        self._background.start(notify())
        self._watcher.prepare = self._compile
        self._watcher.make_ready()
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
        self.metrics.history.extend(history(self.config.state_dir / AUDIT_FILE))
        self.pages = Pages(self.metrics, self.service.why_unready, self._front)
        self._background.call(self.pages.start(self.config.metrics_listen))
        opened.callback(lambda: self._background.call(self.pages.stop()))

    def _front(self) -> Reply:
        return Reply(200, page(self.service).encode(), headers(), closing=True)

    def _open_network(self, opened: ExitStack) -> None:
        """Listen, and get ready to ask."""
        self._client = Client(self.layout, self.clock.position)
        self.server = Server(self.service, call_back=self._client.probe)
        folder, coming = self.config.state_dir / "evidence", self.config.next_members
        self._pulls = Pulls(self._client, self.service.witness, folder, self.metrics, coming, self._end_with)
        try:
            self._background.call(self.server.start(*listen_address(self.config.listen)))
        except OSError as error:
            raise OSError(f"listen {self.config.listen} cannot be used ({error.strerror or error})") from None
        opened.callback(lambda: self._background.call(self._close_network()))

    async def _close_network(self) -> None:
        await self.server.stop()
        await self._pulls.stop()

    def _restore_proofs(self) -> None:
        """The proofs on disk that hold under the membership in force."""
        for proof in proofs(self.config.state_dir / "evidence", self.now.membership):
            self.service.witness.restore(proof)

    def _show_identity(self) -> None:
        now = self.now
        self.metrics.identity(
            now.membership.hash, now.own.expires, (now.names[number] for number in now.others)
        )

    def _introduce(self) -> None:
        """Say where this peer listens, among how many members, and which round it is."""
        m, now = self.now.membership, self.clock.round()
        begins = datetime.fromtimestamp(m.timetable.begins, UTC)
        when = (
            f"round 1 begins {begins:%Y-%m-%d %H:%M:%S} UTC"
            if now < 1
            else f"round {now} of {m.rounds} is running"
        )
        if now < 1:
            when += f", in {duration(-self.clock.position())}"
        elif now > m.rounds:
            when = f"round {m.rounds}, the last one, is over: the others may still serve it"
        if not self.ended_here:
            log.info(
                "%s listens at %s, one of %d members; %s", self.config.id, self.config.listen, m.nodes, when
            )
            for caution in m.cautions():
                log.warning("%s", caution)

    def stop(self) -> None:
        """End :meth:`live` from another thread, as soon as it waits for something."""
        self.service.unready = "stopping"
        self._background.wake()

    def _end_with(self, error: OSError) -> None:
        """End this peer at once; called in the network's thread."""
        self._fatal = error
        self._background.wake()

    def summary(self) -> dict[str, Any]:
        """Return who this peer is and how the rounds since the start went."""
        return self.service.summary()

    # --- the rounds -----------------------------------------------------------------------------------------

    def live(self, learner: Learner) -> Generator[Round, None, None]:
        """Drive the protocol to its end, yielding at each local step.

        The yield comes between the learner's ``load`` and ``half``. A caller that leaves at a yield leaves
        the round: nothing of it is on disk and nothing is seen outside. At the end the learner is loaded with
        the last round's model.
        """
        self._learner = learner
        if self.ended_here:
            self._finish()
            return
        effects = self._begin(learner)
        try:
            self._wait_to_join()
            effect = _next(effects, None)
            while effect is not None:
                if isinstance(effect, protocol.Step):
                    learner.load(effect.round, effect.x, effect.fresh)
                    yield self._beginning(effect.round)
                    learner.half(self._table[0], scratch=self._table[1])
                    answer: Any = self._table[0]
                else:
                    answer = self.answer(effect, learner)
                effect = _next(effects, answer)
            self._finish()
        except Woken:
            self.service.unready = "stopped"
            if self._fatal is not None:
                raise self._fatal from None
        finally:
            effects.close()

    def _wait_to_join(self) -> None:
        """Wait until a joining peer's first membership takes effect; no member answers it before."""
        m, first = self.now.membership, self.clock.start(self.now.membership.from_round)
        if m.from_round > 1 and (left := first - self.clock.position()) > 0:
            self.service.unready = f"waits for round {m.from_round}, with which it joins"
            log.info("%s joins with round %d, in %s", self.config.id, m.from_round, duration(left))
            self.sleep(first)

    def _begin(self, learner: Learner) -> protocol.Effects:
        """The protocol's effects, after everything it needs is compiled."""
        self._compile(self.now.membership)
        scratch = self._table[1]
        scratch[:] = self._initial()
        learner.prepare(scratch, scratch=self._table[0])
        return protocol.rounds(self.now.terms, self.clock, self._sampler, self._initial)

    def _initial(self) -> Models:
        return initial_model(self.config, self.now.membership)[1]

    def _compile(self, m: Membership) -> None:
        """Compile the kernels of a plan.

        Those of an announced plan are compiled in parallel with the rounds. Until they are ready it uses the
        kernels for any number of models.
        """
        for chosen in (rule(m.rule, f=m.b_hat), protocol.catching_up(m.b_hat)):
            protocol.make_ready(chosen, m.pull, self.layout.d, self.layout.dtype)

    def _finish(self) -> None:
        """Load the learner with the last model kept, and write it as model.safetensors."""
        if self.service.unready == "finished":
            return
        self.service.unready = "finished"
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
        m = self.now.membership
        return export(self.config.state_dir, self.layout, to, round, run=m.run, id=self.config.id)

    @property
    def model_path(self) -> Path:
        """The model after the last round."""
        return self.config.state_dir / MODEL_FILE

    @property
    def over(self) -> bool:
        """Return whether the last round has ended here, or all members have left by this machine's clock."""
        m, position = self._last_known, self.clock.position()
        return self.ended_here or position >= m.timetable.end(m.rounds) + m.linger * m.period

    @property
    def ended_here(self) -> bool:
        """Whether the last round is over and its checkpoint is on disk: then there is nothing left to do."""
        m = self._last_known
        past = m.timetable.round(self.clock.position()) > m.rounds
        return past and m.rounds in rounds_kept(self.config.state_dir, "checkpoint")

    @property
    def _last_known(self) -> Membership:
        """The membership that knows best when the last round is."""
        return self._watcher.announced(self.now.membership) or self.now.membership

    def _beginning(self, number: int) -> Round:
        last = self.metrics.last
        return (
            Round(number)
            if last is None
            else Round(number, last.outcome, last.asked, last.received, last.trim)
        )

    # --- effects --------------------------------------------------------------------------------------------

    def answer(self, effect: Effect[Any], learner: Learner) -> Any:
        """Do what the protocol asks for, except a local step, and return the result."""
        match effect:
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
            case protocol.Pull(_, members, half, deadline):
                table, seconds = self._rows(1 + len(members), half), deadline - self.clock.position()
                return self._background.call(self._pulls.round(effect, table, seconds, self.now))
            case protocol.Save(checkpoint):
                return self._save(checkpoint, learner)
            case protocol.Tell(report):
                return self._tell(report, learner)
            case Linger(until):
                self._finish()
                self.service.ended = True
                if (left := until - self.clock.position()) > 0:
                    log.info("the last round is served to late members for %s more", duration(left))
                return self.sleep(until)
        raise AssertionError(effect)

    def _recall(self, learner: Learner) -> Stored:
        store = self.service.store
        memory, now = store.memory(), self.clock.round()
        if memory.last_round > max(now, 0) + 1:
            self.service.blocked = (
                f"the state folder holds a record of round {memory.last_round}, but it is round {now}: no "
                f"round up to that one can be played; remove half-{memory.last_round}.json if this peer "
                "never made it"
            )
            log.error("%s", self.service.blocked)
        if memory.checkpoint is not None:
            self._x = memory.checkpoint.x
        record = memory.record
        if record is None:
            return memory
        if blob := store.state(record.round):
            learner.restore(blob)
        if record.half is not None:
            self._table[0] = record.half
            record = replace(record, half=LentRow(self._table[0]))
            self._digest = wire.digest(self.layout, self._table[0])
        return replace(memory, record=record)

    def _ask_clocks(self) -> list[float | None]:
        m, client = self.now.membership, self._client
        offsets = self._background.call(self._pulls.clocks(self.now, min(_CLOCKS, m.period)))
        if len(offsets) >= 2 * m.byzantine:  # the protocol has all it needs to begin
            if self.service.unready and not self.service.blocked:
                log.info("ready: %d members told their clocks", len(offsets))
            self.service.agreed()
        elsewhere = 0 if client is None else client.held_elsewhere(self.now).total()
        return [*offsets, *[None] * elsewhere]

    def sleep(self, until: float) -> None:
        """Wait until this peer's clock has that position."""
        while (left := until - self.clock.position()) > 0:
            self._background.sleep(min(left, _SLICE))

    def _enter(self, round: int) -> Terms | None:
        """The terms of this round; a membership that takes effect with it is put in force first."""
        position, patience = self.clock.position(), self.clock.period / 20
        coming = self._watcher.due(self.now.membership, round, position, patience)
        if coming is not None:
            if all(member.id != self.config.id for member in coming.members):
                log.info("%s leaves, as agreed: it is not a member from round %d on", self.config.id, round)
                self.left = round
                return None
            self._background.call(self._put_in_force(take(self.config, coming)))
            self.clock.timetable = coming.timetable
            self._show_identity()
            self._keep(coming)
            log.info("membership %s is in force", coming.hash[:12])
        return self.now.terms

    def _keep(self, membership: Membership) -> None:
        """Save the membership in the state folder for the next start.

        By then there may be a later one at the place where it was announced.
        """
        try:
            membership.save(self.config.state_dir / IN_FORCE)
        except OSError as error:
            log.warning(
                "the membership in force cannot be saved (%s): keep its file until the next", error.strerror
            )

    async def _put_in_force(self, snapshot: Snapshot) -> None:
        _ = snapshot.server_context  # read it before the membership counts
        reserve_descriptors(len(snapshot.membership.members))
        self.service.now = snapshot
        self._restore_proofs()
        self.server.membership_changed()

    def _persist(self, record: Record, learner: Learner) -> bool:
        if record.half is None:
            log.info("round %d: catching up: the others' models take the place of this peer's", record.round)
        elif record.stale:
            log.info(
                "round %d: all were down: this peer serves its newest model so that some can", record.round
            )
        body = () if record.half is None else self.layout.body(record.half)
        self._digest, signature = wire.digest_of(body) if body else "", b""
        if self._digest:
            signature = self._background.call(self._sign(record.round, bytes.fromhex(self._digest)))
        return self.service.store.persist(record, learner.state(), signature, body)

    async def _sign(self, round: int, digest: bytes) -> bytes:
        """The signature of the own half-step, made once, before it is recorded."""
        now = self.now
        self.service.witness.recorded(round, digest)
        return sign(now.secret, of_member(now.membership, now.me), round, digest)

    async def _publish(self, round: int, served: bool) -> None:
        self.service.publish(round, served)
        self.server.announce()

    def _rows(self, count: int, half: Models | None) -> Models:
        """The table of a round's models, with the half-step in row 0."""
        if len(self._table) < count:  # another plan came with another membership
            self._table = np.empty((count, self.layout.d), self.layout.dtype)
        if half is not None and not np.may_share_memory(half, self._table[0]):
            self._table[0] = half
        return self._table[:count]

    def _save(self, checkpoint: Checkpoint, learner: Learner) -> bool:
        self._x = checkpoint.x
        saved = self.service.store.save(checkpoint, learner.buffers())
        if saved:
            self.metrics.saved()
        return saved

    def _tell(self, report: Report, learner: Learner) -> None:
        """The log, the metrics, and while there is nothing else to do the accuracy."""
        now, client = self.now, self._client
        self.metrics.ended(report, now.names)
        self.metrics.excluded(len(self.service.excluded()))
        budget = self.service.budget
        spent = None if budget is None else budget.after(report.round)
        self._certify_privacy(report.round, spent)
        self.service.round_ended(report, exhausted=client is not None and client.exhausted)
        if self.metrics.unasked() == _UNASKED:
            log.warning(
                "no member has fetched this peer's model for %d rounds: rpel network status says "
                "who reaches it",
                _UNASKED,
            )
        assert self._x is not None, "saved just before"
        measured = learner.measure(self._x, report.round, last=report.round >= now.membership.rounds)
        if measured == Measured():
            measured, self.said = self.said, measured
        self._keep_best(report.round, measured, learner)
        self._journal.write(report, now, self._digest, self._pulls.digests, measured, spent)
        self.metrics.scored(measured)
        if self.progress is not None:
            self.progress(report, measured, self.service.unready)

    def _keep_best(self, round: int, measured: Measured, learner: Learner) -> None:
        """Keep the model that scored best so far on this peer's own data."""
        assert self._x is not None, "saved just before"
        folder, facts = self.config.state_dir, {"run": self.now.membership.run, "id": self.config.id}
        try:
            keep_best(folder, self.layout, self._x, learner.buffers(), round, measured, **facts)
        except OSError as error:
            log.warning("the best model cannot be kept (%s): rounds go on without it", error.strerror)

    def _certify_privacy(self, round: int, spent: float | None) -> None:
        """What this peer states of its steps so far, in the state folder."""
        budget = self.service.budget
        if budget is None:
            return
        so_far = {"round": round, "epsilon_so_far": spent, "target_epsilon": budget.target}
        try:
            write_text(
                self.config.state_dir / PRIVACY_FILE, json.dumps(so_far | budget.statement(), indent=2)
            )
        except OSError as error:
            log.warning("%s cannot be written (%s): rounds go on without it", PRIVACY_FILE, error.strerror)
