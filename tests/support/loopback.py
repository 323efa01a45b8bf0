"""Peers on loopback in one event loop, with real TLS: what the transport's tests and benchmarks share."""

import asyncio
import os
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rpel import certificates
from rpel.peer.config.membership import Member, Membership
from rpel.peer.config.settings import listen_address
from rpel.peer.core.serve_policy import ServePolicy
from rpel.peer.core.wire import Layout
from rpel.peer.net import tls
from rpel.peer.net.client import Answer, Client
from rpel.peer.net.intake import Turns
from rpel.peer.net.limits import Limits
from rpel.peer.net.server import Server
from rpel.peer.net.snapshot import Snapshot
from rpel.peer.ops.create import draft, stall_proof
from rpel.peer.state.store import Body
from rpel.types import Models
from support.waiting import PATIENCE

SMALL = Layout(("w",), ((1000,),), np.dtype("float32"))


def flat_layout(d: int) -> Layout:
    return Layout(("w",), ((d,),), np.dtype("float32"))


def model(layout: Layout, seed: int) -> Models:
    return np.random.default_rng(seed).standard_normal(layout.d).astype(layout.dtype)


@dataclass(frozen=True)
class Credentials:
    """A key, a certificate, and where they are."""

    key: Path
    certificate: Path
    pem: str

    @property
    def pin(self) -> str:
        return certificates.fingerprint(ssl.PEM_cert_to_DER_cert(self.pem))


def kept(folder: Path, name: str, secret: bytes, pem: str) -> Credentials:
    """This key and certificate as files."""
    files = Credentials(folder / f"{name}.key", folder / f"{name}.pem", pem)
    tls.write_key(files.key, secret)
    files.certificate.write_text(pem)
    return files


def credentials(folder: Path, name: str, **options: Any) -> Credentials:
    """A new key and its certificate as files."""
    return kept(folder, name, *certificates.create(name, **options))


def membership(members: Iterable[Member]) -> Membership:
    listed = tuple(members)
    plan = stall_proof(max(2, len(listed)), byzantine=0, rounds=10, no_shows=0)
    hashes: dict[str, Any] = dict.fromkeys(("model_header_sha256", "init_sha256"), "0" * 64)
    times: dict[str, Any] = {"epoch": 1.0e9, "period": 10.0, "deadline": 8.0, "linger": 0.0}
    return draft(plan, run="loopback", allow_private=True, **times, **hashes).replace(members=listed)


@dataclass
class MemoryStore:
    """What a served peer has: models by round in memory files, and a record of what was answered."""

    layout: Layout
    ahead: float = 0.0
    policy: ServePolicy = field(default_factory=ServePolicy)
    files: dict[int, int] = field(default_factory=dict)
    answered: list[tuple[int, int, int]] = field(default_factory=list)
    signatures: dict[int, bytes] = field(default_factory=dict)
    told: dict[int, dict[str, object]] = field(default_factory=dict)
    now: Snapshot = field(init=False)

    def put(self, round: int, x: Models) -> None:
        file = os.memfd_create(f"round {round}")
        for part in (self.layout if round else self.layout.exact).body(x):
            view = memoryview(part)
            while view:
                view = view[os.write(file, view) :]
        self.files[round] = file
        if round:
            self.policy.publish(round)

    def open_body(self, round: int) -> Body | None:
        return (
            Body(os.dup(self.files[round]), 0, (self.layout if round else self.layout.exact).size)
            if round in self.files
            else None
        )

    def signature_of(self, round: int) -> bytes | None:
        return self.signatures.get(round)

    def seen(self, now: Snapshot, round: int) -> dict[str, object] | None:
        return self.told.get(round)

    def position(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead

    def status(self) -> dict[str, object]:
        return {"round": self.policy.passed}

    def served(self, now: Snapshot, member: int, code: int, sent: int) -> None:
        self.answered.append((member, code, sent))

    def codes(self) -> Counter[int]:
        return Counter(code for _, code, _ in self.answered)

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)


class Ends:
    """Both ends of one peer's network, without the peer."""

    def __init__(
        self,
        membership: Membership,
        certificate: Path,
        key: Path,
        listen: str,
        layout: Layout,
        store: MemoryStore,
        limits: Limits | None = None,
    ) -> None:
        self._store, self._listen = store, listen_address(listen)
        self.rotate(membership, certificate, key)
        self.server = Server(store, limits)
        self.client = Client(layout, store.position)

    @property
    def now(self) -> Snapshot:
        return self._store.now

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    def announce(self) -> None:
        self.server.announce()

    async def start(self) -> None:
        await self.server.start(*self._listen)

    async def stop(self) -> None:
        await self.server.stop()
        await self.client.close()

    def rotate(self, membership: Membership, certificate: Path, key: Path) -> None:
        """Another membership is in force."""
        names = [member.id for member in membership.members]
        me = names.index(certificate.stem) if certificate.stem in names else 0
        self._store.now = Snapshot(membership, me, certificate, key)
        if hasattr(self, "server"):
            self.server.membership_changed()

    async def pull(
        self,
        member: int,
        round: int,
        row: Models,
        deadline: float,
        turns: Turns | None = None,
    ) -> Answer:
        return await self.client.member(self.now, member).fetch(round, row, deadline, turns)

    async def clocks(self, within: float = 3.0) -> list[float]:
        return list((await self.client.clocks(self.now, asyncio.get_running_loop().time() + within)).values())

    async def status(self, member: int, deadline: float) -> dict[str, Any] | Answer:
        return await self.client.member(self.now, member).status(deadline)


