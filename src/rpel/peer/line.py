"""One accepted connection of one member, on which requests come one at a time.

Laws: nothing is parsed before the certificate at the other end is known to be a member's; a request is small; requests
that come before the last one is answered wait in a short queue (aiohttp's), and then in the kernel's.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web

from rpel.peer.identity import leaf_fingerprint

LARGEST_REQUEST = 4 << 10
_QUIET = logging.Logger("rpel.http", logging.CRITICAL + 1)  # a member's bad requests must not fill the log


class Line(web.RequestHandler):
    """One connection of one member: aiohttp's, once the pin is known to be a member's."""

    def __init__(
        self,
        http: web.Server,
        idle: float,
        welcome: Callable[["Line"], bool],
        left: Callable[["Line"], None],
    ) -> None:
        super().__init__(
            http,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=idle,
            logger=_QUIET,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=256,
            max_field_size=256,
            max_headers=16,
            lingering_time=0,
            read_bufsize=LARGEST_REQUEST,
            auto_decompress=False,
        )
        self._welcome, self._left = welcome, left
        self._connection: asyncio.Transport | None = None
        self.pin = ""
        self.sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = cast(asyncio.Transport, transport)
        self.pin = leaf_fingerprint(transport.get_extra_info("ssl_object"))
        if self._welcome(self):
            self._connection.set_write_buffer_limits(high=1, low=0)  # a slow reader must not fill our memory
            super().connection_made(transport)
        else:
            self._connection.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._left(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close at once, whatever is still to be sent."""
        if self._connection is not None:
            self._connection.abort()
