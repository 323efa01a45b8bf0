"""What a peer shows: its half-steps and what it knows to members, its state to its operator.

Invariants: the membership in force stands here and nowhere else, in :attr:`PeerService.now`; all but that and
:meth:`PeerService.trouble` is called in the network's thread, and is quick.
"""

import time
from collections.abc import Callable
from typing import Any

from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.core.clock import RoundClock
from rpel.peer.core.evidence import Witness
from rpel.peer.core.protocol import Report
from rpel.peer.core.serve_policy import ServePolicy
from rpel.peer.core.wire import Layout
from rpel.peer.io.metrics import Metrics
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.state.models import initial_body
from rpel.peer.state.store import Body, Store
from rpel.privacy import Budget
from rpel.version import __version__

_LATE = 3.0  # periods without the end of a round after which a peer is not ready


class PeerService:
    """One peer, as its server, its pages and its operator see it."""

    def __init__(self, config: Config, now: Snapshot, layout: Layout, clock: RoundClock) -> None:
        self.config, self.now, self._layout, self.clock = config, now, layout, clock
        self.policy, self.metrics = ServePolicy(), Metrics()
        self.store: Store
        self.witness: Witness
        self.unready = "starting"
        """Why this peer does not train as it should; "" if it does."""
        self.blocked = ""
        """Why no round can be played."""
        self.budget: Budget | None = None
        """Of private local steps, where this peer takes such."""
        self.ended = False
        """Whether this peer has played its last round."""
        self.coming: Callable[[], Membership | None] = lambda: None
        """The membership that is announced and not yet in force."""
        self._progress = 0.0  # where the clock was when this peer was ready or last ended a round

    # --- to members -----------------------------------------------------------------------------------------

    def publish(self, round: int, served: bool) -> None:
        """Serve this round's half-step from now on; ``served`` False: never serve it."""
        if served:
            self.policy.publish(round)
        else:
            self.policy.skip(round)

    def open_body(self, round: int) -> Body | None:
        """The half-step of a published round; round 0: the common initial model."""
        return self.store.open_body(round) if round else initial_body(self.config, self._layout)

    def signature_of(self, round: int) -> bytes | None:
        """The signature of a published half-step."""
        return self.store.signature(round)

    def seen(self, now: Snapshot, round: int) -> dict[str, object] | None:
        """What this peer saw signed in a round."""
        return self.witness.seen(now.roster, round)

    def position(self) -> float:
        """This peer's round clock."""
        return self.clock.position()

    def status(self) -> dict[str, object]:
        """What `rpel network status` shows of this peer."""
        return self.summary() | {
            "version": __version__,
            "position": self.position(),
            "ready": not self.why_unready(),
            "excluded": list(self.excluded()),
            "coming": "" if (coming := self.coming()) is None else coming.hash,
        }

    def excluded(self) -> tuple[str, ...]:
        """The ids of members whose key signed two half-steps of one round."""
        pins = self.witness.excluded(self.now.roster)
        return tuple(member.id for member in self.now.membership.members if member.fingerprint in pins)

    def served(self, now: Snapshot, member: int, code: int, sent: int) -> None:
        """A member's request was answered."""
        self.metrics.served(now.names[member], code, sent)
        if code == 200 and sent >= self._layout.size:
            self.metrics.asked(now.names[member])

    # --- to its operator ------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return who this peer is and how the rounds since the start went."""
        m = self.now.membership
        privacy = {} if self.budget is None else {"privacy": self.budget.statement()}
        return (
            {"id": self.config.id, "membership": m.hash, "rounds": m.rounds}
            | self.metrics.summary()
            | privacy
        )

    def why_unready(self) -> str:
        """Return why this peer does not train as it should, or "" if it does.

        One reason is that no round has ended for three periods.
        """
        m = self.now.membership
        since = max(self._progress, 0.0)
        late = (self.position() - since) / m.period
        late = min(late, self.clock.round() - self.clock.round(since) + 1.0)  # pauses do not count
        if not self.unready and late > _LATE and self.clock.round() <= m.rounds:
            return f"no round has ended for {late:.1f} periods"
        return self.unready

    def agreed(self) -> None:
        """Enough members have told their clocks: the rounds can begin."""
        self.unready, self._progress = self.blocked, self.position()

    def round_ended(self, report: Report, exhausted: bool) -> None:
        """A round ended; ``exhausted``: there were no file descriptors for all its connections."""
        self.blocked, self._progress = "", self.position()
        self.unready = "frozen: too few members answer" if report.frozen else ""
        if exhausted:
            self.unready = "no file descriptors are left: raise the limit of open files"
        if self.now.own.expires < time.time():
            self.unready = (
                "this peer's certificate has ended: rpel network change --replace brings in a new one"
            )
        if self.store.trouble:
            self.unready = f"the state folder cannot be written: {self.store.trouble}"
