"""Real processes beside b hostile ones, and behind bad proxies: n = 12, b = 2, s = 9, b_hat = 2.

As in test_real_processes.py nothing asserts a time.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from support.process_network import (
    PORT,
    Member,
    Plan,
    ProcessNetwork,
    check_invariants,
    half_step,
    heard,
    loopback,
)
from support.proxy import Proxies, Proxy

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def besieged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ProcessNetwork, Proxies]]:
    """Ten honest peers, the first two behind proxies that can be bad, and two members still to turn hostile;
    one such network for each number asked for."""
    address = loopback()
    plan = Plan(
        urls=lambda i: f"https://{address}.{i + (101 if i < 2 else 1)}:{PORT}",
        listen=lambda i: f"{address}.{i + 1}:{PORT}",
    )
    proxies = Proxies([Proxy((f"{address}.{i + 101}", PORT), (f"{address}.{i + 1}", PORT)) for i in (0, 1)])
    with ProcessNetwork(tmp_path_factory.mktemp("besieged"), plan) as net, proxies:
        net.start(*net.members[:10])
        net.wait_aggregated(times=2)
        yield net, proxies


def struck(member: Member) -> bool:
    """Has somebody been given what this hostile member has made?"""
    return any(deed["answered"] for deed in member.process.deeds)


ATTACKS = [
    *(pytest.param(1, attack, marks=pytest.mark.full) for attack in ("silence", "slow", "nan")),
    (1, "alie"),
    pytest.param(1, "gaussian", marks=pytest.mark.full),
    pytest.param(1, "equivocate", marks=pytest.mark.full),  # the last: it is excluded for good
]


@pytest.mark.parametrize(("besieged", "attack"), ATTACKS, indirect=["besieged"])
def test_rounds_aggregate_beside_b_hostile_members(
    besieged: tuple[ProcessNetwork, Proxies], attack: str
) -> None:
    net, proxies = besieged
    honest, hostile = net.members[:10], net.members[10:]
    for proxy in proxies.proxies:
        proxy.delay = 0.15  # honest ones are slow, and the hostile fast
    for member, ally in zip(hostile, reversed(hostile), strict=True):
        drill = ["network", "drill", "--attack", attack, "--allies", ally.id, "--json"]
        arguments = [*drill, "--config", str(member.config)]
        net.start(member, arguments=arguments)
    net.wait(lambda: all(struck(member) for member in hostile), f"the first {attack}")
    begin = {member: member.last + 1 for member in honest}
    net.wait_aggregated(*honest, times=3)
    net.kill(*hostile)
    for proxy in proxies.proxies:
        proxy.delay = 0.0
    for member in honest:
        lines = [line for line in member.lines if line["round"] > begin[member]]
        if attack in ("silence", "slow"):
            assert "ok" not in heard(lines, *hostile)
        for line in lines:
            assert [line["results"].get(m.id) for m in hostile].count("ok") <= line["trim"] == 2
    halves = [half for member in honest if (half := half_step(net, member)) is not None]
    assert halves, "no honest member served a model"
    assert np.abs(halves).max() < 10, "an attack got through"
    net.wait_aggregated(times=2)
    check_invariants(net, *honest)


@pytest.mark.parametrize("besieged", [1], indirect=True)
def test_damaged_bytes_are_never_taken_for_a_model(besieged: tuple[ProcessNetwork, Proxies]) -> None:
    net, proxies = besieged
    honest, behind = net.members[:10], net.members[:2]
    for proxy in proxies.proxies:
        proxy.damage = 500
    proxies.cut()
    begin = {member: member.last + 1 for member in honest}
    net.wait_round(max(begin.values()) + 4, *honest)
    for proxy in proxies.proxies:
        proxy.damage = 0
    for member in honest:
        lines = [line for line in member.lines if line["round"] > begin[member]]
        assert "ok" not in heard(lines, *behind)
    assert all(proxy.damaged for proxy in proxies.proxies)
    proxies.cut()
    net.wait_aggregated(*honest, times=2)
    net.wait(lambda: any("ok" in heard(member.lines[-2:], *behind) for member in honest), "healed proxies")
    check_invariants(net, *honest)
