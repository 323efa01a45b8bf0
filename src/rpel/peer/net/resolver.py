"""Find where members are: look names up and race their addresses.

A slow name server holds up only the names that it serves.

Invariants: a literal address is never looked up. For each host at most one look-up is under way, in a thread
of its own, and all together no more than ``most``: a member's name that never resolves takes one of them, so
that with b hostile members and ``most`` above b the others' names are always looked up. A caller that waits
stops at its own deadline; the look-up continues, and the next caller is given its result. Addresses are tried
a quarter of a second apart, of both families in turn, and the first that answers is taken (RFC 8305).
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from aiohappyeyeballs import start_connection

from rpel.peer.config.membership import is_public
from rpel.peer.net.http import Socket

_APART = 0.25  # seconds between two attempts to connect
_MOST_ADDRESSES = 8  # of one host: whoever announces more is not believed

Address = IPv4Address | IPv6Address
Lookup = Callable[..., Sequence[tuple[Any, ...]]]


class Resolver:
    """The addresses of hosts."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup, self._most = lookup, 0
        self._under_way: dict[str, asyncio.Future[list[Address]]] = {}
        self._waiting: list[str] = []

    @property
    def under_way(self) -> int:
        """Look-ups whose threads have not ended."""
        return len(self._under_way) - len(self._waiting)

    async def addresses(self, host: str, most: int, private: bool = True) -> list[Address]:
        """Return a host's addresses in the order in which to try them; OSError if none is known and allowed.

        ``most`` look-ups at a time; ``private``: whether addresses that are not reached from everywhere may
        be used (RFC 1918, loopback, …).
        """
        with suppress(ValueError):
            return _allowed(host, [ip_address(host)], private)
        self._most = most
        future = self._under_way.get(host) or self._begin(host)
        return _allowed(host, await asyncio.shield(future), private)

    def _begin(self, host: str) -> asyncio.Future[list[Address]]:
        future = self._under_way[host] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_looked_at)
        self._waiting.append(host)
        self._next()
        return future

    def _next(self) -> None:
        """Begin the look-ups for which there is room."""
        while self._waiting and self.under_way < self._most:
            host = self._waiting.pop(0)
            future = self._under_way[host]
            work = (host, future, asyncio.get_running_loop())
            threading.Thread(target=self._look_up, args=work, name="rpel-resolver", daemon=True).start()

    def _look_up(
        self, host: str, future: asyncio.Future[list[Address]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Look a host up in a thread of its own.

        Nothing can end that thread before the system's resolver gives up.
        """
        answer: list[Address] | Exception
        try:
            rows = self._lookup(host, None, type=socket.SOCK_STREAM)
            texts = dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows)
            answer = [ip_address(text) for text in texts][:_MOST_ADDRESSES]
        except Exception as error:  # socket.gaierror, UnicodeError of a name that is none
            answer = OSError(f"{host} cannot be looked up: {error}")
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(self._ended, host, future, answer)

    def _ended(
        self, host: str, future: asyncio.Future[list[Address]], answer: list[Address] | Exception
    ) -> None:
        del self._under_way[host]
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        self._next()


def _allowed(host: str, addresses: list[Address], private: bool) -> list[Address]:
    usable = [address for address in addresses if private or is_public(address)]
    if addresses and not usable:
        raise OSError(
            f"{host} is at {addresses[0]}, a private address: allow_private in members.toml would allow it"
        )
    return usable


def _looked_at(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a look-up that no caller waits for any more, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


async def connect(addresses: Sequence[Address], port: int, kept: set[Socket]) -> socket.socket:
    """Return a socket connected to the first of the addresses that answers.

    When cancelled, it leaves no socket open.
    """
    infos = [
        (
            socket.AF_INET if address.version == 4 else socket.AF_INET6,
            socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (str(address), port),
        )
        for address in addresses
    ]  # fmt: skip
    return await start_connection(
        infos,
        happy_eyeballs_delay=_APART,
        interleave=1,
        socket_factory=lambda info: Socket(*info[:3], kept=kept),
    )
