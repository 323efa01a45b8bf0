"""Two looks inside runs of docs/results/memory.md and wire.md: python tools/exchange_closeup.py DATA.

memory: of a run with c = 3 that loses a node, and of the same without memory, how far the node that is
farthest from the median of all half-steps is from it, and where line 9 puts that node.
wire: the root mean square distance of two honest half-steps, as they are and as they arrive.
"""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

import four_bits
from exchange_results import Fields, exchange
from rpel import simulate
from rpel.algorithm import Info, State
from rpel.types import Models
from rpel.wire import Wire


def farthest(state: State, info: Info) -> str:
    """The half-step farthest from the median, before and after line 9."""
    middle = np.median(info.half, axis=0)
    before, after = (np.linalg.norm(models - middle, axis=1) for models in (info.half, state.x))
    node = int(before.argmax())
    return f"round {info.round}: node {node} is {before[node]:.2f} away, after line 9 {after[node]:.2f}"


def apart(models: Models) -> float:
    """The root mean square distance of two rows."""
    centred = models - models.mean(axis=0, dtype=np.float64)
    return float(np.sqrt(2 * np.square(centred).sum() / (len(models) - 1)))


class Coded(four_bits.Nibbles):
    """Four bits, with a word on what they do to the honest half-steps of a round."""

    def through(self, x: Models, out: Models) -> None:
        if len(x) != self.honest or x is out:
            super().through(x, out)
            return
        eight = np.empty_like(x)
        Wire("int8").through(x, eight)
        before = apart(x)
        super().through(x, out)
        print(f"apart {before:.2f}, as int8 {apart(eight):.2f}, in four bits {apart(out):.2f}")


def look(data_dir: str, fields: Fields, rounds: int, shown: Iterable[int] = (), **given: Any) -> None:
    """The first rounds of a run of seed 0, of which those shown say who is farthest."""

    def tell(state: State, info: Info, row: dict[str, Any]) -> None:
        if info.round in shown:
            print(farthest(state, info), flush=True)

    short = {"rounds": rounds, "eval_every": rounds, "final_eval_size": 250, "seed": 0, "threads": 1}
    called = {"data_dir": data_dir, "out": None, "callbacks": [tell]}
    simulate(**fields | short | called | given)


def main() -> None:
    (data_dir,) = sys.argv[1:]
    for c in (3, 1):
        print(f"memory: min_sum, c = {c}")
        look(data_dir, exchange(30, "min_sum", c), 48, shown=range(40, 49))
    print("wire: min_sum, int4 random, round by round")
    four_bits.Nibbles = Coded  # type: ignore[misc]
    code = "int4 random"
    look(data_dir, exchange(30, "min_sum", 1, code), 40, **four_bits.four_bits(code))


if __name__ == "__main__":
    main()
