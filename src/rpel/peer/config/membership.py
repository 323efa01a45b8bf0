"""members.toml: who belongs to a network, with which plan, initial model and times.

All members hold the same content.

Invariants: two files have the same :attr:`Membership.hash` exactly if they mean the same. The hash covers the
parsed content, so key order, white space and comments do not change it, and everything else does. A member's
number is its place in the file; its identity is the fingerprint, never the id. A plan counts entries, so two
members of one organisation count twice.
"""

import hashlib
import json
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

from rpel import rules
from rpel.certificates import check_id, read_certificate
from rpel.errors import nearest
from rpel.files import atomic
from rpel.peer.config.timetable import Count, Pace, Seconds, Since1970, Timetable
from rpel.planning.law import probability
from rpel.record import StrictRecord, check_keys, read_toml
from rpel.rules.registry import built_in
from rpel.text import count
from rpel.types import ROBUST_RULE, WireName

INIT_FILE = "init.safetensors"
"""The common initial model lies beside members.toml under this name."""

PROTOCOL = 4
"""The protocol that peers speak."""

OUTER = ("outer", "outer_lr", "outer_momentum")
"""Keys of the step after line 9; they are in the file only if there is such a step."""

ADDED = ("wire", "epoch_round", "hours", "earlier")
"""Keys that are in the file, and enter its hash, only where they differ from their defaults."""

