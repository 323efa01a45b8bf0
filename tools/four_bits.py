"""Models in four bits a number, which rpel does not offer: docs/results/exchange.md says why.

Rounded to nearest, rounded at random, with the sender's error fed back, in blocks of 32, and modulo theta,
decoded beside the receiver's own model (Lu and De Sa, "Moniqua", ICML 2020): a liar is then never further
than theta / 2 from its victim in any coordinate, and an honest value that is wraps around.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rpel.algorithm import Info, Problem, State
from rpel.types import Arrays, Floats, Integers, Models, Received
from rpel.wire import BLOCK

SHORT = 32
FOUR_BITS = ("int4", "int4 random", "int4 feedback", "int4 short", "mod 0.02", "mod 0.05", "mod 0.2")
"""Every code by its name; the number is theta."""


def bytes_of(code: str, d: int) -> float:
    """Bytes of a message of d numbers in one of these codes.

    >>> bytes_of("int4", 1024), bytes_of("mod 0.05", 1024)
    (528.0, 512.0)
    """
    block = SHORT if "short" in code else BLOCK
    return d / 2 + (0 if code.startswith("mod") else 4 * -(-d // block))


def nibbles(x: Models, dither: Floats | float = 0.5, block: int = BLOCK) -> Models:
    """Blocks in codes −7 … 7 with a scale each: floor(x / scale + dither).

    >>> nibbles(np.array([[7.0, 3.2, -0.4]]))
    array([[ 7.,  3.,  0.]])
    """
    n, d = x.shape
    padded = np.zeros((n, -(-d // block) * block), x.dtype)
    padded[:, :d] = x
    blocks = padded.reshape(n, -1, block)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=2, keepdims=True) / x.dtype.type(7)
        blocks /= np.where(scale == 0, x.dtype.type(1), scale)
        blocks += dither
        np.clip(np.floor(blocks, out=blocks), -7, 7, out=blocks)
        blocks *= scale
        said: Models = padded[:, :d] + x.dtype.type(0)
    return said


@dataclass
class Nibbles:
    """Four bits a number, in place of the code of a run: `through` as of :class:`rpel.wire.Wire`.

    The first call of a round codes the honest half-steps, which may be dithered or have their error fed back;
    later calls code what hostile nodes say, to the nearest.
    """

    honest: int
    dithered: bool = False
    feedback: bool = False
    block: int = BLOCK
    name: str = "int4"
    error: Models | None = None
    coins: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def through(self, x: Models, out: Models) -> None:
        if len(x) != self.honest or x is out:
            out[:] = nibbles(x, block=self.block)
            return
        said = x if self.error is None else x + self.error
        dither: Floats | float = 0.5
        if self.dithered:
            dither = self.coins.random((len(x), -(-x.shape[1] // self.block), self.block), np.float32)
        out[:] = nibbles(said, dither, self.block)
        if self.feedback:
            self.error = np.where(np.isfinite(said - out), said - out, 0)


@dataclass
class Modulo:
    """Four bits of x mod theta, decoded next to the receiver's own model;
    counts how often an honest value wraps."""

    network: Any
    theta: float
    wrapped: int = 0
    total: int = 0

    def init(self) -> Arrays:
        return dict(self.network.init())

    def nodes(self, t: int) -> Integers:
        return np.asarray(self.network.nodes(t))

    def __call__(
        self, half: Models, state: Arrays, nodes: Integers, t: int, before: Models
    ) -> tuple[Received, Arrays]:
        received, state = self.network(half, state, nodes, t, before)
        (h, m), kind, theta = received.index.shape, half.dtype.type, half.dtype.type(self.theta)
        step = kind(theta / 16)
        table = np.empty((h * m, half.shape[1]), half.dtype)
        index = np.where(received.index >= 0, np.arange(h * m).reshape(h, m), -1)
        codes = np.floor(received.table / step + kind(0.5)) * step
        for i, rows in enumerate(received.index):
            own = received.table[rows[0]]
            table[i * m] = own
            for k, row in enumerate(rows[1:], 1):
                if row >= 0:
                    off = (codes[row] - own) / theta
                    off -= np.floor(off + kind(0.5))
                    table[i * m + k] = own + off * theta
                    if row < self.network.models:
                        self.wrapped += int((np.abs(received.table[row] - own) > theta / 2).sum())
                        self.total += own.size
        return replace(received, table=table, index=index), state

    def tell(self, state: State, info: Info, row: dict[str, Any]) -> None:
        """The share of honest values that wrapped so far, as a column of the run."""
        row["wrapped"] = self.wrapped / max(1, self.total)


def four_bits(code: str) -> dict[str, Any]:
    """What `simulate` is told beside wire = "int8", so that this code stands in its place."""
    modulo: list[Modulo] = []

    def change(problem: Problem) -> Problem:
        coded: Any = problem.deliver
        if code.startswith("mod"):
            # half-steps, and room for what is forged
            table = coded.half.base[len(coded.whole) - len(coded.half) :]
            plain = replace(coded.network, table=table, wire=replace(coded.network.wire, name="float32"))
            modulo.append(Modulo(plain, float(code.split()[1])))
            return replace(problem, deliver=modulo[-1])
        code_ = Nibbles(
            len(coded.half), "random" in code, "feedback" in code, SHORT if "short" in code else BLOCK
        )
        return replace(problem, deliver=replace(coded, network=replace(coded.network, wire=code_)))

    def tell(state: State, info: Info, row: dict[str, Any]) -> None:
        if modulo:
            modulo[-1].tell(state, info, row)

    callbacks: list[Callable[..., None]] = [tell] if code.startswith("mod") else []
    return {"problem": change, "callbacks": callbacks}
