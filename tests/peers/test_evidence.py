"""Signatures of half-steps: honest peers are never excluded, a liar is, and anybody can check the proof."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from rpel import certificates
from rpel.peer.config.membership import Member, Membership, content_hash
from rpel.peer.core import evidence
from rpel.peer.core.evidence import Proof, Roster, Signed, Witness, of_member, sign
from rpel.peer.core.exchange import SecondInstanceError
from rpel.peer.core.protocol import make_ready
from rpel.peer.io.proofs import keep, proofs, verify
from rpel.peer.node.node import Node
from rpel.peer.ops.drill import HostileMember
from rpel.peer.state.journal import Audit, RoundLog, check_audit, verify_audit
from rpel.rules import rule
from support.commands import no_more_than, rpel
from support.loopback import membership as a_membership
from support.thread_network import QuadraticLearner, Running, ended, found
from support.waiting import PATIENCE

PERIOD = 1.2
DIGESTS = (bytes(range(32)), bytes(range(1, 33)))


def key_of(secret: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(secret, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


@pytest.fixture(scope="module")
def network() -> tuple[Membership, list[ec.EllipticCurvePrivateKey]]:
    made = [certificates.create(f"peer-{i}") for i in range(3)]
    members = [Member.of(f"peer-{i}", f"https://127.0.0.1:{i + 1}", pem) for i, (_, pem) in enumerate(made)]
    return a_membership(members), [key_of(secret) for secret, _ in made]


Network = tuple[Membership, list[ec.EllipticCurvePrivateKey]]


def proof(network: Network, member: int = 1, round: int = 4) -> Proof:
    m, keys = network
    pair = [Signed(digest, sign(keys[member], of_member(m, member), round, digest)) for digest in DIGESTS]
    return Proof(member, m.members[member].fingerprint, round, *pair)


# --- a proof as a file --------------------------------------------------------------------------------------


def test_two_signed_half_steps_of_one_round_are_a_proof_for_anybody(network: Network, tmp_path: Path) -> None:
    m, _ = network
    path = keep(tmp_path / "evidence", proof(network), m)
    content = json.loads(path.read_text())
    assert list(content) == [
        "format", "facts", "member", "fingerprint", "round", "digests", "signatures", "certificate",
    ]  # fmt: skip
    assert (verify(path, m).member, verify(path, m).round) == (1, 4)
    later = m.replace(rounds=99, pull=2, from_round=7)  # another membership of the same network
    assert verify(path, later).round == 4


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (lambda e: e.update(format="rpel evidence 9"), "format"),
    "another network": (lambda e: e["facts"].update(run="elsewhere"), "another network"),
    "a stranger's key": (lambda e: e.update(fingerprint="0" * 64), "no member's"),
    "another member": (lambda e: e.update(member="peer-0"), "certificate is not the one of"),
    "another round": (lambda e: e.update(round=5), "a signature in it is not that of"),
    "no round": (lambda e: e.update(round=0), "two different hashes"),
    "the same twice": (
        lambda e: e.update(digests=[e["digests"][0]] * 2, signatures=[e["signatures"][0]] * 2),
        "two",
    ),
    "a changed hash": (lambda e: e["digests"].__setitem__(1, "ab" * 32), "a signature in it is not that of"),
    "signatures swapped": (lambda e: e["signatures"].reverse(), "a signature in it is not that of"),
    "a damaged signature": (lambda e: e["signatures"].__setitem__(0, "%%%"), "damaged"),
    "one signature": (lambda e: e["signatures"].pop(), "damaged"),
    "no certificate": (lambda e: e.pop("certificate"), "is not evidence"),
    "numbers for text": (lambda e: e.update(certificate=7), "damaged"),
    "a round without end": (lambda e: e.update(round=float("inf")), "damaged"),
    "a part of a round": (lambda e: e.update(round=4.5), "damaged"),
    "a verdict for a key": (
        lambda e: e.update(fingerprint="\r\x1b[2Kproven: peer-1"),
        r"'\\r\\x1b\[2Kproven: peer-1'",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_evidence_that_was_changed_proves_nothing(network: Network, tmp_path: Path, name: str) -> None:
    m, _ = network
    change, sentence = DAMAGE[name]
    path = keep(tmp_path, proof(network), m)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=sentence):
        verify(path, m)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, "{" * 70_000, '"x"', "\x00"])
def test_file_that_is_no_evidence_is_refused(network: Network, tmp_path: Path, text: str) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not evidence: .*signatures"):
        verify(path, network[0])


def test_removed_key_is_cleared_from_exclusions(network: Network, tmp_path: Path) -> None:
    m, _ = network
    path = keep(tmp_path, proof(network), m)
    fresh = certificates.create("peer-1")[1]
    rotated = m.replace(members=(m.members[0], Member.of("peer-1", m.members[1].url, fresh), m.members[2]))
    with pytest.raises(ValueError, match=r"names the key '[0-9a-f]{64}'.*no member"):
        verify(path, rotated)
    assert proofs(tmp_path, m) != []
    assert proofs(tmp_path, rotated) == []


# --- what a peer makes of what it is told -------------------------------------------------------------------


class Under(Witness):
    """A witness, and the membership under which it is asked here."""

    def __init__(self, roster: Roster, last: int = 0) -> None:
        super().__init__(last)
        self.roster = roster

    def seen_by(self, member: int, round: int, signed: Signed) -> None:
        self.saw(self.roster, member, round, signed)

    def told(self, round: int, content: dict[str, Any]) -> list[Proof]:
        return self.hear(self.roster, round, content)


def witness(network: Network, me: int = 0, last: int = 0) -> Under:
    m, _ = network
    pins = tuple(member.fingerprint for member in m.members)

    def verified(member: int, round: int, digest: bytes, signature: bytes) -> bool:
        return evidence.signed_by(
            m.members[member].certificate, of_member(m, member), round, digest, signature
        )

    return Under(Roster(me, pins, verified), last)


def told(*entries: tuple[int, Signed]) -> dict[str, Any]:
    return {"seen": [[number, *_text(signed)] for number, signed in entries]}


def test_own_and_reported_digest_make_a_proof_that_is_passed_on(network: Network) -> None:
    two = proof(network)
    first, second = witness(network), witness(network, me=2)
    first.seen_by(1, 4, two.first)
    assert first.told(4, told((1, two.first))) == []
    assert [found.round for found in first.told(4, told((1, two.second)))] == [4]
    assert first.excluded(first.roster) == {two.fingerprint}
    assert first.told(4, told((1, two.second))) == []  # once
    passed_on = second.told(9, first.seen(first.roster, 9))
    assert [found.member for found in passed_on] == [1]
    assert second.excluded(replace(second.roster, pins=("a", "b", "c"))) == set()


def test_two_reported_digests_make_a_proof(network: Network) -> None:
    two = proof(network)
    for digest in DIGESTS:  # nor does a liar hide it who tells the right hash with a wrong signature
        here = witness(network)
        assert here.told(4, told((1, Signed(digest, b"nonsense")))) == []
        assert here.told(4, told((1, two.first))) == []
        assert len(here.told(4, told((1, two.second)))) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["AAAA", "//=="]),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["seen", "proofs", "x"]), inner)
    ),
    max_leaves=30,
)


@given(content=st.dictionaries(st.sampled_from(["seen", "proofs"]), JSON, max_size=2))
def test_false_reports_exclude_nobody(network: Network, content: dict[str, Any]) -> None:
    here, two = witness(network), proof(network)
    here.seen_by(1, 4, two.first)
    assert here.told(4, content) == []
    assert here.duplicate_key == 0


def test_signatures_verified_per_reply_are_bounded_by_the_pull() -> None:
    """Whoever is told of 300 members by each of 8 others must not verify 2,400 signatures a round."""
    verified: list[int] = []

    def count(member: int, round: int, digest: bytes, signature: bytes) -> bool:
        verified.append(member)
        return True

    here = Under(Roster(0, tuple(map(str, range(300))), count, most=8))
    for member in range(1, 300):
        here.seen_by(member, 4, Signed(b"a", b"1"))
    here.told(4, told(*((member, Signed(b"b", b"2")) for member in range(1, 300))))
    assert len(set(verified)) == 8
    assert len(here.excluded(here.roster)) == 8


def test_foreign_use_of_the_own_key_is_noticed(network: Network) -> None:
    two = proof(network, member=0)
    here = witness(network, last=3)
    here.told(4, told((0, Signed(two.first.digest, b"forged"))))
    assert here.duplicate_key == 0
    here.told(3, told((0, replace(proof(network, 0, 3).first))))  # it may have signed that before it started
    assert here.duplicate_key == 0
    here.told(4, told((0, two.first)))
    assert here.duplicate_key == 4
    signing = witness(network, last=3)
    signing.recorded(4, two.first.digest)
    signing.told(4, told((0, two.first)))
    assert signing.duplicate_key == 0
    signing.told(4, told((0, two.second)))
    assert signing.duplicate_key == 4


def test_valid_proof_against_the_own_key_is_noticed(
    network: Network,
) -> None:
    two = proof(network, member=0, round=4)
    entry = [0, 4, *_text(two.first), *_text(two.second)]
    here = witness(network, last=3)
    here.told(20, {"proofs": [[*entry[:4], *_text(Signed(two.second.digest, b"forged"))]]})
    assert here.duplicate_key == 0
    here.told(20, {"proofs": [entry]})
    assert here.duplicate_key == 4
    later = witness(network, last=4)  # it began after that: another peer ran before it, and need not run now
    later.told(20, {"proofs": [entry]})
    assert later.duplicate_key == 0
    assert later.excluded(later.roster) == set()


def _text(signed: Signed) -> list[str]:
    return [base64.b64encode(signed.digest).decode(), base64.b64encode(signed.signature).decode()]


# --- the audit log ------------------------------------------------------------------------------------------


def test_audit_log_continues_after_a_crash_and_shows_tampering(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    Audit(path).write({"round": 1}, sign=lambda digest: b"")
    with path.open("a") as file:
        file.write('{"round": 2, "outc')  # the power failed
    again = Audit(path)
    for round in (2, 3):
        again.write({"round": round}, sign=lambda digest: b"")
    lines = check_audit(path)
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [line["gap"]["lines"] for line in lines if "gap" in line] == [1]
    assert path.stat().st_mode & 0o077 == 0
    path.write_text(path.read_text().replace('"round": 2', '"round": 9'))
    with pytest.raises(ValueError, match=r"line 3.*line 2"):
        check_audit(path)


def test_audit_log_of_a_peer_whose_disk_was_full_is_proven_and_shows_the_gap(
    network: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    m, keys = network
    path, audit = tmp_path / "audit.jsonl", Audit(tmp_path / "audit.jsonl")

    def write(round: int) -> None:
        line = {"member": "peer-1", "round": round}
        audit.write(line, sign=lambda digest: evidence.sign_line(keys[1], of_member(m, 1), digest))

    write(1)
    write(2)
    with no_more_than(path.stat().st_size + 50):
        for round in (3, 4):
            with pytest.raises(OSError, match="large"):
                write(round)
            assert path.read_bytes().endswith(b"}\n")  # no part of a line stays
    write(5)
    m.replace(hyperparameters_sha256=content_hash({})).save(tmp_path / "members.toml")
    arguments = ("network", "verify", str(path), "--members", str(tmp_path / "members.toml"))
    output, _ = rpel(*arguments, capsys=capsys)
    assert "before round 5: 2 lines not written (File too large)" in output
    assert "rounds without a line: 3-4" in output
    said = json.loads(rpel(*arguments, "--json", capsys=capsys)[0])
    assert (said["gaps"][0]["lines"], said["rounds_missing"]) == (2, [[3, 4]])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")  # a gap hides no line that was written
    assert "line 2 does not follow" in rpel(*arguments, capsys=capsys, code=1)[0]


def test_round_log_of_a_peer_whose_disk_was_full_has_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"round": 1}\n{"rou')  # the power failed
    log = RoundLog(path)
    log.write('{"round": 2}')
    with no_more_than(path.stat().st_size + 5):
        log.write('{"round": 3}')
    log.write('{"round": 4}')
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 4]


def test_rewritten_audit_log_fails_its_signature(network: Network, tmp_path: Path) -> None:
    m, keys = network
    path = tmp_path / "audit.jsonl"

    def written(key: ec.EllipticCurvePrivateKey, outcome: str) -> list[dict[str, Any]]:
        path.unlink(missing_ok=True)
        audit = Audit(path)
        for round in (1, 2):
            line = {"member": "peer-1", "round": round, "outcome": outcome}
            audit.write(line, sign=lambda digest: evidence.sign_line(key, of_member(m, 1), digest))
        return verify_audit(path, m)

    assert [line["round"] for line in written(keys[1], "aggregated")] == [1, 2]
    with pytest.raises(ValueError, match=r"last line .*'peer-1'"):
        written(keys[2], "another story")  # the hashes fit; the signature does not
    lines = path.read_text().splitlines()
    path.write_text(lines[0] + "\n")
    with pytest.raises(ValueError, match=r"signed.*key"):
        verify_audit(path, m)
    written(keys[1], "aggregated")
    with pytest.raises(ValueError, match=r"last line .*'peer-1'.*this network"):
        verify_audit(path, m.replace(run="founded anew"))


@pytest.fixture(scope="module")
def compiled() -> None:
    """What any machine does once, before its first round."""
    make_ready(rule("nnm+trimmed_mean", f=1), 4, 6, np.float64)


# --- whole peers --------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.usefixtures("compiled")
def test_training_peers_write_verifiable_audit_logs(tmp_path: Path) -> None:
    files = found(tmp_path, 4, rounds=3, period=PERIOD, soon=3.0, byzantine=1)
    running = [Running(Node(config), QuadraticLearner(i)) for i, config in enumerate(files.configs)]
    with ended(running):
        for peer in running:
            peer.start()
        for peer in running:
            assert peer.join().node.summary()["outcomes"]["aggregated"] >= 1
    logs = [
        {line["round"]: line for line in verify_audit(c.state_dir / "audit.jsonl", files.membership)}
        for c in files.configs
    ]
    for log in logs:
        assert 3 in log
        for t, line in log.items():
            served = {f"peer-{i}": other[t]["digest"] for i, other in enumerate(logs) if t in other}
            assert all(served[peer] == digest for peer, digest in line["aggregated"].items())
            assert len(line["aggregated"]) >= (2 if line["outcome"] == "aggregated" else 0)
    assert not (files.configs[0].state_dir / "evidence").exists()


@pytest.mark.integration
@pytest.mark.usefixtures("compiled")
def test_equivocating_member_is_excluded(tmp_path: Path) -> None:
    files = found(tmp_path, 5, rounds=6, period=PERIOD, soon=3.0, byzantine=1)
    running = [Running(Node(config), QuadraticLearner(i)) for i, config in enumerate(files.configs[:4])]
    team = HostileMember(files.configs[4], "equivocate")
    hostile = threading.Thread(target=lambda: asyncio.run(team.run()), daemon=True)
    with ended(running):
        for peer in running:
            peer.start()
        hostile.start()
        for peer in running:
            peer.join()
    hostile.join(PATIENCE)
    assert not hostile.is_alive()
    for peer, config in zip(running, files.configs[:4], strict=True):
        (path,) = (config.state_dir / "evidence").glob("*.json")
        assert verify(path, files.membership).member == 4
        assert peer.node.service.excluded() == ("peer-4",)
        assert peer.node.summary()["outcomes"]["aggregated"] >= 3
        lines = [
            json.loads(text) for text in (config.state_dir.parent / "rounds.jsonl").read_text().splitlines()
        ]
        assert lines[-1]["results"]["peer-4"] == "refused"
        assert {line["trim"] for line in lines} == {1}


@pytest.mark.integration
@pytest.mark.usefixtures("compiled")
def test_second_peer_with_the_same_key_stops_and_says_so(tmp_path: Path) -> None:
    files = found(tmp_path, 4, rounds=8, period=PERIOD, soon=3.0, byzantine=1)
    running = [Running(Node(config), QuadraticLearner(i)) for i, config in enumerate(files.configs)]
    copy = files.configs[3].replace(
        state_dir=tmp_path / "copy", listen="127.0.0.1:0", log=tmp_path / "copy.jsonl"
    )
    second = Running(Node(copy), QuadraticLearner(9))
    with ended([*running, second]):
        for peer in (*running, second):
            peer.start()
        with pytest.raises(SecondInstanceError, match=r"round \d+ with this peer.s key"):
            second.join()
        for peer in running:
            peer.join()
    assert all(peer.node.service.excluded() == () for peer in running)
    assert running[3].node.summary()["round"] == 8
