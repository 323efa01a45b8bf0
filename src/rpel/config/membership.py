"""members.toml: who belongs to a network, with what plan, from which model, at which times. All members hold the same.

Laws: what two files mean is compared by :attr:`Membership.hash`, over the parsed content: key order, white space and
comments do not matter and everything else does; a member is numbered by its place in the file; identity is the
fingerprint, never the id; a plan counts entries, so two of one organisation count twice.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from rpel import aggregation
from rpel.aggregation.graph import GraphRule
from rpel.aggregation.mixing import Mixer
from rpel.certificates import check_id, read_certificate
from rpel.config.cautions import cautions
from rpel.config.founding import stall_proof
from rpel.config.reading import check_keys, peer_url, read_toml, take
from rpel.files import atomic

INIT_FILE = "init.safetensors"
"""The common initial model lies beside members.toml under this name."""

_log = logging.getLogger("rpel")


@dataclass(frozen=True)
class Member:
    """One entry: what the others need to know to reach a peer and to know it by."""

    id: str
    organisation: str
    url: str
    certificate: str
    fingerprint: str

    @classmethod
    def of(cls, id: str, url: str, certificate: str, organisation: str = "") -> "Member":
        """From its certificate's PEM text, everything checked but the dates."""
        found = read_certificate(certificate)
        return cls(check_id(id), organisation, peer_url(url), found.pem, found.fingerprint)


@dataclass(frozen=True)
class Membership:
    """A network's terms. Times are seconds: ``epoch`` since 1970 (when round 1 begins), ``deadline`` into a round.

    >>> m = found(run="ward-7", nodes=12, byzantine=2, rounds=200, epoch=1.8e9, model_header_sha256="0" * 64,
    ...     init_sha256="0" * 64)
    >>> m.pull, m.b_hat, m.deadline, m.by_fingerprint("0" * 64)
    (8, 2, 36.0, None)
    """

    run: str
    epoch: float
    period: float
    deadline: float
    nodes: int
    byzantine: int
    pull: int
    b_hat: int
    confidence: float
    rounds: int
    rule: str
    local_steps: int
    hyperparameters_sha256: str
    model_header_sha256: str
    init_sha256: str
    from_round: int = 1
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[Member, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The content of members.toml, in the file's order."""
        top = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "members"}
        return top | {"hyperparameters": dict(self.hyperparameters), "member": [vars(m) for m in self.members]}

    @cached_property
    def hash(self) -> str:
        """The name of this content, sent with every request: peers that hold different files refuse each other."""
        return content_hash(self.to_dict())

    @cached_property
    def enough(self) -> int:
        """How many answers a round needs to aggregate: 2 b̂, or more where the rule does."""
        return max(2 * self.b_hat, aggregation.rule(self.rule, f=self.b_hat).least(self.b_hat) - 1)

    def index(self, id: str) -> int:
        """The number of the member with this id."""
        for number, member in enumerate(self.members):
            if member.id == id:
                return number
        raise ValueError(
            f"{id!r} is not a member: the members are {', '.join(m.id for m in self.members) or 'none yet'}"
        )

    def by_fingerprint(self, fingerprint: str) -> int | None:
        """The number of the member with this pin; None for a stranger."""
        return self._pins.get(fingerprint)

    @cached_property
    def _pins(self) -> dict[str, int]:
        return {member.fingerprint: number for number, member in enumerate(self.members)}


