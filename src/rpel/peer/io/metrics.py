"""Show an operator the state of a peer: Prometheus metrics, two health pages, and the peer's page.

Weights are never shown.

Invariants:
- everything shown is a number, a name or a digest; no entry of any model leaves through here;
- metrics live in a registry of their own, so that several peers in one process do not mix;
- a log that cannot be written is said once and harms no round.
"""

import asyncio
import logging
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prometheus_client as prometheus

from rpel.peer.config.settings import listen_address
from rpel.peer.core.protocol import Report
from rpel.peer.net.http import Line, Reply, Request
from rpel.peer.state.journal import Point
from rpel.types import Measured, Outcome, PullResult
from rpel.version import __version__

log = logging.getLogger("rpel")

_LITERAL = re.compile(r"[0-9.]+|\[[0-9a-fA-F:.]+\]")
_HISTORY = 5000  # rounds that the page can draw
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class Contact:
    """What this peer has had to do with one member since the start."""

    counts: Counter[PullResult] = field(default_factory=Counter)
    result: PullResult | None = None
    answered: int = 0
    """The last round of which it gave its model; 0: none."""
    offset: float | None = None
    """How far its clock was ahead when it last answered."""
    version: str = ""
    """Of rpel, by its own word, when it last answered; "": it does not say."""
    asked_us: int = 0


