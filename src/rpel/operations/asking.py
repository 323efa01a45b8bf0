"""Asking the members of a network with one's own key, without taking part: what watching and checking share."""

import time
from dataclasses import dataclass

from rpel.config.membership import Membership
from rpel.config.peer import Config
from rpel.peer.client import Client
from rpel.peer.clock import RoundClock
from rpel.peer.identity import News, Standing, take
from rpel.peer.store import initial_model
from rpel.peer.wire import Signature
from rpel.types import Models


@dataclass(frozen=True)
class Asking:
    """A member's place in the network, its clock, and the client that asks the others in its name."""

    standing: Standing
    signature: Signature
    initial: Models
    clock: RoundClock
    client: Client

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()


def asking(config: Config) -> Asking:
    """Everything that a peer.toml names, read and checked; ValueError unless its key is a member's."""
    written = Membership.load(config.members)
    clock = RoundClock(written.epoch, written.period, wall=time.time, ticks=time.monotonic)
    standing = take(config, News(config).due(written, clock.round()) or written)
    signature, initial = initial_model(config, standing.membership)
    client = Client(standing.membership, standing.certificate, standing.key, signature, clock.position)
    return Asking(standing, signature, initial, clock, client)
