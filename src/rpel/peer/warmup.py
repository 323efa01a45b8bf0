"""What is compiled before a peer is ready: its rule, for every number of answers that may come."""

from collections.abc import Iterator
from typing import Any

from rpel.aggregation import Rule
from rpel.randomness import stream

_LARGE = 1_000_000
"""Parameters from which a kernel made for one number of models is worth the second that compiling it takes."""
_ROUNDS = 1 << 20


def sizes(rule: Rule, pull: int) -> Iterator[tuple[int, int]]:
    """(m, f) for which the rule may run after s peers were asked.

    >>> from rpel.aggregation import rule
    >>> list(sizes(rule("trimmed_mean", f=1), pull=4))
    [(3, 1), (4, 1), (5, 1), (2, 0), (3, 0), (4, 0)]
    """
    f = rule.f or 0
    for left_out in range(f + 1):
        least = max(1, rule.least(f) - left_out)
        yield from ((m, f - left_out) for m in range(least, pull + 2 - left_out))


def make_ready(rule: Rule, pull: int, d: int, dtype: Any) -> None:
    """Run the rule once for each of its sizes on one coordinate; for large models make the kernels of each size too.

    >>> import numpy as np
    >>> from rpel.aggregation import rule
    >>> make_ready(rule("median", f=1), pull=3, d=10, dtype=np.float32)
    """
    for m, f in sizes(rule, pull):
        chosen = rule.with_f(f)
        chosen(stream(0, "ready").standard_normal((m, 1)).astype(dtype))
        if d >= _LARGE:
            chosen.prepare(m, d, dtype, victims=_ROUNDS)
