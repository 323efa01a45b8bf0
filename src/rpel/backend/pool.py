"""Who computes: a fixed list of units of work, taken in turn by the caller and a few helpers.

Invariants:
- units are fixed by the shapes alone, and each writes its own part of the result: so the number of threads,
  and who took which unit, cannot change a bit;
- the caller works too and never waits for a helper that has not begun,
  so concurrent calls cannot block each other;
- after a fork the child starts its own helpers.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import NamedTuple

from rpel.processes import cores

_SECOND_CACHE = 512 << 10  # bytes per core; right or wrong, only the speed depends on it
_UNITS = 64  # wanted at least, so that all threads stay busy
_SHARES = 8  # pieces per thread: small enough to even out a disturbed core, large enough to cost nothing


class _Crew:
    """The helpers of this process and how many threads may work on one call."""

    def __init__(self) -> None:
        self.size = cores()
        self.pool: ThreadPoolExecutor | None = None

    def helpers(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(max(1, self.size - 1), thread_name_prefix="rpel-kernels")
        return self.pool

    def forget(self) -> None:
        self.pool = None


_crew = _Crew()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.forget)


def threads() -> int:
    """How many threads one call may use; at first the cores this process may run on.

    >>> threads() >= 1
    True
    """
    return _crew.size


def set_threads(count: int) -> None:
    """Use `count` threads from the next call on. Results do not depend on it.

    >>> before = threads(); set_threads(3); threads(); set_threads(before)
    3
    """
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    if count != _crew.size:
        pool, _crew.pool, _crew.size = _crew.pool, None, count
        if pool is not None:
            pool.shutdown(wait=False)


class Units(NamedTuple):
    """How an (h, d) result is cut: `total` units of `columns` × `chunk` victims,
    all victims of a block in turn."""

    columns: int
    chunk: int
    total: int


def cut(n: int, h: int, d: int, itemsize: int) -> Units:
    """Columns outermost: a block of all n rows fits half of the second cache,
    so that every victim finds it there.

    Columns come in multiples of 128, at least 512 (shorter pieces of a row read slowly), and where not even
    these fit, 4096; victims are split only where columns give too few units to keep all threads busy.

    >>> cut(n=180, h=90, d=176_050, itemsize=4), cut(n=20_000, h=9_000, d=650, itemsize=4)
    (Units(columns=512, chunk=90, total=344), Units(columns=4096, chunk=140, total=65))
    """
    fitting = _SECOND_CACHE // 2 // max(1, n * itemsize)
    columns = max(512, min(4096, fitting // 128 * 128)) if fitting >= 64 else 4096
    blocks = -(-d // columns)
    chunk = max(1, min(h, h * blocks // _UNITS))
    return Units(columns, chunk, blocks * -(-h // chunk))


def run(work: Callable[[int, int], None], units: int, small: bool = False) -> None:
    """Call work(first, last) over ranges that cover 0 … units − 1, on all threads;
    in this thread alone when `small`.

    >>> seen = []; run(lambda first, last: seen.extend(range(first, last)), 5, small=True); seen
    [0, 1, 2, 3, 4]
    """
    size = 1 if small else min(threads(), units)
    if size <= 1:
        if units:
            work(0, units)
        return
    pieces = min(units, size * _SHARES)
    edges = [units * p // pieces for p in range(pieces + 1)]
    turns = itertools.count()

    def take() -> None:
        while (turn := next(turns)) < pieces:
            work(edges[turn], edges[turn + 1])

    futures: list[Future[None]] = []
    # the pool was just closed by set_threads or the interpreter's end: work alone
    with suppress(RuntimeError):
        futures.extend(_crew.helpers().submit(take) for _ in range(size - 1))
    try:
        take()
    finally:
        begun = [future for future in futures if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()
