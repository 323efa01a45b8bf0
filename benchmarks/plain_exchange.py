"""The rival of a round's exchange: n processes of plain aiohttp over mutual TLS,
each pulling s bodies at once.

Used by reliability.py. Plain aiohttp at its better: a handler that writes pieces of 256 KiB, a session that
reads them as they come into a row, with larger buffers; nothing is checked, stored or limited.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web

from rpel.peer.config.membership import Membership
from rpel.peer.net import tls

PORT = 7444


async def one(config: dict[str, str], number: int, size: int, asked: list[int]) -> None:
    """Serve, wait for a line that says when to begin, pull, print when it ended."""
    folder, net = Path(config["folder"]), config["net"]
    members = Membership.load(folder / "members.toml").members
    home = folder / members[number].id
    own = home / "peer.crt", home / "peer.key"
    body, rows = bytes(size), [memoryview(bytearray(size)) for _ in asked]

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(size)})
        await response.prepare(request)
        for begin in range(0, size, 256 << 10):
            await response.write(body[begin : begin + (256 << 10)])
        await response.write_eof()
        return response

    context = tls.server_context(*own, [member.certificate for member in members])
    await asyncio.get_running_loop().create_server(
        web.Server(serve), f"{net}.{number + 1}", PORT, ssl=context
    )
    print("ready", flush=True)
    start = float(await asyncio.to_thread(sys.stdin.readline))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, read_bufsize=1 << 20
    ) as session:

        async def pull(other: int, row: memoryview) -> int:
            target, got = tls.client_context(*own, members[other].certificate), 0
            async with session.get(f"https://{net}.{other + 1}:{PORT}/", ssl=target) as reply:
                async for piece in reply.content.iter_any():
                    row[got : got + len(piece)] = piece
                    got += len(piece)
            return got

        await asyncio.sleep(start - time.monotonic())
        actual = await asyncio.gather(*(pull(other, row) for other, row in zip(asked, rows, strict=True)))
        assert actual == [size] * len(asked)
        print(time.monotonic(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)  # the others may still be pulling


def measure(folder: Path, net: str, size: int, draws: Sequence[Sequence[int]]) -> float:
    """Seconds from the common start until the last process has its last byte."""
    config = {"folder": str(folder), "net": net}
    processes = []
    for number, asked in enumerate(draws):
        command = [
            sys.executable,
            __file__,
            json.dumps(config),
            str(number),
            str(size),
            json.dumps(list(asked)),
        ]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        ends = [(process.stdin, process.stdout) for process in processes]
        for _, lines in ends:
            assert lines is not None
            assert lines.readline() == "ready\n"
        start = time.monotonic() + 1
        for orders, _ in ends:
            assert orders is not None
            orders.write(f"{start}\n")
            orders.flush()
        actual = [float(lines.readline()) for _, lines in ends if lines is not None]
        return max(actual) - start
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    asyncio.run(one(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