class Metrics:
    """The numbers of one peer, under the names that dashboards rely on.

    They include the summary that `rpel network status` asks for.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.outcomes: Counter[Outcome] = Counter()
        self.pulls: Counter[PullResult] = Counter()
        self.last: Report | None = None
        self.measured = Measured()
        self.history: deque[Point] = deque(maxlen=_HISTORY)
        self.members: defaultdict[str, Contact] = defaultdict(Contact)
        self._saved: float | None = None
        self._asked_now, self.unasked_rounds = False, 0
        self._gauges()
        self._counters()
        age = self._gauge("rpel_checkpoint_age_seconds", "Seconds since the last checkpoint (NaN: none yet)")
        age.set_function(lambda: float("nan") if self._saved is None else clock() - self._saved)
        self._clock = clock

    def _gauge(self, name: str, about: str) -> prometheus.Gauge:
        return prometheus.Gauge(name, about, registry=self.registry)

    def _gauges(self) -> None:
        self._round = self._gauge("rpel_round", "The last round that ended")
        self._received = self._gauge("rpel_received_models", "Models received in the last round")
        self._trim = self._gauge("rpel_trim_count", "Hostile models the last aggregation could survive")
        self._offset = self._gauge(
            "rpel_clock_offset_seconds",
            "How far the members' clocks are ahead of this peer's, by their median",
        )
        self._expiry = self._gauge(
            "rpel_cert_expiry_timestamp_seconds", "When the own certificate ends, unix seconds"
        )
        self._excluded = self._gauge(
            "rpel_excluded_members", "Members whose key signed two half-steps of one round"
        )
        self._accuracy = self._gauge("rpel_accuracy", "Accuracy on this peer's test data (NaN: not measured)")
        self._loss = self._gauge("rpel_loss", "Loss on this peer's test data (NaN: not measured)")
        self._age = self._gauge(
            "rpel_model_age_rounds", "Rounds since others' models were taken in (NaN: none yet)"
        )
        for unknown in (self._accuracy, self._loss, self._age):
            unknown.set(float("nan"))
        self._unasked = self._gauge(
            "rpel_unasked_rounds", "Rounds in a row in which nobody had this peer's half-step"
        )
        self._build = prometheus.Info(
            "rpel_build", "Version, and hash of the membership", registry=self.registry
        )

    def _counters(self) -> None:
        own = self.registry
        self._rounds = prometheus.Counter("rpel_rounds_total", "Rounds that ended", ["outcome"], registry=own)
        self._pull = prometheus.Counter(
            "rpel_pull_total", "Models asked for", ["peer", "result"], registry=own
        )
        self._asked = prometheus.Counter("rpel_asked_total", "Half-steps sent whole", ["peer"], registry=own)
        self._serve = prometheus.Counter(
            "rpel_serve_total", "Requests answered", ["peer", "code"], registry=own
        )
        self._bytes = prometheus.Counter(
            "rpel_bytes_total", "Bytes of models sent and received", ["direction"], registry=own
        )
        self._seconds = prometheus.Histogram(
            "rpel_round_duration_seconds", "A round's work", buckets=_SECONDS, registry=own
        )
        self._pulling = prometheus.Histogram(
            "rpel_pull_duration_seconds", "One pull", buckets=_SECONDS, registry=own
        )
        # shown as 0 from the start: a rate over a missing series cannot be alarmed on
        for outcome in Outcome:
            self._rounds.labels(outcome)
        for direction in ("sent", "received"):
            self._bytes.labels(direction)

    def identity(self, membership: str, expiry: float, others: Iterable[str] = ()) -> None:
        """The membership in force, by its hash and the other members' ids, and when the own certificate ends.

        Each member's counts are shown as 0 at once: an increase over a series that begins with 1 is 0, so
        that the first malformed answer would raise no alarm,
        and a member that never answered would have no line.
        """
        self._build.info({"version": __version__, "membership": membership})
        self._expiry.set(expiry)
        for peer in others:
            self._asked.labels(peer)
            for result in PullResult:
                self._pull.labels(peer, result)

    def ended(self, report: Report, names: Sequence[str]) -> None:
        """A round ended; ``names`` are the members' ids by number."""
        self.last = report
        self.outcomes[report.outcome] += 1
        self.pulls.update(report.results.values())
        self._round.set(report.round)
        self._rounds.labels(report.outcome).inc()
        self._seconds.observe(report.seconds)
        self._received.set(report.received)
        self._trim.set(report.trim)
        self._offset.set(report.offset)
        self._age.set(report.degraded)
        for peer, result in report.results.items():
            self._pull.labels(names[peer], result).inc()
            contact = self.members[names[peer]]
            contact.result = result
            contact.counts[result] += 1
            if result == PullResult.OK:
                contact.answered = report.round

    def heard(self, name: str, offset: float | None, version: str) -> None:
        """Note what came with a member's model: how far its clock is ahead, and its version of rpel."""
        contact = self.members[name]
        contact.offset = contact.offset if offset is None else offset
        contact.version = version or contact.version

    def scored(self, measured: Measured) -> None:
        """The last round's model was measured, or not; the round is part of the history now."""
        assert self.last is not None, "a round has ended"
        if measured.accuracy is not None:
            self._accuracy.set(measured.accuracy)
        if measured.loss is not None:
            self._loss.set(measured.loss)
        known = self.measured
        self.measured = Measured(
            known.accuracy if measured.accuracy is None else measured.accuracy,
            known.loss if measured.loss is None else measured.loss,
        )
        last = self.last
        self.history.append(
            Point(last.round, last.outcome, last.asked, last.received, measured.accuracy, measured.loss)
        )

    def pulled(self, seconds: float, received: int) -> None:
        """Record the duration and the bytes of one pull."""
        self._pulling.observe(seconds)
        self._bytes.labels("received").inc(received)

    def served(self, peer: str, code: int, sent: int) -> None:
        """Record the status and the model bytes of one answer to a member."""
        self._serve.labels(peer, str(code)).inc()
        self._bytes.labels("sent").inc(sent)

    def asked(self, peer: str) -> None:
        """A member was sent a whole half-step."""
        self._asked.labels(peer).inc()
        self.members[peer].asked_us += 1
        self._asked_now = True

    def unasked(self) -> int:
        """End a round; return for how many rounds in a row no member has asked for this peer's half-step."""
        self.unasked_rounds = 0 if self._asked_now else self.unasked_rounds + 1
        self._asked_now = False
        self._unasked.set(self.unasked_rounds)
        return self.unasked_rounds

    def excluded(self, members: int) -> None:
        """Record the number of members whose keys signed two half-steps of one round."""
        self._excluded.set(members)

    def saved(self) -> None:
        """A checkpoint is on disk."""
        self._saved = self._clock()

    def summary(self) -> dict[str, Any]:
        """Return the counts since the start, the last round and the accuracy if it is known.

        The counts are those of the outcomes of rounds and of the results of pulls.
        """
        last = self.last
        return {
            "round": last.round if last else 0,
            "outcomes": {name.value: self.outcomes[name] for name in Outcome},
            "pulls": {name.value: self.pulls[name] for name in PullResult},
            "degraded": last.degraded if last else 0,
            "frozen": last.frozen if last else False,
            "accuracy": self.measured.accuracy,
            "loss": self.measured.loss,
        }

    def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return prometheus.generate_latest(self.registry)


