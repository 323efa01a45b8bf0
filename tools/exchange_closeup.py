"""A look inside a run of docs/results/exchange.md: python tools/exchange_closeup.py DATA.

Under min_sum, the root mean square distance of two honest half-steps, as they are and as they arrive.
"""

import sys

import numpy as np

import four_bits
from exchange_results import exchange
from rpel import simulate
from rpel.types import Models
from rpel.wire import Wire


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


def main() -> None:
    (data_dir,) = sys.argv[1:]
    four_bits.Nibbles = Coded  # type: ignore[misc]
    code = "int4 random"
    fields = exchange(30, "min_sum", code) | four_bits.four_bits(code)
    fields |= {"rounds": 40, "eval_every": 40, "seed": 0, "threads": 1}
    simulate(**fields, data_dir=data_dir, out=None)


if __name__ == "__main__":
    main()
