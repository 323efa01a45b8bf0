"""Real processes that stop or lose each other, each in a network namespace: n = 12, b = 2, s = 9, b_hat = 2.

As in test_real_processes.py nothing asserts a time. After every fault all aggregate again, by themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from support import namespaces
from support.namespaces import Namespaces
from support.process_network import Member, Plan, ProcessNetwork, check_invariants, heard

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessNetwork, Namespaces]]:
    """Twelve running peers, each in a network namespace of its own."""
    if why := namespaces.possible():
        pytest.skip(why)
    network = Namespaces(12)
    try:
        network.make()
        plan = Plan(urls=namespaces.url, namespace=network.namespace)
        with ProcessNetwork(tmp_path_factory.mktemp("apart"), plan) as net:
            net.start()
            net.wait_aggregated(times=2)
            yield net, network
    finally:
        network.remove()


def during(
    net: ProcessNetwork,
    fault: AbstractContextManager[None],
    rounds: int,
    until: Callable[[], bool] = lambda: True,
) -> dict[Member, list[dict[str, Any]]]:
    """The log lines of rounds that began and ended under the fault,
    which lasts so many rounds and ``until``."""
    with fault:
        begin = {member: member.last + 2 for member in net.members}  # these may have begun before it
        net.wait(
            lambda: all(m.last > begin[m] + rounds for m in net.members) and until(), "the fault's rounds"
        )
        return {m: [line for line in m.lines if line["round"] > begin[m]] for m in net.members}


def recovered(net: ProcessNetwork) -> None:
    net.wait_aggregated(times=2)
    check_invariants(net)


def test_peer_stopped_for_three_rounds_catches_up(apart: tuple[ProcessNetwork, Namespaces]) -> None:
    net, _ = apart
    peer, others = net.members[0], net.members[1:]
    before = len(peer.lines)
    with net.stopped(peer):
        net.wait_round(peer.last + 5, *others)
    recovered(net)
    assert "caught_up" in {line["outcome"] for line in peer.lines[before:]}


def test_network_cut_in_halves_goes_on_in_each_and_joins_again(
    apart: tuple[ProcessNetwork, Namespaces],
) -> None:
    net, network = apart
    left, right = net.members[:6], net.members[6:]
    for member, lines in during(net, network.split(), rounds=3).items():
        far = right if member in left else left
        assert "ok" not in heard(lines, *far), "the cut did not cut"
    recovered(net)
    net.wait_aggregated()
    assert any("ok" in heard(member.lines[-3:], *right) for member in left)


def test_peer_cut_off_freezes_and_catches_up(apart: tuple[ProcessNetwork, Namespaces]) -> None:
    net, network = apart
    alone, others = net.members[3], [*net.members[:3], *net.members[4:]]
    seen = len(alone.lines)
    found = during(net, network.isolated(3), rounds=3, until=lambda: bool(alone.lines[-1]["frozen"]))
    assert {line["outcome"] for line in found[alone]} == {"local_only"}
    for member in others:
        assert "ok" not in heard(found[member], alone)
    recovered(net)
    assert "caught_up" in {line["outcome"] for line in alone.lines[seen:]}


@pytest.mark.full
def test_link_that_carries_one_way_only_harms_nobody(apart: tuple[ProcessNetwork, Namespaces]) -> None:
    net, network = apart
    mute, deaf = net.members[0], net.members[6:]
    found = during(net, network.one_way(0, [member.number for member in deaf]), rounds=4)
    assert "ok" not in heard(found[mute], *deaf), "the link carries both ways"
    for member in deaf:
        assert "ok" not in heard(found[member], mute)
    recovered(net)
