"""A member that pulls every round from everybody, twice, and remembers the hash of what it was given.

It has a member's key and serves nothing, so the others see one more silent member.
"""

import asyncio
import threading
import time
from collections import defaultdict
from typing import Self

import numpy as np

from rpel.peer.core.wire import digest
from rpel.peer.net.client import Client
from rpel.peer.net.snapshot import Snapshot
from support.process_network import Member, ProcessNetwork


class Observer:
    """Pulls in a thread of its own while it is open;
    ``seen[member number, round]`` are the hashes that came."""

    def __init__(self, net: ProcessNetwork, member: Member) -> None:
        self._net, self._own = net, member
        self.seen: dict[tuple[int, int], set[str]] = defaultdict(set)
        self.pulled: dict[tuple[int, int], int] = defaultdict(int)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._watch(),), daemon=True
        )
        self._stop = asyncio.Event()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def looked_twice(self) -> int:
        """How many half-steps were pulled more than once."""
        return sum(count > 1 for count in list(self.pulled.values()))

    def caught(self, member: Member) -> bool:
        """Has this member served two versions of a round?"""
        return any(
            number == member.number and len(hashes) > 1 for (number, _), hashes in list(self.seen.items())
        )

    def _position(self) -> float:
        return time.time() - self._net.membership.epoch

    async def _watch(self) -> None:
        key = self._own.folder / "peer.key"
        certificate = self._own.folder / "peer.crt"
        self._now = Snapshot(self._net.membership, self._own.number, certificate, key)
        client = Client(self._net.layout, self._position)
        client.signed = False  # it looks at what is served, also where no peer would believe it
        others = [member.number for member in self._net.members if member is not self._own]
        watching = [asyncio.create_task(self._follow(client, number)) for number in others]
        await self._stop.wait()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await client.close()

    async def _follow(self, client: Client, number: int) -> None:
        """Each round in its own time and once more in the next one's, so that a crash in between is seen."""
        period = self._net.membership.period
        row = np.empty(self._net.layout.d, self._net.layout.dtype)
        while True:
            now = int(self._position() // period) + 1
            end = asyncio.get_running_loop().time() + now * period - self._position()
            for round in (now - 1, now):
                if round < 1:
                    continue
                answer = await client.member(self._now, number).fetch(round, row, end)
                if answer.result == "ok":
                    self.seen[number, round].add(digest(self._net.layout, row))
                    self.pulled[number, round] += 1
            await asyncio.sleep(max(0.0, now * period - self._position()))
