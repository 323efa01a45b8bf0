"""A round's exchange of n = 12 members that pull s = 9 each, as float32 and int8: bytes,
CPU-seconds, memory.

Run `python benchmarks/coded_exchange.py [--parameters 10000000] [--repeats 3]`. All members are in this
process, with real TLS, hashes and signatures; they pull one after the other, nine models at once, so that
rows are there once. What counts is the processor's time of both ends, not the wall's. Codes take turns, and
the least of the repeats counts. Memory is the peak of the process: nine rows, twelve published bodies and one
model, beside rpel itself.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from rpel.peer.core.evidence import of_member, sign
from rpel.peer.core.wire import Layout, digest_of
from rpel.types import Models, WireName
from support.loopback import Loopback, loopback, model

NODES, PULL = 12, 9


async def measure(folder: Path, layout: Layout) -> tuple[int, float, float, int]:
    """Bytes of all bodies, CPU-seconds to code one model and of all pulls,
    and the peak memory of this process."""
    async with loopback(folder, NODES, layout) as net:
        x = model(layout, 1)
        began = time.process_time()
        parts = layout.body(x)
        coding = time.process_time() - began
        actual = bytes.fromhex(digest_of(parts))
        for number, (store, ends) in enumerate(zip(net.stores, net.transports, strict=True)):
            store.put(1, x)
            store.signatures[1] = sign(ends.now.secret, of_member(net.membership, number), 1, actual)
            ends.client.signed = True
        rows = np.empty((PULL, layout.d), layout.dtype)
        began, received = time.process_time(), 0
        for me in range(NODES):
            received += await pulled(net, me, rows)
        return (
            received,
            coding,
            time.process_time() - began,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        )


async def pulled(net: Loopback, me: int, rows: Models) -> int:
    others = [(me + 1 + i) % NODES for i in range(PULL)]
    deadline = asyncio.get_running_loop().time() + 3600
    ends = net.transports[me]
    answers = await asyncio.gather(
        *(ends.pull(other, 1, row, deadline) for other, row in zip(others, rows, strict=True))
    )
    assert all(answer.result == "ok" for answer in answers), answers
    return sum(answer.received for answer in answers)


def child(wire: str, parameters: int) -> list[float]:
    """One measurement in a process of its own, whose peak memory is that of this code."""
    command = [sys.executable, __file__, "--parameters", str(parameters), "--wire", wire]
    return list(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--parameters", type=int, default=10_000_000)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--wire", choices=get_args(WireName), help="measure this one here, and print JSON")
    given = asked.parse_args()
    if given.wire:
        layout = Layout(("w",), ((given.parameters,),), np.dtype("float32"), given.wire)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(measure(Path(folder), layout))))
        return
    turns = [
        {wire: child(wire, given.parameters) for wire in get_args(WireName)} for _ in range(given.repeats)
    ]
    best = {wire: [min(turn[wire][i] for turn in turns) for i in range(4)] for wire in get_args(WireName)}
    print(
        f"{NODES} members pull {PULL} models of {given.parameters:,} parameters each, least of "
        f"{given.repeats}:\n"
    )
    print(
        "| wire | bytes of a round | of float32's | CPU-s to code one | CPU-s of all pulls | of float32's | "
        "memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for wire, (received, coding, seconds, peak) in best.items():
        bytes_share, share = received / best["float32"][0], seconds / best["float32"][2]
        print(
            f"| {wire} | {received:,.0f} | {bytes_share:.4f} | {coding:.3f} | {seconds:.2f} | {share:.2f} | "
            f"{peak / 4 / given.parameters:.1f} models |"
        )


if __name__ == "__main__":
    main()