def content_hash(content: Any) -> str:
    """SHA-256 of canonical JSON: keys sorted, no white space.

    >>> content_hash({"b": 1, "a": 2.0}) == content_hash({"a": 2.0, "b": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# --- founding --------------------------------------------------------------------------------------------------------


def found(
    *,
    run: str,
    nodes: int,
    byzantine: int,
    rounds: int,
    epoch: float,
    model_header_sha256: str,
    init_sha256: str,
    period: float = 60.0,
    deadline: float | None = None,
    confidence: float = 0.99,
    no_shows: int | None = None,
    rule: str = "nnm+trimmed_mean",
    local_steps: int = 1,
    hyperparameters: Mapping[str, Any] | None = None,
) -> Membership:
    """A network without members yet, with a stall-proof plan; pulls end after 0.6 of a round unless said otherwise."""
    plan = stall_proof(nodes, byzantine, rounds, confidence, no_shows)
    table = dict(hyperparameters or {})
    terms = _checked(
        "",
        Membership(
            run=run,
            epoch=float(epoch),
            period=float(period),
            deadline=0.6 * period if deadline is None else float(deadline),
            nodes=nodes,
            byzantine=byzantine,
            pull=plan.pull,
            b_hat=plan.b_hat,
            confidence=confidence,
            rounds=rounds,
            rule=rule,
            local_steps=local_steps,
            hyperparameters_sha256=content_hash(table),
            model_header_sha256=model_header_sha256,
            init_sha256=init_sha256,
            from_round=1,
            hyperparameters=table,
        ),
        draft=True,
    )
    sure = plan.pull - plan.b_hat - plan.no_shows
    if terms.enough > sure:
        raise ValueError(
            f"rule {rule!r} needs {terms.enough} answers a round, but with hostile peers silent and {plan.no_shows} "
            f"honest ones late only {sure} come: the nearest is 'nnm+trimmed_mean'"
        )
    return terms


# --- files -----------------------------------------------------------------------------------------------------------


def load(path: str | Path, draft: bool = False) -> Membership:
    """A members.toml, checked; with ``draft`` one whose members are not complete yet."""
    where, content = str(path), read_toml(Path(path))
    kinds = {key: kind for key, kind in get_type_hints(Membership).items() if kind in (str, int, float)}
    check_keys(where, content, [*kinds, "hyperparameters", "member"])
    if isinstance(content.get("epoch"), datetime):
        content["epoch"] = _seconds(where, content["epoch"])
    content.setdefault("from_round", 1)
    top = {key: take(where, content, key, kind) for key, kind in kinds.items()}
    table = take(where, content, "hyperparameters", dict, {})
    entries = take(where, content, "member", list, [])
    members = tuple(_member(f"{where}, member {number}", entry) for number, entry in enumerate(entries, 1))
    found = _checked(f"{where}: ", Membership(**top, hyperparameters=table, members=members), draft)
    for caution in cautions(found):
        _log.warning("%s: %s", where, caution)
    return found


def save(membership: Membership, path: str | Path) -> None:
    """Write a members.toml that :func:`load` reads back; members can be added at its end."""
    content = membership.to_dict()
    members = content.pop("member")
    start = datetime.fromtimestamp(membership.epoch, UTC)
    text = f"# An rpel network; all members hold the same file. Round 1 begins {start:%Y-%m-%d %H:%M:%S} UTC.\n"
    text += tomli_w.dumps(content)
    text += "".join("\n" + entry(Member(**member)) for member in members)
    with atomic(Path(path)) as file:
        file.write(text.encode())


def entry(member: Member) -> str:
    """The lines of members.toml that make somebody a member."""
    return tomli_w.dumps({"member": [vars(member)]}, multiline_strings=True)


def _seconds(where: str, moment: datetime) -> float:
    if moment.tzinfo is None:
        raise ValueError(f"{where}: epoch {moment} has no time zone: write {moment.isoformat()}Z if it is UTC")
    return moment.timestamp()


def _member(where: str, entry: Any) -> Member:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not valid: it takes a table [[member]]")
    check_keys(where, entry, [f.name for f in fields(Member)])
    text = {f.name: take(where, entry, f.name, str, "" if f.name == "organisation" else None) for f in fields(Member)}
    pin = text.pop("fingerprint").replace(":", "").lower()
    try:
        member = Member.of(**text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if pin != member.fingerprint:
        raise ValueError(f"{where}: fingerprint {pin} is not that of its certificate, {member.fingerprint}")
    return member


# --- what must hold --------------------------------------------------------------------------------------------------


def _checked(where: str, m: Membership, draft: bool) -> Membership:
    for key, low, high in _ranges(m):
        value = getattr(m, key)
        if not low <= value <= high:
            near = low if value < low else high
            raise ValueError(f"{where}{key} {value:g} is impossible: the nearest is {near:.15g}")
    _check_hashes(where, m)
    _check_rule(where, m)
    if len(m.members) > m.nodes or (len(m.members) < m.nodes and not draft):
        raise ValueError(f"{where}nodes is {m.nodes}, but there are {len(m.members)} members")
    for key in ("id", "url", "fingerprint"):
        seen: dict[str, str] = {}
        for member in m.members:
            value = getattr(member, key)
            if value in seen:
                raise ValueError(f"{where}members {seen[value]!r} and {member.id!r} have the same {key} {value!r}")
            seen[value] = member.id
    return m


def _ranges(m: Membership) -> Iterator[tuple[str, float, float]]:
    """(key, least, most) of every number, in an order in which earlier ones bound later ones."""
    yield "epoch", 0, 1e11
    yield "period", 0.01, 1e7
    yield "deadline", 0.001 * m.period, 0.999 * m.period
    yield "nodes", 2, 10**7
    yield "byzantine", 0, (m.nodes - 1) // 2
    yield "pull", 1, m.nodes - 1
    yield "b_hat", 0, m.pull // 2
    yield "confidence", 1e-9, 1 - 1e-15
    for key in ("rounds", "local_steps", "from_round"):
        yield key, 1, 10**9


def _check_rule(where: str, m: Membership) -> None:
    found = aggregation.rule(m.rule, f=m.b_hat)
    if isinstance(found, Mixer | GraphRule):
        raise ValueError(f"{where}rule {m.rule!r} is not one for answers pulled: the nearest is 'nnm+trimmed_mean'")
    if m.enough > m.pull:
        raise ValueError(f"{where}rule {m.rule!r} needs {m.enough} answers for b_hat {m.b_hat}, but pull is {m.pull}")


def _check_hashes(where: str, m: Membership) -> None:
    for key in ("hyperparameters_sha256", "model_header_sha256", "init_sha256"):
        value = getattr(m, key)
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise ValueError(f"{where}{key} {value!r} is not valid: it takes 64 hexadecimal digits")
    try:
        right = content_hash(m.hyperparameters)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}hyperparameters may hold numbers, text, truth values, lists and tables only"
        ) from None
    if right != m.hyperparameters_sha256:
        raise ValueError(f"{where}hyperparameters_sha256 {m.hyperparameters_sha256} is not that of the table, {right}")
