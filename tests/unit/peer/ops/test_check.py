"""What members are told before a network begins: shared organisations, weak plans, certificates that end."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rpel import certificates
from rpel.peer.config.membership import Member, Membership
from rpel.peer.ops.check import cautions
from rpel.peer.ops.create import draft, stall_proof
from support.commands import rpel

PEMS = [certificates.create(f"peer-{i}")[1] for i in range(4)]


def network(**changes: Any) -> Membership:
    """Four members, one of them possibly hostile, that begin now."""
    members = tuple(Member.of(f"peer-{i}", f"https://peer-{i}.example:7443", PEMS[i]) for i in range(4))
    terms: dict[str, Any] = {"run": "ward-7", "model_header_sha256": "a" * 64, "init_sha256": "b" * 64}
    new = draft(stall_proof(nodes=4, byzantine=1, rounds=50), epoch=datetime.now(UTC).timestamp(), **terms)
    return new.replace(**{"members": members, **changes})


def test_sound_membership_gives_no_cautions() -> None:
    assert list(cautions(network())) == []


def test_members_of_one_organisation_are_named_where_a_membership_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m = network()
    path = tmp_path / "members.toml"
    m.replace(members=tuple(member.replace(organisation="Trust") for member in m.members)).save(path)
    _, err = rpel("network", "members", "--members", str(path), capsys=capsys)
    assert "4 members" in err
    assert "'Trust'" in err
    assert "byzantine 1" in err


def test_weak_plan_is_named_with_its_probability() -> None:
    (caution,) = cautions(network(b_hat=0))
    assert "b_hat 0 has probability 0," in caution
    assert "0.99" in caution


def test_certificates_that_end_before_the_last_round_are_named() -> None:
    late = (datetime.now(UTC) + timedelta(days=824)).timestamp()
    for n in (1, 4):
        (caution,) = cautions(network(epoch=late, rounds=5000, members=network().members[:n]))
        assert f"{n} certificate" in caution
        assert "that of 'peer-" in caution
