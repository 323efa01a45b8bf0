"""Becoming a member: a key, a certificate, a peer.toml, the entry for members.toml;
and adding entries to that file."""

import math
import socket
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rpel import certificates
from rpel.files import write_text
from rpel.peer.config.membership import INIT_FILE, Member, Membership, duplicates, peer_url
from rpel.peer.config.settings import Config
from rpel.peer.core.wire import Layout
from rpel.peer.io import identity
from rpel.peer.io.model_files import read_layout

METRICS_PORT = 9464
MEMORY_FILE = "rpel-peer-memory.conf"
_ITSELF = 600_000_000  # bytes of a peer without models: the interpreter, torch, compiled kernels


@dataclass(frozen=True)
class Joined:
    """A new identity, where its files lie, and what its operator should know."""

    member: Member
    config: Path
    key: Path
    certificate: Path
    expires: datetime
    notes: tuple[str, ...]
    memory: Path | None = None
    """What a service needs for the plan, as systemd takes it, where that is known already."""

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain JSON values; the key itself is never printed."""
        return {
            **{key: getattr(self.member, key) for key in ("id", "organisation", "url", "fingerprint")},
            **{key: str(getattr(self, key)) for key in ("config", "key", "certificate")},
            "expires": self.expires.isoformat(),
            "entry": self.member.toml(),
        }


def join(
    *,
    url: str,
    id: str | None = None,
    organisation: str = "",
    members: Path | None = None,
    task: str | None = None,
    data: Path | None = None,
    listen: str | None = None,
    metrics_listen: str | None = None,
    folder: Path = Path(),
    days: int = certificates.VALID_DAYS,
    passphrase_file: Path | None = None,
) -> Joined:
    """Make peer.key (only its owner can read it), peer.crt and peer.toml in ``folder``;
    nothing is overwritten.

    A peer.toml that is there without a key, as `rpel new` writes it, counts, and what is given must agree
    with it. The key is encrypted by the first line of ``passphrase_file``, if one is given.
    """
    url, settings, there = peer_url(url), folder / "peer.toml", (folder / "peer.toml").exists()
    own = _agreed(settings, id, url, members, task, data, listen, metrics_listen, passphrase_file)
    for path in (own.key, own.certificate):
        if path.exists():
            raise ValueError(
                f"{_near(path)} exists already and is not overwritten: choose another folder with --dir"
            )
    passphrase = identity.read_passphrase(own.passphrase_file) if own.passphrase_file else b""
    secret, pem = certificates.create(own.id, days, passphrase=passphrase)
    member = Member.of(own.id, url, pem, organisation)
    notes = _notes(_near(own.members), member)
    identity.write_key(own.key, secret)
    write_text(own.certificate, pem)
    if not there:
        own.save(settings)
    expires = certificates.read_certificate(pem).not_after
    return Joined(
        member, settings, _near(own.key), _near(own.certificate), expires, notes, _memory(folder, own)
    )


def _near(path: Path) -> Path:
    """As it is written from here, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _agreed(
    settings: Path,
    id: str | None,
    url: str,
    members: Path | None,
    task: str | None,
    data: Path | None,
    listen: str | None,
    metrics_listen: str | None,
    passphrase_file: Path | None,
) -> Config:
    """The settings of a new peer: as given, or as peer.toml says where that is there already."""
    given: dict[str, Any] = {"id": id, "task": task, "listen": listen, "metrics_listen": metrics_listen}
    paths = {"members": members, "data": data, "passphrase_file": passphrase_file}
    given |= {key: None if path is None else path.resolve() for key, path in paths.items()}
    given = {key: value for key, value in given.items() if value is not None}
    if not settings.exists():
        if id is None:
            raise ValueError(
                f"--id is missing, and there is no {settings} that says it: name this peer, as clinic-3"
            )
        usual = {"listen": usual_listen(url), "metrics_listen": free_metrics(settings.parent)}
        members = (members or Path("members.toml")).resolve()
        return Config.of(
            {**usual, **given, "members": members}, settings.resolve().parent, "the new peer.toml"
        )
    own = Config.load(settings)
    for key, value in given.items():
        if getattr(own, key) != value:
            raise ValueError(
                f"{settings} is there and says {key} = {str(getattr(own, key))!r}, not {str(value)!r}: "
                "change it there, or choose another folder with --dir"
            )
    return own


def memory_needed(membership: Membership, layout: Layout) -> int:
    """Bytes that a peer may need: itself, s + 6 models and what it remembers, and half as much again."""
    return int(1.5 * (_ITSELF + (membership.pull + 6) * layout.size))


