"""Threads: a fixed list of units of work, taken in turn by the caller and a few helpers.

Invariants:
- units are fixed by the shapes alone, and each writes its own part of the result: so the number of threads,
  and who took which unit, cannot change a bit;
- the caller works too and never waits for a helper that has not begun,
  so concurrent calls cannot block each other;
- after a fork the child starts its own helpers.

`share` runs work of torch on the same threads, each with torch held to one: faster than torch's own threads
on small products, and independent of their number.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import NamedTuple

from rpel.processes import cores

SECOND_CACHE = 512 << 10  # bytes per core; right or wrong, only the speed depends on it
MIN_UNITS = 64  # wanted at least, so that all threads stay busy
PIECES_PER_THREAD = (
    8  # pieces per thread: small enough to even out a disturbed core, large enough to cost nothing
)


class _Helpers:
    """The helpers of this process and how many threads may work on one call."""

    def __init__(self) -> None:
        self.size = cores()
        self.pool: ThreadPoolExecutor | None = None

    def executor(self) -> ThreadPoolExecutor:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(max(1, self.size - 1), thread_name_prefix="rpel-kernels")
        return self.pool

    def forget(self) -> None:
        self.pool = None


_helpers = _Helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.forget)


def threads() -> int:
    """How many threads one call may use; at first the cores this process may run on.

    >>> threads() >= 1
    True
    """
    return _helpers.size


def set_threads(count: int) -> None:
    """Use `count` threads from the next call on. Results do not depend on it.

    >>> before = threads(); set_threads(3); threads(); set_threads(before)
    3
    """
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    if count != _helpers.size:
        pool, _helpers.pool, _helpers.size = _helpers.pool, None, count
        if pool is not None:
            pool.shutdown(wait=False)


class Units(NamedTuple):
    """The cut of an (h, d) result into `total` units of `columns` × `chunk` victims.

    The units of one block of columns follow each other.
    """

    columns: int
    chunk: int
    total: int


def cut(n: int, h: int, d: int, itemsize: int) -> Units:
    """Cut an (h, d) result into units of work, columns outermost.

    A block of columns of all n rows fits half of the second-level cache, so that every victim finds it there.

    Columns come in multiples of 128, at least 512 (shorter pieces of a row read slowly), and where not even
    these fit, 4096; victims are split only where columns give too few units to keep all threads busy.

    >>> cut(n=180, h=90, d=176_050, itemsize=4), cut(n=20_000, h=9_000, d=650, itemsize=4)
    (Units(columns=512, chunk=90, total=344), Units(columns=4096, chunk=140, total=65))
    """
    fitting = SECOND_CACHE // 2 // max(1, n * itemsize)
    columns = max(512, min(4096, fitting // 128 * 128)) if fitting >= 64 else 4096
    blocks = -(-d // columns)
    chunk = max(1, min(h, h * blocks // MIN_UNITS))
    return Units(columns, chunk, blocks * -(-h // chunk))


def run(work: Callable[[int, int], None], units: int, small: bool = False) -> None:
    """Call work(first, last) over ranges that cover 0 … units − 1, on all threads.

    When `small`, call it in this thread alone.

    >>> seen = []; run(lambda first, last: seen.extend(range(first, last)), 5, small=True); seen
    [0, 1, 2, 3, 4]
    """
    size = 1 if small else min(threads(), units)
    if size <= 1:
        if units:
            work(0, units)
        return
    pieces = min(units, size * PIECES_PER_THREAD)
    edges = [units * p // pieces for p in range(pieces + 1)]
    turns = itertools.count()

    def take() -> None:
        while (turn := next(turns)) < pieces:
            work(edges[turn], edges[turn + 1])

    futures: list[Future[None]] = []
    # set_threads or interpreter shutdown has just closed the pool: work alone
    with suppress(RuntimeError):
        futures.extend(_helpers.executor().submit(take) for _ in range(size - 1))
    try:
        take()
    finally:
        begun = [future for future in futures if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()


# --- torch --------------------------------------------------------------------------------------------------


class _Hold:
    """How many calls hold torch to one thread now, and what to go back to."""

    def __init__(self) -> None:
        self.lock, self.calls, self.before = threading.Lock(), 0, 1


_hold = _Hold()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Hold torch to one thread in the whole process; the last to leave restores what the first found.

    >>> import torch
    >>> with one_torch_thread():
    ...     torch.get_num_threads()
    1
    """
    import torch

    with _hold.lock:
        if not _hold.calls:
            _hold.before = torch.get_num_threads()
        _hold.calls += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _hold.lock:
            _hold.calls -= 1
            if not _hold.calls:
                torch.set_num_threads(_hold.before)


def share(work: Callable[[int], None], units: int, serial: bool = False) -> None:
    """Call work(u) for u < units on all threads; in order and in this one if ``serial``.

    >>> seen = []; share(seen.append, 3); sorted(seen)
    [0, 1, 2]
    """
    import torch

    def some(first: int, last: int) -> None:
        torch.set_num_threads(1)  # OpenMP keeps a number per thread, so each has to be told
        for unit in range(first, last):
            work(unit)

    if serial:
        for unit in range(units):
            work(unit)
        return
    with one_torch_thread():
        run(some, units)