class Pages:
    """/, /metrics, /healthz and /readyz over plain HTTP, meant for the operator's own machine.

    One request a connection, ``most`` connections at a time, ``seconds`` for a request: whoever connects and
    says nothing gives way to the next, so that it costs the peer no descriptors and the operator no page.
    """

    def __init__(
        self,
        metrics: Metrics,
        unready: Callable[[], str],
        front: Callable[[], Reply] | None = None,
        most: int = 16,
        seconds: float = 5.0,
    ) -> None:
        """Take the metrics and what else the pages show.

        ``unready()`` returns in a few words why the peer is not ready, or "" when it is. ``front()`` returns
        the page at /.
        """
        self._front = front
        self._of, self._unready, self._most, self._seconds = metrics, unready, most, seconds
        self._open: list[Line] = []
        self._server: asyncio.Server | None = None
        self.address = ("", 0)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    async def start(self, listen: str) -> None:
        """Begin to serve at host:port or unix:path; ``address`` is then where (port 0: any free one)."""
        loop = asyncio.get_running_loop()
        try:
            if listen.startswith("unix:"):
                path = Path(listen.removeprefix("unix:"))
                if path.is_socket():
                    # of a peer that was killed: the state folder's lock keeps a living one away
                    path.unlink()
                self._server = await loop.create_unix_server(self._line, path, backlog=self._most)
                path.chmod(0o600)
            else:
                self._server = await loop.create_server(
                    self._line, *listen_address(listen), backlog=self._most
                )
                self.address = self._server.sockets[0].getsockname()[:2]
        except OSError as error:
            raise OSError(f"metrics_listen {listen} cannot be used ({error.strerror or error})") from None

    async def stop(self) -> None:
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            # what was accepted becomes a line in the next turn; a closed server would lose it
            await asyncio.sleep(0)
            self._server.close()
        ends = [line.ended for line in self._open]
        for line in list(self._open):
            line.drop()
        await asyncio.gather(*ends)

    def _line(self) -> Line:
        staying = [line for line in self._open if not line.dropped]  # many may come in one turn of the loop
        mute = [line for line in staying if not line.busy]
        if len(staying) >= self._most and mute:
            mute[0].drop()
        line = Line(self._answer, self._seconds)
        self._open.append(line)
        line.ended.add_done_callback(lambda _: self._open.remove(line))
        return line

    def _meant(self, request: Request) -> bool:
        """Return whether the request was meant for a page of this machine.

        A website whose name resolves to this machine must not read its pages.
        """
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        return (
            not self.address[0].startswith(("127.", "::1"))
            or host == "localhost"
            or _LITERAL.fullmatch(host) is not None
        )

    async def _answer(self, line: Line, request: Request) -> Reply:
        if request.method != "GET":
            return Reply(405, closing=True)
        if not self._meant(request):
            return _text(403, "ask for it by its address")
        if request.path == "/metrics":
            return Reply(200, self._of.text(), {"Content-Type": prometheus.CONTENT_TYPE_LATEST}, closing=True)
        if request.path == "/healthz":
            return _text(200, "ok")
        if request.path == "/readyz":
            why = self._unready()
            return _text(503 if why else 200, why or "ready")
        if request.path == "/" and self._front is not None:
            return self._front()
        return _text(404, "there are /, /metrics, /healthz and /readyz")


def _text(status: int, text: str) -> Reply:
    return Reply(status, f"{text}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"}, closing=True)
