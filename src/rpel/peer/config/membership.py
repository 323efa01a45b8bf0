"""members.toml: who belongs to a network, with what plan, from which model, at which times.
All members hold the same.

Invariants: two files mean the same exactly if :attr:`Membership.hash` is the same; it covers the parsed
content, so key order, white space and comments do not matter and everything else does. A member's number is
its place in the file; its identity is the fingerprint, never the id. A plan counts entries,
so two of one organisation count twice.
"""

import hashlib
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import tomli_w
from pydantic import Field

from rpel import planning, rules
from rpel.certificates import check_id, read_certificate
from rpel.config.record import StrictRecord, check_keys, read_toml
from rpel.errors import nearest
from rpel.files import atomic
from rpel.peer.config.timetable import Count, Pace, Seconds, Since1970, Timetable
from rpel.planning.law import probability
from rpel.rules.registry import built_in
from rpel.text import count
from rpel.types import CONFIDENCE, ROBUST_RULE, WireName

INIT_FILE = "init.safetensors"
"""The common initial model lies beside members.toml under this name."""

PROTOCOL = 4
"""The protocol that peers speak."""

OUTER = ("outer", "outer_lr", "outer_momentum")
"""Keys of the step after line 9; they stand in the file only where there is one."""

ADDED = ("wire", "epoch_round", "hours", "earlier")
"""Keys that stand in the file, and enter its hash, only where they differ from their defaults."""

LINGER = 2.0
"""Periods after the last round in which peers serve it to members that are late."""

_log = logging.getLogger("rpel")
_said: set[tuple[str, str]] = set()  # cautions, by membership: a command reads its files several times


