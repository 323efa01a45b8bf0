"""Run the network of a peer on an asyncio loop in a thread of its own.

Training has the caller's thread.

Invariants: a thread that waits here for the network can be woken, by Ctrl-C in the main thread and by
:meth:`Background.wake` from any other; the work in progress is then cancelled.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger("rpel")


class Woken(Exception):  # noqa: N818 (nothing went wrong)
    """The waiting thread was asked to stop."""


class Background:
    """A running loop, and calls into it from the one thread that trains.

    >>> background = Background()
    >>> background.call(asyncio.sleep(0, result=7))
    7
    >>> background.close()
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_noted)
        self._thread = threading.Thread(target=self._run, name="rpel-peer", daemon=True)
        self._woken = threading.Event()
        self._resting, self._lock = False, threading.RLock()  # a signal's handler may wake while it is held
        self._waiting: Future[Any] | None = None
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine over there and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._waiting = future
        if self._woken.is_set():  # woken before there was anything to cancel
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise Woken from None
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waiting = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine over there until it ends or the loop is closed."""
        asyncio.run_coroutine_threadsafe(work, self.loop)

    def sleep(self, seconds: float) -> None:
        """Wait here, unless woken."""
        if self._woken.wait(max(0.0, seconds)):
            raise Woken

    def wake(self) -> None:
        """End what the training thread waits for now, and whatever it will wait for.

        It raises Woken there.
        """
        with self._lock:
            if self._resting:
                return
            self._woken.set()
            if (future := self._waiting) is not None:
                future.cancel()

    def rest(self) -> None:
        """Take a :meth:`wake` back and heed none any more, so that the loop can be closed in order."""
        with self._lock:
            self._resting = True
            self._woken.clear()

    def close(self) -> None:
        """End all that runs over there, then the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_wind_up(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()


def _noted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log in one line what asyncio could not raise anywhere.

    An example is the end of a connection during a timeout.
    """
    error = context.get("exception")
    level = logging.DEBUG if isinstance(error, OSError | AttributeError) else logging.WARNING
    _log.log(level, "the network: %s%s", context["message"], f" ({error!r})" if error is not None else "")


async def _wind_up() -> None:
    """Cancel every other task and wait for its end."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
