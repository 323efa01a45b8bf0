"""docs/protocol_vectors.json is what the code does:
whoever implements a peer in another language can rely on it."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import certificates
from rpel.peer.config.membership import ADDED, OUTER, Member, Membership, content_hash
from rpel.peer.config.timetable import Pace
from rpel.peer.core import evidence, wire
from rpel.peer.core.evidence import Roster, Witness, message, of_member, signed_by
from rpel.peer.io.proofs import verify
from rpel.peer.net.http import parse_request
from rpel.wire import Wire

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "protocol_vectors.json").read_text())
    return found


@pytest.fixture(scope="module")
def membership(vectors: dict[str, Any]) -> Membership:
    content = dict(vectors["membership"]["content"])
    members = tuple(Member(**entry) for entry in content.pop("member"))
    assert set(content) == set(Membership.model_fields) - {"members", *OUTER, *ADDED}  # defaults are left out
    return Membership(**content, members=members)


def test_body_is_the_header_that_every_peer_computes_and_the_values(vectors: dict[str, Any]) -> None:
    given = vectors["model"]
    layout = wire.Layout(tuple(given["names"]), tuple(map(tuple, given["shapes"])), np.dtype("<f4"))
    x = np.array(given["values"], "<f4")
    assert layout.header.hex() == given["header"]
    assert layout.sha256 == given["header_sha256"]
    assert (layout.header + bytes(wire.raw(layout, x))).hex() == given["body"]
    assert wire.digest(layout, x) == given["body_sha256"]


def test_coded_body_is_a_header_and_codes_that_everybody_decodes_alike(vectors: dict[str, Any]) -> None:
    model, given = vectors["model"], vectors["coded"]["int8"]
    layout = wire.Layout(tuple(model["names"]), tuple(map(tuple, model["shapes"])), np.dtype("<f4"), "int8")
    x = np.array(model["values"], "<f4")
    body = b"".join(layout.body(x))
    assert body.hex() == given["body"]
    assert (layout.body_header.hex(), wire.digest(layout, x)) == (given["header"], given["body_sha256"])
    decoded = Wire("int8").decode(body[len(layout.body_header) :], layout.d)
    assert decoded.tobytes().hex() == given["decoded_bits"]
    assert decoded.tolist() == given["decoded"]


def test_membership_hash_is_that_of_its_canonical_json(
    vectors: dict[str, Any], membership: Membership, tmp_path: Path
) -> None:
    given = vectors["membership"]
    assert hashlib.sha256(given["canonical_json"].encode()).hexdigest() == given["hash"] == membership.hash
    assert json.loads(given["canonical_json"]) == given["content"]
    membership.save(tmp_path / "members.toml")
    assert Membership.load(tmp_path / "members.toml").hash == given["hash"]


def test_protocol_page_names_every_key_of_the_membership() -> None:
    page = (DOCS / "protocol.md").read_text()
    keys = {*Membership.model_fields, *Member.model_fields, *Pace.model_fields} - {"members"}
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_fingerprint_is_the_hash_of_the_certificates_der_bytes(vectors: dict[str, Any]) -> None:
    given = vectors["certificate"]
    der = base64.b64decode("".join(given["pem"].splitlines()[1:-1]))
    assert hashlib.sha256(der).hexdigest() == given["fingerprint"]
    assert certificates.read_certificate(given["pem"]).fingerprint == given["fingerprint"]


def test_signature_is_over_the_bytes_that_are_written_down(
    vectors: dict[str, Any], membership: Membership
) -> None:
    given, digest = vectors["signature"], bytes.fromhex(vectors["signature"]["digest"])
    assert of_member(membership, 0) == given["facts"]
    assert content_hash(given["facts"]) == given["facts_sha256"]
    assert hashlib.sha256(given["facts_canonical_json"].encode()).hexdigest() == given["facts_sha256"]
    by_hand = (
        b"rpel half-step 3\0"
        + bytes.fromhex(given["facts_sha256"])
        + given["round"].to_bytes(8, "big")
        + digest
    )
    assert message(given["facts"], given["round"], digest) == by_hand == bytes.fromhex(given["message"])
    signature = base64.b64decode(given["signature_base64"])
    certificate = vectors["certificate"]["pem"]
    assert signed_by(certificate, given["facts"], given["round"], digest, signature)
    assert not signed_by(certificate, given["facts"], given["round"] + 1, digest, signature)


def test_evidence_and_what_was_seen_are_read(
    vectors: dict[str, Any], membership: Membership, tmp_path: Path
) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(vectors["evidence"]))
    proof = verify(path, membership)
    assert evidence.evidence(proof, membership) == vectors["evidence"]
    pins = tuple(member.fingerprint for member in membership.members)

    def verified(member: int, *rest: Any) -> bool:
        return signed_by(membership.members[member].certificate, of_member(membership, member), *rest)

    witness, roster = Witness(), Roster(1, pins, verified)
    witness.saw(roster, 0, proof.round, proof.second)
    assert [found.member for found in witness.hear(roster, proof.round, vectors["seen"])] == [0]


def test_request_is_read(vectors: dict[str, Any], membership: Membership) -> None:
    request = parse_request(vectors["request"].encode().removesuffix(b"\r\n\r\n"))
    assert (request.method, request.path) == ("GET", "/v1/model/7")
    assert request.headers["rpel-membership"] == membership.hash
