"""The membership to come: announced in a file, looked at before each round.

Invariants: a later membership takes effect at the round it names and not before; one that could not be meant
for this run, or would split this peer off from the others, is refused in one sentence,
and the present one stays.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.config.timetable import Timetable
from rpel.peer.core.evidence import FIXED
from rpel.peer.net.snapshot import take

log = logging.getLogger("rpel")


class MembershipWatcher:
    """The file in which a coming membership is announced, looked at before each round.

    It is read in a thread of its own: whatever it holds, it neither ends a peer nor holds up a round.
    """

    def __init__(
        self, config: Config, held: Callable[[str], bool] = lambda hash: False, force: bool = False
    ) -> None:
        """Watch for memberships to come.

        ``held(hash)``: whether more than b others say that they hold that membership. ``force``: accept any
        file.
        """
        self._config, self._held, self._force = config, held, force
        self._seen: tuple[int, int, int] | None = None
        self._coming: Membership | None = None
        self._reading: threading.Thread | None = None
        self._refused = ""
        self._found_in = 0  # the round in which the file was first seen
        self.prepare: Callable[[Membership], None] | None = None
        """Called, in a thread of its own, with a membership that is announced:
        what its plan needs is compiled then."""

    def announced(self, now: Membership) -> Membership | None:
        """The membership that the file holds, if it is another than the one in force."""
        coming = self._coming
        return None if coming is None or coming.hash == now.hash else coming

    def make_ready(self, coming: Membership | None = None) -> None:
        """Begin to prepare a coming membership, by default the announced one, in the background."""
        coming = coming or self._coming
        if self.prepare is not None and coming is not None:
            threading.Thread(target=self.prepare, args=(coming,), name="rpel-prepare", daemon=True).start()

    def due(
        self,
        now: Membership,
        round: int,
        position: float,
        patience: float | None = None,
        at_start: bool = False,
    ) -> Membership | None:
        """Return the announced membership, if it has taken effect by now and is not yet in force.

        One that should have taken effect before is taken at the start of a peer, and later if the others
        hold it. One that gives other times to earlier rounds, because this peer missed a membership in
        between, is taken if the others hold it.

        Args:
            now: the membership in force.
            round: the round that runs, by the membership in force.
            position: of this peer's clock.
            patience: seconds to wait for a file that takes long to read; it counts from the round in which
                it is read.
            at_start: whether this peer starts.
        """
        self._look(now, round)
        if self._reading is not None:
            self._reading.join(patience)
            if self._reading.is_alive():
                log.warning(
                    "%s takes long to read: the present membership stays for now", self._config.next_members
                )
                return None
        coming = self.announced(now)
        if coming is None:
            return None
        if moved := _moves_rounds(now, coming):
            paces = coming.timetable.before(coming.from_round) or coming.timetable.paces[:1]
            round = Timetable(paces).round(position)
        if coming.from_round > round:
            return None
        late = moved or (coming.from_round < self._found_in and not at_start)
        if late and not self._force and not self._held(coming.hash):
            if not at_start:
                self._refuse(coming, round)
            return None
        return coming

    def _refuse(self, coming: Membership, round: int) -> None:
        """Refuse a membership that should have taken effect before.

        A peer that adopts it now, alone, is refused by all the others.
        """
        if coming.hash != self._refused:
            self._refused = coming.hash
            log.warning(
                "%s takes effect at round %d, which has begun, and the others do not hold it (it is round "
                "%d): with it this peer would be split off from them. Name a later from_round in the file "
                "that all get, or start with --force",
                self._config.next_members,
                coming.from_round,
                round,
            )

    def _look(self, now: Membership, round: int) -> None:
        """Begin to read the file again if it has changed."""
        if self._reading is not None and self._reading.is_alive():
            return
        try:
            status = self._config.next_members.stat()
        except OSError:
            self._seen = self._coming = None
            return
        mark = (status.st_mtime_ns, status.st_size, status.st_ino)
        if mark != self._seen:
            self._seen, self._coming, self._found_in = mark, None, round
            self._reading = threading.Thread(target=self._read, args=(now,), name="rpel-members", daemon=True)
            self._reading.start()

    def _read(self, now: Membership) -> None:
        """Read the file; what is wrong with it is said once."""
        try:
            coming = _successor(now, Membership.load(self._config.next_members), self._force)
            self._coming = coming
            if coming.hash != now.hash:
                self._announce(now, coming)
                self.make_ready()
        except Exception as error:  # whatever is in the file, it must not end this peer
            log.warning(
                "the coming membership is refused and the present one stays: %s", error or repr(error)
            )

    def _announce(self, now: Membership, coming: Membership) -> None:
        """Say what will happen, while there is time to do something about it."""
        log.info("membership %s takes effect at round %d", coming.hash[:12], coming.from_round)
        for caution in coming.cautions():
            log.warning("in the coming membership %s", caution)
        if _moves_rounds(now, coming):
            log.warning(
                "%s gives other times to rounds before round %d than the membership in force: this peer "
                "missed a membership in between, or the file is wrong; it is taken when the others hold it",
                self._config.next_members,
                coming.from_round,
            )
        try:
            take(self._config, coming)
        except ValueError as error:
            log.warning("this peer will have to stop at round %d: %s", coming.from_round, error)


def _successor(now: Membership, coming: Membership, force: bool = False) -> Membership:
    """The coming membership, if it can follow the present one."""
    if coming.from_round < now.from_round and not force:
        raise ValueError(
            f"its from_round is {coming.from_round}, and {now.from_round} is in force: it is an older file, "
            "with which this peer would be split off from the others; --force takes it all the same"
        )
    for key in (*FIXED, "wire"):
        if getattr(coming, key) != getattr(now, key):
            raise ValueError(
                f"its {key} is {getattr(coming, key)}, and a running network keeps {getattr(now, key)}"
            )
    if coming.timetable.begins != now.timetable.begins:
        raise ValueError(
            f"its round 1 begins at {coming.timetable.begins:.15g}, and a running network keeps "
            f"{now.timetable.begins:.15g}"
        )
    return coming


def _moves_rounds(now: Membership, coming: Membership) -> bool:
    """Whether the coming membership gives other times to rounds before it takes effect."""
    first = coming.from_round
    return coming.timetable.before(first) != now.timetable.before(first)


IN_FORCE = "members.toml"
"""The membership in force lies in the state folder under this name,
so that the announced file may be replaced."""


def in_force(config: Config, watcher: MembershipWatcher) -> Membership:
    """Return the newest of the memberships that count now.

    They are the one in members.toml, the one last put in force, and the one announced. A peer that is in
    neither of the first two but is announced as a member is joining: its first membership is still to come.
    """
    coming = config.next_members
    written = Membership.load(config.members if config.members.exists() or not coming.exists() else coming)
    stored = config.state_dir / IN_FORCE
    if stored.exists():
        with suppress(ValueError):  # it is of another network, older than members.toml, or damaged
            written = _successor(written, Membership.load(stored))
    position = time.time() - written.timetable.begins
    due = watcher.due(written, written.timetable.round(position), position, at_start=True)
    announced = watcher.announced(written)
    if (
        due is None
        and announced is not None
        and not _names(written, config.id)
        and _names(announced, config.id)
    ):
        return announced
    return due or written


def _names(m: Membership, id: str) -> bool:
    return any(member.id == id for member in m.members)
