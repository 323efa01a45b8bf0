"""members.toml: the same content has the same hash however it is written, and any other content another."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from rpel import certificates
from rpel.peer.config.membership import Member, Membership, peer_url
from rpel.peer.config.timetable import Pace
from rpel.peer.ops.create import draft, stall_proof
from support.commands import rpel

PEMS = [certificates.create(f"peer-{i}")[1] for i in range(5)]
SPARE = certificates.create("spare")[1]


def network(**changes: Any) -> Membership:
    """Four members, one of them possibly hostile; each pulls from all others."""
    members = tuple(
        Member.of(f"peer-{i}", f"https://peer-{i}.example:7443", PEMS[i], f"org {i}") for i in range(4)
    )
    table = {"lr": 0.5, "layers": [3, 4], "net": {"b": True, "a": "x"}}
    hashes: dict[str, Any] = {"model_header_sha256": "a" * 64, "init_sha256": "b" * 64}
    plan = stall_proof(nodes=4, byzantine=1, rounds=50)
    return draft(plan, run="ward-7", epoch=1.8e9, hyperparameters=table, **hashes).replace(
        **{"members": members, **changes}
    )


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(content))
    return path


# --- the same, and not the same -----------------------------------------------------------------------------


keys = st.text("abcdefgh_-", min_size=1, max_size=5)
leaves = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
tables = st.dictionaries(
    keys, st.recursive(leaves, lambda c: st.lists(c, max_size=3) | st.dictionaries(keys, c), max_leaves=6)
)


@given(tables, st.floats(1e8, 1e10), st.floats(0.5, 1e5), st.text(min_size=1, max_size=20))
def test_membership_terms_survive_the_file(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any], epoch: float, period: float, run: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "members.toml"
    plan = stall_proof(nodes=12, byzantine=2, rounds=9)
    hashes: dict[str, Any] = {"model_header_sha256": "0" * 64, "init_sha256": "1" * 64}
    m = draft(plan, run=run, epoch=epoch, period=period, hyperparameters=table, **hashes)
    m.save(path)
    again = Membership.load(path, draft=True)
    assert again == m
    assert again.hash == m.hash


@pytest.mark.parametrize("protocol", [1, 3, 5, "4"])
def test_membership_of_another_protocol_is_refused_with_what_to_do(tmp_path: Path, protocol: object) -> None:
    content = network().to_dict()
    assert content["protocol"] == 4
    path = written(tmp_path / "members.toml", content | {"protocol": protocol, "memory": 2})
    with pytest.raises(ValueError, match="rpel network new") as refused:
        Membership.load(path)
    assert str(refused.value).startswith(f"{path}: protocol {protocol!r} is not supported, only 4: use")
    assert "\n" not in str(refused.value)


def test_weight_1_may_stand_in_the_file_and_changes_no_hash(tmp_path: Path) -> None:
    m = network()
    content = m.to_dict()
    assert all("weight" not in entry for entry in content["member"])
    for entry in content["member"]:
        entry["weight"] = 1
    again = Membership.load(written(tmp_path / "members.toml", content))
    assert again == m
    assert again.hash == m.hash


@pytest.mark.parametrize("weight", [0, 2, -1, 1.5, "1"])
def test_other_weight_than_1_is_refused(tmp_path: Path, weight: object) -> None:
    content = network().to_dict()
    content["member"][2]["weight"] = weight
    path = written(tmp_path / "members.toml", content)
    with pytest.raises(ValueError, match="every member counts once") as refused:
        Membership.load(path)
    assert str(refused.value).startswith(f"{path}, member 3: weight {weight!r} is not supported")


def test_hash_does_not_see_key_order_white_space_comments_or_spelling(tmp_path: Path) -> None:
    m = network()
    content = m.to_dict()
    turned = dict(reversed(content.items())) | {
        "member": [dict(reversed(e.items())) for e in content["member"]]
    }
    turned["hyperparameters"] = dict(reversed(content["hyperparameters"].items()))
    turned["epoch"] = datetime.fromtimestamp(m.epoch, UTC)
    turned["period"] = int(m.period)
    del turned["from_round"]
    for entry in turned["member"]:
        pin = entry["fingerprint"].upper()
        entry["fingerprint"] = ":".join(pin[i : i + 2] for i in range(0, 64, 2))
        entry["url"] = entry["url"].replace("peer", "PEER") + "/"
        entry["certificate"] = f"issued to somebody\n{entry['certificate'].strip()}"
    text = "# our network\n\n" + tomli_w.dumps(turned, indent=7).replace(" = ", "    =  ")
    (tmp_path / "members.toml").write_text(text)
    assert Membership.load(tmp_path / "members.toml").hash == m.hash


def test_hash_sees_every_field_and_every_member() -> None:
    m = network().replace(outer="nesterov")
    other = Member.of("peer-4", "https://peer-4.example:7443", PEMS[4], "org 4")
    first = m.members[0]
    changes: dict[str, Any] = {
        key: {str: "other", int: 7, float: 1.25, bool: True, tuple: (Pace(epoch=1.0, period=2.0),)}[
            type(value)
        ]
        for key, value in m.given().items()
        if key not in ("members", "hyperparameters")
    }
    # also such as are refused
    versions = [m.model_copy(update={key: value}) for key, value in changes.items()]
    versions += [m.replace(hyperparameters=table) for table in ({}, {**m.hyperparameters, "lr": 0.25})]
    others = [first.model_copy(update={key: 2 if key == "weight" else "x"}) for key in Member.model_fields]
    versions += [m.replace(members=(changed, *m.members[1:])) for changed in others]
    versions += [m.replace(members=(other, *m.members[1:])), m.replace(members=tuple(reversed(m.members)))]
    assert len(changes) == len(Membership.model_fields) - 2
    assert len({v.hash for v in [m, *versions]}) == len(versions) + 1


def test_entries_are_appended_until_the_membership_is_complete(tmp_path: Path) -> None:
    m, path = network(), tmp_path / "members.toml"
    m.replace(members=()).save(path)
    for count, member in enumerate(m.members):
        assert len(Membership.load(path, draft=True).members) == count
        with pytest.raises(ValueError, match=f"4.* {count} "):
            Membership.load(path)
        with path.open("a") as file:
            file.write(member.toml())
    assert Membership.load(path) == m


def test_members_are_found_by_id_and_by_pin() -> None:
    m = network()
    assert [m.index(member.id) for member in m.members] == [0, 1, 2, 3]
    assert [m.by_fingerprint(member.fingerprint) for member in m.members] == [0, 1, 2, 3]
    assert m.by_fingerprint(certificates.read_certificate(SPARE).fingerprint) is None
    with pytest.raises(ValueError, match=r"'peer-9'.*peer-3"):
        m.index("peer-9")


# --- refusals -----------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def put(**values: Any) -> Change:
    return lambda content: content.update(values)


def in_member(number: int, **values: Any) -> Change:
    return lambda content: content["member"][number].update(values)


PIN = certificates.read_certificate(SPARE).fingerprint
REFUSALS: list[tuple[Change, str]] = [
    (put(perriod=3), "unknown key 'perriod': the nearest is 'period'"),
    (lambda c: c.pop("run"), "lacks the key 'run'"),
    (lambda c: c.pop("hyperparameters"), "hyperparameters_sha256"),
    (put(nodes="4"), "nodes '4' is not valid: it takes a whole number"),
    (put(nodes=4.0), "nodes 4.0 is not valid"),
    (put(confidence=True), "confidence True is not valid"),
    (put(period=float("nan")), "period nan is not valid"),
    (put(period=0), "period 0 is impossible"),
    (put(deadline=60.0), "deadline 60 .*59.94"),
    (put(deadline=-1.0), "deadline -1 is impossible"),
    (put(nodes=5), "nodes is 5, but it has 4 members"),
    (put(nodes=3, pull=2), "b_hat 1 is impossible|nodes is 3"),
    (put(byzantine=2), "byzantine 2 .*between 0 and 1"),
    (put(pull=4), "pull 4 .*between 1 and 3"),
    (put(b_hat=2), "b_hat 2 .*between 0 and 1"),
    (put(rounds=0), "rounds 0 is impossible: the nearest is 1"),
    (put(from_round=0), "from_round 0 is impossible"),
    (put(confidence=1.0), "confidence 1 is impossible"),
    (put(rule="trimmedmean"), "'trimmed_mean'"),
    (put(rule="nnm"), "rule 'nnm' cannot aggregate"),
    (put(rule="cs_plus"), "cs_plus"),
    (put(rule="bulyan"), "needs 6 answers"),
    (put(init_sha256="xyz"), "init_sha256 'xyz' is not valid"),
    (put(hyperparameters={"lr": 0.25}), "is not that of the table"),
    (put(hyperparameters={"since": datetime(2030, 1, 1)}), "numbers, text"),
    (put(epoch=datetime(2030, 1, 1)), "has no time zone: write 2030-01-01T00:00:00Z"),
    (put(member=[1]), r"member \[1\].*tables \[\[member\]\]"),
    (in_member(1, id="peer-0"), "'peer-0' and 'peer-0' have the same id"),
    (in_member(1, url="https://peer-0.example:7443"), "'peer-0' and 'peer-1' have the same url"),
    (in_member(1, certificate=PEMS[0]), "member 2: fingerprint .* is not that of its certificate"),
    (in_member(1, certificate=SPARE), "member 2: fingerprint"),
    (in_member(1, fingerprint=PIN), "member 2: fingerprint"),
    (in_member(1, url="http://peer-1.example:7443"), "write it as https://peer-1.example:7443"),
    (in_member(1, url="https://u:p@peer-1.example:7443"), "write it as https://peer-1.example:7443"),
    (in_member(1, url="https://peer-1.example:7443/v1"), "write it as https://peer-1.example:7443"),
    (in_member(1, url="https://peer-1.example:99999"), "write it as https://host:7443"),
    (in_member(1, id="peer 1"), "member 2: id 'peer 1' is not valid"),
    (in_member(1, name="x"), "member 2 has an unknown key 'name'"),
    (lambda c: c["member"][1].pop("certificate"), "member 2 lacks the key 'certificate'"),
]


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_bad_membership_names_the_wrong_value(tmp_path: Path, change: Change, words: str) -> None:
    content = json.loads(json.dumps(network().to_dict()))
    change(content)
    with pytest.raises(ValueError, match=words) as caught:
        Membership.load(written(tmp_path / "members.toml", content))
    assert "\n" not in str(caught.value)


def test_two_entries_with_one_key_are_refused_even_under_two_names(tmp_path: Path) -> None:
    m = network()
    twin = m.members[0].replace(id="peer-9", url="https://peer-9.example:7443")
    m.replace(members=(*m.members[:3], twin)).save(tmp_path / "members.toml")
    with pytest.raises(ValueError, match=r"'peer-0'.*'peer-9'.*fingerprint"):
        Membership.load(tmp_path / "members.toml")


def test_missing_or_non_toml_membership_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.toml"):
        Membership.load(tmp_path / "none.toml")
    (tmp_path / "members.toml").write_bytes(b"\xff\xfe = 3")
    with pytest.raises(ValueError, match=r"is not TOML: .*utf-8"):
        Membership.load(tmp_path / "members.toml")


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, ".".join("a" * 30_000) + " = 1", "a = " + "9" * 5000]
)
def test_oversized_or_deeply_nested_membership_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "members.toml").write_text(text)
    with pytest.raises(ValueError, match=r"is not TOML: .*(deeply|100 parts|digits)"):
        Membership.load(tmp_path / "members.toml")


# --- cautions -----------------------------------------------------------------------------------------------


def test_sound_membership_gives_no_cautions() -> None:
    assert list(network(epoch=datetime.now(UTC).timestamp()).cautions()) == []


def test_weak_plan_is_named_with_its_probability() -> None:
    (caution,) = network(b_hat=0, epoch=datetime.now(UTC).timestamp()).cautions()
    assert "b_hat 0 has probability 0," in caution
    assert "0.99" in caution


def test_certificates_that_end_before_the_last_round_are_named() -> None:
    late = (datetime.now(UTC) + timedelta(days=824)).timestamp()
    for n in (1, 4):
        (caution,) = network(epoch=late, rounds=5000, members=network().members[:n]).cautions()
        assert f"{n} certificate" in caution
        assert "that of 'peer-" in caution


def test_members_of_one_organisation_are_named_where_a_membership_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m = network(epoch=datetime.now(UTC).timestamp())
    path = tmp_path / "members.toml"
    m.replace(members=tuple(member.replace(organisation="Trust") for member in m.members)).save(path)
    _, err = rpel("network", "show", str(path), capsys=capsys)
    assert "4 members" in err
    assert "'Trust'" in err
    assert "byzantine 1" in err


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://CLINIC.example", "https://clinic.example:443"),
        ("https://[::1]:7443/", "https://[::1]:7443"),
        ("HTTPS://10.0.0.1:1", "https://10.0.0.1:1"),
    ],
)
def test_url_has_one_spelling(text: str, url: str) -> None:
    assert peer_url(text) == url


@pytest.mark.parametrize(
    "text",
    ["", "clinic", "http://clinic:1", "https://", "https://h:0", "https://h:1/x", "https://h:1?q", "https://h:1#f",
     "https://u@h:1", "https://h:x", "https://h :1", "ftp://h:1", "https://[::1"],
)  # fmt: skip
def test_url_is_https_host_and_port_only(text: str) -> None:
    with pytest.raises(ValueError, match=r"^url '.*write it as https://"):
        peer_url(text)


def test_url_beyond_ascii_is_refused_with_the_name_that_travels() -> None:
    with pytest.raises(ValueError, match="xn--klinik-mnchen-3ob") as refused:
        peer_url("https://klinik-münchen.example:7443")
    assert peer_url(str(refused.value).rpartition(" ")[2]) == "https://xn--klinik-mnchen-3ob.example:7443"
