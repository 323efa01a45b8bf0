"""A rule to copy: a class for all victims at once, and the same as a plain function.

    rpel run quickstart --rule rule:NearestHalf
    rpel run quickstart --rule "nnm+rule:nearest_half(share=0.6)"

To put it into the library: the function that makes it goes into rules/linear.py (weights from distances),
coordinatewise.py, mixing.py or graph.py, and its name into ``__all__`` there. Then add it to
tests/support/rule_cases.py and docs/rules.md.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpel.rules import Group, Rule
from rpel.testing import check_rule

Array = NDArray[Any]


class NearestHalf(Rule):
    """Average the half of the vectors that are nearest to the node's own."""

    def run(self, group: Group, out: Array | None = None) -> Array:
        """(h, d) Aggregate for h victims, whose m vectors are all present and finite."""
        distances = group.to(0)  # (h, m) squared, to column 0, the own vector
        near = np.argsort(distances, axis=1, kind="stable")[:, : group.m // 2 + 1]
        weights = np.zeros(group.index.shape)
        np.put_along_axis(weights, near, 1 / near.shape[1], axis=1)
        return np.asarray(group.combine(weights, out))  # (h, d) one weighted sum per victim


def nearest_half(x: Array, f: int, share: float = 0.5) -> Array:
    """(d,) Average the share of the vectors x (m, d) that are nearest to the own one, x[0]."""
    near = np.argsort(np.square(x - x[0]).sum(axis=1), kind="stable")[: int(share * len(x)) + 1]
    return np.asarray(x[near].mean(axis=0))


if __name__ == "__main__":
    check_rule(NearestHalf("nearest_half", f=2, pivot=0))  # pivot: its own vector must be finite
    check_rule(nearest_half, f=2, share=0.6)