Probability = Annotated[float, Field(ge=1e-9, le=1 - 1e-15)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Member(StrictRecord):
    """One entry: what the others need to know to reach a peer and to know it by."""

    id: str
    organisation: str = ""
    url: str
    weight: int = Field(default=1, ge=1, le=1)
    certificate: str
    fingerprint: str

    @classmethod
    def of(cls, id: str, url: str, certificate: str, organisation: str = "") -> Self:
        """From its certificate's PEM text, everything checked but the dates."""
        parsed = read_certificate(certificate)
        return cls(
            id=check_id(id),
            organisation=organisation,
            url=peer_url(url),
            certificate=parsed.pem,
            fingerprint=parsed.fingerprint,
        )

    @classmethod
    def parse(cls, where: str, entry: Any) -> Self:
        """From a table [[member]] of a file, checked; the fingerprint may have colons,
        spaces and capitals."""
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is not valid: it takes a table [[member]]")
        if entry.get("weight", 1) != 1:
            raise ValueError(
                f"{where}: weight {entry['weight']!r} is not supported, because every member counts once: "
                "write weight = 1, or leave the key out"
            )
        written = cls.read(where, entry)
        pin = written.fingerprint.replace(":", "").replace(" ", "").lower()
        try:
            member = cls.of(written.id, written.url, written.certificate, written.organisation)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if pin != member.fingerprint:
            raise ValueError(
                f"{where}: fingerprint {pin} is not that of its certificate, {member.fingerprint}"
            )
        return member

    @cached_property
    def expires(self) -> float:
        """When the certificate ends, unix seconds."""
        return read_certificate(self.certificate).not_after.timestamp()

    def to_dict(self) -> dict[str, Any]:
        """The keys of its table [[member]]; the weight only where it is not 1."""
        return {key: value for key, value in self.given().items() if (key, value) != ("weight", 1)}

    def toml(self) -> str:
        """The lines of members.toml that make somebody a member."""
        return tomli_w.dumps({"member": [self.to_dict()]}, multiline_strings=True)


class Membership(StrictRecord):
    """What all members of a network agree on. Times are seconds: ``epoch`` since 1970,
    ``deadline`` into a round.

    ``period`` and ``hours`` are those of the rounds from ``epoch_round`` on, which begins at ``epoch``;
    ``earlier`` has the paces of the rounds before, if there were others.

    >>> m = Founding(run="ward-7", nodes=12, byzantine=2, rounds=200, epoch=1.8e9).membership("0" * 64,
    ...     "0" * 64)
    >>> m.pull, m.b_hat, m.deadline, m.by_fingerprint("0" * 64)
    (9, 2, 36.0, None)
    """

    run: str
    epoch: Since1970
    period: Seconds
    deadline: float
    nodes: int = Field(ge=2, le=10**7)
    byzantine: int = Field(ge=0)
    pull: Count
    b_hat: int = Field(ge=0)
    confidence: Probability
    rounds: Count
    rule: str
    local_steps: Count
    hyperparameters_sha256: Sha256
    model_header_sha256: Sha256
    init_sha256: Sha256
    from_round: Count = 1
    protocol: int = Field(default=PROTOCOL, ge=PROTOCOL, le=PROTOCOL)
    allow_private: bool = False
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: float = Field(default=0.7, ge=1e-6, le=10)
    outer_momentum: float = Field(default=0.9, ge=0, le=0.999)
    linger: float = Field(default=LINGER, ge=0, le=1000)
    wire: WireName = "float32"
    epoch_round: Count = 1
    hours: str = ""
    hyperparameters: Mapping[str, Any] = {}
    earlier: tuple[Pace, ...] = ()
    members: tuple[Member, ...] = ()

    @classmethod
    def load(cls, path: str | Path, draft: bool = False) -> "Membership":
        """A members.toml, checked; with ``draft`` one whose members are not complete yet."""
        where, content = str(path), read_toml(Path(path))
        if (protocol := content.get("protocol", PROTOCOL)) != PROTOCOL:
            raise ValueError(
                f"{where}: protocol {protocol!r} is not supported, only {PROTOCOL}: use the version of rpel "
                "that wrote the file, or make the network again with this one (rpel network new)"
            )
        check_keys(where, content, [*(key for key in cls.model_fields if key != "members"), "member"])
        if isinstance(content.get("epoch"), datetime):
            content["epoch"] = _seconds(where, content["epoch"])
        entries = content.pop("member", [])
        if not isinstance(entries, list):
            raise ValueError(f"{where}: member {entries!r} is not valid: it takes tables [[member]]")
        members = [
            Member.parse(f"{where}, member {number}", entry) for number, entry in enumerate(entries, 1)
        ]
        earlier = _paces(where, content.pop("earlier", []))
        membership = cls.read(where, content | {"members": tuple(members), "earlier": earlier})
        _check(f"{where}: ", membership, draft)
        for caution in cautions(membership):
            if (membership.hash, caution) not in _said:
                _said.add((membership.hash, caution))
                _log.warning("%s: %s", where, caution)
        return membership

    def save(self, path: str | Path) -> None:
        """Write a members.toml that :meth:`load` reads back; members can be added at its end."""
        content = self.to_dict()
        del content["member"]
        start = datetime.fromtimestamp(self.timetable.begins, UTC)
        text = (
            "# An rpel network; all members hold the same file. Round 1 begins "
            f"{start:%Y-%m-%d %H:%M:%S} UTC.\n"
        )
        text += tomli_w.dumps(content)
        text += "".join("\n" + member.toml() for member in self.members)
        with atomic(Path(path)) as file:
            file.write(text.encode())

    def to_dict(self) -> dict[str, Any]:
        """The content of members.toml, in the file's order."""
        content = self.given() | {"hyperparameters": dict(self.hyperparameters)}
        content |= {"member": [member.to_dict() for member in content.pop("members")]}
        content["earlier"] = [pace.given() for pace in self.earlier]
        left_out = {key for key in ADDED if getattr(self, key) == Membership.model_fields[key].default}
        left_out |= set(OUTER) if self.outer == "none" else set()
        return {key: value for key, value in content.items() if key not in left_out}

    @cached_property
    def timetable(self) -> Timetable:
        """When which round begins."""
        present = Pace(epoch=self.epoch, epoch_round=self.epoch_round, period=self.period, hours=self.hours)
        return Timetable([*self.earlier, present])

    def paced(self, timetable: Timetable) -> "Membership":
        """With another timetable; pulls end at the same share of a round."""
        *earlier, last = timetable.paces
        deadline = round(self.deadline / self.period * last.period, 6)
        return self.replace(**last.given(), earlier=tuple(earlier), deadline=deadline)

    @cached_property
    def hash(self) -> str:
        """The name of this content, sent with every request:
        peers that hold different files refuse each other."""
        return content_hash(self.to_dict())

    @cached_property
    def enough(self) -> int:
        """How many answers a round needs to aggregate: 2 b̂, or more where the rule does."""
        return max(2 * self.b_hat, rules.rule(self.rule, f=self.b_hat).least(self.b_hat) - 1)

    def index(self, id: str) -> int:
        """The number of the member with this id."""
        for number, member in enumerate(self.members):
            if member.id == id:
                return number
        raise ValueError(
            f"{id!r} is not a member: the members are {', '.join(m.id for m in self.members) or 'none yet'}"
        )

    def by_fingerprint(self, fingerprint: str) -> int | None:
        """The number of the member with this fingerprint; None for a stranger."""
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


def peer_url(text: str) -> str:
    """An address at which a member is asked: https, host and port, nothing else; without a slash at its end.

    >>> peer_url("https://Clinic.example:7443/"), peer_url("https://clinic.example")
    ('https://clinic.example:7443', 'https://clinic.example:443')
    >>> peer_url("http://clinic.example:7443")
    Traceback (most recent call last):
    ValueError: url 'http://clinic.example:7443' is not valid: write it as https://clinic.example:7443
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if not host or port == 0 or any(letter.isspace() for letter in text):
        raise ValueError(f"url {text!r} is not valid: write it as https://host:7443")
    where = f"[{host}]" if ":" in host else host
    rest = (parts.username, parts.path.rstrip("/"), parts.query, parts.fragment)
    if parts.scheme != "https" or "://" not in text or any(rest):
        raise ValueError(f"url {text!r} is not valid: write it as https://{where}:{port or 7443}")
    return f"https://{where}:{port or 443}"


# --- founding -----------------------------------------------------------------------------------------------


class Founding(StrictRecord):
    """What the founder of a network decides; the plan and the membership follow from it.

    A round asks s peers; all b̂ hostile ones among them may stay silent, and F honest ones (``no_shows``) may
    be late. It aggregates with 2 b̂ answers, so s ≥ 3 b̂ + F keeps every round going; s ≥ 3 b̂ + 1 + F also lets
    a peer that missed rounds catch up without its own old model, and is preferred where it fits.

    >>> terms = Founding(run="ward-7", nodes=12, byzantine=2, rounds=200, epoch=1.8e9)
    >>> (terms.plan.pull, terms.plan.b_hat, terms.late, terms.strong_catch_up)
    (9, 2, 2, True)
    """

    run: str
    nodes: int
    byzantine: int
    rounds: int
    epoch: float
    period: float = 60.0
    deadline: float | None = None
    confidence: float = CONFIDENCE
    no_shows: int | None = Field(
        default=None,
        description="honest peers that may be late in a round; None: 2, or as many as fit among few peers",
        ge=0,
    )
    rule: str = ROBUST_RULE
    local_steps: int = 1
    hyperparameters: Mapping[str, Any] = {}
    allow_private: bool = False
    outer: str = "none"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    linger: float = LINGER
    wire: WireName = "float32"
    hours: str = ""

    @cached_property
    def late(self) -> int:
        """How many honest peers may be late in a round."""
        least = self._planned(0)  # says what is wrong, if not even this fits
        if self.no_shows is None:
            return next((late for late in (2, 1) if self._fits(late)), least.no_shows)
        if not self._fits(self.no_shows):
            most = bisect_left(range(self.nodes), True, key=lambda late: not self._fits(late)) - 1
            raise ValueError(
                f"no_shows {self.no_shows} does not fit {self.nodes} peers, {self.byzantine} of them "
                f"hostile: the most is {most}"
            )
        return self.no_shows

    @cached_property
    def strong_catch_up(self) -> bool:
        """Whether a peer that missed rounds can count on the 2 b̂ + 1 answers that replace its own model."""
        return self._fits(self.late + 1)

    @cached_property
    def plan(self) -> planning.Plan:
        """How many peers each one pulls from; ValueError where there is no such plan."""
        return self._planned(self.late + self.strong_catch_up)

    def membership(self, model_header_sha256: str, init_sha256: str) -> Membership:
        """The network without members yet; pulls end after 0.6 of a round unless said otherwise."""
        content = {
            "deadline": 0.6 * self.period if self.deadline is None else self.deadline,
            "pull": self.plan.pull,
            "b_hat": self.plan.b_hat,
            "hyperparameters_sha256": content_hash(self.hyperparameters),
            "model_header_sha256": model_header_sha256,
            "init_sha256": init_sha256,
        }
        terms = self.given()
        del terms["no_shows"]
        membership = Membership(**terms | content)
        _check("", membership, draft=True)
        sure = membership.pull - membership.b_hat - self.late
        if membership.enough > sure:
            raise ValueError(
                f"rule {self.rule!r} needs {membership.enough} answers a round, but with hostile peers "
                f"silent and {self.late} honest ones late only {sure} come: the nearest is {ROBUST_RULE!r}"
            )
        return membership

    def _planned(self, late: int) -> planning.Plan:
        return planning.comfortable(
            nodes=self.nodes,
            byzantine=self.byzantine,
            rounds=self.rounds,
            confidence=self.confidence,
            silent=True,
            no_shows=late,
        )

    def _fits(self, late: int) -> bool:
        try:
            return bool(self._planned(late))
        except ValueError:
            return False


# --- what must hold, and what members should know -----------------------------------------------------------


def _check(where: str, m: Membership, draft: bool) -> None:
    """What pydantic cannot see: bounds that depend on other values, hashes of content,
    entries that are the same."""
    for key, low, high in _ranges(m):
        value = getattr(m, key)
        if not low <= value <= high:
            near = low if value < low else high
            raise ValueError(f"{where}{key} {value:g} is impossible: the nearest is {near:.15g}")
    _check_table(where, m)
    _check_rule(where, m)
    _check_outer(where, m)
    for sentence in _hours_wrong(m):
        raise ValueError(f"{where}{sentence}")
    if len(m.members) > m.nodes or (len(m.members) < m.nodes and not draft):
        raise ValueError(f"{where}nodes is {m.nodes}, but it has {count(len(m.members), 'member')}")
    check_different(where, m.members)
    for member in m.members if not m.allow_private else ():
        check_public(where, member)


def checked(m: Membership) -> Membership:
    """The membership itself, if it is complete and everything in it can be."""
    _check("", m, draft=False)
    return m


def check_public(where: str, member: Member) -> None:
    """Refuse the address of this machine or of a private network: every member would connect there.

    >>> check_public("", Member(id="a", url="https://192.168.7.1:7443", certificate="", fingerprint=""))
    Traceback (most recent call last):
    ValueError: member 'a' is at the private address 192.168.7.1: found the network with --allow-private
    if ...
    """
    host = (urlsplit(member.url).hostname or "").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:  # a name, whose addresses are looked at when they are used
        private = host == "localhost"
    else:
        private = not is_public(address)
    if private:
        raise ValueError(
            f"{where}member {member.id!r} is at the private address {host}: found the network with "
            "--allow-private if the members are meant to connect there (allow_private = true in members.toml)"
        )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one of the internet's, and not of this machine, of a private network or of none.

    >>> [is_public(ip_address(text)) for text in ("93.184.216.34", "10.1.2.3", "::1", "::ffff:192.168.0.1",
    ...     "fe80::1")]
    [True, False, False, False, False]
    """
    meant = getattr(address, "ipv4_mapped", None) or address
    return bool(meant.is_global and not meant.is_multicast)


def check_different(where: str, members: tuple[Member, ...]) -> None:
    """Refuse two entries with the same id, address or fingerprint."""
    for key in ("id", "url", "fingerprint"):
        seen: dict[str, str] = {}
        for member in members:
            value = getattr(member, key)
            if value in seen:
                raise ValueError(
                    f"{where}members {seen[value]!r} and {member.id!r} have the same {key} {value!r}"
                )
            seen[value] = member.id


def _ranges(m: Membership) -> Iterator[tuple[str, float, float]]:
    """(key, least, most) of the numbers that others bound."""
    yield "deadline", 0.001 * m.period, 0.999 * m.period
    yield "byzantine", 0, (m.nodes - 1) // 2
    yield "pull", 1, m.nodes - 1
    yield "b_hat", 0, m.pull // 2


def _check_rule(where: str, m: Membership) -> None:
    if not built_in(m.rule):  # a file from others never makes a peer import code
        raise ValueError(f"{where}there is no rule {m.rule!r} in the library; {nearest(m.rule, rules.RULES)}")
    rule = rules.rule(m.rule, f=m.b_hat)
    if rule.unsuited:
        raise ValueError(
            f"{where}rule {m.rule!r} is not one for answers pulled: the nearest is {ROBUST_RULE!r}"
        )
    if m.enough > m.pull:
        raise ValueError(
            f"{where}rule {m.rule!r} needs {m.enough} answers for b_hat {m.b_hat}, but pull is {m.pull}"
        )


def _hours_wrong(m: Membership) -> Iterator[str]:
    try:
        yield from m.timetable.wrong()
    except ValueError as error:  # of hours that cannot be read
        yield str(error)


def _paces(where: str, tables: Any) -> tuple[Pace, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{where}: earlier {tables!r} is not valid: it takes tables [[earlier]]")
    return tuple(Pace.read(f"{where}, earlier {number}", table) for number, table in enumerate(tables, 1))


def _check_outer(where: str, m: Membership) -> None:
    """A rate of a step that is not taken would be left out without a word."""
    for key in OUTER[1:]:
        if m.outer == "none" and getattr(m, key) != Membership.model_fields[key].default:
            raise ValueError(
                f"{where}{key} {getattr(m, key):g} goes with outer nesterov, not with outer none"
            )


def _check_table(where: str, m: Membership) -> None:
    try:
        right = content_hash(m.hyperparameters)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}hyperparameters may hold numbers, text, truth values, lists and tables only"
        ) from None
    if right != m.hyperparameters_sha256:
        raise ValueError(
            f"{where}hyperparameters_sha256 {m.hyperparameters_sha256} is not that of the table, {right}"
        )


