"""Rounds without a barrier: nodes publish when their local phase ends and read whatever is there,
window by window.

A window (:mod:`rpel.simulation.schedule`) is: first all local phases that end in it, as one cohort, then all
its reads. The table holds every node's newest version; those that were replaced within the window stand
behind them until its end, so that each read finds what was newest at its own moment. Two versions a node are
enough; no event is handled alone.

Invariants: a phase draws its batches, peers and noise by coordinates of its own (`of_round`), the round's for
the first that a node publishes in a round; so with equal speeds the run is the synchronous one,
byte for byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.algorithm import Info, Outer, State
from rpel.learning import Aggregation
from rpel.simulation.communicator import Communicator, Shards
from rpel.simulation.delivery import SimulatedNetwork, victim_by_victim
from rpel.simulation.schedule import Acting, Schedule
from rpel.types import Aggregated, Arrays, Integers, Models, Received


@dataclass(frozen=True)
class Versions:
    """Which version of a peer an answer brings: replaced (k,)
    are the rows whose older one stands behind the others.

    published: when the newest version of each row was published, in ticks.
    """

    rows: int
    replaced: Integers
    published: Integers
    moment: Integers  # (c,) when those who ask read

    def choose(self, rows: Integers) -> Integers:
        """(c, s) the rows of the versions that are read."""
        asked, moment = np.maximum(rows, 0), self.moment[:, None]
        place = np.full(self.rows, -1, np.int64)
        place[self.replaced] = self.rows + np.arange(len(self.replaced))
        later = (self.published[asked] > moment) & (place[asked] >= 0)
        return np.where(later & (rows >= 0), place[asked], rows)


@dataclass
class AsynchronousRounds:
    """A round of Algorithm 1 as the windows of a unit of virtual time."""

    schedule: Schedule
    local: Any
    network: SimulatedNetwork
    rule: Aggregation
    outer: Outer | None
    workers: Communicator
    shards: Shards
    mine: slice

    def __post_init__(self) -> None:
        self.h = len(self.schedule.w)
        self.table = self.network.table
        self.finite = np.ones(self.h, bool)
        self.scratch: dict[str, Models] = {}
        self.backend = self.network.backend
        needs = "before" in self.network.attack.needs
        self.known = self.backend.empty(self.h, self.table) if needs else None

    @property
    def _alone(self) -> bool:
        """Whether what a node is sent depends on nobody else who reads at about the same time."""
        attack = self.network.attack
        forging = not (self.network.silent or attack.trains)
        return not forging or (
            victim_by_victim(attack, self.network.consistent) and "before" not in attack.needs
        )

    def init(self, x: Models) -> Arrays:
        """The versions that everybody has before anything is published: the common initial model."""
        self.table[: self.h] = x[:1]
        if self.known is not None:
            self.known[:] = x[:1]
        return self._kept({})

    def _kept(self, attack: Arrays) -> Arrays:
        known = {} if self.known is None else {"versions.known": self.known}
        return attack | {"versions.half": self.table[: self.h]} | known

    def step(self, state: State) -> tuple[State, Info]:
        """One unit of virtual time."""
        t, attack = state.round + 1, {k: v for k, v in state.network.items() if not k.startswith("versions.")}
        for key, held in (("versions.half", self.table[: self.h]), ("versions.known", self.known)):
            if held is not None and not self.backend.shares(held, state.network[key]):
                held[:] = self.backend.array(state.network[key])
                self.finite = self._finite(self.table[: self.h])
        self.published = self.schedule.published_by(t - 1)
        count = self.mine.stop - self.mine.start
        met = np.full((count, self.schedule.most), -1, np.int64)
        turn, degraded = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for published, reading in self.schedule.windows(t, long=self._alone):
            self._publish(published, state, keep=len(reading.rows) > 0)
            results, attack = self._read(reading, published.rows, state, attack)
            for some, hostile, failed in results:
                met[some, turn[some]] = hostile
                turn[some] += 1
                degraded[some] += failed
        after = State(t, state.x, state.local, self._kept(attack), state.outer)
        nobody: Integers = np.empty((count, 0), np.int64)
        half = self.table[: self.h][self.mine]
        return after, Info(
            t, half, Received(half, nobody, met=met), Aggregated(degraded, np.zeros_like(degraded))
        )

    # --- local phases ---

    def _publish(self, acting: Acting, state: State, keep: bool) -> None:
        """Lines 3-6 of those whose phase ends in the window; keep: somebody reads in it, so that what they
        replace is put behind the newest versions."""
        rows, h = acting.rows, self.h
        if not len(rows):
            return
        if keep:
            self.backend.take(self.table[:h], rows, out=self.table[h : h + len(rows)])
            self.replaced = self.finite[rows]
        mine = (rows >= self.mine.start) & (rows < self.mine.stop)
        own, labels = rows[mine], acting.labels[mine]
        if self.workers.size == 1:
            for label, at in self._alike(labels, own, state.local):
                self.finite[own[at]] = self._finite(self._phase(own[at], int(label), state, self.table))
        else:
            made = self.backend.empty(len(own), self.table)
            for label, at in self._alike(labels, own - self.mine.start, state.local):
                self._phase(own[at], int(label), state, made, at)
            edges = [int(np.searchsorted(rows, shard.start)) for shard in self.shards] + [len(rows)]
            parts = [slice(a, max(a, b)) for a, b in pairwise(edges)]
            everyone = self.workers.rows(made, parts)
            self.backend.put(self.table, rows, everyone)
            self.finite[rows] = self._finite(everyone)
        self.published[rows] = acting.published

    def _finite(self, table: Models) -> NDArray[np.bool_]:
        """(n,) which rows hold nothing but finite numbers: looked at when they are published,
        not at each read."""
        return np.asarray(self.backend.finite_rows(table))

    def _some(self, name: str, array: Models, rows: Integers, fill: bool = True) -> Models:
        """Some rows of an array, in memory that is used again:
        new memory would be cleared page by page each time."""
        room = self.scratch.get(name)
        if room is None or len(room) < len(rows):
            room = self.scratch[name] = self.backend.take(array, rows)
            return room
        return self.backend.take(array, rows, out=room[: len(rows)]) if fill else room[: len(rows)]

    def _alike(self, labels: Integers, at: Integers, local: Arrays) -> Iterator[tuple[int, Integers]]:
        """Nodes that step together: of one coordinate,
        and with equally many steps behind them where that counts."""
        taken = local["steps"][at, 0] if "steps" in local else np.zeros(len(at), np.int64)
        for label, steps in np.unique(np.stack([labels, taken]), axis=1).T:
            yield int(label), np.flatnonzero((labels == label) & (taken == steps))

    def _phase(
        self, rows: Integers, label: int, state: State, out: Models, at: Integers | None = None
    ) -> Models:
        """One cohort's local steps, also put into out[at] (out[rows] if left out)."""
        some = rows - self.mine.start
        if self.known is not None:
            self.backend.put(self.known, rows, self.backend.take(state.x, some))
        if len(some) == len(state.x) and at is None:  # everybody at once: nothing is copied
            half: Models = self.local(state.x, state.local, rows, label, out=out[: self.h])[0]
            return half
        x, part = (
            self._some("x", state.x, some),
            {k: self._some(f"local.{k}", a, some) for k, a in state.local.items()},
        )
        half = self._some("half", state.x, some, fill=False)
        self.local(x, part, rows, label, out=half)
        self.backend.put(out, rows if at is None else at, half)
        for key, array in part.items():
            self.backend.put(state.local[key], some, array)
        return half

    # --- reads ---

    def _read(
        self, acting: Acting, replaced: Integers, state: State, attack: Arrays
    ) -> tuple[list[tuple[Integers, Integers, NDArray[np.bool_]]], Arrays]:
        """Lines 7-9 of those who read in the window: (which of this worker's nodes, hostile answers met, who
        could not aggregate) for each coordinate, and what the attack remembers.
        Nobody reads a model that is made here."""
        found = []
        known = None if self.known is None else self.workers_known()
        for label in np.unique(acting.labels):
            group = acting.labels == label
            rows, moment = acting.rows[group], acting.published[group] + self.schedule.wait
            mine = (rows >= self.mine.start) & (rows < self.mine.stop)
            received, attack = self._answers(rows, moment, mine, int(label), replaced, attack, known)
            if not mine.any():
                continue
            own, some = rows[mine], rows[mine] - self.mine.start
            looked = np.append(self.finite, self.replaced) if len(replaced) else self.finite
            half, room = self._some("half", self.table, own), self._some("z", self.table, own, fill=False)
            z, done = self.rule(half, replace(received, finite=looked), own, int(label), out=room)
            if self.outer is not None:
                part = {key: self.backend.take(array, some) for key, array in state.outer.items()}
                z, part = self.outer(self._some("x", state.x, some), z, part, done)
                for key, array in part.items():
                    self.backend.put(state.outer[key], some, array)
            self.backend.put(state.x, some, z)
            found.append((some, np.asarray(received.met), done.degraded))
        return found, attack

    def workers_known(self) -> Models | None:
        """The models before the local phases of everybody, for attacks that look at them."""
        if self.known is None or self.workers.size == 1:
            return self.known
        known: Models = self.workers.rows(self.known[self.mine], self.shards)
        return known

    def _answers(
        self, rows: Integers, moment: Integers, mine: NDArray[np.bool_], label: int, replaced: Integers,
        attack: Arrays, known: Models | None,
    ) -> tuple[Received, Arrays]:  # fmt: skip
        """What these nodes get, each at its own moment."""
        plain = self.network
        forging = not (plain.silent or plain.attack.trains)
        alone = not forging or victim_by_victim(plain.attack, plain.consistent)
        own, at = (rows[mine], moment[mine]) if alone else (rows, moment)
        if not len(own):
            return Received(self.table[:0], np.empty((0, 1), np.int64), met=np.empty(0, np.int64)), attack
        versions = Versions(self.h, replaced, self.published, at)
        network = replace(plain, models=self.h + len(replaced), newest=versions.choose)
        first = int(np.flatnonzero(mine)[0]) if mine.any() else 0
        wanted = slice(None) if alone else slice(first, first + int(mine.sum()))
        return network.answers(label, own, attack, known, forging, wanted)