Probability = Annotated[float, Field(ge=1e-9, le=1 - 1e-15)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Member(StrictRecord):
    """One entry: how the other members reach a peer and recognise it."""

    id: str
    organisation: str = ""
    url: str
    weight: int = Field(default=1, ge=1, le=1)
    certificate: str
    fingerprint: str

    @classmethod
    def of(cls, id: str, url: str, certificate: str, organisation: str = "") -> Self:
        """Make an entry from a certificate's PEM text; everything but the dates is checked."""
        parsed = read_certificate(certificate)
        return cls(
            id=check_id(id),
            organisation=organisation,
            url=peer_url(url),
            certificate=parsed.pem,
            fingerprint=parsed.fingerprint,
        )

    @classmethod
    def parse(cls, where: str, entry: Mapping[str, Any]) -> Self:
        """Read and check a table [[member]]; its fingerprint may have colons, spaces and capitals."""
        if entry.get("weight", 1) != 1:
            raise ValueError(
                f"{where}: weight {entry['weight']!r} is not supported, because every member counts once: "
                "write weight = 1, or leave the key out"
            )
        written = cls.read(where, entry)
        try:
            member = cls.of(written.id, written.url, written.certificate, written.organisation)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        pin = written.fingerprint.replace(":", "").replace(" ", "").lower()
        if pin != member.fingerprint:
            raise ValueError(
                f"{where}: fingerprint {pin} is not that of its certificate, {member.fingerprint}"
            )
        return member

    @cached_property
    def expires(self) -> float:
        """When the certificate ends, in seconds since 1970."""
        return read_certificate(self.certificate).not_after.timestamp()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of its table [[member]], the weight only if it is not 1."""
        return {key: value for key, value in self.given().items() if (key, value) != ("weight", 1)}

    def toml(self) -> str:
        """Return the lines that are appended to members.toml."""
        return tomli_w.dumps({"member": [self.to_dict()]}, multiline_strings=True)


class Membership(StrictRecord):
    """What all members of a network agree on, at first without members.

    ``epoch`` is in seconds since 1970, ``deadline`` in seconds into a round. ``period`` and ``hours`` apply
    from ``epoch_round`` on, which begins at ``epoch``; ``earlier`` has the paces of the rounds before.
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
    linger: float = Field(default=2.0, ge=0, le=1000)
    wire: WireName = "float32"
    epoch_round: Count = 1
    hours: str = ""
    hyperparameters: Mapping[str, Any] = {}
    earlier: tuple[Pace, ...] = ()
    members: tuple[Member, ...] = ()

    @classmethod
    def load(cls, path: str | Path, draft: bool = False) -> Self:
        """Read and check a members.toml, with ``draft`` one that may still lack members."""
        where, content = str(path), read_toml(Path(path))
        if (protocol := content.get("protocol", PROTOCOL)) != PROTOCOL:
            raise ValueError(
                f"{where}: protocol {protocol!r} is not supported, only {PROTOCOL}: use the version of rpel "
                "that wrote the file, or make the network again with this one (rpel network new)"
            )
        check_keys(where, content, [*(key for key in cls.model_fields if key != "members"), "member"])
        for key in ("member", "earlier"):
            tables = content.setdefault(key, [])
            if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
                raise ValueError(f"{where}: {key} {tables!r} is not valid: it takes tables [[{key}]]")
        if isinstance(epoch := content.get("epoch"), datetime):
            if epoch.tzinfo is None:
                raise ValueError(
                    f"{where}: epoch {epoch} has no time zone: write {epoch.isoformat()}Z if it is UTC"
                )
            content["epoch"] = epoch.timestamp()
        content["members"] = tuple(
            Member.parse(f"{where}, member {number}", entry)
            for number, entry in enumerate(content.pop("member"), 1)
        )
        content["earlier"] = tuple(
            Pace.read(f"{where}, earlier {number}", table)
            for number, table in enumerate(content["earlier"], 1)
        )
        return cls.read(where, content).check(f"{where}: ", draft)

    def save(self, path: str | Path) -> None:
        """Write a members.toml that :meth:`load` reads back; members can be appended to it."""
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
        """Return the content of members.toml, in the file's order."""
        content = self.given() | {"hyperparameters": dict(self.hyperparameters)}
        content |= {"member": [member.to_dict() for member in content.pop("members")]}
        content["earlier"] = [pace.given() for pace in self.earlier]
        left_out = {key for key in ADDED if getattr(self, key) == Membership.model_fields[key].default}
        left_out |= set(OUTER) if self.outer == "none" else set()
        return {key: value for key, value in content.items() if key not in left_out}

    @cached_property
    def timetable(self) -> Timetable:
        """When each round begins."""
        present = Pace(epoch=self.epoch, epoch_round=self.epoch_round, period=self.period, hours=self.hours)
        return Timetable([*self.earlier, present])

    def paced(self, timetable: Timetable) -> Self:
        """Return it with another timetable; pulls end at the same share of a round."""
        *earlier, last = timetable.paces
        deadline = round(self.deadline / self.period * last.period, 6)
        return self.replace(**last.given(), earlier=tuple(earlier), deadline=deadline)

    @cached_property
    def hash(self) -> str:
        """The name of this content, sent with every request; peers with different files refuse each other."""
        return content_hash(self.to_dict())

    @cached_property
    def enough(self) -> int:
        """How many answers a round needs to aggregate: 2 b̂, or more if the rule needs more."""
        return max(2 * self.b_hat, rules.rule(self.rule, f=self.b_hat).min_vectors(self.b_hat) - 1)

    def index(self, id: str) -> int:
        """Return the number of the member with this id."""
        ids = [member.id for member in self.members]
        if id not in ids:
            raise ValueError(f"{id!r} is not a member: the members are {', '.join(ids) or 'none yet'}")
        return ids.index(id)

    def by_fingerprint(self, fingerprint: str) -> int | None:
        """Return the number of the member with this fingerprint, None if there is none."""
        return self._pins.get(fingerprint)

    @cached_property
    def _pins(self) -> dict[str, int]:
        return {member.fingerprint: number for number, member in enumerate(self.members)}

    def cautions(self) -> Iterator[str]:
        """Yield what should be known: shared organisations, a weak plan, certificates that end."""
        for organisation, several in Counter(member.organisation for member in self.members).items():
            if organisation and several > 1:
                yield (
                    f"{several} members belong to {organisation!r}: byzantine {self.byzantine} counts "
                    f"members, so a hostile organisation would use up {several} of them"
                )
        p = probability(self.nodes, self.byzantine, self.pull, self.rounds, self.b_hat)
        if p < self.confidence:
            yield f"b_hat {self.b_hat} has probability {p:.6g}, below the confidence {self.confidence:g}"
        last = self.timetable.begins + self.timetable.end(self.rounds)
        ends = sorted((member.expires, member.id) for member in self.members if member.expires < last)
        if ends:
            end, first = ends[0]
            when = f"that of {first!r} at {datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC"
            yield (
                f"{count(len(ends), 'certificate')} will expire before the last round, {when}: "
                "`rpel network change --replace` brings in one that lasts longer"
            )

    def check(self, where: str = "", draft: bool = False) -> Self:
        """Refuse values that do not fit together; a draft may lack members."""
        for fault in self._faults(draft):
            raise ValueError(where + fault)
        return self

    def _faults(self, draft: bool) -> Iterator[str]:
        """Yield what is wrong beside the bounds of single fields.

        Later checks rely on earlier ones: after the first fault they may raise.
        """
        bounds = {
            "deadline": (0.001 * self.period, 0.999 * self.period),
            "byzantine": (0, (self.nodes - 1) // 2),
            "pull": (1, self.nodes - 1),
            "b_hat": (0, self.pull // 2),
        }
        for key, (low, high) in bounds.items():
            value = getattr(self, key)
            if not low <= value <= high:
                yield f"{key} {value:.15g} is impossible: it must be between {low:.15g} and {high:.15g}"
        try:
            right = content_hash(self.hyperparameters)
        except (TypeError, ValueError):
            yield "hyperparameters may contain only numbers, text, truth values, lists and tables"
        else:
            if right != self.hyperparameters_sha256:
                given = self.hyperparameters_sha256
                yield f"hyperparameters_sha256 {given} is not that of the table, {right}"
        if not built_in(self.rule):  # a file from others never makes a peer import code
            yield f"rule {self.rule!r} is not one of the library's: {nearest(self.rule, rules.RULES)}"
        if rules.rule(self.rule, f=self.b_hat).pull_error:
            yield f"rule {self.rule!r} cannot aggregate pulled models: choose for example {ROBUST_RULE!r}"
        if self.enough > self.pull:
            yield (
                f"rule {self.rule!r} needs {self.enough} answers for b_hat {self.b_hat}, but pull is "
                f"{self.pull}"
            )
        for key in OUTER[1:] if self.outer == "none" else ():
            if getattr(self, key) != Membership.model_fields[key].default:
                yield f"{key} {getattr(self, key):g} needs outer nesterov, but outer is none"
        try:
            yield from self.timetable.faults()
        except ValueError as error:  # unreadable hours
            yield str(error)
        members = len(self.members)
        if members > self.nodes or (members < self.nodes and not draft):
            yield f"nodes is {self.nodes}, but it has {count(members, 'member')}"
        yield from duplicates(self.members)
        if not self.allow_private:
            yield from filter(None, map(private_address, self.members))


def content_hash(content: Any) -> str:
    """Return the SHA-256 of canonical JSON: keys sorted, no white space.

    >>> content_hash({"b": 1, "a": 2.0}) == content_hash({"a": 2.0, "b": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def duplicates(members: tuple[Member, ...]) -> Iterator[str]:
    """Yield a sentence for each two entries with the same id, address or fingerprint."""
    for key in ("id", "url", "fingerprint"):
        seen: dict[str, str] = {}
        for member in members:
            value = getattr(member, key)
            if value in seen:
                yield f"members {seen[value]!r} and {member.id!r} have the same {key} {value!r}"
            seen[value] = member.id


# --- addresses ----------------------------------------------------------------------------------------------


def peer_url(text: str) -> str:
    """Return an address in its one spelling: https, host and port, nothing else.

    >>> peer_url("https://Clinic.example:7443/"), peer_url("https://clinic.example")
    ('https://clinic.example:7443', 'https://clinic.example:443')
    >>> peer_url("http://clinic.example:7443")
    Traceback (most recent call last):
    ValueError: url 'http://clinic.example:7443' is not valid: write it as https://clinic.example:7443
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
        if not host.isascii():  # names travel in ASCII, and standards for translating differ
            host = host.encode("idna").decode()
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if not host or port == 0 or any(letter.isspace() for letter in text):
        raise ValueError(f"url {text!r} is not valid: write it as https://host:7443")
    where = f"[{host}]" if ":" in host else host
    rest = (parts.username, parts.path.rstrip("/"), parts.query, parts.fragment, not text.isascii())
    if parts.scheme != "https" or "://" not in text or any(rest):
        raise ValueError(f"url {text!r} is not valid: write it as https://{where}:{port or 7443}")
    return f"https://{where}:{port or 443}"


def private_address(member: Member) -> str | None:
    """Return why every member would connect to this machine or to a private network.

    >>> private_address(Member(id="a", url="https://192.168.7.1:7443", certificate="", fingerprint=""))
    "member 'a' is at the private address 192.168.7.1: ..."
    """
    host = (urlsplit(member.url).hostname or "").partition("%")[0]
    try:
        private = not is_public(ip_address(host))
    except ValueError:  # a name, whose addresses are checked when they are used
        private = host == "localhost"
    if not private:
        return None
    return (
        f"member {member.id!r} is at the private address {host}: make the network with --allow-private if "
        "the members are meant to connect there (allow_private = true in members.toml)"
    )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is one of the internet's, not of this machine or of a private network.

    >>> [is_public(ip_address(text)) for text in ("93.184.216.34", "10.1.2.3", "::1", "::ffff:192.168.0.1",
    ...     "fe80::1")]
    [True, False, False, False, False]
    """
    meant = getattr(address, "ipv4_mapped", None) or address
    return bool(meant.is_global and not meant.is_multicast)
