"""Work of torch on the threads of `pool`, each with torch held to one: faster than torch's own threads on
small products, and independent of their number."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rpel.backend.pool import run


class _Hold:
    """How many calls hold torch to one thread now, and what to go back to."""

    def __init__(self) -> None:
        self.lock, self.calls, self.before = threading.Lock(), 0, 1


_hold = _Hold()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, torch uses one thread in the whole process; the last to leave restores what the first found.

    >>> with one_torch_thread():
    ...     torch.get_num_threads()
    1
    """
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
    """Call work(u) for u < units, on all threads that `rpel.backend.pool` allows;
    in order and here if `serial`.

    >>> seen = []; share(seen.append, 3); sorted(seen)
    [0, 1, 2]
    """

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
