"""How long many real peers on one machine take to be ready, in seconds and in CPU-seconds each.

Run `python benchmarks/many_peers.py [--peers 40]`. Keys and files are made first; then all peers are started
as `rpel network demo` starts its own, forked from one warmed process,
and asked until each says that it is ready.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.ops.demo import Demonstration, write_network
from rpel.peer.ops.status import Observer, look
from rpel.processes import Children, Stop
from rpel.types import ROBUST_RULE

_LEAD = 3600.0  # round 1 is far away: only the start is measured


def cpu_seconds(pid: int) -> float:
    """What a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(children: Children, paths: list[Path]) -> tuple[float, list[float]]:
    """Seconds until all these peers are ready, and the CPU-seconds that each has used by then."""
    observer = Observer.of(Config.load(paths[0]))
    began = time.monotonic()
    for path in paths:
        children.start(path.parent.name, ["peer", "run", "--config", str(path), "--json"], path.parent)
    with asyncio.Runner() as runner:
        try:
            while not all(member.ready for member in runner.run(look(observer, within=5.0))):
                children.check()
                time.sleep(1.0)
        finally:
            runner.run(observer.close())
    return time.monotonic() - began, [cpu_seconds(child.pid) for child in children.all]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--peers", type=int, default=40)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder, Stop() as stop:
        paths = write_network(
            Demonstration(peers=given.peers, byzantine=0), ROBUST_RULE, Path(folder) / "net", 60.0
        )
        members = Config.load(paths[0]).members
        Membership.load(members).replace(epoch=time.time() + _LEAD).save(members)
        for count in (1, given.peers):  # the first one alone: it compiles, and the starter is warm then
            with Children(stop) as children:
                if count == 1:
                    children.start("alone", ["peer", "run", "--config", str(paths[0])], paths[0].parent)
                    time.sleep(15.0)
                    continue
                seconds, used = start(children, paths)
        load = os.getloadavg()[0]
    print(
        f"{given.peers} peers ready after {seconds:.1f} s (load {load:.1f}, {os.cpu_count()} cores); "
        f"CPU-seconds each: {sum(used) / len(used):.2f} on average, {max(used):.2f} at most, {sum(used):.0f} "
        "in all"
    )


if __name__ == "__main__":
    main()
