"""A network whose nodes remember: line 9 takes the answers of the last c rounds, the older ones moved along.

In a round a node draws s peers among those that it did not draw in the c − 1 rounds before, so that the
hostile among the c·s of a window follow the planned law; the first round draws c·s,
cut into c lists that count as rounds 2 − c … 1.

Invariants:
- a round costs one table: its half-steps and its forged rows as they were delivered. What each node has of
  it are numbers; no answer is stored twice, and none is moved before it is aggregated
  (:class:`rpel.types.Moves`);
- who was asked is known of all nodes to every worker, what came is known of a worker's own nodes;
- what is remembered is part of the state: it is checkpointed, and any number of workers can go on with it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rpel.backend.base import Backend
from rpel.randomness import draws, sample_others, sample_without_replacement
from rpel.simulation.delivery import CodedNetwork, SimulatedNetwork, Window, to_the_front, victim_by_victim
from rpel.topology import Unweighted
from rpel.types import Arrays, Floats, Integers, Models, Moves, Received

_OURS = ("memory.", "rows.")
_ABSENT = -1


@dataclass(frozen=True)
class Drawn(Unweighted):
    """Who asks whom in one round, drawn before: node ids[r] asks asked[r]."""

    ids: Integers
    asked: Integers

    @property
    def widest(self) -> int:
        return int(self.asked.shape[1])

    def sample(self, t: int, ids: Integers) -> Integers:
        row = np.empty(int(self.ids.max()) + 1, np.int64)
        row[self.ids] = np.arange(len(self.ids))
        return self.asked[row[ids]]


class Shelf:
    """What c rounds left, in one array: half-steps (h), forged rows, and the exact half-steps of those who
    remember where models travel in a code. Row i of round u is row i·c + u mod c: the round that is put there
    is not one of the c − 1 before it, which line 9 is still to read."""

    def __init__(self, half: int, forged: int, own: int, rounds: int, like: Models, backend: Backend) -> None:
        self.rounds, self.backend, rows = rounds, backend, half + forged + own
        self.past = backend.zeros(rows * rounds, like.shape[-1], like)
        self.most = np.zeros(rows * rounds)
        self.parts = {
            "half": slice(0, half),
            "forged": slice(half, half + forged),
            "own": slice(half + forged, rows),
        }

    def put(self, part: str, slot: int, rows: Integers | None, values: Models, most: Floats) -> None:
        """Keep these rows of a round (None: all), of which the largest absolute values are known."""
        place = self.parts[part]
        numbers = (
            np.arange(place.start, place.stop) if rows is None else place.start + rows
        ) * self.rounds + slot
        self.backend.put(self.past, numbers, values)
        self.most[numbers] = most

    def kept(self, part: str) -> Models:
        """(rows, rounds, d) of a part, as a checkpoint has it."""
        held = self.past[self._rows(part)]
        return held.reshape(len(held) // self.rounds, self.rounds, held.shape[1])

    def restore(self, part: str, values: Models) -> None:
        """Take over what a checkpoint held, unless it is here already."""
        rows = self._rows(part)
        if not self.backend.shares(self.past, values):
            self.past[rows] = self.backend.array(values).reshape(-1, self.past.shape[1])
            self.most[rows] = self.backend.largest(self.past[rows])

    def _rows(self, part: str) -> slice:
        return slice(self.parts[part].start * self.rounds, self.parts[part].stop * self.rounds)


@dataclass(frozen=True)
class RememberingNetwork:
    """Lines 7-8 with a memory of c rounds, over a network that delivers one."""

    network: SimulatedNetwork | CodedNetwork
    memory: int
    pull: int
    shelf: Shelf = field(init=False)

    def __post_init__(self) -> None:
        plain, h = self.plain, self.plain.models
        mine = len(np.arange(h)[plain.mine])
        coded = mine if isinstance(self.network, CodedNetwork) else 0
        shelf = Shelf(h, mine if self._alone else h, coded, self.memory, plain.table[:1], plain.backend)
        object.__setattr__(self, "shelf", shelf)

    @property
    def plain(self) -> SimulatedNetwork:
        return self.network.network if isinstance(self.network, CodedNetwork) else self.network

    @property
    def _alone(self) -> bool:
        """Whether this worker knows the forged rows of its own victims alone."""
        return victim_by_victim(self.plain.attack, self.plain.consistent)

    def init(self) -> Arrays:
        """What the attack remembers; nothing was received yet."""
        return self.network.init()

    def nodes(self, t: int) -> Integers:
        """The rows of the nodes that act."""
        return self.network.nodes(t)

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        """This round's answers, and those of the rounds before as rows that are moved."""
        attack = {key: value for key, value in state.items() if not key.startswith(_OURS)}
        asked = self._draw(t, state.get("memory.asked"))
        codes: Integers = np.empty((len(nodes), 0), np.int64)
        if t > 1:
            codes = np.asarray(state["rows.answers"])
            for part in self.shelf.parts:
                if (key := self._key(part)) in state:
                    self.shelf.restore(part, state[key])
        network = self._of_round(t, asked, codes, nodes)
        received, attack = network(half, attack, nodes, t, before)
        most = self.plain.backend.largest(received.table)
        whole = self._windows(received, codes, t, state, most)
        return whole, attack | self._kept(received, asked, codes, nodes, t, state, most)

    # --- asking ---

    def _draw(self, t: int, before: Integers | None) -> Integers:
        """(h, s) whom every node asks, none of those that it asked in the rounds before;
        c·s in the first round."""
        plain = self.plain
        ids, n, seed = plain.ids(t), plain.roster.nodes, plain.seed
        if before is not None:
            return sample_others(seed, "pull", t, ids, n, self.pull, before)
        drawn = sample_without_replacement(seed, "pull", t, ids, n, self.memory * self.pull)
        # any s of them are drawn alike
        order = np.argsort(draws(seed, "lists", t, ids, drawn.shape[1]), axis=1)
        return np.take_along_axis(drawn, order, axis=1)

    def _of_round(
        self, t: int, asked: Integers, codes: Integers, nodes: Integers
    ) -> SimulatedNetwork | CodedNetwork:
        """The network of one round: who asks whom is fixed;
        an attack that searches knows what is remembered."""
        plain = self.plain
        window = None
        if plain.attack.searches and codes.size:
            window = Window(nodes, *self._moved(codes, nodes, t))
        one = replace(plain, topology=Drawn(plain.ids(t), asked), in_order=True, window=window)
        return replace(self.network, network=one) if isinstance(self.network, CodedNetwork) else one

    # --- what came ---

    def _windows(self, received: Received, codes: Integers, t: int, state: Arrays, most: Floats) -> Received:
        """Own row, this round's answers, then the remembered ones;
        hostile answers are counted over the window."""
        if t == 1:
            return replace(received, index=to_the_front(received.index))
        number, moves = self._moved(codes, received.index[:, 0], t)
        behind = np.where(number >= 0, len(received.table) + number, -1)
        index = to_the_front(np.concatenate([received.index, behind], axis=1))
        hostile = self.plain.roster.hostile(t)[state["memory.asked"][self.plain.mine]]
        met = np.asarray(received.met) + hostile.sum(axis=1)
        return replace(received, index=index, met=met, moves=replace(moves, now=most))

    def _moved(self, codes: Integers, own: Integers, t: int) -> tuple[Integers, Moves]:
        """(c, (c − 1)·s) the numbers of the remembered answers, −1 absent, and how each is made; own: the
        rows of the table that hold the nodes' own half-steps."""
        c, h = self.memory, self.plain.models
        first = self.plain.mine.start if self._alone else 0
        rows = np.where(codes >= 0, codes, h + (-2 - codes) - first)
        lags = np.repeat(np.arange(1, c), self.pull)
        slots = np.maximum(t - lags, 1) % c
        base = np.where(codes == _ABSENT, 0, rows * c + slots)
        nodes = np.arange(h)[self.plain.mine]
        exact = self.shelf.parts["own"].start + np.arange(len(nodes))
        held = exact if isinstance(self.network, CodedNetwork) else nodes
        back = held[:, None] * c + slots
        number = np.where(codes == _ABSENT, -1, np.arange(codes.size).reshape(codes.shape))
        owns = np.repeat(own, codes.shape[1])
        return number, Moves(self.shelf.past, owns, base.ravel(), back.ravel(), self.shelf.most)

    def _kept(
        self,
        received: Received,
        asked: Integers,
        codes: Integers,
        nodes: Integers,
        t: int,
        state: Arrays,
        most: Floats,
    ) -> Arrays:
        """What the next rounds need of this one; most: the largest absolute values of the table's rows."""
        plain, gaps, s = self.plain, self.memory - 1, self.pull
        slot, h, table = t % self.memory, plain.models, received.table
        who = nodes if self._alone else np.arange(h)
        met = plain.roster.hostile(t)[asked[who]].any(axis=1)
        forging = not (plain.silent or plain.attack.trains)
        victims = who[met] if forging else who[:0]
        first = plain.mine.start if self._alone else 0
        behind, own = slice(h, h + len(victims)), received.index[:, 0]
        self.shelf.put("half", slot, None, table[:h], most[:h])
        self.shelf.put("forged", slot, victims - first, table[behind], most[behind])
        if isinstance(self.network, CodedNetwork):
            self.shelf.put("own", slot, None, plain.backend.take(table, own), most[own])
        rows = received.index[:, 1:]
        forged = np.append(victims, 0)[np.clip(rows - h, 0, len(victims))]
        new = np.where(rows < h, rows, -2 - forged)
        before: Any = state.get("memory.asked")
        if t == 1:  # the last list is this round's, those before it count as earlier rounds
            order = [np.arange(q * s, (q + 1) * s) for q in range(gaps, 0, -1)]
            columns = np.concatenate(order)
            new, known = new[:, columns], asked[:, columns]
        else:
            new = np.concatenate([new, codes[:, : (gaps - 1) * s]], axis=1)
            known = np.concatenate([asked, before[:, : (gaps - 1) * s]], axis=1)
        held = {self._key(part): self.shelf.kept(part) for part in self.shelf.parts}
        return {"memory.asked": known, "rows.answers": new, **{k: v for k, v in held.items() if len(v)}}

    def _key(self, part: str) -> str:
        """The name of a part in the state: by row where it is of this worker's nodes alone."""
        return f"{'rows' if part == 'own' or (part == 'forged' and self._alone) else 'memory'}.{part}"