@dataclass
class Loopback:
    """n peers, all serving; ``transports[i]`` asks and serves as member i."""

    membership: Membership
    credentials: list[Credentials]
    stores: list[MemoryStore]
    transports: list[Ends]
    layout: Layout

    async def pull(self, asking: int, member: int, round: int, within: float = 20.0) -> tuple[str, Models]:
        row = np.zeros(self.layout.d, self.layout.dtype)
        deadline = asyncio.get_running_loop().time() + within
        answer = await self.transports[asking].pull(member, round, row, deadline)
        return answer.result, row

    def move(self, urls: dict[int, str]) -> None:
        """Give members other addresses, in everybody's file."""
        members = list(self.membership.members)
        for member, url in urls.items():
            members[member] = members[member].replace(url=url)
        self.membership = membership(members)
        for transport, own in zip(self.transports, self.credentials, strict=True):
            transport.rotate(self.membership, own.certificate, own.key)


@asynccontextmanager
async def loopback(
    folder: Path, n: int = 3, layout: Layout = SMALL, limits: Limits | None = None
) -> AsyncIterator[Loopback]:
    """Start n peers on free ports, tell everybody where they are, and stop them at the end."""
    before = asyncio.all_tasks()
    held = [credentials(folder, f"peer-{i}") for i in range(n)]
    unplaced = membership(Member.of(f"peer-{i}", "https://127.0.0.1:1", held[i].pem) for i in range(n))
    stores = [MemoryStore(layout) for _ in range(n)]
    transports = [
        Ends(unplaced, own.certificate, own.key, "127.0.0.1:0", layout, store, limits)
        for own, store in zip(held, stores, strict=True)
    ]
    net = Loopback(unplaced, held, stores, transports, layout)
    for transport in transports:
        transport.client.signed = False  # the wire alone: test_evidence has the signatures
    try:
        for transport in transports:
            await transport.start()
        net.move({i: f"https://127.0.0.1:{transport.port}" for i, transport in enumerate(transports)})
        yield net
    finally:
        for transport in transports:
            await transport.stop()
        for store in stores:
            store.close()
        await connections_closed(before)


async def connections_closed(before: set["asyncio.Task[Any]"]) -> None:
    """Wait until all tasks that were not there before have ended."""
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, late = await asyncio.wait(left, timeout=PATIENCE)
        assert not late, late


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def hostile(net: Loopback, member: int, script: Script) -> AsyncIterator[list[bytes]]:
    """A member whose server does what the script says after each request; yields the requests that came."""
    own = net.credentials[member]
    context = tls.server_context(own.certificate, own.key, [p.pem for p in net.credentials])
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    requests.append(await reader.readuntil(b"\r\n\r\n"))
                    await script(reader, writer)
        finally:  # also when the loop ends
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    net.move({member: f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    try:
        yield requests
    finally:
        server.close()


def head(layout: Layout, round: int, **changed: Any) -> bytes:
    """The head of a right reply, with headers changed, added (any value) or left out (None)."""
    fields: dict[str, Any] = {
        "Content-Length": layout.size,
        "Content-Type": "application/octet-stream",
        "RPEL-Round": round,
        "RPEL-Position": "0.0",
    }
    fields.update({name.replace("_", "-"): value for name, value in changed.items()})
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()


async def told(net: Loopback, context: ssl.SSLContext | None, request: bytes) -> bytes:
    """What peer 1 answers to these bytes, sent with this TLS (None: without)."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", net.transports[1].port, ssl=context, server_hostname="" if context else None
        )
        writer.write(request)
        try:
            return await reader.read(1 << 20)
        finally:
            writer.transport.abort()
    return b""


def asking(net: Loopback, own: Credentials) -> ssl.SSLContext:
    return tls.client_context(own.certificate, own.key, net.credentials[1].pem)


def wanted(net: Loopback, path: str = "/v1/model/1", method: str = "GET", more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nRPEL-Membership: {net.membership.hash}\r\n{more}\r\n"
    ).encode()
