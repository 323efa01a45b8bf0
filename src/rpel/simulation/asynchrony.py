"""Rounds without a barrier: nodes publish when their local phase ends and read the newest models.

When nodes publish, read and aggregate depends on their speeds alone. Node i's k-th local phase lasts
max(L, w_i · e_ik): w_i its slowness, e_ik its jitter. When it ends, at τ, the half-step is published;
requests reach the peers at τ + L, answers come back at τ + 2L, and the next phase begins. With all speeds
equal a cycle lasts C = 1 + 2L; round r of a run is the time in which everything aggregated by r·C is read:
up to r·C − L.

A window is: first all local phases that end in it, as one cohort, then all its reads. The table holds every
node's newest version; those that were replaced within the window stand behind them until its end, so that
each read finds what was newest at its own moment. Two versions a node are enough; no event is handled alone.

Invariants:
- no draw of a peer enters the times, so the number of aggregations is known before the first;
- times are integers, a billion ticks to the unit, so that equal speeds give equal times, exactly;
- what is published in a window comes from models that were aggregated before it, and no node publishes twice
  in it: a phase of length p that ends in it was begun with answers that were read p + L before its end. So a
  window may last as long as the shortest phase and L together; the shortest possible phase is L;
- a phase draws its batches, peers and noise by coordinates of its own (`of_round`), the round's for the first
  that a node publishes in a round; so with equal speeds the run is the synchronous one, byte for byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpel.algorithm import Info, Outer, State
from rpel.backend.arrays import empty, put, take
from rpel.component import parse_chain
from rpel.errors import unknown
from rpel.learning import Aggregation
from rpel.randomness import Purpose, draws
from rpel.simulation.communicator import Group, Shards
from rpel.simulation.network import SimulatedNetwork, victim_by_victim
from rpel.types import Aggregated, Arrays, Floats, Integers, Models, Received

TICKS = 1_000_000_000


def of_round(label: int) -> int:
    """Return the round r of a phase's coordinate.

    The coordinate of the k-th phase (from 0) that a node publishes in round r is r + (k << 32).

    >>> of_round(7), of_round(7 + (2 << 32))
    (7, 7)
    """
    return label & 0xFFFFFFFF


def slowness(
    speeds: str | Sequence[float], ids: Integers, hostile: Integers, nodes: int, seed: int
) -> Floats:
    """(h,) how many times slower than the median each of these nodes is; ValueError for what says no speeds.

    >>> slowness("stragglers(0.5, 10)", np.arange(4), np.array([], int), 4, seed=0).tolist()
    [1.0, 10.0, 1.0, 10.0]
    """
    everyone, w = np.arange(nodes), np.ones(nodes)
    if not isinstance(speeds, str):
        if len(speeds) != nodes or not min(speeds) > 0:
            raise ValueError(f"speeds need {nodes} positive numbers, one for each node, not {len(speeds)}")
        return np.asarray(speeds, np.float64)[ids]
    for part in parse_chain(speeds):
        if part.name == "lognormal":
            sigma = part.bind(["sigma"]).get("sigma", 0.5)
            if not 0 <= sigma < 10:
                raise ValueError(f"speeds {part}: sigma is from 0 to 10")
            w *= np.exp(sigma * _normal(seed, "speeds", 0, everyone))
        elif part.name == "stragglers":
            share, factor = {"share": 0.1, "factor": 10, **part.bind(["share", "factor"])}.values()
            if not (0 <= share <= 1 and factor > 0):
                raise ValueError(f"speeds {part}: share is from 0 to 1, and factor positive")
            late = draws(seed, "stragglers", 0, everyone, 1)[:, 0]
            for some in (np.setdiff1d(everyone, hostile), hostile):
                w[some[np.argsort(late[some])[: round(share * len(some))]]] *= factor
        elif part.name != "equal":
            raise ValueError(unknown("speeds", part.name, ["equal", "lognormal", "stragglers"]))
    return w[ids]


def _normal(seed: int, purpose: Purpose, round: int, ids: Integers) -> Floats:
    """A standard normal number for each node."""
    u = draws(seed, purpose, round, ids, 2)
    return np.asarray(np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1]))


class Acting(NamedTuple):
    """Phases of some nodes in row order: rows (k,), publication times, and coordinates of the draws."""

    rows: Integers
    published: Integers
    labels: Integers


@dataclass(frozen=True)
class Schedule:
    """All phases of a run of ``rounds`` units of time; w (h,) is the slowness of each row."""

    w: Floats
    ids: Integers
    rounds: int
    latency: float
    jitter: float
    seed: int

    @property
    def wait(self) -> int:
        """L, the way of a message, in ticks."""
        return max(1, round(self.latency * TICKS))

    @property
    def cycle(self) -> int:
        """C, how long a round lasts."""
        return TICKS + 2 * self.wait

    def edge(self, r: int) -> int:
        """When the last read of round r may be."""
        return r * self.cycle - self.wait

    def lasts(self, k: int) -> Integers:
        """(h,) the ticks of every node's k-th phase."""
        e = np.exp(self.jitter * _normal(self.seed, "jitter", k, self.ids)) if self.jitter else 1.0
        return np.maximum(self.wait, np.rint(self.w * e * TICKS).astype(np.int64))

    @cached_property
    def _phases(self) -> Acting:
        """Every phase that ends in time, in the order of publication."""
        begin, rows, ends, k, last = np.zeros(len(self.w), np.int64), [], [], 0, self.edge(self.rounds)
        while (begin < last).any():
            k += 1
            end = begin + self.lasts(k)
            there = np.flatnonzero(end <= last)
            rows.append(there)
            ends.append(end[there])
            begin = end + 2 * self.wait
        row, published = np.concatenate(rows), np.concatenate(ends)
        order = np.lexsort((row, published))
        row, published = row[order], published[order]
        rounds = -(-(published + self.wait) // self.cycle)
        return Acting(row, published, rounds + (_nth(row, rounds) << 32))

    @cached_property
    def shortest(self) -> int:
        """The ticks of the shortest phase that ends in time."""
        row, published, _ = self._phases
        order = np.lexsort((published, row))
        row, ends = row[order], published[order]
        begin = np.where(np.append(True, row[1:] != row[:-1]), 0, np.append(0, ends[:-1]) + 2 * self.wait)
        return int((ends - begin).min(initial=self.cycle))

    @cached_property
    def most(self) -> int:
        """The largest number of times that a node aggregates in one round."""
        row, reads = self._reads
        return int(_nth(row, reads).max(initial=0)) + 1

    @cached_property
    def _reads(self) -> tuple[Integers, Integers]:
        """Row and round of every read that is answered in time."""
        phases, last = self._phases, self.edge(self.rounds)
        done = phases.published + self.wait <= last
        return phases.rows[done], -(-(phases.published[done] + 2 * self.wait) // self.cycle)

    def aggregations(self, rows: Integers | None = None) -> int:
        """How often these rows (all) aggregate in the whole run."""
        row, _ = self._reads
        return len(row) if rows is None else int(np.isin(row, rows).sum())

    def pulls(self, r: int) -> int:
        """How many rows read in round r."""
        return int((self._reads[1] == r).sum())

    def windows(self, r: int, long: bool = True) -> list[tuple[Acting, Acting]]:
        """Return (who publishes, who reads) for each window of round r that has any.

        long: as few as possible; else none is longer than L,
        so that whoever acts in one acts at nearly one time.
        """
        phases, first, last = self._phases, self.edge(r - 1) if r > 1 else -1, self.edge(r)
        each = self.wait
        if long:
            each = -(-(last - first) // -(-(last - first) // (self.shortest + self.wait)))
        edges = [first, *range(last - (last - first - 1) // each * each, last, each), last]
        found = []
        for low, high in pairwise(edges):
            pair = [self._between(phases, low - shift, high - shift) for shift in (0, self.wait)]
            if any(len(one.rows) for one in pair):
                found.append((pair[0], pair[1]))
        return found

    def _between(self, phases: Acting, low: int, high: int) -> Acting:
        """The phases that end after low and by high, in the order of rows."""
        begin, end = np.searchsorted(phases.published, [low, high], side="right")
        order = np.argsort(phases.rows[begin:end], kind="stable")
        return Acting(*(part[begin:end][order] for part in phases))

    def published_by(self, r: int) -> Integers:
        """Return when each row's newest version was published, (h,), as of the end of round r.

        0 stands for the common initial model.
        """
        phases = self._phases
        done = phases.published <= (self.edge(r) if r else -1)
        newest = np.zeros(len(self.w), np.int64)
        newest[phases.rows[done]] = phases.published[done]  # in order of time, so the last one wins
        return newest

    def time(self, r: int) -> float:
        """The virtual time at the end of round r."""
        return r * self.cycle / TICKS

    def charged(self, r: int) -> float:
        """The virtual time of r synchronous rounds, in each of which all wait for the slowest."""
        return sum(int(self.lasts(k).max()) + 2 * self.wait for k in range(1, r + 1)) / TICKS


def _nth(rows: Integers, groups: Integers) -> Integers:
    """Count, for each entry, the entries before it with the same row and group."""
    order = np.lexsort((np.arange(len(rows)), groups, rows))
    keys = np.stack([rows[order], groups[order]])
    new = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)) if len(rows) else np.empty(0, bool)
    start = (
        np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0)) if len(rows) else np.empty(0, np.int64)
    )
    nth = np.empty(len(rows), np.int64)
    nth[order] = np.arange(len(rows)) - start
    return nth


# --- a round ------------------------------------------------------------------------------------------------


@dataclass
class AsynchronousRounds:
    """A round of Algorithm 1 as the windows of a unit of virtual time."""

    schedule: Schedule
    local: Any
    network: SimulatedNetwork
    rule: Aggregation
    outer: Outer | None
    workers: Group
    shards: Shards
    mine: slice

    def __post_init__(self) -> None:
        self.h = len(self.schedule.w)
        self.table = self.network.table
        self.finite = np.ones(self.h, bool)
        self.scratch: dict[str, Models] = {}
        self.backend = self.network.backend
        needs = "before" in self.network.attack.needs
        self.known = empty(self.h, self.table) if needs else None

    @property
    def _alone(self) -> bool:
        """Return whether a node's messages do not depend on nodes that read at about the same time."""
        attack = self.network.attack
        forging = not (self.network.silent or attack.trains)
        return not forging or (victim_by_victim(attack) and "before" not in attack.needs)

    def init(self, x: Models) -> Arrays:
        """Fill the table with the version that all nodes have at first: the common initial model."""
        self.table[: self.h] = x[:1]
        if self.known is not None:
            self.known[:] = x[:1]
        return self._kept({})

    def _kept(self, attack: Arrays) -> Arrays:
        known = {} if self.known is None else {"versions.known": self.known}
        return attack | {"versions.half": self.table[: self.h]} | known

    def load(self, network: Arrays) -> None:
        """Take over the versions of a checkpoint."""
        self.table[: self.h] = self.backend.array(network["versions.half"])
        if self.known is not None:
            self.known[:] = self.backend.array(network["versions.known"])
        self.finite = self._finite(self.table[: self.h])

    def step(self, state: State) -> tuple[State, Info]:
        """One unit of virtual time."""
        t, attack = state.round + 1, {k: v for k, v in state.network.items() if not k.startswith("versions.")}
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
        """Run lines 3-6 for the nodes whose phase ends in the window.

        keep: some node reads in this window, so the replaced versions are kept behind the newest ones.
        """
        rows, h = acting.rows, self.h
        if not len(rows):
            return
        if keep:
            take(self.table[:h], rows, out=self.table[h : h + len(rows)])
            self.replaced = self.finite[rows]
        mine = (rows >= self.mine.start) & (rows < self.mine.stop)
        own, labels = rows[mine], acting.labels[mine]
        if self.workers.size == 1:
            for label, at in self._alike(labels, own, state.local):
                self.finite[own[at]] = self._finite(self._phase(own[at], int(label), state, self.table))
        else:
            made = empty(len(own), self.table)
            for label, at in self._alike(labels, own - self.mine.start, state.local):
                self._phase(own[at], int(label), state, made, at)
            edges = [int(np.searchsorted(rows, shard.start)) for shard in self.shards] + [len(rows)]
            parts = [slice(a, max(a, b)) for a, b in pairwise(edges)]
            everyone = self.workers.rows(made, parts)
            put(self.table, rows, everyone)
            self.finite[rows] = self._finite(everyone)
        self.published[rows] = acting.published

    def _finite(self, table: Models) -> NDArray[np.bool_]:
        """Return which rows hold only finite numbers, (n,).

        Rows are checked when they are published, not at each read.
        """
        return np.asarray(self.backend.finite_rows(table))

    def _some(self, name: str, array: Models, rows: Integers, fill: bool = True) -> Models:
        """Copy some rows of an array into memory that is reused.

        The operating system would clear new memory page by page each time.
        """
        room = self.scratch.get(name)
        if room is None or len(room) < len(rows):
            room = self.scratch[name] = take(array, rows)
            return room
        return take(array, rows, out=room[: len(rows)]) if fill else room[: len(rows)]

    def _alike(self, labels: Integers, at: Integers, local: Arrays) -> Iterator[tuple[int, Integers]]:
        """Group nodes that can step together.

        They share a coordinate and, where it matters, the number of steps taken.
        """
        taken = local["steps"][at, 0] if "steps" in local else np.zeros(len(at), np.int64)
        for label, steps in np.unique(np.stack([labels, taken]), axis=1).T:
            yield int(label), np.flatnonzero((labels == label) & (taken == steps))

    def _phase(
        self, rows: Integers, label: int, state: State, out: Models, at: Integers | None = None
    ) -> Models:
        """One cohort's local steps, also put into out[at] (out[rows] if left out)."""
        some = rows - self.mine.start
        if self.known is not None:
            put(self.known, rows, take(state.x, some))
        if len(some) == len(state.x) and at is None:  # everybody at once: nothing is copied
            half: Models = self.local(state.x, state.local, rows, label, out=out[: self.h])[0]
            return half
        x, part = (
            self._some("x", state.x, some),
            {k: self._some(f"local.{k}", a, some) for k, a in state.local.items()},
        )
        half = self._some("half", state.x, some, fill=False)
        self.local(x, part, rows, label, out=half)
        put(out, rows if at is None else at, half)
        for key, array in part.items():
            put(state.local[key], some, array)
        return half

    # --- reads ---

    def _read(
        self, acting: Acting, replaced: Integers, state: State, attack: Arrays
    ) -> tuple[list[tuple[Integers, Integers, NDArray[np.bool_]]], Arrays]:
        """Run lines 7-9 for the nodes that read in the window.

        Returns, for each coordinate, which of this worker's nodes read, how many hostile answers they met and
        which could not aggregate; and what the attack remembers. No node reads a model that is made here.
        """
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
                part = {key: take(array, some) for key, array in state.outer.items()}
                z, part = self.outer(self._some("x", state.x, some), z, part, done)
                for key, array in part.items():
                    put(state.outer[key], some, array)
            put(state.x, some, z)
            found.append((some, np.asarray(received.met), done.degraded))
        return found, attack

    def workers_known(self) -> Models | None:
        """Return all nodes' models before their local phases, for attacks that look at them."""
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
        alone = not forging or victim_by_victim(plain.attack)
        own, at = (rows[mine], moment[mine]) if alone else (rows, moment)
        if not len(own):
            return Received(self.table[:0], np.empty((0, 1), np.int64), met=np.empty(0, np.int64)), attack
        place = np.full(self.h, -1, np.int64)  # of the older version of each row, behind the newest ones
        place[replaced] = self.h + np.arange(len(replaced))

        def newest(asked: Integers) -> Integers:
            """(c, s) the rows of the versions that are read: the newest at the moment of each reader."""
            row = np.maximum(asked, 0)
            later = (self.published[row] > at[:, None]) & (place[row] >= 0) & (asked >= 0)
            return np.where(later, place[row], asked)

        network = replace(plain, models=self.h + len(replaced), newest=newest)
        first = int(np.flatnonzero(mine)[0]) if mine.any() else 0
        wanted = slice(None) if alone else slice(first, first + int(mine.sum()))
        return network.answers(label, own, attack, known, forging, wanted)
