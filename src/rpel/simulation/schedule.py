"""When nodes of an asynchronous run publish, read and aggregate: a matter of their speeds alone.

Node i's k-th local phase lasts max(L, w_i · e_ik): w_i its slowness, e_ik its jitter. When it ends, at τ, the
half-step is published; requests reach the peers at τ + L, answers come back at τ + 2L, and the next phase
begins. With all speeds equal a cycle lasts C = 1 + 2L; round r of a run is the time in which what is
aggregated by r·C is read: up to r·C − L.

Invariants:
- no draw of a peer enters, so that the number of aggregations is known before the first;
- times are whole numbers of ticks, a billion to the unit, so that equal speeds give equal times, exactly;
- what is published in a window comes from models that were aggregated before it, and nobody publishes twice
  in it: a phase of length p that ends in it was begun with answers that were read p + L before its end. So a
  window may last as long as the shortest phase and L together; the shortest possible phase is L.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rpel.randomness import Purpose, draws
from rpel.types import Floats, Integers

TICKS = 1_000_000_000
_FORMS = "equal, lognormal:0.3, stragglers:0.1,10, several of these joined by +, or a number for each node"


def of_round(label: int) -> int:
    """The round r of a phase's coordinate, r + (k << 32) for the k-th, from 0 on,
    that a node publishes in round r.

    >>> of_round(7), of_round(7 + (2 << 32))
    (7, 7)
    """
    return label & 0xFFFFFFFF


def slowness(speeds: str, ids: Integers, hostile: Integers, nodes: int, seed: int) -> Floats:
    """(h,) how many times slower than the median each of these nodes is; ValueError for what says no speeds.

    >>> slowness("stragglers:0.5,10", np.arange(4), np.array([], int), 4, seed=0).tolist()
    [1.0, 10.0, 1.0, 10.0]
    """
    everyone, w = np.arange(nodes), np.ones(nodes)
    for part in str(speeds).split("+"):
        name, _, rest = part.strip().partition(":")
        try:
            numbers = (
                [float(text) for text in (rest if rest else name).split(",")]
                if part.strip() != "equal"
                else []
            )
        except ValueError:
            raise ValueError(f"speeds {speeds!r} is not valid: it takes {_FORMS}") from None
        if name == "lognormal" and len(numbers) == 1 and 0 <= numbers[0] < 10:
            w *= np.exp(numbers[0] * _normal(seed, "speeds", 0, everyone))
        elif name == "stragglers" and len(numbers) == 2 and 0 <= numbers[0] <= 1 and numbers[1] > 0:
            late = draws(seed, "stragglers", 0, everyone, 1)[:, 0]
            for some in (np.setdiff1d(everyone, hostile), hostile):
                w[some[np.argsort(late[some])[: round(numbers[0] * len(some))]]] *= numbers[1]
        elif not rest and len(numbers) == nodes and min(numbers) > 0:
            w *= numbers
        elif part.strip() != "equal":
            raise ValueError(f"speeds {speeds!r} is not valid among {nodes} nodes: it takes {_FORMS}")
    return w[ids]


def _normal(seed: int, purpose: Purpose, round: int, ids: Integers) -> Floats:
    """A standard normal number for each node."""
    u = draws(seed, purpose, round, ids, 2)
    return np.asarray(np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1]))


class Acting(NamedTuple):
    """Phases of some nodes, in the order of rows: rows (k,), when each published,
    and the coordinates of its draws."""

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
        """(who publishes, who reads) in each window of round r; windows in which nobody does are left out.

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
        """(h,) when each row's newest version was published, as of the end of round r; 0:
        the common initial model."""
        phases = self._phases
        done = phases.published <= (self.edge(r) if r else -1)
        newest = np.zeros(len(self.w), np.int64)
        newest[phases.rows[done]] = phases.published[done]  # in the order of time: the last one stays
        return newest

    def time(self, r: int) -> float:
        """The virtual time at the end of round r."""
        return r * self.cycle / TICKS

    def charged(self, r: int) -> float:
        """The virtual time of r synchronous rounds, in each of which all wait for the slowest."""
        return sum(int(self.lasts(k).max()) + 2 * self.wait for k in range(1, r + 1)) / TICKS


def _nth(rows: Integers, groups: Integers) -> Integers:
    """For each entry, how many before it have the same row and group."""
    order = np.lexsort((np.arange(len(rows)), groups, rows))
    keys = np.stack([rows[order], groups[order]])
    new = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)) if len(rows) else np.empty(0, bool)
    start = (
        np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0)) if len(rows) else np.empty(0, np.int64)
    )
    nth = np.empty(len(rows), np.int64)
    nth[order] = np.arange(len(rows)) - start
    return nth