def _memory(folder: Path, own: Config) -> Path | None:
    """Write how much memory a service needs for the plan, if that is there already."""
    init = own.members.with_name(INIT_FILE)
    if not own.members.exists() or not init.exists():
        return None
    needed = memory_needed(Membership.load(own.members, draft=True), read_layout(init))
    path = folder / MEMORY_FILE
    about = "# For /etc/systemd/system/rpel-peer.service.d/"
    write_text(path, f"{about}\n[Service]\nMemoryMax={math.ceil(needed / 1e6)}M\n")
    return path


def free_metrics(folder: Path) -> str:
    """The first address from port 9464 on that nobody listens at and no peer.toml in the folders beside
    names."""
    named = set()
    for path in folder.resolve().parent.glob("*/peer.toml"):
        with suppress(ValueError, OSError):
            named.add(Config.load(path).metrics_listen)
    for port in range(METRICS_PORT, METRICS_PORT + 1000):
        address = f"127.0.0.1:{port}"
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if address not in named:
                return address
    return "127.0.0.1:0"


def usual_listen(url: str) -> str:
    """Where a peer with this address listens: on this machine only if the address is,
    else on all its networks.

    >>> usual_listen("https://127.0.0.1:7001"), usual_listen("https://clinic.example:7443")
    ('127.0.0.1:7001', '0.0.0.0:7443')
    """
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return f"0.0.0.0:{parts.port}"
    here = host if address.is_loopback else "::" if address.version == 6 else "0.0.0.0"
    return f"[{here}]:{parts.port}" if ":" in here else f"{here}:{parts.port}"


def _notes(path: Path, member: Member) -> tuple[str, ...]:
    """What the membership, if it is there already, says about this member."""
    if not path.exists():
        return (
            f"{path} is not there yet: put the file of the network's founder and its init.safetensors there",
        )
    terms = Membership.load(path, draft=True)
    for other in terms.members:
        if other.id == member.id:
            return (
                f"{member.id!r} is in {path} already: its new key comes into force by `rpel network rotate`",
            )
        if other.url == member.url:
            raise ValueError(
                f"url {member.url!r} is that of {other.id!r} in {path}: each member needs its own"
            )
    if len(terms.members) >= terms.nodes:
        return (
            f"{path} has all of its {terms.nodes} members already: one more joins by `rpel network join`",
        )
    return ()


# --- the founder adds them ----------------------------------------------------------------------------------


def add(members: Path, entries: Sequence[Path]) -> tuple[Membership, tuple[Member, ...]]:
    """Add the entries in these files, each as `rpel peer init` prints it, to a members.toml;
    all of them or none.

    Returns the membership with them, and the new members.
    """
    before = Membership.load(members, draft=True)
    new = tuple(member for path in entries for member in read_entries(path))
    for fault in duplicates(before.members + new):
        raise ValueError(fault)
    room = before.nodes - len(before.members)
    if not room:
        first = max(1, before.timetable.round(time.time() - before.timetable.begins)) + 10
        raise ValueError(
            f"{members} has all of its {before.nodes} members: one more joins from a later round on, by "
            f"`rpel network join ENTRY --from-round {first}`, or found the network again with more --peers"
        )
    if len(new) > room:
        raise ValueError(
            f"{members} waits for {room} more of its {before.nodes} members, but {len(new)} entries are "
            f"given: add {room} of them, the others join later (`rpel network join`), or found again with "
            "more --peers"
        )
    after = before.replace(members=before.members + new)
    after.save(members)
    return after, new


def read_entries(path: Path) -> list[Member]:
    """The members in a file of [[member]] tables; certificate,
    address and fingerprint of each are checked."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: it takes an entry that `rpel peer init` printed")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not an entry that `rpel peer init` printed: {error}") from None
    entries = content.get("member")
    if not isinstance(entries, list) or not entries or set(content) != {"member"}:
        raise ValueError(
            f"{path} is not an entry that `rpel peer init` printed: it takes one table [[member]]"
        )
    where = f"{path}, member " if len(entries) > 1 else str(path)
    return [
        Member.parse(f"{where}{number}" if len(entries) > 1 else where, e)
        for number, e in enumerate(entries, 1)
    ]


def grouped(fingerprint: str) -> str:
    """A fingerprint in groups of four, as it is read over the telephone.

    >>> grouped("0e56f6f15911271d")
    '0e56 f6f1 5911 271d'
    """
    return " ".join(fingerprint[i : i + 4] for i in range(0, len(fingerprint), 4))
