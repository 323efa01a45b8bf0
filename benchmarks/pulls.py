"""Seconds to pull one model over mutual TLS: rpel's transport against plain aiohttp moving the same bytes,
in one run.

Run `python benchmarks/pulls.py [--quick]`. The serving process has both servers; here both clients take
turns. Plain aiohttp is taken at its better: a handler that writes pieces of 256 KiB, a session that reads
them as they come into a row, with larger buffers; nothing is checked.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
from aiohttp import web

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from rpel.peer.config.membership import Member, Membership
from rpel.peer.core.serve_policy import ServePolicy
from rpel.peer.net import tls
from rpel.peer.net.client import Client
from rpel.peer.net.snapshot import Snapshot
from support.loopback import Credentials, Ends, MemoryStore, credentials, flat_layout, membership, model

SIZES = {"MNIST": 176_050, "10 M": 10_000_000}


def held(folder: Path) -> list[Credentials]:
    """Server's and client's key and certificate, as the parent made them."""
    names = ("server", "client")
    return [
        Credentials(folder / f"{n}.key", folder / f"{n}.pem", (folder / f"{n}.pem").read_text())
        for n in names
    ]


def members(folder: Path, port: int) -> Membership:
    server, client = held(folder)
    return membership(
        [
            Member.of("server", f"https://127.0.0.1:{port}", server.pem),
            Member.of("client", "https://x:1", client.pem),
        ]
    )


async def serve(folder: Path, d: int) -> None:
    """Both servers in one process; prints their ports, ends with its standard input."""
    own, client = held(folder)
    layout, x = flat_layout(d), model(flat_layout(d), 1)
    store = MemoryStore(layout, policy=ServePolicy(bodies=10**9))
    store.put(1, x)
    ours = Ends(members(folder, 1), own.certificate, own.key, "127.0.0.1:0", layout, store)
    await ours.start()
    ours.rotate(members(folder, ours.port), own.certificate, own.key)
    body = layout.header + x.tobytes()

    async def plain(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        for begin in range(0, len(body), 256 << 10):
            await response.write(body[begin : begin + (256 << 10)])
        await response.write_eof()
        return response

    context = tls.server_context(own.certificate, own.key, [client.pem])
    theirs = await asyncio.get_running_loop().create_server(web.Server(plain), "127.0.0.1", 0, ssl=context)
    print(ours.port, theirs.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def measure(folder: Path, d: int, ports: tuple[int, int], repeats: int) -> tuple[float, float]:
    """Median seconds of our pull and of aiohttp's, taking turns."""
    loop, layout = asyncio.get_running_loop(), flat_layout(d)
    server, own = held(folder)
    row = np.zeros(d, np.float32)
    client = Client(layout, loop.time)
    member = client.member(Snapshot(members(folder, ports[0]), 1, own.certificate, own.key), 0)
    context = tls.client_context(own.certificate, own.key, server.pem)
    mine, theirs = [], []
    target = memoryview(bytearray(layout.size))
    async with aiohttp.ClientSession(auto_decompress=False, read_bufsize=1 << 20) as session:
        for _ in range(repeats):
            begin = loop.time()
            answer = await member.fetch(1, row, begin + 60)
            mine.append(loop.time() - begin)
            assert answer.result == "ok", answer
            begin = loop.time()
            async with session.get(f"https://127.0.0.1:{ports[1]}/", ssl=context) as reply:
                got = 0
                async for piece in reply.content.iter_any():
                    target[got : got + len(piece)] = piece
                    got += len(piece)
                assert got == layout.size
            theirs.append(loop.time() - begin)
            await asyncio.sleep(0.03)  # below the rate at which a member is held up
    await client.close()
    return median(mine[1:]), median(theirs[1:])


def main() -> None:
    repeats = 8 if "--quick" in sys.argv else 30
    for name, d in SIZES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for who in ("server", "client"):
                credentials(folder, who)
            command = [sys.executable, __file__, "serve", temporary, str(d)]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as serving:
                assert serving.stdout is not None
                ours, theirs = map(int, serving.stdout.readline().split())
                mine, plain = asyncio.run(measure(folder, d, (ours, theirs), repeats))
                serving.communicate("")
        rate = 4 * d / mine / 1e6
        print(
            f"{name:6} {4 * d / 1e6:6.2f} MB  ours {mine * 1e3:7.2f} ms ({rate:.0f} MB/s)  "
            f"plain aiohttp {plain * 1e3:7.2f} ms  ratio {mine / plain:.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
