"""After all members were down for more than a round, rounds work again as soon as the members are up."""

from pathlib import Path

import pytest

from support.process_network import Member, Plan, ProcessNetwork

pytestmark = pytest.mark.integration


def test_network_that_starts_late_aggregates_within_two_rounds(tmp_path: Path) -> None:
    with ProcessNetwork(tmp_path, Plan(peers=4, byzantine=1, period=0.8, deadline=0.5, start=-6.0)) as net:

        def empty(member: Member) -> int:
            return sum(not line["received"] for line in member.lines)

        def answered(member: Member) -> bool:
            return any(line["received"] for line in member.lines)

        net.start()
        net.wait(lambda: any(empty(m) > 2 for m in net.members) or all(map(answered, net.members)), "answers")
        assert [empty(member) for member in net.members if empty(member) > 2] == []
