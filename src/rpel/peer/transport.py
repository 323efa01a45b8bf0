"""The network as a peer sees it: what :mod:`rpel.peer.node` needs of it, and the real one, HTTPS on both ends."""

import asyncio
from pathlib import Path
from typing import Any, Protocol

from rpel.config.membership import Membership
from rpel.config.reading import listen_address
from rpel.peer.client import Answer, Client
from rpel.peer.identity import server_context
from rpel.peer.limits import Limits
from rpel.peer.server import Server, Service
from rpel.peer.wire import Signature
from rpel.types import Models

__all__ = ["Answer", "Client", "HttpsTransport", "Limits", "Service", "Transport"]


class Transport(Protocol):
    """Serving and asking. All of it runs in one event loop's thread."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def pull(self, member: int, round: int, row: Models, deadline: float) -> Answer:
        """Ask a member for its half-step of a round, into row (d,), until a deadline (the loop's time)."""

    async def clocks(self) -> list[float]:
        """How far the clocks of the members that answer are ahead of this one."""

    def announce(self) -> None:
        """The desk has changed: a round was published or passed over."""

    def rotate(self, membership: Membership, certificate: Path, key: Path) -> None:
        """From now on this membership and certificate count."""


class HttpsTransport:
    """A peer's two ends, with one certificate. A missing or unfit key or certificate: ValueError, nothing is opened."""

    def __init__(
        self,
        membership: Membership,
        certificate: Path,
        key: Path,
        listen: str,
        signature: Signature,
        service: Service,
        limits: Limits | None = None,
        clock_timeout: float = 3.0,
    ) -> None:
        context = server_context(certificate, key, (member.certificate for member in membership.members))
        self._listen, self._clock_timeout = listen_address(listen), clock_timeout
        self.server = Server(service, membership, context, limits)
        self.client = Client(membership, certificate, key, signature, service.position)

    @property
    def port(self) -> int:
        """Where this peer listens, once it does."""
        return self.server.addresses[0][1]

    async def start(self) -> None:
        """Listen."""
        await self.server.start(*self._listen)

    async def stop(self) -> None:
        """Close everything."""
        await self.server.stop()
        await self.client.close()

    async def pull(self, member: int, round: int, row: Models, deadline: float) -> Answer:
        return await self.client.pull(member, round, row, deadline)

    async def clocks(self) -> list[float]:
        return await self.client.clocks(asyncio.get_running_loop().time() + self._clock_timeout)

    async def status(self, member: int, deadline: float) -> dict[str, Any] | Answer:
        """What a member says of itself; an Answer if it does not."""
        return await self.client.status(member, deadline)

    def announce(self) -> None:
        self.server.announce()

    def rotate(self, membership: Membership, certificate: Path, key: Path) -> None:
        context = server_context(certificate, key, (member.certificate for member in membership.members))
        self.server.rotate(membership, context)
        self.client.rotate(membership, certificate, key)
