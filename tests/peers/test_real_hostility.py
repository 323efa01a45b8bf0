"""Real processes beside b hostile ones, and behind bad wires: n = 12, b = 2, s = 8, b_hat = 2.

As in test_real_processes.py nothing asserts a time.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from fleet import PORT, Fleet, Member, Plan, check_laws, half_step, heard, loopback
from proxy import Wire, Wires


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Wires]]:
    """Ten honest peers, the first two behind wires that can be bad, and two members that are still to turn hostile."""
    net = loopback()
    plan = Plan(
        urls=lambda i: f"https://{net}.{i + (101 if i < 2 else 1)}:{PORT}", listen=lambda i: f"{net}.{i + 1}:{PORT}"
    )
    wires = Wires([Wire((f"{net}.{i + 101}", PORT), (f"{net}.{i + 1}", PORT)) for i in (0, 1)])
    with Fleet(tmp_path_factory.mktemp("besieged"), plan) as fleet, wires:
        fleet.start(*fleet.members[:10])
        fleet.wait_aggregated(times=2)
        yield fleet, wires


def struck(member: Member) -> bool:
    """Has somebody been given what this hostile member has made?"""
    return any(deed["answered"] for deed in member.process.deeds)


@pytest.mark.parametrize("attack", ["silence", "slow", "alie", "gaussian", "nan"])
def test_rounds_aggregate_beside_b_hostile_members(besieged: tuple[Fleet, Wires], attack: str) -> None:
    fleet, wires = besieged
    honest, hostile = fleet.members[:10], fleet.members[10:]
    for wire in wires.wires:
        wire.delay = 0.15  # honest ones are slow, and the hostile fast
    for member, ally in zip(hostile, reversed(hostile), strict=True):
        arguments = ["red-team", "--config", str(member.config), "--attack", attack, "--allies", ally.id, "--json"]
        fleet.start(member, arguments=arguments)
    fleet.wait(lambda: all(struck(member) for member in hostile), f"the first {attack}")
    begin = {member: member.last + 1 for member in honest}
    fleet.wait_aggregated(*honest, times=3)
    fleet.kill(*hostile)
    for wire in wires.wires:
        wire.delay = 0.0
    for member in honest:
        lines = [line for line in member.lines if line["round"] > begin[member]]
        if attack in ("silence", "slow"):
            assert "ok" not in heard(lines, *hostile)
        for line in lines:
            assert [line["results"].get(m.id) for m in hostile].count("ok") <= line["trim"] == 2
        half = half_step(fleet, member)
        assert half is None or np.abs(half).max() < 10, "an attack got through"
    check_laws(fleet, *honest)


def test_damaged_bytes_are_never_taken_for_a_model(besieged: tuple[Fleet, Wires]) -> None:
    fleet, wires = besieged
    honest, behind = fleet.members[:10], fleet.members[:2]
    for wire in wires.wires:
        wire.damage = 500
    wires.cut()
    begin = {member: member.last + 1 for member in honest}
    fleet.wait_round(max(begin.values()) + 4, *honest)
    for wire in wires.wires:
        wire.damage = 0
    for member in honest:
        lines = [line for line in member.lines if line["round"] > begin[member]]
        assert "ok" not in heard(lines, *behind)
    assert all(wire.damaged for wire in wires.wires)
    wires.cut()
    fleet.wait_aggregated(*honest, times=2)
    fleet.wait(lambda: any("ok" in heard(member.lines[-2:], *behind) for member in honest), "healed wires")
    check_laws(fleet, *honest)
