"""What a flood costs the others: p50 and p99 of honest members' pulls, with and without it, in one run.

Run `python benchmarks/flood.py [--quick]`. One process serves MNIST-sized models, a new round every 200 ms;
one is a hostile member that sends 1,000 requests a second whatever the answers, with 300 stalled handshakes
from 127.0.0.66; here four honest members pull in turn. Quiet and flooded stretches alternate,
so that a busy machine counts for both.
Promised: p99 rises by less than 20 % or 50 ms.
"""

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from rpel.peer.config.membership import Member, Membership
from rpel.peer.net import tls
from rpel.peer.net.client import Client
from rpel.peer.net.snapshot import Snapshot
from support.flood import Flood, stall
from support.loopback import Credentials, Ends, MemoryStore, credentials, flat_layout, membership, model

LAYOUT = flat_layout(176_050)
NAMES = ("server", "hostile", "a", "b", "c", "d")
PERIOD = 0.2


def held(folder: Path, name: str) -> Credentials:
    return Credentials(folder / f"{name}.key", folder / f"{name}.pem", (folder / f"{name}.pem").read_text())


def members(folder: Path, port: int) -> Membership:
    return membership(Member.of(name, f"https://127.0.0.1:{port}", held(folder, name).pem) for name in NAMES)


async def serve(folder: Path) -> None:
    """Publish a round every 200 ms; prints the port, ends with its standard input."""
    own, store, x = held(folder, "server"), MemoryStore(LAYOUT), model(LAYOUT, 1)
    transport = Ends(members(folder, 1), own.certificate, own.key, "127.0.0.1:0", LAYOUT, store)
    await transport.start()
    transport.rotate(members(folder, transport.port), own.certificate, own.key)
    print(transport.port, flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    store.put(1, x)
    file, round = store.files[1], 1
    while not ended.done():
        await asyncio.sleep(PERIOD)
        round += 1
        store.files[round] = file
        for gone in store.policy.publish(round):
            del store.files[gone]
        transport.announce()


async def attack(folder: Path, port: int) -> None:
    """The flood and the stalled handshakes, until the standard input ends;
    prints how many requests were sent."""
    own, everybody = held(folder, "hostile"), members(folder, port)
    context = tls.client_context(own.certificate, own.key, everybody.members[0].certificate)
    begin, round = asyncio.get_running_loop().time(), int(sys.argv[4])

    def request() -> bytes:
        newest = round + int((asyncio.get_running_loop().time() - begin) / PERIOD)
        top = f"GET /v1/model/{newest} HTTP/1.1\r\nHost: x\r\nRPEL-Membership: {everybody.hash}\r\n\r\n"
        return top.encode()

    logging.disable()  # asyncio complains of connections that the server closed
    flood = Flood(port, context, request)
    tasks = [asyncio.create_task(flood.run()), asyncio.create_task(stall(port))]
    print("attacking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(flood.sent, flush=True)


class Victims:
    """Honest members that pull the newest round in turn."""

    def __init__(self, folder: Path, port: int) -> None:
        everybody = members(folder, port)
        self._row = np.zeros(LAYOUT.d, np.float32)
        self._members = [
            Client(LAYOUT, lambda: 0.0).member(
                Snapshot(everybody, number, held(folder, name).certificate, held(folder, name).key), 0
            )
            for number, name in enumerate(NAMES[2:], 2)
        ]
        self.newest = 0

    async def pulls(self, count: int) -> list[float]:
        """Seconds of each pull of a round that is published."""
        loop, values = asyncio.get_running_loop(), []
        for i in range(count):
            server = self._members[i % len(self._members)]
            status = await server.status(loop.time() + 10)
            assert isinstance(status, dict), status
            self.newest = int(status["round"])
            begin = loop.time()
            answer = await server.fetch(self.newest, self._row, begin + 10)
            values.append(loop.time() - begin)
            assert answer.result == "ok", answer
            await asyncio.sleep(0.03)
        return values


@contextmanager
def running(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process of this file, and the first line it prints; it ends when its standard input does."""
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.stdin.close()


async def measure(folder: Path, port: int, stretches: int, each: int) -> tuple[list[float], list[float], int]:
    """Seconds of pulls without and with the flood, and the requests that the flood sent."""
    victims = Victims(folder, port)
    await victims.pulls(8)
    quiet: list[float] = []
    flooded: list[float] = []
    sent = 0
    for _ in range(stretches):
        quiet += await victims.pulls(each)
        with running("attack", folder, port, victims.newest) as (process, _):
            await victims.pulls(8)
            flooded += await victims.pulls(each)
            sent += int(process.communicate("")[0])
    return quiet, flooded, sent


def main() -> None:
    stretches, each = (1, 60) if "--quick" in sys.argv else (4, 150)
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            credentials(Path(folder), name)
        with running("serve", folder) as (_, port):
            quiet, flooded, sent = asyncio.run(measure(Path(folder), int(port), stretches, each))
    for q in (50, 99):
        before, after = (1e3 * float(np.percentile(seconds, q)) for seconds in (quiet, flooded))
        rise = f"{after - before:+.2f} ms  ratio {after / before:.2f}"
        print(f"p{q}: quiet {before:6.2f} ms  flooded {after:6.2f} ms  {rise}")
    print(f"{len(quiet)} and {len(flooded)} pulls, all answered; the flood sent {sent} requests")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2])))
    elif sys.argv[1:2] == ["attack"]:
        asyncio.run(attack(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
