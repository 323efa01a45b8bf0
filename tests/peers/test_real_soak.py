"""A peer that runs for long holds no more descriptors, threads or memory than at the beginning."""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from support.process_network import Member, Plan, ProcessNetwork, check_invariants

pytestmark = pytest.mark.integration

ROUNDS, EVERY = 300, 10
"""How many rounds are played, and after how many one peer is killed and started again."""


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    kilobytes: int


def usage(member: Member) -> Usage:
    process = Path("/proc") / str(member.process.pid)
    status = (process / "status").read_text()
    threads, kilobytes = (
        int(re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("Threads", "VmRSS")
    )
    return Usage(len(list((process / "fd").iterdir())), threads, kilobytes)


def soak(net: ProcessNetwork, rounds: int, every: int) -> list[Usage]:
    """Kill one of the others every few rounds, and return what the first peer held each time."""
    first, victims = net.members[0], itertools.cycle(net.members[1:])
    net.start()
    net.wait_aggregated(times=2)
    samples = []
    while first.last < rounds:
        victim = next(victims)
        net.kill(victim)
        net.start(victim)
        net.wait_round(first.last + every, first)
        samples.append(usage(first))
    net.wait_aggregated()
    return samples


@pytest.mark.full
def test_descriptors_threads_and_memory_stay_constant_over_300_rounds(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path, Plan(peers=6, byzantine=1, period=1.0, deadline=0.7)) as net:
        samples = soak(net, ROUNDS, EVERY)
        check_invariants(net)
    begin, end = samples[2:7], samples[-5:]
    assert len(samples) > 20
    # connections to peers that were just killed come and go: some more, but not more and more
    assert max(one.descriptors for one in end) <= max(one.descriptors for one in begin) + 6
    assert max(one.threads for one in end) <= max(one.threads for one in begin) + 1
    assert max(one.kilobytes for one in end) <= 1.05 * max(one.kilobytes for one in begin)
