"""Before a peer says that it is ready, all that its rule may need is compiled: compiling inside a round costs seconds.

Any number of answers from 2 b̂ to s may come, with the own model or without it, and up to b̂ of them not finite, each of
which leaves one model and one trim fewer.
"""

from collections.abc import Iterator
from typing import Any

from rpel.aggregation import Rule
from rpel.aggregation.mixing import Mixed
from rpel.aggregation.rules import Coordinatewise
from rpel.kernels.compiled import prepare
from rpel.randomness import stream

_LARGE = 1_000_000
"""Parameters from which a kernel made for one number of models is worth the second that compiling it takes."""


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
    last = rule.rule if isinstance(rule, Mixed) else rule
    for m, f in sizes(rule, pull):
        rule.with_f(f)(stream(0, "ready").standard_normal((m, 1)).astype(dtype))
        if d >= _LARGE and isinstance(last, Coordinatewise):
            prepare(m, f, last.operation, isinstance(rule, Mixed), dtype)