def _seconds(where: str, moment: datetime) -> float:
    if moment.tzinfo is None:
        raise ValueError(
            f"{where}: epoch {moment} has no time zone: write {moment.isoformat()}Z if it is UTC"
        )
    return moment.timestamp()


def cautions(m: Membership) -> Iterator[str]:
    """Sentences on what is allowed and should be known: members of one organisation, weak plans,
    certificates' ends."""
    organisations = Counter(member.organisation for member in m.members if member.organisation)
    for organisation, several in organisations.items():
        if several > 1:
            yield (
                f"{several} members are of {organisation!r}: byzantine {m.byzantine} counts members, so if "
                f"that organisation turns hostile it takes up {several} of them"
            )
    holds = probability(m.nodes, m.byzantine, m.pull, m.rounds, m.b_hat)
    if holds < m.confidence:
        yield f"b_hat {m.b_hat} holds with probability {holds:.6g}, below the confidence {m.confidence:g}"
    last = m.timetable.begins + m.timetable.end(m.rounds)
    ends = sorted((read_certificate(member.certificate).not_after, member.id) for member in m.members)
    early = [(until, id) for until, id in ends if until.timestamp() < last]
    if early:
        until, first = early[0]
        alone = len(early) == 1
        which = f"the certificate of {first!r} ends" if alone else f"{len(early)} certificates end"
        when = (
            f"{until:%Y-%m-%d %H:%M} UTC"
            if alone
            else f"that of {first!r} first, at {until:%Y-%m-%d %H:%M} UTC"
        )
        yield f"{which} before the last round, {when}: `rpel network rotate` brings in one that lasts longer"
